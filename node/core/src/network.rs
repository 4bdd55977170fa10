//! The node's one interface: static where the parameters say so, DHCP
//! otherwise.
//!
//! The configuration comes from the parameters; a node that has a sealed
//! configuration finds it there, too, as it was at its enrolment, so that a
//! later boot needs no parameters. What is published is the one address under
//! which other nodes reach this one. A lost lease does not take it back: the
//! others have no better one until there is a new lease.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::console::{Milestone, Report};
use hearth_base::event::{self, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_enrolment::sealed::{SealedStore, Stored};
use hearth_host::console;
use hearth_host::layout::Root;
use hearth_host::parameters::{self, StaticNetwork};
use hearth_sys::cidr::Cidr;
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::files;
use hearth_sys::netlink::{Link, LinkKind, LinkMonitor, Netlink, Route};

const METRIC: u32 = 100;
const PUBLIC: u32 = 0o644;

/// What this boot uses; `None` is DHCP.
pub fn configuration(
    parameters: &parameters::Loaded,
    sealed: &SealedStore,
) -> Option<StaticNetwork> {
    if let Ok(Some(found)) = parameters {
        return found.parameters.network.clone();
    }
    match sealed.load() {
        Ok(Stored::Sealed(sealed)) => sealed.network().cloned(),
        // Enrolment reads it as well, and says what is wrong.
        Ok(Stored::Absent | Stored::NeverCompleted) | Err(_) => None,
    }
}

/// What the worker works with.
pub struct Network {
    /// `None` is DHCP.
    pub configuration: Option<StaticNetwork>,
    /// Where name servers are written down.
    pub root: Root,
    /// Will be written.
    pub address: Arc<Writer<IpAddr>>,
}

/// Brings the network up and keeps it up.
pub async fn run(ctx: Context, network: Arc<Network>) -> Outcome {
    let netlink = Netlink::open()?;
    netlink.set_loopback_up().await?;
    let mac = network.configuration.as_ref().and_then(|fixed| fixed.mac);
    let link = tokio::select! {
        link = find_link(&netlink, mac.map(|mac| mac.0)) => link?,
        () = ctx.cancelled() => return Ok(()),
    };
    tracing::info!(interface = link.name, "network interface");
    match &network.configuration {
        Some(fixed) => {
            configure(&netlink, &link, fixed).await?;
            let address = fixed.addresses[0];
            let servers: Vec<IpAddr> = fixed.nameservers.clone();
            publish(&network, address, &servers)?;
            ctx.healthy();
            ctx.cancelled().await;
            Ok(())
        }
        None => lease(ctx, &network, link).await,
    }
}

/// The interface of this address, or the only Ethernet interface there is.
/// Waits for it to appear: a driver may take its time.
async fn find_link(netlink: &Netlink, mac: Option<[u8; 6]>) -> Result<Link, Failure> {
    let mut monitor = LinkMonitor::open()?;
    let mut said = false;
    loop {
        let links = netlink.list_links().await?;
        let wanted = |link: &&Link| match mac {
            Some(mac) => link.mac == Some(mac),
            None => link.kind == LinkKind::Ethernet,
        };
        let found: Vec<&Link> = links.iter().filter(wanted).collect();
        if let [only] = found[..] {
            return Ok(only.clone());
        }
        if !std::mem::replace(&mut said, true) {
            let names: Vec<&str> = found.iter().map(|link| link.name.as_str()).collect();
            let why = match (mac, names.len()) {
                (Some(_), _) => "the interface that network_config.mac names".to_owned(),
                (None, 0) => "an Ethernet interface".to_owned(),
                (None, _) => format!(
                    "parameters that name one interface by network_config.mac; there are {}",
                    names.join(", ")
                ),
            };
            tracing::warn!("the network waits for {why}");
            console::report(&Report::Waiting(why));
        }
        monitor.changed().await?;
    }
}

async fn configure(netlink: &Netlink, link: &Link, fixed: &StaticNetwork) -> Outcome {
    netlink.set_up(link.index).await?;
    let index = match fixed.vlan {
        Some(vlan) => {
            let name = format!("{}.{vlan}", link.name);
            netlink.add_vlan(link.index, &name, vlan).await?.index
        }
        None => link.index,
    };
    for address in &fixed.addresses {
        netlink.add_address(index, *address).await?;
    }
    for route in &fixed.routes {
        let route = Route {
            source: None,
            destination: route.destination,
            gateway: route.gateway,
            metric: METRIC,
        };
        netlink.replace_route(index, route).await?;
    }
    Ok(())
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
                publish(network, lease.address, &servers)?;
            }
            None => tracing::warn!("the DHCP lease is lost"),
        }
    }
}

/// Tells everyone, once for each new address.
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
        tracing::info!("address {cidr}");
        network.address.set(address);
    }
    if before.is_none() {
        console::report(&Report::Reached(Milestone::Network, cidr.to_string()));
    }
    Ok(())
}
