//! A cluster's CA in memory, for tests: it issues what a real one does, and also what a real one
//! never would. And a curator without a cluster, on real sockets and real TLS, and a node that waits
//! to be unlocked.

mod curator;
pub mod fixtures;
mod insecure;
mod locked;
mod nodes;
mod operators;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PublicKeyData, SanType,
    SignatureAlgorithm,
};
use rustls::ClientConfig;
use rustls::time_provider::TimeProvider;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer, UnixTime};

use crate::certificates::{self, ClusterCa};
use crate::identity::{
    ClusterId, Identity, NodeCredentials, NodeId, NodeKey, P256PublicKey, PublicKey, SigningKey,
    UserCredentials, UserName,
};
use crate::ranges::ClusterRanges;
use crate::tls::{self, Clock, ExpectedServer, OwnCertificate};
use crate::v1::KubernetesConfiguration;

pub use curator::{Heartbeats, Script, Seen, TestCurator};
pub use insecure::{insecure_client_config, p256_client_config};
pub use locked::{LockedNode, TestLockedNode};

/// Start of the certificates' validity: 1 January 2020.
pub const NOT_BEFORE: u64 = 1_577_836_800;
/// Last second of the certificates' validity: the end of 2049.
pub const NOT_AFTER: u64 = 2_524_607_999;

/// A point in time (Unix seconds).
pub fn at(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(seconds))
}

/// The wall clock plus an offset in seconds, which can jump. The offset is never negative: where the time matters, a
/// clock before the image's build time is raised to that.
#[derive(Debug, Default)]
pub struct Ahead(AtomicU64);

impl Ahead {
    /// Begins with this offset.
    pub fn by(seconds: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(seconds)))
    }

    /// Jumps to this offset.
    pub fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::SeqCst);
    }
}

impl TimeProvider for Ahead {
    fn current_time(&self) -> Option<UnixTime> {
        let now = tls::wall_clock().current_time()?;
        Some(at(now.as_secs() + self.0.load(Ordering::SeqCst)))
    }
}

/// A clock that stands still until it is set.
#[derive(Debug)]
pub struct TestClock(AtomicU64);

impl TestClock {
    /// Stands in the middle of the certificates' validity.
    pub fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self((NOT_BEFORE + 1000).into()))
    }

    /// Sets the clock (Unix seconds).
    pub fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::SeqCst);
    }
}

impl rustls::time_provider::TimeProvider for TestClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(at(self.0.load(std::sync::atomic::Ordering::SeqCst)))
    }
}

/// A cluster that consists of its CA only.
pub struct TestCluster {
    /// Its ID.
    pub id: ClusterId,
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl TestCluster {
    /// With a valid CA.
    pub fn new() -> Self {
        Self::with_ca(|_| {})
    }

    /// With a CA whose parameters are modified.
    pub fn with_ca(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let key = pair(&SigningKey::generate());
        let mut params = params("test cluster CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        change(&mut params);
        let certificate = params.self_signed(&key).expect("a CA").der().clone();
        Self {
            id: ClusterId::generate(),
            key,
            certificate,
        }
    }

    /// Its CA certificate, DER.
    pub fn ca(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Its CA certificate, parsed.
    pub fn parsed_ca(&self) -> ClusterCa {
        ClusterCa::parse(&self.certificate).expect("a proper CA")
    }

    /// Valid credentials of a new node.
    pub fn node(&self) -> NodeCredentials {
        let key = NodeKey::generate();
        let identity = Identity::node(self.id, NodeId::from_public_key(&key.public()));
        NodeCredentials {
            certificate: self.leaf(&identity, key.public(), |_| {}),
            ca: self.certificate.clone(),
            key,
        }
    }

    /// Valid credentials of a user.
    pub fn user(&self, name: &str) -> UserCredentials {
        let key = SigningKey::generate();
        UserCredentials {
            certificate: self.user_certificate(name, key.public()),
            ca: self.certificate.clone(),
            key,
        }
    }

    /// A valid certificate of a user for an existing key.
    pub fn user_certificate(&self, name: &str, key: PublicKey) -> CertificateDer<'static> {
        let name = UserName::new(name).expect("a name");
        self.leaf(&Identity::user(self.id, name), key, |_| {})
    }

    /// A leaf whose parameters are modified.
    pub fn leaf(
        &self,
        identity: &Identity,
        key: PublicKey,
        change: impl FnOnce(&mut CertificateParams),
    ) -> CertificateDer<'static> {
        self.issue(&BareKey(key), |params| {
            params.subject_alt_names = vec![uri(&identity.to_string())];
            params.extended_key_usages = usages(identity);
            change(params);
        })
    }

    /// A leaf with a P-256 key for the holder of an Ed25519 key, whose parameters are modified.
    pub fn p256_leaf(
        &self,
        identity: &Identity,
        key: PublicKey,
        p256: P256PublicKey,
        change: impl FnOnce(&mut CertificateParams),
    ) -> CertificateDer<'static> {
        self.issue(&BareP256Key(p256), |params| {
            let holders_key = certificates::key_uri(identity.cluster, &key);
            params.subject_alt_names = vec![uri(&identity.to_string()), uri(&holders_key)];
            params.extended_key_usages = usages(identity);
            change(params);
        })
    }

    /// The same for the key in a field of a request; empty without one.
    fn p256_leaf_of(&self, identity: &Identity, key: PublicKey, field: &[u8]) -> Vec<u8> {
        let p256 = P256PublicKey::from_field(field).expect("a key");
        let leaf = p256.map(|p256| self.p256_leaf(identity, key, p256, |_| {}).to_vec());
        leaf.unwrap_or_default()
    }

    /// A certificate with any parameters, for any key.
    pub fn issue(
        &self,
        key: &impl PublicKeyData,
        change: impl FnOnce(&mut CertificateParams),
    ) -> CertificateDer<'static> {
        let mut params = params("test leaf");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        change(&mut params);
        let issuer = Issuer::from_ca_cert_der(&self.certificate, &self.key).expect("an issuer");
        params
            .signed_by(key, &issuer)
            .expect("a certificate")
            .der()
            .clone()
    }
}

impl Default for TestCluster {
    fn default() -> Self {
        Self::new()
    }
}

/// What a node with these credentials presents, by the wall clock.
pub fn own(node: &NodeCredentials) -> Arc<OwnCertificate> {
    OwnCertificate::new(node, tls::wall_clock()).expect("proper credentials")
}

/// TLS of this node as a client of any node of its cluster.
pub fn node_client_config(node: &NodeCredentials, clock: Clock) -> Arc<ClientConfig> {
    let own = OwnCertificate::new(node, clock).expect("proper credentials");
    tls::node_client_config(&own, ExpectedServer::AnyNode).expect("a TLS configuration")
}

/// A URI as subject alternative name.
pub fn uri(text: &str) -> SanType {
    SanType::URI(text.try_into().expect("ASCII"))
}

/// Our key in rcgen's form.
pub fn pair(key: &SigningKey) -> KeyPair {
    let der = PrivatePkcs8KeyDer::from(key.expose_pkcs8_der().to_vec());
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519).expect("a key pair")
}

/// Common parameters of all certificates here.
pub fn params(name: &str) -> CertificateParams {
    let time = |seconds| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = time(NOT_BEFORE);
    params.not_after = time(NOT_AFTER);
    params
}

fn usages(identity: &Identity) -> Vec<ExtendedKeyUsagePurpose> {
    match identity.node_id() {
        Some(_) => vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ],
        None => vec![ExtendedKeyUsagePurpose::ClientAuth],
    }
}

struct BareP256Key(P256PublicKey);

impl PublicKeyData for BareP256Key {
    fn der_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

struct BareKey(PublicKey);

impl PublicKeyData for BareKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ED25519
    }
}

/// The settings of a dual-stack cluster.
pub fn dual_stack() -> KubernetesConfiguration {
    KubernetesConfiguration {
        pod_ranges: vec!["10.208.0.0/12".into(), "fd00:1::/48".into()],
        service_ranges: vec!["10.224.0.0/16".into(), "fd00:2::/112".into()],
        ..KubernetesConfiguration::default()
    }
}

/// The ranges of that cluster.
pub fn dual_stack_ranges() -> ClusterRanges {
    ClusterRanges::of(&dual_stack()).expect("valid ranges")
}
