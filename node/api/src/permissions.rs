//! Which caller may call which method.
//!
//! Every method states in the proto files what its caller needs; the build script turns that into
//! the table behind [`authorization`]. What a caller holds follows from its identity alone, so a
//! certificate carries no permissions that would have to be revoked separately.
//!
//! A method that is not in the table is refused: a forgotten option closes a method, and never
//! opens one.

use crate::identity::Subject;
pub use crate::v1::Permission;

/// What a method requires of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authorization {
    /// Nothing but a completed TLS handshake. The handler checks whatever proof the call itself
    /// requires.
    Unauthenticated,
    /// A certificate of this cluster whose identity holds all of these.
    Need(&'static [Permission]),
}

include!(concat!(env!("OUT_DIR"), "/permissions.rs"));

/// What the method with this path (`/hearth.v1.Management/GetNodes`) requires of its caller; `None`
/// means that no caller may call it.
pub fn authorization(path: &str) -> Option<Authorization> {
    match path {
        // The proto file of this standard service cannot be annotated. Load balancers call it
        // without credentials, and it reveals nothing but "serving".
        "/grpc.health.v1.Health/Check" | "/grpc.health.v1.Health/Watch" => {
            Some(Authorization::Unauthenticated)
        }
        // Neither can that of this one. It shows what any member of the cluster may know.
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo" => {
            Some(Authorization::Need(&[Permission::ReadClusterStatus]))
        }
        _ => generated(path),
    }
}

/// Permissions of a node.
const NODE: &[Permission] = &[Permission::ReadClusterStatus, Permission::UpdateNodeSelf];

/// Permissions of a user. There is one user, the owner, which holds everything but the permissions
/// for nodes only.
const USER: &[Permission] = &[
    Permission::ReadClusterStatus,
    Permission::GetRegisterTicket,
    Permission::ApproveNode,
    Permission::UpdateNodeRoles,
    Permission::UpdateNodeLabels,
    Permission::DecommissionNode,
    Permission::DeleteNode,
    Permission::ConfigureCluster,
    Permission::ReplaceOwner,
    Permission::TrustImages,
    Permission::ReadNodeLogs,
    Permission::NodePower,
    Permission::ConfigureNode,
    Permission::UseKubernetes,
];

/// The permissions that a subject of the cluster holds.
pub fn held_by(subject: &Subject) -> &'static [Permission] {
    match subject {
        Subject::Node(_) => NODE,
        Subject::User(_) => USER,
    }
}

/// The first of the needed permissions that the subject does not hold.
pub fn missing(subject: &Subject, need: &[Permission]) -> Option<Permission> {
    let held = held_by(subject);
    need.iter().copied().find(|p| !held.contains(p))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use prost_reflect::{DescriptorPool, Value};

    use super::*;
    use crate::identity::{NodeId, UserName};

    #[test]
    fn every_method_states_who_may_call_it() {
        let pool = DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET).expect("descriptors");
        let extension = pool
            .get_extension_by_name("hearth.v1.authorization")
            .expect("the option is defined");
        let mut methods = 0;
        for service in pool.services() {
            for method in service.methods() {
                methods += 1;
                let path = format!("/{}/{}", service.full_name(), method.name());
                let options = method.options();
                assert!(options.has_extension(&extension), "{path} has no option");
                let option = options.get_extension(&extension);
                let option = option.as_message().expect("a message");
                let open = option.get_field_by_name("unauthenticated").expect("field");
                let need = option.get_field_by_name("need").expect("field");
                let need: Vec<i32> = need
                    .as_list()
                    .expect("a list")
                    .iter()
                    .filter_map(Value::as_enum_number)
                    .collect();
                // The generated table matches the descriptor.
                match authorization(&path).expect("in the table") {
                    Authorization::Unauthenticated => {
                        assert_eq!(open.as_bool(), Some(true), "{path}");
                        assert!(need.is_empty(), "{path} is both");
                    }
                    Authorization::Need(table) => {
                        assert_eq!(open.as_bool(), Some(false), "{path} is both");
                        let table: Vec<i32> = table.iter().map(|p| *p as i32).collect();
                        assert_eq!(table, need, "{path}");
                        assert!(!need.is_empty(), "{path} needs nothing");
                    }
                }
            }
        }
        assert!(methods > 5, "the descriptor set has only {methods} methods");
    }

    #[test]
    fn unknown_paths_are_refused() {
        for path in [
            "",
            "/",
            "hearth.v1.Management/GetNodes",
            "/hearth.v1.Management/GetNodes/",
            "/hearth.v1.Management/getnodes",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ] {
            assert_eq!(authorization(path), None, "{path:?}");
        }
    }

    #[test]
    fn nodes_and_users_keep_to_their_own() {
        let node = Subject::Node(NodeId::from_bytes([7; 16]));
        let user = Subject::User(UserName::new("owner").expect("valid"));
        assert_eq!(
            missing(&user, &[Permission::UpdateNodeSelf]),
            Some(Permission::UpdateNodeSelf)
        );
        assert_eq!(
            missing(
                &node,
                &[Permission::ReadClusterStatus, Permission::ApproveNode]
            ),
            Some(Permission::ApproveNode)
        );
        assert_eq!(missing(&node, &[Permission::UpdateNodeSelf]), None);
        // The unspecified permission has no holder, and every other one has.
        let all: HashSet<i32> = NODE.iter().chain(USER).map(|p| *p as i32).collect();
        assert!(!all.contains(&(Permission::Unspecified as i32)));
        for number in 1.. {
            match Permission::try_from(number) {
                Ok(permission) => assert!(all.contains(&number), "{permission:?} has no holder"),
                Err(_) => break,
            }
        }
    }
}
