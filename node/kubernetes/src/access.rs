//! TLS configuration of Hearth's own clients of the Kubernetes API.
//!
//! A client is made from a certificate and a key in memory, without kubeconfig files. The component
//! that renews the certificate makes a new client and publishes it as a value; the users of the
//! value restart their watches with it.

use hearth_api::provider::provider;
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_kubernetes_api::{AddressError, Client};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// Why a client cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The URL of the API server is invalid.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A certificate is invalid, or the key does not belong to it.
    #[error("cannot set up TLS for a client of the Kubernetes API")]
    Tls(#[from] rustls::Error),
    /// The private key is invalid.
    #[error("cannot read the private key of a client of the Kubernetes API")]
    Key(#[from] pem::Error),
}

/// TLS 1.3 with `authority` as the only trusted CA, and with the client certificate `shown`, if
/// any.
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

/// A client of the API servers at `url`, with the client certificate `own` and `authority` as the
/// only trusted CA. It connects when it is first used.
pub fn client(
    url: &str,
    authority: &CertificateDer<'static>,
    own: &KeyAndCertificate,
) -> Result<Client, AccessError> {
    Ok(Client::new(url, tls(authority, Some(own))?)?)
}
