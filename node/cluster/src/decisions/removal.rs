//! Deletion of a node.
//!
//! Its pod range and mesh key are released. A tombstone is kept, so that the machine is disowned
//! when it joins again, and its join key stays reserved. The leader removes an etcd member that has
//! no node record any more.

use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::{NodeRoles, NodeState};
use hearth_consensus::fenced::{Condition, Write};

use super::{FoundNode, Rejection};
use crate::state::{self, Tombstone, Wanted};

/// The checks that the operator bypasses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bypass {
    /// Delete the node even if it is UP.
    pub not_decommissioned: bool,
    /// Delete the node even if it has roles.
    pub has_roles: bool,
}

/// The decision.
pub struct Removal {
    /// Deletes the node.
    pub write: Write,
    /// The node is an etcd member, so its departure has to be authorized.
    pub leaves: bool,
}

/// Decides about a deletion. A machine that is reset need not be decommissioned: it gets its order and destroys what it has.
pub fn decide(
    bypass: Bypass,
    afterwards: AfterRemoval,
    found: &FoundNode,
) -> Result<Removal, Rejection> {
    let node = &found.full.content.node;
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    let is_member = node.roles.consensus_member.is_some()
        || matches!(wanted, Some(Wanted::Join { member: Some(_) }));
    let has_roles = is_member || wanted.is_some() || node.roles != NodeRoles::default();
    let may_be_up = bypass.not_decommissioned || afterwards == AfterRemoval::Reset;
    if node.state == NodeState::Up && !may_be_up {
        return Err(Rejection::NotDecommissioned(node.id));
    }
    if has_roles && !bypass.has_roles {
        return Err(Rejection::HasRoles(node.id));
    }
    let tombstone = Tombstone {
        id: node.id,
        public_key: node.public_key,
        join_key: node.join_key,
        afterwards,
    };
    let mut write = found
        .all_unchanged()
        .and(Condition::Absent(state::tombstone_key(node.id)))
        .put(state::tombstone_key(node.id), tombstone.encode())
        .delete(state::node_key(node.id))
        .delete(state::status_key(node.id))
        .delete(state::liveness_key(node.id))
        .delete(state::joins_key(node.id))
        .delete(state::endorsement_key(node.id))
        .delete(state::intent_key(node.id));
    if let Some(networking) = node.networking {
        write = write
            .delete(state::pod_range_key(networking.range))
            .delete(state::mesh_key_key(&networking.key));
    }
    Ok(Removal {
        write,
        leaves: is_member,
    })
}
