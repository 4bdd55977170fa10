//! Budgets: what a single node may cost all others.
//!
//! A node with valid credentials may be in the wrong hands, or have a fault. Every write of a node
//! goes through consensus, and is told to all subscribers; every stream takes memory. So each node
//! has a budget of its own, which is far more than a node in order needs:
//!
//! | what | budget of a node | beyond it |
//! |---|---|---|
//! | status reports that are written | [`Limits::status`] | the report waits, and a newer one takes its place |
//! | liveness records: another boot, another curator | [`Limits::liveness`] | ResourceExhausted |
//! | keys of the pod network | [`Limits::mesh_keys`] | ResourceExhausted |
//! | calls of JoinNode with a known join key | [`Limits::joins`] | ResourceExhausted |
//! | certificates | [`Limits::certificates`] | ResourceExhausted |
//! | open Watch streams | [`Limits::watches`] | the oldest one ends |
//! | open heartbeat streams | [`Limits::heartbeats`] | the oldest one ends |
//!
//! Of streams the newest are kept, because a node that has lost a connection opens new streams long
//! before this curator notices that the former ones are dead.
//!
//! # Invariants
//! - A budget is one curator's: a node that goes to all curators has the sum. That bounds what it
//!   costs, and curators need not agree.
//! - The state of all budgets is bounded by the number of nodes that have used one recently.

mod rate;
mod slots;

use std::time::Duration;

use hearth_api::identity::NodeId;
use tokio::time::sleep;
use tonic::Status;

use rate::NodeRates;
pub use rate::{Bucket, Rate};
use slots::NodeSlots;
pub use slots::Slot;

/// The budgets of a node.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Status reports that are written to etcd. A learner reports its progress four times a second.
    pub status: Rate,
    /// Liveness records that are written to etcd.
    pub liveness: Rate,
    /// Changes of the key of the pod network, after each of which every node sets up WireGuard anew.
    pub mesh_keys: Rate,
    /// Calls of JoinNode. A node makes one for each boot, and for each change of the cluster's settings.
    pub joins: Rate,
    /// Certificates. A Kubernetes worker asks for a few at its start.
    pub certificates: Rate,
    /// Open Watch streams.
    pub watches: usize,
    /// Open heartbeat streams.
    pub heartbeats: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            status: Rate {
                burst: 8,
                every: Duration::from_secs(1),
            },
            liveness: Rate {
                burst: 8,
                every: Duration::from_secs(2),
            },
            mesh_keys: Rate {
                burst: 4,
                every: Duration::from_secs(60),
            },
            joins: Rate {
                burst: 8,
                every: Duration::from_secs(1),
            },
            certificates: Rate {
                burst: 16,
                every: Duration::from_secs(5),
            },
            watches: 8,
            heartbeats: 2,
        }
    }
}

/// The budgets of all nodes.
pub struct Budgets {
    status: NodeRates,
    reports: NodeSlots,
    liveness: NodeRates,
    mesh_keys: NodeRates,
    joins: NodeRates,
    certificates: NodeRates,
    watches: NodeSlots,
    heartbeats: NodeSlots,
}

/// A status report in progress. A newer one of the same node ends it.
pub struct Report<'a> {
    budgets: &'a Budgets,
    node: NodeId,
    slot: Slot,
}

impl Budgets {
    /// Full budgets for all nodes.
    pub fn new(limits: &Limits) -> Self {
        Self {
            status: NodeRates::new("status reports", limits.status),
            reports: NodeSlots::new("status reports", 1),
            liveness: NodeRates::new("changes of boot or curator", limits.liveness),
            mesh_keys: NodeRates::new("keys of the pod network", limits.mesh_keys),
            joins: NodeRates::new("calls of JoinNode", limits.joins),
            certificates: NodeRates::new("certificates", limits.certificates),
            watches: NodeSlots::new("Watch streams", limits.watches),
            heartbeats: NodeSlots::new("heartbeat streams", limits.heartbeats),
        }
    }

    /// Begins a status report, and ends an earlier one of this node that is still waiting.
    pub fn report(&self, node: NodeId) -> Report<'_> {
        Report {
            budgets: self,
            node,
            slot: self.reports.open(node),
        }
    }

    /// Takes one liveness record from the node's budget.
    pub fn liveness(&self, node: NodeId) -> Result<(), Status> {
        self.liveness.take_or_refuse(node)
    }

    /// Takes one key of the pod network from the node's budget.
    pub fn mesh_key(&self, node: NodeId) -> Result<(), Status> {
        self.mesh_keys.take_or_refuse(node)
    }

    /// Takes one call of JoinNode from the node's budget.
    pub fn join(&self, node: NodeId) -> Result<(), Status> {
        self.joins.take_or_refuse(node)
    }

    /// Takes one certificate from the node's budget.
    pub fn certificate(&self, node: NodeId) -> Result<(), Status> {
        self.certificates.take_or_refuse(node)
    }

    /// A place for a Watch stream.
    pub fn watch(&self, node: NodeId) -> Slot {
        self.watches.open(node)
    }

    /// A place for a heartbeat stream.
    pub fn heartbeat(&self, node: NodeId) -> Slot {
        self.heartbeats.open(node)
    }
}

impl Report<'_> {
    /// Waits until the budget of the node permits a write.
    ///
    /// # Errors
    /// If a newer report has taken the place of this one.
    pub async fn may_write(&self) -> Result<(), Status> {
        while let Err(wait) = self.budgets.status.take(self.node) {
            tokio::select! {
                biased;
                status = self.slot.replaced() => return Err(status),
                () = sleep(wait) => {}
            }
        }
        Ok(())
    }
}
