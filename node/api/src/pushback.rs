//! When to repeat a call that was refused for now.
//!
//! A server that refuses a call because something else has to end first knows best how soon to ask
//! again. It says so in the metadata that gRPC's retries have for this, so that the client needs no
//! backoff, which would overshoot. The status code says the same to a client that does not know the
//! metadata.

use std::time::Duration;

use tonic::Status;

/// The metadata, in milliseconds.
const KEY: &str = "grpc-retry-pushback-ms";

/// Adds to a status when to ask again.
pub fn ask_again(mut status: Status, after: Duration) -> Status {
    let ms = u32::try_from(after.as_millis()).unwrap_or(u32::MAX);
    status.metadata_mut().insert(KEY, ms.into());
    status
}

/// When to ask again, if the server has said so.
pub fn of(status: &Status) -> Option<Duration> {
    let ms: u32 = status.metadata().get(KEY)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(ms.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_when_to_ask_again() {
        let status = Status::unavailable("not yet");
        assert_eq!(of(&status), None);
        let after = Duration::from_millis(1500);
        let mut status = ask_again(status, after);
        assert_eq!(of(&status), Some(after));
        // gRPC: a negative number means never.
        for other in ["-1", "", "soon", "4294967296"] {
            status.metadata_mut().insert(KEY, other.parse().unwrap());
            assert_eq!(of(&status), None, "{other}");
        }
    }
}
