//! A simulated machine that opens connections: a network card, and smoltcp's DHCP client, TCP, UDP and ICMP.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_switch::Mac;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::{dhcpv4, icmp, tcp, udp};
use smoltcp::wire::{
    EthernetAddress, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr, IpCidr, Ipv6Cidr,
};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use super::{Card, plug, read, write};

/// The size of each buffer.
const BUFFER: usize = 64 << 10;

/// A simulated machine; runs until it is dropped.
pub(crate) struct Client {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

struct Shared {
    stack: Mutex<Stack>,
    /// The stack has done something.
    changed: Notify,
    /// There is something for the stack to do.
    work: Notify,
}

struct Stack {
    card: Card,
    interface: Interface,
    sockets: SocketSet<'static>,
    dhcp: SocketHandle,
    lease: Option<Lease>,
    started: Instant,
    next_port: u16,
}

/// What DHCP has told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) address: Ipv4Addr,
    pub(crate) router: Option<Ipv4Addr>,
    pub(crate) resolvers: Vec<Ipv4Addr>,
}

impl Shared {
    /// Tries until there is a result.
    async fn until<T>(&self, mut attempt: impl FnMut(&mut Stack) -> Option<T>) -> T {
        loop {
            let mut changed = Box::pin(self.changed.notified());
            changed.as_mut().enable();
            let done = attempt(&mut self.stack.lock().expect("not poisoned"));
            match done {
                Some(done) => {
                    self.work.notify_one();
                    return done;
                }
                None => changed.await,
            }
        }
    }

    fn now<T>(&self, act: impl FnOnce(&mut Stack) -> T) -> T {
        let done = act(&mut self.stack.lock().expect("not poisoned"));
        self.work.notify_one();
        done
    }

    async fn run(self: Arc<Self>, stream: UnixStream) {
        let mut input = Vec::new();
        let mut received = VecDeque::new();
        loop {
            let (mut sent, delay) = {
                let mut stack = self.stack.lock().expect("not poisoned");
                stack.card.received.append(&mut received);
                stack.poll();
                (std::mem::take(&mut stack.card.sent), stack.delay())
            };
            self.changed.notify_waiters();
            if !write(&stream, &mut sent).await {
                return;
            }
            tokio::select! {
                read = read(&stream, &mut input, &mut received) => {
                    if !read {
                        return;
                    }
                }
                () = self.work.notified() => {}
                () = tokio::time::sleep(delay) => {}
            }
        }
    }
}

impl Stack {
    fn new(mac: Mac) -> Self {
        let mut card = Card::default();
        let mut config = Config::new(EthernetAddress(mac.0).into());
        config.random_seed = u64::from(mac.0[5]) + 1;
        let interface = Interface::new(config, &mut card, smoltcp::time::Instant::ZERO);
        let mut sockets = SocketSet::new(Vec::new());
        Self {
            card,
            interface,
            dhcp: sockets.add(dhcpv4::Socket::new()),
            sockets,
            lease: None,
            started: Instant::now(),
            next_port: 40_000,
        }
    }

    fn clock(&self) -> smoltcp::time::Instant {
        let micros = self.started.elapsed().as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(micros).expect("a short test"))
    }

    fn poll(&mut self) {
        let now = self.clock();
        self.interface.poll(now, &mut self.card, &mut self.sockets);
        let event = self.sockets.get_mut::<dhcpv4::Socket<'_>>(self.dhcp).poll();
        if let Some(dhcpv4::Event::Configured(config)) = event {
            self.lease = Some(Lease {
                address: config.address.address(),
                router: config.router,
                resolvers: config.dns_servers.to_vec(),
            });
            self.interface.update_ip_addrs(|addresses| {
                addresses.retain(|address| matches!(address, IpCidr::Ipv6(_)));
                addresses
                    .push(IpCidr::Ipv4(config.address))
                    .expect("room for one");
            });
            if let Some(router) = config.router {
                let routes = self.interface.routes_mut();
                routes.add_default_ipv4_route(router).expect("room for one");
            }
        }
    }

    fn delay(&mut self) -> Duration {
        let now = self.clock();
        let delay = self.interface.poll_delay(now, &self.sockets);
        delay.map_or(Duration::from_secs(1), Duration::from)
    }

    fn port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }
}

impl Client {
    /// Connects a machine, and waits for its address.
    pub(crate) async fn start(socket: &Path, mac: Mac) -> Self {
        let shared = Arc::new(Shared {
            stack: Mutex::new(Stack::new(mac)),
            changed: Notify::new(),
            work: Notify::new(),
        });
        let task = tokio::spawn(shared.clone().run(plug(socket).await));
        let client = Self {
            shared,
            _task: AbortOnDropHandle::new(task),
        };
        client.lease().await;
        client
    }

    pub(crate) async fn lease(&self) -> Lease {
        self.shared.until(|stack| stack.lease.clone()).await
    }

    /// Gives the machine an IPv6 address, of a subnet of 64 bits, and a router.
    pub(crate) fn configure6(&self, address: Ipv6Addr, router: Ipv6Addr) {
        self.shared.now(|stack| {
            stack.interface.update_ip_addrs(|addresses| {
                let cidr = IpCidr::Ipv6(Ipv6Cidr::new(address, 64));
                addresses.push(cidr).expect("room");
            });
            let routes = stack.interface.routes_mut();
            routes.add_default_ipv6_route(router).expect("room for one");
        });
    }

    /// Begins a connection.
    pub(crate) fn connecting(&self, to: SocketAddr) -> Connection {
        let handle = self.shared.now(|stack| {
            let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
            let mut socket = tcp::Socket::new(buffer(), buffer());
            socket.set_nagle_enabled(false);
            // Makes smoltcp repeat an end, which it may otherwise stop to do when segments are lost.
            socket.set_keep_alive(Some(smoltcp::time::Duration::from_secs(1)));
            let local = stack.port();
            let connected = socket.connect(stack.interface.context(), to, local);
            connected.expect("a route");
            stack.sockets.add(socket)
        });
        Connection {
            shared: self.shared.clone(),
            handle,
        }
    }

    /// Makes a connection.
    pub(crate) async fn connect(&self, to: SocketAddr) -> io::Result<Connection> {
        let connection = self.connecting(to);
        let state = connection.socket(|socket| match socket.state() {
            state if is_opening(state) => None,
            state => Some(state),
        });
        match state.await {
            tcp::State::Closed => Err(ErrorKind::ConnectionRefused.into()),
            _ => Ok(connection),
        }
    }

    /// A UDP socket, and one that receives what ICMP says of it.
    pub(crate) fn udp(&self) -> Datagrams {
        let (udp, icmp) = self.shared.now(|stack| {
            let port = stack.port();
            let buffer =
                || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 64], vec![0; BUFFER]);
            let mut udp = udp::Socket::new(buffer(), buffer());
            udp.bind(port).expect("a port");
            let mut icmp = icmp_socket();
            icmp.bind(icmp::Endpoint::Udp(port.into())).expect("a port");
            (stack.sockets.add(udp), stack.sockets.add(icmp))
        });
        Datagrams {
            shared: self.shared.clone(),
            udp,
            icmp,
        }
    }

    /// Sends an echo request, and waits for its reply.
    pub(crate) async fn ping(&self, to: IpAddr, data: &[u8]) -> Vec<u8> {
        let ident = 0x1234;
        let handle = self.shared.now(|stack| {
            let mut socket = icmp_socket();
            socket.bind(icmp::Endpoint::Ident(ident)).expect("free");
            let bytes = socket.send(8 + data.len(), to.into()).expect("room");
            echo_request(to, ident, data, bytes);
            stack.sockets.add(socket)
        });
        self.shared
            .until(|stack| {
                let socket = stack.sockets.get_mut::<icmp::Socket<'_>>(handle);
                let (bytes, from) = socket.recv().ok()?;
                assert_eq!(IpAddr::from(from), to);
                Some(echoed(to, bytes).to_vec())
            })
            .await
    }
}

/// Writes an echo request. The stack computes the checksum.
fn echo_request(to: IpAddr, ident: u16, data: &[u8], bytes: &mut [u8]) {
    let (checksums, seq_no) = (ChecksumCapabilities::default(), 1);
    match to {
        IpAddr::V4(_) => {
            let mut packet = Icmpv4Packet::new_unchecked(bytes);
            #[rustfmt::skip]
            let request = Icmpv4Repr::EchoRequest { ident, seq_no, data };
            request.emit(&mut packet, &checksums);
        }
        IpAddr::V6(to) => {
            let mut packet = Icmpv6Packet::new_unchecked(bytes);
            #[rustfmt::skip]
            let request = Icmpv6Repr::EchoRequest { ident, seq_no, data };
            request.emit(&Ipv6Addr::UNSPECIFIED, &to, &mut packet, &checksums);
        }
    }
}

/// The data of an echo reply.
fn echoed(from: IpAddr, bytes: &[u8]) -> &[u8] {
    let checksums = ChecksumCapabilities::ignored();
    match from {
        IpAddr::V4(_) => {
            let packet = Icmpv4Packet::new_checked(bytes).expect("ICMP");
            match Icmpv4Repr::parse(&packet, &checksums) {
                Ok(Icmpv4Repr::EchoReply { data, .. }) => data,
                other => panic!("expected an echo reply, got {other:?}"),
            }
        }
        IpAddr::V6(from) => {
            let packet = Icmpv6Packet::new_checked(bytes).expect("ICMPv6");
            match Icmpv6Repr::parse(&from, &from, &packet, &checksums) {
                Ok(Icmpv6Repr::EchoReply { data, .. }) => data,
                other => panic!("expected an echo reply, got {other:?}"),
            }
        }
    }
}

fn is_opening(state: tcp::State) -> bool {
    matches!(state, tcp::State::SynSent | tcp::State::SynReceived)
}

fn icmp_socket() -> icmp::Socket<'static> {
    let buffer = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 8], vec![0; 8 << 10]);
    icmp::Socket::new(buffer(), buffer())
}

/// A connection of the machine.
pub(crate) struct Connection {
    shared: Arc<Shared>,
    handle: SocketHandle,
}

impl Connection {
    async fn socket<T>(
        &self,
        mut attempt: impl FnMut(&mut tcp::Socket<'static>) -> Option<T>,
    ) -> T {
        let handle = self.handle;
        self.shared
            .until(|stack| attempt(stack.sockets.get_mut(handle)))
            .await
    }

    pub(crate) fn state(&self) -> tcp::State {
        let handle = self.handle;
        self.shared
            .now(|stack| stack.sockets.get_mut::<tcp::Socket<'_>>(handle).state())
    }

    /// Sends everything; an error: it was reset.
    pub(crate) async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let sent = self.socket(|socket| match socket.send_slice(rest) {
                Ok(0) => None,
                Ok(sent) => Some(Ok(sent)),
                Err(_) => Some(Err(io::Error::from(ErrorKind::ConnectionReset))),
            });
            rest = &rest[sent.await?..];
        }
        Ok(())
    }

    /// Some bytes, none at the end.
    pub(crate) async fn receive(&self) -> io::Result<Vec<u8>> {
        self.socket(|socket| {
            let bytes = socket.recv(|bytes| (bytes.len(), bytes.to_vec()));
            match bytes {
                Ok(bytes) if bytes.is_empty() => None,
                Ok(bytes) => Some(Ok(bytes)),
                Err(tcp::RecvError::Finished) => Some(Ok(Vec::new())),
                Err(tcp::RecvError::InvalidState) if is_opening(socket.state()) => None,
                Err(tcp::RecvError::InvalidState) => Some(Err(ErrorKind::ConnectionReset.into())),
            }
        })
        .await
    }

    /// Everything until the end.
    pub(crate) async fn receive_all(&self) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let bytes = self.receive().await?;
            if bytes.is_empty() {
                return Ok(all);
            }
            all.extend(bytes);
        }
    }

    /// Ends this direction.
    pub(crate) fn close(&self) {
        let handle = self.handle;
        self.shared
            .now(|stack| stack.sockets.get_mut::<tcp::Socket<'_>>(handle).close());
    }

    /// Resets it.
    pub(crate) fn abort(&self) {
        let handle = self.handle;
        self.shared
            .now(|stack| stack.sockets.get_mut::<tcp::Socket<'_>>(handle).abort());
    }
}

/// A UDP socket of the machine.
pub(crate) struct Datagrams {
    shared: Arc<Shared>,
    udp: SocketHandle,
    icmp: SocketHandle,
}

impl Datagrams {
    pub(crate) fn send(&self, to: SocketAddr, bytes: &[u8]) {
        self.shared.now(|stack| {
            let socket = stack.sockets.get_mut::<udp::Socket<'_>>(self.udp);
            socket.send_slice(bytes, to).expect("room");
        });
    }

    /// A datagram and its source.
    pub(crate) async fn receive(&self) -> (SocketAddr, Vec<u8>) {
        self.shared
            .until(|stack| {
                let socket = stack.sockets.get_mut::<udp::Socket<'_>>(self.udp);
                let (bytes, from) = socket.recv().ok()?;
                let from = SocketAddr::new(from.endpoint.addr.into(), from.endpoint.port);
                Some((from, bytes.to_vec()))
            })
            .await
    }

    /// The source and the type and code of an ICMP message about what was sent.
    pub(crate) async fn receive_error(&self) -> (IpAddr, [u8; 2]) {
        self.shared
            .until(|stack| {
                let socket = stack.sockets.get_mut::<icmp::Socket<'_>>(self.icmp);
                let (bytes, from) = socket.recv().ok()?;
                Some((from.into(), [bytes[0], bytes[1]]))
            })
            .await
    }
}
