//! How recent the cache is, and how recent it has to be.
//!
//! Every write of the curators moves one key, the epoch. Who reads the epoch
//! from etcd, linearizable, and then waits until the cache has reached its
//! revision, has in the cache everything that was written before. One task
//! does these reads; all callers that come while one is under way share the
//! next. When nobody asks it reads once a second, so that a curator finds out
//! that it has lost touch before anyone relies on it.
//!
//! A curator whose last such read began too long ago is *stale*: it neither
//! authorises nor acknowledges anything, and its streams end. Somewhere a
//! majority may have gone on without it.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use hearth_consensus::{ConsensusError, NamespacedClient, fenced};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::cache::Cache;

/// After a read that failed.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// This curator has lost touch with consensus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this curator has lost touch with consensus: ask another one, or wait")]
pub struct Stale;

impl From<Stale> for tonic::Status {
    fn from(stale: Stale) -> Self {
        Self::unavailable(stale.to_string())
    }
}

/// See the module.
pub struct Reads {
    client: NamespacedClient,
    interval: Duration,
    freshness: Duration,
    /// Callers are counted. A read serves all that came before it began.
    callers: AtomicU64,
    called: Notify,
    served: watch::Sender<u64>,
    /// When the last read began that was answered, and since when there was
    /// no gap.
    fresh: watch::Sender<Option<Fresh>>,
}

#[derive(Clone, Copy)]
struct Fresh {
    last: Instant,
    since: Instant,
}

impl Reads {
    /// Reads at least once in `interval`; stale after `freshness` without.
    pub fn new(client: &NamespacedClient, interval: Duration, freshness: Duration) -> Self {
        Self {
            // One attempt must not use up all the time there is.
            client: client.bounded(freshness * 2 / 3),
            interval,
            freshness,
            callers: AtomicU64::new(0),
            called: Notify::new(),
            served: watch::Sender::new(0),
            fresh: watch::Sender::new(None),
        }
    }

    /// Does the reads, for ever.
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
                        tracing::info!("in touch with consensus again");
                    }
                }
                Err(why) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!("no linearizable read: {why}");
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
        cache.loaded().await;
        let epoch = self.client.get(fenced::EPOCH).await;
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

    /// Waits until the cache holds everything that was written before this
    /// call.
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

    /// Since when this curator has been in touch without a gap.
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

    /// Waits until it is not.
    pub async fn fresh(&self) {
        let mut fresh = self.fresh.subscribe();
        while self.check().is_err() {
            // The sender lives as long as `self`.
            let _ = fresh.changed().await;
        }
    }
}
