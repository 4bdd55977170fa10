//! The rules as text, in the syntax of nft(8): a function of what the cluster's other nodes are, and of
//! the network policy of this node's pods.
//!
//! A verdict of `accept` ends only the chain's own hook, so chains of kube-proxy and of the CNI
//! plugins, which come later, still see the packet; `drop` and `reject` are final. A translation is
//! decided once for each connection: the first chain that translates it wins, also if it translates
//! the address to itself. So the node's own ports are kept from host ports and services by such a
//! translation before theirs.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use hearth_api::names::{POD_NETWORK, SERVICE_NETWORK, ports};
use hearth_network_policy::node::{Network, NodePolicy};
use hearth_network_policy::rules;

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
pub(crate) const OWN_UDP: [u16; 2] = [ports::NODE_MANAGEMENT, ports::MESH];

/// TCP ports of nodes that pods may connect to: the API server, and the kubelet, from which pods
/// that collect metrics read them. Both authenticate their clients.
const REACHABLE_TCP: [u16; 2] = [ports::KUBERNETES, ports::KUBELET];

/// What the rules depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rules {
    /// The IPv4 addresses of the cluster's nodes. Pods have no others.
    pub nodes: BTreeSet<Ipv4Addr>,
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
        network: Network,
        /// Which connections they may have, once this is known.
        policy: Option<Arc<NodePolicy>>,
    },
    /// Those of another network.
    OtherNetwork,
}

impl Rules {
    /// For a cluster whose nodes have these addresses.
    pub(super) fn of(addresses: impl IntoIterator<Item = IpAddr>, pods: Pods) -> Self {
        let v4 = |address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        };
        Self {
            nodes: addresses.into_iter().filter_map(v4).collect(),
            pods,
        }
    }

    /// A script that makes these the rules of the table, whatever was in it.
    pub(super) fn script(&self) -> String {
        let mut sets = set("own_tcp", "inet_service", OWN_TCP);
        sets += &set("own_udp", "inet_service", OWN_UDP);
        let built_in = match &self.pods {
            Pods::None => Some(rules::nothing()),
            Pods::BuiltIn { network, policy } => Some(rules::text(*network, policy.as_deref())),
            Pods::OtherNetwork => None,
        };
        let built_in = built_in.map(|policy| self.of_built_in_network(&policy));
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
		ip daddr {POD_NETWORK} meta l4proto {{ tcp, udp }} th dport 53 goto not_translated
	}}
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
            built_in = built_in.unwrap_or_default()
        )
    }

    /// What holds unless pods have another network. `policy` is the chains of the network policy.
    fn of_built_in_network(&self, policy: &str) -> String {
        let mut sets = set("reachable_tcp", "inet_service", REACHABLE_TCP);
        sets += &set("nodes", "ipv4_addr", &self.nodes);
        let (policy_passing, policy_to_node) = (rules::PASSING, rules::TO_NODE);
        let pods = format!("{{ \"{BRIDGE}\", \"{LINK}\" }}");
        let inside = format!("{{ {POD_NETWORK}, {SERVICE_NETWORK} }}");
        format!(
            r#"
{sets}
	# Packets that cannot come from where they come from: with the address of a pod, or to a service.
	# Pods have no IPv6.
	chain arriving {{
		type filter hook prerouting priority raw; policy accept;
		iifname "lo" accept
		iifname {pods} meta nfproto ipv6 counter drop
		iifname {pods} accept
		ip saddr {POD_NETWORK} counter drop
		ip daddr {SERVICE_NETWORK} counter drop
	}}

	# What the cluster's network policies permit to this node's pods.
{policy}
	# What pods may reach on nodes.
	chain from_pods {{
		meta l4proto icmp accept
		tcp dport @reachable_tcp accept
		tcp dport @own_tcp counter reject with icmpx admin-prohibited
		udp dport @own_udp counter reject with icmpx admin-prohibited
		ct status dnat accept
		counter reject with icmpx admin-prohibited
	}}
	chain to_this_node {{
		type filter hook input priority filter - 10; policy accept;
		iifname != {pods} accept
		ip daddr {POD_NETWORK} meta l4proto {{ tcp, udp }} th dport 53 accept
		jump {policy_to_node}
		ct state established,related accept
		jump from_pods
	}}

	# What passes the node: packets between pods, from pods to others, and from others to pods
	# through host ports and services. Packets to pods and services leave through the mesh or not at
	# all.
	chain passing {{
		type filter hook forward priority filter - 10; policy accept;
		oifname != {pods} ip daddr {inside} counter reject with icmpx admin-prohibited
		jump {policy_passing}
		ct state established,related accept
		oifname {pods} iifname {pods} accept
		oifname {pods} ct status dnat accept
		oifname {pods} counter reject with icmpx admin-prohibited
		iifname "{BRIDGE}" ip daddr @nodes jump from_pods
		iifname "{BRIDGE}" accept
		ct status dnat accept
		counter drop
	}}
	chain leaving_from_here {{
		type filter hook output priority filter - 10; policy accept;
		oifname {{ "lo", "{BRIDGE}", "{LINK}" }} accept
		ip daddr {inside} counter reject with icmpx admin-prohibited
	}}

	# Other machines have no route to pods.
	chain to_other_machines {{
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr {POD_NETWORK} oifname != {{ "lo", "{BRIDGE}", "{LINK}" }} masquerade
	}}
"#
        )
    }
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
