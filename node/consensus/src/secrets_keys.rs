//! The keys of Kubernetes' Secrets in etcd: which there are, for whom they are wrapped, and which controllers there are
//! to wrap them for. The keys themselves are in [`hearth_api::secrets_keys`]; nothing here is secret.
//!
//! | key | record | written |
//! |---|---|---|
//! | `controllers/ID` | [`Controller`] | by this controller |
//! | `keys/GENERATION` | [`StoredKey`] | by the controller that generates the key, then by any that wraps it for others |
//!
//! All are read at once, and each write requires that the record has not changed since: whoever comes second reads
//! again. A record that cannot be decoded is an error, and is never replaced: with it the only copy of a key might be
//! lost.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::private::{StoredSecretsController, StoredSecretsKey};
use hearth_api::recovery::{RecoveryError, RecoveryRecipient, WrappedKey};
use hearth_api::secrets_keys::{WRAPPED_KEY, parse_wrapped, wrapped_message};
use prost::Message as _;
use tokio::time::timeout;

use crate::fenced::{Condition, EPOCH, Write, WriteError};
use crate::{ConsensusError, NamespacedClient};

const CONTROLLERS: &str = "controllers/";
const KEYS: &str = "keys/";
/// The version of the records.
const VERSION: u32 = 1;

/// Why the records cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SecretsKeysError {
    /// etcd failed.
    #[error("cannot read the keys of Secrets")]
    Consensus(#[from] ConsensusError),
    /// A record is not what it should be.
    #[error("{key}: {field}: expected {expected}, got {found}")]
    Field {
        /// The record's key.
        key: String,
        /// Name of the field.
        field: &'static str,
        /// The expected value.
        expected: &'static str,
        /// The actual value.
        found: String,
    },
}

/// A Kubernetes controller, as it has announced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// To which keys are wrapped for it.
    pub recipient: RecoveryRecipient,
    /// The generation of the key with which its API server encrypts; 0 until it does.
    pub generation: u32,
}

/// A key, wrapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKey {
    /// Derived from the key.
    pub id: String,
    /// For whom.
    pub wrapped: Vec<(RecoveryRecipient, WrappedKey)>,
    /// Whether all Secrets are encrypted with this key or a later one.
    pub rewritten: bool,
}

impl StoredKey {
    /// The key as it is wrapped for this recipient.
    pub fn wrapped_for(&self, recipient: &RecoveryRecipient) -> Option<&WrappedKey> {
        let mut all = self.wrapped.iter();
        all.find(|(whose, _)| whose == recipient)
            .map(|(_, wrapped)| wrapped)
    }
}

/// A record, and the revision at which it was written.
#[derive(Clone, Debug)]
pub struct Read<T> {
    /// The content.
    pub content: T,
    revision: i64,
}

/// All records at one revision.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The controllers.
    pub controllers: BTreeMap<NodeId, Read<Controller>>,
    /// The keys, by generation.
    pub keys: BTreeMap<u32, Read<StoredKey>>,
    revision: i64,
}

impl Known {
    /// The latest generation; 0 if there is no key.
    pub fn latest(&self) -> u32 {
        self.keys.keys().next_back().copied().unwrap_or(0)
    }
}

/// Reads and writes the records.
#[derive(Clone)]
pub struct SecretsKeys {
    client: NamespacedClient,
}

impl SecretsKeys {
    /// `client` is that of [`ConsensusUser::KubernetesSecrets`](crate::ConsensusUser).
    pub fn new(client: NamespacedClient) -> Self {
        Self { client }
    }

    /// All records.
    pub async fn read(&self) -> Result<Known, SecretsKeysError> {
        let found = self.client.list("").await?;
        let mut known = Known {
            revision: found.revision,
            ..Known::default()
        };
        for record in found.records {
            let (key, revision) = (&record.key[..], record.mod_revision);
            if let Some(id) = key.strip_prefix(CONTROLLERS) {
                let id = id.parse().map_err(|_| unknown(key))?;
                let content = decode_controller(key, &record.value)?;
                known.controllers.insert(id, Read { content, revision });
            } else if let Some(generation) = key.strip_prefix(KEYS) {
                let number = generation.parse().map_err(|_| unknown(key))?;
                let content = decode_key(key, &record.value)?;
                known.keys.insert(number, Read { content, revision });
            } else if key != EPOCH {
                return Err(unknown(key));
            }
        }
        Ok(known)
    }

    /// Returns when a record has changed since, or may have; at the latest after this time.
    pub async fn changed(&self, since: &Known, within: Duration) {
        let changed = async {
            let Ok(mut changes) = self.client.watch(since.revision + 1).await else {
                // etcd does not answer: it is asked again after the whole time.
                return std::future::pending().await;
            };
            // Whether the watch has ended or has news, the records are read again.
            drop(changes.next().await);
        };
        // Neither outcome says more than that it is time to read.
        let _ = timeout(within, changed).await;
    }

    /// Writes what a controller says of itself.
    pub async fn announce(
        &self,
        known: &Known,
        node: NodeId,
        controller: &Controller,
    ) -> Result<(), WriteError> {
        let key = controller_key(node);
        let condition = unchanged(&key, known.controllers.get(&node));
        let write = Write::when(condition).put(key, encode_controller(controller));
        self.client.write(write).await.map(drop)
    }

    /// Removes a controller that is none any more.
    pub async fn forget(&self, known: &Known, node: NodeId) -> Result<(), WriteError> {
        let key = controller_key(node);
        let condition = unchanged(&key, known.controllers.get(&node));
        let write = Write::when(condition).delete(key);
        self.client.write(write).await.map(drop)
    }

    /// Writes a key, which is new or replaces what was read of this generation.
    pub async fn put(
        &self,
        known: &Known,
        generation: u32,
        stored: &StoredKey,
    ) -> Result<(), WriteError> {
        let key = format!("{KEYS}{generation:010}");
        let condition = unchanged(&key, known.keys.get(&generation));
        let write = Write::when(condition).put(key, encode_key(stored));
        self.client.write(write).await.map(drop)
    }
}

fn controller_key(node: NodeId) -> String {
    format!("{CONTROLLERS}{node}")
}

/// The condition that a record is as it was read.
fn unchanged<T>(key: &str, read: Option<&Read<T>>) -> Condition {
    match read {
        Some(read) => Condition::Unchanged(key.to_owned(), read.revision),
        None => Condition::Absent(key.to_owned()),
    }
}

fn unknown(key: &str) -> SecretsKeysError {
    SecretsKeysError::Field {
        key: key.to_owned(),
        field: "key",
        expected: "controllers/ID or keys/GENERATION",
        found: key.to_owned(),
    }
}

fn message<M: prost::Message + Default>(key: &str, value: &[u8]) -> Result<M, SecretsKeysError> {
    M::decode(value).map_err(|error| SecretsKeysError::Field {
        key: key.to_owned(),
        field: "record",
        expected: "a protobuf message",
        found: error.to_string(),
    })
}

fn check_version(key: &str, version: u32) -> Result<(), SecretsKeysError> {
    match version {
        VERSION => Ok(()),
        found => Err(SecretsKeysError::Field {
            key: key.to_owned(),
            field: "version",
            expected: "1",
            found: found.to_string(),
        }),
    }
}

fn decode_controller(key: &str, value: &[u8]) -> Result<Controller, SecretsKeysError> {
    let stored: StoredSecretsController = message(key, value)?;
    check_version(key, stored.version)?;
    let recipient = RecoveryRecipient::try_from(&stored.recipient[..]);
    Ok(Controller {
        recipient: recipient.map_err(|error| wrong(key, "recipient", &error))?,
        generation: stored.generation,
    })
}

fn encode_controller(controller: &Controller) -> Vec<u8> {
    let stored = StoredSecretsController {
        version: VERSION,
        recipient: controller.recipient.as_bytes().to_vec(),
        generation: controller.generation,
    };
    stored.encode_to_vec()
}

fn decode_key(key: &str, value: &[u8]) -> Result<StoredKey, SecretsKeysError> {
    let stored: StoredSecretsKey = message(key, value)?;
    check_version(key, stored.version)?;
    let wrapped = stored.wrapped.iter().map(|one| {
        let parsed = parse_wrapped(one);
        parsed.map_err(|error| wrong(key, "wrapped", &error))
    });
    Ok(StoredKey {
        id: stored.id,
        wrapped: wrapped.collect::<Result<_, _>>()?,
        rewritten: stored.rewritten,
    })
}

fn encode_key(key: &StoredKey) -> Vec<u8> {
    let wrapped = key.wrapped.iter();
    let stored = StoredSecretsKey {
        version: VERSION,
        id: key.id.clone(),
        wrapped: wrapped.map(|(to, key)| wrapped_message(to, key)).collect(),
        rewritten: key.rewritten,
    };
    stored.encode_to_vec()
}

fn wrong(key: &str, field: &'static str, error: &RecoveryError) -> SecretsKeysError {
    SecretsKeysError::Field {
        key: key.to_owned(),
        field,
        expected: WRAPPED_KEY,
        found: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;
    use crate::ConsensusUser;
    use crate::testing::Site;

    fn recipient(byte: u8) -> RecoveryRecipient {
        hearth_api::recovery::RecoveryKey::from_bytes([byte; 32]).recipient()
    }

    fn stored(rewritten: bool) -> StoredKey {
        let wrapped = |byte| WrappedKey::try_from(&[byte; 80][..]).unwrap();
        StoredKey {
            id: "1-0011223344556677".into(),
            wrapped: vec![(recipient(1), wrapped(2)), (recipient(3), wrapped(4))],
            rewritten,
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_record_is_written_by_whoever_has_read_it_last() {
        let site = Site::new();
        let etcd = site.start(true).await;
        let root = etcd.handle();
        let keys = SecretsKeys::new(root.root().namespaced(ConsensusUser::KubernetesSecrets));
        let before = keys.read().await.unwrap();
        assert_eq!((before.latest(), before.controllers.len()), (0, 0));
        keys.put(&before, 1, &stored(false)).await.unwrap();
        let conflict = keys.put(&before, 1, &stored(true)).await;
        assert!(matches!(conflict, Err(WriteError::Conflict)));

        let (node, controller) = (
            NodeId::from_bytes([7; 16]),
            Controller {
                recipient: recipient(1),
                generation: 0,
            },
        );
        keys.announce(&before, node, &controller).await.unwrap();
        // What has changed since is noticed at once.
        keys.changed(&before, Duration::from_secs(60)).await;
        let now = keys.read().await.unwrap();
        assert_eq!(now.latest(), 1);
        assert_eq!(now.keys[&1].content, stored(false));
        assert_eq!(now.controllers[&node].content, controller);
        keys.put(&now, 1, &stored(true)).await.unwrap();
        keys.forget(&now, node).await.unwrap();
        let last = keys.read().await.unwrap();
        assert!(last.keys[&1].content.rewritten && last.controllers.is_empty());
        etcd.stop().await;
    }

    #[test]
    fn the_stored_form_stays() {
        let controller = Controller {
            recipient: recipient(1),
            generation: 2,
        };
        let written = stored_form!("etcd-secrets-controller.pb", encode_controller(&controller));
        assert_eq!(decode_controller("k", &written).unwrap(), controller);
        let written = stored_form!("etcd-secrets-key.pb", encode_key(&stored(true)));
        assert_eq!(decode_key("k", &written).unwrap(), stored(true));
    }

    #[test]
    fn what_is_malformed_is_named() {
        let said = |error: SecretsKeysError| error.to_string();
        let newer = StoredSecretsKey {
            version: 2,
            ..StoredSecretsKey::default()
        };
        let error = decode_key("keys/0000000001", &newer.encode_to_vec()).unwrap_err();
        assert_eq!(said(error), "keys/0000000001: version: expected 1, got 2");
        let short = StoredSecretsController {
            version: 1,
            recipient: vec![1; 31],
            generation: 0,
        };
        let error = decode_controller("controllers/x", &short.encode_to_vec()).unwrap_err();
        assert!(said(error).starts_with("controllers/x: recipient: expected"));
        let error = decode_key("keys/1", b"\xff").unwrap_err();
        assert!(said(error).starts_with("keys/1: record: expected"));
    }
}
