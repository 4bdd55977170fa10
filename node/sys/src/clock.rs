//! The minimum time of the system clock.
//!
//! A machine without a clock battery starts in 1970, and then no certificate is valid. Before
//! anything depends on the clock, it is set forward to the later of two times in the past: the
//! build time of the image and the last saved time. The clock is never set back: a clock that is
//! ahead cannot be distinguished from a correct one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::time::TimeSpec;
use nix::time::ClockId;

/// Why the clock cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    /// The kernel cannot represent the time.
    #[error("the clock cannot be set to {0} seconds after 1970")]
    OutOfRange(u64),
    /// The kernel rejected the time.
    #[error("cannot set the clock")]
    Set(#[source] nix::Error),
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
}
