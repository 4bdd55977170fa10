//! The cluster's records in memory: one watch feeds them, everybody reads them.
//!
//! A curator asks etcd for the whole of its records once, then follows every
//! change by a single watch, however many subscribers it has. What is here is
//! always some true state of the store, at [`Cache::revision`]; how recent it
//! has to be is the business of [`super::reads`].
//!
//! Each visible change gives the node concerned a new *version*, a number that
//! only grows. A subscriber remembers the last version it has seen and asks
//! for what is newer ([`Cache::changes_since`]): it gets every node that has
//! changed, once, as it is now. So a slow subscriber costs nothing but its own
//! delay: there is no queue that could grow.
//!
//! Records that are newer than this image end the curator, because it could
//! only guess what they mean. A record that is spoilt is reported and taken
//! for absent, so that it harms no node but its own.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    convert::Infallible,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use hearth_api::{
    identity::{Identity, MeshKey, NodeId, PublicKey, Subject, Ticket, UserName},
    v1::{ClusterDirectory, NodeState, NodeStatus, cluster_directory},
};
use hearth_consensus::{Change, Lease, Listing, NamespacedClient, Record};
use hearth_host::networking::PodRange;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until},
};
use zeroize::Zeroize as _;

use super::{
    decisions::{At, networking::Found},
    health::{self, Liveness},
    state::{self, ClusterRecord, Intent, Key, LivenessRecord, NodeRecord, RecordError, Tombstone},
};

use leading::Candidate;

/// Before etcd is asked again after it did not answer.
const RETRY: Duration = Duration::from_millis(100);

/// Why a caller with a good certificate is refused all the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMember {
    /// It has been deleted, or never was.
    #[error("{0} is not a member of this cluster (any more)")]
    Unknown(Subject),
    /// Its certificate is for a key that it no longer has.
    #[error("{0} has another key now: this certificate is no longer good")]
    OtherKey(Subject),
    /// It is not, or no longer, part of the cluster.
    #[error("{0} is {1}: only nodes that are UP may call this")]
    NotUp(Subject, &'static str),
}

/// What the cluster knows of one node.
#[derive(Default)]
struct Entry {
    record: Option<At<NodeRecord>>,
    status: Option<At<NodeStatus>>,
    liveness: Liveness,
    /// When this curator heard it last.
    heartbeat: Option<Instant>,
    /// Of its last visible change.
    version: u64,
    /// As subscribers get it, once one did, until it changes.
    encoded: Option<Bytes>,
}

#[derive(Default)]
struct Inner {
    cluster: Option<At<ClusterRecord>>,
    ticket: Option<At<Ticket>>,
    nodes: BTreeMap<NodeId, Entry>,
    candidates: BTreeMap<String, Candidate>,
    intents: BTreeMap<NodeId, At<Intent>>,
    /// Of deleted nodes: as many as ever were, at some hundred bytes each.
    tombstones: HashMap<NodeId, Tombstone>,
    /// Of nodes and of deleted ones.
    join_keys: HashMap<PublicKey, NodeId>,
    /// Of the nodes that have, or had, pods.
    pod_ranges: BTreeMap<PodRange, At<NodeId>>,
    /// The same.
    mesh_keys: HashMap<MeshKey, At<NodeId>>,
    /// Deleted nodes by the version of their deletion. As many as are deleted
    /// while this curator runs.
    gone: BTreeMap<NodeId, u64>,
    /// All versions that still stand, and whose they are.
    versions: BTreeMap<u64, NodeId>,
    /// The newest version.
    version: u64,
    /// Of the store, up to which everything is here.
    revision: i64,
    /// Of the cluster and the nodes' records: of who is a member.
    members: u64,
    /// This curator's lease.
    session: Option<Lease>,
    /// Leases that earlier lives of this curator have left.
    former: BTreeSet<i64>,
}

impl Inner {
    fn entry(&mut self, id: NodeId) -> &mut Entry {
        self.nodes.entry(id).or_default()
    }

    /// The node has visibly changed, if it is, or was, visible.
    fn touch(&mut self, id: NodeId) {
        let Some(entry) = self.nodes.get_mut(&id) else {
            return;
        };
        entry.encoded = None;
        let was_visible = entry.version != 0;
        let is_visible = entry.record.is_some();
        if !was_visible && !is_visible {
            return;
        }
        self.version += 1;
        self.versions.remove(&entry.version);
        if is_visible {
            entry.version = self.version;
            if let Some(old) = self.gone.remove(&id) {
                self.versions.remove(&old);
            }
        } else {
            entry.version = 0;
            self.gone.insert(id, self.version);
        }
        self.versions.insert(self.version, id);
    }

    /// Something has changed that is about no node in particular.
    fn touch_all(&mut self) {
        self.version += 1;
    }

    fn set_liveness(&mut self, id: NodeId, new: Liveness) {
        let entry = self.entry(id);
        let differs = entry.liveness.differs(&new);
        // The grace runs from when the node was lost first.
        let still_lost = matches!(
            (&entry.liveness, &new),
            (Liveness::Lost { .. }, Liveness::Lost { overdue: false, .. })
        );
        if !still_lost {
            entry.liveness = new;
            if differs {
                self.touch(id);
            }
        }
    }
}

/// See the module.
pub struct Cache {
    own: NodeId,
    bound: Duration,
    grace: Duration,
    inner: Mutex<Inner>,
    version: watch::Sender<u64>,
    members: watch::Sender<u64>,
    revision: watch::Sender<i64>,
    resync: Notify,
}

impl Cache {
    /// An empty one of the curator on node `own`. `bound` is how long a node
    /// may be silent, `grace` how long it may take to find another curator.
    pub fn new(own: NodeId, bound: Duration, grace: Duration) -> Self {
        Self {
            own,
            bound,
            grace,
            inner: Mutex::default(),
            version: watch::Sender::new(0),
            members: watch::Sender::new(0),
            revision: watch::Sender::new(0),
            resync: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing below panics halfway through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Feeds the cache for ever. Ends only for a record that this image does
    /// not understand.
    pub async fn follow(&self, client: &NamespacedClient) -> Result<Infallible, RecordError> {
        loop {
            match client.list_all(&state::FOLLOWED).await {
                Ok(listing) => self.replace(listing)?,
                Err(error) => {
                    tracing::warn!("cannot read the cluster's records: {error}");
                    sleep(RETRY).await;
                    continue;
                }
            }
            let from = self.revision() + 1;
            let mut changes = match client.watch(from).await {
                Ok(changes) => changes,
                Err(error) => {
                    tracing::warn!("cannot watch the cluster's records: {error}");
                    sleep(RETRY).await;
                    continue;
                }
            };
            let end = loop {
                tokio::select! {
                    batch = changes.next() => match batch {
                        Ok(batch) => self.apply(batch)?,
                        Err(end) => break end.to_string(),
                    },
                    () = self.next_overdue() => self.mark_overdue(),
                    () = self.resync.notified() => break "it lagged behind".to_owned(),
                }
            };
            tracing::warn!("the watch has ended ({end}); reading everything again");
        }
    }

    /// Has everything read again: the watch is behind what it should have told.
    pub fn resync(&self) {
        self.resync.notify_one();
    }

    /// Everything up to this revision is here.
    pub fn revision(&self) -> i64 {
        *self.revision.borrow()
    }

    /// Waits until everything up to this revision is here.
    pub async fn reached(&self, revision: i64) {
        let mut reached = self.revision.subscribe();
        // The sender lives as long as `self`.
        let _ = reached.wait_for(|at| *at >= revision).await;
    }

    /// Waits until there is anything at all.
    pub async fn loaded(&self) {
        self.reached(1).await;
    }

    /// Follows the newest version.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Follows who is a member. What nodes say of themselves, and who hears
    /// them, changes far more often, and each connection asks.
    pub fn watch_members(&self) -> watch::Receiver<u64> {
        self.members.subscribe()
    }

    /// Takes a whole listing for what there is.
    fn replace(&self, listing: Listing) -> Result<(), RecordError> {
        let present: HashSet<String> = listing.records.iter().map(|r| r.key.clone()).collect();
        self.change(listing.revision, |inner| {
            for key in inner.keys() {
                if !present.contains(&key) {
                    self.delete(inner, &key);
                }
            }
            listing
                .records
                .into_iter()
                .try_for_each(|record| self.put(inner, record))
        })
    }

    fn apply(&self, batch: Vec<Change>) -> Result<(), RecordError> {
        let revision = batch.iter().map(Change::revision).max().unwrap_or(0);
        self.change(revision, |inner| {
            batch.into_iter().try_for_each(|change| match change {
                Change::Put(record) => self.put(inner, record),
                Change::Deleted { key, .. } => {
                    self.delete(inner, &key);
                    Ok(())
                }
            })
        })
    }

    /// Changes the content and tells everyone, about the revision last.
    fn change<T>(&self, revision: i64, change: impl FnOnce(&mut Inner) -> T) -> T {
        let (result, version, members) = {
            let mut inner = self.lock();
            let result = change(&mut inner);
            inner.revision = inner.revision.max(revision);
            (result, inner.version, inner.members)
        };
        for (sender, new) in [(&self.members, members), (&self.version, version)] {
            sender.send_if_modified(|old| {
                let modified = *old != new;
                *old = new;
                modified
            });
        }
        self.revision.send_if_modified(|old| {
            let modified = *old < revision;
            *old = revision.max(*old);
            modified
        });
        result
    }

    fn put(&self, inner: &mut Inner, record: Record) -> Result<(), RecordError> {
        let Record {
            key,
            mut value,
            create_revision,
            mod_revision: revision,
            lease,
        } = record;
        match Key::parse(&key) {
            Key::Cluster => {
                let content = usable(ClusterRecord::decode(&key, &value))?;
                inner.cluster = content.map(|content| At { content, revision });
                inner.members += 1;
                inner.touch_all();
            }
            Key::Node(id) => {
                let known = inner.nodes.get(&id).and_then(|e| e.record.as_ref());
                if known.is_none_or(|known| known.revision != revision) {
                    let content = usable(NodeRecord::decode(&key, &value))?;
                    inner.entry(id).record = content.map(|content| At { content, revision });
                    inner.members += 1;
                    inner.touch(id);
                }
            }
            Key::Status(id) => {
                let known = inner.nodes.get(&id).and_then(|e| e.status.as_ref());
                if known.is_none_or(|known| known.revision != revision) {
                    let content = usable(state::decode_status(&key, &value))?;
                    inner.entry(id).status = content.map(|content| At { content, revision });
                    inner.touch(id);
                }
            }
            Key::Liveness(id) => {
                let record = usable(LivenessRecord::decode(&key, &value))?;
                let liveness = match record {
                    Some((LivenessRecord::HeardBy(curator), boot_id))
                        if !self.is_former(inner, curator, lease) =>
                    {
                        Liveness::Heard {
                            curator,
                            lease,
                            revision,
                            boot_id,
                        }
                    }
                    Some((LivenessRecord::GivenUp, _)) => Liveness::GivenUp,
                    _ => Liveness::default(),
                };
                inner.set_liveness(id, liveness);
            }
            Key::Candidate => {
                if let Some(curator) = usable(state::decode_candidate(&key, &value))?
                    && !self.is_former(inner, curator, lease)
                {
                    let candidate = Candidate {
                        curator,
                        lease,
                        since: create_revision,
                    };
                    inner.candidates.insert(key, candidate);
                    inner.touch_all();
                }
            }
            Key::Tombstone(id) => {
                if let Some(tombstone) = usable(Tombstone::decode(&key, &value))? {
                    inner.tombstones.insert(id, tombstone);
                }
            }
            Key::JoinKey(join_key) => {
                if let Some(id) = usable(state::decode_owner(&key, &value))? {
                    inner.join_keys.insert(join_key, id);
                }
            }
            Key::PodRange(range) => {
                if let Some(content) = usable(state::decode_owner(&key, &value))? {
                    inner.pod_ranges.insert(range, At { content, revision });
                }
            }
            Key::MeshKey(mesh_key) => {
                if let Some(content) = usable(state::decode_owner(&key, &value))? {
                    inner.mesh_keys.insert(mesh_key, At { content, revision });
                }
            }
            Key::Intent(id) => match usable(Intent::decode(&key, &value))? {
                Some(content) => {
                    inner.intents.insert(id, At { content, revision });
                }
                None => drop(inner.intents.remove(&id)),
            },
            Key::RegisterTicket => {
                let content = usable(state::decode_ticket(&key, &value))?;
                inner.ticket = content.map(|content| At { content, revision });
            }
            Key::Other => {}
        }
        // Some of them have secrets in them.
        value.zeroize();
        Ok(())
    }

    fn delete(&self, inner: &mut Inner, key: &str) {
        match Key::parse(key) {
            Key::Cluster => {
                inner.cluster = None;
                inner.members += 1;
            }
            Key::Node(id) => {
                inner.entry(id).record = None;
                inner.members += 1;
                inner.touch(id);
            }
            Key::Status(id) => {
                inner.entry(id).status = None;
                inner.touch(id);
            }
            Key::Liveness(id) => inner.set_liveness(id, Liveness::default()),
            Key::Candidate => {
                inner.candidates.remove(key);
                inner.touch_all();
            }
            Key::Tombstone(id) => drop(inner.tombstones.remove(&id)),
            Key::JoinKey(key) => drop(inner.join_keys.remove(&key)),
            Key::PodRange(range) => drop(inner.pod_ranges.remove(&range)),
            Key::MeshKey(key) => drop(inner.mesh_keys.remove(&key)),
            Key::Intent(id) => drop(inner.intents.remove(&id)),
            Key::RegisterTicket => inner.ticket = None,
            Key::Other => {}
        }
    }

    /// Whether an earlier life of this curator has written this. It means
    /// nothing any more, and its lease is noted, to be revoked.
    fn is_former(&self, inner: &mut Inner, curator: NodeId, lease: i64) -> bool {
        let former = curator == self.own && inner.session.is_none_or(|s| s.id() != lease);
        if former {
            inner.former.insert(lease);
        }
        former
    }

    /// Begins a new life of this curator under this lease. Returns the leases
    /// that earlier lives have left.
    pub fn begin_session(&self, lease: Lease) -> BTreeSet<i64> {
        self.change(0, |inner| {
            inner.session = Some(lease);
            let former: Vec<_> = inner
                .nodes
                .iter()
                .filter_map(|(id, entry)| match entry.liveness {
                    Liveness::Heard {
                        curator, lease: l, ..
                    } if curator == self.own => Some((*id, l)),
                    _ => None,
                })
                .filter(|(_, l)| *l != lease.id())
                .collect();
            for (id, lease) in former {
                inner.former.insert(lease);
                inner.set_liveness(id, Liveness::default());
            }
            let former = &mut inner.former;
            inner.candidates.retain(|_, candidate| {
                let stays = candidate.curator != self.own || candidate.lease == lease.id();
                if !stays {
                    former.insert(candidate.lease);
                }
                stays
            });
            inner.touch_all();
            std::mem::take(&mut inner.former)
        })
    }

    /// Waits until some node's grace is over.
    async fn next_overdue(&self) {
        let mut changed = self.version.subscribe();
        loop {
            changed.mark_unchanged();
            let deadline = self.deadlines(&self.lock()).min();
            let waited = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = waited => return,
                // The sender lives as long as `self`.
                _ = changed.changed() => {}
            }
        }
    }

    fn deadlines<'a>(&self, inner: &'a Inner) -> impl Iterator<Item = Instant> + use<'a> {
        let grace = self.grace;
        inner.nodes.values().filter_map(move |entry| match entry {
            Entry {
                record: Some(_),
                liveness:
                    Liveness::Lost {
                        since,
                        overdue: false,
                    },
                ..
            } => Some(*since + grace),
            _ => None,
        })
    }

    fn mark_overdue(&self) {
        let now = Instant::now();
        self.change(0, |inner| {
            let overdue: Vec<_> = inner
                .nodes
                .iter_mut()
                .filter_map(|(id, entry)| match &mut entry.liveness {
                    Liveness::Lost { since, overdue }
                        if !*overdue && *since + self.grace <= now =>
                    {
                        *overdue = true;
                        Some(*id)
                    }
                    _ => None,
                })
                .collect();
            for id in overdue {
                inner.touch(id);
            }
        });
    }

    /// Notes that this curator has heard the node just now.
    pub fn heard(&self, id: NodeId) {
        if let Some(entry) = self.lock().nodes.get_mut(&id) {
            entry.heartbeat = Some(Instant::now());
        }
    }

    /// The curator that hears the node, and since which revision.
    pub fn heard_by(&self, id: NodeId) -> Option<(NodeId, i64)> {
        match self.lock().nodes.get(&id)?.liveness {
            Liveness::Heard {
                curator, revision, ..
            } => Some((curator, revision)),
            _ => None,
        }
    }

    /// The nodes that are heard under this lease, and since which revision.
    pub fn heard_under(&self, session: Lease) -> Vec<(NodeId, i64)> {
        let inner = self.lock();
        let nodes = inner.nodes.iter().filter_map(|(id, e)| match e.liveness {
            Liveness::Heard {
                lease, revision, ..
            } if lease == session.id() => Some((*id, revision)),
            _ => None,
        });
        nodes.collect()
    }

    /// The node's record and its revision.
    pub fn node(&self, id: NodeId) -> Option<(NodeRecord, i64)> {
        let inner = self.lock();
        let stored = inner.nodes.get(&id)?.record.as_ref()?;
        Some((stored.content.clone(), stored.revision))
    }

    /// What the node has said last of itself, if the node exists.
    pub fn status(&self, id: NodeId) -> Option<NodeStatus> {
        let inner = self.lock();
        let entry = inner.nodes.get(&id)?;
        entry.record.as_ref()?;
        Some(entry.status.as_ref()?.content.clone())
    }

    /// What is true of the whole cluster.
    pub fn cluster(&self) -> Option<At<ClusterRecord>> {
        self.lock().cluster.clone()
    }

    /// What lets a machine ask to be registered, once somebody wanted to know.
    pub fn ticket(&self) -> Option<At<Ticket>> {
        self.lock().ticket.clone()
    }

    /// What stays of a deleted node.
    pub fn tombstone(&self, id: NodeId) -> Option<Tombstone> {
        self.lock().tombstones.get(&id).cloned()
    }

    /// The node that has this join key, or had it when it was deleted.
    pub fn join_key_of(&self, key: &PublicKey) -> Option<NodeId> {
        self.lock().join_keys.get(key).copied()
    }

    /// What node `id` may have of the mesh with this key.
    pub fn mesh(&self, id: NodeId, key: &MeshKey) -> Found {
        let inner = self.lock();
        let mut own = inner.pod_ranges.iter().filter(|(_, at)| at.content == id);
        Found {
            own: own.next().map(|(range, at)| at.clone().map(|_| *range)),
            free: PodRange::all().find(|range| !inner.pod_ranges.contains_key(range)),
            key_of: inner.mesh_keys.get(key).cloned(),
        }
    }

    /// The node that has this identity key.
    pub fn node_with_key(&self, key: &PublicKey) -> Option<NodeId> {
        let inner = self.lock();
        let has_key = |entry: &&Entry| {
            let record = entry.record.as_ref();
            record.is_some_and(|record| record.content.public_key == *key)
        };
        let entry = inner.nodes.values().find(has_key)?;
        Some(entry.record.as_ref()?.content.id)
    }

    /// What is wanted of the node's membership in consensus.
    pub fn intent(&self, id: NodeId) -> Option<At<Intent>> {
        self.lock().intents.get(&id).cloned()
    }

    /// All of these.
    pub fn intents(&self) -> Vec<At<Intent>> {
        self.lock().intents.values().cloned().collect()
    }

    /// How many nodes are in this state.
    pub fn count(&self, state: NodeState) -> usize {
        let inner = self.lock();
        let records = inner.nodes.values().filter_map(|e| e.record.as_ref());
        records
            .filter(|record| record.content.state == state)
            .count()
    }

    /// Whether a caller with this identity and key belongs to the cluster now.
    pub fn admits(&self, identity: &Identity, key: &PublicKey) -> Result<(), NotMember> {
        let inner = self.lock();
        let subject = || identity.subject.clone();
        let unknown = || NotMember::Unknown(subject());
        let cluster = &inner.cluster.as_ref().ok_or_else(unknown)?.content;
        if cluster.id != identity.cluster {
            return Err(unknown());
        }
        let (known, state) = match &identity.subject {
            Subject::User(name) if *name == UserName::owner() => (cluster.owner, NodeState::Up),
            Subject::User(_) => return Err(unknown()),
            Subject::Node(id) => {
                let record = inner.nodes.get(id).and_then(|e| e.record.as_ref());
                let record = &record.ok_or_else(unknown)?.content;
                (record.public_key, record.state)
            }
        };
        if known != *key {
            return Err(NotMember::OtherKey(subject()));
        }
        if state != NodeState::Up {
            return Err(NotMember::NotUp(subject(), health::name(state)));
        }
        Ok(())
    }

    /// Where curators can be found: consensus members that are UP and have
    /// said where they are.
    pub fn directory(&self) -> ClusterDirectory {
        let inner = self.lock();
        let nodes = inner.nodes.values().filter_map(|entry| {
            let record = &entry.record.as_ref()?.content;
            let status = &entry.status.as_ref()?.content;
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

impl Inner {
    /// The keys of everything that is held, but candidates of former lives.
    fn keys(&self) -> Vec<String> {
        let nodes = self.nodes.iter().flat_map(|(id, entry)| {
            [
                entry.record.is_some().then(|| state::node_key(*id)),
                entry.status.is_some().then(|| state::status_key(*id)),
                (!matches!(entry.liveness, Liveness::Lost { .. }))
                    .then(|| state::liveness_key(*id)),
            ]
        });
        let cluster = self.cluster.as_ref().map(|_| state::CLUSTER.to_owned());
        let ticket = self.ticket.as_ref().map(|_| state::REGISTER_TICKET.into());
        nodes
            .flatten()
            .chain(self.candidates.keys().cloned())
            .chain(self.intents.keys().map(|id| state::intent_key(*id)))
            .chain(self.tombstones.keys().map(|id| state::tombstone_key(*id)))
            .chain(self.join_keys.keys().map(state::join_key_key))
            .chain(
                self.pod_ranges
                    .keys()
                    .map(|range| state::pod_range_key(*range)),
            )
            .chain(self.mesh_keys.keys().map(state::mesh_key_key))
            .chain(cluster)
            .chain(ticket)
            .collect()
    }
}

/// A spoilt record is reported and counts as absent; a newer one is an error.
fn usable<T>(decoded: Result<T, RecordError>) -> Result<Option<T>, RecordError> {
    match decoded {
        Ok(content) => Ok(Some(content)),
        Err(error @ RecordError::Malformed { .. }) => {
            tracing::error!("{error}; it counts as absent");
            Ok(None)
        }
        Err(error @ RecordError::TooNew { .. }) => Err(error),
    }
}

mod leading;
mod views;

pub use leading::{Leader, Leadership};
pub use views::{Changes, Moment};

#[cfg(test)]
mod tests;
