//! The cluster as this node sees it: one live value, and who may write it.
//!
//! The value changes only along the arrows of this table. Any other change is
//! a bug in the writer: it is refused with a typed error, the value stays, and
//! the runnable that tried fails, visibly.
//!
//! | from | to |
//! |---|---|
//! | UNKNOWN | FOREIGN, HOME, SPLIT, DISOWNING |
//! | FOREIGN | TRUSTED |
//! | TRUSTED | HOME |
//! | HOME | SPLIT, DISOWNING |
//! | SPLIT | HOME, DISOWNING |
//! | DISOWNING | nothing, for ever |
//!
//! There is one [`Writer`], and it is handed on: enrolment holds it until the
//! node has its credentials, the membership worker from then on. A runnable
//! that restarts would drop what it holds, so between its runs the writer lies
//! on a [`Desk`]: each of the two has its own, a runnable borrows the writer
//! from its desk, and handing over means to lay it on the other's.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hearth_api::v1;
use hearth_base::event;
use tokio::sync::Notify;

/// What a node may think of its cluster. The first of all is UNKNOWN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Not in touch, and nothing known.
    Unknown,
    /// In touch, not yet accepted.
    Foreign,
    /// Approved, committing.
    Trusted,
    /// A member.
    Home,
    /// Removed: keys are wiped, never again part of it.
    Disowning,
    /// Would be home, but consensus is out of reach.
    Split,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Unknown,
        Self::Foreign,
        Self::Trusted,
        Self::Home,
        Self::Disowning,
        Self::Split,
    ];

    /// Whether the node may change from this state to `next`.
    pub fn may_become(self, next: Self) -> bool {
        use State::{Disowning, Foreign, Home, Split, Trusted, Unknown};
        matches!(
            (self, next),
            (Unknown, Foreign | Home | Split | Disowning)
                | (Foreign, Trusted)
                | (Trusted, Home)
                | (Home, Split | Disowning)
                | (Split, Home | Disowning)
        )
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "UNKNOWN",
            Self::Foreign => "FOREIGN",
            Self::Trusted => "TRUSTED",
            Self::Home => "HOME",
            Self::Disowning => "DISOWNING",
            Self::Split => "SPLIT",
        })
    }
}

impl From<State> for v1::ClusterState {
    fn from(state: State) -> Self {
        match state {
            State::Unknown => Self::Unknown,
            State::Foreign => Self::Foreign,
            State::Trusted => Self::Trusted,
            State::Home => Self::Home,
            State::Disowning => Self::Disowning,
            State::Split => Self::Split,
        }
    }
}

/// A change that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster state cannot change from {from} to {to}: this is a bug")]
pub struct ForbiddenChange {
    /// What it is, and stays.
    pub from: State,
    /// What was asked for.
    pub to: State,
}

/// Why [`ClusterState::get_home`] gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotHome {
    /// The node was removed from its cluster.
    #[error("the cluster has removed this node")]
    Disowned,
    /// Nobody will ever write the state again.
    #[error("the cluster state has no writer any more")]
    Closed,
}

/// Makes the value, in state UNKNOWN, and its writer.
pub fn new() -> (Writer, ClusterState) {
    let (writer, value) = event::value();
    writer.set(State::Unknown);
    (Writer(writer), ClusterState(value))
}

/// The one place that changes the state.
#[derive(Debug)]
pub struct Writer(event::Writer<State>);

impl Writer {
    /// The state now.
    pub fn get(&self) -> State {
        self.0.value().get().unwrap_or(State::Unknown)
    }

    /// Changes the state and tells whether it was another one before. What it
    /// is already it may be told to become, without anyone noticing.
    pub fn set(&self, to: State) -> Result<bool, ForbiddenChange> {
        let from = self.get();
        if from == to {
            return Ok(false);
        }
        if !from.may_become(to) {
            return Err(ForbiddenChange { from, to });
        }
        tracing::info!("cluster state {from} → {to}");
        self.0.set(to);
        Ok(true)
    }

    /// A reading end.
    pub fn value(&self) -> ClusterState {
        ClusterState(self.0.value())
    }
}

/// The state, for everyone to read.
#[derive(Clone, Debug)]
pub struct ClusterState(event::Value<State>);

impl ClusterState {
    /// The state now.
    pub fn get(&self) -> State {
        self.0.get().unwrap_or(State::Unknown)
    }

    /// Follows it.
    pub fn watch(&self) -> event::Watcher<State> {
        self.0.watch()
    }

    /// Waits until the node is a member of its cluster; fails when it never
    /// will be.
    pub async fn get_home(&self) -> Result<(), NotHome> {
        let settled = |state: &State| matches!(state, State::Home | State::Disowning);
        match self.watch().wait_for(settled).await {
            Ok(State::Disowning) => Err(NotHome::Disowned),
            Ok(_) => Ok(()),
            Err(event::Closed) => Err(NotHome::Closed),
        }
    }
}

/// Where the writer lies while nobody holds it. A cheap handle.
#[derive(Clone, Debug)]
pub struct Desk(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    writer: Mutex<Option<Writer>>,
    laid: Notify,
}

impl Desk {
    /// A desk with the writer on it.
    pub fn with(writer: Writer) -> Self {
        let desk = Self::empty();
        desk.lay(writer);
        desk
    }

    /// A desk that will be handed the writer later.
    pub fn empty() -> Self {
        Self(Arc::new(Slot {
            writer: Mutex::new(None),
            laid: Notify::new(),
        }))
    }

    /// Takes the writer, waiting until it lies here. Has one caller at a time.
    pub async fn take(&self) -> Held {
        loop {
            if let Some(held) = self.try_take() {
                return held;
            }
            // `notify_one` keeps a permit if it comes before this line.
            self.0.laid.notified().await;
        }
    }

    /// Takes the writer if it lies here.
    pub fn try_take(&self) -> Option<Held> {
        self.content().take().map(|writer| Held {
            writer: Some(writer),
            desk: self.clone(),
        })
    }

    fn lay(&self, writer: Writer) {
        *self.content() = Some(writer);
        self.0.laid.notify_one();
    }

    fn content(&self) -> MutexGuard<'_, Option<Writer>> {
        // The content is one whole value at any time, a panic elsewhere or not.
        self.0.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writer, borrowed: when this is dropped, it lies on its desk again.
#[derive(Debug)]
pub struct Held {
    writer: Option<Writer>,
    desk: Desk,
}

impl Held {
    /// Hands the writer over for good.
    pub fn hand_over(mut self, to: &Desk) {
        self.desk = to.clone();
    }
}

impl Deref for Held {
    type Target = Writer;

    fn deref(&self) -> &Writer {
        // Only `drop` takes it out.
        self.writer.as_ref().expect("held until dropped")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.desk.lay(writer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use State::{Disowning, Foreign, Home, Split, Trusted, Unknown};

    /// Brings a fresh value to `state` by allowed changes.
    fn at(state: State) -> Writer {
        let (writer, _) = new();
        let way: &[State] = match state {
            Unknown => &[],
            Foreign => &[Foreign],
            Trusted => &[Foreign, Trusted],
            Home => &[Home],
            Disowning => &[Disowning],
            Split => &[Split],
        };
        for step in way {
            writer.set(*step).unwrap();
        }
        writer
    }

    #[test]
    fn exactly_the_changes_of_the_table_happen() {
        let allowed = [
            (Unknown, Foreign),
            (Unknown, Home),
            (Unknown, Split),
            (Unknown, Disowning),
            (Foreign, Trusted),
            (Trusted, Home),
            (Home, Split),
            (Split, Home),
            (Home, Disowning),
            (Split, Disowning),
        ];
        for from in State::ALL {
            for to in State::ALL {
                let writer = at(from);
                let result = writer.set(to);
                if from == to {
                    assert_eq!(result, Ok(false));
                } else if allowed.contains(&(from, to)) {
                    assert_eq!(result, Ok(true), "{from} → {to}");
                    assert_eq!(writer.get(), to);
                } else {
                    assert_eq!(result, Err(ForbiddenChange { from, to }));
                    assert_eq!(writer.get(), from);
                }
            }
        }
    }

    #[tokio::test]
    async fn get_home_waits_for_home() {
        let (writer, state) = new();
        let waiting = tokio::spawn(async move { state.get_home().await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        writer.set(Split).unwrap();
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        writer.set(Home).unwrap();
        assert_eq!(waiting.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn get_home_fails_when_there_is_none_left() {
        let (writer, state) = new();
        writer.set(Disowning).unwrap();
        assert_eq!(state.get_home().await, Err(NotHome::Disowned));

        let (writer, state) = new();
        drop(writer);
        assert_eq!(state.get_home().await, Err(NotHome::Closed));
    }

    #[tokio::test]
    async fn the_writer_survives_its_holder_and_is_handed_over_once() {
        let (writer, state) = new();
        let (enrolment, membership) = (Desk::with(writer), Desk::empty());

        let held = enrolment.take().await;
        held.set(Home).unwrap();
        assert!(enrolment.try_take().is_none(), "there is only one");
        drop(held);

        let waiting = tokio::spawn({
            let membership = membership.clone();
            async move { membership.take().await.set(Split) }
        });
        tokio::task::yield_now().await;
        enrolment.take().await.hand_over(&membership);
        assert_eq!(waiting.await.unwrap(), Ok(true));
        assert!(enrolment.try_take().is_none());
        assert_eq!(state.get(), Split);
        // A holder that panics puts it back as well.
        let panics = tokio::spawn({
            let membership = membership.clone();
            async move {
                let _held = membership.take().await;
                panic!("a bug");
            }
        });
        assert!(panics.await.is_err());
        assert!(membership.try_take().is_some());
    }
}
