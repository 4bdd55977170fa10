//! The settings of a cluster: every field of [`ClusterConfiguration`], including those of the
//! messages in it.
//!
//! One table, [`SETTINGS`], has a row for each: path, help, default, validation, and whether the
//! setting can be changed. Parameters of machines, curators and operator tools take all of this
//! from the table, so that a new setting is a field in the proto file and a row here. A test
//! compares both.
//!
//! A setting without a value has its default. A record of a release that did not know a setting is
//! therefore complete, and an empty value resets a setting. The exception is a setting whose default
//! the first node decides when it creates the cluster: the parameters need not name a value, but the
//! configuration of a cluster always has one, and an empty value is an error.
//!
//! The rows are code, not options in the proto file: validation is code in any case, and the
//! compiler checks that a row refers to a field of the right type. Access by descriptors would need
//! a reflection library at run time, see [`crate::schema`].

mod kinds;
mod table;

use std::fmt;

pub use table::SETTINGS;

use self::kinds::Kind;
use crate::labels::quoted;
use crate::ranges::{ClusterRanges, RangesError};
use crate::v1::ClusterConfiguration;

/// A setting of a cluster.
pub struct Setting {
    /// Names of the fields that lead to it, joined by dots.
    pub path: &'static str,
    /// What it is, in one line, for operators.
    pub help: &'static str,
    /// Why it cannot be changed once the cluster has been created; `None` if it can.
    pub fixed: Option<&'static str>,
    kind: &'static (dyn Kind + Sync),
}

impl fmt::Debug for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path)
    }
}

/// The value of a setting, as operators read and write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text, or the name of an enum value without its prefix. An enum value that this release
    /// does not know is its number.
    Text(String),
    /// A number.
    Number(u32),
    /// A list.
    List(Vec<String>),
}

/// Lists are separated by commas.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => number.fmt(f),
            Self::List(list) => f.write_str(&list.join(",")),
        }
    }
}

/// An invalid value of a setting, or an unknown setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub struct SettingError {
    /// The path of the setting, or the field that names it.
    pub field: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl From<RangesError> for SettingError {
    fn from(error: RangesError) -> Self {
        let RangesError {
            field,
            expected,
            found,
        } = error;
        Self {
            field,
            expected,
            found,
        }
    }
}

/// The setting with this path. `field` is the name of the path in the error.
pub fn find(field: &str, path: &str) -> Result<&'static Setting, SettingError> {
    let found = SETTINGS.iter().find(|setting| setting.path == path);
    found.ok_or_else(|| {
        let paths: Vec<_> = SETTINGS.iter().map(|setting| setting.path).collect();
        SettingError {
            field: field.to_owned(),
            expected: format!("one of {}", paths.join(", ")),
            found: quoted(path),
        }
    })
}

/// Checks all settings of the parameters of a new cluster, and gives those without a value their
/// defaults.
pub fn complete(configuration: ClusterConfiguration) -> Result<ClusterConfiguration, SettingError> {
    for setting in SETTINGS {
        setting.check(&configuration)?;
    }
    check_together(&configuration)?;
    Ok(with_defaults(configuration))
}

/// Checks what depends on several settings, each of which is valid alone.
pub fn check_together(configuration: &ClusterConfiguration) -> Result<(), SettingError> {
    let Some(kubernetes) = &configuration.kubernetes else {
        return Ok(());
    };
    let ranges = ClusterRanges::of(kubernetes)?;
    match kubernetes.virtual_address() {
        Some(address) if ranges.contains(address) => Err(SettingError {
            field: "kubernetes.api_address".to_owned(),
            expected: "an address outside the ranges of pods and services".to_owned(),
            found: quoted(&kubernetes.api_address),
        }),
        _ => Ok(()),
    }
}

/// Gives all settings without a value their defaults.
pub fn with_defaults(mut configuration: ClusterConfiguration) -> ClusterConfiguration {
    for setting in SETTINGS {
        setting.kind.fill(&mut configuration);
    }
    configuration
}

/// Replaces what is secret in the settings, for whom it is not meant.
pub fn without_secrets(mut configuration: ClusterConfiguration) -> ClusterConfiguration {
    for setting in SETTINGS {
        setting.kind.hide(&mut configuration);
    }
    configuration
}

impl Setting {
    /// Completes a value that was read by who is not told what is secret in it ([`without_secrets`]):
    /// what was replaced is what `known` has in its place.
    ///
    /// # Errors
    /// If `known` does not have it.
    pub fn complete_secrets(
        &self,
        configuration: &mut ClusterConfiguration,
        known: &ClusterConfiguration,
    ) -> Result<(), SettingError> {
        self.kind
            .reveal(self.path, configuration, &mut known.clone())
    }

    /// The value in this configuration, or the default.
    pub fn value(&self, configuration: &ClusterConfiguration) -> Value {
        // The accessor of a row creates missing messages, so it works on a copy.
        let mut configuration = configuration.clone();
        self.kind.fill(&mut configuration);
        self.kind.value(&mut configuration)
    }

    /// The default; `None` if the first node decides when it creates the cluster.
    pub fn default_value(&self) -> Option<Value> {
        let mut unset = ClusterConfiguration::default();
        match self.kind.missing(&mut unset) {
            Some(_) => None,
            None => Some(self.value(&unset)),
        }
    }

    /// Checks the value in the parameters of a new cluster. They need not have one.
    pub fn check(&self, configuration: &ClusterConfiguration) -> Result<(), SettingError> {
        self.kind.check(self.path, &mut configuration.clone())
    }

    /// Checks the value for a cluster that exists. If there is none, the setting must have a default.
    pub fn check_definite(&self, configuration: &ClusterConfiguration) -> Result<(), SettingError> {
        match self.kind.missing(&mut configuration.clone()) {
            Some(expected) => Err(SettingError {
                field: self.path.to_owned(),
                expected,
                found: "no value, and this setting has no default".to_owned(),
            }),
            None => self.check(configuration),
        }
    }

    /// Sets the value that an operator writes as this text. An empty text resets the setting to its
    /// default. The elements of a list are separated by commas.
    pub fn assign(
        &self,
        configuration: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        self.kind.assign(self.path, configuration, text.trim())?;
        self.check_definite(configuration)?;
        self.kind.fill(configuration);
        Ok(())
    }

    /// Copies the value, or the default if there is none.
    pub fn copy(&self, from: &ClusterConfiguration, to: &mut ClusterConfiguration) {
        self.kind.copy(&mut from.clone(), to);
        self.kind.fill(to);
    }
}

#[cfg(test)]
mod tests;
