//! The state of Kubernetes in a cluster.

use hearth_api::v1;
use serde::Serialize;

use super::{Condition, word};
use crate::table::{Table, printable};

/// What the nodes with a Kubernetes role report.
#[derive(Debug, Serialize)]
pub(crate) struct KubernetesStatus {
    /// The URLs of a load balancer or virtual address of the API servers.
    servers: Vec<String>,
    nodes: Vec<KubernetesNode>,
}

#[derive(Debug, Serialize)]
struct KubernetesNode {
    id: String,
    health: String,
    controller: bool,
    worker: bool,
    /// As the node has reported them last.
    conditions: Vec<Condition>,
}

impl KubernetesStatus {
    /// Of all nodes of a cluster with this configuration.
    pub(crate) fn new(nodes: &[v1::Node], configuration: &v1::ClusterConfiguration) -> Self {
        let kubernetes = configuration.kubernetes.clone().unwrap_or_default();
        Self {
            servers: kubernetes.stable_urls(),
            nodes: nodes.iter().filter_map(KubernetesNode::of).collect(),
        }
    }

    /// Whether there is a node with a Kubernetes role, and all of them do what they should.
    pub(crate) fn is_well(&self) -> bool {
        !self.nodes.is_empty() && self.nodes.iter().all(KubernetesNode::is_well)
    }

    /// One line for each condition.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new(&["NODE", "HEALTH", "CONDITION", "MET", "REASON", "MESSAGE"]);
        for node in &self.nodes {
            for condition in &node.conditions {
                table.row([
                    node.id.clone(),
                    node.health.clone(),
                    printable(&condition.r#type),
                    if condition.met { "yes" } else { "no" }.to_owned(),
                    printable(&condition.reason),
                    printable(&condition.message),
                ]);
            }
            for role in node.unreported() {
                let [id, health] = [&node.id, &node.health].map(String::clone);
                let none = "not reported yet".to_owned();
                table.row([
                    id,
                    health,
                    role.to_owned(),
                    "no".to_owned(),
                    String::new(),
                    none,
                ]);
            }
        }
        let servers = self
            .servers
            .iter()
            .map(|url| format!("API servers: {url}\n"));
        let servers: String = servers.collect();
        format!("{servers}{table}")
    }
}

impl KubernetesNode {
    /// `None` for a node without a Kubernetes role.
    fn of(node: &v1::Node) -> Option<Self> {
        let roles = node.roles.unwrap_or_default();
        let (controller, worker) = (
            roles.kubernetes_controller.is_some(),
            roles.kubernetes_worker.is_some(),
        );
        let conditions = node.status.iter().flat_map(|status| &status.conditions);
        (controller || worker).then(|| Self {
            id: node.id.clone(),
            health: word(node.health, v1::NodeHealth::as_str_name, "NODE_HEALTH_"),
            controller,
            worker,
            conditions: conditions.map(Condition::from).collect(),
        })
    }

    /// The conditions of its roles that it has not reported.
    fn unreported(&self) -> impl Iterator<Item = &'static str> {
        use hearth_api::names::conditions::{KUBERNETES_CONTROLLER, KUBERNETES_WORKER};
        let roles = [
            (self.controller, KUBERNETES_CONTROLLER),
            (self.worker, KUBERNETES_WORKER),
        ];
        let is_missing = |(held, name): &(bool, &str)| {
            *held
                && !self
                    .conditions
                    .iter()
                    .any(|condition| condition.r#type == *name)
        };
        roles.into_iter().filter(is_missing).map(|(_, name)| name)
    }

    fn is_well(&self) -> bool {
        self.health == "HEALTHY"
            && self.conditions.iter().all(|condition| condition.met)
            && self.unreported().next().is_none()
    }
}
