//! The address ranges of pods and services, as two settings state them.
//!
//! | setting | elements |
//! |---|---|
//! | `kubernetes.pod_ranges` | the range of all pods: IPv4, and IPv6 in a dual-stack cluster |
//! | `kubernetes.service_ranges` | the range of all services, of the same families |
//!
//! They are chosen when a cluster is founded and never change: nodes, pods and services have addresses of
//! them. IPv4 is always present, because the API servers' own service and DNS are reached by it; so a
//! cluster with IPv6 alone is not a value of [`ClusterRanges`].

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::v1::KubernetesConfiguration;

/// The path of the setting with the ranges of pods.
pub const POD_RANGES: &str = "kubernetes.pod_ranges";
/// The path of the setting with the ranges of services.
pub const SERVICE_RANGES: &str = "kubernetes.service_ranges";

/// What an element of `kubernetes.pod_ranges` should be.
pub const POD_RANGE: &str =
    "a range of unicast addresses by its first one: IPv4 of /8 to /22, or IPv6 of /48 to /64";
/// What an element of `kubernetes.service_ranges` should be.
pub const SERVICE_RANGE: &str =
    "a range of unicast addresses by its first one: IPv4 of /12 to /24, or IPv6 of /108 to /120";

/// The ranges of pods, where the parameters state none. The same as [`ClusterRanges::DEFAULT`].
pub const DEFAULT_POD_RANGES: &[&str] = &["10.208.0.0/12"];
/// The ranges of services, where the parameters state none.
pub const DEFAULT_SERVICE_RANGES: &[&str] = &["10.224.0.0/16"];

/// Prefix length of the IPv4 addresses of one node's pods.
pub const NODE_PREFIX_V4: u8 = 24;
/// Prefix length of the IPv6 addresses of one node's pods, where the range of all pods is large enough.
const NODE_PREFIX_V6: u8 = 64;

/// The service of the API servers has this address of the range, which Kubernetes chooses.
const API_SERVICE: u32 = 1;
/// The service of the cluster's DNS.
const DNS_SERVICE: u32 = 10;

/// An IP address of one family.
pub trait Address: Copy + Eq + fmt::Display + FromStr + Into<IpAddr> {
    /// Its length.
    const BITS: u8;
    /// Its bits as a number.
    fn to_number(self) -> u128;
    /// The address with these bits; those above [`Self::BITS`] are ignored.
    fn from_number(number: u128) -> Self;
    /// Whether a range from this address to `last` may be one of pods or services.
    fn is_unicast(self, last: Self) -> bool;
}

impl Address for Ipv4Addr {
    const BITS: u8 = 32;

    fn to_number(self) -> u128 {
        self.to_bits().into()
    }

    fn from_number(number: u128) -> Self {
        Self::from_bits(number as u32)
    }

    fn is_unicast(self, last: Self) -> bool {
        let reserved = [
            (Ipv4Addr::new(0, 0, 0, 0), 8),
            (Ipv4Addr::new(127, 0, 0, 0), 8),
            (Ipv4Addr::new(169, 254, 0, 0), 16),
            // Multicast, and what is reserved above it.
            (Ipv4Addr::new(224, 0, 0, 0), 3),
        ];
        reserved.into_iter().all(|(first, prefix)| {
            let other = Range { first, prefix };
            last < other.first || other.last() < self
        })
    }
}

impl Address for Ipv6Addr {
    const BITS: u8 = 128;

    fn to_number(self) -> u128 {
        self.to_bits()
    }

    fn from_number(number: u128) -> Self {
        Self::from_bits(number)
    }

    /// Unique local (fc00::/7) or global (2000::/3).
    fn is_unicast(self, _last: Self) -> bool {
        self.is_unique_local() || self.segments()[0] & 0xe000 == 0x2000
    }
}

/// A range of addresses of one family, with at least one bit of prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range<A> {
    first: A,
    prefix: u8,
}

impl<A: Address> Range<A> {
    /// Its first address.
    pub fn first(self) -> A {
        self.first
    }

    /// The length of its prefix in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The address after `number` others. It is outside of the range if the range is shorter.
    pub fn nth(self, number: u32) -> A {
        A::from_number(self.first.to_number() + u128::from(number))
    }

    fn last(self) -> A {
        A::from_number(self.first.to_number() | !self.mask())
    }

    /// The bits of the prefix. Those above the address are set.
    fn mask(self) -> u128 {
        let rest = u32::from(A::BITS - self.prefix);
        u128::MAX.checked_shl(rest).unwrap_or(0)
    }

    /// Whether the address is in this range.
    pub fn contains(self, address: A) -> bool {
        (self.first.to_number() ^ address.to_number()) & self.mask() == 0
    }

    /// Whether all addresses with these first `prefix` bits of `first` are in this range.
    pub fn contains_all(self, first: A, prefix: u8) -> bool {
        prefix >= self.prefix && self.contains(first)
    }

    /// Whether an address is in both ranges.
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }

    /// The part with this index, of those with this prefix length; `None` if there are fewer.
    pub fn part(self, prefix: u8, index: u32) -> Option<Self> {
        let bits = prefix.checked_sub(self.prefix)?;
        let fits = prefix <= A::BITS && u128::from(index) < 1_u128.checked_shl(bits.into())?;
        let offset = u128::from(index).checked_shl((A::BITS.checked_sub(prefix)?).into())?;
        let first = A::from_number(self.first.to_number() + offset);
        fits.then_some(Self { first, prefix })
    }

    /// The index of the part with this prefix length that begins with `first`; `None` if it is not
    /// in the range.
    pub fn index_of(self, first: A, prefix: u8) -> Option<u32> {
        let rest = A::BITS.checked_sub(prefix)?;
        let offset = first.to_number().checked_sub(self.first.to_number())?;
        let index = u32::try_from(offset.checked_shr(rest.into())?).ok()?;
        (self.part(prefix, index)?.first == first).then_some(index)
    }

    fn parse(text: &str) -> Option<Self> {
        let (first, prefix) = text.split_once('/')?;
        let range = Self {
            first: first.parse().ok()?,
            prefix: prefix.parse().ok()?,
        };
        let has_prefix = (1..=A::BITS).contains(&range.prefix);
        let is_first = has_prefix && range.first.to_number() & !range.mask() == 0;
        (is_first && range.to_string() == text).then_some(range)
    }

    /// The same, of unicast addresses and with a prefix length that is accepted.
    fn parse_unicast(text: &str, prefixes: &Prefixes) -> Option<Self> {
        let range = Self::parse(text)?;
        let accepted = if A::BITS == 32 {
            &prefixes.v4
        } else {
            &prefixes.v6
        };
        let is_good = accepted.contains(&range.prefix) && range.first.is_unicast(range.last());
        is_good.then_some(range)
    }
}

/// A text that is not a range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a range in CIDR notation by its first address, got {0:?}")]
pub struct RangeError(String);

/// Only the canonical spelling is accepted.
impl<A: Address> FromStr for Range<A> {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        Self::parse(text).ok_or_else(|| RangeError(text.to_owned()))
    }
}

impl<A: fmt::Display> fmt::Display for Range<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

/// The accepted prefix lengths.
struct Prefixes {
    v4: std::ops::RangeInclusive<u8>,
    v6: std::ops::RangeInclusive<u8>,
}

/// At least four nodes, and not more than Kubernetes can number: 16 bits.
const OF_PODS: Prefixes = Prefixes {
    v4: 8..=22,
    v6: 48..=64,
};
/// Kubernetes accepts at most 20 bits of addresses.
const OF_SERVICES: Prefixes = Prefixes {
    v4: 12..=24,
    v6: 108..=120,
};

fn is_range(text: &str, prefixes: &Prefixes) -> bool {
    Range::<Ipv4Addr>::parse_unicast(text, prefixes).is_some()
        || Range::<Ipv6Addr>::parse_unicast(text, prefixes).is_some()
}

/// Whether this can be an element of `kubernetes.pod_ranges`.
pub fn is_pod_range(text: &str) -> bool {
    is_range(text, &OF_PODS)
}

/// Whether this can be an element of `kubernetes.service_ranges`.
pub fn is_service_range(text: &str) -> bool {
    is_range(text, &OF_SERVICES)
}

/// Settings that are no ranges of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub struct RangesError {
    /// The path of the setting, with the index of the element if one is wrong.
    pub field: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

/// The ranges of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ranges<A> {
    /// The addresses of all pods; each node has a part of them.
    pub pods: Range<A>,
    /// The addresses of all services.
    pub services: Range<A>,
}

/// The ranges of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClusterRanges {
    /// Of IPv4.
    pub v4: Ranges<Ipv4Addr>,
    /// Of IPv6, in a dual-stack cluster.
    pub v6: Option<Ranges<Ipv6Addr>>,
}

impl Default for ClusterRanges {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl ClusterRanges {
    /// Those of a cluster whose parameters state none, and of one that is older than the settings.
    pub const DEFAULT: Self = Self {
        v4: Ranges {
            pods: Range {
                first: Ipv4Addr::new(10, 208, 0, 0),
                prefix: 12,
            },
            services: Range {
                first: Ipv4Addr::new(10, 224, 0, 0),
                prefix: 16,
            },
        },
        v6: None,
    };

    /// The ranges in the settings of a cluster.
    ///
    /// # Errors
    /// If the settings contradict each other, or are those of a newer release.
    pub fn of(settings: &KubernetesConfiguration) -> Result<Self, RangesError> {
        let list = |list: &[String], default: &[&str]| match list {
            [] => default.iter().map(|text| (*text).to_owned()).collect(),
            list => list.to_vec(),
        };
        let pods = list(&settings.pod_ranges, DEFAULT_POD_RANGES);
        let services = list(&settings.service_ranges, DEFAULT_SERVICE_RANGES);
        let pods = Families::of(POD_RANGES, &pods, &OF_PODS, POD_RANGE)?;
        let services = Families::of(SERVICE_RANGES, &services, &OF_SERVICES, SERVICE_RANGE)?;
        apart(pods.v4, services.v4)?;
        let v6 = match (pods.v6, services.v6) {
            (None, None) => None,
            (Some(pods), Some(services)) => {
                apart(pods, services)?;
                Some(Ranges { pods, services })
            }
            (Some(_), None) => return Err(one_sided(SERVICE_RANGES, POD_RANGES, services.v4)),
            (None, Some(_)) => return Err(one_sided(POD_RANGES, SERVICE_RANGES, pods.v4)),
        };
        let (pods, services) = (pods.v4, services.v4);
        let v4 = Ranges { pods, services };
        Ok(Self { v4, v6 })
    }

    /// Whether this is an address of pods.
    pub fn has_pod(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => self.v4.pods.contains(v4),
            IpAddr::V6(v6) => self.v6.is_some_and(|ranges| ranges.pods.contains(v6)),
        }
    }

    /// Whether this is an address of services.
    pub fn has_service(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => self.v4.services.contains(v4),
            IpAddr::V6(v6) => self.v6.is_some_and(|ranges| ranges.services.contains(v6)),
        }
    }

    /// Whether this is an address of pods or services, which no machine can have.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.has_pod(address) || self.has_service(address)
    }

    /// The service address of the API servers.
    pub fn api_service(&self) -> Ipv4Addr {
        self.v4.services.nth(API_SERVICE)
    }

    /// The service address of the cluster's DNS.
    pub fn dns_service(&self) -> Ipv4Addr {
        self.v4.services.nth(DNS_SERVICE)
    }

    /// The number of nodes that can have pods.
    pub fn nodes(&self) -> u32 {
        1 << (NODE_PREFIX_V4 - self.v4.pods.prefix())
    }

    /// The prefix length of the IPv6 addresses of one node's pods: 64, or longer if that would not be
    /// enough for as many nodes as IPv4 is.
    pub fn node_prefix_v6(&self) -> Option<u8> {
        let bits = NODE_PREFIX_V4 - self.v4.pods.prefix();
        let pods = self.v6?.pods;
        Some(NODE_PREFIX_V6.max(pods.prefix() + bits))
    }

    /// The ranges of pods as Kubernetes' programs read them: IPv4 first, separated by a comma.
    pub fn pods_text(&self) -> String {
        both(self.v4.pods, self.v6.map(|ranges| ranges.pods))
    }

    /// The ranges of services in the same form.
    pub fn services_text(&self) -> String {
        both(self.v4.services, self.v6.map(|ranges| ranges.services))
    }
}

fn both(v4: Range<Ipv4Addr>, v6: Option<Range<Ipv6Addr>>) -> String {
    match v6 {
        None => v4.to_string(),
        Some(v6) => format!("{v4},{v6}"),
    }
}

/// The ranges of one setting by their families.
#[derive(Clone, Copy)]
struct Families {
    v4: Range<Ipv4Addr>,
    v6: Option<Range<Ipv6Addr>>,
}

impl Families {
    fn of(
        path: &str,
        list: &[String],
        prefixes: &Prefixes,
        expected: &str,
    ) -> Result<Self, RangesError> {
        let (mut v4, mut v6) = (None, None);
        for (index, text) in list.iter().enumerate() {
            let field = format!("{path}[{index}]");
            let is_second = if let Some(range) = Range::parse_unicast(text, prefixes) {
                v4.replace(range).is_some()
            } else if let Some(range) = Range::parse_unicast(text, prefixes) {
                v6.replace(range).is_some()
            } else {
                return Err(error(field, expected, text));
            };
            if is_second {
                return Err(error(field, "one range of each family at most", text));
            }
        }
        let Some(v4) = v4 else {
            let expected = "an IPv4 range, besides one of IPv6 (IPv6 alone is not supported: the API \
                            servers, DNS and the nodes' own programs are reached by IPv4)";
            return Err(error(path, expected, &list.join(",")));
        };
        Ok(Self { v4, v6 })
    }
}

fn apart<A: Address>(pods: Range<A>, services: Range<A>) -> Result<(), RangesError> {
    if pods.overlaps(services) {
        let expected = format!("a range that does not overlap with {pods} of the pods");
        return Err(error(SERVICE_RANGES, expected, &services.to_string()));
    }
    Ok(())
}

fn one_sided(path: &str, other: &str, v4: Range<Ipv4Addr>) -> RangesError {
    let expected = format!("an IPv6 range, too, because {other} has one");
    error(path, expected, &v4.to_string())
}

fn error(field: impl Into<String>, expected: impl Into<String>, found: &str) -> RangesError {
    RangesError {
        field: field.into(),
        expected: expected.into(),
        found: crate::labels::quoted(found),
    }
}

#[cfg(test)]
mod tests;
