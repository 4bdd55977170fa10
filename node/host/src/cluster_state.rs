//! The cluster state as this node sees it: one value with one writer.
//!
//! The value changes only according to this table. Any other change is a bug in the writer: it is
//! rejected with a typed error, the value does not change, and the runnable that tried it fails.
//!
//! | from | to |
//! |---|---|
//! | UNKNOWN | FOREIGN, HOME, SPLIT, DISOWNING |
//! | FOREIGN | TRUSTED |
//! | TRUSTED | HOME |
//! | HOME | SPLIT, DISOWNING |
//! | SPLIT | HOME, DISOWNING |
//! | DISOWNING | none: it is final |
//!
//! One [`Worker`] computes the state from four inputs: the phase of enrolment, whether curators
//! acknowledge this node, whether the cluster has removed it ([`judge`]), and whether the node has an
//! address: without one it is not HOME, even if it is a cluster of one. Each input is a value
//! with its own writer, so no part has to pass the state on, and a part that restarts still finds
//! what it wrote.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::v1;
use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Context, Outcome};

use crate::handover::Disowned;

/// The cluster state of a node. The initial state is UNKNOWN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// No contact with the cluster, and nothing known.
    Unknown,
    /// In contact with the cluster, not yet accepted.
    Foreign,
    /// Approved, committing.
    Trusted,
    /// A member of the cluster.
    Home,
    /// Removed: the keys are wiped, and the node never becomes a member again.
    Disowning,
    /// A member, but without contact to the curators.
    Split,
}

impl State {
    /// All states.
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

/// A change of state that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("internal error: the cluster state cannot change from {from} to {to}")]
pub struct ForbiddenChange {
    /// The current state, which does not change.
    pub from: State,
    /// The requested state.
    pub to: State,
}

/// Why [`ClusterState::get_home`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotHome {
    /// The node was removed from its cluster.
    #[error("the cluster has removed this node")]
    Disowned,
    /// The writer was dropped, so the state will not change again.
    #[error("the cluster state no longer has a writer")]
    Closed,
}

/// Creates the value, in state UNKNOWN, and its writer.
pub fn new() -> (Writer, ClusterState) {
    let (writer, value) = event::value();
    writer.set(State::Unknown);
    (Writer(writer), ClusterState(value))
}

/// The only writer of the state.
#[derive(Debug)]
pub struct Writer(event::Writer<State>);

impl Writer {
    /// The current state.
    pub fn get(&self) -> State {
        self.0.value().get().unwrap_or(State::Unknown)
    }

    /// Changes the state and returns whether it differed before. Setting the current state again
    /// does nothing and notifies no reader.
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

    /// A read-only handle.
    pub fn value(&self) -> ClusterState {
        ClusterState(self.0.value())
    }
}

/// Read-only handle of the state.
#[derive(Clone, Debug)]
pub struct ClusterState(event::Value<State>);

impl ClusterState {
    /// The current state.
    pub fn get(&self) -> State {
        self.0.get().unwrap_or(State::Unknown)
    }

    /// Watches the state.
    pub fn watch(&self) -> event::Watcher<State> {
        self.0.watch()
    }

    /// Waits until the node is a member of its cluster; fails if it never will be.
    pub async fn get_home(&self) -> Result<(), NotHome> {
        let settled = |state: &State| matches!(state, State::Home | State::Disowning);
        match self.watch().wait_for(settled).await {
            Ok(State::Disowning) => Err(NotHome::Disowned),
            Ok(_) => Ok(()),
            Err(event::Closed) => Err(NotHome::Closed),
        }
    }
}

/// The phase of enrolment in this boot: written by enrolment, never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnrolmentPhase {
    /// The node registers and waits for approval.
    Foreign,
    /// The node is approved and commits.
    Trusted,
    /// The node has the credentials of a member; `in_touch` says whether the cluster has confirmed
    /// it, or only the disk says so.
    Member {
        /// Whether the cluster has confirmed it in this boot.
        in_touch: bool,
    },
    /// According to the disk, the cluster has removed this node.
    Disowned,
}

/// Whether curators acknowledge this node: written by the worker that keeps the connection to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connectivity {
    /// Curators acknowledge heartbeats.
    InTouch,
    /// No curator has acknowledged a heartbeat for too long.
    Lost,
}

/// Computes the cluster state from its inputs.
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

/// The states that lead from `from` to `to`, `to` included: an input value may change again before
/// it is read, but no state may be skipped.
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

/// The worker that computes the cluster state.
#[derive(Debug)]
pub struct Worker {
    /// The phase of enrolment.
    pub enrolment_phase: Value<EnrolmentPhase>,
    /// Whether curators acknowledge this node.
    pub connectivity: Value<Connectivity>,
    /// Whether the cluster has removed this node while it ran.
    pub disowned: Value<Disowned>,
    /// At which other nodes reach this one.
    pub address: Value<IpAddr>,
    /// The resulting state.
    pub cluster_state: Writer,
}

/// Recomputes the state whenever an input changes. The writer of an input may be gone; its last
/// value remains valid.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let mut phases = worker.enrolment_phase.watch();
    let mut connectivities = worker.connectivity.watch();
    let mut removals = worker.disowned.watch();
    let mut addresses = worker.address.watch();
    ctx.healthy();
    loop {
        let now = worker.cluster_state.get();
        let to = judge(
            worker.enrolment_phase.get(),
            worker.connectivity.get(),
            worker.disowned.get(),
        );
        let is_reachable = to != State::Home || worker.address.get().is_some();
        // DISOWNING is final: the keys are wiped.
        if now != State::Disowning && is_reachable {
            for state in way(now, to) {
                worker.cluster_state.set(*state)?;
            }
        }
        tokio::select! {
            Ok(_) = phases.next() => {}
            Ok(_) = connectivities.next() => {}
            Ok(_) = removals.next() => {}
            Ok(_) = addresses.next() => {}
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use State::{Disowning, Foreign, Home, Split, Trusted, Unknown};

    use super::*;

    /// A new value, brought to `state` by allowed changes.
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
        // Phases never go back, connectivity is known only for members, and only members are
        // removed.
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
                    // The state never returns to UNKNOWN.
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
        let (address_writer, address) = event::value();
        let worker = Arc::new(Worker {
            enrolment_phase,
            connectivity,
            disowned,
            address,
            cluster_state,
        });
        let alone = hearth_base::testing::TestSupervisor::run(move |ctx| run(ctx, worker.clone()));
        let becomes = async |wanted: State| {
            let mut states = state.watch();
            let reached = states.wait_for(|now| *now == wanted);
            hearth_base::testing::within_timeout("the state", reached)
                .await
                .unwrap();
        };
        phase.set(EnrolmentPhase::Foreign);
        becomes(Foreign).await;
        phase.set(EnrolmentPhase::Trusted);
        becomes(Trusted).await;
        phase.set(EnrolmentPhase::Member { in_touch: true });
        // A cluster of one needs no network to be in touch with itself, but nobody else could reach it.
        let mut states = state.watch();
        let home = states.wait_for(|now| *now == Home);
        hearth_base::testing::assert_never("HOME without an address", home).await;
        address_writer.set(IpAddr::from([192, 0, 2, 1]));
        becomes(Home).await;
        touch.set(Connectivity::Lost);
        becomes(Split).await;
        touch.set(Connectivity::InTouch);
        becomes(Home).await;
        // Enrolment has ended.
        drop(phase);
        removed.set(Disowned);
        becomes(Disowning).await;
        touch.set(Connectivity::InTouch);
        alone.is_fine();
        alone.stop().await;
        assert_eq!(state.get(), Disowning);
    }
}
