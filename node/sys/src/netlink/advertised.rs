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

/// An IPv6 address that the kernel has made from a router advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertised {
    /// The address and the length of the advertised prefix.
    pub address: Cidr,
    /// Whether it can be used: no other machine has it, and it is not about to expire.
    pub usable: bool,
}

impl Netlink {
    /// The IPv6 addresses of an interface that routers have advertised.
    pub async fn advertised(&self, index: u32) -> Result<Vec<Advertised>, NetlinkError> {
        let messages = self.address_messages(index).await?;
        Ok(messages.iter().filter_map(advertised).collect())
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

fn advertised(message: &AddressMessage) -> Option<Advertised> {
    let is_from_router = |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Protocol(by) if *by == AddressProtocol::RouterAnnouncement);
    if !message.attributes.iter().any(is_from_router) {
        return None;
    }
    let flags = message.header.flags;
    let unusable = AddressHeaderFlags::Tentative
        | AddressHeaderFlags::Dadfailed
        | AddressHeaderFlags::Deprecated;
    Some(Advertised {
        address: cidr(message)
            .filter(|it| matches!(it.address(), IpAddr::V6(v6) if !v6.is_unicast_link_local()))?,
        usable: !flags.intersects(unusable),
    })
}
