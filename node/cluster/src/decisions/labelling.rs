//! Changes of a node's labels.

use hearth_api::labels::{self, MAX_LABELS};
use hearth_api::v1::Label;
use hearth_consensus::fenced::Write;

use super::{FoundNode, Rejection, pairs, put};

/// Validated changes: labels to set, and keys of labels to remove.
pub struct Changes {
    upsert: Vec<Label>,
    delete: Vec<String>,
}

impl Changes {
    /// Validates a request.
    pub fn new(upsert: Vec<Label>, delete: Vec<String>) -> Result<Self, Rejection> {
        labels::check_changes(&upsert, &delete)
            .map_err(|error| Rejection::Invalid(error.to_string()))?;
        Ok(Self { upsert, delete })
    }

    /// The write for this node; `None` if nothing changes.
    pub fn decide(&self, found: &FoundNode) -> Result<Option<Write>, Rejection> {
        let mut full = found.full.content.clone();
        let old = std::mem::take(&mut full.node.labels);
        let pair = |label: &Label| (label.key.clone(), label.value.clone());
        let (before, upsert) = (old.iter().map(pair), self.upsert.iter().map(pair));
        let new = pairs::changed(before, &self.delete, upsert, MAX_LABELS);
        let new = new.map_err(|count| {
            Rejection::Invalid(format!(
                "upsert: the node would have {count} labels, expected at most {MAX_LABELS}"
            ))
        })?;
        let label = |(key, value)| Label { key, value };
        full.node.labels = new.into_iter().map(label).collect();
        if full.node.labels == old {
            return Ok(None);
        }
        Ok(Some(put(found.unchanged(), &full)))
    }
}
