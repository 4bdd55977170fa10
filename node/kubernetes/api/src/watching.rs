//! Health and log of a runnable that watches objects.

use std::sync::atomic::{AtomicBool, Ordering};

use hearth_base::supervisor::{Context, Health};

use crate::ApiError;

/// Reports for a runnable that watches: it is healthy after the first complete list, and of
/// consecutive errors only the first is logged as a warning.
pub struct Watching<'a> {
    health: Health<'a>,
    complained: AtomicBool,
}

impl<'a> Watching<'a> {
    /// For this runnable.
    pub fn of(ctx: &'a Context) -> Self {
        Self {
            health: Health::of(ctx),
            complained: AtomicBool::new(false),
        }
    }

    /// Everything has been listed: reports healthy.
    pub fn good(&self) {
        self.health.good();
        self.hears();
    }

    /// An event has arrived: the next error is logged as a warning again.
    pub fn hears(&self) {
        self.complained.store(false, Ordering::Relaxed);
    }

    /// A watch has failed and will be retried.
    pub fn failed(&self, what: &str, error: &ApiError) {
        let error = hearth_api::chain(error);
        if self.complained.swap(true, Ordering::Relaxed) {
            tracing::debug!("cannot watch {what}: {error}");
        } else {
            tracing::warn!("cannot watch {what}: {error}");
        }
    }
}
