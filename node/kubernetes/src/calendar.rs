//! When a certificate is due, by the clock by which certificates end.
//!
//! That clock may be set while something waits for it, and no timer hears of
//! that; so it is looked at again and again. What is due the moment it was
//! issued comes of an authority that is about to end, which issues nothing
//! better: so nothing is due sooner than one look later.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::tls::{self, Clock};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

/// A clock, and how often it is looked at. Cheap to clone.
#[derive(Clone)]
pub struct Calendar {
    clock: Clock,
    look: Duration,
}

impl Calendar {
    /// By the machine's clock.
    pub fn of_this_machine() -> Self {
        Self {
            clock: tls::wall_clock(),
            look: LOOK_EVERY,
        }
    }

    /// By another one.
    #[cfg(test)]
    pub fn by(clock: Clock, look: Duration) -> Self {
        Self { clock, look }
    }

    /// What time it is.
    pub fn now(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(tls::now(&self.clock).as_secs())
    }

    /// Waits until this time has come, and for one look at least.
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
    use hearth_api::testing::TestClock;
    use tokio::time::{Instant, timeout};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_is_noticed_at_the_next_look() {
        let clock = TestClock::new();
        let calendar = Calendar::by(clock.clone(), HOUR);
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
        let calendar = Calendar::by(TestClock::new(), HOUR);
        let begin = Instant::now();
        calendar.reaches(calendar.now()).await;
        assert_eq!(begin.elapsed(), HOUR);
    }
}
