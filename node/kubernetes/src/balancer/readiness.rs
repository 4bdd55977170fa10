//! Readiness probes of API servers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::Value;
use hearth_kubernetes_api::{AddressError, Client};
use rustls::ClientConfig;

use crate::program::probe::{self, ProbeFailure};

/// Why a server does not count as ready.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// This node has no certificates yet.
    #[error("this node has no certificates for Kubernetes yet")]
    NoCertificates,
    /// The address of the server is invalid.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The server has answered that it is not ready, or cannot be reached.
    #[error("{0}")]
    NotReady(String),
    /// There was no answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// The readiness probe of one server. It may keep a connection. The timeout is the balancer's.
pub(crate) trait Probe: Send + 'static {
    /// Probes once. Safe to cancel.
    fn ready(&mut self) -> impl Future<Output = Result<(), ProbeError>> + Send;
}

/// Makes probes.
pub(crate) trait Probes: Send + Sync + 'static {
    /// The type of the probes.
    type Probe: Probe;

    /// Makes the probe of a server.
    fn probe(&self, server: SocketAddr) -> Self::Probe;
}

/// Makes probes of `/readyz` over TLS.
pub(crate) struct Readyz {
    /// Input: client certificate and trusted CA, once they have been issued.
    pub tls: Value<Arc<ClientConfig>>,
}

impl Probes for Readyz {
    type Probe = ReadyzProbe;

    fn probe(&self, server: SocketAddr) -> ReadyzProbe {
        ReadyzProbe {
            server,
            tls: self.tls.clone(),
            kept: None,
        }
    }
}

/// A probe of `/readyz` of one server.
pub(crate) struct ReadyzProbe {
    server: SocketAddr,
    tls: Value<Arc<ClientConfig>>,
    /// The client, and the certificates that it was made with.
    kept: Option<(Arc<ClientConfig>, Client)>,
}

impl Probe for ReadyzProbe {
    async fn ready(&mut self) -> Result<(), ProbeError> {
        let client = self.client()?;
        let answer = probe::https(&client, "/readyz").await;
        answer.map_err(|ProbeFailure { why, .. }| ProbeError::NotReady(why))
    }
}

impl ReadyzProbe {
    /// The cached client, or a new one if there are new certificates.
    fn client(&mut self) -> Result<Client, ProbeError> {
        let tls = self.tls.get().ok_or(ProbeError::NoCertificates)?;
        if let Some((of, client)) = &self.kept
            && Arc::ptr_eq(of, &tls)
        {
            return Ok(client.clone());
        }
        // Its connection was authenticated with the old certificate.
        self.kept = None;
        let client = Client::new(&format!("https://{}", self.server), (*tls).clone())?;
        self.kept = Some((tls, client.clone()));
        Ok(client)
    }
}
