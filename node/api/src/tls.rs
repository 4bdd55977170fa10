//! TLS as Hearth speaks it: version 1.3, Ed25519, one certificate each way.
//!
//! Nothing is resumed: no tickets, no stored sessions, no early data, because
//! a resumed connection passes by the verifiers, and so by expiry and
//! revocation. The verifiers are our own (see [`crate::certificates`]), since
//! identity here is a URI and not a host name, and since a server must accept
//! self-signed possession certificates, which no CA-based verifier does.
//!
//! A server asks for a client certificate and takes none for an answer, but
//! one that is neither a leaf of its cluster nor a possession certificate ends
//! the handshake. What came out of it is a [`PeerCertificate`].

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, PeerIncompatible, ServerConfig,
    SignatureScheme,
};
pub use rustls_pki_types::CertificateDer;
use rustls_pki_types::{ServerName, UnixTime};

use crate::certificates::{self, CertificateError, ClusterCa, Leaf};
use crate::identity::{
    ClusterId, Identity, NodeCredentials, NodeId, PublicKey, SigningKey, Subject, UserCredentials,
};
use crate::provider::provider;

/// The one protocol we speak on top.
const ALPN: &[u8] = b"h2";

/// What time it is. Tests hold it still; everything else uses [`wall_clock`].
pub type Clock = Arc<dyn TimeProvider>;

/// The machine's clock.
pub fn wall_clock() -> Clock {
    Arc::new(DefaultTimeProvider)
}

/// Now, by this clock. A clock that cannot be read is one at which no
/// certificate is valid.
pub fn now(clock: &Clock) -> UnixTime {
    clock
        .current_time()
        .unwrap_or(UnixTime::since_unix_epoch(std::time::Duration::ZERO))
}

/// TLS cannot be set up with what was given.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The CA certificate is none.
    #[error("the cluster's CA certificate")]
    Ca(#[source] CertificateError),
    /// Our own certificate would be refused by every peer.
    #[error("our own certificate")]
    Own(#[source] CertificateError),
    /// Our own certificate is for another key.
    #[error("our own certificate is for the key {certificate}, our key is {key}")]
    OtherKey {
        /// The one in the certificate.
        certificate: PublicKey,
        /// The one that was given.
        key: PublicKey,
    },
    /// rustls refuses the configuration.
    #[error("TLS configuration")]
    Rustls(#[from] rustls::Error),
}

/// Who is at the other end, as far as the handshake has proven it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerCertificate {
    /// Anyone.
    None,
    /// The holder of this key, whom the cluster has not named.
    Possession(PublicKey),
    /// One of the cluster's own.
    Identified {
        /// Who.
        identity: Identity,
        /// With which key.
        public_key: PublicKey,
        /// Last second in which this may be relied on.
        not_after: UnixTime,
    },
}

impl PeerCertificate {
    /// Who it is, if the cluster says so.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Identified { identity, .. } => Some(identity),
            Self::None | Self::Possession(_) => None,
        }
    }

    /// The key that the peer holds, named or not.
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

/// By what a server judges its callers.
#[derive(Clone, Debug)]
pub struct Trust {
    /// The server's cluster.
    pub cluster: ClusterId,
    /// The cluster's CA.
    pub ca: ClusterCa,
}

impl Trust {
    /// By what a node with these credentials judges, and the node's identity.
    pub fn of_node(
        credentials: &NodeCredentials,
        now: UnixTime,
    ) -> Result<(Self, NodeId), TlsError> {
        let ca = ClusterCa::parse(&credentials.ca).map_err(TlsError::Ca)?;
        let leaf = own_leaf(&ca, &credentials.certificate, &credentials.key, now)?;
        let cluster = leaf.identity.cluster;
        match leaf.identity.subject {
            Subject::Node(id) => Ok((Self { cluster, ca }, id)),
            Subject::User(_) => Err(TlsError::Own(CertificateError::OtherPeer {
                wanted: "a node".to_owned(),
                found: leaf.identity,
            })),
        }
    }

    /// What the presented certificates prove now; an error is a peer that must
    /// not be talked to.
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

/// Whom a client wants to meet.
#[derive(Clone, Debug)]
pub enum ExpectedServer {
    /// Any node of the client's cluster.
    AnyNode,
    /// This node of it.
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

/// A certificate and key that can be exchanged while they are in use: new
/// handshakes take the new ones, connections that stand keep the old.
pub struct OwnCertificate(RwLock<Arc<CertifiedKey>>);

impl OwnCertificate {
    /// Of a node.
    pub fn new(credentials: &NodeCredentials) -> Result<Arc<Self>, TlsError> {
        let certified = certified_key(&credentials.certificate, &credentials.key)?;
        Ok(Arc::new(Self(RwLock::new(certified))))
    }

    /// From now on these.
    pub fn replace(&self, credentials: &NodeCredentials) -> Result<(), TlsError> {
        let certified = certified_key(&credentials.certificate, &credentials.key)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = certified;
        Ok(())
    }

    fn current(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for OwnCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnCertificate")
    }
}

impl ResolvesServerCert for OwnCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// A server's side: presents `own`, judges callers by `trust`.
pub fn server_config(
    own: Arc<OwnCertificate>,
    trust: Trust,
    clock: Clock,
) -> Result<Arc<ServerConfig>, TlsError> {
    let mut config = ServerConfig::builder_with_details(provider(), clock)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(CallerVerifier(trust)))
        .with_cert_resolver(own);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// A node's side as a client of its own cluster.
pub fn node_client_config(
    credentials: &NodeCredentials,
    server: ExpectedServer,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let NodeCredentials {
        key,
        certificate,
        ca,
    } = credentials;
    authenticated(key, certificate, ca, server, clock)
}

/// A user's side.
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
    authenticated(key, certificate, ca, server, clock)
}

fn authenticated(
    key: &SigningKey,
    certificate: &CertificateDer<'static>,
    ca: &CertificateDer<'static>,
    server: ExpectedServer,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let ca = ClusterCa::parse(ca).map_err(TlsError::Ca)?;
    let leaf = own_leaf(&ca, certificate, key, now(&clock))?;
    let verifier = PinnedVerifier {
        ca,
        cluster: Some(leaf.identity.cluster),
        server,
    };
    client_config(Arc::new(verifier), Some((certificate, key)), clock)
}

/// The side of someone whom the cluster has not named yet: proves that it
/// holds `key`, and judges the server by a CA it knows.
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
    client_config(Arc::new(verifier), Some((&certificate, key)), clock)
}

/// The side of someone who does not know the CA yet: any server will do, but
/// what it presented is kept, to be judged as soon as the CA is known. For one
/// connection, and for nothing but [`crate::first_contact`].
pub(crate) fn first_contact_client_config(
    clock: Clock,
) -> Result<(Arc<ClientConfig>, Presented), TlsError> {
    let presented = Presented::default();
    let verifier = RecordingVerifier(presented.clone());
    Ok((client_config(Arc::new(verifier), None, clock)?, presented))
}

/// The certificate that a server presented at first contact.
#[derive(Clone, Debug, Default)]
pub(crate) struct Presented(Arc<OnceLock<CertificateDer<'static>>>);

impl Presented {
    /// What it was; `None` before the handshake.
    pub(crate) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.0.get()
    }
}

fn client_config(
    verifier: Arc<dyn ServerCertVerifier>,
    own: Option<(&CertificateDer<'static>, &SigningKey)>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_details(provider(), clock)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match own {
        Some((certificate, key)) => {
            builder.with_client_auth_cert(vec![certificate.clone()], key.to_private_key_der())?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    // The name would tell an onlooker whom we look for, and servers ignore it.
    config.enable_sni = false;
    Ok(Arc::new(config))
}

fn own_leaf(
    ca: &ClusterCa,
    certificate: &CertificateDer<'_>,
    key: &SigningKey,
    now: UnixTime,
) -> Result<Leaf, TlsError> {
    let leaf = ca.verify(certificate, now).map_err(TlsError::Own)?;
    if leaf.public_key == key.public() {
        Ok(leaf)
    } else {
        Err(TlsError::OtherKey {
            certificate: leaf.public_key,
            key: key.public(),
        })
    }
}

fn certified_key(
    certificate: &CertificateDer<'static>,
    key: &SigningKey,
) -> Result<Arc<CertifiedKey>, TlsError> {
    let certified = CertifiedKey::from_der(
        vec![certificate.clone()],
        key.to_private_key_der(),
        &provider(),
    )?;
    Ok(Arc::new(certified))
}

/// Our reason, in the form in which rustls carries foreign reasons. It goes
/// into logs on this side; the peer gets an alert without details.
fn refusal(error: CertificateError) -> rustls::Error {
    rustls::Error::InvalidCertificate(rustls::CertificateError::Other(rustls::OtherError(
        Arc::new(error),
    )))
}

/// Our own reason, if it was we who refused the peer's certificate.
pub(crate) fn refused_certificate(error: &std::io::Error) -> Option<CertificateError> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    let rustls::Error::InvalidCertificate(rustls::CertificateError::Other(reason)) = error else {
        return None;
    };
    reason.0.downcast_ref::<CertificateError>().cloned()
}

/// A handshake signature by the key in `certificate`, Ed25519 and nothing else.
fn handshake_signature(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, rustls::Error> {
    if signed.scheme != SignatureScheme::ED25519 {
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

/// Both kinds of verifier answer alike what depends only on the protocol.
macro_rules! handshake_signatures {
    () => {
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
            handshake_signature(message, certificate, signed)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
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

/// A server's judgement of its callers.
#[derive(Debug)]
struct CallerVerifier(Trust);

impl ClientCertVerifier for CallerVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[] // no hints: a possession certificate has no root
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

    handshake_signatures!();
}

/// A client's judgement of a server by a CA that it knows.
#[derive(Debug)]
struct PinnedVerifier {
    ca: ClusterCa,
    /// `None`: whichever the CA vouches for.
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

    handshake_signatures!();
}

/// A client that judges later.
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
                "first contact is one connection, and this is another".to_owned(),
            )),
        }
    }

    handshake_signatures!();
}

#[cfg(test)]
mod tests;
