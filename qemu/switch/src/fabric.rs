//! The forwarding of frames: links, switch, faults, queues.
//!
//! Pure except for the capture and for waking waiting tasks: the clock is an input, nothing is read or written, and
//! nothing waits.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::rc::Rc;
use std::time::{Instant, SystemTime};

use tokio::sync::Notify;

use super::capture::Capture;
use super::faults::{Fate, Faults};
use super::lacp::{self, SLOW_PROTOCOLS};
use super::learning::{Address, HEADER, Table, is_group};
use super::{Counters, GATEWAY_MAC, framing};

/// Maximum number of bytes that wait for a machine to read them.
const QUEUE: usize = 2 << 20;

/// Maximum number of bytes that wait for the gateway, which reads all of them whenever it runs.
const GATEWAY_QUEUE: usize = 8 << 20;

/// Maximum number of bytes in transit on slow links.
const UNDER_WAY: usize = 64 << 20;

/// The source or destination of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Gateway,
    /// A port, by its index.
    Machine(usize),
}

/// The link of a port.
#[derive(Debug, Default)]
struct Link {
    plugged: bool,
    faults: Faults,
    counters: Counters,
    /// Frames for its machine, as a stream.
    queue: Vec<u8>,
    /// Bytes that were taken from the queue and not yet written.
    in_hand: usize,
    waiting: Rc<Notify>,
    /// Notified when there is space in the queue again.
    drained: Rc<Notify>,
}

impl Link {
    fn queued(&self) -> usize {
        self.queue.len() + self.in_hand
    }
}

/// A frame in transit on a slow link.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Late {
    due: Instant,
    /// Keeps frames of the same time in order.
    number: u64,
    way: Way,
    frame: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// From the machine at this port.
    Up(usize),
    /// To the machine at this port.
    Down(usize),
}

/// All links and the switch between them.
#[derive(Debug)]
pub(super) struct Fabric {
    links: Vec<Link>,
    /// Pairs of ports, the smaller index first.
    blocks: BTreeSet<(usize, usize)>,
    table: Table<End>,
    aggregated: lacp::Ports,
    dice: fastrand::Rng,
    capture: Option<Capture>,
    late: BinaryHeap<Reverse<Late>>,
    late_bytes: usize,
    late_number: u64,
    /// Notified when something is due sooner than [`Self::go_on`] has said.
    pub(super) sooner: Rc<Notify>,
    gateway: VecDeque<Vec<u8>>,
    gateway_bytes: usize,
    /// Notified when there is a frame for the gateway.
    pub(super) for_gateway: Rc<Notify>,
}

impl Fabric {
    pub(super) fn new(seed: u64, capture: Option<Capture>) -> Self {
        Self {
            links: Vec::new(),
            blocks: BTreeSet::new(),
            table: Table::default(),
            aggregated: lacp::Ports::default(),
            dice: fastrand::Rng::with_seed(seed),
            capture,
            late: BinaryHeap::new(),
            late_bytes: 0,
            late_number: 0,
            sooner: Rc::default(),
            gateway: VecDeque::new(),
            gateway_bytes: 0,
            for_gateway: Rc::default(),
        }
    }

    /// Adds a link; its index counts up from 0.
    pub(super) fn add_link(&mut self) -> usize {
        self.links.push(Link::default());
        self.links.len() - 1
    }

    pub(super) fn set_faults(&mut self, port: usize, faults: Faults) {
        self.links[port].faults = faults;
    }

    pub(super) fn faults(&self, port: usize) -> Faults {
        self.links[port].faults
    }

    pub(super) fn counters(&self, port: usize) -> Counters {
        self.links[port].counters
    }

    pub(super) fn plugged(&self, port: usize) -> bool {
        self.links[port].plugged
    }

    pub(super) fn capture(&mut self) -> Option<&mut Capture> {
        self.capture.as_mut()
    }

    /// Blocks traffic between two ports, or unblocks it.
    pub(super) fn block(&mut self, a: usize, b: usize, on: bool) {
        let pair = (a.min(b), a.max(b));
        if on {
            self.blocks.insert(pair);
        } else {
            self.blocks.remove(&pair);
        }
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        self.blocks.iter().copied()
    }

    /// A machine is connected or disconnected. Frames that waited for the last one are not given to the next.
    pub(super) fn plug(&mut self, port: usize, plugged: bool) {
        let link = &mut self.links[port];
        link.plugged = plugged;
        link.queue = Vec::new();
        link.in_hand = 0;
        link.drained.notify_waiters();
        if !plugged {
            self.table.forget(End::Machine(port));
            self.aggregated.forget(port);
        }
    }

    /// Notified when a port's queue has frames.
    pub(super) fn waiting(&self, port: usize) -> Rc<Notify> {
        self.links[port].waiting.clone()
    }

    /// Takes everything in a port's queue, as a stream; must be called again when that has been written, and only then.
    pub(super) fn take(&mut self, port: usize) -> Vec<u8> {
        let link = &mut self.links[port];
        let taken = std::mem::take(&mut link.queue);
        link.in_hand = taken.len();
        link.drained.notify_waiters();
        taken
    }

    /// Whether the gateway may send to this port: the gateway is in the same process as the queue, so it can wait
    /// rather than lose frames.
    pub(super) fn has_room(&self, port: usize) -> bool {
        self.links[port].queued() < QUEUE / 2
    }

    /// Notified when there is space in a port's queue.
    pub(super) fn drained(&self, port: usize) -> Rc<Notify> {
        self.links[port].drained.clone()
    }

    /// The next frame for the gateway.
    pub(super) fn take_for_gateway(&mut self) -> Option<Vec<u8>> {
        let frame = self.gateway.pop_front()?;
        self.gateway_bytes -= frame.len();
        Some(frame)
    }

    /// The machine at this port has sent a frame.
    pub(super) fn take_from_machine(&mut self, port: usize, frame: &[u8], now: Instant) {
        let counters = &mut self.links[port].counters;
        if frame.len() < HEADER {
            counters.dropped_malformed += 1;
            return;
        }
        counters.received_frames += 1;
        counters.received_bytes += frame.len() as u64;
        if self.passes(Way::Up(port), frame, now) {
            self.switch(End::Machine(port), frame, now);
        }
    }

    /// The gateway has sent a frame.
    pub(super) fn take_from_gateway(&mut self, frame: &[u8], now: Instant) {
        self.switch(End::Gateway, frame, now);
    }

    /// Whether the machine at this port uses it as a part of an aggregation.
    pub(super) fn aggregated(&self, port: usize, now: Instant) -> bool {
        self.aggregated.carries(port, now)
    }

    /// Sends what is due; returns when something will be again.
    pub(super) fn go_on(&mut self, now: Instant) -> Option<Instant> {
        for (port, message) in self.aggregated.due(now) {
            self.offer(End::Gateway, End::Machine(port), &message, now);
        }
        let next = [self.forward_late(now), self.aggregated.next_due()];
        next.into_iter().flatten().min()
    }

    /// Forwards late frames that are due; returns the time of the next one.
    fn forward_late(&mut self, now: Instant) -> Option<Instant> {
        while let Some(Reverse(first)) = self.late.peek() {
            if first.due > now {
                return Some(first.due);
            }
            let Some(Reverse(late)) = self.late.pop() else {
                break;
            };
            self.late_bytes -= late.frame.len();
            let (Way::Up(port) | Way::Down(port)) = late.way;
            let link = &mut self.links[port];
            if link.faults.cut {
                link.counters.dropped_cut += 1;
                continue;
            }
            match late.way {
                Way::Up(port) => self.switch(End::Machine(port), &late.frame, now),
                Way::Down(port) => self.hand_over(port, &late.frame),
            }
        }
        None
    }

    /// Whether a frame leaves the other end of a link at once. A frame that is late is stored.
    fn passes(&mut self, way: Way, frame: &[u8], now: Instant) -> bool {
        let (Way::Up(port) | Way::Down(port)) = way;
        let link = &mut self.links[port];
        let counters = &mut link.counters;
        match link.faults.fate(frame.len() - HEADER, &mut self.dice) {
            Fate::Passes => return true,
            Fate::Cut => counters.dropped_cut += 1,
            Fate::Lost => counters.dropped_loss += 1,
            Fate::TooLarge => counters.dropped_mtu += 1,
            Fate::After(_) if self.late_bytes + frame.len() > UNDER_WAY => {
                counters.dropped_overflow += 1;
            }
            Fate::After(delay) => {
                let late = Late {
                    due: now + delay,
                    number: self.late_number,
                    way,
                    frame: frame.to_vec(),
                };
                self.late_number += 1;
                self.late_bytes += frame.len();
                let sooner = self.late.peek().is_none_or(|Reverse(first)| late < *first);
                self.late.push(Reverse(late));
                if sooner {
                    self.sooner.notify_one();
                }
            }
        }
        false
    }

    /// A frame has arrived at the switch.
    fn switch(&mut self, from: End, frame: &[u8], now: Instant) {
        if let Some(capture) = &mut self.capture {
            capture.write(frame, SystemTime::now());
        }
        let address = |at: usize| -> Address { std::array::from_fn(|byte| frame[at + byte]) };
        let (to, sender) = (address(0), address(6));
        // The gateway's position is fixed: no machine can take it over.
        if sender != GATEWAY_MAC.0 {
            self.table.learn(sender, from, now);
        }
        if to == GATEWAY_MAC.0 {
            return self.offer(from, End::Gateway, frame, now);
        }
        if to == SLOW_PROTOCOLS {
            if let End::Machine(port) = from
                && let Some(answer) = self.aggregated.take(port, frame, now)
            {
                self.offer(End::Gateway, from, &answer, now);
                self.sooner.notify_one();
            }
            return;
        }
        match self.table.find(to, now) {
            Some(end) if !is_group(to) => self.offer(from, end, frame, now),
            _ => {
                // The gateway has one address, so a frame to an unknown one is not for it.
                if is_group(to) {
                    self.offer(from, End::Gateway, frame, now);
                }
                for port in 0..self.links.len() {
                    if self.is_first(port, now) {
                        self.offer(from, End::Machine(port), frame, now);
                    }
                }
            }
        }
    }

    /// Whether what goes to all goes to this port: of several that are one link, to the first that is connected.
    fn is_first(&self, port: usize, now: Instant) -> bool {
        let is_before = |other: usize| {
            let link = &self.links[other];
            link.plugged && !link.faults.cut && self.aggregated.are_one(other, port, now)
        };
        !(0..port).any(is_before)
    }

    /// Sends a frame to one destination, unless it came from there.
    fn offer(&mut self, from: End, to: End, frame: &[u8], now: Instant) {
        let is_same = match (from, to) {
            (End::Machine(a), End::Machine(b)) => a == b || self.aggregated.are_one(a, b, now),
            (from, to) => from == to,
        };
        if is_same {
            return;
        }
        match (from, to) {
            (_, End::Gateway) => {
                if self.gateway_bytes + frame.len() <= GATEWAY_QUEUE {
                    self.gateway_bytes += frame.len();
                    self.gateway.push_back(frame.to_vec());
                    self.for_gateway.notify_one();
                }
            }
            (End::Machine(a), End::Machine(b)) if self.blocks.contains(&(a.min(b), a.max(b))) => {
                self.links[b].counters.dropped_blocked += 1;
            }
            (_, End::Machine(port)) => {
                if self.passes(Way::Down(port), frame, now) {
                    self.hand_over(port, frame);
                }
            }
        }
    }

    /// A frame has arrived at its machine.
    fn hand_over(&mut self, port: usize, frame: &[u8]) {
        let link = &mut self.links[port];
        if !link.plugged {
            link.counters.dropped_unplugged += 1;
        } else if link.queued() + framing::encoded_len(frame) > QUEUE {
            link.counters.dropped_overflow += 1;
        } else {
            link.counters.sent_frames += 1;
            link.counters.sent_bytes += frame.len() as u64;
            framing::encode(frame, &mut link.queue);
            link.waiting.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
