//! Services and pods as DNS records.
//!
//! A [`Zone`] is a snapshot and immutable; changes make a new one. So lookups need no lock, and all
//! records of one response are consistent. All names are in one flat table, also the empty
//! non-terminals (`default.svc.cluster.local`), which exist without records: NXDOMAIN and NODATA
//! are different responses, and resolvers cache NXDOMAIN for all types.
//!
//! Names in objects are validated again here. The API server accepts valid labels only, but an
//! invalid name in a response would be an error of this server.
//!
//! In a dual-stack cluster services and pods have records of the families that they have addresses of.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hearth_api::names::KUBERNETES_DOMAIN;
use hearth_api::ranges::{Address, ClusterRanges, Range, Ranges};
use hearth_kubernetes_api::store::{Kept, Key};
use hickory_proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData};

/// TTL of all records, in seconds; short, because services and pods change.
pub const TTL: u32 = 5;
/// Version of the specification of DNS for Kubernetes, which tools query.
const SCHEMA: &str = "1.1.0";
const REVERSE: &str = "in-addr.arpa";
const REVERSE_V6: &str = "ip6.arpa";

/// The part of a `Service` that DNS needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// What its name resolves to.
    pub target: Target,
    /// Its named ports.
    pub ports: Vec<Port>,
}

/// What the name of a service resolves to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The cluster IPs, one of each family at most.
    Addresses(Vec<IpAddr>),
    /// A headless service: the addresses of its endpoints.
    Headless,
    /// An `ExternalName`: a CNAME to this name.
    Elsewhere(String),
}

/// A named port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Such as `http`.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// Port of the service; of the pods, if the service is headless.
    pub number: u16,
}

/// Some of the ready endpoints of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Name of the service, in the namespace of the slice.
    pub service: String,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
}

/// A ready endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Address of the pod.
    pub address: IpAddr,
    /// Hostname of the pod within the service, if it has one.
    pub hostname: Option<String>,
    /// Its named ports.
    pub ports: Vec<Port>,
}

impl Kept for Port {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.name.len() + self.protocol.len()
    }
}

impl Kept for Service {
    fn bytes(&self) -> usize {
        let name = match &self.target {
            Target::Elsewhere(name) => name.len(),
            Target::Addresses(addresses) => size_of_val(&addresses[..]),
            Target::Headless => 0,
        };
        size_of::<Self>() + name + self.ports.bytes()
    }
}

impl Kept for Slice {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.service.len() + self.endpoints.bytes()
    }
}

impl Kept for Endpoint {
    fn bytes(&self) -> usize {
        let hostname = self.hostname.as_ref().map_or(0, String::len);
        size_of::<Self>() + hostname + self.ports.bytes()
    }
}

/// The result of a lookup in the zone.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// The name exists; it may have no records.
    Records(std::borrow::Cow<'a, [RData]>),
    /// The name does not exist.
    NoSuchName,
    /// The name is outside of the zone.
    Foreign,
}

/// A snapshot of all names.
pub struct Zone {
    /// Records by name, in lower case and without the final dot. An empty non-terminal has none.
    names: HashMap<String, Vec<RData>>,
    /// The addresses of pods and services.
    ranges: ClusterRanges,
}

impl Zone {
    /// Builds the zone. Endpoints without a service of the same name are ignored. `ranges` are the
    /// addresses of pods and services, `server` is that of this server, for the zone's NS record.
    pub fn new(
        services: &BTreeMap<Key, Service>,
        slices: &BTreeMap<Key, Slice>,
        ranges: ClusterRanges,
        server: Ipv4Addr,
    ) -> Self {
        let mut zone = Self {
            names: HashMap::new(),
            ranges,
        };
        zone.add_itself(server);
        let mut endpoints: HashMap<(&str, &str), Vec<&Endpoint>> = HashMap::new();
        for ((namespace, _), slice) in slices {
            let of_service = endpoints.entry((namespace, &slice.service)).or_default();
            of_service.extend(&slice.endpoints);
        }
        for ((namespace, name), service) in services {
            if !(is_label(namespace) && is_label(name)) {
                continue;
            }
            let own = format!("{name}.{namespace}.svc.{KUBERNETES_DOMAIN}");
            match &service.target {
                Target::Addresses(addresses) => zone.add_service(&own, addresses, &service.ports),
                Target::Elsewhere(other) => {
                    if let Ok(other) = Name::from_ascii(other.trim_end_matches('.')) {
                        zone.add(&own, RData::CNAME(CNAME(rooted(other))));
                    }
                }
                Target::Headless => {
                    // The name exists with or without endpoints.
                    zone.between(&own);
                    let key = (&namespace[..], &name[..]);
                    for endpoint in endpoints.get(&key).into_iter().flatten() {
                        zone.add_endpoint(&own, endpoint);
                    }
                }
            }
        }
        zone
    }

    /// Looks up a name, which is in lower case and without the final dot.
    pub fn find(&self, name: &str) -> Found<'_> {
        if let Some(records) = self.names.get(name) {
            return Found::Records(records.into());
        }
        if !is_ours(name, &self.ranges) {
            return Found::Foreign;
        }
        match pod(name, &self.ranges) {
            Some(Pod::Address(address)) => Found::Records(vec![record(address)].into()),
            Some(Pod::Between) => Found::Records([][..].into()),
            None => Found::NoSuchName,
        }
    }

    fn add_itself(&mut self, server: Ipv4Addr) {
        let host = format!("ns.dns.{KUBERNETES_DOMAIN}");
        let Some(host_name) = absolute(&host) else {
            return;
        };
        self.add(KUBERNETES_DOMAIN, RData::SOA(authority()));
        self.add(KUBERNETES_DOMAIN, RData::NS(NS(host_name)));
        self.add(&host, RData::A(A(server)));
        let version = format!("dns-version.{KUBERNETES_DOMAIN}");
        self.add(&version, RData::TXT(TXT::new(vec![SCHEMA.to_owned()])));
        self.between(&format!("svc.{KUBERNETES_DOMAIN}"));
        self.between(&format!("pod.{KUBERNETES_DOMAIN}"));
    }

    fn add_service(&mut self, own: &str, addresses: &[IpAddr], ports: &[Port]) {
        for address in addresses {
            self.add(own, record(*address));
            self.add_reverse(*address, own);
        }
        self.add_ports(own, own, ports);
    }

    fn add_endpoint(&mut self, own: &str, endpoint: &Endpoint) {
        self.add(own, record(endpoint.address));
        let hostname = endpoint.hostname.as_deref().filter(|name| is_label(name));
        let hostname = hostname.map_or_else(|| dashed(endpoint.address), str::to_owned);
        let host = format!("{hostname}.{own}");
        self.add(&host, record(endpoint.address));
        self.add_reverse(endpoint.address, &host);
        self.add_ports(own, &host, &endpoint.ports);
    }

    /// Adds the SRV records `_http._tcp.OWN` with target `host`.
    fn add_ports(&mut self, own: &str, host: &str, ports: &[Port]) {
        let Some(target) = absolute(host) else { return };
        for port in ports.iter().filter(|port| is_label(&port.name)) {
            let protocol = port.protocol.to_ascii_lowercase();
            let name = format!("_{}._{protocol}.{own}", port.name);
            self.add(
                &name,
                RData::SRV(SRV::new(0, 100, port.number, target.clone())),
            );
        }
    }

    fn add_reverse(&mut self, address: IpAddr, name: &str) {
        // Reverse zones of other addresses are not ours.
        if self.ranges.contains(address)
            && let Some(target) = absolute(name)
        {
            self.add(&reversed(address), RData::PTR(PTR(target)));
        }
    }

    fn add(&mut self, name: &str, record: RData) {
        self.between(name);
        let records = self.names.entry(name.to_owned()).or_default();
        if !records.contains(&record) {
            records.push(record);
        }
    }

    /// Adds this name and its parents within the zone as empty non-terminals.
    fn between(&mut self, name: &str) {
        let mut rest = name;
        while is_ours(rest, &self.ranges) && !self.names.contains_key(rest) {
            self.names.insert(rest.to_owned(), Vec::new());
            match rest.split_once('.') {
                Some((_, above)) => rest = above,
                None => return,
            }
        }
    }
}

/// Whether this server is authoritative for the name, in a cluster with these ranges.
pub fn is_ours(name: &str, ranges: &ClusterRanges) -> bool {
    is_within(name, KUBERNETES_DOMAIN) || is_reverse(name, ranges)
}

fn is_within(name: &str, zone: &str) -> bool {
    let above = name.strip_suffix(zone);
    above.is_some_and(|above| above.is_empty() || above.ends_with('.'))
}

/// Whether a name is in a reverse zone of which all addresses are of pods, or of services.
fn is_reverse(name: &str, ranges: &ClusterRanges) -> bool {
    let zone = |zone: &str| name.strip_suffix(zone)?.strip_suffix('.');
    if let Some(octets) = zone(REVERSE) {
        return is_part(octets, |octet| octet.parse().ok(), ranges.v4);
    }
    let nibbles = zone(REVERSE_V6).zip(ranges.v6);
    nibbles.is_some_and(|(nibbles, ranges)| {
        let number = |nibble: &str| match nibble.len() {
            1 => u8::from_str_radix(nibble, 16).ok(),
            _ => None,
        };
        is_part(nibbles, number, ranges)
    })
}

/// Whether the addresses that begin with the last labels of a name are in one of the ranges: those labels, from the
/// right, that are a part of an address.
fn is_part<A: Address>(
    labels: &str,
    number: impl Fn(&str) -> Option<u8>,
    ranges: Ranges<A>,
) -> bool {
    let width = if A::BITS == 32 { 8 } else { 4 };
    let parts = labels.rsplit('.').map_while(number);
    let parts = parts.take(usize::from(A::BITS / width));
    let (bits, prefix) = parts.fold((0_u128, 0), |(bits, prefix), part| {
        (bits << width | u128::from(part), prefix + width)
    });
    let first = bits.checked_shl((A::BITS - prefix).into()).unwrap_or(0);
    let first = A::from_number(first);
    let has = |range: Range<A>| range.contains_all(first, prefix);
    prefix > 0 && (has(ranges.pods) || has(ranges.services))
}

/// The name of an address in its reverse zone.
fn reversed(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            format!("{d}.{c}.{b}.{a}.{REVERSE}")
        }
        IpAddr::V6(v6) => {
            let digits = format!("{:032x}", v6.to_bits());
            let nibbles = digits.chars().rev().map(|digit| format!("{digit}."));
            nibbles.collect::<String>() + REVERSE_V6
        }
    }
}

fn record(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(v4) => RData::A(A(v4)),
        IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
    }
}

enum Pod {
    Address(IpAddr),
    /// A namespace; it is not checked whether it exists.
    Between,
}

/// Parses `10-208-1-5.NAMESPACE.pod.cluster.local`, which contains the address, as does
/// `fd00-1--5.NAMESPACE.pod.cluster.local`. Only addresses of pods are accepted, so that no name of the
/// zone resolves to another address.
fn pod(name: &str, ranges: &ClusterRanges) -> Option<Pod> {
    let name = name.strip_suffix(KUBERNETES_DOMAIN)?;
    let name = name.strip_suffix(".pod.")?;
    match name.split_once('.') {
        Some((address, namespace)) if is_label(namespace) => {
            let v4 = || address.replace('-', ".").parse::<Ipv4Addr>();
            let v6 = || address.replace('-', ":").parse::<Ipv6Addr>();
            let address = v4().map(IpAddr::from).or_else(|_| v6().map(IpAddr::from));
            let address = address.ok()?;
            ranges.has_pod(address).then_some(Pod::Address(address))
        }
        Some(_) => None,
        None => is_label(name).then_some(Pod::Between),
    }
}

/// The SOA record, which is sent with negative responses: it limits how long they are cached.
pub fn authority() -> SOA {
    let name = |text: &str| absolute(text).unwrap_or_else(Name::root);
    let host = name(&format!("ns.dns.{KUBERNETES_DOMAIN}"));
    let mailbox = name(&format!("hostmaster.{KUBERNETES_DOMAIN}"));
    // There are no zone transfers, so the serial number is constant.
    SOA::new(host, mailbox, 1, 7200, 1800, 86400, TTL)
}

fn dashed(address: IpAddr) -> String {
    address.to_string().replace(['.', ':'], "-")
}

fn absolute(name: &str) -> Option<Name> {
    Name::from_ascii(name).ok().map(rooted)
}

fn rooted(mut name: Name) -> Name {
    name.set_fqdn(true);
    name
}

fn is_label(text: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let proper = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    bytes.len() <= 63 && edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(proper)
}

#[cfg(test)]
mod tests {
    use hearth_api::testing::dual_stack_ranges;

    use super::*;

    const SERVER: Ipv4Addr = Ipv4Addr::new(10, 208, 1, 1);

    fn key(namespace: &str, name: &str) -> Key {
        (namespace.to_owned(), name.to_owned())
    }

    fn port(name: &str, number: u16) -> Port {
        Port {
            name: name.to_owned(),
            protocol: "TCP".to_owned(),
            number,
        }
    }

    fn zone() -> Zone {
        let (mut services, mut slices) = (BTreeMap::new(), BTreeMap::new());
        let mut service = |name, target, ports| {
            let service = Service { target, ports };
            services.insert(key("default", name), service);
        };
        let web = Target::Addresses(vec![[10, 224, 0, 7].into()]);
        service("web", web, vec![port("http", 80)]);
        service("db", Target::Headless, vec![port("sql", 5432)]);
        service("empty", Target::Headless, vec![]);
        service("away", Target::Elsewhere("example.com".into()), vec![]);
        service("bad name", Target::Headless, vec![]);
        let endpoint = |last, hostname: Option<&str>| Endpoint {
            address: [10, 208, 2, last].into(),
            hostname: hostname.map(str::to_owned),
            ports: vec![port("sql", 5432)],
        };
        // In two slices.
        let mut slice = |name, service: &str, endpoints| {
            let service = service.to_owned();
            slices.insert(key("default", name), Slice { service, endpoints });
        };
        slice("db-x", "db", vec![endpoint(5, Some("db-0"))]);
        slice("db-y", "db", vec![endpoint(6, None)]);
        // Endpoints without a service have no names.
        slice("stray-x", "stray", vec![endpoint(9, None)]);
        Zone::new(&services, &slices, ClusterRanges::DEFAULT, SERVER)
    }

    /// A zone of a dual-stack cluster.
    fn dual() -> Zone {
        let mut services = BTreeMap::new();
        for (name, target) in [
            (
                "both",
                Target::Addresses(vec![
                    "10.224.0.7".parse().unwrap(),
                    "fd00:2::7".parse().unwrap(),
                ]),
            ),
            ("six", Target::Addresses(vec!["fd00:2::8".parse().unwrap()])),
            ("db", Target::Headless),
        ] {
            let ports = vec![port("http", 80)];
            services.insert(key("default", name), Service { target, ports });
        }
        let mut slices = BTreeMap::new();
        for (name, addresses) in [
            ("db-4", ["10.208.2.5", "10.208.2.6"]),
            ("db-6", ["fd00:1:0:2::5", "fd00:1:0:2::6"]),
        ] {
            let hostnames = [Some("db-0".to_owned()), None];
            let endpoints = addresses.into_iter().zip(hostnames);
            let endpoints = endpoints.map(|(address, hostname)| Endpoint {
                address: address.parse().unwrap(),
                hostname,
                ports: vec![port("sql", 5432)],
            });
            let slice = Slice {
                service: "db".to_owned(),
                endpoints: endpoints.collect(),
            };
            slices.insert(key("default", name), slice);
        }
        Zone::new(&services, &slices, dual_stack_ranges(), SERVER)
    }

    #[test]
    fn a_dual_stack_cluster_has_names_of_both_families() {
        let zone = dual();
        let is = |name: &str, wanted: &[&str]| {
            let name = name.replace("$", "default.svc.cluster.local");
            let Found::Records(records) = zone.find(&name) else {
                panic!("{name}");
            };
            let mut shown: Vec<_> = records.iter().map(ToString::to_string).collect();
            shown.sort();
            assert_eq!(shown, wanted, "{name}");
        };
        is("both.$", &["10.224.0.7", "fd00:2::7"]);
        is("six.$", &["fd00:2::8"]);
        is(
            "_http._tcp.both.$",
            &["0 100 80 both.default.svc.cluster.local."],
        );
        is(
            "db.$",
            &["10.208.2.5", "10.208.2.6", "fd00:1:0:2::5", "fd00:1:0:2::6"],
        );
        is("db-0.db.$", &["10.208.2.5", "fd00:1:0:2::5"]);
        is("fd00-1-0-2--6.db.$", &["fd00:1:0:2::6"]);
        is(
            "_sql._tcp.db.$",
            &[
                "0 100 5432 10-208-2-6.db.default.svc.cluster.local.",
                "0 100 5432 db-0.db.default.svc.cluster.local.",
                "0 100 5432 fd00-1-0-2--6.db.default.svc.cluster.local.",
            ],
        );
        is(
            "fd00-1-0-2--6.default.pod.cluster.local",
            &["fd00:1:0:2::6"],
        );
        let reversed = &super::reversed("fd00:2::7".parse().unwrap())[..];
        is(reversed, &["both.default.svc.cluster.local."]);
        // Those between exist, others do not, and some are not ours.
        is(&reversed[2..], &[]);
        is("2.0.0.0.0.0.0.0.1.0.0.0.0.0.d.f.ip6.arpa", &[]);
        is("0.0.0.0.1.0.0.0.0.0.d.f.ip6.arpa", &[]);
        for (name, expected) in [
            (&*reversed.replacen('7', "9", 1), Found::NoSuchName),
            ("fd00-9--1.default.pod.cluster.local", Found::NoSuchName),
            ("0.0.0.1.0.0.0.0.0.d.f.ip6.arpa", Found::Foreign),
            ("1.0.0.0.0.0.d.f.ip6.arpa", Found::Foreign),
            ("0.0.0.0.3.0.0.0.0.0.d.f.ip6.arpa", Found::Foreign),
            ("0.0.0.0.2.0.0.0.0.0.d.f.ip6.arpa", Found::Foreign),
            ("ip6.arpa", Found::Foreign),
            ("1.0.0.127.in-addr.arpa", Found::Foreign),
        ] {
            assert_eq!(zone.find(name), expected, "{name}");
        }
        // Without IPv6 its reverse zones are others'.
        is_foreign(reversed);
    }

    /// The example of RFC 3596, section 2.5.
    #[test]
    fn an_address_is_reversed_digit_by_digit() {
        let address = "4321:0:1:2:3:4:567:89ab".parse().unwrap();
        assert_eq!(
            reversed(address),
            "b.a.9.8.7.6.5.0.4.0.0.0.3.0.0.0.2.0.0.0.1.0.0.0.0.0.0.0.1.2.3.4.ip6.arpa"
        );
    }

    #[track_caller]
    fn is_foreign(name: &str) {
        assert_eq!(zone().find(name), Found::Foreign, "{name}");
    }

    fn shown(name: &str) -> Option<Vec<String>> {
        match zone().find(name) {
            Found::Records(records) => {
                let mut shown: Vec<_> = records.iter().map(ToString::to_string).collect();
                shown.sort();
                Some(shown)
            }
            Found::NoSuchName => None,
            Found::Foreign => Some(vec!["foreign".into()]),
        }
    }

    fn is(name: &str, wanted: &[&str]) {
        let wanted = wanted.iter().map(|record| (*record).to_owned()).collect();
        assert_eq!(shown(name), Some(wanted), "{name}");
    }

    #[test]
    fn a_service_has_a_name_its_ports_and_the_way_back() {
        is("web.default.svc.cluster.local", &["10.224.0.7"]);
        is(
            "_http._tcp.web.default.svc.cluster.local",
            &["0 100 80 web.default.svc.cluster.local."],
        );
        is(
            "7.0.224.10.in-addr.arpa",
            &["web.default.svc.cluster.local."],
        );
        is("away.default.svc.cluster.local", &["example.com."]);
    }

    #[test]
    fn a_headless_service_is_its_pods() {
        is(
            "db.default.svc.cluster.local",
            &["10.208.2.5", "10.208.2.6"],
        );
        is("db-0.db.default.svc.cluster.local", &["10.208.2.5"]);
        is("10-208-2-6.db.default.svc.cluster.local", &["10.208.2.6"]);
        is(
            "_sql._tcp.db.default.svc.cluster.local",
            &[
                "0 100 5432 10-208-2-6.db.default.svc.cluster.local.",
                "0 100 5432 db-0.db.default.svc.cluster.local.",
            ],
        );
        is(
            "5.2.208.10.in-addr.arpa",
            &["db-0.db.default.svc.cluster.local."],
        );
        is("empty.default.svc.cluster.local", &[]);
    }

    #[test]
    fn a_pod_has_its_address_as_name() {
        is("10-208-2-5.default.pod.cluster.local", &["10.208.2.5"]);
        is("default.pod.cluster.local", &[]);
        // Addresses that are not in the pod networks have no names.
        assert_eq!(shown("192-0-2-1.default.pod.cluster.local"), None);
        assert_eq!(shown("10-208-2-5.x.default.pod.cluster.local"), None);
        assert_eq!(shown("10-208-2.default.pod.cluster.local"), None);
    }

    #[test]
    fn names_between_exist_and_others_do_not() {
        for name in [
            "default.svc.cluster.local",
            "svc.cluster.local",
            "pod.cluster.local",
            "_tcp.web.default.svc.cluster.local",
            "0.224.10.in-addr.arpa",
            "224.10.in-addr.arpa",
        ] {
            is(name, &[]);
        }
        for name in [
            "x.cluster.local",
            "stray.default.svc.cluster.local",
            "bad name.default.svc.cluster.local",
            "web.other.svc.cluster.local",
            "8.0.224.10.in-addr.arpa",
            "9.2.208.10.in-addr.arpa",
        ] {
            assert_eq!(shown(name), None, "{name}");
        }
    }

    #[test]
    fn what_others_have_to_say_is_left_to_them() {
        for name in [
            "",
            "local",
            "example.com",
            "xcluster.local",
            "cluster.local.example.com",
            "1.0.0.127.in-addr.arpa",
            "10.in-addr.arpa",
            "in-addr.arpa",
            "1.225.10.in-addr.arpa",
        ] {
            is(name, &["foreign"]);
        }
        assert!(shown("cluster.local").unwrap().len() == 2);
        is("ns.dns.cluster.local", &["10.208.1.1"]);
    }
}
