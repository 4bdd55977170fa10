//! Places of which there is a limited number, shared fairly among sources: nodes, or addresses.
//!
//! A source that asks for more than its share takes from itself. When all places are taken, the
//! source with the most of them loses one, so a source that asks for many cannot keep out those
//! that ask for few. First come, first served would be the opposite: who asks most has most.
//!
//! Asking always succeeds, and the oldest place of a source goes first: a client that has lost a
//! connection connects again long before the former one is known to be dead.
//!
//! # Invariants
//! - There are never more than the given number of places that are not lost, in all and of each
//!   source.
//! - A source never loses a place to another one that has as many or more.
//! - What is kept about sources is bounded by the number of places.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// The places.
pub struct Shares<K: Eq + Hash + Clone> {
    /// At most this many in all.
    total: usize,
    /// At most this many of one source.
    each: usize,
    taken: Mutex<Taken<K>>,
}

struct Taken<K> {
    count: usize,
    last: u64,
    /// The places of each source that has any, the oldest first.
    sources: HashMap<K, VecDeque<(u64, CancellationToken)>>,
}

/// A place. Free again when dropped.
pub struct Share<K: Eq + Hash + Clone> {
    shares: Arc<Shares<K>>,
    source: K,
    number: u64,
    lost: CancellationToken,
}

impl<K: Eq + Hash + Clone> Shares<K> {
    /// At most `total` places, at least one, of which a source has at most `each`, at least one.
    pub fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self {
            total: total.max(1),
            each: each.max(1),
            taken: Mutex::new(Taken {
                count: 0,
                last: 0,
                sources: HashMap::new(),
            }),
        })
    }

    /// Takes a place for this source. Another place may be lost by that.
    pub fn take(self: &Arc<Self>, source: K) -> Share<K> {
        let mut taken = self.lock();
        let own = taken.sources.get(&source).map_or(0, VecDeque::len);
        if own >= self.each {
            taken.evict(&source);
        } else if taken.count >= self.total {
            let loser = taken.largest(own).unwrap_or_else(|| source.clone());
            taken.evict(&loser);
        }
        taken.last += 1;
        taken.count += 1;
        let number = taken.last;
        let lost = CancellationToken::new();
        let places = taken.sources.entry(source.clone()).or_default();
        places.push_back((number, lost.clone()));
        Share {
            shares: Arc::clone(self),
            source,
            number,
            lost,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken<K>> {
        // No code that holds the lock panics halfway through a change.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash + Clone> Taken<K> {
    /// The source with the most places, if that is more than `than`. Of several, the one whose
    /// oldest place is the oldest.
    fn largest(&self, than: usize) -> Option<K> {
        let larger = self
            .sources
            .iter()
            .filter(|(_, places)| places.len() > than);
        let largest = larger.max_by_key(|(_, places)| {
            let oldest = places.front().map_or(u64::MAX, |(number, _)| *number);
            (places.len(), u64::MAX - oldest)
        });
        largest.map(|(source, _)| source.clone())
    }

    /// Ends the oldest place of a source.
    fn evict(&mut self, source: &K) {
        let Some(places) = self.sources.get_mut(source) else {
            return;
        };
        if let Some((_, oldest)) = places.pop_front() {
            oldest.cancel();
            self.count -= 1;
        }
        if places.is_empty() {
            self.sources.remove(source);
        }
    }

    fn give_back(&mut self, source: &K, number: u64) {
        let Some(places) = self.sources.get_mut(source) else {
            return;
        };
        if let Some(at) = places.iter().position(|(of, _)| *of == number) {
            places.remove(at);
            self.count -= 1;
        }
        if places.is_empty() {
            self.sources.remove(source);
        }
    }
}

impl<K: Eq + Hash + Clone> Share<K> {
    /// Waits until this place is lost to a newer one.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Whether this place is lost to a newer one.
    pub fn is_lost(&self) -> bool {
        self.lost.is_cancelled()
    }
}

impl<K: Eq + Hash + Clone> Drop for Share<K> {
    fn drop(&mut self) {
        self.shares.lock().give_back(&self.source, self.number);
    }
}

/// What counts as one address: for IPv6 a whole /64, which is what a single machine commonly has.
pub fn block(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_source_that_asks_for_more_than_its_share_takes_from_itself() {
        let shares = Shares::new(10, 2);
        let other = shares.take("other");
        let [first, second] = [shares.take("one"), shares.take("one")];
        assert!(!first.is_lost());
        let third = shares.take("one");
        assert!(first.is_lost() && !second.is_lost() && !other.is_lost());
        // A place that was given back is free.
        drop(third);
        let fourth = shares.take("one");
        assert!(!second.is_lost() && !fourth.is_lost());
    }

    #[test]
    fn who_has_most_gives_way() {
        let shares = Shares::new(4, 4);
        let many: Vec<_> = (0..4).map(|_| shares.take("many")).collect();
        let one = shares.take("one");
        assert!(many[0].is_lost() && !many[1].is_lost());
        // It takes from itself, and not from who has less.
        let again = shares.take("many");
        assert!(many[1].is_lost() && !one.is_lost() && !again.is_lost());
        let two = shares.take("two");
        assert!(many[2].is_lost() && !one.is_lost() && !two.is_lost());
    }

    proptest! {
        #[test]
        fn shares_are_kept(steps in prop::collection::vec((0_u8..5, any::<bool>()), 1..200)) {
            let (total, each) = (8, 3);
            let shares = Shares::new(total, each);
            let mut held: Vec<(u8, Share<u8>)> = Vec::new();
            let of = |held: &[(u8, Share<u8>)], source: u8| {
                held.iter().filter(|(of, share)| *of == source && !share.is_lost()).count()
            };
            for (source, gives_back) in steps {
                if gives_back {
                    let at = held.iter().position(|(of, _)| *of == source);
                    at.map(|at| held.remove(at));
                } else {
                    let before: Vec<_> = (0..5).map(|source| of(&held, source)).collect();
                    held.push((source, shares.take(source)));
                    for other in (0..5).filter(|other| *other != source) {
                        let had = before[usize::from(other)];
                        let kept = of(&held, other) == had;
                        prop_assert!(kept || had > before[usize::from(source)]);
                    }
                }
                let living = held.iter().filter(|(_, share)| !share.is_lost()).count();
                prop_assert!(living <= total && (0..5).all(|source| of(&held, source) <= each));
                prop_assert_eq!(shares.lock().count, living);
            }
            drop(held);
            prop_assert!(shares.lock().sources.is_empty());
        }
    }
}
