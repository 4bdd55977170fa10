//! The contents of the cache, and the only place where its versions change.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use bytes::Bytes;
use hearth_api::identity::NodeId;
use hearth_api::v1::Node;
use hearth_cluster::state::{Key, RecordError};
use hearth_consensus::{Change, Lease, Listing, Record};
use prost::Message as _;
use tokio::time::Instant;
use zeroize::Zeroize as _;

use super::presence::Presence;
use super::records::{Applied, Records};
use super::versions::Versions;
use crate::health;

pub(super) struct Contents {
    pub records: Records,
    pub presence: Presence,
    pub versions: Versions,
    /// The store's revision up to which all changes have been applied.
    pub revision: i64,
    /// Incremented when the cluster's record or a node's record changes, which decide who is a
    /// member.
    pub members: u64,
    bound: Duration,
    grace: Duration,
}

impl Contents {
    /// See [`Cache::new`](super::Cache::new).
    pub(super) fn new(own: NodeId, bound: Duration, grace: Duration) -> Self {
        Self {
            records: Records::default(),
            presence: Presence::new(own),
            versions: Versions::default(),
            revision: 0,
            members: 0,
            bound,
            grace,
        }
    }

    /// Replaces the contents by a complete list.
    pub(super) fn replace(&mut self, listing: Listing) -> Result<(), RecordError> {
        let present: HashSet<&str> = listing.records.iter().map(|r| r.key.as_str()).collect();
        let held: Vec<_> = self.records.keys().chain(self.presence.keys()).collect();
        for key in held {
            if !present.contains(key.as_str()) {
                self.delete(&key);
            }
        }
        listing
            .records
            .into_iter()
            .try_for_each(|record| self.put(record))
    }

    /// Applies a batch of changes.
    pub(super) fn apply(&mut self, batch: Vec<Change>) -> Result<(), RecordError> {
        batch.into_iter().try_for_each(|change| match change {
            Change::Put(record) => self.put(record),
            Change::Deleted { key, .. } => {
                self.delete(&key);
                Ok(())
            }
        })
    }

    fn put(&mut self, mut record: Record) -> Result<(), RecordError> {
        let applied = match Key::parse(&record.key) {
            Key::Liveness(id) => self.presence.put_liveness(id, &record),
            Key::Candidate => self.presence.put_candidate(&record),
            key => self.records.put(key, &record),
        };
        // Some records contain secrets.
        record.value.zeroize();
        self.note(applied?);
        Ok(())
    }

    fn delete(&mut self, key: &str) {
        let applied = match Key::parse(key) {
            Key::Liveness(id) => self.presence.delete_liveness(id),
            Key::Candidate => self.presence.delete_candidate(key),
            key => self.records.delete(&key),
        };
        self.note(applied);
    }

    fn note(&mut self, applied: Applied) {
        match applied {
            Applied::Unfollowed => {}
            Applied::Cluster => self.versions.touch_all(),
            Applied::Members => {
                self.members += 1;
                self.versions.touch_all();
            }
            Applied::Member(id) => {
                self.members += 1;
                self.note(Applied::Node(id));
            }
            Applied::Node(id) => {
                self.presence.expect(id);
                self.versions.touch(id, self.exists(id));
            }
        }
    }

    fn exists(&self, id: NodeId) -> bool {
        self.records.record(id).is_some()
    }

    /// Starts a new session of this curator with this lease. Returns the leases that are left from
    /// former sessions.
    pub(super) fn begin_session(&mut self, lease: Lease) -> BTreeSet<i64> {
        let (applied, former) = self.presence.begin_session(lease);
        applied.into_iter().for_each(|applied| self.note(applied));
        former
    }

    /// When the next grace period is over.
    pub(super) fn next_overdue(&self) -> Option<Instant> {
        self.presence.next_overdue(self.grace, |id| self.exists(id))
    }

    /// Marks the nodes whose grace period is over.
    pub(super) fn mark_overdue(&mut self) {
        let applied = self.presence.mark_overdue(Instant::now(), self.grace);
        applied.into_iter().for_each(|applied| self.note(applied));
    }

    /// One node, encoded for subscribers.
    pub(super) fn encoded(&mut self, id: NodeId) -> Option<Bytes> {
        let Self {
            records,
            presence,
            versions,
            bound,
            grace,
            ..
        } = self;
        let encode = || {
            let node = show(records, presence, id, None, *bound, *grace)?;
            Some(node.encode_to_vec().into())
        };
        versions.encoded(id, encode)
    }

    /// A node as clients see it at `now`.
    pub(super) fn shown(&self, id: NodeId, now: Instant) -> Option<Node> {
        let (records, presence) = (&self.records, &self.presence);
        show(records, presence, id, Some(now), self.bound, self.grace)
    }
}

/// A node as clients see it. The age of its last heartbeat changes all the time, so it is set only
/// for a call at a given time, `now`, and not for subscribers.
fn show(
    records: &Records,
    presence: &Presence,
    id: NodeId,
    now: Option<Instant>,
    bound: Duration,
    grace: Duration,
) -> Option<Node> {
    let record = &records.record(id)?.content;
    let status = records.status(id);
    let reported = status.map(|status| &status.boot_id[..]);
    let liveness = presence.liveness(id)?;
    let (health, health_reason) = health::judge(record.state, liveness, reported, bound, grace);
    let heartbeat = presence.last_heartbeat(id);
    Some(Node {
        id: record.id.to_string(),
        public_key: record.public_key.as_bytes().to_vec(),
        state: record.state.into(),
        roles: Some(record.roles),
        status: status.cloned(),
        health: health.into(),
        health_reason,
        labels: record.labels.clone(),
        settings: record.settings.clone(),
        tpm_usage: record.tpm_usage.into(),
        storage_security: record.storage_security.into(),
        heartbeat_age_ms: now.zip(heartbeat).map(|(now, heard)| {
            u64::try_from(now.duration_since(heard).as_millis()).unwrap_or(u64::MAX)
        }),
        decommissioning: record.decommissioning,
        networking: record.networking.map(Into::into),
        joins: records.joins(id).to_vec(),
    })
}
