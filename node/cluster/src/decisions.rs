//! The curator's decisions about nodes, as pure functions without clock, network or store.
//!
//! Each decision is a function of the request and of records with their revisions. The result is an
//! answer, a [`Rejection`], or a [`Write`] whose conditions are
//! exactly the revisions that the decision depends on. So it does not matter which curator decides,
//! or how old its view is: if a record has changed since, the write fails, and the decision is
//! repeated.
//!
//! All decisions are idempotent: a client that repeats a request because the answer was lost gets
//! the same answer.
//!
//! | module | decides about |
//! |---|---|
//! | [`transitions`] | the states of a node and the steps between them |
//! | [`admission`] | what a machine has to have booted |
//! | [`registration`] | a machine that registers |
//! | [`commit`] | an approved machine that becomes a node |
//! | [`join`] | a node that joins again after a boot |
//! | [`roles`] | roles and decommissioning |
//! | [`networking`] | mesh keys and pod ranges |
//! | [`removal`] | deletion of a node |
//! | [`labelling`] | labels |
//! | [`node_settings`] | settings of a node |
//! | [`kubernetes`] | certificates and access for Kubernetes |
//! | [`configuration`] | the cluster's configuration |

pub mod admission;
pub mod commit;
pub mod configuration;
pub mod join;
pub mod kubernetes;
pub mod labelling;
pub mod networking;
pub mod node_settings;
pub mod ownership;
mod pairs;
pub mod registration;
pub mod rejection;
pub mod removal;
pub mod roles;
pub mod transitions;

#[cfg(test)]
mod tests;

pub use rejection::Rejection;

use hearth_api::identity::NodeId;
use hearth_consensus::fenced::{Condition, Write};

use crate::state::{self, FullCluster, FullRecord, Intent};

/// A record and the revision at which it was last written.
#[derive(Clone)]
pub struct Versioned<T> {
    /// The record.
    pub content: T,
    /// The mod revision of its key.
    pub revision: i64,
}

impl<T> Versioned<T> {
    /// A part of the record, with the same revision.
    pub fn map<U>(self, part: impl FnOnce(T) -> U) -> Versioned<U> {
        Versioned {
            content: part(self.content),
            revision: self.revision,
        }
    }
}

/// The stored records of a node that a decision depends on.
#[derive(Clone)]
pub struct FoundNode {
    /// The node's record.
    pub full: Versioned<FullRecord>,
    /// The pending change of its etcd membership.
    pub intent: Option<Versioned<Intent>>,
}

impl FoundNode {
    /// The node's ID.
    pub fn id(&self) -> NodeId {
        self.full.content.node.id
    }

    /// A write on the condition that the node's record has not changed.
    fn unchanged(&self) -> Write {
        Write::when(Condition::Unchanged(
            state::node_key(self.id()),
            self.full.revision,
        ))
    }

    /// A write on the condition that neither the node's record nor its intent has changed.
    fn all_unchanged(&self) -> Write {
        let key = state::intent_key(self.id());
        self.unchanged().and(as_found(key, self.intent.as_ref()))
    }
}

/// A write of the cluster's record, on the condition that it has not changed.
fn put_cluster(found: &Versioned<FullCluster>, value: &[u8]) -> Write {
    let key = state::CLUSTER;
    Write::when(Condition::Unchanged(key.into(), found.revision)).put(key, value.to_vec())
}

/// The condition that a key still has the record that was found, or none.
fn as_found<T>(key: String, found: Option<&Versioned<T>>) -> Condition {
    match found {
        Some(record) => Condition::Unchanged(key, record.revision),
        None => Condition::Absent(key),
    }
}

/// Adds a put of the node's record.
fn put(write: Write, full: &FullRecord) -> Write {
    write.put(state::node_key(full.node.id), full.encode().to_vec())
}
