//! The Kubernetes objects of `cluster_bootstrap.manifests`, from the founding of the cluster until each has been
//! applied: `manifests/NUMBER`, numbered in their order.
//!
//! An object that has been applied is deleted here, so it is applied once: from then on it belongs to the users of
//! Kubernetes, who may change and delete it. What is here is all that there is to know: no object is both applied and
//! forgotten, and one that was applied just before a power cut is applied once more.

use hearth_api::manifests::{Manifest, ManifestError};
use hearth_api::private::StoredManifest;
use prost::Message as _;

use crate::fenced::{Condition, Write, WriteError};
use crate::{ConsensusError, NamespacedClient};

const PREFIX: &str = "manifests/";
/// The version of the records.
const VERSION: u32 = 1;

/// Why the objects cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestsError {
    /// etcd failed.
    #[error("cannot read the manifests")]
    Consensus(#[from] ConsensusError),
    /// A record is not what it should be.
    #[error("{key}: expected {expected}, got {found}")]
    Record {
        /// The record's key.
        key: String,
        /// The expected content.
        expected: &'static str,
        /// The actual content.
        found: String,
    },
    /// A record contains no object.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

/// An object that has not been applied.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The object.
    pub manifest: Manifest,
    key: String,
    revision: i64,
}

/// Reads and writes the objects.
#[derive(Clone)]
pub struct Manifests {
    client: NamespacedClient,
}

impl Manifests {
    /// `client` is that of [`ConsensusUser::KubernetesControllers`](crate::ConsensusUser).
    pub fn new(client: NamespacedClient) -> Self {
        Self { client }
    }

    /// Stores the objects of a new cluster. What was stored before is kept.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn store(&self, manifests: &[Manifest]) -> Result<(), ConsensusError> {
        if manifests.is_empty() {
            return Ok(());
        }
        let mut write = Write::when(Condition::Absent(key(0)));
        for (number, manifest) in manifests.iter().enumerate() {
            write = write.put(key(number), encode(manifest));
        }
        match self.client.write(write).await {
            Ok(_) | Err(WriteError::Conflict) => Ok(()),
            Err(WriteError::Consensus(error)) => Err(error),
        }
    }

    /// The objects that have not been applied, in their order.
    ///
    /// # Errors
    /// If etcd does not answer, or a record cannot be decoded.
    pub async fn pending(&self) -> Result<Vec<Pending>, ManifestsError> {
        let found = self.client.list(PREFIX).await?;
        let records = found.records.into_iter().map(|record| {
            Ok(Pending {
                manifest: decode(&record.key, &record.value)?,
                key: record.key,
                revision: record.mod_revision,
            })
        });
        records.collect()
    }

    /// Records that an object has been applied.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn applied(&self, pending: &Pending) -> Result<(), ConsensusError> {
        let there = Condition::Unchanged(pending.key.clone(), pending.revision);
        let write = Write::when(there).delete(&pending.key);
        match self.client.write(write).await {
            // Another controller has applied it, too.
            Ok(_) | Err(WriteError::Conflict) => Ok(()),
            Err(WriteError::Consensus(error)) => Err(error),
        }
    }
}

fn key(number: usize) -> String {
    format!("{PREFIX}{number:04}")
}

fn encode(manifest: &Manifest) -> Vec<u8> {
    let stored = StoredManifest {
        version: VERSION,
        object: manifest.to_json(),
    };
    stored.encode_to_vec()
}

fn decode(key: &str, value: &[u8]) -> Result<Manifest, ManifestsError> {
    let wrong = |expected, found| ManifestsError::Record {
        key: key.to_owned(),
        expected,
        found,
    };
    let stored = StoredManifest::decode(value)
        .map_err(|error| wrong("a protobuf message", error.to_string()))?;
    match stored.version {
        VERSION => Ok(Manifest::parse(key, &stored.object)?),
        other => Err(wrong("version 1", other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;
    use crate::ConsensusUser;
    use crate::testing::Site;

    fn manifest(name: &str) -> Manifest {
        let text =
            format!(r#"{{"apiVersion":"v1","kind":"Namespace","metadata":{{"name":"{name}"}}}}"#);
        Manifest::parse("manifest", &text).unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_object_is_kept_until_it_is_applied() {
        let site = Site::new();
        let etcd = site.start(true).await;
        let root = etcd.handle();
        let client = root.root().namespaced(ConsensusUser::KubernetesControllers);
        let manifests = Manifests::new(client);
        manifests.store(&[]).await.unwrap();
        assert!(manifests.pending().await.unwrap().is_empty());

        // As many as there may be, in one transaction.
        let all: Vec<_> = (0..hearth_api::manifests::MAX_OBJECTS)
            .map(|number| manifest(&format!("shop-{number}")))
            .collect();
        manifests.store(&all).await.unwrap();
        let names = |pending: &[Pending]| -> Vec<Manifest> {
            pending.iter().map(|one| one.manifest.clone()).collect()
        };
        let pending = manifests.pending().await.unwrap();
        assert_eq!(names(&pending), all);

        manifests.applied(&pending[1]).await.unwrap();
        // By another controller, and by a founding whose end was lost.
        manifests.applied(&pending[1]).await.unwrap();
        manifests.store(&all).await.unwrap();
        let left = manifests.pending().await.unwrap();
        assert_eq!(names(&left), [&all[..1], &all[2..]].concat());
        etcd.stop().await;
    }

    #[test]
    fn the_stored_form_stays() {
        let written = stored_form!("etcd-manifest.pb", encode(&manifest("shop")));
        assert_eq!(
            decode("manifests/0000", &written).unwrap(),
            manifest("shop")
        );

        let newer = StoredManifest {
            version: VERSION + 1,
            ..StoredManifest::default()
        };
        let error = decode("manifests/0000", &newer.encode_to_vec()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "manifests/0000: expected version 1, got 2"
        );
        let nothing = StoredManifest {
            version: VERSION,
            object: "{}".into(),
        };
        let error = decode("manifests/0000", &nothing.encode_to_vec()).unwrap_err();
        let expected = "manifests/0000.apiVersion: expected";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
