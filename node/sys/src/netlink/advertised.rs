//! What the kernel has configured by itself from the advertisements of IPv6 routers.

use std::net::IpAddr;

use futures::TryStreamExt;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressProtocol,
};
use rtnetlink::packet_route::route::{RouteAttribute, RouteProtocol};

use super::{Netlink, NetlinkError, cidr, refused};
use crate::cidr::Cidr;

impl Netlink {
    /// The IPv6 addresses that the kernel has given an interface because routers advertised them, with the length of the
    /// advertised prefix. Those that another machine has or may have, and those about to expire, are left out.
    pub async fn advertised(&self, index: u32) -> Result<Vec<Cidr>, NetlinkError> {
        let messages = self.address_messages(index).await?;
        Ok(messages.iter().filter_map(usable).collect())
    }

    /// Whether a router has advertised itself on an interface.
    pub async fn has_advertised_router(&self, index: u32) -> Result<bool, NetlinkError> {
        let all = RouteMessageBuilder::<std::net::Ipv6Addr>::new().build();
        let mut routes = self.handle.route().get(all).execute();
        while let Some(route) = routes
            .try_next()
            .await
            .map_err(refused("list the IPv6 routes"))?
        {
            let leads_there = route.attributes.contains(&RouteAttribute::Oif(index));
            let is_default = route.header.destination_prefix_length == 0;
            if leads_there && is_default && route.header.protocol == RouteProtocol::Ra {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn usable(message: &AddressMessage) -> Option<Cidr> {
    let is_from_router = |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Protocol(by) if *by == AddressProtocol::RouterAnnouncement);
    let unusable = AddressHeaderFlags::Tentative
        | AddressHeaderFlags::Dadfailed
        | AddressHeaderFlags::Deprecated;
    if !message.attributes.iter().any(is_from_router) || message.header.flags.intersects(unusable) {
        return None;
    }
    cidr(message).filter(|it| matches!(it.address(), IpAddr::V6(v6) if !v6.is_unicast_link_local()))
}
