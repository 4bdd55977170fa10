//! What contexts, handles and the driver have in common: the tree, and what says that it has changed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use super::tree::{Patience, Tree};
use super::{Options, ROOT, Runnable};
use crate::event;

/// See the module.
pub(super) struct Shared {
    tree: Mutex<Tree<Runnable>>,
    /// The tree has actions, or another deadline.
    pub(super) wake: Notify,
    pub(super) revision: event::Writer<u64>,
    started: Instant,
}

impl Shared {
    pub(super) fn new(root: Runnable, options: &Options) -> Shared {
        let patience = Patience {
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

    /// The tree leaves no method half done by a panic short of a bug in it, so
    /// a poisoned lock is no reason to take everything down.
    pub(super) fn tree(&self) -> MutexGuard<'_, Tree<Runnable>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tree's clock: since the start.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Turns times of the tree's clock into those of the wall clock.
    pub(super) fn wall_clock(&self) -> impl Fn(Duration) -> SystemTime + use<> {
        let (now, wall) = (self.now(), SystemTime::now());
        move |at| wall.checked_sub(now.saturating_sub(at)).unwrap_or(wall)
    }
}
