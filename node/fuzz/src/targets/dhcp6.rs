//! Messages of DHCPv6 servers, received by a client with its state.

use std::net::Ipv6Addr;

use hearth_sys::dhcp6::Lease;
use hearth_sys::dhcp6::testing::{OfflineClient, association, granted, message, option};
use hearth_sys::router_advertisements::Offered;

use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "dhcp6",
    allocates: 256 << 10,
    check,
    seeds,
};

const WAIT: u8 = 0;
const ARBITRARY: u8 = 1;
const CLAIM: u8 = 2;
const RECONNECT: u8 = 3;
const OFFER: u8 = 4;
/// More steps tell nothing new.
const MAX_STEPS: usize = 64;
const ADVERTISE: u8 = 2;
const REPLY: u8 = 7;

/// Steps: the client waits, receives a message, or one with good identifiers in its transaction, or its network changes.
fn check(input: &[u8]) {
    let mut client = OfflineClient::new(Offered::Addresses);
    let mut parts = Parts::of(input);
    for _ in 0..MAX_STEPS {
        if parts.is_empty() {
            break;
        }
        match parts.byte() % 8 {
            WAIT => drop(client.wait()),
            ARBITRARY => drop(client.receive(parts.sized())),
            CLAIM => client.claim(),
            RECONNECT => client.reconnect(),
            OFFER => client.offered(match parts.byte() % 3 {
                0 => Offered::Nothing,
                1 => Offered::Information,
                _ => Offered::Addresses,
            }),
            _ => {
                let (kind, server) = (parts.byte(), parts.byte() % 2);
                let asked = client.sent().last().and_then(|it| it.get(1..4));
                let transaction = asked.and_then(|it| it.try_into().ok());
                let bytes = message(kind, transaction.unwrap_or_default(), server, parts.sized());
                client.receive(&bytes);
            }
        }
        if let Some(lease) = client.lease() {
            is_sound(lease);
        }
    }
}

fn is_sound(lease: &Lease) {
    let is_usable = |it: &Ipv6Addr| {
        !it.is_multicast()
            && !it.is_unspecified()
            && !it.is_loopback()
            && !it.is_unicast_link_local()
    };
    assert!(lease.address.iter().all(is_usable), "{lease:?}");
    let servers = lease.name_servers.iter().chain(&lease.time_servers);
    assert!(
        servers.count() <= 16 && lease.domains.len() <= 6,
        "{lease:?}"
    );
}

fn seeds() -> Seeds {
    let address = |last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, last);
    let step = |kind: u8, options: &[u8]| [&[5, kind, 1][..], &sized(options)].concat();
    let few = association([100, 160], &granted(address(1), [200, 400]));
    let bound = [&step(ADVERTISE, &few)[..], &[WAIT], &step(REPLY, &few)].concat();
    let more = [
        few.clone(),
        option(7, &[9]),
        option(13, &[0, 0]),
        option(23, &address(53).octets()),
        option(24, b"\x03lan\0"),
        option(32, &[0, 0, 9, 0]),
        option(56, &option(1, &address(54).octets())),
        option(82, &[0, 0, 1, 0]),
    ]
    .concat();
    let ended = association([0, 0], &granted(address(1), [0, 0]));
    let raw = [&[ARBITRARY][..], &sized(&message(REPLY, [0; 3], 1, &few))].concat();
    vec![
        ("bound", bound.clone()),
        (
            "renewed",
            [&bound[..], &[WAIT], &step(REPLY, &more)].concat(),
        ),
        (
            "ended",
            [&bound[..], &[WAIT], &step(REPLY, &ended)].concat(),
        ),
        (
            "forgotten",
            [&bound[..], &[RECONNECT], &step(REPLY, &option(13, &[0, 3]))].concat(),
        ),
        (
            "claimed",
            [&bound[..], &[CLAIM], &step(REPLY, &[]), &[WAIT]].concat(),
        ),
        (
            "information",
            [&[OFFER, 1][..], &step(REPLY, &more), &[OFFER, 0]].concat(),
        ),
        ("arbitrary", raw),
    ]
}
