//! The rules as text, in the syntax of nft(8): a function of what the cluster's other nodes are, of the
//! addresses of pods and services, and of the network policy of this node's pods.
//!
//! A node that does not know the ranges of its cluster has no role of Kubernetes, or has not heard a curator
//! yet. It has no pods and forwards nothing, and there are no addresses of pods that it could
//! recognize: other machines may have those of any range.
//!
//! A verdict of `accept` ends only the chain's own hook, so chains of kube-proxy and of the CNI
//! plugins, which come later, still see the packet; `drop` and `reject` are final. A translation is
//! decided once for each connection: the first chain that translates it wins, also if it translates
//! the address to itself. So the node's own ports are kept from host ports and services by such a
//! translation before theirs.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hearth_api::names::ports;
use hearth_api::ranges::{ClusterRanges, Range, Ranges};
use hearth_host::networking::NodeSubnets;
use hearth_network_policy::node::NodePolicy;
use hearth_network_policy::rules;
use hearth_sys::cidr::Cidr;
use hearth_sys::dhcp6;

use crate::mesh::{BRIDGE, LINK};

/// The name of the table, in family `inet`.
pub(super) const TABLE: &str = "hearth";

/// TCP ports on which this node's own programs listen, at any of its addresses.
pub(crate) const OWN_TCP: [u16; 14] = [
    ports::ETCD_PEER,
    ports::CURATOR,
    ports::NODE_MANAGEMENT,
    ports::DEBUG,
    ports::METRICS,
    ports::UNLOCK,
    ports::KUBERNETES,
    ports::KUBERNETES_BALANCER,
    ports::KUBELET,
    ports::KUBELET_HEALTH,
    ports::PROXY_METRICS,
    ports::PROXY_HEALTH,
    ports::CONTROLLER_MANAGER,
    ports::SCHEDULER,
];

/// The same for UDP.
pub(crate) const OWN_UDP: [u16; 3] = [ports::NODE_MANAGEMENT, ports::MESH, dhcp6::CLIENT_PORT];

/// TCP ports of nodes that pods may connect to: the API server, and the kubelet, from which pods
/// that collect metrics read them. Both authenticate their clients.
const REACHABLE_TCP: [u16; 2] = [ports::KUBERNETES, ports::KUBELET];

/// What the rules depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rules {
    /// The IPv4 addresses of the cluster's nodes.
    pub nodes: BTreeSet<Ipv4Addr>,
    /// Their IPv6 addresses, which pods reach in a dual-stack cluster.
    pub nodes_v6: BTreeSet<Ipv6Addr>,
    /// The addresses of pods and services; `None` while they are not known.
    pub ranges: Option<ClusterRanges>,
    /// The pods of this node.
    pub pods: Pods,
}

/// The pods of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Pods {
    /// There are none, or they have no network yet.
    #[default]
    None,
    /// Those of the built-in network.
    BuiltIn {
        /// Their addresses.
        subnets: NodeSubnets,
        /// Which connections they may have, once this is known.
        policy: Option<Arc<NodePolicy>>,
    },
    /// Those of another network.
    OtherNetwork,
}

/// The interfaces to pods, as a set.
fn pods() -> String {
    format!("{{ \"{BRIDGE}\", \"{LINK}\" }}")
}

impl Rules {
    /// For a cluster whose nodes have these addresses.
    pub(super) fn of(
        addresses: impl IntoIterator<Item = IpAddr>,
        ranges: Option<ClusterRanges>,
        pods: Pods,
    ) -> Self {
        let mut rules = Self {
            ranges,
            pods,
            ..Self::default()
        };
        for address in addresses {
            match address {
                IpAddr::V4(v4) => drop(rules.nodes.insert(v4)),
                // In other clusters pods have no IPv6, and the set would only change for nothing.
                IpAddr::V6(v6) if rules.v6().is_some() => drop(rules.nodes_v6.insert(v6)),
                IpAddr::V6(_) => {}
            }
        }
        rules
    }

    fn v6(&self) -> Option<Ranges<Ipv6Addr>> {
        self.ranges?.v6
    }

    /// A script that makes these the rules of the table, whatever was in it.
    pub(super) fn script(&self) -> String {
        let mut sets = set("own_tcp", "inet_service", OWN_TCP);
        sets += &set("own_udp", "inet_service", OWN_UDP);
        let built_in = match (&self.pods, self.ranges) {
            (Pods::OtherNetwork, _) => String::new(),
            (_, None) => closed(),
            (Pods::None, Some(ranges)) => {
                self.of_built_in_network(&ranges, None, &rules::nothing())
            }
            (Pods::BuiltIn { subnets, policy }, Some(ranges)) => {
                let networks: Vec<Cidr> = subnets.all().map(|subnet| subnet.range).collect();
                let policy = rules::text(&networks, policy.as_deref());
                self.of_built_in_network(&ranges, Some(subnets), &policy)
            }
        };
        let resolver = self.ranges.map(|ranges| {
            let pods = ranges.v4.pods;
            format!(
                "\t\tip daddr {pods} meta l4proto {{ tcp, udp }} th dport 53 goto not_translated\n"
            )
        });
        format!(
            r#"add table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{
{sets}
	# Programs that listen on loopback only are not reached from elsewhere.
	chain to_loopback {{
		type filter hook prerouting priority raw; policy accept;
		iifname != "lo" ip daddr 127.0.0.0/8 counter drop
	}}

	# The node's own ports, and the resolver of its pods, belong to no pod and to no service.
	chain own_ports {{
		fib daddr type != local return
		tcp dport @own_tcp goto not_translated
		udp dport @own_udp goto not_translated
{resolver}	}}
	chain not_translated {{
		meta nfproto ipv4 dnat ip to ip daddr
		meta nfproto ipv6 dnat ip6 to ip6 daddr
	}}
	chain own_ports_from_others {{
		type nat hook prerouting priority dstnat - 10; policy accept;
		jump own_ports
	}}
	chain own_ports_from_here {{
		type nat hook output priority -110; policy accept;
		jump own_ports
	}}
{built_in}}}
"#,
            resolver = resolver.unwrap_or_default()
        )
    }

    /// What holds unless pods have another network. `subnets` are the addresses of this node's pods,
    /// `policy` is the chains of the network policy.
    fn of_built_in_network(
        &self,
        ranges: &ClusterRanges,
        subnets: Option<&NodeSubnets>,
        policy: &str,
    ) -> String {
        let mut sets = set("reachable_tcp", "inet_service", REACHABLE_TCP);
        sets += &set("nodes", "ipv4_addr", &self.nodes);
        if ranges.v6.is_some() {
            sets += &set("nodes6", "ipv6_addr", &self.nodes_v6);
        }
        let v6 = subnets.and_then(|subnets| subnets.v6);
        format!(
            "\n{sets}{arriving}
	# What the cluster's network policies permit to this node's pods.
{policy}{to_nodes}{passing}",
            arriving = arriving(ranges, v6),
            to_nodes = to_nodes(ranges),
            passing = passing(ranges)
        )
    }
}

/// While the addresses of pods are not known: there are none to protect, and nothing is forwarded.
fn closed() -> String {
    r#"
	chain passing {
		type filter hook forward priority filter - 10; policy accept;
		counter drop
	}
"#
    .to_owned()
}

/// Packets that cannot come from where they come from: with the address of a pod, or to a service.
fn arriving(ranges: &ClusterRanges, own_v6: Option<Range<Ipv6Addr>>) -> String {
    let (pods, v4) = (pods(), ranges.v4);
    let from_pods = match (ranges.v6, own_v6) {
        (Some(v6), Some(own)) => from_pods_v6(v6, own),
        // Pods have no IPv6.
        _ => format!("\t\tiifname {pods} meta nfproto ipv6 counter drop\n"),
    };
    let from_others = ranges.v6.map(|v6| {
        let Ranges { pods, services } = v6;
        format!("\t\tip6 saddr {pods} counter drop\n\t\tip6 daddr {services} counter drop\n")
    });
    format!(
        r#"
	# Packets that cannot come from where they come from: with the address of a pod, or to a service.
	chain arriving {{
		type filter hook prerouting priority raw; policy accept;
		iifname "lo" accept
{from_pods}		iifname {pods} accept
		ip saddr {v4_pods} counter drop
		ip daddr {v4_services} counter drop
{from_others}	}}
"#,
        v4_pods = v4.pods,
        v4_services = v4.services,
        from_others = from_others.unwrap_or_default()
    )
}

/// IPv6 has no reverse path filter of the kernel, and pods have link-local addresses of which no policy
/// knows: so pods have only the addresses that they were given, and what finds neighbours by them. Routers
/// are not announced by pods.
fn from_pods_v6(ranges: Ranges<Ipv6Addr>, own: Range<Ipv6Addr>) -> String {
    let pods = ranges.pods;
    format!(
        r#"		iifname "{BRIDGE}" ip6 saddr {own} accept
		iifname "{LINK}" ip6 saddr {pods} accept
		iifname "{BRIDGE}" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} ip6 hoplimit 255 accept
		iifname {{ "{BRIDGE}", "{LINK}" }} meta nfproto ipv6 counter drop
"#
    )
}

/// What pods may reach on nodes.
fn to_nodes(ranges: &ClusterRanges) -> String {
    let (pods, v4) = (pods(), ranges.v4.pods);
    let policy_to_node = rules::TO_NODE;
    let icmp = match ranges.v6 {
        None => "icmp",
        // A word of nft: a node has no file of protocols' names.
        Some(_) => "{ icmp, icmpv6 }",
    };
    format!(
        r#"
	# What pods may reach on nodes.
	chain from_pods {{
		meta l4proto {icmp} accept
		tcp dport @reachable_tcp accept
		tcp dport @own_tcp counter reject with icmpx admin-prohibited
		udp dport @own_udp counter reject with icmpx admin-prohibited
		ct status dnat accept
		counter reject with icmpx admin-prohibited
	}}
	chain to_this_node {{
		type filter hook input priority filter - 10; policy accept;
		iifname != {pods} accept
		ip daddr {v4} meta l4proto {{ tcp, udp }} th dport 53 accept
		jump {policy_to_node}
		ct state established,related accept
		jump from_pods
	}}
"#
    )
}

/// What passes the node, and what it sends itself.
fn passing(ranges: &ClusterRanges) -> String {
    let (pods, policy_passing) = (pods(), rules::PASSING);
    let inside = |ip: &str, pods: &dyn std::fmt::Display, services: &dyn std::fmt::Display| {
        format!("{ip} daddr {{ {pods}, {services} }} counter reject with icmpx admin-prohibited\n")
    };
    let v4 = inside("ip", &ranges.v4.pods, &ranges.v4.services);
    let v6 = ranges.v6.map(|v6| inside("ip6", &v6.pods, &v6.services));
    let both: Vec<String> = [Some(v4), v6].into_iter().flatten().collect();
    let refused = |before: &str| {
        let lines = both.iter().map(|inside| format!("\t\t{before}{inside}"));
        lines.collect::<String>()
    };
    let (passing, leaving) = (refused(&format!("oifname != {pods} ")), refused(""));
    let mut lost = format!("\t\tip daddr {} counter drop\n", ranges.v4.pods);
    let mut to_nodes = format!("\t\tiifname \"{BRIDGE}\" ip daddr @nodes jump from_pods\n");
    let out = format!("oifname != {{ \"lo\", \"{BRIDGE}\", \"{LINK}\" }} masquerade");
    let mut masqueraded = format!("\t\tip saddr {} {out}\n", ranges.v4.pods);
    if let Some(v6) = ranges.v6 {
        to_nodes += &format!("\t\tiifname \"{BRIDGE}\" ip6 daddr @nodes6 jump from_pods\n");
        masqueraded += &format!("\t\tip6 saddr {} {out}\n", v6.pods);
        lost += &format!("\t\tip6 daddr {} counter drop\n", v6.pods);
    }
    format!(
        r#"
	# What passes the node: packets between pods, from pods to others, and from others to pods
	# through host ports and services. Packets to pods and services leave through the mesh or not at
	# all.
	chain passing {{
		type filter hook forward priority filter - 10; policy accept;
{passing}		jump {policy_passing}
		ct state established,related accept
		oifname {pods} iifname {pods} accept
		oifname {pods} ct status dnat accept
		oifname {pods} counter reject with icmpx admin-prohibited
{to_nodes}		iifname "{BRIDGE}" accept
		ct status dnat accept
		counter drop
	}}
	chain leaving_from_here {{
		type filter hook output priority filter - 10; policy accept;
		oifname {{ "lo", "{BRIDGE}", "{LINK}" }} accept
		# Packets to services have the way of before their translation here. The next chain sees the one after it.
		ct status dnat accept
{leaving}	}}
	chain leaving {{
		type filter hook postrouting priority filter - 10; policy accept;
		oifname {{ "lo", "{BRIDGE}", "{LINK}" }} accept
{lost}	}}

	# Other machines have no route to pods.
	chain to_other_machines {{
		type nat hook postrouting priority srcnat; policy accept;
{masqueraded}	}}
"#
    )
}

fn set(name: &str, of: &str, elements: impl IntoIterator<Item = impl ToString>) -> String {
    let elements: Vec<_> = elements.into_iter().map(|e| e.to_string()).collect();
    let mut text = format!("\tset {name} {{ type {of}; ");
    if !elements.is_empty() {
        // Writing to a string does not fail.
        let _ = write!(text, "elements = {{ {} }}; ", elements.join(", "));
    }
    text + "}\n"
}
