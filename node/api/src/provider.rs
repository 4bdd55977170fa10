//! The cryptography of TLS, limited to what Hearth uses.
//!
//! Both ends of nearly all connections are ours, and the others (Kubernetes' programs) are
//! configured. So there is one version, one key exchange and one kind of key: TLS 1.3, X25519,
//! Ed25519, with AES-GCM, which every machine that Hearth runs on has in hardware. ECDSA P-256 is
//! there for the clients of others that do not offer Ed25519. Algorithms that are not used cannot be
//! attacked, and are not linked either: with everything that the library offers the program would
//! be two percent larger.

use std::sync::{Arc, OnceLock};

use ring::rand::{SecureRandom as _, SystemRandom};
use rustls::SignatureScheme;
use rustls::crypto::ring::{cipher_suite, kx_group, sign};
use rustls::crypto::{
    CryptoProvider, GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms,
};
use rustls_pki_types::{PrivateKeyDer, SignatureVerificationAlgorithm};

type Signatures = &'static [&'static dyn SignatureVerificationAlgorithm];

/// The accepted signature algorithms.
static ED25519: Signatures = &[webpki::ring::ED25519];
static P256: Signatures = &[webpki::ring::ECDSA_P256_SHA256];
static ALL: Signatures = &[webpki::ring::ED25519, webpki::ring::ECDSA_P256_SHA256];
static NAMED: &[(SignatureScheme, Signatures)] = &[
    (SignatureScheme::ED25519, ED25519),
    (SignatureScheme::ECDSA_NISTP256_SHA256, P256),
];

/// The provider, not installed process-wide: other users of rustls choose their own.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let new = || {
        Arc::new(CryptoProvider {
            cipher_suites: vec![
                cipher_suite::TLS13_AES_256_GCM_SHA384,
                cipher_suite::TLS13_AES_128_GCM_SHA256,
            ],
            kx_groups: vec![kx_group::X25519],
            signature_verification_algorithms: WebPkiSupportedAlgorithms {
                all: ALL,
                mapping: NAMED,
            },
            secure_random: &System,
            key_provider: &Ed25519Keys,
        })
    };
    Arc::clone(PROVIDER.get_or_init(new))
}

/// The kernel's random numbers.
#[derive(Debug)]
struct System;

impl SecureRandom for System {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        let filled = SystemRandom::new().fill(bytes);
        filled.map_err(|_| GetRandomFailed)
    }
}

/// Reads Ed25519 private keys only.
#[derive(Debug)]
struct Ed25519Keys;

impl KeyProvider for Ed25519Keys {
    fn load_private_key(
        &self,
        key: PrivateKeyDer<'static>,
    ) -> Result<Arc<dyn rustls::sign::SigningKey>, rustls::Error> {
        match key {
            PrivateKeyDer::Pkcs8(key) => sign::any_eddsa_type(&key),
            _ => Err(rustls::Error::General(
                "expected an Ed25519 key in PKCS #8".to_owned(),
            )),
        }
    }
}
