//! The gateway: the one address of the network that does not belong to a machine.
//!
//! It answers ARP and pings, is the DHCP server, and is the source of the host's connections into the network
//! ([`super::tunnel`]). It does not route: packets of machines to other networks are dropped.
//!
//! A packet for a connection is found by its port and goes to that connection's own stack; all others go to a stack
//! without sockets, which answers like a host without services. Both process plain IP. The frames around it are made
//! here, because no address resolution is needed: a reply goes back to the sender's address, and a machine's Ethernet
//! address is known from its port.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Instant;

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium};
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, DHCP_CLIENT_PORT, DHCP_SERVER_PORT, EthernetAddress,
    EthernetFrame, EthernetProtocol, HardwareAddress, IpCidr, IpProtocol, Ipv4Packet, Ipv4Repr,
    TcpPacket, UdpPacket, UdpRepr,
};
use tokio::sync::Notify;

use super::fabric::HEADER;
use super::learning::Address;
use super::{GATEWAY_MAC, NetworkOptions, dhcp};

/// MTU of the IP packets on this network.
const MTU: usize = 1500;

/// Maximum number of bytes that wait for one connection, whose window is smaller.
const INBOX: usize = 512 << 10;

/// Source ports of connections from the gateway.
const FIRST_PORT: u16 = 32768;

/// smoltcp's time, derived from ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn at(self, now: Instant) -> smoltcp::time::Instant {
        let micros = now.saturating_duration_since(self.0).as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }
}

/// Received frames of a connection that have not been processed.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    frames: RefCell<VecDeque<Vec<u8>>>,
    bytes: Cell<usize>,
    /// Notified when a frame arrives.
    pub(super) arrived: Notify,
}

impl Inbox {
    fn put(&self, frame: Vec<u8>) {
        let bytes = self.bytes.get() + frame.len();
        // A machine that exceeds the window loses the frame.
        if bytes <= INBOX {
            self.bytes.set(bytes);
            self.frames.borrow_mut().push_back(frame);
            self.arrived.notify_one();
        }
    }

    /// Moves all frames to the input of a stack.
    pub(super) fn take(&self, wire: &mut Wire) {
        self.bytes.set(0);
        wire.received.append(&mut self.frames.borrow_mut());
    }
}

/// The device of a stack: IP packets in frames.
#[derive(Debug)]
pub(super) struct Wire {
    /// Frames with IP packets.
    pub(super) received: VecDeque<Vec<u8>>,
    /// Complete frames.
    pub(super) sent: Vec<Vec<u8>>,
    /// Their destination.
    pub(super) to: Address,
    /// Only answers may be sent now.
    pub(super) full: bool,
}

impl Wire {
    pub(super) fn new(to: Address) -> Self {
        Self {
            received: VecDeque::new(),
            sent: Vec::new(),
            to,
            full: false,
        }
    }

    /// A stack with this device and this address.
    pub(super) fn stack(
        &mut self,
        address: Ipv4Addr,
        prefix: u8,
        now: smoltcp::time::Instant,
    ) -> Interface {
        let mut config = Config::new(HardwareAddress::Ip);
        // For sequence numbers, not for faults.
        config.random_seed = fastrand::u64(..);
        let mut stack = Interface::new(config, self, now);
        stack.update_ip_addrs(|addresses| {
            // There is space for one.
            let _ = addresses.push(IpCidr::new(address.into(), prefix));
        });
        stack
    }
}

pub(super) struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0[HEADER..])
    }
}

pub(super) struct Sent<'a> {
    sent: &'a mut Vec<Vec<u8>>,
    to: Address,
}

impl phy::TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        let mut bytes = framed(self.to, EthernetProtocol::Ipv4, length);
        let done = f(&mut bytes[HEADER..]);
        self.sent.push(bytes);
        done
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sent<'_>)> {
        let frame = self.received.pop_front()?;
        let (sent, to) = (&mut self.sent, self.to);
        Some((Received(frame), Sent { sent, to }))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sent<'_>> {
        if self.full {
            return None;
        }
        let (sent, to) = (&mut self.sent, self.to);
        Some(Sent { sent, to })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

/// A frame from the gateway with space for this much payload.
fn framed(to: Address, kind: EthernetProtocol, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER + length];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes);
    frame.set_dst_addr(EthernetAddress(to));
    frame.set_src_addr(EthernetAddress(GATEWAY_MAC.0));
    frame.set_ethertype(kind);
    bytes
}

/// The gateway.
pub(super) struct Gateway {
    address: Ipv4Addr,
    clock: Clock,
    pub(super) dhcp: dhcp::Server,
    stack: Interface,
    wire: Wire,
    inboxes: HashMap<u16, Rc<Inbox>>,
    next_port: u16,
}

impl Gateway {
    pub(super) fn new(options: &NetworkOptions, clock: Clock) -> Self {
        let mut wire = Wire::new([0xff; 6]);
        let now = clock.at(Instant::now());
        Self {
            address: options.gateway,
            clock,
            dhcp: dhcp::Server::new(
                options.gateway,
                Ipv4Addr::from(options.mask()),
                options.lease,
            ),
            stack: wire.stack(options.gateway, options.prefix, now),
            wire,
            inboxes: HashMap::new(),
            // A different one after every start: a machine may still remember connections of the last one.
            next_port: fastrand::u16(FIRST_PORT..),
        }
    }

    /// A port for a new connection, and the inbox of its packets; `None` if all are in use.
    pub(super) fn open(&mut self) -> Option<(u16, Rc<Inbox>)> {
        for _ in FIRST_PORT..=u16::MAX {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
            if let Entry::Vacant(free) = self.inboxes.entry(port) {
                let inbox = free.insert(Rc::default()).clone();
                return Some((port, inbox));
            }
        }
        None
    }

    /// Releases the port of a connection.
    pub(super) fn close(&mut self, port: u16) {
        self.inboxes.remove(&port);
    }

    /// Processes a frame. Replies to it are appended to
    /// `replies`.
    pub(super) fn take(&mut self, frame: Vec<u8>, now: Instant, replies: &mut Vec<Vec<u8>>) {
        let Ok(ethernet) = EthernetFrame::new_checked(&frame[..]) else {
            return;
        };
        let sender = ethernet.src_addr().0;
        match ethernet.ethertype() {
            EthernetProtocol::Arp => replies.extend(self.arp(ethernet.payload())),
            EthernetProtocol::Ipv4 => {
                let Ok(packet) = Ipv4Packet::new_checked(ethernet.payload()) else {
                    return;
                };
                match packet.next_header() {
                    IpProtocol::Udp if is_dhcp(&packet) => {
                        replies.extend(self.dhcp(&packet, now));
                    }
                    IpProtocol::Tcp if let Some(inbox) = self.inbox(&packet) => {
                        inbox.put(frame);
                    }
                    _ => self.answer(sender, frame, now, replies),
                }
            }
            _ => {}
        }
    }

    /// Answers ARP requests for the gateway's address.
    fn arp(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr,
            source_protocol_addr,
            target_protocol_addr,
            ..
        } = ArpRepr::parse(&ArpPacket::new_checked(bytes).ok()?).ok()?
        else {
            return None;
        };
        if target_protocol_addr != self.address || !source_hardware_addr.is_unicast() {
            return None;
        }
        let reply = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Reply,
            source_hardware_addr: EthernetAddress(GATEWAY_MAC.0),
            source_protocol_addr: self.address,
            target_hardware_addr: source_hardware_addr,
            target_protocol_addr: source_protocol_addr,
        };
        let to = source_hardware_addr.0;
        let mut bytes = framed(to, EthernetProtocol::Arp, reply.buffer_len());
        reply.emit(&mut ArpPacket::new_unchecked(&mut bytes[HEADER..]));
        Some(bytes)
    }

    /// The connection that a TCP packet belongs to.
    fn inbox(&self, packet: &Ipv4Packet<&[u8]>) -> Option<&Rc<Inbox>> {
        if packet.dst_addr() != self.address {
            return None;
        }
        let segment = TcpPacket::new_checked(packet.payload()).ok()?;
        self.inboxes.get(&segment.dst_port())
    }

    fn dhcp(&mut self, packet: &Ipv4Packet<&[u8]>, now: Instant) -> Option<Vec<u8>> {
        let checksums = phy::ChecksumCapabilities::default();
        let ip = Ipv4Repr::parse(packet, &checksums).ok()?;
        let udp = UdpPacket::new_checked(packet.payload()).ok()?;
        UdpRepr::parse(&udp, &ip.src_addr.into(), &ip.dst_addr.into(), &checksums).ok()?;
        let reply = self.dhcp.take(udp.payload(), now)?;

        let (mac, address) = reply.to.unwrap_or(([0xff; 6], Ipv4Addr::BROADCAST));
        let udp = UdpRepr {
            src_port: DHCP_SERVER_PORT,
            dst_port: DHCP_CLIENT_PORT,
        };
        let ip = Ipv4Repr {
            src_addr: self.address,
            dst_addr: address,
            next_header: IpProtocol::Udp,
            payload_len: udp.header_len() + reply.message.len(),
            hop_limit: 64,
        };
        let mut bytes = framed(
            mac,
            EthernetProtocol::Ipv4,
            ip.buffer_len() + ip.payload_len,
        );
        let mut packet = Ipv4Packet::new_unchecked(&mut bytes[HEADER..]);
        ip.emit(&mut packet, &checksums);
        udp.emit(
            &mut UdpPacket::new_unchecked(packet.payload_mut()),
            &ip.src_addr.into(),
            &ip.dst_addr.into(),
            reply.message.len(),
            |payload| payload.copy_from_slice(&reply.message),
            &checksums,
        );
        Some(bytes)
    }

    /// Answers pings, and everything that has no other recipient.
    fn answer(
        &mut self,
        sender: Address,
        frame: Vec<u8>,
        now: Instant,
        replies: &mut Vec<Vec<u8>>,
    ) {
        self.wire.to = sender;
        self.wire.received.push_back(frame);
        let mut nobody = SocketSet::new(Vec::new());
        self.stack
            .poll(self.clock.at(now), &mut self.wire, &mut nobody);
        replies.append(&mut self.wire.sent);
    }
}

/// Whether a packet is for a DHCP server.
fn is_dhcp(packet: &Ipv4Packet<&[u8]>) -> bool {
    // A later fragment has no ports.
    packet.frag_offset() == 0
        && UdpPacket::new_checked(packet.payload())
            .is_ok_and(|udp| udp.dst_port() == DHCP_SERVER_PORT)
}

#[cfg(test)]
mod tests;
