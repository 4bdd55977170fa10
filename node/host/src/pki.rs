//! The cluster's two certificate authorities and the certificates that they issue.
//!
//! The *cluster* CA certifies nodes and users. The *etcd* CA certifies etcd members to each other
//! and nothing else, so that a certificate of one CA is not accepted where the other one is
//! required.
//!
//! Both are created once, at the bootstrap of a cluster, on the data partition of the first node
//! ([`found`]), because etcd cannot start without its CA. The bootstrap transaction writes them to
//! etcd; then the private keys are removed from the disk ([`remove_authority_keys`]). The file
//! without keys remains as the record of the bootstrap. Hence:
//!
//! - CAs are created only if neither that file nor any data of etcd exists. If etcd has data and
//!   the file is missing or corrupt, something has been lost: that is an error, never the start of
//!   a new cluster.
//! - Creating them is idempotent: after a power cut, the next boot finds either none or both.
//!
//! All certificates begin with their CA, at a time that every clock in the cluster has passed (see
//! [`Lifetime`]). The leaves of nodes and users end after the time that the cluster's setting says, and
//! are renewed long before. Certificates of etcd members end with the CA: etcd has to start before
//! there is a curator that could renew them, and a member that has been removed is refused whatever
//! its certificate says. Serial numbers are random, so that no counter is needed and none collides.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hearth_api::certificates;
use hearth_api::hosts::Host;
use hearth_api::identity::{
    self, ClusterId, Identity, KeyError, NodeId, NodeKey, P256PublicKey, PublicKey, SigningKey,
    UserName,
};
use hearth_api::private::{StoredAuthorities, StoredAuthority};
use hearth_api::proofs::{self, AfterRemoval};
use hearth_api::v1::DisownOrder;
use hearth_sys::files::{self, FileError};
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls_pki_types::CertificateDer;
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use zeroize::{Zeroize as _, Zeroizing};

use crate::date::date;
use crate::{failpoint, layout};

pub mod kubernetes;

/// The version of `StoredAuthority` and `StoredAuthorities`.
const VERSION: u32 = 1;
/// Two certificates and two keys are well below 2 KiB.
const LARGEST_FILE: u64 = 64 << 10;
/// The lifetime of a CA, and so of a cluster.
const CA_LIFETIME_YEARS: u32 = 20;
/// Subtracted from the beginning, because clocks are read in whole seconds and some run slow.
const BACK_DATED: Duration = Duration::from_secs(24 * 3600);

/// An error of a certificate operation.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of the bootstrap cannot be read or written.
    #[error("cannot access the certificate authorities")]
    File(#[from] FileError),
    /// The file exists but is corrupt. It is never replaced.
    #[error("corrupt certificate authorities in {path}: {why}")]
    Spoilt {
        /// The file.
        path: String,
        /// Why it is corrupt.
        why: String,
    },
    /// etcd has data, so a cluster was bootstrapped, but the file that identifies it is missing.
    #[error(
        "{path} is missing, but etcd has data: this node has bootstrapped a cluster before; \
         restore the file, or wipe the node"
    )]
    Lost {
        /// The missing file.
        path: String,
    },
    /// The file belongs to another cluster.
    #[error("the certificate authority on disk is not that of cluster {wanted}")]
    Foreign {
        /// The cluster that is being bootstrapped.
        wanted: ClusterId,
    },
    /// The private key has been moved to etcd.
    #[error("the private key of the {which} authority is no longer on this disk")]
    KeyRemoved {
        /// The CA: `cluster` or `etcd`.
        which: &'static str,
    },
    /// A stored CA is invalid.
    #[error("invalid stored certificate authority: {0}")]
    Stored(&'static str),
    /// The stored private key is invalid.
    #[error("invalid private key of a certificate authority")]
    Key(#[from] KeyError),
    /// The stored version is newer than this image supports.
    #[error("stored certificate authority: expected a version up to {VERSION}, got {found}")]
    TooNew {
        /// The stored version.
        found: u32,
    },
    /// A certificate cannot be created.
    #[error("cannot issue a certificate for {subject}")]
    Issue {
        /// The subject of the certificate.
        subject: String,
        /// The error of the certificate library.
        source: rcgen::Error,
    },
    /// The clock is outside the lifetime of the CA, so that no end of a certificate can be told.
    #[error(
        "the clock says {now}, but certificates of this cluster are valid from {from} to {until}"
    )]
    Clock {
        /// The date by the clock.
        now: String,
        /// The first day of the CA.
        from: String,
        /// The last one.
        until: String,
    },
    /// The kernel returned no random bytes.
    #[error("cannot generate a serial number: no random bytes")]
    Random,
}

/// The validity period of certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    not_before: OffsetDateTime,
    not_after: OffsetDateTime,
}

impl Lifetime {
    /// The lifetime of CAs created by an image with this build time. No node's clock is before the
    /// build time of its image (it is raised at boot), so the certificates are valid on every node
    /// from the start, even if the clock of the node that created them was wrong.
    pub fn since_build(build_time: SystemTime) -> Self {
        let not_before = OffsetDateTime::from(build_time) - BACK_DATED;
        let not_before = not_before.replace_nanosecond(0).unwrap_or(not_before);
        Self {
            not_before,
            not_after: not_before
                + Duration::from_secs(u64::from(CA_LIFETIME_YEARS) * 365 * 24 * 3600),
        }
    }

    /// The lifetime of a leaf that is issued now by a CA with this lifetime: until `valid` has passed,
    /// but no longer than the CA.
    ///
    /// # Errors
    /// If the clock is outside the lifetime of the CA.
    fn of_leaf(self, now: SystemTime, valid: Duration) -> Result<Self, PkiError> {
        if now < SystemTime::from(self.not_before) || now >= self.end() {
            return Err(PkiError::Clock {
                now: date(now),
                from: date(self.not_before.into()),
                until: date(self.not_after.into()),
            });
        }
        let not_after = OffsetDateTime::from(now)
            .replace_nanosecond(0)
            .map(|now| now + valid);
        Ok(Self {
            not_before: self.not_before,
            not_after: not_after.map_or(self.not_after, |end| end.min(self.not_after)),
        })
    }

    /// Its end.
    pub fn end(&self) -> SystemTime {
        self.not_after.into()
    }

    /// The lifetime of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Result<Self, PkiError> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|_| PkiError::Stored("the certificate is malformed"))?;
        let validity = parsed.validity();
        Ok(Self {
            not_before: validity.not_before.to_datetime(),
            not_after: validity.not_after.to_datetime(),
        })
    }
}

/// Adapts our keys to rcgen's traits without copying them.
struct Signer<'a>(&'a SigningKey, PublicKey);

impl PublicKeyData for Signer<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.1.as_bytes()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl rcgen::SigningKey for Signer<'_> {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(self.0.sign(message).to_vec())
    }
}

/// A public key without its private half.
enum SubjectKey {
    Ed25519(PublicKey),
    P256(P256PublicKey),
}

impl PublicKeyData for SubjectKey {
    fn der_bytes(&self) -> &[u8] {
        match self {
            Self::Ed25519(key) => key.as_bytes(),
            Self::P256(key) => key.as_bytes(),
        }
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        match self {
            Self::Ed25519(_) => &rcgen::PKCS_ED25519,
            Self::P256(_) => &rcgen::PKCS_ECDSA_P256_SHA256,
        }
    }
}

/// Whom a leaf certifies.
pub struct Holder {
    identity: Identity,
    key: PublicKey,
    hosts: Vec<Host>,
}

impl Holder {
    /// A node with this key, which is reached by these names and addresses besides its ID.
    pub fn node(cluster: ClusterId, id: NodeId, key: PublicKey, hosts: Vec<Host>) -> Self {
        let own = Host::Name(id.to_string());
        Self {
            identity: Identity::node(cluster, id),
            key,
            hosts: std::iter::once(own).chain(hosts).collect(),
        }
    }

    /// A user with this key.
    pub fn user(cluster: ClusterId, name: UserName, key: PublicKey) -> Self {
        Self {
            identity: Identity::user(cluster, name),
            key,
            hosts: Vec::new(),
        }
    }
}

/// A certificate authority with its private key, which is zeroized on drop.
pub struct Authority {
    certificate: CertificateDer<'static>,
    key: SigningKey,
    lifetime: Lifetime,
}

impl Authority {
    fn make(name: &str, lifetime: Lifetime) -> Result<Self, PkiError> {
        let key = SigningKey::generate();
        let mut params = parameters(name, lifetime)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params
            .self_signed(&Signer(&key, key.public()))
            .map_err(issue(name))?;
        Ok(Self {
            certificate: certificate.der().clone(),
            key,
            lifetime,
        })
    }

    /// Reads a CA from its record in etcd or on the disk, and checks that key and certificate
    /// match.
    pub fn from_stored(stored: &StoredAuthority) -> Result<Self, PkiError> {
        if stored.version > VERSION {
            return Err(PkiError::TooNew {
                found: stored.version,
            });
        }
        let key = SigningKey::from_pkcs8_der(&stored.private_key)?;
        let (rest, parsed) = x509_parser::parse_x509_certificate(&stored.certificate)
            .map_err(|_| PkiError::Stored("the certificate is malformed"))?;
        if !rest.is_empty() {
            return Err(PkiError::Stored("trailing bytes after the certificate"));
        }
        if parsed.public_key().subject_public_key.data.as_ref() != key.public().as_bytes() {
            return Err(PkiError::Stored("key and certificate do not match"));
        }
        Ok(Self {
            certificate: CertificateDer::from(stored.certificate.clone()),
            lifetime: Lifetime::of(&stored.certificate)?,
            key,
        })
    }

    /// Converts the CA to its record, which contains the private key.
    pub fn to_stored(&self) -> StoredAuthority {
        StoredAuthority {
            version: VERSION,
            certificate: self.certificate.to_vec(),
            private_key: self.key.expose_pkcs8_der().to_vec(),
        }
    }

    /// The certificate of the CA itself.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Issues a leaf for the Ed25519 key of a node or user, valid for so long from now on. Nodes are
    /// servers and clients, users are clients only.
    ///
    /// # Errors
    /// If the clock is outside the lifetime of the CA.
    pub fn issue_leaf(
        &self,
        holder: &Holder,
        now: SystemTime,
        valid: Duration,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let lifetime = self.lifetime.of_leaf(now, valid)?;
        self.issue(
            holder,
            lifetime,
            Vec::new(),
            SubjectKey::Ed25519(holder.key),
        )
    }

    /// The same for a P-256 key of that node or user.
    pub fn issue_p256_leaf(
        &self,
        holder: &Holder,
        key: P256PublicKey,
        now: SystemTime,
        valid: Duration,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let lifetime = self.lifetime.of_leaf(now, valid)?;
        let holders_key = certificates::key_uri(holder.identity.cluster, &holder.key);
        let names = vec![SanType::URI(ia5(&holders_key)?)];
        self.issue(holder, lifetime, names, SubjectKey::P256(key))
    }

    /// Issues a certificate for an etcd member. Its name is the node ID, as in the members' URLs;
    /// it contains no addresses, because they may change.
    pub fn issue_peer(
        &self,
        id: NodeId,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let name = id.to_string();
        let mut params = parameters(&name, self.lifetime)?;
        params.subject_alt_names = vec![SanType::DnsName(ia5(&name)?)];
        params.extended_key_usages = of_node();
        self.sign(&name, params, &SubjectKey::Ed25519(key))
    }

    /// Signs an order to a node to wipe its keys. Valid only if signed by the cluster CA.
    pub fn disown(
        &self,
        cluster: ClusterId,
        node: NodeId,
        afterwards: AfterRemoval,
    ) -> DisownOrder {
        proofs::disown(&self.key, cluster, node, afterwards)
    }

    fn issue(
        &self,
        holder: &Holder,
        lifetime: Lifetime,
        more_names: Vec<SanType>,
        key: SubjectKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let (name, usages) = match &holder.identity.subject {
            identity::Subject::Node(id) => (id.to_string(), of_node()),
            identity::Subject::User(name) => {
                (name.to_string(), vec![ExtendedKeyUsagePurpose::ClientAuth])
            }
        };
        let mut params = parameters(&name, lifetime)?;
        let mut names = vec![SanType::URI(ia5(&holder.identity.to_string())?)];
        names.extend(more_names);
        for host in &holder.hosts {
            names.push(match host {
                Host::Name(name) => SanType::DnsName(ia5(name)?),
                Host::Address(address) => SanType::IpAddress(*address),
            });
        }
        params.subject_alt_names = names;
        params.extended_key_usages = usages;
        self.sign(&name, params, &key)
    }

    /// Signs a leaf certificate; the caller sets everything that is specific to its kind.
    fn sign(
        &self,
        name: &str,
        mut params: CertificateParams,
        key: &SubjectKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let signer = Signer(&self.key, self.key.public());
        let issuer = Issuer::from_ca_cert_der(&self.certificate, signer).map_err(issue(name))?;
        let certificate = params.signed_by(key, &issuer).map_err(issue(name))?;
        Ok(certificate.der().clone())
    }
}

/// The names and addresses by which the holder of a leaf is reached, in the order of the certificate.
pub fn hosts(certificate: &[u8]) -> Result<Vec<Host>, PkiError> {
    const MALFORMED: PkiError = PkiError::Stored("the certificate is malformed");
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| MALFORMED)?;
    let names = parsed.subject_alternative_name().map_err(|_| MALFORMED)?;
    let names = names
        .into_iter()
        .flat_map(|names| &names.value.general_names);
    let hosts = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(Host::Name((*name).to_owned())),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let address = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
            address.ok().map(Host::Address)
        }
        _ => None,
    });
    Ok(hosts.collect())
}

/// The public key that a certificate of anyone certifies, without its algorithm. Bytes after the certificate are ignored.
pub fn key_of(certificate: &[u8]) -> Result<Vec<u8>, PkiError> {
    const MALFORMED: PkiError = PkiError::Stored("the certificate is malformed");
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| MALFORMED)?;
    Ok(parsed.public_key().subject_public_key.data.to_vec())
}

/// The usages of a certificate of a node: it is a server and a client.
fn of_node() -> Vec<ExtendedKeyUsagePurpose> {
    vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ]
}

fn issue(subject: &str) -> impl FnOnce(rcgen::Error) -> PkiError {
    let subject = subject.to_owned();
    move |source| PkiError::Issue { subject, source }
}

fn ia5(text: &str) -> Result<rcgen::string::Ia5String, PkiError> {
    text.try_into().map_err(issue(text))
}

/// The parameters that all of our certificates share.
fn parameters(name: &str, lifetime: Lifetime) -> Result<CertificateParams, PkiError> {
    let mut serial = [0; 16];
    SystemRandom::new()
        .fill(&mut serial)
        .map_err(|_| PkiError::Random)?;
    serial[0] &= 0x7f; // a serial number is positive …
    serial[0] |= 0x40; // … and has no leading zero
    let mut params = CertificateParams::default();
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = lifetime.not_before;
    params.not_after = lifetime.not_after;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, name.to_owned());
    Ok(params)
}

/// The two CAs of a cluster.
pub struct Authorities {
    /// Certifies nodes and users.
    pub cluster: Authority,
    /// Certifies etcd members.
    pub etcd: Authority,
}

/// The bootstrapping node, for [`found`].
pub struct Bootstrapper<'a> {
    /// The cluster's ID, which is part of the CAs' names.
    pub cluster_id: ClusterId,
    /// The ID of the first node.
    pub node_id: NodeId,
    /// The private key of the first node, which also becomes its etcd peer key.
    pub node_key: &'a NodeKey,
}

/// What a cluster begins with, in memory only: its CAs, and the certificate of the first etcd member.
pub struct NewCluster {
    authorities: Authorities,
    peer_certificate: CertificateDer<'static>,
}

impl NewCluster {
    /// Makes all of it.
    pub fn make(founder: &Bootstrapper<'_>, lifetime: Lifetime) -> Result<Self, PkiError> {
        let cluster = founder.cluster_id;
        let authorities = Authorities {
            cluster: Authority::make(&cluster_authority_name(cluster), lifetime)?,
            etcd: Authority::make(&format!("hearth etcd {cluster}"), lifetime)?,
        };
        Self::with(authorities, founder)
    }

    /// With CAs that were made before.
    fn with(authorities: Authorities, founder: &Bootstrapper<'_>) -> Result<Self, PkiError> {
        let key = founder.node_key.public();
        Ok(Self {
            peer_certificate: authorities.etcd.issue_peer(founder.node_id, key)?,
            authorities,
        })
    }
}

/// Saves both CAs and this node's etcd peer certificate on the data partition, durably, and
/// returns the certificate of the cluster CA. `make` is called if there are no CAs yet.
///
/// Idempotent: if a later boot of the same bootstrap calls it again, it returns the same
/// certificate, even after the keys have been removed. Blocks on disk I/O.
pub fn found(
    etcd: &layout::Etcd,
    founder: &Bootstrapper<'_>,
    make: impl FnOnce() -> Result<NewCluster, PkiError>,
) -> Result<CertificateDer<'static>, PkiError> {
    failpoint!("founding.authorities.before");
    let path = etcd.authorities();
    let cluster = match read(&path)? {
        Some(stored) => {
            check_cluster(&stored, founder.cluster_id)?;
            if keys_removed(&stored) {
                return Ok(certificate_of(stored.cluster.as_ref()));
            }
            NewCluster::with(authorities(&path, &stored)?, founder)?
        }
        None if etcd.data().exists() => {
            return Err(PkiError::Lost {
                path: path.display().to_string(),
            });
        }
        None => make()?,
    };
    write_all(etcd, founder, &cluster)?;
    failpoint!("founding.authorities.after");
    Ok(cluster.authorities.cluster.certificate)
}

/// Reads the CAs of a bootstrap that has not completed.
pub fn load(etcd: &layout::Etcd, cluster_id: ClusterId) -> Result<Authorities, PkiError> {
    let path = etcd.authorities();
    let stored = read(&path)?.ok_or_else(|| PkiError::Lost {
        path: path.display().to_string(),
    })?;
    check_cluster(&stored, cluster_id)?;
    authorities(&path, &stored)
}

/// Whether the private keys are still on this disk, that is, whether the bootstrap may not have
/// completed.
pub fn has_authority_keys(etcd: &layout::Etcd) -> Result<bool, PkiError> {
    Ok(read(&etcd.authorities())?.is_some_and(|stored| !keys_removed(&stored)))
}

/// Removes the private keys from the disk, durably. Call it only when etcd holds them and the
/// credentials issued with them are durable. Idempotent.
pub fn remove_authority_keys(etcd: &layout::Etcd) -> Result<(), PkiError> {
    failpoint!("founding.authority_keys_removed.before");
    let path = etcd.authorities();
    if let Some(mut stored) = read(&path)?
        && !keys_removed(&stored)
    {
        for authority in [&mut stored.cluster, &mut stored.etcd]
            .into_iter()
            .flatten()
        {
            authority.private_key.zeroize();
        }
        files::write_atomic(&path, &stored.encode_to_vec(), files::PRIVATE_FILE)?;
    }
    failpoint!("founding.authority_keys_removed.after");
    Ok(())
}

fn cluster_authority_name(cluster: ClusterId) -> String {
    format!("hearth cluster {cluster}")
}

fn keys_removed(stored: &StoredAuthorities) -> bool {
    [&stored.cluster, &stored.etcd]
        .into_iter()
        .flatten()
        .all(|authority| authority.private_key.is_empty())
}

fn certificate_of(stored: Option<&StoredAuthority>) -> CertificateDer<'static> {
    CertificateDer::from(stored.map(|a| a.certificate.clone()).unwrap_or_default())
}

fn authorities(path: &Path, stored: &StoredAuthorities) -> Result<Authorities, PkiError> {
    let one = |which: &'static str, authority: &Option<StoredAuthority>| {
        let authority = authority.as_ref().ok_or_else(|| PkiError::Spoilt {
            path: path.display().to_string(),
            why: format!("the {which} CA is missing"),
        })?;
        if authority.private_key.is_empty() {
            return Err(PkiError::KeyRemoved { which });
        }
        Authority::from_stored(authority)
    };
    Ok(Authorities {
        cluster: one("cluster", &stored.cluster)?,
        etcd: one("etcd", &stored.etcd)?,
    })
}

fn read(path: &Path) -> Result<Option<StoredAuthorities>, PkiError> {
    let Some(bytes) = files::read_limited(path, LARGEST_FILE)?.map(Zeroizing::new) else {
        return Ok(None);
    };
    let corrupt = |why: String| PkiError::Spoilt {
        path: path.display().to_string(),
        why,
    };
    let stored = StoredAuthorities::decode(bytes.as_slice()).map_err(|e| corrupt(e.to_string()))?;
    match stored.version {
        0 => Err(corrupt("the record is empty".into())),
        1..=VERSION => Ok(Some(stored)),
        found => Err(PkiError::TooNew { found }),
    }
}

/// Checks the cluster's ID, which is part of the CA's name.
fn check_cluster(stored: &StoredAuthorities, wanted: ClusterId) -> Result<(), PkiError> {
    let certificate = certificate_of(stored.cluster.as_ref());
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate)
        .map_err(|_| PkiError::Stored("the certificate is malformed"))?;
    let name = parsed
        .subject()
        .iter_common_name()
        .next()
        .and_then(|name| name.as_str().ok());
    if name == Some(cluster_authority_name(wanted).as_str()) {
        Ok(())
    } else {
        Err(PkiError::Foreign { wanted })
    }
}

/// Encodes a certificate or a key in PEM.
fn as_pem(tag: &str, der: &[u8]) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(pem::encode(&pem::Pem::new(tag, der)).into_bytes())
}

/// Writes the files for etcd's peer connections, each of them durably. Blocks on disk I/O.
pub fn save_peer(
    peer: &layout::KeyFiles,
    key: &NodeKey,
    certificate: &[u8],
    ca: &[u8],
) -> Result<(), PkiError> {
    for (path, bytes) in [
        (peer.ca(), as_pem("CERTIFICATE", ca)),
        (peer.certificate(), as_pem("CERTIFICATE", certificate)),
        (peer.key(), as_pem("PRIVATE KEY", &key.expose_pkcs8_der())),
    ] {
        files::write_atomic(&path, &bytes, files::PRIVATE_FILE)?;
    }
    Ok(())
}

/// Writes the CAs and the peer files together, so that they share the disk's flushes: a
/// bootstrap waits for this. The order does not matter: the peer files are written again from the
/// CAs as long as these have keys.
fn write_all(
    etcd: &layout::Etcd,
    founder: &Bootstrapper<'_>,
    cluster: &NewCluster,
) -> Result<(), PkiError> {
    let NewCluster {
        authorities,
        peer_certificate,
    } = cluster;
    let stored = StoredAuthorities {
        version: VERSION,
        cluster: Some(authorities.cluster.to_stored()),
        etcd: Some(authorities.etcd.to_stored()),
    };
    let peer = etcd.peer();
    let key = founder.node_key.expose_pkcs8_der();
    let content = [
        (etcd.authorities(), Zeroizing::new(stored.encode_to_vec())),
        (
            peer.ca(),
            as_pem("CERTIFICATE", &authorities.etcd.certificate),
        ),
        (peer.certificate(), as_pem("CERTIFICATE", peer_certificate)),
        (peer.key(), as_pem("PRIVATE KEY", &key)),
    ];
    let content: Vec<(&Path, &[u8])> = content
        .iter()
        .map(|(path, bytes)| (path.as_path(), bytes.as_slice()))
        .collect();
    Ok(files::write_all_atomic(&content, files::PRIVATE_FILE)?)
}

#[cfg(test)]
mod stored_forms;
#[cfg(test)]
mod tests;
