//! Rewrites all Secrets after a change of the key, so that what was encrypted with an earlier one, or was not encrypted,
//! is encrypted with the current one.
//!
//! A Secret is rewritten by a change that changes nothing: the API server stores it again if it was not encrypted with
//! the key that it uses now, and does nothing otherwise. So the work can be interrupted and repeated at any time, and by
//! several controllers at once.
//!
//! It begins when the API server of every controller encrypts with the new key: an earlier one could write with the old
//! key behind its back. The record of the key says when it is done.

use std::sync::Arc;
use std::time::Duration;

use hearth_agent::View;
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_consensus::fenced::WriteError;
use hearth_consensus::secrets_keys::{Known, StoredKey};
use hearth_kubernetes_api::fields::Metadata;
use hearth_kubernetes_api::watch::MetadataPages;
use hearth_kubernetes_api::{ApiError, Client, kinds};
use http::StatusCode;
use serde_json::json;
use tokio::time::sleep;

use super::keyring::{KeyStatus, Keyring};
use super::sharing::controllers;
use crate::program::Progress;

/// Interval at which the records are read when nothing is known to have changed.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Delay after an error.
const AGAIN: Duration = Duration::from_secs(5);

/// Connects to the API server of this node, as a user that may read and write all Secrets.
type Connect = dyn Fn() -> Result<Client, Failure> + Send + Sync;

/// Inputs.
pub(crate) struct Rewriter {
    pub keyring: Arc<Keyring>,
    /// Input: the nodes of the cluster.
    pub view: Value<Arc<View>>,
    /// Input: the API server of this node.
    pub apiserver: Value<Progress>,
    pub connect: Box<Connect>,
}

/// Rewrites when it is due, until it is cancelled.
pub(crate) async fn run(ctx: Context, rewriter: Arc<Rewriter>) -> Outcome {
    let health = Health::of(&ctx);
    ctx.until_cancelled(follow(&rewriter, &health)).await
}

/// Returns only on an error.
async fn follow(rewriter: &Rewriter, health: &Health<'_>) -> Outcome {
    let ring = &rewriter.keyring;
    health.good();
    let is_ready = |status: &KeyStatus| matches!(status, KeyStatus::Ready(_));
    ring.status().watch().wait_for(is_ready).await?;
    loop {
        let known = match ring.stored.read().await {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!("{}", hearth_api::chain(&error));
                sleep(AGAIN).await;
                continue;
            }
        };
        let view = rewriter.view.watch().next().await?;
        if let Some(stored) = due(&known, &view) {
            let serves = |progress: &Progress| *progress == Progress::Serving;
            rewriter.apiserver.watch().wait_for(serves).await?;
            if let Err(failure) = rewriter.rewrite(&known, stored).await {
                tracing::warn!("cannot rewrite all Secrets: {failure}");
                sleep(AGAIN).await;
            }
            continue;
        }
        // A controller that is removed is known by the view; all else is in the records.
        let mut views = rewriter.view.watch();
        let other = views.wait_for(|now| controllers(now) != controllers(&view));
        tokio::select! {
            () = ring.stored.changed(&known, LOOK_EVERY) => {}
            changed = other => drop(changed?),
        }
    }
}

/// The latest key, if Secrets are still to be rewritten with it and every API server encrypts with it. A controller
/// that has not announced itself has no key, and so no API server.
fn due<'a>(known: &'a Known, view: &View) -> Option<&'a StoredKey> {
    let (latest, read) = known.keys.last_key_value()?;
    let current = controllers(view);
    let uses_it = |generation: u32| generation >= *latest;
    let mut all = known.controllers.iter();
    let all_use_it = all.all(|(node, controller)| {
        uses_it(controller.content.generation) || !current.contains(node)
    });
    let mut all = known.controllers.values();
    let is_used = all_use_it && all.any(|controller| uses_it(controller.content.generation));
    (is_used && !read.content.rewritten).then_some(&read.content)
}

impl Rewriter {
    async fn rewrite(&self, known: &Known, stored: &StoredKey) -> Outcome {
        let client = (self.connect)()?;
        let mut pages = MetadataPages::of(client.all(kinds::SECRETS));
        let mut count = 0_u64;
        while let Some(page) = pages.next().await? {
            for secret in page {
                touch(&client, &secret).await?;
                count += 1;
            }
        }
        let done = StoredKey {
            rewritten: true,
            ..stored.clone()
        };
        match self.keyring.stored.put(known, known.latest(), &done).await {
            Ok(()) => {
                tracing::info!(
                    key = stored.id,
                    count,
                    "all Secrets are encrypted with this key"
                );
                Ok(())
            }
            // Another controller has done it, or wraps the key for one. It is decided again.
            Err(WriteError::Conflict) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Has the API server store a Secret again if it needs to be.
async fn touch(client: &Client, secret: &Metadata) -> Result<(), ApiError> {
    let secrets = client.within(&secret.namespace, kinds::SECRETS);
    let same = json!({ "metadata": { "resourceVersion": secret.resource_version } });
    match secrets.merge(&secret.name, &same).await {
        // It was written or deleted since, by an API server that encrypts with the new key.
        Err(error) if error.is(StatusCode::CONFLICT) || error.is(StatusCode::NOT_FOUND) => Ok(()),
        outcome => outcome,
    }
}
