//! A network that is configured by hand instead of by DHCP.
//!
//! Applying it is idempotent, and makes the interface hold exactly the IPv4
//! addresses given, so that a change leaves nothing of the old ones behind.
//! IPv6 addresses are added to those the kernel makes by itself.

use std::net::IpAddr;

use super::{
    cidr::Cidr,
    netlink::{Link, LinkKind, Netlink, NetlinkError, Route},
};

/// Which interface is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Selector {
    /// The only Ethernet device there is.
    #[default]
    Only,
    /// The one of this name.
    Name(String),
    /// The Ethernet device with this hardware address.
    Mac([u8; 6]),
}

/// The configuration of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticNetwork {
    /// The interface.
    pub interface: Selector,
    /// The VLAN to use on it; the addresses are then those of the VLAN.
    pub vlan: Option<u16>,
    /// The MTU in bytes, if not the device's own.
    pub mtu: Option<u16>,
    /// Its addresses, one at least.
    pub addresses: Vec<Cidr>,
    /// Its routes, beyond those of the addresses' own networks.
    pub routes: Vec<Route>,
}

/// Why the configuration was not applied.
#[derive(Debug, thiserror::Error)]
pub enum StaticNetworkError {
    /// There is no interface as selected, or several.
    #[error("{wanted}: found {found}")]
    Interface {
        /// What was wanted.
        wanted: String,
        /// The interfaces there are.
        found: String,
    },
    /// The configuration contradicts itself.
    #[error("network configuration: {field}: {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The kernel refused.
    #[error("network configuration")]
    Netlink(#[from] NetlinkError),
}

impl StaticNetwork {
    /// Checks what can be checked without a machine.
    pub fn check(&self) -> Result<(), StaticNetworkError> {
        let invalid = |field, problem| Err(StaticNetworkError::Invalid { field, problem });
        if self.addresses.is_empty() {
            return invalid("addresses", "at least one is needed".into());
        }
        for cidr in &self.addresses {
            let address = cidr.address();
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                return invalid("addresses", format!("{cidr} cannot be a node's address"));
            }
        }
        if let Some(vlan) = self.vlan
            && !(1..=4094).contains(&vlan)
        {
            return invalid("vlan", format!("{vlan} is not between 1 and 4094"));
        }
        if let Some(mtu) = self.mtu
            && mtu < 576
        {
            return invalid("mtu", format!("{mtu} is less than 576"));
        }
        for route in &self.routes {
            let Some(gateway) = route.gateway else {
                continue;
            };
            if gateway.is_ipv4() != route.destination.address().is_ipv4() {
                let problem = format!("{} through {gateway}: not one family", route.destination);
                return invalid("routes", problem);
            }
            let link_local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
            let reached = self.addresses.iter().any(|cidr| cidr.contains(gateway));
            if !reached && !link_local {
                let problem = format!("the gateway {gateway} is in no network of the addresses");
                return invalid("routes", problem);
            }
        }
        Ok(())
    }

    /// Applies the configuration; gives the interface that has it.
    pub async fn apply(&self, netlink: &Netlink) -> Result<Link, StaticNetworkError> {
        self.check()?;
        let device = choose(&self.interface, netlink.list_links().await?)?;
        if let Some(mtu) = self.mtu {
            netlink.set_mtu(device.index, mtu.into()).await?;
        }
        netlink.set_up(device.index).await?;
        let link = match self.vlan {
            Some(vlan) => {
                let name = vlan_name(&device.name, vlan);
                netlink.add_vlan(device.index, &name, vlan).await?
            }
            None => device,
        };
        netlink
            .set_ipv4_addresses(link.index, &self.addresses)
            .await?;
        for address in self.addresses.iter().filter(|a| a.address().is_ipv6()) {
            netlink.add_address(link.index, *address).await?;
        }
        for route in &self.routes {
            netlink.replace_route(link.index, *route).await?;
        }
        Ok(netlink.link(link.index).await?)
    }
}

/// Interface names have at most 15 bytes.
fn vlan_name(device: &str, vlan: u16) -> String {
    let name = format!("{device}.{vlan}");
    if name.len() <= 15 {
        name
    } else {
        format!("vlan{vlan}")
    }
}

/// Picks the interface meant from all there are.
pub fn choose(selector: &Selector, links: Vec<Link>) -> Result<Link, StaticNetworkError> {
    let wanted = match selector {
        Selector::Only => "exactly one Ethernet device".to_owned(),
        Selector::Name(name) => format!("an interface {name}"),
        Selector::Mac(mac) => format!("one Ethernet device {}", mac_text(mac)),
    };
    let is_meant = |link: &&Link| match selector {
        Selector::Only => link.kind == LinkKind::Ethernet,
        Selector::Name(name) => link.name == *name,
        Selector::Mac(mac) => link.kind == LinkKind::Ethernet && link.mac == Some(*mac),
    };
    let mut meant = links.iter().filter(is_meant);
    if let (Some(link), None) = (meant.next(), meant.next()) {
        return Ok(link.clone());
    }
    let describe = |link: &Link| match &link.mac {
        Some(mac) => format!("{} ({})", link.name, mac_text(mac)),
        None => link.name.clone(),
    };
    let found: Vec<_> = links.iter().map(describe).collect();
    Err(StaticNetworkError::Interface {
        wanted,
        found: found.join(", "),
    })
}

fn mac_text(mac: &[u8; 6]) -> String {
    let bytes: Vec<_> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_own_network;

    fn link(index: u32, name: &str, kind: LinkKind) -> Link {
        Link {
            index,
            name: name.into(),
            mac: Some([2, 0, 0, 0, 0, index as u8]),
            kind,
            up: false,
            carrier: false,
            mtu: 1500,
        }
    }

    fn network(address: &str) -> StaticNetwork {
        StaticNetwork {
            addresses: vec![address.parse().unwrap()],
            ..Default::default()
        }
    }

    #[test]
    fn the_interface_is_picked_or_all_are_told() {
        let links = vec![
            link(1, "lo", LinkKind::Loopback),
            link(2, "eth0", LinkKind::Ethernet),
            link(3, "br0", LinkKind::Virtual),
        ];
        let pick = |selector: Selector, links: &[Link]| choose(&selector, links.to_vec());
        assert_eq!(pick(Selector::Only, &links).unwrap().name, "eth0");
        assert_eq!(
            pick(Selector::Mac([2, 0, 0, 0, 0, 2]), &links)
                .unwrap()
                .index,
            2
        );
        assert_eq!(pick(Selector::Name("br0".into()), &links).unwrap().index, 3);
        let two = [links.clone(), vec![link(4, "eth1", LinkKind::Ethernet)]].concat();
        let error = pick(Selector::Only, &two).unwrap_err().to_string();
        assert!(error.contains("eth0 (02:00:00:00:00:02), br0"), "{error}");
        assert!(pick(Selector::Mac([9; 6]), &two).is_err());
    }

    #[test]
    fn contradictions_are_named() {
        let route = |gateway: &str| Route::default_through(gateway.parse().unwrap(), 0);
        let good = network("10.0.0.5/24");
        let with_route = |gateway: &str| StaticNetwork {
            routes: vec![route(gateway)],
            ..good.clone()
        };
        good.check().unwrap();
        with_route("10.0.0.1").check().unwrap();
        with_route("fe80::1").check().unwrap();
        for (bad, word) in [
            (StaticNetwork::default(), "at least one"),
            (network("127.0.0.1/8"), "127.0.0.1/8"),
            (with_route("10.0.1.1"), "10.0.1.1"),
            (
                StaticNetwork {
                    vlan: Some(4095),
                    ..good.clone()
                },
                "4095",
            ),
            (
                StaticNetwork {
                    mtu: Some(100),
                    ..good.clone()
                },
                "100",
            ),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn it_is_applied_again_and_changed() {
        in_own_network(async {
            if !crate::add_veth("one", "other").await {
                return;
            }
            let netlink = Netlink::open().unwrap();
            let mut wanted = StaticNetwork {
                interface: Selector::Name("one".into()),
                mtu: Some(1400),
                routes: vec![Route::default_through("10.0.0.1".parse().unwrap(), 5)],
                ..network("10.0.0.5/24")
            };
            for _ in 0..2 {
                let link = wanted.apply(&netlink).await.unwrap();
                assert_eq!((link.mtu, link.up), (1400, true));
            }
            wanted.addresses = vec!["10.0.0.6/24".parse().unwrap()];
            let link = wanted.apply(&netlink).await.unwrap();
            let addresses = netlink.addresses(link.index).await.unwrap();
            let given = addresses.iter().filter(|cidr| cidr.address().is_ipv4());
            assert!(given.eq(&wanted.addresses), "{addresses:?}");
        });
    }

    #[test]
    fn vlan_names_fit() {
        assert_eq!(vlan_name("eth0", 7), "eth0.7");
        assert_eq!(vlan_name("enp0s31f6abcd", 4094), "vlan4094");
    }
}
