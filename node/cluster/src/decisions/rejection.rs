//! Why a request is rejected, and what the caller can do.

use std::net::IpAddr;
use std::time::Duration;

use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::pushback;
use hearth_api::settings::SettingError;
use hearth_api::v1::{NodeState, StorageSecurity};
use hearth_tpm::Digest;
use hearth_tpm::attestation::ProofError;
use hearth_tpm::images::Untrusted;
use tonic::{Code, Status};

use crate::messages::{name, seconds};

/// When a boot that has to wait for the end of another one asks again. Short and constant, so that
/// the node is up soon after that.
const JOIN_AGAIN: Duration = Duration::from_secs(2);

/// Why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// A field has an invalid value.
    #[error("{field}: expected {wanted}, got {found}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// The valid values.
        wanted: &'static str,
        /// The actual value. Never a secret.
        found: String,
    },
    /// Labels or settings of a node are invalid; the message is that of the validation.
    #[error("{0}")]
    Invalid(String),
    /// A setting is unknown, or its value is invalid.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The setting cannot be changed.
    #[error(
        "{path}: expected {current}, got {found}: it is fixed when the cluster is created, because \
         {reason}"
    )]
    FixedSetting {
        /// The path of the setting.
        path: &'static str,
        /// Why it is fixed.
        reason: &'static str,
        /// Its value.
        current: String,
        /// The value in the request.
        found: String,
    },
    /// The cold-start policy OWNER needs a recovery recipient, which this cluster does not have.
    #[error(
        "cold_start_policy: expected TPM or NONE, got OWNER: this cluster has no recovery recipient: \
         `hearthctl owner replace` gives it one"
    )]
    NoRecoveryRecipient,
    /// A replacement of the owner is malformed or wrongly signed; the message is that of the
    /// validation.
    #[error("{0}")]
    Replacement(String),
    /// The owner has been replaced too often.
    #[error("the owner of this cluster has been replaced {0} times, the maximum")]
    TooManyReplacements(usize),
    /// The configuration has changed since the caller read it.
    #[error(
        "version: expected {current}, got {found}: the configuration has changed since: read it \
         again"
    )]
    ConfigurationChanged {
        /// The current version.
        current: u64,
        /// The version in the request.
        found: u64,
    },
    /// The register ticket is wrong or has been rotated.
    #[error(
        "register_ticket: expected the current ticket of this cluster, got another one: ask the \
         cluster's operator for it"
    )]
    WrongTicket,
    /// The rate limit of wrong register tickets is exceeded.
    #[error("too many wrong register tickets: retry later")]
    TooManyWrongTickets,
    /// The maximum number of nodes that wait for approval is reached.
    #[error(
        "{0} machines wait for approval, which is the maximum: an operator has to approve or \
         delete some of them first"
    )]
    TooManyWaiting(usize),
    /// A node with another key has this ID.
    #[error(
        "{0} is registered with another key: this machine needs a new key: wipe it and register \
         again"
    )]
    OtherNodeKey(NodeId),
    /// The node has registered with another join key.
    #[error(
        "join_key: {0} is registered with another join key: wipe the machine, so that it gets \
         new keys, and register again"
    )]
    OtherJoinKey(NodeId),
    /// Another node has this join key.
    #[error("join_key: already used by {0}: each machine needs its own join key")]
    JoinKeyTaken(NodeId),
    /// The cluster requires a TPM, and the machine has none.
    #[error("tpm_is_present: expected a TPM 2.0, as the cluster's TPM mode is REQUIRED, got none")]
    NoTpm,
    /// The node has been deleted.
    #[error(
        "{0} has been deleted from this cluster: wipe the machine, so that it gets new keys, and \
         register again"
    )]
    Deleted(NodeId),
    /// The node has been decommissioned.
    #[error(
        "{0} has been decommissioned and cannot join again: wipe the machine and register again"
    )]
    Decommissioned(NodeId),
    /// No machine has registered with this key.
    #[error("no machine is registered with the key {0}: register it first")]
    NotRegistered(PublicKey),
    /// An operator has not approved the node yet.
    #[error(
        "{0} has not been approved yet: an operator has to approve it \
         (`hearthctl node approve {0}`)"
    )]
    NotApproved(NodeId),
    /// The node has committed with another cluster unlock key.
    #[error(
        "cluster_unlock_key: {0} has already committed with another key: wipe the machine and \
         register again"
    )]
    OtherUnlockKey(NodeId),
    /// The node has committed with another storage security.
    #[error("storage_security: expected {committed}, as {node} has committed with it, got {found}")]
    OtherStorage {
        /// The node.
        node: NodeId,
        /// The storage security with which it has committed.
        committed: &'static str,
        /// The storage security in the request.
        found: &'static str,
    },
    /// The cluster's policy does not permit the storage security.
    #[error("storage_security: {found} is not permitted by the cluster's policy {policy}")]
    Storage {
        /// The cluster's policy.
        policy: &'static str,
        /// The storage security in the request.
        found: &'static str,
    },
    /// No record has this join key.
    #[error("no node of this cluster has the join key {0}")]
    UnknownJoinKey(PublicKey),
    /// The node has been deleted, but is still an etcd member.
    #[error("{0} was deleted and is still being removed from etcd: retry")]
    MemberStill(NodeId),
    /// Heartbeats of another boot of the node arrive. The node shows this on its console.
    #[error(
        "the cluster still hears another boot of this node: this one can join when that one has \
         been silent for {} s",
        seconds(*.silence)
    )]
    OtherBoot {
        /// After this time without heartbeats a boot has ended.
        silence: Duration,
    },
    /// The node has registered with another TPM usage.
    #[error(
        "tpm_usage: expected {registered}, as {node} has registered with it, got {found}: wipe \
         the machine and register again"
    )]
    TpmChanged {
        /// The node.
        node: NodeId,
        /// The TPM usage with which it has registered.
        registered: &'static str,
        /// The TPM usage in the request.
        found: &'static str,
    },
    /// Under KNOWN_IMAGES, a machine that has no TPM or no software for it.
    #[error(
        "proof: expected one of what this machine has booted, as the cluster's admission policy is KNOWN_IMAGES, got none: \
         it needs a TPM 2.0"
    )]
    NoProof,
    /// The curator has asked nothing, or has forgotten it. Asking again helps.
    #[error(
        "proof: expected the answer to a challenge of this curator, got another one: ask for a challenge again"
    )]
    NoChallenge,
    /// The rate limit of challenges for callers with unknown keys is exceeded.
    #[error("too many machines ask for a challenge: retry later")]
    TooManyChallenges,
    /// The proof does not prove what the machine has booted.
    #[error("proof: {0}")]
    Proof(#[from] ProofError),
    /// The machine has booted something else than a trusted image.
    #[error("{0}: see `hearthctl image`")]
    Untrusted(#[from] Untrusted),
    /// The machine is not the one that has registered, or its TPM was replaced.
    #[error(
        "endorsement_key: {0} has registered with another TPM: this is another machine, or its TPM was replaced: wipe it \
         and register again"
    )]
    OtherTpm(NodeId),
    /// The maximum number of trusted images is reached.
    #[error("{0} images are trusted, which is the maximum: revoke some of them first")]
    TooManyImages(usize),
    /// The image is not trusted.
    #[error("parts: no image with these parts is trusted, got {0}")]
    NoSuchImage(Digest),
    /// The node's state does not permit the request.
    #[error("{node} is {}: expected {wanted}", name(*.state))]
    State {
        /// The node.
        node: NodeId,
        /// Its state.
        state: NodeState,
        /// The required state, and what to do.
        wanted: &'static str,
    },
    /// The node is being decommissioned.
    #[error("{0} is being decommissioned")]
    Decommissioning(NodeId),
    /// The node is being removed from etcd.
    #[error("{0} is leaving etcd: wait until it has left")]
    Leaving(NodeId),
    /// A Kubernetes controller must be a consensus member, and the node is not.
    #[error(
        "{0}: a Kubernetes controller must be a consensus member: add the role consensus-member \
         in the same call or before"
    )]
    ControllerAlone(NodeId),
    /// The node must stay a consensus member, because it is a Kubernetes controller.
    #[error(
        "{0}: a Kubernetes controller must be a consensus member: remove the role \
         kubernetes-controller in the same call or before"
    )]
    ControllerStill(NodeId),
    /// The node has roles, or is about to get one.
    #[error(
        "{0} has roles, or is about to get one: remove them or decommission the node first, or \
         delete it anyway with bypass_has_roles"
    )]
    HasRoles(NodeId),
    /// The node is not decommissioned.
    #[error(
        "{0} is UP: decommission it first, or delete it anyway with bypass_not_decommissioned; \
         it then keeps its keys until it connects to the cluster again"
    )]
    NotDecommissioned(NodeId),
    /// No node matches the selector.
    #[error("{field}: no node of this cluster matches {wanted}: see GetNodes")]
    NoSuchNode {
        /// The field of the selector.
        field: &'static str,
        /// The value of the selector.
        wanted: String,
    },
    /// Another node has this mesh key.
    #[error("wireguard_public_key: already used by {0}: each node needs its own key")]
    MeshKeyTaken(NodeId),
    /// All pod ranges are assigned.
    #[error(
        "all parts of kubernetes.pod_ranges are assigned to nodes: an operator has to delete nodes \
         that are out of service first"
    )]
    NoPodRange,
    /// The node is not a consensus member, and not about to become one.
    #[error("{0} is not a consensus member: add the role first")]
    NoMember(NodeId),
    /// The node is not a Kubernetes worker.
    #[error("{0} is not a Kubernetes worker: add the role first")]
    NoWorker(NodeId),
    /// A server certificate contains the node's address, which the node has not reported yet.
    #[error("{0} has not reported its address yet: report the status first (UpdateNodeStatus)")]
    NoAddress(NodeId),
    /// The node has reported an address for which it cannot get a server certificate.
    #[error("{node} has reported the address {address}, which is {whose}")]
    AddressOfOthers {
        /// The node.
        node: NodeId,
        /// The address that it has reported.
        address: IpAddr,
        /// What the address is instead.
        whose: String,
    },
    /// No node is a Kubernetes controller.
    #[error(
        "no node is a Kubernetes controller: run \
         `hearthctl node role add NODE kubernetes-controller`"
    )]
    NoController,
    /// No Kubernetes controller has reported its address yet.
    #[error("no Kubernetes controller has reported its address yet: see `hearthctl node list`")]
    NoControllerAddress,
}

impl Rejection {
    /// The gRPC status code of this rejection.
    pub fn code(&self) -> Code {
        match self {
            Self::Field { .. } | Self::Invalid(_) | Self::Setting(_) | Self::Replacement(_) => {
                Code::InvalidArgument
            }
            Self::ConfigurationChanged { .. } => Code::Aborted,
            Self::WrongTicket | Self::Deleted(_) | Self::Decommissioned(_) => {
                Code::PermissionDenied
            }
            Self::TooManyWrongTickets
            | Self::TooManyWaiting(_)
            | Self::TooManyImages(_)
            | Self::TooManyChallenges
            | Self::NoPodRange => Code::ResourceExhausted,
            Self::OtherNodeKey(_) | Self::JoinKeyTaken(_) | Self::MeshKeyTaken(_) => {
                Code::AlreadyExists
            }
            Self::MemberStill(_) | Self::OtherBoot { .. } | Self::NoChallenge => Code::Unavailable,
            Self::NotRegistered(_)
            | Self::UnknownJoinKey(_)
            | Self::NoSuchImage(_)
            | Self::NoSuchNode { .. } => Code::NotFound,
            Self::FixedSetting { .. }
            | Self::NoRecoveryRecipient
            | Self::TooManyReplacements(_)
            | Self::OtherJoinKey(_)
            | Self::NoTpm
            | Self::NotApproved(_)
            | Self::OtherUnlockKey(_)
            | Self::OtherStorage { .. }
            | Self::Storage { .. }
            | Self::TpmChanged { .. }
            | Self::NoProof
            | Self::Proof(_)
            | Self::Untrusted(_)
            | Self::OtherTpm(_)
            | Self::State { .. }
            | Self::Decommissioning(_)
            | Self::Leaving(_)
            | Self::ControllerAlone(_)
            | Self::ControllerStill(_)
            | Self::HasRoles(_)
            | Self::NotDecommissioned(_)
            | Self::NoMember(_)
            | Self::NoWorker(_)
            | Self::NoAddress(_)
            | Self::AddressOfOthers { .. }
            | Self::NoController
            | Self::NoControllerAddress => Code::FailedPrecondition,
        }
    }
}

impl From<Rejection> for Status {
    fn from(refused: Rejection) -> Self {
        let status = Self::new(refused.code(), refused.to_string());
        match refused {
            // Not a failure: it only takes a while.
            Rejection::OtherBoot { .. } => pushback::ask_again(status, JOIN_AGAIN),
            _ => status,
        }
    }
}

/// The name of a storage security without the prefix of the enum.
pub(super) fn storage_name(storage: StorageSecurity) -> &'static str {
    let name = storage.as_str_name();
    name.strip_prefix("STORAGE_SECURITY_").unwrap_or(name)
}
