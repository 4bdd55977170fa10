//! Our own clients of Kubernetes' API: who they are, and what a watch tells
//! about itself.
//!
//! A client is made in memory, of a certificate and its key; no file says who
//! we are. Whoever renews the certificate makes a new client and sets it as a
//! value; those who watch begin again with it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use http::Uri;
use kube::Client;
use kube::config::AuthInfo;
use kube::runtime::utils::Backoff;

use crate::roles::Health;

/// To reach an API server, or what stands before it.
const CONNECT: Duration = Duration::from_secs(10);
/// A request that is not written by then is lost.
const WRITE: Duration = Duration::from_secs(30);
/// See [`Pauses`].
const PAUSE: Duration = Duration::from_secs(1);
/// Nothing for so long on a connection: longer than a watch, which an API server
/// ends after five minutes.
const READ: Duration = Duration::from_secs(330);

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The address.
    #[error("{url:?} is not the address of an API server")]
    Address {
        /// As it was given.
        url: String,
        /// The cause.
        source: http::uri::InvalidUri,
    },
    /// The certificates or the key.
    #[error("make a client of Kubernetes' API")]
    Client(#[source] Box<kube::Error>),
}

/// A client of the API servers at `url` that proves itself by `certificate` and
/// `key` (PEM) and believes those whom `authority` (DER) vouches for. Connects
/// when it is first used.
pub fn client(
    url: &str,
    authority: &[u8],
    certificate: &str,
    key: &str,
) -> Result<Client, AccessError> {
    let address: Uri = url.parse().map_err(|source| AccessError::Address {
        url: url.to_owned(),
        source,
    })?;
    let mut config = kube::Config::new(address);
    config.root_cert = Some(vec![authority.to_vec()]);
    config.connect_timeout = Some(CONNECT);
    config.write_timeout = Some(WRITE);
    config.read_timeout = Some(READ);
    config.reset_reader_on_write = true;
    config.auth_info = AuthInfo {
        client_certificate_data: Some(STANDARD.encode(certificate)),
        client_key_data: Some(STANDARD.encode(key).into()),
        ..AuthInfo::default()
    };
    Client::try_from(config).map_err(|error| AccessError::Client(Box::new(error)))
}

/// A certificate and its key as a client, of each newer one a newer client.
/// Healthy when there was one.
pub async fn follow<T: Clone + Send + Sync + 'static>(
    ctx: Context,
    credentials: Value<T>,
    client_of: impl Fn(&T) -> Result<Client, AccessError>,
    clients: &Writer<Client>,
) -> Outcome {
    let health = Health::of(&ctx);
    let mut credentials = credentials.watch();
    loop {
        let newer = tokio::select! {
            newer = credentials.next() => newer?,
            () = ctx.cancelled() => return Ok(()),
        };
        clients.set(client_of(&newer)?);
        health.good();
    }
}

/// Pauses between attempts to watch. They do not grow: the library's grow to half
/// a minute, and a node that has just started would have no names for as long,
/// when its first attempts were too early.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pauses;

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(PAUSE)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {}
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
        self.complained.store(false, Ordering::Relaxed);
    }

    /// A watch has failed, and will begin again.
    pub fn failed(&self, what: &str, error: &kube::runtime::watcher::Error) {
        let error = hearth_api::chain(error);
        if self.complained.swap(true, Ordering::Relaxed) {
            tracing::debug!("{what} cannot be watched: {error}");
        } else {
            tracing::warn!("{what} cannot be watched: {error}");
        }
    }
}
