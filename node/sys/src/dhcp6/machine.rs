//! DHCPv6 (RFC 8415) as a state machine, without socket and clock.
//!
//! Inputs are what routers say of this protocol, messages, and the time; outputs are actions for the driver. The caller calls
//! [`Machine::timeout`] when [`Machine::deadline`] has passed; calling it earlier does nothing.
//!
//! | phase | transitions |
//! |---|---|
//! | Off | routers have addresses → Soliciting; they have other information → Informing |
//! | Soliciting | the best advertisement of a second, or a perfect one → Requesting |
//! | Requesting | a grant → Bound; a failure, or no answer → Soliciting |
//! | Bound | T1 → Renewing; another machine has the address → Declining |
//! | Renewing | a grant → Bound; not known → Requesting; ended → Soliciting; T2 → Rebinding |
//! | Rebinding | a grant → Bound; not known → Requesting; ended → Soliciting |
//! | Declining | an answer → Waiting for ten seconds; none → Soliciting |
//! | Informing | an answer → Waiting for the time that the server has set |
//! | Waiting | its end → as from Off |
//!
//! After an interruption of the cable, which may lead to another network now, a held lease is rebound, and everything else starts again.
//!
//! The lease that is held is independent of the phase: it ends by its own time, by a server that does not grant it any more, or when
//! another machine has the address. An advertisement is never used, only what a reply grants.

use std::net::Ipv6Addr;
use std::time::Duration;

use tokio::time::Instant;

use super::message::{Answer, Kind, Question, Status, Transaction};
use crate::router_advertisements::Offered;

/// What a server has granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The address; none where servers have information only.
    pub address: Option<Ipv6Addr>,
    /// Name servers, in order of preference.
    pub name_servers: Vec<Ipv6Addr>,
    /// Time servers.
    pub time_servers: Vec<Ipv6Addr>,
    /// Domains in which names are looked up.
    pub domains: Vec<String>,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Send this to all servers.
    Send(Vec<u8>),
    /// Use this in the place of what was used before.
    Configure(Lease),
    /// Use nothing.
    Unconfigure,
}

/// Numbers that nobody can predict.
pub(super) type Random = Box<dyn FnMut() -> u64 + Send + Sync>;

/// How messages are repeated: RFC 8415, section 7.6.
#[derive(Clone, Copy, Debug)]
struct Pace {
    first: Duration,
    longest: Duration,
    /// How many messages are sent at most.
    most: Option<u32>,
}

const fn pace(first: u64, longest: u64, most: Option<u32>) -> Pace {
    Pace {
        first: Duration::from_secs(first),
        longest: Duration::from_secs(longest),
        most,
    }
}

const SOLICIT: Pace = pace(1, 3600, None);
const REQUEST: Pace = pace(1, 30, Some(10));
const RENEW: Pace = pace(10, 600, None);
const REBIND: Pace = pace(10, 600, None);
const DECLINE: Pace = pace(1, 30, Some(4));
const INFORM: Pace = pace(1, 3600, None);
/// When information is asked for again if the server does not say, and not earlier than that.
const REFRESH: Duration = Duration::from_secs(86_400);
const SOONEST_REFRESH: Duration = Duration::from_secs(600);
/// A server may grant the declined address again and again: as in DHCP for IPv4.
const AFTER_DECLINE: Duration = Duration::from_secs(10);
/// An advertisement that is not compared with others.
const PERFECT: u8 = 255;
/// Servers cannot make a client ask more often than this.
const SHORTEST_TIME: Duration = Duration::from_secs(10);

/// A message that is repeated until it is answered.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    transaction: Transaction,
    began: Instant,
    sent: u32,
    /// The last pause.
    pause: Duration,
    next: Instant,
}

#[derive(Clone, Debug)]
struct Advertised {
    preference: u8,
    server: Vec<u8>,
    address: Ipv6Addr,
}

#[derive(Clone, Debug)]
enum Phase {
    Off,
    Asking(Asking, Exchange),
    Bound,
    /// Starts again then.
    Waiting {
        until: Instant,
    },
}

/// What servers are asked.
#[derive(Clone, Debug)]
enum Asking {
    /// With the best advertisement so far.
    Solicit(Option<Advertised>),
    Request(Advertised),
    Renew,
    Rebind,
    Decline(Advertised),
    Inform,
}

impl Asking {
    const fn pace(&self) -> Pace {
        match self {
            Self::Solicit(_) => SOLICIT,
            Self::Request(_) => REQUEST,
            Self::Renew => RENEW,
            Self::Rebind => REBIND,
            Self::Decline(_) => DECLINE,
            Self::Inform => INFORM,
        }
    }

    const fn kind(&self) -> Kind {
        match self {
            Self::Solicit(_) => Kind::Solicit,
            Self::Request(_) => Kind::Request,
            Self::Renew => Kind::Renew,
            Self::Rebind => Kind::Rebind,
            Self::Decline(_) => Kind::Decline,
            Self::Inform => Kind::InformationRequest,
        }
    }
}

/// The address of a lease, and when what is due.
#[derive(Clone, Debug)]
struct Held {
    server: Vec<u8>,
    address: Ipv6Addr,
    renew: Option<Instant>,
    rebind: Option<Instant>,
    end: Option<Instant>,
}

/// The client of one interface.
pub(super) struct Machine {
    client: Vec<u8>,
    association: u32,
    random: Random,
    offered: Offered,
    longest_pause: Duration,
    phase: Phase,
    held: Option<Held>,
    is_configured: bool,
}

impl Machine {
    /// A client with this DUID, whose association has this identifier.
    pub(super) fn new(client: Vec<u8>, association: u32, random: Random) -> Self {
        Self {
            client,
            association,
            random,
            offered: Offered::Nothing,
            longest_pause: SOLICIT.longest,
            phase: Phase::Off,
            held: None,
            is_configured: false,
        }
    }

    /// The DUID of this client, and the identifier of its association.
    pub(super) fn identifiers(&self) -> (&[u8], u32) {
        (&self.client, self.association)
    }

    /// When to call [`Machine::timeout`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        let held = self.held.as_ref();
        let next = match &self.phase {
            Phase::Off => None,
            Phase::Bound => held.and_then(|held| held.renew),
            Phase::Waiting { until } => Some(*until),
            Phase::Asking(_, exchange) => Some(exchange.next),
        };
        let rebind = match &self.phase {
            Phase::Asking(Asking::Renew, _) => held.and_then(|held| held.rebind),
            _ => None,
        };
        let end = held.and_then(|held| held.end);
        [next, rebind, end].into_iter().flatten().min()
    }

    /// What routers say now. A held lease stays until its end, also if they say nothing any more.
    pub(super) fn offered(&mut self, offered: Offered, now: Instant) -> Vec<Action> {
        if self.offered == offered {
            return Vec::new();
        }
        self.offered = offered;
        let is_asking_for_address =
            matches!(&self.phase, Phase::Asking(asking, _) if !matches!(asking, Asking::Inform));
        match offered {
            _ if self.held.is_some() => Vec::new(),
            Offered::Addresses if is_asking_for_address => Vec::new(),
            Offered::Nothing => self.lose(now),
            Offered::Information | Offered::Addresses => self.restart(now),
        }
    }

    /// [`Machine::deadline`] has passed.
    pub(super) fn timeout(&mut self, now: Instant) -> Vec<Action> {
        if self.is_due(|held| held.end, now) {
            return self.lose(now);
        }
        match self.phase.clone() {
            Phase::Off => Vec::new(),
            Phase::Bound if self.is_due(|held| held.renew, now) => self.begin(Asking::Renew, now),
            Phase::Waiting { until } if until <= now => self.restart(now),
            Phase::Bound | Phase::Waiting { .. } => Vec::new(),
            Phase::Asking(Asking::Renew, _) if self.is_due(|held| held.rebind, now) => {
                self.begin(Asking::Rebind, now)
            }
            Phase::Asking(Asking::Solicit(Some(best)), exchange) if exchange.next <= now => {
                self.begin(Asking::Request(best), now)
            }
            Phase::Asking(asking, exchange) => self.go_on(asking, exchange, now),
        }
    }

    fn is_due(&self, time: impl Fn(&Held) -> Option<Instant>, now: Instant) -> bool {
        let time = self.held.as_ref().and_then(time);
        time.is_some_and(|time| time <= now)
    }

    /// A server has answered.
    pub(super) fn received(&mut self, answer: &Answer, now: Instant) -> Vec<Action> {
        let (asking, exchange) = match self.phase.clone() {
            Phase::Asking(asking, exchange) if exchange.transaction == answer.transaction => {
                (asking, exchange)
            }
            _ => return Vec::new(),
        };
        if let Some(pause) = answer.longest_pause {
            self.longest_pause = pause;
        }
        match asking {
            Asking::Solicit(best) if answer.is_advertisement => {
                self.advertised(exchange, best, answer, now)
            }
            _ if answer.is_advertisement => Vec::new(),
            Asking::Request(wanted) if wanted.server == answer.server => match answer.grants() {
                true => self.bind(answer, now),
                false => self.begin(Asking::Solicit(None), now),
            },
            Asking::Renew | Asking::Rebind => self.extended(answer, now),
            Asking::Decline(_) => {
                self.wait(AFTER_DECLINE, now);
                Vec::new()
            }
            Asking::Inform => {
                let refresh = answer.refresh.unwrap_or(REFRESH);
                self.wait(refresh.max(SOONEST_REFRESH), now);
                self.configure(answer, None)
            }
            Asking::Solicit(_) | Asking::Request(_) => Vec::new(),
        }
    }

    /// Another machine has the address: it is given back.
    pub(super) fn claimed(&mut self, now: Instant) -> Vec<Action> {
        let Some(held) = self.held.take() else {
            return Vec::new();
        };
        let refused = Advertised {
            preference: 0,
            server: held.server,
            address: held.address,
        };
        let mut actions = self.unconfigure();
        actions.extend(self.begin(Asking::Decline(refused), now));
        actions
    }

    /// The cable is back.
    pub(super) fn reconnected(&mut self, now: Instant) -> Vec<Action> {
        match self.held {
            Some(_) => self.begin(Asking::Rebind, now),
            None => self.restart(now),
        }
    }

    fn advertised(
        &mut self,
        exchange: Exchange,
        best: Option<Advertised>,
        answer: &Answer,
        now: Instant,
    ) -> Vec<Action> {
        let Some(granted) = answer.granted.filter(|_| answer.status == Status::Success) else {
            return Vec::new();
        };
        let new = Advertised {
            preference: answer.preference,
            server: answer.server.clone(),
            address: granted.address,
        };
        let best = match best {
            Some(best) if best.preference >= new.preference => best,
            _ => new,
        };
        // The first second is for comparing; later on the first one is good enough.
        if best.preference == PERFECT || exchange.sent > 1 {
            return self.begin(Asking::Request(best), now);
        }
        self.phase = Phase::Asking(Asking::Solicit(Some(best)), exchange);
        Vec::new()
    }

    fn extended(&mut self, answer: &Answer, now: Instant) -> Vec<Action> {
        if answer.grants() {
            return self.bind(answer, now);
        }
        match (answer.status, &self.held) {
            (_, Some(held)) if answer.ended.contains(&held.address) => self.lose(now),
            // RFC 8415, section 18.2.10.1: it is asked for as if it was new.
            (Status::NoBinding, Some(held)) => {
                let wanted = Advertised {
                    preference: 0,
                    server: answer.server.clone(),
                    address: held.address,
                };
                self.begin(Asking::Request(wanted), now)
            }
            (Status::NoAddresses, _) => self.lose(now),
            // Others may still extend it.
            _ => Vec::new(),
        }
    }

    fn bind(&mut self, answer: &Answer, now: Instant) -> Vec<Action> {
        let Some(granted) = answer.granted else {
            return Vec::new();
        };
        let after = |duration: Option<Duration>| duration.and_then(|it| now.checked_add(it));
        let of_preferred = |numerator: u32, denominator: u32| {
            granted.preferred.map(|it| it * numerator / denominator)
        };
        // RFC 8415, section 21.4: as the server recommends, or else by what is preferred. Never after the end.
        let bounded = |asked: Duration, own: Option<Duration>| {
            let time = match asked {
                Duration::ZERO => own?,
                asked if asked == Duration::from_secs(u32::MAX.into()) => return None,
                asked => asked,
            };
            let time = time.max(SHORTEST_TIME);
            Some(granted.valid.map_or(time, |valid| time.min(valid)))
        };
        let (first, second) = answer.times;
        let renew = bounded(first, of_preferred(1, 2));
        let rebind = bounded(second, of_preferred(4, 5)).map(|it| it.max(renew.unwrap_or(it)));
        self.held = Some(Held {
            server: answer.server.clone(),
            address: granted.address,
            renew: after(renew),
            rebind: after(rebind),
            end: after(granted.valid),
        });
        self.phase = Phase::Bound;
        self.configure(answer, Some(granted.address))
    }

    fn configure(&mut self, answer: &Answer, address: Option<Ipv6Addr>) -> Vec<Action> {
        self.is_configured = true;
        vec![Action::Configure(Lease {
            address,
            name_servers: answer.name_servers.clone(),
            time_servers: answer.time_servers.clone(),
            domains: answer.domains.clone(),
        })]
    }

    fn unconfigure(&mut self) -> Vec<Action> {
        match std::mem::take(&mut self.is_configured) {
            true => vec![Action::Unconfigure],
            false => Vec::new(),
        }
    }

    /// The address has ended.
    fn lose(&mut self, now: Instant) -> Vec<Action> {
        self.held = None;
        let mut actions = self.unconfigure();
        actions.extend(self.restart(now));
        actions
    }

    fn wait(&mut self, pause: Duration, now: Instant) {
        let until = now + pause;
        self.phase = Phase::Waiting { until };
    }

    fn restart(&mut self, now: Instant) -> Vec<Action> {
        match self.offered {
            Offered::Addresses => self.begin(Asking::Solicit(None), now),
            Offered::Information => self.begin(Asking::Inform, now),
            Offered::Nothing => {
                self.phase = Phase::Off;
                Vec::new()
            }
        }
    }

    /// Begins a transaction with its first message.
    fn begin(&mut self, asking: Asking, now: Instant) -> Vec<Action> {
        let [a, b, c, ..] = (self.random)().to_be_bytes();
        let exchange = Exchange {
            transaction: [a, b, c],
            began: now,
            sent: 0,
            pause: asking.pace().first,
            next: now,
        };
        self.go_on(asking, exchange, now)
    }

    /// Sends the message of a transaction if it is due.
    fn go_on(&mut self, asking: Asking, mut exchange: Exchange, now: Instant) -> Vec<Action> {
        if exchange.next > now {
            self.phase = Phase::Asking(asking, exchange);
            return Vec::new();
        }
        let pace = asking.pace();
        if pace.most.is_some_and(|most| exchange.sent >= most) {
            return self.begin(Asking::Solicit(None), now);
        }
        let longest = match asking {
            Asking::Solicit(_) => self.longest_pause,
            _ => pace.longest,
        };
        let pause = match exchange.sent {
            0 => pace.first,
            _ => (exchange.pause * 2).min(longest),
        };
        exchange.sent += 1;
        exchange.pause = self.jittered(pause, &asking);
        exchange.next = now + exchange.pause;
        let message = self.message(&asking, exchange, now);
        self.phase = Phase::Asking(asking, exchange);
        vec![Action::Send(message)]
    }

    /// A tenth more or less; a solicitation's pause is never shorter, because advertisements are compared in it.
    fn jittered(&mut self, pause: Duration, asking: &Asking) -> Duration {
        let random = (self.random)();
        let jitter = pause * (random % 1000) as u32 / 10_000;
        match asking {
            Asking::Solicit(_) => pause + jitter,
            _ if random & 1024 == 0 => pause + jitter,
            _ => pause - jitter,
        }
    }

    fn message(&self, asking: &Asking, exchange: Exchange, now: Instant) -> Vec<u8> {
        let held = self.held.as_ref();
        let own = held.map(|held| held.address);
        let (server, address) = match asking {
            Asking::Request(one) | Asking::Decline(one) => (Some(&one.server), Some(one.address)),
            Asking::Renew => (held.map(|held| &held.server), own),
            Asking::Rebind => (None, own),
            Asking::Solicit(_) | Asking::Inform => (None, None),
        };
        let association = (self.association, address.as_slice());
        let question = Question {
            kind: asking.kind(),
            transaction: exchange.transaction,
            client: &self.client,
            server: server.map(Vec::as_slice),
            association: (!matches!(asking, Asking::Inform)).then_some(association),
            elapsed: now - exchange.began,
        };
        question.encode()
    }
}
