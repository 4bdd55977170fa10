//! Plans against Kubernetes' own words about policies, read from the objects directly.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::fields::Object;
use hearth_kubernetes_api::store::Key;
use hearth_sys::cidr::Cidr;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};

use super::node::{NodePolicy, Peers};
use super::objects::{
    Direction, Namespace, NamespaceObject, Pod, PodObject, Policy, PolicyObject, Protocol,
};
use super::plan::{Objects, plan};

const NODES: [[&str; 2]; 2] = [
    ["10.208.1.0/24", "fd00:1:0:1::/64"],
    ["10.208.2.0/24", "fd00:1:0:2::/64"],
];

/// A cluster of two nodes.
#[derive(Default)]
struct World {
    pods: BTreeMap<Key, Pod>,
    namespaces: BTreeMap<Key, Namespace>,
    policies: BTreeMap<Key, Policy>,
}

fn node(number: usize) -> NodeId {
    let text = format!("hearth-{:032x}", number + 1);
    text.parse().unwrap()
}

fn nodes() -> BTreeMap<NodeId, Vec<Cidr>> {
    let networks = |texts: &[&str; 2]| texts.map(|text| text.parse().unwrap()).to_vec();
    let all = NODES.iter().enumerate();
    all.map(|(number, texts)| (node(number), networks(texts)))
        .collect()
}

/// The node whose pods have this address.
fn node_of(address: IpAddr) -> Option<NodeId> {
    let mut all = nodes().into_iter();
    let found = all.find(|(_, networks)| networks.iter().any(|it| it.contains(address)));
    found.map(|(node, _)| node)
}

/// The IPv6 address of the pod with this address.
fn v6_of(address: Ipv4Addr) -> Ipv6Addr {
    let [_, _, on, number] = address.octets();
    Ipv6Addr::new(0xfd00, 1, 0, on.into(), 0, 0, 0, number.into())
}

fn read<O: Object + DeserializeOwned, T>(object: Json, read: fn(O) -> Option<T>) -> (Key, T) {
    let object: O = serde_json::from_value(object).unwrap();
    let metadata = object.metadata();
    let key = (metadata.namespace.clone(), metadata.name.clone());
    (key, read(object).unwrap())
}

impl World {
    fn namespace(&mut self, name: &str, labels: Json) {
        let object = json!({ "metadata": { "name": name, "labels": labels } });
        self.namespaces
            .extend([read::<NamespaceObject, _>(object, Namespace::read)]);
    }

    /// A pod on a node; returns its IPv4 address.
    fn pod(&mut self, on: usize, namespace: &str, name: &str, labels: Json) -> Ipv4Addr {
        let number = u8::try_from(self.pods.len() + 2).unwrap();
        let address = Ipv4Addr::from([10, 208, u8::try_from(on + 1).unwrap(), number]);
        let object = json!({
            "metadata": { "namespace": namespace, "name": name, "labels": labels },
            "spec": {
                "nodeName": node(on).to_string(),
                "containers": [{ "ports": [
                    { "name": "web", "containerPort": 8000 + u16::from(number) },
                    { "name": "dns", "containerPort": 5353, "protocol": "UDP" },
                ]}],
            },
            "status": {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{ "ip": address }, { "ip": v6_of(address) }],
            },
        });
        self.pods.extend([read::<PodObject, _>(object, Pod::read)]);
        address
    }

    fn policy(&mut self, namespace: &str, name: &str, spec: Json) {
        let object = json!({
            "metadata": { "namespace": namespace, "name": name },
            "spec": spec,
        });
        self.policies
            .extend([read::<PolicyObject, _>(object, Policy::read)]);
    }

    fn plan(&self) -> BTreeMap<NodeId, NodePolicy> {
        let objects = Objects {
            pods: &self.pods,
            namespaces: &self.namespaces,
            policies: &self.policies,
        };
        let planned = plan(objects, &nodes());
        for policy in planned.values() {
            assert_eq!(NodePolicy::parse(&policy.to_text()).unwrap(), *policy);
        }
        planned
    }

    /// Whether the plans of both nodes let a connection pass.
    fn passes(
        &self,
        from: impl Into<IpAddr>,
        to: impl Into<IpAddr>,
        protocol: Protocol,
        port: u16,
    ) -> bool {
        let (from, to) = (from.into(), to.into());
        let plans = self.plan();
        let one = |direction, pod: IpAddr, peer| {
            // Somebody outside of the cluster.
            let Some(on) = node_of(pod) else { return true };
            permits(&plans[&on], direction, pod, (peer, protocol, port))
        };
        from == to || one(Direction::Egress, from, to) && one(Direction::Ingress, to, from)
    }

    fn tcp(&self, from: impl Into<IpAddr>, to: impl Into<IpAddr>, port: u16) -> bool {
        self.passes(from, to, Protocol::Tcp, port)
    }
}

/// What the rules of a node say.
fn permits(
    policy: &NodePolicy,
    direction: Direction,
    pod: IpAddr,
    (peer, protocol, port): (IpAddr, Protocol, u16),
) -> bool {
    if !policy.enforced {
        return true;
    }
    let Some(isolation) = policy.pods.get(&pod) else {
        return false;
    };
    let chain = match direction {
        Direction::Ingress => isolation.ingress,
        Direction::Egress => isolation.egress,
    };
    let Some(chain) = chain else { return true };
    policy.chains[chain].iter().any(|rule| {
        let is_peer = match &rule.peers {
            Peers::Any => true,
            Peers::Set(set) => policy.sets[*set].contains(&peer),
            Peers::Block(block) => block.contains(peer),
        };
        let is_port = rule.ports.as_ref().is_none_or(|ports| {
            let mut ranges = ports.ranges.iter();
            ports.protocol == protocol
                && ranges.any(|(first, last)| (*first..=*last).contains(&port))
        });
        is_peer && is_port
    })
}

/// Two namespaces with two pods each, on both nodes.
fn world() -> (World, [Ipv4Addr; 4]) {
    let mut world = World::default();
    world.namespace("a", json!({ "team": "one" }));
    world.namespace("b", json!({ "team": "two" }));
    let pods = [
        world.pod(0, "a", "web", json!({ "app": "web" })),
        world.pod(1, "a", "db", json!({ "app": "db" })),
        world.pod(0, "b", "web", json!({ "app": "web" })),
        world.pod(1, "b", "db", json!({ "app": "db" })),
    ];
    (world, pods)
}

#[test]
fn without_policies_everything_passes() {
    let (world, [a, _, _, d]) = world();
    assert!(world.plan().values().all(|it| *it == NodePolicy::default()));
    assert!(world.tcp(a, d, 80));
}

#[test]
fn a_policy_without_rules_isolates_its_pods_and_no_others() {
    let (mut world, [web, db, other, _]) = world();
    world.policy(
        "a",
        "deny",
        json!({ "podSelector": { "matchLabels": { "app": "web" } } }),
    );
    assert!(!world.tcp(db, web, 80) && !world.tcp(other, web, 80));
    assert!(!world.passes(db, web, Protocol::Udp, 53));
    // Itself, what it connects to, and its namesake elsewhere.
    assert!(world.tcp(web, web, 80) && world.tcp(web, db, 80) && world.tcp(db, other, 80));
    // Only the kinds that the policy names.
    let (mut world, [web, db, ..]) = self::world();
    let egress = json!({ "podSelector": {}, "policyTypes": ["Egress"] });
    world.policy("a", "deny", egress);
    assert!(!world.tcp(web, db, 80));
    let outside = Ipv4Addr::new(192, 0, 2, 1);
    assert!(!world.tcp(web, outside, 80) && world.tcp(outside, web, 80));
}

#[test]
fn policies_add_up() {
    let (mut world, [web, db, other, last]) = world();
    world.policy("a", "deny", json!({ "podSelector": {} }));
    let from_db = json!({
        "podSelector": { "matchLabels": { "app": "web" } },
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "app": "db" } } }] }],
    });
    world.policy("a", "permit", from_db);
    let from_team = json!({
        "podSelector": {},
        "ingress": [{
            "from": [{
                "namespaceSelector": { "matchLabels": { "team": "two" } },
                "podSelector": { "matchLabels": { "app": "web" } },
            }],
            "ports": [{ "port": 80 }, { "port": 90, "endPort": 95 }],
        }],
    });
    world.policy("a", "team", from_team);
    assert!(world.tcp(db, web, 1));
    // A selector of pods means the policy's own namespace.
    assert!(!world.tcp(last, web, 1) && !world.tcp(last, web, 80));
    for (port, passes) in [
        (79, false),
        (80, true),
        (81, false),
        (90, true),
        (95, true),
        (96, false),
    ] {
        assert_eq!(world.tcp(other, web, port), passes, "{port}");
        assert!(!world.passes(other, web, Protocol::Udp, port));
    }
    assert!(world.tcp(other, db, 80) && !world.tcp(web, db, 80));
}

#[test]
fn ports_have_the_names_that_pods_give_them() {
    let (mut world, [web, db, other, last]) = world();
    let named = json!([{ "port": "web" }, { "port": "dns", "protocol": "UDP" }]);
    world.policy(
        "a",
        "in",
        json!({ "podSelector": {}, "ingress": [{ "ports": named }] }),
    );
    let out = json!({
        "podSelector": {},
        "policyTypes": ["Egress"],
        "egress": [{ "to": [{ "namespaceSelector": {} }], "ports": named }],
    });
    world.policy("b", "out", out);
    // Each pod has another number for it.
    let number = |pod: Ipv4Addr| 8000 + u16::from(pod.octets()[3]);
    for (from, to) in [(last, web), (last, db), (other, last), (last, other)] {
        assert!(world.tcp(from, to, number(to)), "{from} {to}");
        assert!(!world.tcp(from, to, number(to) + 1), "{from} {to}");
        assert!(world.passes(from, to, Protocol::Udp, 5353));
        assert!(!world.tcp(from, to, 5353));
    }
}

#[test]
fn blocks_have_holes() {
    let (mut world, [web, ..]) = world();
    let block = json!({ "cidr": "192.0.2.0/24", "except": ["192.0.2.64/26"] });
    let six = json!({ "ipBlock": { "cidr": "2001:db8::/32" } });
    let rules = json!([{ "ipBlock": block }, six]);
    let spec = json!({
        "podSelector": {},
        "ingress": [{ "from": rules }],
        "egress": [{ "to": rules }],
    });
    world.policy("a", "block", spec);
    for (last, passes) in [
        (1, true),
        (63, true),
        (64, false),
        (127, false),
        (128, true),
    ] {
        let outside = Ipv4Addr::new(192, 0, 2, last);
        assert_eq!(world.tcp(outside, web, 80), passes);
        assert_eq!(world.tcp(web, outside, 80), passes);
    }
    assert!(!world.tcp(web, Ipv4Addr::new(192, 0, 3, 1), 80));
    for (outside, passes) in [("2001:db8::1", true), ("2001:db9::1", false)] {
        let outside: IpAddr = outside.parse().unwrap();
        assert_eq!(world.tcp(outside, v6_of(web), 80), passes);
        assert_eq!(world.tcp(v6_of(web), outside, 80), passes);
    }
    // A rule for addresses of one family is no rule for the other.
    world.policies.clear();
    let spec = json!({ "podSelector": {}, "ingress": [{ "from": [six] }] });
    world.policy("a", "six", spec);
    assert!(!world.tcp(Ipv4Addr::new(192, 0, 2, 1), web, 80));
}

/// Nodes of a former release cannot read rules of IPv6, and pods of IPv4 alone need none.
#[test]
fn a_cluster_of_ipv4_has_no_rules_of_ipv6() {
    let (mut world, [web, db, ..]) = world();
    let from = json!([{ "podSelector": {} }, { "ipBlock": { "cidr": "2001:db8::/32" } }]);
    let spec = json!({ "podSelector": {}, "ingress": [{ "from": from }] });
    world.policy("a", "six", spec);
    let objects = Objects {
        pods: &world.pods,
        namespaces: &world.namespaces,
        policies: &world.policies,
    };
    let mut v4 = nodes();
    for networks in v4.values_mut() {
        networks.retain(|network| network.address().is_ipv4());
    }
    let planned = plan(objects, &v4);
    for policy in planned.values() {
        assert!(!policy.to_text().contains("::"), "{}", policy.to_text());
    }
    assert!(planned[&node(0)].pods.contains_key(&web.into()));
    assert!(planned[&node(1)].pods.contains_key(&db.into()));
}

/// A node cannot make the pods of another one its own.
#[test]
fn an_address_of_another_node_is_no_pods() {
    let (mut world, [web, db, ..]) = world();
    world.policy(
        "a",
        "deny",
        json!({ "podSelector": {}, "ingress": [{ "from": [
        { "podSelector": { "matchLabels": { "app": "db" } } },
    ]}] }),
    );
    assert!(world.tcp(db, web, 80));
    let thief = json!({
        "metadata": { "namespace": "a", "name": "thief", "labels": { "app": "db" } },
        "spec": { "nodeName": node(0).to_string() },
        "status": { "phase": "Running", "podIP": "10.208.2.77" },
    });
    world.pods.extend([read::<PodObject, _>(thief, Pod::read)]);
    assert!(!world.tcp(Ipv4Addr::new(10, 208, 2, 77), web, 80));
}

#[test]
fn a_text_that_is_no_policy_is_refused() {
    let error = NodePolicy::parse("{}").unwrap_err().to_string();
    assert!(error.contains("as JSON"), "{error}");
    let rule = json!({ "peers": { "set": 1 } });
    let text = json!({
        "enforced": true, "pods": { "10.208.1.2": { "ingress": 1 } },
        "chains": [[rule]], "sets": [[]],
    });
    let error = NodePolicy::parse(&text.to_string())
        .unwrap_err()
        .to_string();
    assert_eq!(error, "expected a chain below 1, got 1");
}

/// A selector of labels with few values.
fn selectors() -> impl Strategy<Value = Json> {
    prop_oneof![
        Just(json!({})),
        "[xy]".prop_map(|value| json!({ "matchLabels": { "l": value } })),
        "[xy]".prop_map(|value| json!({ "matchExpressions": [
            { "key": "l", "operator": "NotIn", "values": [value] },
        ]})),
    ]
}

fn peers() -> impl Strategy<Value = Json> {
    prop_oneof![
        selectors().prop_map(|it| json!({ "podSelector": it })),
        selectors().prop_map(|it| json!({ "namespaceSelector": it })),
        (selectors(), selectors())
            .prop_map(|(a, b)| json!({ "podSelector": a, "namespaceSelector": b })),
        (0..4_u8).prop_map(|it| json!({ "ipBlock": {
            "cidr": "10.208.1.0/24", "except": [format!("10.208.1.{}/31", it * 2)],
        }})),
        (0..4_u8).prop_map(|it| json!({ "ipBlock": {
            "cidr": "fd00:1:0:1::/64", "except": [format!("fd00:1:0:1::{}/127", it * 2)],
        }})),
    ]
}

fn ports() -> impl Strategy<Value = Json> {
    prop_oneof![
        Just(json!({})),
        (1..4_u16).prop_map(|it| json!({ "port": it })),
        (1..4_u16).prop_map(|it| json!({ "port": it, "endPort": 3 })),
        Just(json!({ "port": "dns", "protocol": "UDP" })),
    ]
}

fn rules(peers_in: &'static str) -> impl Strategy<Value = Json> {
    let rule = (
        prop::collection::vec(peers(), 0..3),
        prop::collection::vec(ports(), 0..3),
    );
    let rule = rule.prop_map(move |(peers, ports)| json!({ peers_in: peers, "ports": ports }));
    prop::collection::vec(rule, 0..3).prop_map(Json::Array)
}

/// The policy's own words.
fn says(world: &World, spec: &Json, own: &str, direction: &str, end: &End) -> bool {
    let matches = |selector: &Json, labels: &BTreeMap<String, String>| {
        let selector: super::selector::Selector = serde_json::from_value(selector.clone()).unwrap();
        selector.matches(labels)
    };
    let (rules, peers) = match direction {
        "Ingress" => (&spec["ingress"], "from"),
        _ => (&spec["egress"], "to"),
    };
    let all = |list: &Json, holds: &dyn Fn(&Json) -> bool| {
        let list = list.as_array().unwrap();
        list.is_empty() || list.iter().any(holds)
    };
    rules.as_array().unwrap().iter().any(|rule| {
        all(&rule[peers], &|peer| {
            if let Some(block) = peer.get("ipBlock") {
                let within = |it: &Json| {
                    let cidr: hearth_sys::cidr::Cidr = it.as_str().unwrap().parse().unwrap();
                    cidr.contains(end.address)
                };
                return within(&block["cidr"])
                    && !block["except"].as_array().unwrap().iter().any(within);
            }
            let namespace = match peer.get("namespaceSelector") {
                None => end.namespace == own,
                Some(selector) => {
                    let key = (String::new(), end.namespace.clone());
                    matches(selector, &world.namespaces[&key].labels)
                }
            };
            let pod = peer.get("podSelector");
            namespace && pod.is_none_or(|selector| matches(selector, &end.peer.labels))
        }) && all(&rule["ports"], &|port| {
            let protocol = match port["protocol"].as_str() {
                Some("UDP") => Protocol::Udp,
                _ => Protocol::Tcp,
            };
            let number = match &port["port"] {
                Json::Null => true,
                // All pods have it at this one.
                Json::String(_) => end.port == 5353,
                first => {
                    let first = first.as_u64().unwrap();
                    let last = port["endPort"].as_u64().unwrap_or(first);
                    (first..=last).contains(&u64::from(end.port))
                }
            };
            protocol == end.protocol && number
        })
    })
}

/// The other end of a connection, and its port.
struct End {
    namespace: String,
    peer: Pod,
    address: IpAddr,
    protocol: Protocol,
    port: u16,
}

proptest! {
    #[test]
    fn plans_are_what_the_policies_say(
        labels in prop::collection::vec("[xyz]", 4),
        specs in prop::collection::vec(
            ("[ab]", selectors(), rules("from"), rules("to"), any::<(bool, bool)>()), 1..4,
        ),
        udp: bool,
        port in prop_oneof![Just(1_u16), Just(2), Just(3), Just(5353)],
    ) {
        let mut world = World::default();
        world.namespace("a", json!({ "l": "x" }));
        world.namespace("b", json!({ "l": "y" }));
        for (number, label) in labels.iter().enumerate() {
            let namespace = if number < 2 { "a" } else { "b" };
            world.pod(number % 2, namespace, &number.to_string(), json!({ "l": label }));
        }
        let mut policies = Vec::new();
        for (number, (namespace, pods, from, to, (ingress, egress))) in specs.iter().enumerate() {
            let types: Vec<&str> = [(*ingress, "Ingress"), (*egress, "Egress")]
                .into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect();
            // Without any of them there are defaults.
            let types = if types.is_empty() { vec!["Ingress"] } else { types };
            let spec = json!({
                "podSelector": pods, "ingress": from, "egress": to, "policyTypes": types,
            });
            world.policy(namespace, &number.to_string(), spec.clone());
            policies.push((namespace.clone(), spec, types));
        }
        let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
        let permitted = |direction: &str, (namespace, _): &Key, pod: &Pod, end: &End| {
            let selector = |spec: &Json| {
                serde_json::from_value::<super::selector::Selector>(spec["podSelector"].clone())
            };
            let mut isolated = false;
            for (own, spec, types) in &policies {
                if own == namespace
                    && types.contains(&direction)
                    && selector(spec).unwrap().matches(&pod.labels)
                {
                    isolated = true;
                    if says(&world, spec, own, direction, end) {
                        return true;
                    }
                }
            }
            !isolated
        };
        for (key, from) in &world.pods {
            for (other, to) in &world.pods {
                for family in 0..2 {
                    let at = |pod: &Pod| pod.addresses[family];
                    let end = |key: &Key, pod: &Pod| End {
                        namespace: key.0.clone(), peer: pod.clone(), address: at(pod), protocol, port,
                    };
                    let wanted = key == other
                        || permitted("Egress", key, from, &end(other, to))
                            && permitted("Ingress", other, to, &end(key, from));
                    let passes = world.passes(at(from), at(to), protocol, port);
                    prop_assert_eq!(passes, wanted, "{:?} {:?}", key, other);
                }
            }
        }
    }
}
