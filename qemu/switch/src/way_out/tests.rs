//! The router by the packets of machines; `packet::tests` has their form.

use std::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpProtocol, TcpControl, UdpPacket, UdpRepr};

use super::*;
use crate::packets;
use crate::wire::Wire;

const MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];
const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 10);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const MACHINE6: Ipv6Addr = Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 0x10);
const REMOTE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

fn router() -> Router {
    let way_out = WayOut {
        aliases: BTreeMap::from([(
            Ipv4Addr::new(192, 0, 2, 7).into(),
            Ipv4Addr::LOCALHOST.into(),
        )]),
        ..WayOut::default()
    };
    Router::new(&NetworkOptions::default(), &way_out)
}

fn tcp<A: Into<IpAddr>>(from: (A, u16), to: (A, u16), control: TcpControl, ack: bool) -> Vec<u8> {
    packets::tcp(MAC, from, to, control, ack)
}

fn syn(from: u16, to: Ipv4Addr, port: u16) -> Vec<u8> {
    tcp((MACHINE, from), (to, port), TcpControl::Syn, false)
}

fn udp(from: impl Into<IpAddr>, to: impl Into<IpAddr>, port: u16) -> Vec<u8> {
    let (from, to) = (from.into(), to.into());
    let repr = UdpRepr {
        src_port: 5000,
        dst_port: port,
    };
    let mut bytes = vec![0; repr.header_len() + 5];
    repr.emit(
        &mut UdpPacket::new_unchecked(&mut bytes),
        &from.into(),
        &to.into(),
        5,
        |buffer| buffer.copy_from_slice(b"hello"),
        &ChecksumCapabilities::default(),
    );
    packets::ip(MAC, from, to, IpProtocol::Udp, &bytes)
}

#[test]
fn a_connection_is_opened_once_and_then_given_its_segments() {
    let mut router = router();
    let Verdict::Outgoing(Outgoing::Connect {
        flow,
        target,
        inbox,
        ..
    }) = router.take(syn(4000, REMOTE, 80))
    else {
        panic!("no connection");
    };
    assert_eq!(target, Target::Outside("192.0.2.1:80".parse().unwrap()));
    assert_eq!(router.connections(), 1);
    // Repeated.
    assert!(matches!(router.take(syn(4000, REMOTE, 80)), Verdict::Done));
    let mut wire = Wire::new(MAC);
    inbox.take(&mut wire);
    assert_eq!(wire.received.len(), 1);
    router.close(&flow);
    assert_eq!(router.connections(), 0);
    let segment = |control, ack| tcp((MACHINE, 4000), (REMOTE, 80), control, ack);
    let stray = router.take(segment(TcpControl::None, true));
    assert!(matches!(stray, Verdict::Refuse(_)));
    let reset = router.take(segment(TcpControl::Rst, false));
    assert!(matches!(reset, Verdict::Done));
}

#[test]
fn the_gateway_is_a_resolver_and_nothing_else_of_the_host() {
    let mut router = router();
    let Verdict::Outgoing(Outgoing::Query { flow, message }) =
        router.take(udp(MACHINE, GATEWAY, 53))
    else {
        panic!("no query");
    };
    assert_eq!(flow.machine.port(), 5000);
    assert_eq!(message, b"hello");
    let Verdict::Outgoing(Outgoing::Connect { target, .. }) = router.take(syn(4000, GATEWAY, 53))
    else {
        panic!("no connection");
    };
    assert_eq!(target, Target::Resolvers);
    for frame in [udp(MACHINE, GATEWAY, 123), syn(4000, GATEWAY, 80)] {
        assert!(matches!(router.take(frame), Verdict::Ours(_)));
    }
    for to in [
        [127, 0, 0, 1],
        [10, 98, 0, 11],
        [10, 98, 0, 255],
        [224, 0, 0, 1],
        [169, 254, 0, 1],
    ] {
        for frame in [udp(MACHINE, to, 53), syn(4000, to.into(), 53)] {
            assert!(matches!(router.take(frame), Verdict::Done), "{to:?}");
        }
    }
}

#[test]
fn an_alias_is_reached_where_it_stands_for() {
    let sent = router().take(udp(MACHINE, Ipv4Addr::new(192, 0, 2, 7), 123));
    let Verdict::Outgoing(Outgoing::Send {
        flow,
        target,
        payload,
    }) = sent
    else {
        panic!("not sent");
    };
    assert_eq!(flow.remote, "192.0.2.7:123".parse().unwrap());
    assert_eq!(target, "127.0.0.1:123".parse().unwrap());
    assert_eq!(payload, b"hello");
}

#[test]
fn only_addresses_of_machines_are_translated() {
    for from in [
        [10, 98, 1, 10],
        [127, 0, 0, 1],
        [192, 0, 2, 9],
        [10, 98, 0, 255],
        [10, 98, 0, 1],
    ] {
        let verdict = router().take(udp(from, REMOTE, 123));
        assert!(matches!(verdict, Verdict::Done), "{from:?}");
    }
}

#[test]
fn ipv6_is_routed_by_the_same_rules() {
    let syn =
        |from: Ipv6Addr, to: Ipv6Addr, port| tcp((from, 4000), (to, port), TcpControl::Syn, false);
    let mut router = router();
    let Verdict::Outgoing(Outgoing::Connect { flow, target, .. }) =
        router.take(syn(MACHINE6, REMOTE6, 80))
    else {
        panic!("no connection");
    };
    let remote = SocketAddr::new(REMOTE6.into(), 80);
    assert_eq!((flow.remote, target), (remote, Target::Outside(remote)));
    let gateway = NetworkOptions::default().gateway6;
    let asked = router.take(udp(MACHINE6, gateway, 53));
    assert!(matches!(asked, Verdict::Outgoing(Outgoing::Query { .. })));
    let asked = router.take(syn(MACHINE6, gateway, 53));
    let Verdict::Outgoing(Outgoing::Connect { target, .. }) = asked else {
        panic!("no connection");
    };
    assert_eq!(target, Target::Resolvers);
    for to in [gateway, crate::GATEWAY_LINK_LOCAL] {
        for frame in [udp(MACHINE6, to, 123), syn(MACHINE6, to, 80)] {
            assert!(matches!(router.take(frame), Verdict::Ours(_)), "{to}");
        }
    }
    let refused = [
        ("fd68:6561:7274::10", "::1"),
        ("fd68:6561:7274::10", "::ffff:127.0.0.1"),
        ("fd68:6561:7274::10", "fe80::1"),
        ("fd68:6561:7274::10", "ff02::1"),
        ("fd68:6561:7274::10", "fd68:6561:7274::11"),
        ("fe80::10", "2001:db8::1"),
        ("::", "2001:db8::1"),
        ("2001:db8::2", "2001:db8::1"),
        ("fd68:6561:7274::1", "2001:db8::1"),
        ("fd68:6561:7274:1::10", "2001:db8::1"),
    ];
    for (from, to) in refused {
        let parse = |text: &str| text.parse::<Ipv6Addr>().unwrap();
        for frame in [
            udp(parse(from), parse(to), 123),
            syn(parse(from), parse(to), 80),
        ] {
            assert!(matches!(router.take(frame), Verdict::Done), "{from} {to}");
        }
    }
}

#[test]
fn a_connection_beyond_the_limit_is_refused_and_an_ended_one_makes_room() {
    let mut router = router();
    let mut flows = Vec::new();
    for port in 1..=CONNECTIONS.machine {
        let port = u16::try_from(port).unwrap();
        match router.take(syn(port, REMOTE, 80)) {
            Verdict::Outgoing(Outgoing::Connect { flow, .. }) => flows.push(flow),
            other => panic!("{port}: {other:?}"),
        }
    }
    let refused = router.take(syn(60_000, REMOTE, 80));
    assert!(matches!(refused, Verdict::Refuse(_)));
    // Another machine has its own.
    let mut of_other = syn(60_000, REMOTE, 80);
    of_other[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    assert!(matches!(router.take(of_other), Verdict::Outgoing(_)));
    router.close(&flows[3]);
    let opened = router.take(syn(60_000, REMOTE, 80));
    assert!(matches!(opened, Verdict::Outgoing(_)));
}
