//! Nodes as they are shown: to those who ask, and, encoded once for all of
//! them, to those who follow.

use std::{
    collections::HashSet,
    ops::Bound::{Excluded, Unbounded},
};

use bytes::Bytes;
use hearth_api::{identity::NodeId, v1::Node};
use prost::Message as _;
use tokio::time::Instant;

use super::{Cache, Entry, Inner};
use crate::health;

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
        let inner = self.lock();
        self.wire(inner.nodes.get(&id)?, Some(Instant::now()))
    }

    /// Those of these nodes that `wanted` picks, all at one moment.
    pub fn nodes_among(&self, ids: &HashSet<NodeId>, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let inner = self.lock();
        let now = Some(Instant::now());
        let named = ids.iter().filter_map(|id| inner.nodes.get(id));
        let mut nodes: Vec<_> = named.filter_map(|e| self.wire(e, now)).collect();
        nodes.retain(wanted);
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
        nodes
    }

    /// The nodes that `wanted` picks, all at one moment.
    pub fn nodes(&self, wanted: impl Fn(&Node) -> bool) -> Vec<Node> {
        let inner = self.lock();
        let now = Some(Instant::now());
        let visible = inner.nodes.values().filter_map(|e| self.wire(e, now));
        visible.filter(wanted).collect()
    }

    /// One node, as subscribers get it.
    pub fn encoded(&self, id: NodeId) -> Option<Bytes> {
        self.encode(self.lock().nodes.get_mut(&id)?)
    }

    /// The version and the revision of what is here, of one moment.
    pub fn moment(&self) -> Moment {
        let inner = self.lock();
        Moment {
            version: inner.version,
            revision: inner.revision,
        }
    }

    /// Up to `most` nodes with IDs after this one, as subscribers get them.
    pub fn nodes_after(&self, after: Option<NodeId>, most: usize) -> Vec<(NodeId, Bytes)> {
        let mut inner = self.lock();
        let from = after.map_or(Unbounded, Excluded);
        let nodes = inner.nodes.range_mut((from, Unbounded));
        let nodes = nodes.filter_map(|(id, e)| Some((*id, self.encode(e)?)));
        nodes.take(most).collect()
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
        let mut inner = self.lock();
        let Inner {
            nodes,
            versions,
            version: newest,
            revision,
            ..
        } = &mut *inner;
        let mut changes = Changes {
            nodes: Vec::new(),
            tombstones: Vec::new(),
            version: *newest,
            complete: Some(*revision),
        };
        let mut size = 0;
        for (at, id) in versions.range(version + 1..) {
            if only.is_some_and(|only| only != *id) {
                continue;
            }
            match nodes.get_mut(id).and_then(|e| self.encode(e)) {
                Some(node) => {
                    size += node.len();
                    changes.nodes.push(node);
                }
                None => changes.tombstones.push(id.to_string()),
            }
            if changes.nodes.len() + changes.tombstones.len() == most || size >= bytes {
                changes.version = *at;
                changes.complete = None;
                break;
            }
        }
        changes
    }

    /// All subscribers share these bytes.
    fn encode(&self, entry: &mut Entry) -> Option<Bytes> {
        if entry.encoded.is_none() {
            let node = self.wire(entry, None)?;
            entry.encoded = Some(node.encode_to_vec().into());
        }
        entry.encoded.clone()
    }

    /// A node as it is shown. How old its last heartbeat is changes all the
    /// time, so that is for those who ask at some moment, `now`.
    fn wire(&self, entry: &Entry, now: Option<Instant>) -> Option<Node> {
        let record = &entry.record.as_ref()?.content;
        let status = entry.status.as_ref().map(|status| &status.content);
        let reported = status.map(|status| &status.boot_id[..]);
        let (health, health_reason) = health::judge(
            record.state,
            &entry.liveness,
            reported,
            self.bound,
            self.grace,
        );
        Some(Node {
            id: record.id.to_string(),
            public_key: record.public_key.as_bytes().to_vec(),
            state: record.state.into(),
            roles: Some(record.roles),
            status: status.cloned(),
            health: health.into(),
            health_reason,
            labels: record.labels.clone(),
            tpm_usage: record.tpm_usage.into(),
            storage_security: record.storage_security.into(),
            heartbeat_age_ms: now.zip(entry.heartbeat).map(|(now, heard)| {
                u64::try_from(now.duration_since(heard).as_millis()).unwrap_or(u64::MAX)
            }),
            decommissioning: record.decommissioning,
            networking: record.networking.map(Into::into),
        })
    }
}
