//! Continuous writes during faults of a cluster; no acknowledged write may be lost.
//!
//! One write at a time, through the public API: a label on a node, whose value counts up. A failed write may still have
//! been made, or be made later by a curator that was only slow; so after each failure the next write uses a label with
//! a new name. The final value of every label is then known: the last acknowledged value, or the failed one after it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_api::client::within;
use hearth_api::v1::{Label, UpdateNodeLabelsRequest};
use hearth_operator::by_id;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::owner::Operator;
use crate::{Outcome, bounds};

/// Time after which a write counts as failed: a cluster that has lost its leader answers late, and the writer should
/// continue soon after.
const PATIENCE: Duration = Duration::from_secs(5);

/// Between two attempts while no write succeeds: a cluster without quorum fails at once.
const PAUSE: Duration = Duration::from_millis(100);

/// The writes, by label.
#[derive(Clone, Debug, Default)]
struct History {
    labels: BTreeMap<String, Written>,
    acknowledged: u64,
    failed: u64,
    /// A failure that no fault of a cluster explains.
    broken: Option<String>,
}

/// The known state of one label.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    acknowledged: Option<u64>,
    /// The last write, if it failed.
    unknown: Option<u64>,
}

/// Writes until it is dropped.
pub struct Writer {
    history: watch::Receiver<History>,
    node: String,
    task: JoinSet<()>,
}

impl Writer {
    pub(crate) async fn start(operator: Operator, node: String) -> anyhow::Result<Self> {
        let (sender, history) = watch::channel(History::default());
        let mut task = JoinSet::new();
        task.spawn(write(operator, node.clone(), sender));
        let writer = Self {
            history,
            node,
            task,
        };
        writer.goes_on().await?;
        Ok(writer)
    }

    /// Waits until some more writes have been acknowledged that were begun after this call.
    ///
    /// # Errors
    /// If that times out.
    pub async fn goes_on(&self) -> Outcome {
        // The one in progress, and a few that were surely begun later.
        let wanted = self.history.borrow().acknowledged + 5;
        let enough = |history: &History| history.acknowledged >= wanted;
        let mut history = self.history.clone();
        let done = history.wait_for(|history| enough(history) || history.broken.is_some());
        let ended = tokio::time::timeout(bounds::SETTLED, done).await;
        if let Ok(Err(_)) = ended {
            bail!("the writer has ended");
        }
        drop(ended);
        let history = self.history.borrow();
        if let Some(why) = &history.broken {
            bail!("a write failed: {why}");
        }
        ensure!(
            enough(&history),
            "writes have stopped: expected {wanted} acknowledged, got {}; {} failed",
            history.acknowledged,
            history.failed
        );
        Ok(())
    }

    /// The numbers of acknowledged and of failed writes.
    pub fn counts(&self) -> (u64, u64) {
        let history = self.history.borrow();
        (history.acknowledged, history.failed)
    }

    /// Stops, and compares the acknowledged writes with the cluster's labels.
    ///
    /// # Errors
    /// If a write was lost, or failed for another reason than a fault.
    pub async fn verify(mut self, operator: &Operator) -> Outcome {
        // The task ends at an await: a write in progress then has an unknown result, like a failed one.
        self.task.shutdown().await;
        let history = self.history.borrow().clone();
        if let Some(why) = history.broken {
            bail!("a write failed: {why}");
        }
        let nodes = operator.nodes().await?;
        let node = nodes.iter().find(|node| node.id == self.node);
        let node = node.with_context(|| format!("{} is no longer listed", self.node))?;
        for (key, written) in &history.labels {
            let label = node.labels.iter().find(|label| label.key == *key);
            let found = label.map(|label| label.value.parse::<u64>()).transpose();
            let found = found.with_context(|| format!("label {key} is not a number"))?;
            ensure!(
                written.allows(found),
                "label {key}: expected {written:?}, got {found:?}; all labels are {:?}",
                node.labels
            );
        }
        ensure!(history.acknowledged > 0, "no write was acknowledged");
        Ok(())
    }
}

impl Written {
    fn allows(self, found: Option<u64>) -> bool {
        found == self.acknowledged || (found.is_some() && found == self.unknown)
    }
}

async fn write(operator: Operator, node: String, history: watch::Sender<History>) {
    let mut name = 0;
    for value in 1.. {
        let key = format!("writer-{name}");
        // Unknown from before it is sent: this task may end at any await.
        history.send_modify(|history| {
            history.labels.entry(key.clone()).or_default().unknown = Some(value);
        });
        match write_once(&operator, &node, &key, value).await {
            Ok(()) => history.send_modify(|history| {
                history.acknowledged += 1;
                let label = history.labels.entry(key).or_default();
                *label = Written {
                    acknowledged: Some(value),
                    unknown: None,
                };
            }),
            Err(status) if may_pass(&status) => {
                history.send_modify(|history| history.failed += 1);
                name += 1;
                // One name per outage, not per attempt: nothing is written until a curator answers again.
                while operator.info().await.is_err() {
                    tokio::time::sleep(PAUSE).await;
                }
            }
            Err(status) => {
                history.send_modify(|history| history.broken = Some(status.to_string()));
                return;
            }
        }
    }
}

async fn write_once(operator: &Operator, node: &str, key: &str, value: u64) -> Result<(), Status> {
    let request = UpdateNodeLabelsRequest {
        node: Some(by_id(node)),
        upsert: vec![Label {
            key: key.to_owned(),
            value: value.to_string(),
        }],
        delete: Vec::new(),
    };
    let write = operator.once().update_labels(request);
    within(PATIENCE, write).await.map(drop)
}

/// The status codes of a lost connection, a lost leader or a conflicting write.
fn may_pass(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::Cancelled
            | Code::Internal
            | Code::Unknown
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_acknowledged_must_be_there() {
        let written = |acknowledged, unknown| Written {
            acknowledged,
            unknown,
        };
        assert!(written(Some(3), None).allows(Some(3)));
        assert!(written(Some(3), Some(4)).allows(Some(4)));
        assert!(written(None, Some(1)).allows(None));
        for found in [None, Some(2), Some(4)] {
            assert!(!written(Some(3), None).allows(found), "{found:?}");
        }
        assert!(!written(Some(3), Some(4)).allows(None));
    }
}
