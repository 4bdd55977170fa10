//! What the parts of the node hand to each other.
//!
//! Data flow one way: enrolment finds out who this node is, the control plane
//! is built from that, the membership lives by both. Each hand-over is one
//! small fact in one event value with one writer. The types stand here, below
//! all of the parts, so that none of these has to know another.

use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, FirstContactSecret, NodeCredentials, NodeId, NodeKey, PublicKey,
};
use hearth_api::v1::{
    ClusterConfiguration, ClusterDirectory, Label, NodeRoles, StorageSecurity, TpmUsage,
};
use hearth_sys::cidr::Cidr;

/// What the owner has said of a cluster that is to be founded. It is carried
/// whole from the parameters through the sealed configuration to the founding.
#[derive(Clone, Debug)]
pub struct ClusterSeed {
    /// Who may take ownership.
    pub owner: PublicKey,
    /// Proves the CA to the owner.
    pub first_contact_secret: FirstContactSecret,
    /// X25519; with cold-start policy OWNER only.
    pub recovery_recipient: Option<[u8; 32]>,
    /// With every default filled in.
    pub configuration: ClusterConfiguration,
    /// Of the first node.
    pub labels: Vec<Label>,
}

/// A cluster that is to be founded: written by enrolment, read by the control
/// plane. Held in an `Arc`, for it has secrets that should lie in one place.
pub struct BootstrapData {
    /// Random.
    pub cluster_id: ClusterId,
    /// Of the first node.
    pub node_id: NodeId,
    /// Of the first node.
    pub node_key: NodeKey,
    /// The cluster's half of the data partition's key.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// Public half of the key that proves who reboots.
    pub join_key: PublicKey,
    /// How the data partition is protected.
    pub storage_security: StorageSecurity,
    /// How the TPM is used.
    pub tpm_usage: TpmUsage,
    /// What the owner has said.
    pub seed: ClusterSeed,
    /// Of the first node.
    pub roles: NodeRoles,
}

/// The founding is durable, in etcd and on the data partition, and a curator
/// serves it: written by the control plane, read by enrolment.
#[derive(Clone)]
pub struct Founded {
    /// As saved on the data partition.
    pub credentials: Arc<NodeCredentials>,
}

/// This node is a member: written by enrolment when the sealed configuration
/// says so, at the end of a bootstrap as at every later boot.
#[derive(Clone)]
pub struct MemberData {
    /// Of the cluster.
    pub cluster_id: ClusterId,
    /// Of this node.
    pub node_id: NodeId,
    /// Of this node, as they lie on the data partition.
    pub credentials: Arc<NodeCredentials>,
    /// The curators that the ESP knew of.
    pub directory: ClusterDirectory,
}

/// The cluster has removed this node, by an order that was checked, and its
/// keys are wiped: written by enrolment, read by the membership worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disowned;

/// The curators refuse this node's certificate, as often as this number has
/// grown: written by the heartbeat worker, read by enrolment, which asks them
/// by the join key whether the node still belongs to them.
pub type Refusals = u64;

/// Whether there may be pods on this node: written by Kubernetes' launcher,
/// true from before it starts the first until after nothing is left of the
/// last; read by the mesh, without which they have no network.
pub type MayHavePods = bool;

/// The pods' part of the cluster's network on this node: written by the mesh
/// once it is there and when it goes, read by what runs pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodNetwork {
    /// All addresses of this node's pods, e.g. 10.208.3.0/24.
    pub range: Cidr,
    /// Of the node among its pods: the first of the range.
    pub gateway: IpAddr,
}
