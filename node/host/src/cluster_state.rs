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
//! The state is computed by one [`Worker`] from what others know: how far
//! enrolment is, whether curators acknowledge this node, and whether its
//! cluster has removed it ([`judge`]). Each of these is a value of its own with
//! its own writer, so nobody has to hand the state on, and a part that starts
//! again finds what it wrote.

use std::fmt;
use std::sync::Arc;

use hearth_api::v1;
use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Context, Outcome};

use crate::handover::Disowned;

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

/// How far this boot has come with its cluster: written by enrolment, forwards
/// only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnrolmentPhase {
    /// It registers, and waits for approval.
    Foreign,
    /// It is approved, and commits.
    Trusted,
    /// It has what a member has. `in_touch`: its cluster has just said so. What
    /// the disk says alone is not news.
    Member {
        /// Whether the cluster has answered in this boot.
        in_touch: bool,
    },
    /// The disk says that the cluster has removed this node.
    Disowned,
}

/// Whether curators acknowledge this node: written by who keeps the connection
/// to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connectivity {
    /// They do.
    InTouch,
    /// They have not for too long.
    Lost,
}

/// What the cluster state is, by what is known.
pub fn judge(
    phase: Option<EnrolmentPhase>,
    connectivity: Option<Connectivity>,
    disowned: Option<Disowned>,
) -> State {
    use EnrolmentPhase::{Foreign, Member, Trusted};
    match (phase, connectivity) {
        _ if disowned.is_some() => State::Disowning,
        (Some(EnrolmentPhase::Disowned), _) => State::Disowning,
        (None, _) => State::Unknown,
        (Some(Foreign), _) => State::Foreign,
        (Some(Trusted), _) => State::Trusted,
        (Some(Member { .. }), Some(Connectivity::InTouch)) => State::Home,
        (Some(Member { .. }), Some(Connectivity::Lost)) => State::Split,
        (Some(Member { in_touch: true }), None) => State::Home,
        (Some(Member { in_touch: false }), None) => State::Unknown,
    }
}

/// The states by which the node goes to `to`, which is the last of them: values
/// may be overtaken before they are seen, states are not.
fn way(from: State, to: State) -> &'static [State] {
    match (from, to) {
        (State::Unknown, State::Trusted) => &[State::Foreign, State::Trusted],
        (State::Foreign, State::Home) => &[State::Trusted, State::Home],
        (State::Foreign, State::Split) => &[State::Trusted, State::Home, State::Split],
        (State::Trusted, State::Split) => &[State::Home, State::Split],
        (State::Foreign, State::Disowning) => &[State::Trusted, State::Home, State::Disowning],
        (State::Trusted, State::Disowning) => &[State::Home, State::Disowning],
        (_, State::Unknown) => &[State::Unknown],
        (_, State::Foreign) => &[State::Foreign],
        (_, State::Trusted) => &[State::Trusted],
        (_, State::Home) => &[State::Home],
        (_, State::Split) => &[State::Split],
        (_, State::Disowning) => &[State::Disowning],
    }
}

/// Keeps the cluster state true.
#[derive(Debug)]
pub struct Worker {
    /// How far enrolment is.
    pub enrolment_phase: Value<EnrolmentPhase>,
    /// Whether curators acknowledge this node.
    pub connectivity: Value<Connectivity>,
    /// Whether its cluster has removed it while it ran.
    pub disowned: Value<Disowned>,
    /// What follows.
    pub cluster_state: Writer,
}

/// Computes the state anew at each change. Those who know may be gone, which
/// says nothing new.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let mut phases = worker.enrolment_phase.watch();
    let mut connectivities = worker.connectivity.watch();
    let mut removals = worker.disowned.watch();
    ctx.healthy();
    loop {
        let now = worker.cluster_state.get();
        let to = judge(
            worker.enrolment_phase.get(),
            worker.connectivity.get(),
            worker.disowned.get(),
        );
        // Its keys are gone, whatever anybody says later.
        if now != State::Disowning {
            for state in way(now, to) {
                worker.cluster_state.set(*state)?;
            }
        }
        tokio::select! {
            Ok(_) = phases.next() => {}
            Ok(_) = connectivities.next() => {}
            Ok(_) = removals.next() => {}
            () = ctx.cancelled() => return Ok(()),
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

    #[test]
    fn each_way_goes_along_the_table() {
        let phases = [
            None,
            Some(EnrolmentPhase::Foreign),
            Some(EnrolmentPhase::Trusted),
            Some(EnrolmentPhase::Member { in_touch: false }),
            Some(EnrolmentPhase::Member { in_touch: true }),
            Some(EnrolmentPhase::Disowned),
        ];
        let connectivities = [None, Some(Connectivity::InTouch), Some(Connectivity::Lost)];
        // Phases go forwards only, connectivity comes after membership, and who
        // is removed was a member.
        for (before, earlier) in phases.iter().enumerate() {
            for later in &phases[before..] {
                for (first, second) in connectivities
                    .iter()
                    .flat_map(|a| connectivities.iter().map(move |b| (a, b)))
                {
                    let is_member = |phase: &Option<EnrolmentPhase>| {
                        matches!(phase, Some(EnrolmentPhase::Member { .. }))
                    };
                    let first = first.filter(|_| is_member(earlier));
                    let second = second.filter(|_| is_member(later)).or(first);
                    let writer = at(judge(*earlier, first, None));
                    let to = judge(*later, second, None);
                    // Nothing that is known is ever forgotten.
                    if to == Unknown {
                        continue;
                    }
                    for state in way(writer.get(), to) {
                        writer.set(*state).unwrap();
                    }
                    assert_eq!(writer.get(), to);
                    if is_member(later) && writer.get() != Disowning && to != Unknown {
                        let removed = judge(*later, second, Some(Disowned));
                        for state in way(writer.get(), removed) {
                            writer.set(*state).unwrap();
                        }
                        assert_eq!(writer.get(), Disowning);
                    }
                }
            }
        }
    }

    #[tokio::test]
    async fn what_is_known_becomes_the_state() {
        let (cluster_state, state) = new();
        let (phase, enrolment_phase) = event::value();
        let (touch, connectivity) = event::value();
        let (removed, disowned) = event::value();
        let worker = Arc::new(Worker {
            enrolment_phase,
            connectivity,
            disowned,
            cluster_state,
        });
        let alone = hearth_base::testing::Alone::run(move |ctx| run(ctx, worker.clone()));
        let becomes = async |wanted: State| {
            let mut states = state.watch();
            let reached = states.wait_for(|now| *now == wanted);
            hearth_base::testing::soon("the state", reached)
                .await
                .unwrap();
        };
        phase.set(EnrolmentPhase::Foreign);
        becomes(Foreign).await;
        phase.set(EnrolmentPhase::Trusted);
        becomes(Trusted).await;
        phase.set(EnrolmentPhase::Member { in_touch: true });
        becomes(Home).await;
        touch.set(Connectivity::Lost);
        becomes(Split).await;
        touch.set(Connectivity::InTouch);
        becomes(Home).await;
        // Enrolment has no more to say.
        drop(phase);
        removed.set(Disowned);
        becomes(Disowning).await;
        touch.set(Connectivity::InTouch);
        alone.is_fine();
        alone.stop().await;
        assert_eq!(state.get(), Disowning);
    }
}
