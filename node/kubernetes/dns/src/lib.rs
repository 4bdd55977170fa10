//! Names for pods: a server on each node, at the node's address among its pods.
//!
//! | part | does |
//! |---|---|
//! | [`zone`] | what Kubernetes has, as records; never changes |
//! | [`watch`] | makes a new zone of what the API servers tell |
//! | [`answer`] | bytes of a question to bytes of an answer, pure |
//! | [`forward`] | names of others, from the node's own name servers |
//! | [`serve`] | the sockets |
//!
//! Why on each node and not as pods behind a service: names work before the
//! first pod runs, without an image, and as long as the node does; a question
//! never leaves the node; and nothing stands between a pod and its names that
//! could be out of step with them. The service at the usual address exists for
//! those who have learned that one, and leads to all of these servers.
//!
//! Why a server of our own around a library's messages: the library's listens
//! without bounds, and tells two lines of log for each question.
//!
//! Invariants: names of the cluster are never asked of others; before
//! Kubernetes has told everything once, questions about them fail, rather than
//! that names are said not to exist; later, when no API server answers, the
//! last state is served for as long as that lasts.

pub mod answer;
pub mod forward;
pub mod serve;
#[cfg(test)]
mod tests;
mod watch;
pub mod zone;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::handover::PodNetwork;
use hearth_kubernetes_api::Client;
use hearth_kubernetes_api::Watching;

use forward::Forwarder;
use serve::Server;

/// Where everybody looks for names.
pub const PORT: u16 = 53;
/// A server that could not listen tries again within so long.
const AGAIN_WITHIN: Duration = Duration::from_secs(2);

/// What the names are made of.
pub struct Dns {
    /// Names the name servers of others.
    pub resolv_conf: PathBuf,
    /// At which to serve: [`PORT`].
    pub port: u16,
    /// Whom to answer: [`serve::pods`].
    pub admits: fn(IpAddr) -> bool,
    /// Will be read: where to serve.
    pub pod_network: Value<Option<PodNetwork>>,
    /// Will be read: speaks with API servers, as one of the nodes.
    pub client: Value<Client>,
}

/// Serves names. Healthy when it answers; whether it knows anything is told by
/// its child `watch`.
pub async fn run(ctx: Context, dns: Arc<Dns>) -> Outcome {
    // The address may come a moment later, or go for one.
    ctx.restart_within(Some(AGAIN_WITHIN));
    let mut networks = dns.pod_network.watch();
    let network = tokio::select! {
        network = networks.some() => network?,
        () = ctx.cancelled() => return Ok(()),
    };
    let IpAddr::V4(gateway) = network.gateway else {
        return Err(Failure::msg("names are served at an IPv4 address"));
    };
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
                    outcome = watch::follow(client, gateway, &writer, &watching) => return outcome,
                    // With a newer certificate.
                    newer = clients.next() => newer?,
                    () = ctx.cancelled() => return Ok(()),
                };
            }
        }
    })?;
    let server = Arc::new(Server {
        zone,
        forwarder: Arc::new(Forwarder::new(dns.resolv_conf.clone())),
        admits: dns.admits,
    });
    let at = SocketAddr::new(network.gateway, dns.port);
    let (socket, listener) = serve::bind(at).await?;
    tracing::info!(%at, "names are served");
    ctx.healthy();
    tokio::select! {
        outcome = serve::datagrams(&server, socket) => outcome?,
        outcome = serve::streams(server.clone(), listener) => outcome?,
        moved = networks.wait_for(|now| now.is_none_or(|now| now.gateway != network.gateway)) => {
            moved?;
            return Err(Failure::msg("the pods' network has changed"));
        }
        () = ctx.cancelled() => {}
    }
    Ok(())
}
