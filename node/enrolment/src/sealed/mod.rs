//! The sealed configuration: what a node must know before its data partition
//! is open. It lies on the ESP in two slots.
//!
//! On disk it is one protobuf message with a phase in it; in memory it is the
//! enum [`Sealed`], in which each phase has exactly the fields that it has.
//! The one is parsed into the other at the edge: a MEMBER that still holds its
//! cluster unlock key, or a FOUNDING without a node key, does not exist behind
//! this module.
//! How it lies on the ESP is the business of [`SealedStore`].

mod message;
mod store;

use std::sync::Arc;

use hearth_api::{
    identity::{
        ClusterId, ClusterUnlockKey, JoinKey, NodeId, NodeKey, NodeUnlockKey, PublicKey, Ticket,
    },
    v1::{ClusterDirectory, ColdStartPolicy, Label, NodeRoles, StorageSecurity, TpmUsage},
};
use hearth_host::handover::ClusterSeed;
use hearth_host::parameters::StaticNetwork;
use hearth_host::storage::header::Owner;
use hearth_host::storage::keys::Secrets;
use hearth_host::storage::{Mode, Volume};
use rustls_pki_types::CertificateDer;

use super::EnrolmentId;

pub use store::{SealedError, SealedStore, Stored};

const VERSION: u32 = 1;

/// What all nodes that belong to a cluster have.
#[derive(Clone, Debug)]
pub struct Identity {
    /// This life of the machine.
    pub enrolment_id: EnrolmentId,
    /// The cluster.
    pub cluster_id: ClusterId,
    /// The node.
    pub node_id: NodeId,
    /// Half of the data partition's key.
    pub node_unlock_key: NodeUnlockKey,
    /// Proves who is rebooting.
    pub join_key: JoinKey,
    /// How the data partition is protected; never unspecified.
    pub storage_security: StorageSecurity,
    /// How the TPM is used; never unspecified.
    pub tpm_usage: TpmUsage,
    /// Who can unlock when no cluster lives; never unspecified.
    pub cold_start_policy: ColdStartPolicy,
    /// Counts the changes of keys.
    pub key_epoch: u32,
    /// As the parameters gave it.
    pub network: Option<StaticNetwork>,
}

/// Phase FOUNDING: everything that it takes to found the cluster without the
/// parameters.
#[derive(Clone, Debug)]
pub struct Founding {
    /// Who the node will be.
    pub identity: Identity,
    /// Its key.
    pub node_key: NodeKey,
    /// The other half of the data partition's key.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// The cluster's CA. Known from when the authorities are on the data
    /// partition; from then on that must not be made anew.
    pub cluster_ca: Option<CertificateDer<'static>>,
    /// What the owner has said of the cluster.
    pub seed: ClusterSeed,
    /// Of this node.
    pub roles: NodeRoles,
}

/// Phase REGISTERING: what makes a node the same one when it asks again, and,
/// from when that is known, what the cluster answered.
#[derive(Clone, Debug)]
pub struct Registering {
    /// This life of the machine.
    pub enrolment_id: EnrolmentId,
    /// The node.
    pub node_id: NodeId,
    /// Its key.
    pub node_key: NodeKey,
    /// Half of the data partition's key.
    pub node_unlock_key: NodeUnlockKey,
    /// The other half, which the cluster will keep.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// Proves who is rebooting.
    pub join_key: JoinKey,
    /// What the cluster is judged by.
    pub cluster_ca: CertificateDer<'static>,
    /// How it asks; later parameters may replace this.
    pub asking: Asking,
    /// What the cluster has answered. The data partition is made by this, so
    /// it must not change once it is durable.
    pub answer: Option<Answer>,
    /// As the parameters gave it.
    pub network: Option<StaticNetwork>,
}

/// What a machine asks with.
#[derive(Clone, Debug, PartialEq)]
pub struct Asking {
    /// Whom.
    pub directory: ClusterDirectory,
    /// The right to ask.
    pub ticket: Ticket,
    /// Of this node.
    pub labels: Vec<Label>,
}

/// What a cluster says to a machine that may become one of its nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The cluster.
    pub cluster_id: ClusterId,
    /// How the data partition is to be protected; never unspecified.
    pub storage_security: StorageSecurity,
    /// How the TPM is to be used; never unspecified.
    pub tpm_usage: TpmUsage,
    /// Who can unlock when no cluster lives; never unspecified.
    pub cold_start_policy: ColdStartPolicy,
}

/// Phase MEMBER.
#[derive(Clone, Debug)]
pub struct Member {
    /// Who the node is.
    pub identity: Identity,
    /// What the cluster is judged by.
    pub cluster_ca: CertificateDer<'static>,
    /// The owner at founding, where the node knows it.
    pub owner: Option<PublicKey>,
}

/// Phase DISOWNED: the cluster has removed the node, and no key is left. What
/// is left is which life has ended, so that it is given up by its name only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disowned {
    /// The life that has ended.
    pub enrolment_id: EnrolmentId,
    /// The cluster that it was part of.
    pub cluster_id: ClusterId,
    /// The node that it was.
    pub node_id: NodeId,
}

/// The sealed configuration, by phase.
#[derive(Clone, Debug)]
pub enum Sealed {
    /// The node founds a cluster.
    Founding(Arc<Founding>),
    /// The node asks to be taken in.
    Registering(Arc<Registering>),
    /// The node belongs to a cluster.
    Member(Arc<Member>),
    /// The node belonged to a cluster, and never will again.
    Disowned(Disowned),
}

impl Identity {
    /// Whose the data partition is.
    pub fn data_owner(&self) -> Owner {
        Owner {
            enrolment_id: self.enrolment_id,
            node_id: self.node_id,
            cluster_id: self.cluster_id,
        }
    }

    /// The data partition, or `None` where that takes a cluster unlock key and
    /// there is none.
    pub fn volume(&self, cluster_unlock_key: Option<&ClusterUnlockKey>) -> Option<Volume> {
        let mode = match self.storage_security {
            StorageSecurity::Unspecified | StorageSecurity::Insecure => None,
            StorageSecurity::Encrypted => Some(Mode::Encrypted),
            StorageSecurity::AuthenticatedEncrypted => Some(Mode::AuthenticatedEncrypted),
        };
        let secrets = match mode {
            None => None,
            Some(mode) => Some(Secrets {
                mode,
                node_unlock_key: self.node_unlock_key.clone(),
                cluster_unlock_key: cluster_unlock_key?.clone(),
                cluster_id: self.cluster_id,
                node_id: self.node_id,
                key_epoch: self.key_epoch,
            }),
        };
        Some(Volume {
            owner: self.data_owner(),
            secrets,
        })
    }
}

impl Founding {
    /// The data partition.
    pub fn volume(&self) -> Volume {
        self.identity
            .volume(Some(&self.cluster_unlock_key))
            .expect("a founding node has both keys")
    }

    /// What it becomes when the cluster is founded.
    pub fn into_member(&self, cluster_ca: CertificateDer<'static>) -> Member {
        Member {
            identity: self.identity.clone(),
            cluster_ca,
            owner: Some(self.seed.owner),
        }
    }
}

impl Registering {
    /// Who the node will be, as the cluster answered.
    fn identity(&self, answer: &Answer) -> Identity {
        Identity {
            enrolment_id: self.enrolment_id,
            cluster_id: answer.cluster_id,
            node_id: self.node_id,
            node_unlock_key: self.node_unlock_key.clone(),
            join_key: self.join_key.clone(),
            storage_security: answer.storage_security,
            tpm_usage: answer.tpm_usage,
            cold_start_policy: answer.cold_start_policy,
            key_epoch: 0,
            network: self.network.clone(),
        }
    }

    /// The data partition that this answer asks for.
    pub fn volume(&self, answer: &Answer) -> Volume {
        self.identity(answer)
            .volume(Some(&self.cluster_unlock_key))
            .expect("a registering node has both keys")
    }

    /// What it becomes when it has committed.
    pub fn into_member(&self, answer: &Answer, owner: Option<PublicKey>) -> Member {
        Member {
            identity: self.identity(answer),
            cluster_ca: self.cluster_ca.clone(),
            owner,
        }
    }
}

impl Member {
    /// What is left of it when its cluster has disowned it.
    pub fn into_disowned(&self) -> Disowned {
        Disowned {
            enrolment_id: self.identity.enrolment_id,
            cluster_id: self.identity.cluster_id,
            node_id: self.identity.node_id,
        }
    }
}

impl Disowned {
    /// Whose its data partition was.
    pub fn data_owner(&self) -> Owner {
        Owner {
            enrolment_id: self.enrolment_id,
            node_id: self.node_id,
            cluster_id: self.cluster_id,
        }
    }
}

impl Sealed {
    /// This life of the machine.
    pub fn enrolment_id(&self) -> EnrolmentId {
        match self {
            Self::Founding(founding) => founding.identity.enrolment_id,
            Self::Registering(registering) => registering.enrolment_id,
            Self::Member(member) => member.identity.enrolment_id,
            Self::Disowned(disowned) => disowned.enrolment_id,
        }
    }

    /// How to reach the network, as the parameters once gave it.
    pub fn network(&self) -> Option<&StaticNetwork> {
        match self {
            Self::Founding(founding) => founding.identity.network.as_ref(),
            Self::Registering(registering) => registering.network.as_ref(),
            Self::Member(member) => member.identity.network.as_ref(),
            Self::Disowned(_) => None,
        }
    }

    /// The phase's name.
    pub fn phase(&self) -> &'static str {
        match self {
            Self::Founding(_) => "FOUNDING",
            Self::Registering(_) => "REGISTERING",
            Self::Member(_) => "MEMBER",
            Self::Disowned(_) => "DISOWNED",
        }
    }
}

#[cfg(test)]
mod stored_forms;
#[cfg(test)]
mod tests;
