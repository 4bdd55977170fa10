//! What a node enforces, in the syntax of nft(8): sets and chains for a table of family `inet`.
//!
//! Other chains jump to [`PASSING`] with packets that the node forwards, and to [`TO_NODE`] with those
//! from its pods to itself. Both return with what is permitted, and refuse the rest: a TCP connection
//! that exists by a reset, which ends it at once; everything else by ICMP. The kernel sends a reset
//! between two pods of a bridge as it is, without the translation of a service, so that who connects to
//! the service does not take it for an answer.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;

use hearth_sys::cidr::Cidr;

use super::node::{Isolation, NodePolicy, Peers, Ports, Rule};
use super::objects::Protocol;

/// The chain for packets that pass the node.
pub const PASSING: &str = "policy_passing";
/// The chain for packets from pods to their node.
pub const TO_NODE: &str = "policy_to_node";

/// The same two chains without a rule.
pub fn nothing() -> String {
    format!("\tchain {PASSING} {{\n\t}}\n\tchain {TO_NODE} {{\n\t}}\n")
}

/// How rules name what belongs to an address family.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Family {
    fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The protocol, before the name of a field.
    const fn ip(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// The type of addresses.
    const fn addresses(self) -> &'static str {
        match self {
            Self::V4 => "ipv4_addr",
            Self::V6 => "ipv6_addr",
        }
    }

    /// Beginning of the names of sets.
    const fn set(self) -> &'static str {
        match self {
            Self::V4 => "policy_",
            Self::V6 => "policy6_",
        }
    }

    /// The addresses of this family.
    fn among<'a>(
        self,
        all: impl IntoIterator<Item = &'a IpAddr>,
    ) -> impl Iterator<Item = &'a IpAddr> {
        let all = all.into_iter();
        all.filter(move |address| Self::of(**address) == self)
    }
}

/// Sets and chains of a node whose pods have addresses in `networks`. While the policy is not known,
/// its pods have no network.
pub fn text(networks: &[Cidr], policy: Option<&NodePolicy>) -> String {
    let closed = NodePolicy {
        enforced: true,
        ..NodePolicy::default()
    };
    let policy = policy.unwrap_or(&closed);
    if !policy.enforced {
        return nothing();
    }
    let mut text = String::new();
    for (place, set) in policy.sets.iter().enumerate() {
        for family in FAMILIES {
            let elements = family.among(set).map(ToString::to_string);
            let elements = listed("elements = ", elements, "; ");
            let (name, of) = (family.set(), family.addresses());
            if family == Family::V4 || !elements.is_empty() {
                // Writing to a string does not fail.
                let _ = writeln!(text, "\tset {name}{place} {{ type {of}; {elements}}}");
            }
        }
    }
    text += "\tchain policy_refused {
		meta l4proto tcp ct state established counter reject with tcp reset
		counter reject with icmpx admin-prohibited
	}
";
    text += &INGRESS.chains(policy);
    text += &EGRESS.chains(policy);
    let mut selves = String::new();
    for family in FAMILIES {
        let (pods, ip) = (family.among(policy.pods.keys()), family.ip());
        let pods = pods.map(|pod| format!("{pod} . {pod}"));
        selves += &listed(&format!("\t\t{ip} saddr . {ip} daddr "), pods, " return\n");
    }
    let (mut from_pods, mut to_pods, mut neighbours) = (String::new(), String::new(), "");
    for network in networks {
        let family = Family::of(network.address());
        let ip = family.ip();
        let _ = writeln!(from_pods, "\t\t{ip} saddr {network} jump policy_egress");
        let _ = writeln!(to_pods, "\t\t{ip} daddr {network} jump policy_ingress");
        if family == Family::V6 {
            // What ARP is for IPv4. Without it, pods would not find what they may connect to.
            neighbours = "\t\ticmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } return\n";
        }
    }
    let _ = write!(
        text,
        "\tchain {PASSING} {{
		ct direction reply return
		ct state related return
{neighbours}{selves}{from_pods}{to_pods}\t}}
	chain {TO_NODE} {{
		ct direction reply return
		ct state related return
{neighbours}{from_pods}\t}}
"
    );
    text
}

/// Elements in braces between two texts; nothing if there are none.
fn listed(before: &str, elements: impl Iterator<Item = String>, after: &str) -> String {
    let all: Vec<String> = elements.collect();
    match &all[..] {
        [] => String::new(),
        all => format!("{before}{{ {} }}{after}", all.join(", ")),
    }
}

/// How a direction is written.
struct Way {
    name: &'static str,
    /// The address of the pod.
    own: &'static str,
    /// The address of the other end.
    peer: &'static str,
    chain: fn(&Isolation) -> Option<usize>,
}

const INGRESS: Way = Way {
    name: "ingress",
    own: "daddr",
    peer: "saddr",
    chain: |pod| pod.ingress,
};
const EGRESS: Way = Way {
    name: "egress",
    own: "saddr",
    peer: "daddr",
    chain: |pod| pod.egress,
};

impl Way {
    /// The chains of isolated pods, and the one that leads to them.
    fn chains(&self, policy: &NodePolicy) -> String {
        let Self { name, own, .. } = self;
        let mut text = String::new();
        let used: BTreeSet<usize> = policy.pods.values().filter_map(self.chain).collect();
        for (place, chain) in policy.chains.iter().enumerate() {
            if !used.contains(&place) {
                continue;
            }
            let _ = writeln!(text, "\tchain policy_{name}_{place} {{");
            for rule in chain {
                for line in self.permitted(rule, policy) {
                    let _ = writeln!(text, "\t\t{line}return");
                }
            }
            text += "\t\tgoto policy_refused\n\t}\n";
        }
        let mut pods = String::new();
        for family in FAMILIES {
            let known = policy.pods.iter();
            let known = known.filter(|(pod, _)| Family::of(**pod) == family);
            let known = known.map(|(pod, isolation)| match (self.chain)(isolation) {
                Some(chain) => format!("{pod} : goto policy_{name}_{chain}"),
                None => format!("{pod} : return"),
            });
            let ip = family.ip();
            pods += &listed(&format!("\t\t{ip} {own} vmap "), known, "\n");
        }
        // Pods that are not known yet are not told that they are refused: they try again.
        let _ = writeln!(
            text,
            "\tchain policy_{name} {{\n{pods}\t\tcounter drop\n\t}}"
        );
        text
    }

    /// The conditions of a rule, each followed by a blank: for each family that the other end can have.
    /// None if nothing can meet them.
    fn permitted(&self, rule: &Rule, policy: &NodePolicy) -> Vec<String> {
        let Some(ports) = ports(rule) else {
            return Vec::new();
        };
        let peer = self.peer;
        let peers = match &rule.peers {
            Peers::Any => vec![String::new()],
            Peers::Set(set) => {
                let members = policy.sets.get(*set).into_iter().flatten();
                let has = |family: &Family| family.among(members.clone()).next().is_some();
                let families = FAMILIES.into_iter().filter(has);
                families
                    .map(|family| format!("{} {peer} @{}{set} ", family.ip(), family.set()))
                    .collect()
            }
            Peers::Block(block) => {
                let ip = Family::of(block.network.first()).ip();
                let except = block
                    .except
                    .iter()
                    .map(|it| format!("{ip} {peer} != {it} "));
                let except = except.collect::<String>();
                vec![format!("{ip} {peer} {} {except}", block.network)]
            }
        };
        let with_ports = peers.into_iter().map(|peers| peers + &ports);
        with_ports.collect()
    }
}

/// The condition about ports, followed by a blank; `None` if nothing can meet it.
fn ports(rule: &Rule) -> Option<String> {
    let Some(ports) = &rule.ports else {
        return Some(String::new());
    };
    let protocol = match ports.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
    };
    let mut condition = format!("meta l4proto {protocol} ");
    if ports.ranges.is_empty() {
        return None;
    }
    if ports.ranges != [Ports::ALL] {
        let ranges = ports
            .ranges
            .iter()
            .map(|(first, last)| match first == last {
                true => first.to_string(),
                false => format!("{first}-{last}"),
            });
        condition += &listed("th dport ", ranges, " ");
    }
    Some(condition)
}
