//! On workers: follows the policy of this node.

use std::sync::Arc;

use futures::StreamExt as _;
use hearth_api::identity::NodeId;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_kubernetes_api::store::{Event, Full};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{Client, Watching, kinds};
use hearth_network_policy::node::NodePolicy;

use super::{NAMESPACE, Text};

/// Inputs and output.
pub(crate) struct Receiver {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// Input: a client with the node's own certificate.
    pub client: Value<Client>,
}

/// Follows the policy of this node.
pub(crate) async fn run(ctx: Context, receiver: Arc<Receiver>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &receiver)).await
}

/// Returns only on an error.
async fn follow(ctx: &Context, receiver: &Receiver) -> Outcome {
    let watching = Watching::of(ctx);
    let node = receiver.parts.member.watch().next().await?.own.node();
    let mut clients = receiver.client.watch();
    let mut client = clients.next().await?;
    loop {
        client = tokio::select! {
            outcome = receive(client, node, receiver, &watching) => return outcome,
            newer = clients.next() => newer?,
        };
    }
}

async fn receive(
    client: Client,
    node: NodeId,
    receiver: &Receiver,
    watching: &Watching<'_>,
) -> Outcome {
    let objects = client.within(NAMESPACE, kinds::CONFIG_MAPS);
    let own = Which::Named(node.to_string());
    let events = watch(objects, own, Text::read, Full::default());
    tokio::pin!(events);
    while let Some(event) = events.next().await {
        let texts: Vec<Text> = match event {
            Ok(Event::All(all)) => {
                watching.good();
                all.into_objects().into_values().collect()
            }
            Ok(Event::Changed(_, text)) => vec![text],
            Ok(Event::Gone(_)) => Vec::new(),
            Err(error) => {
                watching.failed("the network policy of this node", &error);
                continue;
            }
        };
        for Text(text) in texts {
            match NodePolicy::parse(&text) {
                Ok(policy) => receiver.parts.network_policy.set(Some(Arc::new(policy))),
                Err(error) => {
                    let error = hearth_api::chain(&error);
                    tracing::warn!("cannot read the network policy of this node: {error}");
                }
            }
        }
    }
    Err(Failure::msg("the watch ended"))
}
