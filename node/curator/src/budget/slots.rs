//! Places of which each node has a few, and of which the newest are kept.

use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::shares::{Share, Shares};
use tonic::Status;

/// The places of all nodes.
pub(super) struct NodeSlots {
    what: &'static str,
    most: usize,
    shares: Arc<Shares<NodeId>>,
}

/// A place. Free again when dropped.
pub struct Slot {
    what: &'static str,
    most: usize,
    share: Share<NodeId>,
}

impl NodeSlots {
    /// The number of nodes has its own limits, so the places of all together have none.
    pub(super) fn new(what: &'static str, most: usize) -> Self {
        Self {
            what,
            most,
            shares: Shares::new(usize::MAX, most),
        }
    }

    /// Takes a place. If the node has taken all of its own, its oldest one ends.
    pub(super) fn open(&self, node: NodeId) -> Slot {
        Slot {
            what: self.what,
            most: self.most,
            share: self.shares.take(node),
        }
    }
}

impl Slot {
    /// Waits until the node has taken more places than it has; returns the reason.
    pub async fn replaced(&self) -> Status {
        self.share.lost().await;
        Status::aborted(format!(
            "this node has begun more than {} {}: the oldest one ends",
            self.most, self.what
        ))
    }
}
