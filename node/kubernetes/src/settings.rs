//! The cluster's settings for Kubernetes, which come from the curators: a node with one of the two roles polls
//! them.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::CuratorConnection;
use hearth_api::hosts::Host;
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::v1::{GetClusterInfoResponse, NodeRoles};
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
    /// Output: the recovery recipient of the cluster, if it has one.
    pub recovery_recipient: Writer<Option<RecoveryRecipient>>,
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
        let Some(info) = ask(&parts.connection).await else {
            sleep(ASK_AGAIN).await;
            continue;
        };
        match RecoveryRecipient::from_field(&info.recovery_recipient) {
            Ok(recipient) if worker.recovery_recipient.value().get() != Some(recipient) => {
                worker.recovery_recipient.set(recipient);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("invalid answer of a curator: recovery_{error}"),
        }
        let configuration = info.configuration.unwrap_or_default();
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
async fn ask(connection: &Value<CuratorConnection>) -> Option<GetClusterInfoResponse> {
    let connection = connection.watch().next().await.ok()?;
    match timeout(ANSWER_WITHIN, connection.cluster_info()).await {
        Ok(Ok(info)) => return Some(info),
        Ok(Err(error)) => tracing::debug!("cannot get the cluster configuration: {error}"),
        Err(_) => tracing::debug!("cannot get the cluster configuration: no answer"),
    }
    None
}
