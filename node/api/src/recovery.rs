//! The owner's way to the keys of encrypted nodes, when no cluster is running that could give them.
//!
//! The *recovery key* (X25519) is the owner's, and its public half, the [`RecoveryRecipient`], is a setting of the cluster.
//! Each node keeps its cluster unlock key [`wrap`]ped to that recipient, next to its own half of its data partition's
//! key. A node that waits for its key presents a [`Challenge`], and the owner returns an answer:
//!
//! ```text
//!  locked node                                     owner
//!     │ wrapped key, nonce, answer's recipient,       │
//!     │ signed with the join key ────────────────────►│ verify, open with the recovery key
//!     │◄──────── key, encrypted to the answer's ──────┤ sign with the owner key
//!     │          recipient, and signed                │
//! ```
//!
//!
//! # Invariants
//! - A wrapped key is bound to cluster, node, join key and key epoch. So a challenge with the wrapped key of a node, but
//!   signed with a join key that is not the node's, cannot be opened, and the owner never encrypts a node's key to a
//!   recipient that anyone else has chosen.
//! - An answer is bound to the signature of one challenge, and so to its nonce. Neither another node accepts
//!   it, nor the same node after a restart.
//! - The recovery key alone does not unlock over a network: the answer needs the owner key, too. Whoever is at the
//!   console of the machine needs no owner key ([`console`]).
//!
//! The formats are documented in `unlock.proto`.

pub mod console;

use std::fmt;

use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable as _, Kem as _, OpModeR, OpModeS, Serializable as _};
use zeroize::Zeroizing;

use crate::identity::{
    ClusterId, ClusterUnlockKey, JoinKey, NodeId, OwnerKey, PublicKey, random_bytes,
};
use crate::proofs::push;
use crate::v1::{ColdStartPolicy, UnlockChallenge, UnlockRequest};

type Kem = X25519HkdfSha256;

const WRAPPED: &[u8] = b"hearth recovery v1\0";
const CHALLENGE: &[u8] = b"hearth unlock challenge v1\0";
const ANSWER: &[u8] = b"hearth unlock answer v1\0";
const SETTINGS: &[u8] = b"hearth unlock settings v2\0";

/// Length of a wrapped key in bytes: encapsulated key, key and tag.
pub const WRAPPED_LEN: usize = 32 + 32 + 16;

/// Why a challenge, an answer or a wrapped key is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// A field has the wrong value.
    #[error("{field}: expected {expected}, got {found}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// The expected value.
        expected: &'static str,
        /// The actual value.
        found: String,
    },
    /// The challenge is not signed with the join key in it.
    #[error("challenge: invalid signature")]
    Challenge,
    /// The answer is not signed with the owner key, or is for another challenge.
    #[error("answer: expected a signature of this challenge's answer by the cluster's owner key")]
    Answer,
    /// What was entered at the console does not open.
    #[error("answer: does not open: it was mistyped, or it is the answer to another challenge")]
    ConsoleAnswer,
    /// A wrapped key does not open.
    #[error(
        "wrapped key: does not open: it was encrypted to another recovery key, or for another node"
    )]
    Wrapped,
}

fn field(field: &'static str, expected: &'static str, found: impl fmt::Display) -> RecoveryError {
    RecoveryError::Field {
        field,
        expected,
        found: found.to_string(),
    }
}

/// The public half of a recovery key: what keys are wrapped to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RecoveryRecipient([u8; 32]);

impl RecoveryRecipient {
    /// Its 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// As a field of a message, where no recipient is an empty field.
    pub fn to_field(recipient: Option<Self>) -> Vec<u8> {
        recipient
            .map(|recipient| recipient.0.to_vec())
            .unwrap_or_default()
    }

    /// From such a field.
    ///
    /// # Errors
    /// If the field is neither empty nor a recipient.
    pub fn from_field(bytes: &[u8]) -> Result<Option<Self>, RecoveryError> {
        match bytes {
            [] => Ok(None),
            bytes => Self::try_from(bytes).map(Some),
        }
    }

    fn key(&self) -> Result<<Kem as hpke::Kem>::PublicKey, RecoveryError> {
        let key = <Kem as hpke::Kem>::PublicKey::from_bytes(&self.0);
        key.map_err(|_| field("recipient", "an X25519 public key", "another value"))
    }
}

impl TryFrom<&[u8]> for RecoveryRecipient {
    type Error = RecoveryError;

    /// Rejects keys with which every shared secret is the same.
    fn try_from(bytes: &[u8]) -> Result<Self, RecoveryError> {
        let found = format!("{} bytes", bytes.len());
        let recipient = <[u8; 32]>::try_from(bytes)
            .map(Self)
            .map_err(|_| field("recipient", "32 bytes", found))?;
        seal(&recipient, b"", &[0; 32])?;
        Ok(recipient)
    }
}

impl fmt::Display for RecoveryRecipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for RecoveryRecipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who unlocks an encrypted node when no curator is running: the settings of its cluster that a node
/// records with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnlockSettings {
    /// The cluster's policy.
    pub cold_start_policy: ColdStartPolicy,
    /// To which nodes wrap their cluster unlock keys.
    pub recovery_recipient: Option<RecoveryRecipient>,
    /// Whose answers unlock a node. `None` if a former release has registered the node, and in the
    /// answers of its curators.
    pub owner: Option<PublicKey>,
}

impl UnlockSettings {
    /// A number that differs when the settings do. Curators send it with each heartbeat, so that a
    /// node notices that it has recorded other settings. Never 0, which curators of former releases
    /// send.
    pub fn digest(&self) -> u64 {
        let recipient = self.recovery_recipient.as_ref();
        let owner = self.owner.as_ref();
        let mut hashed = SETTINGS.to_vec();
        hashed.extend_from_slice(&i32::from(self.cold_start_policy).to_le_bytes());
        push(
            &mut hashed,
            recipient.map_or(&[], |recipient| &recipient.0[..]),
        );
        hashed.extend_from_slice(owner.map_or(&[], |owner| &owner.as_bytes()[..]));
        let digest = ring::digest::digest(&ring::digest::SHA256, &hashed);
        let first = digest.as_ref().first_chunk().expect("SHA-256 has 32 bytes");
        u64::from_le_bytes(*first).max(1)
    }
}

/// A recovery key. Wiped when dropped; has no printable form.
#[derive(Clone)]
pub struct RecoveryKey(Zeroizing<[u8; 32]>);

impl RecoveryKey {
    /// Generates a new one.
    pub fn generate() -> Self {
        Self(Zeroizing::new(random_bytes()))
    }

    /// From its 32 bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Its 32 bytes, to be stored.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    /// Its public half.
    pub fn recipient(&self) -> RecoveryRecipient {
        let public = Kem::sk_to_pk(&self.private());
        RecoveryRecipient(public.to_bytes().into())
    }

    /// Opens 32 bytes that were sealed to its public half, bound to this text.
    pub(crate) fn unseal(
        &self,
        bound_to: &[u8],
        wrapped: &WrappedKey,
    ) -> Result<Zeroizing<[u8; 32]>, RecoveryError> {
        open(&self.private(), bound_to, wrapped)
    }

    fn private(&self) -> <Kem as hpke::Kem>::PrivateKey {
        <Kem as hpke::Kem>::PrivateKey::from_bytes(&*self.0)
            .expect("any 32 bytes are a private key of X25519")
    }

    /// Opens a node's wrapped key.
    ///
    /// # Errors
    /// If it was wrapped to another key, or is not this node's.
    pub fn open(
        &self,
        node: &WrappedFor,
        wrapped: &WrappedKey,
    ) -> Result<ClusterUnlockKey, RecoveryError> {
        open_key(&self.private(), &node.info(), wrapped)
    }
}

impl fmt::Debug for RecoveryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecoveryKey(redacted)")
    }
}

/// The node for which a cluster unlock key is wrapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrappedFor {
    /// Its cluster.
    pub cluster_id: ClusterId,
    /// Its ID.
    pub node_id: NodeId,
    /// The public half of its join key.
    pub join_key: PublicKey,
    /// Number of changes of its data partition's key.
    pub key_epoch: u32,
}

impl WrappedFor {
    fn info(&self) -> Vec<u8> {
        self.statement(WRAPPED)
    }

    fn statement(&self, name: &[u8]) -> Vec<u8> {
        let mut statement = [name, self.cluster_id.as_bytes()].concat();
        push(&mut statement, self.node_id.to_string().as_bytes());
        statement.extend_from_slice(self.join_key.as_bytes());
        statement.extend_from_slice(&self.key_epoch.to_le_bytes());
        statement
    }
}

/// A key of 32 bytes that only the holder of a private key can read. Not secret.
#[derive(Clone, PartialEq, Eq)]
pub struct WrappedKey([u8; WRAPPED_LEN]);

impl WrappedKey {
    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; WRAPPED_LEN] {
        &self.0
    }
}

impl TryFrom<&[u8]> for WrappedKey {
    type Error = RecoveryError;

    fn try_from(bytes: &[u8]) -> Result<Self, RecoveryError> {
        let found = format!("{} bytes", bytes.len());
        <[u8; WRAPPED_LEN]>::try_from(bytes)
            .map(Self)
            .map_err(|_| field("wrapped_key", "80 bytes", found))
    }
}

impl fmt::Debug for WrappedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WrappedKey")
    }
}

/// Encrypts a node's cluster unlock key to a recovery key. Each call has another result.
pub fn wrap(
    recipient: &RecoveryRecipient,
    node: &WrappedFor,
    key: &ClusterUnlockKey,
) -> WrappedKey {
    seal(recipient, &node.info(), key.expose())
        .expect("the recipient was checked when it was parsed")
}

/// Encrypts 32 bytes to a recipient, bound to this text.
pub(crate) fn seal(
    recipient: &RecoveryRecipient,
    info: &[u8],
    key: &[u8; 32],
) -> Result<WrappedKey, RecoveryError> {
    let sealed = hpke::single_shot_seal::<ChaCha20Poly1305, HkdfSha256, Kem>(
        &OpModeS::Base,
        &recipient.key()?,
        info,
        key,
        b"",
    );
    let (encapsulated, ciphertext) = sealed.map_err(|_| {
        field(
            "recipient",
            "an X25519 public key",
            "a point of small order",
        )
    })?;
    let mut wrapped = [0; WRAPPED_LEN];
    let (front, back) = wrapped.split_at_mut(32);
    front.copy_from_slice(&encapsulated.to_bytes());
    back.copy_from_slice(&ciphertext);
    Ok(WrappedKey(wrapped))
}

fn open_key(
    key: &<Kem as hpke::Kem>::PrivateKey,
    info: &[u8],
    wrapped: &WrappedKey,
) -> Result<ClusterUnlockKey, RecoveryError> {
    let opened = open(key, info, wrapped)?;
    ClusterUnlockKey::try_from(&opened[..]).map_err(|_| RecoveryError::Wrapped)
}

fn open(
    key: &<Kem as hpke::Kem>::PrivateKey,
    info: &[u8],
    wrapped: &WrappedKey,
) -> Result<Zeroizing<[u8; 32]>, RecoveryError> {
    let (encapsulated, ciphertext) = wrapped.0.split_at(32);
    let encapsulated = <Kem as hpke::Kem>::EncappedKey::from_bytes(encapsulated)
        .map_err(|_| RecoveryError::Wrapped)?;
    let opened = hpke::single_shot_open::<ChaCha20Poly1305, HkdfSha256, Kem>(
        &OpModeR::Base,
        key,
        &encapsulated,
        info,
        ciphertext,
        b"",
    );
    let opened = Zeroizing::new(opened.map_err(|_| RecoveryError::Wrapped)?);
    let key = <[u8; 32]>::try_from(&opened[..]).map_err(|_| RecoveryError::Wrapped)?;
    Ok(Zeroizing::new(key))
}

/// The private half of a challenge: what a locked node keeps in memory.
pub struct Challenger {
    challenge: Challenge,
    /// Of the answer's recipient.
    answer_key: RecoveryKey,
}

impl Challenger {
    /// The challenge of this node, with a new nonce. The wrapped key is the node's, and the join key is that in `node`.
    pub fn new(node: WrappedFor, wrapped_key: WrappedKey, join_key: &JoinKey) -> Self {
        let answer_key = RecoveryKey::generate();
        let mut challenge = Challenge {
            node,
            wrapped_key,
            nonce: random_bytes(),
            answer_recipient: answer_key.recipient(),
            signature: [0; 64],
        };
        challenge.signature = join_key.sign(&challenge.statement());
        Self {
            challenge,
            answer_key,
        }
    }

    /// The challenge.
    pub fn challenge(&self) -> &Challenge {
        &self.challenge
    }

    /// The cluster unlock key in the owner's answer.
    ///
    /// # Errors
    /// If the answer is not signed with the key of this owner, or does not open.
    pub fn accept(
        &self,
        answer: &UnlockRequest,
        owner: &PublicKey,
    ) -> Result<ClusterUnlockKey, RecoveryError> {
        let wrapped = WrappedKey::try_from(&answer.wrapped_key[..])?;
        owner
            .verify(&self.challenge.answer(&wrapped), &answer.signature)
            .map_err(|_| RecoveryError::Answer)?;
        open_key(
            &self.answer_key.private(),
            &self.challenge.answer_info(),
            &wrapped,
        )
    }
}

impl fmt::Debug for Challenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Challenger").field(&self.challenge).finish()
    }
}

/// A challenge. One that was received is signed with the join key in it; whether that is the join key of the node, shows
/// when the wrapped key is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    node: WrappedFor,
    wrapped_key: WrappedKey,
    nonce: [u8; 32],
    answer_recipient: RecoveryRecipient,
    signature: [u8; 64],
}

impl Challenge {
    /// The node that waits for its key.
    pub fn node(&self) -> &WrappedFor {
        &self.node
    }

    /// The owner's answer to this challenge.
    ///
    /// # Errors
    /// If the wrapped key does not open with the recovery key.
    pub fn answered(
        &self,
        recovery: &RecoveryKey,
        owner: &OwnerKey,
    ) -> Result<UnlockRequest, RecoveryError> {
        let key = recovery.open(&self.node, &self.wrapped_key)?;
        let wrapped = seal(&self.answer_recipient, &self.answer_info(), key.expose())?;
        Ok(UnlockRequest {
            signature: owner.sign(&self.answer(&wrapped)).to_vec(),
            wrapped_key: wrapped.0.to_vec(),
        })
    }

    fn statement(&self) -> Vec<u8> {
        let mut statement = self.node.statement(CHALLENGE);
        statement.extend_from_slice(&self.wrapped_key.0);
        statement.extend_from_slice(&self.nonce);
        statement.extend_from_slice(&self.answer_recipient.0);
        statement
    }

    fn answer_info(&self) -> Vec<u8> {
        [ANSWER, &self.signature].concat()
    }

    fn answer(&self, wrapped: &WrappedKey) -> Vec<u8> {
        [ANSWER, &self.signature, &wrapped.0].concat()
    }

    /// The message.
    pub fn to_message(&self) -> UnlockChallenge {
        UnlockChallenge {
            cluster_id: self.node.cluster_id.as_bytes().to_vec(),
            node_id: self.node.node_id.to_string(),
            key_epoch: self.node.key_epoch,
            join_key: self.node.join_key.as_bytes().to_vec(),
            wrapped_key: self.wrapped_key.0.to_vec(),
            nonce: self.nonce.to_vec(),
            answer_recipient: self.answer_recipient.0.to_vec(),
            signature: self.signature.to_vec(),
        }
    }

    /// Parses the message, and verifies its signature.
    ///
    /// # Errors
    /// If a field is malformed, or the signature is not by the join key in it.
    pub fn parse(message: &UnlockChallenge) -> Result<Self, RecoveryError> {
        let bytes = |name, bytes: &[u8]| {
            let found = format!("{} bytes", bytes.len());
            <[u8; 32]>::try_from(bytes).map_err(|_| field(name, "32 bytes", found))
        };
        let challenge = Self {
            node: WrappedFor {
                cluster_id: ClusterId::try_from(&message.cluster_id[..])
                    .map_err(|error| field("cluster_id", "16 bytes", error))?,
                node_id: message
                    .node_id
                    .parse()
                    .map_err(|_| field("node_id", "the ID of a node", &message.node_id))?,
                join_key: PublicKey::try_from(&message.join_key[..])
                    .map_err(|error| field("join_key", "an Ed25519 public key", error))?,
                key_epoch: message.key_epoch,
            },
            wrapped_key: WrappedKey::try_from(&message.wrapped_key[..])?,
            nonce: bytes("nonce", &message.nonce)?,
            answer_recipient: RecoveryRecipient::try_from(&message.answer_recipient[..])?,
            signature: <[u8; 64]>::try_from(&message.signature[..])
                .map_err(|_| RecoveryError::Challenge)?,
        };
        challenge
            .node
            .join_key
            .verify(&challenge.statement(), &challenge.signature)
            .map_err(|_| RecoveryError::Challenge)?;
        Ok(challenge)
    }
}

#[cfg(test)]
mod tests;
