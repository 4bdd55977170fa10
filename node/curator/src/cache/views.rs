//! Nodes as clients see them: decoded for calls, and encoded once for all subscribers.

use std::collections::HashSet;

use bytes::Bytes;
use hearth_api::identity::NodeId;
use hearth_api::v1::Node;
use tokio::time::Instant;

use super::Cache;

/// The position at which a subscriber begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The version for [`Cache::changes_since`].
    pub version: u64,
    /// Everything read after this moment includes all changes up to this revision.
    pub revision: i64,
}

/// Changes for a subscriber.
pub struct Changes {
    /// The latest state of changed nodes, each an encoded [`Node`].
    pub nodes: Vec<Bytes>,
    /// The IDs of deleted nodes.
    pub tombstones: Vec<String>,
    /// The version to continue from.
    pub version: u64,
    /// If these are all changes: the revision up to which the subscriber is then current.
    pub complete: Option<i64>,
}

impl Cache {
    /// One node as clients see it now.
    pub fn shown(&self, id: NodeId) -> Option<Node> {
        self.lock().shown(id, Instant::now())
    }

    /// Those of these nodes that `wanted` selects, sorted by ID, as one consistent snapshot.
    pub fn nodes_among(&self, ids: &HashSet<NodeId>, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let contents = self.lock();
        let now = Instant::now();
        let named = ids.iter().filter_map(|id| contents.shown(*id, now));
        let mut nodes: Vec<_> = named.filter(wanted).collect();
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
        nodes
    }

    /// The nodes that `wanted` selects, as one consistent snapshot.
    pub fn nodes(&self, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let contents = self.lock();
        let now = Instant::now();
        let all = contents.records.ids_after(None);
        let visible = all.filter_map(|id| contents.shown(id, now));
        visible.filter(wanted).collect()
    }

    /// One node, encoded for subscribers.
    pub fn encoded(&self, id: NodeId) -> Option<Bytes> {
        self.lock().encoded(id)
    }

    /// The current version and revision, as one consistent snapshot.
    pub fn moment(&self) -> Moment {
        let contents = self.lock();
        Moment {
            version: contents.versions.newest(),
            revision: contents.revision,
        }
    }

    /// Up to `most` nodes with IDs after this one, encoded for subscribers.
    pub fn nodes_after(&self, after: Option<NodeId>, most: usize) -> Vec<(NodeId, Bytes)> {
        let mut contents = self.lock();
        let ids: Vec<_> = contents.records.ids_after(after).take(most).collect();
        let nodes = ids.into_iter();
        let nodes = nodes.filter_map(|id| Some((id, contents.encoded(id)?)));
        nodes.collect()
    }

    /// The changes since a version, of `only` one node if given. Returns at most `most` nodes, and
    /// no further one once they have `bytes` bytes.
    pub fn changes_since(
        &self,
        version: u64,
        only: Option<NodeId>,
        most: usize,
        bytes: usize,
    ) -> Changes {
        let mut contents = self.lock();
        let mut changes = Changes {
            nodes: Vec::new(),
            tombstones: Vec::new(),
            version: contents.versions.newest(),
            complete: Some(contents.revision),
        };
        let newer = contents.versions.since(version);
        let newer = newer.filter(|(_, id)| only.is_none_or(|only| only == *id));
        let newer: Vec<_> = newer.take(most).collect();
        let mut size = 0;
        for (at, id) in newer {
            match contents.encoded(id) {
                Some(node) => {
                    size += node.len();
                    changes.nodes.push(node);
                }
                None => changes.tombstones.push(id.to_string()),
            }
            if changes.nodes.len() + changes.tombstones.len() == most || size >= bytes {
                changes.version = at;
                changes.complete = None;
                break;
            }
        }
        changes
    }
}
