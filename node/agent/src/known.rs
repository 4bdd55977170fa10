//! What this node knows of all nodes, and what follows from it: where each one
//! stands, and which of them can be asked for the cluster.
//!
//! There are four sources, and none of them alone is enough:
//!
//! - the directory that was saved on the ESP, which is there with the first
//!   instruction, and may be old;
//! - the curators' nodes, which are complete, but only there while consensus
//!   is, and tell addresses as the nodes last could report them;
//! - the nodes' own signed words, exchanged among them, which need no quorum;
//! - this node's own address, of which it knows best.
//!
//! Which nodes there are is the curators' to say, and the saved directory's
//! until they have said it once. Of two addresses of one node the one with the
//! higher counter is true; a saved one has none and is the last resort.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::names::PORT_CURATOR;
use hearth_api::v1::cluster_directory::{self, Address};
use hearth_api::v1::{ClusterDirectory, Label, Node, NodeRoles, NodeState};
use hearth_host::networking::Networking;

use super::learned::{Learned, Located};
use super::names::Addresses;

/// What curators say of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// In its life.
    pub state: NodeState,
    /// Which it holds.
    pub roles: NodeRoles,
    /// Where it was when it last could report.
    pub located: Option<Located>,
    /// Of its curator, 0 for the default one.
    pub curator_port: u32,
    /// As its operators have set them.
    pub labels: Vec<Label>,
    /// Its part of the mesh, once it has one.
    pub networking: Option<Networking>,
}

impl From<&Node> for Seen {
    fn from(node: &Node) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let located = status.external_address.parse().ok().map(|host| Located {
            host,
            counter: status.address_counter,
        });
        let networking = node.networking.as_ref().map(Networking::try_from);
        let networking = networking.transpose().unwrap_or_else(|error| {
            tracing::warn!(id = node.id, %error, "a node without a usable part of the mesh");
            None
        });
        let usual = status.curator_port == u32::from(PORT_CURATOR);
        Self {
            state: node.state(),
            roles: node.roles.unwrap_or_default(),
            located,
            curator_port: if usual { 0 } else { status.curator_port },
            labels: node.labels.clone(),
            networking,
        }
    }
}

/// The cluster as the curators have described it completely.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// The DNS name under which nodes have names.
    pub domain: String,
    /// All of them; those that are gone are forgotten.
    pub nodes: BTreeMap<NodeId, Seen>,
}

impl View {
    /// Follows an event of theirs.
    pub fn apply(&mut self, nodes: &[Node], tombstones: &[String]) {
        for node in nodes {
            match node.id.parse() {
                Ok(id) => drop(self.nodes.insert(id, node.into())),
                Err(error) => tracing::warn!(id = node.id, %error, "a node without a usable ID"),
            }
        }
        for id in tombstones.iter().filter_map(|id| id.parse().ok()) {
            self.nodes.remove(&id);
        }
    }

    /// Whether this node is one of the cluster, with all rights of one.
    pub fn has(&self, id: &NodeId) -> bool {
        self.nodes
            .get(id)
            .is_some_and(|node| node.state == NodeState::Up)
    }
}

/// All sources together.
#[derive(Clone)]
pub struct Known {
    /// This node.
    pub own: NodeId,
    /// `None` until the network has one.
    pub own_address: Option<IpAddr>,
    /// As the ESP has it: what is known before anything is heard.
    pub saved: ClusterDirectory,
    /// From the nodes themselves.
    pub learned: Learned,
    /// `None` until curators have described it.
    pub view: Option<Arc<View>>,
}

impl Known {
    /// Where each node stands.
    pub fn addresses(&self) -> Addresses {
        let mut addresses: Addresses = match &self.view {
            Some(view) => {
                let ids = view.nodes.keys();
                ids.filter_map(|id| Some((*id, self.address(id)?)))
                    .collect()
            }
            None => {
                let saved = self.saved.nodes.iter();
                let saved = saved.filter_map(|node| node.id.parse().ok());
                saved
                    .chain(self.learned.keys().copied())
                    .filter_map(|id| Some((id, self.address(&id)?)))
                    .collect()
            }
        };
        if let Some(own) = self.own_address {
            addresses.insert(self.own, own);
        }
        addresses
    }

    fn address(&self, id: &NodeId) -> Option<IpAddr> {
        if *id == self.own && self.own_address.is_some() {
            return self.own_address;
        }
        let seen = self.view.as_ref().and_then(|view| view.nodes.get(id));
        let seen = seen.and_then(|seen| seen.located);
        let newest = [self.learned.get(id).copied(), seen];
        // Of equals the last: what the curators were told since.
        let newest = newest.into_iter().flatten();
        let newest = newest.max_by_key(|located| located.counter);
        let saved = || {
            let id = id.to_string();
            let node = self.saved.nodes.iter().find(|node| node.id == id)?;
            let mut hosts = node.addresses.iter();
            hosts.find_map(|address| address.host.parse().ok())
        };
        newest.map(|located| located.host).or_else(saved)
    }

    /// Those that can be asked for the cluster: its consensus members. Empty
    /// if no such node is known with its address.
    pub fn directory(&self) -> ClusterDirectory {
        let nodes = match &self.view {
            Some(view) => {
                let members = view
                    .nodes
                    .iter()
                    .filter(|(_, node)| node.roles.consensus_member.is_some());
                let entry = |(id, node): (&NodeId, &Seen)| {
                    let host = self.address(id)?;
                    Some(entry(id.to_string(), host, node.curator_port, node.roles))
                };
                members.filter_map(entry).collect()
            }
            None => self
                .saved
                .nodes
                .iter()
                .map(|node| self.moved(node))
                .collect(),
        };
        ClusterDirectory { nodes }
    }

    /// A saved entry, with what was learned of the node since.
    fn moved(&self, saved: &cluster_directory::Node) -> cluster_directory::Node {
        let id = saved.id.parse::<NodeId>().ok();
        let is_news = |id: &NodeId| {
            self.learned.contains_key(id) || (*id == self.own && self.own_address.is_some())
        };
        match id.filter(is_news).and_then(|id| self.address(&id)) {
            Some(host) => {
                let port = saved.addresses.first().map_or(0, |address| address.port);
                let roles = saved.roles.unwrap_or_default();
                entry(saved.id.clone(), host, port, roles)
            }
            None => saved.clone(),
        }
    }
}

fn entry(id: String, host: IpAddr, port: u32, roles: NodeRoles) -> cluster_directory::Node {
    cluster_directory::Node {
        id,
        addresses: vec![Address {
            host: host.to_string(),
            port,
        }],
        roles: Some(roles),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::NodeStatus;
    use hearth_api::v1::node_roles::ConsensusMember;

    use super::*;

    fn id(digit: char) -> NodeId {
        format!("hearth-{}", String::from(digit).repeat(32))
            .parse()
            .unwrap()
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn member() -> NodeRoles {
        NodeRoles {
            consensus_member: Some(ConsensusMember::default()),
            ..NodeRoles::default()
        }
    }

    fn node(digit: char, address: &str, counter: u64, roles: NodeRoles) -> Node {
        Node {
            id: id(digit).to_string(),
            state: NodeState::Up.into(),
            status: Some(NodeStatus {
                external_address: address.into(),
                address_counter: counter,
                curator_port: 7835,
                ..NodeStatus::default()
            }),
            roles: Some(roles),
            ..Node::default()
        }
    }

    /// Node a, which has saved itself, b and c.
    fn booted() -> Known {
        let saved = [('a', 1), ('b', 2), ('c', 3)];
        let saved = saved.map(|(n, last)| entry(id(n).to_string(), ip(last), 0, member()));
        Known {
            own: id('a'),
            own_address: None,
            saved: ClusterDirectory {
                nodes: saved.to_vec(),
            },
            learned: Learned::default(),
            view: None,
        }
    }

    fn learned(words: &[(char, u8, u64)]) -> Learned {
        let located = |(n, last, counter): &(char, u8, u64)| {
            let host = ip(*last);
            let counter = *counter;
            (id(*n), Located { host, counter })
        };
        Arc::new(words.iter().map(located).collect())
    }

    fn viewed(known: &Known, nodes: &[Node]) -> Known {
        let mut view = View::default();
        view.apply(nodes, &[]);
        Known {
            view: Some(Arc::new(view)),
            ..known.clone()
        }
    }

    fn hosts(known: &Known) -> Vec<String> {
        let nodes = known.directory().nodes.into_iter();
        let addresses = nodes.flat_map(|node| node.addresses);
        addresses.map(|address| address.host).collect()
    }

    #[test]
    fn a_boot_knows_what_was_saved_and_then_better() {
        let mut known = booted();
        let all = |last: [u8; 3]| {
            Addresses::from([('a', 0), ('b', 1), ('c', 2)].map(|(n, i)| (id(n), ip(last[i]))))
        };
        assert_eq!(known.addresses(), all([1, 2, 3]));
        known.own_address = Some(ip(11));
        assert_eq!(known.addresses(), all([11, 2, 3]));
        known.learned = learned(&[('b', 12, 1)]);
        assert_eq!(known.addresses(), all([11, 12, 3]));
        assert_eq!(hosts(&known), ["192.0.2.11", "192.0.2.12", "192.0.2.3"]);
    }

    #[test]
    fn of_two_words_the_later_one_counts_whichever_way_it_came() {
        let mut known = booted();
        known.own_address = Some(ip(1));
        known.learned = learned(&[('b', 12, 5), ('c', 13, 5)]);
        let known = viewed(
            &known,
            &[
                node('a', "192.0.2.99", 9, member()),
                // Reported before it moved, and after.
                node('b', "192.0.2.22", 4, member()),
                node('c', "192.0.2.23", 6, member()),
            ],
        );
        assert_eq!(hosts(&known), ["192.0.2.1", "192.0.2.12", "192.0.2.23"]);
    }

    #[test]
    fn a_member_that_has_not_reported_stays_where_it_was_saved() {
        let nodes = ['a', 'b'].map(|n| node(n, "", 0, member()));
        let known = viewed(&booted(), &nodes);
        assert_eq!(hosts(&known), ["192.0.2.1", "192.0.2.2"]);
        let addresses = known.addresses();
        assert!(!addresses.contains_key(&id('c')), "it is gone");
    }

    #[test]
    fn the_directory_is_of_members_with_an_address() {
        let nodes = [
            node('b', "192.0.2.2", 1, member()),
            node('d', "192.0.2.4", 1, NodeRoles::default()),
            node('e', "", 0, member()),
        ];
        let known = viewed(&booted(), &nodes);
        assert_eq!(hosts(&known), ["192.0.2.2"]);
        assert_eq!(known.directory().nodes[0].addresses[0].port, 0);
        assert_eq!(known.addresses().len(), 2);
    }

    #[test]
    fn only_nodes_that_are_up_belong_to_the_cluster() {
        let mut view = View::default();
        let up = node('b', "", 0, member());
        let out = Node {
            state: NodeState::Decommissioned.into(),
            ..node('c', "", 0, member())
        };
        view.apply(&[up, out], &[]);
        assert!(view.has(&id('b')));
        assert!(!view.has(&id('c')));
        view.apply(&[], &[id('b').to_string()]);
        assert!(!view.has(&id('b')));
    }
}
