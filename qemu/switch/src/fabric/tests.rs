//! The forwarding of frames, with a fixed clock.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::framing::Decoder;

const ALL: Address = [0xff; 6];

fn mac(port: usize) -> Address {
    [2, 0, 0, 0, 0, port as u8]
}

fn frame(to: Address, from: Address, text: &[u8]) -> Vec<u8> {
    [&to, &from, &[0x88, 0xb5][..], text].concat()
}

/// A fabric with machines at all of its ports, whose addresses have been learned.
fn fabric(ports: usize) -> Fabric {
    let mut fabric = Fabric::new(1, None);
    for port in 0..ports {
        assert_eq!(fabric.add_link(), port);
        fabric.plug(port, true);
    }
    fabric
}

/// The frames that a machine gets now.
fn given(fabric: &mut Fabric, port: usize) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::default();
    decoder.buffer().extend(fabric.take(port));
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next().expect("a stream") {
        frames.push(frame.to_vec());
    }
    frames
}

fn for_gateway(fabric: &mut Fabric) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| fabric.take_for_gateway()).collect()
}

fn cut() -> Faults {
    Faults {
        cut: true,
        ..Faults::default()
    }
}

/// Two ports of one machine, and a second machine.
#[test]
fn ports_that_are_one_link_get_everything_once() {
    let now = Instant::now();
    let mut fabric = fabric(3);
    for port in [0, 1] {
        fabric.take_from_machine(port, &lacp::message(7, 1), now);
        assert_eq!(given(&mut fabric, port).len(), 1, "an answer");
    }
    assert!(given(&mut fabric, 2).is_empty() && for_gateway(&mut fabric).is_empty());
    let broadcast = |from: usize| frame(ALL, mac(from), b"x");
    fabric.take_from_machine(0, &broadcast(0), now);
    assert!(given(&mut fabric, 1).is_empty());
    assert_eq!(given(&mut fabric, 2).len(), 1);
    fabric.take_from_machine(2, &broadcast(2), now);
    assert_eq!(given(&mut fabric, 0).len(), 1);
    assert!(given(&mut fabric, 1).is_empty());
    // The address of the machine is at either port.
    fabric.take_from_machine(1, &frame(mac(2), mac(0), b"x"), now);
    fabric.take_from_machine(2, &frame(mac(0), mac(2), b"x"), now);
    assert!(given(&mut fabric, 0).is_empty());
    assert_eq!(given(&mut fabric, 1).len(), 1);
    given(&mut fabric, 2);
    fabric.set_faults(0, cut());
    fabric.take_from_machine(2, &broadcast(2), now);
    assert_eq!(given(&mut fabric, 1).len(), 1);
}

fn slow(millis: u64) -> Faults {
    Faults {
        delay: Duration::from_millis(millis),
        ..Faults::default()
    }
}

#[test]
fn frames_go_everywhere_until_the_place_is_known() {
    let (mut fabric, now) = (fabric(3), Instant::now());
    let first = frame(mac(1), mac(0), b"where?");
    fabric.take_from_machine(0, &first, now);
    assert!(given(&mut fabric, 0).is_empty(), "not back to the sender");
    assert_eq!(given(&mut fabric, 1), std::slice::from_ref(&first));
    assert_eq!(given(&mut fabric, 2), [first]);
    assert!(for_gateway(&mut fabric).is_empty());

    let answer = frame(mac(0), mac(1), b"here");
    fabric.take_from_machine(1, &answer, now);
    assert_eq!(given(&mut fabric, 0), [answer]);
    assert!(given(&mut fabric, 2).is_empty());

    let all = frame(ALL, mac(2), b"all");
    fabric.take_from_machine(2, &all, now);
    for port in [0, 1] {
        assert_eq!(given(&mut fabric, port), std::slice::from_ref(&all));
    }
    assert_eq!(for_gateway(&mut fabric), [all]);
}

#[test]
fn nobody_takes_the_gateways_place() {
    let (mut fabric, now) = (fabric(2), Instant::now());
    let forged = frame(ALL, GATEWAY_MAC.0, b"I am the gateway");
    fabric.take_from_machine(0, &forged, now);
    for_gateway(&mut fabric);
    given(&mut fabric, 1);
    let meant = frame(GATEWAY_MAC.0, mac(1), b"hello");
    fabric.take_from_machine(1, &meant, now);
    assert_eq!(for_gateway(&mut fabric), [meant]);
    assert!(given(&mut fabric, 0).is_empty());
}

#[test]
fn a_cut_link_lets_nothing_through_either_way() {
    let (mut fabric, now) = (fabric(2), Instant::now());
    fabric.set_faults(1, cut());
    fabric.take_from_machine(0, &frame(ALL, mac(0), b"to it"), now);
    fabric.take_from_machine(1, &frame(ALL, mac(1), b"from it"), now);
    fabric.take_from_gateway(&frame(mac(1), GATEWAY_MAC.0, b"from the host"), now);
    assert!(given(&mut fabric, 1).is_empty());
    // From the host: its port was never learned, so it went to all.
    let others = given(&mut fabric, 0);
    assert_eq!(others, [frame(mac(1), GATEWAY_MAC.0, b"from the host")]);
    assert_eq!(fabric.counters(1).dropped_cut, 3);
    assert_eq!(fabric.counters(0).dropped_cut, 0);
    fabric.set_faults(1, Faults::default());
    fabric.take_from_machine(0, &frame(ALL, mac(0), b"again"), now);
    assert_eq!(given(&mut fabric, 1).len(), 1);
}

#[test]
fn slow_links_add_up_and_what_is_under_way_is_lost_by_a_cut() {
    let (mut fabric, start) = (fabric(2), Instant::now());
    let at = |millis| start + Duration::from_millis(millis);
    fabric.set_faults(0, slow(10));
    fabric.set_faults(1, slow(5));
    fabric.take_from_machine(0, &frame(ALL, mac(0), b"one"), start);
    assert_eq!(fabric.go_on(start), Some(at(10)));
    assert!(for_gateway(&mut fabric).is_empty());
    assert_eq!(fabric.go_on(at(10)), Some(at(15)));
    assert_eq!(for_gateway(&mut fabric).len(), 1);
    assert!(given(&mut fabric, 1).is_empty());
    assert_eq!(fabric.go_on(at(15)), None);
    assert_eq!(given(&mut fabric, 1).len(), 1);

    fabric.take_from_machine(0, &frame(ALL, mac(0), b"two"), start);
    fabric.set_faults(0, cut());
    assert_eq!(fabric.go_on(at(10)), None);
    assert!(given(&mut fabric, 1).is_empty());
    assert_eq!(fabric.counters(0).dropped_cut, 1);
    assert_eq!(fabric.late_bytes, 0);
}

#[test]
fn a_steady_delay_keeps_the_order_and_jitter_does_not() {
    let (mut fabric, start) = (fabric(2), Instant::now());
    let order = |fabric: &mut Fabric| -> Vec<u8> {
        for number in 0..100 {
            fabric.take_from_machine(0, &frame(ALL, mac(0), &[number]), start);
        }
        fabric.go_on(start + Duration::from_secs(1));
        given(fabric, 1).iter().map(|frame| frame[HEADER]).collect()
    };
    let sent: Vec<u8> = (0..100).collect();
    fabric.set_faults(0, slow(10));
    assert_eq!(order(&mut fabric), sent);
    fabric.set_faults(
        0,
        Faults {
            jitter: Duration::from_millis(10),
            ..slow(10)
        },
    );
    let mut mixed = order(&mut fabric);
    assert_ne!(mixed, sent);
    mixed.sort_unstable();
    assert_eq!(mixed, sent, "none is lost");
}

#[test]
fn parted_machines_reach_the_gateway_and_others() {
    let (mut fabric, now) = (fabric(3), Instant::now());
    fabric.block(1, 0, true);
    assert_eq!(fabric.blocks().collect::<Vec<_>>(), [(0, 1)]);
    fabric.take_from_machine(0, &frame(ALL, mac(0), b"all"), now);
    assert!(given(&mut fabric, 1).is_empty());
    assert_eq!(given(&mut fabric, 2).len(), 1);
    assert_eq!(for_gateway(&mut fabric).len(), 1);
    fabric.take_from_machine(1, &frame(mac(0), mac(1), b"one"), now);
    assert!(given(&mut fabric, 0).is_empty());
    assert_eq!(fabric.counters(0).dropped_blocked, 1);
    fabric.take_from_gateway(&frame(mac(1), GATEWAY_MAC.0, b"host"), now);
    assert_eq!(given(&mut fabric, 1).len(), 1);
    fabric.block(0, 1, false);
    fabric.take_from_machine(0, &frame(mac(1), mac(0), b"one"), now);
    assert_eq!(given(&mut fabric, 1).len(), 1);
}

#[test]
fn who_does_not_take_its_frames_loses_them_alone() {
    let (mut fabric, now) = (fabric(3), Instant::now());
    let large = frame(ALL, mac(0), &[0; 1500]);
    let fits = QUEUE / framing::encoded_len(&large);
    assert!(fabric.has_room(1));
    for _ in 0..fits + 10 {
        fabric.take_from_machine(0, &large, now);
        given(&mut fabric, 2);
    }
    assert!(!fabric.has_room(1));
    assert_eq!(fabric.counters(1).dropped_overflow, 10);
    assert_eq!(fabric.counters(2).dropped_overflow, 0);
    // What was taken and is not written yet counts, too.
    assert_eq!(given(&mut fabric, 1).len(), fits);
    fabric.take_from_machine(0, &large, now);
    assert_eq!(fabric.counters(1).dropped_overflow, 11);
    assert!(given(&mut fabric, 1).is_empty());
    assert!(fabric.has_room(1));
}

#[test]
fn who_is_not_there_is_forgotten_and_given_nothing() {
    let (mut fabric, now) = (fabric(3), Instant::now());
    fabric.take_from_machine(1, &frame(ALL, mac(1), b"here"), now);
    fabric.plug(1, false);
    fabric.take_from_machine(0, &frame(mac(1), mac(0), b"gone"), now);
    assert_eq!(fabric.counters(1).dropped_unplugged, 1);
    // It may have moved.
    assert_eq!(given(&mut fabric, 2).len(), 2);
    fabric.plug(1, true);
    assert!(given(&mut fabric, 1).is_empty());
}

#[test]
fn what_is_no_frame_is_counted_and_dropped() {
    let (mut fabric, now) = (fabric(2), Instant::now());
    fabric.take_from_machine(0, &[0xff; HEADER - 1], now);
    assert_eq!(fabric.counters(0).dropped_malformed, 1);
    fabric.take_from_machine(0, &frame(ALL, mac(0), b""), now);
    assert_eq!(given(&mut fabric, 1).len(), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Send { from: usize, to: usize, size: usize },
    Host { to: usize, size: usize },
    Take(usize),
    Plug(usize, bool),
    Set(usize, Faults),
    Block(usize, usize, bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let port = 0..3_usize;
    let faults = (any::<bool>(), 0.0..1.0, 0..20_u64, 0..20_u64, 68..2000_u32).prop_map(
        |(cut, loss, delay, jitter, mtu)| Faults {
            cut,
            loss,
            delay: Duration::from_millis(delay),
            jitter: Duration::from_millis(jitter),
            mtu: Some(mtu),
        },
    );
    prop_oneof![
        8 => (port.clone(), port.clone(), 0..2000_usize)
            .prop_map(|(from, to, size)| Step::Send { from, to, size }),
        2 => (port.clone(), 0..2000_usize).prop_map(|(to, size)| Step::Host { to, size }),
        1 => port.clone().prop_map(Step::Take),
        1 => (port.clone(), any::<bool>()).prop_map(|(port, on)| Step::Plug(port, on)),
        1 => (port.clone(), faults).prop_map(|(port, faults)| Step::Set(port, faults)),
        1 => (port.clone(), port, any::<bool>()).prop_map(|(a, b, on)| Step::Block(a, b, on)),
        2 => (1..30_u64).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Every frame that was sent is delivered, lost and counted, or under way.
    #[test]
    fn frames_are_accounted_for(steps in vec(step(), 0..200)) {
        let mut fabric = fabric(3);
        let mut now = Instant::now();
        // All addresses are learned, so that each frame goes to one port.
        for port in 0..3 {
            fabric.take_from_machine(port, &frame(mac(port), mac(port), b""), now);
        }
        let mut sent = 0_u64;
        for step in steps {
            match step {
                Step::Send { from, to, size } if from != to => {
                    sent += 1;
                    // The address of a disconnected machine is forgotten: then this frame would go to all, and would be
                    // counted more than once.
                    for port in 0..3 {
                        fabric.table.learn(mac(port), End::Machine(port), now);
                    }
                    fabric.take_from_machine(from, &frame(mac(to), mac(from), &vec![0; size]), now);
                }
                Step::Send { .. } => {}
                Step::Host { to, size } => {
                    sent += 1;
                    for port in 0..3 {
                        fabric.table.learn(mac(port), End::Machine(port), now);
                    }
                    fabric.take_from_gateway(&frame(mac(to), GATEWAY_MAC.0, &vec![0; size]), now);
                }
                Step::Take(port) => drop(fabric.take(port)),
                Step::Plug(port, plugged) => {
                    fabric.plug(port, plugged);
                    for port in 0..3 {
                        fabric.table.learn(mac(port), End::Machine(port), now);
                    }
                }
                Step::Set(port, faults) => fabric.set_faults(port, faults),
                Step::Block(a, b, on) if a != b => fabric.block(a, b, on),
                Step::Block(..) => {}
                Step::Pass(millis) => {
                    now += Duration::from_millis(millis);
                    let next = fabric.go_on(now);
                    prop_assert!(next.is_none_or(|next| next > now));
                }
            }
            prop_assert!(fabric.late_bytes <= UNDER_WAY);
            prop_assert!(fabric.links.iter().all(|link| link.queued() <= QUEUE));
            let ended: u64 = (0..3)
                .map(|port| {
                    let counters = fabric.counters(port);
                    counters.sent_frames
                        + counters.dropped_cut
                        + counters.dropped_loss
                        + counters.dropped_mtu
                        + counters.dropped_blocked
                        + counters.dropped_overflow
                        + counters.dropped_unplugged
                })
                .sum();
            prop_assert_eq!(sent, ended + fabric.late.len() as u64);
        }
    }

    #[test]
    fn any_frames_are_switched(frames in vec((0..3_usize, vec(any::<u8>(), 0..40)), 0..50)) {
        let (mut fabric, now) = (fabric(3), Instant::now());
        for (port, frame) in frames {
            fabric.take_from_machine(port, &frame, now);
        }
    }
}
