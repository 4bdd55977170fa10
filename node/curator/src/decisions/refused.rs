//! Why a request about a node is refused, and what its caller can do.

use std::net::IpAddr;

use hearth_api::{
    identity::{NodeId, PublicKey},
    v1::{NodeState, StorageSecurity},
};
use tonic::{Code, Status};

use crate::health::name;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A field is not what it should be.
    #[error("{field}: wanted {wanted}, found {found}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it should hold.
        wanted: &'static str,
        /// What it holds. Never a secret.
        found: String,
    },
    /// Labels, or patterns of labels, that break the rules, as the rules say it.
    #[error("{0}")]
    Labels(String),
    /// The ticket is another one.
    #[error(
        "register_ticket: it is not, or no longer, that of this cluster: ask its operator for \
         the present one"
    )]
    WrongTicket,
    /// Too many wrong tickets lately.
    #[error("too many wrong register tickets lately: try again later")]
    TooManyWrongTickets,
    /// Too many wait already.
    #[error(
        "{0} machines wait for approval already: an operator has to approve or delete some of \
         them first"
    )]
    TooManyWaiting(usize),
    /// Another key has this ID.
    #[error(
        "{0} is registered with another key: this machine needs a new key, so wipe it and \
         register again"
    )]
    OtherNodeKey(NodeId),
    /// The node has shown another join key before.
    #[error(
        "join_key: {0} has registered with another one: wipe the machine, so that it gets new \
         keys, and register again"
    )]
    OtherJoinKey(NodeId),
    /// Another node has it.
    #[error("join_key: it is that of {0}: each machine needs a join key of its own")]
    JoinKeyTaken(NodeId),
    /// The cluster demands one.
    #[error(
        "tpm_is_present: the cluster's TPM mode is REQUIRED, so a TPM 2.0 is wanted; found none"
    )]
    NoTpm,
    /// It was a node once.
    #[error(
        "{0} has been deleted from this cluster: wipe the machine, so that it gets new keys, and \
         register again"
    )]
    Deleted(NodeId),
    /// It was taken out of service.
    #[error(
        "{0} has been decommissioned: it cannot come back; wipe the machine and register again"
    )]
    Decommissioned(NodeId),
    /// Nobody has registered with this key.
    #[error("no machine has registered with the key {0}: register it first")]
    NotRegistered(PublicKey),
    /// An operator has not approved it.
    #[error("{0} has not been approved yet: an operator has to (`hearthctl node approve {0}`)")]
    NotApproved(NodeId),
    /// It has committed with something else before.
    #[error(
        "cluster_unlock_key: {0} has committed with another one before: wipe the machine and \
         register again"
    )]
    OtherUnlockKey(NodeId),
    /// It has committed with something else before.
    #[error("storage_security: {node} has committed with {committed} before, found {found}")]
    OtherStorage {
        /// The node.
        node: NodeId,
        /// Before.
        committed: &'static str,
        /// Now.
        found: &'static str,
    },
    /// The cluster does not admit it.
    #[error("storage_security: the cluster's policy is {policy}, found {found}")]
    Storage {
        /// The policy.
        policy: &'static str,
        /// What the node has.
        found: &'static str,
    },
    /// It says nothing about any node.
    #[error("no node of this cluster has the join key {0}")]
    UnknownJoinKey(PublicKey),
    /// It is not needed any more soon.
    #[error("{0} was deleted, and is being taken out of consensus: ask again")]
    MemberStill(NodeId),
    /// It is sealed in another way than the cluster knows.
    #[error(
        "tpm_usage: {node} has registered with {registered}, found {found}: wipe the machine and \
         register again"
    )]
    TpmChanged {
        /// The node.
        node: NodeId,
        /// Then.
        registered: &'static str,
        /// Now.
        found: &'static str,
    },
    /// The node is in a state in which this is not done.
    #[error("{node} is {}: wanted {wanted}", name(*.state))]
    State {
        /// The node.
        node: NodeId,
        /// In which it is.
        state: NodeState,
        /// In which it should be, and what to do.
        wanted: &'static str,
    },
    /// It is on its way out of service.
    #[error("{0} is being decommissioned")]
    Decommissioning(NodeId),
    /// It leaves consensus at the moment.
    #[error("{0} is leaving consensus: wait until it has left")]
    Leaving(NodeId),
    /// A controller would have no etcd beside it.
    #[error(
        "{0} is no consensus member, and is not about to become one, as a Kubernetes controller \
         must be: give it consensus-member in the same call, or before"
    )]
    ControllerAlone(NodeId),
    /// The same, once it has none any more.
    #[error(
        "{0} is a Kubernetes controller, which must be a consensus member: take \
         kubernetes-controller from it in the same call, or before"
    )]
    ControllerStill(NodeId),
    /// It has roles.
    #[error(
        "{0} has, or is about to get, roles: take them away or decommission it first, or delete \
         it all the same with bypass_has_roles"
    )]
    HasRoles(NodeId),
    /// It is in service.
    #[error(
        "{0} is UP: decommission it first, or delete it all the same with \
         bypass_not_decommissioned; it keeps its keys then until it asks for the cluster again"
    )]
    NotDecommissioned(NodeId),
    /// No such node.
    #[error("{field}: no node of this cluster is {wanted}: GetNodes shows those that are")]
    NoSuchNode {
        /// By which it was selected.
        field: &'static str,
        /// As it was selected.
        wanted: String,
    },
    /// Another node has it.
    #[error("wireguard_public_key: it is that of {0}: each node needs a key of its own")]
    MeshKeyTaken(NodeId),
    /// There are more nodes than ranges.
    #[error(
        "all ranges of addresses for pods are taken: an operator has to delete nodes that are \
         out of service first"
    )]
    NoPodRange,
    /// Not a member, and not about to become one.
    #[error("{0} is no consensus member: it is given the role first")]
    NoMember(NodeId),
    /// It does not run pods.
    #[error("{0} is no Kubernetes worker: it is given the role first")]
    NoWorker(NodeId),
    /// A server's certificate names an address, and there is none.
    #[error(
        "{0} has not told yet under which address others reach it: it reports its status first \
         (UpdateNodeStatus)"
    )]
    NoAddress(NodeId),
    /// A server's certificate for an address that belongs to others.
    #[error("{node} says that others reach it at {address}, which is {whose}")]
    AddressOfOthers {
        /// Who wants it.
        node: NodeId,
        /// For which address.
        address: IpAddr,
        /// What it is.
        whose: &'static str,
    },
    /// There is nothing to have access to.
    #[error(
        "no node is a Kubernetes controller: hearthctl node role add NODE kubernetes-controller"
    )]
    NoController,
    /// There is one, but it cannot be found.
    #[error(
        "no Kubernetes controller has told yet under which address it is reached: look at \
         hearthctl node list"
    )]
    NoControllerAddress,
}

impl Refused {
    /// The gRPC status code that goes with it.
    pub fn code(&self) -> Code {
        match self {
            Self::Field { .. } | Self::Labels(_) => Code::InvalidArgument,
            Self::WrongTicket | Self::Deleted(_) | Self::Decommissioned(_) => {
                Code::PermissionDenied
            }
            Self::TooManyWrongTickets | Self::TooManyWaiting(_) | Self::NoPodRange => {
                Code::ResourceExhausted
            }
            Self::OtherNodeKey(_) | Self::JoinKeyTaken(_) | Self::MeshKeyTaken(_) => {
                Code::AlreadyExists
            }
            Self::MemberStill(_) => Code::Unavailable,
            Self::NotRegistered(_) | Self::UnknownJoinKey(_) | Self::NoSuchNode { .. } => {
                Code::NotFound
            }
            Self::OtherJoinKey(_)
            | Self::NoTpm
            | Self::NotApproved(_)
            | Self::OtherUnlockKey(_)
            | Self::OtherStorage { .. }
            | Self::Storage { .. }
            | Self::TpmChanged { .. }
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

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Self::new(refused.code(), refused.to_string())
    }
}

/// A storage security's word without the enum's name.
pub(super) fn storage_name(storage: StorageSecurity) -> &'static str {
    let name = storage.as_str_name();
    name.strip_prefix("STORAGE_SECURITY_").unwrap_or(name)
}
