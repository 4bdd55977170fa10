//! A node takes part in the mesh: its key is made known, and its pods get
//! addresses.
//!
//! What a node has is written in its record and, the other way round, at the
//! range and at the key ([`state::pod_range_key`], [`state::mesh_key_key`]),
//! always in one transaction. A range or a key is taken only where nothing
//! stands, so no two nodes ever have the same, whichever curators they ask at
//! the same moment.
//!
//! A node keeps its range as long as it has a record, with the role or without:
//! its pods' addresses are in other nodes' connections and caches, and there
//! are more ranges than nodes. A key can be changed at any time.

use hearth_api::identity::{MeshKey, NodeId};
use hearth_consensus::fenced::{Condition, Write};
use hearth_host::networking::{Networking, PodRange};

use super::{At, FoundNode, Refused, put, standing::wants_up};
use crate::state;

/// What the records say beside the node's own.
#[derive(Clone, Default)]
pub struct Found {
    /// The range at which the node is named.
    pub own: Option<At<PodRange>>,
    /// The lowest range at which no node is named.
    pub free: Option<PodRange>,
    /// The node that is named at the key.
    pub key_of: Option<At<NodeId>>,
}

/// Decides what the node has of the mesh with this key, and what is written
/// for it; nothing if it has that already.
pub fn decide(
    key: MeshKey,
    node: &FoundNode,
    found: Found,
) -> Result<(Networking, Option<Write>), Refused> {
    let mut full = node.full.content.clone();
    let id = node.id();
    wants_up(&full.node)?;
    if full.node.roles.kubernetes_worker.is_none() {
        return Err(Refused::NoWorker(id));
    }
    if let Some(other) = found.key_of.as_ref().filter(|other| other.content != id) {
        return Err(Refused::MeshKeyTaken(other.content));
    }
    let before = full.node.networking;
    // A record that an older image has written since does not tell the range.
    let own = found.own.as_ref().map(|own| own.content);
    let held = before.map(|before| before.range).or(own);
    let range = held.or(found.free).ok_or(Refused::NoPodRange)?;
    let now = Networking { key, range };
    if before == Some(now) {
        return Ok((now, None));
    }
    full.node.networking = Some(now);
    let mut write = put(node.unchanged(), &full);
    // What was found there may be older than the record, or newer: it has to
    // stand just so when this is written.
    let name = |write: Write, key: String, found: Option<i64>| {
        let as_found = match found {
            Some(revision) => Condition::Unchanged(key.clone(), revision),
            None => Condition::Absent(key.clone()),
        };
        write.and(as_found).put(key, id.to_string().into_bytes())
    };
    if before.is_none() {
        let found = found.own.map(|own| own.revision);
        write = name(write, state::pod_range_key(range), found);
    }
    if before.is_none_or(|before| before.key != key) {
        let found = found.key_of.map(|owner| owner.revision);
        write = name(write, state::mesh_key_key(&key), found);
    }
    if let Some(old) = before.filter(|before| before.key != key) {
        write = write.delete(state::mesh_key_key(&old.key));
    }
    Ok((now, Some(write)))
}
