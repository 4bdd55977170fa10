//! Linearizable reads from the cache.
//!
//! Every write of the curators updates one key, the epoch. A linearizable read of the epoch,
//! followed by a wait until the cache has reached the epoch's revision, ensures that the cache has
//! everything that was written before. One task does these reads; all callers that arrive during
//! one read share the next. Without callers it reads once a second, so that a curator detects that
//! it has lost etcd before a caller relies on it.
//!
//! A curator whose last successful read began too long ago is *stale*: it authorizes nothing,
//! acknowledges nothing, and ends its streams. A majority may have continued without it.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_consensus::{ConsensusError, NamespacedClient, fenced};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::cache::Cache;

/// Delay after a failed read.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// This curator has lost contact with etcd's quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this curator has lost contact with etcd's quorum: use another one, or retry")]
pub struct Stale;

impl From<Stale> for tonic::Status {
    fn from(stale: Stale) -> Self {
        Self::unavailable(stale.to_string())
    }
}

/// The task and the callers of linearizable reads.
pub struct ReadIndex {
    client: NamespacedClient,
    interval: Duration,
    freshness: Duration,
    /// The number of callers so far. A read serves all callers that arrived before it began.
    callers: AtomicU64,
    called: Notify,
    served: watch::Sender<u64>,
    /// When the last successful read began, and since when the curator has not been stale.
    fresh: watch::Sender<Option<Fresh>>,
}

#[derive(Clone, Copy)]
struct Fresh {
    last: Instant,
    since: Instant,
}

impl ReadIndex {
    /// Reads at least once per `interval`; stale after `freshness` without a successful read.
    pub fn new(client: &NamespacedClient, interval: Duration, freshness: Duration) -> Self {
        Self {
            // One failed attempt must leave time for another.
            client: client.bounded(freshness * 2 / 3),
            interval,
            freshness,
            callers: AtomicU64::new(0),
            called: Notify::new(),
            served: watch::Sender::new(0),
            fresh: watch::Sender::new(None),
        }
    }

    /// Does the reads. Never returns.
    pub async fn serve(&self, cache: &Cache) -> Infallible {
        let mut failing = false;
        loop {
            let callers = self.callers.load(Ordering::SeqCst);
            let begin = Instant::now();
            match self.read(cache).await {
                Ok(()) => {
                    self.fresh.send_modify(|fresh| {
                        let since = match fresh {
                            Some(old) if begin < old.last + self.freshness => old.since,
                            _ => begin,
                        };
                        *fresh = Some(Fresh { last: begin, since });
                    });
                    self.served.send_replace(callers);
                    if std::mem::take(&mut failing) {
                        tracing::info!("linearizable reads recovered");
                    }
                }
                Err(why) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!("linearizable read failed: {why}");
                    }
                    sleep(RETRY_DELAY).await;
                    continue;
                }
            }
            if self.callers.load(Ordering::SeqCst) == callers {
                tokio::select! {
                    () = self.called.notified() => {}
                    () = sleep(self.interval) => {}
                }
            }
        }
    }

    async fn read(&self, cache: &Cache) -> Result<(), String> {
        let (epoch, ()) = tokio::join!(self.client.get(fenced::EPOCH), cache.loaded());
        let epoch = epoch.map_err(|error: ConsensusError| error.to_string())?;
        let revision = epoch.map_or(0, |record| record.mod_revision);
        if timeout(self.freshness / 2, cache.reached(revision))
            .await
            .is_err()
        {
            cache.resync();
            return Err(format!("the watch lags behind revision {revision}"));
        }
        Ok(())
    }

    /// Waits until the cache has everything that was written before this call.
    pub async fn linearizable(&self) -> Result<(), Stale> {
        let caller = self.callers.fetch_add(1, Ordering::SeqCst) + 1;
        self.called.notify_one();
        let mut served = self.served.subscribe();
        match timeout(self.freshness, served.wait_for(|n| *n >= caller)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Stale),
        }
    }

    /// Whether the cache is recent enough to act on.
    pub fn check(&self) -> Result<(), Stale> {
        match *self.fresh.borrow() {
            Some(fresh) if Instant::now() < fresh.last + self.freshness => Ok(()),
            _ => Err(Stale),
        }
    }

    /// Since when this curator has not been stale; `None` if it is stale.
    pub fn fresh_since(&self) -> Option<Instant> {
        self.check().ok()?;
        self.fresh.borrow().map(|fresh| fresh.since)
    }

    /// Waits until the curator is stale.
    pub async fn stale(&self) -> Stale {
        loop {
            let Some(fresh) = *self.fresh.borrow() else {
                return Stale;
            };
            sleep_until(fresh.last + self.freshness).await;
            if let Err(stale) = self.check() {
                return stale;
            }
        }
    }

    /// Waits until the curator is not stale.
    pub async fn fresh(&self) {
        let mut fresh = self.fresh.subscribe();
        while self.check().is_err() {
            // The sender lives as long as `self`.
            let _ = fresh.changed().await;
        }
    }
}
