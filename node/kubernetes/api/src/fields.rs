//! The fields of Kubernetes objects that Hearth reads. All others are ignored; fields that are
//! missing have their default values.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::store::Kept;

/// `ObjectMeta`: the metadata of every object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// Unique among the objects of the kind in the namespace.
    pub name: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// Unique over the lifetime of the cluster.
    pub uid: String,
    /// Changes whenever the object changes.
    pub resource_version: String,
    /// Set when the object is being deleted.
    pub deletion_timestamp: Option<String>,
    /// Labels by key.
    pub labels: BTreeMap<String, String>,
    /// Annotations by key.
    pub annotations: BTreeMap<String, String>,
    /// While there are any, a deleted object is kept.
    pub finalizers: Vec<String>,
}

impl Metadata {
    fn bytes(&self) -> usize {
        let maps = self.labels.bytes() + self.annotations.bytes();
        let finalizers = self.finalizers.iter().map(|text| 24 + text.len());
        size_of::<Self>() + maps + finalizers.sum::<usize>()
    }
}

/// A Kubernetes object that can be watched.
pub trait Object {
    /// The object's metadata.
    fn metadata(&self) -> &Metadata;
}

/// Implements [`Object`] for types with a field `metadata`.
#[macro_export]
macro_rules! objects {
    ($($kind:ident),+) => {$(
        impl $crate::fields::Object for $kind {
            fn metadata(&self) -> &$crate::fields::Metadata {
                &self.metadata
            }
        }
    )+};
}
objects!(Node, Volume, Claim, Service, EndpointSlice);

impl Kept for Node {
    fn bytes(&self) -> usize {
        // Their texts are short, or the API server refuses them.
        self.metadata.bytes() + 512 * self.spec.taints.len() + 128 * self.status.conditions.len()
    }
}

impl Kept for Volume {
    fn bytes(&self) -> usize {
        self.metadata.bytes() + size_of::<Self>() + 128 * self.spec.capacity.len()
    }
}

impl Kept for Claim {
    fn bytes(&self) -> usize {
        self.metadata.bytes() + size_of::<Self>() + 128 * self.spec.resources.requests.len()
    }
}

/// A `Node`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The object's metadata.
    pub metadata: Metadata,
    /// What controllers and operators say of it.
    pub spec: NodeSpec,
    /// Status, as the kubelet reports it.
    pub status: NodeStatus,
}

/// What controllers and operators say of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// Its taints, with all their fields.
    pub taints: Vec<serde_json::Value>,
}

/// Status of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Conditions, such as `Ready`.
    pub conditions: Vec<Condition>,
}

/// A condition of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Its type, such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// A `PersistentVolume`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Volume {
    /// The object's metadata.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: VolumeSpec,
    /// Its phase.
    pub status: Phase,
}

/// Specification of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VolumeSpec {
    /// Quantities by resource.
    pub capacity: BTreeMap<String, String>,
    /// The directory, if it is a local volume.
    pub local: Option<Local>,
    /// `Delete`, `Retain` or `Recycle`: what happens when its claim is deleted.
    pub persistent_volume_reclaim_policy: String,
}

/// Source of a local volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Local {
    /// Path of the directory on the node.
    pub path: String,
}

/// Status of a volume or a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Phase {
    /// Such as `Bound`.
    pub phase: String,
}

/// A `PersistentVolumeClaim`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Claim {
    /// The object's metadata.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: ClaimSpec,
    /// Its phase.
    pub status: Phase,
}

/// Specification of a claim.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimSpec {
    /// Name of its `StorageClass`.
    pub storage_class_name: Option<String>,
    /// The volume that it is bound to; empty if it is unbound.
    pub volume_name: String,
    /// Such as `ReadWriteOnce`.
    pub access_modes: Vec<String>,
    /// `Filesystem` (the default) or `Block`.
    pub volume_mode: Option<String>,
    /// The requested resources.
    pub resources: Resources,
    /// What the volume is populated from.
    pub data_source: Option<IgnoredAny>,
    /// Label query over the volumes that may be bound.
    pub selector: Option<IgnoredAny>,
}

/// Requested resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Quantities by resource.
    pub requests: BTreeMap<String, String>,
}

/// A `Service`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Service {
    /// The object's metadata.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: ServiceSpec,
}

/// Specification of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    /// Its type; empty means `ClusterIP`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its address; the text `None` for a headless service; empty before it is allocated.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: String,
    /// Its addresses, of each of its families; the first one is the same.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Vec<String>,
    /// The external name that it is an alias of, for type `ExternalName`.
    pub external_name: String,
    /// The ports that it exposes.
    pub ports: Vec<Port>,
}

/// A port of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Port {
    /// May be empty if there is only one port.
    pub name: String,
    /// Empty means `TCP`.
    pub protocol: String,
    /// Port number.
    pub port: i32,
}

/// Some of the endpoints of a service, of one address family. Lists that are empty may be `null`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EndpointSlice {
    /// The object's metadata; the label [`SERVICE_NAME`] names the service.
    pub metadata: Metadata,
    /// The endpoints.
    pub endpoints: Option<Vec<Endpoint>>,
    /// The ports that all of them serve.
    pub ports: Option<Vec<EndpointPort>>,
}

/// The label of an `EndpointSlice` with the name of its service.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// An endpoint, which is usually a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// IP addresses as text, of which the first one counts.
    pub addresses: Vec<String>,
    /// Whether it serves.
    pub conditions: EndpointConditions,
    /// Hostname within the service, if it has one.
    pub hostname: Option<String>,
}

/// The conditions of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    /// It is ready, unless this is `false`.
    pub ready: Option<bool>,
}

/// A port of endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EndpointPort {
    /// May be empty if there is only one port.
    pub name: Option<String>,
    /// Missing means `TCP`.
    pub protocol: Option<String>,
    /// Port number; missing means all ports.
    pub port: Option<i32>,
}

/// A `Lease`, for leader election.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// The object's metadata.
    pub metadata: Metadata,
    /// Its specification.
    pub spec: LeaseSpec,
}

/// Specification of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LeaseSpec {
    /// Identity of the holder; empty if it has been released.
    pub holder_identity: String,
    /// Seconds after the last renewal at which the lease expires.
    pub lease_duration_seconds: i32,
    /// How often the holder has changed.
    pub lease_transitions: i32,
}
