//! The keys that protect the Secrets of Kubernetes in etcd, in the form in which etcd has them.
//!
//! A *secrets key* ([`SecretsKey`]) encrypts the keys with which API servers encrypt Secrets. The keys are numbered by
//! their generation, from 1: the latest encrypts, the earlier ones still decrypt. etcd has each of them only
//! wrapped: once for each Kubernetes controller, to a key that only its data partition has ([`ControllerKey`]), and once
//! to the recovery key of the cluster. So etcd, or a backup of it, opens no Secret alone.
//!
//! # Invariants
//! - A wrapped key is bound to its cluster and its generation ([`Generation`]), so it cannot take the place of another.
//! - The [ID](Generation::id) of a key follows from the key: what opens as another key than others have is noticed.

use std::fmt;

use crate::identity::{ClusterId, SecretsKey};
use crate::recovery::{self, RecoveryError, RecoveryKey, RecoveryRecipient, WrappedKey};
use crate::v1::WrappedSecretsKey;

const WRAPPED: &[u8] = b"hearth kubernetes secrets v1\0";
const ID: &[u8] = b"hearth kubernetes secrets key id v1\0";
/// What a [`WrappedSecretsKey`] should be, for errors.
pub const WRAPPED_KEY: &str = "an X25519 public key of 32 bytes, and a wrapped key of 80";
/// Bytes of the hash in an ID.
const ID_LEN: usize = 8;

/// The X25519 key of a Kubernetes controller. Wiped when dropped; has no printable form.
#[derive(Clone)]
pub struct ControllerKey(RecoveryKey);

impl ControllerKey {
    /// Generates a new one.
    pub fn generate() -> Self {
        Self(RecoveryKey::generate())
    }

    /// From its 32 bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(RecoveryKey::from_bytes(bytes))
    }

    /// Its 32 bytes, to be stored.
    pub fn expose(&self) -> &[u8; 32] {
        self.0.expose()
    }

    /// To which secrets keys are wrapped for it.
    pub fn recipient(&self) -> RecoveryRecipient {
        self.0.recipient()
    }
}

impl fmt::Debug for ControllerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControllerKey(redacted)")
    }
}

/// Which of a cluster's secrets keys is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    /// The cluster.
    pub cluster: ClusterId,
    /// Counted from 1.
    pub number: u32,
}

impl Generation {
    /// Encrypts the key of this generation to a controller, or to the recovery key. Each call has another result.
    ///
    /// # Errors
    /// If the recipient is no X25519 public key.
    pub fn wrap(
        &self,
        recipient: &RecoveryRecipient,
        key: &SecretsKey,
    ) -> Result<WrappedKey, RecoveryError> {
        recovery::seal(recipient, &self.text(WRAPPED), key.expose())
    }

    /// Opens the key of this generation as a controller.
    ///
    /// # Errors
    /// If it was wrapped to another recipient, or is that of another generation or cluster.
    pub fn open(
        &self,
        own: &ControllerKey,
        wrapped: &WrappedKey,
    ) -> Result<SecretsKey, RecoveryError> {
        self.recover(&own.0, wrapped)
    }

    /// Opens the key of this generation with the recovery key.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn recover(
        &self,
        recovery: &RecoveryKey,
        wrapped: &WrappedKey,
    ) -> Result<SecretsKey, RecoveryError> {
        let key = recovery.unseal(&self.text(WRAPPED), wrapped)?;
        Ok(SecretsKey::from_bytes(*key))
    }

    /// Name of the key of this generation, e.g. `2-8c1d4be06f7a9310`. Reveals nothing of the key.
    pub fn id(&self, key: &SecretsKey) -> String {
        let text = [&self.text(ID)[..], key.expose()].concat();
        let hash = ring::digest::digest(&ring::digest::SHA256, &zeroize::Zeroizing::new(text));
        format!("{}-{}", self.number, hex::encode(&hash.as_ref()[..ID_LEN]))
    }

    fn text(&self, purpose: &[u8]) -> Vec<u8> {
        let number = self.number.to_le_bytes();
        [purpose, self.cluster.as_bytes(), &number].concat()
    }
}

/// The message of a wrapped key.
pub fn wrapped_message(recipient: &RecoveryRecipient, wrapped: &WrappedKey) -> WrappedSecretsKey {
    WrappedSecretsKey {
        recipient: recipient.as_bytes().to_vec(),
        wrapped_key: wrapped.as_bytes().to_vec(),
    }
}

/// A wrapped key from its message.
///
/// # Errors
/// If a field is malformed.
pub fn parse_wrapped(
    message: &WrappedSecretsKey,
) -> Result<(RecoveryRecipient, WrappedKey), RecoveryError> {
    Ok((
        RecoveryRecipient::try_from(&message.recipient[..])?,
        WrappedKey::try_from(&message.wrapped_key[..])?,
    ))
}

/// The message in which a key is wrapped for this recipient.
pub fn find_wrapped<'a>(
    wrapped: &'a [WrappedSecretsKey],
    recipient: &[u8],
) -> Option<&'a WrappedSecretsKey> {
    wrapped.iter().find(|one| one.recipient == recipient)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn generation(cluster: u8, number: u32) -> Generation {
        Generation {
            cluster: ClusterId::from_bytes([cluster; 16]),
            number,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn only_its_recipient_opens_it_as_what_it_is(
            key: [u8; 32], cluster: u8, number in 1_u32..9, other in 1_u32..9,
            at in 0..recovery::WRAPPED_LEN, bit in 0_u8..8,
        ) {
            let (own, foreign) = (ControllerKey::generate(), ControllerKey::generate());
            let of = generation(cluster, number);
            let key = SecretsKey::from_bytes(key);
            let wrapped = of.wrap(&own.recipient(), &key).unwrap();
            prop_assert_eq!(of.open(&own, &wrapped), Ok(key));
            prop_assert_eq!(of.open(&foreign, &wrapped), Err(RecoveryError::Wrapped));
            let elsewhere = generation(cluster.wrapping_add(1), number);
            prop_assert_eq!(elsewhere.open(&own, &wrapped), Err(RecoveryError::Wrapped));
            let later = generation(cluster, other).open(&own, &wrapped);
            prop_assert_eq!(later.is_ok(), other == number);
            let mut bytes = *wrapped.as_bytes();
            bytes[at] ^= 1 << bit;
            let changed = WrappedKey::try_from(&bytes[..]).unwrap();
            // The top bit of an X25519 public key is ignored, but bound to the key that follows from it.
            prop_assert_eq!(of.open(&own, &changed), Err(RecoveryError::Wrapped));
        }
    }

    #[test]
    fn the_recovery_key_opens_what_was_wrapped_to_it() {
        let (recovery, of) = (RecoveryKey::generate(), generation(1, 2));
        let key = SecretsKey::generate();
        let wrapped = of.wrap(&recovery.recipient(), &key).unwrap();
        assert_eq!(of.recover(&recovery, &wrapped), Ok(key));
    }

    #[test]
    fn an_id_names_generation_and_key() {
        let (one, two) = (generation(1, 1), generation(1, 2));
        let key = SecretsKey::from_bytes([7; 32]);
        assert!(one.id(&key).starts_with("1-"));
        assert_eq!(one.id(&key).len(), 2 + 2 * ID_LEN);
        assert_ne!(one.id(&key)[2..], two.id(&key)[2..]);
        assert_ne!(one.id(&key), one.id(&SecretsKey::from_bytes([8; 32])));
        assert_eq!(
            format!("{:?}", ControllerKey::generate()),
            "ControllerKey(redacted)"
        );
    }
}
