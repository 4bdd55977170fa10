//! The gateway: the one host of the network that is no machine.
//!
//! It answers ARP, neighbour solicitations and pings, is the DHCP server of either version, and is the source of the host's connections
//! into the network ([`super::tunnel`]), which are of IPv4. Packets of machines to other networks, and to its resolver, go
//! to the router of the way out ([`super::way_out`]); without one they are dropped.
//!
//! A packet for a connection is found by its port and goes to that connection's own stack; all others go to a stack
//! without sockets, which answers like a host without services. Both process plain IP ([`super::wire`]). No address
//! resolution is needed: a reply goes back to the sender's address, and a machine's Ethernet address is known from its
//! port. Only the holder of an address that machines have in turn is found by ARP: the last that has said to have it.

mod neighbours;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::rc::Rc;
use std::time::Instant;

use smoltcp::iface::{Interface, SocketSet};
use smoltcp::phy;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, DHCP_CLIENT_PORT, DHCP_SERVER_PORT, EthernetAddress,
    EthernetFrame, EthernetProtocol, IpCidr, IpProtocol, Ipv4Packet, Ipv4Repr, Ipv6Packet,
    TcpPacket, UdpPacket, UdpRepr,
};
use tokio::sync::Notify;

use super::learning::{Address, HEADER, is_group};
use super::way_out::{Outgoing, Router, Verdict, datagram};
use super::wire::{Clock, Inbox, Wire, framed, refuse};
use super::{
    Addressing, GATEWAY_LINK_LOCAL, GATEWAY_MAC, MASK6, NetworkOptions, PREFIX6, dhcp, dhcp6,
};
use neighbours::Solicited;

/// Source ports of connections from the gateway.
const FIRST_PORT: u16 = 32768;

/// The gateway.
pub(super) struct Gateway {
    address: Ipv4Addr,
    address6: Ipv6Addr,
    addressing: Addressing,
    clock: Clock,
    pub(super) dhcp: dhcp::Server,
    dhcp6: dhcp6::Server,
    /// None: machines do not reach other networks.
    pub(super) router: Option<Router>,
    stack: Interface,
    wire: Wire,
    inboxes: HashMap<u16, Rc<Inbox>>,
    next_port: u16,
    shared: BTreeMap<Ipv4Addr, Holder>,
}

/// Which machine has an address that machines have in turn.
#[derive(Default)]
struct Holder {
    machine: Option<Address>,
    /// Notified when a machine says that it has the address.
    heard: Rc<Notify>,
}

impl Gateway {
    pub(super) fn new(options: &NetworkOptions, clock: Clock) -> Self {
        let mut wire = Wire::new([0xff; 6]);
        let now = clock.at(Instant::now());
        let own = [
            IpCidr::new(IpAddr::from(options.gateway).into(), options.prefix),
            IpCidr::new(IpAddr::from(options.gateway6).into(), PREFIX6),
            IpCidr::new(IpAddr::from(GATEWAY_LINK_LOCAL).into(), PREFIX6),
        ];
        Self {
            address: options.gateway,
            address6: options.gateway6,
            addressing: options.addressing,
            clock,
            dhcp: dhcp::Server::new(dhcp::Settings {
                address: options.gateway,
                mask: Ipv4Addr::from(options.mask()),
                lease: options.lease,
                resolves: options.way_out.is_some(),
                boot_url: options.boot_url.clone(),
            }),
            dhcp6: dhcp6::Server {
                resolver: options.gateway6,
                lease: options.lease,
            },
            router: options
                .way_out
                .as_ref()
                .map(|way_out| Router::new(options, way_out)),
            stack: wire.stack(&own, now),
            wire,
            inboxes: HashMap::new(),
            // A different one after every start: a machine may still remember connections of the last one.
            next_port: fastrand::u16(FIRST_PORT..),
            shared: BTreeMap::new(),
        }
    }

    /// Notified when a machine says that it has this address, which is listened for from now on.
    pub(super) fn share(&mut self, address: Ipv4Addr) -> Rc<Notify> {
        self.shared.entry(address).or_default().heard.clone()
    }

    /// The machine that has said last that it has this address.
    pub(super) fn holder(&self, address: Ipv4Addr) -> Option<Address> {
        self.shared.get(&address)?.machine
    }

    /// The question who has an address.
    pub(super) fn ask(&self, address: Ipv4Addr) -> Vec<u8> {
        arp_frame(
            EthernetAddress::BROADCAST,
            &ArpRepr::EthernetIpv4 {
                operation: ArpOperation::Request,
                source_hardware_addr: EthernetAddress(GATEWAY_MAC.0),
                source_protocol_addr: self.address,
                target_hardware_addr: EthernetAddress([0; 6]),
                target_protocol_addr: address,
            },
        )
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

    /// Processes a frame. Replies to it are appended to `replies`. Returns what the host has to do for the way out, if
    /// anything.
    pub(super) fn take(
        &mut self,
        frame: Vec<u8>,
        now: Instant,
        replies: &mut Vec<Vec<u8>>,
    ) -> Option<Outgoing> {
        let ethernet = EthernetFrame::new_checked(&frame[..]).ok()?;
        let sender = ethernet.src_addr().0;
        let is_addressed = ethernet.dst_addr().0 == GATEWAY_MAC.0;
        match ethernet.ethertype() {
            EthernetProtocol::Arp => replies.extend(self.arp(ethernet.payload())),
            EthernetProtocol::Ipv4 => {
                let packet = Ipv4Packet::new_checked(ethernet.payload()).ok()?;
                match packet.next_header() {
                    IpProtocol::Udp if is_dhcp(&packet) => match self.addressing {
                        Addressing::Dhcp => replies.extend(self.dhcp(&packet, now)),
                        Addressing::RouterAdvertisements | Addressing::Dhcp6 => {}
                    },
                    IpProtocol::Tcp if let Some(inbox) = self.inbox(&packet) => {
                        inbox.put(frame);
                    }
                    _ if is_addressed && self.router.is_some() => {
                        return self.route(sender, frame, now, replies);
                    }
                    _ => self.answer(sender, frame, now, replies),
                }
            }
            EthernetProtocol::Ipv6 => {
                let packet = Ipv6Packet::new_checked(ethernet.payload()).ok()?;
                if let Some(solicited) = neighbours::solicited(&packet) {
                    replies.extend(self.advertise(sender, packet.src_addr(), solicited));
                } else if self.addressing == Addressing::Dhcp6 && is_dhcp6(&packet) {
                    replies.extend(self.dhcp6(sender, &packet));
                } else if is_addressed && self.router.is_some() {
                    return self.route(sender, frame, now, replies);
                } else if is_addressed {
                    self.answer(sender, frame, now, replies);
                }
            }
            _ => {}
        }
        None
    }

    /// Passes a frame to the router.
    fn route(
        &mut self,
        sender: Address,
        frame: Vec<u8>,
        now: Instant,
        replies: &mut Vec<Vec<u8>>,
    ) -> Option<Outgoing> {
        // Addresses that no machine has are made up by one.
        if !self.dhcp.knows(sender) {
            return None;
        }
        match self.router.as_mut()?.take(frame) {
            Verdict::Done => {}
            Verdict::Ours(frame) => self.answer(sender, frame, now, replies),
            Verdict::Refuse(frame) => replies.extend(refuse(frame, self.clock.at(now))),
            Verdict::Outgoing(outgoing) => return Some(outgoing),
        }
        None
    }

    /// Answers ARP requests for the gateway's address, and hears who has a shared one.
    fn arp(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let ArpRepr::EthernetIpv4 {
            operation,
            source_hardware_addr,
            source_protocol_addr,
            target_protocol_addr,
            ..
        } = ArpRepr::parse(&ArpPacket::new_checked(bytes).ok()?).ok()?
        else {
            return None;
        };
        if let Some(holder) = self.shared.get_mut(&source_protocol_addr) {
            holder.machine = Some(source_hardware_addr.0);
            holder.heard.notify_waiters();
        }
        let is_for_us = target_protocol_addr == self.address && source_hardware_addr.is_unicast();
        if operation != ArpOperation::Request || !is_for_us {
            return None;
        }
        let reply = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Reply,
            source_hardware_addr: EthernetAddress(GATEWAY_MAC.0),
            source_protocol_addr: self.address,
            target_hardware_addr: source_hardware_addr,
            target_protocol_addr: source_protocol_addr,
        };
        Some(arp_frame(source_hardware_addr, &reply))
    }

    /// Answers solicitations for the gateway's addresses, and for routers where it advertises itself.
    fn advertise(&self, sender: Address, asker: Ipv6Addr, solicited: Solicited) -> Option<Vec<u8>> {
        let with_dhcp = match (solicited, self.addressing) {
            (Solicited::Neighbour(target), _) => {
                let is_own = [self.address6, GATEWAY_LINK_LOCAL].contains(&target);
                return (is_own && !is_group(sender))
                    .then(|| neighbours::advertise(sender, asker, target));
            }
            (Solicited::Routers, Addressing::Dhcp) => return None,
            (Solicited::Routers, Addressing::RouterAdvertisements) => false,
            (Solicited::Routers, Addressing::Dhcp6) => true,
        };
        Some(neighbours::advertise_router(self.address6, with_dhcp))
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
        let from = (self.address, DHCP_SERVER_PORT).into();
        let to = (address, DHCP_CLIENT_PORT).into();
        Some(datagram(mac, from, to, &reply.message))
    }

    /// A machine's IPv6 address has the number of its IPv4 address.
    fn dhcp6(&self, sender: Address, packet: &Ipv6Packet<&[u8]>) -> Option<Vec<u8>> {
        let checksums = phy::ChecksumCapabilities::default();
        let from = packet.src_addr();
        let udp = UdpPacket::new_checked(packet.payload()).ok()?;
        UdpRepr::parse(&udp, &from.into(), &packet.dst_addr().into(), &checksums).ok()?;
        let number = self.dhcp.number(sender)?;
        let address = Ipv6Addr::from_bits(self.address6.to_bits() & MASK6 | u128::from(number));
        let message = self.dhcp6.answer(udp.payload(), address)?;
        let own = (GATEWAY_LINK_LOCAL, dhcp6::SERVER_PORT).into();
        let to = (from, dhcp6::CLIENT_PORT).into();
        Some(datagram(sender, own, to, &message))
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

fn arp_frame(to: EthernetAddress, content: &ArpRepr) -> Vec<u8> {
    let mut bytes = framed(to.0, EthernetProtocol::Arp, content.buffer_len());
    content.emit(&mut ArpPacket::new_unchecked(&mut bytes[HEADER..]));
    bytes
}

/// Whether a packet is for a DHCP server.
fn is_dhcp(packet: &Ipv4Packet<&[u8]>) -> bool {
    // A later fragment has no ports.
    packet.frag_offset() == 0
        && UdpPacket::new_checked(packet.payload())
            .is_ok_and(|udp| udp.dst_port() == DHCP_SERVER_PORT)
}

/// Whether a packet is for a DHCPv6 server.
fn is_dhcp6(packet: &Ipv6Packet<&[u8]>) -> bool {
    packet.next_header() == IpProtocol::Udp
        && UdpPacket::new_checked(packet.payload())
            .is_ok_and(|udp| udp.dst_port() == dhcp6::SERVER_PORT)
}

#[cfg(test)]
mod tests;
