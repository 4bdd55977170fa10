//! The owner of a cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::client::{Endpoint, Options};
use hearth_api::identity::{FirstContactSecret, OwnerKey};
use hearth_api::operator::{self, Operator, OwnershipError};
use hearth_api::owner;
use hearth_api::v1::{self, StorageSecurityPolicy};

use crate::{LabError, Result};

/// An owner of an existing or future cluster.
#[derive(Clone, Debug)]
pub struct Owner {
    /// The owner key.
    pub key: OwnerKey,
    /// The secret by which the cluster authenticates itself at first contact.
    pub secret: FirstContactSecret,
}

impl Owner {
    /// A new owner that exists only in this process.
    pub fn generate() -> Owner {
        Owner {
            key: OwnerKey::generate(),
            secret: FirstContactSecret::generate(),
        }
    }

    /// A new owner, whose files are in this folder: [`key_file`] and [`secret_file`].
    ///
    /// # Errors
    /// If the files cannot be created, or exist.
    pub fn create(folder: &Path) -> Result<Owner> {
        let key = owner::create_key(&key_file(folder)).map_err(failed("create the owner key"))?;
        let secret = owner::create_first_contact_secret(&secret_file(folder))
            .map_err(failed("create the first-contact secret"))?;
        Ok(Owner { key, secret })
    }

    /// The owner whose files are in this folder.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn load(folder: &Path) -> Result<Owner> {
        let key = owner::read_key(&key_file(folder)).map_err(failed("read the owner key"))?;
        let secret = owner::read_first_contact_secret(&secret_file(folder))
            .map_err(failed("read the first-contact secret"))?;
        Ok(Owner { key, secret })
    }

    /// The parameters by which the first node founds this owner's cluster.
    pub fn parameters(&self, configuration: v1::ClusterConfiguration) -> v1::NodeParameters {
        operator::bootstrap_parameters(&self.key.public(), &self.secret, configuration)
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
    folder.join("owner-key.pem")
}

/// Path of the first-contact secret in an owner's folder.
pub fn secret_file(folder: &Path) -> PathBuf {
    folder.join("first-contact-secret")
}

fn failed(step: &'static str) -> impl FnOnce(owner::OwnerFileError) -> LabError {
    move |source| LabError::OwnerFile { step, source }
}
