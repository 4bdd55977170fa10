//! The wall clock, which may only be moved forward.
//!
//! Certificates are judged by it. A clock that starts in 1970 would find every
//! certificate not yet valid, one that is turned back would find expired ones
//! valid again; so the callers give a time that is surely past, and the clock
//! is never left behind it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

/// The clock could not be set.
#[derive(Debug, thiserror::Error)]
#[error("cannot set the clock forward by {by:?}: {source}")]
pub struct ClockError {
    by: Duration,
    source: nix::Error,
}

/// Sets the clock to `floor` if it stands before it; by how much it was behind.
pub fn raise_to(floor: SystemTime) -> Result<Option<Duration>, ClockError> {
    let Ok(by) = floor.duration_since(SystemTime::now()) else {
        return Ok(None);
    };
    if by.is_zero() {
        return Ok(None);
    }
    let since_epoch = floor.duration_since(UNIX_EPOCH).unwrap_or_default();
    clock_settime(
        ClockId::CLOCK_REALTIME,
        TimeSpec::from_duration(since_epoch),
    )
    .map_err(|source| ClockError { by, source })?;
    Ok(Some(by))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_in_the_past_changes_nothing() {
        let past = SystemTime::now() - Duration::from_secs(1);
        assert_eq!(raise_to(past).unwrap(), None);
        assert_eq!(raise_to(UNIX_EPOCH).unwrap(), None);
    }
}
