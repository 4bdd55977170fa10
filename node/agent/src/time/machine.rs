//! When and by how much the clock is corrected: a state machine without clock or socket.
//!
//! It is given rounds, each the answers of all sources that were asked at one moment, and says what
//! to do with the clock and when to ask again.
//!
//! # Rules
//! | difference | before the first synchronisation | later |
//! |---|---|---|
//! | below 128 ms ([`STEP`]) | slewed | slewed |
//! | up to 1000 s ([`LARGE`]) | set at once | set when two rounds in a row say the same |
//! | more | set at once | the same, and all sources that answer have to agree, not only most |
//!
//! 128 ms and 1000 s are the thresholds that ntpd has made usual. ntpd exits where a correction is
//! larger than the second; a node has nobody who would start it again with another option, and may
//! have begun with a clock that was wrong by years. So a large correction needs more evidence
//! instead. Two rounds are seconds apart, so one wrong answer corrects nothing. A minority can
//! prevent a large correction, but not make one.
//!
//! The result of a correction is within bounds, always: not before the build of the image, and
//! before the end of the cluster's CA. An answer outside of them cannot be right, but it counts as
//! one of the answers of which a majority must agree.
//!
//! Rounds are two seconds apart until four have been good, then a minute, up to 17 minutes while
//! the clock stays within 8 ms. Without an answer they are further and further apart, up to a
//! minute.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use super::agreement::{Agreement, Sample, agree};

/// Smaller differences are slewed, in nanoseconds.
pub(super) const STEP: i64 = 128_000_000;
/// Larger differences need the agreement of all, in nanoseconds.
pub(super) const LARGE: i64 = 1_000_000_000_000;
/// Within this the clock is good, in nanoseconds.
const GOOD: i64 = 8_000_000;
/// Beyond this it is looked at often again, in nanoseconds.
const POOR: i64 = 32_000_000;

/// The time between the first rounds, and before a correction is confirmed.
const FAST: Duration = Duration::from_secs(2);
/// The number of good rounds before they become less frequent.
const FAST_ROUNDS: u32 = 4;
/// The shortest and the longest time between rounds later.
pub(super) const SHORTEST: Duration = Duration::from_secs(64);
pub(super) const LONGEST: Duration = Duration::from_secs(1024);
/// The number of good rounds before the time between them is doubled.
const GOOD_ROUNDS: u32 = 4;
/// The number of rounds without an answer after which the clock is not synchronised any more.
const SILENT_ROUNDS: u32 = 4;

/// What to do with the clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Correct it gradually, by this many nanoseconds.
    Slew(Agreement),
    /// Set it, by this many nanoseconds.
    Step(Agreement),
    /// Nothing yet: the next round has to confirm this.
    Confirm(Agreement),
    /// Nothing.
    Nothing(Reason),
}

/// Why nothing is done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Reason {
    /// Nobody has answered.
    #[error("none of {asked} answers")]
    Silence {
        /// The number of those asked.
        asked: usize,
    },
    /// The time that they say cannot be.
    #[error(
        "{from} says that it is {seconds} seconds after 1970: that is before this image was built, \
         or after the end of its cluster's certificates"
    )]
    OutOfBounds {
        /// Who says so.
        from: String,
        /// Seconds since 1970.
        seconds: u64,
    },
    /// There is no majority.
    #[error("the {answered} answers contradict each other")]
    Contradiction {
        /// The number of answers.
        answered: usize,
    },
    /// A large correction that not all agree with.
    #[error(
        "{} say that the clock is wrong by {} s, but {} of {answered} do not agree, and a correction \
         of more than {} s needs them all",
        by.join(", "), offset / 1_000_000_000, answered - by.len(), LARGE / 1_000_000_000
    )]
    Dissent {
        /// The correction in nanoseconds.
        offset: i64,
        /// Who agrees.
        by: Vec<String>,
        /// The number of answers.
        answered: usize,
    },
}

/// The machine.
#[derive(Debug)]
pub(super) struct Machine {
    /// The clock was corrected or found right once.
    begun: bool,
    /// The correction that the next round has to confirm.
    pending: Option<i64>,
    /// Good rounds in a row at the present interval.
    good: u32,
    /// Rounds that remain at [`FAST`].
    fast: u32,
    /// The time between rounds after these.
    interval: Duration,
    /// Rounds without an answer, in a row.
    silent: u32,
}

impl Machine {
    pub(super) fn new() -> Self {
        Self {
            begun: false,
            pending: None,
            good: 0,
            fast: FAST_ROUNDS,
            interval: SHORTEST,
            silent: 0,
        }
    }

    /// Other sources are asked from now on: at first often. What a correction needs stays the same.
    pub(super) fn ask_others(&mut self) {
        *self = Self {
            begun: self.begun,
            ..Self::new()
        };
    }

    /// The answers of a round. `now`: the clock at that time. `asked`: how many were asked.
    pub(super) fn round(
        &mut self,
        now: SystemTime,
        bounds: &Range<SystemTime>,
        asked: usize,
        samples: &[Sample],
    ) -> Decision {
        if samples.is_empty() {
            self.silent = self.silent.saturating_add(1);
            self.pending = None;
            return Decision::Nothing(Reason::Silence { asked });
        }
        self.silent = 0;
        let (possible, impossible): (Vec<_>, Vec<_>) = samples
            .iter()
            .cloned()
            .partition(|sample| bounds.contains(&shifted(now, sample.offset)));
        let Some(agreement) = agree(&possible, samples.len()) else {
            self.pending = None;
            return Decision::Nothing(match impossible.first() {
                Some(sample) => Reason::OutOfBounds {
                    from: sample.from.clone(),
                    seconds: seconds(shifted(now, sample.offset)),
                },
                None => Reason::Contradiction {
                    answered: samples.len(),
                },
            });
        };
        self.decide(agreement, samples.len())
    }

    fn decide(&mut self, agreement: Agreement, answered: usize) -> Decision {
        let offset = agreement.offset;
        if offset.saturating_abs() < STEP {
            self.begun = true;
            self.pending = None;
            self.pace(offset);
            return Decision::Slew(agreement);
        }
        if self.begun {
            if offset.saturating_abs() > LARGE && agreement.by.len() < answered {
                self.pending = None;
                return Decision::Nothing(Reason::Dissent {
                    offset,
                    by: agreement.by,
                    answered,
                });
            }
            let is_confirmed = |before: i64| before.saturating_sub(offset).saturating_abs() < STEP;
            if !self.pending.is_some_and(is_confirmed) {
                self.pending = Some(offset);
                return Decision::Confirm(agreement);
            }
        }
        *self = Self {
            begun: true,
            ..Self::new()
        };
        Decision::Step(agreement)
    }

    /// The clock is right, within this difference.
    fn pace(&mut self, offset: i64) {
        if let Some(rest) = self.fast.checked_sub(1) {
            self.fast = rest;
            return;
        }
        match offset.saturating_abs() {
            POOR.. => (self.good, self.interval) = (0, SHORTEST),
            GOOD.. => self.good = 0,
            _ => self.good += 1,
        }
        if self.good >= GOOD_ROUNDS {
            self.good = 0;
            self.interval = (self.interval * 2).min(LONGEST);
        }
    }

    /// Whether the sources have been silent for so long that the clock may be wrong again.
    pub(super) fn is_deserted(&self) -> bool {
        self.silent >= SILENT_ROUNDS
    }

    /// The time between rounds, on average.
    pub(super) fn interval(&self) -> Duration {
        if self.silent > 0 {
            return (FAST * 2u32.saturating_pow(self.silent.min(8) - 1)).min(SHORTEST);
        }
        match self.fast > 0 || self.pending.is_some() {
            true => FAST,
            false => self.interval,
        }
    }

    /// The time until the next round. Varies by a tenth, so that nodes that were started together do not ask at the
    /// same moment for ever. `random`: any number.
    pub(super) fn next(&self, random: u64) -> Duration {
        let interval = self.interval();
        let spread = u64::try_from(interval.as_millis() / 5).unwrap_or(u64::MAX);
        interval - interval / 10 + Duration::from_millis(random % (spread + 1))
    }
}

/// A time plus nanoseconds. A time that cannot be represented is the begin of 1970, which is out of all bounds.
pub(super) fn shifted(time: SystemTime, by: i64) -> SystemTime {
    let distance = Duration::from_nanos(by.unsigned_abs());
    let shifted = match by < 0 {
        true => time.checked_sub(distance),
        false => time.checked_add(distance),
    };
    shifted.unwrap_or(SystemTime::UNIX_EPOCH)
}

fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests;
