//! Admission: what a machine has to have booted before it gets anything of the cluster.
//!
//! Under the policy KNOWN_IMAGES a machine proves it when it registers, at each join, and when its certificates are renewed.
//! The curator has verified the proof ([`hearth_tpm::attestation`]) before it decides here, so what it proves is true of
//! the caller; these decisions are about whether that is enough.
//!
//! A node keeps the TPM with which it has proven something first. A node that has registered under the policy ANY proves
//! nothing then, so the TPM that it brings at its first join under KNOWN_IMAGES is taken for its own: it has the node's join
//! key, which only the node has.

use hearth_api::identity::NodeId;
use hearth_api::v1::{AdmissionPolicy, ClusterConfiguration};
use hearth_consensus::fenced::{Condition, Write};
use hearth_tpm::Digest;
use hearth_tpm::boot_log::BootEvent;
use hearth_tpm::images::{TrustedImage, judge};

use super::{Rejection, Versioned, as_found};
use crate::state::{self, Endorsement, Trusted};

/// The largest number of trusted images: a cluster needs two or three.
pub const MOST_IMAGES: usize = 64;

/// What a machine has proven.
#[derive(Clone, Debug)]
pub struct Proven {
    /// Its TPM.
    pub endorsement: Endorsement,
    /// What it has booted.
    pub events: Vec<BootEvent>,
}

/// A machine that has booted a trusted image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Its TPM.
    pub endorsement: Endorsement,
    /// The image, by its value of PCR 11.
    pub image: Digest,
}

/// Whether machines have to prove what they have booted.
pub fn is_required(configuration: &ClusterConfiguration) -> bool {
    configuration.admission_policy() == AdmissionPolicy::KnownImages
}

/// Decides whether a machine may enter a cluster in which these images are trusted; `None` if nothing is asked of it.
pub fn decide<'a>(
    configuration: &ClusterConfiguration,
    proven: Option<Proven>,
    trusted: impl IntoIterator<Item = &'a TrustedImage>,
) -> Result<Option<Admission>, Rejection> {
    if !is_required(configuration) {
        return Ok(None);
    }
    let Proven {
        endorsement,
        events,
    } = proven.ok_or(Rejection::NoProof)?;
    let image = judge(trusted, &events)?.parts;
    Ok(Some(Admission { endorsement, image }))
}

/// Adds to `write` that the node has this TPM, unless that is recorded.
///
/// # Errors
/// If another TPM is recorded for the node.
pub(super) fn bind(
    write: Write,
    node: NodeId,
    admission: Option<&Admission>,
    known: Option<&Versioned<Endorsement>>,
) -> Result<Write, Rejection> {
    let Some(admission) = admission else {
        return Ok(write);
    };
    is_own(node, admission, known.map(|known| &known.content))?;
    let key = state::endorsement_key(node);
    let write = write.and(as_found(key.clone(), known));
    Ok(match known {
        Some(_) => write,
        None => write.put(key, admission.endorsement.encode()),
    })
}

/// Whether the machine has the TPM that is recorded for the node.
pub fn is_own(
    node: NodeId,
    admission: &Admission,
    known: Option<&Endorsement>,
) -> Result<(), Rejection> {
    match known {
        Some(known) if known.key != admission.endorsement.key => Err(Rejection::OtherTpm(node)),
        _ => Ok(()),
    }
}

/// Trusts an image besides `count` others; `found` is what is trusted of it before. `None` if that is all of it. What the
/// first node has booted may have more programs than the image's builder knows: those of its firmware.
pub fn trust(
    image: &TrustedImage,
    found: Option<&Versioned<Trusted>>,
    count: usize,
    now: i64,
) -> Result<Option<Write>, Rejection> {
    let trusted = match found {
        None if count >= MOST_IMAGES => return Err(Rejection::TooManyImages(count)),
        None => Trusted {
            image: image.clone(),
            since: now,
        },
        Some(found) => Trusted {
            image: image.with(&found.content.image),
            since: found.content.since,
        },
    };
    if found.is_some_and(|found| found.content == trusted) {
        return Ok(None);
    }
    let key = state::image_key(&image.parts);
    let write = Write::when(as_found(key.clone(), found));
    Ok(Some(write.put(key, trusted.encode())))
}

/// Revokes an image.
pub fn revoke(parts: &Digest, found: Option<&Versioned<Trusted>>) -> Result<Write, Rejection> {
    let found = found.ok_or(Rejection::NoSuchImage(*parts))?;
    let key = state::image_key(parts);
    Ok(Write::when(Condition::Unchanged(key.clone(), found.revision)).delete(key))
}
