//! A DHCPv6 client (RFC 8415) for one interface.
//!
//! It asks only where routers say that there are servers, by the flags in their advertisements. Routes and the length of the
//! prefix come from these, never from DHCPv6: an address is one of the interface, without a network.
//!
//! # Parts
//! - `message`: the format of messages.
//! - `machine`: the protocol as a pure state machine, without socket or clock.
//! - this module: socket, timers and the address of the interface.
//!
//! The kernel probes whether another machine has an address before it can be used, and here this is waited for, unlike with
//! IPv4: the kernel sends nothing from the address until then. The lease is published once its address can be used.
//!
//! # Why no library
//! The maintained client library (mozim 0.3) asks for no information without an address, does not decline the address of another
//! machine, and cannot run on a simulated clock. The maintained codec (dhcproto 0.15) depends on a DNS library; of its
//! options we use thirteen.
//!
//! Intentionally not implemented: prefixes for others, rapid commit, relays, and reconfiguration by the server. Where the
//! cable was interrupted, the lease is rebound instead of confirmed, which asks the same and is answered by more servers.

mod machine;
mod message;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;

use hearth_base::deadline;
use hearth_base::event::{Value, Watcher};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrIn6, sockopt};
use tokio::time::Instant;

use super::cidr::Cidr;
use super::dhcp::DhcpError;
use super::netlink::{AddressState, Link, LinkMonitor, Netlink, NetlinkError};
use super::router_advertisements::Offered;
use super::{announce, random};
use machine::{Action, Machine};
use message::Answer;

pub use machine::Lease;

/// The port of clients.
pub const CLIENT_PORT: u16 = 546;
const SERVER_PORT: u16 = 547;
/// The group of all servers and relays of a link.
const ALL_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// No server sends longer messages, which would be cut off, and then not valid.
const MOST_BYTES: usize = 4096;

/// What decides where and for what a client asks.
#[derive(Clone, Debug)]
pub struct Options {
    /// What routers say of DHCPv6.
    pub offered: Value<Offered>,
    /// Networks that are used otherwise. No new address in them is taken.
    pub reserved: Value<Vec<Cidr>>,
}

/// The DHCPv6 client of one interface.
pub struct Client {
    link: Link,
    mac: [u8; 6],
    netlink: Netlink,
    monitor: LinkMonitor,
    socket: tokio::net::UdpSocket,
    machine: Machine,
    offered: Watcher<Offered>,
    reserved: Value<Vec<Cidr>>,
    has_carrier: bool,
    /// What the state machine wants to be used.
    configured: Option<Lease>,
    /// The same, once its address can be used.
    published: Option<Lease>,
}

impl Client {
    /// Starts to listen on an interface that is set up. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the interface has no Ethernet address, or cannot be listened on.
    pub fn open(link: &Link, options: Options) -> Result<Self, DhcpError> {
        let interface = || link.name.clone();
        let netlink_failed = |source| DhcpError::Netlink {
            interface: interface(),
            source,
        };
        let mac = link.mac.ok_or_else(|| DhcpError::NotEthernet {
            interface: interface(),
        })?;
        let socket = listen(&link.name).map_err(|source| DhcpError::Socket {
            interface: interface(),
            step: "listen to DHCPv6 servers",
            source,
        })?;
        let (client, association) = identifiers(mac);
        Ok(Self {
            link: link.clone(),
            mac,
            netlink: Netlink::open().map_err(netlink_failed)?,
            monitor: LinkMonitor::with_advertisements().map_err(netlink_failed)?,
            socket,
            machine: Machine::new(client, association, Box::new(random::number)),
            offered: options.offered.watch(),
            reserved: options.reserved,
            has_carrier: link.carrier,
            configured: None,
            published: None,
        })
    }

    /// Runs until an error that is not a network error. Calls `on_lease` after each change of what is used.
    pub async fn run(&mut self, mut on_lease: impl FnMut(Option<&Lease>)) -> DhcpError {
        loop {
            if let Err(error) = self.step().await {
                return error;
            }
            match self.observe().await {
                Ok(true) => on_lease(self.published.as_ref()),
                Ok(false) => {}
                Err(source) => return self.netlink_failed(source),
            }
        }
    }

    async fn step(&mut self) -> Result<(), DhcpError> {
        let deadline = self.machine.deadline();
        let mut buffer = [0; MOST_BYTES];
        let actions = tokio::select! {
            changed = self.monitor.changed() => {
                changed.map_err(|source| self.netlink_failed(source))?;
                self.reconnected().await.map_err(|source| self.netlink_failed(source))?
            }
            received = self.socket.recv(&mut buffer) => {
                let length = received.map_err(|source| DhcpError::Socket {
                    interface: self.link.name.clone(),
                    step: "receive from DHCPv6 servers",
                    source,
                })?;
                self.received(&buffer[..length])
            }
            () = deadline::passed(deadline) => self.machine.timeout(Instant::now()),
            Ok(offered) = self.offered.next() => self.machine.offered(offered, Instant::now()),
        };
        let performed = self.perform(actions).await;
        performed.map_err(|source| self.netlink_failed(source))
    }

    fn received(&mut self, message: &[u8]) -> Vec<Action> {
        let (client, association) = self.machine.identifiers();
        let Some(answer) = Answer::decode(message, client, association) else {
            tracing::debug!(interface = %self.link.name, "ignored an invalid DHCPv6 message");
            return Vec::new();
        };
        if let Some(granted) = answer.granted
            && Some(granted.address) != self.address()
            && let Some(reserved) = self.reservation(granted.address)
        {
            tracing::warn!(interface = %self.link.name, "refused a DHCPv6 answer: its address {} is in {reserved}, which is used for pods and services", granted.address);
            return Vec::new();
        }
        self.machine.received(&answer, Instant::now())
    }

    fn reservation(&self, address: Ipv6Addr) -> Option<Cidr> {
        let reserved = self.reserved.get()?;
        reserved.into_iter().find(|it| it.contains(address.into()))
    }

    /// The address that is configured, whether or not it can be used yet.
    fn address(&self) -> Option<Ipv6Addr> {
        address_of(self.configured.as_ref())
    }

    /// The network may be another one after the cable was interrupted.
    async fn reconnected(&mut self) -> Result<Vec<Action>, NetlinkError> {
        let carrier = self.netlink.link(self.link.index).await?.carrier;
        let before = std::mem::replace(&mut self.has_carrier, carrier);
        match carrier && !before {
            true => Ok(self.machine.reconnected(Instant::now())),
            false => Ok(Vec::new()),
        }
    }

    async fn perform(&mut self, actions: Vec<Action>) -> Result<(), NetlinkError> {
        for action in actions {
            let wanted = match action {
                Action::Send(message) => {
                    self.send(&message).await;
                    continue;
                }
                Action::Configure(lease) => Some(lease),
                Action::Unconfigure => None,
            };
            let old = self.address();
            self.configured = wanted;
            if let Some(old) = old.filter(|old| Some(*old) != self.address()) {
                let index = self.link.index;
                self.netlink.remove_address(index, host(old)).await?;
            }
        }
        Ok(())
    }

    /// A send error is treated like a lost message: the message is sent again at the next deadline.
    async fn send(&self, message: &[u8]) {
        let to = SocketAddrV6::new(ALL_SERVERS, SERVER_PORT, 0, self.link.index);
        if let Err(error) = self.socket.send_to(message, to).await {
            tracing::debug!(interface = %self.link.name, %error, "cannot send a DHCPv6 message");
        }
    }

    /// Sees that the interface has the address, and whether it can be used. Returns whether what is published has changed.
    async fn observe(&mut self) -> Result<bool, NetlinkError> {
        let index = self.link.index;
        let is_usable = match self.address() {
            None => true,
            Some(address) => match self.netlink.address_state(index, address).await? {
                Some(AddressState::Usable) => true,
                Some(AddressState::Probed) => false,
                Some(AddressState::Duplicate) => {
                    tracing::warn!(interface = %self.link.name, %address, "another machine uses the address of the DHCPv6 lease");
                    let actions = self.machine.claimed(Instant::now());
                    self.perform(actions).await?;
                    true
                }
                // It is new, or was lost when the interface was down.
                None => {
                    self.netlink.add_address(index, host(address)).await?;
                    false
                }
            },
        };
        let now = self.configured.clone().filter(|_| is_usable);
        if now == self.published {
            return Ok(false);
        }
        self.tell(now.as_ref());
        self.published = now;
        Ok(true)
    }

    fn tell(&self, now: Option<&Lease>) {
        let interface = &self.link.name;
        let before = address_of(self.published.as_ref());
        match (before, address_of(now)) {
            (before, Some(address)) if before != Some(address) => {
                tracing::info!(%interface, %address, "got a DHCPv6 lease");
                // Others may remember the address as that of another machine.
                if let Err(error) = announce::announce(self.link.index, self.mac, address.into()) {
                    tracing::debug!(%interface, %address, %error, "cannot announce the address");
                }
            }
            (Some(address), None) => {
                tracing::warn!(%interface, %address, "lost the DHCPv6 lease");
            }
            _ => tracing::info!(%interface, "got network settings by DHCPv6"),
        }
    }

    fn netlink_failed(&self, source: NetlinkError) -> DhcpError {
        DhcpError::Netlink {
            interface: self.link.name.clone(),
            source,
        }
    }
}

fn address_of(lease: Option<&Lease>) -> Option<Ipv6Addr> {
    lease?.address
}

fn host(address: Ipv6Addr) -> Cidr {
    Cidr::host(IpAddr::V6(address))
}

/// The DUID of a client, made of its Ethernet address (RFC 8415, section 11.4), and the identifier of its association. Both are
/// the same after each boot.
fn identifiers(mac: [u8; 6]) -> (Vec<u8>, u32) {
    const LINK_LAYER: [u8; 2] = [0, 3];
    const ETHERNET: [u8; 2] = [0, 1];
    let [_, _, a, b, c, d] = mac;
    let duid = [&LINK_LAYER[..], &ETHERNET, &mac].concat();
    (duid, u32::from_be_bytes([a, b, c, d]))
}

/// A socket at one interface; each interface has its own at the same port.
fn listen(interface: &str) -> io::Result<tokio::net::UdpSocket> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Inet6, SockType::Datagram, flags, None)?;
    socket::setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    socket::setsockopt(&socket, sockopt::BindToDevice, &interface.into())?;
    let address = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, CLIENT_PORT, 0, 0);
    socket::bind(socket.as_raw_fd(), &SockaddrIn6::from(address))?;
    tokio::net::UdpSocket::from_std(UdpSocket::from(socket))
}
