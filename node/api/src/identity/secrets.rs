//! Secrets of 32 raw bytes.

use std::fmt;

use ring::hmac;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// A secret of the wrong length. The error does not contain the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected 32 bytes, got {found}")]
pub struct SecretLengthError {
    /// Name of the secret.
    pub what: &'static str,
    /// Its length.
    pub found: usize,
}

macro_rules! secret {
    ($($(#[doc = $doc:literal])+ $name:ident is $what:literal),+ $(,)?) => {$(
        $(#[doc = $doc])+
        ///
        /// 32 bytes. Wiped when dropped; has no printable form; is compared in constant time.
        #[derive(Clone, Zeroize, ZeroizeOnDrop)]
        pub struct $name([u8; 32]);

        impl $name {
            /// Generates a new one.
            pub fn generate() -> Self {
                Self(*Zeroizing::new(super::random_bytes()))
            }

            /// From its bytes.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The secret itself, to be stored or passed to what needs it.
            pub const fn expose(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl TryFrom<&[u8]> for $name {
            type Error = SecretLengthError;

            fn try_from(bytes: &[u8]) -> Result<Self, SecretLengthError> {
                let found = bytes.len();
                <[u8; 32]>::try_from(bytes)
                    .map(Self)
                    .map_err(|_| SecretLengthError { what: $what, found })
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                equal(&self.0, &other.0)
            }
        }

        impl Eq for $name {}

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(redacted)"))
            }
        }
    )+};
}

secret! {
    /// The node's half of its data partition's key. Never leaves the node.
    NodeUnlockKey is "node unlock key",
    /// The cluster's half of a data partition's key.
    ClusterUnlockKey is "cluster unlock key",
    /// Encrypts what API servers encrypt the Secrets of Kubernetes with.
    SecretsKey is "key of Kubernetes' Secrets",
    /// Lets a machine ask to be registered; nothing more.
    Ticket is "register ticket",
    /// Shared by the owner and the first node: with it the cluster proves its CA at first contact.
    FirstContactSecret is "first-contact secret",
}

/// Whether both are equal, in constant time: compares their tags under a fresh random key, so that
/// the running time reveals nothing about the secrets.
fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, &super::random_bytes::<32>());
    hmac::verify(&key, a, hmac::sign(&key, b).as_ref()).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn equal_means_equal(a: [u8; 32], at in 0_usize..32, bit in 0_u8..8) {
            let mut b = a;
            prop_assert_eq!(Ticket::from_bytes(a), Ticket::from_bytes(b));
            b[at] ^= 1 << bit;
            prop_assert_ne!(Ticket::from_bytes(a), Ticket::from_bytes(b));
        }

        #[test]
        fn only_32_bytes_are_a_secret(bytes: Vec<u8>) {
            let secret = FirstContactSecret::try_from(&bytes[..]);
            prop_assert_eq!(secret.is_ok(), bytes.len() == 32);
        }
    }

    #[test]
    fn secrets_do_not_print() {
        let bytes = [0xa5; 32];
        let printed = format!(
            "{:?} {:?} {:?} {:?}",
            NodeUnlockKey::from_bytes(bytes),
            ClusterUnlockKey::from_bytes(bytes),
            Ticket::from_bytes(bytes),
            FirstContactSecret::from_bytes(bytes),
        );
        assert!(!printed.contains("a5a5"), "{printed}");
        assert!(!printed.contains("165"), "{printed}");
    }

    #[test]
    fn generated_secrets_differ() {
        assert_ne!(Ticket::generate(), Ticket::generate());
    }
}
