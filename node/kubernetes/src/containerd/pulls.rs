//! The progress of image pulls, in the node's log.
//!
//! The kubelet reports that an image is being pulled, and nothing more until it is there, which can take many minutes
//! on a slow machine or network. containerd knows how much it has of each layer, and is asked for it: it notifies
//! nobody. A layer that is there before it was seen twice is not mentioned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Health, Outcome};
use tokio::time::sleep;

use super::connection::{self, Connection};
use super::wire::content::{ListStatusesRequest, ListStatusesResponse, Status};
use crate::program::Progress;

/// Interval of the questions.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How the writes of layers are named.
const LAYER: &str = "layer-sha256:";
/// How much of a digest is shown.
const SHOWN_DIGITS: usize = 12;

/// Inputs.
pub(crate) struct Pulls {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// Input: the state of containerd.
    pub containerd: Value<Progress>,
}

/// Logs the progress of pulls while containerd serves.
pub(crate) async fn follow(ctx: Context, pulls: Arc<Pulls>) -> Outcome {
    let health = Health::of(&ctx);
    let socket = pulls.parts.root.ephemeral.containerd_socket();
    let connection = Connection::to(&socket);
    let mut known = Layers::default();
    health.good();
    ctx.until_cancelled(async {
        loop {
            let serves = |progress: &Progress| *progress == Progress::Serving;
            pulls.containerd.watch().wait_for(serves).await?;
            match writes(&connection).await {
                Ok(now) => {
                    for line in known.update(&now) {
                        tracing::info!("{line}");
                    }
                }
                Err(status) => tracing::debug!("cannot list pulls: {}", status.message()),
            }
            sleep(LOOK_EVERY).await;
        }
    })
    .await
}

/// What containerd is writing.
async fn writes(connection: &Connection) -> Result<Vec<Status>, tonic::Status> {
    let path = "/containerd.services.content.v1.Content/ListStatuses".to_owned();
    let all = connection::request(ListStatusesRequest::default());
    let answer: ListStatusesResponse = connection.ask(path, all).await?;
    Ok(answer.statuses)
}

/// The digests of the layers that were being pulled at the last look.
#[derive(Default)]
struct Layers(BTreeSet<String>);

impl Layers {
    /// What there is to say about these.
    fn update(&mut self, now: &[Status]) -> Vec<String> {
        let layers = now.iter().filter_map(|status| {
            let digest = status.r#ref.strip_prefix(LAYER)?;
            Some((digest.to_owned(), status))
        });
        let layers: BTreeMap<_, _> = layers.collect();
        let mut lines = Vec::new();
        for (digest, status) in &layers {
            // A pull that stands still is said each time, too: that is what one wants to know.
            if self.0.contains(digest) {
                lines.push(line(digest, status));
            }
        }
        let before = std::mem::take(&mut self.0);
        let ended = before.iter().filter(|digest| !layers.contains_key(*digest));
        lines
            .extend(ended.map(|digest| format!("layer {} is complete or given up", short(digest))));
        self.0 = layers.into_keys().collect();
        lines
    }
}

fn line(digest: &str, status: &Status) -> String {
    let (done, total) = (megabytes(status.offset), megabytes(status.total));
    match status.total {
        0 => format!("pulling layer {}: {done} MB", short(digest)),
        size => {
            let percent = status.offset.saturating_mul(100) / size;
            format!(
                "pulling layer {}: {done} of {total} MB ({percent} %)",
                short(digest)
            )
        }
    }
}

fn short(digest: &str) -> &str {
    digest.get(..SHOWN_DIGITS).unwrap_or(digest)
}

fn megabytes(bytes: i64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(name: &str, offset: i64, total: i64) -> Status {
        Status {
            r#ref: name.to_owned(),
            offset,
            total,
        }
    }

    #[test]
    fn slow_layers_are_followed_to_their_end() {
        let mut layers = Layers::default();
        let digest = format!("layer-sha256:0123456789ab{}", "0".repeat(52));
        let at = |offset, total| {
            [
                status(&digest, offset, total),
                status("manifest-sha256:77", 1, 2),
            ]
        };
        assert_eq!(layers.update(&at(0, 50_000_000)), [] as [&str; 0]);
        let said = layers.update(&at(12_340_000, 50_000_000));
        assert_eq!(said, ["pulling layer 0123456789ab: 12.3 of 50.0 MB (24 %)"]);
        assert_eq!(
            layers.update(&at(13_000_000, 0)),
            ["pulling layer 0123456789ab: 13.0 MB"]
        );
        assert_eq!(
            layers.update(&[]),
            ["layer 0123456789ab is complete or given up"]
        );
        assert_eq!(layers.update(&[]), [] as [&str; 0]);
    }
}
