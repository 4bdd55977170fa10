//! What operators call a node.

use std::collections::BTreeMap;

use hearth_api::labels;
use hearth_api::v1::Label;
use hearth_consensus::fenced::Write;

use super::{FoundNode, Refused, put};

/// Labels to be set, and keys of labels to be taken away. Checked.
pub struct Changes {
    upsert: Vec<Label>,
    delete: Vec<String>,
}

impl Changes {
    /// Checks what was sent.
    pub fn new(upsert: Vec<Label>, delete: Vec<String>) -> Result<Self, Refused> {
        labels::check_changes(&upsert, &delete)
            .map_err(|error| Refused::Labels(error.to_string()))?;
        Ok(Self { upsert, delete })
    }

    /// What is written for this node; nothing if it has these labels already.
    pub fn decide(&self, found: &FoundNode) -> Result<Option<Write>, Refused> {
        let mut full = found.full.content.clone();
        let old = std::mem::take(&mut full.node.labels);
        let mut new: BTreeMap<_, _> = old.iter().map(|l| (&l.key[..], &l.value[..])).collect();
        for key in &self.delete {
            new.remove(&key[..]);
        }
        new.extend(self.upsert.iter().map(|l| (&l.key[..], &l.value[..])));
        if new.len() > labels::MAX_LABELS {
            return Err(Refused::Labels(format!(
                "upsert: the node would have {} labels, wanted at most {}",
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
