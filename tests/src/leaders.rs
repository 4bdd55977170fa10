//! Who leads a cluster, while it is observed: how often that changes is what a fault costs everybody.
//!
//! A change is counted when the cluster's API shows another leader than before. Two changes between two looks are
//! counted as one, or as none if the second one undid the first.

use std::time::Duration;

use anyhow::bail;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::owner::Operator;

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The leaders so far, by their node IDs, without repetitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Of the curators.
    pub curator: Vec<String>,
    /// Of etcd's members.
    pub etcd: Vec<String>,
}

/// Observes until it is dropped.
pub struct Leaders {
    seen: watch::Receiver<Seen>,
    _task: JoinSet<()>,
}

impl Leaders {
    pub(crate) fn observe(operator: Operator) -> Self {
        let (sender, seen) = watch::channel(Seen::default());
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                look(&operator, &sender).await;
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        });
        Self { seen, _task: task }
    }

    /// All leaders since it began; both have had one.
    ///
    /// # Errors
    /// If none was seen.
    pub fn seen(&self) -> anyhow::Result<Seen> {
        let seen = self.seen.borrow().clone();
        if seen.curator.is_empty() || seen.etcd.is_empty() {
            bail!("no leader was seen: {seen:?}");
        }
        Ok(seen)
    }
}

async fn look(operator: &Operator, seen: &watch::Sender<Seen>) {
    // Calls fail while leaders change.
    if let Ok(curator) = operator.once().leader().await {
        seen.send_modify(|seen| note(&mut seen.curator, curator));
    }
    if let Ok(status) = operator.once().cluster_status().await {
        let leader = status.consensus.members.into_iter().find(|m| m.leader);
        if let Some(leader) = leader {
            seen.send_modify(|seen| note(&mut seen.etcd, leader.node_id));
        }
    }
}

fn note(leaders: &mut Vec<String>, leader: String) {
    if leaders.last() != Some(&leader) {
        leaders.push(leader);
    }
}
