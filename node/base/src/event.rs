//! Event values: one fact, one writer, any number of watchers.
//!
//! A value carries the latest state of one fact ("the address of this node", "the sealed
//! configuration is open"). A watcher may skip intermediate states, but it always gets the last
//! one, and it never sees an older state after a newer one.
//!
//! Why many small values and not one message bus: a message that arrives before its reader is ready
//! is lost unless something stores it, and every reader has to reconstruct the current state from
//! past messages. A value *is* the current state, so a part that restarts reads it again. Why one
//! fact per value: parts that need the address do not wake when the clock is set, and no large
//! structure has to be filled in before it can be published.
//!
//! Invariants:
//! - There is one [`Writer`] (it cannot be cloned), so writers cannot conflict. Whoever owns the
//!   writer owns the fact.
//! - A value is unset until the first [`Writer::set`] and never becomes unset again. A fact that
//!   can cease to hold is a `Value<Option<T>>`.
//! - Setting never blocks, whatever the watchers do.
//! - Setting an equal state notifies as well; a watcher that cares compares.
//!
//! A fact that comes from another source (a key in etcd) is set by a runnable that holds the
//! [`Writer`]; readers hold the same [`Value`] and need not know.

use tokio::sync::watch;

/// Returned by a [`Watcher`] when the writer was dropped and there is no newer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the value is closed: its writer was dropped")]
pub struct Closed;

/// Makes an unset value and its only writer.
pub fn value<T: Clone + Send + Sync + 'static>() -> (Writer<T>, Value<T>) {
    let (sender, receiver) = watch::channel(None);
    (Writer { sender }, Value { receiver })
}

/// The writing end of a value; the only place that sets it.
#[derive(Debug)]
pub struct Writer<T> {
    sender: watch::Sender<Option<T>>,
}

impl<T: Clone + Send + Sync + 'static> Writer<T> {
    /// Replaces the state and wakes every watcher. Never blocks.
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
    /// The current state, `None` if it was never set. The last state remains readable after the
    /// writer was dropped.
    pub fn get(&self) -> Option<T> {
        self.receiver.borrow().clone()
    }

    /// Starts watching; the first [`Watcher::next`] returns the current state.
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
    /// The latest state that this watcher has not seen: the first call returns the current state
    /// (and waits until there is one), later calls the next that is set. Cancel safe: a state
    /// counts as seen only when it is returned.
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

impl<T: Clone + Send + Sync + 'static> Watcher<Option<T>> {
    /// The first unseen state that is `Some`.
    pub async fn some(&mut self) -> Result<T, Closed> {
        loop {
            if let Some(state) = self.next().await? {
                return Ok(state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn block_on<F: Future>(future: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        let bounded = async { timeout(SOON, future).await.expect("timed out") };
        runtime.expect("a runtime").block_on(bounded)
    }

    /// Whether a future is pending.
    fn pends<F: Future>(future: F) -> bool {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(future).poll(&mut context).is_pending()
    }

    #[test]
    fn waits_until_set_and_then_only_for_news() {
        let (writer, value) = value();
        let mut watcher = value.watch();
        assert_eq!(value.get(), None);
        assert!(pends(watcher.next()));
        writer.set(1);
        assert_eq!(value.get(), Some(1));
        assert_eq!(block_on(watcher.next()), Ok(1));
        assert!(pends(watcher.next()));
        writer.set(1);
        assert_eq!(block_on(watcher.next()), Ok(1), "equal states notify, too");
    }

    #[test]
    fn late_watchers_begin_with_the_present() {
        let (writer, value) = value();
        writer.set("old");
        writer.set("new");
        assert_eq!(block_on(value.watch().next()), Ok("new"));
        assert_eq!(block_on(writer.value().watch().next()), Ok("new"));
    }

    #[test]
    fn the_last_state_outlives_the_writer() {
        let (writer, value) = value();
        let mut early = value.watch();
        writer.set(7);
        drop(writer);
        assert_eq!(block_on(early.next()), Ok(7));
        assert_eq!(block_on(early.next()), Err(Closed));
        assert_eq!(value.get(), Some(7));
        let mut late = value.watch();
        assert_eq!(block_on(late.next()), Ok(7));
        assert_eq!(block_on(late.next()), Err(Closed));
    }

    #[test]
    fn never_set_and_never_will_be() {
        let (writer, value) = value::<u8>();
        drop(writer);
        assert_eq!(block_on(value.watch().next()), Err(Closed));
    }

    #[test]
    fn waits_for_a_condition() {
        let (writer, value) = value();
        let mut watcher = value.watch();
        writer.set(1);
        assert!(pends(watcher.wait_for(|n| *n >= 3)));
        writer.set(3);
        assert_eq!(block_on(watcher.wait_for(|n| *n >= 3)), Ok(3));
        drop(writer);
        assert_eq!(block_on(watcher.wait_for(|n| *n >= 4)), Err(Closed));
    }

    #[test]
    fn waits_for_a_fact_that_can_cease_to_hold() {
        let (writer, value) = value();
        let mut watcher = value.watch();
        writer.set(None);
        assert!(pends(watcher.some()));
        writer.set(Some(1));
        assert_eq!(block_on(watcher.some()), Ok(1));
        writer.set(None);
        assert!(pends(watcher.some()));
        drop(writer);
        assert_eq!(block_on(watcher.some()), Err(Closed));
    }

    /// One writing thread and several watching threads: each watcher sees increasing states and
    /// ends with the last one.
    #[test]
    fn watchers_on_other_threads_see_the_last_state() {
        const LAST: u32 = 20_000;
        let (writer, value) = value();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let mut watcher = value.watch();
                scope.spawn(move || {
                    block_on(async {
                        let mut before = None;
                        while let Ok(state) = watcher.next().await {
                            assert!(before < Some(state), "{before:?} then {state}");
                            before = Some(state);
                        }
                        assert_eq!(before, Some(LAST));
                    });
                });
            }
            (0..=LAST).for_each(|state| writer.set(state));
            drop(writer);
        });
    }

    #[derive(Debug, Clone)]
    enum Step {
        Set,
        Watch,
        /// Index of the watcher that reads (modulo their number).
        Look(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Set),
            1 => Just(Step::Watch),
            4 => any::<usize>().prop_map(Step::Look),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// In any order of steps: reading returns the latest state if it is unseen, and waits if it
        /// was seen; at the end every watcher has the last one.
        #[test]
        fn latest_wins_and_the_last_is_never_missed(steps in prop::collection::vec(step(), 0..40)) {
            let (writer, value) = value();
            let mut newest = None;
            let mut watchers = vec![(value.watch(), None)];
            for step in steps {
                match step {
                    Step::Set => {
                        newest = Some(newest.map_or(0, |n| n + 1));
                        writer.set(newest.expect("just set"));
                    }
                    Step::Watch => watchers.push((value.watch(), None)),
                    Step::Look(which) => {
                        let which = which % watchers.len();
                        let (watcher, seen) = &mut watchers[which];
                        if newest == *seen {
                            prop_assert!(pends(watcher.next()));
                        } else {
                            *seen = Some(block_on(watcher.next()).expect("open"));
                            prop_assert_eq!(*seen, newest);
                        }
                    }
                }
                prop_assert_eq!(value.get(), newest);
            }
            drop(writer);
            for (mut watcher, seen) in watchers {
                if newest != seen {
                    prop_assert_eq!(block_on(watcher.next()).ok(), newest);
                }
                prop_assert_eq!(block_on(watcher.next()), Err(Closed));
            }
        }
    }
}
