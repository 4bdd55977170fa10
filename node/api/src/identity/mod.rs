//! Identities, and the keys that prove them.
//!
//! Names ([`NodeId`], [`ClusterId`], [`Identity`]) and public keys can be printed, compared and
//! stored. Secrets (private keys, unlock keys, tickets) are types of their own that have no
//! printable form, are wiped when they are dropped, and return their bytes only through `expose`,
//! so that every such place can be found by searching for that word. Everything that comes from
//! outside is parsed into these types once, at the edge; no code inside handles raw bytes.

mod enrolment_id;
mod ids;
mod keys;
mod mesh;
mod p256;
mod secrets;

pub use enrolment_id::{EnrolmentId, EnrolmentIdLength};
pub use ids::{ClusterId, Identity, IdentityError, NodeId, Subject, UserName};
pub use keys::{BadSignature, JoinKey, KeyError, NodeKey, OwnerKey, PublicKey, SigningKey};
pub use mesh::{MeshKey, MeshSecret};
pub use p256::{P256Key, P256PublicKey};
pub use secrets::{
    ClusterUnlockKey, FirstContactSecret, NodeUnlockKey, SecretLengthError, SecretsKey, Ticket,
};

use rustls_pki_types::CertificateDer;

/// Everything a node needs to authenticate itself: durable on its data partition.
#[derive(Clone, Debug)]
pub struct NodeCredentials {
    /// The node's private key.
    pub key: NodeKey,
    /// Its certificate, issued by `ca`.
    pub certificate: CertificateDer<'static>,
    /// The cluster's CA certificate.
    pub ca: CertificateDer<'static>,
}

/// Everything a user needs to authenticate itself.
#[derive(Clone)]
pub struct UserCredentials {
    /// The user's private key.
    pub key: SigningKey,
    /// Its certificate, issued by `ca`.
    pub certificate: CertificateDer<'static>,
    /// The cluster's CA certificate.
    pub ca: CertificateDer<'static>,
}

/// Random bytes from the kernel's generator.
///
/// # Panics
/// If the kernel has no random bytes. It blocks until it has, so this means a kernel without
/// `getrandom`, on which Hearth must not continue.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .expect("the kernel provides random bytes");
    bytes
}
