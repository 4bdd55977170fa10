//! The licences of code that runs on the node.

use std::collections::{BTreeMap, BTreeSet};

use super::crates::{Metadata, ResolvedNode};

/// Checks that no copyleft code runs on the node: walks the dependencies that the binary links.
pub(super) fn none_is_copyleft(metadata: &Metadata, wrong: &mut Vec<String>) {
    let nodes: BTreeMap<&str, &ResolvedNode> = metadata
        .resolve
        .nodes
        .iter()
        .map(|node| (node.id.as_str(), node))
        .collect();
    let core = metadata
        .packages
        .iter()
        .find(|package| package.name == "hearth-core");
    let mut pending: Vec<&str> = core
        .map(|package| package.id.as_str())
        .into_iter()
        .collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = pending.pop() {
        if !linked.insert(id) {
            continue;
        }
        for dependency in nodes.get(id).into_iter().flat_map(|node| &node.deps) {
            if dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()) {
                pending.push(&dependency.pkg);
            }
        }
    }
    for package in metadata
        .packages
        .iter()
        .filter(|package| linked.contains(package.id.as_str()))
    {
        match package.license.as_deref() {
            Some(licence) if permissive(licence) => {}
            Some(licence) => wrong.push(format!(
                "{}: licence {licence} is not allowed in the node",
                package.name
            )),
            None => wrong.push(format!("{}: no licence declared", package.name)),
        }
    }
}

/// Whether an SPDX expression allows a choice without copyleft.
fn permissive(expression: &str) -> bool {
    let choices = expression
        .split(" OR ")
        .flat_map(|choice| choice.split('/'));
    choices
        .into_iter()
        .any(|choice| !choice.contains("GPL") && !choice.contains("MPL"))
}

#[cfg(test)]
mod tests {
    use super::permissive;

    #[test]
    fn copyleft_is_found_and_a_choice_is_taken() {
        assert!(permissive("MIT OR Apache-2.0"));
        assert!(permissive("MIT/Apache-2.0"));
        assert!(permissive("Apache-2.0 OR LGPL-2.1-or-later"));
        assert!(!permissive("MPL-2.0"));
        assert!(!permissive("GPL-3.0-only"));
    }
}
