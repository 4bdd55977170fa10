//! The settings of a cluster as they are printed.

use hearth_api::settings::{SETTINGS, Setting, Value};
use hearth_api::v1::ClusterConfiguration;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::{Value as Json, json};

use crate::table::{Table, printable};

/// The values of all settings. In JSON an object with their paths as keys.
#[derive(Debug)]
pub(crate) struct Configuration(Vec<(&'static Setting, Value)>);

impl From<&ClusterConfiguration> for Configuration {
    fn from(configuration: &ClusterConfiguration) -> Self {
        let values = SETTINGS
            .iter()
            .map(|setting| (setting, setting.value(configuration)));
        Self(values.collect())
    }
}

impl Serialize for Configuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let values = self.0.iter();
        serializer.collect_map(values.map(|(setting, value)| (setting.path, to_json(value))))
    }
}

impl Configuration {
    /// The value of the setting with this path, as text; empty if there is no such setting.
    pub(super) fn text_of(&self, path: &str) -> String {
        let found = self.0.iter().find(|(setting, _)| setting.path == path);
        found.map_or_else(String::new, |(_, value)| value.to_string())
    }

    /// As a table.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(&["SETTING", "VALUE"]);
        for (setting, value) in &self.0 {
            table.row([setting.path.to_owned(), printable(&value.to_string())]);
        }
        table
    }
}

/// Output of `cluster get`, `cluster set` and `cluster edit`: settings with all that is known of
/// them, and the version of the configuration.
#[derive(Debug)]
pub(crate) struct Settings {
    version: u64,
    configuration: Configuration,
}

impl Settings {
    /// These settings of a configuration; all if none is named.
    pub(crate) fn new(
        version: u64,
        configuration: &ClusterConfiguration,
        which: &[&'static Setting],
    ) -> Self {
        let is_named = |setting: &Setting| which.iter().any(|named| named.path == setting.path);
        let mut configuration = Configuration::from(configuration);
        if !which.is_empty() {
            configuration.0.retain(|(setting, _)| is_named(setting));
        }
        Self {
            version,
            configuration,
        }
    }

    /// As text for people.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new(&["SETTING", "VALUE", "DEFAULT", "DESCRIPTION"]);
        for (setting, value) in &self.configuration.0 {
            let fixed = match setting.fixed {
                Some(_) => " (fixed when the cluster is created)",
                None => "",
            };
            table.row([
                setting.path.to_owned(),
                printable(&value.to_string()),
                setting
                    .default_value()
                    .map_or_else(String::new, |value| value.to_string()),
                format!("{}{fixed}", setting.help),
            ]);
        }
        format!("{table}\nversion {}\n", self.version)
    }
}

impl Serialize for Settings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("version", &self.version)?;
        map.serialize_entry("settings", &Detailed(&self.configuration))?;
        map.end()
    }
}

/// The settings of a configuration as an object with their paths as keys.
struct Detailed<'a>(&'a Configuration);

impl Serialize for Detailed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let settings = self.0.0.iter().map(|(setting, value)| {
            let detailed = json!({
                "value": to_json(value),
                "default": setting.default_value().as_ref().map(to_json),
                "fixed": setting.fixed.is_some(),
                "description": setting.help,
            });
            (setting.path, detailed)
        });
        serializer.collect_map(settings)
    }
}

fn to_json(value: &Value) -> Json {
    match value {
        Value::Text(text) => json!(text),
        Value::Number(number) => json!(number),
        Value::List(list) => json!(list),
    }
}
