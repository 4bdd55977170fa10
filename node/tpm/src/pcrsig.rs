//! Signatures for values of PCRs, in systemd's JSON format: the section `.pcrsig` of a unified kernel image.
//!
//! ```text
//! {"sha256":[{"pcrs":[11],"pkfp":"<key>","pol":"<policy>","sig":"<signature>"}]}
//! ```
//!
//! `pkfp` is [`PolicyKey::fingerprint`] and `pol` is [`pcr_policy`], both in hexadecimal; `sig` is the signature over the 32
//! bytes of `pol`, in base64. One file may have signatures by several keys and for several phases of a boot. Entries of
//! other banks are ignored, as everything is that systemd may add.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::key::{PolicyKey, SignError, SigningKey};
use super::pcr::{Digest, Pcr, PcrSelection, PcrValues};
use super::policy::pcr_policy;

/// How large the JSON may be.
const MAX_SIZE: usize = 64 * 1024;
/// The largest signature: that of RSA with 2048 bits.
const MAX_SIGNATURE: usize = 256;

/// Why signatures were not accepted. Entries are counted from 0, within `sha256`.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// More bytes than any image needs.
    #[error("PCR signatures: expected {MAX_SIZE} bytes at most, got {0}")]
    Size(usize),
    /// Not JSON of this format.
    #[error("PCR signatures: {0}")]
    Json(#[from] serde_json::Error),
    /// A value without meaning.
    #[error("PCR signatures: sha256[{entry}].{field}: expected {expected}, got {got:?}")]
    Value {
        /// Which entry.
        entry: usize,
        /// Its field.
        field: &'static str,
        /// What it should have been.
        expected: &'static str,
        /// What it is.
        got: String,
    },
}

/// The file: one list for each bank.
#[derive(Serialize, Deserialize)]
struct Banks {
    #[serde(default)]
    sha256: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    pcrs: Vec<u8>,
    pkfp: String,
    pol: String,
    sig: String,
}

/// One signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcrSignature {
    /// The registers of the policy.
    pub pcrs: PcrSelection,
    /// Who signed ([`PolicyKey::fingerprint`]).
    pub fingerprint: Digest,
    /// What was signed ([`pcr_policy`]).
    pub policy: Digest,
    /// The signature: DER for ECDSA, RSASSA-PKCS1-v1_5 for RSA.
    pub signature: Vec<u8>,
}

/// Signatures for the values that images leave in PCRs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PcrSignatures(Vec<PcrSignature>);

impl PcrSignatures {
    /// From JSON; zero bytes at its end, with which a section is padded, are ignored. Nothing is verified: who has a
    /// policy verifies with the key that it names.
    pub fn parse(json: &[u8]) -> Result<Self, ParseError> {
        if json.len() > MAX_SIZE {
            return Err(ParseError::Size(json.len()));
        }
        let json = json.split(|byte| *byte == 0).next().unwrap_or_default();
        let banks: Banks = serde_json::from_slice(json)?;
        let entries = banks.sha256.into_iter().enumerate();
        let parsed: Result<_, _> = entries.map(|(at, entry)| parse(at, entry)).collect();
        Ok(Self(parsed?))
    }

    /// The JSON, in one line.
    pub fn to_json(&self) -> String {
        let entry = |signature: &PcrSignature| Entry {
            pcrs: signature.pcrs.iter().map(Pcr::index).collect(),
            pkfp: signature.fingerprint.to_string(),
            pol: signature.policy.to_string(),
            sig: STANDARD.encode(&signature.signature),
        };
        let banks = Banks {
            sha256: self.0.iter().map(entry).collect(),
        };
        serde_json::to_string(&banks).expect("numbers and text are JSON")
    }

    /// Adds a signature for the values that an image is going to leave in PCRs.
    pub fn sign(&mut self, key: &SigningKey, values: &PcrValues) -> Result<(), SignError> {
        let policy = pcr_policy(values);
        self.0.push(PcrSignature {
            pcrs: values.selection(),
            fingerprint: key.public().fingerprint(),
            policy,
            signature: key.sign(&policy.0)?,
        });
        Ok(())
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &PcrSignature> {
        self.0.iter()
    }

    /// The signatures that say to be by this key and for these values.
    pub(crate) fn matching(
        &self,
        key: &PolicyKey,
        values: &PcrValues,
    ) -> impl Iterator<Item = &PcrSignature> {
        let (fingerprint, policy) = (key.fingerprint(), pcr_policy(values));
        self.0
            .iter()
            .filter(move |one| one.fingerprint == fingerprint && one.policy == policy)
    }
}

fn parse(at: usize, entry: Entry) -> Result<PcrSignature, ParseError> {
    let wrong = |field, expected, got: &str| ParseError::Value {
        entry: at,
        field,
        expected,
        got: got.to_owned(),
    };
    let digest = |field, text: &str| {
        Digest::from_hex(text).ok_or_else(|| wrong(field, "64 hexadecimal digits", text))
    };
    let pcr = |index: &u8| {
        Pcr::new(*index).ok_or_else(|| wrong("pcrs", "numbers below 24", &index.to_string()))
    };
    let pcrs: PcrSelection = entry.pcrs.iter().map(pcr).collect::<Result<_, _>>()?;
    if pcrs.is_empty() {
        return Err(wrong("pcrs", "at least one PCR", "none"));
    }
    let signature = STANDARD.decode(&entry.sig).ok();
    let signature = signature.filter(|bytes| bytes.len() <= MAX_SIGNATURE);
    Ok(PcrSignature {
        pcrs,
        fingerprint: digest("pkfp", &entry.pkfp)?,
        policy: digest("pol", &entry.pol)?,
        signature: signature
            .ok_or_else(|| wrong("sig", "base64 of 256 bytes at most", &entry.sig))?,
    })
}
