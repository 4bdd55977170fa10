//! The objects that a cluster has from us, as they are to be.
//!
//! Written by server-side apply: what stands here is ours and is put right when
//! somebody changes it; what others add to the same objects stays. Taken back is
//! nothing: an object that a later version no longer has is that version's to
//! remove.

use std::net::Ipv4Addr;

use hearth_api::names::SERVICE_DNS;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Error};
use serde_json::{Value, json};

use crate::kubernetes::volumes::plan::Refusal;
use crate::kubernetes::volumes::{CLASS, PROVISIONER};
use crate::pki::kubernetes::NODES;

/// By whom the fields are managed.
pub const MANAGER: &str = "hearth";
/// Of Kubernetes itself.
pub const NAMESPACE: &str = "kube-system";
/// The service that resolves names, by the name that everybody looks for.
const DNS: &str = "kube-dns";
/// The role of the nodes' own clients.
const NODE_ROLE: &str = "hearth:node";
const RUNTIME: &str = "runc";

/// An object, and where it goes.
pub struct Wanted {
    /// Its kind, for whoever writes it.
    pub resource: ApiResource,
    /// `None`: it is in none.
    pub namespace: Option<&'static str>,
    /// What is ours of it.
    pub body: Value,
}

impl Wanted {
    fn new(
        (group, version, kind, plural): (&str, &str, &str, &str),
        namespace: Option<&'static str>,
        name: &str,
        mut body: Value,
    ) -> Self {
        let kind = GroupVersionKind::gvk(group, version, kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        body["apiVersion"] = json!(resource.api_version);
        body["kind"] = json!(resource.kind);
        body["metadata"]["name"] = json!(name);
        body["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!(MANAGER);
        if let Some(namespace) = namespace {
            body["metadata"]["namespace"] = json!(namespace);
        }
        Self {
            resource,
            namespace,
            body,
        }
    }

    /// Of the body.
    pub fn name(&self) -> &str {
        self.body["metadata"]["name"].as_str().unwrap_or_default()
    }

    /// Makes it so.
    pub async fn apply(&self, client: &Client) -> Result<DynamicObject, Error> {
        let client = client.clone();
        let api: Api<DynamicObject> = match self.namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &self.resource),
            None => Api::all_with(client, &self.resource),
        };
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(&self.body);
        api.patch(self.name(), &params, &patch).await
    }
}

/// Those that are always the same.
pub fn constant() -> Vec<Wanted> {
    vec![
        role(),
        binding(),
        storage_class(),
        runtime_class(),
        dns_service(),
    ]
}

/// What nodes do: resolve names, and keep their volumes. Nodes make and remove
/// no volumes' objects (see [`crate::kubernetes::volumes`]): one that could make them could have
/// others mount any of their directories.
fn role() -> Wanted {
    let rbac = (
        "rbac.authorization.k8s.io",
        "v1",
        "ClusterRole",
        "clusterroles",
    );
    let body = json!({ "rules": [
        {
            "apiGroups": [""],
            "resources": ["services", "endpoints"],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": [""],
            "resources": ["persistentvolumes"],
            "verbs": ["get", "list", "watch", "patch"],
        },
    ]});
    Wanted::new(rbac, None, NODE_ROLE, body)
}

fn binding() -> Wanted {
    let rbac = "rbac.authorization.k8s.io";
    let kind = (rbac, "v1", "ClusterRoleBinding", "clusterrolebindings");
    let body = json!({
        "roleRef": { "apiGroup": rbac, "kind": "ClusterRole", "name": NODE_ROLE },
        "subjects": [{ "apiGroup": rbac, "kind": "Group", "name": NODES }],
    });
    Wanted::new(kind, None, "hearth:nodes", body)
}

fn storage_class() -> Wanted {
    let kind = ("storage.k8s.io", "v1", "StorageClass", "storageclasses");
    let body = json!({
        "metadata": { "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        // The pod's node decides where the volume is.
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": false,
    });
    Wanted::new(kind, None, CLASS, body)
}

fn runtime_class() -> Wanted {
    let kind = ("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses");
    Wanted::new(kind, None, RUNTIME, json!({ "handler": RUNTIME }))
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
    Wanted::new(
        ("", "v1", "Service", "services"),
        Some(NAMESPACE),
        DNS,
        body,
    )
}

/// The nodes that answer, with their addresses among their pods.
pub fn dns_endpoints(servers: &[(String, Ipv4Addr)]) -> Wanted {
    let address = |(node, ip): &(String, Ipv4Addr)| json!({ "ip": ip, "nodeName": node });
    let addresses: Vec<Value> = servers.iter().map(address).collect();
    let subsets = match addresses.is_empty() {
        // A subset without addresses is none.
        true => json!([]),
        false => json!([{
            "addresses": addresses,
            "ports": [
                { "name": "dns", "protocol": "UDP", "port": 53 },
                { "name": "dns-tcp", "protocol": "TCP", "port": 53 },
            ],
        }]),
    };
    let kind = ("", "v1", "Endpoints", "endpoints");
    Wanted::new(kind, Some(NAMESPACE), DNS, json!({ "subsets": subsets }))
}

/// The word to the one who made a claim that cannot be served. One for each
/// claim: the newest reason is the one that counts.
pub fn refusal(refusal: &Refusal) -> Wanted {
    let (namespace, name, uid) = &refusal.claim;
    let body = json!({
        "metadata": { "namespace": namespace },
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
    Wanted::new(("", "v1", "Event", "events"), None, &event, body)
}
