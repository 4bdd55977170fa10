//! Kubernetes' own authorities, and every certificate that they issue.
//!
//! Kubernetes trusts whoever has a certificate of its authority, and reads the
//! user's name and group from the subject. So it has authorities of its own: a
//! certificate of the cluster's opens nothing there, and none of these opens
//! anything of the cluster's.
//!
//! | what | vouches for |
//! |---|---|
//! | authority `kubernetes` | API servers, kubelets, and all who speak with them |
//! | authority `front-proxy` | API servers that pass a request on for somebody else |
//! | service-account key | the tokens of what runs in pods (ECDSA P-256: Kubernetes takes no Ed25519 here) |
//!
//! Invariants:
//! - All three are one record. What is there but cannot be read is an error,
//!   and is never made anew.
//! - The private keys lie in etcd, in a part of the store that only curators
//!   and Kubernetes controllers open, and nowhere else; what is read is wiped
//!   when it is dropped.
//! - The authorities live as long as the cluster's. What they issue lives for
//!   [`LIFETIME`] at most, because Kubernetes knows no revocation: to be
//!   cut off is to get no new certificate. Who holds one asks for the next at
//!   [`KeyAndCertificate::renew_at`].
//!
//! ```text
//! let authorities = Authorities::make(Lifetime::of(&credentials.ca)?)?;
//! let scheduler = authorities.issue(&Certificate::Scheduler, SystemTime::now())?;
//! scheduler.save(&certificate_file, &key_file)?;
//! ```

mod certificate;
mod issued;

use std::time::SystemTime;

use hearth_api::{
    identity::{PublicKey, SigningKey, random_bytes},
    private::{StoredAuthority, StoredKubernetesAuthorities},
};
use p256::pkcs8::{DecodePrivateKey as _, EncodePrivateKey as _, EncodePublicKey as _};
use prost::Message as _;
use rustls_pki_types::CertificateDer;
use zeroize::{Zeroize as _, Zeroizing};

pub use certificate::{
    Certificate, FRONT_PROXY_CLIENT, LIFETIME, NODES, OPERATOR_LIFETIME, OPERATORS, RECONCILER,
};
use issued::pem_of;
pub use issued::{Issued, KeyAndCertificate, Pem, RENEW_BEFORE, to_pem};

use super::{Authority, Lifetime, PkiError};

/// Of the record.
const VERSION: u32 = 1;

/// What went wrong with Kubernetes' authorities, at which step.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesPkiError {
    /// What is stored makes no sense. It is not made anew.
    #[error("the record of Kubernetes' authorities is spoilt: {0}")]
    Spoilt(&'static str),
    /// The record is of a version that this image does not know.
    #[error("Kubernetes' authorities of version {found}: this image knows up to {VERSION}")]
    TooNew {
        /// Its version.
        found: u32,
    },
    /// A key or a certificate could not be made or read.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// An answer does not hold what was asked for.
    #[error("the certificate that was issued {0}")]
    Issued(&'static str),
    /// What was issued cannot be written.
    #[error("save a certificate")]
    File(#[from] hearth_sys::files::FileError),
}

/// All of them, with their private keys, which are wiped when dropped.
pub struct Authorities {
    kubernetes: Authority,
    front_proxy: Authority,
    service_accounts: ServiceAccountKey,
}

impl Authorities {
    /// New ones, for a cluster that has none yet.
    pub fn make(lifetime: Lifetime) -> Result<Self, KubernetesPkiError> {
        Ok(Self {
            kubernetes: Authority::make("hearth kubernetes", lifetime)?,
            front_proxy: Authority::make("hearth kubernetes front proxy", lifetime)?,
            service_accounts: ServiceAccountKey::generate(),
        })
    }

    /// The record of them (`StoredKubernetesAuthorities`).
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        let mut stored = StoredKubernetesAuthorities {
            version: VERSION,
            kubernetes: Some(self.kubernetes.to_stored()),
            front_proxy: Some(self.front_proxy.to_stored()),
            service_account_key: self.service_accounts.pkcs8.to_vec(),
        };
        let bytes = Zeroizing::new(stored.encode_to_vec());
        wipe(&mut stored);
        bytes
    }

    /// Reads the record of them.
    pub fn decode(bytes: &[u8]) -> Result<Self, KubernetesPkiError> {
        let mut stored = StoredKubernetesAuthorities::decode(bytes)
            .map_err(|_| KubernetesPkiError::Spoilt("it is no message"))?;
        let authorities = Self::from_stored(&stored);
        wipe(&mut stored);
        authorities
    }

    fn from_stored(stored: &StoredKubernetesAuthorities) -> Result<Self, KubernetesPkiError> {
        match stored.version {
            0 => return Err(KubernetesPkiError::Spoilt("it is empty")),
            1..=VERSION => {}
            found => return Err(KubernetesPkiError::TooNew { found }),
        }
        let one = |authority: &Option<StoredAuthority>| match authority {
            Some(authority) => Ok(Authority::from_stored(authority)?),
            None => Err(KubernetesPkiError::Spoilt("an authority is missing")),
        };
        Ok(Self {
            kubernetes: one(&stored.kubernetes)?,
            front_proxy: one(&stored.front_proxy)?,
            service_accounts: ServiceAccountKey::from_pkcs8(&stored.service_account_key)?,
        })
    }

    /// For how long they are valid.
    pub fn lifetime(&self) -> Lifetime {
        self.kubernetes.lifetime
    }

    /// The certificate, DER, by which Kubernetes' parts prove themselves to
    /// each other.
    pub fn ca(&self) -> &CertificateDer<'static> {
        self.kubernetes.certificate()
    }

    /// The same, PEM.
    pub fn ca_pem(&self) -> String {
        to_pem(self.ca())
    }

    /// The certificate of those who pass requests on, PEM.
    pub fn front_proxy_ca_pem(&self) -> String {
        to_pem(self.front_proxy.certificate())
    }

    /// What signs the tokens of service accounts.
    pub fn service_accounts(&self) -> &ServiceAccountKey {
        &self.service_accounts
    }

    /// A certificate for a new key, which is made here. `now` is the beginning
    /// of its life.
    pub fn issue(
        &self,
        what: &Certificate<'_>,
        now: SystemTime,
    ) -> Result<KeyAndCertificate, KubernetesPkiError> {
        let key = SigningKey::generate();
        let issued = self.certify(what, key.public(), now)?;
        KeyAndCertificate::new(&key, issued.certificate())
    }

    /// A certificate for somebody else's key.
    pub fn certify(
        &self,
        what: &Certificate<'_>,
        key: PublicKey,
        now: SystemTime,
    ) -> Result<Issued, KubernetesPkiError> {
        let authority = match what {
            Certificate::FrontProxyClient => &self.front_proxy,
            _ => &self.kubernetes,
        };
        let params = what.parameters(authority.lifetime, now)?;
        let der = authority.sign(&what.subject(), params, key)?;
        Issued::parse(&der)
    }
}

/// Signs the tokens of service accounts. We make it and hand it on; the API
/// servers sign by it.
///
/// It is made by a library of this one curve, for ring brings a table by which
/// signing is fast and the node is larger by a sixtieth.
pub struct ServiceAccountKey {
    pkcs8: Zeroizing<Vec<u8>>,
    public: p256::PublicKey,
}

impl ServiceAccountKey {
    fn generate() -> Self {
        // Of all numbers so long, one in four thousand million is no key.
        let key = loop {
            let bytes = Zeroizing::new(random_bytes::<32>());
            if let Ok(key) = p256::SecretKey::from_slice(&*bytes) {
                break key;
            }
        };
        let der = key.to_pkcs8_der().expect("any key can be written");
        Self {
            pkcs8: Zeroizing::new(der.as_bytes().to_vec()),
            public: key.public_key(),
        }
    }

    fn from_pkcs8(der: &[u8]) -> Result<Self, KubernetesPkiError> {
        let key = p256::SecretKey::from_pkcs8_der(der)
            .map_err(|_| KubernetesPkiError::Spoilt("the key of service accounts is none"))?;
        Ok(Self {
            pkcs8: Zeroizing::new(der.to_vec()),
            public: key.public_key(),
        })
    }

    /// The private key (PKCS #8, PEM): for `--service-account-signing-key-file`
    /// and `--service-account-private-key-file`.
    pub fn private_pem(&self) -> Pem {
        Pem::new(Zeroizing::new(pem_of("PRIVATE KEY", &self.pkcs8)))
    }

    /// The public half (SPKI, PEM): for `--service-account-key-file`.
    pub fn public_pem(&self) -> String {
        let der = self.public.to_public_key_der();
        pem_of(
            "PUBLIC KEY",
            der.expect("any key can be written").as_bytes(),
        )
    }
}

fn wipe(stored: &mut StoredKubernetesAuthorities) {
    stored.service_account_key.zeroize();
    for authority in [&mut stored.kubernetes, &mut stored.front_proxy]
        .into_iter()
        .flatten()
    {
        authority.private_key.zeroize();
    }
}

#[cfg(test)]
mod tests;
