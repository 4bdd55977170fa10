//! Nodes as they are shown: to those who ask, and, encoded once for all of
//! them, to those who follow.

use std::collections::HashSet;

use bytes::Bytes;
use hearth_api::{identity::NodeId, v1::Node};
use tokio::time::Instant;

use super::Cache;

/// Where a subscriber begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// For [`Cache::changes_since`].
    pub version: u64,
    /// Everything up to here is told by what is read from now on.
    pub revision: i64,
}

/// What has changed for a subscriber.
pub struct Changes {
    /// As they are now, each a [`Node`] as it goes over the wire.
    pub nodes: Vec<Bytes>,
    /// Those that are gone.
    pub tombstones: Vec<String>,
    /// To be given next time.
    pub version: u64,
    /// Everything up to here has been told, if all of it has.
    pub complete: Option<i64>,
}

impl Cache {
    /// One node, as it is shown.
    pub fn shown(&self, id: NodeId) -> Option<Node> {
        self.lock().shown(id, Instant::now())
    }

    /// Those of these nodes that `wanted` picks, all at one moment.
    pub fn nodes_among(&self, ids: &HashSet<NodeId>, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let contents = self.lock();
        let now = Instant::now();
        let named = ids.iter().filter_map(|id| contents.shown(*id, now));
        let mut nodes: Vec<_> = named.filter(wanted).collect();
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
        nodes
    }

    /// The nodes that `wanted` picks, all at one moment.
    pub fn nodes(&self, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let contents = self.lock();
        let now = Instant::now();
        let all = contents.records.ids_after(None);
        let visible = all.filter_map(|id| contents.shown(id, now));
        visible.filter(wanted).collect()
    }

    /// One node, as subscribers get it.
    pub fn encoded(&self, id: NodeId) -> Option<Bytes> {
        self.lock().encoded(id)
    }

    /// The version and the revision of what is here, of one moment.
    pub fn moment(&self) -> Moment {
        let contents = self.lock();
        Moment {
            version: contents.versions.newest(),
            revision: contents.revision,
        }
    }

    /// Up to `most` nodes with IDs after this one, as subscribers get them.
    pub fn nodes_after(&self, after: Option<NodeId>, most: usize) -> Vec<(NodeId, Bytes)> {
        let mut contents = self.lock();
        let ids: Vec<_> = contents.records.ids_after(after).take(most).collect();
        let nodes = ids.into_iter();
        let nodes = nodes.filter_map(|id| Some((id, contents.encoded(id)?)));
        nodes.collect()
    }

    /// What has changed since a version, of `only` one node if it is given: at
    /// most so many nodes, and no more once they have so many bytes.
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
