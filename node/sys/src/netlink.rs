//! Links, addresses and routes, through the kernel's rtnetlink.
//!
//! Every change is idempotent: adding something that exists and removing something that does not
//! exist succeed. Watching is level-triggered: [`LinkMonitor`] only reports *that* links changed,
//! and its user reads the state again, so that a lost or merged notification cannot lead to a wrong
//! view.

mod bonds;
mod ipv6;
#[cfg(test)]
mod tests;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, CacheInfo,
};
use rtnetlink::packet_route::link::{
    InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use rtnetlink::packet_route::route::{RouteMessage, RouteScope};
use rtnetlink::{
    AddressMessageBuilder, Handle, LinkBridge, LinkUnspec, LinkVlan, LinkWireguard, MulticastGroup,
    RouteMessageBuilder,
};
use tokio::task::JoinHandle;

pub use bonds::BondMode;
pub use ipv6::AddressState;

use super::cidr::Cidr;

/// Why the network configuration cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The netlink socket cannot be opened.
    #[error("cannot open a netlink socket")]
    Open(#[source] io::Error),
    /// The kernel rejected an operation.
    #[error("cannot {step}")]
    Refused {
        /// The operation, as a verb with its object.
        step: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The interface does not exist.
    #[error("cannot find network interface {0}")]
    NoLink(String),
    /// The connection to the kernel was closed.
    #[error("the netlink connection to the kernel was closed")]
    Gone,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The kernel's index, which never changes while the interface exists.
    pub index: u32,
    /// The name, such as `eth0`.
    pub name: String,
    /// The hardware address, if it has the length of an Ethernet address.
    pub mac: Option<[u8; 6]>,
    /// The hardware address that the device has by itself, if it says so: in a bond it has another one.
    pub permanent_mac: Option<[u8; 6]>,
    /// The index of the bond or bridge to which the interface belongs.
    pub controller: Option<u32>,
    /// The kind of interface.
    pub kind: LinkKind,
    /// Whether the interface is set up.
    pub up: bool,
    /// Whether it is up and has a carrier.
    pub carrier: bool,
    /// The MTU in bytes.
    pub mtu: u32,
}

/// The kind of a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The loopback interface.
    Loopback,
    /// An Ethernet device, emulated ones included.
    Ethernet,
    /// Several Ethernet devices as one.
    Bond,
    /// A VLAN of an Ethernet device or a bond.
    Vlan,
    /// Otherwise created by software: bridge, tunnel …
    Virtual,
    /// Anything else.
    Other,
}

impl Link {
    /// Whether it may lead to other machines, as opposed to pods.
    pub fn is_uplink(&self) -> bool {
        matches!(
            self.kind,
            LinkKind::Ethernet | LinkKind::Bond | LinkKind::Vlan
        )
    }
}

/// A route through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination of the route.
    pub destination: Cidr,
    /// The gateway; `None` for a directly attached network.
    pub gateway: Option<IpAddr>,
    /// Routes of lower metric are preferred.
    pub metric: u32,
    /// The source address for this route; `None` leaves the choice to the kernel.
    pub source: Option<IpAddr>,
}

impl Route {
    /// The default route through a gateway.
    pub fn default_through(gateway: IpAddr, metric: u32) -> Self {
        let destination = if gateway.is_ipv4() {
            Cidr::ALL_V4
        } else {
            Cidr::ALL_V6
        };
        Self {
            destination,
            gateway: Some(gateway),
            metric,
            source: None,
        }
    }
}

/// Aborts the task on drop.
#[derive(Debug)]
struct Owned(JoinHandle<()>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection to the kernel, shared by its clones.
#[derive(Clone, Debug)]
pub struct Netlink {
    handle: Handle,
    _connection: Arc<Owned>,
}

impl Netlink {
    /// Opens the connection. Must be called within a tokio runtime.
    #[expect(clippy::disallowed_methods, reason = "Owned aborts the task")]
    pub fn open() -> Result<Self, NetlinkError> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(NetlinkError::Open)?;
        Ok(Self {
            handle,
            _connection: Arc::new(Owned(tokio::spawn(connection))),
        })
    }

    /// All interfaces, sorted by index.
    pub async fn list_links(&self) -> Result<Vec<Link>, NetlinkError> {
        let links = self.handle.link().get().execute();
        let links = links.map_ok(|message| link(&message)).try_collect();
        let mut links: Vec<Link> = links.await.map_err(refused("list network interfaces"))?;
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    /// The interface with this index.
    pub async fn link(&self, index: u32) -> Result<Link, NetlinkError> {
        let links = self.list_links().await?;
        let found = links.into_iter().find(|link| link.index == index);
        found.ok_or_else(|| NetlinkError::NoLink(format!("with index {index}")))
    }

    /// The interface with this name.
    pub async fn link_named(&self, name: &str) -> Result<Link, NetlinkError> {
        let links = self.list_links().await?;
        let found = links.into_iter().find(|link| link.name == name);
        found.ok_or_else(|| NetlinkError::NoLink(name.to_owned()))
    }

    /// Sets an interface up.
    pub async fn set_up(&self, index: u32) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(index).up().build();
        let result = self.handle.link().set(message).execute().await;
        result.map_err(refused(format!("set interface {index} up")))
    }

    /// Sets an interface down. It loses its routes, and its IPv6 addresses.
    pub async fn set_down(&self, index: u32) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(index).down().build();
        let result = self.handle.link().set(message).execute().await;
        result.map_err(refused(format!("set interface {index} down")))
    }

    /// Sets the loopback interface up, and with it 127.0.0.1 and ::1.
    pub async fn set_loopback_up(&self) -> Result<(), NetlinkError> {
        let links = self.list_links().await?;
        let loopback = links.iter().find(|link| link.kind == LinkKind::Loopback);
        let loopback = loopback.ok_or_else(|| NetlinkError::NoLink("of kind loopback".into()))?;
        self.set_up(loopback.index).await
    }

    /// Sets an interface's MTU in bytes.
    pub async fn set_mtu(&self, index: u32, mtu: u32) -> Result<(), NetlinkError> {
        let message = LinkUnspec::new_with_index(index).mtu(mtu).build();
        let result = self.handle.link().set(message).execute().await;
        result.map_err(refused(format!(
            "set the MTU of interface {index} to {mtu}"
        )))
    }

    /// Creates a VLAN interface on top of another one and sets it up; an existing one with this
    /// name is not changed. Returns its link.
    pub async fn add_vlan(&self, parent: u32, name: &str, vlan: u16) -> Result<Link, NetlinkError> {
        let message = LinkVlan::new(name, parent, vlan).up().build();
        let result = self.handle.link().add(message).execute().await;
        if let Err(error) = result
            && !is(&error, libc::EEXIST)
        {
            return Err(refused(format!("create VLAN {vlan} on interface {parent}"))(error));
        }
        let link = self.link_named(name).await?;
        self.set_up(link.index).await?;
        Ok(link)
    }

    /// Creates a bridge with this hardware address and sets it up; an existing one with this name
    /// is not changed. Returns its link.
    ///
    /// A bridge without a fixed address takes that of one of its ports, and changes it when ports
    /// are added or removed.
    pub async fn add_bridge(&self, name: &str, mac: [u8; 6]) -> Result<Link, NetlinkError> {
        let message = LinkBridge::new(name).address(mac.to_vec()).build();
        self.add_link(name, "bridge", message).await
    }

    /// Creates a WireGuard interface and sets it up; an existing one with this name is not changed.
    /// Returns its link. See [`wireguard`](super::wireguard) for its configuration.
    pub async fn add_wireguard(&self, name: &str) -> Result<Link, NetlinkError> {
        let message = LinkWireguard::new(name).up().build();
        self.add_link(name, "WireGuard interface", message).await
    }

    async fn add_link(
        &self,
        name: &str,
        what: &str,
        message: LinkMessage,
    ) -> Result<Link, NetlinkError> {
        let result = self.handle.link().add(message).execute().await;
        if let Err(error) = result
            && !is(&error, libc::EEXIST)
        {
            return Err(refused(format!("create {what} {name}"))(error));
        }
        let link = self.link_named(name).await?;
        self.set_up(link.index).await?;
        Ok(link)
    }

    /// Removes a virtual interface and everything that depends on it. Succeeds if it does not
    /// exist.
    pub async fn remove_link(&self, name: &str) -> Result<(), NetlinkError> {
        let links = self.list_links().await?;
        let Some(link) = links.into_iter().find(|link| link.name == name) else {
            return Ok(());
        };
        match self.handle.link().del(link.index).execute().await {
            Err(error) if is(&error, libc::ENODEV) => Ok(()),
            other => other.map_err(refused(format!("remove interface {name}"))),
        }
    }

    /// The addresses of an interface.
    pub async fn addresses(&self, index: u32) -> Result<Vec<Cidr>, NetlinkError> {
        let messages = self.address_messages(index).await?;
        Ok(messages.iter().filter_map(cidr).collect())
    }

    async fn address_messages(&self, index: u32) -> Result<Vec<AddressMessage>, NetlinkError> {
        let addresses = self.handle.address().get();
        let addresses = addresses.set_link_index_filter(index).execute();
        let addresses: Result<Vec<_>, _> = addresses.try_collect().await;
        addresses.map_err(refused(format!("list the addresses of interface {index}")))
    }

    /// Adds an address to an interface.
    pub async fn add_address(&self, index: u32, cidr: Cidr) -> Result<(), NetlinkError> {
        let request = self
            .handle
            .address()
            .add(index, cidr.address(), cidr.prefix());
        let result = request.replace().execute().await;
        result.map_err(refused(format!("add {cidr} to interface {index}")))
    }

    /// Adds an address to an interface for a while, or changes how long it remains: the kernel removes it
    /// once this time has passed (whole seconds, at least one). The address is the interface's without a
    /// network, it is not probed for duplicates, and the machine does not use it as a source of its
    /// own connections.
    pub async fn lend_address(
        &self,
        index: u32,
        address: IpAddr,
        valid: Duration,
    ) -> Result<(), NetlinkError> {
        let mut lifetime = CacheInfo::default();
        lifetime.ifa_valid = valid.as_secs().clamp(1, u32::MAX.into()) as u32;
        let cidr = Cidr::host(address);
        let addresses = self.handle.address();
        let mut request = addresses.add(index, address, cidr.prefix()).replace();
        request.message_mut().attributes.extend([
            AddressAttribute::CacheInfo(lifetime),
            AddressAttribute::Flags(AddressFlags::Nodad),
        ]);
        let result = request.execute().await;
        result.map_err(refused(format!("add {cidr} to interface {index}")))
    }

    /// Makes these the only IPv4 addresses of an interface that it has for an unlimited time.
    ///
    /// Other addresses are removed first: an address in the network of another one depends on it,
    /// and would be removed with it.
    pub async fn set_ipv4_addresses(
        &self,
        index: u32,
        wanted: &[Cidr],
    ) -> Result<(), NetlinkError> {
        self.set_addresses(index, wanted, |address| address.is_ipv4())
            .await
    }

    /// The same for IPv6. Link-local addresses are not changed. The new ones are not probed for
    /// duplicates, so that they can be used at once.
    pub async fn set_ipv6_addresses(
        &self,
        index: u32,
        wanted: &[Cidr],
    ) -> Result<(), NetlinkError> {
        self.set_addresses(
            index,
            wanted,
            |address| matches!(address, IpAddr::V6(v6) if !v6.is_unicast_link_local()),
        )
        .await
    }

    async fn set_addresses(
        &self,
        index: u32,
        wanted: &[Cidr],
        is_meant: fn(IpAddr) -> bool,
    ) -> Result<(), NetlinkError> {
        let found = self.address_messages(index).await?;
        let is_permanent = |message: &&AddressMessage| {
            let flags = message.header.flags;
            flags.contains(AddressHeaderFlags::Permanent)
        };
        for old in found.iter().filter(is_permanent).filter_map(cidr) {
            if is_meant(old.address()) && !wanted.contains(&old) {
                self.remove_address(index, old).await?;
            }
        }
        for cidr in wanted.iter().filter(|cidr| is_meant(cidr.address())) {
            let addresses = self.handle.address();
            let mut request = addresses
                .add(index, cidr.address(), cidr.prefix())
                .replace();
            if cidr.address().is_ipv6() {
                let unprobed = AddressAttribute::Flags(AddressFlags::Nodad);
                request.message_mut().attributes.push(unprobed);
            }
            let result = request.execute().await;
            result.map_err(refused(format!("add {cidr} to interface {index}")))?;
        }
        Ok(())
    }

    /// Removes an address from an interface.
    pub async fn remove_address(&self, index: u32, cidr: Cidr) -> Result<(), NetlinkError> {
        let message = match cidr.address() {
            IpAddr::V4(address) => AddressMessageBuilder::<std::net::Ipv4Addr>::new()
                .index(index)
                .address(address, cidr.prefix())
                .build(),
            IpAddr::V6(address) => AddressMessageBuilder::<std::net::Ipv6Addr>::new()
                .index(index)
                .address(address, cidr.prefix())
                .build(),
        };
        match self.handle.address().del(message).execute().await {
            Err(error) if is(&error, libc::EADDRNOTAVAIL) => Ok(()),
            other => other.map_err(refused(format!("remove {cidr} from interface {index}"))),
        }
    }

    /// Adds a route, or replaces the one with the same destination and metric.
    pub async fn replace_route(&self, index: u32, route: Route) -> Result<(), NetlinkError> {
        let result = self.handle.route().add(message_of(index, route));
        let result = result.replace().execute().await;
        result.map_err(refused(format!("add {}", describe(index, route))))
    }

    /// Removes a route.
    pub async fn remove_route(&self, index: u32, route: Route) -> Result<(), NetlinkError> {
        let request = self.handle.route().del(message_of(index, route));
        match request.execute().await {
            Err(error) if is(&error, libc::ESRCH) => Ok(()),
            other => other.map_err(refused(format!("remove {}", describe(index, route)))),
        }
    }
}

/// The first Ethernet interface, as soon as there is one.
pub async fn first_ethernet(netlink: &Netlink) -> Result<Link, NetlinkError> {
    let mut monitor = LinkMonitor::open()?;
    loop {
        let links = netlink.list_links().await?;
        let mut ethernet = links
            .into_iter()
            .filter(|link| link.kind == LinkKind::Ethernet);
        match ethernet.next() {
            Some(link) => return Ok(link),
            None => monitor.changed().await?,
        }
    }
}

/// Reports changes of interfaces, or of what the kernel has learned from routers.
#[derive(Debug)]
pub struct LinkMonitor {
    changes: tokio::sync::watch::Receiver<()>,
    _connection: Owned,
}

impl LinkMonitor {
    /// Starts to watch. Must be called within a tokio runtime.
    pub fn open() -> Result<Self, NetlinkError> {
        Self::of(&[MulticastGroup::Link])
    }

    /// Starts to watch the interfaces, and their IPv6 addresses and routes. Must be called within a tokio runtime.
    pub fn with_advertisements() -> Result<Self, NetlinkError> {
        Self::of(&[
            MulticastGroup::Link,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv6Route,
        ])
    }

    #[expect(clippy::disallowed_methods, reason = "Owned aborts the task")]
    fn of(groups: &[MulticastGroup]) -> Result<Self, NetlinkError> {
        let (connection, _, mut messages) =
            rtnetlink::new_multicast_connection(groups).map_err(NetlinkError::Open)?;
        let (tell, changes) = tokio::sync::watch::channel(());
        // Notifications are read at once into a watch value, so they cannot pile up.
        let drain = async move {
            while messages.next().await.is_some() {
                tell.send_replace(());
            }
        };
        let both = async move {
            tokio::join!(connection, drain);
        };
        Ok(Self {
            changes,
            _connection: Owned(tokio::spawn(both)),
        })
    }

    /// Waits for the next change. Changes since the last call count as one.
    ///
    /// Cancel safe.
    pub async fn changed(&mut self) -> Result<(), NetlinkError> {
        self.changes.changed().await.map_err(|_| NetlinkError::Gone)
    }
}

/// The kind of a virtual interface.
fn kind(info: &LinkInfo) -> Option<LinkKind> {
    match info {
        LinkInfo::Kind(InfoKind::Bond) => Some(LinkKind::Bond),
        LinkInfo::Kind(InfoKind::Vlan) => Some(LinkKind::Vlan),
        LinkInfo::Kind(_) => Some(LinkKind::Virtual),
        _ => None,
    }
}

fn link(message: &LinkMessage) -> Link {
    let header = &message.header;
    let mut link = Link {
        index: header.index,
        name: String::new(),
        mac: None,
        permanent_mac: None,
        controller: None,
        kind: match header.link_layer_type {
            LinkLayerType::Loopback => LinkKind::Loopback,
            LinkLayerType::Ether => LinkKind::Ethernet,
            _ => LinkKind::Other,
        },
        up: header.flags.contains(LinkFlags::Up),
        carrier: header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
        mtu: 0,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
            LinkAttribute::PermAddress(mac) => link.permanent_mac = mac.as_slice().try_into().ok(),
            LinkAttribute::Controller(index) => link.controller = Some(*index),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            // Virtual interfaces have this attribute, and devices that belong to one.
            LinkAttribute::LinkInfo(info) if link.kind != LinkKind::Loopback => {
                link.kind = info.iter().find_map(kind).unwrap_or(link.kind);
            }
            _ => {}
        }
    }
    link
}

fn cidr(message: &AddressMessage) -> Option<Cidr> {
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point link, "address" is that of the peer.
            AddressAttribute::Local(local) => found = Some(*local),
            AddressAttribute::Address(address) if found.is_none() => found = Some(*address),
            _ => {}
        }
    }
    Cidr::new(found?, message.header.prefix_len).ok()
}

fn message_of(index: u32, route: Route) -> RouteMessage {
    let (destination, gateway) = (route.destination, route.gateway);
    let prefix = destination.prefix();
    let scope = match gateway {
        Some(_) => RouteScope::Universe,
        None => RouteScope::Link,
    };
    match destination.address() {
        IpAddr::V4(address) => {
            let mut builder = RouteMessageBuilder::<std::net::Ipv4Addr>::new()
                .destination_prefix(address, prefix)
                .output_interface(index)
                .priority(route.metric)
                .scope(scope);
            if let Some(IpAddr::V4(gateway)) = gateway {
                builder = builder.gateway(gateway);
            }
            if let Some(IpAddr::V4(source)) = route.source {
                builder = builder.pref_source(source);
            }
            builder.build()
        }
        IpAddr::V6(address) => {
            let mut builder = RouteMessageBuilder::<std::net::Ipv6Addr>::new()
                .destination_prefix(address, prefix)
                .output_interface(index)
                .priority(route.metric);
            if let Some(IpAddr::V6(gateway)) = gateway {
                builder = builder.gateway(gateway);
            }
            if let Some(IpAddr::V6(source)) = route.source {
                builder = builder.pref_source(source);
            }
            builder.build()
        }
    }
}

fn describe(index: u32, route: Route) -> String {
    let through = match route.gateway {
        Some(gateway) => format!(" via {gateway}"),
        None => String::new(),
    };
    let destination = route.destination;
    format!("the route to {destination}{through} on interface {index}")
}

fn refused(step: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetlinkError {
    let step = step.into();
    move |error| NetlinkError::Refused {
        step,
        source: cause(error),
    }
}

/// Converts the library's error into one without a kernel message: the code that prints those is a
/// hundred kilobytes in size.
fn cause(error: rtnetlink::Error) -> io::Error {
    use rtnetlink::Error;
    let text = match error {
        Error::NetlinkError(message) => return message.to_io(),
        Error::RequestFailed => return io::ErrorKind::NotConnected.into(),
        Error::UnexpectedMessage(message) => {
            format!("unexpected answer of type {}", message.header.message_type)
        }
        Error::NamespaceError(text) | Error::InvalidNla(text) => text,
        Error::InvalidHardwareAddress(bytes) | Error::InvalidIp(bytes) => {
            format!("malformed address {bytes:02x?}")
        }
        Error::InvalidAddress(address, mask) => {
            format!("malformed address {address:02x?} with mask {mask:02x?}")
        }
    };
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn is(error: &rtnetlink::Error, errno: i32) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message)
        if message.to_io().raw_os_error() == Some(errno))
}
