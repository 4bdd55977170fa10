//! Packets of machines to other networks, and the packets that answer them. Pure.
//!
//! The only part of the way out that knows how IPv4 packets are made.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, Icmpv4DstUnreachable, Icmpv4Message, Icmpv4Packet, Icmpv4Repr,
    IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, UdpPacket, UdpRepr,
};

use super::{Flow, Protocol};
use crate::fabric::HEADER;
use crate::learning::Address;
use crate::wire::{MTU, framed};

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

/// The flow and the content of a frame's packet. None if it is invalid, a fragment, or of another protocol.
pub(super) fn parse(frame: &[u8]) -> Option<(Flow, Content<'_>)> {
    let ethernet = EthernetFrame::new_checked(frame).ok()?;
    let packet = Ipv4Packet::new_checked(frame.get(HEADER..)?).ok()?;
    if packet.more_frags() || packet.frag_offset() != 0 || !packet.verify_checksum() {
        return None;
    }
    let (from, to) = (packet.src_addr(), packet.dst_addr());
    let payload = payload_of(&packet, frame)?;
    let checksums = ChecksumCapabilities::default();
    let (protocol, source, destination, content) = match packet.next_header() {
        IpProtocol::Tcp => {
            let tcp = TcpPacket::new_checked(payload).ok()?;
            let segment = match (tcp.rst(), tcp.syn() && !tcp.ack()) {
                (true, _) => Segment::Reset,
                (false, false) => Segment::Other,
                (false, true) => {
                    let segment = TcpRepr::parse(&tcp, &from.into(), &to.into(), &checksums);
                    match segment.ok()?.control {
                        TcpControl::Syn => Segment::Open,
                        _ => return None,
                    }
                }
            };
            let (source, destination) = (tcp.src_port(), tcp.dst_port());
            (
                Protocol::Tcp,
                source,
                destination,
                Content::Segment(segment),
            )
        }
        IpProtocol::Udp => {
            let udp = UdpPacket::new_checked(payload).ok()?;
            UdpRepr::parse(&udp, &from.into(), &to.into(), &checksums).ok()?;
            let content = Content::Payload(payload.get(PAYLOAD_HEADER..usize::from(udp.len()))?);
            (Protocol::Udp, udp.src_port(), udp.dst_port(), content)
        }
        IpProtocol::Icmp => {
            let icmp = Icmpv4Packet::new_checked(payload).ok()?;
            let Icmpv4Repr::EchoRequest { ident, .. } =
                Icmpv4Repr::parse(&icmp, &checksums).ok()?
            else {
                return None;
            };
            (Protocol::Ping, ident, 0, Content::Payload(payload))
        }
        _ => return None,
    };
    // No packet is for port 0, except that echo requests have none.
    if protocol != Protocol::Ping && (source == 0 || destination == 0) {
        return None;
    }
    let flow = Flow {
        mac: ethernet.src_addr().0,
        protocol,
        machine: SocketAddr::new(from.into(), source),
        remote: SocketAddr::new(to.into(), destination),
    };
    Some((flow, content))
}

/// The payload of a frame's packet, with the lifetime of the frame, which smoltcp's accessor does not have.
fn payload_of<'a>(packet: &Ipv4Packet<&[u8]>, frame: &'a [u8]) -> Option<&'a [u8]> {
    let start = HEADER + usize::from(packet.header_len());
    frame.get(start..HEADER + usize::from(packet.total_len()))
}

/// Whether an answer does not fit into one packet.
pub(crate) fn too_large(protocol: Protocol, payload: &[u8]) -> bool {
    let header = match protocol {
        Protocol::Udp => PAYLOAD_HEADER,
        Protocol::Tcp | Protocol::Ping => 0,
    };
    smoltcp::wire::IPV4_HEADER_LEN + header + payload.len() > MTU
}

/// A frame to the machine with an answer of the flow's remote end: the payload of a UDP datagram, or a whole ICMP
/// message. None if it does not fit into one packet, or is no answer.
pub(crate) fn reply(flow: &Flow, payload: &[u8]) -> Option<Vec<u8>> {
    let (from, to) = addresses(flow)?;
    if too_large(flow.protocol, payload) {
        return None;
    }
    let checksums = ChecksumCapabilities::default();
    match flow.protocol {
        Protocol::Tcp => None,
        Protocol::Udp => {
            let udp = UdpRepr {
                src_port: flow.remote.port(),
                dst_port: flow.machine.port(),
            };
            let length = PAYLOAD_HEADER + payload.len();
            Some(ip(flow.mac, from, to, IpProtocol::Udp, length, |bytes| {
                udp.emit(
                    &mut UdpPacket::new_unchecked(bytes),
                    &from.into(),
                    &to.into(),
                    payload.len(),
                    |buffer| buffer.copy_from_slice(payload),
                    &checksums,
                );
            }))
        }
        Protocol::Ping => {
            let message = Icmpv4Packet::new_checked(payload).ok()?;
            // The host's kernel has checked it, and has put its own identifier into the request.
            if (message.msg_type(), message.msg_code()) != (Icmpv4Message::EchoReply, 0) {
                return None;
            }
            let icmp = Icmpv4Repr::EchoReply {
                ident: flow.machine.port(),
                seq_no: message.echo_seq_no(),
                data: message.data(),
            };
            Some(of_icmp(flow.mac, from, to, &icmp))
        }
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
/// which the machine recognises a connection; the other protocols need none.
pub(crate) fn unreachable(
    flow: &Flow,
    gateway: Ipv4Addr,
    why: Unreachable,
    start: Option<[u8; 8]>,
) -> Option<Vec<u8>> {
    let (remote, machine) = addresses(flow)?;
    let (next_header, usual) = match flow.protocol {
        Protocol::Tcp => (IpProtocol::Tcp, ports(flow, 0)),
        Protocol::Udp => (IpProtocol::Udp, ports(flow, PAYLOAD_HEADER as u8)),
        Protocol::Ping => {
            let [high, low] = flow.machine.port().to_be_bytes();
            let request = Icmpv4Message::EchoRequest.into();
            (IpProtocol::Icmp, [request, 0, 0, 0, high, low, 0, 0])
        }
    };
    let data = start.unwrap_or(usual);
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
            next_header,
            payload_len: data.len(),
            hop_limit: HOP_LIMIT,
        },
        data: &data,
    };
    // A port is refused by the remote host, all else by the way to it.
    let from = match why {
        Unreachable::Port => remote,
        _ => gateway,
    };
    Some(of_icmp(flow.mac, from, machine, &icmp))
}

/// The ports, and a length.
fn ports(flow: &Flow, length: u8) -> [u8; 8] {
    let [a, b] = flow.machine.port().to_be_bytes();
    let [c, d] = flow.remote.port().to_be_bytes();
    [a, b, c, d, 0, length, 0, 0]
}

/// The remote and the machine's address.
fn addresses(flow: &Flow) -> Option<(Ipv4Addr, Ipv4Addr)> {
    match (flow.remote.ip(), flow.machine.ip()) {
        (IpAddr::V4(remote), IpAddr::V4(machine)) => Some((remote, machine)),
        _ => None,
    }
}

fn of_icmp(mac: Address, from: Ipv4Addr, to: Ipv4Addr, icmp: &Icmpv4Repr<'_>) -> Vec<u8> {
    ip(
        mac,
        from,
        to,
        IpProtocol::Icmp,
        icmp.buffer_len(),
        |bytes| {
            icmp.emit(
                &mut Icmpv4Packet::new_unchecked(bytes),
                &ChecksumCapabilities::default(),
            );
        },
    )
}

fn ip(
    mac: Address,
    from: Ipv4Addr,
    to: Ipv4Addr,
    next_header: IpProtocol,
    payload_len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let header = Ipv4Repr {
        src_addr: from,
        dst_addr: to,
        next_header,
        payload_len,
        hop_limit: HOP_LIMIT,
    };
    let length = header.buffer_len() + payload_len;
    let mut bytes = framed(mac, EthernetProtocol::Ipv4, length);
    let mut packet = Ipv4Packet::new_unchecked(&mut bytes[HEADER..]);
    header.emit(&mut packet, &ChecksumCapabilities::default());
    fill(packet.payload_mut());
    bytes
}

#[cfg(test)]
mod tests;
