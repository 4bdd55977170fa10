//! The owner of a cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::client::{Endpoint, Options};
use hearth_api::identity::{FirstContactSecret, OwnerKey};
use hearth_api::owner::{self, OwnerFiles};
use hearth_api::recovery::RecoveryKey;
use hearth_api::v1::node_parameters::Cluster;
use hearth_api::v1::{self, StorageSecurityPolicy};
use hearth_operator::unlock::Keys;
use hearth_operator::{Operator, OwnershipError};

use crate::{LabError, Result};

/// An owner of an existing or future cluster.
#[derive(Clone, Debug)]
pub struct Owner {
    /// The owner key.
    pub key: OwnerKey,
    /// The secret by which the cluster authenticates itself at first contact.
    pub secret: FirstContactSecret,
    /// Opens the keys of encrypted nodes. Owners of earlier releases have none.
    pub recovery: Option<RecoveryKey>,
}

impl Owner {
    /// A new owner that exists only in this process.
    pub fn generate() -> Owner {
        Owner {
            key: OwnerKey::generate(),
            secret: FirstContactSecret::generate(),
            recovery: Some(RecoveryKey::generate()),
        }
    }

    /// A new owner, whose files are in this folder: [`key_file`], [`secret_file`] and [`recovery_key_file`].
    ///
    /// # Errors
    /// If the files cannot be created, or exist.
    pub fn create(folder: &Path) -> Result<Owner> {
        let files = OwnerFiles::create(folder).map_err(failed("create the owner's files"))?;
        Ok(Owner {
            key: files.key,
            secret: files.secret,
            recovery: Some(files.recovery),
        })
    }

    /// The owner whose files are in this folder.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn load(folder: &Path) -> Result<Owner> {
        let key = owner::read_key(&key_file(folder)).map_err(failed("read the owner key"))?;
        let secret = owner::read_first_contact_secret(&secret_file(folder))
            .map_err(failed("read the first-contact secret"))?;
        let recovery = recovery_key_file(folder);
        let recovery = match recovery.exists() {
            true => {
                Some(owner::read_recovery_key(&recovery).map_err(failed("read the recovery key"))?)
            }
            false => None,
        };
        Ok(Owner {
            key,
            secret,
            recovery,
        })
    }

    /// The parameters by which the first node founds this owner's cluster. Its nodes can be unlocked with the recovery
    /// key, unless nothing of them is encrypted.
    pub fn parameters(&self, configuration: v1::ClusterConfiguration) -> v1::NodeParameters {
        let is_encrypted =
            configuration.storage_security_policy() != StorageSecurityPolicy::NeedsInsecure;
        let recovery = self.recovery.as_ref().filter(|_| is_encrypted);
        let recipient = recovery.map(|key| key.recipient().as_bytes().to_vec());
        let key = self.key.public();
        let bootstrap = v1::ClusterBootstrap {
            recovery_recipient: recipient.unwrap_or_default(),
            ..hearth_operator::cluster_bootstrap(&key, &self.secret, configuration)
        };
        hearth_operator::parameters(Cluster::ClusterBootstrap(bootstrap))
    }

    /// The same, with these Kubernetes objects, each in JSON.
    pub fn founding(
        &self,
        configuration: v1::ClusterConfiguration,
        manifests: Vec<String>,
    ) -> v1::NodeParameters {
        let mut parameters = self.parameters(configuration);
        if let Some(Cluster::ClusterBootstrap(bootstrap)) = &mut parameters.cluster {
            bootstrap.manifests = manifests;
        }
        parameters
    }

    /// The keys that unlock this owner's nodes.
    pub fn keys(&self) -> Option<Keys> {
        Some(Keys {
            owner: self.key.clone(),
            recovery: self.recovery.clone()?,
        })
    }

    /// First contact with the first curator that answers, then a certificate for the owner key. `bound` applies to each
    /// call.
    ///
    /// # Errors
    /// If no curator authenticates itself, or the cluster issues no certificate.
    pub async fn take_ownership(
        &self,
        curators: Vec<Endpoint>,
        bound: Duration,
    ) -> Result<Operator, OwnershipError> {
        let options = Options {
            connect_timeout: bound,
            call_timeout: bound,
            ..Options::default()
        };
        let taken = Operator::take_ownership(&self.key, &self.secret, curators, options).await;
        taken.map(|(operator, _)| operator)
    }
}

/// A configuration with this policy, and defaults for everything else.
pub fn with_storage(policy: StorageSecurityPolicy) -> v1::ClusterConfiguration {
    v1::ClusterConfiguration {
        storage_security_policy: policy.into(),
        ..v1::ClusterConfiguration::default()
    }
}

/// Path of the owner key in an owner's folder.
pub fn key_file(folder: &Path) -> PathBuf {
    folder.join(owner::KEY_FILE)
}

/// Path of the first-contact secret in an owner's folder.
pub fn secret_file(folder: &Path) -> PathBuf {
    folder.join(owner::SECRET_FILE)
}

/// Path of the recovery key in an owner's folder.
pub fn recovery_key_file(folder: &Path) -> PathBuf {
    folder.join(owner::RECOVERY_KEY_FILE)
}

fn failed(step: &'static str) -> impl FnOnce(owner::OwnerFileError) -> LabError {
    move |source| LabError::OwnerFile { step, source }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::node_parameters::Cluster;

    use super::*;

    #[test]
    fn what_is_encrypted_can_be_recovered() {
        let folder = tempfile::tempdir().unwrap();
        let owner = Owner::create(folder.path()).unwrap();
        let recipient = |owner: &Owner, policy| match owner.parameters(with_storage(policy)).cluster
        {
            Some(Cluster::ClusterBootstrap(bootstrap)) => bootstrap.recovery_recipient,
            other => panic!("{other:?}"),
        };
        let own = owner.recovery.as_ref().unwrap().recipient();
        let encrypted = StorageSecurityPolicy::NeedsEncryption;
        assert_eq!(recipient(&owner, encrypted), own.as_bytes());
        assert!(recipient(&owner, StorageSecurityPolicy::NeedsInsecure).is_empty());

        let again = Owner::load(folder.path()).unwrap();
        assert_eq!(recipient(&again, encrypted), own.as_bytes());
        std::fs::remove_file(recovery_key_file(folder.path())).unwrap();
        let older = Owner::load(folder.path()).unwrap();
        assert!(older.keys().is_none() && recipient(&older, encrypted).is_empty());
    }
}
