//! What becomes of a request, given the records: the decisions of the curator
//! about nodes, without clock, network or store.
//!
//! Each decision is a function of what was asked and of records that were read,
//! with the revisions they had. It comes to an answer, to a [`Refused`], or to
//! a [`Write`](hearth_consensus::fenced::Write) whose conditions are exactly
//! the revisions it rests on. So it does not matter which curator decides, nor
//! how old its view is: what was decided on records that have changed since is
//! not written, and is decided again.
//!
//! Everything is idempotent: whoever repeats a request because the answer was
//! lost finds the work done and gets the same answer.
//!
//! | module | about |
//! |---|---|
//! | [`standing`] | the states of a node and the steps between them |
//! | [`registration`] | a machine asks to become a node |
//! | [`commit`] | an approved machine becomes one |
//! | [`join`] | a node comes back |
//! | [`roles`] | roles, and the way out of service |
//! | [`networking`] | its part of the mesh over which pods reach each other |
//! | [`removal`] | a node is forgotten |
//! | [`labelling`] | what operators call it |
//! | [`kubernetes`] | who may speak with Kubernetes, and where |
//! | [`configuration`] | how the cluster is set up |

pub mod commit;
pub mod configuration;
pub mod join;
pub mod kubernetes;
pub mod labelling;
pub mod networking;
pub mod refused;
pub mod registration;
pub mod removal;
pub mod roles;
pub mod standing;

#[cfg(test)]
mod tests;

pub use refused::Refused;

use hearth_api::identity::NodeId;
use hearth_consensus::fenced::{Condition, Write};

use super::state::{self, FullRecord, Intent};

/// A record and the revision at which it was last written.
#[derive(Clone)]
pub struct At<T> {
    /// The record.
    pub content: T,
    /// Of its last write.
    pub revision: i64,
}

impl<T> At<T> {
    /// A part of the record, of the same revision.
    pub fn map<U>(self, part: impl FnOnce(T) -> U) -> At<U> {
        At {
            content: part(self.content),
            revision: self.revision,
        }
    }
}

/// A node as it was found, and what is about to change of it.
#[derive(Clone)]
pub struct FoundNode {
    /// The node.
    pub full: At<FullRecord>,
    /// Of its membership in consensus.
    pub intent: Option<At<Intent>>,
}

impl FoundNode {
    /// Which node.
    pub fn id(&self) -> NodeId {
        self.full.content.node.id
    }

    /// A write that happens only if the node's record is what was found.
    fn unchanged(&self) -> Write {
        Write::when(Condition::Unchanged(
            state::node_key(self.id()),
            self.full.revision,
        ))
    }

    /// The same, if the intent is what was found, too.
    fn all_unchanged(&self) -> Write {
        let key = state::intent_key(self.id());
        self.unchanged().and(match &self.intent {
            Some(intent) => Condition::Unchanged(key, intent.revision),
            None => Condition::Absent(key),
        })
    }
}

/// Puts the node's record.
fn put(write: Write, full: &FullRecord) -> Write {
    write.put(state::node_key(full.node.id), full.encode().to_vec())
}
