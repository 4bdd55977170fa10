//! Mesh keys and pod ranges of nodes.
//!
//! A node's range and key are written to its record and to an index by range and by key
//! ([`state::pod_range_key`], [`state::mesh_key_key`]), always in one transaction. A range or a key
//! is assigned only if its index key does not exist, so no two nodes ever have the same one, even
//! if they ask different curators at the same time.
//!
//! A node keeps its range as long as it has a record, even without the role: the addresses of its
//! pods are in other nodes' connections and caches, and there are more ranges than nodes. The key
//! can change at any time. The IPv6 range of a dual-stack cluster follows from the IPv4 range
//! ([`PodRange::subnets`]).

use hearth_api::identity::{MeshKey, NodeId};
use hearth_consensus::fenced::{Condition, Write};
use hearth_host::networking::{Networking, PodRange};

use super::transitions::check_up;
use super::{FoundNode, Rejection, Versioned, put};
use crate::state;

/// What the indexes contain.
#[derive(Clone, Default)]
pub struct Found {
    /// The range that is indexed for the node.
    pub own: Option<Versioned<PodRange>>,
    /// The lowest range that is not assigned.
    pub free: Option<PodRange>,
    /// The node that is indexed for the key.
    pub key_of: Option<Versioned<NodeId>>,
}

/// Assigns the key and a range to the node. Returns both, and the write; `None` if nothing changes.
pub fn decide(
    key: MeshKey,
    node: &FoundNode,
    found: Found,
) -> Result<(Networking, Option<Write>), Rejection> {
    let mut full = node.full.content.clone();
    let id = node.id();
    check_up(&full.node)?;
    if full.node.roles.kubernetes_worker.is_none() {
        return Err(Rejection::NoWorker(id));
    }
    if let Some(other) = found.key_of.as_ref().filter(|other| other.content != id) {
        return Err(Rejection::MeshKeyTaken(other.content));
    }
    let before = full.node.networking;
    // An older image drops the range when it writes the record; the index still has it.
    let own = found.own.as_ref().map(|own| own.content);
    let held = before.map(|before| before.range).or(own);
    let range = held.or(found.free).ok_or(Rejection::NoPodRange)?;
    let now = Networking { key, range };
    if before == Some(now) {
        return Ok((now, None));
    }
    full.node.networking = Some(now);
    let mut write = put(node.unchanged(), &full);
    // The index was read at another revision than the record, so it gets its own condition.
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
