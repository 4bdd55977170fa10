//! Which endpoints there are, and in which order they are tried: a pure value,
//! whoever has it says what time it is.
//!
//! Endpoints that have failed stand back for a while, which doubles each time
//! until they work again. They are tried last, never left out: all may have
//! failed, and one of them is the next to work.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Endpoint;
use crate::certificates::CertificateError;
use crate::identity::{Identity, NodeId, Subject};

/// How long an endpoint stands back after its first failure.
const STAND_BACK: Duration = Duration::from_secs(1);
/// However often it fails, no longer than this.
const STAND_BACK_AT_MOST: Duration = Duration::from_secs(30);

/// The servers that a client may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Tried first, in this order.
    preferred: Vec<Endpoint>,
    /// Tried then, in an order of the moment.
    others: Vec<Endpoint>,
    servers: Servers,
}

/// Who may answer there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Servers(Option<Arc<BTreeSet<NodeId>>>);

impl Servers {
    /// Refuses whoever is none of them.
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
    /// Each client takes them in an order of its own, and in another one each
    /// time, so that the load spreads; but this machine's own before all.
    pub fn balanced(own: Option<Endpoint>, mut others: Vec<Endpoint>) -> Self {
        others.retain(|one| Some(one) != own.as_ref());
        Self {
            preferred: own.into_iter().collect(),
            others,
            servers: Servers::default(),
        }
    }

    /// At all of these addresses one of these nodes is meant, and no other node
    /// of the cluster, however good its certificate is. Which of them is at
    /// which address is not fixed: machines that start together may be given
    /// each other's addresses, and each of them serves every call.
    #[must_use]
    pub fn only(mut self, servers: Option<BTreeSet<NodeId>>) -> Self {
        self.servers = Servers(servers.map(Arc::new));
        self
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.preferred.is_empty() && self.others.is_empty()
    }

    /// All of them, the preferred ones first.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.preferred.iter().chain(&self.others)
    }
}

/// In this order, always.
impl From<Vec<Endpoint>> for Endpoints {
    fn from(preferred: Vec<Endpoint>) -> Self {
        Self {
            preferred,
            others: Vec::new(),
            servers: Servers::default(),
        }
    }
}

/// The endpoints, and what is known of each.
#[derive(Default)]
pub(super) struct List {
    endpoints: Endpoints,
    failed: HashMap<Endpoint, Failed>,
}

#[derive(Clone, Copy)]
struct Failed {
    /// Stands back until then.
    until: Instant,
    /// Then it stands back so long, should it fail again.
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

    /// Who may answer.
    pub(super) fn servers(&self) -> Servers {
        self.endpoints.servers.clone()
    }

    /// Whether a connection to this endpoint, where this one answers, is one
    /// for it.
    pub(super) fn wants(&self, endpoint: &Endpoint, server: Option<&Identity>) -> bool {
        self.contains(endpoint) && self.endpoints.servers.check(server).is_ok()
    }

    pub(super) fn contains(&self, endpoint: &Endpoint) -> bool {
        self.endpoints.iter().any(|one| one == endpoint)
    }

    /// Whether it stands back now.
    pub(super) fn stands_back(&self, endpoint: &Endpoint, now: Instant) -> bool {
        self.failed
            .get(endpoint)
            .is_some_and(|failed| now < failed.until)
    }

    /// It did not work.
    pub(super) fn failed(&mut self, endpoint: &Endpoint, now: Instant) {
        // Many calls on one connection fail at a time. That is one failure.
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

    /// It works.
    pub(super) fn works(&mut self, endpoint: &Endpoint) {
        self.failed.remove(endpoint);
    }

    /// All of them, the one to try first at the front.
    pub(super) fn order(&self, now: Instant) -> Vec<Endpoint> {
        let mut others = self.endpoints.others.clone();
        // Keys of its own for each use: a shuffled order.
        let shuffle = RandomState::new();
        others.sort_by_cached_key(|endpoint| shuffle.hash_one(endpoint));
        let mut all = self.endpoints.preferred.clone();
        all.extend(others);
        // Stable, so who does not stand back stays in order.
        all.sort_by_key(|endpoint| {
            let failed = self.failed.get(endpoint);
            failed.map(|failed| failed.until).filter(|at| now < *at)
        });
        all
    }

    /// Those to try instead of this one, which is in use: none of them stands
    /// back, and each comes before it.
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
            // The others who noticed it too.
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
                    // Who stands back is left for any that does not.
                    if list.stands_back(current, now) {
                        let fit = backs.iter().filter(|back| !**back).count();
                        prop_assert_eq!(better.len(), fit);
                    }
                }
            }
        }
    }
}
