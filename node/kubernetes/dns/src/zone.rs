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
//! Pods and services have IPv4 addresses only.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;

use hearth_api::names::{KUBERNETES_DOMAIN, pods};
use hearth_kubernetes_api::store::{Kept, Key};
use hickory_proto::rr::rdata::{A, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData};

/// TTL of all records, in seconds; short, because services and pods change.
pub const TTL: u32 = 5;
/// Version of the specification of DNS for Kubernetes, which tools query.
const SCHEMA: &str = "1.1.0";
const REVERSE: &str = "in-addr.arpa";

/// Whether this is an address in the pod networks: of a pod, or the gateway of a node.
pub fn is_pod(address: Ipv4Addr) -> bool {
    pods::NETWORK.contains(address)
}

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
    /// The cluster IP.
    Address(Ipv4Addr),
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

/// The ready endpoints of one service.
pub type Endpoints = Vec<Endpoint>;

/// A ready endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Address of the pod.
    pub address: Ipv4Addr,
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
            Target::Address(_) | Target::Headless => 0,
        };
        size_of::<Self>() + name + self.ports.bytes()
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
}

impl Zone {
    /// Builds the zone. Endpoints without a service of the same name are ignored. `server` is the
    /// address of this server, for the zone's NS record.
    pub fn new(
        services: &BTreeMap<Key, Service>,
        endpoints: &BTreeMap<Key, Endpoints>,
        server: Ipv4Addr,
    ) -> Self {
        let mut zone = Self {
            names: HashMap::new(),
        };
        zone.add_itself(server);
        for (key, service) in services {
            let (namespace, name) = key;
            if !(is_label(namespace) && is_label(name)) {
                continue;
            }
            let own = format!("{name}.{namespace}.svc.{KUBERNETES_DOMAIN}");
            match &service.target {
                Target::Address(address) => zone.add_service(&own, *address, &service.ports),
                Target::Elsewhere(other) => {
                    if let Ok(other) = Name::from_ascii(other.trim_end_matches('.')) {
                        zone.add(&own, RData::CNAME(CNAME(rooted(other))));
                    }
                }
                Target::Headless => {
                    // The name exists with or without endpoints.
                    zone.between(&own);
                    for endpoint in endpoints.get(key).into_iter().flatten() {
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
        if !is_ours(name) {
            return Found::Foreign;
        }
        match pod(name) {
            Some(Pod::Address(address)) => Found::Records(vec![RData::A(A(address))].into()),
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

    fn add_service(&mut self, own: &str, address: Ipv4Addr, ports: &[Port]) {
        self.add(own, RData::A(A(address)));
        self.add_reverse(address, own);
        self.add_ports(own, own, ports);
    }

    fn add_endpoint(&mut self, own: &str, endpoint: &Endpoint) {
        self.add(own, RData::A(A(endpoint.address)));
        let hostname = endpoint.hostname.as_deref().filter(|name| is_label(name));
        let hostname = hostname.map_or_else(|| dashed(endpoint.address), str::to_owned);
        let host = format!("{hostname}.{own}");
        self.add(&host, RData::A(A(endpoint.address)));
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

    fn add_reverse(&mut self, address: Ipv4Addr, name: &str) {
        // Reverse zones of other addresses are not ours.
        if !(pods::NETWORK.contains(address) || pods::SERVICE_NETWORK.contains(address)) {
            return;
        }
        if let Some(target) = absolute(name) {
            let [a, b, c, d] = address.octets();
            self.add(
                &format!("{d}.{c}.{b}.{a}.{REVERSE}"),
                RData::PTR(PTR(target)),
            );
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
        while is_ours(rest) && !self.names.contains_key(rest) {
            self.names.insert(rest.to_owned(), Vec::new());
            match rest.split_once('.') {
                Some((_, above)) => rest = above,
                None => return,
            }
        }
    }
}

/// Whether this server is authoritative for the name.
pub fn is_ours(name: &str) -> bool {
    is_within(name, KUBERNETES_DOMAIN) || reverse_zone(name)
}

fn is_within(name: &str, zone: &str) -> bool {
    let above = name.strip_suffix(zone);
    above.is_some_and(|above| above.is_empty() || above.ends_with('.'))
}

/// Whether a name is in a reverse zone of pods or services. The zones have two octets.
fn reverse_zone(name: &str) -> bool {
    let Some(digits) = name.strip_suffix(REVERSE) else {
        return false;
    };
    let mut octets = digits.trim_end_matches('.').rsplit('.');
    let mut octet = || octets.next()?.parse::<u8>().ok();
    let (Some(a), Some(b)) = (octet(), octet()) else {
        return false;
    };
    let network = Ipv4Addr::from([a, b, 0, 0]);
    is_pod(network) || pods::SERVICE_NETWORK.contains(network)
}

enum Pod {
    Address(Ipv4Addr),
    /// A namespace; it is not checked whether it exists.
    Between,
}

/// Parses `10-208-1-5.NAMESPACE.pod.cluster.local`, which contains the address. Only addresses of
/// pods are accepted, so that no name of the zone resolves to another address.
fn pod(name: &str) -> Option<Pod> {
    let name = name.strip_suffix(KUBERNETES_DOMAIN)?;
    let name = name.strip_suffix(".pod.")?;
    match name.split_once('.') {
        Some((address, namespace)) if is_label(namespace) => {
            let address: Ipv4Addr = address.replace('-', ".").parse().ok()?;
            is_pod(address).then_some(Pod::Address(address))
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

fn dashed(address: Ipv4Addr) -> String {
    address.to_string().replace('.', "-")
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
        let (mut services, mut endpoints) = (BTreeMap::new(), BTreeMap::new());
        let mut service = |name, target, ports| {
            let service = Service { target, ports };
            services.insert(key("default", name), service);
        };
        let web = Target::Address([10, 224, 0, 7].into());
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
        let pods = vec![endpoint(5, Some("db-0")), endpoint(6, None)];
        endpoints.insert(key("default", "db"), pods);
        // Endpoints without a service have no names.
        let stray = vec![endpoint(9, None)];
        endpoints.insert(key("default", "stray"), stray);
        Zone::new(&services, &endpoints, SERVER)
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
