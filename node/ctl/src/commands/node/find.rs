//! Finds the node that an argument names.

use hearth_api::client::Channel;
use hearth_api::v1::{Label, Node, NodeState};

use super::all;
use crate::args::Global;
use crate::failure::{Failure, Kind};

/// The label whose value can name a node. It is ignored for a node that is NEW: a machine chooses
/// its labels when it registers, so it could take the hostname of another node, or one that looks
/// like the prefix of another node's ID.
const HOSTNAME: &str = "hostname";

/// Finds the one node that `wanted` names, or fails.
pub(super) async fn node(
    global: &Global,
    channel: &Channel,
    wanted: &str,
) -> Result<Node, Failure> {
    let mut nodes = all(global, channel).await?;
    let failed = || Failure::new(Kind::Cluster, format!("find node {wanted:?}"));
    match &candidates(&nodes, wanted)[..] {
        [one] => Ok(nodes.swap_remove(*one)),
        [] => Err(failed()
            .because("no node has this ID, public key or hostname")
            .advise("`hearthctl node list` shows all nodes")),
        several => {
            let ids: Vec<&str> = several.iter().map(|which| &nodes[*which].id[..]).collect();
            Err(failed()
                .because(format!("it matches several nodes: {}", ids.join(", ")))
                .advise("use a longer prefix of the ID"))
        }
    }
}

/// Indices of the nodes that `wanted` names. An exact ID or public key has precedence over a
/// hostname, and a hostname over a prefix of an ID.
fn candidates(nodes: &[Node], wanted: &str) -> Vec<usize> {
    let those = |is: &dyn Fn(&Node) -> bool| -> Vec<usize> {
        (0..nodes.len())
            .filter(|which| is(&nodes[*which]))
            .collect()
    };
    let digits = wanted.strip_prefix("hearth-").unwrap_or(wanted);
    let exact = those(&|node| node.id == wanted || hex::encode(&node.public_key) == wanted);
    let named = || {
        those(&|node| {
            let mut labels = node.labels.iter();
            let is_it = |label: &Label| label.key == HOSTNAME && label.value == wanted;
            node.state() != NodeState::New && labels.any(is_it)
        })
    };
    let begins = || {
        those(&|node| {
            let id = node.id.strip_prefix("hearth-").unwrap_or(&node.id);
            !digits.is_empty() && id.starts_with(digits)
        })
    };
    let ways: [&dyn Fn() -> Vec<usize>; 3] = [&|| exact.clone(), &named, &begins];
    let found = ways.iter().map(|way| way()).find(|found| !found.is_empty());
    found.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: &str, key: u8, hostname: Option<&str>) -> Node {
        Node {
            id: id.into(),
            public_key: vec![key; 32],
            labels: hostname
                .map(|name| Label {
                    key: HOSTNAME.into(),
                    value: name.into(),
                })
                .into_iter()
                .collect(),
            ..Node::default()
        }
    }

    #[test]
    fn nodes_have_several_names() {
        let nodes = [
            node("hearth-a1b2", 1, None),
            node("hearth-a1c3", 2, Some("a1b2")),
            node("hearth-a1", 3, Some("db")),
            node("hearth-ffff", 4, Some("db")),
        ];
        let key = "02".repeat(32);
        for (wanted, found) in [
            ("hearth-a1b2", &[0][..]),
            ("hearth-a1b", &[0]),
            ("a1c", &[1]),
            (&key, &[1]),
            // A hostname has precedence over a prefix of an ID, and a full ID over those that it
            // is a prefix of.
            ("a1b2", &[1]),
            ("hearth-a1", &[2]),
            ("a1", &[0, 1, 2]),
            ("db", &[2, 3]),
            ("f", &[3]),
            ("hearth-", &[]),
            ("", &[]),
            ("h", &[]),
            ("b2", &[]),
        ] {
            assert_eq!(candidates(&nodes, wanted), found, "{wanted:?}");
        }
    }

    #[test]
    fn who_only_registers_takes_no_names() {
        let mut guest = node("hearth-c3", 3, Some("db"));
        guest.set_state(NodeState::New);
        let nodes = [node("hearth-db17", 1, None), guest.clone()];
        assert_eq!(candidates(&nodes, "db"), [0]);
        assert_eq!(candidates(&nodes, "c3"), [1]);
        let nodes = [node("hearth-a1", 1, Some("db")), guest];
        assert_eq!(candidates(&nodes, "db"), [0]);
    }
}
