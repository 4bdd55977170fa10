//! A quota for one user, so that it cannot fill the store for all.
//!
//! etcd has one quota for all users. When its database file has reached it, etcd refuses all
//! writes, the curators' too, until its members have defragmented their files (see
//! `consensus::defrag`): the file never shrinks by itself. It has to hold all live data and the
//! history since the last compaction; freed pages are reused. So the file grows to the maximum that
//! was ever *in use* at once, and limiting the bytes in use keeps a user from reaching the quota:
//!
//! - From half of the limit on, history older than [`Timing::keep`] is compacted. The API server
//!   would do that by itself, every five minutes, if the store were its own; curators that have
//!   missed something list everything again.
//! - At the limit, which is below the quota, the user's writes are refused with etcd's own error
//!   for a full store. It may read and delete; once enough is free, it may write again.
//!
//! The bytes in use are those of all users together, because etcd reports nothing else: the
//! confined user yields to the others.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use hearth_base::event::Writer;
use tokio::time::{Instant, sleep};

use super::super::client::{ConsensusError, NamespacedClient};
use super::super::defrag::relieved;

/// Maximum number of compactions per [`Timing::keep`]: for each, etcd scans all keys.
const COMPACTIONS_PER_KEEP: u32 = 5;

/// Revoked at once; etcd extends it if it has a higher minimum.
const SHORTEST_LEASE_TTL: Duration = Duration::from_secs(1);

/// Whether the user may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// The user may write.
    Enough,
    /// The user may only read and delete.
    Full {
        /// Bytes of the store in use, by all users, when it became full.
        in_use: u64,
        /// Maximum bytes in use at which this user may write.
        limit: u64,
    },
}

/// Intervals of the quota.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How often to check. What is written between two checks must fit between the limit and the
    /// quota.
    pub look: Duration,
    /// Minimum age of history before it is compacted.
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

/// Enforces the quota for a user that may write while at most `limit` bytes of the store are in
/// use. Publishes the result in `capacity`.
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
            // While etcd does not answer, nothing can be written either.
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::debug!("cannot check the etcd quota: {error}");
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
            Capacity::Enough => tracing::info!("etcd has free space: {in_use} bytes in use"),
            Capacity::Full { .. } => tracing::error!("etcd limit reached: {in_use} bytes in use"),
        }
        capacity.set(now);
    }
    if let Some(revision) = forget {
        // A failure is retried at the next check.
        tracing::info!(revision, "compacting etcd's history: {in_use} bytes in use");
        client.store().compact(revision).await?;
        // Pages become free only with the next write, and there may be no other user that may
        // write.
        let lease = client.grant(SHORTEST_LEASE_TTL).await?;
        client.revoke(lease).await?;
        gauge.forgotten = Some((Instant::now(), revision));
    }
    Ok(())
}

/// The decision, without a clock and without a store.
struct Gauge {
    limit: u64,
    keep: Duration,
    capacity: Capacity,
    /// The latest revision at each check, the oldest first. The first is at least `keep` old, once
    /// one is.
    past: VecDeque<(Instant, i64)>,
    /// Time and revision of the last compaction.
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

    /// Takes a measurement. Returns whether the user may write, and the revision to compact to, if
    /// any.
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

    /// A gauge that is checked every second, with one revision per second.
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

        /// The compactions during so many checks: second and revision.
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
        // History that is old enough by then, and again from time to time.
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
        // The compaction fails at first.
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
