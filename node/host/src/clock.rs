//! Which of the times that a boot finds it believes.
//!
//! There are three: the hardware's clock, the time at which the image was built, and the time that an
//! earlier boot has saved ([`boot_record`](crate::boot_record)). Certificates are checked against the
//! system clock, so one that is far ahead makes a node useless, and one that is behind makes it accept
//! certificates that have expired.
//!
//! - The clock is never before the build of the image. A hardware clock that is has lost its battery.
//! - The saved time sets the clock forward, within bounds: not past the end of the certificates that an
//!   image of this age makes, and not more than [`LONGEST_LEAD`] past a hardware clock that has not lost
//!   its battery. So one boot with a clock that is years ahead does no harm to the next.
//! - A time that is past the end of the certificates is not saved.
//!
//! What is believed is logged with the reason, and so is what is not. Nothing here asks other machines:
//! the time service does.

use std::time::{Duration, SystemTime};

use hearth_sys::clock;

use crate::date::date;
use crate::pki::Lifetime;

/// How far the saved time may be ahead of a hardware clock.
pub const LONGEST_LEAD: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a boot knows about its clock.
#[derive(Clone, Copy, Debug)]
pub struct BootClock {
    /// When the image was built.
    build_time: SystemTime,
    /// The hardware's clock was before that.
    has_no_battery: bool,
}

/// What becomes of a saved time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The clock is not before it.
    Past,
    /// The clock is set to it.
    Believed,
    /// It is after the end of certificates.
    AfterTheEnd,
    /// It is too far ahead of the hardware's clock.
    TooFarAhead,
}

impl BootClock {
    /// Sets the clock to the build time of the image, if it is before that.
    pub fn begin(build_time: SystemTime) -> Self {
        Self {
            build_time,
            has_no_battery: raise_to(build_time, "the time at which the image was built"),
        }
    }

    /// Sets the clock to the saved time, if it is before that and the saved time can be believed.
    /// Returns whether it can.
    #[expect(clippy::disallowed_methods, reason = "this is about the system clock")]
    pub fn believe(&self, saved: SystemTime) -> bool {
        let now = SystemTime::now();
        let verdict = self.judge(saved, now);
        let wrong = |why: &str| {
            let (saved, now) = (date(saved), date(now));
            tracing::warn!("the saved time, {saved}, is {why}: the clock stays at {now}");
        };
        match verdict {
            Verdict::Past => {}
            Verdict::Believed => {
                raise_to(saved, "the time that was saved last");
            }
            Verdict::AfterTheEnd => wrong("after the end of all certificates"),
            Verdict::TooFarAhead => wrong("more than a year ahead of the hardware's clock"),
        }
        matches!(verdict, Verdict::Past | Verdict::Believed)
    }

    /// Whether this time may be saved for the next boot.
    pub fn may_save(&self, now: SystemTime) -> bool {
        now < self.end()
    }

    fn judge(&self, saved: SystemTime, now: SystemTime) -> Verdict {
        if saved <= now {
            Verdict::Past
        } else if saved >= self.end() {
            Verdict::AfterTheEnd
        } else if !self.has_no_battery && saved > now + LONGEST_LEAD {
            Verdict::TooFarAhead
        } else {
            Verdict::Believed
        }
    }

    /// The end of the certificates that this image makes.
    fn end(&self) -> SystemTime {
        Lifetime::since_build(self.build_time).end()
    }
}

/// Sets the clock to this time, if it is before it; returns whether it was.
fn raise_to(floor: SystemTime, is: &str) -> bool {
    let to = date(floor);
    match clock::raise_to(floor) {
        Ok(None) => return false,
        Ok(Some(by)) => {
            let seconds = by.as_secs();
            tracing::warn!(
                seconds,
                "the clock was behind and has been set to {to}, {is}"
            );
        }
        Err(error) => tracing::warn!(%error, "the clock is before {to}, {is}, and cannot be set"),
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DAY: u64 = 24 * 3600;
    const YEAR: u64 = 365 * DAY;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// The clock of a boot, and the verdict about the saved time.
    fn boot(build: u64, hardware: u64, saved: u64) -> (u64, Verdict) {
        let clock = BootClock {
            build_time: at(build),
            has_no_battery: hardware < build,
        };
        let now = hardware.max(build);
        match clock.judge(at(saved), at(now)) {
            Verdict::Believed => (saved, Verdict::Believed),
            verdict => (now, verdict),
        }
    }

    #[test]
    fn a_saved_time_is_believed_within_bounds() {
        let build = 56 * YEAR;
        let days = |days: u64| build + days * DAY;
        let no_battery = 0;
        for (hardware, saved, clock, verdict) in [
            (days(9), days(8), days(9), Verdict::Past),
            (days(9), days(10), days(10), Verdict::Believed),
            (no_battery, days(10), days(10), Verdict::Believed),
            (no_battery, days(3000), days(3000), Verdict::Believed),
            (days(9), days(9 + 365), days(9 + 365), Verdict::Believed),
            (days(9), days(9 + 366), days(9), Verdict::TooFarAhead),
            (days(9), days(12_000), days(9), Verdict::AfterTheEnd),
            (no_battery, days(12_000), build, Verdict::AfterTheEnd),
        ] {
            assert_eq!(boot(build, hardware, saved), (clock, verdict));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Whatever was saved, by whatever boots before: a boot with a battery and the right time is at most a year
        /// ahead, and no boot is before the build of its image, or after the end because of what was saved.
        #[test]
        fn no_saved_time_takes_a_boot_far(
            build in 50 * YEAR..60 * YEAR,
            clocks in proptest::collection::vec(0..200 * YEAR, 1..8),
        ) {
            let image = BootClock { build_time: at(build), has_no_battery: false };
            let end = image.end().duration_since(at(0)).unwrap().as_secs();
            let mut saved = 0;
            for hardware in clocks {
                let (clock, verdict) = boot(build, hardware, saved);
                prop_assert!(clock >= build && clock >= hardware);
                prop_assert!(clock <= hardware || clock < end);
                if hardware >= build {
                    prop_assert!(clock <= hardware + YEAR);
                }
                let believed = matches!(verdict, Verdict::Past | Verdict::Believed);
                saved = match (image.may_save(at(clock)), believed) {
                    (true, _) => clock,
                    (false, true) => saved,
                    (false, false) => 0,
                };
                prop_assert!(saved < end);
            }
        }
    }
}
