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

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};

use super::client::{ConsensusError, Lease, NamespacedClient};

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
        let compare = write.conditions.iter();
        let compare: Vec<_> = compare.map(|condition| self.compare(condition)).collect();
        let operations = write.operations.into_iter();
        let mut operations: Vec<_> = operations.map(|step| self.operation(step)).collect();
        let epoch = [self.root.as_bytes(), EPOCH.as_bytes()].concat();
        operations.push(TxnOp::put(epoch, "", None));

        let mut kv = self.kv();
        let call = kv.txn(Txn::new().when(compare).and_then(operations));
        let answer = self.step(WHAT, call).await?;
        if !answer.succeeded() {
            return Err(WriteError::Conflict);
        }
        let header = answer.header().ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "header",
        })?;
        Ok(header.revision())
    }

    /// A key that does not exist has the revision 0.
    fn compare(&self, condition: &Condition) -> Compare {
        let equal = CompareOp::Equal;
        match condition {
            Condition::Absent(key) => Compare::create_revision(self.absolute(key), equal, 0),
            Condition::Created(key, revision) => {
                Compare::create_revision(self.absolute(key), equal, *revision)
            }
            Condition::Unchanged(key, revision) => {
                Compare::mod_revision(self.absolute(key), equal, *revision)
            }
        }
    }

    fn operation(&self, operation: Operation) -> TxnOp {
        match operation {
            Operation::Put { key, value, lease } => {
                let options = lease.map(|lease| PutOptions::new().with_lease(lease.id()));
                TxnOp::put(self.absolute(&key), value, options)
            }
            Operation::Delete { key } => TxnOp::delete(self.absolute(&key), None),
        }
    }
}
