//! The DHCP protocol as a state machine, without socket and clock.
//!
//! Inputs are the carrier, messages and the expiry of a deadline, each with its time; outputs are
//! actions for the driver. The caller calls [`Machine::timeout`] when [`Machine::deadline`] has
//! passed; calling it earlier does nothing.
//!
//! The lease that is *held* is independent of the phase: it is kept when the carrier is lost and
//! during the search for a new lease, until it expires or a server rejects it.
//!
//! | phase | transitions |
//! |---|---|
//! | Down | carrier → Checking if a lease is held, else Selecting |
//! | Selecting | offer → Requesting |
//! | Requesting | ACK → Bound; NAK → Resting; no answer → Selecting |
//! | Checking | ACK → Bound; NAK → Resting; no answer → Selecting |
//! | Bound | T1 → Renewing; another machine has the address → Resting |
//! | Renewing | ACK → Bound; NAK → Resting; T2 → Rebinding |
//! | Rebinding | ACK → Bound; NAK → Resting; expiry → Selecting |
//! | Resting | a pause that grows with every NAK → Selecting |

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::time::Instant;

use super::Lease;
use super::message::{Kind, Message, code};
use super::wire::{Reply, ReplyKind};
use crate::cidr::Cidr;

/// The delay before the first retransmission. It doubles with each one, with a jitter of one eighth
/// in both directions.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The maximum delay, so that a server that starts late is found soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);
/// The maximum number of requests for an offer or a held lease.
const MAX_REQUESTS: u32 = 4;
/// The pause after an address was declined, as the protocol wants it.
const DECLINED_PAUSE: Duration = Duration::from_secs(10);
/// The minimum interval between renewal requests.
const RENEWAL_PAUSE: Duration = Duration::from_secs(60);

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a message to all servers.
    Broadcast(Vec<u8>),
    /// Send a message to one server, from the address in use.
    Renew {
        from: Ipv4Addr,
        server: Ipv4Addr,
        message: Vec<u8>,
    },
    /// Configure this lease; it replaces the previous one.
    Configure(Lease),
    /// Remove the configuration; no lease is held.
    Unconfigure,
    /// An offer was not taken, because its address is in a reserved network.
    Refuse { offer: Lease, reserved: Cidr },
}

/// A source of unpredictable numbers.
pub(crate) type Random = Box<dyn FnMut() -> u64 + Send + Sync>;

pub(crate) struct Machine {
    mac: [u8; 6],
    host_name: Option<String>,
    random: Random,
    phase: Phase,
    held: Option<Held>,
    /// The number of NAKs since the last lease.
    refusals: u32,
    /// A server that did not confirm its offer; others are preferred.
    shunned: Option<Ipv4Addr>,
    /// Networks of which no address is taken.
    reserved: Vec<Cidr>,
}

#[derive(Debug)]
enum Phase {
    Down,
    Selecting(Exchange),
    Requesting(Exchange, Lease),
    Checking(Exchange),
    Bound,
    Renewing(Exchange),
    Rebinding(Exchange),
    Resting { until: Instant },
}

/// A request that is repeated until it is answered.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    xid: u32,
    began: Instant,
    /// The number of requests sent.
    asked: u32,
    /// When to repeat the request, or to end the exchange.
    next: Instant,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    since: Instant,
}

impl Held {
    /// `None` on overflow.
    fn after(&self, duration: Duration) -> Option<Instant> {
        self.since.checked_add(duration)
    }
    fn renew(&self) -> Option<Instant> {
        self.lease.duration?;
        self.after(self.lease.renew_after)
    }
    fn rebind(&self) -> Option<Instant> {
        self.lease.duration?;
        self.after(self.lease.rebind_after)
    }
    fn expiry(&self) -> Option<Instant> {
        self.after(self.lease.duration?)
    }
}

impl Machine {
    pub(crate) fn new(mac: [u8; 6], random: Random) -> Self {
        Self {
            mac,
            host_name: None,
            random,
            phase: Phase::Down,
            held: None,
            refusals: 0,
            shunned: None,
            reserved: Vec::new(),
        }
    }

    /// The networks of which no address is taken from now on.
    pub(crate) fn set_reserved(&mut self, networks: Vec<Cidr>) {
        self.reserved = networks;
    }

    pub(crate) fn reserved(&self) -> &[Cidr] {
        &self.reserved
    }

    /// The host name in the messages from now on.
    pub(crate) fn set_host_name(&mut self, name: Option<String>) {
        self.host_name = name;
    }

    pub(crate) fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// When to call [`Machine::timeout`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let next = match &self.phase {
            Phase::Down => None,
            Phase::Resting { until } => Some(*until),
            Phase::Bound => self.held.as_ref().and_then(Held::renew),
            Phase::Selecting(exchange)
            | Phase::Requesting(exchange, _)
            | Phase::Checking(exchange)
            | Phase::Renewing(exchange)
            | Phase::Rebinding(exchange) => Some(exchange.next),
        };
        let expiry = self.held.as_ref().and_then(Held::expiry);
        [next, expiry].into_iter().flatten().min()
    }

    /// The carrier appeared or was lost; repeated calls have no effect.
    pub(crate) fn carrier(&mut self, present: bool, now: Instant) -> Vec<Action> {
        match (present, &self.phase) {
            (true, Phase::Down) => {
                let exchange = self.exchange(now);
                if self.held.is_some() {
                    self.phase = Phase::Checking(exchange);
                } else {
                    self.phase = Phase::Selecting(exchange);
                }
                self.timeout(now)
            }
            (false, _) => {
                self.phase = Phase::Down;
                Vec::new()
            }
            (true, _) => Vec::new(),
        }
    }

    /// [`Machine::deadline`] has passed.
    pub(crate) fn timeout(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let expiry = self.held.as_ref().and_then(Held::expiry);
        if expiry.is_some_and(|expiry| expiry <= now) {
            self.held = None;
            actions.push(Action::Unconfigure);
            match self.phase {
                // Only these phases depend on the expired lease.
                Phase::Checking(_) | Phase::Bound | Phase::Renewing(_) | Phase::Rebinding(_) => {
                    self.phase = Phase::Selecting(self.exchange(now));
                }
                _ => {}
            }
        }
        // Each iteration either sends a request or changes to a phase that then does.
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            actions.extend(self.turn(now));
        }
        actions
    }

    fn turn(&mut self, now: Instant) -> Option<Action> {
        match &self.phase {
            Phase::Down => None,
            Phase::Resting { .. } => {
                self.phase = Phase::Selecting(self.exchange(now));
                None
            }
            Phase::Bound => {
                self.phase = Phase::Renewing(self.exchange(now));
                None
            }
            Phase::Selecting(exchange) => {
                let exchange = self.asking(*exchange, now);
                self.phase = Phase::Selecting(exchange);
                Some(self.broadcast(Kind::Discover, exchange, None, now))
            }
            Phase::Requesting(exchange, offer) => {
                let (exchange, offer) = (*exchange, offer.clone());
                if exchange.asked >= MAX_REQUESTS {
                    self.shunned = Some(offer.server);
                    self.phase = Phase::Selecting(self.exchange(now));
                    return None;
                }
                let exchange = self.asking(exchange, now);
                let action = self.broadcast(Kind::Request, exchange, Some(&offer), now);
                self.phase = Phase::Requesting(exchange, offer);
                Some(action)
            }
            Phase::Checking(exchange) => {
                let exchange = *exchange;
                if exchange.asked >= MAX_REQUESTS {
                    // The lease remains in use until it expires; meanwhile any server may grant
                    // another one.
                    self.phase = Phase::Selecting(self.exchange(now));
                    return None;
                }
                let exchange = self.asking(exchange, now);
                self.phase = Phase::Checking(exchange);
                let mut query = self.query(Kind::Request, exchange, now);
                if let Some(held) = &self.held {
                    query.set(code::WANTED_ADDRESS, &ipv4(&held.lease).octets());
                }
                Some(Action::Broadcast(query.encode()))
            }
            Phase::Renewing(exchange) => self.renew(*exchange, now),
            Phase::Rebinding(exchange) => {
                let until = self.held.as_ref().and_then(Held::expiry);
                let exchange = prolonging(*exchange, now, until);
                self.phase = Phase::Rebinding(exchange);
                let message = self.extend_request(exchange, now);
                Some(Action::Broadcast(message))
            }
        }
    }

    fn renew(&mut self, exchange: Exchange, now: Instant) -> Option<Action> {
        let held = self.held.as_ref()?;
        let (from, server, rebind) = (ipv4(&held.lease), held.lease.server, held.rebind());
        if rebind.is_none_or(|rebind| rebind <= now) {
            self.phase = Phase::Rebinding(self.exchange(now));
            return None;
        }
        let exchange = prolonging(exchange, now, rebind);
        self.phase = Phase::Renewing(exchange);
        Some(Action::Renew {
            from,
            server,
            message: self.extend_request(exchange, now),
        })
    }

    /// A message was received.
    pub(crate) fn received(&mut self, reply: &Reply, now: Instant) -> Vec<Action> {
        let exchange = match &self.phase {
            Phase::Down | Phase::Bound | Phase::Resting { .. } => return Vec::new(),
            Phase::Selecting(exchange)
            | Phase::Requesting(exchange, _)
            | Phase::Checking(exchange)
            | Phase::Renewing(exchange)
            | Phase::Rebinding(exchange) => *exchange,
        };
        if reply.xid != exchange.xid || reply.mac != self.mac {
            return Vec::new();
        }
        match (&self.phase, &reply.kind) {
            (Phase::Selecting(_), ReplyKind::Offer(offer)) => {
                if self.shunned == Some(offer.server) && exchange.asked <= 1 {
                    return Vec::new();
                }
                let address = offer.address.address();
                if let Some(reserved) = self.reserved.iter().find(|it| it.contains(address)) {
                    return vec![Action::Refuse {
                        offer: offer.clone(),
                        reserved: *reserved,
                    }];
                }
                let asked_now = Exchange {
                    asked: 0,
                    next: now,
                    ..exchange
                };
                self.phase = Phase::Requesting(asked_now, offer.clone());
                self.timeout(now)
            }
            // The server may have another address than in its offer, as behind some relays: it is
            // the answer to this request, and grants what was offered.
            (Phase::Requesting(_, offer), ReplyKind::Ack(lease))
                if lease.server == offer.server
                    || lease.address.address() == offer.address.address() =>
            {
                self.bind(lease, now)
            }
            (Phase::Requesting(_, offer), ReplyKind::Nak) if reply.server == Some(offer.server) => {
                self.refused(now)
            }
            (
                Phase::Checking(_) | Phase::Renewing(_) | Phase::Rebinding(_),
                ReplyKind::Ack(lease),
            ) => self.bind(lease, now),
            (Phase::Checking(_) | Phase::Renewing(_) | Phase::Rebinding(_), ReplyKind::Nak) => {
                self.held = None;
                let mut actions = vec![Action::Unconfigure];
                actions.extend(self.refused(now));
                actions
            }
            _ => Vec::new(),
        }
    }

    /// Another machine has the address that was just granted: the server is told, and the search starts again after
    /// a while.
    pub(crate) fn conflict(&mut self, now: Instant) -> Vec<Action> {
        let Some(held) = self.held.take() else {
            return Vec::new();
        };
        let exchange = self.exchange(now);
        let mut decline = self.query(Kind::Decline, exchange, now);
        decline.set(code::WANTED_ADDRESS, &ipv4(&held.lease).octets());
        decline.set(code::SERVER, &held.lease.server.octets());
        self.phase = Phase::Resting {
            until: now + DECLINED_PAUSE,
        };
        vec![Action::Unconfigure, Action::Broadcast(decline.encode())]
    }

    fn bind(&mut self, lease: &Lease, now: Instant) -> Vec<Action> {
        self.refusals = 0;
        self.shunned = None;
        self.held = Some(Held {
            lease: lease.clone(),
            since: now,
        });
        self.phase = Phase::Bound;
        vec![Action::Configure(lease.clone())]
    }

    /// After the first NAK the search starts again at once; after further ones it waits longer and
    /// longer.
    fn refused(&mut self, now: Instant) -> Vec<Action> {
        let pause = match self.refusals {
            0 => Duration::ZERO,
            n => self.pause(n),
        };
        self.refusals = self.refusals.saturating_add(1);
        self.phase = Phase::Resting { until: now + pause };
        self.timeout(now)
    }

    fn exchange(&mut self, now: Instant) -> Exchange {
        Exchange {
            xid: (self.random)() as u32,
            began: now,
            asked: 0,
            next: now,
        }
    }

    fn asking(&mut self, exchange: Exchange, now: Instant) -> Exchange {
        let asked = exchange.asked.saturating_add(1);
        Exchange {
            asked,
            next: now + self.pause(asked),
            ..exchange
        }
    }

    /// The delay after this many requests.
    fn pause(&mut self, asked: u32) -> Duration {
        let doubled = FIRST_PAUSE * 2_u32.pow(asked.saturating_sub(1).min(10));
        let pause = doubled.min(LONGEST_PAUSE);
        let spread = (pause / 4).as_millis().max(1) as u64;
        pause - pause / 8 + Duration::from_millis((self.random)() % spread)
    }

    fn query(&self, kind: Kind, exchange: Exchange, now: Instant) -> Message {
        let elapsed = now.duration_since(exchange.began).as_secs();
        let mut query = Message::query(kind, exchange.xid, self.mac);
        query.seconds = elapsed.min(u64::from(u16::MAX)) as u16;
        if let Some(name) = &self.host_name {
            query.set(code::HOST_NAME, name.as_bytes());
        }
        query
    }

    fn broadcast(
        &self,
        kind: Kind,
        exchange: Exchange,
        offer: Option<&Lease>,
        now: Instant,
    ) -> Action {
        let mut query = self.query(kind, exchange, now);
        if let Some(offer) = offer {
            query.set(code::WANTED_ADDRESS, &ipv4(offer).octets());
            query.set(code::SERVER, &offer.server.octets());
        }
        Action::Broadcast(query.encode())
    }

    fn extend_request(&self, exchange: Exchange, now: Instant) -> Vec<u8> {
        let mut query = self.query(Kind::Request, exchange, now);
        if let Some(held) = &self.held {
            query.in_use = ipv4(&held.lease);
        }
        query.encode()
    }
}

/// The next request is sent after half of the remaining time, but not before a minute has passed
/// and not after the end.
fn prolonging(exchange: Exchange, now: Instant, until: Option<Instant>) -> Exchange {
    let next = match until {
        Some(until) => {
            let left = until.saturating_duration_since(now);
            now + left.min((left / 2).max(RENEWAL_PAUSE))
        }
        None => now + RENEWAL_PAUSE,
    };
    Exchange {
        asked: exchange.asked.saturating_add(1),
        next,
        ..exchange
    }
}

fn ipv4(lease: &Lease) -> Ipv4Addr {
    match lease.address.address() {
        std::net::IpAddr::V4(address) => address,
        // The wire module only creates leases with IPv4 addresses.
        std::net::IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}
