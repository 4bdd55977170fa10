use std::net::Ipv4Addr;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::packets;

const MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];

/// The addresses of a machine, a remote host and the gateway.
#[derive(Clone, Copy, Debug)]
struct World {
    machine: IpAddr,
    remote: IpAddr,
    gateway: IpAddr,
}

const V4: World = World {
    machine: IpAddr::V4(Ipv4Addr::new(10, 98, 0, 10)),
    remote: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    gateway: IpAddr::V4(Ipv4Addr::new(10, 98, 0, 1)),
};

const V6: World = World {
    machine: IpAddr::V6(Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 0x10)),
    remote: IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    gateway: IpAddr::V6(Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 1)),
};

const WORLDS: [World; 2] = [V4, V6];

impl World {
    fn flow(self, protocol: Protocol, machine: u16, remote: u16) -> Flow {
        Flow {
            mac: MAC,
            protocol,
            machine: SocketAddr::new(self.machine, machine),
            remote: SocketAddr::new(self.remote, remote),
        }
    }

    /// A packet of the machine, made as one to it and then readdressed.
    fn sent(self, protocol: IpProtocol, length: usize, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut frame = ip([0; 6], self.machine, self.remote, protocol, length, fill);
        frame[6..12].copy_from_slice(&MAC);
        frame
    }

    fn udp(self, from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
        let repr = UdpRepr {
            src_port: from,
            dst_port: to,
        };
        self.sent(IpProtocol::Udp, PAYLOAD_HEADER + payload.len(), |bytes| {
            repr.emit(
                &mut UdpPacket::new_unchecked(bytes),
                &self.machine.into(),
                &self.remote.into(),
                payload.len(),
                |buffer| buffer.copy_from_slice(payload),
                &ChecksumCapabilities::default(),
            );
        })
    }

    fn tcp(self, control: TcpControl, ack: bool) -> Vec<u8> {
        packets::tcp(MAC, (self.machine, 4000), (self.remote, 80), control, ack)
    }

    fn ping(self, ident: u16, data: &[u8]) -> Vec<u8> {
        let (protocol, message) = self.echo(true, ident, data);
        self.sent(protocol, message.len(), |bytes| {
            bytes.copy_from_slice(&message);
        })
    }

    /// A request of the machine, or a reply of the remote host.
    fn echo(self, is_request: bool, ident: u16, data: &[u8]) -> (IpProtocol, Vec<u8>) {
        let checksums = ChecksumCapabilities::default();
        let seq_no = 5;
        let mut bytes = vec![0; 8 + data.len()];
        match (self.machine, self.remote) {
            (IpAddr::V6(machine), IpAddr::V6(remote)) => {
                let mut packet = Icmpv6Packet::new_unchecked(&mut bytes[..]);
                let (from, to, repr) = match is_request {
                    #[rustfmt::skip]
                    true => (machine, remote, Icmpv6Repr::EchoRequest { ident, seq_no, data }),
                    #[rustfmt::skip]
                    false => (remote, machine, Icmpv6Repr::EchoReply { ident, seq_no, data }),
                };
                repr.emit(&from, &to, &mut packet, &checksums);
                (IpProtocol::Icmpv6, bytes)
            }
            _ => {
                let repr = match is_request {
                    #[rustfmt::skip]
                    true => Icmpv4Repr::EchoRequest { ident, seq_no, data },
                    #[rustfmt::skip]
                    false => Icmpv4Repr::EchoReply { ident, seq_no, data },
                };
                repr.emit(&mut Icmpv4Packet::new_unchecked(&mut bytes), &checksums);
                (IpProtocol::Icmp, bytes)
            }
        }
    }

    fn of_each_kind(self) -> [Vec<u8>; 3] {
        let syn = self.tcp(TcpControl::Syn, false);
        [self.udp(5000, 123, b"time?"), self.ping(77, b"data"), syn]
    }
}

/// The packet of a frame to the machine.
fn received(frame: &[u8]) -> Packet<'_> {
    let ethernet = EthernetFrame::new_checked(frame).expect("a frame");
    assert_eq!(ethernet.dst_addr().0, MAC);
    Packet::parse(frame).expect("a packet")
}

/// Type, code, the machine's header and its data of an ICMP error to the machine.
fn icmp_error(packet: &Packet<'_>) -> (u8, u8, IpRepr, Vec<u8>) {
    let checksums = ChecksumCapabilities::default();
    let (kind, code) = (packet.payload[0], packet.payload[1]);
    match (packet.from, packet.to) {
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let icmp = Icmpv6Packet::new_checked(packet.payload).expect("ICMPv6");
            match Icmpv6Repr::parse(&from, &to, &icmp, &checksums) {
                Ok(Icmpv6Repr::DstUnreachable { header, data, .. }) => {
                    (kind, code, header.into(), data.to_vec())
                }
                other => panic!("{other:?}"),
            }
        }
        _ => {
            let icmp = Icmpv4Packet::new_checked(packet.payload).expect("ICMP");
            match Icmpv4Repr::parse(&icmp, &checksums) {
                Ok(Icmpv4Repr::DstUnreachable { header, data, .. }) => {
                    (kind, code, header.into(), data.to_vec())
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn each_protocol_has_its_flow() {
    for world in WORLDS {
        let frame = world.udp(5000, 123, b"time?");
        let flow = world.flow(Protocol::Udp, 5000, 123);
        assert_eq!(parse(&frame), Some((flow, Content::Payload(b"time?"))));
        let frame = world.ping(77, b"data");
        let (found, Content::Payload(message)) = parse(&frame).expect("a packet") else {
            panic!("of another kind");
        };
        assert_eq!(found, world.flow(Protocol::Ping, 77, 0));
        assert_eq!(message, world.echo(true, 77, b"data").1);
        for (control, ack, segment) in [
            (TcpControl::Syn, false, Segment::Open),
            (TcpControl::Syn, true, Segment::Other),
            (TcpControl::None, true, Segment::Other),
            (TcpControl::Fin, true, Segment::Other),
            (TcpControl::Rst, false, Segment::Reset),
        ] {
            let flow = world.flow(Protocol::Tcp, 4000, 80);
            assert_eq!(
                parse(&world.tcp(control, ack)),
                Some((flow, Content::Segment(segment))),
                "{control:?}"
            );
        }
        assert_eq!(parse(&world.udp(0, 123, b"")), None);
        assert_eq!(parse(&world.udp(5000, 0, b"")), None);
    }
}

#[test]
fn the_start_of_a_segment_is_behind_its_header() {
    for world in WORLDS {
        let frame = world.tcp(TcpControl::Syn, false);
        assert_eq!(start_of_payload(&frame), Some([15, 160, 0, 80, 0, 0, 0, 7]));
    }
    // IPv4 has options.
    let plain = V4.tcp(TcpControl::Syn, false);
    let mut frame = plain[..HEADER + 20].to_vec();
    frame.extend([1; 4]);
    frame.extend(&plain[HEADER + 20..]);
    let mut packet = Ipv4Packet::new_unchecked(&mut frame[HEADER..]);
    packet.set_header_len(24);
    packet.set_total_len(44);
    packet.fill_checksum();
    assert_eq!(start_of_payload(&frame), Some([15, 160, 0, 80, 0, 0, 0, 7]));
    assert_eq!(start_of_payload(&frame[..HEADER + 27]), None);
}

#[test]
fn damaged_packets_are_not_translated() {
    for frame in WORLDS.into_iter().flat_map(World::of_each_kind) {
        assert!(parse(&frame).is_some());
        // The checksum of IPv6 leaves out what routers change: traffic class, flow label and hop limit.
        let is_v6 = frame[HEADER] >> 4 == 6;
        let unchecked = |at: usize| is_v6 && (at < HEADER + 4 || at == HEADER + 7);
        for at in (HEADER..frame.len()).filter(|at| !unchecked(*at)) {
            let mut damaged = frame.clone();
            damaged[at] ^= 0x10;
            // The stack of a connection checks all segments but the first.
            let taken = parse(&damaged).filter(|(_, content)| {
                !matches!(content, Content::Segment(Segment::Other | Segment::Reset))
            });
            assert_eq!(taken, None, "byte {at}");
        }
    }
    for (world, is_valid) in [(V4, true), (V6, false)] {
        let mut without = world.udp(5000, 123, b"x");
        let checksum = without.len() - 3;
        without[checksum..checksum + 2].fill(0);
        assert_eq!(parse(&without).is_some(), is_valid, "{world:?}");
    }
    // Ethernet pads short frames.
    for world in WORLDS {
        let mut padded = world.udp(5000, 123, b"x");
        padded.resize(80, 0);
        assert!(matches!(parse(&padded), Some((_, Content::Payload(b"x")))));
    }
}

#[test]
fn fragments_are_not_translated() {
    for mut fragment in V4.of_each_kind() {
        let mut packet = Ipv4Packet::new_unchecked(&mut fragment[HEADER..]);
        packet.set_dont_frag(false);
        packet.set_more_frags(true);
        packet.fill_checksum();
        assert_eq!(parse(&fragment), None);
    }
    for mut fragment in V6.of_each_kind() {
        Ipv6Packet::new_unchecked(&mut fragment[HEADER..]).set_next_header(IpProtocol::Ipv6Frag);
        assert_eq!(parse(&fragment), None);
    }
}

#[test]
fn an_echo_reply_has_the_identifier_of_its_request() {
    for world in WORLDS {
        let (protocol, mut message) = world.echo(false, 999, b"data");
        let flow = world.flow(Protocol::Ping, 77, 0);
        let frame = reply(&flow, &message).expect("a reply");
        let packet = received(&frame);
        assert_eq!((packet.from, packet.to), (world.remote, world.machine));
        assert_eq!(packet.next_header, protocol);
        assert_eq!(packet.payload, world.echo(false, 77, b"data").1);
        message[0] = world.echo(true, 999, b"data").1[0];
        assert_eq!(reply(&flow, &message), None);
        assert_eq!(reply(&flow, &message[..3]), None);
    }
}

#[test]
fn what_is_unreachable_is_told_with_what_was_sent() {
    // Types and codes of RFC 792, RFC 1122 and RFC 4443.
    for (protocol, why, v4, v6) in [
        (Protocol::Tcp, Unreachable::Network, [3, 0], [1, 0]),
        (Protocol::Udp, Unreachable::Port, [3, 3], [1, 4]),
        (Protocol::Ping, Unreachable::Host, [3, 1], [1, 3]),
        (Protocol::Udp, Unreachable::Prohibited, [3, 13], [1, 1]),
    ] {
        for (world, wanted) in [(V4, v4), (V6, v6)] {
            let flow = world.flow(protocol, 4000, 80);
            let start = (protocol == Protocol::Tcp).then_some([9; 8]);
            let frame = unreachable(&flow, world.gateway, why, start).expect("an answer");
            let packet = received(&frame);
            let from = match why {
                Unreachable::Port => world.remote,
                _ => world.gateway,
            };
            assert_eq!((packet.from, packet.to), (from, world.machine));
            let (kind, code, header, data) = icmp_error(&packet);
            assert_eq!([kind, code], wanted);
            assert_eq!(header.src_addr(), world.machine.into());
            assert_eq!(header.dst_addr(), world.remote.into());
            match protocol {
                Protocol::Tcp => assert_eq!(data, [9; 8]),
                Protocol::Udp => assert_eq!(data[..4], [15, 160, 0, 80]),
                Protocol::Ping => {
                    assert_eq!(data[0], world.echo(true, 1, b"").1[0]);
                    assert_eq!(data[4..6], [15, 160]);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn datagrams_arrive_as_they_were_sent(payload in vec(any::<u8>(), 0..1600)) {
        for (world, headers) in [(V4, 28), (V6, 48)] {
            let flow = world.flow(Protocol::Udp, 5000, 123);
            match reply(&flow, &payload) {
                None => prop_assert!(payload.len() > MTU - headers),
                Some(frame) => {
                    prop_assert!(frame.len() <= HEADER + MTU);
                    let packet = received(&frame);
                    prop_assert_eq!((packet.from, packet.to), (world.remote, world.machine));
                    let udp = UdpPacket::new_checked(packet.payload).expect("UDP");
                    let (from, to) = (world.remote.into(), world.machine.into());
                    prop_assert!(udp.verify_checksum(&from, &to));
                    prop_assert_eq!((udp.src_port(), udp.dst_port()), (123, 5000));
                    prop_assert_eq!(udp.payload(), &payload[..]);
                }
            }
        }
    }

    #[test]
    fn any_frames_are_parsed(frame in vec(any::<u8>(), 0..120)) {
        for kind in [0x0800_u16, 0x86dd] {
            let mut frame = frame.clone();
            if let Some(ethertype) = frame.get_mut(12..14) {
                ethertype.copy_from_slice(&kind.to_be_bytes());
            }
            parse(&frame);
        }
    }

    #[test]
    fn damaged_frames_are_parsed(
        payload in vec(any::<u8>(), 0..50),
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        for world in WORLDS {
            let syn = world.tcp(TcpControl::Syn, false);
            for mut frame in [world.udp(1, 2, &payload), world.ping(3, &payload), syn] {
                for (at, flip) in &flips {
                    let at = at.index(frame.len());
                    frame[at] ^= flip;
                }
                parse(&frame);
            }
        }
    }
}
