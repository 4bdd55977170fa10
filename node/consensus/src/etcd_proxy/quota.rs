//! Capacity for the others in a store that one user could fill.
//!
//! etcd has one quota for all. When its file has reached that, it refuses
//! everybody's writes, curators' too, until its members have written their files
//! anew (see `consensus::defrag`): a file never shrinks by itself. What it has to
//! hold is all that is there and the history since the last compaction; what has
//! become free is used again. So the file grows to the most that was ever in use
//! at once, and a user is kept from the quota by being kept from the *use*:
//!
//! - From half of its limit on, history is forgotten that is older than
//!   [`Timing::keep`]. The API server would do that by itself, every five
//!   minutes, if the store were its own; curators that have missed something
//!   read everything anew.
//! - At the limit, which is below the quota, its writes are refused, in etcd's
//!   own words for a full store. It may read and delete; when enough is gone,
//!   it may write again.
//!
//! What is in use is measured for all users together, for etcd knows no other
//! measure: who is confined makes room for those who are not.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use hearth_base::event::Writer;
use tokio::time::{Instant, sleep};

use super::super::client::{ConsensusError, NamespacedClient};
use super::super::defrag::relieved;

/// History is forgotten at most so many times while it is kept for once:
/// etcd looks through all keys for it.
const COMPACTIONS_PER_KEEP: u32 = 5;

/// Revoked at once; etcd makes it longer if it has to.
const SHORTEST_LEASE_TTL: Duration = Duration::from_secs(1);

/// Whether there is room for more of this user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// It may write.
    Enough,
    /// It may not.
    Full {
        /// Bytes of the store that were in use, by all, when it became full.
        in_use: u64,
        /// Bytes that may be in use when this user writes.
        limit: u64,
    },
}

/// How often, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two looks. What is written between them must fit between the
    /// limit and the quota.
    pub look: Duration,
    /// History that is kept in any case.
    pub keep: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(5),
            keep: Duration::from_secs(300),
        }
    }
}

/// Watches over a store, for a user that may write while at most `limit` bytes
/// of it are in use.
pub async fn watch(
    client: &NamespacedClient,
    limit: u64,
    timing: Timing,
    capacity: &Writer<Capacity>,
) -> Infallible {
    let mut gauge = Gauge::new(limit, timing.keep);
    loop {
        match look(client, &mut gauge, capacity).await {
            Ok(()) => {}
            // Then nothing can be written, either.
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::debug!("the room in the store: {error}");
            }
        }
        sleep(timing.look).await;
    }
}

async fn look(
    client: &NamespacedClient,
    gauge: &mut Gauge,
    capacity: &Writer<Capacity>,
) -> Result<(), ConsensusError> {
    let status = client.store().members().status().await?;
    let in_use = status.used;
    let (now, forget) = gauge.look(Instant::now(), in_use, status.revision);
    if capacity.value().get() != Some(now) {
        match now {
            Capacity::Enough => tracing::info!("there is room in the store: {in_use} bytes in use"),
            Capacity::Full { .. } => tracing::error!("the store is full: {in_use} bytes in use"),
        }
        capacity.set(now);
    }
    if let Some(revision) = forget {
        // What has failed is tried again at the next look.
        tracing::info!(revision, "history is forgotten: {in_use} bytes are in use");
        client.store().compact(revision).await?;
        // What is freed is free only with the next write, and there may be
        // nobody else who may write.
        let lease = client.grant(SHORTEST_LEASE_TTL).await?;
        client.revoke(lease).await?;
        gauge.forgotten = Some((Instant::now(), revision));
    }
    Ok(())
}

/// What follows from what is seen. Without a clock and without a store.
struct Gauge {
    limit: u64,
    keep: Duration,
    capacity: Capacity,
    /// When which revision was the last one, the oldest first. The first is at
    /// least `keep` old, once one is.
    past: VecDeque<(Instant, i64)>,
    /// When history was forgotten last, and up to which revision.
    forgotten: Option<(Instant, i64)>,
}

impl Gauge {
    fn new(limit: u64, keep: Duration) -> Self {
        Self {
            limit,
            keep,
            capacity: Capacity::Enough,
            past: VecDeque::new(),
            forgotten: None,
        }
    }

    /// Takes in a look: whether there is room, and up to which revision history
    /// is to be forgotten, if any.
    fn look(&mut self, now: Instant, in_use: u64, revision: i64) -> (Capacity, Option<i64>) {
        let full = self.limit;
        self.capacity = match self.capacity {
            Capacity::Enough if in_use >= full => Capacity::Full {
                in_use,
                limit: full,
            },
            Capacity::Full { .. } if in_use < relieved(full) => Capacity::Enough,
            as_it_was => as_it_was,
        };
        self.past.push_back((now, revision));
        let since = |at: Instant| now.saturating_duration_since(at);
        while self
            .past
            .get(1)
            .is_some_and(|(at, _)| since(*at) >= self.keep)
        {
            self.past.pop_front();
        }
        let old = self.past.front().filter(|(at, _)| since(*at) >= self.keep);
        let is_due = |revision: &i64| match self.forgotten {
            Some((at, before)) => {
                since(at) >= self.keep / COMPACTIONS_PER_KEEP && *revision > before
            }
            None => true,
        };
        let forget = old
            .map(|(_, revision)| *revision)
            .filter(|revision| in_use >= self.limit / 2 && is_due(revision));
        (self.capacity, forget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 1600;
    const KEEP: Duration = Duration::from_secs(300);

    /// A gauge that is looked at each second, of which one revision is made.
    struct Seconds {
        gauge: Gauge,
        begin: Instant,
        second: u32,
    }

    impl Seconds {
        fn begin() -> Self {
            Self {
                gauge: Gauge::new(LIMIT, KEEP),
                begin: Instant::now(),
                second: 0,
            }
        }

        fn look(&mut self, in_use: u64) -> (Capacity, Option<i64>) {
            let now = self.begin + Duration::from_secs(self.second.into());
            let revision = i64::from(self.second);
            self.second += 1;
            let (capacity, forget) = self.gauge.look(now, in_use, revision);
            if let Some(revision) = forget {
                self.gauge.forgotten = Some((now, revision));
            }
            (capacity, forget)
        }

        /// What is forgotten, when, in so many looks.
        fn forgotten(&mut self, looks: u32, in_use: u64) -> Vec<(u32, i64)> {
            let looks = (0..looks).filter_map(|_| Some((self.second, self.look(in_use).1?)));
            looks.collect()
        }
    }

    #[test]
    fn full_is_full_until_there_is_some_room() {
        let mut seconds = Seconds::begin();
        let full = |in_use| Capacity::Full {
            in_use,
            limit: LIMIT,
        };
        for (in_use, capacity) in [
            (0, Capacity::Enough),
            (1599, Capacity::Enough),
            (1600, full(1600)),
            (1700, full(1600)),
            (1500, full(1600)),
            (1499, Capacity::Enough),
            (1599, Capacity::Enough),
            (2000, full(2000)),
        ] {
            assert_eq!(seconds.look(in_use).0, capacity, "{in_use}");
        }
    }

    #[test]
    fn old_history_is_forgotten_when_half_is_in_use() {
        let mut seconds = Seconds::begin();
        assert_eq!(seconds.forgotten(1000, 799), []);
        // What is old enough by then, and again from time to time.
        assert_eq!(
            seconds.forgotten(130, 800),
            [(1000, 700), (1060, 760), (1120, 820)]
        );
        assert_eq!(seconds.forgotten(1000, 799), []);

        let mut young = Seconds::begin();
        assert_eq!(young.forgotten(301, LIMIT), [(300, 0)]);
    }

    #[test]
    fn what_has_not_changed_is_not_forgotten_twice() {
        let mut gauge = Gauge::new(LIMIT, KEEP);
        let begin = Instant::now();
        let looks = (0..1000).map(|second| begin + Duration::from_secs(second));
        // At first it fails.
        let mut tries = 0;
        for now in looks {
            if let Some(revision) = gauge.look(now, LIMIT, 7).1 {
                tries += 1;
                assert_eq!(revision, 7);
                gauge.forgotten = (tries == 3).then_some((now, revision));
            }
        }
        assert_eq!(tries, 3);
    }

    #[test]
    fn little_is_remembered() {
        let mut seconds = Seconds::begin();
        assert_eq!(seconds.forgotten(10_000, 0), []);
        assert_eq!(seconds.gauge.past.len(), 301);
    }
}
