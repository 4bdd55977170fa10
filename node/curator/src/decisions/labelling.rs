//! What operators call a node.

use std::collections::BTreeMap;

use hearth_api::v1::Label;
use hearth_consensus::fenced::Write;
use hearth_host::parameters::labels;

use super::{FoundNode, Refused, put};

/// Labels to be set, and keys of labels to be taken away. Checked.
pub struct Changes {
    upsert: Vec<Label>,
    delete: Vec<String>,
}

impl Changes {
    /// Checks what was sent.
    pub fn new(upsert: Vec<Label>, delete: Vec<String>) -> Result<Self, Refused> {
        let upsert = labels::parse("upsert", upsert).map_err(|e| Refused::Labels(e.to_string()))?;
        if delete.len() > labels::MOST {
            return Err(Refused::Labels(format!(
                "delete: wanted at most {} keys, found {}",
                labels::MOST,
                delete.len()
            )));
        }
        for (index, key) in delete.iter().enumerate() {
            if !labels::is_key(key) {
                return Err(Refused::Labels(format!(
                    "delete[{index}]: wanted the key of a label, found {}",
                    labels::quoted(key)
                )));
            }
            if upsert.iter().any(|label| label.key == *key) {
                return Err(Refused::Labels(format!(
                    "delete[{index}]: wanted a key that is not in upsert, found {key:?}"
                )));
            }
        }
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
        if new.len() > labels::MOST {
            return Err(Refused::Labels(format!(
                "upsert: the node would have {} labels, wanted at most {}",
                new.len(),
                labels::MOST
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
