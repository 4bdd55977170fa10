//! The states of a node, and the only steps that lead from one to another.
//!
//! NEW → STANDBY → UP → DECOMMISSIONED, one at a time. Nothing leads back: a
//! machine that is to begin anew gets a new key, and with it a new name.

use hearth_api::{identity::NodeId, v1::NodeState};
use hearth_consensus::fenced::Write;

use super::{FoundNode, Refused, put};
use crate::state::NodeRecord;

/// What moves a node on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An operator lets it in.
    Approve,
    /// It hands over its unlock key.
    Commit,
    /// An operator takes it out of service.
    Decommission,
}

/// Where the step leads from a state.
pub fn after(node: NodeId, state: NodeState, step: Step) -> Result<NodeState, Refused> {
    match (state, step) {
        (NodeState::New, Step::Approve) => Ok(NodeState::Standby),
        (NodeState::Standby, Step::Commit) => Ok(NodeState::Up),
        (NodeState::Up, Step::Decommission) => Ok(NodeState::Decommissioned),
        (NodeState::New, Step::Commit) => Err(Refused::NotApproved(node)),
        (NodeState::Decommissioned, Step::Approve | Step::Commit) => {
            Err(Refused::Decommissioned(node))
        }
        (state, step) => Err(Refused::State {
            node,
            state,
            wanted: match step {
                Step::Approve => "NEW",
                Step::Commit => "STANDBY",
                Step::Decommission => "UP (delete it if it never came up)",
            },
        }),
    }
}

/// Whether the node is part of the cluster: nothing about roles or consensus
/// is decided for one that is not.
pub fn wants_up(node: &NodeRecord) -> Result<(), Refused> {
    match node.state {
        NodeState::Up => Ok(()),
        state => Err(Refused::State {
            node: node.id,
            state,
            wanted: "UP: only such nodes have roles",
        }),
    }
}

/// An operator lets the node in. What was let in before stays what it is.
pub fn approve(found: &FoundNode) -> Result<Option<Write>, Refused> {
    let mut full = found.full.content.clone();
    if matches!(full.node.state, NodeState::Standby | NodeState::Up) {
        return Ok(None);
    }
    full.node.state = after(full.node.id, full.node.state, Step::Approve)?;
    Ok(Some(put(found.unchanged(), &full)))
}
