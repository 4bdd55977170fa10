//! Synchronization of node labels to Kubernetes nodes. Pure functions.
//!
//! Operators set with patterns which labels of the cluster's nodes are copied to the Node objects.
//! The keys of the copied labels are stored in an annotation of the Node, [`REMEMBERED`], because
//! otherwise it would be unknown later whether a label that the cluster's node no longer has was
//! copied: only labels in the annotation are removed, so labels that someone has set in Kubernetes
//! are kept.
//!
//! Keys that belong to Kubernetes or the kubelet are never copied, whatever the patterns are:
//! otherwise a node could claim to be something that it is not.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// Annotation of a Node: the keys of the labels that Hearth has set, separated by commas.
pub const REMEMBERED: &str = "hearth.dev/labels";
/// Label of a Node that is a worker.
pub const ROLE_WORKER: &str = "node-role.kubernetes.io/worker";
/// Label of a Node that is also a controller.
pub const ROLE_CONTROLLER: &str = "node-role.kubernetes.io/controller";

/// Domains below those of Kubernetes that operators may use.
const ALLOWED: [&str; 2] = ["topology.kubernetes.io", "node-role.kubernetes.io"];
const KUBERNETES: [&str; 2] = ["kubernetes.io", "k8s.io"];
/// Hearth's own domain, which volumes use.
const OWN: &str = "hearth.dev";

/// Whether a key matches a pattern: it is equal, or the pattern is a prefix followed by `*`.
pub fn matches(pattern: &str, key: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => key.starts_with(beginning),
        None => pattern == key,
    }
}

/// Whether a key may be copied.
fn is_free(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else {
        return true;
    };
    if ALLOWED.contains(&domain) {
        return true;
    }
    let below = |parent: &str| {
        let above = domain.strip_suffix(parent);
        above.is_some_and(|above| above.is_empty() || above.ends_with('.'))
    };
    !(KUBERNETES.iter().any(|parent| below(parent)) || below(OWN))
}

/// The labels that a Node should have: copied labels and role labels.
pub fn wanted(
    labels: &BTreeMap<String, String>,
    patterns: &[String],
    worker: bool,
    controller: bool,
) -> BTreeMap<String, String> {
    let named = |key: &String| patterns.iter().any(|pattern| matches(pattern, key));
    let mut wanted: BTreeMap<String, String> = labels
        .iter()
        .filter(|(key, _)| is_free(key) && named(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    for (role, key) in [(worker, ROLE_WORKER), (controller, ROLE_CONTROLLER)] {
        if role {
            wanted.insert(key.to_owned(), String::new());
        }
    }
    wanted
}

/// The merge patch from a Node's current labels to the wanted ones; `None` if there is nothing to
/// change.
pub fn patch(
    wanted: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
) -> Option<Value> {
    let remembered = annotations.get(REMEMBERED).map_or("", String::as_str);
    let before: BTreeSet<&str> = remembered
        .split(',')
        .filter(|key| !key.is_empty())
        .collect();
    let mut changes = serde_json::Map::new();
    for (key, value) in wanted {
        if labels.get(key) != Some(value) {
            changes.insert(key.clone(), json!(value));
        }
    }
    for key in before {
        // The annotation can be edited by anyone who may edit the Node: check the keys again.
        if !wanted.contains_key(key) && labels.contains_key(key) && is_free(key) {
            changes.insert(key.to_owned(), Value::Null);
        }
    }
    let keys: Vec<&str> = wanted.keys().map(String::as_str).collect();
    let keys = keys.join(",");
    if changes.is_empty() && keys == remembered {
        return None;
    }
    let mut metadata = json!({ "annotations": { REMEMBERED: keys } });
    if !changes.is_empty() {
        metadata["labels"] = Value::Object(changes);
    }
    Some(json!({ "metadata": metadata }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Map = BTreeMap<String, String>;

    fn map(pairs: &[(&str, &str)]) -> Map {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    /// Applies a merge patch as an API server does.
    fn apply(patch: &Value, what: &str, to: &mut Map) {
        let Some(changes) = patch["metadata"][what].as_object() else {
            return;
        };
        for (key, value) in changes {
            match value.as_str() {
                Some(value) => drop(to.insert(key.clone(), value.to_owned())),
                None => drop(to.remove(key)),
            }
        }
    }

    fn settle(wanted: &Map, labels: &mut Map, annotations: &mut Map) {
        if let Some(patch) = patch(wanted, labels, annotations) {
            apply(&patch, "labels", labels);
            apply(&patch, "annotations", annotations);
        }
    }

    #[test]
    fn only_what_the_patterns_mean_is_taken_over() {
        let labels = map(&[
            ("rack", "7"),
            ("racks", "8"),
            ("disk/ssd", ""),
            ("disk/size", "large"),
            ("kubernetes.io/hostname", "somebody-else"),
            ("node.kubernetes.io/instance-type", "large"),
            ("topology.kubernetes.io/zone", "a"),
            ("hearth.dev/node", "x"),
        ]);
        let some = ["rack".to_owned(), "disk/*".to_owned()];
        let expected = map(&[("rack", "7"), ("disk/ssd", ""), ("disk/size", "large")]);
        assert_eq!(wanted(&labels, &some, false, false), expected);
        let all = wanted(&labels, &["*".to_owned()], true, true);
        assert!(all.contains_key("topology.kubernetes.io/zone"));
        assert!(all.contains_key(ROLE_WORKER) && all.contains_key(ROLE_CONTROLLER));
        for kept in [
            "kubernetes.io/hostname",
            "node.kubernetes.io/instance-type",
            "hearth.dev/node",
        ] {
            assert!(!all.contains_key(kept), "{kept}");
        }
    }

    #[test]
    fn labels_go_when_the_cluster_takes_them_back() {
        let mut labels = map(&[("kubernetes.io/os", "linux"), ("mine", "1")]);
        let mut annotations = Map::new();
        settle(
            &map(&[("rack", "7"), ("row", "2")]),
            &mut labels,
            &mut annotations,
        );
        assert_eq!(labels.get("rack").unwrap(), "7");
        // One is changed, one is removed, and labels of others are kept.
        settle(&map(&[("rack", "8")]), &mut labels, &mut annotations);
        let expected = map(&[("kubernetes.io/os", "linux"), ("mine", "1"), ("rack", "8")]);
        assert_eq!(labels, expected);
        // A copied label is changed in Kubernetes: it is set back.
        labels.insert("rack".into(), "9".into());
        settle(&map(&[("rack", "8")]), &mut labels, &mut annotations);
        assert_eq!(labels, expected);
    }

    #[test]
    fn the_memory_cannot_be_used_to_remove_what_is_not_ours() {
        let labels = map(&[("kubernetes.io/os", "linux")]);
        let annotations = map(&[(REMEMBERED, "kubernetes.io/os,,x")]);
        let patch = patch(&Map::new(), &labels, &annotations).unwrap();
        assert!(patch["metadata"]["labels"].is_null(), "{patch}");
    }

    proptest! {
        #[test]
        fn one_patch_is_enough_and_foreign_labels_stay(
            foreign in prop::collection::btree_map("[x-z]{1,2}", "[a-z]{0,2}", 0..4),
            steps in prop::collection::vec(
                prop::collection::btree_map("[a-c]{1,2}", "[a-z]{0,2}", 0..4), 1..5),
        ) {
            let mut labels = foreign.clone();
            let mut annotations = Map::new();
            for wanted in &steps {
                settle(wanted, &mut labels, &mut annotations);
                let mut expected = foreign.clone();
                expected.extend(wanted.clone());
                prop_assert_eq!(&labels, &expected);
                prop_assert_eq!(patch(wanted, &labels, &annotations), None);
            }
        }
    }
}
