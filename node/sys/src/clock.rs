//! The clock's floor.
//!
//! A machine without a battery starts in 1970, and then no certificate is
//! valid. Before anything is judged by the clock it is raised to the later of
//! two times that are surely past: when the image was built, and the last time
//! that was saved. It is never turned back: a clock that runs ahead cannot be
//! told from one that is right.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::{sys::time::TimeSpec, time::ClockId};

/// Why the clock was not raised.
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    /// The floor is not a time the kernel can be set to.
    #[error("the clock cannot be set to {0} seconds after 1970")]
    OutOfRange(u64),
    /// The kernel refused.
    #[error("cannot set the clock")]
    Set(#[source] nix::Error),
}

/// By how much a clock that shows `now` must be raised to reach the floor.
pub fn shortfall(now: SystemTime, floor: SystemTime) -> Option<Duration> {
    floor.duration_since(now).ok().filter(|gap| !gap.is_zero())
}

/// Raises the clock to the floor if it is below; tells by how much.
pub fn raise_to(floor: SystemTime) -> Result<Option<Duration>, ClockError> {
    let Some(gap) = shortfall(SystemTime::now(), floor) else {
        return Ok(None);
    };
    // A floor before 1970 is below any clock.
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
        // This machine's clock is past 1970, so it is left alone.
        assert_eq!(raise_to(at(25)).unwrap(), None);
        assert_eq!(raise_to(UNIX_EPOCH - Duration::from_secs(5)).unwrap(), None);
    }
}
