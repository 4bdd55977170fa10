//! Packets of machines to other networks, and the packets that answer them. Pure.
//!
//! The only part of the way out that knows how packets are made. IPv4 and IPv6 differ in their headers and in ICMP; all
//! else is the same code.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, Icmpv4DstUnreachable, Icmpv4Message, Icmpv4Packet, Icmpv4Repr,
    Icmpv6DstUnreachable, Icmpv6Message, Icmpv6Packet, Icmpv6Repr, IpProtocol, IpRepr, Ipv4Packet,
    Ipv4Repr, Ipv6Packet, Ipv6Repr, TcpControl, TcpPacket, TcpRepr, UdpPacket, UdpRepr,
};

use super::{Flow, Protocol};
use crate::learning::{Address, HEADER};
use crate::wire::{MTU, ethertype, framed};

const HOP_LIMIT: u8 = 64;

/// The header of a UDP datagram, and of an echo request.
const PAYLOAD_HEADER: usize = 8;

/// The content of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content<'a> {
    /// A TCP segment. Its checksum has been checked only if it opens a connection: the stack of an open one does that.
    Segment(Segment),
    /// The payload of a UDP datagram, or a whole ICMP message.
    Payload(&'a [u8]),
}

/// Kinds of TCP segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// It opens a connection.
    Open,
    Reset,
    Other,
}

/// What IPv4 and IPv6 headers have in common.
#[derive(Clone, Copy, Debug)]
struct Packet<'a> {
    from: IpAddr,
    to: IpAddr,
    next_header: IpProtocol,
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// None if it is invalid or a fragment. IPv6 extension headers are not skipped: they are another protocol.
    fn parse(frame: &'a [u8]) -> Option<Self> {
        let ethernet = EthernetFrame::new_checked(frame).ok()?;
        let bytes = frame.get(HEADER..)?;
        match ethernet.ethertype() {
            EthernetProtocol::Ipv4 => {
                let packet = Ipv4Packet::new_checked(bytes).ok()?;
                let is_fragment = packet.more_frags() || packet.frag_offset() != 0;
                if packet.version() != 4 || is_fragment || !packet.verify_checksum() {
                    return None;
                }
                let range = usize::from(packet.header_len())..usize::from(packet.total_len());
                Some(Self {
                    from: packet.src_addr().into(),
                    to: packet.dst_addr().into(),
                    next_header: packet.next_header(),
                    payload: bytes.get(range)?,
                })
            }
            EthernetProtocol::Ipv6 => {
                let packet = Ipv6Packet::new_checked(bytes).ok()?;
                if packet.version() != 6 {
                    return None;
                }
                Some(Self {
                    from: packet.src_addr().into(),
                    to: packet.dst_addr().into(),
                    next_header: packet.next_header(),
                    payload: bytes.get(packet.header_len()..packet.total_len())?,
                })
            }
            _ => None,
        }
    }
}

/// The flow and the content of a frame's packet. None if it is invalid, a fragment, or of another protocol.
pub(super) fn parse(frame: &[u8]) -> Option<(Flow, Content<'_>)> {
    let packet = Packet::parse(frame)?;
    let (protocol, source, destination, content) = match packet.next_header {
        IpProtocol::Tcp => parse_tcp(&packet)?,
        IpProtocol::Udp => parse_udp(&packet)?,
        IpProtocol::Icmp | IpProtocol::Icmpv6 => {
            let content = Content::Payload(packet.payload);
            (Protocol::Ping, echo_request(&packet)?, 0, content)
        }
        _ => return None,
    };
    // No packet is for port 0, except that echo requests have none.
    if protocol != Protocol::Ping && (source == 0 || destination == 0) {
        return None;
    }
    let flow = Flow {
        mac: EthernetFrame::new_unchecked(frame).src_addr().0,
        protocol,
        machine: SocketAddr::new(packet.from, source),
        remote: SocketAddr::new(packet.to, destination),
    };
    Some((flow, content))
}

type Parsed<'a> = (Protocol, u16, u16, Content<'a>);

fn parse_tcp<'a>(packet: &Packet<'a>) -> Option<Parsed<'a>> {
    let tcp = TcpPacket::new_checked(packet.payload).ok()?;
    let segment = match (tcp.rst(), tcp.syn() && !tcp.ack()) {
        (true, _) => Segment::Reset,
        (false, false) => Segment::Other,
        (false, true) => {
            let (from, to) = (packet.from.into(), packet.to.into());
            let segment = TcpRepr::parse(&tcp, &from, &to, &ChecksumCapabilities::default());
            match segment.ok()?.control {
                TcpControl::Syn => Segment::Open,
                _ => return None,
            }
        }
    };
    let content = Content::Segment(segment);
    Some((Protocol::Tcp, tcp.src_port(), tcp.dst_port(), content))
}

fn parse_udp<'a>(packet: &Packet<'a>) -> Option<Parsed<'a>> {
    let udp = UdpPacket::new_checked(packet.payload).ok()?;
    // Without a checksum is allowed with IPv4 only.
    if packet.from.is_ipv6() && udp.checksum() == 0 {
        return None;
    }
    let (from, to) = (packet.from.into(), packet.to.into());
    UdpRepr::parse(&udp, &from, &to, &ChecksumCapabilities::default()).ok()?;
    let payload = packet.payload.get(PAYLOAD_HEADER..usize::from(udp.len()))?;
    let content = Content::Payload(payload);
    Some((Protocol::Udp, udp.src_port(), udp.dst_port(), content))
}

/// The identifier of an echo request.
fn echo_request(packet: &Packet<'_>) -> Option<u16> {
    let checksums = ChecksumCapabilities::default();
    match (packet.next_header, packet.from, packet.to) {
        (IpProtocol::Icmp, IpAddr::V4(_), IpAddr::V4(_)) => {
            let icmp = Icmpv4Packet::new_checked(packet.payload).ok()?;
            match Icmpv4Repr::parse(&icmp, &checksums).ok()? {
                Icmpv4Repr::EchoRequest { ident, .. } => Some(ident),
                _ => None,
            }
        }
        (IpProtocol::Icmpv6, IpAddr::V6(from), IpAddr::V6(to)) => {
            let icmp = Icmpv6Packet::new_checked(packet.payload).ok()?;
            match Icmpv6Repr::parse(&from, &to, &icmp, &checksums).ok()? {
                Icmpv6Repr::EchoRequest { ident, .. } => Some(ident),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The first bytes after the IP header: for TCP, the ports and the sequence number.
pub(crate) fn start_of_payload(frame: &[u8]) -> Option<[u8; 8]> {
    Packet::parse(frame)?.payload.first_chunk().copied()
}

/// Whether an answer does not fit into one packet.
pub(crate) fn too_large(flow: &Flow, payload: &[u8]) -> bool {
    let ip = match flow.machine {
        SocketAddr::V4(_) => smoltcp::wire::IPV4_HEADER_LEN,
        SocketAddr::V6(_) => smoltcp::wire::IPV6_HEADER_LEN,
    };
    let header = match flow.protocol {
        Protocol::Udp => PAYLOAD_HEADER,
        Protocol::Tcp | Protocol::Ping => 0,
    };
    ip + header + payload.len() > MTU
}

/// A frame to the machine with an answer of the flow's remote end: the payload of a UDP datagram, or a whole ICMP
/// message. None if it does not fit into one packet, or is no answer.
pub(crate) fn reply(flow: &Flow, payload: &[u8]) -> Option<Vec<u8>> {
    if too_large(flow, payload) {
        return None;
    }
    match flow.protocol {
        Protocol::Tcp => None,
        Protocol::Udp => Some(datagram(flow.mac, flow.remote, flow.machine, payload)),
        Protocol::Ping => echo_reply(flow, payload),
    }
}

/// A frame with a datagram; both addresses must be of the same version.
pub(crate) fn datagram(mac: Address, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let udp = UdpRepr {
        src_port: from.port(),
        dst_port: to.port(),
    };
    let (from, to) = (from.ip(), to.ip());
    let length = PAYLOAD_HEADER + payload.len();
    ip(mac, from, to, IpProtocol::Udp, length, |bytes| {
        udp.emit(
            &mut UdpPacket::new_unchecked(bytes),
            &from.into(),
            &to.into(),
            payload.len(),
            |buffer| buffer.copy_from_slice(payload),
            &ChecksumCapabilities::default(),
        );
    })
}

/// The host's kernel has checked the message, and has put its own identifier into the request.
fn echo_reply(flow: &Flow, message: &[u8]) -> Option<Vec<u8>> {
    let ident = flow.machine.port();
    match (flow.remote.ip(), flow.machine.ip()) {
        (from @ IpAddr::V4(_), to) => {
            let message = Icmpv4Packet::new_checked(message).ok()?;
            if (message.msg_type(), message.msg_code()) != (Icmpv4Message::EchoReply, 0) {
                return None;
            }
            let icmp = Icmpv4Repr::EchoReply {
                ident,
                seq_no: message.echo_seq_no(),
                data: message.data(),
            };
            Some(of_icmp(flow.mac, from, to, &icmp))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let message = Icmpv6Packet::new_checked(message).ok()?;
            if (message.msg_type(), message.msg_code()) != (Icmpv6Message::EchoReply, 0) {
                return None;
            }
            let icmp = Icmpv6Repr::EchoReply {
                ident,
                seq_no: message.echo_seq_no(),
                data: message.payload(),
            };
            Some(of_icmp6(flow.mac, from, to, &icmp))
        }
        (IpAddr::V6(_), IpAddr::V4(_)) => None,
    }
}

/// Why a packet does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    Network,
    Host,
    Port,
    /// The host's own packet filter.
    Prohibited,
}

/// A frame that tells the machine that what it sent does not arrive. `start` is the beginning of the flow's segment, by
/// which the machine recognises a connection; the other protocols need none. `router` is the gateway's address.
pub(crate) fn unreachable(
    flow: &Flow,
    router: IpAddr,
    why: Unreachable,
    start: Option<[u8; 8]>,
) -> Option<Vec<u8>> {
    let data = start.unwrap_or_else(|| usual_start(flow));
    // A port is refused by the remote host, all else by the way to it.
    let from = match why {
        Unreachable::Port => flow.remote.ip(),
        _ => router,
    };
    match (flow.machine.ip(), flow.remote.ip(), from) {
        (IpAddr::V4(machine), IpAddr::V4(remote), from) => {
            let icmp = Icmpv4Repr::DstUnreachable {
                reason: match why {
                    Unreachable::Network => Icmpv4DstUnreachable::NetUnreachable,
                    Unreachable::Host => Icmpv4DstUnreachable::HostUnreachable,
                    Unreachable::Port => Icmpv4DstUnreachable::PortUnreachable,
                    Unreachable::Prohibited => Icmpv4DstUnreachable::CommProhibited,
                },
                header: Ipv4Repr {
                    src_addr: machine,
                    dst_addr: remote,
                    next_header: next_header(flow),
                    payload_len: data.len(),
                    hop_limit: HOP_LIMIT,
                },
                data: &data,
            };
            Some(of_icmp(flow.mac, from, machine.into(), &icmp))
        }
        (IpAddr::V6(machine), IpAddr::V6(remote), IpAddr::V6(from)) => {
            let icmp = Icmpv6Repr::DstUnreachable {
                reason: match why {
                    Unreachable::Network => Icmpv6DstUnreachable::NoRoute,
                    Unreachable::Host => Icmpv6DstUnreachable::AddrUnreachable,
                    Unreachable::Port => Icmpv6DstUnreachable::PortUnreachable,
                    Unreachable::Prohibited => Icmpv6DstUnreachable::AdminProhibit,
                },
                header: Ipv6Repr {
                    src_addr: machine,
                    dst_addr: remote,
                    next_header: next_header(flow),
                    payload_len: data.len(),
                    hop_limit: HOP_LIMIT,
                },
                data: &data,
            };
            Some(of_icmp6(flow.mac, from, machine, &icmp))
        }
        _ => None,
    }
}

fn next_header(flow: &Flow) -> IpProtocol {
    match (flow.protocol, flow.machine) {
        (Protocol::Tcp, _) => IpProtocol::Tcp,
        (Protocol::Udp, _) => IpProtocol::Udp,
        (Protocol::Ping, SocketAddr::V4(_)) => IpProtocol::Icmp,
        (Protocol::Ping, SocketAddr::V6(_)) => IpProtocol::Icmpv6,
    }
}

/// The beginning of what a machine has sent, as far as the flow has it: ports and a length, or type and identifier.
fn usual_start(flow: &Flow) -> [u8; 8] {
    let [a, b] = flow.machine.port().to_be_bytes();
    let [c, d] = flow.remote.port().to_be_bytes();
    match (flow.protocol, flow.machine) {
        (Protocol::Tcp, _) => [a, b, c, d, 0, 0, 0, 0],
        (Protocol::Udp, _) => [a, b, c, d, 0, PAYLOAD_HEADER as u8, 0, 0],
        (Protocol::Ping, SocketAddr::V4(_)) => {
            [Icmpv4Message::EchoRequest.into(), 0, 0, 0, a, b, 0, 0]
        }
        (Protocol::Ping, SocketAddr::V6(_)) => {
            [Icmpv6Message::EchoRequest.into(), 0, 0, 0, a, b, 0, 0]
        }
    }
}

fn of_icmp(mac: Address, from: IpAddr, to: IpAddr, icmp: &Icmpv4Repr<'_>) -> Vec<u8> {
    let length = icmp.buffer_len();
    ip(mac, from, to, IpProtocol::Icmp, length, |bytes| {
        icmp.emit(
            &mut Icmpv4Packet::new_unchecked(bytes),
            &ChecksumCapabilities::default(),
        );
    })
}

fn of_icmp6(mac: Address, from: Ipv6Addr, to: Ipv6Addr, icmp: &Icmpv6Repr<'_>) -> Vec<u8> {
    let length = icmp.buffer_len();
    let (source, destination) = (from.into(), to.into());
    ip(
        mac,
        source,
        destination,
        IpProtocol::Icmpv6,
        length,
        |bytes| {
            icmp.emit(
                &from,
                &to,
                &mut Icmpv6Packet::new_unchecked(bytes),
                &ChecksumCapabilities::default(),
            );
        },
    )
}

/// A frame with a packet; both addresses must be of the same version.
fn ip(
    mac: Address,
    from: IpAddr,
    to: IpAddr,
    next_header: IpProtocol,
    payload_len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let header = IpRepr::new(from.into(), to.into(), next_header, payload_len, HOP_LIMIT);
    let mut bytes = framed(mac, ethertype(header.version()), header.buffer_len());
    let packet = &mut bytes[HEADER..];
    header.emit(&mut *packet, &ChecksumCapabilities::default());
    fill(&mut packet[header.header_len()..]);
    bytes
}

#[cfg(test)]
mod tests;
