//! The store of signed address records: the newest one of each node.
//!
//! No clock, socket or disk. The caller passes the function that verifies a record's signature.
//!
//! Invariants:
//! - There is one record for each node, and its counter only grows. So the order, source and number
//!   of received records do not change the final result.
//! - Only verified records are stored.
//! - There are never more than [`MOST`] records; the first ones stay. Once the nodes of the cluster
//!   are known, there are records of these only.
//! - This node's own record cannot be replaced by a received one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::proofs::ProofError;
use hearth_api::v1::NodeAddress;

/// Maximum number of records, in the store and in one message.
pub const MOST: usize = 1024;

/// The address of a node. Of two records, the one with the higher counter is the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRecord {
    /// The node's IP address.
    pub host: IpAddr,
    /// Incremented with every change of the address.
    pub counter: u64,
}

/// The addresses of the other nodes, from their own records.
pub type PeerAddresses = Arc<BTreeMap<NodeId, AddressRecord>>;

/// What a received record changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnResult {
    /// It is newer than the stored record.
    News(NodeId, AddressRecord),
    /// This record or a newer one is stored.
    Known,
    /// This node has signed it and does not remember it: its next record needs a higher counter.
    Forgotten(u64),
    /// The node is not in the cluster.
    Stranger,
    /// The store is full.
    Full,
}

/// The store; see the module.
#[derive(Debug)]
pub struct Store {
    own: NodeId,
    records: BTreeMap<NodeId, (AddressRecord, NodeAddress)>,
    members: Option<BTreeSet<NodeId>>,
}

impl Store {
    /// An empty store for the node `own`.
    pub fn new(own: NodeId) -> Self {
        Self {
            own,
            records: BTreeMap::new(),
            members: None,
        }
    }

    /// Processes a record. `check`, which is expensive, is only called for a record that would
    /// change something.
    pub fn learn(
        &mut self,
        record: &NodeAddress,
        check: impl FnOnce(&NodeAddress) -> Result<(NodeId, IpAddr), ProofError>,
    ) -> Result<LearnResult, ProofError> {
        if let Ok(id) = record.node_id.parse::<NodeId>() {
            let known = self.records.get(&id);
            if known.is_some_and(|(known, _)| record.counter <= known.counter) {
                return Ok(LearnResult::Known);
            }
            if id != self.own && !self.is_member(&id) {
                return Ok(LearnResult::Stranger);
            }
            if known.is_none() && self.records.len() >= MOST {
                return Ok(LearnResult::Full);
            }
        }
        let (id, host) = check(record)?;
        let counter = record.counter;
        if id == self.own {
            return Ok(LearnResult::Forgotten(counter));
        }
        let located = AddressRecord { host, counter };
        self.records.insert(id, (located, record.clone()));
        Ok(LearnResult::News(id, located))
    }

    /// Whether this is the stored record of its node.
    pub fn has(&self, record: &NodeAddress) -> bool {
        let id = record.node_id.parse::<NodeId>().ok();
        let stored = id.and_then(|id| self.records.get(&id));
        stored.is_some_and(|(_, stored)| stored == record)
    }

    /// Sets this node's own record.
    pub fn set_own(&mut self, located: AddressRecord, record: NodeAddress) {
        self.records.insert(self.own, (located, record));
    }

    /// Sets the nodes of the cluster, and drops records of others. Returns whether there were any.
    pub fn set_members(&mut self, members: BTreeSet<NodeId>) -> bool {
        let before = self.records.len();
        let own = self.own;
        self.records
            .retain(|id, _| *id == own || members.contains(id));
        self.members = Some(members);
        self.records.len() != before
    }

    fn is_member(&self, id: &NodeId) -> bool {
        self.members.as_ref().is_none_or(|all| all.contains(id))
    }

    /// The addresses of the other nodes.
    pub fn others(&self) -> BTreeMap<NodeId, AddressRecord> {
        let others = self.records.iter().filter(|(id, _)| **id != self.own);
        others.map(|(id, (located, _))| (*id, *located)).collect()
    }

    /// All records, including this node's own, to send to others.
    pub fn records(&self) -> Vec<NodeAddress> {
        self.records
            .values()
            .map(|(_, record)| record.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(n: u8) -> NodeId {
        NodeId::from_bytes([n; 16])
    }

    const OWN: u8 = 0;

    /// A record; a forged one has no signature.
    fn record(node: u8, counter: u64, honest: bool) -> NodeAddress {
        NodeAddress {
            node_id: id(node).to_string(),
            host: host(node, counter).to_string(),
            counter,
            certificate: Vec::new(),
            signature: if honest { vec![1] } else { Vec::new() },
        }
    }

    fn host(node: u8, counter: u64) -> IpAddr {
        let counter = u8::try_from(counter % 256).unwrap();
        IpAddr::from([10, 0, node, counter])
    }

    fn check(record: &NodeAddress) -> Result<(NodeId, IpAddr), ProofError> {
        let forged = ProofError::Signature { what: "record" };
        if record.signature.is_empty() {
            return Err(forged);
        }
        let id = record.node_id.parse().map_err(|_| forged)?;
        Ok((id, record.host.parse().expect("an address")))
    }

    #[derive(Debug, Clone)]
    enum Step {
        Learn(u8, u64, bool),
        /// Nodes below this number are members.
        Members(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            9 => (0..12u8, 0..20u64, any::<bool>()).prop_map(|(n, c, h)| Step::Learn(n, c, h)),
            1 => (1..12u8).prop_map(Step::Members),
        ]
    }

    proptest! {
        /// Against a model that only remembers the highest valid counter.
        #[test]
        fn the_newest_honest_word_of_each_member_is_kept(
            steps in prop::collection::vec(step(), 0..120),
        ) {
            let mut store = Store::new(id(OWN));
            let mut model: BTreeMap<u8, u64> = BTreeMap::new();
            let mut members = u8::MAX;
            for step in steps {
                match step {
                    Step::Members(number) => {
                        members = number;
                        store.set_members((0..number).map(id).collect());
                        model.retain(|node, _| *node < number);
                    }
                    Step::Learn(node, counter, honest) => {
                        let heard = store.learn(&record(node, counter, honest), check);
                        let newer = model.get(&node).is_none_or(|known| counter > *known);
                        match heard {
                            Ok(LearnResult::News(found, located)) => {
                                prop_assert!(honest && newer && node < members);
                                prop_assert_eq!(found, id(node));
                                prop_assert_eq!(located.host, host(node, counter));
                                model.insert(node, counter);
                            }
                            Ok(LearnResult::Known) => prop_assert!(!newer),
                            Ok(LearnResult::Forgotten(found)) => {
                                prop_assert!(honest && node == OWN && found == counter);
                            }
                            Ok(LearnResult::Stranger) => prop_assert!(node >= members),
                            Ok(LearnResult::Full) => prop_assert!(false, "below the limit"),
                            Err(_) => prop_assert!(!honest),
                        }
                    }
                }
                let others: BTreeMap<u8, u64> = store
                    .others()
                    .into_iter()
                    .map(|(node, located)| (node.as_bytes()[0], located.counter))
                    .collect();
                prop_assert_eq!(&others, &model);
            }
        }

        /// Whatever the order and the repetitions: the same records lead to the same result.
        #[test]
        fn order_and_repetition_change_nothing(
            words in prop::collection::vec((1..8u8, 0..20u64), 0..40),
            seed in any::<u64>(),
        ) {
            let all = |words: &[(u8, u64)]| {
                let mut store = Store::new(id(OWN));
                for (node, counter) in words {
                    let _ = store.learn(&record(*node, *counter, true), check);
                }
                store.others()
            };
            let mut shuffled: Vec<_> = words.iter().chain(&words).copied().collect();
            let count = shuffled.len().max(1);
            for index in 0..shuffled.len() {
                let other = usize::try_from(seed % 7919).unwrap() * (index + 1) % count;
                shuffled.swap(index, other);
            }
            prop_assert_eq!(all(&words), all(&shuffled));
        }
    }

    #[test]
    fn there_is_a_bound_and_those_who_are_known_can_still_move() {
        let mut store = Store::new(id(OWN));
        let node = |n: usize| {
            let mut bytes = [7; 16];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            NodeId::from_bytes(bytes)
        };
        let record = |n: usize, counter| NodeAddress {
            node_id: node(n).to_string(),
            ..record(1, counter, true)
        };
        for n in 0..MOST {
            assert!(matches!(
                store.learn(&record(n, 1), check),
                Ok(LearnResult::News(..))
            ));
        }
        assert_eq!(
            store.learn(&record(MOST, 1), check).unwrap(),
            LearnResult::Full
        );
        assert!(matches!(
            store.learn(&record(5, 2), check),
            Ok(LearnResult::News(..))
        ));
        assert_eq!(store.records().len(), MOST);
    }

    #[test]
    fn nobody_speaks_for_this_node() {
        let mut store = Store::new(id(OWN));
        let located = AddressRecord {
            host: host(OWN, 3),
            counter: 3,
        };
        store.set_own(located, record(OWN, 3, true));
        assert_eq!(
            store.learn(&record(OWN, 9, true), check).unwrap(),
            LearnResult::Forgotten(9)
        );
        assert_eq!(store.records(), [record(OWN, 3, true)]);
        assert!(store.others().is_empty());
        assert!(!store.set_members(BTreeSet::new()), "its own record stays");
    }
}
