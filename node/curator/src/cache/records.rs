//! The followed records of etcd, decoded. This module has no clock, no lock and no notification: a
//! change is applied, and the result says what it concerned ([`Applied`]).

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound::{Excluded, Unbounded};

use hearth_api::identity::{MeshKey, NodeId, PublicKey, Ticket};
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::{ClusterDirectory, NodeJoin, NodeState, NodeStatus, cluster_directory};
use hearth_cluster::decisions::Versioned;
use hearth_cluster::decisions::networking::Found;
use hearth_cluster::state::{
    self, ClusterRecord, Intent, Key, NodeRecord, RecordError, Tombstone, Trusted,
};
use hearth_consensus::Record;
use hearth_host::networking::PodRange;
use hearth_tpm::Digest;

/// What a change concerned: decides who is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// Nothing that watchers are notified of.
    Unfollowed,
    /// The cluster as a whole, not a single node.
    Cluster,
    /// The cluster's record, on which the membership of every caller depends.
    Members,
    /// This node's record: its membership and its visible state.
    Member(NodeId),
    /// The visible state of this node.
    Node(NodeId),
}

/// The stored records of one node.
#[derive(Default)]
struct Stored {
    record: Option<Versioned<NodeRecord>>,
    /// There is a record, and it cannot be read.
    unreadable: bool,
    status: Option<Versioned<NodeStatus>>,
    joins: Option<Versioned<Vec<NodeJoin>>>,
}

#[derive(Default)]
pub(super) struct Records {
    cluster: Option<Versioned<ClusterRecord>>,
    /// Computed once, because each heartbeat returns it.
    unlock_settings: Option<u64>,
    ticket: Option<Versioned<Ticket>>,
    nodes: BTreeMap<NodeId, Stored>,
    intents: BTreeMap<NodeId, Versioned<Intent>>,
    /// One per node ever deleted, about a hundred bytes each.
    tombstones: HashMap<NodeId, Tombstone>,
    /// Join keys of nodes and of deleted nodes.
    join_keys: HashMap<PublicKey, NodeId>,
    /// Pod ranges of nodes that are, or were, Kubernetes workers.
    pod_ranges: BTreeMap<PodRange, Versioned<NodeId>>,
    /// Mesh keys of the same nodes.
    mesh_keys: HashMap<MeshKey, Versioned<NodeId>>,
    /// Trusted images, by their parts.
    images: BTreeMap<Digest, Versioned<Trusted>>,
}

impl Records {
    /// Applies a put of `key`.
    pub(super) fn put(&mut self, key: Key, record: &Record) -> Result<Applied, RecordError> {
        match key {
            Key::Cluster => self.put_cluster(record),
            Key::Node(id) => self.put_node(id, record),
            Key::Status(id) => self.put_part(id, record, state::decode_status, |stored| {
                &mut stored.status
            }),
            Key::Joins(id) => {
                self.put_part(id, record, state::decode_joins, |stored| &mut stored.joins)
            }
            Key::Tombstone(id) => self.put_tombstone(id, record),
            Key::JoinKey(key) => self.put_join_key(key, record),
            Key::PodRange(range) => self.put_pod_range(range, record),
            Key::MeshKey(key) => self.put_mesh_key(key, record),
            Key::Intent(id) => self.put_intent(id, record),
            Key::RegisterTicket => self.put_ticket(record),
            Key::Image(parts) => self.put_image(parts, record),
            Key::Liveness(_) | Key::Candidate | Key::Other => Ok(Applied::Unfollowed),
        }
    }

    /// Applies a deletion of `key`.
    pub(super) fn delete(&mut self, key: &Key) -> Applied {
        match key {
            Key::Cluster => {
                self.cluster = None;
                self.unlock_settings = None;
                return Applied::Members;
            }
            Key::Node(id) => {
                self.change_node(*id, |stored| {
                    stored.record = None;
                    stored.unreadable = false;
                });
                return Applied::Member(*id);
            }
            Key::Status(id) => {
                self.change_node(*id, |stored| stored.status = None);
                return Applied::Node(*id);
            }
            Key::Joins(id) => {
                self.change_node(*id, |stored| stored.joins = None);
                return Applied::Node(*id);
            }
            Key::Tombstone(id) => drop(self.tombstones.remove(id)),
            Key::JoinKey(key) => drop(self.join_keys.remove(key)),
            Key::PodRange(range) => drop(self.pod_ranges.remove(range)),
            Key::MeshKey(key) => drop(self.mesh_keys.remove(key)),
            Key::Intent(id) => drop(self.intents.remove(id)),
            Key::RegisterTicket => self.ticket = None,
            Key::Image(parts) => drop(self.images.remove(parts)),
            Key::Liveness(_) | Key::Candidate | Key::Other => {}
        }
        Applied::Unfollowed
    }

    fn put_cluster(&mut self, record: &Record) -> Result<Applied, RecordError> {
        self.cluster = at(
            record,
            usable(ClusterRecord::decode(&record.key, &record.value))?,
        );
        let cluster = self.cluster.as_ref();
        self.unlock_settings = cluster.map(|at| at.content.unlock_settings().digest());
        Ok(Applied::Members)
    }

    fn put_node(&mut self, id: NodeId, record: &Record) -> Result<Applied, RecordError> {
        let known = self.record(id).map(|known| known.revision);
        if known == Some(record.mod_revision) {
            return Ok(Applied::Unfollowed);
        }
        let node = at(
            record,
            usable(NodeRecord::decode(&record.key, &record.value))?,
        );
        self.change_node(id, |stored| {
            stored.unreadable = node.is_none();
            stored.record = node;
        });
        Ok(Applied::Member(id))
    }

    /// Sets a part of what is stored for a node, from a record of its own.
    fn put_part<T>(
        &mut self,
        id: NodeId,
        record: &Record,
        decode: fn(&str, &[u8]) -> Result<T, RecordError>,
        part: fn(&mut Stored) -> &mut Option<Versioned<T>>,
    ) -> Result<Applied, RecordError> {
        let known = self
            .nodes
            .get_mut(&id)
            .and_then(|stored| part(stored).as_ref());
        if known.is_some_and(|known| known.revision == record.mod_revision) {
            return Ok(Applied::Unfollowed);
        }
        let new = at(record, usable(decode(&record.key, &record.value))?);
        self.change_node(id, |stored| *part(stored) = new);
        Ok(Applied::Node(id))
    }

    fn put_tombstone(&mut self, id: NodeId, record: &Record) -> Result<Applied, RecordError> {
        if let Some(tombstone) = usable(Tombstone::decode(&record.key, &record.value))? {
            self.tombstones.insert(id, tombstone);
        }
        Ok(Applied::Unfollowed)
    }

    fn put_join_key(&mut self, key: PublicKey, record: &Record) -> Result<Applied, RecordError> {
        if let Some(id) = owner(record)? {
            self.join_keys.insert(key, id.content);
        }
        Ok(Applied::Unfollowed)
    }

    fn put_pod_range(&mut self, range: PodRange, record: &Record) -> Result<Applied, RecordError> {
        if let Some(id) = owner(record)? {
            self.pod_ranges.insert(range, id);
        }
        Ok(Applied::Unfollowed)
    }

    fn put_mesh_key(&mut self, key: MeshKey, record: &Record) -> Result<Applied, RecordError> {
        if let Some(id) = owner(record)? {
            self.mesh_keys.insert(key, id);
        }
        Ok(Applied::Unfollowed)
    }

    fn put_intent(&mut self, id: NodeId, record: &Record) -> Result<Applied, RecordError> {
        match at(record, usable(Intent::decode(&record.key, &record.value))?) {
            Some(intent) => drop(self.intents.insert(id, intent)),
            None => drop(self.intents.remove(&id)),
        }
        Ok(Applied::Unfollowed)
    }

    fn put_ticket(&mut self, record: &Record) -> Result<Applied, RecordError> {
        self.ticket = at(
            record,
            usable(state::decode_ticket(&record.key, &record.value))?,
        );
        Ok(Applied::Unfollowed)
    }

    fn put_image(&mut self, parts: Digest, record: &Record) -> Result<Applied, RecordError> {
        match at(record, usable(Trusted::decode(&record.key, &record.value))?) {
            Some(image) => drop(self.images.insert(parts, image)),
            None => drop(self.images.remove(&parts)),
        }
        Ok(Applied::Unfollowed)
    }

    fn change_node(&mut self, id: NodeId, change: impl FnOnce(&mut Stored)) {
        let stored = self.nodes.entry(id).or_default();
        change(stored);
        let Stored {
            record,
            unreadable,
            status,
            joins,
        } = stored;
        if record.is_none() && !*unreadable && status.is_none() && joins.is_none() {
            self.nodes.remove(&id);
        }
    }

    /// The keys of all records.
    pub(super) fn keys(&self) -> impl Iterator<Item = String> {
        let nodes = self.nodes.iter().flat_map(|(id, stored)| {
            [
                (stored.record.is_some() || stored.unreadable).then(|| state::node_key(*id)),
                stored.status.is_some().then(|| state::status_key(*id)),
                stored.joins.is_some().then(|| state::joins_key(*id)),
            ]
        });
        let ranges = self.pod_ranges.keys();
        let cluster = self.cluster.as_ref().map(|_| state::CLUSTER.to_owned());
        let ticket = self.ticket.as_ref().map(|_| state::REGISTER_TICKET.into());
        nodes
            .flatten()
            .chain(self.intents.keys().map(|id| state::intent_key(*id)))
            .chain(self.tombstones.keys().map(|id| state::tombstone_key(*id)))
            .chain(self.join_keys.keys().map(state::join_key_key))
            .chain(ranges.map(|range| state::pod_range_key(*range)))
            .chain(self.mesh_keys.keys().map(state::mesh_key_key))
            .chain(self.images.keys().map(state::image_key))
            .chain(cluster)
            .chain(ticket)
    }

    pub(super) fn cluster(&self) -> Option<&Versioned<ClusterRecord>> {
        self.cluster.as_ref()
    }

    /// The digest of the cluster's unlock settings.
    pub(super) fn unlock_settings(&self) -> Option<u64> {
        self.unlock_settings
    }

    pub(super) fn ticket(&self) -> Option<&Versioned<Ticket>> {
        self.ticket.as_ref()
    }

    pub(super) fn image(&self, parts: &Digest) -> Option<&Versioned<Trusted>> {
        self.images.get(parts)
    }

    pub(super) fn images(&self) -> impl Iterator<Item = &Versioned<Trusted>> {
        self.images.values()
    }

    pub(super) fn tombstone(&self, id: NodeId) -> Option<&Tombstone> {
        self.tombstones.get(&id)
    }

    pub(super) fn intent(&self, id: NodeId) -> Option<&Versioned<Intent>> {
        self.intents.get(&id)
    }

    pub(super) fn intents(&self) -> impl Iterator<Item = &Versioned<Intent>> {
        self.intents.values()
    }

    pub(super) fn join_key_owner(&self, key: &PublicKey) -> Option<NodeId> {
        self.join_keys.get(key).copied()
    }

    /// A node's record, if the node exists.
    pub(super) fn record(&self, id: NodeId) -> Option<&Versioned<NodeRecord>> {
        self.nodes.get(&id)?.record.as_ref()
    }

    /// The nodes whose records cannot be read.
    pub(super) fn unreadable(&self) -> impl Iterator<Item = NodeId> {
        let unreadable = self.nodes.iter().filter(|(_, stored)| stored.unreadable);
        unreadable.map(|(id, _)| *id)
    }

    /// The last status reported for this ID, whether or not the node has a record.
    pub(super) fn status(&self, id: NodeId) -> Option<&NodeStatus> {
        Some(&self.nodes.get(&id)?.status.as_ref()?.content)
    }

    /// The last joins of this ID, the latest first, whether or not the node has a record.
    pub(super) fn joins(&self, id: NodeId) -> &[NodeJoin] {
        let joins = self.nodes.get(&id).and_then(|stored| stored.joins.as_ref());
        joins.map_or(&[], |joins| &joins.content)
    }

    /// All nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeRecord> {
        let records = self
            .nodes
            .values()
            .filter_map(|stored| stored.record.as_ref());
        records.map(|record| &record.content)
    }

    /// The nodes with IDs after this one, in order.
    pub(super) fn ids_after(&self, after: Option<NodeId>) -> impl Iterator<Item = NodeId> {
        let from = after.map_or(Unbounded, Excluded);
        let stored = self.nodes.range((from, Unbounded));
        stored.filter_map(|(id, stored)| stored.record.is_some().then_some(*id))
    }

    /// What the records say about the pod range of node `id`, in a cluster with these ranges, and about
    /// this mesh key.
    pub(super) fn mesh(&self, id: NodeId, key: &MeshKey, ranges: &ClusterRanges) -> Found {
        let mut own = self.pod_ranges.iter().filter(|(_, at)| at.content == id);
        Found {
            own: own.next().map(|(range, at)| at.clone().map(|_| *range)),
            free: PodRange::all(ranges).find(|range| !self.pod_ranges.contains_key(range)),
            key_of: self.mesh_keys.get(key).cloned(),
        }
    }

    /// The addresses of curators: consensus members that are UP and have reported an address.
    pub(super) fn directory(&self) -> ClusterDirectory {
        let nodes = self.nodes.values().filter_map(|stored| {
            let record = &stored.record.as_ref()?.content;
            let status = &stored.status.as_ref()?.content;
            let serves = record.state == NodeState::Up
                && record.roles.consensus_member.is_some()
                && !status.external_address.is_empty();
            serves.then(|| cluster_directory::Node {
                id: record.id.to_string(),
                addresses: vec![cluster_directory::Address {
                    host: status.external_address.clone(),
                    port: status.curator_port,
                }],
                roles: Some(record.roles),
            })
        });
        ClusterDirectory {
            nodes: nodes.collect(),
        }
    }
}

/// Logs a corrupt record and ignores it; returns an error for a record of a newer version.
pub(super) fn usable<T>(decoded: Result<T, RecordError>) -> Result<Option<T>, RecordError> {
    match decoded {
        Ok(content) => Ok(Some(content)),
        Err(error @ (RecordError::Malformed { .. } | RecordError::Field { .. })) => {
            tracing::error!("{error}; ignoring the record");
            Ok(None)
        }
        Err(error @ RecordError::TooNew { .. }) => Err(error),
    }
}

fn at<T>(record: &Record, content: Option<T>) -> Option<Versioned<T>> {
    content.map(|content| Versioned {
        content,
        revision: record.mod_revision,
    })
}

fn owner(record: &Record) -> Result<Option<Versioned<NodeId>>, RecordError> {
    let id = usable(state::decode_owner(&record.key, &record.value))?;
    Ok(at(record, id))
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::{MeshSecret, SigningKey};
    use hearth_api::private::{StoredCluster, StoredNode};
    use hearth_api::proofs::AfterRemoval;
    use hearth_cluster::state::Wanted;
    use prost::Message as _;

    use super::*;

    fn id() -> NodeId {
        NodeId::from_bytes([5; 16])
    }

    fn key_of(number: u8) -> PublicKey {
        SigningKey::from_seed([number; 32]).public()
    }

    fn node() -> Vec<u8> {
        StoredNode {
            version: state::VERSION,
            id: id().to_string(),
            public_key: key_of(1).as_bytes().to_vec(),
            join_key: key_of(2).as_bytes().to_vec(),
            state: NodeState::Up.into(),
            ..Default::default()
        }
        .encode_to_vec()
    }

    fn record(key: &str, value: Vec<u8>, revision: i64) -> Record {
        Record {
            key: key.to_owned(),
            value,
            create_revision: revision,
            mod_revision: revision,
            lease: 0,
        }
    }

    /// One record of each kind, and what its change concerns.
    fn each() -> Vec<(String, Vec<u8>, Applied)> {
        let cluster = StoredCluster {
            version: state::VERSION,
            cluster_id: vec![9; 16],
            owner_public_key: key_of(7).as_bytes().to_vec(),
            first_contact_secret: vec![1; 32],
            ..Default::default()
        };
        let tombstone = Tombstone {
            id: id(),
            public_key: key_of(1),
            join_key: key_of(2),
            afterwards: AfterRemoval::Wait,
        };
        let intent = Intent {
            node: id(),
            wanted: Wanted::Join { member: None },
            attempts: 0,
            replaces: None,
        };
        let ticket = state::encode_ticket(&Ticket::from_bytes([3; 32]));
        let status = state::encode_status(NodeStatus::default());
        let joins = state::encode_joins(vec![NodeJoin::default()]);
        let owner = || id().to_string().into_bytes();
        let range = state::pod_range_key("10.208.3.0/24".parse().unwrap());
        let mesh_key = state::mesh_key_key(&MeshSecret::generate().public());
        let unfollowed = Applied::Unfollowed;
        vec![
            (
                state::CLUSTER.into(),
                cluster.encode_to_vec(),
                Applied::Members,
            ),
            (state::node_key(id()), node(), Applied::Member(id())),
            (state::status_key(id()), status, Applied::Node(id())),
            (state::joins_key(id()), joins, Applied::Node(id())),
            (state::tombstone_key(id()), tombstone.encode(), unfollowed),
            (state::join_key_key(&key_of(2)), owner(), unfollowed),
            (range, owner(), unfollowed),
            (mesh_key, owner(), unfollowed),
            (state::intent_key(id()), intent.encode(), unfollowed),
            (state::REGISTER_TICKET.into(), ticket.to_vec(), unfollowed),
        ]
    }

    #[test]
    fn each_record_is_held_until_it_is_deleted() {
        let mut records = Records::default();
        let each = each();
        for (key, value, applied) in each.clone() {
            let record = record(&key, value, 1);
            assert_eq!(records.put(Key::parse(&key), &record), Ok(applied), "{key}");
            assert!(records.keys().any(|held| held == key), "{key}");
        }
        assert_eq!(records.keys().count(), each.len());
        for (key, _, applied) in each {
            assert_eq!(records.delete(&Key::parse(&key)), applied, "{key}");
            assert!(records.keys().all(|held| held != key), "{key}");
        }
        assert_eq!(records.keys().count(), 0);
    }

    #[test]
    fn what_is_read_again_is_no_change() {
        let mut records = Records::default();
        let key = state::node_key(id());
        let mut put = |revision| records.put(Key::Node(id()), &record(&key, node(), revision));
        assert_eq!(put(1), Ok(Applied::Member(id())));
        assert_eq!(put(1), Ok(Applied::Unfollowed));
        assert_eq!(put(2), Ok(Applied::Member(id())));
    }

    #[test]
    fn a_status_alone_makes_no_node() {
        let mut records = Records::default();
        let key = state::status_key(id());
        let status = record(&key, state::encode_status(NodeStatus::default()), 1);
        records.put(Key::Status(id()), &status).unwrap();
        assert!(records.record(id()).is_none() && records.status(id()).is_some());
        assert_eq!(records.nodes().count() + records.ids_after(None).count(), 0);
    }
}
