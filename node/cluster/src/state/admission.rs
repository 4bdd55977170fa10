//! The records of admission under the policy KNOWN_IMAGES: which images are trusted, and which TPM a node has.

use hearth_api::private::{StoredEndorsement, StoredImage};
use hearth_api::v1;
use hearth_tpm::Digest;
use hearth_tpm::attestation::EndorsementKey;
use hearth_tpm::images::TrustedImage;
use prost::Message as _;

use super::{RecordError, VERSION, decode, image_key, malformed};

/// An image that operators trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    /// The image.
    pub image: TrustedImage,
    /// The Unix time in seconds since when it is trusted.
    pub since: i64,
}

impl Trusted {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let stored: StoredImage = decode(key, bytes, |m: &StoredImage| m.version)?;
        let stored = stored.image.unwrap_or_default();
        let digest = |field: &str, bytes: &[u8]| {
            let digest = bytes.try_into().map(Digest);
            digest.map_err(|_| malformed(key)(format!("{field}: expected 32 bytes")))
        };
        let all = |field: &str, each: &[Vec<u8>]| {
            let digests = each.iter().map(|bytes| digest(field, bytes));
            digests.collect::<Result<Vec<Digest>, RecordError>>()
        };
        let image = TrustedImage {
            parts: digest("parts", &stored.parts)?,
            programs: all("programs", &stored.programs)?,
            command_lines: all("command_lines", &stored.command_lines)?,
        };
        if image_key(&image.parts) != key {
            return Err(malformed(key)(
                "parts: expected those of the key".to_owned(),
            ));
        }
        Ok(Self {
            image,
            since: stored.trusted_at,
        })
    }

    /// Encodes the record.
    pub fn encode(self) -> Vec<u8> {
        StoredImage {
            version: VERSION,
            image: Some(self.into()),
        }
        .encode_to_vec()
    }
}

impl From<Trusted> for v1::TrustedImage {
    fn from(trusted: Trusted) -> Self {
        let bytes = |digests: Vec<Digest>| digests.iter().map(|digest| digest.0.to_vec()).collect();
        Self {
            parts: trusted.image.parts.0.to_vec(),
            programs: bytes(trusted.image.programs),
            command_lines: bytes(trusted.image.command_lines),
            trusted_at: trusted.since,
        }
    }
}

/// The TPM of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endorsement {
    /// By which it is known.
    pub key: EndorsementKey,
    /// The manufacturer's certificate, DER; empty if there is none.
    pub certificate: Vec<u8>,
}

impl Endorsement {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let stored: StoredEndorsement = decode(key, bytes, |m: &StoredEndorsement| m.version)?;
        let own = EndorsementKey::from_bytes(&stored.endorsement_key);
        Ok(Self {
            key: own.map_err(|error| malformed(key)(format!("endorsement key: {error}")))?,
            certificate: stored.certificate,
        })
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        StoredEndorsement {
            version: VERSION,
            endorsement_key: self.key.to_bytes(),
            certificate: self.certificate.clone(),
        }
        .encode_to_vec()
    }
}
