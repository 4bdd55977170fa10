//! The node's network interface: a static configuration if the parameters contain one, otherwise
//! DHCP.
//!
//! The configuration comes from the parameters. The sealed configuration has a copy from the time
//! of enrolment, so that a later boot needs no parameters. This worker publishes the address at
//! which other nodes reach this one. A lost lease does not withdraw the address: the other nodes
//! have no better one until there is a new lease. The time servers of the lease are published before
//! the address, so that whoever has waited for that knows them; so is the address of the other family, which
//! only a static configuration has: the first of that family that is not link-local.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use hearth_api::console::{Milestone, Report};
use hearth_base::event::{self, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_enrolment::sealed::{SealedStore, Stored};
use hearth_host::layout::Root;
use hearth_host::{console, parameters};
use hearth_parameters::StaticNetwork;
use hearth_sys::cidr::Cidr;
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::files;
use hearth_sys::netlink::{Link, LinkMonitor, Netlink, Route};
use hearth_sys::pci::{self, Purpose};
use hearth_sys::static_network::{self, Device};

const SYS: &str = "/sys";
const METRIC: u32 = 100;
const PUBLIC: u32 = 0o644;

/// The network configuration of this boot; `None` means DHCP.
pub(crate) fn configuration(
    parameters: &parameters::Loaded,
    sealed: &SealedStore,
) -> Option<StaticNetwork> {
    if let Ok(Some(found)) = parameters {
        return found.parameters.network.clone();
    }
    match sealed.load() {
        Ok(Stored::Sealed(sealed)) => sealed.network().cloned(),
        // Enrolment reads the sealed configuration, too, and reports what is wrong with it.
        Ok(Stored::Absent | Stored::NeverCompleted) | Err(_) => None,
    }
}

/// The inputs and outputs of the network worker.
pub(crate) struct Network {
    /// `None` means DHCP.
    pub configuration: Option<StaticNetwork>,
    /// For the path of `resolv.conf`.
    pub root: Root,
    pub address: Arc<Writer<IpAddr>>,
    pub second_address: Arc<Writer<Option<IpAddr>>>,
    pub dhcp_time_servers: Arc<Writer<Vec<IpAddr>>>,
}

/// Brings the network up and keeps it up.
pub(crate) async fn run(ctx: Context, network: Arc<Network>) -> Outcome {
    let netlink = Netlink::open()?;
    netlink.set_loopback_up().await?;
    let device = device(network.configuration.as_ref());
    let link = tokio::select! {
        link = find_link(&netlink, device) => link?,
        () = ctx.cancelled() => return Ok(()),
    };
    tracing::info!(interface = link.name, "network interface");
    match &network.configuration {
        Some(fixed) => {
            as_applied(fixed).apply(&netlink, &link).await?;
            network.second_address.set(second(&fixed.addresses));
            publish(&network, fixed.addresses[0], &fixed.nameservers)?;
            ctx.healthy();
            ctx.cancelled().await;
            Ok(())
        }
        None => {
            network.second_address.set(None);
            lease(ctx, &network, link).await
        }
    }
}

/// The first address of another family than the first one, by which other machines can reach this one.
fn second(addresses: &[Cidr]) -> Option<IpAddr> {
    let mut addresses = addresses.iter().map(Cidr::address);
    let first = addresses.next()?;
    addresses.find(|address| {
        let is_local = match address {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        address.is_ipv4() != first.is_ipv4() && !is_local
    })
}

fn device(configuration: Option<&StaticNetwork>) -> Device {
    match configuration.and_then(|fixed| fixed.mac) {
        Some(mac) => Device::WithMac(mac.0),
        None => Device::Only,
    }
}

/// Waits for the device to appear: a driver may need time to probe it.
async fn find_link(netlink: &Netlink, device: Device) -> Result<Link, Failure> {
    let mut monitor = LinkMonitor::open()?;
    let mut said = false;
    loop {
        let links = netlink.list_links().await?;
        let candidates = match device.choose(&links) {
            Ok(link) => return Ok(link.clone()),
            Err(candidates) => candidates,
        };
        if !said {
            said = true;
            let without_driver = pci::without_driver(Path::new(SYS), Purpose::Network);
            let why = awaited(device, &candidates) + &without_driver;
            tracing::warn!("network setup: waiting for {why}");
            console::report(&Report::Waiting(why));
        }
        monitor.changed().await?;
    }
}

fn awaited(device: Device, candidates: &[&Link]) -> String {
    let names: Vec<&str> = candidates.iter().map(|link| link.name.as_str()).collect();
    match (device, names.len()) {
        (Device::WithMac(_), _) => "the interface with MAC address network_config.mac".to_owned(),
        (Device::Only, 0) => "an Ethernet interface".to_owned(),
        (Device::Only, _) => format!(
            "parameters that select an interface by network_config.mac; available: {}",
            names.join(", ")
        ),
    }
}

fn as_applied(fixed: &StaticNetwork) -> static_network::StaticNetwork {
    let routes = fixed.routes.iter().map(|route| Route {
        source: None,
        destination: route.destination,
        gateway: route.gateway,
        metric: METRIC,
    });
    static_network::StaticNetwork {
        vlan: fixed.vlan,
        addresses: fixed.addresses.clone(),
        routes: routes.collect(),
    }
}

async fn lease(ctx: Context, network: &Network, link: Link) -> Outcome {
    let (writer, leases) = event::value::<Option<Lease>>();
    let writer = Arc::new(writer);
    let interface = link.name;
    ctx.run("dhcp", move |ctx| {
        let (interface, writer) = (interface.clone(), writer.clone());
        async move {
            let options = dhcp::Options {
                metric: METRIC,
                ..dhcp::Options::default()
            };
            dhcp::run(ctx, &interface, options, writer).await
        }
    })?;
    ctx.healthy();
    let mut leases = leases.watch();
    loop {
        let lease = tokio::select! {
            lease = leases.next() => lease?,
            () = ctx.cancelled() => return Ok(()),
        };
        match lease {
            Some(lease) => {
                let servers: Vec<IpAddr> = lease
                    .name_servers
                    .iter()
                    .copied()
                    .map(IpAddr::from)
                    .collect();
                publish_time_servers(network, &lease);
                publish(network, lease.address, &servers)?;
            }
            None => tracing::warn!("lost the DHCP lease"),
        }
    }
}

/// Publishes the lease's time servers if they have changed. They stay when it is lost.
fn publish_time_servers(network: &Network, lease: &Lease) {
    let servers = lease.time_servers.iter().copied().map(IpAddr::from);
    let servers: Vec<IpAddr> = servers.collect();
    let before = network.dhcp_time_servers.value().get();
    if before.unwrap_or_default() != servers {
        network.dhcp_time_servers.set(servers);
    }
}

/// Writes `resolv.conf` and publishes the address if it has changed.
fn publish(network: &Network, cidr: Cidr, servers: &[IpAddr]) -> Outcome {
    let mut resolv_conf = String::new();
    for server in servers {
        // Writing to a string cannot fail.
        let _ = writeln!(resolv_conf, "nameserver {server}");
    }
    let path = network.root.ephemeral.resolv_conf();
    files::write_atomic(&path, resolv_conf.as_bytes(), PUBLIC)?;
    let address = cidr.address();
    let before = network.address.value().get();
    if before != Some(address) {
        tracing::info!("network address: {cidr}");
        network.address.set(address);
    }
    if before.is_none() {
        console::report(&Report::Reached(Milestone::Network, cidr.to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hearth_sys::netlink::LinkKind;

    use super::*;

    fn configuration(text: &str) -> StaticNetwork {
        StaticNetwork {
            mac: text.parse().ok(),
            addresses: vec!["192.0.2.10/24".parse().unwrap()],
            routes: vec![hearth_parameters::Route {
                destination: Cidr::ALL_V4,
                gateway: Some("192.0.2.1".parse().unwrap()),
            }],
            nameservers: Vec::new(),
            vlan: Some(7),
        }
    }

    #[test]
    fn the_parameters_name_a_device_or_leave_it_to_the_machine() {
        assert_eq!(device(None), Device::Only);
        assert_eq!(device(Some(&configuration(""))), Device::Only);
        let named = configuration("52:54:00:12:34:56");
        let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        assert_eq!(device(Some(&named)), Device::WithMac(mac));
    }

    #[test]
    fn a_node_has_an_address_of_the_other_family_that_others_can_use() {
        for (addresses, expected) in [
            (&["192.0.2.10/24"][..], None),
            (&["192.0.2.10/24", "198.51.100.1/24"], None),
            (&["192.0.2.10/24", "fe80::1/64"], None),
            (
                &["192.0.2.10/24", "fe80::1/64", "fd00::a/64", "fd00::b/64"],
                Some("fd00::a"),
            ),
            (&["fd00::a/64", "192.0.2.10/24"], Some("192.0.2.10")),
        ] {
            let addresses: Vec<Cidr> = addresses.iter().map(|cidr| cidr.parse().unwrap()).collect();
            let expected = expected.map(|address| address.parse().unwrap());
            assert_eq!(second(&addresses), expected, "{addresses:?}");
        }
    }

    #[test]
    fn all_of_the_parameters_is_applied() {
        let fixed = configuration("");
        let applied = as_applied(&fixed);
        assert_eq!(applied.vlan, fixed.vlan);
        assert_eq!(applied.addresses, fixed.addresses);
        let default = Route::default_through("192.0.2.1".parse().unwrap(), METRIC);
        assert_eq!(applied.routes, [default]);
    }

    #[test]
    fn whoever_waits_hears_what_for() {
        let link = |name: &str| Link {
            index: 2,
            name: name.to_owned(),
            mac: None,
            kind: LinkKind::Ethernet,
            up: false,
            carrier: false,
            mtu: 1500,
        };
        let (one, two) = (link("eth0"), link("eth1"));
        let why = awaited(Device::WithMac([2; 6]), &[]);
        assert!(why.contains("network_config.mac"), "{why}");
        assert_eq!(awaited(Device::Only, &[]), "an Ethernet interface");
        let why = awaited(Device::Only, &[&one, &two]);
        assert!(why.ends_with("available: eth0, eth1"), "{why}");
    }
}
