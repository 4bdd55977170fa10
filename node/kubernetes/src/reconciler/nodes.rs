//! Reconciles Node objects with the nodes of the cluster. Pure functions.
//!
//! A kubelet creates its Node object when it starts, and not again while it runs. So a Node is only
//! deleted when its node has not been a worker for some time ([`Patience`]): the view of a
//! controller may be older than that with which the kubelet was started. If it is older by more
//! than that, the worker notices that its Node has been deleted, and restarts the kubelet.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::node_settings::Taint;
use hearth_api::ranges::ClusterRanges;
use hearth_kubernetes_api::fields::Node;
use hearth_sys::cidr::Cidr;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::labels;

/// How long a Node is kept when its node is not a worker (any more).
pub const PATIENCE: Duration = Duration::from_secs(15);

/// The taint of nodes of the control plane, by Kubernetes' convention.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

/// Annotation of a Node: the taints that settings of its node have set, separated by commas.
const REMEMBERED_TAINTS: &str = "hearth.dev/taints";

/// The nodes of the cluster that are UP, with what the reconciler needs of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// The nodes by ID.
    pub nodes: BTreeMap<NodeId, Member>,
    /// Patterns of the labels that are copied to Nodes.
    pub patterns: Vec<String>,
    /// Nodes of the control plane get the taint.
    pub taint_control_plane: bool,
    /// Pods have another network than the built-in one.
    pub other_network: bool,
    /// The addresses of pods and services.
    pub ranges: ClusterRanges,
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// It has the role Kubernetes worker.
    pub worker: bool,
    /// It has the role Kubernetes controller.
    pub controller: bool,
    /// It has the role consensus member.
    pub consensus: bool,
    /// Labels by key.
    pub labels: BTreeMap<String, String>,
    /// The taints in its settings.
    pub taints: Vec<Taint>,
    /// Gateway address of its pod network, if it has one.
    pub gateway: Option<Ipv4Addr>,
    /// The addresses of its pods, of each family.
    pub networks: Vec<Cidr>,
}

/// The changes that are needed.
#[derive(Debug, Default, PartialEq)]
pub struct Work {
    /// Names of Nodes to delete.
    pub remove: Vec<String>,
    /// Merge patches of Nodes, by name.
    pub patch: Vec<(String, Value)>,
    /// Name and DNS address of each node whose DNS server can be used.
    pub servers: Vec<(String, Ipv4Addr)>,
    /// When the next Node is due for deletion.
    pub again: Option<Instant>,
}

/// Tracks since when Nodes have not belonged to a worker.
pub struct Patience {
    lasts: Duration,
    since: HashMap<String, Instant>,
}

impl Patience {
    /// `lasts` is how long Nodes are kept.
    pub fn new(lasts: Duration) -> Self {
        Self {
            lasts,
            since: HashMap::new(),
        }
    }
}

/// Computes the changes. Nodes whose names are not node IDs are not Hearth's and are ignored.
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
                let labels = labels::patch(&wanted, &metadata.labels, &metadata.annotations);
                let tainted = cluster.taint_control_plane && (controller || member.consensus);
                let taints = taints(node, tainted, &member.taints);
                let changes = [labels, taints].into_iter().flatten();
                work.patch
                    .extend(changes.map(|patch| (name.clone(), patch)));
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

/// The merge patch with which the Node has the taint of the control plane, or has not, and the taints of its settings;
/// `None` if there is nothing to change. The list is replaced as a whole, so the patch is for this version of the object
/// only. The taints that were set by settings are remembered in an annotation: others, which somebody has set in
/// Kubernetes, stay.
fn taints(node: &Node, control_plane: bool, settings: &[Taint]) -> Option<Value> {
    let metadata = &node.metadata;
    let remembered = metadata.annotations.get(REMEMBERED_TAINTS);
    let remembered = remembered.map_or("", String::as_str);
    let of_settings: Vec<Value> = settings.iter().map(object).collect();
    let to_remember = of_settings
        .iter()
        .map(name_of)
        .collect::<Vec<_>>()
        .join(",");

    let ours = json!({ "key": CONTROL_PLANE, "effect": "NoSchedule" });
    let was_ours =
        |name: &str| name == name_of(&ours) || remembered.split(',').any(|it| it == name);
    let mut wanted = of_settings;
    if control_plane {
        wanted.insert(0, ours.clone());
    }
    let is_other = |taint: &&Value| {
        let name = name_of(taint);
        !was_ours(&name) && wanted.iter().all(|it| name_of(it) != name)
    };
    let current = &node.spec.taints;
    let others: Vec<Value> = current.iter().filter(is_other).cloned().collect();
    let is_there = |taint: &Value| current.iter().any(|it| same(it, taint));
    let are_set = others.len() + wanted.len() == current.len() && wanted.iter().all(is_there);
    if are_set && remembered == to_remember {
        return None;
    }
    let mut changes = json!({ "resourceVersion": metadata.resource_version });
    if remembered != to_remember {
        let to_remember = (!to_remember.is_empty()).then_some(to_remember);
        changes["annotations"] = json!({ REMEMBERED_TAINTS: to_remember });
    }
    let taints: Vec<Value> = others.into_iter().chain(wanted).collect();
    Some(json!({ "metadata": changes, "spec": { "taints": taints } }))
}

/// A taint as Kubernetes has it.
fn object(taint: &Taint) -> Value {
    let mut object = json!({ "key": taint.key, "effect": taint.effect });
    if !taint.value.is_empty() {
        object["value"] = taint.value.clone().into();
    }
    object
}

/// What a taint is known by: a Node has at most one of each key and effect.
fn name_of(taint: &Value) -> String {
    let text = |field: &str| taint[field].as_str().unwrap_or_default();
    format!("{}:{}", text("key"), text("effect"))
}

/// Whether they are the same but for the time at which one was added.
fn same(a: &Value, b: &Value) -> bool {
    let value = |taint: &Value| taint["value"].as_str().unwrap_or_default().to_owned();
    name_of(a) == name_of(b) && value(a) == value(b)
}

/// Whether the Node is ready. (The controller-manager sets the condition to `Unknown` if the
/// kubelet does not report.)
fn is_ready(node: &Node) -> bool {
    let mut conditions = node.status.conditions.iter();
    conditions.any(|condition| condition.kind == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
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

        // It loses the role again: the time starts anew.
        cluster.nodes.remove(&id('b'));
        let work = plan(&cluster, all(), &mut patience, begin + PATIENCE);
        assert_eq!(work.remove, [names[2].clone()]);
        assert_eq!(work.again, Some(begin + PATIENCE * 2));
    }

    /// Applies the patch of the taints, as the API server does; `None` if there is none.
    fn patched(node: &Node, settings: &[Taint]) -> Option<Node> {
        let patch = taints(node, false, settings)?;
        let mut changed = node.clone();
        if let Some(remembered) = patch["metadata"].get("annotations") {
            match remembered[REMEMBERED_TAINTS].as_str() {
                Some(text) => drop(
                    changed
                        .metadata
                        .annotations
                        .insert(REMEMBERED_TAINTS.into(), text.into()),
                ),
                None => drop(changed.metadata.annotations.remove(REMEMBERED_TAINTS)),
            }
        }
        changed.spec.taints = patch["spec"]["taints"].as_array().unwrap().clone();
        Some(changed)
    }

    #[test]
    fn taints_of_settings_come_and_go_and_others_stay() {
        let taint = |value: &str, effect| Taint {
            key: "dedicated".into(),
            value: value.into(),
            effect,
        };
        let (db, web) = (taint("db", "NoSchedule"), taint("web", "NoSchedule"));
        let other = json!({ "key": "disk", "effect": "NoExecute", "timeAdded": "2026" });
        let bare: Node = serde_json::from_value(json!({
            "metadata": { "name": "x", "resourceVersion": "7" },
            "spec": { "taints": [other] },
        }))
        .unwrap();
        assert!(patched(&bare, &[]).is_none());
        let shown = |node: &Node| {
            node.spec
                .taints
                .iter()
                .map(|t| t["value"].clone())
                .collect::<Vec<_>>()
        };
        let one = patched(&bare, std::slice::from_ref(&db)).unwrap();
        assert_eq!(shown(&one), [Value::Null, json!("db")]);
        assert!(patched(&one, std::slice::from_ref(&db)).is_none());
        // Another value, and another effect.
        let changed = patched(&one, std::slice::from_ref(&web)).unwrap();
        assert_eq!(shown(&changed), [Value::Null, json!("web")]);
        let both = [web, taint("", "NoExecute")];
        let more = patched(&changed, &both).unwrap();
        assert_eq!(more.spec.taints.len(), 3);
        assert!(patched(&more, &both).is_none());
        let gone = patched(&more, &[]).unwrap();
        assert_eq!(gone.spec.taints, [other]);
        assert_eq!(gone.metadata.annotations.get(REMEMBERED_TAINTS), None);
    }

    #[test]
    fn nodes_of_the_control_plane_are_tainted_if_the_cluster_says_so() {
        let member = |controller, consensus| Member {
            worker: true,
            controller,
            consensus,
            ..Member::default()
        };
        let mut cluster = Cluster::default();
        cluster.nodes.insert(id('a'), member(true, false));
        cluster.nodes.insert(id('b'), member(false, true));
        cluster.nodes.insert(id('c'), member(false, false));
        let other = json!({ "key": "disk", "effect": "NoExecute", "timeAdded": "2026" });
        let ours = json!({ "key": CONTROL_PLANE, "effect": "NoSchedule" });
        let node = |digit: char, taints: &[&Value]| -> Node {
            serde_json::from_value(json!({
                "metadata": { "name": id(digit).to_string(), "resourceVersion": "7" },
                "spec": { "taints": taints },
            }))
            .unwrap()
        };
        let planned = |cluster: &Cluster, nodes: &[Node]| -> Vec<(String, Value)> {
            let mut patience = Patience::new(PATIENCE);
            let work = plan(cluster, nodes.iter(), &mut patience, Instant::now());
            let taints = work.patch.into_iter();
            let taints = taints.filter(|(_, patch)| !patch["spec"].is_null());
            taints.collect()
        };
        let bare = [node('a', &[&other]), node('b', &[]), node('c', &[])];
        assert_eq!(planned(&cluster, &bare), []);
        cluster.taint_control_plane = true;
        let patch = |taints: Value| json!({ "metadata": { "resourceVersion": "7" }, "spec": { "taints": taints } });
        assert_eq!(
            planned(&cluster, &bare),
            [
                (id('a').to_string(), patch(json!([other, ours]))),
                (id('b').to_string(), patch(json!([ours]))),
            ]
        );
        let tainted = [node('a', &[&ours, &other]), node('c', &[&ours])];
        let [(name, removed)] = &planned(&cluster, &tainted)[..] else {
            panic!("one is tainted that is not to be");
        };
        assert_eq!((name, removed), (&id('c').to_string(), &patch(json!([]))));
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
