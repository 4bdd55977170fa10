//! The cluster's settings for Kubernetes, which come from the curators: controllers poll them, and
//! workers need those that never change.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::CuratorConnection;
use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{Closed, Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use tokio::time::{sleep, timeout};

/// Polling interval.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// Delay after a request that has failed.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Timeout of a request.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Input and output.
pub(crate) struct Worker {
    /// Input: the curators.
    pub connection: Value<CuratorConnection>,
    /// Output: the settings, once they are known. They stay when no curator answers.
    pub settings: Writer<Arc<KubernetesConfiguration>>,
}

/// Keeps the output up to date.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

/// Returns only on an error.
async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let health = Health::of(ctx);
    loop {
        let settings = current(&worker.connection).await?;
        if worker.settings.value().get().as_deref() != Some(&settings) {
            worker.settings.set(Arc::new(settings));
        }
        health.good();
        sleep(ASK_EVERY).await;
    }
}

/// The current settings, as soon as a curator answers.
pub(crate) async fn current(
    connection: &Value<CuratorConnection>,
) -> Result<KubernetesConfiguration, Closed> {
    let mut connections = connection.watch();
    let mut connection = connections.next().await?;
    loop {
        if let Some(settings) = ask(&connection).await {
            return Ok(settings);
        }
        tokio::select! {
            newer = connections.next() => connection = newer?,
            () = sleep(ASK_AGAIN) => {}
        }
    }
}

/// `None` on an error.
async fn ask(connection: &CuratorConnection) -> Option<KubernetesConfiguration> {
    match timeout(ANSWER_WITHIN, connection.configuration()).await {
        Ok(Ok(configuration)) => return Some(configuration.kubernetes.unwrap_or_default()),
        Ok(Err(error)) => tracing::debug!("cannot get the cluster configuration: {error}"),
        Err(_) => tracing::debug!("cannot get the cluster configuration: no answer"),
    }
    None
}
