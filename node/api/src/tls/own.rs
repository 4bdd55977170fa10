//! The certificates with which a node presents itself, and what they are replaced by.
//!
//! There is one value of [`OwnCertificate`] per node. All its servers and clients hold it, so that a
//! renewed certificate is used by every handshake from then on, wherever it comes from. Connections
//! that exist are not affected: they end with the certificates that they began with, and
//! [`crate::client`] replaces them before.
//!
//! A node has one identity and one Ed25519 key, and up to three certificates:
//!
//! - its leaf, which is on its data partition and is renewed long before it expires;
//! - a leaf with a P-256 key, for callers that do not offer Ed25519. Its key is made at each start
//!   and kept in memory, so that there is nothing to store; until the curators have issued the leaf,
//!   such callers are refused;
//! - as a client, once its leaf has expired, a self-signed certificate of its Ed25519 key. With that it
//!   may ask for a new leaf and do nothing else.
//!
//! A leaf may have expired: a node that was off for long begins with such a one, and can renew it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::ring::sign;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio::sync::watch;

use super::{Clock, TlsError, now};
use crate::certificates::{self, CertificateError, ClusterCa, Leaf};
use crate::identity::{
    ClusterId, NodeCredentials, NodeId, NodeKey, P256Key, P256PublicKey, SigningKey, Subject,
};
use crate::provider::provider;

/// The certificates of this node, which can be replaced while they are in use.
pub struct OwnCertificate {
    key: NodeKey,
    p256_key: P256Key,
    ca: ClusterCa,
    cluster: ClusterId,
    node: NodeId,
    clock: Clock,
    /// Proves the key without a certificate of the cluster.
    possession: Arc<CertifiedKey>,
    leaves: RwLock<Leaves>,
    /// How often the leaves have been replaced.
    changes: watch::Sender<u64>,
}

struct Leaves {
    certificate: CertificateDer<'static>,
    /// When they were taken into use.
    since: UnixTime,
    not_after: UnixTime,
    ed25519: Arc<CertifiedKey>,
    p256: Option<Arc<CertifiedKey>>,
}

impl OwnCertificate {
    /// From a node's credentials, whose certificate may have expired.
    ///
    /// # Errors
    /// If they do not belong together, or are not those of a node.
    pub fn new(credentials: &NodeCredentials, clock: Clock) -> Result<Arc<Self>, TlsError> {
        let ca = ClusterCa::parse(&credentials.ca).map_err(TlsError::Ca)?;
        let leaf = ca
            .verify_at_any_time(&credentials.certificate)
            .map_err(TlsError::Own)?;
        let (cluster, node) = match leaf.identity.subject {
            Subject::Node(id) => (leaf.identity.cluster, id),
            Subject::User(_) => return Err(other_peer("a node".to_owned(), leaf)),
        };
        let key = credentials.key.clone();
        is_of(&key, &leaf)?;
        let possession = certificates::self_signed(&key);
        Ok(Arc::new(Self {
            possession: certified(&possession, &key)?,
            leaves: RwLock::new(Leaves {
                ed25519: certified(&credentials.certificate, &key)?,
                certificate: credentials.certificate.clone(),
                since: now(&clock),
                not_after: leaf.not_after,
                p256: None,
            }),
            key,
            p256_key: P256Key::generate(),
            ca,
            cluster,
            node,
            clock,
            changes: watch::Sender::new(0),
        }))
    }

    /// Replaces the leaf, and the one with the P-256 key if there is a new one.
    ///
    /// # Errors
    /// If one of them is not a valid certificate of this node and its key. Nothing is replaced then.
    pub fn replace(
        &self,
        certificate: CertificateDer<'static>,
        p256: Option<CertificateDer<'static>>,
    ) -> Result<(), TlsError> {
        let leaf = self.verify(&certificate)?;
        let ed25519 = certified(&certificate, &self.key)?;
        let p256 = match p256 {
            None => None,
            Some(p256) => {
                self.verify(&p256)?;
                Some(certified_p256(p256, &self.p256_key)?)
            }
        };
        let mut leaves = self.leaves.write().unwrap_or_else(PoisonError::into_inner);
        *leaves = Leaves {
            certificate,
            since: now(&self.clock),
            not_after: leaf.not_after,
            ed25519,
            p256: p256.or_else(|| leaves.p256.take()),
        };
        drop(leaves);
        self.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<Leaf, TlsError> {
        let leaf = self.ca.verify(certificate, now(&self.clock));
        let leaf = leaf.map_err(TlsError::Own)?;
        let identity = &leaf.identity;
        if identity.cluster != self.cluster || identity.node_id() != Some(self.node) {
            return Err(other_peer(self.node.to_string(), leaf));
        }
        is_of(&self.key, &leaf)?;
        Ok(leaf)
    }

    /// Changes whenever the leaves have been replaced.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The node's cluster.
    pub const fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The node.
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// The node's private key.
    pub const fn key(&self) -> &NodeKey {
        &self.key
    }

    /// The public half of the P-256 key.
    pub const fn p256_public_key(&self) -> P256PublicKey {
        self.p256_key.public()
    }

    /// The cluster's CA.
    pub const fn ca(&self) -> &ClusterCa {
        &self.ca
    }

    /// The clock by which certificates expire.
    pub fn clock(&self) -> Clock {
        Arc::clone(&self.clock)
    }

    /// The current leaf, which may have expired.
    pub fn certificate(&self) -> CertificateDer<'static> {
        self.leaves().certificate.clone()
    }

    /// Last second in which the current leaf is valid.
    pub fn not_after(&self) -> UnixTime {
        self.leaves().not_after
    }

    /// Whether new leaves should be requested: there is none with the P-256 key, half of the time of
    /// the current ones has passed, or the clock has been set back.
    pub fn is_due(&self) -> bool {
        let now = now(&self.clock).as_secs();
        let leaves = self.leaves();
        let (since, end) = (leaves.since.as_secs(), leaves.not_after.as_secs());
        let half = since + end.saturating_sub(since) / 2;
        leaves.p256.is_none() || now > half && end < self.ca.not_after().as_secs() || now < since
    }

    /// Whether there is a leaf with the P-256 key.
    pub fn has_p256(&self) -> bool {
        self.leaves().p256.is_some()
    }

    /// The credentials with the current leaf, to be saved.
    pub fn credentials(&self) -> NodeCredentials {
        NodeCredentials {
            key: self.key.clone(),
            certificate: self.certificate(),
            ca: self.ca.certificate().clone(),
        }
    }

    fn leaves(&self) -> std::sync::RwLockReadGuard<'_, Leaves> {
        self.leaves.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for OwnCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnCertificate({})", self.node)
    }
}

impl ResolvesServerCert for OwnCertificate {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let offers = |scheme| hello.signature_schemes().contains(&scheme);
        let needs_p256 =
            !offers(SignatureScheme::ED25519) && offers(SignatureScheme::ECDSA_NISTP256_SHA256);
        let leaves = self.leaves();
        match &leaves.p256 {
            Some(p256) if needs_p256 => Some(Arc::clone(p256)),
            _ => Some(Arc::clone(&leaves.ed25519)),
        }
    }
}

impl ResolvesClientCert for OwnCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let leaves = self.leaves();
        let has_expired = now(&self.clock) > leaves.not_after;
        Some(Arc::clone(match has_expired {
            true => &self.possession,
            false => &leaves.ed25519,
        }))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Checks that the leaf is for this key.
pub(super) fn is_of(key: &SigningKey, leaf: &Leaf) -> Result<(), TlsError> {
    match leaf.public_key == key.public() {
        true => Ok(()),
        false => Err(TlsError::OtherKey {
            certificate: leaf.public_key,
            key: key.public(),
        }),
    }
}

fn other_peer(wanted: String, leaf: Leaf) -> TlsError {
    TlsError::Own(CertificateError::OtherPeer {
        wanted,
        found: leaf.identity,
    })
}

fn certified(
    certificate: &CertificateDer<'static>,
    key: &SigningKey,
) -> Result<Arc<CertifiedKey>, TlsError> {
    let certificates = vec![certificate.clone()];
    let certified = CertifiedKey::from_der(certificates, key.to_private_key_der(), &provider())?;
    Ok(Arc::new(certified))
}

fn certified_p256(
    certificate: CertificateDer<'static>,
    key: &P256Key,
) -> Result<Arc<CertifiedKey>, TlsError> {
    let key = PrivateKeyDer::Pkcs8(key.to_private_key_der());
    let certified = CertifiedKey::new(vec![certificate], sign::any_ecdsa_type(&key)?);
    // The public half of the key is in the certificate.
    certified.keys_match()?;
    Ok(Arc::new(certified))
}
