//! What stands in etcd under curators' leases: which curator hears a node, and
//! which curators are ready to lead; with it, when this curator began to miss a
//! node, and when it heard one last.
//!
//! What an earlier life of this curator has left there means nothing any more.
//! It is not believed, and its leases are noted, to be revoked.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use hearth_api::identity::NodeId;
use hearth_consensus::{Lease, Record};
use tokio::time::Instant;

use super::{
    leading::Candidate,
    records::{Applied, usable},
};
use crate::health::Liveness;
use crate::state::{self, LivenessRecord, RecordError};

/// Who hears one node.
#[derive(Default)]
struct Contact {
    liveness: Liveness,
    /// When this curator heard it last.
    heartbeat: Option<Instant>,
}

/// See the module.
pub(super) struct Presence {
    own: NodeId,
    contacts: HashMap<NodeId, Contact>,
    candidates: BTreeMap<String, Candidate>,
    /// This curator's lease.
    session: Option<Lease>,
    /// Leases that earlier lives of this curator have left.
    former: BTreeSet<i64>,
}

impl Presence {
    /// As the curator on node `own` sees it.
    pub(super) fn new(own: NodeId) -> Self {
        Self {
            own,
            contacts: HashMap::new(),
            candidates: BTreeMap::new(),
            session: None,
            former: BTreeSet::new(),
        }
    }

    /// Something is known of this node: from now on it is missed.
    pub(super) fn expect(&mut self, id: NodeId) {
        self.contacts.entry(id).or_default();
    }

    /// Takes in who hears the node now.
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
            _ => Liveness::default(),
        };
        Ok(self.set_liveness(id, liveness))
    }

    /// Nobody hears the node any more.
    pub(super) fn delete_liveness(&mut self, id: NodeId) -> Applied {
        self.set_liveness(id, Liveness::default())
    }

    fn set_liveness(&mut self, id: NodeId, new: Liveness) -> Applied {
        let contact = self.contacts.entry(id).or_default();
        // The grace runs from when the node was lost first.
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

    /// Takes in that a curator is ready to lead.
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

    /// A curator is no longer ready to.
    pub(super) fn delete_candidate(&mut self, key: &str) -> Applied {
        self.candidates.remove(key);
        Applied::Cluster
    }

    /// Whether an earlier life of this curator has written this.
    fn is_former(&mut self, curator: NodeId, lease: i64) -> bool {
        let former = curator == self.own && self.session.is_none_or(|s| s.id() != lease);
        if former {
            self.former.insert(lease);
        }
        former
    }

    /// Begins a new life of this curator under this lease. Returns what that
    /// has changed, and the leases that earlier lives have left.
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

    /// When the first grace is over, of the nodes that `exists` knows.
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

    /// Notes whose grace is over.
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

    /// Notes that this curator has heard the node just now.
    pub(super) fn record_heartbeat(&mut self, id: NodeId) {
        if let Some(contact) = self.contacts.get_mut(&id) {
            contact.heartbeat = Some(Instant::now());
        }
    }

    /// When this curator heard the node last.
    pub(super) fn last_heartbeat(&self, id: NodeId) -> Option<Instant> {
        self.contacts.get(&id)?.heartbeat
    }

    /// Who hears the node, if anything is known of it.
    pub(super) fn liveness(&self, id: NodeId) -> Option<&Liveness> {
        Some(&self.contacts.get(&id)?.liveness)
    }

    /// The nodes that are heard under this lease, and since which revision.
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

    /// The curator that leads, and its candidacy's key.
    pub(super) fn oldest_candidate(&self) -> Option<(&String, &Candidate)> {
        self.candidates.iter().min_by_key(|(_, c)| c.since)
    }

    /// Whether this candidate is this curator, in its present life.
    pub(super) fn is_own(&self, candidate: &Candidate) -> bool {
        let session = self.session.map(Lease::id);
        candidate.curator == self.own && session == Some(candidate.lease)
    }

    pub(super) fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// The keys of everything that is held, but those of former lives.
    pub(super) fn keys(&self) -> impl Iterator<Item = String> {
        let heard = self.contacts.iter();
        let heard = heard.filter(|(_, contact)| !matches!(contact.liveness, Liveness::Lost { .. }));
        heard
            .map(|(id, _)| state::liveness_key(*id))
            .chain(self.candidates.keys().cloned())
    }
}
