//! All writes to etcd.
//!
//! Every write of Hearth is one transaction with at least one condition, so that no write is based
//! on stale data. The transaction also writes the user's epoch key. A reader that has seen
//! everything up to the epoch's revision has therefore seen every earlier write: this is why
//! readers need only one watch.
//!
//! Background work, which only the elected curator does, adds its leadership as a further condition
//! ([`Condition::Created`] of its election key): a leader that was replaced while it was suspended
//! writes nothing.

use super::client::{ConsensusError, Lease, NamespacedClient};
use super::wire::compare::{CompareTarget, TargetUnion};
use super::wire::request_op::Request;
use super::wire::{Compare, DeleteRangeRequest, PutRequest, RequestOp, TxnRequest};

/// The epoch key, below each user's prefix; its revision is that of the user's last write.
pub const EPOCH: &str = "epoch";

/// A condition of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key does not exist.
    Absent(String),
    /// The key exists and was last written at this revision.
    Unchanged(String, i64),
    /// The key exists and was created at this revision: it may have been written since, but was
    /// never deleted.
    Created(String, i64),
}

/// A transaction, under construction.
#[must_use]
#[derive(Clone)]
pub struct Write {
    conditions: Vec<Condition>,
    operations: Vec<Operation>,
}

#[derive(Clone)]
enum Operation {
    Put {
        key: String,
        value: Vec<u8>,
        lease: Option<Lease>,
    },
    Delete {
        key: String,
    },
}

impl Write {
    /// A write that is done only if the condition holds. There is no write without a condition.
    pub fn when(condition: Condition) -> Self {
        Self {
            conditions: vec![condition],
            operations: Vec::new(),
        }
    }

    /// Adds a condition.
    pub fn and(mut self, condition: Condition) -> Self {
        self.conditions.push(condition);
        self
    }

    /// Sets a key.
    pub fn put(mut self, key: impl Into<String>, value: Vec<u8>) -> Self {
        self.operations.push(Operation::Put {
            key: key.into(),
            value,
            lease: None,
        });
        self
    }

    /// Sets a key and attaches it to the lease: it is deleted when the lease expires.
    pub fn put_leased(mut self, key: impl Into<String>, value: Vec<u8>, lease: Lease) -> Self {
        self.operations.push(Operation::Put {
            key: key.into(),
            value,
            lease: Some(lease),
        });
        self
    }

    /// Deletes a key.
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.operations.push(Operation::Delete { key: key.into() });
        self
    }
}

/// A key with its new value, or `None` if it is deleted.
#[cfg(any(test, feature = "testing"))]
pub type Part<'a> = (&'a str, Option<&'a [u8]>);

#[cfg(any(test, feature = "testing"))]
impl Write {
    /// The conditions, and the keys with their new values, for an in-memory store in tests.
    pub fn parts(&self) -> (&[Condition], Vec<Part<'_>>) {
        let operations = self.operations.iter().map(|operation| match operation {
            Operation::Put { key, value, .. } => (&key[..], Some(&value[..])),
            Operation::Delete { key } => (&key[..], None),
        });
        (&self.conditions, operations.collect())
    }
}

/// Why a write was not done, or is not known to have been done.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A condition does not hold: read and decide again.
    #[error("the records have changed since they were read")]
    Conflict,
    /// etcd refused the write, or did not answer in time.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
}

impl NamespacedClient {
    /// Commits the write atomically. Returns its revision.
    pub async fn write(&self, write: Write) -> Result<i64, WriteError> {
        const WHAT: &str = "write";
        let operation = |request| RequestOp {
            request: Some(request),
        };
        let compare = write
            .conditions
            .iter()
            .map(|condition| self.compare(condition))
            .collect();
        let mut success: Vec<_> = write
            .operations
            .into_iter()
            .map(|step| match step {
                Operation::Put { key, value, lease } => Request::RequestPut(PutRequest {
                    key: self.absolute(&key),
                    value,
                    lease: lease.map_or(0, Lease::id),
                    ..Default::default()
                }),
                Operation::Delete { key } => Request::RequestDeleteRange(DeleteRangeRequest {
                    key: self.absolute(&key),
                    ..Default::default()
                }),
            })
            .map(operation)
            .collect();
        success.push(operation(Request::RequestPut(PutRequest {
            key: [self.root.as_bytes(), EPOCH.as_bytes()].concat(),
            ..Default::default()
        })));

        let mut kv = self.kv();
        let request = TxnRequest {
            compare,
            success,
            ..Default::default()
        };
        let answer = self.step(WHAT, kv.txn(request)).await?;
        if !answer.succeeded {
            return Err(WriteError::Conflict);
        }
        let header = answer.header.ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "header",
        })?;
        Ok(header.revision)
    }

    /// A key that does not exist has the revision 0.
    fn compare(&self, condition: &Condition) -> Compare {
        let (key, target, union) = match condition {
            Condition::Absent(key) => (key, CompareTarget::Create, TargetUnion::CreateRevision(0)),
            Condition::Created(key, revision) => (
                key,
                CompareTarget::Create,
                TargetUnion::CreateRevision(*revision),
            ),
            Condition::Unchanged(key, revision) => {
                (key, CompareTarget::Mod, TargetUnion::ModRevision(*revision))
            }
        };
        let mut compare = Compare {
            key: self.absolute(key),
            target_union: Some(union),
            ..Default::default()
        };
        compare.set_target(target);
        compare
    }
}
