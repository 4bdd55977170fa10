//! Our own clients of Kubernetes' API: who they are, and what a watch tells
//! about itself.
//!
//! A client is made in memory, of a certificate and its key; no file says who
//! we are. Whoever renews the certificate makes a new client and sets it as a
//! value; those who watch begin again with it.

use std::sync::atomic::{AtomicBool, Ordering};

use hearth_api::provider::provider;
use hearth_base::supervisor::Context;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::api::{AddressError, ApiError, Client};
use crate::pki::kubernetes::KeyAndCertificate;
use crate::roles::Health;

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The certificates, or that the key does not belong to them.
    #[error("make a client of Kubernetes' API")]
    Tls(#[from] rustls::Error),
    /// The key.
    #[error("the key of a client of Kubernetes' API")]
    Key(#[from] pem::Error),
}

/// Believes whom `authority` vouches for, and shows a certificate if there is
/// one to show.
pub fn tls(
    authority: &CertificateDer<'static>,
    shown: Option<&KeyAndCertificate>,
) -> Result<ClientConfig, AccessError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone())?;
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots);
    let Some(shown) = shown else {
        return Ok(config.with_no_client_auth());
    };
    let key = PrivatePkcs8KeyDer::from_pem_slice(shown.key_pem().expose().as_bytes())?;
    let chain = vec![shown.certificate().clone()];
    Ok(config.with_client_auth_cert(chain, PrivateKeyDer::Pkcs8(key))?)
}

/// A client of the API servers at `url` that proves itself by `own` and believes
/// those whom `authority` vouches for. Connects when it is first used.
pub fn client(
    url: &str,
    authority: &CertificateDer<'static>,
    own: &KeyAndCertificate,
) -> Result<Client, AccessError> {
    Ok(Client::new(url, tls(authority, Some(own))?)?)
}

/// A runnable that watches: it is well when it has seen everything once, and
/// says once in a row what stands in its way.
pub struct Watching<'a> {
    health: Health<'a>,
    complained: AtomicBool,
}

impl<'a> Watching<'a> {
    /// Of this runnable.
    pub fn of(ctx: &'a Context) -> Self {
        Self {
            health: Health::of(ctx),
            complained: AtomicBool::new(false),
        }
    }

    /// It sees everything.
    pub fn good(&self) {
        self.health.good();
        self.hears();
    }

    /// It is told something: the next failure is worth a word again.
    pub fn hears(&self) {
        self.complained.store(false, Ordering::Relaxed);
    }

    /// A watch has failed, and will begin again.
    pub fn failed(&self, what: &str, error: &ApiError) {
        let error = hearth_api::chain(error);
        if self.complained.swap(true, Ordering::Relaxed) {
            tracing::debug!("{what} cannot be watched: {error}");
        } else {
            tracing::warn!("{what} cannot be watched: {error}");
        }
    }
}
