//! A DHCP client (RFC 2131) for one interface.
//!
//! It obtains a lease as fast as the network allows (the first message goes
//! out the moment there is a carrier; boot time is a promise), keeps it by
//! renewing and rebinding, configures the interface, and publishes the lease
//! as an event value. A lost carrier keeps the lease; when the carrier is back
//! the lease is checked with the network, which may be another one. A refusal
//! (NAK) or expiry takes the address away at once.
//!
//! # Parts
//! - `message`: the format of messages; `wire`: the frames around them, and
//!   the checks on whatever comes in.
//! - `machine`: the protocol as a pure state machine, without socket or clock.
//! - this module: sockets, timers and the kernel's configuration around it.
//!
//! # Why no library
//! The maintained client library (mozim 0.3) ignores refusals, stays with an
//! offer that is not honoured for ever, waits before its first message, and
//! cannot be run against a simulated clock. The maintained codec (dhcproto
//! 0.15) panics on messages that anybody on the network can send (option 94
//! of another length than 3, a hardware address longer than 16), and brings
//! a DNS library with it; of its hundred options we use twelve.
//!
//! Left out on purpose: probing for address conflicts (it costs seconds at
//! boot; servers do it), and DHCPv6.
//!
//! The interface's IPv4 configuration belongs to this client alone: addresses
//! that are not the lease's are removed when one is obtained.

mod machine;
mod message;
mod wire;

#[cfg(test)]
mod tests;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::Arc,
    time::Duration,
};

use nix::sys::socket::{self, sockopt};
use tokio::time::Instant;

use super::{
    cidr::Cidr,
    netlink::{LinkMonitor, Netlink, NetlinkError, Route},
    raw::{self, Watched},
};
use hearth_base::event::Writer;
use hearth_base::supervisor::{Context, Outcome};
use machine::{Action, Machine};

/// What a server granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The address and the length of its network's prefix.
    pub address: Cidr,
    /// The server that granted it.
    pub server: Ipv4Addr,
    /// Routes, the default route among them if there is one.
    pub routes: Vec<LeasedRoute>,
    /// Name servers, in the server's order.
    pub name_servers: Vec<Ipv4Addr>,
    /// Time servers (NTP), in the server's order.
    pub time_servers: Vec<Ipv4Addr>,
    /// The network's domain, if the server tells one that could be one.
    pub domain: Option<String>,
    /// The network's MTU in bytes, if the server tells one.
    pub mtu: Option<u16>,
    /// How long it holds from when it was granted; `None` is for ever.
    pub duration: Option<Duration>,
    /// When to ask the same server to prolong it (T1).
    pub renew_after: Duration,
    /// When to ask any server to prolong it (T2).
    pub rebind_after: Duration,
}

/// A route that came with a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedRoute {
    /// Which addresses it is for.
    pub destination: Cidr,
    /// The neighbour that forwards; `None` for a directly attached network.
    pub gateway: Option<Ipv4Addr>,
}

impl Lease {
    /// The gateway of the default route.
    pub fn default_gateway(&self) -> Option<Ipv4Addr> {
        let default = self.routes.iter().find(|r| r.destination.prefix() == 0);
        default.and_then(|route| route.gateway)
    }
}

/// How to ask for a lease.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name to tell the server, if any.
    pub host_name: Option<String>,
    /// The metric of the routes that come with the lease.
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

/// Why the client had to stop. Nothing that the network does makes it stop.
#[derive(Debug, thiserror::Error)]
pub enum DhcpError {
    /// The interface could not be read or configured.
    #[error("DHCP on {interface}")]
    Netlink {
        /// The interface.
        interface: String,
        /// The cause.
        source: NetlinkError,
    },
    /// The interface has no Ethernet address.
    #[error("DHCP on {interface}: it has no Ethernet address")]
    NotEthernet {
        /// The interface.
        interface: String,
    },
    /// The interface's socket failed.
    #[error("DHCP on {interface}: cannot {step}")]
    Socket {
        /// The interface.
        interface: String,
        /// The step, as a verb.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Runs the client on an interface, as a runnable. Healthy once it listens;
/// a network without a server is no failure.
///
/// The lease is published while it is held and configured; `None` says that
/// there was one and is none now.
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

/// The client on one interface.
pub struct Client {
    interface: String,
    index: u32,
    options: Options,
    netlink: Netlink,
    monitor: LinkMonitor,
    socket: Watched,
    machine: Machine,
    /// Held while renewing, so that the kernel does not answer "port
    /// unreachable" to the server. What it receives comes by `socket`, too.
    renewing: Option<UdpSocket>,
    /// What has been configured.
    configured: Option<Lease>,
}

impl Client {
    /// Sets the interface up and listens on it.
    pub async fn open(interface: &str, options: Options) -> Result<Self, DhcpError> {
        let netlink_failed = |source| DhcpError::Netlink {
            interface: interface.to_owned(),
            source,
        };
        let netlink = Netlink::open().map_err(netlink_failed)?;
        // Before the state is first read, so that no change falls between.
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
        let machine = Machine::new(mac, options.host_name.clone(), Box::new(random));
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

    /// Runs until something other than the network fails. Each change of what
    /// is configured is told to `on_lease`, after it has been made.
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
                            tracing::debug!(interface = %self.interface, %flaw, "a DHCP message was ignored");
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
                        tracing::info!(interface = %self.interface, address = %lease.address, server = %lease.server, "leased");
                    }
                    on_lease(Some(&lease));
                    self.configured = Some(lease);
                }
                Action::Unconfigure => {
                    self.renewing = None;
                    tracing::warn!(interface = %self.interface, "the lease is lost");
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

    /// A message that is not sent is as good as one that was lost: it is sent
    /// again at the next deadline.
    fn broadcast(&self, message: &[u8]) {
        let frame = wire::broadcast(self.machine.mac(), message);
        if let Err(error) = self.socket.write(&frame) {
            tracing::debug!(interface = %self.interface, %error, "a DHCP message was not sent");
        }
    }

    fn unicast(&mut self, from: Ipv4Addr, server: Ipv4Addr, message: &[u8]) {
        if self.renewing.is_none() {
            self.renewing = renewing_socket(&self.interface, from)
                .inspect_err(|error| {
                    tracing::debug!(interface = %self.interface, %error, "no socket to renew the lease");
                })
                .ok();
        }
        if let Some(socket) = &self.renewing
            && let Err(error) = socket.send_to(message, (server, wire::SERVER_PORT))
        {
            tracing::debug!(interface = %self.interface, %error, "a DHCP message was not sent");
        }
    }

    async fn configure(&self, lease: &Lease) -> Result<(), NetlinkError> {
        let (netlink, index) = (&self.netlink, self.index);
        if let Some(mtu) = lease.mtu
            && netlink.link(index).await?.mtu != u32::from(mtu)
        {
            // Not every device can; the network still works, with fragments.
            if let Err(error) = netlink.set_mtu(index, mtu.into()).await {
                tracing::warn!(interface = %self.interface, %error, "the network's MTU was not set");
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
            // One senseless route must not cost the node its address.
            if let Err(error) = netlink.replace_route(index, route).await {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(interface = %self.interface, %error, cause, "a leased route was not made");
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
            // Told once when the interface goes down; the monitor tells too.
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

/// Unpredictable: a transaction id that can be guessed lets anybody answer.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // Cannot fail for so few bytes once the pool is ready, which the kernel
    // waits for; were it to, the worst is a guessable transaction.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
