//! The sealed configuration: what a node must know before its data partition
//! is open. It lies on the ESP in two slots.
//!
//! On disk it is one protobuf message with a phase in it; in memory it is the
//! enum [`Sealed`], in which each phase has exactly the fields that it has.
//! The one is parsed into the other at the edge: a MEMBER that still holds its
//! cluster unlock key, or a FOUNDING without a node key, does not exist behind
//! this module.
//!
//! # Formats
//! A configuration that is sealed by a TPM and one that is not are different
//! formats with different magic. The one is never tried as the other: to do so
//! would turn "the TPM refuses" into "this is nonsense", and nonsense into a
//! reason to begin anew. This release writes and reads the plain one, and
//! names the other when it meets it.
//!
//! # Record
//! Length of the message (u32, little-endian), message, zeros. Before MEMBER
//! the message holds a key that must not outlast that phase, and slots are
//! written in place; so the record never shrinks, and a shorter message
//! overwrites all of the longer one before it.

use std::{fs, sync::Arc};

use hearth_api::{
    identity::{
        ClusterId, ClusterUnlockKey, FirstContactSecret, JoinKey, NodeId, NodeKey, NodeUnlockKey,
        PublicKey,
    },
    private::{self, EnrolmentPhase, SealedConfiguration},
    v1::{ClusterConfiguration, ColdStartPolicy, Label, NodeRoles, StorageSecurity, TpmUsage},
};
use hearth_base::sys::{
    files::{self, FileError},
    slots::{Damage, FileSlot, HEADER_LEN, Loaded, MAX_PAYLOAD, SlotError, SlotFormat, SlotPair},
};
use prost::Message;
use rustls_pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::EnrolmentId;
use crate::{
    layout::{Esp, StateFile},
    parameters::StaticNetwork,
    storage::{Mode, Volume, header::Owner, keys::Secrets},
};

const VERSION: u32 = 1;
/// The format that this release reads and writes.
const PLAIN: SlotFormat = SlotFormat {
    magic: *b"HRTHPLSC",
    version: VERSION,
};
/// Begins a configuration that a TPM has sealed. Kept for that alone.
const TPM_MAGIC: &[u8; 8] = b"HRTHTPSC";

/// Records are multiples of this with their slot's header.
const BLOCK: usize = 4096;

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
    /// Who may take ownership.
    pub owner: PublicKey,
    /// The cluster's CA. Known from when the authorities are on the data
    /// partition; from then on that must not be made anew.
    pub cluster_ca: Option<CertificateDer<'static>>,
    /// Proves the CA to the owner.
    pub first_contact_secret: FirstContactSecret,
    /// X25519, for cold-start policy OWNER.
    pub recovery_recipient: Option<[u8; 32]>,
    /// Of the cluster.
    pub configuration: ClusterConfiguration,
    /// Of this node.
    pub roles: NodeRoles,
    /// Of this node.
    pub labels: Vec<Label>,
}

/// Phase REGISTERING: what makes a node the same one when it asks again. What
/// the cluster answers is added with the release that can ask.
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
    /// As the parameters gave it.
    pub network: Option<StaticNetwork>,
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

/// The sealed configuration, by phase.
#[derive(Clone, Debug)]
pub enum Sealed {
    /// The node founds a cluster.
    Founding(Arc<Founding>),
    /// The node asks to be taken in.
    Registering(Arc<Registering>),
    /// The node belongs to a cluster.
    Member(Arc<Member>),
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
            owner: Some(self.owner),
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
        }
    }

    /// How to reach the network, as the parameters once gave it.
    pub fn network(&self) -> Option<&StaticNetwork> {
        match self {
            Self::Founding(founding) => founding.identity.network.as_ref(),
            Self::Registering(registering) => registering.network.as_ref(),
            Self::Member(member) => member.identity.network.as_ref(),
        }
    }

    /// The phase's name.
    pub fn phase(&self) -> &'static str {
        match self {
            Self::Founding(_) => "FOUNDING",
            Self::Registering(_) => "REGISTERING",
            Self::Member(_) => "MEMBER",
        }
    }

    /// Whether both are the same in every field. By their encoding, as the
    /// secrets among them are not made for comparison.
    pub fn is_same(&self, other: &Self) -> bool {
        *self.encode() == *other.encode()
    }

    pub(super) fn encode(&self) -> Zeroizing<Vec<u8>> {
        let mut message = self.to_message();
        let bytes = Zeroizing::new(message.encode_to_vec());
        wipe(&mut message);
        bytes
    }

    fn to_message(&self) -> SealedConfiguration {
        match self {
            Self::Founding(founding) => SealedConfiguration {
                phase: EnrolmentPhase::Founding.into(),
                cluster_ca: der(founding.cluster_ca.as_ref()),
                owner_public_key: founding.owner.as_bytes().to_vec(),
                node_key: founding.node_key.expose_seed().to_vec(),
                cluster_unlock_key: founding.cluster_unlock_key.expose().to_vec(),
                founding: Some(private::Founding {
                    first_contact_secret: founding.first_contact_secret.expose().to_vec(),
                    recovery_recipient: founding
                        .recovery_recipient
                        .map(|recipient| recipient.to_vec())
                        .unwrap_or_default(),
                    configuration: Some(founding.configuration.clone()),
                    roles: Some(founding.roles),
                    labels: founding.labels.clone(),
                }),
                ..identity_message(&founding.identity)
            },
            Self::Registering(registering) => SealedConfiguration {
                version: VERSION,
                phase: EnrolmentPhase::Registering.into(),
                enrolment_id: registering.enrolment_id.as_bytes().to_vec(),
                node_id: registering.node_id.to_string(),
                node_key: registering.node_key.expose_seed().to_vec(),
                node_unlock_key: registering.node_unlock_key.expose().to_vec(),
                cluster_unlock_key: registering.cluster_unlock_key.expose().to_vec(),
                join_key: registering.join_key.expose_seed().to_vec(),
                cluster_ca: registering.cluster_ca.to_vec(),
                network_config: registering.network.as_ref().map(StaticNetwork::to_message),
                ..SealedConfiguration::default()
            },
            Self::Member(member) => SealedConfiguration {
                phase: EnrolmentPhase::Member.into(),
                cluster_ca: member.cluster_ca.to_vec(),
                owner_public_key: member
                    .owner
                    .map(|owner| owner.as_bytes().to_vec())
                    .unwrap_or_default(),
                ..identity_message(&member.identity)
            },
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, SealedError> {
        let mut message = SealedConfiguration::decode(bytes)
            .map_err(|error| SealedError::content("message", "a sealed configuration", error))?;
        let sealed = parse(&message);
        wipe(&mut message);
        sealed
    }
}

fn der(certificate: Option<&CertificateDer<'_>>) -> Vec<u8> {
    certificate.map(|c| c.to_vec()).unwrap_or_default()
}

fn identity_message(identity: &Identity) -> SealedConfiguration {
    SealedConfiguration {
        version: VERSION,
        enrolment_id: identity.enrolment_id.as_bytes().to_vec(),
        cluster_id: identity.cluster_id.as_bytes().to_vec(),
        node_id: identity.node_id.to_string(),
        node_unlock_key: identity.node_unlock_key.expose().to_vec(),
        join_key: identity.join_key.expose_seed().to_vec(),
        storage_security: identity.storage_security.into(),
        tpm_usage: identity.tpm_usage.into(),
        cold_start_policy: identity.cold_start_policy.into(),
        key_epoch: identity.key_epoch,
        network_config: identity.network.as_ref().map(StaticNetwork::to_message),
        ..SealedConfiguration::default()
    }
}

/// The generated type does not wipe itself.
fn wipe(message: &mut SealedConfiguration) {
    use zeroize::Zeroize;
    message.node_unlock_key.zeroize();
    message.join_key.zeroize();
    message.node_key.zeroize();
    message.cluster_unlock_key.zeroize();
    if let Some(founding) = &mut message.founding {
        founding.first_contact_secret.zeroize();
    }
}

fn parse(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    if message.version != VERSION {
        return Err(SealedError::content(
            "version",
            format!("{VERSION}"),
            message.version,
        ));
    }
    match message.phase() {
        EnrolmentPhase::Founding => parse_founding(message),
        EnrolmentPhase::Registering => parse_registering(message),
        EnrolmentPhase::Member => parse_member(message),
        EnrolmentPhase::Disowned | EnrolmentPhase::Unspecified => {
            Err(SealedError::content("phase", "one", message.phase))
        }
    }
}

/// `field("name", …)` gives the field's error its name.
fn field<T, E: std::fmt::Display>(
    name: &'static str,
    parsed: Result<T, E>,
) -> Result<T, SealedError> {
    parsed.map_err(|error| SealedError::content(name, "a valid one", error))
}

fn absent(name: &'static str, phase: &str, length: usize) -> Result<(), SealedError> {
    match length {
        0 => Ok(()),
        length => Err(SealedError::content(
            name,
            format!("nothing in phase {phase}"),
            format!("{length} bytes"),
        )),
    }
}

fn certificate(bytes: &[u8]) -> Option<CertificateDer<'static>> {
    (!bytes.is_empty()).then(|| CertificateDer::from(bytes.to_vec()))
}

fn network(message: &SealedConfiguration) -> Result<Option<StaticNetwork>, SealedError> {
    let network = message.network_config.clone().map(StaticNetwork::parse);
    field("network_config", network.transpose())
}

fn parse_identity(message: &SealedConfiguration) -> Result<Identity, SealedError> {
    let storage_security = message.storage_security();
    let tpm_usage = message.tpm_usage();
    let cold_start_policy = message.cold_start_policy();
    for (name, given) in [
        (
            "storage_security",
            storage_security != StorageSecurity::Unspecified,
        ),
        ("tpm_usage", tpm_usage != TpmUsage::Unspecified),
        (
            "cold_start_policy",
            cold_start_policy != ColdStartPolicy::Unspecified,
        ),
    ] {
        if !given {
            return Err(SealedError::content(name, "a known value", "none"));
        }
    }
    Ok(Identity {
        enrolment_id: field("enrolment_id", message.enrolment_id[..].try_into())?,
        cluster_id: field("cluster_id", message.cluster_id[..].try_into())?,
        node_id: field("node_id", message.node_id.parse())?,
        node_unlock_key: field("node_unlock_key", message.node_unlock_key[..].try_into())?,
        join_key: field("join_key", JoinKey::from_seed_slice(&message.join_key))?,
        storage_security,
        tpm_usage,
        cold_start_policy,
        key_epoch: message.key_epoch,
        network: network(message)?,
    })
}

fn parse_founding(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    let Some(founding) = &message.founding else {
        return Err(SealedError::content(
            "founding",
            "it in phase FOUNDING",
            "none",
        ));
    };
    let recovery_recipient = match &founding.recovery_recipient[..] {
        [] => None,
        bytes => Some(field(
            "founding.recovery_recipient",
            <[u8; 32]>::try_from(bytes),
        )?),
    };
    Ok(Sealed::Founding(Arc::new(Founding {
        identity: parse_identity(message)?,
        node_key: field("node_key", NodeKey::from_seed_slice(&message.node_key))?,
        cluster_unlock_key: field(
            "cluster_unlock_key",
            message.cluster_unlock_key[..].try_into(),
        )?,
        owner: field("owner_public_key", message.owner_public_key[..].try_into())?,
        cluster_ca: certificate(&message.cluster_ca),
        first_contact_secret: field(
            "founding.first_contact_secret",
            founding.first_contact_secret[..].try_into(),
        )?,
        recovery_recipient,
        configuration: founding.configuration.clone().unwrap_or_default(),
        roles: founding.roles.unwrap_or_default(),
        labels: founding.labels.clone(),
    })))
}

fn parse_registering(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    let Some(cluster_ca) = certificate(&message.cluster_ca) else {
        return Err(SealedError::content("cluster_ca", "it", "none"));
    };
    Ok(Sealed::Registering(Arc::new(Registering {
        enrolment_id: field("enrolment_id", message.enrolment_id[..].try_into())?,
        node_id: field("node_id", message.node_id.parse())?,
        node_key: field("node_key", NodeKey::from_seed_slice(&message.node_key))?,
        node_unlock_key: field("node_unlock_key", message.node_unlock_key[..].try_into())?,
        cluster_unlock_key: field(
            "cluster_unlock_key",
            message.cluster_unlock_key[..].try_into(),
        )?,
        join_key: field("join_key", JoinKey::from_seed_slice(&message.join_key))?,
        cluster_ca,
        network: network(message)?,
    })))
}

fn parse_member(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    absent("node_key", "MEMBER", message.node_key.len())?;
    absent(
        "cluster_unlock_key",
        "MEMBER",
        message.cluster_unlock_key.len(),
    )?;
    absent("founding", "MEMBER", message.founding.iter().len())?;
    let Some(cluster_ca) = certificate(&message.cluster_ca) else {
        return Err(SealedError::content("cluster_ca", "it", "none"));
    };
    let owner = match &message.owner_public_key[..] {
        [] => None,
        bytes => Some(field("owner_public_key", bytes.try_into())?),
    };
    Ok(Sealed::Member(Arc::new(Member {
        identity: parse_identity(message)?,
        cluster_ca,
        owner,
    })))
}

/// Why there is no sealed configuration to be had from what is on the ESP.
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// The slots cannot be read or written, or hold nothing valid.
    #[error(transparent)]
    Slots(#[from] SlotError),
    /// The ESP cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A TPM has sealed it.
    #[error("{place}: sealed by a TPM, which this release cannot unseal")]
    SealedByTpm {
        /// The slot.
        place: String,
    },
    /// Valid slots with a content that makes no sense.
    #[error("{field}: wanted {wanted}, found {found}")]
    Content {
        /// The field.
        field: &'static str,
        /// What it should hold.
        wanted: String,
        /// What it holds; no secret.
        found: String,
    },
}

impl SealedError {
    fn content(field: &'static str, wanted: impl Into<String>, found: impl ToString) -> Self {
        Self::Content {
            field,
            wanted: wanted.into(),
            found: found.to_string(),
        }
    }

    /// Whether it says something about the medium, which may recover, and
    /// nothing about what was written on it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Slots(SlotError::Corrupt { a, b, .. }) => [a, b]
                .into_iter()
                .any(|damage| matches!(damage, Damage::Unreadable(_))),
            Self::Slots(SlotError::Io { .. }) | Self::File(_) => true,
            _ => false,
        }
    }
}

/// What the ESP holds.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Nothing: the machine was never a node, or has been wiped.
    Absent,
    /// The very first save was cut off. As good as absent if the data
    /// partition is blank, and only then.
    NeverCompleted,
    /// A configuration.
    Sealed(Sealed),
}

/// The sealed configuration on an ESP.
#[derive(Debug)]
pub struct SealedStore {
    esp: Esp,
    file: StateFile,
}

impl SealedStore {
    /// The one on this ESP.
    pub fn new(esp: &Esp) -> Self {
        Self {
            esp: esp.clone(),
            file: esp.sealed_configuration(),
        }
    }

    /// Reads it, and mends a slot that lags behind.
    pub fn load(&self) -> Result<Stored, SealedError> {
        for path in self.file.paths() {
            // One that cannot be read is for the slots to judge: the other
            // one may be enough.
            let slot = files::read_limited(&path, (HEADER_LEN + MAX_PAYLOAD) as u64);
            let slot = slot.ok().flatten();
            if slot.is_some_and(|bytes| Zeroizing::new(bytes).starts_with(TPM_MAGIC)) {
                return Err(SealedError::SealedByTpm {
                    place: path.display().to_string(),
                });
            }
        }
        match self.slots().load()? {
            Loaded::Absent => Ok(Stored::Absent),
            Loaded::NeverCompleted => Ok(Stored::NeverCompleted),
            Loaded::Value { payload, .. } => {
                Ok(Stored::Sealed(Sealed::decode(unframe(&payload)?)?))
            }
        }
    }

    /// Replaces it. Durable when this returns; no byte of the former one is
    /// left in its files.
    pub fn save(&self, sealed: &Sealed) -> Result<(), SealedError> {
        self.esp.make_directories()?;
        let former = self
            .file
            .paths()
            .map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len() as usize));
        let record = frame(&sealed.encode(), former.into_iter().max().unwrap_or(0));
        self.slots().save(&record)?;
        Ok(())
    }

    /// Removes it for good.
    pub fn erase(&self) -> Result<(), SealedError> {
        Ok(self.slots().erase()?)
    }

    fn slots(&self) -> SlotPair<FileSlot> {
        self.file.slots(PLAIN)
    }
}

/// Frames a message so that the slot's file is at least `former` bytes long.
fn frame(message: &[u8], former: usize) -> Zeroizing<Vec<u8>> {
    let file = (HEADER_LEN + 4 + message.len())
        .max(former)
        .next_multiple_of(BLOCK)
        .min(HEADER_LEN + MAX_PAYLOAD);
    let mut record = Zeroizing::new(vec![0; file - HEADER_LEN]);
    record[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
    record[4..4 + message.len()].copy_from_slice(message);
    record
}

fn unframe(record: &[u8]) -> Result<&[u8], SealedError> {
    let message = record
        .split_first_chunk::<4>()
        .and_then(|(length, rest)| rest.get(..u32::from_le_bytes(*length) as usize));
    message.ok_or_else(|| {
        SealedError::content(
            "record",
            "a message of the length it announces",
            format!("{} bytes", record.len()),
        )
    })
}

#[cfg(test)]
#[path = "sealed_tests.rs"]
mod tests;
