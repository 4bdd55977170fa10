//! TLS settings of Hearth: version 1.3, one certificate on each side, Ed25519 between our own
//! programs.
//!
//! Programs of others that do not offer Ed25519 get a server certificate with an ECDSA P-256 key, and
//! may present such a client certificate: see [`OwnCertificate`] and [`crate::certificates`].
//!
//! Sessions are never resumed: no tickets, no stored sessions, no early data, because a resumed
//! connection bypasses the verifiers, and so expiry and revocation. The verifiers are our own (see
//! [`crate::certificates`]), because identities are URIs and not host names, and because a server
//! must accept self-signed possession certificates, which no CA-based verifier does.
//!
//! A server requests a client certificate and accepts a client without one, but a certificate that
//! is neither a leaf of its cluster nor a possession certificate ends the handshake. The result is
//! a [`PeerCertificate`].

mod own;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, PeerIncompatible, ServerConfig,
    SignatureScheme,
};
pub use rustls_pki_types::CertificateDer;
use rustls_pki_types::{ServerName, UnixTime};

use crate::certificates::{self, CertificateError, ClusterCa, Leaf};
use crate::identity::{
    ClusterId, Identity, NodeId, PublicKey, SigningKey, Subject, UserCredentials,
};
use crate::provider::provider;

pub use own::OwnCertificate;

/// The only application protocol: HTTP/2.
const ALPN: &[u8] = b"h2";

/// Source of the current time. Tests use a fixed one; everything else uses [`wall_clock`].
pub type Clock = Arc<dyn TimeProvider>;

/// The machine's wall clock.
pub fn wall_clock() -> Clock {
    Arc::new(DefaultTimeProvider)
}

/// The current time of this clock. If the clock cannot be read, a time at which no certificate is
/// valid.
pub fn now(clock: &Clock) -> UnixTime {
    clock
        .current_time()
        .unwrap_or(UnixTime::since_unix_epoch(Duration::ZERO))
}

/// The same in seconds, as messages have it.
pub fn unix_seconds(clock: &Clock) -> i64 {
    i64::try_from(now(clock).as_secs()).unwrap_or(i64::MAX)
}

/// The same as [`SystemTime`], in whole seconds: that from which certificates are valid for a limited time.
pub fn system_time(clock: &Clock) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(now(clock).as_secs())
}

/// TLS cannot be set up with the given credentials.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The CA certificate is invalid.
    #[error("invalid cluster CA certificate")]
    Ca(#[source] CertificateError),
    /// Our own certificate would be rejected by every peer.
    #[error("invalid own certificate")]
    Own(#[source] CertificateError),
    /// Our own certificate is for another key.
    #[error("own certificate: expected public key {key}, got {certificate}")]
    OtherKey {
        /// The key in the certificate.
        certificate: PublicKey,
        /// The public half of our key.
        key: PublicKey,
    },
    /// rustls rejects the configuration.
    #[error("cannot build the TLS configuration")]
    Rustls(#[from] rustls::Error),
}

/// What the handshake has proven about the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerCertificate {
    /// No certificate.
    None,
    /// The peer holds this key; it has no certificate of the cluster.
    Possession(PublicKey),
    /// A node or user of the cluster.
    Identified {
        /// Its identity.
        identity: Identity,
        /// Its public key.
        public_key: PublicKey,
        /// Last second in which this may be relied on.
        not_after: UnixTime,
    },
}

impl PeerCertificate {
    /// The peer's identity, if it has a certificate of the cluster.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Identified { identity, .. } => Some(identity),
            Self::None | Self::Possession(_) => None,
        }
    }

    /// The public key that the peer has proven to hold, with or without a certificate of the
    /// cluster.
    pub fn public_key(&self) -> Option<PublicKey> {
        match self {
            Self::None => None,
            Self::Possession(key) => Some(*key),
            Self::Identified { public_key, .. } => Some(*public_key),
        }
    }
}

impl From<Leaf> for PeerCertificate {
    fn from(leaf: Leaf) -> Self {
        Self::Identified {
            identity: leaf.identity,
            public_key: leaf.public_key,
            not_after: leaf.not_after,
        }
    }
}

/// What a server trusts when it verifies its callers.
#[derive(Clone, Debug)]
pub struct Trust {
    /// The server's cluster.
    pub cluster: ClusterId,
    /// The cluster's CA.
    pub ca: ClusterCa,
}

impl Trust {
    /// The trust of a node with these certificates.
    pub fn of_node(own: &OwnCertificate) -> Self {
        Self {
            cluster: own.cluster(),
            ca: own.ca().clone(),
        }
    }

    /// What the presented certificates prove now. After an error the connection must be closed.
    pub fn judge(
        &self,
        certificates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<PeerCertificate, CertificateError> {
        if certificates.is_empty() {
            return Ok(PeerCertificate::None);
        }
        let der = certificates::only_one(certificates)?;
        match self.ca.verify(der, now) {
            Ok(leaf) => Ok(leaf.of_cluster(self.cluster)?.into()),
            Err(CertificateError::SelfSigned) => {
                certificates::verify_self_signed(der, now).map(PeerCertificate::Possession)
            }
            Err(error) => Err(error),
        }
    }
}

/// The servers that a client accepts.
#[derive(Clone, Debug)]
pub enum ExpectedServer {
    /// Any node of the client's cluster.
    AnyNode,
    /// This node of the client's cluster.
    Node(NodeId),
}

impl ExpectedServer {
    fn check(
        &self,
        identity: &Identity,
        cluster: Option<ClusterId>,
    ) -> Result<(), CertificateError> {
        let other = |wanted: String| CertificateError::OtherPeer {
            wanted,
            found: identity.clone(),
        };
        if let Some(wanted) = cluster.filter(|wanted| *wanted != identity.cluster) {
            return Err(CertificateError::OtherCluster {
                wanted,
                found: identity.cluster,
            });
        }
        match (self, &identity.subject) {
            (Self::AnyNode, Subject::Node(_)) => Ok(()),
            (Self::Node(wanted), Subject::Node(found)) if wanted == found => Ok(()),
            (Self::AnyNode, _) => Err(other("a node".to_owned())),
            (Self::Node(wanted), _) => Err(other(format!("node {wanted}"))),
        }
    }
}

/// TLS configuration of a node as a server of its cluster.
pub fn server_config(own: Arc<OwnCertificate>) -> Result<Arc<ServerConfig>, TlsError> {
    let trust = Trust::of_node(&own);
    let mut config = ServerConfig::builder_with_details(provider(), own.clock())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(CallerVerifier(trust)))
        .with_cert_resolver(own);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// TLS configuration of a node as a client of its own cluster. Each handshake presents the
/// certificate that is current then.
pub fn node_client_config(
    own: &Arc<OwnCertificate>,
    server: ExpectedServer,
) -> Result<Arc<ClientConfig>, TlsError> {
    let verifier = PinnedVerifier {
        ca: own.ca().clone(),
        cluster: Some(own.cluster()),
        server,
    };
    client_config(Arc::new(verifier), Own::Node(Arc::clone(own)), own.clock())
}

/// TLS configuration of a user.
pub fn user_client_config(
    credentials: &UserCredentials,
    server: ExpectedServer,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let UserCredentials {
        key,
        certificate,
        ca,
    } = credentials;
    let ca = ClusterCa::parse(ca).map_err(TlsError::Ca)?;
    let leaf = ca.verify(certificate, now(&clock)).map_err(TlsError::Own)?;
    own::is_of(key, &leaf)?;
    let verifier = PinnedVerifier {
        ca,
        cluster: Some(leaf.identity.cluster),
        server,
    };
    client_config(Arc::new(verifier), Own::Fixed(certificate, key), clock)
}

/// TLS configuration of a client that has no certificate of the cluster yet: proves that it holds
/// `key`, and verifies the server by a CA that it knows.
pub fn possession_client_config(
    key: &SigningKey,
    ca: ClusterCa,
    server: ExpectedServer,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let verifier = PinnedVerifier {
        ca,
        cluster: None,
        server,
    };
    let certificate = certificates::self_signed(key);
    client_config(Arc::new(verifier), Own::Fixed(&certificate, key), clock)
}

/// TLS configuration of a client that does not know the CA yet: it accepts any server, but keeps
/// the presented certificate, to be verified as soon as the CA is known. For one connection, of
/// [`crate::first_contact`].
pub(crate) fn first_contact_client_config(
    clock: Clock,
) -> Result<(Arc<ClientConfig>, Presented), TlsError> {
    let presented = Presented::default();
    let verifier = RecordingVerifier(presented.clone());
    let config = client_config(Arc::new(verifier), Own::None, clock)?;
    Ok((config, presented))
}

/// The certificate that a server presented at first contact.
#[derive(Clone, Debug, Default)]
pub(crate) struct Presented(Arc<OnceLock<CertificateDer<'static>>>);

impl Presented {
    /// The certificate; `None` before the handshake.
    pub(crate) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.0.get()
    }
}

/// What a client presents.
enum Own<'a> {
    None,
    Fixed(&'a CertificateDer<'static>, &'a SigningKey),
    Node(Arc<OwnCertificate>),
}

fn client_config(
    verifier: Arc<dyn ServerCertVerifier>,
    own: Own<'_>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_details(provider(), clock)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match own {
        Own::Fixed(certificate, key) => {
            builder.with_client_auth_cert(vec![certificate.clone()], key.to_private_key_der())?
        }
        Own::Node(own) => builder.with_client_cert_resolver(own),
        Own::None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    // Server names would tell an observer which server is contacted, and servers ignore them.
    config.enable_sni = false;
    Ok(Arc::new(config))
}

/// Our error in the form in which rustls carries errors of others. It is logged on this side; the
/// peer gets an alert without details.
fn refusal(error: CertificateError) -> rustls::Error {
    rustls::Error::InvalidCertificate(rustls::CertificateError::Other(rustls::OtherError(
        Arc::new(error),
    )))
}

/// Our error, if our verifier rejected the peer's certificate.
pub(crate) fn refused_certificate(error: &std::io::Error) -> Option<CertificateError> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    let rustls::Error::InvalidCertificate(rustls::CertificateError::Other(reason)) = error else {
        return None;
    };
    reason.0.downcast_ref::<CertificateError>().cloned()
}

/// The signatures of servers that our clients accept.
const OF_SERVERS: &[SignatureScheme] = &[SignatureScheme::ED25519];
/// The signatures of clients that our servers accept.
const OF_CLIENTS: &[SignatureScheme] = &[
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
];

/// Verifies a handshake signature of one of these kinds by the key in `certificate`.
fn handshake_signature(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
    accepted: &[SignatureScheme],
) -> Result<HandshakeSignatureValid, rustls::Error> {
    if !accepted.contains(&signed.scheme) {
        return Err(refusal(CertificateError::NotEd25519 {
            what: "handshake signature",
        }));
    }
    rustls::crypto::verify_tls13_signature(
        message,
        certificate,
        signed,
        &provider().signature_verification_algorithms,
    )
}

/// The methods that depend only on the protocol, the same for all verifiers.
macro_rules! handshake_signatures {
    ($accepted:expr) => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(PeerIncompatible::Tls12NotOfferedOrEnabled.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            handshake_signature(message, certificate, signed, $accepted)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            $accepted.to_vec()
        }
    };
}

fn presented<'a>(
    end_entity: &'a CertificateDer<'a>,
    intermediates: &[CertificateDer<'_>],
) -> Result<&'a CertificateDer<'a>, CertificateError> {
    if intermediates.is_empty() {
        Ok(end_entity)
    } else {
        Err(CertificateError::Chain {
            found: 1 + intermediates.len(),
        })
    }
}

/// Verifies the callers of a server.
#[derive(Debug)]
struct CallerVerifier(Trust);

impl ClientCertVerifier for CallerVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[] // no hints: a possession certificate has no issuer
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let der = presented(end_entity, intermediates).map_err(refusal)?;
        self.0
            .judge(std::slice::from_ref(der), now)
            .map_err(refusal)?;
        Ok(ClientCertVerified::assertion())
    }

    handshake_signatures!(OF_CLIENTS);
}

/// Verifies a server by a known CA.
#[derive(Debug)]
struct PinnedVerifier {
    ca: ClusterCa,
    /// `None`: any cluster of the CA.
    cluster: Option<ClusterId>,
    server: ExpectedServer,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let der = presented(end_entity, intermediates).map_err(refusal)?;
        let leaf = self.ca.verify(der, now).map_err(refusal)?;
        self.server
            .check(&leaf.identity, self.cluster)
            .map_err(refusal)?;
        Ok(ServerCertVerified::assertion())
    }

    handshake_signatures!(OF_SERVERS);
}

/// Accepts any server and records its certificate, to be verified later.
#[derive(Debug)]
struct RecordingVerifier(Presented);

impl ServerCertVerifier for RecordingVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let der = presented(end_entity, intermediates).map_err(refusal)?;
        match self.0.0.set(der.clone().into_owned()) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(_) => Err(rustls::Error::General(
                "first contact is limited to one connection".to_owned(),
            )),
        }
    }

    handshake_signatures!(OF_SERVERS);
}

#[cfg(test)]
mod tests;
