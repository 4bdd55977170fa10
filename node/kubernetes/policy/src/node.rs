//! What one node enforces, as it is stored and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use hearth_sys::cidr::Cidr;
use serde::{Deserialize, Serialize};

use super::objects::Protocol;

/// Maximum size as text, in bytes: that of a ConfigMap.
pub const MAX_BYTES: usize = 1 << 20;

/// Why a text cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodePolicyError {
    /// The text is not of this form.
    #[error("expected the network policy of a node as JSON")]
    Json(#[from] serde_json::Error),
    /// A number refers to nothing.
    #[error("expected {what} below {count}, got {index}")]
    Index {
        /// What it refers to.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// The number.
        index: usize,
    },
}

/// What one node enforces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodePolicy {
    /// Whether the cluster has any policy. Without one everything is permitted.
    pub enforced: bool,
    /// The node's pods, by each of their addresses; others on the node have no network.
    pub pods: BTreeMap<IpAddr, Isolation>,
    /// Permitted connections; what no rule permits is refused.
    pub chains: Vec<Vec<Rule>>,
    /// Addresses of pods.
    pub sets: Vec<BTreeSet<IpAddr>>,
}

/// The index of a pod's chain in each direction; `None` if it is not isolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Isolation {
    /// For connections to the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<usize>,
    /// For connections from the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<usize>,
}

/// Permitted connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The other end.
    pub peers: Peers,
    /// The ports; `None` for all, and for what has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<Ports>,
}

/// The other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Peers {
    /// Everyone.
    Any,
    /// The addresses of this set.
    Set(usize),
    /// A block of addresses.
    Block(Block),
}

/// A block of addresses, without some of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// These,
    pub network: Network,
    /// but not these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<Network>,
}

/// A network of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "(IpAddr, u8)", into = "(IpAddr, u8)")]
pub struct Network(Cidr);

/// Ranges of ports of a protocol, in order and apart from each other. All ports are one range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ports {
    /// The protocol.
    pub protocol: Protocol,
    /// First and last port.
    pub ranges: Vec<(u16, u16)>,
}

impl Network {
    /// Whether the address is in it.
    pub fn contains(self, address: IpAddr) -> bool {
        self.0.contains(address)
    }

    /// Its first address.
    pub fn first(self) -> IpAddr {
        self.0.address()
    }
}

impl From<Cidr> for Network {
    fn from(cidr: Cidr) -> Self {
        Self(cidr.network())
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<(IpAddr, u8)> for Network {
    type Error = String;

    fn try_from((address, prefix): (IpAddr, u8)) -> Result<Self, String> {
        let cidr = Cidr::new(address, prefix).map_err(|error| error.to_string())?;
        Ok(cidr.into())
    }
}

impl From<Network> for (IpAddr, u8) {
    fn from(Network(cidr): Network) -> Self {
        (cidr.address(), cidr.prefix())
    }
}

impl Block {
    /// Whether the address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.network.contains(address) && !self.except.iter().any(|it| it.contains(address))
    }
}

impl Ports {
    /// The range of all ports.
    pub const ALL: (u16, u16) = (0, u16::MAX);

    /// Ranges in any order, which may overlap or be empty.
    pub fn new(protocol: Protocol, mut ranges: Vec<(u16, u16)>) -> Self {
        ranges.retain(|(first, last)| first <= last);
        ranges.sort_unstable();
        let mut apart: Vec<(u16, u16)> = Vec::new();
        for (first, last) in ranges {
            match apart.last_mut() {
                Some((_, end)) if u32::from(first) <= u32::from(*end) + 1 => *end = last.max(*end),
                _ => apart.push((first, last)),
            }
        }
        Self {
            protocol,
            ranges: apart,
        }
    }
}

impl NodePolicy {
    /// As it is stored.
    pub fn to_text(&self) -> String {
        // Maps with addresses as keys, and no other fallible type.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads what [`to_text`](Self::to_text) has written.
    ///
    /// # Errors
    /// If it was something else.
    pub fn parse(text: &str) -> Result<Self, NodePolicyError> {
        let policy: Self = serde_json::from_str(text)?;
        let check = |what, index, count| match index < count {
            true => Ok(()),
            false => Err(NodePolicyError::Index { what, count, index }),
        };
        for pod in policy.pods.values() {
            for chain in [pod.ingress, pod.egress].into_iter().flatten() {
                check("a chain", chain, policy.chains.len())?;
            }
        }
        for rule in policy.chains.iter().flatten() {
            if let Peers::Set(set) = rule.peers {
                check("a set", set, policy.sets.len())?;
            }
        }
        Ok(Self {
            chains: policy.chains.into_iter().map(normal).collect(),
            ..policy
        })
    }
}

/// Ranges that overlap are an error of nft.
fn normal(chain: Vec<Rule>) -> Vec<Rule> {
    let rule = |rule: Rule| Rule {
        ports: rule.ports.map(|it| Ports::new(it.protocol, it.ranges)),
        ..rule
    };
    chain.into_iter().map(rule).collect()
}
