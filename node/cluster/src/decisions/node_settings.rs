//! Changes of a node's settings.

use hearth_api::node_settings::{self, MAX_SETTINGS};
use hearth_api::v1::NodeSetting;
use hearth_consensus::fenced::Write;

use super::{FoundNode, Rejection, pairs, put};

/// Validated changes: settings to set, and names of settings to remove.
pub struct SettingChanges {
    upsert: Vec<NodeSetting>,
    delete: Vec<String>,
}

impl SettingChanges {
    /// Validates a request.
    pub fn new(upsert: Vec<NodeSetting>, delete: Vec<String>) -> Result<Self, Rejection> {
        node_settings::check_changes(&upsert, &delete)
            .map_err(|error| Rejection::Invalid(error.to_string()))?;
        Ok(Self { upsert, delete })
    }

    /// The names of all of them, for the log.
    pub fn names(&self) -> String {
        let upsert = self.upsert.iter().map(|setting| &setting.name[..]);
        let names: Vec<&str> = upsert
            .chain(self.delete.iter().map(|name| &name[..]))
            .collect();
        names.join(", ")
    }

    /// The write for this node; `None` if nothing changes.
    pub fn decide(&self, found: &FoundNode) -> Result<Option<Write>, Rejection> {
        let mut full = found.full.content.clone();
        let old = std::mem::take(&mut full.node.settings);
        let pair = |setting: &NodeSetting| (setting.name.clone(), setting.value.clone());
        let (before, upsert) = (old.iter().map(pair), self.upsert.iter().map(pair));
        let new = pairs::changed(before, &self.delete, upsert, MAX_SETTINGS);
        let new = new.map_err(|count| {
            Rejection::Invalid(format!(
                "upsert: the node would have {count} settings, expected at most {MAX_SETTINGS}"
            ))
        })?;
        let setting = |(name, value)| NodeSetting { name, value };
        full.node.settings = new.into_iter().map(setting).collect();
        if full.node.settings == old {
            return Ok(None);
        }
        Ok(Some(put(found.unchanged(), &full)))
    }
}
