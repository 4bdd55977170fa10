//! A simulated machine: a network card, smoltcp's DHCP client and TCP, and a service. For the switch it is like any
//! other.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code)]

pub(crate) mod client;
pub(crate) mod world;

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_switch::Mac;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium, TxToken as _};
use smoltcp::socket::{dhcpv4, tcp};
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol,
    HardwareAddress, IpCidr,
};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

/// What is done with the bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// They are sent back, followed by the end.
    Echo,
    /// They are not read.
    Ignore,
    /// The connection is reset at the first byte.
    Reset,
    /// This many zeros are sent at once, and then the end.
    Give(usize),
}

/// An address that a machine has besides its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) address: Option<Ipv4Addr>,
    /// Whether the machine says so, or waits to be asked.
    pub(crate) announced: bool,
}

/// A simulated machine; runs until it is dropped.
pub(crate) struct Machine {
    address: watch::Receiver<Option<Ipv4Addr>>,
    shares: mpsc::UnboundedSender<(Shared, oneshot::Sender<()>)>,
    _task: AbortOnDropHandle<()>,
}

impl Machine {
    /// Connects a machine that serves a number of simultaneous connections on each of these ports.
    pub(crate) async fn start(socket: &Path, mac: Mac, services: &[(u16, Service, usize)]) -> Self {
        let stream = plug(socket).await;
        let (address_in, address) = watch::channel(None);
        let stack = Stack::new(mac, services);
        let (shares, shares_out) = mpsc::unbounded_channel();
        let task = tokio::spawn(stack.run(stream, address_in, shares_out));
        Self {
            address,
            shares,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Waits until it has an address that is `wanted`.
    pub(crate) async fn has_address(&mut self, wanted: Ipv4Addr) {
        self.address
            .wait_for(|address| *address == Some(wanted))
            .await
            .expect("the machine runs");
    }

    /// Gives it this address in addition, or takes it away. At the end it has, or has not.
    pub(crate) async fn share(&self, shared: Shared) {
        let (done_in, done) = oneshot::channel();
        self.shares.send((shared, done_in)).expect("it runs");
        done.await.expect("it runs");
    }

    /// Its address.
    pub(crate) fn address(&self) -> Option<Ipv4Addr> {
        *self.address.borrow()
    }
}

/// Connects to a port. A socket's address holds 107 bytes; folders are longer
/// than that.
pub(crate) async fn plug(socket: &Path) -> UnixStream {
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("s");
    std::os::unix::fs::symlink(socket, &link).expect("a link");
    UnixStream::connect(link).await.expect("the switch listens")
}

/// The card: received frames, and the stream of sent ones.
#[derive(Default)]
struct Card {
    received: VecDeque<Vec<u8>>,
    sent: Vec<u8>,
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sent<'a>(&'a mut Vec<u8>);

impl phy::TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        let prefix = u32::try_from(length).expect("a short frame").to_be_bytes();
        self.0.extend_from_slice(&prefix);
        let start = self.0.len();
        self.0.resize(start + length, 0);
        f(&mut self.0[start..])
    }
}

impl Device for Card {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sent<'_>)> {
        let frame = self.received.pop_front()?;
        Some((Received(frame), Sent(&mut self.sent)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sent<'_>> {
        Some(Sent(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities
    }
}

struct Listener {
    handle: SocketHandle,
    port: u16,
    service: Service,
    given: usize,
}

struct Stack {
    card: Card,
    interface: Interface,
    sockets: SocketSet<'static>,
    dhcp: SocketHandle,
    listeners: Vec<Listener>,
    started: Instant,
}

impl Stack {
    fn new(mac: Mac, services: &[(u16, Service, usize)]) -> Self {
        let mut card = Card::default();
        let mut config = Config::new(EthernetAddress(mac.0).into());
        config.random_seed = u64::from(mac.0[5]) + 1;
        let interface = Interface::new(config, &mut card, smoltcp::time::Instant::ZERO);
        let mut sockets = SocketSet::new(Vec::new());
        let dhcp = sockets.add(dhcpv4::Socket::new());
        let mut listeners = Vec::new();
        for (port, service, count) in services {
            for _ in 0..*count {
                let buffer = || tcp::SocketBuffer::new(vec![0; 16 << 10]);
                listeners.push(Listener {
                    handle: sockets.add(tcp::Socket::new(buffer(), buffer())),
                    port: *port,
                    service: *service,
                    given: 0,
                });
            }
        }
        Self {
            card,
            interface,
            sockets,
            dhcp,
            listeners,
            started: Instant::now(),
        }
    }

    fn now(&self) -> smoltcp::time::Instant {
        let micros = self.started.elapsed().as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(micros).expect("a short test"))
    }

    async fn run(
        mut self,
        stream: UnixStream,
        address: watch::Sender<Option<Ipv4Addr>>,
        mut shares: mpsc::UnboundedReceiver<(Shared, oneshot::Sender<()>)>,
    ) {
        let mut input = Vec::new();
        loop {
            // One frame at a time, so that a place is free again for a request that comes with a reset.
            loop {
                let is_last = self.card.received.len() < 2;
                let now = self.now();
                self.interface
                    .poll_ingress_single(now, &mut self.card, &mut self.sockets);
                self.configure(&address);
                for index in 0..self.listeners.len() {
                    self.serve(index);
                }
                if is_last {
                    break;
                }
            }
            let now = self.now();
            self.interface.poll(now, &mut self.card, &mut self.sockets);
            if !write(&stream, &mut self.card.sent).await {
                return;
            }
            let delay = self.interface.poll_delay(self.now(), &self.sockets);
            let delay = delay.map_or(Duration::from_secs(1), Duration::from);
            tokio::select! {
                read = read(&stream, &mut input, &mut self.card.received) => {
                    if !read {
                        return;
                    }
                }
                Some((shared, done)) = shares.recv() => {
                    self.share(shared);
                    // Who has asked may be gone.
                    let _ = done.send(());
                }
                () = tokio::time::sleep(delay) => {}
            }
        }
    }

    /// The first address is that of DHCP.
    fn share(&mut self, shared: Shared) {
        self.interface.update_ip_addrs(|addresses| {
            addresses.truncate(1);
            if let Some(address) = shared.address {
                let cidr = IpCidr::new(address.into(), 32);
                addresses.push(cidr).expect("room for two");
            }
        });
        if let Some(address) = shared.address.filter(|_| shared.announced) {
            let HardwareAddress::Ethernet(mac) = self.interface.hardware_addr() else {
                panic!("an Ethernet card");
            };
            let announcement = ArpRepr::EthernetIpv4 {
                operation: ArpOperation::Request,
                source_hardware_addr: mac,
                source_protocol_addr: address,
                target_hardware_addr: EthernetAddress([0; 6]),
                target_protocol_addr: address,
            };
            let length = EthernetFrame::<&[u8]>::buffer_len(announcement.buffer_len());
            Sent(&mut self.card.sent).consume(length, |bytes| {
                let mut frame = EthernetFrame::new_unchecked(bytes);
                frame.set_src_addr(mac);
                frame.set_dst_addr(EthernetAddress::BROADCAST);
                frame.set_ethertype(EthernetProtocol::Arp);
                announcement.emit(&mut ArpPacket::new_unchecked(frame.payload_mut()));
            });
        }
    }

    fn configure(&mut self, address: &watch::Sender<Option<Ipv4Addr>>) {
        let event = self.sockets.get_mut::<dhcpv4::Socket<'_>>(self.dhcp).poll();
        let (cidr, router) = match event {
            None => return,
            Some(dhcpv4::Event::Configured(config)) => (Some(config.address), config.router),
            Some(dhcpv4::Event::Deconfigured) => (None, None),
        };
        self.interface.update_ip_addrs(|addresses| {
            addresses.clear();
            if let Some(cidr) = cidr {
                addresses.push(IpCidr::Ipv4(cidr)).expect("room for one");
            }
        });
        self.interface.routes_mut().remove_default_ipv4_route();
        if let Some(router) = router {
            let routes = self.interface.routes_mut();
            routes.add_default_ipv4_route(router).expect("room for one");
        }
        address.send_replace(cidr.map(|cidr| cidr.address()));
    }

    fn serve(&mut self, index: usize) {
        let listener = &mut self.listeners[index];
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(listener.handle);
        if !socket.is_open() {
            listener.given = 0;
            socket.listen(listener.port).expect("it is closed");
        }
        match listener.service {
            Service::Ignore => {}
            Service::Reset => {
                if socket.can_recv() {
                    socket.abort();
                }
            }
            Service::Give(total) => {
                while socket.can_send() && listener.given < total {
                    let left = total - listener.given;
                    let given = socket.send(|room| {
                        let part = room.len().min(left);
                        room[..part].fill(0);
                        (part, part)
                    });
                    listener.given += given.expect("it can send");
                }
                if listener.given == total {
                    socket.close();
                }
            }
            Service::Echo => {
                while socket.can_recv() && socket.can_send() {
                    let mut buffer = [0; 4096];
                    let room = (socket.send_capacity() - socket.send_queue()).min(buffer.len());
                    let read = socket.recv_slice(&mut buffer[..room]).expect("it can");
                    assert_eq!(socket.send_slice(&buffer[..read]), Ok(read));
                }
                if socket.state() == tcp::State::CloseWait && !socket.can_recv() {
                    socket.close();
                }
            }
        }
    }
}

async fn write(stream: &UnixStream, bytes: &mut Vec<u8>) -> bool {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(written) => drop(bytes.drain(..written)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if stream.writable().await.is_err() {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// Reads what is there; `false` at the end. Cancel safe.
async fn read(stream: &UnixStream, input: &mut Vec<u8>, frames: &mut VecDeque<Vec<u8>>) -> bool {
    if stream.readable().await.is_err() {
        return false;
    }
    let mut chunk = vec![0; 64 << 10];
    match stream.try_read(&mut chunk) {
        Ok(0) => return false,
        Ok(read) => input.extend_from_slice(&chunk[..read]),
        Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
        Err(_) => return false,
    }
    let mut used = 0;
    while let Some((length, rest)) = input[used..].split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        if rest.len() < length {
            break;
        }
        frames.push_back(rest[..length].to_vec());
        used += 4 + length;
    }
    input.drain(..used);
    true
}
