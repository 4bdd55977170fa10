//! The hosts file: names of all nodes, for bundled programs.
//!
//! The node's own binary resolves no names. etcd and containers do, by `/etc/hosts`, which lists
//! each node under its ID and under its ID in the cluster's domain. This module only generates and
//! parses the text.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use hearth_api::identity::NodeId;

/// Addresses of nodes; nodes without a known address are not included.
pub(crate) type Addresses = BTreeMap<NodeId, IpAddr>;

/// The hosts file for these nodes. Deterministic, so that an unchanged file is not written again.
/// Until the cluster's domain is known, nodes only have their ID as a name.
pub(crate) fn hosts(addresses: &Addresses, domain: Option<&str>) -> String {
    let mut text = String::from("127.0.0.1 localhost\n::1 localhost\n");
    for (node, address) in addresses {
        // Writing to a string cannot fail.
        let _ = match domain {
            Some(domain) => writeln!(text, "{address} {node}.{domain} {node}"),
            None => writeln!(text, "{address} {node}"),
        };
    }
    text
}

/// Looks up a name in a hosts file, to verify that the file just written works for its readers.
pub(crate) fn resolve(hosts: &str, name: &str) -> Vec<IpAddr> {
    let entries = hosts
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default());
    let matching = entries.filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words
            .any(|word| word.eq_ignore_ascii_case(name))
            .then_some(address)
    });
    matching.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_resolves_by_both_names() {
        let node: NodeId = format!("hearth-{}", "0a".repeat(16)).parse().unwrap();
        let address: IpAddr = "192.0.2.7".parse().unwrap();
        let addresses = Addresses::from([(node, address)]);
        let alone = hosts(&addresses, None);
        assert_eq!(resolve(&alone, &node.to_string()), [address]);
        let text = hosts(&addresses, Some("cluster.internal"));
        assert_eq!(resolve(&text, &node.to_string()), [address]);
        assert_eq!(
            resolve(&text, &format!("{node}.cluster.internal")),
            [address]
        );
        assert_eq!(resolve(&text, "localhost").len(), 2);
        assert!(resolve(&text, "nobody").is_empty());
    }

    #[test]
    fn comments_and_nonsense_resolve_to_nothing() {
        assert!(resolve("# 1.2.3.4 a\nnot-an-address a\n\n1.2.3.4 # a\n", "a").is_empty());
    }
}
