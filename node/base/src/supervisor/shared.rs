//! State shared by contexts, handles and the driver: the tree, and the notification of its changes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use super::tree::{StopTimeouts, Tree};
use super::{Options, ROOT, Runnable};
use crate::event;

/// The tree behind its mutex, with its clock.
pub(super) struct Shared {
    tree: Mutex<Tree<Runnable>>,
    /// Notified when the tree has actions, or another deadline.
    pub(super) wake: Notify,
    pub(super) revision: event::Writer<u64>,
    started: Instant,
}

impl Shared {
    pub(super) fn new(root: Runnable, options: &Options) -> Shared {
        let patience = StopTimeouts {
            warning: options.stop_warning,
            bound: options.stop_bound,
        };
        Shared {
            tree: Mutex::new(Tree::new(ROOT, root, options.backoff.clone(), patience)),
            wake: Notify::new(),
            revision: event::value().0,
            started: Instant::now(),
        }
    }

    /// Short of a bug in the tree, no panic leaves a method half done, so a poisoned lock is not a
    /// reason to stop everything.
    pub(super) fn tree(&self) -> MutexGuard<'_, Tree<Runnable>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tree's clock: time since the start.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Converts times of the tree's clock to wall-clock times.
    #[expect(clippy::disallowed_methods, reason = "for time stamps of the log only")]
    pub(super) fn wall_clock(&self) -> impl Fn(Duration) -> SystemTime + use<> {
        let (now, wall) = (self.now(), SystemTime::now());
        move |at| wall.checked_sub(now.saturating_sub(at)).unwrap_or(wall)
    }
}
