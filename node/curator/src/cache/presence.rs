//! Records attached to curators' leases: which curator receives a node's heartbeats, and which
//! curators are candidates for the leadership. Also when this curator lost sight of a node, and
//! when it received a node's last heartbeat.
//!
//! Records from former sessions of this curator are not valid any more. They are ignored, and
//! their leases are collected to be revoked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_cluster::state::{self, LivenessRecord, RecordError};
use hearth_consensus::{Lease, Record};
use tokio::time::Instant;

use super::leading::Candidate;
use super::records::{Applied, usable};
use crate::health::Liveness;

/// The liveness of one node.
#[derive(Default)]
struct Contact {
    liveness: Liveness,
    /// When this curator received the node's last heartbeat.
    heartbeat: Option<Instant>,
}

pub(super) struct Presence {
    own: NodeId,
    contacts: HashMap<NodeId, Contact>,
    candidates: BTreeMap<String, Candidate>,
    /// The lease of this curator's session.
    session: Option<Lease>,
    /// Leases that are left from former sessions of this curator.
    former: BTreeSet<i64>,
}

impl Presence {
    /// For the curator on node `own`.
    pub(super) fn new(own: NodeId) -> Self {
        Self {
            own,
            contacts: HashMap::new(),
            candidates: BTreeMap::new(),
            session: None,
            former: BTreeSet::new(),
        }
    }

    /// Starts to track this node: without liveness record it counts as lost from now on.
    pub(super) fn expect(&mut self, id: NodeId) {
        self.contacts.entry(id).or_default();
    }

    /// Applies a liveness record.
    pub(super) fn put_liveness(
        &mut self,
        id: NodeId,
        record: &Record,
    ) -> Result<Applied, RecordError> {
        let liveness = match usable(LivenessRecord::decode(&record.key, &record.value))? {
            Some((LivenessRecord::HeardBy(curator), boot_id))
                if !self.is_former(curator, record.lease) =>
            {
                Liveness::Heard {
                    curator,
                    lease: record.lease,
                    revision: record.mod_revision,
                    boot_id,
                }
            }
            Some((LivenessRecord::GivenUp, _)) => Liveness::GivenUp,
            Some((LivenessRecord::Ended, _)) => Liveness::Ended,
            _ => Liveness::default(),
        };
        Ok(self.set_liveness(id, liveness))
    }

    /// Applies the deletion of a liveness record.
    pub(super) fn delete_liveness(&mut self, id: NodeId) -> Applied {
        self.set_liveness(id, Liveness::default())
    }

    fn set_liveness(&mut self, id: NodeId, new: Liveness) -> Applied {
        let contact = self.contacts.entry(id).or_default();
        // The grace period starts when the node is lost first.
        let still_lost = matches!(
            (&contact.liveness, &new),
            (Liveness::Lost { .. }, Liveness::Lost { overdue: false, .. })
        );
        if still_lost {
            return Applied::Unfollowed;
        }
        let differs = contact.liveness.differs(&new);
        contact.liveness = new;
        if differs {
            Applied::Node(id)
        } else {
            Applied::Unfollowed
        }
    }

    /// Applies a candidate record.
    pub(super) fn put_candidate(&mut self, record: &Record) -> Result<Applied, RecordError> {
        let curator = usable(state::decode_candidate(&record.key, &record.value))?;
        let Some(curator) = curator.filter(|id| !self.is_former(*id, record.lease)) else {
            return Ok(Applied::Unfollowed);
        };
        let candidate = Candidate {
            curator,
            lease: record.lease,
            since: record.create_revision,
        };
        self.candidates.insert(record.key.clone(), candidate);
        Ok(Applied::Cluster)
    }

    /// Applies the deletion of a candidate record.
    pub(super) fn delete_candidate(&mut self, key: &str) -> Applied {
        self.candidates.remove(key);
        Applied::Cluster
    }

    /// Whether a former session of this curator has written a record. If so, the lease is noted.
    fn is_former(&mut self, curator: NodeId, lease: i64) -> bool {
        let former = curator == self.own && self.session.is_none_or(|s| s.id() != lease);
        if former {
            self.former.insert(lease);
        }
        former
    }

    /// Starts a new session of this curator with this lease. Returns the changes, and the leases
    /// that are left from former sessions.
    pub(super) fn begin_session(&mut self, lease: Lease) -> (Vec<Applied>, BTreeSet<i64>) {
        self.session = Some(lease);
        let own = self.own;
        let heard: Vec<_> = self
            .contacts
            .iter()
            .filter_map(|(id, contact)| match contact.liveness {
                Liveness::Heard {
                    curator, lease: l, ..
                } if curator == own && l != lease.id() => Some((*id, l)),
                _ => None,
            })
            .collect();
        let mut applied = vec![Applied::Cluster];
        for (id, former) in heard {
            self.former.insert(former);
            applied.push(self.set_liveness(id, Liveness::default()));
        }
        let is_former =
            |candidate: &Candidate| candidate.curator == own && candidate.lease != lease.id();
        let candidates = self.candidates.values().filter(|c| is_former(c));
        self.former
            .extend(candidates.map(|candidate| candidate.lease));
        self.candidates.retain(|_, candidate| !is_former(candidate));
        (applied, std::mem::take(&mut self.former))
    }

    /// When the next grace period is over, among the nodes for which `exists` is true.
    pub(super) fn next_overdue(
        &self,
        grace: Duration,
        exists: impl Fn(NodeId) -> bool,
    ) -> Option<Instant> {
        let lost = self.contacts.iter().filter_map(|(id, contact)| {
            let Liveness::Lost {
                since,
                overdue: false,
            } = contact.liveness
            else {
                return None;
            };
            exists(*id).then_some(since + grace)
        });
        lost.min()
    }

    /// Marks the nodes whose grace period is over.
    pub(super) fn mark_overdue(&mut self, now: Instant, grace: Duration) -> Vec<Applied> {
        let mut applied = Vec::new();
        for (id, contact) in &mut self.contacts {
            if let Liveness::Lost { since, overdue } = &mut contact.liveness
                && !*overdue
                && *since + grace <= now
            {
                *overdue = true;
                applied.push(Applied::Node(*id));
            }
        }
        applied
    }

    /// Records that this curator has just received a heartbeat of the node.
    pub(super) fn record_heartbeat(&mut self, id: NodeId) {
        if let Some(contact) = self.contacts.get_mut(&id) {
            contact.heartbeat = Some(Instant::now());
        }
    }

    /// When this curator received the node's last heartbeat.
    pub(super) fn last_heartbeat(&self, id: NodeId) -> Option<Instant> {
        self.contacts.get(&id)?.heartbeat
    }

    /// The liveness of the node, if it is tracked.
    pub(super) fn liveness(&self, id: NodeId) -> Option<&Liveness> {
        Some(&self.contacts.get(&id)?.liveness)
    }

    /// The nodes whose liveness keys are attached to this lease, with the revisions of those keys.
    pub(super) fn nodes_in_session(&self, session: Lease) -> Vec<(NodeId, i64)> {
        let heard = self.contacts.iter();
        let heard = heard.filter_map(|(id, contact)| match contact.liveness {
            Liveness::Heard {
                lease, revision, ..
            } if lease == session.id() => Some((*id, revision)),
            _ => None,
        });
        heard.collect()
    }

    /// The candidate that leads, and its key.
    pub(super) fn oldest_candidate(&self) -> Option<(&String, &Candidate)> {
        self.candidates.iter().min_by_key(|(_, c)| c.since)
    }

    /// Whether this candidate is this curator, in its present session.
    pub(super) fn is_own(&self, candidate: &Candidate) -> bool {
        let session = self.session.map(Lease::id);
        candidate.curator == self.own && session == Some(candidate.lease)
    }

    pub(super) fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// The keys of all tracked records, without those of former sessions.
    pub(super) fn keys(&self) -> impl Iterator<Item = String> {
        let heard = self.contacts.iter();
        let heard = heard.filter(|(_, contact)| !matches!(contact.liveness, Liveness::Lost { .. }));
        heard
            .map(|(id, _)| state::liveness_key(*id))
            .chain(self.candidates.keys().cloned())
    }
}
