//! A leaky bucket, to limit the rate of failures.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Permits `most` events at once; `forget_one` is the time after which one more is permitted.
pub(super) struct Bucket {
    most: u32,
    forget_one: Duration,
    level: Mutex<Level>,
}

struct Level {
    count: u32,
    /// The time up to which the leak has been applied.
    at: Instant,
}

impl Bucket {
    /// Permits `most` at once, and one more per `forget_one`.
    pub(super) fn new(most: u32, forget_one: Duration) -> Self {
        let level = Level {
            count: 0,
            at: Instant::now(),
        };
        Self {
            most,
            forget_one,
            level: Mutex::new(level),
        }
    }

    /// Counts one event; returns whether it is permitted.
    pub(super) fn take(&self) -> bool {
        let now = Instant::now();
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.duration_since(level.at).as_nanos() / self.forget_one.as_nanos().max(1);
        let forgotten = u32::try_from(passed).unwrap_or(u32::MAX);
        if forgotten >= level.count {
            *level = Level { count: 0, at: now };
        } else {
            level.count -= forgotten;
            level.at += self.forget_one * forgotten;
        }
        if level.count == self.most {
            return false;
        }
        level.count += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_fills_and_leaks() {
        let second = Duration::from_secs(1);
        let bucket = Bucket::new(3, second);
        let takes = |n: u32| (0..n).filter(|_| bucket.take()).count();
        assert_eq!(takes(10), 3);
        tokio::time::advance(second / 2).await;
        assert_eq!(takes(10), 0);
        // Half seconds add up.
        tokio::time::advance(second / 2).await;
        assert_eq!(takes(10), 1);
        tokio::time::advance(second * 2).await;
        assert_eq!(takes(10), 2);
        tokio::time::advance(second * 1000).await;
        assert_eq!(takes(10), 3);
    }
}
