//! How a machine would reach its networks.

use std::net::IpAddr;

use hearth_parameters::{self as parameters, BondMode, Device, Mac};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct Network {
    /// In order of preference. None: every Ethernet device, by DHCP and router advertisements.
    interfaces: Vec<Interface>,
    nameservers: Vec<IpAddr>,
    search_domains: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Interface {
    /// Null for the only Ethernet device, or a bond.
    mac: Option<String>,
    /// Null if it is none.
    bond: Option<Bond>,
    /// Null if the network is untagged.
    vlan: Option<u16>,
    /// None: by DHCP and router advertisements.
    addresses: Vec<String>,
    routes: Vec<Route>,
    /// In bytes; null for that of the device, or of the lease.
    mtu: Option<u16>,
}

#[derive(Debug, Serialize)]
struct Bond {
    macs: Vec<String>,
    mode: &'static str,
}

#[derive(Debug, Serialize)]
struct Route {
    destination: String,
    /// Null for a route on the link.
    gateway: Option<IpAddr>,
}

impl From<&parameters::Network> for Network {
    fn from(network: &parameters::Network) -> Self {
        Self {
            interfaces: network.interfaces.iter().map(Interface::from).collect(),
            nameservers: network.nameservers.clone(),
            search_domains: network.search_domains.clone(),
        }
    }
}

impl From<&parameters::Interface> for Interface {
    fn from(interface: &parameters::Interface) -> Self {
        let routes = interface.routes.iter().map(|route| Route {
            destination: route.destination.to_string(),
            gateway: route.gateway,
        });
        let (mac, bond) = match &interface.device {
            Device::Only => (None, None),
            Device::WithMac(mac) => (Some(mac.to_string()), None),
            Device::Bond { macs, mode } => {
                let macs = macs.iter().map(Mac::to_string).collect();
                let mode = match mode {
                    BondMode::ActiveBackup => "active-backup",
                    BondMode::Lacp => "lacp",
                };
                (None, Some(Bond { macs, mode }))
            }
        };
        Self {
            mac,
            bond,
            vlan: interface.vlan,
            addresses: interface
                .addresses
                .iter()
                .map(ToString::to_string)
                .collect(),
            routes: routes.collect(),
            mtu: interface.mtu,
        }
    }
}

impl Network {
    /// The rows of the text for people; a blank value is none.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows: Vec<_> = self
            .interfaces
            .iter()
            .map(|one| ("network", one.text()))
            .collect();
        if rows.is_empty() {
            rows.push(("network", "by DHCP".to_owned()));
        }
        let servers = self.nameservers.iter().map(ToString::to_string);
        let servers: Vec<_> = servers.collect();
        for (name, values) in [
            ("name servers", &servers),
            ("search domains", &self.search_domains),
        ] {
            if !values.is_empty() {
                rows.push((name, values.join(",")));
            }
        }
        rows
    }
}

impl Interface {
    fn text(&self) -> String {
        let mut text = match &self.addresses[..] {
            [] => "by DHCP".to_owned(),
            addresses => addresses.join(","),
        };
        if let Some(mac) = &self.mac {
            text.push_str(&format!(" on {mac}"));
        }
        if let Some(Bond { macs, mode }) = &self.bond {
            text.push_str(&format!(" on a bond ({mode}) of {}", macs.join(" and ")));
        }
        if let Some(vlan) = self.vlan {
            text.push_str(&format!(" VLAN {vlan}"));
        }
        if let Some(mtu) = self.mtu {
            text.push_str(&format!(" MTU {mtu}"));
        }
        for Route {
            destination,
            gateway,
        } in &self.routes
        {
            text.push_str(&match gateway {
                Some(gateway) => format!(", {destination} by {gateway}"),
                None => format!(", {destination} on the link"),
            });
        }
        text
    }
}
