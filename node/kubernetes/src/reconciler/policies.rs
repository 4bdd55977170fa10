//! The ConfigMaps with the network policy of each worker (see [`crate::policy`]).

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use hearth_api::identity::NodeId;
use hearth_host::pki::kubernetes::NODES;
use hearth_kubernetes_api::kinds::{self, RBAC};
use hearth_kubernetes_api::store::{Kept, Key};
use hearth_network_policy::node::{MAX_BYTES, NodePolicy};
use serde_json::json;

use super::objects::Wanted;
use crate::policy::{ConfigMap, KEY, NAMESPACE};

/// Role and binding of the nodes in the namespace.
const ROLE: &str = "hearth:network-policy";

/// What is remembered of a ConfigMap: enough to see that it is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Published(u64);

impl Published {
    pub(crate) fn read(object: ConfigMap) -> Option<Self> {
        Some(Self::of(&object.text()))
    }

    fn of(text: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Self(hasher.finish())
    }
}

impl Kept for Published {
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// The namespace, and the permission of nodes to read in it.
pub(crate) fn constant() -> [Wanted; 3] {
    let role = json!({ "rules": [{
        "apiGroups": [""],
        "resources": ["configmaps"],
        "verbs": ["get", "list", "watch"],
    }]});
    let binding = json!({
        "roleRef": { "apiGroup": RBAC, "kind": "Role", "name": ROLE },
        "subjects": [{ "apiGroup": RBAC, "kind": "Group", "name": NODES }],
    });
    [
        Wanted::new(kinds::NAMESPACES, None, NAMESPACE, json!({})),
        Wanted::new(kinds::ROLES, Some(NAMESPACE), ROLE, role),
        Wanted::new(kinds::ROLE_BINDINGS, Some(NAMESPACE), ROLE, binding),
    ]
}

/// The changes that are needed.
#[derive(Default)]
pub(crate) struct Work {
    /// ConfigMaps to write.
    pub write: Vec<Wanted>,
    /// Names of ConfigMaps to delete.
    pub remove: Vec<String>,
    /// Nodes whose policy is too large, and its size in bytes. They keep what they have.
    pub too_large: Vec<(NodeId, usize)>,
}

/// Compares what the nodes should enforce with what is published.
pub(crate) fn work(
    planned: &BTreeMap<NodeId, NodePolicy>,
    published: &BTreeMap<Key, Published>,
) -> Work {
    let mut work = Work::default();
    for (node, policy) in planned {
        let text = policy.to_text();
        let key = (NAMESPACE.to_owned(), node.to_string());
        if text.len() > MAX_BYTES {
            work.too_large.push((*node, text.len()));
        } else if published.get(&key) != Some(&Published::of(&text)) {
            let body = json!({ "data": { KEY: text } });
            let (namespace, name) = key;
            let wanted = Wanted::new(kinds::CONFIG_MAPS, Some(&namespace), &name, body);
            work.write.push(wanted);
        }
    }
    for (_, name) in published.keys() {
        // Kubernetes keeps one of its own in each namespace.
        let node = name.parse::<NodeId>().ok();
        if node.is_some_and(|node| !planned.contains_key(&node)) {
            work.remove.push(name.clone());
        }
    }
    work
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_already_is_not_written_again() {
        let node = |digit: u8| NodeId::from_bytes([digit; 16]);
        let key = |name: String| (NAMESPACE.to_owned(), name);
        let policy = NodePolicy::default();
        let planned = [1, 2].map(|digit| (node(digit), policy.clone())).into();
        let same = Published::of(&policy.to_text());
        let published = [
            (key(node(1).to_string()), same),
            (key(node(3).to_string()), same),
            (key("kube-root-ca.crt".to_owned()), same),
        ];
        let found = work(&planned, &published.into());
        let written: Vec<&str> = found.write.iter().map(Wanted::name).collect();
        assert_eq!(written, [node(2).to_string()]);
        assert_eq!(found.remove, [node(3).to_string()]);
        assert!(found.too_large.is_empty());
    }

    #[test]
    fn a_policy_that_no_object_can_hold_is_not_written() {
        let node = NodeId::from_bytes([1; 16]);
        let first = u32::from_be_bytes([10, 0, 0, 0]);
        let set = (first..first + 80_000)
            .map(|bits| std::net::Ipv4Addr::from(bits).into())
            .collect();
        let policy = NodePolicy {
            sets: vec![set],
            ..NodePolicy::default()
        };
        let found = work(&[(node, policy)].into(), &BTreeMap::new());
        assert!(found.write.is_empty() && found.too_large.len() == 1);
    }
}
