//! How long a failed runnable waits before it restarts.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// Exponential backoff with jitter.
#[derive(Clone)]
pub struct Backoff {
    /// The delay after the first failure.
    pub initial: Duration,
    /// Each further failure multiplies the delay by this.
    pub factor: f64,
    /// No delay is longer than this, jitter included.
    pub cap: Duration,
    /// The delay varies by this share of itself, up and down; 0 to 1.
    pub jitter: f64,
    /// Source of the variation: numbers in `[0, 1)`. Tests use a constant (0.5 means no deviation).
    pub random: Arc<dyn Fn() -> f64 + Send + Sync>,
}

impl Backoff {
    /// The delay after this many consecutive failures.
    pub fn delay(&self, failures: u32) -> Duration {
        let cap = self.cap.as_secs_f64();
        let steps = i32::try_from(failures.saturating_sub(1)).unwrap_or(i32::MAX);
        // May be infinite; `min` limits it.
        let plain = (self.initial.as_secs_f64() * self.factor.powi(steps)).min(cap);
        let deviation = self.jitter * (2.0 * (self.random)() - 1.0);
        Duration::from_secs_f64((plain * (1.0 + deviation)).clamp(0.0, cap))
    }
}

impl Default for Backoff {
    /// 0.5 s, × 1.5, at most 60 s, ± 10 %.
    fn default() -> Self {
        Backoff {
            initial: Duration::from_millis(500),
            factor: 1.5,
            cap: Duration::from_secs(60),
            jitter: 0.1,
            random: Arc::new(random),
        }
    }
}

impl fmt::Debug for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backoff")
            .field("initial", &self.initial)
            .field("factor", &self.factor)
            .field("cap", &self.cap)
            .field("jitter", &self.jitter)
            .finish_non_exhaustive()
    }
}

/// Good enough to keep nodes from acting in step, which is its only purpose: the standard library
/// seeds its hash keys anew each time.
fn random() -> f64 {
    let bits = RandomState::new().build_hasher().finish() >> 11;
    bits as f64 / (1u64 << 53) as f64
}
