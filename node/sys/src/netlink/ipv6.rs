//! What the kernel knows of IPv6 at an interface: what it has configured by itself from the advertisements of routers, and whether
//! an address can be used.

use std::net::{IpAddr, Ipv6Addr};

use futures::TryStreamExt;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressProtocol,
};
use rtnetlink::packet_route::route::{RouteAttribute, RouteProtocol};

use super::{Netlink, NetlinkError, cidr, refused};
use crate::cidr::Cidr;

/// Whether an IPv6 address of an interface can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressState {
    /// Not yet: other machines are asked whether they have it.
    Probed,
    /// It can.
    Usable,
    /// Another machine has it.
    Duplicate,
}

impl Netlink {
    /// Whether an IPv6 address can be used; `None` if the interface does not have it.
    pub async fn address_state(
        &self,
        index: u32,
        address: Ipv6Addr,
    ) -> Result<Option<AddressState>, NetlinkError> {
        let messages = self.address_messages(index).await?;
        let is_it =
            |message: &&AddressMessage| cidr(message).is_some_and(|it| it.address() == address);
        let found = messages.iter().find(is_it);
        Ok(found.map(|message| match message.header.flags {
            flags if flags.contains(AddressHeaderFlags::Dadfailed) => AddressState::Duplicate,
            flags if flags.contains(AddressHeaderFlags::Tentative) => AddressState::Probed,
            _ => AddressState::Usable,
        }))
    }

    /// The IPv6 addresses that the kernel has given an interface because routers advertised them, with the length of the
    /// advertised prefix. Those that another machine has or may have, and those about to expire, are left out.
    pub async fn advertised(&self, index: u32) -> Result<Vec<Cidr>, NetlinkError> {
        let messages = self.address_messages(index).await?;
        Ok(messages.iter().filter_map(usable).collect())
    }

    /// Whether a router has advertised itself on an interface.
    pub async fn has_advertised_router(&self, index: u32) -> Result<bool, NetlinkError> {
        let all = RouteMessageBuilder::<Ipv6Addr>::new().build();
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
