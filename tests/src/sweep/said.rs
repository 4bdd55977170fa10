//! What a cluster has said to the outside, and whether it still holds.
//!
//! A statement is noted together with the length of the log at that moment. All that the machine knew to be on its disk
//! was in the log by then, so the statement must hold after each cut that has at least these entries. The converse is not
//! claimed: a cut with fewer may have it as well.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hearth_api::client::within;
use hearth_api::v1::{
    ClusterConfiguration, ConfigureClusterRequest, KubernetesConfiguration, Label,
    UpdateNodeLabelsRequest,
};
use hearth_operator::by_id;
use serde::{Deserialize, Serialize};

use crate::owner::{Operator, retry_unavailable};
use crate::{Outcome, bounds};

/// How a message begins about a statement that does not hold.
pub(super) const LOST: &str = "what was said is lost";
/// The label that counts.
const COUNTER: &str = "power-cuts";
/// The setting that is changed.
const SETTING: &str = "kubernetes.synchronized_labels";

/// A statement of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Statement {
    /// The node is HOME: its cluster exists.
    Home,
    /// The owner has a certificate of the cluster with this ID and CA, in hexadecimal.
    Owned { cluster: String, ca: String },
    /// The label has this value.
    Counter(u64),
    /// The setting has this value.
    Setting(Vec<String>),
    /// A new register ticket, in hexadecimal; the former one is invalid.
    Ticket(String),
}

/// A statement with the time at which it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Said {
    pub statement: Statement,
    /// The length of the log afterwards.
    pub log_bytes: u64,
}

/// Notes what is said while a log is written.
pub(super) struct Notes {
    log: PathBuf,
    pub said: Vec<Said>,
}

impl Notes {
    pub(super) fn beside(log: &Path) -> Self {
        Self {
            log: log.to_owned(),
            said: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, statement: Statement) -> Outcome {
        let context = || format!("cannot read the length of {}", self.log.display());
        let log_bytes = fs::metadata(&self.log).with_context(context)?.len();
        self.said.push(Said {
            statement,
            log_bytes,
        });
        Ok(())
    }

    /// Changes what the owner can change, and notes each answer.
    pub(super) async fn of_changes(&mut self, owner: &Operator, node: &str) -> Outcome {
        let info = owner.info().await?;
        self.note(Statement::Owned {
            cluster: hex::encode(&info.cluster_id),
            ca: hex::encode(&info.ca_certificate),
        })?;
        for value in 1..=2 {
            self.count(owner, node, value).await?;
        }
        let setting = vec!["power-cuts*".to_owned()];
        let request = ConfigureClusterRequest {
            version: info.configuration_version,
            configuration: Some(ClusterConfiguration {
                kubernetes: Some(KubernetesConfiguration {
                    synchronized_labels: setting.clone(),
                    ..KubernetesConfiguration::default()
                }),
                ..ClusterConfiguration::default()
            }),
            field_mask: vec![SETTING.to_owned()],
        };
        let mut management = owner.once().management();
        let call = within(bounds::CALL, management.configure_cluster(request));
        call.await.context("ConfigureCluster")?;
        self.note(Statement::Setting(setting))?;
        let ticket = owner.once().register_ticket(true).await;
        let ticket = ticket.context("GetRegisterTicket")?;
        self.note(Statement::Ticket(hex::encode(ticket)))?;
        self.count(owner, node, 3).await
    }

    async fn count(&mut self, owner: &Operator, node: &str, value: u64) -> Outcome {
        let request = UpdateNodeLabelsRequest {
            node: Some(by_id(node)),
            upsert: vec![Label {
                key: COUNTER.to_owned(),
                value: value.to_string(),
            }],
            delete: Vec::new(),
        };
        let updated = retry_unavailable(|| owner.once().update_labels(request.clone())).await;
        updated.context("UpdateNodeLabels")?;
        self.note(Statement::Counter(value))
    }
}

/// Checks that each of these statements holds in a cluster of one node.
pub(super) async fn hold(said: &[Statement], owner: &Operator, node: &str) -> Outcome {
    let nodes = owner.nodes().await?;
    let info = owner.info().await?;
    let ticket = match said.iter().any(|said| matches!(said, Statement::Ticket(_))) {
        true => {
            let ticket = retry_unavailable(|| owner.once().register_ticket(false)).await;
            Some(hex::encode(ticket.context("GetRegisterTicket")?))
        }
        false => None,
    };
    for statement in said {
        let (found, holds) = match statement {
            Statement::Home => {
                let ids: Vec<_> = nodes.iter().map(|node| &node.id).collect();
                (format!("nodes {ids:?}"), ids == [node])
            }
            Statement::Owned { cluster, ca } => {
                let found = (
                    hex::encode(&info.cluster_id),
                    hex::encode(&info.ca_certificate),
                );
                let holds = found.0 == *cluster && found.1 == *ca;
                (format!("cluster {found:?}"), holds)
            }
            Statement::Counter(value) => {
                let labels = nodes.iter().flat_map(|node| &node.labels);
                let found = labels.filter(|label| label.key == COUNTER);
                let found: Vec<_> = found.map(|label| label.value.as_str()).collect();
                // A later write may have been made without an answer.
                let holds = found
                    .iter()
                    .any(|found| found.parse().is_ok_and(|found: u64| found >= *value));
                (format!("values {found:?}"), holds)
            }
            Statement::Setting(value) => {
                let configuration = info.configuration.clone().unwrap_or_default();
                let found = configuration
                    .kubernetes
                    .unwrap_or_default()
                    .synchronized_labels;
                let holds = found == *value;
                (format!("{found:?}"), holds)
            }
            Statement::Ticket(wanted) => {
                // Both are secrets of a cluster that no longer exists, but a message shows neither.
                ("another ticket".to_owned(), ticket.as_ref() == Some(wanted))
            }
        };
        ensure!(
            holds,
            "{LOST}: {} was expected, {found} found",
            statement.shown()
        );
    }
    Ok(())
}

impl Statement {
    fn shown(&self) -> String {
        match self {
            Self::Ticket(_) => "the new register ticket".to_owned(),
            other => format!("{other:?}"),
        }
    }
}
