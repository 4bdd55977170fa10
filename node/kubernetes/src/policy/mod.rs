//! Network policies on their way from the cluster's objects to the packet filter of each node.
//!
//! ```text
//! NetworkPolicy, Pod, Namespace ── reconciler ── ConfigMap of the node ── worker ── packet filter
//! ```
//!
//! [`hearth_network_policy`] says what is enforced. Here it is only carried: the reconciler writes
//! one ConfigMap for each worker (`reconciler::policies`), in a namespace of their own, and the worker
//! follows the one with its name ([`receive`]).
//!
//! Invariants:
//! - What a worker has received stays in force until it receives something else, also while no API
//!   server answers, and if the object is deleted.
//! - What cannot be read or written is reported, and changes nothing.
//!
//! Why ConfigMaps: the API server carries them to the nodes with permissions, versions and watches
//! that are there already. A call between nodes would need all of these again.

pub(crate) mod receive;

use hearth_kubernetes_api::fields::Metadata;
use hearth_kubernetes_api::store::Kept;
use serde::Deserialize;

/// The namespace of the ConfigMaps, whose names are those of the nodes.
pub(crate) const NAMESPACE: &str = "hearth-network-policy";
/// The key of the policy in its ConfigMap.
pub(crate) const KEY: &str = "policy";

/// A `ConfigMap` with the policy of a node.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConfigMap {
    metadata: Metadata,
    data: Data,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Data {
    policy: String,
}

impl ConfigMap {
    /// The text of the policy.
    pub(crate) fn text(self) -> String {
        self.data.policy
    }
}

hearth_kubernetes_api::objects!(ConfigMap);

/// The text of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text(String);

impl Text {
    fn read(object: ConfigMap) -> Option<Self> {
        Some(Self(object.text()))
    }
}

impl Kept for Text {
    fn bytes(&self) -> usize {
        self.0.len()
    }
}
