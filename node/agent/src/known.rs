//! Everything this node knows about the nodes of its cluster, and what follows from it: the address
//! of each, and the directory of the consensus members.
//!
//! There are four sources, and none is sufficient alone:
//!
//! - the directory saved on the ESP: available immediately after boot, but may be old;
//! - the curators' node records: complete, but only available while consensus is, and with the
//!   addresses that the nodes last reported;
//! - the signed address records that the nodes exchange: need no quorum;
//! - this node's own address, which it knows best.
//!
//! The curators determine which nodes exist, and the saved directory does until they have been
//! heard once. Of two addresses of a node, the one with the higher counter is used; a saved address
//! has no counter and is the last resort.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::names::PORT_CURATOR;
use hearth_api::v1::cluster_directory::{self, Address};
use hearth_api::v1::{ClusterDirectory, Label, Node, NodeRoles, NodeSetting, NodeState};
use hearth_base::event::{Closed, Value, Watcher};
use hearth_host::handover::MemberData;
use hearth_host::networking::Networking;

use super::learned::{AddressRecord, PeerAddresses};
use super::names::Addresses;

/// A node according to the curators.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// State of the node.
    pub state: NodeState,
    /// Roles of the node.
    pub roles: NodeRoles,
    /// The address that it last reported.
    pub located: Option<AddressRecord>,
    /// Its address of the other family, if it has reported one.
    pub second_address: Option<IpAddr>,
    /// Port of its curator, 0 for the default.
    pub curator_port: u32,
    /// Its labels, as set by operators.
    pub labels: Vec<Label>,
    /// Its settings, as set by operators.
    pub settings: Vec<NodeSetting>,
    /// Its mesh address range and key, once assigned.
    pub networking: Option<Networking>,
}

impl From<&Node> for Seen {
    fn from(node: &Node) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let located = status
            .external_address
            .parse()
            .ok()
            .map(|host| AddressRecord {
                host,
                counter: status.address_counter,
            });
        let networking = node.networking.as_ref().map(Networking::try_from);
        let networking = networking.transpose().unwrap_or_else(|error| {
            tracing::warn!(id = node.id, %error, "node has an invalid mesh configuration");
            None
        });
        let usual = status.curator_port == u32::from(PORT_CURATOR);
        Self {
            state: node.state(),
            roles: node.roles.unwrap_or_default(),
            located,
            second_address: status.second_address.parse().ok(),
            curator_port: if usual { 0 } else { status.curator_port },
            labels: node.labels.clone(),
            settings: node.settings.clone(),
            networking,
        }
    }
}

/// The nodes of the cluster, from a complete listing of the curators.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// The DNS domain of the nodes' names.
    pub domain: String,
    /// All nodes; deleted ones are not included.
    pub nodes: BTreeMap<NodeId, Seen>,
}

impl View {
    /// Applies an event of the curators' watch.
    pub fn apply(&mut self, nodes: &[Node], tombstones: &[String]) {
        for node in nodes {
            match node.id.parse() {
                Ok(id) => drop(self.nodes.insert(id, node.into())),
                Err(error) => tracing::warn!(id = node.id, %error, "node has an invalid ID"),
            }
        }
        for id in tombstones.iter().filter_map(|id| id.parse().ok()) {
            self.nodes.remove(&id);
        }
    }

    /// Whether this is a node of the cluster in state UP, which has all rights of one.
    pub fn has(&self, id: &NodeId) -> bool {
        self.up(id).is_some()
    }

    fn up(&self, id: &NodeId) -> Option<&Seen> {
        self.nodes
            .get(id)
            .filter(|node| node.state == NodeState::Up)
    }

    /// Whether this is a node of the cluster in state UP that is a consensus member, or is to become one.
    pub fn has_consensus_member(&self, id: &NodeId) -> bool {
        self.up(id)
            .is_some_and(|node| node.roles.consensus_member.is_some())
    }
}

/// Combines all sources.
#[derive(Clone)]
pub struct PeerResolver {
    /// ID of this node.
    pub own: NodeId,
    /// Address of this node; `None` until the network has one.
    pub own_address: Option<IpAddr>,
    /// The directory from the ESP, for the time before the curators answer.
    pub saved: ClusterDirectory,
    /// Signed records from the nodes.
    pub learned: PeerAddresses,
    /// Nodes according to the curators; `None` until the first complete listing.
    pub view: Option<Arc<View>>,
}

impl PeerResolver {
    /// The address of each node.
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

    /// The addresses of all nodes in both families; of this node's own only that at which others reach
    /// it.
    pub fn all_addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let nodes = self.view.iter().flat_map(|view| view.nodes.values());
        let mut all: Vec<_> = nodes.filter_map(|seen| seen.second_address).collect();
        all.extend(self.addresses().into_values());
        all.into_iter()
    }

    fn address(&self, id: &NodeId) -> Option<IpAddr> {
        if *id == self.own && self.own_address.is_some() {
            return self.own_address;
        }
        let seen = self.view.as_ref().and_then(|view| view.nodes.get(id));
        let seen = seen.and_then(|seen| seen.located);
        let newest = [self.learned.get(id).copied(), seen];
        // Of equal counters the last: a curator's record is the more recent information.
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

    /// The consensus members with a known address, which can be asked for the cluster; may be
    /// empty.
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

    /// A saved entry, with the node's newer address, if there is one.
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

/// A [`PeerResolver`] that follows its sources.
pub struct PeerWatcher {
    known: PeerResolver,
    views: Watcher<Arc<View>>,
    learned: Watcher<PeerAddresses>,
    addresses: Watcher<IpAddr>,
}

impl PeerWatcher {
    /// `address` is that of this node.
    pub fn new(
        member: &MemberData,
        view: &Value<Arc<View>>,
        learned: &Value<PeerAddresses>,
        address: &Value<IpAddr>,
    ) -> Self {
        Self {
            known: PeerResolver {
                own: member.own.node(),
                own_address: address.get(),
                saved: member.directory.clone(),
                learned: learned.get().unwrap_or_default(),
                view: view.get(),
            },
            views: view.watch(),
            learned: learned.watch(),
            addresses: address.watch(),
        }
    }

    /// What is known now.
    pub fn known(&self) -> &PeerResolver {
        &self.known
    }

    /// Waits until a source has news. Nothing is lost if the future is dropped before.
    ///
    /// # Errors
    ///
    /// The writer of a source has ended.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        tokio::select! {
            view = self.views.next() => self.known.view = Some(view?),
            news = self.learned.next() => self.known.learned = news?,
            address = self.addresses.next() => self.known.own_address = Some(address?),
        }
        Ok(())
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
    fn booted() -> PeerResolver {
        let saved = [('a', 1), ('b', 2), ('c', 3)];
        let saved = saved.map(|(n, last)| entry(id(n).to_string(), ip(last), 0, member()));
        PeerResolver {
            own: id('a'),
            own_address: None,
            saved: ClusterDirectory {
                nodes: saved.to_vec(),
            },
            learned: PeerAddresses::default(),
            view: None,
        }
    }

    fn learned(words: &[(char, u8, u64)]) -> PeerAddresses {
        let located = |(n, last, counter): &(char, u8, u64)| {
            let host = ip(*last);
            let counter = *counter;
            (id(*n), AddressRecord { host, counter })
        };
        Arc::new(words.iter().map(located).collect())
    }

    fn viewed(known: &PeerResolver, nodes: &[Node]) -> PeerResolver {
        let mut view = View::default();
        view.apply(nodes, &[]);
        PeerResolver {
            view: Some(Arc::new(view)),
            ..known.clone()
        }
    }

    fn hosts(known: &PeerResolver) -> Vec<String> {
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
                // Reported before the node moved, and after.
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
        assert!(!addresses.contains_key(&id('c')), "deleted node");
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
    fn a_node_has_an_address_of_each_family() {
        let mut both = node('b', "192.0.2.2", 1, member());
        let status = both.status.get_or_insert_default();
        status.second_address = "2001:db8::2".into();
        let known = viewed(&booted(), &[both, node('c', "192.0.2.3", 1, member())]);
        let mut all: Vec<_> = known.all_addresses().collect();
        all.sort();
        assert_eq!(all, [ip(2), ip(3), "2001:db8::2".parse().unwrap()]);
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
