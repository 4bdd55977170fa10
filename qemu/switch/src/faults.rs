//! Faults of a link, and the random decisions.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum time that a frame is delayed.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// The minimum MTU of IPv4.
const MIN_MTU: u32 = 68;

/// The faults of a link, which apply to both directions. The default is none.
///
/// A field that is absent in JSON has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// No frame passes. The machine does not notice: its card stays connected, but gets no answers.
    pub cut: bool,
    /// The share of frames that are lost, 0 to 1.
    pub loss: f64,
    /// How long each frame takes, one way. At most a minute, jitter included.
    pub delay: Duration,
    /// A random time of up to this much is added for each frame, so frames can overtake each other.
    pub jitter: Duration,
    /// Frames with a larger payload are silently lost, as if path MTU discovery is broken. In bytes after the Ethernet
    /// header, at least 68.
    pub mtu: Option<u32>,
}

/// Invalid faults.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{field}: expected {wanted}, got {found}")]
pub struct BadFaults {
    field: String,
    found: String,
    wanted: String,
}

impl Faults {
    pub(super) fn check(&self) -> Result<(), BadFaults> {
        let refuse = |field: &str, found: String, wanted: &str| {
            Err(BadFaults {
                field: field.to_owned(),
                found,
                wanted: wanted.to_owned(),
            })
        };
        // Also refuses NaN.
        if !(0.0..=1.0).contains(&self.loss) {
            return refuse("loss", self.loss.to_string(), "0 to 1");
        }
        match self.delay.checked_add(self.jitter) {
            Some(longest) if longest <= MAX_DELAY => {}
            _ => {
                let found = format!("{:?} and {:?}", self.delay, self.jitter);
                return refuse("delay and jitter", found, "at most 60 s together");
            }
        }
        match self.mtu {
            Some(mtu) if mtu < MIN_MTU => refuse("mtu", mtu.to_string(), "at least 68"),
            _ => Ok(()),
        }
    }

    /// Decides about one frame with this much payload.
    pub(super) fn fate(&self, payload: usize, dice: &mut fastrand::Rng) -> Fate {
        if self.cut {
            return Fate::Cut;
        }
        if self.mtu.is_some_and(|mtu| payload > mtu as usize) {
            return Fate::TooLarge;
        }
        if self.loss > 0.0 && dice.f64() < self.loss {
            return Fate::Lost;
        }
        let mut delay = self.delay;
        if !self.jitter.is_zero() {
            delay += self.jitter.mul_f64(dice.f64());
        }
        if delay.is_zero() {
            Fate::Passes
        } else {
            Fate::After(delay)
        }
    }
}

/// What happens to a frame on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Passes,
    After(Duration),
    Cut,
    Lost,
    TooLarge,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fates(faults: Faults, seed: u64, payload: usize) -> Vec<Fate> {
        let mut dice = fastrand::Rng::with_seed(seed);
        (0..1000).map(|_| faults.fate(payload, &mut dice)).collect()
    }

    #[test]
    fn each_fault_does_its_own() {
        assert!(
            fates(Faults::default(), 1, 1500)
                .iter()
                .all(|fate| *fate == Fate::Passes)
        );
        let cut = Faults {
            cut: true,
            ..Faults::default()
        };
        assert!(fates(cut, 1, 1).iter().all(|fate| *fate == Fate::Cut));
        let all = Faults {
            loss: 1.0,
            ..Faults::default()
        };
        assert!(fates(all, 1, 1).iter().all(|fate| *fate == Fate::Lost));
        let third = Faults {
            loss: 0.3,
            ..Faults::default()
        };
        let lost = fates(third, 1, 1)
            .iter()
            .filter(|fate| **fate == Fate::Lost)
            .count();
        assert!((200..400).contains(&lost), "{lost}");
        let small = Faults {
            mtu: Some(1400),
            ..Faults::default()
        };
        assert_eq!(fates(small, 1, 1400)[0], Fate::Passes);
        assert_eq!(fates(small, 1, 1401)[0], Fate::TooLarge);
    }

    #[test]
    fn jitter_stays_within_its_bounds_and_varies() {
        let (delay, jitter) = (Duration::from_millis(20), Duration::from_millis(10));
        let faults = Faults {
            delay,
            jitter,
            ..Faults::default()
        };
        let fates = fates(faults, 7, 1);
        let within = |fate: &Fate| matches!(fate, Fate::After(after) if (delay..=delay + jitter).contains(after));
        assert!(fates.iter().all(within));
        assert!(fates.windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn a_seed_repeats_everything() {
        let faults = Faults {
            loss: 0.5,
            jitter: Duration::from_secs(1),
            ..Faults::default()
        };
        assert_eq!(fates(faults, 9, 1), fates(faults, 9, 1));
        assert_ne!(fates(faults, 9, 1), fates(faults, 10, 1));
    }

    #[test]
    fn what_cannot_be_is_refused_by_field() {
        let second = Duration::from_secs(1);
        for (faults, field) in [
            (
                Faults {
                    loss: 1.5,
                    ..Faults::default()
                },
                "loss",
            ),
            (
                Faults {
                    loss: f64::NAN,
                    ..Faults::default()
                },
                "loss",
            ),
            (
                Faults {
                    delay: 60 * second,
                    jitter: second,
                    ..Faults::default()
                },
                "delay",
            ),
            (
                Faults {
                    delay: Duration::MAX,
                    jitter: second,
                    ..Faults::default()
                },
                "delay",
            ),
            (
                Faults {
                    mtu: Some(67),
                    ..Faults::default()
                },
                "mtu",
            ),
        ] {
            let error = faults.check().expect_err("refused").to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }

    proptest! {
        /// Faults that pass the check never fail in use.
        #[test]
        fn no_faults_that_are_taken_fail(loss: f64, delay: Duration, jitter: Duration, mtu: Option<u32>, seed: u64) {
            let faults = Faults { cut: false, loss, delay, jitter, mtu };
            if faults.check().is_ok() {
                fates(faults, seed, 100);
            }
        }
    }
}
