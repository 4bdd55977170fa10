//! Ed25519 keys.

use std::fmt;
use std::ops::Deref;

use ed25519_dalek::Signer as _;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey, KeypairBytes};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use zeroize::Zeroizing;

/// Why bytes are not a valid key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Of the wrong length.
    #[error("key: expected 32 bytes, got {found}")]
    Length {
        /// Its length.
        found: usize,
    },
    /// Not a point of the curve, or one of the few for which anyone can sign.
    #[error("an invalid Ed25519 public key")]
    NotAKey,
    /// Not a Curve25519 public key in its canonical form, or one for which every shared secret is
    /// the same.
    #[error("an invalid Curve25519 public key")]
    NotAMeshKey,
    /// Not an uncompressed point of P-256.
    #[error("P-256 public key: expected 65 bytes that begin with 4, got {found} bytes")]
    NotP256 {
        /// Its length.
        found: usize,
    },
    /// Not the PKCS #8 form of an Ed25519 private key.
    #[error("not an Ed25519 private key in PKCS #8 form")]
    NotPkcs8,
}

/// The signature is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid signature")]
pub struct BadSignature;

/// An Ed25519 public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Its 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// As a field of a message, where no key is an empty field.
    pub fn to_field(key: Option<Self>) -> Vec<u8> {
        key.map(|key| key.0.to_vec()).unwrap_or_default()
    }

    /// From such a field.
    ///
    /// # Errors
    /// If the field is neither empty nor a key.
    pub fn from_field(bytes: &[u8]) -> Result<Option<Self>, KeyError> {
        match bytes {
            [] => Ok(None),
            bytes => Self::try_from(bytes).map(Some),
        }
    }

    /// Verifies a signature (64 bytes) of `message`.
    pub fn verify(&self, message: &[u8], signature: &[u8]) -> Result<(), BadSignature> {
        ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, &self.0)
            .verify(message, signature)
            .map_err(|_| BadSignature)
    }
}

impl TryFrom<&[u8]> for PublicKey {
    type Error = KeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, KeyError> {
        let found = bytes.len();
        let bytes = <[u8; 32]>::try_from(bytes).map_err(|_| KeyError::Length { found })?;
        let key = ed25519_dalek::VerifyingKey::from_bytes(&bytes).map_err(|_| KeyError::NotAKey)?;
        if key.is_weak() {
            return Err(KeyError::NotAKey);
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An Ed25519 private key. Wiped when dropped.
#[derive(Clone)]
pub struct SigningKey(ed25519_dalek::SigningKey);

impl SigningKey {
    /// Generates a new one.
    pub fn generate() -> Self {
        Self::from_seed(*Zeroizing::new(super::random_bytes()))
    }

    /// From its 32-byte seed.
    pub fn from_seed(seed: [u8; 32]) -> Self {
        let seed = Zeroizing::new(seed);
        Self(ed25519_dalek::SigningKey::from_bytes(&seed))
    }

    /// From its seed; rejects any length but 32 bytes.
    pub fn from_seed_slice(seed: &[u8]) -> Result<Self, KeyError> {
        let found = seed.len();
        <[u8; 32]>::try_from(seed)
            .map(Self::from_seed)
            .map_err(|_| KeyError::Length { found })
    }

    /// From PKCS #8, DER.
    pub fn from_pkcs8_der(der: &[u8]) -> Result<Self, KeyError> {
        ed25519_dalek::SigningKey::from_pkcs8_der(der)
            .map(Self)
            .map_err(|_| KeyError::NotPkcs8)
    }

    /// From PKCS #8, PEM.
    pub fn from_pkcs8_pem(pem: &str) -> Result<Self, KeyError> {
        ed25519_dalek::SigningKey::from_pkcs8_pem(pem)
            .map(Self)
            .map_err(|_| KeyError::NotPkcs8)
    }

    /// Its public half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    /// Signs `message`; returns 64 bytes.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }

    /// The seed itself, to be stored or passed to what needs it.
    pub fn expose_seed(&self) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(self.0.to_bytes())
    }

    /// PKCS #8, DER: the form for certificate libraries and TLS.
    pub fn expose_pkcs8_der(&self) -> Zeroizing<Vec<u8>> {
        let document = self
            .0
            .to_pkcs8_der()
            .expect("a key in memory always has a PKCS #8 form");
        Zeroizing::new(document.as_bytes().to_vec())
    }

    /// PKCS #8, PEM: the form for files.
    pub fn expose_pkcs8_pem(&self) -> Zeroizing<String> {
        self.0
            .to_pkcs8_pem(LineEnding::LF)
            .expect("a key in memory always has a PKCS #8 form")
    }

    /// PKCS #8 version 1, PEM, without the public half: for programs that support no other form.
    pub fn expose_plain_pkcs8_pem(&self) -> Zeroizing<String> {
        let plain = KeypairBytes {
            secret_key: self.0.to_bytes(),
            public_key: None,
        };
        plain
            .to_pkcs8_pem(LineEnding::LF)
            .expect("a key in memory always has a PKCS #8 form")
    }

    /// The form for rustls.
    pub fn to_private_key_der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.expose_pkcs8_der().to_vec()))
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey(of {})", self.public())
    }
}

/// Signing keys by purpose, as types of their own, so that none is used for another's purpose.
macro_rules! purpose {
    ($(#[doc = $doc:literal] $name:ident),+ $(,)?) => {$(
        #[doc = $doc]
        #[derive(Clone, Debug)]
        pub struct $name(SigningKey);

        impl $name {
            /// Generates a new one.
            pub fn generate() -> Self {
                Self(SigningKey::generate())
            }

            /// From its 32-byte seed.
            pub fn from_seed(seed: [u8; 32]) -> Self {
                Self(SigningKey::from_seed(seed))
            }

            /// From its seed; rejects any length but 32 bytes.
            pub fn from_seed_slice(seed: &[u8]) -> Result<Self, KeyError> {
                SigningKey::from_seed_slice(seed).map(Self)
            }

            /// From PKCS #8, DER.
            pub fn from_pkcs8_der(der: &[u8]) -> Result<Self, KeyError> {
                SigningKey::from_pkcs8_der(der).map(Self)
            }

            /// From PKCS #8, PEM.
            pub fn from_pkcs8_pem(pem: &str) -> Result<Self, KeyError> {
                SigningKey::from_pkcs8_pem(pem).map(Self)
            }
        }

        impl Deref for $name {
            type Target = SigningKey;

            fn deref(&self) -> &SigningKey {
                &self.0
            }
        }
    )+};
}

purpose! {
    /// A node's identity key: TLS, etcd peer. Never leaves the node.
    NodeKey,
    /// Authenticates a rebooting node before the data partition is open.
    JoinKey,
    /// Its holder can take ownership of the cluster.
    OwnerKey,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn keys_round_trip(seed: [u8; 32]) {
            let key = SigningKey::from_seed(seed);
            prop_assert_eq!(*key.expose_seed(), seed);
            let again = SigningKey::from_pkcs8_der(&key.expose_pkcs8_der()).expect("PKCS #8");
            prop_assert_eq!(*again.expose_seed(), seed);
            let plain = key.expose_plain_pkcs8_pem();
            let again = SigningKey::from_pkcs8_pem(&plain).expect("PKCS #8");
            prop_assert_eq!(*again.expose_seed(), seed);
            let public = PublicKey::try_from(&key.public().as_bytes()[..]);
            prop_assert_eq!(public, Ok(key.public()));
        }

        #[test]
        fn signatures_hold_for_their_message_only(seed: [u8; 32], message: Vec<u8>, at: prop::sample::Index) {
            let key = SigningKey::from_seed(seed);
            let mut signature = key.sign(&message);
            prop_assert_eq!(key.public().verify(&message, &signature), Ok(()));
            let mut longer = message.clone();
            longer.push(0);
            prop_assert_eq!(key.public().verify(&longer, &signature), Err(BadSignature));
            signature[at.index(64)] ^= 1;
            prop_assert_eq!(key.public().verify(&message, &signature), Err(BadSignature));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = PublicKey::try_from(&bytes[..]);
            let _ = SigningKey::from_seed_slice(&bytes);
            let _ = SigningKey::from_pkcs8_der(&bytes);
            let _ = SigningKey::from_seed([1; 32]).public().verify(b"", &bytes);
        }
    }

    #[test]
    fn keys_that_anyone_can_sign_for_are_refused() {
        let mut identity_point = [0; 32];
        identity_point[0] = 1;
        for weak in [[0; 32], identity_point] {
            assert_eq!(PublicKey::try_from(&weak[..]), Err(KeyError::NotAKey));
        }
        assert_eq!(
            PublicKey::try_from(&[0; 31][..]),
            Err(KeyError::Length { found: 31 })
        );
    }

    #[test]
    fn private_keys_do_not_print() {
        let seed = [0xa5; 32];
        let printed = format!(
            "{:?} {:?}",
            SigningKey::from_seed(seed),
            NodeKey::from_seed(seed)
        );
        assert!(!printed.contains("a5a5"), "{printed}");
        assert!(!printed.contains("165, 165"), "{printed}");
    }
}
