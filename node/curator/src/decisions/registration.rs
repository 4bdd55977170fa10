//! A machine asks to become a node.
//!
//! It has shown its node key by TLS and the register ticket. From then on its
//! key alone is asked for: a ticket that is rotated while machines wait for
//! approval sends none of them away.

use hearth_api::{
    identity::{NodeId, PublicKey},
    v1::{ClusterConfiguration, Label, NodeRoles, NodeState, TpmMode, TpmUsage},
};
use hearth_consensus::fenced::{Condition, Write};
use hearth_host::parameters::storage_security;

use super::{At, Refused, put};
use crate::state::{self, FullRecord, NodeRecord};

/// Nodes that may wait for approval. Each machine that has the ticket can add
/// one, so there is an end to it; one more per further curator if they take
/// one in at the same moment.
pub const MOST_WAITING: usize = 128;

/// What the machine says, checked as far as it can be without the records.
pub struct Registration {
    /// By TLS.
    pub node_key: PublicKey,
    /// Proven to be held by the same machine.
    pub join_key: PublicKey,
    /// See there.
    pub tpm_is_present: bool,
    /// Checked.
    pub labels: Vec<Label>,
}

/// What the records say about it.
pub struct Found {
    /// The node with this ID.
    pub node: Option<NodeRecord>,
    /// Such a node was deleted.
    pub deleted: bool,
    /// The node, deleted or not, that has this join key.
    pub join_key_of: Option<NodeId>,
    /// Nodes that are NEW.
    pub waiting: usize,
}

/// What comes of it.
pub enum Registered {
    /// It has asked before.
    Before(NodeRecord),
    /// It is a node now, if this is written.
    Now(NodeRecord, Write),
}

/// The name of the node.
pub fn id_of(node_key: &PublicKey) -> NodeId {
    NodeId::from_public_key(node_key)
}

/// What a node that the records know is told.
pub fn known(
    node: NodeRecord,
    node_key: &PublicKey,
    join_key: &PublicKey,
) -> Result<NodeRecord, Refused> {
    if node.public_key != *node_key {
        return Err(Refused::OtherNodeKey(node.id));
    }
    if node.state == NodeState::Decommissioned {
        return Err(Refused::Decommissioned(node.id));
    }
    if node.join_key != *join_key {
        return Err(Refused::OtherJoinKey(node.id));
    }
    Ok(node)
}

/// Decides. The write happens only while the ticket, which the machine has
/// shown, is the one of this revision, and the configuration that of the other.
pub fn decide(
    registration: &Registration,
    found: Found,
    configuration: &At<ClusterConfiguration>,
    ticket: i64,
) -> Result<Registered, Refused> {
    let Registration {
        node_key,
        join_key,
        tpm_is_present,
        labels,
    } = registration;
    let (node_key, join_key) = (*node_key, *join_key);
    let id = id_of(&node_key);
    if let Some(node) = found.node {
        return known(node, &node_key, &join_key).map(Registered::Before);
    }
    if found.deleted {
        return Err(Refused::Deleted(id));
    }
    if let Some(other) = found.join_key_of {
        return Err(Refused::JoinKeyTaken(other));
    }
    if found.waiting >= MOST_WAITING {
        return Err(Refused::TooManyWaiting(found.waiting));
    }
    let node = NodeRecord {
        id,
        public_key: node_key,
        join_key,
        state: NodeState::New,
        roles: NodeRoles::default(),
        labels: labels.clone(),
        tpm_usage: tpm_usage(configuration.content.tpm_mode(), *tpm_is_present)?,
        storage_security: storage_security(configuration.content.storage_security_policy()),
        decommissioning: false,
        networking: None,
    };
    let write = Write::when(Condition::Absent(state::node_key(id)))
        .and(Condition::Absent(state::tombstone_key(id)))
        .and(Condition::Absent(state::join_key_key(&join_key)))
        .and(Condition::Unchanged(state::REGISTER_TICKET.into(), ticket))
        .and(Condition::Unchanged(
            state::CLUSTER.into(),
            configuration.revision,
        ))
        .put(state::join_key_key(&join_key), id.to_string().into_bytes());
    let full = FullRecord {
        node,
        unlock_key: None,
        certificate: None,
    };
    let write = put(write, &full);
    Ok(Registered::Now(full.node, write))
}

/// As the cluster's mode has it. BEST_EFFORT comes to a TPM that is left
/// alone: this release seals by none.
fn tpm_usage(mode: TpmMode, is_present: bool) -> Result<TpmUsage, Refused> {
    match (mode, is_present) {
        (TpmMode::Required, false) => Err(Refused::NoTpm),
        (TpmMode::Required, true) => Ok(TpmUsage::PresentAndUsed),
        (_, true) => Ok(TpmUsage::PresentButUnused),
        (_, false) => Ok(TpmUsage::NotPresent),
    }
}
