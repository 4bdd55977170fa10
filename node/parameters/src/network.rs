//! `network_config`: static network configuration, instead of DHCP.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use hearth_api::labels::quoted;
use hearth_api::v1::{NetworkConfig, network_config};
use hearth_cidr::Cidr;

use super::Problem;

/// Static configuration of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticNetwork {
    /// The MAC address of the interface; `None` is the only Ethernet interface.
    pub mac: Option<Mac>,
    /// The interface's addresses, at least one.
    pub addresses: Vec<Cidr>,
    /// Routes in addition to those that the addresses imply.
    pub routes: Vec<Route>,
    /// Nameservers in order of preference.
    pub nameservers: Vec<IpAddr>,
    /// The 802.1Q VLAN ID, 1 to 4094; `None` is untagged.
    pub vlan: Option<u16>,
}

/// The MAC address of an Ethernet interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

/// A static route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination; a prefix of length 0 is the default route.
    pub destination: Cidr,
    /// The gateway, of the same address family; `None` is a route on this link.
    pub gateway: Option<IpAddr>,
}

impl StaticNetwork {
    /// Parses the message, from the parameters or the sealed configuration.
    pub fn parse(message: NetworkConfig) -> Result<Self, Problem> {
        if message.addresses.is_empty() {
            return Err(Problem::unwanted(
                "network_config.addresses",
                "at least one address with its prefix length, such as \"192.0.2.10/24\"",
                "none",
            ));
        }
        let addresses = each("addresses", &message.addresses, |field, text| {
            host(cidr(field, text)?, field, text)
        })?;
        let nameservers = each("nameservers", &message.nameservers, address)?;
        let routes = message
            .routes
            .iter()
            .enumerate()
            .map(|(index, message)| route(&format!("network_config.routes[{index}]"), message))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            mac: mac(&message.mac)?,
            addresses,
            routes,
            nameservers,
            vlan: vlan(message.vlan)?,
        })
    }

    /// Converts the configuration back to the message.
    pub fn to_message(&self) -> NetworkConfig {
        NetworkConfig {
            mac: self.mac.map(|mac| mac.to_string()).unwrap_or_default(),
            addresses: self.addresses.iter().map(Cidr::to_string).collect(),
            routes: self
                .routes
                .iter()
                .map(|route| network_config::Route {
                    destination: route.destination.to_string(),
                    gateway: route.gateway.map(|g| g.to_string()).unwrap_or_default(),
                })
                .collect(),
            nameservers: self.nameservers.iter().map(IpAddr::to_string).collect(),
            vlan: self.vlan.unwrap_or_default().into(),
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(())?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ())?;
        }
        parts.next().is_none().then_some(Self(bytes)).ok_or(())
    }
}

fn each<T>(
    name: &str,
    texts: &[String],
    parse: impl Fn(&str, &str) -> Result<T, Problem>,
) -> Result<Vec<T>, Problem> {
    let indexed = texts.iter().enumerate();
    indexed
        .map(|(index, text)| parse(&format!("network_config.{name}[{index}]"), text))
        .collect()
}

fn cidr(field: &str, text: &str) -> Result<Cidr, Problem> {
    text.parse().map_err(|_| {
        Problem::unwanted(
            field,
            "an address with its prefix length, such as \"192.0.2.10/24\"",
            quoted(text),
        )
    })
}

fn host(cidr: Cidr, field: &str, text: &str) -> Result<Cidr, Problem> {
    let address = cidr.address();
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        return Err(Problem::unwanted(
            field,
            "a host address (not unspecified, multicast or loopback)",
            quoted(text),
        ));
    }
    Ok(cidr)
}

fn address(field: &str, text: &str) -> Result<IpAddr, Problem> {
    text.parse()
        .map_err(|_| Problem::unwanted(field, "an IP address", quoted(text)))
}

fn route(field: &str, message: &network_config::Route) -> Result<Route, Problem> {
    let destination = cidr(&format!("{field}.destination"), &message.destination)?;
    let gateway = match &message.gateway[..] {
        "" => None,
        text => Some(address(&format!("{field}.gateway"), text)?),
    };
    if gateway.is_some_and(|g| g.is_ipv4() != destination.address().is_ipv4()) {
        return Err(Problem::unwanted(
            format!("{field}.gateway"),
            "an address of the destination's address family",
            quoted(&message.gateway),
        ));
    }
    Ok(Route {
        destination,
        gateway,
    })
}

fn mac(text: &str) -> Result<Option<Mac>, Problem> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|()| {
        Problem::unwanted(
            "network_config.mac",
            "a MAC address such as \"52:54:00:12:34:56\"",
            quoted(text),
        )
    })
}

fn vlan(tag: u32) -> Result<Option<u16>, Problem> {
    match u16::try_from(tag) {
        Ok(0) => Ok(None),
        Ok(tag) if tag <= 4094 => Ok(Some(tag)),
        _ => Err(Problem::unwanted(
            "network_config.vlan",
            "0 for none, or 1 to 4094",
            tag.to_string(),
        )),
    }
}
