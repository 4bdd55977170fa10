//! A node's part of the mesh, the network between pods: its key and its pod range.
//!
//! [`NETWORK`] is divided into ranges with a prefix of [`RANGE_PREFIX`] bits, and a range is
//! identified by its index. So two ranges are either equal or disjoint: to keep the ranges of nodes
//! from overlapping, it is sufficient to assign no index twice. Everything received from other
//! nodes is validated here.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use hearth_api::identity::MeshKey;
use hearth_api::names::pods::{NETWORK, RANGE_PREFIX};
use hearth_api::v1::ClusterNetworking;
use hearth_sys::cidr::Cidr;

/// Why a `ClusterNetworking` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkingError {
    /// The key is invalid.
    #[error("wireguard_public_key: {0}")]
    Key(#[from] hearth_api::identity::KeyError),
    /// The range is invalid.
    #[error("pod_range: expected a /{RANGE_PREFIX} of {NETWORK}, got {0:?}")]
    Range(String),
}

/// The addresses of one node's pods.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRange(u16);

/// The first address of [`NETWORK`].
const FIRST: u32 = NETWORK.first().to_bits();
/// The number of ranges in it.
const RANGES: u16 = 1 << (RANGE_PREFIX - NETWORK.prefix());

impl PodRange {
    /// All ranges, in ascending order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..RANGES).map(Self)
    }

    /// The first host address of the range, which is the node's own address in the pod network.
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first() + 1)
    }

    /// The range in CIDR notation.
    pub fn cidr(self) -> Cidr {
        let first = Ipv4Addr::from_bits(self.first()).into();
        Cidr::new(first, RANGE_PREFIX).expect("a prefix of IPv4")
    }

    fn first(self) -> u32 {
        FIRST + (u32::from(self.0) << (32 - RANGE_PREFIX))
    }
}

impl FromStr for PodRange {
    type Err = NetworkingError;

    fn from_str(text: &str) -> Result<Self, NetworkingError> {
        let range = |text: &str| {
            let cidr: Cidr = text.parse().ok()?;
            let std::net::IpAddr::V4(address) = cidr.address() else {
                return None;
            };
            let offset = address.to_bits().checked_sub(FIRST)?;
            let number = u16::try_from(offset >> (32 - RANGE_PREFIX)).ok()?;
            let range = Self(number);
            // Accept only the canonical spelling.
            (number < RANGES && range.to_string() == text).then_some(range)
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
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_cut_from_the_network_of_pods() {
        let all: Vec<_> = PodRange::all().collect();
        assert_eq!(all.len(), 4096);
        assert_eq!(all[0].to_string(), "10.208.0.0/24");
        assert_eq!(all[3].gateway().to_string(), "10.208.3.1");
        assert_eq!(all[4095].to_string(), "10.223.255.0/24");
        for (number, range) in all.iter().enumerate() {
            assert!(NETWORK.contains(range.gateway()), "{range}");
            assert_eq!(range.to_string().parse(), Ok(*range));
            let next = all.get(number + 1);
            assert!(next.is_none_or(|next| !next.cidr().contains(range.gateway().into())));
        }
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
            "10.207.255.0/24",
            "10.224.0.0/24",
            "::/24",
        ] {
            let refused = wrong.parse::<PodRange>().unwrap_err();
            assert!(refused.to_string().contains("10.208.0.0/12"), "{refused}");
        }
    }

    #[test]
    fn a_part_reads_back() {
        let networking = Networking {
            key: MeshSecret::generate().public(),
            range: PodRange(7),
        };
        let wire = ClusterNetworking::from(networking);
        assert_eq!(wire.pod_range, "10.208.7.0/24");
        assert_eq!(Networking::try_from(&wire), Ok(networking));
        assert!(Networking::try_from(&ClusterNetworking::default()).is_err());
    }

    proptest! {
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
