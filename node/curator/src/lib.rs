//! The curator: the cluster's control plane, on every consensus member.
//!
//! All its state is in etcd, so any number of curators can serve the same cluster at the same
//! time, and a client can send each call to any of them. A write is one fenced transaction
//! ([`hearth_consensus::fenced`]). Reads are served from a [`cache`] that is fed by one watch and
//! is as recent as each call requires ([`reads`]). One of the curators is the leader, but only to
//! do background work. The records, and the rules by which requests change them, are in
//! `hearth-cluster`.
//!
//! | module | what it does |
//! |---|---|
//! | [`founding`] | writes the records of a new cluster |
//! | [`budget`] | what a single node may cost all others |
//! | [`authorities`] | loads certificate authorities for signing |
//! | [`leaves`] | issues the certificates of nodes and users, and renews its own |
//! | [`cache`] | the records in memory |
//! | [`reads`] | how recent the cache is |
//! | [`liveness`] | receives heartbeats; the curator's session |
//! | [`membership`] | changes etcd's members as operators request |
//! | [`health`] | derives a node's health from its liveness |
//! | [`core`] | shared by the services: access checks, decide and write |
//! | [`pace`] | limits the rate of messages to subscribers |
//! | [`status`] | gRPC status codes of internal errors |
//! | [`streams`] | backlog and changes, in messages of bounded size |
//! | [`services`] | the gRPC methods |
//!
//! Invariants:
//! - A curator whose last linearizable read is older than [`Timing::freshness`] authorizes nothing,
//!   acknowledges nothing, and ends its streams.
//! - The size of a request is bounded before it is parsed, and a request is validated before it is
//!   executed. No handler panics on a request; if one does, its caller gets `Internal` and other
//!   callers are not affected.
//! - The curator does not depend on how the node is run: it gets a client, its credentials and an
//!   address, and runs the same way on a developer's machine.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod authorities;
pub mod budget;
pub mod cache;
pub mod core;
pub mod founding;
pub mod health;
pub mod leaves;
pub mod liveness;
pub mod membership;
pub mod pace;
pub mod reads;
pub mod services;
pub mod status;
pub mod streams;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::names::WATCH_MARK;
use hearth_api::server::{Limits, ServeError, Server, Transport};
use hearth_api::tls::{OwnCertificate, TlsError};
use hearth_base::event;
use hearth_base::supervisor::{Context, Outcome};
use hearth_cluster::state::RecordError;
use hearth_consensus::secrets_keys::SecretsKeys;
use hearth_consensus::{Members, NamespacedClient, PeerReadiness};
use hearth_host::handover::TimeStatus;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::budget::Budgets;
use self::cache::Cache;
use self::core::Core;
use self::liveness::HeartbeatTracker;
use self::pace::Pace;
use self::reads::ReadIndex;

/// Maximum number of connections of nodes and operators. One takes about 60 KB, mostly TLS and
/// HTTP/2 buffers. Only members of the cluster are counted here, so a cluster with this many nodes
/// needs the memory in any case.
const MOST_CONNECTIONS: usize = 8192;

/// How long shutdown waits for the session to be revoked. Otherwise its lease expires.
const SESSION_END_BOUND: Duration = Duration::from_secs(1);

/// Intervals and timeouts of a curator.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How often nodes send heartbeats.
    pub heartbeat_interval: Duration,
    /// A node without a heartbeat for this long is declared lost.
    pub heartbeat_bound: Duration,
    /// Time to live of the curator's session, a lease in etcd, instead of the cluster's setting; for
    /// tests. Whole seconds.
    pub session: Option<Duration>,
    /// How long a node whose curator is gone may take to reach another one.
    pub grace: Duration,
    /// Interval of linearizable reads while no call needs one.
    pub read_interval: Duration,
    /// Age of the last linearizable read at which the curator is stale.
    pub freshness: Duration,
    /// A watcher without events for this long is sent the revision that it is current at.
    pub quiet: Duration,
    /// A watcher is sent an event at least this often, even if nothing has changed.
    pub mark: Duration,
    /// How long a learner may take to get in sync with the leader.
    pub learner: Duration,
    /// How long the cluster, after it has replaced a damaged etcd member by itself, replaces no other one. Whole seconds.
    pub replacement: Duration,
    /// What a single node may cost.
    pub budget: budget::Limits,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_secs(2),
            heartbeat_bound: Duration::from_secs(10),
            session: None,
            grace: Duration::from_secs(20),
            read_interval: Duration::from_secs(1),
            freshness: Duration::from_secs(3),
            quiet: Duration::from_secs(5),
            mark: WATCH_MARK,
            learner: Duration::from_secs(300),
            replacement: Duration::from_secs(3600),
            budget: budget::Limits::default(),
        }
    }
}

/// Configuration of a curator.
#[derive(Clone)]
pub struct Config {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The certificates of the node that it runs on, which it renews. Certificates are issued and
    /// checked by their clock.
    pub own: Arc<OwnCertificate>,
    /// Read: the state of that node's clock. While it is known to be wrong, no certificate is issued.
    pub time: event::Value<TimeStatus>,
    /// The etcd client of [`hearth_consensus::ConsensusUser::Curator`].
    pub client: NamespacedClient,
    /// The etcd client of [`hearth_consensus::ConsensusUser::KubernetesPki`], of the same etcd.
    pub kubernetes_pki: NamespacedClient,
    /// The etcd client of [`hearth_consensus::ConsensusUser::KubernetesSecrets`], of the same etcd.
    pub kubernetes_secrets: NamespacedClient,
    /// The members of the same etcd.
    pub members: Members,
    /// Whether the same etcd is ready for peers.
    pub peers: PeerReadiness,
    /// The version of the node's image.
    pub version: String,
    /// Intervals and timeouts.
    pub timing: Timing,
}

/// Why a curator cannot run, by the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum CuratorError {
    /// Binding the port failed.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
    /// The node's credentials cannot be used for TLS.
    #[error("cannot set up TLS")]
    Tls(#[from] TlsError),
    /// The gRPC server failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A record was written by a newer image.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Runs a curator until it is cancelled. The port is published when the curator can answer calls:
/// as soon as it has read from etcd.
pub async fn run(ctx: Context, config: Arc<Config>, ready: Arc<event::Writer<u16>>) -> Outcome {
    let listener = bind(config.listen).await?;
    let port = listener.local_addr().map_err(ServeError::from)?.port();
    let own = &config.own;
    let node_id = own.node();
    let transport = Transport::of_node(own).map_err(CuratorError::Tls)?;
    let timing = config.timing;
    let cache = Arc::new(Cache::new(node_id, timing.heartbeat_bound, timing.grace));
    let reads = Arc::new(ReadIndex::new(
        &config.client,
        timing.read_interval,
        timing.freshness,
    ));
    let ending = CancellationToken::new();
    let budgets = Arc::new(Budgets::new(&timing.budget));
    let core = Arc::new(Core {
        node_id,
        version: config.version.clone(),
        ca: own.ca().certificate().clone(),
        client: config.client.clone(),
        kubernetes_pki: config.kubernetes_pki.clone(),
        secrets_keys: SecretsKeys::new(config.kubernetes_secrets.clone()),
        members: config.members.clone(),
        peers: config.peers.clone(),
        cache: cache.clone(),
        reads: reads.clone(),
        clock: own.clock(),
        time: config.time.clone(),
        pace: Pace::default(),
        budgets: budgets.clone(),
        hearing: HeartbeatTracker::new(
            node_id,
            config.client.clone(),
            cache.clone(),
            reads.clone(),
            timing.heartbeat_bound,
            timing.session,
            budgets,
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
        leaves::begin_own(&core, own).await;
        ready.set(port);
        tracing::info!(port, "curator listening");
        ctx.healthy();
        health.follow(&reads).await
    };
    let work = async {
        tokio::select! {
            never = announce => match never {},
            never = reads.serve(&cache) => match never {},
            never = core.pace.announce(&cache) => match never {},
            never = core.hearing.keep_session() => match never {},
            never = core.hearing.expire_heartbeats() => match never {},
            never = membership::run(&core) => match never {},
            never = leaves::keep_own(&core, own) => match never {},
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
        // Clients that balance by health switch to another curator; streams end with a status.
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
// Test code: it panics on failure.
pub mod testing;
#[cfg(test)]
mod tests;
