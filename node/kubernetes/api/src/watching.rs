//! What a runnable that watches tells of itself: that it is well, and what stands in its way.

use std::sync::atomic::{AtomicBool, Ordering};

use hearth_base::supervisor::{Context, Health};

use crate::ApiError;

/// A runnable that watches: it is well when it has seen everything once, and
/// says once in a row what stands in its way.
pub struct Watching<'a> {
    health: Health<'a>,
    complained: AtomicBool,
}

impl<'a> Watching<'a> {
    /// Of this runnable.
    pub fn of(ctx: &'a Context) -> Self {
        Self {
            health: Health::of(ctx),
            complained: AtomicBool::new(false),
        }
    }

    /// It sees everything.
    pub fn good(&self) {
        self.health.good();
        self.hears();
    }

    /// It is told something: the next failure is worth a word again.
    pub fn hears(&self) {
        self.complained.store(false, Ordering::Relaxed);
    }

    /// A watch has failed, and will begin again.
    pub fn failed(&self, what: &str, error: &ApiError) {
        let error = hearth_api::chain(error);
        if self.complained.swap(true, Ordering::Relaxed) {
            tracing::debug!("{what} cannot be watched: {error}");
        } else {
            tracing::warn!("{what} cannot be watched: {error}");
        }
    }
}
