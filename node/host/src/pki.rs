//! The cluster's two certificate authorities, and what they issue.
//!
//! The *cluster* authority vouches for nodes and users: whoever has its
//! certificate is who the certificate says. The *etcd* authority vouches for
//! etcd's members to each other and for nothing else, so that a certificate
//! of the one world opens no door in the other.
//!
//! Both come into being once, when a cluster is founded, on the data partition
//! of the first node ([`found`]), because etcd cannot start without its own.
//! The founding transaction takes them into etcd; then the private keys are
//! taken off the disk ([`remove_authority_keys`]). The file without keys stays
//! and says that there was a founding. Hence:
//!
//! - Authorities are made only where there is neither that file nor any data
//!   of etcd. Where etcd has data and the file is missing or spoilt, somebody
//!   has lost something: that is an error, never the start of a new cluster.
//! - Making them is idempotent: after a power cut the next boot finds either
//!   nothing or both.
//!
//! A certificate has the lifetime of its authority, beginning at a moment that
//! every clock of the cluster has passed (see [`Lifetime`]). Serial numbers
//! are random, so that nothing has to be remembered and nothing can collide.

use std::{
    path::Path,
    thread,
    time::{Duration, SystemTime},
};

use hearth_api::{
    identity::{ClusterId, Identity, KeyError, NodeId, NodeKey, PublicKey, SigningKey, UserName},
    private::{StoredAuthorities, StoredAuthority},
    proofs,
    v1::DisownOrder,
};
use hearth_sys::files::{self, FileError};
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls_pki_types::CertificateDer;
use time::OffsetDateTime;
use zeroize::{Zeroize as _, Zeroizing};

use crate::{failpoint, layout};

pub mod kubernetes;

/// Of `StoredAuthority` and `StoredAuthorities`.
const VERSION: u32 = 1;
/// Two certificates and two keys are well below 2 KiB.
const LARGEST_FILE: u64 = 64 << 10;
/// How long an authority lives. Until certificates are renewed this is also
/// how long a cluster lives.
const CA_LIFETIME_YEARS: u32 = 20;
/// Taken off the beginning: a clock is read in whole seconds, and some run
/// slow.
const BACK_DATED: Duration = Duration::from_secs(24 * 3600);

/// What went wrong with certificates, at which step.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of the founding cannot be read or written.
    #[error("certificate authorities")]
    File(#[from] FileError),
    /// The file is there and makes no sense. It is not made anew.
    #[error("certificate authorities in {path}: {why}")]
    Spoilt {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// etcd has data, so there was a founding, and nothing tells which.
    #[error(
        "{path} is missing, but etcd has data: this node has founded a cluster before; \
         restore the file, or wipe the node"
    )]
    Lost {
        /// The missing file.
        path: String,
    },
    /// The file belongs to another cluster.
    #[error("the certificate authority on disk is not that of cluster {wanted}")]
    Foreign {
        /// The cluster that is being founded.
        wanted: ClusterId,
    },
    /// The private key has been handed over to etcd.
    #[error("the private key of the {which} authority is no longer on this disk")]
    KeyRemoved {
        /// Which authority.
        which: &'static str,
    },
    /// A stored authority does not hold together.
    #[error("stored certificate authority: {0}")]
    Stored(&'static str),
    /// Its private key is none.
    #[error("private key of a certificate authority")]
    Key(#[from] KeyError),
    /// It is of a version that this image does not know.
    #[error("stored certificate authority of version {found}: this image knows up to {VERSION}")]
    TooNew {
        /// Its version.
        found: u32,
    },
    /// A certificate could not be made.
    #[error("make a certificate for {subject}")]
    Issue {
        /// For whom.
        subject: String,
        /// By the library.
        source: rcgen::Error,
    },
    /// The kernel gave no random bytes.
    #[error("no random bytes for a serial number")]
    Random,
}

/// From when to when certificates are good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    not_before: OffsetDateTime,
    not_after: OffsetDateTime,
}

impl Lifetime {
    /// The lifetime of authorities made by an image of this build time. No
    /// node's clock stands before its image's build time (it is raised at
    /// boot), so the certificates are good from the first moment on every
    /// node, however wrong the clock of the one that made them.
    pub fn since_build(build_time: SystemTime) -> Self {
        let not_before = OffsetDateTime::from(build_time) - BACK_DATED;
        let not_before = not_before.replace_nanosecond(0).unwrap_or(not_before);
        Self {
            not_before,
            not_after: not_before
                + Duration::from_secs(u64::from(CA_LIFETIME_YEARS) * 365 * 24 * 3600),
        }
    }

    /// That of a certificate, DER.
    pub fn of(certificate: &[u8]) -> Result<Self, PkiError> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|_| PkiError::Stored("its certificate is none"))?;
        let validity = parsed.validity();
        Ok(Self {
            not_before: validity.not_before.to_datetime(),
            not_after: validity.not_after.to_datetime(),
        })
    }
}

/// Our keys in the form that rcgen asks for: nothing is copied.
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

/// The public half alone.
struct Subject(PublicKey);

impl PublicKeyData for Subject {
    fn der_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

/// A certificate authority with its private key, which is wiped when dropped.
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

    /// From a record of etcd (or the disk). Checks that key and certificate
    /// belong together.
    pub fn from_stored(stored: &StoredAuthority) -> Result<Self, PkiError> {
        if stored.version > VERSION {
            return Err(PkiError::TooNew {
                found: stored.version,
            });
        }
        let key = SigningKey::from_pkcs8_der(&stored.private_key)?;
        let (rest, parsed) = x509_parser::parse_x509_certificate(&stored.certificate)
            .map_err(|_| PkiError::Stored("its certificate is none"))?;
        if !rest.is_empty() {
            return Err(PkiError::Stored("something follows its certificate"));
        }
        if parsed.public_key().subject_public_key.data.as_ref() != key.public().as_bytes() {
            return Err(PkiError::Stored(
                "key and certificate do not belong together",
            ));
        }
        Ok(Self {
            certificate: CertificateDer::from(stored.certificate.clone()),
            lifetime: Lifetime::of(&stored.certificate)?,
            key,
        })
    }

    /// As it is stored. Holds the private key.
    pub fn to_stored(&self) -> StoredAuthority {
        StoredAuthority {
            version: VERSION,
            certificate: self.certificate.to_vec(),
            private_key: self.key.expose_pkcs8_der().to_vec(),
        }
    }

    /// Its own certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// A node of the cluster: it serves and it calls.
    pub fn issue_node(
        &self,
        cluster: ClusterId,
        id: NodeId,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let identity = Identity::node(cluster, id);
        self.issue(
            &id.to_string(),
            SanType::URI(ia5(&identity.to_string())?),
            vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            key,
        )
    }

    /// A user of the cluster: it only calls.
    pub fn issue_user(
        &self,
        cluster: ClusterId,
        name: &UserName,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let identity = Identity::user(cluster, name.clone());
        self.issue(
            &name.to_string(),
            SanType::URI(ia5(&identity.to_string())?),
            vec![ExtendedKeyUsagePurpose::ClientAuth],
            key,
        )
    }

    /// A member of etcd. Its name is the node ID, as in the members' URLs;
    /// there are no addresses in it, so that they can change.
    pub fn issue_peer(
        &self,
        id: NodeId,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let name = id.to_string();
        self.issue(
            &name,
            SanType::DnsName(ia5(&name)?),
            vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            key,
        )
    }

    /// Orders a node to wipe its keys. Only the cluster's authority can.
    pub fn disown(&self, cluster: ClusterId, node: NodeId) -> DisownOrder {
        proofs::disown(&self.key, cluster, node)
    }

    fn issue(
        &self,
        name: &str,
        alternative: SanType,
        usages: Vec<ExtendedKeyUsagePurpose>,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        let mut params = parameters(name, self.lifetime)?;
        params.subject_alt_names = vec![alternative];
        params.extended_key_usages = usages;
        self.sign(name, params, key)
    }

    /// Signs a leaf: everything but what makes it one is the caller's.
    fn sign(
        &self,
        name: &str,
        mut params: CertificateParams,
        key: PublicKey,
    ) -> Result<CertificateDer<'static>, PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let signer = Signer(&self.key, self.key.public());
        let issuer = Issuer::from_ca_cert_der(&self.certificate, signer).map_err(issue(name))?;
        let certificate = params
            .signed_by(&Subject(key), &issuer)
            .map_err(issue(name))?;
        Ok(certificate.der().clone())
    }
}

fn issue(subject: &str) -> impl FnOnce(rcgen::Error) -> PkiError {
    let subject = subject.to_owned();
    move |source| PkiError::Issue { subject, source }
}

fn ia5(text: &str) -> Result<rcgen::string::Ia5String, PkiError> {
    text.try_into().map_err(issue(text))
}

/// What all of our certificates have in common.
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

/// Both of them.
pub struct Authorities {
    /// Vouches for nodes and users.
    pub cluster: Authority,
    /// Vouches for etcd's members.
    pub etcd: Authority,
}

/// Who founds, for [`found`].
pub struct Founder<'a> {
    /// The cluster's name, which becomes the authorities' name.
    pub cluster_id: ClusterId,
    /// The first node.
    pub node_id: NodeId,
    /// Its key, which becomes its etcd peer key.
    pub node_key: &'a NodeKey,
    /// Of what is issued.
    pub lifetime: Lifetime,
}

/// Makes both authorities and this node's etcd peer certificate on the data
/// partition, durably, and returns the cluster authority's certificate.
///
/// Idempotent: called again by a later boot of the same founding, it finds
/// what is there and returns the same certificate, also after the keys were
/// taken away. Blocks on the disk.
pub fn found(
    etcd: &layout::Etcd,
    founder: &Founder<'_>,
) -> Result<CertificateDer<'static>, PkiError> {
    failpoint!("founding.authorities.before");
    let path = etcd.authorities();
    let authorities = match read(&path)? {
        Some(stored) => {
            check_cluster(&stored, founder.cluster_id)?;
            if keys_removed(&stored) {
                return Ok(certificate_of(stored.cluster.as_ref()));
            }
            authorities(&path, &stored)?
        }
        None if etcd.data().exists() => {
            return Err(PkiError::Lost {
                path: path.display().to_string(),
            });
        }
        None => Authorities {
            cluster: Authority::make(
                &cluster_authority_name(founder.cluster_id),
                founder.lifetime,
            )?,
            etcd: Authority::make(
                &format!("hearth etcd {}", founder.cluster_id),
                founder.lifetime,
            )?,
        },
    };
    write_all(etcd, founder, &authorities)?;
    failpoint!("founding.authorities.after");
    Ok(authorities.cluster.certificate.clone())
}

/// The authorities of a founding that has not ended.
pub fn load(etcd: &layout::Etcd, cluster_id: ClusterId) -> Result<Authorities, PkiError> {
    let path = etcd.authorities();
    let stored = read(&path)?.ok_or_else(|| PkiError::Lost {
        path: path.display().to_string(),
    })?;
    check_cluster(&stored, cluster_id)?;
    authorities(&path, &stored)
}

/// Whether the private keys are still on this disk, that is, whether the
/// founding may not have ended.
pub fn has_authority_keys(etcd: &layout::Etcd) -> Result<bool, PkiError> {
    Ok(read(&etcd.authorities())?.is_some_and(|stored| !keys_removed(&stored)))
}

/// Takes the private keys off the disk, durably. To be called when etcd holds
/// them and the credentials that came of them are durable. Idempotent.
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
            why: format!("no {which} authority"),
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
    let spoilt = |why: String| PkiError::Spoilt {
        path: path.display().to_string(),
        why,
    };
    let stored = StoredAuthorities::decode(bytes.as_slice()).map_err(|e| spoilt(e.to_string()))?;
    match stored.version {
        0 => Err(spoilt("it is empty".into())),
        1..=VERSION => Ok(Some(stored)),
        found => Err(PkiError::TooNew { found }),
    }
}

/// The cluster's name is in its authority's name.
fn check_cluster(stored: &StoredAuthorities, wanted: ClusterId) -> Result<(), PkiError> {
    let certificate = certificate_of(stored.cluster.as_ref());
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate)
        .map_err(|_| PkiError::Stored("its certificate is none"))?;
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

/// What a certificate, or key, is in a file.
fn as_pem(tag: &str, der: &[u8]) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(pem::encode(&pem::Pem::new(tag, der)).into_bytes())
}

/// Writes what a member of etcd shows its peers, each file durably. Blocks on
/// the disk.
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

/// Writes authorities and peer files at the same time, so that they share the
/// disk's flushes: a founding waits for this. The order does not matter. The
/// peer files are made again from the authorities as long as these have keys.
fn write_all(
    etcd: &layout::Etcd,
    founder: &Founder<'_>,
    authorities: &Authorities,
) -> Result<(), PkiError> {
    let stored = StoredAuthorities {
        version: VERSION,
        cluster: Some(authorities.cluster.to_stored()),
        etcd: Some(authorities.etcd.to_stored()),
    };
    let peer_certificate = authorities
        .etcd
        .issue_peer(founder.node_id, founder.node_key.public())?;
    let peer = etcd.peer();
    let key = founder.node_key.expose_pkcs8_der();
    let content = [
        (etcd.authorities(), Zeroizing::new(stored.encode_to_vec())),
        (
            peer.ca(),
            as_pem("CERTIFICATE", &authorities.etcd.certificate),
        ),
        (peer.certificate(), as_pem("CERTIFICATE", &peer_certificate)),
        (peer.key(), as_pem("PRIVATE KEY", &key)),
    ];
    thread::scope(|scope| {
        let writers: Vec<_> = content
            .iter()
            .map(|(path, bytes)| {
                scope.spawn(move || files::write_atomic(path, bytes, files::PRIVATE_FILE))
            })
            .collect();
        for writer in writers {
            match writer.join() {
                Ok(written) => written?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod stored_forms;
#[cfg(test)]
mod tests;
