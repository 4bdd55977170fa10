//! Event values: one fact, one writer, any number of watchers.
//!
//! A value carries the newest state of a single thing ("the address of this
//! node", "the sealed configuration is open"). A watcher may skip states that
//! were overtaken before it looked, but it never misses the last one, and it
//! never sees an older state after a newer one.
//!
//! Why many small values and not one bus of messages: a message that arrives
//! before its reader is ready is lost or must be stored for it, and every
//! reader has to rebuild the present from the past. A value *is* the present,
//! so a part that restarts simply looks again. Why one fact for each value:
//! the parts that need the address do not wake when the clock is set, and
//! nobody has to fill a large structure half before it can be published.
//!
//! Invariants:
//! - There is one [`Writer`] (it cannot be cloned), so there is no question of
//!   who was last. Ownership of the writer is ownership of the fact.
//! - A value is unset until the first [`Writer::set`]; it never becomes unset
//!   again. A fact that can cease to hold is a `Value<Option<T>>`.
//! - Setting never waits, whatever the watchers do.
//! - Equal states notify as well: a watcher that cares compares.
//!
//! What is backed by another source (a key in the consensus store) is a
//! runnable that holds the [`Writer`] and feeds it; its readers hold the same
//! [`Value`] and cannot tell the difference.

use tokio::sync::watch;

/// The writer of a value is gone and there is nothing newer to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the writer of this value is gone")]
pub struct Closed;

/// Makes a value that is not set yet, and its only writer.
pub fn value<T: Clone + Send + Sync + 'static>() -> (Writer<T>, Value<T>) {
    let (sender, receiver) = watch::channel(None);
    (Writer { sender }, Value { receiver })
}

/// The one place that sets a value.
#[derive(Debug)]
pub struct Writer<T> {
    sender: watch::Sender<Option<T>>,
}

impl<T: Clone + Send + Sync + 'static> Writer<T> {
    /// Replaces the state and wakes every watcher. Never waits.
    pub fn set(&self, state: T) {
        self.sender.send_replace(Some(state));
    }

    /// A reading end of this value.
    pub fn value(&self) -> Value<T> {
        Value {
            receiver: self.sender.subscribe(),
        }
    }
}

/// The reading end of a value; cheap to clone and to keep.
#[derive(Debug)]
pub struct Value<T> {
    receiver: watch::Receiver<Option<T>>,
}

impl<T> Clone for Value<T> {
    fn clone(&self) -> Self {
        Value {
            receiver: self.receiver.clone(),
        }
    }
}

impl<T: Clone + Send + Sync + 'static> Value<T> {
    /// The state of this moment, `None` while it was never set. Works after
    /// the writer is gone, too: the last state stays.
    pub fn get(&self) -> Option<T> {
        self.receiver.borrow().clone()
    }

    /// Begins to watch; the first [`Watcher::next`] gives the present state.
    pub fn watch(&self) -> Watcher<T> {
        let mut receiver = self.receiver.clone();
        receiver.mark_changed();
        Watcher { receiver }
    }
}

/// Follows one value. Each watcher has its own position.
#[derive(Debug)]
pub struct Watcher<T> {
    receiver: watch::Receiver<Option<T>>,
}

impl<T: Clone + Send + Sync + 'static> Watcher<T> {
    /// The newest state that this watcher has not seen: at the first call the
    /// present one (waiting until it is set), later the next that differs in
    /// time from the one seen last. Safe to cancel: a state is only counted as
    /// seen when it is returned.
    pub async fn next(&mut self) -> Result<T, Closed> {
        loop {
            self.receiver.changed().await.map_err(|_| Closed)?;
            if let Some(state) = self.receiver.borrow_and_update().clone() {
                return Ok(state);
            }
        }
    }

    /// The first unseen state for which `wanted` holds.
    pub async fn wait_for(&mut self, mut wanted: impl FnMut(&T) -> bool) -> Result<T, Closed> {
        loop {
            let state = self.next().await?;
            if wanted(&state) {
                return Ok(state);
            }
        }
    }
}
