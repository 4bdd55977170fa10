//! Whether an API server is ready, as it says itself.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::Value;
use hearth_kubernetes_api::{AddressError, Client};
use rustls::ClientConfig;

use crate::program::probe::{self, Unwell};

/// Why a server does not count as ready.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// This node has no certificates yet.
    #[error("nobody to ask as yet")]
    NoCertificates,
    /// Its address makes no client.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// It says so, or nothing.
    #[error("{0}")]
    NotReady(String),
    /// There is no answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// Finds out whether one server is ready, again and again. May keep a
/// connection. The bound in time is the balancer's.
pub(crate) trait Probe: Send + 'static {
    /// Asks once. Safe to cancel.
    fn ready(&mut self) -> impl Future<Output = Result<(), ProbeError>> + Send;
}

/// Makes the probes.
pub(crate) trait Probes: Send + Sync + 'static {
    /// What it makes.
    type Probe: Probe;

    /// One for this server.
    fn probe(&self, server: SocketAddr) -> Self::Probe;
}

/// Asks API servers at `/readyz`, by TLS.
pub(crate) struct Readyz {
    /// Will be read: as whom, once there are certificates, and the authority that
    /// servers are to prove themselves by.
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

/// The same, of one server.
pub(crate) struct ReadyzProbe {
    server: SocketAddr,
    tls: Value<Arc<ClientConfig>>,
    /// The client, and the certificates that it was made of.
    kept: Option<(Arc<ClientConfig>, Client)>,
}

impl Probe for ReadyzProbe {
    async fn ready(&mut self) -> Result<(), ProbeError> {
        let client = self.client()?;
        let answer = probe::https(&client, "/readyz").await;
        answer.map_err(|Unwell { why, .. }| ProbeError::NotReady(why))
    }
}

impl ReadyzProbe {
    /// The client that is kept, or a new one when there are new certificates.
    fn client(&mut self) -> Result<Client, ProbeError> {
        let tls = self.tls.get().ok_or(ProbeError::NoCertificates)?;
        if let Some((of, client)) = &self.kept
            && Arc::ptr_eq(of, &tls)
        {
            return Ok(client.clone());
        }
        // Its connection proves what is not true any more.
        self.kept = None;
        let client = Client::new(&format!("https://{}", self.server), (*tls).clone())?;
        self.kept = Some((tls, client.clone()));
        Ok(client)
    }
}
