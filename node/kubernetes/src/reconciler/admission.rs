//! What the API servers refuse because Hearth says so, in all namespaces and to everybody.
//!
//! The policies are objects of the API server, so `kubectl` shows them, and a refusal says why.
//!
//! | policy | refuses |
//! |---|---|
//! | [`NODE_PORTS`] | pods that ask for one of the node's own ports as a host port. It only tells early: the node defends itself |
//! | [`REGISTRATION`] | a kubelet that creates the Node of a machine that is not a worker |
//! | [`BINDING`] | to bind a pod to a machine that is not a worker |
//! | [`HOST_PATHS`] | pods, and volumes, that ask for directories of the node with its keys or the cluster's, but for pods of `kube-system` |
//!
//! [`REGISTRATION`] and [`BINDING`] are for workers that were deleted because they are in the wrong hands. Their
//! certificates remain valid for some hours, and with the name of a node comes the right to read the
//! secrets of all pods that are bound to it; pods of DaemonSets are bound to every Node that exists,
//! whatever its taints. So what is refused is not a list of deleted nodes, which would have to be
//! complete, but everything that is not in the list of present workers, [`WORKERS`].

use std::collections::BTreeSet;

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::kinds;
use serde_json::{Value, json};

use super::objects::{NAMESPACE, Wanted};
use crate::firewall::{OWN_TCP, OWN_UDP};

/// The name of the policy about ports.
const NODE_PORTS: &str = "hearth-node-ports";

/// The name of the policy about host paths.
const HOST_PATHS: &str = "hearth-host-paths";
/// The directories that [`HOST_PATHS`] is about. In `/proc` there are links to the root directory
/// of each process.
const PRIVATE: [&str; 5] = ["/data/etcd", "/data/node", "/ephemeral", "/esp", "/proc"];
/// The name of the policy about Nodes.
const REGISTRATION: &str = "hearth-node-registration";
/// The name of the policy about the nodes of pods.
const BINDING: &str = "hearth-pod-binding";
/// The name of the ConfigMap with the IDs of the present workers.
const WORKERS: &str = "hearth-workers";

/// All policies. They do not change.
pub(super) fn policies() -> Vec<Wanted> {
    let policies = node_ports().into_iter().chain(workers_only());
    policies.chain(host_paths()).collect()
}

/// The list of the present workers.
pub(super) fn workers(ids: &BTreeSet<NodeId>) -> Wanted {
    let data = ids.iter().map(|id| (id.to_string(), json!("")));
    let body = json!({ "data": data.collect::<serde_json::Map<_, _>>() });
    Wanted::new(kinds::CONFIG_MAPS, Some(NAMESPACE), WORKERS, body)
}

/// The policies by that list.
fn workers_only() -> [Wanted; 4] {
    // Before there is a list, everything is permitted.
    let parameters = |policy: &str| {
        let binding = json!({ "spec": {
            "policyName": policy,
            "paramRef": {
                "name": WORKERS,
                "namespace": NAMESPACE,
                "parameterNotFoundAction": "Allow",
            },
            "validationActions": ["Deny"],
        }});
        Wanted::new(kinds::ADMISSION_POLICY_BINDINGS, None, policy, binding)
    };
    let policy = |name: &str, resource: &str, node: &str, conditions: Value| {
        let listed = format!("has(params.data) && {node} in params.data");
        let policy = json!({ "spec": {
            "failurePolicy": "Fail",
            "paramKind": { "apiVersion": "v1", "kind": "ConfigMap" },
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": [resource],
            }]},
            "matchConditions": conditions,
            "validations": [{
                "expression": listed,
                "messageExpression": format!("{node} + ' is not a worker of this cluster'"),
            }],
        }});
        Wanted::new(kinds::ADMISSION_POLICIES, None, name, policy)
    };
    // Nodes whose names are not IDs are not Hearth's.
    let ours = |node: &str| json!([{ "name": "ours", "expression": format!("{node}.startsWith('hearth-')") }]);
    let kubelets = json!([{
        "name": "kubelets",
        "expression": "'system:nodes' in request.userInfo.groups",
    }]);
    let bound = "object.target.name";
    [
        policy(REGISTRATION, "nodes", "object.metadata.name", kubelets),
        parameters(REGISTRATION),
        policy(BINDING, "pods/binding", bound, ours(bound)),
        parameters(BINDING),
    ]
}

/// Pods may not use the node's own ports as host ports. (Without the host's network such a host
/// port would be without effect, see [`crate::firewall`]; with it, it would be in conflict with the
/// node's own program.)
fn node_ports() -> [Wanted; 2] {
    let taken = |protocol: &str, ports: &[u16]| {
        format!(
            "p.?protocol.orValue('TCP') == '{protocol}' && p.?hostPort.orValue(0) in {}",
            json!(ports)
        )
    };
    let taken = format!("{} || {}", taken("TCP", &OWN_TCP), taken("UDP", &OWN_UDP));
    let taken = format!(
        "(object.spec.containers + object.spec.?initContainers.orValue([]))\
         .map(c, c.?ports.orValue([]).filter(p, {taken}).map(p, string(p.hostPort)))\
         .filter(ports, size(ports) > 0)"
    );
    let policy = json!({ "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": { "resourceRules": [{
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["pods"],
        }]},
        "variables": [{ "name": "taken", "expression": taken }],
        "validations": [{
            "expression": "size(variables.taken) == 0",
            "messageExpression": "'host port ' + variables.taken[0].join(', ') + \
                                  ' is used by the node itself: choose another host port'",
        }],
    }});
    let binding = json!({ "spec": {
        "policyName": NODE_PORTS,
        "validationActions": ["Deny"],
    }});
    [
        Wanted::new(kinds::ADMISSION_POLICIES, None, NODE_PORTS, policy),
        Wanted::new(kinds::ADMISSION_POLICY_BINDINGS, None, NODE_PORTS, binding),
    ]
}

/// Host paths that are, are in, or contain a directory of [`PRIVATE`]. Which host paths there are at
/// all is for Pod Security; this holds where that permits them, too. Links that a pod has made in
/// another directory are not seen here.
fn host_paths() -> [Wanted; 4] {
    let pods =
        "object.spec.?volumes.orValue([]).filter(v, has(v.hostPath)).map(v, v.hostPath.path)";
    let volumes = "(has(object.spec.hostPath) ? [object.spec.hostPath.path] : []) \
                   + (has(object.spec.local) ? [object.spec.local.path] : [])";
    let policy = |resource: &str, conditions: Value, paths: &str| {
        // Names between the slashes, so that no other spelling of a path passes.
        let named = |path: &str| {
            format!("{path}.split('/').filter(n, n != '' && n != '.').join('/') + '/'")
        };
        let taken = format!(
            "variables.paths.filter(p, {private}.exists(q, (p == '/' || p.startsWith(q) || q.startsWith(p))))",
            private = json!(PRIVATE.map(|path| format!("{}/", path.trim_start_matches('/')))),
        );
        let name = format!("{HOST_PATHS}-{resource}");
        let policy = json!({ "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": [resource],
            }]},
            "matchConditions": conditions,
            "variables": [
                { "name": "paths", "expression": format!("({paths}).map(p, {})", named("p")) },
                { "name": "taken", "expression": taken },
            ],
            "validations": [{
                "expression": "size(variables.taken) == 0",
                "messageExpression": "'host path /' + variables.taken[0] + \
                                      ' is, or contains, a private directory of the node'",
            }],
        }});
        let binding = json!({ "spec": { "policyName": name, "validationActions": ["Deny"] } });
        [
            Wanted::new(kinds::ADMISSION_POLICIES, None, &name, policy),
            Wanted::new(kinds::ADMISSION_POLICY_BINDINGS, None, &name, binding),
        ]
    };
    let elsewhere = json!([{
        "name": "elsewhere",
        "expression": format!("object.metadata.namespace != '{NAMESPACE}'"),
    }]);
    let [of_pods, bound_pods] = policy("pods", elsewhere, pods);
    let [of_volumes, bound_volumes] = policy("persistentvolumes", json!([]), volumes);
    [of_pods, bound_pods, of_volumes, bound_volumes]
}
