//! Ethernet devices, and the interfaces that are made of them: bonds and VLANs.
//!
//! The selection is a pure function of the existing links; the caller decides how long to wait for a device. It selects
//! a physical device, never a virtual one on top of it: a VLAN has the hardware address of its device, so after a restart two
//! links have that address. A device in a bond has the bond's address; it is known by the permanent one.

use std::collections::BTreeMap;

use super::netlink::{BondMode, Link, LinkKind, Netlink, NetlinkError};

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
                    Self::WithMac(mac) => link.permanent_mac.or(link.mac) == Some(*mac),
                }
        };
        let meant: Vec<&Link> = links.iter().filter(is_meant).collect();
        match meant[..] {
            [only] => Ok(only),
            _ => Err(meant),
        }
    }
}

/// Makes one interface of several devices, with the address of the first, and sets all of them up; again it is completed.
pub async fn bond(
    netlink: &Netlink,
    name: &str,
    mode: BondMode,
    devices: &[Link],
) -> Result<Link, NetlinkError> {
    let mac = devices
        .first()
        .and_then(|first| first.permanent_mac.or(first.mac));
    let bond = netlink.add_bond(name, mode, mac).await?;
    for device in devices {
        if device.controller != Some(bond.index) {
            netlink.join_bond(device.index, bond.index).await?;
        }
        netlink.set_up(device.index).await?;
    }
    netlink.set_up(bond.index).await?;
    netlink.link(bond.index).await
}

/// Makes the interface of a VLAN on a device or a bond, and sets both up; an existing one is not changed.
pub async fn vlan(netlink: &Netlink, device: &Link, vlan: u16) -> Result<Link, NetlinkError> {
    netlink.set_up(device.index).await?;
    let name = vlan_name(device, vlan);
    netlink.add_vlan(device.index, &name, vlan).await
}

/// The MTU of each Ethernet device, in bytes, by its index.
pub type Mtus = BTreeMap<u32, u32>;

/// The MTUs that the Ethernet devices have now.
///
/// # Errors
/// If the kernel does not list the devices.
pub async fn mtus(netlink: &Netlink) -> Result<Mtus, NetlinkError> {
    let links = netlink.list_links().await?.into_iter();
    let devices = links.filter(|link| link.kind == LinkKind::Ethernet);
    Ok(devices.map(|link| (link.index, link.mtu)).collect())
}

/// Takes the interfaces to other machines down to what they were at boot: bonds and VLANs are removed; Ethernet devices lose
/// their addresses and routes, are set down, and get the MTUs `at_boot`.
///
/// Nothing else on a node makes bonds and VLANs: those of pods are in the pods' network namespaces.
///
/// # Errors
/// If the kernel refuses a change.
pub async fn reset(netlink: &Netlink, at_boot: &Mtus) -> Result<(), NetlinkError> {
    let links = netlink.list_links().await?;
    for link in links.iter().filter(|link| link.kind == LinkKind::Vlan) {
        netlink.remove_link(&link.name).await?;
    }
    for link in links.iter().filter(|link| link.kind == LinkKind::Bond) {
        netlink.remove_link(&link.name).await?;
    }
    for link in links.iter().filter(|link| link.kind == LinkKind::Ethernet) {
        netlink.set_ipv4_addresses(link.index, &[]).await?;
        netlink.set_down(link.index).await?;
        if let Some(mtu) = other_mtu(link, at_boot) {
            netlink.set_mtu(link.index, mtu).await?;
        }
    }
    Ok(())
}

/// The MTU at boot of a device that has another one now.
fn other_mtu(link: &Link, at_boot: &Mtus) -> Option<u32> {
    let mtu = at_boot.get(&link.index);
    mtu.copied().filter(|mtu| *mtu != link.mtu)
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
            permanent_mac: None,
            controller: None,
            kind,
            up: false,
            carrier: false,
            mtu: 1500,
        }
    }

    #[test]
    fn the_device_is_chosen_or_all_that_might_be() {
        let lo = || link(1, "lo", LinkKind::Loopback, [0; 6]);
        let eth0 = || link(2, "eth0", LinkKind::Ethernet, MAC);
        let eth1 = || link(3, "eth1", LinkKind::Ethernet, [3; 6]);
        let twin = || link(4, "eth2", LinkKind::Ethernet, MAC);
        let vlan = || link(5, "eth0.7", LinkKind::Vlan, MAC);
        let pods = || link(6, "pods", LinkKind::Virtual, [6; 6]);
        let without_mac = || Link {
            mac: None,
            ..link(7, "ib0", LinkKind::Other, MAC)
        };
        let in_bond = || Link {
            permanent_mac: Some([8; 6]),
            controller: Some(9),
            ..link(8, "eth8", LinkKind::Ethernet, MAC)
        };
        let by_mac = Device::WithMac(MAC);
        type Names = Result<&'static str, &'static [&'static str]>;
        let table: [(Device, Vec<Link>, Names); 15] = [
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
            // A device in a bond has the bond's address, and its own permanent one.
            (by_mac, vec![eth0(), in_bond()], Ok("eth0")),
            (Device::WithMac([8; 6]), vec![eth0(), in_bond()], Ok("eth8")),
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
    fn a_vlan_is_made_once() {
        in_own_network(async {
            if !crate::testing::add_veth("one", "other").await {
                return;
            }
            let netlink = Netlink::open().unwrap();
            let device = netlink.link_named("one").await.unwrap();
            let first = match vlan(&netlink, &device, 7).await {
                Ok(link) => link,
                Err(error) => {
                    assert!(error.to_string().contains("VLAN 7"), "{error}");
                    eprintln!("skipped: cannot create VLANs ({error})");
                    return;
                }
            };
            assert_eq!((&first.name[..], first.mac), ("one.7", device.mac));
            assert_eq!(first.kind, LinkKind::Vlan);
            let again = vlan(&netlink, &device, 7).await.unwrap();
            assert_eq!(again.index, first.index);
            reset(&netlink, &Mtus::new()).await.unwrap();
            assert!(netlink.link_named("one.7").await.is_err());
            assert!(netlink.link_named("one").await.is_ok());
        });
    }

    #[test]
    fn a_device_has_the_mtu_of_the_boot_again() {
        let eth0 = || link(2, "eth0", LinkKind::Ethernet, MAC);
        let jumbo = Link {
            mtu: 9000,
            ..eth0()
        };
        let at_boot = Mtus::from([(eth0().index, eth0().mtu), (7, 1400)]);
        assert_eq!(other_mtu(&jumbo, &at_boot), Some(eth0().mtu));
        assert_eq!(other_mtu(&eth0(), &at_boot), None);
        // One that was plugged in later.
        assert_eq!(other_mtu(&jumbo, &Mtus::new()), None);
    }

    #[test]
    fn a_bond_is_made_once_and_completed() {
        in_own_network(async {
            for (one, other) in [("one", "far1"), ("two", "far2")] {
                if !crate::testing::add_veth(one, other).await {
                    return;
                }
            }
            let netlink = Netlink::open().unwrap();
            let mut devices = Vec::new();
            for name in ["one", "two"] {
                devices.push(netlink.link_named(name).await.unwrap());
            }
            let mode = BondMode::ActiveBackup;
            let first = match bond(&netlink, "uplink0", mode, &devices[..1]).await {
                Ok(link) => link,
                Err(error) => {
                    assert!(error.to_string().contains("bond uplink0"), "{error}");
                    eprintln!("skipped: cannot create bonds ({error})");
                    return;
                }
            };
            assert_eq!((first.kind, first.mac), (LinkKind::Bond, devices[0].mac));
            let again = bond(&netlink, "uplink0", mode, &devices).await.unwrap();
            assert_eq!(again.index, first.index);
            let second = netlink.link_named("two").await.unwrap();
            assert_eq!((second.controller, second.up), (Some(first.index), true));
            reset(&netlink, &Mtus::new()).await.unwrap();
            assert!(netlink.link_named("uplink0").await.is_err());
            assert_eq!(netlink.link_named("two").await.unwrap().controller, None);
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
