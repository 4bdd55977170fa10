//! Limits of rates: so many at once, and one more after each interval.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_api::identity::NodeId;
use tokio::time::Instant;
use tonic::Status;

/// Nodes whose state is kept before those are forgotten that have a full budget again.
const FORGET_BEYOND: usize = 1024;
/// Minimum interval of log messages about one node.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// A rate.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// How many are permitted at once. At least one.
    pub burst: u32,
    /// The interval after which one more is permitted. Zero: no limit.
    pub every: Duration,
}

/// What has been taken: the time at which all of it is permitted again.
#[derive(Clone, Copy)]
struct Level(Instant);

impl Level {
    fn take(&mut self, rate: Rate, now: Instant) -> Result<(), Duration> {
        let begin = self.0.max(now);
        let most = now + rate.every * rate.burst.saturating_sub(1);
        if begin > most {
            return Err(begin - most);
        }
        self.0 = begin + rate.every;
        Ok(())
    }
}

/// A rate of events of any origin.
pub struct Bucket {
    rate: Rate,
    level: Mutex<Level>,
}

impl Bucket {
    /// A full budget.
    pub fn new(rate: Rate) -> Self {
        Self {
            rate,
            level: Mutex::new(Level(Instant::now())),
        }
    }

    /// Counts one event; returns whether it is permitted.
    pub fn take(&self) -> bool {
        lock(&self.level).take(self.rate, Instant::now()).is_ok()
    }
}

/// The same rate for each node.
pub(super) struct NodeRates {
    what: &'static str,
    rate: Rate,
    nodes: Mutex<HashMap<NodeId, NodeLevel>>,
}

struct NodeLevel {
    level: Level,
    /// Refused since the last message about it.
    refused: u64,
    told: Option<Instant>,
}

impl NodeRates {
    pub(super) fn new(what: &'static str, rate: Rate) -> Self {
        Self {
            what,
            rate,
            nodes: Mutex::default(),
        }
    }

    /// Takes one from the node's budget; or returns the time until there is one.
    pub(super) fn take(&self, node: NodeId) -> Result<(), Duration> {
        let now = Instant::now();
        let mut nodes = lock(&self.nodes);
        if nodes.len() >= FORGET_BEYOND {
            nodes.retain(|_, known| known.level.0 > now);
        }
        let known = nodes.entry(node).or_insert_with(|| NodeLevel {
            level: Level(now),
            refused: 0,
            told: None,
        });
        let taken = known.level.take(self.rate, now);
        if taken.is_err() {
            known.refused += 1;
            if known.told.is_none_or(|told| now >= told + TELL_EVERY) {
                known.told = Some(now);
                let refused = std::mem::take(&mut known.refused);
                tracing::warn!(%node, refused, "a node is beyond its budget of {}", self.what);
            }
        }
        taken
    }

    /// The same, as the answer to a call.
    pub(super) fn take_or_refuse(&self, node: NodeId) -> Result<(), Status> {
        self.take(node).map_err(|wait| {
            Status::resource_exhausted(format!(
                "this node is beyond its budget of {}: retry in {} s",
                self.what,
                wait.as_secs() + 1
            ))
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds the lock panics halfway through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const RATE: Rate = Rate {
        burst: 3,
        every: SECOND,
    };

    #[tokio::test(start_paused = true)]
    async fn a_bucket_fills_again() {
        let bucket = Bucket::new(RATE);
        let takes = |n: u32| (0..n).filter(|_| bucket.take()).count();
        assert_eq!(takes(10), 3);
        tokio::time::advance(SECOND / 2).await;
        assert_eq!(takes(10), 0);
        // Half seconds add up.
        tokio::time::advance(SECOND / 2).await;
        assert_eq!(takes(10), 1);
        tokio::time::advance(SECOND * 2).await;
        assert_eq!(takes(10), 2);
        tokio::time::advance(SECOND * 1000).await;
        assert_eq!(takes(10), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn each_node_has_a_budget_of_its_own() {
        let rates = NodeRates::new("tests", RATE);
        let id = |number: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            NodeId::from_bytes(bytes)
        };
        let takes = |node: u32| (0..10).filter(|_| rates.take(id(node)).is_ok()).count();
        assert_eq!((takes(1), takes(1), takes(2)), (3, 0, 3));
        assert_eq!(rates.take(id(1)), Err(SECOND));
        let refused = rates.take_or_refuse(id(1)).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        // What is full again is forgotten, and nothing else.
        for node in 10..10 + FORGET_BEYOND as u32 {
            assert_eq!(rates.take(id(node)), Ok(()));
        }
        assert_eq!(takes(1), 0);
        tokio::time::advance(SECOND * 4).await;
        assert_eq!(takes(1), 3);
        assert_eq!(lock(&rates.nodes).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn no_interval_is_no_limit() {
        let bucket = Bucket::new(Rate {
            burst: 1,
            every: Duration::ZERO,
        });
        assert!((0..1000).all(|_| bucket.take()));
    }
}
