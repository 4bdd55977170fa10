//! Waiting for the renewal time of a certificate, by the wall clock.
//!
//! The wall clock may be set while a task waits, which timers do not notice; so it is polled. A
//! certificate that is due as soon as it has been issued comes from a CA that is about to expire,
//! and a new one would be no better: so no certificate is due earlier than one polling interval
//! after it was issued.

use std::time::{Duration, SystemTime};

use hearth_api::tls::{self, Clock};

/// Polling interval of the wall clock.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

/// A wall clock with a polling interval. Cheap to clone.
#[derive(Clone)]
pub struct CertificateClock {
    clock: Clock,
    look: Duration,
}

impl CertificateClock {
    /// The system's clock.
    pub fn of_this_machine() -> Self {
        Self {
            clock: tls::wall_clock(),
            look: LOOK_EVERY,
        }
    }

    /// Another clock.
    #[cfg(test)]
    pub fn by(clock: Clock, look: Duration) -> Self {
        Self { clock, look }
    }

    /// The current time, in whole seconds.
    pub fn now(&self) -> SystemTime {
        tls::system_time(&self.clock)
    }

    /// Waits until this time, but for at least one polling interval.
    pub async fn reaches(&self, time: SystemTime) {
        tokio::time::sleep(self.look).await;
        while let Ok(left) = time.duration_since(self.now())
            && !left.is_zero()
        {
            tokio::time::sleep(left.min(self.look)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use hearth_api::testing::TestClock;
    use tokio::time::{Instant, timeout};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_is_noticed_at_the_next_look() {
        let clock = TestClock::new();
        let calendar = CertificateClock::by(clock.clone(), HOUR);
        let due = calendar.now() + 30 * 24 * HOUR;
        let mut reached = Box::pin(calendar.reaches(due));
        let waits = timeout(24 * HOUR, &mut reached).await;
        waits.expect_err("the clock stands still");
        let seconds = due.duration_since(UNIX_EPOCH).unwrap().as_secs();
        clock.set(seconds);
        timeout(HOUR, reached).await.expect("within a look");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_from_the_beginning_is_not_due_at_once() {
        let calendar = CertificateClock::by(TestClock::new(), HOUR);
        let begin = Instant::now();
        calendar.reaches(calendar.now()).await;
        assert_eq!(begin.elapsed(), HOUR);
    }
}
