//! Encodes the sealed configuration as the one protobuf message that is stored, and decodes it. A
//! field that does not belong to the phase is an error.

use std::sync::Arc;

use hearth_api::identity::{JoinKey, NodeKey, PublicKey};
use hearth_api::manifests::Manifest;
use hearth_api::private::{self, EnrolmentPhase, SealedConfiguration};
use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::{ColdStartPolicy, StorageSecurity, TpmUsage};
use hearth_parameters::{ClusterSeed, Network};
use prost::Message;
use rustls_pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::{
    Answer, Asking, Disowned, Founding, Identity, Member, Recovery, Registering, Sealed,
    SealedError, VERSION,
};

impl Sealed {
    /// Whether both are equal in every field. Compares the encodings, because the secrets do not
    /// implement comparison.
    pub fn is_same(&self, other: &Self) -> bool {
        *self.encode() == *other.encode()
    }

    /// The message in a record.
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        let mut message = self.to_message();
        let bytes = Zeroizing::new(message.encode_to_vec());
        wipe(&mut message);
        bytes
    }

    pub(super) fn to_message(&self) -> SealedConfiguration {
        match self {
            Self::Founding(founding) => SealedConfiguration {
                phase: EnrolmentPhase::Founding.into(),
                cluster_ca: der(founding.cluster_ca.as_ref()),
                owner_public_key: founding.seed.owner.as_bytes().to_vec(),
                node_key: founding.node_key.expose_seed().to_vec(),
                cluster_unlock_key: founding.cluster_unlock_key.expose().to_vec(),
                recovery: founding.recovery.as_ref().map(recovery_message),
                founding: Some(private::Founding {
                    first_contact_secret: founding.seed.first_contact_secret.expose().to_vec(),
                    recovery_recipient: RecoveryRecipient::to_field(
                        founding.seed.recovery_recipient,
                    ),
                    configuration: Some(founding.seed.configuration.clone()),
                    roles: Some(founding.roles),
                    labels: founding.seed.labels.clone(),
                    manifests: founding
                        .seed
                        .manifests
                        .iter()
                        .map(Manifest::to_json)
                        .collect(),
                }),
                ..identity_message(&founding.identity)
            },
            Self::Registering(registering) => registering_message(registering),
            Self::Member(member) => SealedConfiguration {
                phase: EnrolmentPhase::Member.into(),
                cluster_ca: member.cluster_ca.to_vec(),
                owner_public_key: PublicKey::to_field(member.owner),
                cluster_unlock_key: member
                    .cluster_unlock_key
                    .as_ref()
                    .map(|key| key.expose().to_vec())
                    .unwrap_or_default(),
                recovery: member.recovery.as_ref().map(recovery_message),
                ..identity_message(&member.identity)
            },
            Self::Disowned(disowned) => SealedConfiguration {
                version: VERSION,
                phase: EnrolmentPhase::Disowned.into(),
                enrolment_id: disowned.enrolment_id.as_bytes().to_vec(),
                cluster_id: disowned.cluster_id.as_bytes().to_vec(),
                node_id: disowned.node_id.to_string(),
                reset: disowned.afterwards.is_reset(),
                ..SealedConfiguration::default()
            },
        }
    }

    /// Decodes the message in a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, SealedError> {
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

fn recovery_message(recovery: &Recovery) -> private::Recovery {
    private::Recovery {
        recipient: recovery.recipient.as_bytes().to_vec(),
        wrapped_key: recovery.wrapped_key.as_bytes().to_vec(),
    }
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
        network_config: identity.network.to_message(),
        ..SealedConfiguration::default()
    }
}

fn registering_message(registering: &Registering) -> SealedConfiguration {
    let message = SealedConfiguration {
        version: VERSION,
        phase: EnrolmentPhase::Registering.into(),
        enrolment_id: registering.enrolment_id.as_bytes().to_vec(),
        node_id: registering.node_id.to_string(),
        node_key: registering.node_key.expose_seed().to_vec(),
        node_unlock_key: registering.node_unlock_key.expose().to_vec(),
        cluster_unlock_key: registering.cluster_unlock_key.expose().to_vec(),
        join_key: registering.join_key.expose_seed().to_vec(),
        cluster_ca: registering.cluster_ca.to_vec(),
        registering: Some(private::Registering {
            directory: Some(registering.asking.directory.clone()),
            register_ticket: registering.asking.ticket.expose().to_vec(),
            labels: registering.asking.labels.clone(),
        }),
        network_config: registering.network.to_message(),
        ..SealedConfiguration::default()
    };
    match &registering.answer {
        None => message,
        Some(answer) => SealedConfiguration {
            cluster_id: answer.cluster_id.as_bytes().to_vec(),
            storage_security: answer.storage_security.into(),
            tpm_usage: answer.tpm_usage.into(),
            cold_start_policy: answer.cold_start_policy.into(),
            ..message
        },
    }
}

/// The generated type does not zeroize itself.
fn wipe(message: &mut SealedConfiguration) {
    use zeroize::Zeroize;
    message.node_unlock_key.zeroize();
    message.join_key.zeroize();
    message.node_key.zeroize();
    message.cluster_unlock_key.zeroize();
    if let Some(founding) = &mut message.founding {
        founding.first_contact_secret.zeroize();
    }
    if let Some(registering) = &mut message.registering {
        registering.register_ticket.zeroize();
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
    if message.reset && message.phase() != EnrolmentPhase::Disowned {
        return Err(SealedError::content("reset", "none before DISOWNED", true));
    }
    match message.phase() {
        EnrolmentPhase::Founding => parse_founding(message),
        EnrolmentPhase::Registering => parse_registering(message),
        EnrolmentPhase::Member => parse_member(message),
        EnrolmentPhase::Disowned => parse_disowned(message),
        EnrolmentPhase::Unspecified => Err(SealedError::content("phase", "a phase", message.phase)),
    }
}

/// Adds the field's name to a parse error.
fn field<T, E: std::fmt::Display>(
    name: &'static str,
    parsed: Result<T, E>,
) -> Result<T, SealedError> {
    parsed.map_err(|error| SealedError::content(name, "a valid value", error))
}

fn absent(name: &'static str, phase: &str, length: usize) -> Result<(), SealedError> {
    match length {
        0 => Ok(()),
        length => Err(SealedError::content(
            name,
            format!("no value in phase {phase}"),
            format!("{length} bytes"),
        )),
    }
}

fn certificate(bytes: &[u8]) -> Option<CertificateDer<'static>> {
    (!bytes.is_empty()).then(|| CertificateDer::from(bytes.to_vec()))
}

fn recovery(message: &SealedConfiguration) -> Result<Option<Recovery>, SealedError> {
    let Some(recovery) = &message.recovery else {
        return Ok(None);
    };
    Ok(Some(Recovery {
        recipient: field("recovery.recipient", recovery.recipient[..].try_into())?,
        wrapped_key: field("recovery.wrapped_key", recovery.wrapped_key[..].try_into())?,
    }))
}

fn network(message: &SealedConfiguration) -> Result<Network, SealedError> {
    let network = message.network_config.clone().unwrap_or_default();
    field("network_config", Network::parse(network))
}

fn parse_answer(message: &SealedConfiguration) -> Result<Answer, SealedError> {
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
    Ok(Answer {
        cluster_id: field("cluster_id", message.cluster_id[..].try_into())?,
        storage_security,
        tpm_usage,
        cold_start_policy,
    })
}

fn parse_identity(message: &SealedConfiguration) -> Result<Identity, SealedError> {
    let answer = parse_answer(message)?;
    Ok(Identity {
        enrolment_id: field("enrolment_id", message.enrolment_id[..].try_into())?,
        cluster_id: answer.cluster_id,
        node_id: field("node_id", message.node_id.parse())?,
        node_unlock_key: field("node_unlock_key", message.node_unlock_key[..].try_into())?,
        join_key: field("join_key", JoinKey::from_seed_slice(&message.join_key))?,
        storage_security: answer.storage_security,
        tpm_usage: answer.tpm_usage,
        cold_start_policy: answer.cold_start_policy,
        key_epoch: message.key_epoch,
        network: network(message)?,
    })
}

fn parse_founding(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    absent("registering", "FOUNDING", message.registering.iter().len())?;
    let Some(founding) = &message.founding else {
        return Err(SealedError::content(
            "founding",
            "a value in phase FOUNDING",
            "none",
        ));
    };
    let recovery_recipient = RecoveryRecipient::from_field(&founding.recovery_recipient);
    Ok(Sealed::Founding(Arc::new(Founding {
        identity: parse_identity(message)?,
        node_key: field("node_key", NodeKey::from_seed_slice(&message.node_key))?,
        cluster_unlock_key: field(
            "cluster_unlock_key",
            message.cluster_unlock_key[..].try_into(),
        )?,
        recovery: recovery(message)?,
        cluster_ca: certificate(&message.cluster_ca),
        roles: founding.roles.unwrap_or_default(),
        seed: ClusterSeed {
            owner: field("owner_public_key", message.owner_public_key[..].try_into())?,
            first_contact_secret: field(
                "founding.first_contact_secret",
                founding.first_contact_secret[..].try_into(),
            )?,
            recovery_recipient: field("founding.recovery_recipient", recovery_recipient)?,
            configuration: founding.configuration.clone().unwrap_or_default(),
            labels: founding.labels.clone(),
            manifests: field(
                "founding.manifests",
                Manifest::parse_all(&founding.manifests),
            )?,
        },
    })))
}

fn parse_registering(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    absent("founding", "REGISTERING", message.founding.iter().len())?;
    absent(
        "owner_public_key",
        "REGISTERING",
        message.owner_public_key.len(),
    )?;
    absent("recovery", "REGISTERING", message.recovery.iter().len())?;
    let Some(asking) = &message.registering else {
        return Err(SealedError::content(
            "registering",
            "a value in phase REGISTERING",
            "none",
        ));
    };
    let Some(cluster_ca) = certificate(&message.cluster_ca) else {
        return Err(SealedError::content("cluster_ca", "a certificate", "none"));
    };
    // The answer is either complete or absent.
    let unanswered = message.cluster_id.is_empty()
        && message.storage_security() == StorageSecurity::Unspecified
        && message.tpm_usage() == TpmUsage::Unspecified
        && message.cold_start_policy() == ColdStartPolicy::Unspecified;
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
        asking: Asking {
            directory: asking.directory.clone().unwrap_or_default(),
            ticket: field(
                "registering.register_ticket",
                asking.register_ticket[..].try_into(),
            )?,
            labels: asking.labels.clone(),
        },
        answer: match unanswered {
            true => None,
            false => Some(parse_answer(message)?),
        },
        network: network(message)?,
    })))
}

fn parse_member(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    absent("node_key", "MEMBER", message.node_key.len())?;
    let identity = parse_identity(message)?;
    let key = &message.cluster_unlock_key[..];
    if !identity.opens_itself() {
        absent("cluster_unlock_key", "MEMBER", key.len())?;
    }
    let cluster_unlock_key = match key {
        [] => None,
        key => Some(field("cluster_unlock_key", key.try_into())?),
    };
    absent("founding", "MEMBER", message.founding.iter().len())?;
    absent("registering", "MEMBER", message.registering.iter().len())?;
    let Some(cluster_ca) = certificate(&message.cluster_ca) else {
        return Err(SealedError::content("cluster_ca", "a certificate", "none"));
    };
    let owner = PublicKey::from_field(&message.owner_public_key);
    let owner = field("owner_public_key", owner)?;
    Ok(Sealed::Member(Arc::new(Member {
        identity,
        cluster_ca,
        owner,
        cluster_unlock_key,
        recovery: recovery(message)?,
    })))
}

fn parse_disowned(message: &SealedConfiguration) -> Result<Sealed, SealedError> {
    for (name, length) in [
        ("node_unlock_key", message.node_unlock_key.len()),
        ("join_key", message.join_key.len()),
        ("node_key", message.node_key.len()),
        ("cluster_unlock_key", message.cluster_unlock_key.len()),
        ("founding", message.founding.iter().len()),
        ("registering", message.registering.iter().len()),
        ("recovery", message.recovery.iter().len()),
    ] {
        absent(name, "DISOWNED", length)?;
    }
    Ok(Sealed::Disowned(Disowned {
        enrolment_id: field("enrolment_id", message.enrolment_id[..].try_into())?,
        cluster_id: field("cluster_id", message.cluster_id[..].try_into())?,
        node_id: field("node_id", message.node_id.parse())?,
        afterwards: AfterRemoval::of(message.reset),
    }))
}
