//! Which received data is accepted.

use proptest::prelude::*;

use super::*;
use crate::dhcp::message::Malformed;
use crate::dhcp::wire::{Invalid, ReplyKind};

fn offer() -> Message {
    let query = Message::query(Kind::Discover, 0x1234_5678, MAC);
    answer(&query, Kind::Offer, 600)
}

fn parsed(message: &Message) -> Result<Lease, Invalid> {
    match wire::parse(&frame_to_client(&message.encode()))?.kind {
        ReplyKind::Offer(lease) | ReplyKind::Ack(lease) => Ok(lease),
        ReplyKind::Nak => panic!("got a NAK"),
    }
}

fn with(code: u8, value: &[u8]) -> Result<Lease, Invalid> {
    let mut message = offer();
    message.set(code, value);
    parsed(&message)
}

fn with_seconds(code: u8, seconds: u32) -> Result<Lease, Invalid> {
    with(code, &seconds.to_be_bytes())
}

#[test]
fn an_offer_becomes_a_lease() {
    let lease = parsed(&offer()).unwrap();
    assert_eq!(lease.address, "10.77.0.5/24".parse().unwrap());
    assert_eq!(lease.server, SERVER);
    assert_eq!(lease.default_gateway(), Some(ROUTER));
    assert_eq!(lease.name_servers, [SERVER]);
    assert_eq!(lease.time_servers, [SERVER]);
    assert_eq!(lease.domains, ["example.com"]);
    assert_eq!(lease.duration, Some(Duration::from_secs(600)));
    assert_eq!(lease.renew_after, Duration::from_secs(300));
    assert_eq!(lease.rebind_after, Duration::from_secs(525));
}

#[test]
fn senseless_addresses_and_masks_are_refused() {
    let mut message = offer();
    for bad in [[0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1], [255; 4]] {
        message.granted = bad.into();
        assert_eq!(parsed(&message), Err(Invalid::Address(bad.into())));
    }
    let mask = |mask: &[u8]| with(code::SUBNET_MASK, mask);
    assert!(matches!(mask(&[255, 0, 255, 0]), Err(Invalid::Mask(_))));
    assert!(matches!(mask(&[0; 4]), Err(Invalid::Mask(_))));
    let wrong_length = Invalid::Message(Malformed::Length(code::SUBNET_MASK));
    assert_eq!(mask(&[255; 3]), Err(wrong_length));
    assert_eq!(mask(&[255; 4]).unwrap().address.prefix(), 32);
    assert!(with(code::SERVER, &[]).is_err());
    assert_eq!(with_seconds(code::LEASE_TIME, 0), Err(Invalid::NoTime));
}

#[test]
fn senseless_extras_are_left_out() {
    let mtu = |mtu: u16| with(code::MTU, &mtu.to_be_bytes()).unwrap().mtu;
    assert_eq!((mtu(60), mtu(1400)), (None, Some(1400)));
    let domain = |name: &str| with(code::DOMAIN, name.as_bytes()).unwrap().domains.pop();
    assert_eq!(domain("a b"), None);
    assert_eq!(domain("x\nsearch evil"), None);
    assert_eq!(domain(""), None);
    assert_eq!(domain(&"a".repeat(64)), None);
    assert_eq!(with(code::DOMAIN, &[0xff, 0xfe]).unwrap().domains, [""; 0]);
    let many = SERVER.octets().repeat(60);
    let lease = with(code::NAME_SERVERS, &many).unwrap();
    assert_eq!(lease.name_servers.len(), 8);
    let lease = with(code::TIME_SERVERS, &[127, 0, 0, 1, 1, 2]).unwrap();
    assert!(lease.time_servers.is_empty());
    // T1 after T2, and T2 after the end: the defaults are used.
    let lease = with_seconds(code::RENEW_TIME, 590).unwrap();
    assert_eq!(lease.renew_after, Duration::from_secs(300));
    let lease = with_seconds(code::REBIND_TIME, 900).unwrap();
    assert_eq!(lease.rebind_after, Duration::from_secs(525));
    let lease = with_seconds(code::LEASE_TIME, u32::MAX).unwrap();
    assert_eq!(lease.duration, None);
}

#[test]
fn classless_routes_take_the_place_of_the_router() {
    // 10.1.0.0/16 via the server, the default route via another router, an on-link route, and a
    // truncated one.
    let mut bytes = vec![16, 10, 1, 10, 77, 0, 1];
    bytes.extend([0, 10, 77, 0, 2]);
    bytes.extend([25, 10, 2, 0, 0xff, 0, 0, 0, 0]);
    bytes.extend([24, 10, 3, 0, 10]);
    let lease = with(code::CLASSLESS_ROUTES, &bytes).unwrap();
    let routes: Vec<_> = lease
        .routes
        .iter()
        .map(|route| (route.destination.to_string(), route.gateway))
        .collect();
    let expected = [
        ("10.1.0.0/16".to_owned(), Some(SERVER)),
        ("0.0.0.0/0".to_owned(), Some([10, 77, 0, 2].into())),
        ("10.2.0.128/25".to_owned(), None),
    ];
    assert_eq!(routes, expected);
    let lease = with(code::CLASSLESS_ROUTES, &[33, 1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    assert!(lease.routes.is_empty());
}

#[test]
fn other_datagrams_are_not_taken() {
    let message = offer().encode();
    let from = (MAC, SERVER, wire::SERVER_PORT);
    let other_port = wire::frame(from, (MAC, ADDRESS, 53), &message);
    assert_eq!(wire::parse(&other_port), Err(Invalid::Port));
    let good = frame_to_client(&message);
    assert!(wire::parse(&good).is_ok());
    // Version, header length, total length, fragment, checksum, protocol.
    for at in [14, 16, 20, 21, 24, 23] {
        let mut bad = good.clone();
        bad[at] ^= 0x2f;
        assert_eq!(wire::parse(&bad), Err(Invalid::Frame), "{at}");
    }
    // A client's own message is rejected.
    let query = Message::query(Kind::Discover, 1, MAC).encode();
    let own = wire::broadcast(MAC, &query);
    assert_eq!(wire::parse(&own), Err(Invalid::Port));
    assert_eq!(
        wire::parse(&frame_to_client(&query)),
        Err(Invalid::NotReply)
    );
}

#[test]
fn a_broadcast_is_a_sound_datagram_to_the_servers_port() {
    let query = Message::query(Kind::Discover, 1, MAC).encode();
    let frame = wire::broadcast(MAC, &query);
    assert_eq!(frame[..14], [&[0xff; 6][..], &MAC, &[8, 0]].concat());
    let payload = wire::payload_for(&frame, wire::SERVER_PORT).unwrap();
    assert_eq!(payload, query);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn arbitrary_frames_crash_nothing(frame in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = wire::parse(&frame);
    }

    #[test]
    fn arbitrary_messages_crash_nothing(
        changes in proptest::collection::vec((0_usize..400, any::<u8>()), 0..40),
        options in proptest::collection::vec(any::<u8>(), 0..200),
        length in 0_usize..500,
    ) {
        let mut message = offer().encode();
        // In place of the end mark and the padding.
        let end = message.iter().rposition(|byte| *byte == 255).unwrap();
        message.truncate(end);
        message.extend(options);
        for (at, byte) in changes {
            if let Some(place) = message.get_mut(at) {
                *place = byte;
            }
        }
        message.truncate(length);
        let frame = frame_to_client(&message);
        if let Ok(reply) = wire::parse(&frame)
            && let ReplyKind::Offer(lease) | ReplyKind::Ack(lease) = reply.kind
        {
            prop_assert!(lease.renew_after <= lease.rebind_after);
            prop_assert!(lease.duration.is_none_or(|end| lease.rebind_after <= end));
            prop_assert!(lease.routes.len() <= 32 && lease.name_servers.len() <= 8);
        }
    }
}
