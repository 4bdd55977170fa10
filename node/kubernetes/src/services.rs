//! What a worker runs for its pods besides the kubelet: DNS, volumes and the network policy.
//!
//! All are clients of the API servers with the node's own certificate, which has permissions for
//! this only.

use std::sync::Arc;

use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Outcome, SpawnError};
use hearth_kubernetes_api::Client;
use hearth_kubernetes_dns::{Dns, serve};

use super::Worker;
use super::policy::receive::{self, Receiver};
use super::volumes::{self, Volumes};

/// Starts what belongs to the built-in pod network as children of this runnable. `client` uses the
/// node's own certificate.
pub(crate) fn of_built_in_network(
    ctx: &Context,
    parts: &Arc<Worker>,
    client: &Value<Client>,
) -> Result<(), SpawnError> {
    let dns = Arc::new(Dns {
        resolv_conf: parts.root.ephemeral.resolv_conf(),
        port: hearth_kubernetes_dns::PORT,
        admits: serve::pods,
        pod_network: parts.pod_network.clone(),
        client: client.clone(),
    });
    ctx.run("names", move |ctx| {
        hearth_kubernetes_dns::run(ctx, dns.clone())
    })?;
    let receiver = Arc::new(Receiver {
        parts: parts.clone(),
        client: client.clone(),
    });
    ctx.run("policy", move |ctx| receive::run(ctx, receiver.clone()))
}

/// Starts the worker that makes and removes local volumes, in the same way.
pub(crate) fn volumes(
    ctx: &Context,
    parts: &Arc<Worker>,
    client: &Value<Client>,
) -> Result<(), SpawnError> {
    let (parts, client) = (parts.clone(), client.clone());
    ctx.run("volumes", move |ctx| {
        keep_volumes(ctx, parts.clone(), client.clone())
    })
}

async fn keep_volumes(ctx: Context, parts: Arc<Worker>, client: Value<Client>) -> Outcome {
    let mut members = parts.member.watch();
    let member = tokio::select! {
        member = members.next() => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let volumes = Volumes {
        node: member.own.node(),
        directory: parts.root.data.volumes(),
        client,
    };
    volumes::run(ctx, Arc::new(volumes)).await
}
