//! Limits the number of connections of a server.
//!
//! Members and unauthenticated clients have separate limits, so that neither can lock the other
//! out. Each node has a limit of its own among the members.
//!
//! An unauthenticated client always gets a slot: when all are taken, another connection is closed.
//! Rejecting the new client instead would let those that came first and hold on block registration
//! and a new owner. The connection that is closed is one that has made no call for a while, or else
//! the oldest. An address that has reached its limit replaces its own connections, so that one
//! address cannot take all slots; the limit is high, because many machines may be behind one
//! address.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Limits, Refused};
use crate::identity::{Identity, NodeId};
use crate::shares::block;
use crate::tls::PeerCertificate;

/// A connection that has made no call for this long is idle. A new connection is not: its first
/// call is still on its way.
const IDLE_AFTER: Duration = Duration::from_secs(5);

/// All connection slots of a server.
pub(super) struct ConnectionLimiter {
    limits: Limits,
    identified: Arc<Semaphore>,
    nodes: Arc<Nodes>,
    strangers: Arc<Mutex<UnauthenticatedClients>>,
}

impl ConnectionLimiter {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            identified: Arc::new(Semaphore::new(limits.identified)),
            nodes: Arc::default(),
            strangers: Arc::new(Mutex::new(UnauthenticatedClients::new(&limits))),
        }
    }

    /// Takes a slot for a connection of this peer from this address.
    pub(super) fn take(&self, peer: &PeerCertificate, from: IpAddr) -> Result<Place, Refused> {
        if !matches!(peer, PeerCertificate::Identified { .. }) {
            let taken = lock(&self.strangers).admit(block(from), Instant::now());
            return Ok(Place {
                activity: Arc::clone(&taken.activity),
                given_up: taken.given_up.clone(),
                _member: None,
                _stranger: Some(StrangersPlace {
                    strangers: Arc::clone(&self.strangers),
                    taken,
                }),
            });
        }
        let node = peer.identity().and_then(Identity::node_id);
        let node = node
            .map(|node| self.nodes.place(node, self.limits.per_node))
            .transpose()?;
        let permit = Arc::clone(&self.identified)
            .try_acquire_owned()
            .map_err(|_| Refused::Full(self.limits.identified))?;
        Ok(Place {
            activity: Arc::new(Activity::new(Instant::now())),
            given_up: CancellationToken::new(),
            _member: Some((permit, node)),
            _stranger: None,
        })
    }
}

/// The slot of one connection, until it is dropped.
pub(super) struct Place {
    /// The calls on this connection.
    pub(super) activity: Arc<Activity>,
    /// Cancelled when the connection is replaced by another.
    pub(super) given_up: CancellationToken,
    _member: Option<(OwnedSemaphorePermit, Option<NodePlace>)>,
    _stranger: Option<StrangersPlace>,
}

/// Number of connections of each node.
#[derive(Default)]
struct Nodes(Mutex<HashMap<NodeId, usize>>);

impl Nodes {
    /// Counts one more connection of this node, if it has fewer than `most`.
    fn place(self: &Arc<Self>, node: NodeId, most: usize) -> Result<NodePlace, Refused> {
        let mut all = lock(&self.0);
        let count = all.entry(node).or_default();
        if *count >= most {
            return Err(Refused::Greedy(node, most));
        }
        *count += 1;
        let nodes = Arc::clone(self);
        Ok(NodePlace { nodes, node })
    }
}

/// One of a node's connections, until it is dropped.
struct NodePlace {
    nodes: Arc<Nodes>,
    node: NodeId,
}

impl Drop for NodePlace {
    fn drop(&mut self) {
        let mut all = lock(&self.nodes.0);
        if let Some(count) = all.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.node);
            }
        }
    }
}

/// The calls of one connection: how many are running, or since when none is.
#[derive(Debug)]
pub(super) struct Activity(Mutex<(usize, Instant)>);

impl Activity {
    fn new(now: Instant) -> Self {
        Self(Mutex::new((0, now)))
    }

    /// Counts a call as running until the result is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> RunningCall {
        lock(&self.0).0 += 1;
        RunningCall(Arc::clone(self))
    }

    fn is_idle(&self, now: Instant) -> bool {
        let (running, since) = *lock(&self.0);
        running == 0 && now.duration_since(since) >= IDLE_AFTER
    }
}

/// A running call.
pub(super) struct RunningCall(Arc<Activity>);

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut activity = lock(&self.0.0);
        activity.0 -= 1;
        activity.1 = Instant::now();
    }
}

/// The connections of unauthenticated clients.
struct UnauthenticatedClients {
    most: usize,
    most_of_one_block: usize,
    /// By the order in which they came.
    here: BTreeMap<u64, Stranger>,
    next: u64,
}

struct Stranger {
    block: IpAddr,
    activity: Arc<Activity>,
    given_up: CancellationToken,
}

/// The slot of an unauthenticated client.
struct Taken {
    number: u64,
    activity: Arc<Activity>,
    given_up: CancellationToken,
}

impl UnauthenticatedClients {
    fn new(limits: &Limits) -> Self {
        Self {
            // With zero slots no client could ever connect.
            most: limits.anonymous.max(1),
            most_of_one_block: limits.anonymous_per_address.max(1),
            here: BTreeMap::new(),
            next: 0,
        }
    }

    /// Takes a slot for a new connection; closes another one if the limit is reached.
    fn admit(&mut self, block: IpAddr, now: Instant) -> Taken {
        let of_block = self.here.values().filter(|one| one.block == block);
        if of_block.count() >= self.most_of_one_block {
            self.evict(now, |one| one.block == block);
        } else if self.here.len() >= self.most {
            self.evict(now, |_| true);
        }
        let number = self.next;
        self.next += 1;
        let activity = Arc::new(Activity::new(now));
        let given_up = CancellationToken::new();
        self.here.insert(
            number,
            Stranger {
                block,
                activity: Arc::clone(&activity),
                given_up: given_up.clone(),
            },
        );
        Taken {
            number,
            activity,
            given_up,
        }
    }

    fn evict(&mut self, now: Instant, may_go: impl Fn(&Stranger) -> bool) {
        let candidates = || self.here.iter().filter(|(_, one)| may_go(one));
        let goes = candidates()
            .find(|(_, one)| one.activity.is_idle(now))
            .or_else(|| candidates().next())
            .map(|(number, _)| *number);
        if let Some(gone) = goes.and_then(|number| self.here.remove(&number)) {
            gone.given_up.cancel();
        }
    }
}

struct StrangersPlace {
    strangers: Arc<Mutex<UnauthenticatedClients>>,
    taken: Taken,
}

impl Drop for StrangersPlace {
    fn drop(&mut self) {
        lock(&self.strangers).here.remove(&self.taken.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn strangers(anonymous: usize, anonymous_per_address: usize) -> UnauthenticatedClients {
        UnauthenticatedClients::new(&Limits {
            anonymous,
            anonymous_per_address,
            ..Limits::default()
        })
    }

    fn address(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    fn gone(taken: &Taken) -> bool {
        taken.given_up.is_cancelled()
    }

    #[test]
    fn the_idle_go_first_then_the_oldest() {
        let mut all = strangers(3, 3);
        let begin = Instant::now();
        let oldest = all.admit(address(1), begin);
        let call = oldest.activity.begin();
        let idle = all.admit(address(2), begin);
        let later = begin + IDLE_AFTER;
        let young = all.admit(address(3), later);
        let fourth = all.admit(address(4), later);
        assert!(gone(&idle) && !gone(&oldest) && !gone(&young));
        // No connection is idle now.
        let fifth = all.admit(address(5), later);
        assert!(gone(&oldest) && !gone(&young) && !gone(&fourth) && !gone(&fifth));
        drop(call);
    }

    #[test]
    fn a_call_that_has_just_ended_is_no_idleness() {
        let activity = Arc::new(Activity::new(Instant::now()));
        let call = activity.begin();
        assert!(!activity.is_idle(Instant::now() + 10 * IDLE_AFTER));
        drop(call);
        assert!(!activity.is_idle(Instant::now()));
        assert!(activity.is_idle(Instant::now() + IDLE_AFTER));
    }

    #[test]
    fn an_ipv6_machine_is_one_address_and_a_mapped_one_is_ipv4() {
        let parse = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert_eq!(
            block(parse("2001:db8::1")),
            block(parse("2001:db8:0:0:9::2"))
        );
        assert_ne!(block(parse("2001:db8::1")), block(parse("2001:db8:0:1::1")));
        assert_eq!(block(parse("::ffff:192.0.2.1")), address(1));
        assert_ne!(block(address(1)), block(address(2)));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Come(u8),
        Leave(usize),
        Call(usize),
        Rest(usize),
        Wait,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0_u8..4).prop_map(Step::Come),
            1 => (0_usize..16).prop_map(Step::Leave),
            2 => (0_usize..16).prop_map(Step::Call),
            1 => (0_usize..16).prop_map(Step::Rest),
            1 => Just(Step::Wait),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// In any sequence of steps: the limits hold, a new connection gets a slot, and at most one
        /// other is closed for it, one from the same address if that has reached its limit.
        #[test]
        fn everyone_gets_in_and_nobody_takes_all(
            steps in prop::collection::vec(step(), 1..80),
            most in 1_usize..6,
            share in 1_usize..6,
        ) {
            let mut all = strangers(most, share);
            let mut now = Instant::now();
            let mut here: Vec<(u8, Taken, Option<RunningCall>)> = Vec::new();
            for step in steps {
                match step {
                    Step::Come(from) => {
                        let of_it = here.iter().filter(|(whose, ..)| *whose == from).count();
                        let before = here.len();
                        let taken = all.admit(address(from), now);
                        prop_assert!(!gone(&taken));
                        let went: Vec<u8> = here
                            .iter()
                            .filter(|(_, taken, _)| gone(taken))
                            .map(|(whose, ..)| *whose)
                            .collect();
                        let full = of_it >= share || before >= most;
                        prop_assert_eq!(went.len(), usize::from(full));
                        if of_it >= share {
                            prop_assert_eq!(went[0], from);
                        }
                        here.retain(|(_, taken, _)| !gone(taken));
                        here.push((from, taken, None));
                    }
                    Step::Leave(which) if which < here.len() => {
                        let (_, taken, _) = here.remove(which);
                        all.here.remove(&taken.number);
                    }
                    Step::Call(which) if which < here.len() => {
                        let call = here[which].1.activity.begin();
                        here[which].2 = Some(call);
                    }
                    Step::Rest(which) if which < here.len() => here[which].2 = None,
                    Step::Wait => now += IDLE_AFTER,
                    _ => {}
                }
                prop_assert_eq!(all.here.len(), here.len());
                prop_assert!(here.len() <= most);
                for from in 0..4 {
                    let of_it = here.iter().filter(|(whose, ..)| *whose == from).count();
                    prop_assert!(of_it <= share);
                }
            }
        }
    }
}
