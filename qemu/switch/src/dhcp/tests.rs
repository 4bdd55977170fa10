//! The server by the bytes of its messages; `tests/switch.rs` tests it with an independent client.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];
const LEASE: Duration = Duration::from_secs(30);
const BOOT_URL: &str = "http://192.0.2.80/hearth.efi";
const XID: u32 = 0x0102_0304;

const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const DECLINE: u8 = 4;
const ACK: u8 = 5;
const NAK: u8 = 6;
const RELEASE: u8 = 7;
const INFORM: u8 = 8;

fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 98, 0, last)
}

fn server() -> Server {
    server_that(false)
}

fn server_that(resolves: bool) -> Server {
    let mut server = Server::new(Settings {
        address: SERVER,
        mask: Ipv4Addr::new(255, 255, 255, 0),
        lease: LEASE,
        resolves,
        boot_url: Some(BOOT_URL.to_owned()),
    });
    server.assign(MAC, address(10));
    server
}

/// A client's message, byte by byte as in the RFC.
fn query(kind: u8, has: Ipv4Addr, options: &[(u8, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 240];
    bytes[..3].copy_from_slice(&[1, 1, 6]);
    bytes[4..8].copy_from_slice(&XID.to_be_bytes());
    bytes[12..16].copy_from_slice(&has.octets());
    bytes[28..34].copy_from_slice(&MAC);
    bytes[236..].copy_from_slice(&[99, 130, 83, 99]);
    bytes.extend([53, 1, kind]);
    for (code, value) in options {
        bytes.extend([*code, value.len() as u8]);
        bytes.extend_from_slice(value);
    }
    bytes.push(255);
    bytes
}

/// The options of a reply, by code.
fn options(message: &[u8]) -> HashMap<u8, Vec<u8>> {
    let mut options = HashMap::new();
    let mut rest = &message[240..];
    while let [code, length, tail @ ..] = rest {
        if *code == 255 {
            break;
        }
        let (value, tail) = tail.split_at(usize::from(*length));
        options.insert(*code, value.to_vec());
        rest = tail;
    }
    options
}

const NONE: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

#[test]
fn an_address_is_offered_and_granted_with_its_times() {
    let (mut server, now) = (server(), Instant::now());
    let offer = server
        .take(&query(DISCOVER, NONE, &[]), now)
        .expect("an offer");
    assert_eq!(offer.to, Some((MAC, address(10))));
    assert_eq!(server.leased(MAC, now), None);
    let wanted: &[(u8, &[u8])] = &[(50, &[10, 98, 0, 10]), (54, &SERVER.octets())];
    let ack = server
        .take(&query(REQUEST, NONE, wanted), now)
        .expect("an answer");
    assert_eq!(server.leased(MAC, now), Some(address(10)));
    assert_eq!(server.leased(MAC, now + LEASE), None);
    assert_eq!(server.found_at(MAC, now + LEASE), Some(address(10)));
    for (reply, kind) in [(offer, OFFER), (ack, ACK)] {
        let bytes = &reply.message;
        assert!(bytes.len() >= SHORTEST);
        assert_eq!(bytes[..3], [2, 1, 6]);
        assert_eq!(bytes[4..8], XID.to_be_bytes());
        assert_eq!(bytes[16..20], [10, 98, 0, 10]);
        assert_eq!(bytes[28..34], MAC);
        let options = options(bytes);
        for (code, value) in [
            (53, &[kind][..]),
            (54, &[10, 98, 0, 1]),
            (1, &[255, 255, 255, 0]),
            (3, &[10, 98, 0, 1]),
            (51, &[0, 0, 0, 30]),
            (58, &[0, 0, 0, 15]),
            (59, &[0, 0, 0, 26]),
        ] {
            assert_eq!(options.get(&code).map(Vec::as_slice), Some(value), "{code}");
        }
        assert!(!options.contains_key(&6), "no name servers");
    }
}

#[test]
fn a_server_that_resolves_says_so() {
    let mut server = server_that(true);
    let mut options_of = |kind, options: &[(u8, &[u8])]| {
        let reply = server.take(&query(kind, NONE, options), Instant::now());
        self::options(&reply.expect("an answer").message)
    };
    let wanted: &[(u8, &[u8])] = &[(50, &[10, 98, 0, 10])];
    for told in [
        options_of(DISCOVER, &[]),
        options_of(REQUEST, wanted),
        options_of(INFORM, &[]),
    ] {
        assert_eq!(told.get(&6), Some(&SERVER.octets().to_vec()));
    }
    let refused = options_of(REQUEST, &[(50, &[10, 98, 0, 11])]);
    assert!(!refused.contains_key(&6), "a NAK says nothing else");
}

/// RFC 2131, 4.3.2: the content of a request shows the client's state.
#[test]
fn each_kind_of_request_is_answered_for_the_right_address_only() {
    let us: (u8, &[u8]) = (54, &[10, 98, 0, 1]);
    let wants: (u8, &[u8]) = (50, &[10, 98, 0, 10]);
    let wants_other: (u8, &[u8]) = (50, &[10, 98, 0, 11]);
    for (has, options, kind) in [
        // Selecting, rebooting, renewing.
        (NONE, vec![us, wants], Some(ACK)),
        (NONE, vec![us, wants_other], Some(NAK)),
        (NONE, vec![wants], Some(ACK)),
        (NONE, vec![wants_other], Some(NAK)),
        (address(10), vec![], Some(ACK)),
        (address(11), vec![], Some(NAK)),
        // It has chosen another server.
        (NONE, vec![(54, &[10, 98, 0, 2][..]), wants], None),
        // It requests nothing.
        (NONE, vec![us], Some(NAK)),
    ] {
        let reply = server().take(&query(REQUEST, has, &options), Instant::now());
        let found = reply
            .as_ref()
            .map(|reply| self::options(&reply.message)[&53][0]);
        assert_eq!(found, kind, "{has} {options:?}");
        if let (Some(reply), Some(NAK)) = (reply, kind) {
            assert_eq!(reply.to, None, "a refusal is for all");
            assert_eq!(reply.message[16..20], [0; 4]);
        }
    }
}

#[test]
fn a_changed_address_is_refused_at_the_renewal_and_then_given() {
    let (mut server, now) = (server(), Instant::now());
    server
        .take(&query(REQUEST, address(10), &[]), now)
        .expect("an answer");
    server.assign(MAC, address(20));
    // Until it gets the NAK, the machine is at its old address.
    assert_eq!(server.found_at(MAC, now), Some(address(10)));
    let nak = server
        .take(&query(REQUEST, address(10), &[]), now)
        .expect("an answer");
    assert_eq!(options(&nak.message)[&53], [NAK]);
    let offer = server
        .take(&query(DISCOVER, NONE, &[]), now)
        .expect("an offer");
    assert_eq!(offer.message[16..20], [10, 98, 0, 20]);
    server
        .take(&query(REQUEST, NONE, &[(50, &[10, 98, 0, 20])]), now)
        .expect("an answer");
    assert_eq!(server.found_at(MAC, now), Some(address(20)));
}

#[test]
fn a_declined_address_is_withheld_for_a_while() {
    let (mut server, now) = (server(), Instant::now());
    let declined = query(
        DECLINE,
        NONE,
        &[(50, &[10, 98, 0, 10]), (54, &SERVER.octets())],
    );
    assert_eq!(server.take(&declined, now), None);
    assert_eq!(server.take(&query(DISCOVER, NONE, &[]), now), None);
    assert!(
        server
            .take(&query(DISCOVER, NONE, &[]), now + LEASE)
            .is_some()
    );
    server.take(&declined, now);
    server.assign(MAC, address(20));
    assert!(server.take(&query(DISCOVER, NONE, &[]), now).is_some());
}

#[test]
fn a_released_lease_is_over_and_who_only_asks_gets_none() {
    let (mut server, now) = (server(), Instant::now());
    server
        .take(&query(REQUEST, address(10), &[]), now)
        .expect("an answer");
    assert_eq!(server.take(&query(RELEASE, address(10), &[]), now), None);
    assert_eq!(server.leased(MAC, now), None);
    let told = server
        .take(&query(INFORM, address(77), &[]), now)
        .expect("an answer");
    assert_eq!(told.to, Some((MAC, address(77))));
    assert_eq!(told.message[16..20], [0; 4]);
    assert!(!options(&told.message).contains_key(&51));
    assert_eq!(server.leased(MAC, now), None);
}

#[test]
fn who_is_not_served_is_not_answered_until_it_is() {
    let (mut server, now) = (server(), Instant::now());
    assert!(server.serves(MAC));
    server.serve(MAC, false);
    assert!(!server.serves(MAC));
    for kind in [DISCOVER, REQUEST, INFORM] {
        assert_eq!(server.take(&query(kind, address(10), &[]), now), None);
    }
    // A change of address does not affect it.
    server.assign(MAC, address(20));
    assert_eq!(server.take(&query(DISCOVER, NONE, &[]), now), None);
    server.serve(MAC, true);
    assert!(server.take(&query(DISCOVER, NONE, &[]), now).is_some());
}

#[test]
fn replies_go_to_all_where_they_must() {
    let (mut server, now) = (server(), Instant::now());
    let mut discover = query(DISCOVER, NONE, &[]);
    discover[10] = 0x80;
    assert_eq!(server.take(&discover, now).expect("an offer").to, None);
    // A client with an address is answered there all the same.
    let mut renewal = query(REQUEST, address(10), &[]);
    renewal[10] = 0x80;
    let ack = server.take(&renewal, now).expect("an answer");
    assert_eq!(ack.to, Some((MAC, address(10))));
}

#[test]
fn strangers_relays_and_servers_are_not_answered() {
    let (mut server, now) = (server(), Instant::now());
    let good = query(DISCOVER, NONE, &[]);
    for (at, byte) in [
        (28, 2),
        (24, 10),
        (0, 2),
        (1, 6),
        (2, 16),
        (236, 0),
        (242, OFFER),
        (242, 99),
    ] {
        let mut bytes = good.clone();
        bytes[at] = byte;
        assert_eq!(server.take(&bytes, now), None, "{at}");
    }
    assert!(server.take(&good, now).is_some());
}

proptest! {
    #[test]
    fn any_bytes_are_taken(bytes in vec(any::<u8>(), 0..600)) {
        server().take(&bytes, Instant::now());
    }

    /// Nearly a message.
    #[test]
    fn any_options_are_taken(tail in vec(any::<u8>(), 0..300), has: u32, kind in 0..10_u8) {
        let mut bytes = query(kind, has.into(), &[]);
        bytes.pop();
        bytes.extend(tail);
        let mut server = server();
        let now = Instant::now();
        if let Some(reply) = server.take(&bytes, now) {
            prop_assert!(options(&reply.message).contains_key(&53));
        }
        // No client gets another's address.
        prop_assert!(server.leased(MAC, now).is_none_or(|leased| leased == address(10)));
    }
}

#[test]
fn firmware_that_boots_by_http_is_told_from_where() {
    let class = (60, &b"HTTPClient:Arch:00016:UNDI:003001"[..]);
    for (kind, wanted) in [(DISCOVER, OFFER), (REQUEST, ACK)] {
        let asked = [class, (50, &address(10).octets()[..])];
        let reply = server().take(&query(kind, Ipv4Addr::UNSPECIFIED, &asked), Instant::now());
        let options = options(&reply.expect("an answer").message);
        assert_eq!(options[&53], [wanted]);
        assert_eq!(options[&60], b"HTTPClient");
        assert_eq!(options[&67], BOOT_URL.as_bytes());
    }
    // Others are not.
    for asked in [&[][..], &[(60, &b"PXEClient:Arch:00007"[..])]] {
        let query = query(DISCOVER, Ipv4Addr::UNSPECIFIED, asked);
        let reply = server().take(&query, Instant::now()).expect("an answer");
        let options = options(&reply.message);
        assert!(!options.contains_key(&60) && !options.contains_key(&67));
    }
}
