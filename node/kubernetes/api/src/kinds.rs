//! The kinds of objects that Hearth uses, with group, version and resource name.

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// API version, such as `v1`.
    pub version: &'static str,
    /// Name of the kind, such as `Node`.
    pub name: &'static str,
    /// Name of the resource in a URL, such as `nodes`.
    pub plural: &'static str,
}

impl Kind {
    const fn core(name: &'static str, plural: &'static str) -> Self {
        Self::of("", name, plural)
    }

    const fn of(group: &'static str, name: &'static str, plural: &'static str) -> Self {
        Self {
            group,
            version: "v1",
            name,
            plural,
        }
    }

    /// Group and version, as in an object's `apiVersion`.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Path of the API group and version.
    pub(super) fn root(&self) -> String {
        match self.group {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }
}

/// API group of roles and role bindings.
pub const RBAC: &str = "rbac.authorization.k8s.io";
/// API group of admission policies.
const ADMISSION: &str = "admissionregistration.k8s.io";

/// `Node`.
pub const NODES: Kind = Kind::core("Node", "nodes");
/// `Pod`.
pub const PODS: Kind = Kind::core("Pod", "pods");
/// `Service`.
pub const SERVICES: Kind = Kind::core("Service", "services");
/// `Endpoints`.
pub const ENDPOINTS: Kind = Kind::core("Endpoints", "endpoints");
/// `EndpointSlice`.
pub const ENDPOINT_SLICES: Kind = Kind::of("discovery.k8s.io", "EndpointSlice", "endpointslices");
/// `PersistentVolume`.
pub const VOLUMES: Kind = Kind::core("PersistentVolume", "persistentvolumes");
/// `PersistentVolumeClaim`.
pub const CLAIMS: Kind = Kind::core("PersistentVolumeClaim", "persistentvolumeclaims");
/// `Namespace`.
pub const NAMESPACES: Kind = Kind::core("Namespace", "namespaces");
/// `ConfigMap`.
pub const CONFIG_MAPS: Kind = Kind::core("ConfigMap", "configmaps");
/// `Secret`.
pub const SECRETS: Kind = Kind::core("Secret", "secrets");
/// `ServiceAccount`.
pub const SERVICE_ACCOUNTS: Kind = Kind::core("ServiceAccount", "serviceaccounts");
/// `Event`.
pub const EVENTS: Kind = Kind::core("Event", "events");
/// `Lease`.
pub const LEASES: Kind = Kind::of("coordination.k8s.io", "Lease", "leases");
/// `Role`.
pub const ROLES: Kind = Kind::of(RBAC, "Role", "roles");
/// `RoleBinding`.
pub const ROLE_BINDINGS: Kind = Kind::of(RBAC, "RoleBinding", "rolebindings");
/// `NetworkPolicy`.
pub const NETWORK_POLICIES: Kind =
    Kind::of("networking.k8s.io", "NetworkPolicy", "networkpolicies");
/// `ClusterRole`.
pub const CLUSTER_ROLES: Kind = Kind::of(RBAC, "ClusterRole", "clusterroles");
/// `ClusterRoleBinding`.
pub const CLUSTER_ROLE_BINDINGS: Kind = Kind::of(RBAC, "ClusterRoleBinding", "clusterrolebindings");
/// `ValidatingAdmissionPolicy`.
pub const ADMISSION_POLICIES: Kind = Kind::of(
    ADMISSION,
    "ValidatingAdmissionPolicy",
    "validatingadmissionpolicies",
);
/// `ValidatingAdmissionPolicyBinding`.
pub const ADMISSION_POLICY_BINDINGS: Kind = Kind::of(
    ADMISSION,
    "ValidatingAdmissionPolicyBinding",
    "validatingadmissionpolicybindings",
);
/// `StorageClass`.
pub const STORAGE_CLASSES: Kind = Kind::of("storage.k8s.io", "StorageClass", "storageclasses");
/// `RuntimeClass`.
pub const RUNTIME_CLASSES: Kind = Kind::of("node.k8s.io", "RuntimeClass", "runtimeclasses");
