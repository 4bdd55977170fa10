//! Frames and messages of DHCP servers, received by a client with its state.

use std::time::Duration;

use hearth_sys::dhcp::Lease;
use hearth_sys::dhcp::testing::{MAC, OfflineClient, encoded_again, frame_of};

use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "dhcp",
    allocates: 256 << 10,
    check,
    seeds,
};

const WAIT: u8 = 0;
const FRAME: u8 = 1;
/// More steps tell nothing new.
const MAX_STEPS: usize = 64;

/// Steps: the client waits, or receives a frame, or a message in a good frame.
fn check(input: &[u8]) {
    let mut client = OfflineClient::default();
    let mut parts = Parts::of(input);
    for _ in 0..MAX_STEPS {
        if parts.is_empty() {
            break;
        }
        match parts.byte() % 4 {
            WAIT => client.wait(),
            FRAME => client.receive(parts.sized()),
            _ => {
                let message = parts.sized();
                survives_encoding(message);
                client.receive(&frame_of(message));
            }
        }
        if let Some(lease) = client.lease() {
            is_sound(lease);
        }
    }
}

fn survives_encoding(message: &[u8]) {
    if let Some(once) = encoded_again(message) {
        let twice = encoded_again(&once).expect("what was accepted is encoded");
        assert_eq!(once, twice);
    }
}

fn is_sound(lease: &Lease) {
    let whole = lease.duration.unwrap_or(Duration::MAX);
    assert!(lease.renew_after <= lease.rebind_after, "{lease:?}");
    assert!(lease.rebind_after <= whole, "{lease:?}");
    assert!(lease.mtu.is_none_or(|mtu| mtu >= 576), "{lease:?}");
    let servers = lease.name_servers.len().max(lease.time_servers.len());
    assert!(servers <= 8 && lease.routes.len() <= 32, "{lease:?}");
    assert!(lease.domains.len() <= 6, "{lease:?}");
}

fn seeds() -> Seeds {
    let message = |kind: u8, options: &[u8]| {
        let mut message = vec![0; 240];
        message[..3].copy_from_slice(&[2, 1, 6]);
        message[16..20].copy_from_slice(&[10, 0, 0, 2]);
        message[28..34].copy_from_slice(&MAC);
        message[236..240].copy_from_slice(&[99, 130, 83, 99]);
        message.extend([53, 1, kind, 54, 4, 10, 0, 0, 1]);
        message.extend(options);
        message.push(255);
        message
    };
    let few = [51, 4, 0, 0, 1, 0, 1, 4, 255, 255, 255, 0, 3, 4, 10, 0, 0, 1];
    let more = [
        &[51, 4, 0, 0, 1, 0, 58, 4, 0, 0, 0, 9, 59, 4, 0, 0, 0, 19][..],
        &[6, 8, 10, 0, 0, 1, 10, 0, 0, 3, 42, 4, 10, 0, 0, 4],
        &[26, 2, 5, 220, 15, 3, b'l', b'a', b'n'],
        &[121, 14, 0, 10, 0, 0, 1, 24, 10, 9, 8, 10, 0, 0, 7, 0],
        &[119, 9, 3, b'l', b'a', b'n', 0, 1, b'a', 0xc0, 0],
        &[52, 1, 3],
    ]
    .concat();
    let step = |kind: u8, options: &[u8]| [&[2][..], &sized(&message(kind, options))].concat();
    let (offer, acknowledged) = (step(2, &few), step(5, &few));
    let framed = [&[FRAME][..], &sized(&frame_of(&message(2, &few)))].concat();
    vec![
        ("leased", [&offer[..], &acknowledged].concat()),
        (
            "renewed",
            [&offer[..], &acknowledged, &[WAIT, WAIT], &step(5, &more)].concat(),
        ),
        ("refused", [&offer[..], &step(6, &[]), &[WAIT]].concat()),
        ("options", step(2, &more)),
        ("framed", framed),
    ]
}
