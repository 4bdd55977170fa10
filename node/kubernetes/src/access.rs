//! Our own clients of Kubernetes' API: who they are.
//!
//! A client is made in memory, of a certificate and its key; no file says who
//! we are. Whoever renews the certificate makes a new client and sets it as a
//! value; those who watch begin again with it.

use hearth_api::provider::provider;
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_kubernetes_api::{AddressError, Client};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

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
