//! Applies the objects of `cluster_bootstrap.manifests`, each once.
//!
//! Every controller does this, as long as any are left: applying an object twice does no harm, and an election would
//! only delay the first one. The objects are tried in their order. One that is refused does not stop those after it,
//! and is tried again, so that an object may come before the definition of its kind, or before the webhook that
//! judges it, has begun to work. One that is refused and exists is left as it is: somebody has made a better one.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::chain;
use hearth_api::names::conditions;
use hearth_api::v1::NodeCondition;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_consensus::manifests::{Manifests, ManifestsError, Pending};
use hearth_kubernetes_api::{ApiError, Client};
use tokio::time::sleep;

use crate::program::Progress;

/// Delay before what has failed is tried again.
const AGAIN: Duration = Duration::from_secs(2);

/// What is left to apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ManifestsStatus {
    /// Nothing.
    Done,
    /// So many objects, and why the first one was not applied.
    Left {
        /// How many.
        count: usize,
        /// The first one, and the reason.
        why: String,
    },
    /// They cannot be read.
    Unknown(String),
}

impl ManifestsStatus {
    /// As a condition of the node; `None` if nothing is left.
    pub(crate) fn condition(&self) -> Option<NodeCondition> {
        let message = match self {
            Self::Done => return None,
            Self::Left { count: 1, why } => format!("1 object is not applied: {why}"),
            Self::Left { count, why } => format!("{count} objects are not applied, first {why}"),
            Self::Unknown(why) => why.clone(),
        };
        Some(NodeCondition {
            r#type: conditions::KUBERNETES_MANIFESTS.to_owned(),
            met: false,
            reason: "NotApplied".to_owned(),
            message: hearth_api::names::conditions::printable(&message),
        })
    }
}

/// Inputs and outputs.
pub(crate) struct Worker {
    /// The objects.
    pub manifests: Manifests,
    /// Input: a client of this node's API server with all permissions.
    pub client: Value<Client>,
    /// Input: whether the objects that Hearth maintains exist.
    pub constants: Value<Progress>,
    /// Output.
    pub status: Arc<Writer<ManifestsStatus>>,
}

/// Runs until all objects are applied, and then waits to be cancelled: no others will come.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let work = async {
        let mut constants = worker.constants.watch();
        constants
            .wait_for(|progress| *progress == Progress::Serving)
            .await?;
        let mut clients = worker.client.watch();
        let mut client = clients.next().await?;
        loop {
            let status = worker.apply_all(&client).await;
            worker.status.set(status.clone());
            if status == ManifestsStatus::Done {
                return std::future::pending().await;
            }
            tokio::select! {
                newer = clients.next() => client = newer?,
                () = sleep(AGAIN) => {}
            }
        }
    };
    ctx.healthy();
    ctx.until_cancelled(work).await
}

impl Worker {
    async fn apply_all(&self, client: &Client) -> ManifestsStatus {
        let pending = match self.manifests.pending().await {
            Ok(pending) => pending,
            Err(error) => return ManifestsStatus::Unknown(chain(&error)),
        };
        let (mut count, mut first) = (0, None);
        for one in &pending {
            match self.apply(client, one).await {
                Ok(()) => tracing::info!("applied {}", one.manifest),
                Err(why) => {
                    tracing::debug!("cannot apply {}: {why}", one.manifest);
                    count += 1;
                    first.get_or_insert_with(|| format!("{}: {why}", one.manifest));
                }
            }
        }
        match first {
            None => ManifestsStatus::Done,
            Some(why) => ManifestsStatus::Left { count, why },
        }
    }

    async fn apply(&self, client: &Client, pending: &Pending) -> Result<(), String> {
        let manifest = &pending.manifest;
        let (version, kind) = (manifest.api_version(), manifest.kind());
        let resource = client.resource(version, kind).await;
        let resource = resource.map_err(|error| chain(&error))?;
        let resource =
            resource.ok_or_else(|| format!("the API server does not know {version} {kind}"))?;
        let name = (manifest.namespace(), manifest.name());
        if let Err(error) = client.apply(&resource, name, manifest.object()).await {
            let is_refused = matches!(error, ApiError::Refused { .. });
            if !is_refused || !client.exists(&resource, name).await.unwrap_or(false) {
                return Err(chain(&error));
            }
            let why = chain(&error);
            tracing::warn!("{manifest} exists and is left as it is; what was given: {why}");
        }
        let recorded = self.manifests.applied(pending).await;
        recorded.map_err(|error| chain(&ManifestsError::from(error)))
    }
}
