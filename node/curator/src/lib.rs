//! The curator: the cluster's control plane, on every consensus member.
//!
//! All its state is in etcd, so any number of curators serve the same cluster
//! at the same time and none of them is special: each call can go to each. A
//! write is one fenced transaction ([`hearth_consensus::fenced`]); reads come
//! from a [`cache`] that one watch feeds and that is as recent as each call
//! needs ([`reads`]). One of the curators is the leader, but only to know who
//! does background work.
//!
//! | module | what it does |
//! |---|---|
//! | [`founding`] | makes the records of a new cluster |
//! | [`state`] | the records and their keys |
//! | [`decisions`] | what becomes of a request about a node |
//! | [`authorities`] | who signs |
//! | [`cache`] | the records in memory |
//! | [`reads`] | how recent they are |
//! | [`liveness`] | which nodes this curator hears; its session |
//! | [`membership`] | consensus follows what operators want |
//! | [`health`] | what that says about a node |
//! | [`core`] | who may still call; when a stream ends |
//! | [`pace`] | when subscribers are told |
//! | [`status`] | what callers are told of errors that are not theirs |
//! | [`streams`] | backlog and changes, in bounded pieces |
//! | [`services`] | the gRPC methods |
//!
//! Invariants:
//! - A curator whose last linearizable read is older than [`Timing::freshness`]
//!   authorises nothing, acknowledges nothing, and keeps no stream open.
//! - What a caller sends is bounded before it is looked at and checked before
//!   it is acted on. No handler panics on it; if one does, its caller gets
//!   `Internal` and nobody else notices.
//! - It knows nothing of how the node is run: it is given a client, its
//!   credentials and an address, and works the same on a developer's machine.

pub mod authorities;
pub mod cache;
pub mod core;
pub mod decisions;
pub mod founding;
pub mod health;
pub mod liveness;
pub mod membership;
pub mod pace;
pub mod reads;
pub mod services;
pub mod state;
pub mod status;
pub mod streams;

use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use hearth_api::{
    identity::NodeCredentials,
    names::WATCH_MARK,
    server::{Limits, ServeError, Server, Transport},
    tls::{Clock, TlsError},
};
use hearth_base::{
    event,
    supervisor::{Context, Outcome},
};
use hearth_consensus::{Members, NamespacedClient, PeerReadiness};
use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;

use self::{cache::Cache, core::Core, liveness::Hearing, pace::Pace, reads::Reads};

/// Connections of nodes and operators. One costs some 60 KB, most of it the
/// buffers of TLS and HTTP/2, and only the cluster's own can have one, so this
/// is what a curator of so many nodes needs anyhow.
const MOST_CONNECTIONS: usize = 8192;

/// At the end the session is given up within this, or it lapses by itself.
const SESSION_END_BOUND: Duration = Duration::from_secs(1);

/// How patient a curator is.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How often nodes shall send heartbeats.
    pub heartbeat_interval: Duration,
    /// After this long without one a node is given up.
    pub heartbeat_bound: Duration,
    /// After this a curator that says nothing has lost its session. Whole
    /// seconds.
    pub session: Duration,
    /// How long a node that has lost its curator may take to reach another.
    pub grace: Duration,
    /// How often consensus is asked when nobody else wants to know.
    pub read_interval: Duration,
    /// The age at which what is known is too old to act on.
    pub freshness: Duration,
    /// After this long a watcher that hears nothing is told how current it is.
    pub quiet: Duration,
    /// After this long it is told even that nothing has happened.
    pub mark: Duration,
    /// How long a learner may take until it is in sync.
    pub learner: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_secs(2),
            heartbeat_bound: Duration::from_secs(10),
            session: Duration::from_secs(6),
            grace: Duration::from_secs(20),
            read_interval: Duration::from_secs(1),
            freshness: Duration::from_secs(3),
            quiet: Duration::from_secs(5),
            mark: WATCH_MARK,
            learner: Duration::from_secs(300),
        }
    }
}

/// What a curator needs.
#[derive(Clone)]
pub struct Config {
    /// Where it serves.
    pub listen: SocketAddr,
    /// Of the node it runs on.
    pub credentials: Arc<NodeCredentials>,
    /// Of [`hearth_consensus::ConsensusUser::Curator`].
    pub client: NamespacedClient,
    /// Of [`hearth_consensus::ConsensusUser::KubernetesPki`], of the same etcd.
    pub kubernetes_pki: NamespacedClient,
    /// Those of the etcd that `client` is of.
    pub members: Members,
    /// With the etcd that `client` is of.
    pub peers: PeerReadiness,
    /// Of the node's image.
    pub version: String,
    /// Judges certificates, and dates those that do not live as long as the
    /// cluster.
    pub clock: Clock,
    /// See there.
    pub timing: Timing,
}

/// Why a curator does not run, by the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum CuratorError {
    /// The port.
    #[error("listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The credentials.
    #[error("the curator's TLS")]
    Tls(#[from] TlsError),
    /// Serving.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A record that is too new.
    #[error(transparent)]
    Record(#[from] state::RecordError),
}

/// Runs a curator until it is told to stop. The port is published when calls
/// are answered: with etcd at hand, at once.
pub async fn run(ctx: Context, config: Arc<Config>, ready: Arc<event::Writer<u16>>) -> Outcome {
    let listener = bind(config.listen).await?;
    let port = listener.local_addr().map_err(ServeError::from)?.port();
    // The certificate can be exchanged while the server runs, once they are
    // renewed.
    let (transport, _own, node_id) =
        Transport::of_node(&config.credentials, config.clock.clone()).map_err(CuratorError::Tls)?;
    let timing = config.timing;
    let cache = Arc::new(Cache::new(node_id, timing.heartbeat_bound, timing.grace));
    let reads = Arc::new(Reads::new(
        &config.client,
        timing.read_interval,
        timing.freshness,
    ));
    let ending = CancellationToken::new();
    let core = Arc::new(Core {
        node_id,
        version: config.version.clone(),
        ca: config.credentials.ca.clone(),
        client: config.client.clone(),
        kubernetes_pki: config.kubernetes_pki.clone(),
        members: config.members.clone(),
        peers: config.peers.clone(),
        cache: cache.clone(),
        reads: reads.clone(),
        clock: config.clock.clone(),
        pace: Pace::default(),
        hearing: Hearing::new(
            node_id,
            config.client.clone(),
            cache.clone(),
            reads.clone(),
            timing.heartbeat_bound,
            timing.session,
        ),
        timing,
        ending: ending.clone(),
    });
    let (health, services) = services::all(&core);
    health.not_serving().await;
    let limits = Limits {
        identified: MOST_CONNECTIONS,
        ..Limits::default()
    };
    let server = Server::new(transport)
        .limits(limits)
        .admission(core.clone());

    let announce = async {
        reads.fresh().await;
        ready.set(port);
        tracing::info!(port, "the curator serves");
        ctx.healthy();
        health.follow(&reads).await
    };
    let work = async {
        tokio::select! {
            never = announce => match never {},
            never = reads.serve(&cache) => match never {},
            never = core.pace.announce(&cache) => match never {},
            never = core.hearing.keep_session() => match never {},
            never = core.hearing.give_up_the_silent() => match never {},
            never = membership::run(&core) => match never {},
            failed = cache.follow(&config.client) => match failed {
                Err(error) => CuratorError::from(error),
                Ok(never) => match never {},
            },
        }
    };
    let serve = async {
        let mut server = pin!(server.serve(listener, services, ending.clone()));
        tokio::select! {
            served = &mut server => return served,
            () = ctx.cancelled() => {}
        }
        // Those who balance by health look elsewhere, the others are told.
        health.not_serving().await;
        ending.cancel();
        server.await
    };
    let outcome = tokio::select! {
        error = work => Err(error),
        served = serve => served.map_err(CuratorError::from),
    };
    let _ = timeout(SESSION_END_BOUND, core.hearing.end()).await;
    Ok(outcome?)
}

async fn bind(address: SocketAddr) -> Result<TcpListener, CuratorError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| CuratorError::Listen { address, source })
}

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::new_without_default)]
// It is test code, and fails as tests do.
pub mod testing;
#[cfg(test)]
mod tests;
