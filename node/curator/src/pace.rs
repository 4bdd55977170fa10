//! Rate limit of messages to subscribers.
//!
//! A change of one node is sent to every subscriber, and a message costs the same whether it has
//! one change or ten. So the number of messages is limited: after each announcement the next one
//! is delayed by the time that it takes to serve the current subscribers at
//! [`MESSAGES_PER_SECOND`]. Changes in the meantime are sent together, with the latest state of
//! each node. In a cluster of ten nodes the delay is not noticeable; with thousands of nodes it is
//! a fraction of a second, and the cost does not grow with the rate of changes.
//!
//! The first change after a quiet period is announced immediately.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::cache::Cache;

/// Messages per second to all subscribers together.
const MESSAGES_PER_SECOND: u32 = 12_500;
/// Upper bound of the delay, for any number of subscribers.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Announces changes of the cache to subscribers at a limited rate.
pub struct Pace {
    /// The version of the cache up to which subscribers may read.
    announced: watch::Sender<u64>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            announced: watch::Sender::new(0),
        }
    }
}

impl Pace {
    /// The announced version. The delay grows with the number of receivers.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.announced.subscribe()
    }

    /// Announces the versions of the cache. Never returns.
    pub async fn announce(&self, cache: &Cache) -> Infallible {
        let mut versions = cache.watch();
        loop {
            let version = *versions.borrow_and_update();
            let subscribers = self.announced.receiver_count();
            self.announced.send_replace(version);
            sleep(pause(subscribers)).await;
            // The sender lives in the cache.
            let _ = versions.changed().await;
        }
    }
}

fn pause(subscribers: usize) -> Duration {
    let subscribers = u32::try_from(subscribers).unwrap_or(u32::MAX);
    let pause = Duration::from_secs(1) / MESSAGES_PER_SECOND;
    pause.saturating_mul(subscribers).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_with_the_crowd_and_has_an_end() {
        assert_eq!(pause(0), Duration::ZERO);
        assert!(pause(10) < Duration::from_millis(1));
        assert_eq!(pause(1000), Duration::from_millis(80));
        assert_eq!(pause(5000), Duration::from_millis(400));
        assert_eq!(pause(usize::MAX), LONGEST_PAUSE);
    }
}
