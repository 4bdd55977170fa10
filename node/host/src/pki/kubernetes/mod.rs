//! Kubernetes' own certificate authorities and the certificates that they issue.
//!
//! Kubernetes trusts every certificate of its CA and reads the user name and the group from the
//! subject. So it has CAs of its own: it accepts no certificate of the cluster CA, and Hearth
//! accepts none of these.
//!
//! | key | certifies |
//! |---|---|
//! | CA `kubernetes` | API servers, kubelets and all of their clients |
//! | CA `front-proxy` | API servers that forward a request for another user |
//! | service-account key | service account tokens of pods (ECDSA P-256: Kubernetes does not support Ed25519 here) |
//!
//! Invariants:
//! - All three are one record. If the record exists but cannot be read, that is an error, and it is
//!   never created again.
//! - The private keys are stored in etcd, under a prefix that only curators and Kubernetes
//!   controllers can read, and nowhere else; copies in memory are zeroized on drop.
//! - The CAs have the lifetime of the cluster CA. Their certificates are valid for [`LIFETIME`] at
//!   most, those of workers for [`WORKER_LIFETIME`], because Kubernetes does not support revocation: a client loses access because it gets no
//!   new certificate. The holder of a certificate requests the next one at
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

use hearth_api::identity::{PublicKey, SigningKey, random_bytes};
use hearth_api::private::{StoredAuthority, StoredKubernetesAuthorities};
use p256::pkcs8::{DecodePrivateKey as _, EncodePrivateKey as _, EncodePublicKey as _};
use prost::Message as _;
use rustls_pki_types::CertificateDer;
use zeroize::{Zeroize as _, Zeroizing};

pub use certificate::{
    Certificate, FRONT_PROXY_CLIENT, LIFETIME, NODES, OPERATOR_LIFETIME, OPERATORS, RECONCILER,
    WORKER_LIFETIME,
};
use issued::pem_of;
pub use issued::{Issued, KeyAndCertificate, Pem, to_pem};

use super::{Authority, Lifetime, PkiError, SubjectKey};

/// The version of the record.
const VERSION: u32 = 1;

/// An error with Kubernetes' certificate authorities.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesPkiError {
    /// The stored record is corrupt. It is never replaced.
    #[error("corrupt record of Kubernetes' certificate authorities: {0}")]
    Spoilt(&'static str),
    /// The version of the record is newer than this image supports.
    #[error(
        "Kubernetes' certificate authorities: expected at most version {VERSION}, got version {found}"
    )]
    TooNew {
        /// The version of the record.
        found: u32,
    },
    /// A key or a certificate cannot be created or read.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The issued certificate is not the requested one.
    #[error("the issued certificate {0}")]
    Issued(&'static str),
    /// An issued certificate cannot be written.
    #[error("cannot save the certificate")]
    File(#[from] hearth_sys::files::FileError),
}

/// The CAs and the service-account key, with their private keys, which are zeroized on drop.
pub struct Authorities {
    kubernetes: Authority,
    front_proxy: Authority,
    service_accounts: ServiceAccountKey,
}

impl Authorities {
    /// Creates the CAs for a cluster that has none yet.
    pub fn make(lifetime: Lifetime) -> Result<Self, KubernetesPkiError> {
        Ok(Self {
            kubernetes: Authority::make("hearth kubernetes", lifetime)?,
            front_proxy: Authority::make("hearth kubernetes front proxy", lifetime)?,
            service_accounts: ServiceAccountKey::generate(),
        })
    }

    /// Encodes the record (`StoredKubernetesAuthorities`).
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

    /// Decodes the record.
    pub fn decode(bytes: &[u8]) -> Result<Self, KubernetesPkiError> {
        let mut stored = StoredKubernetesAuthorities::decode(bytes).map_err(|_| {
            KubernetesPkiError::Spoilt("it is not a StoredKubernetesAuthorities message")
        })?;
        let authorities = Self::from_stored(&stored);
        wipe(&mut stored);
        authorities
    }

    fn from_stored(stored: &StoredKubernetesAuthorities) -> Result<Self, KubernetesPkiError> {
        match stored.version {
            0 => return Err(KubernetesPkiError::Spoilt("the record is empty")),
            1..=VERSION => {}
            found => return Err(KubernetesPkiError::TooNew { found }),
        }
        let one = |authority: &Option<StoredAuthority>| match authority {
            Some(authority) => Ok(Authority::from_stored(authority)?),
            None => Err(KubernetesPkiError::Spoilt("a CA is missing")),
        };
        Ok(Self {
            kubernetes: one(&stored.kubernetes)?,
            front_proxy: one(&stored.front_proxy)?,
            service_accounts: ServiceAccountKey::from_pkcs8(&stored.service_account_key)?,
        })
    }

    /// The lifetime of the CAs.
    pub fn lifetime(&self) -> Lifetime {
        self.kubernetes.lifetime
    }

    /// The certificate of the CA `kubernetes`, DER.
    pub fn ca(&self) -> &CertificateDer<'static> {
        self.kubernetes.certificate()
    }

    /// The certificate of the CA `kubernetes`, PEM.
    pub fn ca_pem(&self) -> String {
        to_pem(self.ca())
    }

    /// The certificate of the CA `front-proxy`, PEM.
    pub fn front_proxy_ca_pem(&self) -> String {
        to_pem(self.front_proxy.certificate())
    }

    /// The key that signs service account tokens.
    pub fn service_accounts(&self) -> &ServiceAccountKey {
        &self.service_accounts
    }

    /// Generates a key and issues a certificate for it. `now` is the beginning of its lifetime.
    pub fn issue(
        &self,
        what: &Certificate<'_>,
        now: SystemTime,
    ) -> Result<KeyAndCertificate, KubernetesPkiError> {
        let key = SigningKey::generate();
        let issued = self.certify(what, key.public(), now)?;
        KeyAndCertificate::new(&key, issued.certificate(), what.lifetime())
    }

    /// Issues a certificate for a key that the caller holds.
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
        let der = authority.sign(&what.subject(), params, &SubjectKey::Ed25519(key))?;
        Issued::parse(&der)
    }
}

/// The key that signs service account tokens. It is generated here; the API servers sign with it.
///
/// It is generated by a library for this curve only: ring contains a precomputed table for fast
/// signing, which makes the node's binary larger by a sixtieth.
pub struct ServiceAccountKey {
    pkcs8: Zeroizing<Vec<u8>>,
    public: p256::PublicKey,
}

impl ServiceAccountKey {
    fn generate() -> Self {
        // About one in 2^32 random numbers of this length is not a valid key.
        let key = loop {
            let bytes = Zeroizing::new(random_bytes::<32>());
            if let Ok(key) = p256::SecretKey::from_slice(&*bytes) {
                break key;
            }
        };
        let der = key.to_pkcs8_der().expect("every key can be encoded");
        Self {
            pkcs8: Zeroizing::new(der.as_bytes().to_vec()),
            public: key.public_key(),
        }
    }

    fn from_pkcs8(der: &[u8]) -> Result<Self, KubernetesPkiError> {
        let key = p256::SecretKey::from_pkcs8_der(der)
            .map_err(|_| KubernetesPkiError::Spoilt("the key of service accounts is invalid"))?;
        Ok(Self {
            pkcs8: Zeroizing::new(der.to_vec()),
            public: key.public_key(),
        })
    }

    /// The private key (PKCS #8, PEM): for `--service-account-signing-key-file` and
    /// `--service-account-private-key-file`.
    pub fn private_pem(&self) -> Pem {
        Pem::new(Zeroizing::new(pem_of("PRIVATE KEY", &self.pkcs8)))
    }

    /// The public half (SPKI, PEM): for `--service-account-key-file`.
    pub fn public_pem(&self) -> String {
        let der = self.public.to_public_key_der();
        pem_of(
            "PUBLIC KEY",
            der.expect("every key can be encoded").as_bytes(),
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
