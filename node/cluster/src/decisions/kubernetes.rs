//! Certificates for Kubernetes workers, and the addresses of API servers.

use std::net::{IpAddr, SocketAddr};

use hearth_api::identity::NodeId;
use hearth_api::names::PORT_KUBERNETES;
use hearth_api::ranges::{ClusterRanges, RangesError};
use hearth_api::v1::issue_certificate_request::kubernetes_worker::Purpose;
use hearth_api::v1::{KubernetesConfiguration, Node, NodeState, NodeStatus};
use hearth_host::pki::kubernetes::Certificate;

use super::Rejection;
use crate::state::NodeRecord;

/// Addresses that no node has for its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reserved {
    /// Those of pods and services.
    pub ranges: ClusterRanges,
    /// The virtual address of the API servers.
    pub shared: Option<IpAddr>,
}

impl Reserved {
    /// Those of a cluster with these settings.
    ///
    /// # Errors
    /// If a newer release has written the settings.
    pub fn of(settings: &KubernetesConfiguration) -> Result<Self, RangesError> {
        Ok(Self {
            ranges: ClusterRanges::of(settings)?,
            shared: settings.virtual_address(),
        })
    }
}

/// Which certificate a node gets. `node` and `status` are its records, `others` the nodes selected by
/// [`reports`] for its address. A node reports its address itself, and with a server certificate for
/// another node's address it could pose as that node, for example to the API servers when somebody
/// executes a command in a pod. So addresses that another node has reported are refused, also if
/// that node is not heard: it may have been silenced. So are those that no node has for its own.
pub fn worker(
    id: NodeId,
    purpose: Purpose,
    (node, status): (Option<&NodeRecord>, Option<&NodeStatus>),
    others: &[Node],
    reserved: &Reserved,
) -> Result<Certificate<'static>, Rejection> {
    // A node that is being decommissioned loses this role first and stays UP.
    let is_worker = node
        .is_some_and(|node| node.state == NodeState::Up && node.roles.kubernetes_worker.is_some());
    if !is_worker {
        return Err(Rejection::NoWorker(id));
    }
    match purpose {
        Purpose::KubeletClient => Ok(Certificate::KubeletClient(id)),
        Purpose::KubeletServer => {
            let address = status.and_then(address).ok_or(Rejection::NoAddress(id))?;
            if let Some(whose) = belongs_to_others(id, address, others, reserved) {
                return Err(Rejection::AddressOfOthers {
                    node: id,
                    address,
                    whose,
                });
            }
            Ok(Certificate::KubeletServer { node: id, address })
        }
        Purpose::Proxy => Ok(Certificate::Proxy),
        Purpose::Node => Ok(Certificate::Node(id)),
        Purpose::Unspecified => Err(Rejection::Field {
            field: "kubernetes_worker.purpose",
            wanted: "a value that this curator knows",
            found: "none".into(),
        }),
    }
}

/// Whether a node has reported this address, and is UP.
pub fn reports(node: &Node, at: IpAddr) -> bool {
    let has = |status: &NodeStatus| [address(status), second_address(status)].contains(&Some(at));
    node.state() == NodeState::Up && node.status.as_ref().is_some_and(has)
}

/// Whether a node runs an API server, or will.
pub fn is_controller(node: &Node) -> bool {
    let holds = |roles: &hearth_api::v1::NodeRoles| roles.kubernetes_controller.is_some();
    node.state() == NodeState::Up && node.roles.as_ref().is_some_and(holds)
}

/// The URLs of API servers, given the nodes selected by [`is_controller`]: first those that are the same for as long
/// as the cluster exists, then those of the nodes.
pub fn servers(
    controllers: &[Node],
    settings: Option<&KubernetesConfiguration>,
) -> Result<Vec<String>, Rejection> {
    if controllers.is_empty() {
        return Err(Rejection::NoController);
    }
    let mut servers = settings.map_or_else(Vec::new, KubernetesConfiguration::stable_urls);
    let addresses = controllers
        .iter()
        .filter_map(|node| address(node.status.as_ref()?));
    servers.extend(addresses.map(|ip| format!("https://{}", SocketAddr::new(ip, PORT_KUBERNETES))));
    match servers.is_empty() {
        true => Err(Rejection::NoControllerAddress),
        false => Ok(servers),
    }
}

/// Why this node cannot have an address: a description of its owner, or `None` if it can.
fn belongs_to_others(
    id: NodeId,
    at: IpAddr,
    others: &[Node],
    reserved: &Reserved,
) -> Option<String> {
    if at.is_loopback() {
        return Some("a loopback address".to_owned());
    }
    if reserved.ranges.has_service(at) {
        return Some("in the service network".to_owned());
    }
    if reserved.ranges.has_pod(at) {
        return Some("in the pod network".to_owned());
    }
    if reserved.shared == Some(at) {
        return Some("the virtual address of the API servers".to_owned());
    }
    let mut others = others.iter().filter(|node| reports(node, at));
    let other = others.find(|node| node.id != id.to_string())?;
    Some(format!(
        "the address of node {}: delete that node if it is lost, or give one of them another address",
        other.id
    ))
}

/// The address that a node has reported.
pub fn address(status: &NodeStatus) -> Option<IpAddr> {
    status.external_address.parse().ok()
}

/// The address of the other family that a node has reported.
fn second_address(status: &NodeStatus) -> Option<IpAddr> {
    status.second_address.parse().ok()
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::SigningKey;
    use hearth_api::private::StoredNode;
    use hearth_api::testing::dual_stack;
    use hearth_api::v1::{NodeRoles, node_roles};
    use prost::Message as _;

    use super::*;
    use crate::state;

    fn id() -> NodeId {
        NodeId::from_bytes([5; 16])
    }

    fn record(node_state: NodeState) -> NodeRecord {
        let stored = StoredNode {
            version: state::VERSION,
            id: id().to_string(),
            public_key: SigningKey::from_seed([1; 32]).public().as_bytes().to_vec(),
            join_key: SigningKey::from_seed([2; 32]).public().as_bytes().to_vec(),
            state: node_state.into(),
            roles: Some(NodeRoles {
                kubernetes_worker: Some(node_roles::KubernetesWorker {}),
                ..Default::default()
            }),
            ..Default::default()
        };
        NodeRecord::decode(&state::node_key(id()), &stored.encode_to_vec()).unwrap()
    }

    #[test]
    fn only_a_worker_that_is_up_gets_a_certificate() {
        let purpose = Purpose::KubeletClient;
        let decide = |node: Option<&NodeRecord>| {
            worker(id(), purpose, (node, None), &[], &Reserved::default())
        };
        let refused = Err(Rejection::NoWorker(id()));
        assert_eq!(decide(None), refused);
        for state in [
            NodeState::New,
            NodeState::Standby,
            NodeState::Decommissioned,
        ] {
            assert_eq!(decide(Some(&record(state))), refused, "{state:?}");
        }
        let up = record(NodeState::Up);
        assert_eq!(decide(Some(&up)), Ok(Certificate::KubeletClient(id())));
        let without = NodeRecord {
            roles: NodeRoles::default(),
            ..up
        };
        assert_eq!(decide(Some(&without)), refused);
    }

    #[test]
    fn a_server_is_certified_for_the_address_it_has() {
        let up = record(NodeState::Up);
        let decide = |address: Option<&str>| {
            let status = address.map(|address| NodeStatus {
                external_address: address.into(),
                ..Default::default()
            });
            let at = |id: NodeId, address: &str| Node {
                id: id.to_string(),
                state: NodeState::Up.into(),
                status: Some(NodeStatus {
                    external_address: address.into(),
                    second_address: "2001:db8::6".into(),
                    ..Default::default()
                }),
                ..Default::default()
            };
            let other = NodeId::from_bytes([6; 16]);
            let decommissioned = Node {
                state: NodeState::Decommissioned.into(),
                ..at(NodeId::from_bytes([7; 16]), "192.0.2.1")
            };
            let others = [
                at(id(), "192.0.2.1"),
                at(other, "192.0.2.6"),
                decommissioned,
            ];
            let purpose = Purpose::KubeletServer;
            let settings = KubernetesConfiguration {
                api_address: "192.0.2.100".into(),
                ..dual_stack()
            };
            let reserved = Reserved::of(&settings).unwrap();
            let holder = (Some(&up), status.as_ref());
            worker(id(), purpose, holder, &others, &reserved)
        };
        for others in [
            "127.0.0.1",
            "::1",
            "10.224.0.1",
            "10.208.3.4",
            "fd00:1::1",
            "fd00:2::1",
            "192.0.2.6",
            "2001:db8::6",
            "192.0.2.100",
        ] {
            assert!(
                matches!(decide(Some(others)), Err(Rejection::AddressOfOthers { .. })),
                "{others}"
            );
        }
        assert_eq!(decide(None), Err(Rejection::NoAddress(id())));
        assert_eq!(decide(Some("")), Err(Rejection::NoAddress(id())));
        let address = IpAddr::from([192, 0, 2, 1]);
        assert_eq!(
            decide(Some("192.0.2.1")),
            Ok(Certificate::KubeletServer {
                node: id(),
                address
            })
        );
    }

    #[test]
    fn a_controller_without_an_address_is_no_server_yet() {
        let node = |address: &str| Node {
            status: Some(NodeStatus {
                external_address: address.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(servers(&[], None), Err(Rejection::NoController));
        let silent = [Node::default(), node("")];
        assert_eq!(servers(&silent, None), Err(Rejection::NoControllerAddress));
        assert_eq!(
            servers(
                &[Node::default(), node("2001:db8::1"), node("192.0.2.1")],
                None
            ),
            Ok(vec![
                "https://[2001:db8::1]:6443".to_owned(),
                "https://192.0.2.1:6443".to_owned()
            ])
        );
        let settings = KubernetesConfiguration {
            api_address: "192.0.2.100".to_owned(),
            api_endpoint: "api.example:443".to_owned(),
            ..Default::default()
        };
        assert_eq!(servers(&[], Some(&settings)), Err(Rejection::NoController));
        assert_eq!(
            servers(&[node("192.0.2.1")], Some(&settings)),
            Ok(vec![
                "https://api.example:443".to_owned(),
                "https://192.0.2.100:6443".to_owned(),
                "https://192.0.2.1:6443".to_owned()
            ])
        );
    }
}
