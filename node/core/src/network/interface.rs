//! One interface: from a device, or what is made of several, to addresses.
//!
//! An interface is followed for ever. What it lacks, or what the kernel has refused, is said on the console as long as it is so, and
//! tried again: a device may be plugged in, a cable may come, a router may get the address that the parameters name. Nothing that was
//! true once is repeated after it has changed: each attempt begins with the links that exist.
//!
//! An automatic interface runs the DHCP client, watches what the kernel makes of the advertisements of IPv6 routers, reads the name
//! servers in them, and runs the DHCPv6 client where they say so. One with given addresses has these only.

use std::net::IpAddr;

use hearth_api::chain;
use hearth_base::event::{self, Value};
use hearth_base::supervisor::{Backoff, Failure};
use hearth_parameters::{self as parameters, Interface};
use hearth_sys::addressing::Addressing;
use hearth_sys::cidr::Cidr;
use hearth_sys::dhcp::{self, Lease};
use hearth_sys::netlink::{Link, LinkMonitor, Netlink, NetlinkError, Route};
use hearth_sys::router_advertisements::{Learned, Listener};
use hearth_sys::{devices, dhcp6, hostname, sysctl};
use tokio::sync::mpsc;

use super::choice::Seen;
use super::device::say;
use super::report::{News, Reporter};
use super::{claims, device};

/// The metric of the routes of the first interface; it grows with the order.
const METRIC: u32 = 100;

/// What all interfaces share.
#[derive(Clone)]
pub(super) struct Source {
    /// Networks that are used otherwise.
    pub reserved: Value<Vec<Cidr>>,
    /// What each interface has or lacks, by its order.
    pub tell: mpsc::Sender<(usize, News)>,
}

/// An interface, and its place in the order of preference.
pub(super) struct Followed {
    order: usize,
    what: What,
}

enum What {
    /// A device, until it is gone.
    Device { index: u32, name: String },
    /// As configured; `bond` is the name of the interface if it is one of several devices.
    Configured { interface: Interface, bond: String },
}

/// The interface does not exist any more.
struct Gone;

impl Followed {
    /// A device that is not configured, by DHCP.
    pub(super) fn device(link: &Link) -> Self {
        Self {
            // An index is unique, and lower for devices that were found earlier.
            order: link.index as usize,
            what: What::Device {
                index: link.index,
                name: link.name.clone(),
            },
        }
    }

    /// The configured interface at this place.
    pub(super) fn configured(order: usize, all: &[Interface]) -> Self {
        let interface = all[order].clone();
        // Several VLANs of one bond share it.
        let same = |other: &Interface| other.device == interface.device;
        let first = all.iter().position(same).unwrap_or(order);
        Self {
            order,
            what: What::Configured {
                bond: format!("uplink{first}"),
                interface,
            },
        }
    }

    fn name(&self) -> String {
        match &self.what {
            What::Device { name, .. } => name.clone(),
            What::Configured { interface, bond } => {
                let device = match &interface.device {
                    parameters::Device::Only => "the only Ethernet device".to_owned(),
                    parameters::Device::WithMac(mac) => format!("with MAC address {mac}"),
                    parameters::Device::Bond { .. } => format!("{bond} (a bond)"),
                };
                match interface.vlan {
                    Some(vlan) => format!("{device}, VLAN {vlan}"),
                    None => device,
                }
            }
        }
    }

    fn metric(&self) -> u32 {
        METRIC + self.order as u32
    }
}

/// Follows an interface; a device only until it is gone.
pub(super) async fn follow(source: Source, one: Followed) {
    let backoff = Backoff::default();
    let mut failures = 0_u32;
    let reporter = Reporter {
        order: one.order,
        to: source.tell.clone(),
    };
    loop {
        match attempt(&source, &one, &reporter).await {
            Ok(Gone) => {
                failures = 0;
                tracing::warn!("network interface {}: it is gone", one.name());
                reporter.tell(News::Has(Seen::default())).await;
                if matches!(one.what, What::Device { .. }) {
                    return;
                }
            }
            Err(failure) => {
                failures = failures.saturating_add(1);
                let why = format!("network interface {}: {}", one.name(), failure);
                say(&why);
                reporter.tell(News::Lacks(why)).await;
                tokio::time::sleep(backoff.delay(failures)).await;
            }
        }
    }
}

/// Returns when the interface is gone.
async fn attempt(source: &Source, one: &Followed, reporter: &Reporter) -> Result<Gone, Failure> {
    // Of its own: the kernel refuses a listing while another one runs on the same connection.
    let netlink = &Netlink::open()?;
    match &one.what {
        What::Device { index, .. } => {
            let link = netlink.link(*index).await?;
            accept_advertisements(&link);
            let shared = (source, netlink);
            automatic(shared, (reporter, one.metric()), &link, (Vec::new(), None)).await
        }
        What::Configured { interface, bond } => {
            let (device, missing) = device::get(netlink, interface, bond).await?;
            let link = match interface.vlan {
                Some(vlan) => {
                    device::raise_mtu(netlink, &device, interface.mtu).await?;
                    devices::vlan(netlink, &device, vlan).await?
                }
                None => device.clone(),
            };
            accept_advertisements(&link);
            netlink.set_up(link.index).await?;
            let routes = routes(interface, one.metric());
            let mtu = interface.mtu.map(u32::from);
            let kept = async {
                if interface.addresses.is_empty() {
                    let shared = (source, netlink);
                    automatic(shared, (reporter, one.metric()), &link, (routes, mtu)).await
                } else {
                    let addressing = Addressing {
                        addresses: interface.addresses.clone(),
                        routes,
                        mtu,
                    };
                    fixed(netlink, reporter, &link, &addressing).await
                }
            };
            tokio::select! {
                end = kept => end,
                error = device::join_late(&device, missing) => Err(error.into()),
            }
        }
    }
}

/// A node with pods of IPv6 is a router, which ignores the advertisements of others, and forgets the routes that it has from
/// them, unless it is told otherwise before.
fn accept_advertisements(link: &Link) {
    if let Err(error) = sysctl::set_of_link("ipv6", &link.name, "accept_ra", "2") {
        tracing::warn!("{}", chain(&error));
    }
}

fn routes(interface: &Interface, metric: u32) -> Vec<Route> {
    let routes = interface.routes.iter().map(|route| Route {
        source: None,
        destination: route.destination,
        gateway: route.gateway,
        metric,
    });
    routes.collect()
}

/// An interface with given addresses.
async fn fixed(
    netlink: &Netlink,
    reporter: &Reporter,
    link: &Link,
    addressing: &Addressing,
) -> Result<Gone, Failure> {
    // Opened before the interface is read, so that no change is missed.
    let mut monitor = LinkMonitor::open()?;
    let applied = addressing
        .apply(netlink, link, &Addressing::default())
        .await;
    let found = netlink.addresses(link.index).await?;
    if addressing.addresses.iter().all(|it| found.contains(it)) {
        let seen = Seen {
            interface: link.name.clone(),
            addresses: reachable(&addressing.addresses),
            leads_out: addressing.has_default_route(),
            mtu: netlink.link(link.index).await?.mtu,
            ..Seen::default()
        };
        reporter.tell(News::Has(seen)).await;
    }
    // A route that was refused does not cost the node its address, but it is tried again.
    applied?;
    reporter.tell(News::LacksNothing).await;
    let is_it = |other: &Link| other.index == link.index;
    let exists = async {
        while netlink.list_links().await?.iter().any(is_it) {
            monitor.changed().await?;
        }
        Ok(Gone)
    };
    let addresses = addressing.addresses.iter().map(Cidr::address);
    let watched = addresses.map(|address| claims::watch(reporter, link, address));
    let watched = async {
        futures::future::join_all(watched).await;
        std::future::pending().await
    };
    tokio::select! {
        end = exists => end,
        end = watched => end,
    }
}

/// Those by which other machines can reach this one.
fn reachable(addresses: &[Cidr]) -> Vec<Cidr> {
    let is_local = |cidr: &&Cidr| match cidr.address() {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let reachable: Vec<Cidr> = addresses
        .iter()
        .filter(|it| !is_local(it))
        .copied()
        .collect();
    // What was configured is meant, even if it is of this link only.
    if reachable.is_empty() {
        addresses.to_vec()
    } else {
        reachable
    }
}

/// An interface that gets its addresses from servers and routers.
async fn automatic(
    (source, netlink): (&Source, &Netlink),
    (reporter, metric): (&Reporter, u32),
    link: &Link,
    (routes, mtu): (Vec<Route>, Option<u32>),
) -> Result<Gone, Failure> {
    let leads_out = routes.iter().any(|route| route.destination.is_all());
    let options = dhcp::Options {
        host_name: hostname::of_node,
        metric,
        routes,
        mtu,
        reserved: source.reserved.clone(),
    };
    let (offer, offered) = event::value();
    let options6 = dhcp6::Options {
        offered,
        reserved: source.reserved.clone(),
    };
    let mut monitor = LinkMonitor::with_advertisements()?;
    let mut client = dhcp::Client::open(&link.name, options).await?;
    let mut client6 = dhcp6::Client::open(link, options6)?;
    let mut routers = Listener::open(link.index, link.mac.unwrap_or_default())?;
    reporter.tell(News::LacksNothing).await;
    // The receivers live as long as the clients.
    let (tell, mut leases) = mpsc::unbounded_channel();
    let run = client.run(|lease| drop(tell.send(lease.cloned())));
    let (tell6, mut leases6) = mpsc::unbounded_channel();
    let run6 = client6.run(|lease| drop(tell6.send(lease.cloned())));
    tokio::pin!(run, run6);
    // A boot waits for the lease, so the client does not wait for this.
    let kernels = tokio::select! {
        error = &mut run => return Err(error.into()),
        kernels = Kernels::read(netlink, link) => kernels?,
    };
    let Some(kernels) = kernels else {
        return Ok(Gone);
    };
    let mut given = Given {
        kernels,
        lease: None,
        lease6: None,
    };
    let mut told = None;
    loop {
        let mut seen = given.seen(routers.learned());
        seen.leads_out |= leads_out;
        if told.as_ref() != Some(&seen) {
            reporter.tell(News::Has(seen.clone())).await;
            told = Some(seen);
        }
        tokio::select! {
            error = &mut run => return Err(error.into()),
            error = &mut run6 => return Err(error.into()),
            Some(news) = leases.recv() => given.lease = news,
            Some(news) = leases6.recv() => given.lease6 = news,
            changed = routers.changed() => {
                changed?;
                offer.set(routers.learned().offered());
            }
            changed = monitor.changed() => {
                changed?;
                match Kernels::read(netlink, link).await? {
                    Some(now) => given.kernels = now,
                    None => return Ok(Gone),
                }
            }
        }
    }
}

/// What the kernel knows of an interface by itself.
struct Kernels {
    link: Link,
    /// The addresses that routers have advertised and that can be used.
    advertised: Vec<Cidr>,
    has_router: bool,
}

impl Kernels {
    /// `None` if the interface does not exist any more.
    async fn read(netlink: &Netlink, link: &Link) -> Result<Option<Self>, NetlinkError> {
        let links = netlink.list_links().await?;
        let Some(link) = links.into_iter().find(|it| it.index == link.index) else {
            return Ok(None);
        };
        Ok(Some(Self {
            advertised: netlink.advertised(link.index).await?,
            has_router: netlink.has_advertised_router(link.index).await?,
            link,
        }))
    }
}

/// What an automatic interface has been given.
struct Given {
    kernels: Kernels,
    lease: Option<Lease>,
    lease6: Option<dhcp6::Lease>,
}

impl Given {
    /// Together with what routers say.
    fn seen(&self, routers: &Learned) -> Seen {
        let link = &self.kernels.link;
        let mut seen = Seen {
            interface: link.name.clone(),
            addresses: Vec::new(),
            leads_out: self.kernels.has_router,
            is_asking: self.lease.is_none() && link.carrier,
            mtu: link.mtu,
            ..Seen::default()
        };
        if let Some(lease) = &self.lease {
            let mut routes = lease.routes.iter();
            seen.addresses.push(lease.address);
            seen.leads_out |= routes.any(|route| route.destination.is_all());
            let servers = (&lease.name_servers[..], &lease.time_servers[..]);
            add(&mut seen, servers, &lease.domains);
        }
        seen.addresses.extend(&self.kernels.advertised);
        if let Some(lease) = &self.lease6 {
            let address = lease.address.map(IpAddr::from);
            seen.addresses.extend(address.map(Cidr::host));
            let servers = (&lease.name_servers[..], &lease.time_servers[..]);
            add(&mut seen, servers, &lease.domains);
        }
        let servers = routers.servers().into_iter();
        seen.nameservers.extend(servers.map(IpAddr::from));
        seen.domains.extend(routers.domains());
        seen
    }
}

/// Adds name servers, time servers and domains of a lease.
fn add<A: Copy + Into<IpAddr>>(
    seen: &mut Seen,
    (name_servers, time_servers): (&[A], &[A]),
    domains: &[String],
) {
    let addresses = |servers: &[A]| -> Vec<IpAddr> {
        let servers = servers.iter().copied();
        servers.map(Into::into).collect()
    };
    seen.nameservers.extend(addresses(name_servers));
    seen.time_servers.extend(addresses(time_servers));
    seen.domains.extend(domains.iter().cloned());
}

#[cfg(test)]
mod tests;
