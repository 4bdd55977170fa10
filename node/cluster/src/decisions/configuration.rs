//! Changes of the cluster's configuration.
//!
//! A change names the version at which its caller read the configuration: the revision of the
//! cluster's record. At any other version it is refused, because the caller has decided on the
//! basis of values that may have changed. But a caller that repeats a change because the answer was
//! lost, or that asks for what is already the case, gets the answer that it would get at the
//! current version.
//!
//! Which settings exist and which of them can be changed is stated in [`hearth_api::settings`].

use hearth_api::settings::{self, Setting};
use hearth_api::v1::{ClusterConfiguration, ColdStartPolicy, ConfigureClusterRequest};
use hearth_consensus::fenced::Write;

use super::{Rejection, Versioned, put_cluster};
use crate::state::{self, FullCluster};

/// A validated change of the configuration.
pub struct Change {
    version: u64,
    settings: Vec<&'static Setting>,
    /// The new values of these settings; those of others are ignored.
    values: ClusterConfiguration,
}

/// The decision.
pub struct Configured {
    /// The resulting configuration, with all defaults and without its secrets.
    pub configuration: ClusterConfiguration,
    /// The settings that have other values by it.
    pub changed: Vec<&'static str>,
    /// The write; `None` if nothing changes.
    pub write: Option<Write>,
}

/// The version of a record in the API.
pub fn version<T>(record: &Versioned<T>) -> u64 {
    record.revision.unsigned_abs()
}

impl Change {
    /// Validates a request.
    pub fn new(request: ConfigureClusterRequest) -> Result<Self, Rejection> {
        let ConfigureClusterRequest {
            version,
            configuration,
            field_mask,
        } = request;
        let missing = |field, wanted| Rejection::Field {
            field,
            wanted,
            found: "none".into(),
        };
        if field_mask.is_empty() {
            return Err(missing("field_mask", "the path of at least one setting"));
        }
        let wanted = "the new values of the settings in field_mask";
        let values = configuration.ok_or_else(|| missing("configuration", wanted))?;
        if version == 0 {
            let wanted = "the version of the configuration that was read (GetClusterInfo)";
            return Err(missing("version", wanted));
        }
        let mut settings = Vec::new();
        for (index, path) in field_mask.iter().enumerate() {
            let setting = settings::find(&format!("field_mask[{index}]"), path)?;
            setting.check_definite(&values)?;
            settings.push(setting);
        }
        Ok(Self {
            version,
            settings,
            values,
        })
    }

    /// Decides about the change.
    pub fn decide(&self, found: &Versioned<FullCluster>) -> Result<Configured, Rejection> {
        let mut configuration = found.content.configuration();
        let current = state::definite(configuration.clone());
        let mut values = self.values.clone();
        let mut changed = Vec::new();
        for setting in &self.settings {
            setting.complete_secrets(&mut values, &current)?;
            let (old, new) = (setting.value(&current), setting.value(&values));
            if old == new {
                continue;
            }
            if let Some(reason) = setting.fixed {
                return Err(Rejection::FixedSetting {
                    path: setting.path,
                    reason,
                    current: old.to_string(),
                    found: new.to_string(),
                });
            }
            setting.copy(&values, &mut configuration);
            changed.push(setting.path);
        }
        if !changed.is_empty() {
            settings::check_together(&configuration)?;
        }
        let becomes_owner = configuration.cold_start_policy() == ColdStartPolicy::Owner
            && current.cold_start_policy() != ColdStartPolicy::Owner;
        if becomes_owner && !found.content.has_recovery_recipient() {
            return Err(Rejection::NoRecoveryRecipient);
        }
        let write = match &changed[..] {
            [] => None,
            _ => Some(self.write(found, &configuration)?),
        };
        Ok(Configured {
            configuration: settings::without_secrets(state::definite(configuration)),
            changed,
            write,
        })
    }

    fn write(
        &self,
        found: &Versioned<FullCluster>,
        configuration: &ClusterConfiguration,
    ) -> Result<Write, Rejection> {
        let current = version(found);
        if self.version != current {
            return Err(Rejection::ConfigurationChanged {
                current,
                found: self.version,
            });
        }
        let value = found.content.encode_with(configuration.clone());
        Ok(put_cluster(found, &value))
    }
}
