//! The cluster as the reconciler wants it, from the curators: their nodes as
//! they are told, and the configuration, which has to be asked for.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{CuratorConnection, View};
use hearth_api::v1::NodeState;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use tokio::time::{sleep, timeout};

use super::nodes::{Cluster, Member};

/// A change of the configuration is seen so late.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// For one answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// What it is made of.
pub(crate) struct Worker {
    /// Will be read: the nodes.
    pub view: Value<Arc<View>>,
    /// Will be read: who tells which labels are passed on.
    pub connection: Value<CuratorConnection>,
    /// Will be written, once both are known.
    pub cluster: Writer<Arc<Cluster>>,
}

/// Keeps it up to date.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

/// Ends by an error only.
async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let health = Health::of(ctx);
    let mut views = worker.view.watch();
    let mut view = views.next().await?;
    let mut connections = worker.connection.watch();
    let mut connection = connections.next().await?;
    // Who the nodes are is never held up by it.
    let mut asked = Box::pin(ask(connection.clone(), Duration::ZERO));
    let mut patterns: Option<Vec<String>> = None;
    loop {
        tokio::select! {
            newer = views.next() => view = newer?,
            newer = connections.next() => {
                connection = newer?;
                asked.set(ask(connection.clone(), Duration::ZERO));
            }
            answer = &mut asked => {
                // The old ones hold.
                patterns = answer.or(patterns);
                asked.set(ask(connection.clone(), ASK_EVERY));
            }
        }
        let Some(patterns) = &patterns else { continue };
        let cluster = Arc::new(Cluster {
            patterns: patterns.clone(),
            ..of_view(&view)
        });
        if worker.cluster.value().get().as_ref() != Some(&cluster) {
            worker.cluster.set(cluster);
        }
        health.good();
    }
}

/// Asks for the patterns of labels, after a while.
async fn ask(connection: CuratorConnection, after: Duration) -> Option<Vec<String>> {
    sleep(after).await;
    match timeout(ANSWER_WITHIN, connection.configuration()).await {
        Ok(Ok(configuration)) => {
            let kubernetes = configuration.kubernetes.unwrap_or_default();
            return Some(kubernetes.synchronized_labels);
        }
        Ok(Err(error)) => tracing::debug!("the cluster's configuration: {error}"),
        Err(_) => tracing::debug!("the cluster's configuration: no answer"),
    }
    None
}

fn of_view(view: &View) -> Cluster {
    let up = view.nodes.iter();
    let up = up.filter(|(_, node)| node.state == NodeState::Up);
    let member = |node: &hearth_agent::Seen| {
        let labels = node.labels.iter();
        Member {
            worker: node.roles.kubernetes_worker.is_some(),
            controller: node.roles.kubernetes_controller.is_some(),
            labels: labels
                .map(|label| (label.key.clone(), label.value.clone()))
                .collect(),
            gateway: node.networking.map(|part| part.range.gateway()),
        }
    };
    Cluster {
        nodes: up.map(|(id, node)| (*id, member(node))).collect(),
        patterns: Vec::new(),
    }
}
