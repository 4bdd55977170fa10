//! Names with values, which operators change one by one: the labels and the settings of a node.

use std::collections::BTreeMap;

/// What is there after a change, by name: without what was deleted, and with what was set.
///
/// # Errors
/// The number of names, if there would be more than `most`.
pub(super) fn changed(
    old: impl Iterator<Item = (String, String)>,
    delete: &[String],
    upsert: impl Iterator<Item = (String, String)>,
    most: usize,
) -> Result<BTreeMap<String, String>, usize> {
    let mut new: BTreeMap<_, _> = old.collect();
    for name in delete {
        new.remove(name);
    }
    new.extend(upsert);
    match new.len() > most {
        true => Err(new.len()),
        false => Ok(new),
    }
}
