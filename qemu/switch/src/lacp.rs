//! Link aggregation (LACP, IEEE 802.1AX), as far as a machine needs it to make one link of several ports.
//!
//! The switch answers each message on the port where it has arrived, as a partner that agrees to everything. It repeats its answer
//! each second until the machine is disconnected, as switches do: a machine that has given up its partner speaks only every thirty
//! seconds by itself. The ports on which the same system speaks of the same aggregation are one link, as long as messages come: a
//! machine is asked to send one each second, and does not count any more after three.
//!
//! Between the ports of one link nothing is forwarded, and what goes to all is sent to one of them. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::GATEWAY_MAC;
use super::learning::{Address, HEADER};

/// Where messages of LACP are sent to. No switch forwards them.
pub(super) const SLOW_PROTOCOLS: Address = [0x01, 0x80, 0xc2, 0, 0, 2];
const ETHERTYPE: [u8; 2] = [0x88, 0x09];
/// The subtype of LACP, and its version.
const LACP: [u8; 2] = [1, 1];
/// The short timeout of the standard: three messages.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How often an answer is repeated: the standard's fast rate.
const REPEAT_EACH: Duration = Duration::from_secs(1);
/// Bytes of the description of one partner.
const INFORMATION: usize = 20;
const ACTOR: usize = HEADER + 2;
const PARTNER: usize = ACTOR + INFORMATION;
/// Where a description has the state.
const ACTOR_STATE: usize = 16;
/// Bytes of a message after the two descriptions: how long frames wait at most, the end, and what is reserved.
const REST: usize = 16 + 2 + 50;
/// Active, wants a message each second, aggregates, agrees, receives and sends.
const STATE: u8 = 0b0011_1111;
/// The part of a machine's state that says that its port agrees, receives and sends.
const CARRIES: u8 = 0b0011_1000;

/// What a machine makes one link of: its system, and the key of the aggregation.
type Aggregation = [u8; 10];

/// The last message that was heard on a port.
#[derive(Debug)]
struct Heard {
    aggregation: Aggregation,
    carries: bool,
    at: Instant,
    answer: Vec<u8>,
    repeat_at: Instant,
}

impl Heard {
    fn is_recent(&self, now: Instant) -> bool {
        now.duration_since(self.at) < TIMEOUT
    }
}

/// The ports on which messages were heard.
#[derive(Debug, Default)]
pub(super) struct Ports(BTreeMap<usize, Heard>);

impl Ports {
    /// Takes a frame to [`SLOW_PROTOCOLS`] that has arrived at a port; returns the answer.
    pub(super) fn take(&mut self, port: usize, frame: &[u8], now: Instant) -> Option<Vec<u8>> {
        let is_lacp = frame.get(12..ACTOR)? == [ETHERTYPE, LACP].concat();
        let actor = frame.get(ACTOR..PARTNER)?;
        if !is_lacp || actor[..2] != [1, INFORMATION as u8] {
            return None;
        }
        let heard = Heard {
            aggregation: actor[2..12].try_into().ok()?,
            carries: actor[ACTOR_STATE] & CARRIES == CARRIES,
            at: now,
            answer: answer(port, actor),
            repeat_at: now + REPEAT_EACH,
        };
        let answer = heard.answer.clone();
        self.0.insert(port, heard);
        Some(answer)
    }

    /// The answers that are to be repeated now, each with its port.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(usize, Vec<u8>)> {
        let due = self
            .0
            .iter_mut()
            .filter(|(_, heard)| heard.repeat_at <= now);
        due.map(|(port, heard)| {
            heard.repeat_at = now + REPEAT_EACH;
            (*port, heard.answer.clone())
        })
        .collect()
    }

    /// When the next answer is to be repeated.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().map(|heard| heard.repeat_at).min()
    }

    /// Forgets what was heard on a port.
    pub(super) fn forget(&mut self, port: usize) {
        self.0.remove(&port);
    }

    /// Whether the machine at this port sends and receives by it as part of an aggregation.
    pub(super) fn carries(&self, port: usize, now: Instant) -> bool {
        let heard = self.0.get(&port);
        heard.is_some_and(|heard| heard.carries && heard.is_recent(now))
    }

    /// Whether both ports are of one link.
    pub(super) fn are_one(&self, a: usize, b: usize, now: Instant) -> bool {
        let of = |port| self.of(port, now);
        of(a).is_some_and(|aggregation| of(b) == Some(aggregation))
    }

    fn of(&self, port: usize, now: Instant) -> Option<Aggregation> {
        let heard = self.0.get(&port).filter(|heard| heard.is_recent(now))?;
        Some(heard.aggregation)
    }
}

fn answer(port: usize, actor: &[u8]) -> Vec<u8> {
    let mut frame = [&SLOW_PROTOCOLS[..], &GATEWAY_MAC.0, &ETHERTYPE, &LACP].concat();
    // Priority of the system, the system, the key, priority of the port, the port.
    frame.extend([1, INFORMATION as u8, 0x80, 0]);
    frame.extend(GATEWAY_MAC.0);
    frame.extend([0, 1, 0x80, 0]);
    frame.extend((port as u16 + 1).to_be_bytes());
    frame.extend([STATE, 0, 0, 0]);
    frame.extend([2, INFORMATION as u8]);
    frame.extend(&actor[2..]);
    frame.extend([3, 16]);
    frame.resize(PARTNER + INFORMATION + REST, 0);
    frame
}

/// A message of a machine's port, with this last byte of its system.
#[cfg(test)]
pub(super) fn message(system: u8, key: u8) -> Vec<u8> {
    let mut frame = [&SLOW_PROTOCOLS[..], &[2; 6], &ETHERTYPE, &LACP].concat();
    frame.extend([1, 20, 0xff, 0xff, 2, 0, 0, 0, 0, system, 0, key]);
    frame.extend([0, 0xff, 0, 1, 0x47, 0, 0, 0]);
    frame.resize(124, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_one_system_and_key_are_one_link_while_messages_come() {
        let (mut ports, start) = (Ports::default(), Instant::now());
        for (port, system, key) in [(0, 1, 9), (1, 1, 9), (2, 1, 8), (3, 2, 9)] {
            let answer = ports.take(port, &message(system, key), start);
            assert!(answer.is_some());
        }
        assert!(ports.are_one(0, 1, start));
        for (a, b) in [(0, 2), (0, 3), (2, 3), (0, 4), (4, 5)] {
            assert!(!ports.are_one(a, b, start), "{a} {b}");
        }
        let later = start + TIMEOUT;
        assert!(!ports.are_one(0, 1, later));
        ports.take(0, &message(1, 9), later);
        assert!(!ports.are_one(0, 1, later));
        ports.take(1, &message(1, 9), later);
        assert!(ports.are_one(0, 1, later));
        ports.forget(1);
        assert!(!ports.are_one(0, 1, later));
    }

    #[test]
    fn answers_are_repeated_until_the_machine_is_gone() {
        let (mut ports, start) = (Ports::default(), Instant::now());
        assert_eq!((ports.next_due(), ports.due(start)), (None, vec![]));
        let answer = ports.take(4, &message(1, 9), start).expect("an answer");
        // Long after the machine was heard for the last time.
        for number in 1..10 {
            let due = ports.next_due().expect("a repetition");
            assert_eq!(due, start + REPEAT_EACH * number);
            assert_eq!(ports.due(due - Duration::from_millis(1)), []);
            assert_eq!(ports.due(due), [(4, answer.clone())]);
        }
        ports.forget(4);
        assert_eq!(ports.next_due(), None);
    }

    #[test]
    fn a_port_carries_what_its_machine_agrees_to_while_messages_come() {
        let (mut ports, start) = (Ports::default(), Instant::now());
        let mut message = message(1, 9);
        ports.take(0, &message, start);
        assert!(!ports.carries(0, start));
        message[ACTOR + ACTOR_STATE] = 0x3f;
        ports.take(0, &message, start);
        assert!(ports.carries(0, start) && !ports.carries(1, start));
        assert!(!ports.carries(0, start + TIMEOUT));
    }

    #[test]
    fn the_answer_names_both_sides() {
        let mut ports = Ports::default();
        let heard = message(1, 9);
        let answer = ports.take(6, &heard, Instant::now()).expect("an answer");
        assert_eq!((answer.len(), &answer[..6]), (124, &SLOW_PROTOCOLS[..]));
        assert_eq!(answer[ACTOR + 4..ACTOR + 10], GATEWAY_MAC.0);
        assert_eq!(answer[ACTOR + 14..ACTOR + 17], [0, 7, STATE]);
        assert_eq!(answer[PARTNER + 2..PARTNER + 20], heard[ACTOR + 2..PARTNER]);
    }

    #[test]
    fn other_messages_are_not_answered() {
        let mut ports = Ports::default();
        let mut marker = message(1, 9);
        marker[HEADER] = 2;
        for frame in [&marker[..], &message(1, 9)[..30], &[][..]] {
            assert_eq!(ports.take(0, frame, Instant::now()), None);
        }
    }
}
