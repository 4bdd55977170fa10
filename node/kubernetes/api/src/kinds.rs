//! The kinds of objects, and where they are.

/// A kind of objects, as Kubernetes' discovery would tell of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Empty for the oldest ones.
    pub group: &'static str,
    /// Such as `v1`.
    pub version: &'static str,
    /// Such as `Node`.
    pub name: &'static str,
    /// Such as `nodes`: how it stands in a path.
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

    /// Group and version, as an object bears them.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Where the paths of its group begin.
    pub(super) fn root(&self) -> String {
        match self.group {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }
}

/// The group of roles.
pub const RBAC: &str = "rbac.authorization.k8s.io";

/// Machines.
pub const NODES: Kind = Kind::core("Node", "nodes");
/// Addresses that stand for pods.
pub const SERVICES: Kind = Kind::core("Service", "services");
/// The pods that they stand for.
pub const ENDPOINTS: Kind = Kind::core("Endpoints", "endpoints");
/// Volumes.
pub const VOLUMES: Kind = Kind::core("PersistentVolume", "persistentvolumes");
/// Wishes for volumes.
pub const CLAIMS: Kind = Kind::core("PersistentVolumeClaim", "persistentvolumeclaims");
/// Where objects of the same name do not meet.
pub const NAMESPACES: Kind = Kind::core("Namespace", "namespaces");
/// Who pods are, when they ask the API server.
pub const SERVICE_ACCOUNTS: Kind = Kind::core("ServiceAccount", "serviceaccounts");
/// Words to users.
pub const EVENTS: Kind = Kind::core("Event", "events");
/// Who of several works.
pub const LEASES: Kind = Kind::of("coordination.k8s.io", "Lease", "leases");
/// Rights.
pub const CLUSTER_ROLES: Kind = Kind::of(RBAC, "ClusterRole", "clusterroles");
/// Whose they are.
pub const CLUSTER_ROLE_BINDINGS: Kind = Kind::of(RBAC, "ClusterRoleBinding", "clusterrolebindings");
/// By whom volumes are made.
pub const STORAGE_CLASSES: Kind = Kind::of("storage.k8s.io", "StorageClass", "storageclasses");
/// By what pods are run.
pub const RUNTIME_CLASSES: Kind = Kind::of("node.k8s.io", "RuntimeClass", "runtimeclasses");
