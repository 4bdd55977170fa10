//! The fields that Hearth reads of Kubernetes' objects. All others are passed
//! over, and none of these has to be there.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// What all objects bear.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// Unique among those of the kind in its namespace.
    pub name: String,
    /// Empty if it is in none.
    pub namespace: String,
    /// Never used again.
    pub uid: String,
    /// Changes with each change.
    pub resource_version: String,
    /// It is being removed since then.
    pub deletion_timestamp: Option<String>,
    /// By their keys.
    pub labels: BTreeMap<String, String>,
    /// By their keys.
    pub annotations: BTreeMap<String, String>,
    /// Who has to agree to its end.
    pub finalizers: Vec<String>,
}

/// An object of Kubernetes that is watched.
pub trait Object {
    /// What all objects bear.
    fn metadata(&self) -> &Metadata;
}

macro_rules! objects {
    ($($kind:ident),+) => {$(
        impl Object for $kind {
            fn metadata(&self) -> &Metadata {
                &self.metadata
            }
        }
    )+};
}
objects!(Node, Volume, Claim, Service, Endpoints);

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    /// See there.
    pub metadata: Metadata,
    /// As its kubelet tells it.
    pub status: NodeStatus,
}

/// How a machine is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Such as `Ready`.
    pub conditions: Vec<Condition>,
}

/// What is the case, or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Volume {
    /// See there.
    pub metadata: Metadata,
    /// What it is.
    pub spec: VolumeSpec,
    /// How far it is.
    pub status: Phase,
}

/// What a volume is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VolumeSpec {
    /// Quantities by resource.
    pub capacity: BTreeMap<String, String>,
    /// A directory of a node, if it is one.
    pub local: Option<Local>,
    /// What becomes of it when its claim has gone.
    pub persistent_volume_reclaim_policy: String,
}

/// A directory of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Local {
    /// On that node.
    pub path: String,
}

/// How far a volume, or a claim, is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Phase {
    /// Such as `Bound`.
    pub phase: String,
}

/// A wish for a volume.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Claim {
    /// See there.
    pub metadata: Metadata,
    /// What is wished for.
    pub spec: ClaimSpec,
    /// How far it is.
    pub status: Phase,
}

/// What is wished for.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimSpec {
    /// By whom it is to be served.
    pub storage_class_name: Option<String>,
    /// The volume that it has; empty if it has none.
    pub volume_name: String,
    /// By how many, and how.
    pub access_modes: Vec<String>,
    /// `Filesystem` if it is not told.
    pub volume_mode: Option<String>,
    /// How much.
    pub resources: Resources,
    /// What it is to be filled with.
    pub data_source: Option<IgnoredAny>,
    /// Among which volumes.
    pub selector: Option<IgnoredAny>,
}

/// How much.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Quantities by resource.
    pub requests: BTreeMap<String, String>,
}

/// An address that stands for pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Service {
    /// See there.
    pub metadata: Metadata,
    /// What it is.
    pub spec: ServiceSpec,
}

/// What a service is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    /// `ClusterIP` if it is not told.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its address, `None` in words, or empty before it is admitted.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: String,
    /// Of another domain.
    pub external_name: String,
    /// At which it is served.
    pub ports: Vec<Port>,
}

/// A port of a service, or of its pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Port {
    /// May be empty if there is but one.
    pub name: String,
    /// `TCP` if it is not told.
    pub protocol: String,
    /// Its number.
    pub port: i32,
}

/// The pods that a service stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Endpoints {
    /// See there.
    pub metadata: Metadata,
    /// Those with the same ports.
    pub subsets: Vec<Subset>,
}

/// Pods with the same ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Subset {
    /// Those that are ready.
    pub addresses: Vec<Address>,
    /// At which they serve.
    pub ports: Vec<Port>,
}

/// A pod's address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Address {
    /// As text.
    pub ip: String,
    /// Its own name in the service; empty if it has none.
    pub hostname: String,
}

/// Who of several works.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// See there.
    pub metadata: Metadata,
    /// Whose it is.
    pub spec: LeaseSpec,
}

/// Whose a lease is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LeaseSpec {
    /// Empty if it is nobody's.
    pub holder_identity: String,
    /// Without a renewal.
    pub lease_duration_seconds: i32,
    /// How often it has changed hands.
    pub lease_transitions: i32,
}
