//! The desired state of the objects that Hearth maintains in a cluster.
//!
//! They are written with server-side apply: the fields here are managed by Hearth and are restored
//! when someone changes them; fields that others add to the same objects are kept. Objects are
//! never removed: if a later version does not have an object any more, that version has to remove
//! it.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use hearth_api::identity::NodeId;
use hearth_api::ranges::ClusterRanges;
use hearth_host::pki::kubernetes::{Certificate, NODES};
use hearth_kubernetes_api::kinds::{self, Kind, RBAC};
use hearth_kubernetes_api::{ApiError, Client, MANAGER};
use serde_json::{Value, json};

use crate::volumes::plan::Refusal;
use crate::volumes::{CLASS, PROVISIONER};

/// The namespace of Kubernetes itself.
pub const NAMESPACE: &str = "kube-system";
/// The default namespace of users.
const USERS_NAMESPACE: &str = "default";
/// The DNS service, with the conventional name.
const DNS: &str = "kube-dns";
/// The role of the nodes' own clients.
const NODE_ROLE: &str = "hearth:node";
const RUNTIME: &str = "runc";

/// A desired object.
pub struct Wanted {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; `None` for a cluster-scoped object.
    pub namespace: Option<String>,
    /// The fields that Hearth manages.
    pub body: Value,
}

impl Wanted {
    pub(super) fn new(kind: Kind, namespace: Option<&str>, name: &str, mut body: Value) -> Self {
        body["apiVersion"] = json!(kind.api_version());
        body["kind"] = json!(kind.name);
        body["metadata"]["name"] = json!(name);
        body["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!(MANAGER);
        if let Some(namespace) = namespace {
            body["metadata"]["namespace"] = json!(namespace);
        }
        Self {
            kind,
            namespace: namespace.map(str::to_owned),
            body,
        }
    }

    /// Name of the object.
    pub fn name(&self) -> &str {
        self.body["metadata"]["name"].as_str().unwrap_or_default()
    }

    /// Applies the object.
    pub async fn apply(&self, client: &Client) -> Result<(), ApiError> {
        let objects = match &self.namespace {
            Some(namespace) => client.within(namespace, self.kind),
            None => client.all(self.kind),
        };
        objects.apply(self.name(), &self.body).await
    }
}

/// The constant objects of every cluster, in the order in which they are created. The default storage class comes
/// before the namespace of users: a claim without a class that was created before the default class
/// would never get one.
pub fn constant() -> Vec<Wanted> {
    [
        storage_class(),
        runtime_class(),
        default_namespace(),
        default_account(),
        role(),
        binding(),
    ]
    .into()
}

/// The permissions of nodes: for DNS, for their volumes, and to see their own Node. Nodes may not
/// create, change or delete PersistentVolumes (see [`crate::volumes`]), except for what
/// [`release_permission`] permits: a node that could create them could make other nodes mount any of their
/// directories, and one that could change them could make other nodes delete them.
fn role() -> Wanted {
    let body = json!({ "rules": [
        {
            "apiGroups": [""],
            "resources": ["services", "endpoints", "nodes"],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": [""],
            "resources": ["persistentvolumes"],
            "verbs": ["get", "list", "watch"],
        },
    ]});
    Wanted::new(kinds::CLUSTER_ROLES, None, NODE_ROLE, body)
}

fn binding() -> Wanted {
    let body = json!({
        "roleRef": { "apiGroup": RBAC, "kind": "ClusterRole", "name": NODE_ROLE },
        "subjects": [{ "apiGroup": RBAC, "kind": "Group", "name": NODES }],
    });
    Wanted::new(kinds::CLUSTER_ROLE_BINDINGS, None, "hearth:nodes", body)
}

/// The permission of one node to release these volumes, which are being deleted.
pub fn release_permission(node: NodeId, volumes: &BTreeSet<String>) -> [Wanted; 2] {
    let name = letting_go_name(node);
    // A rule without names would apply to all volumes.
    let rules = if volumes.is_empty() {
        json!([])
    } else {
        json!([{
            "apiGroups": [""],
            "resources": ["persistentvolumes"],
            "resourceNames": volumes,
            "verbs": ["patch"],
        }])
    };
    let user = Certificate::Node(node).subject();
    let binding = json!({
        "roleRef": { "apiGroup": RBAC, "kind": "ClusterRole", "name": name },
        "subjects": [{ "apiGroup": RBAC, "kind": "User", "name": user }],
    });
    let role = json!({ "rules": rules });
    [
        Wanted::new(kinds::CLUSTER_ROLES, None, &name, role),
        Wanted::new(kinds::CLUSTER_ROLE_BINDINGS, None, &name, binding),
    ]
}

/// Name of the role and of its binding.
pub fn letting_go_name(node: NodeId) -> String {
    format!("{NODE_ROLE}:{node}:volumes")
}

fn storage_class() -> Wanted {
    let body = json!({
        "metadata": { "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        // The volume is created on the node of the pod.
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": false,
    });
    Wanted::new(kinds::STORAGE_CLASSES, None, CLASS, body)
}

fn runtime_class() -> Wanted {
    let body = json!({ "handler": RUNTIME });
    Wanted::new(kinds::RUNTIME_CLASSES, None, RUNTIME, body)
}

/// The default namespace. The API server creates it as well, but some time after it has become
/// ready.
fn default_namespace() -> Wanted {
    Wanted::new(kinds::NAMESPACES, None, USERS_NAMESPACE, json!({}))
}

/// The default service account. Pods are rejected before it exists. The controller-manager would
/// create it after all of its controllers have started.
fn default_account() -> Wanted {
    let namespace = Some(USERS_NAMESPACE);
    Wanted::new(kinds::SERVICE_ACCOUNTS, namespace, "default", json!({}))
}

/// The DNS service, without a selector, because its endpoints are nodes and not pods.
pub fn dns_service(ranges: &ClusterRanges) -> Wanted {
    let body = json!({
        "metadata": { "labels": {
            "k8s-app": DNS,
            "kubernetes.io/cluster-service": "true",
        }},
        "spec": {
            "clusterIP": ranges.dns_service(),
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53, "targetPort": 53 },
                { "name": "dns-tcp", "protocol": "TCP", "port": 53, "targetPort": 53 },
            ],
        },
    });
    Wanted::new(kinds::SERVICES, Some(NAMESPACE), DNS, body)
}

/// The endpoints of the DNS service: node names and the gateway addresses of their pod networks.
pub fn dns_endpoints(servers: &[(String, Ipv4Addr)]) -> Wanted {
    let address = |(node, ip): &(String, Ipv4Addr)| json!({ "ip": ip, "nodeName": node });
    let addresses: Vec<Value> = servers.iter().map(address).collect();
    let subsets = if addresses.is_empty() {
        // A subset without addresses is invalid.
        json!([])
    } else {
        json!([{
            "addresses": addresses,
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53 },
                { "name": "dns-tcp", "protocol": "TCP", "port": 53 },
            ],
        }])
    };
    let body = json!({ "subsets": subsets });
    Wanted::new(kinds::ENDPOINTS, Some(NAMESPACE), DNS, body)
}

/// The event for a claim that is refused. There is one for each claim, with the latest reason.
pub fn refusal(refusal: &Refusal) -> Wanted {
    let (namespace, name, uid) = &refusal.claim;
    let body = json!({
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": "Warning",
        "reason": "ProvisioningFailed",
        "message": refusal.why,
        "source": { "component": PROVISIONER },
    });
    let event = format!("{name}.{uid}");
    Wanted::new(kinds::EVENTS, Some(namespace), &event, body)
}
