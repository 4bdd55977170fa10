//! The sealed configuration: what a node must know before its data partition is unlocked. It is
//! stored on the ESP in two slots.
//!
//! On disk it is one protobuf message with a phase; in memory it is the enum [`Sealed`], in which
//! each phase has exactly the fields that it needs. The message is validated when it is read: a
//! MEMBER that still has its cluster unlock key without a TPM that seals it, or a FOUNDING without a node key, cannot be
//! represented outside this module. [`SealedStore`] reads and writes the ESP.

mod message;
mod store;
mod tpm;

use std::sync::Arc;

use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, JoinKey, NodeId, NodeKey, NodeUnlockKey, PublicKey, Ticket,
};
use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::{self, RecoveryRecipient, UnlockSettings, WrappedFor, WrappedKey};
use hearth_api::v1::{
    ClusterDirectory, ColdStartPolicy, Label, NodeRoles, StorageSecurity, TpmUsage,
};
use hearth_host::handover::BootstrapData;
use hearth_host::storage::header::Owner;
use hearth_host::storage::keys::Secrets;
use hearth_host::storage::{Mode, Volume};
use hearth_parameters::{ClusterSeed, Network};
use hearth_tpm::images::TrustedImage;
use rustls_pki_types::CertificateDer;

use super::EnrolmentId;

pub use store::{SealedError, SealedStore, Stored, owners_key};
pub use tpm::{Sealer, SealerError, TpmError};

const VERSION: u32 = 1;

/// The identity of a node that belongs to a cluster.
#[derive(Clone, Debug)]
pub struct Identity {
    /// ID of this enrolment of the machine.
    pub enrolment_id: EnrolmentId,
    /// ID of the cluster.
    pub cluster_id: ClusterId,
    /// ID of the node.
    pub node_id: NodeId,
    /// NUK: one half of the data partition's key.
    pub node_unlock_key: NodeUnlockKey,
    /// Authenticates the node for JoinNode.
    pub join_key: JoinKey,
    /// How the data partition is protected; never unspecified.
    pub storage_security: StorageSecurity,
    /// How the TPM is used; never unspecified.
    pub tpm_usage: TpmUsage,
    /// Who can unlock nodes when the whole cluster is down; never unspecified.
    pub cold_start_policy: ColdStartPolicy,
    /// Incremented by every change of the data partition's key.
    pub key_epoch: u32,
    /// How the machine reaches its networks, from the parameters.
    pub network: Network,
}

/// The owner's way to the cluster unlock key of a node, when no curator is running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The recovery key that opens it.
    pub recipient: RecoveryRecipient,
    /// The cluster unlock key.
    pub wrapped_key: WrappedKey,
}

/// Phase FOUNDING: everything needed to bootstrap the cluster without the parameters.
#[derive(Clone, Debug)]
pub struct Founding {
    /// Identity of the node.
    pub identity: Identity,
    /// The node's private key.
    pub node_key: NodeKey,
    /// CUK: the other half of the data partition's key.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// The same key, for the owner.
    pub recovery: Option<Recovery>,
    /// The cluster CA. Set once the authorities are on the data partition, which must not be
    /// created again after that.
    pub cluster_ca: Option<CertificateDer<'static>>,
    /// The owner's settings for the cluster.
    pub seed: ClusterSeed,
    /// Roles of this node.
    pub roles: NodeRoles,
}

/// Phase REGISTERING: what identifies the node when it registers again, and the cluster's answer,
/// once it is known.
#[derive(Clone, Debug)]
pub struct Registering {
    /// ID of this enrolment of the machine.
    pub enrolment_id: EnrolmentId,
    /// ID of the node.
    pub node_id: NodeId,
    /// The node's private key.
    pub node_key: NodeKey,
    /// NUK: one half of the data partition's key.
    pub node_unlock_key: NodeUnlockKey,
    /// CUK: the other half, which the cluster will store.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// Authenticates the node for JoinNode.
    pub join_key: JoinKey,
    /// Verifies the cluster's certificates.
    pub cluster_ca: CertificateDer<'static>,
    /// How it registers; later parameters may replace this.
    pub asking: Asking,
    /// The cluster's answer. The data partition is created with these settings, so they must not
    /// change once they are durable.
    pub answer: Option<Answer>,
    /// How the machine reaches its networks, from the parameters.
    pub network: Network,
}

/// How a machine registers.
#[derive(Clone, Debug, PartialEq)]
pub struct Asking {
    /// Addresses of curators.
    pub directory: ClusterDirectory,
    /// The register ticket.
    pub ticket: Ticket,
    /// Labels of this node.
    pub labels: Vec<Label>,
}

/// A cluster's answer to a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// ID of the cluster.
    pub cluster_id: ClusterId,
    /// How the data partition is to be protected; never unspecified.
    pub storage_security: StorageSecurity,
    /// How the TPM is to be used; never unspecified.
    pub tpm_usage: TpmUsage,
    /// Who can unlock nodes when the whole cluster is down; never unspecified.
    pub cold_start_policy: ColdStartPolicy,
}

/// Phase MEMBER: the node belongs to a cluster.
#[derive(Clone, Debug)]
pub struct Member {
    /// Identity of the node.
    pub identity: Identity,
    /// Verifies the cluster's certificates.
    pub cluster_ca: CertificateDer<'static>,
    /// The cluster owner's public key at bootstrap, if the node knows it.
    pub owner: Option<PublicKey>,
    /// CUK, only if the node opens its data partition itself ([`Identity::opens_itself`]).
    pub cluster_unlock_key: Option<ClusterUnlockKey>,
    /// CUK for the owner; `None` if the cluster has no recovery recipient, or the data partition no key.
    pub recovery: Option<Recovery>,
}

/// Phase DISOWNED: the cluster has removed the node, and no key is left. The IDs are kept, so that
/// a wipe token must name this enrolment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disowned {
    /// ID of the enrolment that has ended.
    pub enrolment_id: EnrolmentId,
    /// ID of the cluster that it was part of.
    pub cluster_id: ClusterId,
    /// ID of the former node.
    pub node_id: NodeId,
    /// What its machine does then.
    pub afterwards: AfterRemoval,
}

/// The sealed configuration, by phase.
#[derive(Clone, Debug)]
pub enum Sealed {
    /// The node bootstraps a cluster.
    Founding(Arc<Founding>),
    /// The node registers with a cluster.
    Registering(Arc<Registering>),
    /// The node belongs to a cluster.
    Member(Arc<Member>),
    /// The node was removed from its cluster.
    Disowned(Disowned),
}

impl Identity {
    /// Whether the node keeps both halves of its data partition's key, because its cluster's cold-start policy is TPM and
    /// its TPM seals them.
    pub fn opens_itself(&self) -> bool {
        self.cold_start_policy == ColdStartPolicy::Tpm
            && self.tpm_usage == TpmUsage::PresentAndUsed
            && self.has_secrets()
    }

    /// Whether the data partition has a key.
    pub fn has_secrets(&self) -> bool {
        self.storage_security != StorageSecurity::Insecure
    }

    /// The CUK as a member has it.
    fn kept(&self, cluster_unlock_key: &ClusterUnlockKey) -> Option<ClusterUnlockKey> {
        self.opens_itself().then(|| cluster_unlock_key.clone())
    }

    /// The owner's way to this cluster unlock key; `None` without a recipient, or if the data partition has no key.
    pub fn recovery(
        &self,
        recipient: Option<RecoveryRecipient>,
        key: &ClusterUnlockKey,
    ) -> Option<Recovery> {
        let recipient = recipient.filter(|_| self.has_secrets())?;
        Some(Recovery {
            recipient,
            wrapped_key: recovery::wrap(&recipient, &self.wrapped_for(), key),
        })
    }

    /// What binds a wrapped key to this node.
    pub fn wrapped_for(&self) -> WrappedFor {
        WrappedFor {
            cluster_id: self.cluster_id,
            node_id: self.node_id,
            join_key: self.join_key.public(),
            key_epoch: self.key_epoch,
        }
    }

    /// The owner in the header of the data partition.
    pub fn data_owner(&self) -> Owner {
        Owner {
            enrolment_id: self.enrolment_id,
            node_id: self.node_id,
            cluster_id: self.cluster_id,
        }
    }

    /// The data partition; `None` if it needs a cluster unlock key and there is none.
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

    /// What the control plane needs to bootstrap the cluster.
    pub fn bootstrap_data(&self, booted: Option<TrustedImage>) -> BootstrapData {
        BootstrapData {
            cluster_id: self.identity.cluster_id,
            node_id: self.identity.node_id,
            node_key: self.node_key.clone(),
            cluster_unlock_key: self.cluster_unlock_key.clone(),
            join_key: self.identity.join_key.public(),
            storage_security: self.identity.storage_security,
            tpm_usage: self.identity.tpm_usage,
            seed: self.seed.clone(),
            roles: self.roles,
            booted,
        }
    }

    /// The member after the cluster is bootstrapped.
    pub fn into_member(&self, cluster_ca: CertificateDer<'static>) -> Member {
        Member {
            identity: self.identity.clone(),
            cluster_ca,
            owner: Some(self.seed.owner),
            cluster_unlock_key: self.identity.kept(&self.cluster_unlock_key),
            recovery: self.recovery.clone(),
        }
    }
}

impl Registering {
    /// The node's identity, according to the cluster's answer.
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

    /// The data partition with the settings in the answer.
    pub fn volume(&self, answer: &Answer) -> Volume {
        self.identity(answer)
            .volume(Some(&self.cluster_unlock_key))
            .expect("a registering node has both keys")
    }

    /// The cluster unlock key, wrapped to the recovery recipient of the cluster.
    pub fn recovery(
        &self,
        answer: &Answer,
        recipient: Option<RecoveryRecipient>,
    ) -> Option<Recovery> {
        self.identity(answer)
            .recovery(recipient, &self.cluster_unlock_key)
    }

    /// The member after the commit.
    pub fn into_member(
        &self,
        answer: &Answer,
        owner: Option<PublicKey>,
        recovery: Option<Recovery>,
    ) -> Member {
        let identity = self.identity(answer);
        Member {
            cluster_unlock_key: identity.kept(&self.cluster_unlock_key),
            identity,
            cluster_ca: self.cluster_ca.clone(),
            owner,
            recovery,
        }
    }
}

impl Member {
    /// Whether the owner may unlock the node when no curator is running: a node without a TPM in a cluster with the
    /// policy TPM opens as under OWNER.
    pub fn owner_unlocks(&self) -> Option<(&Recovery, PublicKey)> {
        match self.identity.cold_start_policy {
            ColdStartPolicy::Owner | ColdStartPolicy::Tpm => {
                Some((self.recovery.as_ref()?, self.owner?))
            }
            ColdStartPolicy::None | ColdStartPolicy::Unspecified => None,
        }
    }

    /// The settings that it has recorded.
    pub fn unlock_settings(&self) -> UnlockSettings {
        UnlockSettings {
            cold_start_policy: self.identity.cold_start_policy,
            recovery_recipient: self.recovery.as_ref().map(|recovery| recovery.recipient),
            owner: self.owner,
        }
    }

    /// The same, as it is reported: without what means nothing where the data partition has no key.
    pub fn reported_settings(&self) -> UnlockSettings {
        let settings = self.unlock_settings();
        match self.identity.has_secrets() {
            true => settings,
            false => UnlockSettings {
                cold_start_policy: ColdStartPolicy::Unspecified,
                ..settings
            },
        }
    }

    /// The member under other settings of its cluster; `None` if it is the same.
    pub fn under(&self, settings: &UnlockSettings, key: &ClusterUnlockKey) -> Option<Self> {
        if !self.identity.has_secrets() {
            return (self.owner != settings.owner).then(|| Self {
                owner: settings.owner,
                ..self.clone()
            });
        }
        if self.unlock_settings() == *settings {
            return None;
        }
        let identity = Identity {
            cold_start_policy: settings.cold_start_policy,
            ..self.identity.clone()
        };
        let recovery = match (&self.recovery, settings.recovery_recipient) {
            (Some(known), Some(recipient)) if known.recipient == recipient => Some(known.clone()),
            (_, recipient) => identity.recovery(recipient, key),
        };
        Some(Self {
            cluster_unlock_key: identity.kept(key),
            identity,
            recovery,
            owner: settings.owner,
            ..self.clone()
        })
    }

    /// The IDs that remain after the cluster has removed the node.
    pub fn into_disowned(&self, afterwards: AfterRemoval) -> Disowned {
        Disowned {
            afterwards,
            enrolment_id: self.identity.enrolment_id,
            cluster_id: self.identity.cluster_id,
            node_id: self.identity.node_id,
        }
    }
}

impl Disowned {
    /// The owner in the header of its former data partition.
    pub fn data_owner(&self) -> Owner {
        Owner {
            enrolment_id: self.enrolment_id,
            node_id: self.node_id,
            cluster_id: self.cluster_id,
        }
    }
}

impl Sealed {
    /// ID of this enrolment of the machine.
    pub fn enrolment_id(&self) -> EnrolmentId {
        match self {
            Self::Founding(founding) => founding.identity.enrolment_id,
            Self::Registering(registering) => registering.enrolment_id,
            Self::Member(member) => member.identity.enrolment_id,
            Self::Disowned(disowned) => disowned.enrolment_id,
        }
    }

    /// Whether the TPM seals it; `None` if the cluster has not said yet.
    pub fn uses_tpm(&self) -> Option<bool> {
        let usage = match self {
            Self::Founding(founding) => founding.identity.tpm_usage,
            Self::Registering(registering) => registering.answer.as_ref()?.tpm_usage,
            Self::Member(member) => member.identity.tpm_usage,
            // No key is left.
            Self::Disowned(_) => return Some(false),
        };
        Some(usage == TpmUsage::PresentAndUsed)
    }

    /// Who can open it besides the TPM.
    fn recovery_recipient(&self) -> Option<RecoveryRecipient> {
        let recovery = match self {
            Self::Founding(founding) => founding.recovery.as_ref(),
            Self::Member(member) => member.recovery.as_ref(),
            // The data partition is empty: the machine can begin anew.
            Self::Registering(_) | Self::Disowned(_) => None,
        };
        recovery.map(|recovery| recovery.recipient)
    }

    /// How the machine reaches its networks, as it was saved from the parameters.
    pub fn network(&self) -> Option<&Network> {
        match self {
            Self::Founding(founding) => Some(&founding.identity.network),
            Self::Registering(registering) => Some(&registering.network),
            Self::Member(member) => Some(&member.identity.network),
            Self::Disowned(_) => None,
        }
    }

    /// Name of the phase.
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
#[cfg(test)]
pub(crate) mod tpm_tests;
