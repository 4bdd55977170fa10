//! `network_config`: how a machine reaches its networks.
//!
//! A machine with one interface has its fields directly in the message, one with several has a list of them. Both
//! become the same [`Network`], and a single interface is written again as it has been read: the message is stored in the sealed
//! configuration.
//!
//! [`Device`] says which device an interface is. No two interfaces are the same one, and no device belongs to a bond
//! and is used otherwise: [`Network::parse`] refuses what the kernel would refuse later, where nobody sees it.

mod fields;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use hearth_api::v1::{NetworkConfig, network_config};
use hearth_cidr::Cidr;

use super::Problem;
use fields::Field;

/// The bond mode of the message.
type Mode = network_config::bond::Mode;

/// Maximum number of interfaces and of search domains: more than a machine has.
const MOST_INTERFACES: usize = 32;
const MOST_SEARCH_DOMAINS: usize = 6;
/// Devices of one bond.
const BOND_DEVICES: std::ops::RangeInclusive<usize> = 2..=8;

/// How a machine reaches its networks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// The interfaces that are used, in order of preference. None: every Ethernet device, by DHCP and router
    /// advertisements.
    pub interfaces: Vec<Interface>,
    /// Nameservers in order of preference; those of leases come after them.
    pub nameservers: Vec<IpAddr>,
    /// Domains in which names without dots are looked up; those of leases come after them.
    pub search_domains: Vec<String>,
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The device, or what it is made of.
    pub device: Device,
    /// The 802.1Q VLAN ID, 1 to 4094; `None` is untagged.
    pub vlan: Option<u16>,
    /// The interface's addresses. None: those of DHCP and router advertisements.
    pub addresses: Vec<Cidr>,
    /// Routes in addition to those that the addresses, or the lease, imply.
    pub routes: Vec<Route>,
    /// The MTU in bytes; `None` is that of the device, or of the lease.
    pub mtu: Option<u16>,
}

/// The device of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The only Ethernet device.
    Only,
    /// The Ethernet device with this address.
    WithMac(Mac),
    /// Several Ethernet devices as one.
    Bond {
        /// Their addresses, two to eight different ones. The bond has that of the first.
        macs: Vec<Mac>,
        /// How they share the traffic.
        mode: BondMode,
    },
}

/// How the devices of a bond share the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BondMode {
    /// One at a time carries it.
    ActiveBackup,
    /// The switch and the machine agree by LACP (802.3ad).
    Lacp,
}

/// The MAC address of an Ethernet interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// A static route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination; a prefix of length 0 is the default route.
    pub destination: Cidr,
    /// The gateway, of the same address family; `None` is a route on this link.
    pub gateway: Option<IpAddr>,
}

impl Device {
    /// The addresses of the Ethernet devices that it names.
    pub fn macs(&self) -> &[Mac] {
        match self {
            Self::Only => &[],
            Self::WithMac(mac) => std::slice::from_ref(mac),
            Self::Bond { macs, .. } => macs,
        }
    }
}

impl Network {
    /// Parses the message, from the parameters or the sealed configuration.
    pub fn parse(message: NetworkConfig) -> Result<Self, Problem> {
        let root = Field::root();
        let nameservers = root.each_text("nameservers", &message.nameservers, Field::address)?;
        let search_domains = search_domains(&root, &message.search_domains)?;
        let single = network_config::Interface {
            mac: message.mac,
            bond: None,
            vlan: message.vlan,
            addresses: message.addresses,
            routes: message.routes,
            mtu: 0,
        };
        let is_single = single != network_config::Interface::default();
        let interfaces = match (is_single, &message.interfaces[..]) {
            (true, []) => vec![interface(&root, &single)?],
            (false, several) => {
                let list = root.field("interfaces");
                list.at_most(MOST_INTERFACES, several.len(), "interfaces")?;
                root.each("interfaces", several, |field, one| interface(&field, one))?
            }
            (true, _) => {
                return Err(root.field("interfaces").unwanted(
                    "either these, or mac, addresses, routes and vlan of a single interface",
                    "both",
                ));
            }
        };
        devices_are_distinct(&interfaces)?;
        Ok(Self {
            interfaces,
            nameservers,
            search_domains,
        })
    }

    /// Converts the configuration back to the message; `None` is that of a machine that does all by itself.
    pub fn to_message(&self) -> Option<NetworkConfig> {
        if *self == Self::default() {
            return None;
        }
        let mut message = NetworkConfig {
            nameservers: self.nameservers.iter().map(IpAddr::to_string).collect(),
            search_domains: self.search_domains.clone(),
            ..NetworkConfig::default()
        };
        let interfaces = self.interfaces.iter().map(Interface::to_message);
        let mut interfaces: Vec<_> = interfaces.collect();
        match &mut interfaces[..] {
            // What the fields of a single interface cannot say stays in the list.
            [one]
                if one.bond.is_none()
                    && one.mtu == 0
                    && *one != network_config::Interface::default() =>
            {
                let one = std::mem::take(one);
                message.mac = one.mac;
                message.vlan = one.vlan;
                message.addresses = one.addresses;
                message.routes = one.routes;
            }
            _ => message.interfaces = interfaces,
        }
        Some(message)
    }
}

impl Interface {
    fn to_message(&self) -> network_config::Interface {
        let routes = self.routes.iter().map(|route| network_config::Route {
            destination: route.destination.to_string(),
            gateway: route.gateway.map(|g| g.to_string()).unwrap_or_default(),
        });
        let (mac, bond) = match &self.device {
            Device::Only => (String::new(), None),
            Device::WithMac(mac) => (mac.to_string(), None),
            Device::Bond { macs, mode } => {
                let mode = match mode {
                    BondMode::ActiveBackup => Mode::ActiveBackup,
                    BondMode::Lacp => Mode::Lacp,
                };
                let bond = network_config::Bond {
                    macs: macs.iter().map(Mac::to_string).collect(),
                    mode: mode.into(),
                };
                (String::new(), Some(bond))
            }
        };
        network_config::Interface {
            mac,
            bond,
            vlan: self.vlan.unwrap_or_default().into(),
            addresses: self.addresses.iter().map(Cidr::to_string).collect(),
            routes: routes.collect(),
            mtu: self.mtu.unwrap_or_default().into(),
        }
    }
}

fn interface(field: &Field, message: &network_config::Interface) -> Result<Interface, Problem> {
    let routes = field.each("routes", &message.routes, |field, one| route(&field, one))?;
    Ok(Interface {
        device: device(field, message)?,
        vlan: field.field("vlan").vlan(message.vlan)?,
        addresses: field.each_text("addresses", &message.addresses, Field::host)?,
        routes,
        mtu: field.field("mtu").mtu(message.mtu)?,
    })
}

fn device(field: &Field, message: &network_config::Interface) -> Result<Device, Problem> {
    let mac = field.field("mac");
    match (&message.mac[..], &message.bond) {
        ("", None) => Ok(Device::Only),
        (text, None) => Ok(Device::WithMac(mac.mac(text)?)),
        ("", Some(bond)) => {
            let field = field.field("bond");
            let macs = field.each_text("macs", &bond.macs, Field::mac)?;
            let distinct: BTreeSet<Mac> = macs.iter().copied().collect();
            if distinct.len() < macs.len() || !BOND_DEVICES.contains(&macs.len()) {
                return Err(field
                    .field("macs")
                    .unwanted("two to eight different MAC addresses", bond.macs.join(", ")));
            }
            let mode = match Mode::try_from(bond.mode) {
                Ok(Mode::Unspecified | Mode::ActiveBackup) => BondMode::ActiveBackup,
                Ok(Mode::Lacp) => BondMode::Lacp,
                Err(_) => {
                    let found = bond.mode.to_string();
                    let expected = "MODE_ACTIVE_BACKUP or MODE_LACP";
                    return Err(field.field("mode").unwanted(expected, found));
                }
            };
            Ok(Device::Bond { macs, mode })
        }
        (_, Some(_)) => Err(mac.unwanted("none, since the interface is a bond", "one")),
    }
}

fn route(field: &Field, message: &network_config::Route) -> Result<Route, Problem> {
    let destination = field.field("destination").cidr(&message.destination)?;
    let gateway = match &message.gateway[..] {
        "" => None,
        text => Some(field.field("gateway").address(text)?),
    };
    if gateway.is_some_and(|g| g.is_ipv4() != destination.address().is_ipv4()) {
        return Err(field.field("gateway").unwanted(
            "an address of the destination's address family",
            hearth_api::labels::quoted(&message.gateway),
        ));
    }
    Ok(Route {
        destination,
        gateway,
    })
}

fn search_domains(root: &Field, texts: &[String]) -> Result<Vec<String>, Problem> {
    let list = root.field("search_domains");
    list.at_most(MOST_SEARCH_DOMAINS, texts.len(), "domains")?;
    root.each_text("search_domains", texts, Field::domain)
}

/// Of several interfaces each names its device, no two are the same, and no device belongs to two.
fn devices_are_distinct(interfaces: &[Interface]) -> Result<(), Problem> {
    let mut seen: Vec<(&Device, Option<u16>)> = Vec::new();
    let mut users: BTreeMap<Mac, &Device> = BTreeMap::new();
    for (index, interface) in interfaces.iter().enumerate() {
        let field = Field::root().nth("interfaces", index);
        let device = &interface.device;
        if *device == Device::Only && interfaces.len() > 1 {
            let expected = "a MAC address or a bond, since there are several interfaces";
            return Err(field.field("mac").unwanted(expected, "none"));
        }
        if seen.contains(&(device, interface.vlan)) {
            let expected = "another device or VLAN than those of the interfaces before";
            return Err(field.unwanted(expected, "the same"));
        }
        seen.push((device, interface.vlan));
        for mac in device.macs() {
            // A device, or a bond, may carry several VLANs.
            if users
                .insert(*mac, device)
                .is_some_and(|user| user != device)
            {
                let expected = "each device in one bond only, or alone";
                return Err(field.unwanted(expected, format!("{mac} in two")));
            }
        }
    }
    Ok(())
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
