//! What the API servers refuse because Hearth says so, in all namespaces and to everybody.
//!
//! The policies are objects of the API server, so `kubectl` shows them, and a refusal says why.
//!
//! | policy | refuses |
//! |---|---|
//! | [`NODE_PORTS`] | pods that ask for one of the node's own ports as a host port. It only tells early: the node defends itself |
//! | [`REGISTRATION`] | a kubelet that creates the Node of a machine that is not a worker |
//! | [`BINDING`] | to bind a pod to a machine that is not a worker |
//!
//! The last two are for workers that were deleted because they are in the wrong hands. Their
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

/// The name of the policy about Nodes.
const REGISTRATION: &str = "hearth-node-registration";
/// The name of the policy about the nodes of pods.
const BINDING: &str = "hearth-pod-binding";
/// The name of the ConfigMap with the IDs of the present workers.
const WORKERS: &str = "hearth-workers";

/// The list of the present workers.
pub(super) fn workers(ids: &BTreeSet<NodeId>) -> Wanted {
    let data = ids.iter().map(|id| (id.to_string(), json!("")));
    let body = json!({ "data": data.collect::<serde_json::Map<_, _>>() });
    Wanted::new(kinds::CONFIG_MAPS, Some(NAMESPACE), WORKERS, body)
}

/// The policies by that list.
pub(super) fn workers_only() -> [Wanted; 4] {
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
pub(super) fn node_ports() -> [Wanted; 2] {
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
