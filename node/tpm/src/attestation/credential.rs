//! The question of a curator, and what answers it.
//!
//! The secret is encrypted as TPM2_MakeCredential does it (TPM 2.0 library, part 1, "Credential Protection"): an ephemeral
//! key and the endorsement key give a seed (ECDH, KDFe), of which two keys are derived (KDFa): one encrypts the secret,
//! with the name of the attestation key, the other one authenticates both.

use aes::Aes128;
use cfb_mode::Encryptor;
use cfb_mode::cipher::KeyIvInit;
use ring::hmac;
use zeroize::Zeroizing;

use super::quote::{Quote, QuoteError};
use super::{AttestationKey, EndorsementKey, QUOTED};
use crate::boot_log::{BootEvent, replay};
use crate::key::name_with;
use crate::pcr::Digest;
use crate::session::{Salt, SessionError, kdfa, nonce};
use crate::wire::Writer;

/// Of what the quote's qualifying data are the digest, with nonce and caller.
const CONTEXT: &[u8] = b"hearth attestation v1\0";

/// Why a machine cannot be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChallengeError {
    /// No secret can be encrypted to the endorsement key.
    #[error("endorsement key: {0}")]
    EndorsementKey(SessionError),
    /// The system has no random numbers.
    #[error(transparent)]
    Random(SessionError),
}

/// Why an answer proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The secret is another one.
    #[error("endorsement key and attestation key are not in one TPM")]
    OtherTpm,
    /// The quote is not for this challenge, or not by this key.
    #[error(transparent)]
    Quote(#[from] QuoteError),
    /// The events are not those that were measured.
    #[error("the event log does not lead to the quoted values of {QUOTED}")]
    Log,
}

/// What is asked of a TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// 32 bytes.
    pub nonce: [u8; 32],
    /// TPMS_ID_OBJECT: the encrypted secret and its HMAC. At most 128 bytes.
    pub credential: Vec<u8>,
    /// TPMS_ECC_POINT: the ephemeral key. At most 128 bytes.
    pub encrypted_seed: Vec<u8>,
}

/// What a TPM answers, with the log of the firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The decrypted secret.
    pub secret: Vec<u8>,
    /// What was measured.
    pub quote: Quote,
}

/// A question to the TPM with these keys. It is answered once.
pub struct Challenge {
    attestation_key: AttestationKey,
    secret: Zeroizing<[u8; 32]>,
    asked: Asked,
}

impl Challenge {
    /// A new question.
    ///
    /// # Errors
    /// If the endorsement key is none, or the system has no random numbers.
    pub fn new(
        endorsement_key: &EndorsementKey,
        attestation_key: &AttestationKey,
    ) -> Result<Self, ChallengeError> {
        let secret = Zeroizing::new(nonce().map_err(ChallengeError::Random)?);
        let seed = Salt::new(&endorsement_key.0, b"IDENTITY\0");
        let seed = seed.map_err(ChallengeError::EndorsementKey)?;
        let name = name_with(&attestation_key.name());
        let asked = Asked {
            nonce: nonce().map_err(ChallengeError::Random)?,
            credential: protect(&seed, &name, &secret),
            encrypted_seed: seed.encrypted,
        };
        Ok(Self {
            attestation_key: attestation_key.clone(),
            secret,
            asked,
        })
    }

    /// What the machine is asked.
    pub fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Whether the machine with the TLS key `caller` has booted by these events. Of other registers than [`QUOTED`] there
    /// must be none.
    ///
    /// # Errors
    /// If anything does not fit.
    pub fn verify(
        &self,
        caller: &[u8; 32],
        proof: &Proof,
        events: &[BootEvent],
    ) -> Result<(), ProofError> {
        // Compared once: whoever guesses wrong is asked for another secret.
        if self.secret[..] != proof.secret[..] {
            return Err(ProofError::OtherTpm);
        }
        let qualifying = self.asked.qualifying(caller);
        let quoted = proof.quote.verify(&self.attestation_key, &qualifying)?;
        let replayed = replay(events, QUOTED).ok_or(ProofError::Log)?;
        if replayed.digest() != quoted {
            return Err(ProofError::Log);
        }
        Ok(())
    }
}

impl Asked {
    /// What the quote has to contain.
    pub(crate) fn qualifying(&self, caller: &[u8; 32]) -> Digest {
        Digest::of(&[CONTEXT, &self.nonce, caller])
    }
}

/// TPMS_ID_OBJECT. No context in the key derivations but the name.
fn protect(seed: &Salt, name: &[u8; 34], secret: &[u8; 32]) -> Vec<u8> {
    let mut identity = Writer::new().sized(secret).finish();
    let key = kdfa(&*seed.secret, b"STORAGE\0", name, &[], 128);
    let key: &[u8; 16] = key.first_chunk().expect("a key of 32 bytes");
    Encryptor::<Aes128>::new(key.into(), &[0; 16].into()).encrypt(&mut identity);
    let key = kdfa(&*seed.secret, b"INTEGRITY\0", &[], &[], 256);
    let key = hmac::Key::new(hmac::HMAC_SHA256, &*key);
    let mut integrity = hmac::Context::with_key(&key);
    integrity.update(&identity);
    integrity.update(name);
    let object = Writer::new().sized(integrity.sign().as_ref());
    object.bytes(&identity).finish().to_vec()
}
