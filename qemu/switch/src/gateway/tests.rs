//! The gateway by the frames that it receives and sends.

use proptest::collection::vec;
use proptest::prelude::*;
use smoltcp::wire::{
    Icmpv4Message, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr, NdiscNeighborFlags,
    NdiscRepr, TcpControl,
};

use super::*;
use crate::packets;
use crate::way_out::{Flow, WayOut};
use crate::wire::INBOX;

const GUEST_MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 10);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);

fn gateway_with(way_out: Option<WayOut>) -> Gateway {
    let options = NetworkOptions {
        way_out,
        ..NetworkOptions::default()
    };
    let mut gateway = Gateway::new(&options, Clock::start());
    gateway.dhcp.assign(GUEST_MAC, GUEST);
    gateway
}

fn gateway() -> Gateway {
    gateway_with(None)
}

fn replies(gateway: &mut Gateway, frame: Vec<u8>) -> Vec<Vec<u8>> {
    let mut replies = Vec::new();
    let outgoing = gateway.take(frame, Instant::now(), &mut replies);
    assert!(outgoing.is_none(), "{outgoing:?}");
    replies
}

/// The flow that the host has to do something for.
fn outgoing(gateway: &mut Gateway, frame: Vec<u8>) -> Option<Flow> {
    match gateway.take(frame, Instant::now(), &mut Vec::new())? {
        Outgoing::Connect { flow, .. }
        | Outgoing::Send { flow, .. }
        | Outgoing::Query { flow, .. } => Some(flow),
    }
}

/// A frame from the guest.
fn frame(kind: EthernetProtocol, payload: &[u8]) -> Vec<u8> {
    packets::frame(GUEST_MAC, kind, payload)
}

fn ip(to: Ipv4Addr, next_header: IpProtocol, payload: &[u8]) -> Vec<u8> {
    packets::ip(GUEST_MAC, GUEST, to, next_header, payload)
}

fn syn(to: Ipv4Addr, port: u16) -> Vec<u8> {
    packets::tcp(GUEST_MAC, (GUEST, 4000), (to, port), TcpControl::Syn, false)
}

#[test]
fn who_asks_for_the_gateway_is_told() {
    let ask = |address: Ipv4Addr| {
        let repr = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: EthernetAddress(GUEST_MAC),
            source_protocol_addr: GUEST,
            target_hardware_addr: EthernetAddress([0; 6]),
            target_protocol_addr: address,
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut ArpPacket::new_unchecked(&mut bytes));
        let mut frame = frame(EthernetProtocol::Arp, &bytes);
        frame[..6].copy_from_slice(&[0xff; 6]);
        frame
    };
    let replies = super::tests::replies(&mut gateway(), ask(GATEWAY));
    assert_eq!(replies.len(), 1);
    let ethernet = EthernetFrame::new_checked(&replies[0]).expect("a frame");
    assert_eq!(ethernet.dst_addr().0, GUEST_MAC);
    let arp = ArpPacket::new_checked(ethernet.payload()).expect("ARP");
    let ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr,
        source_protocol_addr,
        ..
    } = ArpRepr::parse(&arp).expect("ARP")
    else {
        panic!("of another kind");
    };
    assert_eq!(operation, ArpOperation::Reply);
    assert_eq!(
        (source_hardware_addr.0, source_protocol_addr),
        (GATEWAY_MAC.0, GATEWAY)
    );
    // Others answer for themselves.
    assert!(super::tests::replies(&mut gateway(), ask(GUEST)).is_empty());
    assert!(super::tests::replies(&mut gateway(), ask(Ipv4Addr::new(10, 98, 0, 11))).is_empty());
}

const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 0x10);

/// A message of the guest, to the group of all who may have `target`.
fn icmp6(from: Ipv6Addr, target: Ipv6Addr, message: &Icmpv6Repr<'_>) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let (high, low) = (0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, high, low);
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(
        &from,
        &group,
        &mut Icmpv6Packet::new_unchecked(&mut bytes[..]),
        &phy::ChecksumCapabilities::default(),
    );
    let mut frame = packets::ip(GUEST_MAC, from, group, IpProtocol::Icmpv6, &bytes);
    frame[..6].copy_from_slice(&[0x33, 0x33, 0xff, a, b, c]);
    Ipv6Packet::new_unchecked(&mut frame[HEADER..]).set_hop_limit(255);
    frame
}

#[test]
fn who_solicits_the_gateway_is_told() {
    let options = NetworkOptions::default();
    let ask = |from: Ipv6Addr, target_addr: Ipv6Addr| {
        let lladdr = (!from.is_unspecified()).then(|| EthernetAddress(GUEST_MAC).into());
        #[rustfmt::skip]
        let ask = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr, lladdr });
        icmp6(from, target_addr, &ask)
    };
    let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    for target in [options.gateway6, GATEWAY_LINK_LOCAL] {
        for (from, to, mac) in [
            (GUEST6, GUEST6, GUEST_MAC),
            (Ipv6Addr::UNSPECIFIED, all, [0x33, 0x33, 0, 0, 0, 1]),
        ] {
            let replies = replies(&mut gateway(), ask(from, target));
            assert_eq!(replies.len(), 1);
            let ethernet = EthernetFrame::new_checked(&replies[0]).expect("a frame");
            assert_eq!(ethernet.dst_addr().0, mac);
            let packet = Ipv6Packet::new_checked(ethernet.payload()).expect("IPv6");
            assert_eq!((packet.src_addr(), packet.dst_addr()), (target, to));
            assert_eq!(packet.hop_limit(), 255);
            let icmp = Icmpv6Packet::new_checked(packet.payload()).expect("ICMPv6");
            let checksums = phy::ChecksumCapabilities::default();
            let Ok(Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
                flags,
                target_addr,
                lladdr,
            })) = Icmpv6Repr::parse(&target, &to, &icmp, &checksums)
            else {
                panic!("of another kind");
            };
            assert_eq!(target_addr, target);
            assert_eq!(lladdr, Some(EthernetAddress(GATEWAY_MAC.0).into()));
            let is_answer = flags.contains(NdiscNeighborFlags::SOLICITED);
            assert_eq!(is_answer, from == GUEST6);
        }
    }
    // Others answer for themselves, and a router has forwarded the last one.
    let mut forwarded = ask(GUEST6, options.gateway6);
    Ipv6Packet::new_unchecked(&mut forwarded[HEADER..]).set_hop_limit(254);
    let other = Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 0x11);
    for unanswered in [ask(GUEST6, GUEST6), ask(GUEST6, other), forwarded] {
        assert!(replies(&mut gateway(), unanswered).is_empty());
    }
}

#[test]
fn what_machines_say_to_groups_is_neither_answered_nor_routed() {
    let repr = Icmpv6Repr::EchoRequest {
        ident: 3,
        seq_no: 4,
        data: b"all",
    };
    for way_out in [None, Some(WayOut::default())] {
        let target = NetworkOptions::default().gateway6;
        let frame = icmp6(GUEST6, target, &repr);
        assert!(replies(&mut gateway_with(way_out), frame).is_empty());
    }
}

/// Where machines have their addresses from it, the gateway says who asks for routers, and serves no DHCP.
#[test]
fn routers_are_advertised_where_addresses_come_from_them() {
    let options = NetworkOptions {
        addressing: Addressing::RouterAdvertisements,
        ..NetworkOptions::default()
    };
    let mut advertises = Gateway::new(&options, Clock::start());
    let ask = || {
        let ask = Icmpv6Repr::Ndisc(NdiscRepr::RouterSolicit { lladdr: None });
        icmp6(Ipv6Addr::UNSPECIFIED, options.gateway6, &ask)
    };
    assert!(replies(&mut gateway(), ask()).is_empty());
    let replies = replies(&mut advertises, ask());
    let [reply] = &replies[..] else {
        panic!("{replies:?}");
    };
    let ethernet = EthernetFrame::new_checked(&reply[..]).expect("a frame");
    let packet = Ipv6Packet::new_checked(ethernet.payload()).expect("IPv6");
    let (from, to) = (packet.src_addr(), packet.dst_addr());
    assert_eq!((from, packet.hop_limit()), (GATEWAY_LINK_LOCAL, 255));
    let icmp = Icmpv6Packet::new_checked(packet.payload()).expect("ICMPv6");
    let checksums = phy::ChecksumCapabilities::default();
    let Ok(Icmpv6Repr::Ndisc(NdiscRepr::RouterAdvert { prefix_info, .. })) =
        Icmpv6Repr::parse(&from, &to, &icmp, &checksums)
    else {
        panic!("of another kind");
    };
    let prefix = prefix_info.expect("a prefix");
    assert_eq!(prefix.prefix_len, 64);
    assert_eq!(prefix.prefix.to_bits(), options.gateway6.to_bits() - 1);
    // The name server is the last option.
    assert!(reply.ends_with(&options.gateway6.octets()));
}

/// Where machines have their addresses by DHCPv6, the gateway says so to who asks for routers, and grants them.
#[test]
fn addresses_are_granted_where_they_come_from_dhcpv6() {
    let options = NetworkOptions {
        addressing: Addressing::Dhcp6,
        ..NetworkOptions::default()
    };
    let mut grants = Gateway::new(&options, Clock::start());
    grants.dhcp.assign(GUEST_MAC, GUEST);
    let ask = Icmpv6Repr::Ndisc(NdiscRepr::RouterSolicit { lladdr: None });
    let ask = icmp6(Ipv6Addr::UNSPECIFIED, options.gateway6, &ask);
    let advertisements = replies(&mut grants, ask);
    let [advertisement] = &advertisements[..] else {
        panic!("{advertisements:?}");
    };
    // After the headers: managed addresses and other information; after the other options: a prefix that is on the link only.
    assert_eq!(advertisement[HEADER + 40 + 5], 0xc0);
    assert_eq!(advertisement[advertisement.len() - 32 + 3], 0x80);

    let mut message = vec![1, 7, 8, 9];
    message.extend([0, 1, 0, 1, 77]);
    message.extend([&[0, 3, 0, 12][..], &[5; 12]].concat());
    let (all, own) = (Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2), 0xfe80);
    let guest = Ipv6Addr::new(own, 0, 0, 0, 0, 0, 0, 9);
    let solicit = |mac: Address| {
        let udp = UdpRepr {
            src_port: dhcp6::CLIENT_PORT,
            dst_port: dhcp6::SERVER_PORT,
        };
        let mut bytes = vec![0; udp.header_len() + message.len()];
        udp.emit(
            &mut UdpPacket::new_unchecked(&mut bytes),
            &guest.into(),
            &all.into(),
            message.len(),
            |payload| payload.copy_from_slice(&message),
            &phy::ChecksumCapabilities::default(),
        );
        let mut frame = packets::ip(mac, guest, all, IpProtocol::Udp, &bytes);
        frame[..6].copy_from_slice(&[0x33, 0x33, 0, 1, 0, 2]);
        frame
    };
    let answers = replies(&mut grants, solicit(GUEST_MAC));
    let [answer] = &answers[..] else {
        panic!("{answers:?}");
    };
    let ethernet = EthernetFrame::new_checked(&answer[..]).expect("a frame");
    assert_eq!(ethernet.dst_addr().0, GUEST_MAC);
    let packet = Ipv6Packet::new_checked(ethernet.payload()).expect("IPv6");
    assert_eq!(
        (packet.src_addr(), packet.dst_addr()),
        (GATEWAY_LINK_LOCAL, guest)
    );
    let granted = Ipv6Addr::from_bits(options.gateway6.to_bits() - 1 + 10).octets();
    assert!(answer.windows(16).any(|part| part == granted));
    // Machines that have no port, and networks without it.
    assert!(replies(&mut grants, solicit([2, 0, 0, 0, 0, 9])).is_empty());
    assert!(replies(&mut gateway(), solicit(GUEST_MAC)).is_empty());
}

#[test]
fn pings_are_answered_whoever_sends_them() {
    let ping = |to: Ipv4Addr| {
        let repr = Icmpv4Repr::EchoRequest {
            ident: 3,
            seq_no: 4,
            data: b"hello",
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(
            &mut Icmpv4Packet::new_unchecked(&mut bytes),
            &phy::ChecksumCapabilities::default(),
        );
        ip(to, IpProtocol::Icmp, &bytes)
    };
    let mut gateway = gateway();
    for sender in [GUEST_MAC, [2, 0, 0, 0, 0, 9]] {
        let mut frame = ping(GATEWAY);
        frame[6..12].copy_from_slice(&sender);
        let replies = replies(&mut gateway, frame);
        assert_eq!(replies.len(), 1);
        let ethernet = EthernetFrame::new_checked(&replies[0]).expect("a frame");
        assert_eq!(ethernet.dst_addr().0, sender);
        let packet = Ipv4Packet::new_checked(ethernet.payload()).expect("IP");
        assert_eq!((packet.src_addr(), packet.dst_addr()), (GATEWAY, GUEST));
        let icmp = Icmpv4Packet::new_checked(packet.payload()).expect("ICMP");
        assert_eq!(icmp.msg_type(), Icmpv4Message::EchoReply);
        assert_eq!(icmp.data(), b"hello");
    }
    // Nothing is routed to other networks.
    assert!(replies(&mut gateway, ping(Ipv4Addr::new(1, 1, 1, 1))).is_empty());
}

#[test]
fn segments_go_to_their_connection_and_strays_are_reset() {
    let mut gateway = gateway();
    let (port, inbox) = gateway.open().expect("a port");
    assert!(replies(&mut gateway, syn(GATEWAY, port)).is_empty());
    let mut wire = Wire::new(GUEST_MAC);
    inbox.take(&mut wire);
    assert_eq!(wire.received.len(), 1);
    // To the right port at another address.
    replies(&mut gateway, syn(Ipv4Addr::new(10, 98, 0, 12), port));
    inbox.take(&mut wire);
    assert_eq!(wire.received.len(), 1);

    gateway.close(port);
    let stray = replies(&mut gateway, syn(GATEWAY, port));
    assert_eq!(stray.len(), 1);
    let packet = Ipv4Packet::new_checked(&stray[0][HEADER..]).expect("IP");
    assert!(TcpPacket::new_checked(packet.payload()).expect("TCP").rst());
}

#[test]
fn a_connection_is_not_given_more_than_it_may_hold() {
    let mut gateway = gateway();
    let (port, inbox) = gateway.open().expect("a port");
    let segment = syn(GATEWAY, port);
    for _ in 0..2 * INBOX / segment.len() {
        replies(&mut gateway, segment.clone());
    }
    let mut wire = Wire::new(GUEST_MAC);
    inbox.take(&mut wire);
    assert_eq!(wire.received.len(), INBOX / segment.len());
    replies(&mut gateway, segment);
    inbox.take(&mut wire);
    assert_eq!(wire.received.len(), INBOX / syn(GATEWAY, port).len() + 1);
}

#[test]
fn ports_differ_until_there_are_no_more() {
    let mut gateway = gateway();
    let opened: Vec<u16> = std::iter::from_fn(|| gateway.open().map(|(port, _)| port)).collect();
    assert_eq!(opened.len(), usize::from(u16::MAX - FIRST_PORT) + 1);
    gateway.close(40_000);
    assert_eq!(gateway.open().map(|(port, _)| port), Some(40_000));
}

#[test]
fn other_networks_are_reached_by_a_way_out_only() {
    let remote = Ipv4Addr::new(192, 0, 2, 1);
    assert_eq!(outgoing(&mut gateway(), syn(remote, 80)), None);
    assert!(replies(&mut gateway(), syn(remote, 80)).is_empty());
    assert_eq!(outgoing(&mut gateway(), syn(GATEWAY, 53)), None);

    let mut gateway = gateway_with(Some(WayOut::default()));
    let flow = outgoing(&mut gateway, syn(remote, 80)).expect("a connection");
    assert_eq!(flow.remote, (remote, 80).into());
    // The gateway itself has no other services than before.
    for frame in [syn(GATEWAY, 80), syn(GATEWAY, 7000)] {
        let refused = replies(&mut gateway, frame);
        assert_eq!(refused.len(), 1);
    }
    let flow = outgoing(&mut gateway, syn(GATEWAY, 53)).expect("a connection");
    assert_eq!(flow.remote, (GATEWAY, 53).into());
    // From an unknown machine, and to everybody.
    for at in [0, 6] {
        let mut frame = syn(remote, 81);
        frame[at..at + 6].copy_from_slice(&[0x02, 0, 0, 0, 0, 9]);
        assert_eq!(outgoing(&mut gateway, frame), None);
    }
}

#[test]
fn an_unknown_connection_to_another_network_is_reset_in_its_name() {
    let remote = Ipv4Addr::new(192, 0, 2, 1);
    let mut gateway = gateway_with(Some(WayOut::default()));
    let flow = outgoing(&mut gateway, syn(remote, 80)).expect("a connection");
    let router = gateway.router.as_mut().expect("a router");
    router.close(&flow);
    let mut stray = syn(remote, 80);
    let mut segment = TcpPacket::new_unchecked(&mut stray[HEADER + 20..]);
    segment.set_syn(false);
    segment.set_ack(true);
    segment.fill_checksum(&GUEST.into(), &remote.into());
    let resets = replies(&mut gateway, stray);
    assert_eq!(resets.len(), 1);
    let packet = Ipv4Packet::new_checked(&resets[0][HEADER..]).expect("IP");
    assert_eq!((packet.src_addr(), packet.dst_addr()), (remote, GUEST));
    assert!(TcpPacket::new_checked(packet.payload()).expect("TCP").rst());
}

fn udp(payload: &[u8]) -> Vec<u8> {
    let repr = UdpRepr {
        src_port: DHCP_CLIENT_PORT,
        dst_port: DHCP_SERVER_PORT,
    };
    let mut bytes = vec![0; repr.header_len() + payload.len()];
    repr.emit(
        &mut UdpPacket::new_unchecked(&mut bytes),
        &GUEST.into(),
        &Ipv4Addr::BROADCAST.into(),
        payload.len(),
        |buffer| buffer.copy_from_slice(payload),
        &phy::ChecksumCapabilities::default(),
    );
    ip(Ipv4Addr::BROADCAST, IpProtocol::Udp, &bytes)
}

proptest! {
    #[test]
    fn any_frames_are_taken(bytes in vec(any::<u8>(), 0..100), kind in 0..4, out: bool) {
        let mut gateway = gateway_with(out.then(WayOut::default));
        let frame = match kind {
            0 => bytes,
            1 => frame(EthernetProtocol::Arp, &bytes),
            2 => frame(EthernetProtocol::Ipv4, &bytes),
            _ => udp(&bytes),
        };
        outgoing(&mut gateway, frame);
    }

    /// Nearly packets, of all protocols.
    #[test]
    fn any_packets_are_taken(
        payload in vec(any::<u8>(), 0..100),
        protocol: u8,
        to in 0..3_usize,
        out: bool,
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let mut gateway = gateway_with(out.then(WayOut::default));
        gateway.open().expect("a port");
        let to = [GATEWAY, Ipv4Addr::BROADCAST, Ipv4Addr::new(192, 0, 2, 1)][to];
        for protocol in [IpProtocol::from(protocol), IpProtocol::Icmp, IpProtocol::Tcp, IpProtocol::Udp] {
            let mut frame = ip(to, protocol, &payload);
            for (at, flip) in &flips {
                let at = at.index(frame.len());
                frame[at] ^= flip;
            }
            outgoing(&mut gateway, frame);
        }
    }
}
