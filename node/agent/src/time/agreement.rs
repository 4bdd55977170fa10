//! Which of several answers are right: Marzullo's intersection, and the median of a few clocks.
//!
//! An answer is an interval: the difference between two clocks, give or take half the round trip,
//! the distance of the server to its own source, and [`SLACK`] for a path that is slower in one
//! direction. Those intervals that have a point in common agree. A majority of the answers has to:
//! one of one, two of two or three, three of four. Two servers that contradict each other are
//! therefore as good as none, and a single wrong one is harmless from three on.

use std::time::Duration;

/// What every interval is wider than its round trip says, in nanoseconds.
const SLACK: i64 = 20_000_000;

/// A comparison of this node's clock with another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// Whose clock.
    pub from: String,
    /// The other clock minus this one, in nanoseconds.
    pub offset: i64,
    /// By how much the offset may be wrong.
    pub error: Duration,
}

impl Sample {
    fn interval(&self) -> (i64, i64) {
        let error = i64::try_from(self.error.as_nanos()).unwrap_or(i64::MAX);
        let error = error.saturating_add(SLACK);
        (
            self.offset.saturating_sub(error),
            self.offset.saturating_add(error),
        )
    }
}

/// Answers that agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreement {
    /// The offset of the most exact one.
    pub offset: i64,
    /// Who agrees.
    pub by: Vec<String>,
}

/// The answers that a majority of `answered` agree with; `None` if there is none. `answered` may be
/// more than the samples: those that cannot be right count, too.
pub(super) fn agree(samples: &[Sample], answered: usize) -> Option<Agreement> {
    // A point that most intervals contain is the lower end of one of them.
    let point = samples.iter().map(|sample| sample.interval().0);
    let with = |point: i64| {
        samples.iter().filter(move |sample| {
            let (low, high) = sample.interval();
            low <= point && point <= high
        })
    };
    let point = point.max_by_key(|point| with(*point).count())?;
    let best = with(point).min_by_key(|sample| sample.error)?;
    let by: Vec<String> = with(point).map(|sample| sample.from.clone()).collect();
    (by.len() * 2 > answered).then_some(Agreement {
        offset: best.offset,
        by,
    })
}

/// The clock of another consensus member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemberClock {
    /// The comparison with this node's clock.
    pub sample: Sample,
    /// It is synchronised to a time server.
    pub is_synchronised: bool,
}

/// Why there is no median.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no time servers are known, and the clocks of {found} consensus members, this one included, are \
     too few to tell which is right: expected at least {FEWEST}"
)]
pub(super) struct TooFew {
    /// The number of clocks.
    pub found: usize,
}

/// The fewest clocks of which the median says anything: of two, each could be the right one.
const FEWEST: usize = 3;

/// What a consensus member without time servers follows: the median of the clocks that are
/// synchronised to servers if there are any, otherwise of all clocks, its own included. Of an even
/// number it is the lower of the two in the middle, so that all members follow the same clock.
pub(super) fn median(others: Vec<MemberClock>) -> Result<Sample, TooFew> {
    let is_any = others.iter().any(|other| other.is_synchronised);
    let mut clocks: Vec<Sample> = others
        .into_iter()
        .filter(|other| other.is_synchronised || !is_any)
        .map(|other| other.sample)
        .collect();
    if !is_any {
        clocks.push(Sample {
            from: "this node".to_owned(),
            offset: 0,
            error: Duration::ZERO,
        });
        if clocks.len() < FEWEST {
            let found = clocks.len();
            return Err(TooFew { found });
        }
    }
    clocks.sort_by_key(|clock| clock.offset);
    let middle = (clocks.len() - 1) / 2;
    Ok(clocks.swap_remove(middle))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000_000_000;

    pub(in crate::time) fn sample(from: &str, offset: i64) -> Sample {
        Sample {
            from: from.to_owned(),
            offset,
            error: Duration::from_millis(5),
        }
    }

    fn agreed(offsets: &[i64]) -> Option<(i64, usize)> {
        let samples: Vec<_> = offsets.iter().map(|offset| sample("a", *offset)).collect();
        let agreement = agree(&samples, samples.len())?;
        Some((agreement.offset, agreement.by.len()))
    }

    #[test]
    fn a_majority_has_to_agree() {
        assert_eq!(agreed(&[]), None);
        assert_eq!(agreed(&[7]), Some((7, 1)));
        assert_eq!(agreed(&[0, 30_000_000]), Some((0, 2)));
        assert_eq!(agreed(&[0, SECOND]), None);
        assert_eq!(agreed(&[SECOND, 0, SECOND]), Some((SECOND, 2)));
        assert_eq!(agreed(&[0, SECOND, 2 * SECOND]), None);
        assert_eq!(agreed(&[0, 0, SECOND, SECOND]), None);
        assert_eq!(agreed(&[i64::MIN, i64::MAX, i64::MAX]), Some((i64::MAX, 2)));
        // One of three answers could not be right, and the others contradict each other.
        assert_eq!(agree(&[sample("a", 0)], 2), None);
    }

    #[test]
    fn the_most_exact_answer_counts() {
        let vague = Sample {
            error: Duration::from_secs(2),
            ..sample("vague", SECOND)
        };
        let agreement = agree(&[vague, sample("exact", 0)], 2).unwrap();
        assert_eq!(agreement.offset, 0);
        assert_eq!(agreement.by, ["vague", "exact"]);
    }

    fn member(offset: i64, is_synchronised: bool) -> MemberClock {
        MemberClock {
            sample: sample("a", offset),
            is_synchronised,
        }
    }

    fn followed(others: &[(i64, bool)]) -> Result<i64, TooFew> {
        let others = others.iter().map(|(offset, is)| member(*offset, *is));
        median(others.collect()).map(|sample| sample.offset)
    }

    #[test]
    fn members_follow_the_median() {
        let hour = 3600 * SECOND;
        // The one that is ahead, and one of the others.
        assert_eq!(followed(&[(-hour, false), (-hour, false)]), Ok(-hour));
        assert_eq!(followed(&[(hour, false), (0, false)]), Ok(0));
        assert_eq!(followed(&[(-5, false), (5, false)]), Ok(0));
        // Of four, the lower one in the middle, whoever asks.
        assert_eq!(followed(&[(1, false), (2, false), (3, false)]), Ok(1));
        assert_eq!(followed(&[(-1, false), (1, false), (2, false)]), Ok(0));
        // Those with a server are right, even a single one.
        assert_eq!(followed(&[(hour, true), (0, false), (0, false)]), Ok(hour));
        assert_eq!(followed(&[(hour, true)]), Ok(hour));
        assert_eq!(followed(&[(hour, false)]), Err(TooFew { found: 2 }));
        assert_eq!(followed(&[]), Err(TooFew { found: 1 }));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// However wrong a minority is, the result is within the intervals of the others.
        #[test]
        fn a_minority_decides_nothing(
            truth in -1000 * SECOND..1000 * SECOND,
            honest in proptest::collection::vec(-4_000_000i64..4_000_000, 2..6),
            liars in proptest::collection::vec(any::<i64>(), 0..5),
            turn in 0usize..10,
        ) {
            let liars = &liars[..liars.len().min(honest.len() - 1)];
            let mut samples: Vec<_> = honest.iter().map(|error| sample("honest", truth + error)).collect();
            samples.extend(liars.iter().map(|offset| sample("liar", *offset)));
            let length = samples.len();
            samples.rotate_left(turn % length);
            let agreement = agree(&samples, length).expect("a majority");
            prop_assert!((agreement.offset - truth).abs() <= 2 * (5_000_000 + SLACK) + 4_000_000);
            prop_assert!(agreement.by.len() >= honest.len());
        }

        /// All members of a cluster choose the same clock.
        #[test]
        fn all_members_follow_the_same_clock(clocks in proptest::collection::vec(-1000i64..1000, 3..8), synchronised: u8) {
            let is = |index: usize| synchronised >> index & 1 == 1;
            let mut followed = Vec::new();
            for (own, clock) in clocks.iter().enumerate().filter(|(own, _)| !is(*own)) {
                let others = clocks.iter().enumerate().filter(|(index, _)| *index != own);
                let others = others.map(|(index, other)| member(other - clock, is(index))).collect();
                followed.push(clock + median(others).unwrap().offset);
            }
            prop_assert!(followed.windows(2).all(|pair| pair[0] == pair[1]), "{followed:?}");
        }
    }
}
