//! Records in memory, with the revisions and conditions of etcd.

use std::collections::BTreeMap;

use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::v1::ClusterConfiguration;
use hearth_consensus::fenced::{Condition, Write};

use crate::decisions::{FoundNode, Versioned};
use crate::state::{self, FullRecord, Intent, NodeRecord, Tombstone};

/// A key's value, create revision and mod revision.
type Store = BTreeMap<String, (Vec<u8>, i64, i64)>;

#[derive(Clone, Default)]
pub(super) struct Records {
    pub store: Store,
    pub revision: i64,
}

impl Records {
    pub(super) fn at<T>(
        &self,
        key: String,
        decode: impl Fn(&str, &[u8]) -> Result<T, state::RecordError>,
    ) -> Option<Versioned<T>> {
        let (value, _, revision) = self.store.get(&key)?;
        let content = decode(&key, value).expect("a record that can be read");
        let revision = *revision;
        Some(Versioned { content, revision })
    }

    pub(super) fn node(&self, id: NodeId) -> Option<NodeRecord> {
        Some(self.find(id)?.full.content.node)
    }

    pub(super) fn find(&self, id: NodeId) -> Option<FoundNode> {
        Some(FoundNode {
            full: self.at(state::node_key(id), FullRecord::decode)?,
            intent: self.at(state::intent_key(id), Intent::decode),
        })
    }

    pub(super) fn tombstone(&self, id: NodeId) -> Option<Tombstone> {
        Some(
            self.at(state::tombstone_key(id), Tombstone::decode)?
                .content,
        )
    }

    pub(super) fn join_key_of(&self, key: &PublicKey) -> Option<NodeId> {
        let at = self.at(state::join_key_key(key), state::decode_owner)?;
        Some(at.content)
    }

    fn holds(&self, condition: &Condition) -> bool {
        let of = |key: &String| self.store.get(key).map_or((0, 0), |(_, c, m)| (*c, *m));
        match condition {
            Condition::Absent(key) => of(key).0 == 0,
            Condition::Created(key, revision) => of(key).0 == *revision,
            Condition::Unchanged(key, revision) => of(key).1 == *revision,
        }
    }

    pub(super) fn apply(&mut self, write: &Write) -> bool {
        let (conditions, operations) = write.parts();
        if !conditions.iter().all(|condition| self.holds(condition)) {
            return false;
        }
        self.revision += 1;
        for (key, value) in operations {
            match value {
                Some(value) => {
                    let created = self.store.get(key).map_or(self.revision, |old| old.1);
                    let new = (value.to_vec(), created, self.revision);
                    self.store.insert(key.to_owned(), new);
                }
                None => drop(self.store.remove(key)),
            }
        }
        true
    }

    pub(super) fn configuration(&self) -> Versioned<ClusterConfiguration> {
        Versioned {
            content: ClusterConfiguration::default(),
            revision: self.store[state::CLUSTER].2,
        }
    }
}
