//! What pods may not ask for in any namespace, whatever the level of Pod Security there.
//!
//! The policies are objects of the API server, so `kubectl` shows them, and the refusal says why.
//! They tell users early: what they refuse would not work or not do what the user expects, because
//! the node defends itself against it as well.

use hearth_kubernetes_api::kinds;
use serde_json::json;

use super::objects::Wanted;
use crate::firewall::{OWN_TCP, OWN_UDP};

/// The name of the policy about ports.
const NODE_PORTS: &str = "hearth-node-ports";

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
