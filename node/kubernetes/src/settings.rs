//! The cluster's settings for Kubernetes, which come from the curators: a node with one of the two roles polls
//! them.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::CuratorConnection;
use hearth_api::hosts::Host;
use hearth_api::v1::{ClusterConfiguration, NodeRoles};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use tokio::time::{sleep, timeout};

use super::Worker as Parts;

/// Polling interval.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// Delay after a request that has failed.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Timeout of a request.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Inputs and outputs.
pub(crate) struct Worker {
    /// Inputs of Kubernetes on this node, and the output for the settings.
    pub parts: Arc<Parts>,
    /// Output, set before the settings: further names and addresses in the certificates of API servers.
    pub server_hosts: Writer<Arc<[Host]>>,
}

/// Keeps the settings up to date while the node holds a role. They stay when no curator answers.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

/// Returns only on an error.
async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let parts = &worker.parts;
    let health = Health::of(ctx);
    let mut roles = parts.local_roles.watch();
    let needs_them = |roles: &NodeRoles| {
        roles.kubernetes_controller.is_some() || roles.kubernetes_worker.is_some()
    };
    health.good();
    loop {
        if !parts.local_roles.get().as_ref().is_some_and(needs_them) {
            roles.wait_for(needs_them).await?;
        }
        let Some(configuration) = ask(&parts.connection).await else {
            sleep(ASK_AGAIN).await;
            continue;
        };
        let hosts = configuration.server_hosts().into();
        if worker.server_hosts.value().get().as_ref() != Some(&hosts) {
            worker.server_hosts.set(hosts);
        }
        let settings = configuration.kubernetes.unwrap_or_default();
        if parts.settings.value().get().as_deref() != Some(&settings) {
            parts.settings.set(Arc::new(settings));
        }
        sleep(ASK_EVERY).await;
    }
}

/// `None` on an error.
async fn ask(connection: &Value<CuratorConnection>) -> Option<ClusterConfiguration> {
    let connection = connection.watch().next().await.ok()?;
    match timeout(ANSWER_WITHIN, connection.configuration()).await {
        Ok(Ok(configuration)) => return Some(configuration),
        Ok(Err(error)) => tracing::debug!("cannot get the cluster configuration: {error}"),
        Err(_) => tracing::debug!("cannot get the cluster configuration: no answer"),
    }
    None
}
