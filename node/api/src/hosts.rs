//! Names and addresses of servers, as three settings state them.
//!
//! | setting | value |
//! |---|---|
//! | `certificate_names` | further names and addresses in the certificates of curators and API servers |
//! | `kubernetes.api_address` | the virtual address of the API servers, which one controller at a time has |
//! | `kubernetes.api_endpoint` | `HOST` or `HOST:PORT` of a load balancer in front of the API servers |
//!
//! Host and address of the last two are in the certificates, too.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use crate::client::Endpoint;
use crate::labels;
use crate::names::PORT_KUBERNETES;
use crate::v1::{ClusterConfiguration, KubernetesConfiguration};

/// Maximum length of a DNS name.
const LONGEST_NAME: usize = 253;

/// What a host should be.
pub const HOST: &str = "a lower-case DNS name or an IP address";

/// A DNS name in lower case, or an IP address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// A DNS name.
    Name(String),
    /// An IP address.
    Address(IpAddr),
}

/// A text that is not a host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {HOST}, got {found:?}")]
pub struct HostError {
    /// The text.
    pub found: String,
}

impl FromStr for Host {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        // A name whose last label is a number is meant as an address.
        let last = text.rsplit('.').next().unwrap_or_default();
        let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
        if text.len() <= LONGEST_NAME && labels::is_dns_name(text) && !is_number {
            return Ok(Self::Name(text.to_owned()));
        }
        Err(HostError {
            found: text.to_owned(),
        })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// What `kubernetes.api_endpoint` should be.
pub const API_ENDPOINT: &str = "HOST or HOST:PORT with a lower-case DNS name or an IP address";

/// The endpoint that a text states, with its host. The default port is that of the API servers.
pub fn api_endpoint(text: &str) -> Option<(Host, Endpoint)> {
    let endpoint = Endpoint::parse(text, PORT_KUBERNETES).ok()?;
    let host = endpoint.host().parse().ok()?;
    Some((host, endpoint))
}

/// What `kubernetes.api_address` should be.
pub const API_ADDRESS: &str = "a global IP address of one host";

/// The virtual address that a text states. It must not be one of pods or services
/// ([`check_together`](crate::settings::check_together)).
pub fn api_address(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    let is_unusable = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    let is_host = !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
    (is_host && !is_unusable).then_some(address)
}

impl KubernetesConfiguration {
    /// The virtual address of the API servers.
    pub fn virtual_address(&self) -> Option<IpAddr> {
        api_address(&self.api_address)
    }

    /// The URLs by which the API servers are reached as one, the preferred one first.
    pub fn stable_urls(&self) -> Vec<String> {
        let balancer = api_endpoint(&self.api_endpoint).map(|(_, endpoint)| endpoint.to_string());
        let address = self.virtual_address();
        let address = address.map(|ip| SocketAddr::new(ip, PORT_KUBERNETES).to_string());
        let endpoints = balancer.into_iter().chain(address);
        endpoints.map(|at| format!("https://{at}")).collect()
    }
}

impl ClusterConfiguration {
    /// The further names and addresses in the certificates of curators and API servers, sorted,
    /// without repetitions.
    pub fn server_hosts(&self) -> Vec<Host> {
        let further = self.certificate_names.iter().map(|name| name.parse().ok());
        let kubernetes = self.kubernetes.iter().flat_map(|kubernetes| {
            let balancer = api_endpoint(&kubernetes.api_endpoint).map(|(host, _)| host);
            [balancer, kubernetes.virtual_address().map(Host::Address)]
        });
        let mut hosts: Vec<_> = further.chain(kubernetes).flatten().collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address() {
        for good in [
            "a",
            "api.example.com",
            "192.0.2.1",
            "2001:db8::1",
            "7.example",
        ] {
            assert_eq!(good.parse::<Host>().unwrap().to_string(), good);
        }
        let long = format!("{}.example", ["a"; 130].join("."));
        for bad in [
            "",
            "A",
            "a_b",
            "*.example",
            "a.",
            ".a",
            "192.0.2",
            "192.0.2.256",
            "[::1]",
            "a:1",
            "é",
            &long,
        ] {
            let error = bad.parse::<Host>().unwrap_err();
            assert_eq!(error.found, bad);
        }
    }

    #[test]
    fn an_endpoint_has_the_port_of_the_api_servers_unless_it_names_one() {
        let table = [
            ("api.example.com", Some("api.example.com:6443")),
            ("api.example.com:443", Some("api.example.com:443")),
            ("192.0.2.7", Some("192.0.2.7:6443")),
            ("[2001:db8::1]:443", Some("[2001:db8::1]:443")),
            ("2001:db8::1", Some("[2001:db8::1]:6443")),
            ("https://api.example.com", None),
            ("API.example.com", None),
            ("api.example.com:0", None),
            ("", None),
        ];
        for (text, expected) in table {
            let found = api_endpoint(text).map(|(_, endpoint)| endpoint.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_virtual_address_is_one_that_machines_of_a_network_can_have() {
        for good in ["192.0.2.7", "10.1.2.3", "2001:db8::7", "fd00::7"] {
            assert!(api_address(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "x",
            "0.0.0.0",
            "::",
            "127.0.0.1",
            "::1",
            "224.0.0.1",
            "ff02::1",
            "169.254.1.1",
            "fe80::1",
            "255.255.255.255",
            "::ffff:192.0.2.1",
        ] {
            assert_eq!(api_address(bad), None, "{bad}");
        }
    }

    #[test]
    fn certificates_have_every_host_once_and_urls_prefer_the_balancer() {
        let text = |text: &str| text.to_owned();
        let configuration = ClusterConfiguration {
            certificate_names: vec![text("b.example"), text("192.0.2.7"), text("a.example")],
            kubernetes: Some(KubernetesConfiguration {
                api_address: text("192.0.2.7"),
                api_endpoint: text("a.example:443"),
                ..Default::default()
            }),
            ..Default::default()
        };
        let hosts: Vec<_> = configuration.server_hosts();
        let hosts: Vec<_> = hosts.iter().map(Host::to_string).collect();
        assert_eq!(hosts, ["a.example", "b.example", "192.0.2.7"]);
        let urls = configuration.kubernetes.unwrap().stable_urls();
        assert_eq!(urls, ["https://a.example:443", "https://192.0.2.7:6443"]);
        assert_eq!(ClusterConfiguration::default().server_hosts(), []);
        assert!(KubernetesConfiguration::default().stable_urls().is_empty());
    }
}
