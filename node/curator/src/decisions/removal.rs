//! A node is forgotten.
//!
//! What it had of the mesh is free again. A tombstone stays, by which the machine is told so when it asks for its
//! cluster, and its join key stays taken. A member of consensus for which no
//! record stands any more is removed by the leader.

use hearth_api::v1::{NodeRoles, NodeState};
use hearth_consensus::fenced::{Condition, Write};

use super::{FoundNode, Refused};
use crate::state::{self, Tombstone, Wanted};

/// What the operator means in spite of everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bypass {
    /// It is UP.
    pub not_decommissioned: bool,
    /// It has roles.
    pub has_roles: bool,
}

/// What comes of it.
pub struct Removal {
    /// Forgets the node.
    pub write: Write,
    /// Its member of consensus goes with it: it must be able to leave.
    pub leaves: bool,
}

/// Decides.
pub fn decide(bypass: Bypass, found: &FoundNode) -> Result<Removal, Refused> {
    let node = &found.full.content.node;
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    let is_member = node.roles.consensus_member.is_some()
        || matches!(wanted, Some(Wanted::Join { member: Some(_) }));
    let has_roles = is_member || wanted.is_some() || node.roles != NodeRoles::default();
    if node.state == NodeState::Up && !bypass.not_decommissioned {
        return Err(Refused::NotDecommissioned(node.id));
    }
    if has_roles && !bypass.has_roles {
        return Err(Refused::HasRoles(node.id));
    }
    let tombstone = Tombstone {
        id: node.id,
        public_key: node.public_key,
        join_key: node.join_key,
    };
    let mut write = found
        .all_unchanged()
        .and(Condition::Absent(state::tombstone_key(node.id)))
        .put(state::tombstone_key(node.id), tombstone.encode())
        .delete(state::node_key(node.id))
        .delete(state::status_key(node.id))
        .delete(state::liveness_key(node.id))
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
