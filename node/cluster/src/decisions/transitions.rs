//! The states of a node, and the only transitions between them.
//!
//! NEW → STANDBY → UP → DECOMMISSIONED, one step at a time. There is no way back: a machine that is
//! to register again gets a new key, and thereby a new ID.

use hearth_api::identity::NodeId;
use hearth_api::v1::NodeState;
use hearth_consensus::fenced::Write;

use super::{FoundNode, Rejection, put};
use crate::state::NodeRecord;

/// A step from one state to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An operator approves the node.
    Approve,
    /// The node stores its cluster unlock key.
    Commit,
    /// An operator decommissions the node.
    Decommission,
}

/// The state after a step.
pub fn after(node: NodeId, state: NodeState, step: Step) -> Result<NodeState, Rejection> {
    match (state, step) {
        (NodeState::New, Step::Approve) => Ok(NodeState::Standby),
        (NodeState::Standby, Step::Commit) => Ok(NodeState::Up),
        (NodeState::Up, Step::Decommission) => Ok(NodeState::Decommissioned),
        (NodeState::New, Step::Commit) => Err(Rejection::NotApproved(node)),
        (NodeState::Decommissioned, Step::Approve | Step::Commit) => {
            Err(Rejection::Decommissioned(node))
        }
        (state, step) => Err(Rejection::State {
            node,
            state,
            wanted: match step {
                Step::Approve => "NEW",
                Step::Commit => "STANDBY",
                Step::Decommission => "UP (delete it if it was never UP)",
            },
        }),
    }
}

/// Checks that the node is UP. Only such nodes have roles, etcd members and a part of the mesh.
pub fn check_up(node: &NodeRecord) -> Result<(), Rejection> {
    match node.state {
        NodeState::Up => Ok(()),
        state => Err(Rejection::State {
            node: node.id,
            state,
            wanted: "UP: only nodes that are UP have roles",
        }),
    }
}

/// Approves a node. An approval of a node that is approved already changes nothing.
pub fn approve(found: &FoundNode) -> Result<Option<Write>, Rejection> {
    let mut full = found.full.content.clone();
    if matches!(full.node.state, NodeState::Standby | NodeState::Up) {
        return Ok(None);
    }
    full.node.state = after(full.node.id, full.node.state, Step::Approve)?;
    Ok(Some(put(found.unchanged(), &full)))
}
