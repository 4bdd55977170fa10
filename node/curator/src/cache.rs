//! The cluster's records in memory, fed by one watch.
//!
//! A curator lists all its records in etcd once, then follows every change by a single watch,
//! however many subscribers it has. The cache always holds a state that the store had, at
//! [`Cache::revision`]; [`super::reads`] ensures that it is recent enough.
//!
//! Each visible change gives the node a new *version*, a number that only grows. A subscriber
//! remembers the last version it has seen and asks for newer ones ([`Cache::changes_since`]): it
//! gets every node that has changed, once, in its latest state. So a slow subscriber delays only
//! itself: there is no queue that could grow.
//!
//! A record of a newer version stops the curator, because it could only guess its meaning. A
//! corrupt record is logged and ignored, so that it affects only its own node.

mod contents;
mod leading;
mod lookups;
mod presence;
mod records;
#[cfg(test)]
mod tests;
mod versions;
mod views;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_base::deadline;
use hearth_cluster::state::{self, RecordError};
use hearth_consensus::{Change, Lease, Listing, NamespacedClient};
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use self::contents::Contents;

pub use leading::{Leader, Leadership};
pub use lookups::NotMember;
pub use views::{Changes, Moment};

/// Delay after a failed list or watch.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// The cluster's records in memory, fed by one watch.
pub struct Cache {
    contents: Mutex<Contents>,
    version: watch::Sender<u64>,
    members: watch::Sender<u64>,
    revision: watch::Sender<i64>,
    resync: Notify,
}

impl Cache {
    /// An empty cache of the curator on node `own`. `bound` is the heartbeat timeout of a node,
    /// `grace` how long a node may take to find another curator.
    pub fn new(own: NodeId, bound: Duration, grace: Duration) -> Self {
        Self {
            contents: Mutex::new(Contents::new(own, bound, grace)),
            version: watch::Sender::new(0),
            members: watch::Sender::new(0),
            revision: watch::Sender::new(0),
            resync: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        // No code that holds the lock panics halfway through a change.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Feeds the cache. Returns only for a record of a newer version.
    pub async fn follow(&self, client: &NamespacedClient) -> Result<Infallible, RecordError> {
        loop {
            match client.list_all(&state::FOLLOWED).await {
                Ok(listing) => self.replace(listing)?,
                Err(error) => {
                    tracing::warn!("cannot read the cluster's records: {error}");
                    sleep(RETRY_DELAY).await;
                    continue;
                }
            }
            let from = self.revision() + 1;
            let mut changes = match client.watch(from).await {
                Ok(changes) => changes,
                Err(error) => {
                    tracing::warn!("cannot watch the cluster's records: {error}");
                    sleep(RETRY_DELAY).await;
                    continue;
                }
            };
            let end = loop {
                tokio::select! {
                    batch = changes.next() => match batch {
                        Ok(batch) => self.apply(batch)?,
                        Err(end) => break end.to_string(),
                    },
                    () = self.next_overdue() => self.mark_overdue(),
                    () = self.resync.notified() => break "it lags behind".to_owned(),
                }
            };
            tracing::warn!("watch of the cluster's records ended ({end}); listing all records");
        }
    }

    /// Triggers a new list of all records, because the watch lags behind.
    pub fn resync(&self) {
        self.resync.notify_one();
    }

    /// The store's revision up to which the cache has all changes.
    pub fn revision(&self) -> i64 {
        *self.revision.borrow()
    }

    /// Waits until the cache has all changes up to this revision.
    pub async fn reached(&self, revision: i64) {
        let mut reached = self.revision.subscribe();
        // The sender lives as long as `self`.
        let _ = reached.wait_for(|at| *at >= revision).await;
    }

    /// Waits for the first list.
    pub async fn loaded(&self) {
        self.reached(1).await;
    }

    /// Watches the newest version.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Watches for changes of who is a member. Every connection does; other changes, such as the
    /// status and liveness of nodes, are far more frequent and would wake them all.
    pub fn watch_members(&self) -> watch::Receiver<u64> {
        self.members.subscribe()
    }

    fn replace(&self, listing: Listing) -> Result<(), RecordError> {
        self.change(listing.revision, |contents| contents.replace(listing))
    }

    fn apply(&self, batch: Vec<Change>) -> Result<(), RecordError> {
        let revision = batch.iter().map(Change::revision).max().unwrap_or(0);
        self.change(revision, |contents| contents.apply(batch))
    }

    /// Changes the contents and notifies watchers; the revision is published last.
    fn change<T>(&self, revision: i64, change: impl FnOnce(&mut Contents) -> T) -> T {
        let (result, version, members) = {
            let mut contents = self.lock();
            let result = change(&mut contents);
            contents.revision = contents.revision.max(revision);
            (result, contents.versions.newest(), contents.members)
        };
        for (sender, new) in [(&self.members, members), (&self.version, version)] {
            sender.send_if_modified(|old| {
                let modified = *old != new;
                *old = new;
                modified
            });
        }
        self.revision.send_if_modified(|old| {
            let modified = *old < revision;
            *old = revision.max(*old);
            modified
        });
        result
    }

    /// Starts a new session of this curator with this lease. Returns the leases that are left from
    /// former sessions.
    pub fn begin_session(&self, lease: Lease) -> BTreeSet<i64> {
        self.change(0, |contents| contents.begin_session(lease))
    }

    /// Records that this curator has just received a heartbeat of the node.
    pub fn record_heartbeat(&self, id: NodeId) {
        self.lock().presence.record_heartbeat(id);
    }

    /// Waits until the grace period of some node is over.
    async fn next_overdue(&self) {
        let mut changed = self.version.subscribe();
        loop {
            changed.mark_unchanged();
            let deadline = self.lock().next_overdue();
            tokio::select! {
                () = deadline::passed(deadline) => return,
                // The sender lives as long as `self`.
                _ = changed.changed() => {}
            }
        }
    }

    fn mark_overdue(&self) {
        self.change(0, Contents::mark_overdue);
    }
}
