//! The reconciler's view of the cluster, from the curators: the nodes, which are watched, and the
//! configuration, which is polled.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{CuratorConnection, View};
use hearth_api::v1::NodeState;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use tokio::time::{sleep, timeout};

use super::nodes::{Cluster, Member};

/// Polling interval of the configuration.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// Timeout of a request.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Inputs and output.
pub(crate) struct Worker {
    /// Input: the nodes.
    pub view: Value<Arc<View>>,
    /// Input: the curators, for the label patterns in the configuration.
    pub connection: Value<CuratorConnection>,
    /// Output, set once both are known.
    pub cluster: Writer<Arc<Cluster>>,
}

/// Keeps the output up to date.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

/// Returns only on an error.
async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let health = Health::of(ctx);
    let mut views = worker.view.watch();
    let mut view = views.next().await?;
    let mut connections = worker.connection.watch();
    let mut connection = connections.next().await?;
    // Polled concurrently, so that it does not delay updates of the nodes.
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
                // On an error the old patterns are kept.
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

/// Gets the label patterns after a delay; `None` on an error.
async fn ask(connection: CuratorConnection, after: Duration) -> Option<Vec<String>> {
    sleep(after).await;
    match timeout(ANSWER_WITHIN, connection.configuration()).await {
        Ok(Ok(configuration)) => {
            let kubernetes = configuration.kubernetes.unwrap_or_default();
            return Some(kubernetes.synchronized_labels);
        }
        Ok(Err(error)) => tracing::debug!("cannot get the cluster configuration: {error}"),
        Err(_) => tracing::debug!("cannot get the cluster configuration: no answer"),
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
