//! What is read of `NetworkPolicy`, `Pod` and `Namespace`, and what is kept of it.
//!
//! The API server has validated the objects. What it would not have let pass, such as an operator that
//! is unknown here, is an error of the watch: ignoring it could permit more than was meant.

use std::net::IpAddr;

use hearth_api::identity::NodeId;
use hearth_kubernetes_api::fields::Metadata;
use hearth_kubernetes_api::store::Kept;
use hearth_sys::cidr::Cidr;
use serde::{Deserialize, Serialize};

use super::selector::{Labels, Selector};

/// A transport protocol that policies know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A `Pod`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodObject {
    metadata: Metadata,
    spec: PodSpec,
    status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: String,
    host_network: bool,
    containers: Vec<Container>,
    /// They may run beside the others.
    init_containers: Vec<Container>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Container {
    ports: Vec<ContainerPort>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerPort {
    name: String,
    container_port: u16,
    protocol: Protocol,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

/// A pod with addresses of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Where it runs.
    pub node: NodeId,
    /// Its addresses, at least one; of each family one at most.
    pub addresses: Vec<IpAddr>,
    /// Its labels.
    pub labels: Labels,
    /// Its ports that have names.
    pub ports: Vec<NamedPort>,
}

/// A port with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// Such as `http`.
    pub name: String,
    /// The protocol.
    pub protocol: Protocol,
    /// The number.
    pub number: u16,
}

impl Pod {
    /// `None` if it has no address of its own: not yet, not any more, or for as long as it runs.
    pub fn read(object: PodObject) -> Option<Self> {
        let PodObject {
            metadata,
            spec,
            status,
        } = object;
        let ended = matches!(status.phase.as_str(), "Succeeded" | "Failed");
        if ended || spec.host_network {
            return None;
        }
        let addresses = status.pod_ips.into_iter().map(|it| it.ip);
        let mut addresses: Vec<IpAddr> = (addresses.chain([status.pod_ip]))
            .filter_map(|text| text.parse().ok())
            .collect();
        // Both fields have the first one.
        addresses.sort_unstable();
        addresses.dedup();
        if addresses.is_empty() {
            return None;
        }
        let containers = spec.containers.into_iter().chain(spec.init_containers);
        let named = |port: ContainerPort| {
            Some(NamedPort {
                name: Some(port.name).filter(|name| !name.is_empty())?,
                protocol: port.protocol,
                number: port.container_port,
            })
        };
        Some(Self {
            node: spec.node_name.parse().ok()?,
            addresses,
            labels: metadata.labels,
            ports: containers
                .flat_map(|it| it.ports)
                .filter_map(named)
                .collect(),
        })
    }
}

/// A `Namespace`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct NamespaceObject {
    metadata: Metadata,
}

/// The labels of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// The labels.
    pub labels: Labels,
}

impl Namespace {
    /// What is kept of the object.
    pub fn read(object: NamespaceObject) -> Option<Self> {
        let labels = object.metadata.labels;
        Some(Self { labels })
    }
}

/// A `NetworkPolicy`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PolicyObject {
    metadata: Metadata,
    spec: Policy,
}

/// What a policy says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Policy {
    /// The pods of its namespace that it isolates.
    pub pod_selector: Selector,
    /// The connections to them that it permits.
    pub ingress: Option<Vec<IngressRule>>,
    /// The connections from them that it permits.
    pub egress: Option<Vec<EgressRule>>,
    /// The directions in which it isolates them, if it says so.
    policy_types: Vec<Direction>,
}

/// A direction, seen from the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum Direction {
    /// Connections to the pod.
    Ingress,
    /// Connections from the pod.
    Egress,
}

/// Permitted connections to a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IngressRule {
    from: Vec<PeerRule>,
    ports: Vec<PortRule>,
}

/// Permitted connections from a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EgressRule {
    to: Vec<PeerRule>,
    ports: Vec<PortRule>,
}

/// The other end of a connection. Without any field it is nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PeerRule {
    /// Of the selected namespaces, or of the policy's own.
    pub pod_selector: Option<Selector>,
    /// All pods of these namespaces, if pods are not selected.
    pub namespace_selector: Option<Selector>,
    /// Addresses.
    pub ip_block: Option<IpBlock>,
}

/// Addresses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct IpBlock {
    /// These,
    #[serde(deserialize_with = "cidr")]
    pub cidr: Cidr,
    /// but not these.
    #[serde(default, deserialize_with = "cidrs")]
    pub except: Vec<Cidr>,
}

/// Ports at the end to which a connection is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PortRule {
    /// The protocol.
    pub protocol: Protocol,
    /// All ports, if it is missing.
    pub port: Option<Port>,
    /// The last port of a range.
    pub end_port: Option<u16>,
}

/// A port by number, or by the name that the pod gives it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Port {
    /// The number.
    Number(u16),
    /// The name.
    Name(String),
}

fn cidr<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Cidr, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(serde::de::Error::custom)
}

fn cidrs<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Cidr>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    let all = texts.iter().map(|text| text.parse());
    all.collect::<Result<_, _>>()
        .map_err(serde::de::Error::custom)
}

impl Policy {
    /// What is kept of the object.
    pub fn read(object: PolicyObject) -> Option<Self> {
        Some(object.spec)
    }

    /// Whether it isolates its pods in this direction. Without a word about it, a policy does so for
    /// ingress, and for egress if it has rules for it.
    pub fn isolates(&self, direction: Direction) -> bool {
        match direction {
            _ if !self.policy_types.is_empty() => self.policy_types.contains(&direction),
            Direction::Ingress => true,
            Direction::Egress => self.egress.as_ref().is_some_and(|rules| !rules.is_empty()),
        }
    }

    /// The permitted connections of a direction: peers and ports. Empty lists mean all of them.
    pub fn rules(&self, direction: Direction) -> Vec<(&[PeerRule], &[PortRule])> {
        match direction {
            Direction::Ingress => {
                let rules = self.ingress.iter().flatten();
                rules.map(|it| (&it.from[..], &it.ports[..])).collect()
            }
            Direction::Egress => {
                let rules = self.egress.iter().flatten();
                rules.map(|it| (&it.to[..], &it.ports[..])).collect()
            }
        }
    }
}

hearth_kubernetes_api::objects!(PodObject, NamespaceObject, PolicyObject);

impl Kept for Pod {
    fn bytes(&self) -> usize {
        let ports = self.ports.iter().map(|port| 48 + port.name.len());
        let addresses = size_of_val(&self.addresses[..]);
        size_of::<Self>() + addresses + self.labels.bytes() + ports.sum::<usize>()
    }
}

impl Kept for Namespace {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.labels.bytes()
    }
}

impl Kept for Policy {
    fn bytes(&self) -> usize {
        let directions = [Direction::Ingress, Direction::Egress];
        let rules = directions.into_iter().flat_map(|it| self.rules(it));
        let rules = rules.map(|(peers, ports)| {
            let peers = peers.iter().map(PeerRule::bytes);
            peers.sum::<usize>() + size_of_val(ports)
        });
        size_of::<Self>() + self.pod_selector.bytes() + rules.sum::<usize>()
    }
}

impl PeerRule {
    fn bytes(&self) -> usize {
        let selectors = self.pod_selector.iter().chain(&self.namespace_selector);
        let except = self
            .ip_block
            .as_ref()
            .map_or(0, |it| size_of_val(&it.except[..]));
        size_of::<Self>() + selectors.map(Selector::bytes).sum::<usize>() + except
    }
}
