//! Registration: a machine asks to become a node.
//!
//! It proves its node key by TLS and presents the register ticket. Later calls need only the key:
//! rotating the ticket does not affect machines that wait for approval.

use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::v1::{ClusterConfiguration, Label, NodeRoles, NodeState};
use hearth_consensus::fenced::{Condition, Write};
use hearth_parameters::{storage_security, tpm_usage};

use super::admission::{self, Admission};
use super::{Rejection, Versioned, put};
use crate::state::{self, FullRecord, NodeRecord};

/// Maximum number of nodes that wait for approval, because each machine that has the ticket can add
/// one. Concurrent registrations at several curators can exceed it by one per further curator.
pub const MOST_WAITING: usize = 128;

/// A request, validated as far as possible without the records.
pub struct Registration {
    /// The machine's key, from its TLS certificate.
    pub node_key: PublicKey,
    /// The join key; the machine has proven that it holds it.
    pub join_key: PublicKey,
    /// Whether the machine has a TPM 2.0.
    pub tpm_is_present: bool,
    /// Validated labels.
    pub labels: Vec<Label>,
    /// What the machine has proven, if the cluster asks for that.
    pub admission: Option<Admission>,
}

/// The records for the machine.
pub struct Found {
    /// The node with this ID.
    pub node: Option<NodeRecord>,
    /// Whether a node with this ID was deleted.
    pub deleted: bool,
    /// The node, deleted or not, that has this join key.
    pub join_key_of: Option<NodeId>,
    /// The number of nodes that are NEW.
    pub waiting: usize,
}

/// The decision.
pub enum Registered {
    /// The machine has registered before.
    Before(NodeRecord),
    /// The write registers the machine as this node.
    Now(NodeRecord, Write),
}

/// The ID of the node with this key.
pub fn id_of(node_key: &PublicKey) -> NodeId {
    NodeId::from_public_key(node_key)
}

/// Answers a repeated registration of a node that has a record.
pub fn known(
    node: NodeRecord,
    node_key: &PublicKey,
    join_key: &PublicKey,
) -> Result<NodeRecord, Rejection> {
    if node.public_key != *node_key {
        return Err(Rejection::OtherNodeKey(node.id));
    }
    if node.state == NodeState::Decommissioned {
        return Err(Rejection::Decommissioned(node.id));
    }
    if node.join_key != *join_key {
        return Err(Rejection::OtherJoinKey(node.id));
    }
    Ok(node)
}

/// Decides about a registration. `ticket` is the revision of the ticket that the machine has
/// presented. The write is conditional on the ticket and the configuration being unchanged.
pub fn decide(
    registration: &Registration,
    found: Found,
    configuration: &Versioned<ClusterConfiguration>,
    ticket: i64,
) -> Result<Registered, Rejection> {
    let Registration {
        node_key,
        join_key,
        tpm_is_present,
        labels,
        admission,
    } = registration;
    let (node_key, join_key) = (*node_key, *join_key);
    let id = id_of(&node_key);
    if let Some(node) = found.node {
        return known(node, &node_key, &join_key).map(Registered::Before);
    }
    if found.deleted {
        return Err(Rejection::Deleted(id));
    }
    if let Some(other) = found.join_key_of {
        return Err(Rejection::JoinKeyTaken(other));
    }
    if found.waiting >= MOST_WAITING {
        return Err(Rejection::TooManyWaiting(found.waiting));
    }
    let node = NodeRecord {
        id,
        public_key: node_key,
        join_key,
        state: NodeState::New,
        roles: NodeRoles::default(),
        labels: labels.clone(),
        settings: Vec::new(),
        tpm_usage: tpm_usage(configuration.content.tpm_mode(), *tpm_is_present)
            .ok_or(Rejection::NoTpm)?,
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
    let write = admission::bind(put(write, &full), id, admission.as_ref(), None)?;
    Ok(Registered::Now(full.node, write))
}
