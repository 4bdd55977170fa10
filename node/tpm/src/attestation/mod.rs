//! Attestation: a machine proves to a curator what it booted, by its TPM.
//!
//! Two keys of the TPM take part, and both are derived from its endorsement seed, so neither is stored and both stay the
//! same as long as the TPM exists, also when it is cleared:
//!
//! - the *endorsement key* ([`EndorsementKey`]) identifies the TPM. Its manufacturer may have certified it. It only
//!   decrypts.
//! - the *attestation key* ([`AttestationKey`]) signs, and nothing but structures that the TPM itself has made.
//!
//! ```text
//! node                                            curator
//!  │ both public keys, the certificate ───────────▶ │
//!  │                                                │ Challenge::new: a nonce, and a secret encrypted
//!  │ ◀────────────────────────── Challenge::asked   │ to the endorsement key and the attestation key's name
//!  │ Tpm::attest                                    │
//!  │ the secret, a quote over nonce and caller ────▶│ Challenge::verify, then TrustedImage::judge
//! ```
//!
//! # What is proven
//! - The secret comes back only if both keys are in one TPM: the TPM decrypts it for the endorsement key, and releases it
//!   only if a key with that name is loaded. The name is the digest over the key's public area, which the curator writes
//!   itself ([`AttestationKey::name`]): a key with other attributes, which would sign what a program has written, has
//!   another name.
//! - The quote is signed by that key, and so are the values of the PCRs. It is fresh, because it has the nonce, and it is
//!   the caller's, because it has the public key of the caller's TLS certificate: an image that is trusted asks its TPM
//!   for its own key only.
//! - The events that the node sends are those in the PCRs, because a replay gives the quoted values. Nothing else of the
//!   log is believed, not even the type of an event.
//!
//! Everything on the curator's side is computed from bytes; no TPM is needed, and none is emulated.
//!
//! # Why these keys
//! P-256 only: TPMs of the PC Client profile have the template since 2015, and no padding of RSA is needed. Why no
//! certificate of the attestation key: a curator asks at each boot anyway.

mod commands;
mod credential;
mod quote;

use super::channel::Error;
use super::commands::Template;
use super::pcr::{Digest, Pcr, PcrSelection};
use super::session::Point;
use super::tpm::Tpm;
use super::wire::{Malformed, Reader, Writer};

pub use credential::{Asked, Challenge, ChallengeError, Proof, ProofError};
pub use quote::{Quote, QuoteError, Quoted};

/// The registers that are quoted: what the firmware started, the image, and its command line.
pub const QUOTED: PcrSelection =
    PcrSelection::of([Pcr::BOOT_PROGRAMS, Pcr::KERNEL_IMAGE, Pcr::COMMAND_LINE]);

/// The public half of a TPM's endorsement key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndorsementKey(pub(crate) Point);

/// The public half of a TPM's attestation key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttestationKey(pub(crate) Point);

impl EndorsementKey {
    /// From [`Self::to_bytes`].
    ///
    /// # Errors
    /// If it is no point with coordinates of at most 32 bytes. Whether it lies on the curve is seen when it is used.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        point(bytes).map(Self)
    }

    /// TPMS_ECC_POINT: x and y, each with its size (u16 BE) and at most 32 bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        bytes_of(&self.0)
    }

    /// The digest in the key's name. No two TPMs have the same.
    pub fn name(&self) -> Digest {
        Digest::of(&[&self.0.public_area(Template::Endorsement)])
    }

    /// SEC 1, uncompressed: as in a certificate.
    pub fn uncompressed(&self) -> [u8; 65] {
        self.0.uncompressed()
    }
}

impl AttestationKey {
    /// From [`Self::to_bytes`].
    ///
    /// # Errors
    /// As [`EndorsementKey::from_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        point(bytes).map(Self)
    }

    /// TPMS_ECC_POINT, as [`EndorsementKey::to_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        bytes_of(&self.0)
    }

    /// The digest in the key's name.
    pub fn name(&self) -> Digest {
        Digest::of(&[&self.0.public_area(Template::Attestation)])
    }
}

fn point(bytes: &[u8]) -> Result<Point, Malformed> {
    let mut reader = Reader::new(bytes);
    let point = Point::read(&mut reader)?;
    reader.end()?;
    Ok(point)
}

fn bytes_of(point: &Point) -> Vec<u8> {
    point.write(Writer::new()).finish().to_vec()
}

impl Tpm {
    /// The keys of this TPM.
    pub fn attestation_keys(&mut self) -> Result<(EndorsementKey, AttestationKey), Error> {
        self.call(|channel| {
            let (_, endorsement) = channel.endorsement_key()?;
            let (_, attestation) = channel.attestation_key()?;
            Ok((endorsement, attestation))
        })
    }

    /// The manufacturer's certificate of the endorsement key, if there is one: X.509 in DER, perhaps with bytes after it.
    pub fn endorsement_certificate(&mut self) -> Result<Option<Vec<u8>>, Error> {
        self.call(|channel| channel.endorsement_certificate())
    }

    /// Answers a curator. `caller`: the public key of the certificate with which this node calls it.
    pub fn attest(&mut self, asked: &Asked, caller: &[u8; 32]) -> Result<Proof, Error> {
        self.call(|channel| {
            let (endorsement, _) = channel.endorsement_key()?;
            let (attestation, _) = channel.attestation_key()?;
            let secret = channel.activate(attestation, endorsement, asked)?;
            let quote = channel.quote(attestation, &asked.qualifying(caller))?;
            Ok(Proof { secret, quote })
        })
    }
}
