//! What those who decide ask of the records. Each answer is a copy, of one
//! moment.

use hearth_api::{
    identity::{Identity, MeshKey, NodeId, PublicKey, Subject, Ticket, UserName},
    v1::{ClusterDirectory, NodeState, NodeStatus},
};
use hearth_consensus::Lease;

use super::Cache;
use crate::decisions::{At, networking::Found};
use crate::health::{self, Liveness};
use crate::state::{ClusterRecord, Intent, NodeRecord, Tombstone};

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

impl Cache {
    /// The curator that hears the node, and since which revision.
    pub fn heartbeat_owner(&self, id: NodeId) -> Option<(NodeId, i64)> {
        match self.lock().presence.liveness(id)? {
            Liveness::Heard {
                curator, revision, ..
            } => Some((*curator, *revision)),
            _ => None,
        }
    }

    /// The nodes that are heard under this lease, and since which revision.
    pub fn nodes_in_session(&self, session: Lease) -> Vec<(NodeId, i64)> {
        self.lock().presence.nodes_in_session(session)
    }

    /// The node's record and its revision.
    pub fn node(&self, id: NodeId) -> Option<(NodeRecord, i64)> {
        let contents = self.lock();
        let stored = contents.records.record(id)?;
        Some((stored.content.clone(), stored.revision))
    }

    /// What the node has said last of itself, if the node exists.
    pub fn status(&self, id: NodeId) -> Option<NodeStatus> {
        let contents = self.lock();
        contents.records.record(id)?;
        contents.records.status(id).cloned()
    }

    /// What is true of the whole cluster.
    pub fn cluster(&self) -> Option<At<ClusterRecord>> {
        self.lock().records.cluster().cloned()
    }

    /// What lets a machine ask to be registered, once somebody wanted to know.
    pub fn ticket(&self) -> Option<At<Ticket>> {
        self.lock().records.ticket().cloned()
    }

    /// What stays of a deleted node.
    pub fn tombstone(&self, id: NodeId) -> Option<Tombstone> {
        self.lock().records.tombstone(id).cloned()
    }

    /// The node that has this join key, or had it when it was deleted.
    pub fn join_key_of(&self, key: &PublicKey) -> Option<NodeId> {
        self.lock().records.join_key_owner(key)
    }

    /// What node `id` may have of the mesh with this key.
    pub fn mesh(&self, id: NodeId, key: &MeshKey) -> Found {
        self.lock().records.mesh(id, key)
    }

    /// The node that has this identity key.
    pub fn node_with_key(&self, key: &PublicKey) -> Option<NodeId> {
        let contents = self.lock();
        let mut nodes = contents.records.nodes();
        Some(nodes.find(|node| node.public_key == *key)?.id)
    }

    /// What is wanted of the node's membership in consensus.
    pub fn intent(&self, id: NodeId) -> Option<At<Intent>> {
        self.lock().records.intent(id).cloned()
    }

    /// All of these.
    pub fn intents(&self) -> Vec<At<Intent>> {
        self.lock().records.intents().cloned().collect()
    }

    /// How many nodes are in this state.
    pub fn count(&self, state: NodeState) -> usize {
        let contents = self.lock();
        let nodes = contents.records.nodes();
        nodes.filter(|node| node.state == state).count()
    }

    /// Where curators can be found: consensus members that are UP and have
    /// said where they are.
    pub fn directory(&self) -> ClusterDirectory {
        self.lock().records.directory()
    }

    /// Whether a caller with this identity and key belongs to the cluster now.
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
            return Err(NotMember::NotUp(subject(), health::name(state)));
        }
        Ok(())
    }
}
