//! When subscribers are told that there is news.
//!
//! A change of one node goes to every subscriber, and a subscriber costs the
//! same whether its message tells of one change or of ten. So what is bounded
//! is the number of messages: after each announcement the next one waits for
//! as long as the subscribers there are take to be served at
//! [`MESSAGES_PER_SECOND`]. What changes meanwhile is told together, the latest
//! state of each node. In a
//! cluster of ten the pause cannot be noticed; with thousands of nodes it is
//! a fraction of a second, and a storm of changes costs no more than a breeze.
//!
//! The first change after a quiet time is announced at once.

use std::{convert::Infallible, time::Duration};

use tokio::{sync::watch, time::sleep};

use super::cache::Cache;

/// Messages a second that may be caused, in all.
const MESSAGES_PER_SECOND: u32 = 12_500;
/// However many subscribers there are: nobody hears later than this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// See the module.
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
    /// Versions as they are announced. Those who wait by it are those that the
    /// pause is for.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.announced.subscribe()
    }

    /// Announces what the cache takes in, for ever.
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
