//! A DHCP client (RFC 2131) for one interface.
//!
//! It gets a lease as fast as the network allows (the first message is sent as soon as there is a
//! carrier, because it is on the critical path of the boot), keeps it by renewing and rebinding,
//! configures the interface, and publishes the lease as an event value. When the carrier is lost,
//! the lease is kept; when it is back, the client verifies the lease with the network, which may be
//! another one. A NAK or the expiry of the lease removes the address at once.
//!
//! # Parts
//! - `message`: the format of messages; `domains`: that of two options; `wire`: the frames around them, and the checks of received
//!   data.
//! - `machine`: the protocol as a pure state machine, without socket or clock.
//! - `duplicates`: whether another machine has the address.
//! - this module: sockets, timers and the configuration of the kernel.
//!
//! # Why no library
//! The maintained client library (mozim 0.3) ignores NAKs, keeps an offer forever that the server
//! does not confirm, waits before its first message, and cannot run on a simulated clock. The
//! maintained codec (dhcproto 0.15) panics on messages that anyone on the network can send (option
//! 94 with a length other than 3, a hardware address longer than 16), and depends on a DNS library;
//! of its hundred options we use twelve.
//!
//! Conflicts are looked for while the address is used already (`duplicates`): to wait for that would take seconds at each boot.
//!
//! This client owns the interface's IPv4 configuration: when it gets a lease, it removes all other
//! addresses. What it configures is planned as static configuration is ([`Addressing`]).
//!
//! A server can lead packets elsewhere by its routes. Networks that the machine uses otherwise are
//! [reserved](Options::reserved): an offer of an address in them is not taken, and routes to them or to parts of them
//! are not either. Their owner learns of them while the client runs. An address that is held by then stays, because
//! without it nobody could reach the machine to mend it; the routes go.

pub(crate) mod domains;
mod duplicates;
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

use hearth_base::deadline;
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Outcome};
use nix::sys::socket::{self, sockopt};
use tokio::time::Instant;

use super::addressing::Addressing;
use super::cidr::Cidr;
use super::netlink::{Link, LinkMonitor, Netlink, NetlinkError, Route};
use super::random;
use super::raw::{self, Watched};
use duplicates::Duplicates;
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
    /// The domain of the network, and those in which names are looked up, as far as they are valid; each once.
    pub domains: Vec<String>,
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
        let default = self.routes.iter().find(|r| r.destination.is_all());
        default.and_then(|route| route.gateway)
    }
}

/// The options of the client.
#[derive(Clone, Debug)]
pub struct Options {
    /// The host name that is sent to servers, asked before each message; `None` sends none.
    pub host_name: fn() -> Option<String>,
    /// The metric of the routes from the lease.
    pub metric: u32,
    /// Routes in addition to those of the lease.
    pub routes: Vec<Route>,
    /// The MTU in bytes, in the place of that of the lease.
    pub mtu: Option<u32>,
    /// Networks that are used otherwise. No lease of an address in them is taken, and no route to them.
    pub reserved: Value<Vec<Cidr>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            host_name: || None,
            metric: 100,
            routes: Vec::new(),
            mtu: None,
            reserved: event::value().1,
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
    link: Link,
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
    /// What was applied to the interface for it.
    applied: Addressing,
    reserved: Watcher<Vec<Cidr>>,
    duplicates: Duplicates,
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
        let machine = Machine::new(mac, Box::new(random::number));
        Ok(Self {
            reserved: options.reserved.watch(),
            link,
            options,
            netlink,
            monitor,
            socket,
            machine,
            renewing: None,
            configured: None,
            applied: Addressing::default(),
            duplicates: Duplicates::default(),
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
        self.machine.set_host_name((self.options.host_name)());
        let carrier = self.netlink.link(self.link.index).await;
        let carrier = carrier
            .map_err(|source| self.netlink_failed(source))?
            .carrier;
        let actions = self.machine.carrier(carrier, Instant::now());
        self.perform(actions, on_lease).await?;
        // Until the carrier may have changed:
        loop {
            let deadline = self.machine.deadline();
            let actions = tokio::select! {
                changed = self.monitor.changed() => {
                    return changed.map_err(|source| self.netlink_failed(source));
                }
                frame = receive(&self.socket) => {
                    let frame = frame.map_err(|source| DhcpError::Socket {
                        interface: self.link.name.clone(),
                        step: "receive",
                        source,
                    })?;
                    match wire::parse(&frame) {
                        Ok(reply) => self.machine.received(&reply, Instant::now()),
                        Err(flaw) => {
                            tracing::debug!(interface = %self.link.name, %flaw, "ignored an invalid DHCP message");
                            Vec::new()
                        }
                    }
                }
                () = deadline::passed(deadline) => {
                    self.machine.set_host_name((self.options.host_name)());
                    self.machine.timeout(Instant::now())
                }
                claim = self.duplicates.next() => self.claimed(&claim),
                Ok(reserved) = self.reserved.next() => {
                    self.machine.set_reserved(reserved);
                    let held = self.configured.clone();
                    held.map(Action::Configure).into_iter().collect()
                }
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
                    self.configure(&lease).await?;
                    if self.configured.as_ref() != Some(&lease) {
                        tracing::info!(interface = %self.link.name, address = %lease.address, server = %lease.server, "got a DHCP lease");
                    }
                    self.duplicates
                        .watch(self.link.index, self.machine.mac(), &lease);
                    on_lease(Some(&lease));
                    self.configured = Some(lease);
                }
                Action::Unconfigure => {
                    self.renewing = None;
                    self.duplicates.stop();
                    tracing::warn!(interface = %self.link.name, "lost the DHCP lease");
                    if self.configured.take().is_some() {
                        let applied = std::mem::take(&mut self.applied);
                        let done = applied.remove(&self.netlink, self.link.index).await;
                        done.map_err(|source| self.netlink_failed(source))?;
                    }
                    on_lease(None);
                }
                Action::Refuse { offer, reserved } => {
                    tracing::warn!(interface = %self.link.name, server = %offer.server, "refused a DHCP offer: its address {} is in {reserved}, which is used for pods and services", offer.address);
                }
            }
        }
        Ok(())
    }

    fn claimed(&mut self, claim: &duplicates::Claim) -> Vec<Action> {
        let address = self.configured.as_ref().map(|lease| lease.address);
        let address = address.map(|it| it.to_string()).unwrap_or_default();
        let by = claim.by.map(|byte| format!("{byte:02x}")).join(":");
        tracing::warn!(interface = %self.link.name, address, by, "another machine uses the address of the DHCP lease");
        if claim.is_new {
            return self.machine.conflict(Instant::now());
        }
        Vec::new()
    }

    /// A send error is treated like a lost message: the message is sent again at the next deadline.
    fn broadcast(&self, message: &[u8]) {
        let frame = wire::broadcast(self.machine.mac(), message);
        if let Err(error) = self.socket.write(&frame) {
            tracing::debug!(interface = %self.link.name, %error, "cannot send a DHCP message");
        }
    }

    fn unicast(&mut self, from: Ipv4Addr, server: Ipv4Addr, message: &[u8]) {
        if self.renewing.is_none() {
            self.renewing = renewing_socket(&self.link.name, from)
                .inspect_err(|error| {
                    tracing::debug!(interface = %self.link.name, %error, "cannot open a socket to renew the lease");
                })
                .ok();
        }
        if let Some(socket) = &self.renewing
            && let Err(error) = socket.send_to(message, (server, wire::SERVER_PORT))
        {
            tracing::debug!(interface = %self.link.name, %error, "cannot send a DHCP message");
        }
    }

    async fn configure(&mut self, lease: &Lease) -> Result<(), DhcpError> {
        let wanted = self.wanted(lease);
        let before = std::mem::replace(&mut self.applied, wanted);
        let netlink = &self.netlink;
        let Err(error) = self.applied.apply(netlink, &self.link, &before).await else {
            return Ok(());
        };
        let addresses = netlink.addresses(self.link.index).await;
        if !addresses.is_ok_and(|all| all.contains(&lease.address)) {
            return Err(self.netlink_failed(error));
        }
        // One invalid route must not cost the node its address.
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        tracing::warn!(interface = %self.link.name, %error, cause, "cannot configure all of the lease");
        Ok(())
    }

    /// What is configured for a lease.
    fn wanted(&self, lease: &Lease) -> Addressing {
        let reserved = self.machine.reserved();
        let is_refused = |route: &&LeasedRoute| {
            let network = reserved.iter().find(|it| it.covers(&route.destination));
            network.is_some_and(|network| {
                tracing::warn!(interface = %self.link.name, server = %lease.server, "refused the route to {} of the lease: it is in {network}, which is used for pods and services", route.destination);
                true
            })
        };
        let leased = lease.routes.iter().filter(|route| !is_refused(route));
        let leased = leased.map(|leased| Route {
            source: None,
            destination: leased.destination,
            gateway: leased.gateway.map(IpAddr::V4),
            metric: self.options.metric,
        });
        Addressing {
            addresses: vec![lease.address],
            routes: leased.chain(self.options.routes.iter().copied()).collect(),
            mtu: self.options.mtu.or(lease.mtu.map(u32::from)),
        }
    }

    fn netlink_failed(&self, source: NetlinkError) -> DhcpError {
        DhcpError::Netlink {
            interface: self.link.name.clone(),
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
