//! How an owner comes to know the CA of a new cluster.
//!
//! The owner has put a random secret into the first node's parameters. At
//! first contact it asks any server that answers for the cluster's CA
//! certificate, and gets it with an HMAC under that secret, over a nonce that
//! it chose. Only then is the certificate judged that the server had
//! presented: if the CA has not issued it, someone stands in between and
//! relays. So nothing is trust on first use, and nobody but a node of the
//! owner's own cluster passes.
//!
//! The connection carries nothing but this question. Whatever comes next goes
//! over another one, on which the CA is pinned from the start.

use std::time::Duration;

use ring::hmac;
use tonic::Status;

use crate::certificates::{CertificateError, ClusterCa};
use crate::client::{self, AttemptError, Endpoint};
use crate::identity::{FirstContactSecret, Subject, random_bytes};
use crate::tls::{self, Clock, TlsError};
use crate::v1::curator_local_client::CuratorLocalClient;
use crate::v1::{GetCaCertificateRequest, GetCaCertificateResponse};

/// A shorter nonce could come up twice.
pub const SHORTEST_NONCE: usize = 16;
/// A longer one only makes work.
pub const LONGEST_NONCE: usize = 64;

/// Sets this use of the secret apart from any other.
const CONTEXT: &[u8] = b"hearth first contact v1\0";

/// The caller's nonce is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nonce of {found} bytes: wanted {SHORTEST_NONCE} to {LONGEST_NONCE}")]
pub struct NonceLengthError {
    /// Its length.
    pub found: usize,
}

/// First contact has failed. Nothing was trusted.
#[derive(Debug, thiserror::Error)]
pub enum FirstContactError {
    /// The server cannot be reached.
    #[error("connect to {endpoint}")]
    Connect {
        /// Whom.
        endpoint: Endpoint,
        /// Why not.
        source: AttemptError,
    },
    /// TLS cannot be set up.
    #[error("prepare first contact")]
    Tls(#[from] TlsError),
    /// The server does not answer the question.
    #[error("ask {endpoint} for its CA certificate")]
    Ask {
        /// Whom.
        endpoint: Endpoint,
        /// What it said instead.
        source: Box<Status>,
    },
    /// The server does not know the secret.
    #[error(
        "{endpoint} does not prove its CA certificate: this is another cluster, or another \
         first-contact secret than the one in the cluster's bootstrap parameters"
    )]
    Unproven {
        /// Whom.
        endpoint: Endpoint,
    },
    /// The proven CA certificate is none.
    #[error("the CA certificate of {endpoint}")]
    Ca {
        /// Whose.
        endpoint: Endpoint,
        /// What is wrong with it.
        source: CertificateError,
    },
    /// The CA is right, the server is not of its cluster.
    #[error("{endpoint} answers for a cluster that it is not a node of: someone is in between")]
    Relayed {
        /// Who.
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

/// The cluster's side: proves its CA certificate (DER) to whoever chose the
/// nonce and knows the secret.
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

/// The owner's side: whether the proof holds, in constant time.
pub fn proven(secret: &FirstContactSecret, nonce: &[u8], ca: &[u8], proof: &[u8]) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose());
    message(nonce, ca).is_ok_and(|message| hmac::verify(&key, &message, proof).is_ok())
}

/// Asks one server for its cluster's CA and checks everything above.
/// `timeout` bounds the connecting and the asking, each.
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

#[cfg(test)]
mod tests;
