//! Versions of visible changes: the last version of each node, and the nodes ordered by it.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use hearth_api::identity::NodeId;

/// The last visible change of one node.
struct Last {
    version: u64,
    /// The node exists; otherwise the change was its deletion.
    is_visible: bool,
    /// The node encoded for subscribers; cached at first use until it changes.
    encoded: Option<Bytes>,
}

/// The versions of all nodes. Deleted nodes are kept, so memory grows with the number of nodes that
/// are deleted while this curator runs.
#[derive(Default)]
pub(super) struct Versions {
    newest: u64,
    nodes: HashMap<NodeId, Last>,
    /// The last version of each node, in order.
    latest: BTreeMap<u64, NodeId>,
}

impl Versions {
    /// The newest version.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    /// Records a visible change of the node, unless it neither is nor was visible.
    pub(super) fn touch(&mut self, id: NodeId, is_visible: bool) {
        let last = self.nodes.get(&id);
        if !is_visible && last.is_none_or(|last| !last.is_visible) {
            return;
        }
        self.newest += 1;
        let last = Last {
            version: self.newest,
            is_visible,
            encoded: None,
        };
        if let Some(before) = self.nodes.insert(id, last) {
            self.latest.remove(&before.version);
        }
        self.latest.insert(self.newest, id);
    }

    /// Records a change that does not belong to a node.
    pub(super) fn touch_all(&mut self) {
        self.newest += 1;
    }

    /// The nodes that have changed since a version, in the order of their last change.
    pub(super) fn since(&self, version: u64) -> impl Iterator<Item = (u64, NodeId)> {
        let newer = self.latest.range(version + 1..);
        newer.map(|(version, id)| (*version, *id))
    }

    /// The node encoded for subscribers; `encode` is called if it is not cached. All subscribers
    /// share these bytes.
    pub(super) fn encoded(
        &mut self,
        id: NodeId,
        encode: impl FnOnce() -> Option<Bytes>,
    ) -> Option<Bytes> {
        let last = self.nodes.get_mut(&id)?;
        if last.encoded.is_none() {
            last.encoded = encode();
        }
        last.encoded.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> NodeId {
        NodeId::from_bytes([number; 16])
    }

    #[test]
    fn each_node_stands_once_by_its_last_change() {
        let mut versions = Versions::default();
        versions.touch(id(1), true);
        versions.touch(id(2), true);
        versions.touch(id(1), true);
        let all: Vec<_> = versions.since(0).collect();
        assert_eq!(all, [(2, id(2)), (3, id(1))]);
        // A second deletion is not a change.
        versions.touch(id(2), false);
        versions.touch(id(2), false);
        assert_eq!(versions.newest(), 4);
        assert_eq!(versions.since(3).collect::<Vec<_>>(), [(4, id(2))]);
        versions.touch(id(2), true);
        assert_eq!(versions.since(3).collect::<Vec<_>>(), [(5, id(2))]);
    }

    #[test]
    fn what_nobody_has_seen_does_not_go() {
        let mut versions = Versions::default();
        versions.touch(id(1), false);
        assert_eq!(versions.newest(), 0);
        assert_eq!(versions.since(0).count(), 0);
    }

    #[test]
    fn a_node_is_encoded_once_until_it_changes() {
        let mut versions = Versions::default();
        versions.touch(id(1), true);
        let encode = |byte: u8| move || Some(Bytes::from(vec![byte]));
        assert_eq!(versions.encoded(id(1), encode(1)).unwrap(), [1][..]);
        assert_eq!(versions.encoded(id(1), encode(2)).unwrap(), [1][..]);
        versions.touch(id(1), true);
        assert_eq!(versions.encoded(id(1), encode(3)).unwrap(), [3][..]);
        assert_eq!(versions.encoded(id(2), encode(4)), None);
    }
}
