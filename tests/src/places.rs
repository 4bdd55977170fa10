//! The places for tests with machines: as many as may have some at the same time.
//!
//! The test harness starts all tests at once, and they wait here. Only one test at a time has a cluster: two would
//! overload a small host. It gets the next place before tests with one machine, because the clusters, one after the
//! other, take longest.

use std::env;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context;

/// The environment variable with the number of places; set by `cargo xtask test --jobs`.
const JOBS: &str = "HEARTH_TEST_JOBS";

/// What a test has in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// Single machines.
    Machines,
    /// A cluster.
    Cluster,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    occupant: Occupant,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    has_cluster: bool,
    /// Tests that wait for their turn to have a cluster.
    clusters_waiting: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    taken: 0,
    has_cluster: false,
    clusters_waiting: 0,
});
static CHANGED: Condvar = Condvar::new();

impl State {
    fn admits(&self, occupant: Occupant, places: usize) -> bool {
        let is_next = match occupant {
            Occupant::Cluster => !self.has_cluster,
            Occupant::Machines => self.has_cluster || self.clusters_waiting == 0,
        };
        is_next && self.taken < places
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
        let waits = usize::from(occupant == Occupant::Cluster);
        state.clusters_waiting += waits;
        while !state.admits(occupant, places) {
            state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.clusters_waiting -= waits;
        state.taken += 1;
        state.has_cluster |= occupant == Occupant::Cluster;
        // A cluster that waits holds single machines up; one that has its place does not.
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
        state.taken -= 1;
        state.has_cluster &= self.occupant != Occupant::Cluster;
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
    fn one_cluster_at_a_time_and_before_single_machines() {
        let mut state = State::default();
        let (cluster, machines) = (Occupant::Cluster, Occupant::Machines);
        assert!(state.admits(cluster, 1) && state.admits(machines, 1));
        state.clusters_waiting = 1;
        assert!(state.admits(cluster, 2) && !state.admits(machines, 2));
        // A second cluster waits, and holds nobody up.
        (state.taken, state.has_cluster) = (1, true);
        assert!(!state.admits(cluster, 2) && state.admits(machines, 2));
        state.taken = 2;
        assert!(!state.admits(machines, 2));
    }
}
