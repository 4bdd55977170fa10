//! How an owner gets the authentic CA of a new cluster.
//!
//! The owner has put a random secret into the first node's parameters. At first contact it asks any
//! server that answers for the cluster's CA certificate, and gets it with an HMAC under that secret
//! over a nonce that it chose. Only then is the certificate verified that the server had presented
//! in the handshake: if the CA has not issued it, a man in the middle is relaying. So nothing is
//! trusted on first use, and only a node of the owner's own cluster passes.
//!
//! The connection is used for this request only. Further calls use another connection, on which the
//! CA is pinned from the start.

use std::time::Duration;

use ring::hmac;
use tonic::Status;

use crate::certificates::{self, CertificateError, ClusterCa};
use crate::client::{self, AttemptError, Endpoint};
use crate::identity::{FirstContactSecret, Identity, Subject, random_bytes};
use crate::tls::{self, Clock, TlsError};
use crate::v1::curator_local_client::CuratorLocalClient;
use crate::v1::{GetCaCertificateRequest, GetCaCertificateResponse};

/// A shorter nonce could repeat.
pub const SHORTEST_NONCE: usize = 16;
/// A longer one has no benefit.
pub const LONGEST_NONCE: usize = 64;

/// Separates this use of the secret from any other.
const CONTEXT: &[u8] = b"hearth first contact v1\0";

/// The caller's nonce is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nonce: expected {SHORTEST_NONCE} to {LONGEST_NONCE} bytes, got {found}")]
pub struct NonceLengthError {
    /// Its length.
    pub found: usize,
}

/// First contact has failed. Nothing was trusted.
#[derive(Debug, thiserror::Error)]
pub enum FirstContactError {
    /// The server cannot be reached.
    #[error("cannot connect to {endpoint}")]
    Connect {
        /// The server's address.
        endpoint: Endpoint,
        /// The connection error.
        source: AttemptError,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS for first contact")]
    Tls(#[from] TlsError),
    /// The server returned an error.
    #[error("cannot get the CA certificate from {endpoint}")]
    Ask {
        /// The server's address.
        endpoint: Endpoint,
        /// The returned status.
        source: Box<Status>,
    },
    /// The server's proof is invalid: it does not know the secret.
    #[error(
        "{endpoint} cannot prove its CA certificate: it is of another cluster, or this is not the \
         first-contact secret in the cluster's bootstrap parameters"
    )]
    Unproven {
        /// The server's address.
        endpoint: Endpoint,
    },
    /// The proven CA certificate is invalid.
    #[error("invalid CA certificate from {endpoint}")]
    Ca {
        /// The server's address.
        endpoint: Endpoint,
        /// What is wrong with it.
        source: CertificateError,
    },
    /// The CA is proven, but the server is not a node of its cluster.
    #[error("{endpoint} is not a node of its alleged cluster: possible man in the middle")]
    Relayed {
        /// The server's address.
        endpoint: Endpoint,
        /// What is wrong with the certificate that it presented.
        source: CertificateError,
    },
}

fn message(nonce: &[u8], ca: &[u8]) -> Result<Vec<u8>, NonceLengthError> {
    let found = nonce.len();
    let length = u32::try_from(found).map_err(|_| NonceLengthError { found })?;
    if !(SHORTEST_NONCE..=LONGEST_NONCE).contains(&found) {
        return Err(NonceLengthError { found });
    }
    Ok([CONTEXT, &length.to_le_bytes(), nonce, ca].concat())
}

/// The cluster's side: proves its CA certificate (DER) to a caller that chose the nonce and knows
/// the secret.
pub fn prove(
    secret: &FirstContactSecret,
    nonce: &[u8],
    ca: &[u8],
) -> Result<[u8; 32], NonceLengthError> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose());
    let tag = hmac::sign(&key, &message(nonce, ca)?);
    let mut proof = [0; 32];
    proof.copy_from_slice(tag.as_ref());
    Ok(proof)
}

/// The owner's side: verifies the proof, in constant time.
pub fn proven(secret: &FirstContactSecret, nonce: &[u8], ca: &[u8], proof: &[u8]) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose());
    message(nonce, ca).is_ok_and(|message| hmac::verify(&key, &message, proof).is_ok())
}

/// Asks one server for its cluster's CA and makes all the checks above. `timeout` limits connecting
/// and asking separately.
pub async fn fetch_ca(
    endpoint: &Endpoint,
    secret: &FirstContactSecret,
    timeout: Duration,
    clock: Clock,
) -> Result<ClusterCa, FirstContactError> {
    let (config, presented) = tls::first_contact_client_config(clock.clone())?;
    let channel = client::connect_one(endpoint, config, timeout)
        .await
        .map_err(|source| FirstContactError::Connect {
            endpoint: endpoint.clone(),
            source,
        })?;
    let nonce = random_bytes::<32>();
    let request = GetCaCertificateRequest {
        nonce: nonce.to_vec(),
    };
    let mut server = CuratorLocalClient::new(channel);
    let GetCaCertificateResponse {
        ca_certificate,
        first_contact_mac,
    } = client::within(timeout, server.get_ca_certificate(request))
        .await
        .map_err(|status| FirstContactError::Ask {
            endpoint: endpoint.clone(),
            source: Box::new(status),
        })?
        .into_inner();

    if !proven(secret, &nonce, &ca_certificate, &first_contact_mac) {
        return Err(FirstContactError::Unproven {
            endpoint: endpoint.clone(),
        });
    }
    let ca = ClusterCa::parse(&ca_certificate).map_err(|source| FirstContactError::Ca {
        endpoint: endpoint.clone(),
        source,
    })?;
    let relayed = |source| FirstContactError::Relayed {
        endpoint: endpoint.clone(),
        source,
    };
    let leaf = presented
        .certificate()
        .ok_or(CertificateError::Chain { found: 0 })
        .and_then(|leaf| ca.verify(leaf, tls::now(&clock)))
        .map_err(relayed)?;
    match leaf.identity.subject {
        Subject::Node(_) => Ok(ca),
        Subject::User(_) => Err(relayed(CertificateError::OtherPeer {
            wanted: "a node".to_owned(),
            found: leaf.identity,
        })),
    }
}

/// Whom the server at an address claims to be: the identity in the certificate that it presents,
/// which no CA has verified. Sends no request. `None` if no server presents a certificate of ours.
pub async fn claimed_identity(
    endpoint: &Endpoint,
    timeout: Duration,
    clock: Clock,
) -> Option<Identity> {
    let (config, presented) = tls::first_contact_client_config(clock).ok()?;
    let _connection = client::connect_one(endpoint, config, timeout).await.ok()?;
    certificates::identity(presented.certificate()?).ok()
}

#[cfg(test)]
mod tests;
