//! What a node enforces, in the syntax of nft(8): sets and chains for a table of family `inet`.
//!
//! Other chains jump to [`PASSING`] with packets that the node forwards, and to [`TO_NODE`] with those
//! from its pods to itself. Both return with what is permitted, and refuse the rest: a TCP connection
//! that exists by a reset, which ends it at once; everything else by ICMP. The kernel sends a reset
//! between two pods of a bridge as it is, without the translation of a service, so that who connects to
//! the service does not take it for an answer.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::node::{Isolation, Network, NodePolicy, Peers, Ports, Rule};
use super::objects::Protocol;

/// The chain for packets that pass the node.
pub const PASSING: &str = "policy_passing";
/// The chain for packets from pods to their node.
pub const TO_NODE: &str = "policy_to_node";

/// The same two chains without a rule.
pub fn nothing() -> String {
    format!("\tchain {PASSING} {{\n\t}}\n\tchain {TO_NODE} {{\n\t}}\n")
}

/// Sets and chains of a node whose pods have addresses in `network`. While the policy is not known,
/// its pods have no network.
pub fn text(network: Network, policy: Option<&NodePolicy>) -> String {
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
        let elements = listed("elements = ", set.iter().map(ToString::to_string), "; ");
        // Writing to a string does not fail.
        let _ = writeln!(text, "\tset policy_{place} {{ type ipv4_addr; {elements}}}");
    }
    text += "\tchain policy_refused {
		meta l4proto tcp ct state established counter reject with tcp reset
		counter reject with icmpx admin-prohibited
	}
";
    text += &INGRESS.chains(policy);
    text += &EGRESS.chains(policy);
    let selves = policy.pods.keys().map(|pod| format!("{pod} . {pod}"));
    let selves = listed("\t\tip saddr . ip daddr ", selves, " return\n");
    let _ = write!(
        text,
        "\tchain {PASSING} {{
		ct direction reply return
		ct state related return
{selves}\t\tip saddr {network} jump policy_egress
		ip daddr {network} jump policy_ingress
	}}
	chain {TO_NODE} {{
		ct direction reply return
		ct state related return
		ip saddr {network} jump policy_egress
	}}
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
            for line in chain.iter().filter_map(|rule| self.permitted(rule)) {
                let _ = writeln!(text, "\t\t{line} return");
            }
            text += "\t\tgoto policy_refused\n\t}\n";
        }
        let pods = policy
            .pods
            .iter()
            .map(|(pod, isolation)| match (self.chain)(isolation) {
                Some(chain) => format!("{pod} : goto policy_{name}_{chain}"),
                None => format!("{pod} : return"),
            });
        let pods = listed(&format!("\t\tip {own} vmap "), pods, "\n");
        // Pods that are not known yet are not told that they are refused: they try again.
        let _ = writeln!(
            text,
            "\tchain policy_{name} {{\n{pods}\t\tcounter drop\n\t}}"
        );
        text
    }

    /// The conditions of a rule; `None` if nothing can meet them.
    fn permitted(&self, rule: &Rule) -> Option<String> {
        let peer = self.peer;
        let mut conditions = match &rule.peers {
            // Pods have no other addresses.
            Peers::Any => "meta nfproto ipv4".to_owned(),
            Peers::Set(set) => format!("ip {peer} @policy_{set}"),
            Peers::Block(block) => {
                let except = block.except.iter().map(|it| format!(" ip {peer} != {it}"));
                format!("ip {peer} {}{}", block.network, except.collect::<String>())
            }
        };
        if let Some(ports) = &rule.ports {
            let protocol = match ports.protocol {
                Protocol::Tcp => "tcp",
                Protocol::Udp => "udp",
                Protocol::Sctp => "sctp",
            };
            let _ = write!(conditions, " meta l4proto {protocol}");
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
                conditions += &listed(" th dport ", ranges, "");
            }
        }
        Some(conditions)
    }
}
