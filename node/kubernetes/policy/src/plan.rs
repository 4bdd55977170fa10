//! From all objects of a cluster to what each node enforces.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::store::Key;
use hearth_sys::cidr::Cidr;

use super::node::{Block, Isolation, Network, NodePolicy, Peers, Ports, Rule};
use super::objects::{
    Direction, NamedPort, Namespace, PeerRule, Pod, Policy, Port, PortRule, Protocol,
};

/// The objects of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Objects<'a> {
    /// The pods with addresses of their own.
    pub pods: &'a BTreeMap<Key, Pod>,
    /// The namespaces.
    pub namespaces: &'a BTreeMap<Key, Namespace>,
    /// The policies.
    pub policies: &'a BTreeMap<Key, Policy>,
}

/// What each of these nodes, whose pods have addresses of these networks, enforces. An address of a pod counts
/// only if it is in a network of its node: a node could report the address of another one's pod for one
/// of its own.
pub fn plan(
    objects: Objects<'_>,
    nodes: &BTreeMap<NodeId, Vec<Cidr>>,
) -> BTreeMap<NodeId, NodePolicy> {
    let open = || (nodes.keys().copied()).map(|node| (node, NodePolicy::default()));
    if objects.policies.is_empty() {
        return open().collect();
    }
    let placed = objects.pods.iter().filter_map(|((namespace, _), pod)| {
        let networks = nodes.get(&pod.node)?;
        let is_own = |address: &&IpAddr| networks.iter().any(|it| it.contains(**address));
        let addresses: Vec<IpAddr> = pod.addresses.iter().filter(is_own).copied().collect();
        (!addresses.is_empty()).then_some(Placed {
            namespace,
            pod,
            addresses,
        })
    });
    let pods: Vec<Placed<'_>> = placed.collect();
    let mut networks = nodes.values().flatten();
    let mut planner = Planner {
        objects,
        pods: &pods,
        has_ipv6: networks.any(|network| network.address().is_ipv6()),
        chains: BTreeMap::new(),
    };
    let mut all: BTreeMap<NodeId, Draft> = (nodes.keys().copied())
        .map(|node| (node, Draft::default()))
        .collect();
    for placed in &pods {
        let (namespace, pod) = (placed.namespace, placed.pod);
        let ingress = planner.chain(Direction::Ingress, namespace, pod);
        let egress = planner.chain(Direction::Egress, namespace, pod);
        if let Some(draft) = all.get_mut(&pod.node) {
            draft.add(&placed.addresses, ingress, egress);
        }
    }
    let all = all.into_iter().map(|(node, draft)| (node, draft.policy));
    all.collect()
}

/// A rule whose addresses are not in a set yet.
type Planned = (PlannedPeers, Option<Ports>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum PlannedPeers {
    Any,
    Pods(BTreeSet<IpAddr>),
    Block(Block),
}

/// What the rules of a pod depend on: the policies, by their places, and for ports with names in
/// ingress rules the pod's own ports.
type Cause = (Direction, Vec<usize>, Vec<(String, Protocol, u16)>);

/// A pod with the addresses of it that count.
struct Placed<'a> {
    namespace: &'a str,
    pod: &'a Pod,
    addresses: Vec<IpAddr>,
}

struct Planner<'a> {
    objects: Objects<'a>,
    pods: &'a [Placed<'a>],
    /// Whether pods can have addresses of IPv6.
    has_ipv6: bool,
    /// Many pods have the same rules.
    chains: BTreeMap<Cause, Vec<Planned>>,
}

impl Planner<'_> {
    /// The permitted connections of a pod; `None` if no policy isolates it.
    fn chain(&mut self, direction: Direction, namespace: &str, pod: &Pod) -> Option<Vec<Planned>> {
        let applies = |((of, _), policy): &(&Key, &Policy)| {
            of == namespace
                && policy.isolates(direction)
                && policy.pod_selector.matches(&pod.labels)
        };
        let policies = self.objects.policies.iter().enumerate();
        let policies: Vec<(usize, &Policy)> = policies
            .filter(|(_, it)| applies(it))
            .map(|(place, (_, policy))| (place, policy))
            .collect();
        if policies.is_empty() {
            return None;
        }
        let own_ports = match direction {
            Direction::Ingress => &pod.ports[..],
            Direction::Egress => &[],
        };
        let own_ports = own_ports.iter();
        let cause = (
            direction,
            policies.iter().map(|(place, _)| *place).collect(),
            own_ports
                .map(|it| (it.name.clone(), it.protocol, it.number))
                .collect(),
        );
        if let Some(chain) = self.chains.get(&cause) {
            return Some(chain.clone());
        }
        let mut chain = Vec::new();
        for (_, policy) in policies {
            for (peers, ports) in policy.rules(direction) {
                for peers in self.peers(namespace, peers) {
                    for rule in self.rules(direction, pod, peers, ports) {
                        if !chain.contains(&rule) {
                            chain.push(rule);
                        }
                    }
                }
            }
        }
        self.chains.insert(cause, chain.clone());
        Some(chain)
    }

    /// The other ends that the peers of a rule select.
    fn peers(&self, namespace: &str, peers: &[PeerRule]) -> Vec<PlannedPeers> {
        if peers.is_empty() {
            return vec![PlannedPeers::Any];
        }
        let mut pods = BTreeSet::new();
        let mut all = Vec::new();
        for peer in peers {
            match &peer.ip_block {
                Some(block) => {
                    let network = Network::from(block.cidr);
                    // Pods without an address of a family connect to nobody of it.
                    if network.first().is_ipv4() || self.has_ipv6 {
                        let except = block.except.iter().copied().map(Network::from);
                        let except =
                            except.filter(|it| it.first().is_ipv4() == network.first().is_ipv4());
                        let except = except.collect();
                        all.push(PlannedPeers::Block(Block { network, except }));
                    }
                }
                None => pods.extend(self.selected(namespace, peer)),
            }
        }
        if !pods.is_empty() {
            all.push(PlannedPeers::Pods(pods));
        }
        all
    }

    /// The addresses of the pods that a peer without a block selects.
    fn selected(&self, own: &str, peer: &PeerRule) -> BTreeSet<IpAddr> {
        let nobody = peer.pod_selector.is_none() && peer.namespace_selector.is_none();
        let namespaces = &self.objects.namespaces;
        let matches = |placed: &&Placed<'_>| {
            let in_namespace = match &peer.namespace_selector {
                None => placed.namespace == own,
                Some(selector) => {
                    let key = (String::new(), placed.namespace.to_owned());
                    let found = namespaces.get(&key);
                    found.is_some_and(|it| selector.matches(&it.labels))
                }
            };
            let selector = peer.pod_selector.as_ref();
            in_namespace && selector.is_none_or(|selector| selector.matches(&placed.pod.labels))
        };
        let pods = self.pods.iter().filter(|_| !nobody).filter(matches);
        pods.flat_map(|placed| placed.addresses.iter().copied())
            .collect()
    }

    /// Rules for these peers, with the ports of a rule.
    fn rules(
        &self,
        direction: Direction,
        pod: &Pod,
        peers: PlannedPeers,
        ports: &[PortRule],
    ) -> Vec<Planned> {
        if ports.is_empty() {
            return vec![(peers, None)];
        }
        let mut ranges: BTreeMap<Protocol, Vec<(u16, u16)>> = BTreeMap::new();
        let mut elsewhere = Vec::new();
        for rule in ports {
            let of = ranges.entry(rule.protocol).or_default();
            match (&rule.port, direction) {
                (None, _) => of.push(Ports::ALL),
                (Some(Port::Number(first)), _) => {
                    of.push((*first, rule.end_port.unwrap_or(*first)));
                }
                (Some(Port::Name(name)), Direction::Ingress) => {
                    of.extend(numbers(&pod.ports, name, rule.protocol).map(|it| (it, it)));
                }
                (Some(Port::Name(name)), Direction::Egress) => {
                    elsewhere.extend(self.named(&peers, name, rule.protocol));
                }
            }
        }
        let ranges = ranges.into_iter().filter(|(_, ranges)| !ranges.is_empty());
        let rules =
            ranges.map(|(protocol, ranges)| (peers.clone(), Some(Ports::new(protocol, ranges))));
        rules.chain(elsewhere).collect()
    }

    /// Rules for a port with a name: the pods among the peers that have it, by its number.
    fn named(&self, peers: &PlannedPeers, name: &str, protocol: Protocol) -> Vec<Planned> {
        let is_peer = |address: &&IpAddr| match peers {
            PlannedPeers::Any => true,
            PlannedPeers::Pods(pods) => pods.contains(*address),
            PlannedPeers::Block(block) => block.contains(**address),
        };
        let mut by_number: BTreeMap<u16, BTreeSet<IpAddr>> = BTreeMap::new();
        for Placed { pod, addresses, .. } in self.pods {
            let addresses: Vec<IpAddr> = addresses.iter().filter(is_peer).copied().collect();
            if addresses.is_empty() {
                continue;
            }
            for number in numbers(&pod.ports, name, protocol) {
                by_number.entry(number).or_default().extend(&addresses);
            }
        }
        let rule = |(number, pods)| {
            let ports = Ports::new(protocol, vec![(number, number)]);
            (PlannedPeers::Pods(pods), Some(ports))
        };
        by_number.into_iter().map(rule).collect()
    }
}

/// The numbers of the ports with this name.
fn numbers(ports: &[NamedPort], name: &str, protocol: Protocol) -> impl Iterator<Item = u16> {
    let named = ports.iter();
    let named = named.filter(move |port| port.name == name && port.protocol == protocol);
    named.map(|port| port.number)
}

/// What a node enforces, while pods are added.
struct Draft {
    policy: NodePolicy,
}

impl Default for Draft {
    fn default() -> Self {
        Self {
            policy: NodePolicy {
                enforced: true,
                ..NodePolicy::default()
            },
        }
    }
}

impl Draft {
    fn add(
        &mut self,
        addresses: &[IpAddr],
        ingress: Option<Vec<Planned>>,
        egress: Option<Vec<Planned>>,
    ) {
        let isolation = Isolation {
            ingress: ingress.map(|rules| self.chain(rules)),
            egress: egress.map(|rules| self.chain(rules)),
        };
        let pods = addresses.iter().map(|address| (*address, isolation));
        self.policy.pods.extend(pods);
    }

    fn chain(&mut self, rules: Vec<Planned>) -> usize {
        let rules = rules.into_iter().map(|(peers, ports)| {
            let peers = match peers {
                PlannedPeers::Any => Peers::Any,
                PlannedPeers::Block(block) => Peers::Block(block),
                PlannedPeers::Pods(pods) => Peers::Set(place(&mut self.policy.sets, pods)),
            };
            Rule { peers, ports }
        });
        let rules = rules.collect();
        place(&mut self.policy.chains, rules)
    }
}

/// The place of a value in the list, which it is added to if it is not in it.
fn place<T: PartialEq>(all: &mut Vec<T>, value: T) -> usize {
    match all.iter().position(|it| *it == value) {
        Some(place) => place,
        None => {
            all.push(value);
            all.len() - 1
        }
    }
}
