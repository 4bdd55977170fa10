use proptest::prelude::*;

use super::testing::frame_of;
use super::*;
use crate::netlink::Netlink;
use crate::testing::{cable, in_own_network};

const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

fn server(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last)
}

fn rdnss(lifetime: u32, servers: &[Ipv6Addr]) -> Vec<u8> {
    let mut option = vec![RDNSS, 1 + 2 * servers.len() as u8, 0, 0];
    option.extend(lifetime.to_be_bytes());
    option.extend(servers.iter().flat_map(Ipv6Addr::octets));
    option
}

fn dnssl(lifetime: u32, domains: &[&str]) -> Vec<u8> {
    let mut option = vec![DNSSL, 0, 0, 0];
    option.extend(lifetime.to_be_bytes());
    for domain in domains {
        for label in domain.split('.') {
            option.push(label.len() as u8);
            option.extend(label.bytes());
        }
        option.push(0);
    }
    option.resize(option.len().next_multiple_of(8), 0);
    option[1] = (option.len() / 8) as u8;
    option
}

fn frame(options: &[Vec<u8>]) -> Vec<u8> {
    frame_of(ROUTER, 0, &options.concat())
}

#[test]
fn servers_and_domains_are_read_among_other_options() {
    let prefix = [&[3, 4, 64, 0xc0][..], &[0; 28]].concat();
    let decoded = decode(&frame(&[
        prefix,
        rdnss(600, &[server(1), ROUTER, server(2)]),
        dnssl(INFINITE, &["example.com", "LAN"]),
        rdnss(0, &[server(3)]),
    ]));
    let expected = Advertisement {
        router: ROUTER,
        offered: Offered::Nothing,
        servers: vec![(server(1), 600), (server(2), 600), (server(3), 0)],
        domains: vec![("example.com".into(), INFINITE), ("lan".into(), INFINITE)],
    };
    assert_eq!(decoded, Some(expected));
}

#[test]
fn only_a_neighbour_is_believed() {
    let options = [rdnss(600, &[server(1)])];
    assert!(decode(&frame(&options)).is_some());
    assert_eq!(decode(&frame_of(server(9), 0, &options.concat())), None);
    let mut forwarded = frame(&options);
    forwarded[ETHERNET + 7] = 254;
    assert_eq!(decode(&forwarded), None);
    // RFC 4861, section 6.1.2: the whole message is discarded.
    assert_eq!(decode(&frame(&[vec![RDNSS, 0, 0, 0, 0, 0, 0, 0]])), None);
    let mut short = rdnss(600, &[server(1)]);
    short.truncate(16);
    assert_eq!(decode(&frame(&[short])), None);
}

#[test]
fn entries_end_with_their_time_and_at_once_with_a_time_of_zero() {
    let now = Instant::now();
    let after = |seconds| now + Duration::from_secs(seconds);
    let heard = |servers: &[(u16, u32)]| Advertisement {
        router: ROUTER,
        offered: Offered::Nothing,
        servers: servers
            .iter()
            .map(|(last, t)| (server(*last), *t))
            .collect(),
        domains: vec![("lan".into(), INFINITE)],
    };
    let mut learned = Learned::default();
    assert!(learned.take(&heard(&[(1, 10), (2, 100)]), now));
    assert!(!learned.take(&heard(&[(1, 10), (2, 100)]), after(5)));
    assert_eq!(learned.next_end(), Some(after(15)));
    assert!(!learned.expire(after(14)));
    assert!(learned.expire(after(15)));
    assert_eq!(learned.servers(), [server(2)]);
    assert!(learned.take(&heard(&[(2, 0), (3, INFINITE)]), after(20)));
    assert_eq!(learned.servers(), [server(3)]);
    assert_eq!(learned.domains(), ["lan"]);
    assert_eq!(learned.next_end(), None);
    // A flood of others does not push it out.
    let flood: Vec<(u16, u32)> = (100..200).map(|last| (last, 600)).collect();
    assert!(learned.take(&heard(&flood), after(21)));
    assert_eq!(learned.servers().len(), MOST_SERVERS);
    assert_eq!(learned.servers()[0], server(3));
}

#[test]
fn of_several_routers_the_one_that_offers_most_counts() {
    let router = |last| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
    let mut learned = Learned::default();
    let mut hears = |last, flags| {
        let advertisement = decode(&frame_of(router(last), flags, &[])).expect("valid");
        let changed = learned.take(&advertisement, Instant::now());
        (learned.offered(), changed)
    };
    assert_eq!(hears(1, 0), (Offered::Nothing, false));
    assert_eq!(hears(1, OTHER), (Offered::Information, true));
    assert_eq!(hears(2, MANAGED | OTHER), (Offered::Addresses, true));
    assert_eq!(hears(1, 0), (Offered::Addresses, false));
    assert_eq!(hears(2, 0), (Offered::Nothing, true));
    for last in 3..100 {
        hears(last, MANAGED);
    }
    // Those after the eighth do not count, nor do they push others out.
    for last in 3..9 {
        hears(last, 0);
    }
    assert_eq!(hears(2, 0), (Offered::Nothing, false));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
        let _ = decode(&frame(&[bytes]));
    }

    #[test]
    fn a_changed_bit_is_noticed(bit in 0_usize..8 * (FIXED + 24)) {
        let mut changed = frame(&[rdnss(600, &[server(1)])]);
        changed[ETHERNET + IP + bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(decode(&changed), None);
    }
}

/// A router that is asked, on the other end of a cable.
#[test]
fn a_router_is_asked_and_what_it_says_is_followed() {
    in_own_network(async {
        let netlink = Netlink::open().unwrap();
        let Some([here, there]) = cable(&netlink).await else {
            return;
        };
        let solicitations = [
            (0x30, 0, 0, (ETHERNET + IP) as u32),
            (0x15, 0, 1, SOLICITATION as u32),
            (0x06, 0, 0, FRAME as u32),
            (0x06, 0, 0, 0),
        ];
        let router = raw::packet_socket(there.index, IPV6, &solicitations).unwrap();
        let router = Watched::new(router).unwrap();
        let mut listener = Listener::open(here.index, here.mac.unwrap()).unwrap();
        let answer = async {
            let mut buffer = [0; FRAME];
            // The kernel of this end asks as well; only one of the two has no address yet.
            router.read(&mut buffer).await.unwrap();
            let options = [rdnss(600, &[server(1)]), dnssl(600, &["example.com"])];
            router.write(&frame(&options)).unwrap();
        };
        let (changed, ()) = tokio::join!(listener.changed(), answer);
        changed.unwrap();
        assert_eq!(listener.learned().servers(), [server(1)]);
        assert_eq!(listener.learned().domains(), ["example.com"]);
        router.write(&frame(&[rdnss(0, &[server(1)])])).unwrap();
        listener.changed().await.unwrap();
        assert_eq!(listener.learned().servers(), [Ipv6Addr::UNSPECIFIED; 0]);
        router.write(&frame(&[rdnss(1, &[server(2)])])).unwrap();
        listener.changed().await.unwrap();
        assert_eq!(listener.learned().servers(), [server(2)]);
        // It ends by itself.
        listener.changed().await.unwrap();
        assert_eq!(listener.learned().servers(), [Ipv6Addr::UNSPECIFIED; 0]);
    });
}
