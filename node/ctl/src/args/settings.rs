//! The parsers of cluster settings. They know the paths, so that shells can complete them. Values
//! are checked later, by the rules of the API.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use hearth_api::settings::{self, SETTINGS, Setting};

/// A setting and the text of its new value.
#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    /// The setting.
    pub setting: &'static Setting,
    /// Its new value; empty for the default.
    pub text: String,
}

/// Parses the path of a setting.
pub(super) fn setting() -> impl TypedValueParser<Value = &'static Setting> {
    let values = SETTINGS
        .iter()
        .map(|setting| PossibleValue::new(setting.path).help(setting.help));
    PossibleValuesParser::new(values).try_map(|path| settings::find("setting", &path))
}

/// Parses SETTING=VALUE.
#[derive(Clone)]
pub(super) struct AssignmentParser {
    /// Whether settings are completed that are fixed when the cluster is created.
    completes_fixed: bool,
}

impl AssignmentParser {
    /// For a cluster that exists.
    pub(super) fn of_cluster() -> Self {
        Self {
            completes_fixed: false,
        }
    }

    /// For one that is to be created.
    pub(super) fn of_new_cluster() -> Self {
        Self {
            completes_fixed: true,
        }
    }
}

impl TypedValueParser for AssignmentParser {
    type Value = Assignment;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Assignment, Error> {
        assignment.parse_ref(command, arg, value)
    }

    /// The beginnings of all assignments, for completion.
    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let completes_fixed = self.completes_fixed;
        let changeable = SETTINGS
            .iter()
            .filter(move |setting| completes_fixed || setting.fixed.is_none());
        let beginning =
            |setting: &Setting| PossibleValue::new(format!("{}=", setting.path)).help(setting.help);
        Some(Box::new(changeable.map(beginning)))
    }
}

fn assignment(text: &str) -> Result<Assignment, Box<dyn std::error::Error + Send + Sync>> {
    let (path, text) = text.split_once('=').ok_or("expected SETTING=VALUE")?;
    Ok(Assignment {
        setting: settings::find("setting", path)?,
        text: text.to_owned(),
    })
}
