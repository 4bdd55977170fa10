//! Changes of a node's labels.

use std::collections::BTreeMap;

use hearth_api::labels;
use hearth_api::v1::Label;
use hearth_consensus::fenced::Write;

use super::{FoundNode, Rejection, put};

/// Validated changes: labels to set, and keys of labels to remove.
pub struct Changes {
    upsert: Vec<Label>,
    delete: Vec<String>,
}

impl Changes {
    /// Validates a request.
    pub fn new(upsert: Vec<Label>, delete: Vec<String>) -> Result<Self, Rejection> {
        labels::check_changes(&upsert, &delete)
            .map_err(|error| Rejection::Labels(error.to_string()))?;
        Ok(Self { upsert, delete })
    }

    /// The write for this node; `None` if nothing changes.
    pub fn decide(&self, found: &FoundNode) -> Result<Option<Write>, Rejection> {
        let mut full = found.full.content.clone();
        let old = std::mem::take(&mut full.node.labels);
        let mut new: BTreeMap<_, _> = old.iter().map(|l| (&l.key[..], &l.value[..])).collect();
        for key in &self.delete {
            new.remove(&key[..]);
        }
        new.extend(self.upsert.iter().map(|l| (&l.key[..], &l.value[..])));
        if new.len() > labels::MAX_LABELS {
            return Err(Rejection::Labels(format!(
                "upsert: the node would have {} labels, expected at most {}",
                new.len(),
                labels::MAX_LABELS
            )));
        }
        let label = |(key, value): (&str, &str)| Label {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        full.node.labels = new.into_iter().map(label).collect();
        if full.node.labels == old {
            return Ok(None);
        }
        Ok(Some(put(found.unchanged(), &full)))
    }
}
