//! The types of the values that the parts of the node pass to each other.
//!
//! Data flows one way: enrolment finds out the node's identity, the control plane is built from it,
//! and the membership depends on both. Each value is one fact with one writer. The types are
//! defined here, below all of the parts, so that the parts do not depend on each other.

use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, FirstContactSecret, NodeCredentials, NodeId, NodeKey, PublicKey,
};
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::{
    ClusterConfiguration, ClusterDirectory, Label, NodeRoles, StorageSecurity, TpmUsage,
};
use hearth_sys::cidr::Cidr;
use hearth_sys::nftables::Nftables;

/// The owner's settings for a cluster to be bootstrapped. They are passed unchanged from the
/// parameters through the sealed configuration to the control plane.
#[derive(Clone, Debug)]
pub struct ClusterSeed {
    /// The owner's public key.
    pub owner: PublicKey,
    /// Proves the cluster's CA to the owner at the first contact.
    pub first_contact_secret: FirstContactSecret,
    /// To which the nodes wrap their cluster unlock keys; needed for cold-start policy OWNER.
    pub recovery_recipient: Option<RecoveryRecipient>,
    /// The cluster configuration, with all defaults filled in. In the parameters the cold-start
    /// policy may be unspecified; enrolment then decides it, see
    /// [`cold_start_policy`](crate::parameters::cold_start_policy).
    pub configuration: ClusterConfiguration,
    /// The labels of the first node.
    pub labels: Vec<Label>,
}

/// The data of a cluster to be bootstrapped: written by enrolment, read by the control plane. Kept
/// in an `Arc`, because it holds secrets that must not be copied.
pub struct BootstrapData {
    /// The cluster's ID, random.
    pub cluster_id: ClusterId,
    /// The ID of the first node.
    pub node_id: NodeId,
    /// The private key of the first node.
    pub node_key: NodeKey,
    /// The CUK: the cluster's half of the data partition's key.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// The public half of the first node's join key, which authenticates it after a reboot.
    pub join_key: PublicKey,
    /// How the data partition is protected.
    pub storage_security: StorageSecurity,
    /// How the TPM is used.
    pub tpm_usage: TpmUsage,
    /// The owner's settings.
    pub seed: ClusterSeed,
    /// The roles of the first node.
    pub roles: NodeRoles,
}

/// The new cluster is durable, in etcd and on the data partition, and a curator serves it: written
/// by the control plane, read by enrolment.
#[derive(Clone)]
pub struct Founded {
    /// The first node's credentials, as saved on the data partition.
    pub credentials: Arc<NodeCredentials>,
}

/// This node is a member: written by enrolment when the sealed configuration says so, at the end of
/// a bootstrap and at every later boot.
#[derive(Clone)]
pub struct MemberData {
    /// The cluster's ID.
    pub cluster_id: ClusterId,
    /// The ID of this node.
    pub node_id: NodeId,
    /// The credentials of this node, as stored on the data partition.
    pub credentials: Arc<NodeCredentials>,
    /// The curators in the cluster directory on the ESP.
    pub directory: ClusterDirectory,
}

/// The cluster has removed this node by an order that was verified, and the node's keys are wiped:
/// written by enrolment, read by the membership worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disowned;

/// How many times curators have refused this node's certificate: written by the heartbeat worker,
/// read by enrolment, which then asks them with the join key whether the node is still a member.
pub type Refusals = u64;

/// The digest of the cluster's unlock settings as its curators know them
/// ([`UnlockSettings::digest`](hearth_api::recovery::UnlockSettings::digest)): written by the
/// heartbeat worker, read by enrolment, which asks for the settings if the node has recorded others.
pub type UnlockSettingsDigest = u64;

/// Which pods may exist on this node: written by the Kubernetes worker, before it starts the first
/// pod and after the last one is removed; read by the mesh, which gives pods their network, and by
/// the packet filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodsPossible {
    /// None.
    #[default]
    None,
    /// Pods of the built-in network.
    BuiltIn,
    /// Pods of another network, which is not Hearth's.
    OtherNetwork,
}

/// This node's part of the pod network: written by the mesh when the network is set up or removed,
/// read by the Kubernetes worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodNetwork {
    /// All addresses of this node's pods, e.g. 10.208.3.0/24.
    pub range: Cidr,
    /// The node's address in the pod network: the first of the range.
    pub gateway: IpAddr,
}

/// The node's packet filter rules are in the kernel, and stay there: written by the packet filter,
/// read by the mesh, which forwards no packet before, and by node management, which shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketFilter {
    /// The program that reads and changes them.
    pub nftables: Nftables,
    /// The node's own table, in family `inet`.
    pub table: &'static str,
}
