//! The endpoints and the order in which they are tried: a pure value; the caller passes the time.
//!
//! Endpoints that have failed are backed off for a while, which doubles with each failure until
//! they work again. They are tried last, but never left out: all may have failed, and one of them
//! will be the next to work.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Endpoint;
use crate::certificates::CertificateError;
use crate::identity::{Identity, NodeId, Subject};

/// Back-off of an endpoint after its first failure.
const STAND_BACK: Duration = Duration::from_secs(1);
/// Maximum back-off.
const STAND_BACK_AT_MOST: Duration = Duration::from_secs(30);

/// The servers that a client may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Tried first, in this order.
    preferred: Vec<Endpoint>,
    /// Tried next, in random order.
    others: Vec<Endpoint>,
    servers: Servers,
}

/// The nodes that are accepted as servers; `None` accepts all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Servers(Option<Arc<BTreeSet<NodeId>>>);

impl Servers {
    /// Rejects a server that is not one of them.
    pub(super) fn check(&self, found: Option<&Identity>) -> Result<(), CertificateError> {
        let Some(wanted) = &self.0 else {
            return Ok(());
        };
        match found {
            Some(identity) => match &identity.subject {
                Subject::Node(id) if wanted.contains(id) => Ok(()),
                _ => Err(CertificateError::OtherPeer {
                    wanted: "a node that is known to run a curator".to_owned(),
                    found: identity.clone(),
                }),
            },
            None => Err(CertificateError::SelfSigned),
        }
    }
}

impl Endpoints {
    /// Tries this machine's own endpoint first and the others in random order, a different one for
    /// each client and attempt, so that the load is spread.
    pub fn balanced(own: Option<Endpoint>, mut others: Vec<Endpoint>) -> Self {
        others.retain(|one| Some(one) != own.as_ref());
        Self {
            preferred: own.into_iter().collect(),
            others,
            servers: Servers::default(),
        }
    }

    /// Accepts only these nodes as servers, at any of the addresses; other nodes of the cluster are
    /// rejected even with a valid certificate. Nodes are not tied to addresses: machines that start
    /// together may get each other's addresses, and each of them serves every call.
    #[must_use]
    pub fn only(mut self, servers: Option<BTreeSet<NodeId>>) -> Self {
        self.servers = Servers(servers.map(Arc::new));
        self
    }

    /// Whether there are no endpoints.
    pub fn is_empty(&self) -> bool {
        self.preferred.is_empty() && self.others.is_empty()
    }

    /// All endpoints, the preferred ones first.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.preferred.iter().chain(&self.others)
    }
}

/// Always tried in this order.
impl From<Vec<Endpoint>> for Endpoints {
    fn from(preferred: Vec<Endpoint>) -> Self {
        Self {
            preferred,
            others: Vec::new(),
            servers: Servers::default(),
        }
    }
}

/// The endpoints, and which of them have failed.
#[derive(Default)]
pub(super) struct List {
    endpoints: Endpoints,
    failed: HashMap<Endpoint, Failed>,
}

#[derive(Clone, Copy)]
struct Failed {
    /// Backed off until then.
    until: Instant,
    /// Back-off after the next failure.
    next: Duration,
}

impl List {
    pub(super) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    pub(super) fn set(&mut self, endpoints: Endpoints) {
        self.endpoints = endpoints;
        let endpoints = &self.endpoints;
        self.failed
            .retain(|known, _| endpoints.iter().any(|one| one == known));
    }

    /// The nodes that are accepted as servers.
    pub(super) fn servers(&self) -> Servers {
        self.endpoints.servers.clone()
    }

    /// Whether a connection to this endpoint, where this identity answers, may be used.
    pub(super) fn wants(&self, endpoint: &Endpoint, server: Option<&Identity>) -> bool {
        self.contains(endpoint) && self.endpoints.servers.check(server).is_ok()
    }

    pub(super) fn contains(&self, endpoint: &Endpoint) -> bool {
        self.endpoints.iter().any(|one| one == endpoint)
    }

    /// Whether the endpoint is backed off now.
    pub(super) fn stands_back(&self, endpoint: &Endpoint, now: Instant) -> bool {
        self.failed
            .get(endpoint)
            .is_some_and(|failed| now < failed.until)
    }

    /// Records a failure.
    pub(super) fn failed(&mut self, endpoint: &Endpoint, now: Instant) {
        // Many calls on one connection fail at the same time. That counts as one failure.
        if self.stands_back(endpoint, now) || !self.contains(endpoint) {
            return;
        }
        let before = self.failed.get(endpoint);
        let back = before.map_or(STAND_BACK, |failed| failed.next);
        let failed = Failed {
            until: now + back,
            next: (2 * back).min(STAND_BACK_AT_MOST),
        };
        self.failed.insert(endpoint.clone(), failed);
    }

    /// Records that the endpoint works.
    pub(super) fn works(&mut self, endpoint: &Endpoint) {
        self.failed.remove(endpoint);
    }

    /// All endpoints in the order in which to try them.
    pub(super) fn order(&self, now: Instant) -> Vec<Endpoint> {
        let mut others = self.endpoints.others.clone();
        // New hash keys for each use: a shuffled order.
        let shuffle = RandomState::new();
        others.sort_by_cached_key(|endpoint| shuffle.hash_one(endpoint));
        let mut all = self.endpoints.preferred.clone();
        all.extend(others);
        // The sort is stable: endpoints that are not backed off keep their order.
        all.sort_by_key(|endpoint| {
            let failed = self.failed.get(endpoint);
            failed.map(|failed| failed.until).filter(|at| now < *at)
        });
        all
    }

    /// The endpoints to try instead of the current one: those before it in the order that are not
    /// backed off.
    pub(super) fn better_than(&self, current: &Endpoint, now: Instant) -> Vec<Endpoint> {
        let order = self.order(now).into_iter();
        order
            .take_while(|one| one != current && !self.stands_back(one, now))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn endpoint(number: u8) -> Endpoint {
        Endpoint::new(IpAddr::from([192, 0, 2, number]), 1)
    }

    fn endpoints(numbers: impl IntoIterator<Item = u8>) -> Vec<Endpoint> {
        numbers.into_iter().map(endpoint).collect()
    }

    fn list(endpoints: impl Into<Endpoints>) -> List {
        let mut list = List::default();
        list.set(endpoints.into());
        list
    }

    #[test]
    fn all_of_them_have_their_turn_at_the_front_but_this_machines_own_has_it_always() {
        let now = Instant::now();
        let balanced = list(Endpoints::balanced(None, endpoints(1..4)));
        let fronts: BTreeSet<_> = (0..100).map(|_| balanced.order(now)[0].clone()).collect();
        assert_eq!(fronts.len(), 3);
        let own = list(Endpoints::balanced(Some(endpoint(2)), endpoints(1..4)));
        for _ in 0..20 {
            let order = own.order(now);
            assert_eq!((order.len(), &order[0]), (3, &endpoint(2)));
        }
        assert_eq!(list(endpoints([3, 1, 2])).order(now), endpoints([3, 1, 2]));
    }

    #[test]
    fn who_fails_stands_back_longer_each_time_until_it_works() {
        let mut list = list(endpoints([1, 2]));
        let mut now = Instant::now();
        for back in [1, 2, 4, 8, 16, 30, 30] {
            list.failed(&endpoint(1), now);
            // The failure as noticed by other calls.
            list.failed(&endpoint(1), now);
            assert_eq!(list.order(now), endpoints([2, 1]));
            assert_eq!(list.better_than(&endpoint(1), now), endpoints([2]));
            assert_eq!(list.better_than(&endpoint(2), now), []);
            now += Duration::from_secs(back);
            assert_eq!(list.order(now), endpoints([1, 2]), "after {back} s");
            assert_eq!(list.better_than(&endpoint(2), now), endpoints([1]));
        }
        list.works(&endpoint(1));
        list.failed(&endpoint(1), now);
        assert!(!list.stands_back(&endpoint(1), now + STAND_BACK));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn nobody_is_left_out_and_nobody_who_stands_back_is_preferred(
            preferred in 0_u8..3,
            others in 0_u8..4,
            steps in prop::collection::vec((0_u8..8, prop::bool::ANY, 0_u64..40), 0..30),
        ) {
            let mut list = list(Endpoints {
                preferred: endpoints(0..preferred),
                others: endpoints(preferred..preferred + others),
                servers: Servers::default(),
            });
            let mut now = Instant::now();
            for (which, works, later) in steps {
                now += Duration::from_secs(later);
                match works {
                    true => list.works(&endpoint(which)),
                    false => list.failed(&endpoint(which), now),
                }
                let order = list.order(now);
                let all: BTreeSet<_> = list.endpoints().iter().cloned().collect();
                prop_assert_eq!(order.len(), all.len());
                prop_assert_eq!(order.iter().cloned().collect::<BTreeSet<_>>(), all);
                let backs: Vec<bool> =
                    order.iter().map(|one| list.stands_back(one, now)).collect();
                prop_assert!(backs.is_sorted(), "{:?}", backs);
                for current in &order {
                    let better = list.better_than(current, now);
                    prop_assert!(!better.contains(current));
                    prop_assert!(better.iter().all(|one| !list.stands_back(one, now)));
                    // A backed-off endpoint is left for any that is not.
                    if list.stands_back(current, now) {
                        let fit = backs.iter().filter(|back| !**back).count();
                        prop_assert_eq!(better.len(), fit);
                    }
                }
            }
        }
    }
}
