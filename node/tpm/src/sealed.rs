//! A secret that a TPM has sealed, as a record that can be stored anywhere.
//!
//! Only the TPM can open the private blob, and it opens it only where the policy holds; nothing in the record is secret.
//! The record has what the TPM needs, and what is needed to say why it refuses: the policy, the values of the literal
//! PCRs, and the name of the storage key. The object's public area is not stored: it follows from the policy, so a record
//! cannot state one policy and carry another.
//!
//! ```text
//! "HTPM"  version 1
//! storage key        32 bytes, the digest in its name
//! unique             32 bytes, the digest that ties public area and private blob together
//! literal PCRs       3 bytes, bit n % 8 of byte n / 8 for PCR n; then 32 bytes for each, the lowest first
//! kind of the key    1 byte: 0 none, 1 ECDSA over P-256, 2 RSA with 2048 bits
//!   key              64 bytes (x, y) or 256 (modulus)
//!   signed PCRs      3 bytes
//! private blob       2 bytes of length, at most 512
//! ```
//!
//! Integers are big-endian. Each record has exactly one encoding.

use std::fmt;

use super::key::{PolicyKey, name_of};
use super::pcr::{Digest, PcrSelection, PcrValues, SHA256};
use super::policy::{EmptyPolicy, Policy, SignedPolicy};
use super::wire::{Malformed, Reader, Writer};

const MAGIC: &[u8; 4] = b"HTPM";
const VERSION: u8 = 1;
/// Larger than what any TPM makes of 128 bytes.
pub(crate) const MAX_PRIVATE: usize = 512;

const NO_KEY: u8 = 0;
const ECDSA_KEY: u8 = 1;
const RSA_KEY: u8 = 2;

/// The identity of a TPM's owner hierarchy: the name of the storage key that is derived from its seed. It changes when
/// the TPM is cleared, and no two TPMs have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StorageKeyName(pub(crate) Digest);

impl fmt::Display for StorageKeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why bytes are not a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not a record, or not a whole one.
    #[error("sealed record: {0}")]
    Malformed(#[from] Malformed),
    /// A record of another release.
    #[error("sealed record: expected version {VERSION}, got {0}")]
    Version(u8),
    /// A policy that always holds.
    #[error("sealed record: {0}")]
    Policy(#[from] EmptyPolicy),
}

/// A sealed secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    pub(crate) storage_key: StorageKeyName,
    pub(crate) unique: [u8; 32],
    pub(crate) policy: Policy,
    pub(crate) literal: PcrValues,
    pub(crate) private: Vec<u8>,
}

impl Sealed {
    /// What has to hold for the secret to be released.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The values that the literal PCRs of the policy must have: those when the secret was sealed.
    pub fn pcr_values(&self) -> &PcrValues {
        &self.literal
    }

    /// The TPM that sealed it.
    pub fn storage_key(&self) -> StorageKeyName {
        self.storage_key
    }

    /// The record as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let start = Writer::new().bytes(MAGIC).u8(VERSION);
        let start = start.bytes(&self.storage_key.0.0).bytes(&self.unique);
        let start = start.bytes(&self.policy.pcrs().bits());
        let values = self
            .literal
            .iter()
            .fold(start, |writer, (_, value)| writer.bytes(&value.0));
        let signed = match self.policy.signed() {
            None => values.u8(NO_KEY),
            Some(signed) => {
                let key = match signed.key() {
                    PolicyKey::EcdsaP256(point) => values.u8(ECDSA_KEY).bytes(point),
                    PolicyKey::Rsa2048(modulus) => values.u8(RSA_KEY).bytes(&modulus[..]),
                };
                key.bytes(&signed.pcrs().bits())
            }
        };
        signed.sized(&self.private).finish().to_vec()
    }

    /// A record from bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        reader.expect("magic", MAGIC)?;
        let version = reader.u8("version")?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let storage_key = StorageKeyName(Digest(reader.array("storage key")?));
        let unique = reader.array("unique")?;
        let pcrs = reader.array("literal PCRs").map(PcrSelection::from_bits)?;
        let mut value = |pcr| Ok((pcr, Digest(reader.array("value of a PCR")?)));
        let literal = pcrs
            .iter()
            .map(&mut value)
            .collect::<Result<_, Malformed>>()?;
        let signed = decode_signed(&mut reader)?;
        let private = reader.sized("private blob", MAX_PRIVATE)?.to_vec();
        reader.end()?;
        Ok(Self {
            storage_key,
            unique,
            policy: Policy::new(pcrs, signed)?,
            literal,
            private,
        })
    }

    /// TPMT_PUBLIC of the sealed object.
    pub(crate) fn public_area(&self) -> Vec<u8> {
        public_area(&self.policy.digest(&self.literal), &self.unique)
    }

    /// The name of the sealed object.
    pub(crate) fn name(&self) -> [u8; 34] {
        name_of(&self.public_area())
    }
}

fn decode_signed(reader: &mut Reader<'_>) -> Result<Option<SignedPolicy>, DecodeError> {
    let key = match reader.u8("kind of the key")? {
        NO_KEY => return Ok(None),
        ECDSA_KEY => PolicyKey::EcdsaP256(reader.array("ECDSA key")?),
        RSA_KEY => {
            let modulus: [u8; 256] = reader.array("RSA key")?;
            if modulus[0] & 0x80 == 0 {
                return Err(Malformed::new("RSA key", "2048 bits", "fewer").into());
            }
            PolicyKey::Rsa2048(Box::new(modulus))
        }
        other => {
            let expected = "0 (none), 1 (ECDSA) or 2 (RSA)";
            return Err(Malformed::new("kind of the key", expected, other.to_string()).into());
        }
    };
    let pcrs = reader.array("signed PCRs").map(PcrSelection::from_bits)?;
    Ok(Some(SignedPolicy::new(key, pcrs)?))
}

/// TPMT_PUBLIC of a sealed object: data that this TPM alone can open (fixedTPM, fixedParent), by its policy alone (no
/// userWithAuth), whether or not the TPM is locked out (noDA: there is no password to guess). `unique` is empty in the
/// template for a new one.
pub(crate) fn public_area(policy: &Digest, unique: &[u8]) -> Vec<u8> {
    const KEYED_HASH: u16 = 0x0008;
    const NULL: u16 = 0x0010;
    const ATTRIBUTES: u32 = 1 << 1 | 1 << 4 | 1 << 10;
    let writer = Writer::new().u16(KEYED_HASH).u16(SHA256).u32(ATTRIBUTES);
    let writer = writer.sized(&policy.0).u16(NULL).sized(unique);
    writer.finish().to_vec()
}
