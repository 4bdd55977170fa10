//! Which curator leads: the oldest of those that are ready to.

use hearth_api::identity::NodeId;

use super::Cache;

/// A curator that is ready to.
pub(super) struct Candidate {
    pub curator: NodeId,
    pub lease: i64,
    /// The oldest candidate leads.
    pub since: i64,
}

/// The curator that does the background work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Which node.
    pub node: NodeId,
    /// Where it is, as far as it has said so.
    pub host: String,
    /// The curator's port there; 0 while not known.
    pub port: u32,
}

/// That this curator leads, and what proves it: the condition
/// [`Created`](hearth_consensus::fenced::Condition::Created) of this key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// Its candidacy.
    pub key: String,
    /// When that came into being.
    pub since: i64,
}

impl Cache {
    /// The oldest candidate.
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

    /// Whether the oldest candidate is this curator, in its present life.
    pub fn leadership(&self) -> Option<Leadership> {
        let contents = self.lock();
        let (key, oldest) = contents.presence.oldest_candidate()?;
        contents.presence.is_own(oldest).then(|| Leadership {
            key: key.clone(),
            since: oldest.since,
        })
    }

    /// How many curators are ready to lead.
    pub fn candidates(&self) -> usize {
        self.lock().presence.candidates()
    }
}
