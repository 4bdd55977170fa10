//! A node's part of the mesh, the network between pods: its key and its pod ranges.
//!
//! The curators assign each node a /24 of the cluster's IPv4 range of pods. Two such ranges are
//! either equal or disjoint: to keep those of nodes from overlapping, it is sufficient to assign none
//! twice. In a dual-stack cluster the IPv6 range of a node follows from it: both have the same index
//! in the ranges of the cluster, so that nothing else has to be assigned or stored, and no two nodes
//! have the same one. Everything received from other nodes is validated here.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use hearth_api::identity::MeshKey;
use hearth_api::ranges::{Address, ClusterRanges, NODE_PREFIX_V4, Range};
use hearth_api::v1::ClusterNetworking;
use hearth_sys::cidr::Cidr;

/// Why a `ClusterNetworking` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkingError {
    /// The key is invalid.
    #[error("wireguard_public_key: {0}")]
    Key(#[from] hearth_api::identity::KeyError),
    /// The range is invalid.
    #[error("pod_range: expected a /{NODE_PREFIX_V4} of IPv4 by its first address, got {0:?}")]
    Range(String),
    /// The range is of another cluster.
    #[error("pod_range: expected a part of {network}, got {found}")]
    OtherNetwork {
        /// The range of all pods.
        network: Range<Ipv4Addr>,
        /// The range of the node.
        found: PodRange,
    },
}

/// The IPv4 addresses of one node's pods: the bits of its prefix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRange(u32);

const HOST_BITS: u32 = 32 - NODE_PREFIX_V4 as u32;

impl PodRange {
    /// All ranges in the range of all pods, in ascending order.
    pub fn all(ranges: &ClusterRanges) -> impl Iterator<Item = Self> + use<> {
        let first = ranges.v4.pods.first().to_bits() >> HOST_BITS;
        (first..first + ranges.nodes()).map(Self)
    }

    /// The range in CIDR notation.
    pub fn cidr(self) -> Cidr {
        Cidr::new(self.first().into(), NODE_PREFIX_V4).expect("a prefix of IPv4")
    }

    fn first(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0 << HOST_BITS)
    }

    /// The addresses of the node's pods in a cluster with these ranges.
    ///
    /// # Errors
    /// If the range is not a part of that of all pods.
    pub fn subnets(self, ranges: &ClusterRanges) -> Result<NodeSubnets, NetworkingError> {
        let network = ranges.v4.pods;
        let index = network.index_of(self.first(), NODE_PREFIX_V4);
        let part = |index| Some((index, network.part(NODE_PREFIX_V4, index)?));
        let (index, v4) = index.and_then(part).ok_or(NetworkingError::OtherNetwork {
            network,
            found: self,
        })?;
        // There are at least as many parts of IPv6 as of IPv4.
        let v6 = ranges.v6.zip(ranges.node_prefix_v6());
        let v6 = v6.and_then(|(v6, prefix)| v6.pods.part(prefix, index));
        Ok(NodeSubnets { v4, v6 })
    }
}

/// The addresses of one node's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeSubnets {
    /// Of IPv4, e.g. 10.208.3.0/24.
    pub v4: Range<Ipv4Addr>,
    /// Of IPv6, in a dual-stack cluster.
    pub v6: Option<Range<Ipv6Addr>>,
}

/// The addresses of one node's pods in one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// All of them.
    pub range: Cidr,
    /// The node's own address among them.
    pub gateway: IpAddr,
}

impl NodeSubnets {
    /// The node's own IPv4 address in the pod network: the first host address of its range.
    pub fn gateway(&self) -> Ipv4Addr {
        self.v4.nth(1)
    }

    /// The addresses of each family, IPv4 first.
    pub fn all(&self) -> impl Iterator<Item = Subnet> + use<> {
        [Some(subnet(self.v4)), self.v6.map(subnet)]
            .into_iter()
            .flatten()
    }
}

fn subnet<A: Address>(range: Range<A>) -> Subnet {
    Subnet {
        range: cidr(range),
        gateway: range.nth(1).into(),
    }
}

/// A range in CIDR notation.
pub fn cidr<A: Address>(range: Range<A>) -> Cidr {
    Cidr::new(range.first().into(), range.prefix()).expect("a prefix of its family")
}

impl FromStr for PodRange {
    type Err = NetworkingError;

    fn from_str(text: &str) -> Result<Self, NetworkingError> {
        let range = |text: &str| {
            let cidr: Cidr = text.parse().ok()?;
            let IpAddr::V4(address) = cidr.address() else {
                return None;
            };
            let range = Self(address.to_bits() >> HOST_BITS);
            // Accept only the canonical spelling.
            (range.to_string() == text).then_some(range)
        };
        range(text).ok_or_else(|| NetworkingError::Range(text.to_owned()))
    }
}

impl fmt::Display for PodRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cidr().fmt(f)
    }
}

impl fmt::Debug for PodRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A node's part of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Networking {
    /// The WireGuard public key, unique in the cluster.
    pub key: MeshKey,
    /// The addresses of the node's pods, unique in the cluster.
    pub range: PodRange,
}

impl TryFrom<&ClusterNetworking> for Networking {
    type Error = NetworkingError;

    fn try_from(wire: &ClusterNetworking) -> Result<Self, NetworkingError> {
        Ok(Self {
            key: MeshKey::try_from(&wire.wireguard_public_key[..])?,
            range: wire.pod_range.parse()?,
        })
    }
}

impl From<Networking> for ClusterNetworking {
    fn from(networking: Networking) -> Self {
        Self {
            wireguard_public_key: networking.key.as_bytes().to_vec(),
            pod_range: networking.range.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::MeshSecret;
    use hearth_api::testing::dual_stack_ranges;
    use hearth_api::v1::KubernetesConfiguration;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_cut_from_the_network_of_pods() {
        let ranges = dual_stack_ranges();
        let all: Vec<_> = PodRange::all(&ranges).collect();
        let gateway = |range: PodRange| range.subnets(&ranges).unwrap().gateway();
        assert_eq!(all.len(), 4096);
        assert_eq!(all[0].to_string(), "10.208.0.0/24");
        assert_eq!(gateway(all[3]).to_string(), "10.208.3.1");
        assert_eq!(all[4095].to_string(), "10.223.255.0/24");
        for (number, range) in all.iter().enumerate() {
            assert!(ranges.has_pod(gateway(*range).into()), "{range}");
            assert_eq!(range.to_string().parse(), Ok(*range));
            let next = all.get(number + 1);
            assert!(next.is_none_or(|next| !next.cidr().contains(gateway(*range).into())));
        }
    }

    #[test]
    fn a_node_has_the_same_part_of_both_families() {
        let range: PodRange = "10.209.3.0/24".parse().unwrap();
        let only_v4 = range.subnets(&ClusterRanges::DEFAULT).unwrap();
        assert_eq!(only_v4.v6, None);
        assert_eq!(only_v4.all().count(), 1);
        let both = range.subnets(&dual_stack_ranges()).unwrap();
        assert_eq!(both.v4, only_v4.v4);
        let texts = both.all().map(|s| format!("{} {}", s.range, s.gateway));
        assert_eq!(
            texts.collect::<Vec<_>>(),
            [
                "10.209.3.0/24 10.209.3.1",
                "fd00:1:0:103::/64 fd00:1:0:103::1"
            ]
        );
        let other: PodRange = "10.0.3.0/24".parse().unwrap();
        let error = other.subnets(&dual_stack_ranges()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "pod_range: expected a part of 10.208.0.0/12, got 10.0.3.0/24"
        );
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for wrong in [
            "",
            "10.208.0.0",
            "10.208.0.1/24",
            "10.208.0.0/23",
            "10.208.0.0/25",
            "10.208.0.0/024",
            "::/24",
        ] {
            let refused = wrong.parse::<PodRange>().unwrap_err();
            assert!(refused.to_string().contains("expected a /24"), "{refused}");
        }
    }

    #[test]
    fn a_part_reads_back() {
        let networking = Networking {
            key: MeshSecret::generate().public(),
            range: "10.208.7.0/24".parse().unwrap(),
        };
        let wire = ClusterNetworking::from(networking);
        assert_eq!(wire.pod_range, "10.208.7.0/24");
        assert_eq!(Networking::try_from(&wire), Ok(networking));
        assert!(Networking::try_from(&ClusterNetworking::default()).is_err());
    }

    proptest! {
        /// Whatever the ranges of the cluster, the subnets of two nodes are apart.
        #[test]
        fn subnets_of_nodes_are_apart(
            v4 in 8_u8..=22, v6 in 48_u8..=64, one: prop::sample::Index, other: prop::sample::Index,
        ) {
            let settings = KubernetesConfiguration {
                pod_ranges: vec![format!("10.0.0.0/{v4}"), format!("fd00::/{v6}")],
                service_ranges: vec!["192.168.0.0/24".into(), "fd01::/112".into()],
                ..KubernetesConfiguration::default()
            };
            let ranges = ClusterRanges::of(&settings).unwrap();
            let count = ranges.nodes() as usize;
            let (one, other) = (one.index(count), other.index(count));
            let of = |index| PodRange::all(&ranges).nth(index).unwrap().subnets(&ranges).unwrap();
            let (first, second) = (of(one), of(other));
            prop_assert!(first.v6.is_some() && second.v6.is_some());
            for (first, second) in first.all().zip(second.all()) {
                prop_assert!(ranges.has_pod(first.gateway));
                prop_assert_eq!(first.range.contains(second.gateway), one == other);
                prop_assert_eq!(second.range.contains(first.gateway), one == other);
            }
        }

        #[test]
        fn arbitrary_parts_are_judged_without_harm(
            wireguard_public_key: Vec<u8>, pod_range in "[0-9./:a-f]{0,20}",
        ) {
            let wire = ClusterNetworking { wireguard_public_key, pod_range };
            if let Ok(networking) = Networking::try_from(&wire) {
                prop_assert_eq!(ClusterNetworking::from(networking), wire);
            }
        }
    }
}
