//! The permission that a voter leaves etcd.
//!
//! A permission is void once another departure has been authorized; otherwise two nodes that can each be removed could leave
//! at the same time. It has no other condition, so changes of the remaining nodes do not delay the departure.

use hearth_api::identity::NodeId;
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use tonic::Status;

use super::view;
use crate::core::Core;
use crate::status::unavailable;

/// The permission that a voter leaves etcd. A write that makes it leave has to have it as a part.
pub struct Departure {
    node: NodeId,
    /// No other departure has been authorized since.
    no_other: Condition,
}

impl Departure {
    /// Adds the permission to a write.
    pub fn add_to(self, write: Write) -> Write {
        let node = self.node.to_string().into_bytes();
        write.and(self.no_other).put(state::DEPARTURE, node)
    }
}

/// Authorizes the departure of a node. Refuses if the node is the last voter, or if the live ones
/// of the remaining voters would not be a quorum. `None` if the node does not vote.
pub async fn authorize(core: &Core, node: NodeId) -> Result<Option<Departure>, Status> {
    let last = core.client.get(state::DEPARTURE).await;
    let last = last.map_err(|error| unavailable(&error))?;
    let view = view::look(core).await?;
    if !view.votes(node) {
        return Ok(None);
    }
    view.may_leave_after_all(node)
        .map_err(|stays| Status::failed_precondition(stays.to_string()))?;
    let key = state::DEPARTURE.to_owned();
    let no_other = match last {
        Some(last) => Condition::Unchanged(key, last.mod_revision),
        None => Condition::Absent(key),
    };
    Ok(Some(Departure { node, no_other }))
}
