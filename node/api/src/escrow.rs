//! The exchange of the owner key for an owner certificate.
//!
//! The call itself is [`Aaa.Escrow`](crate::v1::aaa_client); this is the owner's side of it. It is
//! as strict as any peer would be: the result must be a certificate for the owner, with the owner
//! key, issued by the CA that first contact has proven. The exchange can be repeated, and is while
//! the cluster has no quorum.

use crate::certificates::{CertificateError, ClusterCa, Leaf};
use crate::client::{Curators, Endpoint, Options, retry_unavailable};
use crate::identity::{OwnerKey, P256PublicKey, SigningKey, Subject, UserCredentials, UserName};
use crate::tls::{self, CertificateDer, ExpectedServer, TlsError};
use crate::v1::aaa_client::AaaClient;
use crate::v1::{EscrowRequest, EscrowResponse};

/// Why the exchange failed, by step.
#[derive(Debug, thiserror::Error)]
pub enum EscrowError {
    /// Key and CA cannot be used for a connection.
    #[error("cannot set up TLS")]
    Tls(#[from] TlsError),
    /// The call failed or was refused.
    #[error("cannot exchange the owner key for a certificate")]
    Call(#[source] Box<tonic::Status>),
    /// The issued certificate is not the requested one.
    #[error("invalid certificate from the cluster")]
    Certificate(#[from] CertificateError),
}

/// What the owner gets.
pub struct Exchanged {
    /// The owner's credentials.
    pub credentials: UserCredentials,
    /// The content of the certificate in them.
    pub leaf: Leaf,
    /// The certificate of the P-256 key, if there is one.
    pub p256: Option<CertificateDer<'static>>,
}

/// Requests a certificate from the curators, each of which must belong to the cluster with this CA,
/// and another one for the P-256 key if one is given. `options.call_timeout` limits the whole call.
pub async fn exchange(
    curators: Vec<Endpoint>,
    key: &OwnerKey,
    ca: &ClusterCa,
    p256: Option<P256PublicKey>,
    options: Options,
) -> Result<Exchanged, EscrowError> {
    let (clock, bound) = (options.clock.clone(), options.call_timeout);
    let server = ExpectedServer::AnyNode;
    let config = tls::possession_client_config(key, ca.clone(), server, clock.clone())?;
    let aaa = AaaClient::new(Curators::new(curators, config, options).channel());
    let request = EscrowRequest {
        identity: UserName::OWNER.to_owned(),
        p256_public_key: p256.map(|key| key.as_bytes().to_vec()).unwrap_or_default(),
    };
    let call = || {
        let (mut aaa, request) = (aaa.clone(), request.clone());
        async move { aaa.escrow(request).await }
    };
    let response = retry_unavailable(bound, call).await;
    let EscrowResponse {
        certificate,
        ca_certificate,
        p256_certificate,
    } = response
        .map_err(|status| EscrowError::Call(Box::new(status)))?
        .into_inner();
    if ca_certificate != ca.certificate().as_ref() {
        return Err(CertificateError::OtherIssuer.into());
    }
    let now = tls::now(&clock);
    let leaf = owners(ca.verify(&certificate, now)?, key)?;
    if p256.is_some() {
        owners(ca.verify(&p256_certificate, now)?, key)?;
    }
    let credentials = UserCredentials {
        key: SigningKey::clone(key),
        certificate: CertificateDer::from(certificate),
        ca: ca.certificate().clone(),
    };
    Ok(Exchanged {
        credentials,
        leaf,
        p256: p256.map(|_| CertificateDer::from(p256_certificate)),
    })
}

/// Checks that a leaf is the owner's.
fn owners(leaf: Leaf, key: &OwnerKey) -> Result<Leaf, CertificateError> {
    if leaf.identity.subject == Subject::User(UserName::owner()) && leaf.public_key == key.public()
    {
        return Ok(leaf);
    }
    Err(CertificateError::OtherPeer {
        wanted: "user owner with the owner key".to_owned(),
        found: leaf.identity,
    })
}
