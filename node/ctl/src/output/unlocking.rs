//! The result of `cluster unlock`.

use std::fmt;

use hearth_api::identity::ClusterId;
use hearth_api::v1::{self, NodeHealth};
use hearth_operator::unlock::{NodeState, Outcome};
use serde::Serialize;

use crate::table::{Table, printable};

/// The cluster's answer: how many of its nodes are healthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Answers {
    nodes: usize,
    healthy: usize,
}

impl From<&[v1::Node]> for Answers {
    fn from(nodes: &[v1::Node]) -> Self {
        let healthy = nodes
            .iter()
            .filter(|node| node.health() == NodeHealth::Healthy);
        Self {
            nodes: nodes.len(),
            healthy: healthy.count(),
        }
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} nodes are healthy", self.healthy, self.nodes)
    }
}

/// Output of `cluster unlock`.
#[derive(Debug, Serialize)]
pub(crate) struct Unlocking {
    cluster_id: Option<String>,
    /// The quorum with the nodes that were unlocked; null if no node waits.
    quorum: Option<Quorum>,
    nodes: Vec<Node>,
    /// Null if the cluster does not answer, or was not asked.
    answer: Option<Answers>,
}

#[derive(Debug, Serialize)]
struct Quorum {
    voters: usize,
    needed: usize,
    up: usize,
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Node {
    id: String,
    address: Option<String>,
    state: &'static str,
    error: Option<String>,
}

impl Unlocking {
    /// After an attempt.
    pub(crate) fn new(cluster: ClusterId, outcome: &Outcome, answer: Option<Answers>) -> Self {
        let node = |(id, node): (&_, &hearth_operator::unlock::Node)| Node {
            id: ToString::to_string(id),
            address: node.endpoint.as_ref().map(ToString::to_string),
            state: node.state.word(),
            error: match &node.state {
                NodeState::Failed(error) => Some(hearth_api::chain(error)),
                _ => None,
            },
        };
        let quorum = &outcome.quorum;
        Self {
            cluster_id: Some(cluster.to_string()),
            quorum: Some(Quorum {
                voters: quorum.voters,
                needed: quorum.needed(),
                up: quorum.up,
                missing: quorum.missing.iter().map(ToString::to_string).collect(),
            }),
            nodes: outcome.nodes.iter().map(node).collect(),
            answer,
        }
    }

    /// No node waits, and the cluster answers.
    pub(crate) fn nothing(cluster: Option<ClusterId>, answer: Answers) -> Self {
        Self {
            cluster_id: cluster.map(|id| id.to_string()),
            quorum: None,
            nodes: Vec::new(),
            answer: Some(answer),
        }
    }

    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new(&["NODE", "ADDRESS", "STATE"]);
        for node in &self.nodes {
            table.row([
                printable(&node.id),
                node.address.clone().unwrap_or_default(),
                node.state.to_owned(),
            ]);
        }
        let mut text = table.to_string();
        let unlocked = self.nodes.iter().any(|node| node.state == "UNLOCKED");
        if let Some(quorum) = &self.quorum {
            let (up, voters, needed) = (quorum.up, quorum.voters, quorum.needed);
            text.push_str(&format!(
                "\n{up} of {voters} consensus members are up; a quorum needs {needed}\n"
            ));
            if up >= needed && !unlocked {
                text.push_str(
                    "no node had to be unlocked: those that wait get their keys from the cluster; \
                     --all unlocks them nevertheless\n",
                );
            }
        }
        if let Some(answer) = &self.answer {
            text.push_str(&format!("the cluster answers: {answer}\n"));
        }
        text
    }
}
