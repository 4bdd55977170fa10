//! The addresses and routes of one interface, wherever they come from: the parameters, a lease, or both.
//!
//! What people and servers write is not always what the kernel takes: it wants the route to a gateway before the routes
//! through it, and none through a gateway that is not in a network of the interface, as in a /32 lease.
//! [`Addressing::planned_routes`] is the pure function from one to the other: the order of what is given does not matter, and a gateway that
//! nothing else reaches is on the link.
//!
//! Applying is idempotent. It makes the given IPv4 addresses the only ones of the interface, so that a change leaves no old
//! ones behind; IPv6 addresses are added to those that the kernel assigns itself. A route that the kernel refuses does not keep the
//! others from being added. The values are not validated here: the caller validates external input, and the kernel rejects contradictions by
//! name.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use super::announce;
use super::cidr::Cidr;
use super::netlink::{Link, Netlink, NetlinkError, Route};

/// The addresses and routes of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addressing {
    /// Its addresses.
    pub addresses: Vec<Cidr>,
    /// Routes in addition to those that the addresses imply, in any order.
    pub routes: Vec<Route>,
    /// The MTU in bytes; `None` leaves it as it is.
    pub mtu: Option<u32>,
}

impl Addressing {
    /// The routes in an order in which the kernel takes them, each once: those on the link, then those through a gateway,
    /// default routes last. Before them the routes to gateways that no address and no route on the link reaches.
    pub fn planned_routes(&self) -> Vec<Route> {
        let mut planned: Vec<Route> = Vec::new();
        let mut add = |route: Route| {
            if !planned.contains(&route) {
                planned.push(route);
            }
        };
        for route in self.routes.iter().filter(|route| route.gateway.is_none()) {
            add(*route);
        }
        for route in &self.routes {
            if let Some(gateway) = route.gateway
                && !self.is_on_link(gateway)
            {
                add(Route {
                    destination: Cidr::host(gateway),
                    gateway: None,
                    ..*route
                });
            }
        }
        let mut through = self.routes.clone();
        through.retain(|route| route.gateway.is_some());
        // Stable: otherwise in the order that was given.
        through.sort_by_key(|route| std::cmp::Reverse(route.destination.prefix()));
        through.into_iter().for_each(add);
        planned
    }

    fn is_on_link(&self, gateway: IpAddr) -> bool {
        let is_link_local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let on_link = self.routes.iter().filter(|route| route.gateway.is_none());
        let networks = self.addresses.iter().copied();
        let mut networks = networks.chain(on_link.map(|route| route.destination));
        is_link_local || networks.any(|network| network.contains(gateway))
    }

    /// Whether there is a default route.
    pub fn has_default_route(&self) -> bool {
        self.routes.iter().any(|route| route.destination.is_all())
    }

    /// Applies this to an interface that is set up, in the place of what was applied before.
    ///
    /// # Errors
    /// The first of all that the kernel has refused. Everything else has been applied.
    pub async fn apply(
        &self,
        netlink: &Netlink,
        link: &Link,
        before: &Self,
    ) -> Result<(), NetlinkError> {
        let interface = link.index;
        let mut first_error = Ok(());
        if let Some(mtu) = self.mtu
            && netlink.link(interface).await?.mtu != mtu
        {
            // Not every device supports it; the network still works, with fragmentation.
            first_error = netlink.set_mtu(interface, mtu).await;
        }
        netlink
            .set_ipv4_addresses(interface, &self.addresses)
            .await?;
        let is_v6 = |cidr: &&Cidr| cidr.address().is_ipv6();
        for old in before.addresses.iter().filter(is_v6) {
            if !self.addresses.contains(old) {
                netlink.remove_address(interface, *old).await?;
            }
        }
        for address in self.addresses.iter().filter(is_v6) {
            netlink.add_address(interface, *address).await?;
        }
        let routes = self.planned_routes();
        for old in before.planned_routes().iter().rev() {
            if !routes.contains(old) {
                netlink.remove_route(interface, *old).await?;
            }
        }
        for route in routes {
            let added = netlink.replace_route(interface, route).await;
            first_error = first_error.and(added);
        }
        self.announce(link, before);
        first_error
    }

    /// Removes from an interface what was applied.
    pub async fn remove(&self, netlink: &Netlink, interface: u32) -> Result<(), NetlinkError> {
        for route in self.planned_routes().into_iter().rev() {
            netlink.remove_route(interface, route).await?;
        }
        for address in &self.addresses {
            netlink.remove_address(interface, *address).await?;
        }
        Ok(())
    }

    /// Tells the neighbours of new addresses: what they remember may be another machine.
    fn announce(&self, link: &Link, before: &Self) {
        let Some(mac) = link.mac else { return };
        let is_new = |address: &&Cidr| !before.addresses.contains(address);
        for address in self.addresses.iter().filter(is_new).map(Cidr::address) {
            if let Err(error) = announce::announce(link.index, mac, address) {
                tracing::debug!(interface = link.name, %address, %error, "cannot announce the address");
            }
        }
    }
}
