//! The places for tests with machines: as many as may have some at the same time.
//!
//! The test harness starts all tests at once, and they wait here, the first ones until the others have come
//! ([`ALL_HAVE_COME`]). A test with a cluster gets the next place before tests with one machine, because the clusters
//! take longest; but only one cluster runs at a time where there are few places, because its machines keep a small host
//! busy by themselves. With Kubernetes even one machine does: such a test goes first, and alone. Beside others it takes
//! four times as long, and so do they.

use std::env;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

/// The environment variable with the number of places; set by `cargo xtask test --jobs`.
const JOBS: &str = "HEARTH_TEST_JOBS";

/// Where there are more places, the host has enough CPUs for several clusters, or for Kubernetes and other tests.
const FEW: usize = 2;
/// From the first test that waits until places are given away: the harness takes some milliseconds to start all tests,
/// and does not tell how many there are. If one comes later, only the order of the tests is another one.
const ALL_HAVE_COME: Duration = Duration::from_secs(1);

/// What a test has in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// Single machines.
    Machines,
    /// A cluster.
    Cluster,
    /// A cluster that runs Kubernetes.
    Kubernetes,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    occupant: Occupant,
    since: Instant,
}

/// Numbers of tests.
#[derive(Debug, Default)]
struct State {
    machines: usize,
    clusters: usize,
    kubernetes: usize,
    machines_waiting: usize,
    clusters_waiting: usize,
    kubernetes_waiting: usize,
    /// When places are given away.
    opens: Option<Instant>,
}

static STATE: Mutex<State> = Mutex::new(State {
    machines: 0,
    clusters: 0,
    kubernetes: 0,
    machines_waiting: 0,
    clusters_waiting: 0,
    kubernetes_waiting: 0,
    opens: None,
});
static CHANGED: Condvar = Condvar::new();

impl State {
    fn admits(&self, occupant: Occupant, places: usize) -> bool {
        let others = self.machines + self.clusters;
        let few = places <= FEW;
        let is_next = match occupant {
            Occupant::Kubernetes => !few || others == 0,
            _ if few && self.kubernetes + self.kubernetes_waiting > 0 => false,
            Occupant::Cluster => self.clusters == 0 || !few && self.machines_waiting == 0,
            Occupant::Machines => self.clusters > 0 || self.clusters_waiting == 0,
        };
        let places = match occupant {
            Occupant::Kubernetes if few => 1,
            _ => places,
        };
        is_next && others + self.kubernetes < places
    }

    fn waiting(&mut self, occupant: Occupant) -> &mut usize {
        match occupant {
            Occupant::Machines => &mut self.machines_waiting,
            Occupant::Cluster => &mut self.clusters_waiting,
            Occupant::Kubernetes => &mut self.kubernetes_waiting,
        }
    }

    fn admitted(&mut self, occupant: Occupant) -> &mut usize {
        match occupant {
            Occupant::Machines => &mut self.machines,
            Occupant::Cluster => &mut self.clusters,
            Occupant::Kubernetes => &mut self.kubernetes,
        }
    }
}

impl Place {
    /// Waits for a place. Blocks the thread: a test has one of its own, and nothing else to do yet.
    ///
    /// # Errors
    /// If the number of places is invalid.
    pub(crate) fn wait(occupant: Occupant) -> anyhow::Result<Self> {
        let places = places()?;
        let mut state = lock();
        *state.waiting(occupant) += 1;
        let opens = *state
            .opens
            .get_or_insert_with(|| Instant::now() + ALL_HAVE_COME);
        loop {
            let early = opens.saturating_duration_since(Instant::now());
            state = match (early.is_zero(), state.admits(occupant, places)) {
                (true, true) => break,
                (true, false) => CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner),
                (false, _) => {
                    let waited = CHANGED.wait_timeout(state, early);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        *state.waiting(occupant) -= 1;
        *state.admitted(occupant) += 1;
        // Each kind that waits holds the other up.
        CHANGED.notify_all();
        let since = Instant::now();
        Ok(Self { occupant, since })
    }

    pub(crate) fn occupant(&self) -> Occupant {
        self.occupant
    }

    /// When the test got it.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = lock();
        *state.admitted(self.occupant) -= 1;
        CHANGED.notify_all();
    }
}

/// Consistent after a panic: no code that holds the lock can panic.
fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn places() -> anyhow::Result<usize> {
    match env::var(JOBS) {
        Ok(jobs) => {
            let number = jobs.parse().ok().filter(|number| *number > 0);
            number.with_context(|| format!("{JOBS}: expected a number from 1, got {jobs:?}"))
        }
        Err(_) => Ok(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_goes_first_and_alone_where_places_are_few() {
        use Occupant::{Cluster, Kubernetes, Machines};
        let mut state = State {
            machines: 1,
            kubernetes_waiting: 1,
            ..State::default()
        };
        assert!(!state.admits(Kubernetes, 2));
        assert!(!state.admits(Machines, 2) && !state.admits(Cluster, 2));
        assert!(state.admits(Kubernetes, 4) && state.admits(Cluster, 4));
        state.machines = 0;
        assert!(state.admits(Kubernetes, 1) && state.admits(Kubernetes, 2));
        (state.kubernetes, state.kubernetes_waiting) = (1, 0);
        assert!(!state.admits(Kubernetes, 2));
        assert!(!state.admits(Machines, 2) && !state.admits(Cluster, 2));
        assert!(state.admits(Kubernetes, 4) && state.admits(Cluster, 4));
    }

    #[test]
    fn clusters_go_first_and_one_runs_beside_single_machines() {
        let mut state = State::default();
        let (cluster, machines) = (Occupant::Cluster, Occupant::Machines);
        assert!(state.admits(cluster, 1) && state.admits(machines, 1));
        state.clusters_waiting = 1;
        assert!(state.admits(cluster, 2) && !state.admits(machines, 2));
        // A second cluster waits for the first one, or where there are places until no single machine waits, and holds
        // nobody up.
        (state.clusters, state.machines_waiting) = (1, 1);
        assert!(!state.admits(cluster, 4) && state.admits(machines, 2));
        state.machines_waiting = 0;
        assert!(!state.admits(cluster, 2) && state.admits(cluster, 4));
        state.machines = 1;
        assert!(!state.admits(cluster, 2) && !state.admits(machines, 2));
    }
}
