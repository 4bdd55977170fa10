//! What every worker does for its pods beside the kubelet: names and volumes.
//!
//! Both are clients of the API servers with the node's own certificate, which
//! has the rights for just that.

use std::sync::Arc;

use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Context, Outcome, SpawnError};

use super::access::{self, AccessError};
use super::api::Client;
use super::dns::{self, Dns};
use super::volumes::{self, Volumes};
use super::{Parts, dns::serve};

/// Adds them below this runnable. `credentials` are the node's own, and
/// `client_of` makes a client of them.
pub(crate) fn start<T: Clone + Send + Sync + 'static>(
    ctx: &Context,
    parts: &Arc<Parts>,
    credentials: Value<T>,
    client_of: fn(&T) -> Result<Client, AccessError>,
) -> Result<(), SpawnError> {
    let (writer, client) = event::value();
    let writer = Arc::new(writer);
    ctx.run("access", move |ctx| {
        let (writer, credentials) = (writer.clone(), credentials.clone());
        async move { access::follow(ctx, credentials, client_of, &writer).await }
    })?;
    let dns = Arc::new(Dns {
        resolv_conf: parts.root.ephemeral.resolv_conf(),
        port: dns::PORT,
        admits: serve::pods,
        pod_network: parts.pod_network.clone(),
        client: client.clone(),
    });
    ctx.run("names", move |ctx| dns::run(ctx, dns.clone()))?;
    let parts = parts.clone();
    ctx.run("volumes", move |ctx| {
        keep_volumes(ctx, parts.clone(), client.clone())
    })
}

async fn keep_volumes(ctx: Context, parts: Arc<Parts>, client: Value<Client>) -> Outcome {
    let mut members = parts.member.watch();
    let member = tokio::select! {
        member = members.next() => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let volumes = Volumes {
        node: member.node_id,
        directory: parts.root.data.volumes(),
        client,
    };
    volumes::run(ctx, Arc::new(volumes)).await
}
