//! The leader among the curators: the oldest candidate.

use hearth_api::identity::NodeId;

use super::Cache;

/// A curator that is ready to lead.
pub(super) struct Candidate {
    pub curator: NodeId,
    pub lease: i64,
    /// Create revision of its key. The oldest candidate leads.
    pub since: i64,
}

/// The curator that does the background work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The node that it runs on.
    pub node: NodeId,
    /// That node's address; empty if it has not reported one yet.
    pub host: String,
    /// The curator's port; 0 if not known yet.
    pub port: u32,
}

/// Proof that this curator leads: its writes have the condition
/// [`Created`](hearth_consensus::fenced::Condition::Created) of this key and revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// The key of its candidacy.
    pub key: String,
    /// The create revision of that key.
    pub since: i64,
}

impl Cache {
    /// The current leader: the oldest candidate.
    pub fn leader(&self) -> Option<Leader> {
        let contents = self.lock();
        let (_, oldest) = contents.presence.oldest_candidate()?;
        let status = contents.records.status(oldest.curator);
        let (host, port) = status.map_or((String::new(), 0), |status| {
            (status.external_address.clone(), status.curator_port)
        });
        Some(Leader {
            node: oldest.curator,
            host,
            port,
        })
    }

    /// This curator's leadership, if it is the oldest candidate in its present session.
    pub fn leadership(&self) -> Option<Leadership> {
        let contents = self.lock();
        let (key, oldest) = contents.presence.oldest_candidate()?;
        contents.presence.is_own(oldest).then(|| Leadership {
            key: key.clone(),
            since: oldest.since,
        })
    }

    /// The number of candidates.
    pub fn candidates(&self) -> usize {
        self.lock().presence.candidates()
    }
}
