//! The protocol on a simulated clock.

use proptest::prelude::*;

use super::*;
use crate::dhcp::machine::{Action, Machine};
use crate::dhcp::wire::{Reply, ReplyKind};

/// A state machine, its clock, and the lease that it holds.
struct World {
    machine: Machine,
    start: Instant,
    now: Instant,
    held: Option<Lease>,
    expiry: Option<Instant>,
    refused: Vec<Lease>,
}

impl World {
    fn new() -> Self {
        let mut seed = 1_u64;
        let random = move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            seed >> 16
        };
        let start = Instant::now();
        Self {
            machine: Machine::new(MAC, Box::new(random)),
            start,
            now: start,
            held: None,
            expiry: None,
            refused: Vec::new(),
        }
    }

    fn seconds(&self) -> f64 {
        (self.now - self.start).as_secs_f64()
    }

    /// Performs the actions; returns the messages among them.
    fn follow(&mut self, actions: Vec<Action>) -> Vec<(bool, Message)> {
        let mut sent = Vec::new();
        for action in actions {
            match action {
                Action::Broadcast(message) => sent.push((true, decode(&message))),
                Action::Renew {
                    from,
                    server,
                    message,
                } => {
                    assert_eq!((from, server), (ADDRESS, SERVER));
                    sent.push((false, decode(&message)));
                }
                Action::Configure(lease) => {
                    self.expiry = lease.duration.map(|duration| self.now + duration);
                    self.held = Some(lease);
                }
                Action::Unconfigure => assert!(self.held.take().is_some()),
                Action::Refuse { offer, .. } => self.refused.push(offer),
            }
        }
        sent
    }

    fn carrier(&mut self, present: bool) -> Vec<(bool, Message)> {
        let actions = self.machine.carrier(present, self.now);
        self.follow(actions)
    }

    /// Advances to the next deadline at which the machine acts.
    fn pass(&mut self) -> Vec<(bool, Message)> {
        self.now = self.machine.deadline().expect("a deadline");
        let actions = self.machine.timeout(self.now);
        assert!(self.machine.deadline().is_none_or(|next| next > self.now));
        self.follow(actions)
    }

    fn give(&mut self, message: &Message) -> Vec<(bool, Message)> {
        let reply = wire::parse(&frame_to_client(&message.encode())).unwrap();
        let actions = self.machine.received(&reply, self.now);
        self.follow(actions)
    }

    /// Gets a lease of this many seconds.
    fn lease(&mut self, seconds: u32) {
        let discover = only(self.carrier(true));
        let request = only(self.give(&answer(&discover, Kind::Offer, seconds)));
        assert!(kind(&request) == Kind::Request);
        let sent = self.give(&answer(&request, Kind::Ack, seconds));
        assert!(sent.is_empty() && self.held.is_some());
    }
}

fn only(sent: Vec<(bool, Message)>) -> Message {
    let [(_, message)] = <[_; 1]>::try_from(sent).expect("one message");
    message
}

fn kind(message: &Message) -> Kind {
    message.kind.unwrap()
}

#[test]
fn a_lease_takes_two_exchanges_and_no_waiting() {
    let mut world = World::new();
    world.lease(600);
    assert_eq!(world.seconds(), 0.0);
    assert_eq!(world.held.unwrap().address, "10.77.0.5/24".parse().unwrap());
}

#[test]
fn a_silent_network_is_asked_more_and_more_rarely_for_ever() {
    let mut world = World::new();
    world.carrier(true);
    let mut last = world.now;
    let mut pauses = Vec::new();
    for _ in 0..12 {
        assert_eq!(kind(&only(world.pass())), Kind::Discover);
        pauses.push((world.now - last).as_secs_f64());
        last = world.now;
    }
    assert!((0.4..0.6).contains(&pauses[0]), "{pauses:?}");
    assert!(pauses[11] > 13.0 && pauses.iter().all(|pause| *pause < 18.1));
}

#[test]
fn an_offer_that_is_not_honoured_does_not_hold_the_client_up() {
    let mut world = World::new();
    let discover = only(world.carrier(true));
    let offer = answer(&discover, Kind::Offer, 600);
    world.give(&offer);
    let mut sent = Vec::new();
    while sent.last().map(kind) != Some(Kind::Discover) {
        sent.extend(world.pass().into_iter().map(|(_, message)| message));
    }
    assert!(world.seconds() < 12.0);
    // The next offer of the same server is ignored; that of another one is accepted.
    let discover = sent.pop().unwrap();
    assert!(world.give(&answer(&discover, Kind::Offer, 600)).is_empty());
    let other = Ipv4Addr::new(10, 77, 0, 2);
    let mut offer = answer(&discover, Kind::Offer, 600);
    offer.set(code::SERVER, &other.octets());
    let request = only(world.give(&offer));
    assert_eq!(request.address(code::SERVER), Ok(Some(other)));
}

#[test]
fn only_what_was_offered_is_acknowledged_and_only_its_server_refuses() {
    let mut world = World::new();
    let discover = only(world.carrier(true));
    let request = only(world.give(&answer(&discover, Kind::Offer, 600)));
    for kind in [Kind::Ack, Kind::Nak] {
        let mut rogue = answer(&request, kind, 600);
        rogue.set(code::SERVER, &[10, 77, 0, 9]);
        rogue.granted = [10, 77, 0, 66].into();
        assert!(world.give(&rogue).is_empty() && world.held.is_none());
        let mut guess = answer(&request, kind, 600);
        guess.xid ^= 1;
        assert!(world.give(&guess).is_empty() && world.held.is_none());
    }
    world.give(&answer(&request, Kind::Ack, 600));
    assert!(world.held.is_some());
}

/// Behind some relays the server has another address when it acknowledges.
#[test]
fn the_server_may_be_another_one_when_it_acknowledges() {
    let mut world = World::new();
    let discover = only(world.carrier(true));
    let request = only(world.give(&answer(&discover, Kind::Offer, 600)));
    let other = Ipv4Addr::new(10, 77, 0, 2);
    let mut ack = answer(&request, Kind::Ack, 600);
    ack.set(code::SERVER, &other.octets());
    assert!(world.give(&ack).is_empty());
    assert_eq!(world.held.unwrap().server, other);
}

#[test]
fn no_address_of_a_reserved_network_is_taken() {
    let mut world = World::new();
    world
        .machine
        .set_reserved(vec!["10.76.0.0/15".parse().unwrap()]);
    let discover = only(world.carrier(true));
    assert!(world.give(&answer(&discover, Kind::Offer, 600)).is_empty());
    assert_eq!(world.refused[0].address, "10.77.0.5/24".parse().unwrap());
    // Another server's is.
    let mut offer = answer(&discover, Kind::Offer, 600);
    offer.granted = [192, 0, 2, 5].into();
    let request = only(world.give(&offer));
    let mut ack = answer(&request, Kind::Ack, 600);
    ack.granted = offer.granted;
    world.give(&ack);
    assert!(world.held.is_some());
}

#[test]
fn an_address_that_another_machine_has_is_declined() {
    let mut world = World::new();
    world.lease(600);
    let actions = world.machine.conflict(world.now);
    let decline = only(world.follow(actions));
    assert!(world.held.is_none());
    assert_eq!(kind(&decline), Kind::Decline);
    assert_eq!(decline.address(code::WANTED_ADDRESS), Ok(Some(ADDRESS)));
    assert_eq!(decline.address(code::SERVER), Ok(Some(SERVER)));
    assert!(decline.in_use.is_unspecified());
    assert_eq!(kind(&only(world.pass())), Kind::Discover);
    assert_eq!(world.seconds(), 10.0);
    assert!(world.machine.conflict(world.now).is_empty());
}

#[test]
fn messages_have_the_host_name_that_the_machine_has_then() {
    let mut world = World::new();
    let discover = only(world.carrier(true));
    assert_eq!(discover.option(code::HOST_NAME), None);
    world.machine.set_host_name(Some("hearth-7".into()));
    let request = only(world.give(&answer(&discover, Kind::Offer, 600)));
    assert_eq!(request.option(code::HOST_NAME), Some(&b"hearth-7"[..]));
}

#[test]
fn a_lease_is_renewed_with_its_server_then_with_any_then_lost() {
    let mut world = World::new();
    world.lease(1000);
    let sent = world.pass();
    assert_eq!(world.seconds(), 500.0);
    let (broadcast, renewal) = &sent[0];
    assert!(!broadcast && renewal.in_use == ADDRESS);
    assert_eq!(renewal.address(code::SERVER), Ok(None));
    // An ACK restarts the lease.
    world.give(&answer(renewal, Kind::Ack, 1000));
    world.pass();
    assert_eq!(world.seconds(), 1000.0);
    // Without one the client asks again, then by broadcast, and then the lease expires.
    let (mut unicast, mut broadcast) = (1, 0);
    while world.held.is_some() {
        for (to_all, message) in world.pass() {
            match kind(&message) {
                Kind::Request if to_all => broadcast += 1,
                Kind::Request => unicast += 1,
                _ => assert!(world.held.is_none()),
            }
        }
    }
    assert_eq!(world.seconds(), 1500.0);
    assert!(unicast >= 3 && broadcast >= 2, "{unicast} {broadcast}");
}

#[test]
fn a_refused_renewal_takes_the_address_at_once_and_starts_over() {
    let mut world = World::new();
    world.lease(1000);
    let renewal = only(world.pass());
    let discover = only(world.give(&answer(&renewal, Kind::Nak, 0)));
    assert!(world.held.is_none());
    assert_eq!(kind(&discover), Kind::Discover);
}

#[test]
fn a_server_that_refuses_for_ever_is_asked_more_and_more_rarely() {
    let mut world = World::new();
    let mut discover = only(world.carrier(true));
    for _ in 0..20 {
        let request = only(world.give(&answer(&discover, Kind::Offer, 600)));
        let mut sent = world.give(&answer(&request, Kind::Nak, 0));
        while sent.is_empty() {
            sent = world.pass();
        }
        discover = only(sent);
    }
    assert!(world.seconds() > 150.0, "{}", world.seconds());
}

#[test]
fn a_lost_carrier_keeps_the_lease_and_its_return_checks_it() {
    let mut world = World::new();
    world.lease(1000);
    world.carrier(false);
    assert!(world.held.is_some());
    let check = only(world.carrier(true));
    assert_eq!(kind(&check), Kind::Request);
    assert_eq!(check.address(code::WANTED_ADDRESS), Ok(Some(ADDRESS)));
    assert!(check.in_use.is_unspecified());
    world.give(&answer(&check, Kind::Ack, 1000));
    // Another network sends a NAK.
    world.carrier(false);
    let check = only(world.carrier(true));
    world.give(&answer(&check, Kind::Nak, 0));
    assert!(world.held.is_none());
}

#[test]
fn without_an_answer_to_the_check_the_lease_is_kept_until_it_expires() {
    let mut world = World::new();
    world.lease(1000);
    world.carrier(false);
    world.carrier(true);
    let mut discovered = false;
    while world.held.is_some() {
        for (_, message) in world.pass() {
            discovered |= world.held.is_some() && kind(&message) == Kind::Discover;
        }
    }
    assert_eq!(world.seconds(), 1000.0);
    assert!(discovered);
}

#[test]
fn a_lease_expires_without_a_carrier_too() {
    let mut world = World::new();
    world.lease(1000);
    world.carrier(false);
    assert!(world.pass().is_empty() && world.held.is_none());
    assert_eq!(world.machine.deadline(), None);
}

#[test]
fn a_lease_for_ever_has_no_deadline() {
    let mut world = World::new();
    world.lease(u32::MAX);
    assert_eq!(world.machine.deadline(), None);
}

#[derive(Clone, Debug)]
enum Event {
    Carrier(bool),
    Pass,
    Answer(Kind, u32),
    Stray(u32),
}

fn event() -> impl Strategy<Value = Event> {
    let kinds = [Kind::Offer, Kind::Ack, Kind::Nak];
    let kind = proptest::sample::select(kinds.to_vec());
    prop_oneof![
        1 => any::<bool>().prop_map(Event::Carrier),
        4 => Just(Event::Pass),
        4 => (kind, 1_u32..2000).prop_map(|(kind, time)| Event::Answer(kind, time)),
        1 => any::<u32>().prop_map(Event::Stray),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For every order of events: no panic, no busy loop, and never an expired lease.
    #[test]
    fn any_order_of_events_is_survived(events in proptest::collection::vec(event(), 1..60)) {
        let mut world = World::new();
        let mut last = None;
        for event in events {
            let sent = match event {
                Event::Carrier(present) => world.carrier(present),
                Event::Pass if world.machine.deadline().is_none() => Vec::new(),
                Event::Pass => world.pass(),
                Event::Answer(kind, seconds) => match &last {
                    Some(query) => world.give(&answer(query, kind, seconds)),
                    None => Vec::new(),
                },
                Event::Stray(xid) => {
                    let reply = Reply { xid, mac: MAC, server: Some(SERVER), kind: ReplyKind::Nak };
                    let actions = world.machine.received(&reply, world.now);
                    world.follow(actions)
                }
            };
            if let Some((_, message)) = sent.into_iter().last() {
                last = Some(message);
            }
            if world.held.is_some() {
                prop_assert!(world.expiry.is_some_and(|expiry| world.now < expiry));
            }
        }
    }
}
