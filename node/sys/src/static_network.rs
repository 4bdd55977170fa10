//! Static network configuration, instead of DHCP: selects the interface and applies the
//! configuration.
//!
//! The selection is a pure function of the existing links; the caller decides how long to wait for
//! an interface. It selects a physical device, never a virtual one on top of it: a VLAN has the
//! hardware address of its device, so after a restart two links have that address.
//!
//! Applying the configuration is idempotent. It makes the given IPv4 addresses the only ones of the
//! interface, so that a change leaves no old ones behind; IPv6 addresses are added to those that
//! the kernel assigns itself. The values are not validated here: the caller validates external
//! input, and the kernel rejects contradictions by name.

use super::cidr::Cidr;
use super::netlink::{Link, LinkKind, Netlink, NetlinkError, Route};

/// The kernel's IFNAMSIZ, without the terminating zero.
const LONGEST_NAME: usize = 15;

/// Selects an Ethernet device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The only Ethernet device.
    Only,
    /// The device with this hardware address.
    WithMac([u8; 6]),
}

impl Device {
    /// The selected device; on error, all candidates: none, or several.
    pub fn choose<'a>(&self, links: &'a [Link]) -> Result<&'a Link, Vec<&'a Link>> {
        let is_meant = |link: &&Link| {
            link.kind == LinkKind::Ethernet
                && match self {
                    Self::Only => true,
                    Self::WithMac(mac) => link.mac == Some(*mac),
                }
        };
        let meant: Vec<&Link> = links.iter().filter(is_meant).collect();
        match meant[..] {
            [only] => Ok(only),
            _ => Err(meant),
        }
    }
}

/// The configuration of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticNetwork {
    /// The VLAN ID, 1 to 4094; the addresses are then those of the VLAN interface.
    pub vlan: Option<u16>,
    /// The interface's addresses.
    pub addresses: Vec<Cidr>,
    /// Routes in addition to those that the addresses imply, in the order in which they are added.
    pub routes: Vec<Route>,
}

impl StaticNetwork {
    /// Applies the configuration to a device; returns the configured interface.
    pub async fn apply(&self, netlink: &Netlink, device: &Link) -> Result<Link, NetlinkError> {
        netlink.set_up(device.index).await?;
        let index = match self.vlan {
            Some(vlan) => {
                let name = vlan_name(device, vlan);
                netlink.add_vlan(device.index, &name, vlan).await?.index
            }
            None => device.index,
        };
        netlink.set_ipv4_addresses(index, &self.addresses).await?;
        for address in self.addresses.iter().filter(|a| a.address().is_ipv6()) {
            netlink.add_address(index, *address).await?;
        }
        for route in &self.routes {
            netlink.replace_route(index, *route).await?;
        }
        netlink.link(index).await
    }
}

/// A unique name for the VLAN of a device.
///
/// The usual name is too long if the device's name is long. Then the device's index replaces its
/// name, and the dash keeps the two kinds of names distinct.
fn vlan_name(device: &Link, vlan: u16) -> String {
    let name = format!("{}.{vlan}", device.name);
    if name.len() <= LONGEST_NAME {
        name
    } else {
        format!("v{:x}-{vlan}", device.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_own_network;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn link(index: u32, name: &str, kind: LinkKind, mac: [u8; 6]) -> Link {
        Link {
            index,
            name: name.into(),
            mac: Some(mac),
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
    fn the_device_is_chosen_or_all_that_might_be() {
        let lo = || link(1, "lo", LinkKind::Loopback, [0; 6]);
        let eth0 = || link(2, "eth0", LinkKind::Ethernet, MAC);
        let eth1 = || link(3, "eth1", LinkKind::Ethernet, [3; 6]);
        let twin = || link(4, "eth2", LinkKind::Ethernet, MAC);
        let vlan = || link(5, "eth0.7", LinkKind::Virtual, MAC);
        let pods = || link(6, "pods", LinkKind::Virtual, [6; 6]);
        let without_mac = || Link {
            mac: None,
            ..link(7, "ib0", LinkKind::Other, MAC)
        };
        let by_mac = Device::WithMac(MAC);
        type Names = Result<&'static str, &'static [&'static str]>;
        let table: [(Device, Vec<Link>, Names); 13] = [
            (Device::Only, vec![], Err(&[])),
            (Device::Only, vec![lo(), pods()], Err(&[])),
            (Device::Only, vec![lo(), eth0()], Ok("eth0")),
            (Device::Only, vec![lo(), eth0(), vlan()], Ok("eth0")),
            (
                Device::Only,
                vec![without_mac(), eth1(), pods()],
                Ok("eth1"),
            ),
            (Device::Only, vec![eth0(), eth1()], Err(&["eth0", "eth1"])),
            (by_mac, vec![lo(), eth1()], Err(&[])),
            (by_mac, vec![lo(), eth0()], Ok("eth0")),
            (by_mac, vec![lo(), eth1(), eth0(), pods()], Ok("eth0")),
            // After a restart of the runnable: the VLAN already exists.
            (by_mac, vec![lo(), eth0(), vlan()], Ok("eth0")),
            (by_mac, vec![vlan(), eth1(), eth0()], Ok("eth0")),
            // Only a virtual device whose physical device is gone.
            (by_mac, vec![lo(), vlan(), without_mac()], Err(&[])),
            (by_mac, vec![eth0(), twin()], Err(&["eth0", "eth2"])),
        ];
        for (device, links, expected) in table {
            let chosen = device.choose(&links);
            let names = chosen.map(|link| &link.name[..]);
            let names = names.map_err(|all| all.iter().map(|l| &l.name[..]).collect::<Vec<_>>());
            let expected = expected.map_err(<[_]>::to_vec);
            assert_eq!(names, expected, "{device:?} of {links:?}");
        }
    }

    #[test]
    fn it_is_applied_again_and_changed() {
        in_own_network(async {
            if !crate::testing::add_veth("one", "other").await {
                return;
            }
            let netlink = Netlink::open().unwrap();
            let device = netlink.link_named("one").await.unwrap();
            let on_link = Route {
                destination: "192.0.2.1/32".parse().unwrap(),
                gateway: None,
                metric: 5,
                source: None,
            };
            let mut expected = StaticNetwork {
                // The second route uses a gateway that is reachable by the first one.
                routes: vec![
                    on_link,
                    Route::default_through("192.0.2.1".parse().unwrap(), 5),
                ],
                ..network("10.0.0.5/24")
            };
            expected.addresses.push("fd00::5/64".parse().unwrap());
            for _ in 0..2 {
                let link = expected.apply(&netlink, &device).await.unwrap();
                assert_eq!((link.index, link.up), (device.index, true));
                let addresses = netlink.addresses(link.index).await.unwrap();
                for address in &expected.addresses {
                    assert!(addresses.contains(address), "{addresses:?}");
                }
                let table = std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
                assert_eq!(
                    table.matches("one\t00000000\t010200C0").count(),
                    1,
                    "{table}"
                );
            }
            expected.addresses = vec!["10.0.0.6/24".parse().unwrap()];
            let link = expected.apply(&netlink, &device).await.unwrap();
            let addresses = netlink.addresses(link.index).await.unwrap();
            let given = addresses.iter().filter(|cidr| cidr.address().is_ipv4());
            assert!(given.eq(&expected.addresses), "{addresses:?}");

            expected.routes = vec![Route::default_through("172.16.0.1".parse().unwrap(), 5)];
            let error = expected.apply(&netlink, &device).await.unwrap_err();
            assert!(error.to_string().contains("172.16.0.1"), "{error}");
        });
    }

    #[test]
    fn a_vlan_is_made_once_and_has_the_addresses() {
        in_own_network(async {
            if !crate::testing::add_veth("one", "other").await {
                return;
            }
            let netlink = Netlink::open().unwrap();
            let device = netlink.link_named("one").await.unwrap();
            let tagged = StaticNetwork {
                vlan: Some(7),
                ..network("10.0.0.5/24")
            };
            let first = match tagged.apply(&netlink, &device).await {
                Ok(link) => link,
                Err(error) => {
                    assert!(error.to_string().contains("VLAN 7"), "{error}");
                    eprintln!("skipped: cannot create VLANs ({error})");
                    return;
                }
            };
            assert_eq!((&first.name[..], first.mac), ("one.7", device.mac));
            assert_eq!(first.kind, LinkKind::Virtual);
            let again = tagged.apply(&netlink, &device).await.unwrap();
            assert_eq!(again.index, first.index);
            let addresses = netlink.addresses(device.index).await.unwrap();
            assert!(!addresses.contains(&tagged.addresses[0]), "{addresses:?}");
        });
    }

    #[test]
    fn vlan_names_fit_and_are_told_apart() {
        let device = |index, name| link(index, name, LinkKind::Ethernet, MAC);
        let table = [
            (device(2, "eth0"), 7, "eth0.7"),
            (device(2, "enp0s31f6a"), 4094, "enp0s31f6a.4094"),
            (device(2, "enp0s31f6ab"), 4094, "v2-4094"),
            (device(3, "enp0s31f6ac"), 4094, "v3-4094"),
            (device(2, "enp0s31f6ab"), 71, "enp0s31f6ab.71"),
            (device(2, "v2"), 4094, "v2.4094"),
            (device(u32::MAX, "enp0s31f6abcde"), 4094, "vffffffff-4094"),
        ];
        let mut names = std::collections::BTreeSet::new();
        for (device, vlan, expected) in table {
            let name = vlan_name(&device, vlan);
            assert_eq!(name, expected);
            assert!(name.len() <= LONGEST_NAME);
            assert!(names.insert(name));
        }
    }
}
