//! The device of a configured interface: an Ethernet device, or a bond of several, as soon as it exists.
//!
//! A driver may need time to probe a device, and one may be plugged in later. Until then the machine says what it waits for.
//! A bond begins with the devices that exist, and gets the others when they come.

use std::path::Path;
use std::time::Duration;

use hearth_api::console::Report;
use hearth_host::console;
use hearth_parameters::{self as parameters, Interface, Mac};
use hearth_sys::devices::{self, Device};
use hearth_sys::netlink::{BondMode, Link, LinkMonitor, Netlink, NetlinkError};
use hearth_sys::pci::{self, Purpose};
use tokio::time::{Instant, timeout};

const SYS: &str = "/sys";
/// How often a reason for waiting is repeated.
const REPETITION: Duration = Duration::from_secs(60);
/// How long a bond waits for all of its devices before it begins with those that exist.
const PATIENCE: Duration = Duration::from_secs(5);

/// The device of an interface, once it exists, and of a bond the devices that do not yet.
pub(super) async fn get(
    netlink: &Netlink,
    interface: &Interface,
    bond: &str,
) -> Result<(Link, Vec<Mac>), NetlinkError> {
    match &interface.device {
        parameters::Device::Only => Ok((find(netlink, Device::Only).await?, Vec::new())),
        parameters::Device::WithMac(mac) => {
            Ok((find(netlink, Device::WithMac(mac.0)).await?, Vec::new()))
        }
        parameters::Device::Bond { macs, mode } => {
            let mode = match mode {
                parameters::BondMode::ActiveBackup => BondMode::ActiveBackup,
                parameters::BondMode::Lacp => BondMode::Lacp,
            };
            let (found, missing) = find_all(netlink, macs).await?;
            let bond = devices::bond(netlink, bond, mode, &found).await?;
            Ok((bond, missing))
        }
    }
}

/// Waits for a device to appear: a driver may need time to probe it.
async fn find(netlink: &Netlink, device: Device) -> Result<Link, NetlinkError> {
    let mut monitor = LinkMonitor::open()?;
    loop {
        let links = netlink.list_links().await?;
        let candidates = match device.choose(&links) {
            Ok(link) => return Ok(link.clone()),
            Err(candidates) => candidates,
        };
        let why = awaited(device, &candidates);
        await_change(&mut monitor, &why).await?;
    }
}

/// Waits for the devices of a bond: for one of them, and a while for the others.
async fn find_all(netlink: &Netlink, macs: &[Mac]) -> Result<(Vec<Link>, Vec<Mac>), NetlinkError> {
    let mut monitor = LinkMonitor::open()?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let links = netlink.list_links().await?;
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for mac in macs {
            match Device::WithMac(mac.0).choose(&links) {
                Ok(link) => found.push(link.clone()),
                Err(_) => missing.push(*mac),
            }
        }
        let is_late = Instant::now() >= deadline;
        if missing.is_empty() || (is_late && !found.is_empty()) {
            return Ok((found, missing));
        }
        if is_late {
            let macs: Vec<String> = missing.iter().map(Mac::to_string).collect();
            let why = format!(
                "a device of the bond with MAC address {}",
                macs.join(" or ")
            );
            await_change(&mut monitor, &why).await?;
        } else {
            let left = deadline.saturating_duration_since(Instant::now());
            // After that the loop goes on with what there is.
            if let Ok(changed) = timeout(left, monitor.changed()).await {
                changed?;
            }
        }
    }
}

/// Adds the devices to a bond that were missing when it was made. Returns only on an error.
pub(super) async fn join_late(bond: &Link, mut missing: Vec<Mac>) -> NetlinkError {
    let join = async {
        let netlink = Netlink::open()?;
        let mut monitor = LinkMonitor::open()?;
        while !missing.is_empty() {
            let links = netlink.list_links().await?;
            let mut still = Vec::new();
            for mac in missing {
                match Device::WithMac(mac.0).choose(&links) {
                    Ok(link) => {
                        netlink.join_bond(link.index, bond.index).await?;
                        netlink.set_up(link.index).await?;
                        tracing::info!(bond = bond.name, device = link.name, "joined the bond");
                    }
                    Err(_) => still.push(mac),
                }
            }
            missing = still;
            monitor.changed().await?;
        }
        Ok(())
    };
    match join.await {
        Ok(()) => std::future::pending().await,
        Err(error) => error,
    }
}

fn awaited(device: Device, candidates: &[&Link]) -> String {
    let names: Vec<&str> = candidates.iter().map(|link| link.name.as_str()).collect();
    match (device, names.len()) {
        (Device::WithMac(mac), _) => {
            let without_driver = pci::without_driver(Path::new(SYS), Purpose::Network);
            format!(
                "an Ethernet device with MAC address {}{without_driver}",
                Mac(mac)
            )
        }
        (Device::Only, 0) => none_found(),
        (Device::Only, _) => format!(
            "parameters that select an interface by network_config.mac; available: {}",
            names.join(", ")
        ),
    }
}

/// What a machine without any Ethernet device waits for.
pub(super) fn none_found() -> String {
    "an Ethernet interface".to_owned() + &pci::without_driver(Path::new(SYS), Purpose::Network)
}

/// Says what is awaited, and waits for a change of the links, or until it has to be said again.
pub(super) async fn await_change(monitor: &mut LinkMonitor, why: &str) -> Result<(), NetlinkError> {
    say(why);
    match timeout(REPETITION, monitor.changed()).await {
        Ok(changed) => changed,
        Err(_) => Ok(()),
    }
}

pub(super) fn say(why: &str) {
    tracing::warn!("network setup: waiting for {why}");
    console::report(&Report::Waiting(why.to_owned()));
}

/// A VLAN cannot have a larger MTU than its device.
pub(super) async fn raise_mtu(
    netlink: &Netlink,
    device: &Link,
    mtu: Option<u16>,
) -> Result<(), NetlinkError> {
    match mtu.map(u32::from) {
        Some(mtu) if device.mtu < mtu => netlink.set_mtu(device.index, mtu).await,
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use hearth_sys::netlink::LinkKind;

    use super::*;

    fn link(name: &str) -> Link {
        Link {
            index: 2,
            name: name.to_owned(),
            mac: None,
            permanent_mac: None,
            controller: None,
            kind: LinkKind::Ethernet,
            up: false,
            carrier: false,
            mtu: 1500,
        }
    }

    #[test]
    fn whoever_waits_hears_what_for() {
        let (one, two) = (link("eth0"), link("eth1"));
        let why = awaited(Device::WithMac([2; 6]), &[]);
        assert!(why.contains("02:02:02:02:02:02"), "{why}");
        assert!(awaited(Device::Only, &[]).starts_with("an Ethernet interface"));
        let why = awaited(Device::Only, &[&one, &two]);
        assert!(why.ends_with("available: eth0, eth1"), "{why}");
    }
}
