//! ECDSA P-256 keys: for TLS with programs that do not offer Ed25519.
//!
//! Such a key has no meaning of its own. The certificate for it names the Ed25519 key of its holder,
//! and what is checked is that key.

use std::fmt;

use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use rustls_pki_types::PrivatePkcs8KeyDer;
use zeroize::Zeroizing;

use super::keys::KeyError;

/// The length of a point that is not compressed.
const LENGTH: usize = 65;
/// The first byte of such a point.
const UNCOMPRESSED: u8 = 4;

/// A public key: a point that is not compressed, 65 bytes (SEC 1). Whether it is on the curve is
/// found out by whoever verifies a signature with it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct P256PublicKey([u8; LENGTH]);

impl P256PublicKey {
    /// Its 65 bytes.
    pub const fn as_bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }

    /// From the field of a message, where no key is an empty field.
    ///
    /// # Errors
    /// If the field is neither empty nor 65 bytes of an uncompressed point.
    pub fn from_field(bytes: &[u8]) -> Result<Option<Self>, KeyError> {
        match bytes {
            [] => Ok(None),
            bytes => Self::try_from(bytes).map(Some),
        }
    }
}

impl TryFrom<&[u8]> for P256PublicKey {
    type Error = KeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, KeyError> {
        match <[u8; LENGTH]>::try_from(bytes) {
            Ok(point) if point[0] == UNCOMPRESSED => Ok(Self(point)),
            _ => Err(KeyError::NotP256 { found: bytes.len() }),
        }
    }
}

impl fmt::Debug for P256PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(self.0))
    }
}

/// A private key. Wiped when dropped.
pub struct P256Key {
    pkcs8: Zeroizing<Vec<u8>>,
    public: P256PublicKey,
}

impl P256Key {
    /// Generates a new one.
    ///
    /// # Panics
    /// If the kernel has no random bytes, like [`super::random_bytes`].
    pub fn generate() -> Self {
        let random = SystemRandom::new();
        let kind = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let document =
            EcdsaKeyPair::generate_pkcs8(kind, &random).expect("the kernel provides random bytes");
        let pair = EcdsaKeyPair::from_pkcs8(kind, document.as_ref(), &random)
            .expect("a key that was just generated is valid");
        Self {
            public: P256PublicKey::try_from(pair.public_key().as_ref())
                .expect("ring does not compress points"),
            pkcs8: Zeroizing::new(document.as_ref().to_vec()),
        }
    }

    /// Its public half.
    pub const fn public(&self) -> P256PublicKey {
        self.public
    }

    /// PKCS #8, DER.
    pub fn expose_pkcs8_der(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The form for rustls.
    pub fn to_private_key_der(&self) -> PrivatePkcs8KeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.pkcs8.to_vec())
    }
}

impl fmt::Debug for P256Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "P256Key(of {:?})", self.public)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_key_is_65_bytes() {
        let key = P256Key::generate();
        let bytes = key.public().as_bytes().to_vec();
        assert_eq!(P256PublicKey::try_from(&bytes[..]).unwrap(), key.public());
        assert_eq!(P256PublicKey::from_field(&[]).unwrap(), None);
        let short = P256PublicKey::from_field(&bytes[1..]).unwrap_err();
        assert_eq!(
            short.to_string(),
            "P-256 public key: expected 65 bytes that begin with 4, got 64 bytes"
        );
        let mut compressed = bytes;
        compressed[0] = 2;
        assert!(P256PublicKey::try_from(&compressed[..]).is_err());
    }

    #[test]
    fn a_private_key_does_not_print() {
        let key = P256Key::generate();
        let printed = format!("{key:?}");
        assert!(printed.starts_with("P256Key(of 04"), "{printed}");
        assert_ne!(key.public(), P256Key::generate().public());
    }
}
