//! A DHCP client (RFC 2131) for one interface.
//!
//! It gets a lease as fast as the network allows (the first message is sent as soon as there is a
//! carrier, because it is on the critical path of the boot), keeps it by renewing and rebinding,
//! configures the interface, and publishes the lease as an event value. When the carrier is lost,
//! the lease is kept; when it is back, the client verifies the lease with the network, which may be
//! another one. A NAK or the expiry of the lease removes the address at once.
//!
//! # Parts
//! - `message`: the format of messages; `wire`: the frames around them, and the checks of received
//!   data.
//! - `machine`: the protocol as a pure state machine, without socket or clock.
//! - this module: sockets, timers and the configuration of the kernel.
//!
//! # Why no library
//! The maintained client library (mozim 0.3) ignores NAKs, keeps an offer forever that the server
//! does not confirm, waits before its first message, and cannot run on a simulated clock. The
//! maintained codec (dhcproto 0.15) panics on messages that anyone on the network can send (option
//! 94 with a length other than 3, a hardware address longer than 16), and depends on a DNS library;
//! of its hundred options we use twelve.
//!
//! Intentionally not implemented: probing for address conflicts (it takes seconds at boot, and
//! servers do it), and DHCPv6.
//!
//! This client owns the interface's IPv4 configuration: when it gets a lease, it removes all other
//! addresses.

mod machine;
mod message;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod wire;

#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::Writer;
use hearth_base::supervisor::{Context, Outcome};
use nix::sys::socket::{self, sockopt};
use tokio::time::Instant;

use super::cidr::Cidr;
use super::netlink::{LinkMonitor, Netlink, NetlinkError, Route};
use super::random;
use super::raw::{self, Watched};
use machine::{Action, Machine};

/// A lease granted by a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The address and its prefix length.
    pub address: Cidr,
    /// The server that granted the lease.
    pub server: Ipv4Addr,
    /// The routes, including the default route if there is one.
    pub routes: Vec<LeasedRoute>,
    /// Name servers, in the server's order.
    pub name_servers: Vec<Ipv4Addr>,
    /// Time servers (NTP), in the server's order.
    pub time_servers: Vec<Ipv4Addr>,
    /// The domain of the network, if the server sends a valid one.
    pub domain: Option<String>,
    /// The MTU of the network in bytes, if the server sends one.
    pub mtu: Option<u16>,
    /// How long the lease is valid; `None` means forever.
    pub duration: Option<Duration>,
    /// When to renew the lease with the same server (T1).
    pub renew_after: Duration,
    /// When to rebind the lease with any server (T2).
    pub rebind_after: Duration,
}

/// A route from a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedRoute {
    /// The destination of the route.
    pub destination: Cidr,
    /// The gateway; `None` for a directly attached network.
    pub gateway: Option<Ipv4Addr>,
}

impl Lease {
    /// The gateway of the default route.
    pub fn default_gateway(&self) -> Option<Ipv4Addr> {
        let default = self.routes.iter().find(|r| r.destination.prefix() == 0);
        default.and_then(|route| route.gateway)
    }
}

/// The options of the client.
#[derive(Clone, Debug)]
pub struct Options {
    /// The host name sent to the server, if any.
    pub host_name: Option<String>,
    /// The metric of the routes from the lease.
    pub metric: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            host_name: None,
            metric: 100,
        }
    }
}

/// Why the client stopped. Network errors do not stop it.
#[derive(Debug, thiserror::Error)]
pub enum DhcpError {
    /// The interface cannot be read or configured.
    #[error("DHCP on {interface}: cannot configure the interface")]
    Netlink {
        /// The interface.
        interface: String,
        /// The netlink error.
        source: NetlinkError,
    },
    /// The interface has no Ethernet address.
    #[error("DHCP on {interface}: the interface has no Ethernet address")]
    NotEthernet {
        /// The interface.
        interface: String,
    },
    /// An operation on the interface's socket failed.
    #[error("DHCP on {interface}: cannot {step}")]
    Socket {
        /// The interface.
        interface: String,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Runs the client on an interface, as a runnable. It is healthy once it listens; a network without
/// a DHCP server is not a failure.
///
/// The lease is published while it is held and configured; `None` means that a lease was lost.
pub async fn run(
    ctx: Context,
    interface: &str,
    options: Options,
    leases: Arc<Writer<Option<Lease>>>,
) -> Outcome {
    let mut client = Client::open(interface, options).await?;
    ctx.healthy();
    tokio::select! {
        () = ctx.cancelled() => Ok(()),
        error = client.run(|lease| leases.set(lease.cloned())) => Err(error.into()),
    }
}

/// The DHCP client of one interface.
pub struct Client {
    interface: String,
    index: u32,
    options: Options,
    netlink: Netlink,
    monitor: LinkMonitor,
    socket: Watched,
    machine: Machine,
    /// Open while renewing, so that the kernel does not send "port unreachable" to the server.
    /// `socket` receives its messages too.
    renewing: Option<UdpSocket>,
    /// The lease that is configured.
    configured: Option<Lease>,
}

impl Client {
    /// Sets the interface up and starts to listen on it.
    pub async fn open(interface: &str, options: Options) -> Result<Self, DhcpError> {
        let netlink_failed = |source| DhcpError::Netlink {
            interface: interface.to_owned(),
            source,
        };
        let netlink = Netlink::open().map_err(netlink_failed)?;
        // Opened before the state is first read, so that no change is missed.
        let monitor = LinkMonitor::open().map_err(netlink_failed)?;
        let link = netlink.link_named(interface).await;
        let link = link.map_err(netlink_failed)?;
        let mac = link.mac.ok_or_else(|| DhcpError::NotEthernet {
            interface: interface.to_owned(),
        })?;
        netlink.set_up(link.index).await.map_err(netlink_failed)?;
        let socket = raw::packet_socket(link.index, wire::ETHERTYPE, &wire::FILTER);
        let socket = socket.and_then(Watched::new);
        let socket = socket.map_err(|source| DhcpError::Socket {
            interface: interface.to_owned(),
            step: "listen",
            source,
        })?;
        let machine = Machine::new(mac, options.host_name.clone(), Box::new(random::number));
        Ok(Self {
            interface: interface.to_owned(),
            index: link.index,
            options,
            netlink,
            monitor,
            socket,
            machine,
            renewing: None,
            configured: None,
        })
    }

    /// Runs until an error that is not a network error. Calls `on_lease` after each change of the
    /// configuration.
    pub async fn run(&mut self, mut on_lease: impl FnMut(Option<&Lease>)) -> DhcpError {
        loop {
            if let Err(error) = self.step(&mut on_lease).await {
                return error;
            }
        }
    }

    async fn step(&mut self, on_lease: &mut impl FnMut(Option<&Lease>)) -> Result<(), DhcpError> {
        let carrier = self.netlink.link(self.index).await;
        let carrier = carrier
            .map_err(|source| self.netlink_failed(source))?
            .carrier;
        let actions = self.machine.carrier(carrier, Instant::now());
        self.perform(actions, on_lease).await?;
        // Until the carrier may have changed:
        loop {
            let deadline = self.machine.deadline();
            let timeout = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let actions = tokio::select! {
                changed = self.monitor.changed() => {
                    return changed.map_err(|source| self.netlink_failed(source));
                }
                frame = receive(&self.socket) => {
                    let frame = frame.map_err(|source| DhcpError::Socket {
                        interface: self.interface.clone(),
                        step: "receive",
                        source,
                    })?;
                    match wire::parse(&frame) {
                        Ok(reply) => self.machine.received(&reply, Instant::now()),
                        Err(flaw) => {
                            tracing::debug!(interface = %self.interface, %flaw, "ignored an invalid DHCP message");
                            Vec::new()
                        }
                    }
                }
                () = timeout => self.machine.timeout(Instant::now()),
            };
            self.perform(actions, on_lease).await?;
        }
    }

    async fn perform(
        &mut self,
        actions: Vec<Action>,
        on_lease: &mut impl FnMut(Option<&Lease>),
    ) -> Result<(), DhcpError> {
        for action in actions {
            match action {
                Action::Broadcast(message) => self.broadcast(&message),
                Action::Renew {
                    from,
                    server,
                    message,
                } => self.unicast(from, server, &message),
                Action::Configure(lease) => {
                    self.renewing = None;
                    let done = self.configure(&lease).await;
                    done.map_err(|source| self.netlink_failed(source))?;
                    if self.configured.as_ref() != Some(&lease) {
                        tracing::info!(interface = %self.interface, address = %lease.address, server = %lease.server, "got a DHCP lease");
                    }
                    on_lease(Some(&lease));
                    self.configured = Some(lease);
                }
                Action::Unconfigure => {
                    self.renewing = None;
                    tracing::warn!(interface = %self.interface, "lost the DHCP lease");
                    if let Some(lease) = self.configured.take() {
                        let done = self.unconfigure(&lease).await;
                        done.map_err(|source| self.netlink_failed(source))?;
                    }
                    on_lease(None);
                }
            }
        }
        Ok(())
    }

    /// A send error is treated like a lost message: the message is sent again at the next deadline.
    fn broadcast(&self, message: &[u8]) {
        let frame = wire::broadcast(self.machine.mac(), message);
        if let Err(error) = self.socket.write(&frame) {
            tracing::debug!(interface = %self.interface, %error, "cannot send a DHCP message");
        }
    }

    fn unicast(&mut self, from: Ipv4Addr, server: Ipv4Addr, message: &[u8]) {
        if self.renewing.is_none() {
            self.renewing = renewing_socket(&self.interface, from)
                .inspect_err(|error| {
                    tracing::debug!(interface = %self.interface, %error, "cannot open a socket to renew the lease");
                })
                .ok();
        }
        if let Some(socket) = &self.renewing
            && let Err(error) = socket.send_to(message, (server, wire::SERVER_PORT))
        {
            tracing::debug!(interface = %self.interface, %error, "cannot send a DHCP message");
        }
    }

    async fn configure(&self, lease: &Lease) -> Result<(), NetlinkError> {
        let (netlink, index) = (&self.netlink, self.index);
        if let Some(mtu) = lease.mtu
            && netlink.link(index).await?.mtu != u32::from(mtu)
        {
            // Not every device supports it; the network still works, with fragmentation.
            if let Err(error) = netlink.set_mtu(index, mtu.into()).await {
                tracing::warn!(interface = %self.interface, %error, "cannot set the MTU of the network");
            }
        }
        netlink.set_ipv4_addresses(index, &[lease.address]).await?;
        let routes = self.routes(lease);
        for old in self.configured.iter().flat_map(|old| self.routes(old)) {
            if !routes.contains(&old) {
                netlink.remove_route(index, old).await?;
            }
        }
        for route in routes {
            // One invalid route must not cost the node its address.
            if let Err(error) = netlink.replace_route(index, route).await {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(interface = %self.interface, %error, cause, "cannot add a route of the lease");
            }
        }
        Ok(())
    }

    async fn unconfigure(&self, lease: &Lease) -> Result<(), NetlinkError> {
        for route in self.routes(lease) {
            self.netlink.remove_route(self.index, route).await?;
        }
        self.netlink.remove_address(self.index, lease.address).await
    }

    fn routes(&self, lease: &Lease) -> Vec<Route> {
        let route = |leased: &LeasedRoute| Route {
            source: None,
            destination: leased.destination,
            gateway: leased.gateway.map(IpAddr::V4),
            metric: self.options.metric,
        };
        lease.routes.iter().map(route).collect()
    }

    fn netlink_failed(&self, source: NetlinkError) -> DhcpError {
        DhcpError::Netlink {
            interface: self.interface.clone(),
            source,
        }
    }
}

async fn receive(socket: &Watched) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; wire::MAX_FRAME];
    loop {
        match socket.read(&mut buffer).await {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            // Reported once when the interface goes down; the monitor reports it too.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
            Err(error) => return Err(error),
        }
    }
}

fn renewing_socket(interface: &str, from: Ipv4Addr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddrV4::new(from, wire::CLIENT_PORT))?;
    socket::setsockopt(&socket, sockopt::BindToDevice, &interface.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
