//! DNS for pods: a server on each node, at the gateway address of its pod network.
//!
//! | part | content |
//! |---|---|
//! | [`zone`] | services and endpoints as DNS records, of both address families; immutable |
//! | [`watch`] | watches services and endpoints, and builds a new zone when they change |
//! | [`answer`] | parses queries and encodes responses; pure functions |
//! | [`forward`] | forwards queries for other domains to the node's name servers |
//! | [`upstream`] | what to do with what a name server sends; pure functions |
//! | [`wire`] | the responses of name servers as bytes, and how they are passed on; pure functions |
//! | `cache` | responses of name servers |
//! | [`serve`] | UDP and TCP sockets |
//!
//! Why on each node and not as pods behind a service: DNS works before the first pod runs, without
//! an image, and as long as the node does; queries for the cluster domain never leave the node; and
//! there is no proxy between a pod and its DNS server whose rules could be out of date. The service
//! `kube-dns` exists for clients that use its address; its endpoints are all of these servers.
//!
//! Why a server of our own, on a library for DNS messages: the library's server has no limits, and
//! logs two lines for each query.
//!
//! Invariants: queries for the cluster domain are never forwarded. Until services and endpoints
//! have been listed once, they fail with SERVFAIL, because NXDOMAIN would be cached. Later, while
//! no API server is reachable, the last state is served.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod answer;
mod cache;
pub mod forward;
pub mod serve;
#[cfg(test)]
mod tests;
pub mod upstream;
mod watch;
pub mod wire;
pub mod zone;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::ranges::ClusterRanges;
use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::handover::PodNetwork;
use hearth_kubernetes_api::{Client, Watching};

use forward::Forwarder;
use serve::Server;

/// The port of DNS.
pub const PORT: u16 = 53;
/// Maximum restart delay, if the address cannot be bound.
const AGAIN_WITHIN: Duration = Duration::from_secs(2);

/// Configuration and inputs of the DNS server.
pub struct Dns {
    /// Path of `resolv.conf` with the node's name servers.
    pub resolv_conf: PathBuf,
    /// Port to serve at: [`PORT`].
    pub port: u16,
    /// Decides whether a client address is answered: [`serve::pods`].
    pub admits: fn(&ClusterRanges, IpAddr) -> bool,
    /// The pod network; it serves at its IPv4 gateway, for both families.
    pub pod_network: Value<Option<PodNetwork>>,
    /// A client of the API servers with the node's certificate.
    pub client: Value<Client>,
}

/// Runs the DNS server. It is healthy when it listens; whether services and endpoints have been
/// listed is the health of its child `watch`.
pub async fn run(ctx: Context, dns: Arc<Dns>) -> Outcome {
    // The address may be configured a moment later, or be missing for a moment.
    ctx.restart_within(Some(AGAIN_WITHIN));
    let mut networks = dns.pod_network.watch();
    let network = tokio::select! {
        network = networks.some() => network?,
        () = ctx.cancelled() => return Ok(()),
    };
    let (ranges, gateway) = (network.ranges, network.subnets.gateway());
    let (writer, zone) = event::value();
    let (writer, client) = (Arc::new(writer), dns.client.clone());
    ctx.run("watch", move |ctx| {
        let (writer, client) = (writer.clone(), client.clone());
        async move {
            let watching = Watching::of(&ctx);
            let mut clients = client.watch();
            let mut client = tokio::select! {
                client = clients.next() => client?,
                () = ctx.cancelled() => return Ok(()),
            };
            loop {
                client = tokio::select! {
                    outcome = watch::follow(client, (ranges, gateway), &writer, &watching) => return outcome,
                    // With a newer certificate.
                    newer = clients.next() => newer?,
                    () = ctx.cancelled() => return Ok(()),
                };
            }
        }
    })?;
    let server = Arc::new(Server {
        zone,
        forwarder: Arc::new(Forwarder::new(dns.resolv_conf.clone(), ranges)),
        ranges,
        admits: dns.admits,
    });
    let at = SocketAddr::from((gateway, dns.port));
    let (socket, listener) = serve::bind(at).await?;
    tracing::info!(%at, "DNS listening");
    ctx.healthy();
    tokio::select! {
        outcome = serve::datagrams(&server, socket) => outcome?,
        outcome = serve::streams(server.clone(), listener) => outcome?,
        moved = networks.wait_for(|now| *now != Some(network)) => {
            moved?;
            return Err(Failure::msg("the pod network has changed"));
        }
        () = ctx.cancelled() => {}
    }
    Ok(())
}
