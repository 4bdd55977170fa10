//! Kubernetes' nodes as they follow from the cluster's. Pure functions.
//!
//! The kubelet makes the Node object of its node, and never again while it
//! runs. So one is only removed when the cluster has said for some time
//! ([`Patience`]) that its node is no worker: what a controller knows of the
//! cluster may be older than what the kubelet was started by. When it is older
//! by more than that, the worker sees its Node go and starts the kubelet again.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::fields::Node;
use serde_json::Value;
use tokio::time::Instant;

use crate::labels;

/// How long a Node stays whose node is no worker (any more).
pub const PATIENCE: Duration = Duration::from_secs(15);

/// The cluster's nodes that are UP, as far as Kubernetes is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// By their IDs.
    pub nodes: BTreeMap<NodeId, Member>,
    /// Which labels Kubernetes takes over.
    pub patterns: Vec<String>,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// It has the role.
    pub worker: bool,
    /// It has the role.
    pub controller: bool,
    /// By their keys.
    pub labels: BTreeMap<String, String>,
    /// Where it is among its pods, once it is.
    pub gateway: Option<Ipv4Addr>,
}

/// What is to be done about Kubernetes' nodes.
#[derive(Debug, Default, PartialEq)]
pub struct Work {
    /// Names of those that are none any more.
    pub remove: Vec<String>,
    /// Merge patches by name.
    pub patch: Vec<(String, Value)>,
    /// Those that can resolve names.
    pub servers: Vec<(String, Ipv4Addr)>,
    /// Somebody has to be looked at again by then.
    pub again: Option<Instant>,
}

/// Remembers since when nodes have not been wanted.
pub struct Patience {
    lasts: Duration,
    since: HashMap<String, Instant>,
}

impl Patience {
    /// One that lasts so long.
    pub fn new(lasts: Duration) -> Self {
        Self {
            lasts,
            since: HashMap::new(),
        }
    }
}

/// What there is to do. Nodes whose names are no IDs of ours are somebody
/// else's and are left alone.
pub fn plan<'a>(
    cluster: &Cluster,
    nodes: impl Iterator<Item = &'a Node>,
    patience: &mut Patience,
    now: Instant,
) -> Work {
    let mut work = Work::default();
    let mut unwanted = HashMap::new();
    for node in nodes {
        let metadata = &node.metadata;
        let name = metadata.name.clone();
        let Ok(id) = name.parse::<NodeId>() else {
            continue;
        };
        match cluster.nodes.get(&id).filter(|member| member.worker) {
            Some(member) => {
                let (worker, controller) = (member.worker, member.controller);
                let patterns = &cluster.patterns;
                let wanted = labels::wanted(&member.labels, patterns, worker, controller);
                if let Some(patch) = labels::patch(&wanted, &metadata.labels, &metadata.annotations)
                {
                    work.patch.push((name.clone(), patch));
                }
                if let Some(gateway) = member.gateway.filter(|_| is_ready(node)) {
                    work.servers.push((name, gateway));
                }
            }
            None => {
                let since = patience.since.get(&name).copied().unwrap_or(now);
                unwanted.insert(name.clone(), since);
                let due = since + patience.lasts;
                if now >= due {
                    work.remove.push(name);
                } else {
                    work.again = Some(work.again.map_or(due, |again| again.min(due)));
                }
            }
        }
    }
    patience.since = unwanted;
    work.servers.sort();
    work
}

/// Its kubelet says so, and has said so lately.
fn is_ready(node: &Node) -> bool {
    let mut conditions = node.status.conditions.iter();
    conditions.any(|condition| condition.kind == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn id(digit: char) -> NodeId {
        let digits = String::from(digit).repeat(32);
        format!("hearth-{digits}").parse().unwrap()
    }

    fn node(name: &str, ready: &str) -> Node {
        let node = json!({
            "metadata": { "name": name, "labels": { "kubernetes.io/os": "linux" } },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] },
        });
        serde_json::from_value(node).unwrap()
    }

    fn worker(last: u8) -> Member {
        Member {
            worker: true,
            gateway: Some([10, 208, last, 1].into()),
            ..Member::default()
        }
    }

    #[test]
    fn a_node_that_is_no_worker_goes_but_not_at_once() {
        let mut cluster = Cluster::default();
        cluster.nodes.insert(id('a'), worker(1));
        cluster.nodes.insert(
            id('b'),
            Member {
                controller: true,
                ..Member::default()
            },
        );
        let names = [
            id('a').to_string(),
            id('b').to_string(),
            id('c').to_string(),
        ];
        let nodes: Vec<Node> = names.iter().map(|name| node(name, "True")).collect();
        let foreign = node("some-machine", "True");
        let all = || nodes.iter().chain([&foreign]);

        let (mut patience, begin) = (Patience::new(PATIENCE), Instant::now());
        let work = plan(&cluster, all(), &mut patience, begin);
        assert!(work.remove.is_empty());
        assert_eq!(work.again, Some(begin + PATIENCE));
        assert_eq!(work.servers, [(names[0].clone(), [10, 208, 1, 1].into())]);
        assert_eq!(work.patch.len(), 1, "the worker's role");

        // One of them gets the role back in time.
        cluster.nodes.insert(id('b'), worker(2));
        let later = begin + PATIENCE / 2;
        assert!(
            plan(&cluster, all(), &mut patience, later)
                .remove
                .is_empty()
        );
        let work = plan(&cluster, all(), &mut patience, begin + PATIENCE);
        assert_eq!(work.remove, [names[2].clone()]);

        // And loses it again: it has all the time again.
        cluster.nodes.remove(&id('b'));
        let work = plan(&cluster, all(), &mut patience, begin + PATIENCE);
        assert_eq!(work.remove, [names[2].clone()]);
        assert_eq!(work.again, Some(begin + PATIENCE * 2));
    }

    #[test]
    fn names_are_asked_of_those_that_are_ready() {
        let mut cluster = Cluster::default();
        for (digit, last) in [('a', 1), ('b', 2), ('c', 3)] {
            cluster.nodes.insert(id(digit), worker(last));
        }
        let nodes = [
            node(&id('c').to_string(), "True"),
            node(&id('b').to_string(), "Unknown"),
            node(&id('a').to_string(), "True"),
        ];
        let work = plan(
            &cluster,
            nodes.iter(),
            &mut Patience::new(PATIENCE),
            Instant::now(),
        );
        let addresses: Vec<String> = work.servers.iter().map(|(_, ip)| ip.to_string()).collect();
        assert_eq!(addresses, ["10.208.1.1", "10.208.3.1"]);
    }
}
