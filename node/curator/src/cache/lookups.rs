//! Lookups of records for decisions and access checks. Each result is a consistent copy.

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_api::identity::{Identity, MeshKey, NodeId, PublicKey, Subject, Ticket, UserName};
use hearth_api::ranges::ClusterRanges;
use hearth_api::settings;
use hearth_api::v1::{ClusterDirectory, NodeState, NodeStatus};
use hearth_cluster::decisions::Versioned;
use hearth_cluster::decisions::networking::Found;
use hearth_cluster::messages::name;
use hearth_cluster::state::{ClusterRecord, Intent, NodeRecord, Tombstone, Trusted};
use hearth_consensus::Lease;
use hearth_tpm::Digest;

use super::Cache;
use crate::health::Liveness;

/// Why a caller with a valid certificate is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMember {
    /// It has been deleted, or never existed.
    #[error("{0} is not a member of this cluster (any more)")]
    Unknown(Subject),
    /// Its certificate is for a key that it no longer has.
    #[error("{0} has another key now: this certificate is no longer valid")]
    OtherKey(Subject),
    /// It is not in the state UP; the second field is its state.
    #[error("{0} is {1}: only nodes that are UP may call this method")]
    NotUp(Subject, &'static str),
}

impl Cache {
    /// The curator that receives the node's heartbeats, and the revision since when.
    pub fn heartbeat_owner(&self, id: NodeId) -> Option<(NodeId, i64)> {
        match self.lock().presence.liveness(id)? {
            Liveness::Heard {
                curator, revision, ..
            } => Some((*curator, *revision)),
            _ => None,
        }
    }

    /// Decides by the boot of the node that a curator hears, and by the last status that the node has reported. Without
    /// copies: this is done for each report.
    pub fn heard<T>(
        &self,
        id: NodeId,
        decide: impl FnOnce(Option<&str>, Option<&NodeStatus>) -> T,
    ) -> T {
        let contents = self.lock();
        let heard = match contents.presence.liveness(id) {
            Some(Liveness::Heard { boot_id, .. }) => Some(boot_id.as_str()),
            _ => None,
        };
        decide(heard, contents.records.status(id))
    }

    /// The nodes whose liveness keys are attached to this lease, with the revisions of those keys.
    pub fn nodes_in_session(&self, session: Lease) -> Vec<(NodeId, i64)> {
        self.lock().presence.nodes_in_session(session)
    }

    /// The node's record and its revision.
    pub fn node(&self, id: NodeId) -> Option<(NodeRecord, i64)> {
        let contents = self.lock();
        let stored = contents.records.record(id)?;
        Some((stored.content.clone(), stored.revision))
    }

    /// The nodes whose records cannot be read.
    pub fn unreadable_nodes(&self) -> BTreeSet<NodeId> {
        self.lock().records.unreadable().collect()
    }

    /// The last status that the node has reported, if the node exists.
    pub fn status(&self, id: NodeId) -> Option<NodeStatus> {
        let contents = self.lock();
        contents.records.record(id)?;
        contents.records.status(id).cloned()
    }

    /// The revision of the node's record, and whether the last status that it has reported is the
    /// same as another one. Without copies: this is done for each report.
    pub fn reported(
        &self,
        id: NodeId,
        same: impl FnOnce(&NodeStatus) -> bool,
    ) -> Option<(i64, bool)> {
        let contents = self.lock();
        let revision = contents.records.record(id)?.revision;
        let known = contents.records.status(id);
        Some((revision, known.is_some_and(same)))
    }

    /// The cluster's record.
    pub fn cluster(&self) -> Option<Versioned<ClusterRecord>> {
        self.lock().records.cluster().cloned()
    }

    /// The digest of the cluster's unlock settings; `None` without the cluster's record.
    pub fn unlock_settings(&self) -> Option<u64> {
        self.lock().records.unlock_settings()
    }

    /// The time to live of sessions of curators, by the cluster's setting.
    pub fn session_length(&self) -> Duration {
        let configuration = self.cluster().map(|stored| stored.content.configuration);
        // Without the cluster's record there is no setting either.
        let configuration = settings::with_defaults(configuration.unwrap_or_default());
        Duration::from_secs(configuration.curator_session_seconds.into())
    }

    /// The register ticket; created when it is first requested.
    pub fn ticket(&self) -> Option<Versioned<Ticket>> {
        self.lock().records.ticket().cloned()
    }

    /// The tombstone of a deleted node.
    pub fn tombstone(&self, id: NodeId) -> Option<Tombstone> {
        self.lock().records.tombstone(id).cloned()
    }

    /// The node that has this join key, or had it when it was deleted.
    pub fn join_key_of(&self, key: &PublicKey) -> Option<NodeId> {
        self.lock().records.join_key_owner(key)
    }

    /// What the records say about the pod range of node `id`, in a cluster with these ranges, and about
    /// this mesh key.
    pub fn mesh(&self, id: NodeId, key: &MeshKey, ranges: &ClusterRanges) -> Found {
        self.lock().records.mesh(id, key, ranges)
    }

    /// The node that has this identity key.
    pub fn node_with_key(&self, key: &PublicKey) -> Option<NodeId> {
        let contents = self.lock();
        let mut nodes = contents.records.nodes();
        Some(nodes.find(|node| node.public_key == *key)?.id)
    }

    /// The trusted images.
    pub fn images(&self) -> Vec<Versioned<Trusted>> {
        self.lock().records.images().cloned().collect()
    }

    /// The trusted image with these parts.
    pub fn image(&self, parts: &Digest) -> Option<Versioned<Trusted>> {
        self.lock().records.image(parts).cloned()
    }

    /// The requested change of the node's etcd membership.
    pub fn intent(&self, id: NodeId) -> Option<Versioned<Intent>> {
        self.lock().records.intent(id).cloned()
    }

    /// All intents.
    pub fn intents(&self) -> Vec<Versioned<Intent>> {
        self.lock().records.intents().cloned().collect()
    }

    /// The number of nodes in this state.
    pub fn count(&self, state: NodeState) -> usize {
        let contents = self.lock();
        let nodes = contents.records.nodes();
        nodes.filter(|node| node.state == state).count()
    }

    /// The addresses of curators: consensus members that are UP and have reported an address.
    pub fn directory(&self) -> ClusterDirectory {
        self.lock().records.directory()
    }

    /// Checks that a caller with this identity and key is currently a member of the cluster.
    pub fn admits(&self, identity: &Identity, key: &PublicKey) -> Result<(), NotMember> {
        let contents = self.lock();
        let subject = || identity.subject.clone();
        let unknown = || NotMember::Unknown(subject());
        let cluster = &contents.records.cluster().ok_or_else(unknown)?.content;
        if cluster.id != identity.cluster {
            return Err(unknown());
        }
        let (known, state) = match &identity.subject {
            Subject::User(name) if *name == UserName::owner() => (cluster.owner, NodeState::Up),
            Subject::User(_) => return Err(unknown()),
            Subject::Node(id) => {
                let record = &contents.records.record(*id).ok_or_else(unknown)?.content;
                (record.public_key, record.state)
            }
        };
        if known != *key {
            return Err(NotMember::OtherKey(subject()));
        }
        if state != NodeState::Up {
            return Err(NotMember::NotUp(subject(), name(state)));
        }
        Ok(())
    }
}
