use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::packets;

const MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];
const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 10);
const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);

fn flow(protocol: Protocol, machine: u16, remote: u16) -> Flow {
    Flow {
        mac: MAC,
        protocol,
        machine: SocketAddr::new(MACHINE.into(), machine),
        remote: SocketAddr::new(REMOTE.into(), remote),
    }
}

/// A packet of the machine, made as one to it and then readdressed.
fn sent(protocol: IpProtocol, length: usize, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut frame = ip([0; 6], MACHINE, REMOTE, protocol, length, fill);
    frame[6..12].copy_from_slice(&MAC);
    frame
}

fn udp(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let repr = UdpRepr {
        src_port: from,
        dst_port: to,
    };
    sent(IpProtocol::Udp, PAYLOAD_HEADER + payload.len(), |bytes| {
        repr.emit(
            &mut UdpPacket::new_unchecked(bytes),
            &MACHINE.into(),
            &REMOTE.into(),
            payload.len(),
            |buffer| buffer.copy_from_slice(payload),
            &ChecksumCapabilities::default(),
        );
    })
}

fn tcp(control: TcpControl, ack: bool) -> Vec<u8> {
    packets::tcp(MAC, (MACHINE, 4000), (REMOTE, 80), control, ack)
}

fn ping(ident: u16, data: &[u8]) -> Vec<u8> {
    let request = Icmpv4Repr::EchoRequest {
        ident,
        seq_no: 5,
        data,
    };
    sent(IpProtocol::Icmp, request.buffer_len(), |bytes| {
        request.emit(
            &mut Icmpv4Packet::new_unchecked(bytes),
            &ChecksumCapabilities::default(),
        );
    })
}

/// The source, destination and payload of a frame to the machine.
fn received(frame: &[u8]) -> (Ipv4Addr, Ipv4Addr, &[u8]) {
    let ethernet = EthernetFrame::new_checked(frame).expect("a frame");
    assert_eq!(ethernet.dst_addr().0, MAC);
    let packet = Ipv4Packet::new_checked(&frame[HEADER..]).expect("IP");
    assert!(packet.verify_checksum());
    let payload = payload_of(&packet, frame).expect("a payload");
    (packet.src_addr(), packet.dst_addr(), payload)
}

#[test]
fn each_protocol_has_its_flow() {
    let frame = udp(5000, 123, b"time?");
    assert_eq!(
        parse(&frame),
        Some((flow(Protocol::Udp, 5000, 123), Content::Payload(b"time?")))
    );
    let frame = ping(77, b"data");
    let (found, Content::Payload(message)) = parse(&frame).expect("a packet") else {
        panic!("of another kind");
    };
    assert_eq!(found, flow(Protocol::Ping, 77, 0));
    assert_eq!(message, &frame[HEADER + 20..]);
    for (control, ack, segment) in [
        (TcpControl::Syn, false, Segment::Open),
        (TcpControl::Syn, true, Segment::Other),
        (TcpControl::None, true, Segment::Other),
        (TcpControl::Fin, true, Segment::Other),
        (TcpControl::Rst, false, Segment::Reset),
    ] {
        assert_eq!(
            parse(&tcp(control, ack)),
            Some((flow(Protocol::Tcp, 4000, 80), Content::Segment(segment))),
            "{control:?}"
        );
    }
    assert_eq!(parse(&udp(0, 123, b"")), None);
    assert_eq!(parse(&udp(5000, 0, b"")), None);
}

#[test]
fn damaged_packets_and_fragments_are_not_translated() {
    for frame in [
        udp(5000, 123, b"time?"),
        ping(77, b"data"),
        tcp(TcpControl::Syn, false),
    ] {
        assert!(parse(&frame).is_some());
        for at in HEADER..frame.len() {
            let mut damaged = frame.clone();
            damaged[at] ^= 0x10;
            // The stack of a connection checks all segments but the first.
            let taken = parse(&damaged).filter(|(_, content)| {
                !matches!(content, Content::Segment(Segment::Other | Segment::Reset))
            });
            assert_eq!(taken, None, "byte {at}");
        }
        let mut fragment = frame.clone();
        let mut packet = Ipv4Packet::new_unchecked(&mut fragment[HEADER..]);
        packet.set_dont_frag(false);
        packet.set_more_frags(true);
        packet.fill_checksum();
        assert_eq!(parse(&fragment), None);
    }
    // Ethernet pads short frames.
    let mut padded = udp(5000, 123, b"x");
    padded.resize(60, 0);
    assert!(matches!(parse(&padded), Some((_, Content::Payload(b"x")))));
}

#[test]
fn an_echo_reply_has_the_identifier_of_its_request() {
    let host = Icmpv4Repr::EchoReply {
        ident: 999,
        seq_no: 5,
        data: b"data",
    };
    let mut message = vec![0; host.buffer_len()];
    host.emit(
        &mut Icmpv4Packet::new_unchecked(&mut message),
        &ChecksumCapabilities::default(),
    );
    let flow = flow(Protocol::Ping, 77, 0);
    let frame = reply(&flow, &message).expect("a reply");
    let (from, to, payload) = received(&frame);
    assert_eq!((from, to), (REMOTE, MACHINE));
    let icmp = Icmpv4Packet::new_checked(payload).expect("ICMP");
    assert_eq!(
        Icmpv4Repr::parse(&icmp, &ChecksumCapabilities::default()),
        Ok(Icmpv4Repr::EchoReply {
            ident: 77,
            seq_no: 5,
            data: b"data"
        })
    );
    message[0] = Icmpv4Message::EchoRequest.into();
    assert_eq!(reply(&flow, &message), None);
    assert_eq!(reply(&flow, &message[..3]), None);
}

#[test]
fn what_is_unreachable_is_told_with_what_was_sent() {
    for (protocol, why, from) in [
        (Protocol::Tcp, Unreachable::Network, GATEWAY),
        (Protocol::Udp, Unreachable::Port, REMOTE),
        (Protocol::Ping, Unreachable::Host, GATEWAY),
        (Protocol::Udp, Unreachable::Prohibited, GATEWAY),
    ] {
        let flow = flow(protocol, 4000, 80);
        let start = (protocol == Protocol::Tcp).then_some([9; 8]);
        let frame = unreachable(&flow, GATEWAY, why, start).expect("an answer");
        let (source, destination, payload) = received(&frame);
        assert_eq!((source, destination), (from, MACHINE));
        let icmp = Icmpv4Packet::new_checked(payload).expect("ICMP");
        let checksums = ChecksumCapabilities::default();
        let Ok(Icmpv4Repr::DstUnreachable { header, data, .. }) =
            Icmpv4Repr::parse(&icmp, &checksums)
        else {
            panic!("of another kind");
        };
        assert_eq!((header.src_addr, header.dst_addr), (MACHINE, REMOTE));
        match protocol {
            Protocol::Tcp => assert_eq!(data, [9; 8]),
            Protocol::Udp => assert_eq!(data[..4], [15, 160, 0, 80]),
            Protocol::Ping => assert_eq!(data[4..6], [15, 160]),
        }
    }
}

proptest! {
    #[test]
    fn datagrams_arrive_as_they_were_sent(payload in vec(any::<u8>(), 0..1600)) {
        let flow = flow(Protocol::Udp, 5000, 123);
        match reply(&flow, &payload) {
            None => prop_assert!(payload.len() > MTU - 28),
            Some(frame) => {
                prop_assert!(frame.len() <= HEADER + MTU);
                let (from, to, bytes) = received(&frame);
                prop_assert_eq!((from, to), (REMOTE, MACHINE));
                let udp = UdpPacket::new_checked(bytes).expect("UDP");
                prop_assert!(udp.verify_checksum(&REMOTE.into(), &MACHINE.into()));
                prop_assert_eq!((udp.src_port(), udp.dst_port()), (123, 5000));
                prop_assert_eq!(udp.payload(), &payload[..]);
            }
        }
    }

    #[test]
    fn any_frames_are_parsed(frame in vec(any::<u8>(), 0..120)) {
        parse(&frame);
    }

    #[test]
    fn damaged_frames_are_parsed(
        payload in vec(any::<u8>(), 0..50),
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        for mut frame in [udp(1, 2, &payload), ping(3, &payload), tcp(TcpControl::Syn, false)] {
            for (at, flip) in &flips {
                let at = at.index(frame.len());
                frame[at] ^= flip;
            }
            parse(&frame);
        }
    }
}
