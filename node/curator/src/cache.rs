//! The cluster's records in memory: one watch feeds them, everybody reads them.
//!
//! A curator asks etcd for the whole of its records once, then follows every
//! change by a single watch, however many subscribers it has. What is here is
//! always some true state of the store, at [`Cache::revision`]; how recent it
//! has to be is the business of [`super::reads`].
//!
//! Each visible change gives the node concerned a new *version*, a number that
//! only grows. A subscriber remembers the last version it has seen and asks
//! for what is newer ([`Cache::changes_since`]): it gets every node that has
//! changed, once, as it is now. So a slow subscriber costs nothing but its own
//! delay: there is no queue that could grow.
//!
//! Records that are newer than this image end the curator, because it could
//! only guess what they mean. A record that is spoilt is reported and taken
//! for absent, so that it harms no node but its own.

mod contents;
mod leading;
mod lookups;
mod presence;
mod records;
#[cfg(test)]
mod tests;
mod versions;
mod views;

use std::{
    collections::BTreeSet,
    convert::Infallible,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hearth_api::identity::NodeId;
use hearth_consensus::{Change, Lease, Listing, NamespacedClient};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, sleep_until},
};

use self::contents::Contents;
use super::state::{self, RecordError};

pub use leading::{Leader, Leadership};
pub use lookups::NotMember;
pub use views::{Changes, Moment};

/// Before etcd is asked again after it did not answer.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// See the module.
pub struct Cache {
    contents: Mutex<Contents>,
    version: watch::Sender<u64>,
    members: watch::Sender<u64>,
    revision: watch::Sender<i64>,
    resync: Notify,
}

impl Cache {
    /// An empty one of the curator on node `own`. `bound` is how long a node
    /// may be silent, `grace` how long it may take to find another curator.
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
        // Nothing below panics halfway through a change.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Feeds the cache for ever. Ends only for a record that this image does
    /// not understand.
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
                    () = self.resync.notified() => break "it lagged behind".to_owned(),
                }
            };
            tracing::warn!("the watch has ended ({end}); reading everything again");
        }
    }

    /// Has everything read again: the watch is behind what it should have told.
    pub fn resync(&self) {
        self.resync.notify_one();
    }

    /// Everything up to this revision is here.
    pub fn revision(&self) -> i64 {
        *self.revision.borrow()
    }

    /// Waits until everything up to this revision is here.
    pub async fn reached(&self, revision: i64) {
        let mut reached = self.revision.subscribe();
        // The sender lives as long as `self`.
        let _ = reached.wait_for(|at| *at >= revision).await;
    }

    /// Waits until there is anything at all.
    pub async fn loaded(&self) {
        self.reached(1).await;
    }

    /// Follows the newest version.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Follows who is a member. What nodes say of themselves, and who hears
    /// them, changes far more often, and each connection asks.
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

    /// Changes the content and tells everyone, about the revision last.
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

    /// Begins a new life of this curator under this lease. Returns the leases
    /// that earlier lives have left.
    pub fn begin_session(&self, lease: Lease) -> BTreeSet<i64> {
        self.change(0, |contents| contents.begin_session(lease))
    }

    /// Notes that this curator has heard the node just now.
    pub fn record_heartbeat(&self, id: NodeId) {
        self.lock().presence.record_heartbeat(id);
    }

    /// Waits until some node's grace is over.
    async fn next_overdue(&self) {
        let mut changed = self.version.subscribe();
        loop {
            changed.mark_unchanged();
            let deadline = self.lock().next_overdue();
            let waited = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = waited => return,
                // The sender lives as long as `self`.
                _ = changed.changed() => {}
            }
        }
    }

    fn mark_overdue(&self) {
        self.change(0, Contents::mark_overdue);
    }
}
