//! The system clock and the hardware clock.
//!
//! A machine without a clock battery starts in 1970, and then no certificate is valid. Before
//! anything depends on the clock, it is set forward to the later of two times in the past: the
//! build time of the image and the last saved time ([`raise_to`], which never sets it back: a clock
//! that is ahead cannot be distinguished from a correct one). Later, the time service corrects the
//! clock by what others say, in both directions: [`Kernel`].
//!
//! The kernel keeps one flag that says whether its clock is synchronised. It is cleared when a
//! time server has been heard, and the kernel sets it again by itself nine hours after the last
//! correction. Everything on a node that wants to know reads that flag, [`is_synchronised`].

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::time::TimeSpec;
use nix::time::ClockId;

use super::raw;

/// The hardware clock.
pub const RTC: &str = "/dev/rtc0";

const NANOSECONDS: i64 = 1_000_000_000;

/// Why a clock cannot be read or set.
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    /// The kernel cannot represent the time.
    #[error("the clock cannot be set to {0} seconds after 1970")]
    OutOfRange(u64),
    /// The kernel rejected the time.
    #[error("cannot set the clock")]
    Set(#[source] nix::Error),
    /// The kernel rejected a correction.
    #[error("cannot correct the clock by {by} ns")]
    Correct {
        /// The correction in nanoseconds.
        by: i64,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The state of the clock cannot be read.
    #[error("cannot read the state of the clock")]
    Read(#[source] io::Error),
    /// The hardware clock cannot be set.
    #[error("cannot set the hardware clock {device}")]
    Hardware {
        /// The device.
        device: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// What a time service does with the clock of a machine. Offsets are in nanoseconds, positive for a
/// clock that is behind.
pub trait SystemClock: Send + Sync {
    /// The time.
    fn now(&self) -> SystemTime;

    /// Moves the clock at once. Afterwards it is not marked as synchronised.
    fn step(&self, by: i64) -> Result<(), ClockError>;

    /// Moves the clock gradually, and corrects its frequency. `every`: the time until the next
    /// correction. `synchronised`: whether the offset is that of a time server.
    fn slew(&self, by: i64, every: Duration, synchronised: bool) -> Result<(), ClockError>;

    /// Sets the hardware clock to the system's.
    fn save(&self) -> Result<(), ClockError>;
}

/// The clock of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kernel;

impl SystemClock for Kernel {
    #[expect(clippy::disallowed_methods, reason = "this is the system clock")]
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn step(&self, by: i64) -> Result<(), ClockError> {
        // The kernel wants a part of a second that is not negative.
        let seconds = by.div_euclid(NANOSECONDS);
        let nanoseconds = by.rem_euclid(NANOSECONDS) as u32;
        raw::shift_clock(seconds, nanoseconds).map_err(|source| ClockError::Correct { by, source })
    }

    fn slew(&self, by: i64, every: Duration, synchronised: bool) -> Result<(), ClockError> {
        let settings = raw::Discipline {
            offset: by,
            constant: i64::from(every.as_secs().max(1).ilog2()).clamp(4, 10) - 4,
            is_unsynchronised: !synchronised,
            error: (by / 1000).abs(),
        };
        raw::discipline_clock(&settings).map_err(|source| ClockError::Correct { by, source })
    }

    fn save(&self) -> Result<(), ClockError> {
        set_rtc(Path::new(RTC), self.now())
    }
}

/// Whether the clock of this machine is synchronised to a time server. `false` if that cannot be
/// found out.
pub fn is_synchronised() -> bool {
    raw::clock_is_unsynchronised().is_ok_and(|unsynchronised| !unsynchronised)
}

/// The time of this machine in Unix milliseconds.
pub fn unix_milliseconds() -> i64 {
    let since = Kernel.now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Sets a hardware clock, which keeps UTC in whole seconds.
fn set_rtc(device: &Path, time: SystemTime) -> Result<(), ClockError> {
    let failed = |source| ClockError::Hardware {
        device: device.to_owned(),
        source,
    };
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let rtc = OpenOptions::new().read(true).open(device).map_err(failed)?;
    raw::set_rtc(rtc, civil(since.as_secs())).map_err(failed)
}

/// Second, minute, hour, day of the month, month from 0, years since 1900, in UTC.
fn civil(seconds: u64) -> [i32; 6] {
    const DAY: u64 = 24 * 3600;
    // Days since 1 March of year 0, in eras of 400 years, so that leap days come last.
    let days = seconds / DAY + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // From March.
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 2, 0)
    } else {
        (month - 10, 1)
    };
    let year = era * 400 + year_of_era + next;
    let of_day = seconds % DAY;
    let fields = [of_day % 60, of_day / 60 % 60, of_day / 3600, day, month];
    let [second, minute, hour, day, month] = fields.map(|field| field as i32);
    let year = i32::try_from(year).unwrap_or(i32::MAX) - 1900;
    [second, minute, hour, day, month, year]
}

/// How far `now` is behind the floor; `None` if it is not.
pub fn shortfall(now: SystemTime, floor: SystemTime) -> Option<Duration> {
    floor.duration_since(now).ok().filter(|gap| !gap.is_zero())
}

/// Sets the clock to the floor if it is behind; returns by how much.
#[expect(clippy::disallowed_methods, reason = "this is the system clock")]
pub fn raise_to(floor: SystemTime) -> Result<Option<Duration>, ClockError> {
    let Some(gap) = shortfall(SystemTime::now(), floor) else {
        return Ok(None);
    };
    // A floor before 1970 is before any clock.
    let since = floor.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs());
    let seconds = seconds.map_err(|_| ClockError::OutOfRange(since.as_secs()))?;
    let time = TimeSpec::new(seconds, since.subsec_nanos().into());
    nix::time::clock_settime(ClockId::CLOCK_REALTIME, time).map_err(ClockError::Set)?;
    Ok(Some(gap))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clock_below_the_floor_is_raised() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(shortfall(at(10), at(25)), Some(Duration::from_secs(15)));
        assert_eq!(shortfall(at(25), at(25)), None);
        assert_eq!(shortfall(at(40), at(25)), None);
        // This machine's clock is past 1970, so it is not changed.
        assert_eq!(raise_to(at(25)).unwrap(), None);
        assert_eq!(raise_to(UNIX_EPOCH - Duration::from_secs(5)).unwrap(), None);
    }

    #[test]
    fn a_time_is_a_date() {
        for (seconds, fields) in [
            (0, [0, 0, 0, 1, 0, 70]),
            (951_782_399, [59, 59, 23, 28, 1, 100]),
            (951_782_400, [0, 0, 0, 29, 1, 100]),
            (951_868_800, [0, 0, 0, 1, 2, 100]),
            (1_798_761_599, [59, 59, 23, 31, 11, 126]),
            (2_147_483_648, [8, 14, 3, 19, 0, 138]),
            (4_107_542_400, [0, 0, 0, 1, 2, 200]),
        ] {
            assert_eq!(civil(seconds), fields, "{seconds}");
        }
    }

    #[test]
    fn days_follow_each_other() {
        let mut before = civil(0);
        for day in 1..60_000 {
            let date = civil(day * 24 * 3600);
            let [.., day, month, year] = date;
            let [.., day_before, month_before, year_before] = before;
            let next = match (day, month) {
                (1, 0) => (day_before, month_before, year_before) == (31, 11, year - 1),
                (1, _) => day_before >= 28 && (month_before, year_before) == (month - 1, year),
                _ => (day_before, month_before, year_before) == (day - 1, month, year),
            };
            assert!(next, "{before:?}, {date:?}");
            before = date;
        }
    }

    #[test]
    fn a_device_that_is_no_clock_is_named() {
        let error = set_rtc(Path::new("/dev/null"), UNIX_EPOCH).unwrap_err();
        assert_eq!(error.to_string(), "cannot set the hardware clock /dev/null");
    }
}
