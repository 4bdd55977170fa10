//! Advertisements of IPv6 routers, and what is kept of several of them.

use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use hearth_sys::router_advertisements::testing::frame_of;
use hearth_sys::router_advertisements::{Learned, decode};

use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "router_advertisement",
    allocates: 256 << 10,
    check,
    seeds,
};

const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const FRAME: u8 = 0;
const WAIT: u8 = 1;
/// More steps tell nothing new.
const MAX_STEPS: usize = 64;

/// Steps: a frame is received, or flags and options in a good frame, or time passes.
fn check(input: &[u8]) {
    let mut learned = Learned::default();
    let mut now = Instant::now();
    let mut parts = Parts::of(input);
    for _ in 0..MAX_STEPS {
        if parts.is_empty() {
            break;
        }
        let decoded = match parts.byte() % 4 {
            FRAME => decode(parts.sized()),
            WAIT => {
                now += Duration::from_secs(parts.byte().into());
                learned.expire(now);
                None
            }
            _ => {
                let flags = parts.byte();
                decode(&frame_of(ROUTER, flags, parts.sized()))
            }
        };
        if let Some(advertisement) = decoded {
            learned.take(&advertisement, now);
        }
        assert!(learned.servers().len() <= 8 && learned.domains().len() <= 6);
        assert!(learned.next_end().is_none_or(|end| end > now));
        let is_unusable =
            |server: &Ipv6Addr| server.is_unicast_link_local() || server.is_multicast();
        assert!(!learned.servers().iter().any(is_unusable));
    }
}

fn seeds() -> Seeds {
    let server = |lifetime: u32, last: u8| {
        let mut option = vec![25, 3, 0, 0];
        option.extend(lifetime.to_be_bytes());
        option.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        option
    };
    let domain = [&[31, 2, 0, 0, 0, 0, 2, 88][..], b"\x03lan\0\0\0\0"].concat();
    let step = |options: &[u8]| [&[2, 0xc0][..], &sized(options)].concat();
    let both = step(&[server(600, 1), domain].concat());
    let framed = [&[FRAME][..], &sized(&frame_of(ROUTER, 0, &server(9, 1)))].concat();
    vec![
        ("both", both.clone()),
        ("withdrawn", [&both[..], &step(&server(0, 1))].concat()),
        ("ended", [&step(&server(9, 1))[..], &[WAIT, 10]].concat()),
        ("framed", framed),
    ]
}
