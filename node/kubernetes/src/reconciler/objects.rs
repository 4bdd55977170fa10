//! The objects that a cluster has from us, as they are to be.
//!
//! Written by server-side apply: what stands here is ours and is put right when
//! somebody changes it; what others add to the same objects stays. Taken back is
//! nothing: an object that a later version no longer has is that version's to
//! remove.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use hearth_api::identity::NodeId;
use hearth_api::names::SERVICE_DNS;
use hearth_host::pki::kubernetes::{Certificate, NODES};
use hearth_kubernetes_api::kinds::{self, Kind, RBAC};
use hearth_kubernetes_api::{ApiError, Client, MANAGER};
use serde_json::{Value, json};

use crate::volumes::plan::Refusal;
use crate::volumes::{CLASS, PROVISIONER};

/// Of Kubernetes itself.
pub const NAMESPACE: &str = "kube-system";
/// Where users begin.
const USERS_NAMESPACE: &str = "default";
/// The service that resolves names, by the name that everybody looks for.
const DNS: &str = "kube-dns";
/// The role of the nodes' own clients.
const NODE_ROLE: &str = "hearth:node";
const RUNTIME: &str = "runc";

/// An object, and where it goes.
pub struct Wanted {
    /// Its kind.
    pub kind: Kind,
    /// `None`: it is in none.
    pub namespace: Option<String>,
    /// What is ours of it.
    pub body: Value,
}

impl Wanted {
    fn new(kind: Kind, namespace: Option<&str>, name: &str, mut body: Value) -> Self {
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

    /// Of the body.
    pub fn name(&self) -> &str {
        self.body["metadata"]["name"].as_str().unwrap_or_default()
    }

    /// Makes it so.
    pub async fn apply(&self, client: &Client) -> Result<(), ApiError> {
        let objects = match &self.namespace {
            Some(namespace) => client.within(namespace, self.kind),
            None => client.all(self.kind),
        };
        objects.apply(self.name(), &self.body).await
    }
}

/// Those that are always the same, in the order in which they are made. The
/// class of claims that name none comes before the namespace in which users
/// make them: a claim that was there first never gets one.
pub fn constant() -> Vec<Wanted> {
    vec![
        storage_class(),
        runtime_class(),
        default_namespace(),
        default_account(),
        role(),
        binding(),
        dns_service(),
    ]
}

/// What nodes do: resolve names, keep their volumes, and see whether they are
/// nodes of Kubernetes. Nodes make, change and remove no volumes' objects (see
/// [`crate::volumes`]), but for what [`letting_go`] says: one that
/// could make them could have others mount any of their directories, and one
/// that could change them could have others remove them.
fn role() -> Wanted {
    let body = json!({ "rules": [
        {
            "apiGroups": [""],
            "resources": ["services", "endpoints", "nodes"],
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

/// The right of one node to let these volumes go, which are being removed.
pub fn letting_go(node: NodeId, volumes: &BTreeSet<String>) -> [Wanted; 2] {
    let name = letting_go_name(node);
    // Without names it would be a right to all of them.
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

/// Of the role, and of its binding.
pub fn letting_go_name(node: NodeId) -> String {
    format!("{NODE_ROLE}:{node}:volumes")
}

fn storage_class() -> Wanted {
    let body = json!({
        "metadata": { "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        // The pod's node decides where the volume is.
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": false,
    });
    Wanted::new(kinds::STORAGE_CLASSES, None, CLASS, body)
}

fn runtime_class() -> Wanted {
    let body = json!({ "handler": RUNTIME });
    Wanted::new(kinds::RUNTIME_CLASSES, None, RUNTIME, body)
}

/// The namespace that users begin in. The API server makes it as well, but some
/// time after it says that it is ready.
fn default_namespace() -> Wanted {
    Wanted::new(kinds::NAMESPACES, None, USERS_NAMESPACE, json!({}))
}

/// No pod is taken before the account that it has by default has a token. The
/// controller-manager would make this account after all of its controllers have
/// begun; its tokens come from the first of them.
fn default_account() -> Wanted {
    let namespace = Some(USERS_NAMESPACE);
    Wanted::new(kinds::SERVICE_ACCOUNTS, namespace, "default", json!({}))
}

/// Without a selector: what stands behind it are no pods.
fn dns_service() -> Wanted {
    let body = json!({
        "metadata": { "labels": {
            "k8s-app": DNS,
            "kubernetes.io/cluster-service": "true",
        }},
        "spec": {
            "clusterIP": SERVICE_DNS,
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53, "targetPort": 53 },
                { "name": "dns-tcp", "protocol": "TCP", "port": 53, "targetPort": 53 },
            ],
        },
    });
    Wanted::new(kinds::SERVICES, Some(NAMESPACE), DNS, body)
}

/// The nodes that answer, with their addresses among their pods.
pub fn dns_endpoints(servers: &[(String, Ipv4Addr)]) -> Wanted {
    let address = |(node, ip): &(String, Ipv4Addr)| json!({ "ip": ip, "nodeName": node });
    let addresses: Vec<Value> = servers.iter().map(address).collect();
    let subsets = if addresses.is_empty() {
        // A subset without addresses is none.
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

/// The word to the one who made a claim that cannot be served. One for each
/// claim: the newest reason is the one that counts.
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
