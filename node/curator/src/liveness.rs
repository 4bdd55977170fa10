//! Receives the heartbeats of nodes, and keeps the curator's session in etcd.
//!
//! The curator has one lease in etcd, its session. Each node whose heartbeats it receives has one
//! key attached to that lease. The key is written when heartbeats start and when they stop; the
//! heartbeats themselves do not touch etcd. A heartbeat is acknowledged only while the key exists.
//!
//! A node without a heartbeat for too long is declared lost in its key. The end of a stream alone
//! does not do that: the node is about to open another stream, here or at another curator. In the
//! latter case the other curator overwrites the key, and this one stops tracking the node.
//!
//! One boot of a node is heard at a time. A boot that follows another one on the same machine takes its place at once; any
//! other, such as that of a machine with a copy of the disk, is refused as long as the first is heard ([`join::hear`]).
//!
//! A node that shuts down or reboots announces it on its stream, and this is recorded in its key at
//! once. So its next boot can join without waiting for the silence of this one.
//!
//! If the lease expires, because this curator was partitioned or paused, all its keys are gone. The
//! curator gets a new lease, and the next heartbeat of each node writes its key again.
//!
//! The curator's candidacy for the leadership is attached to the session, too.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::v1::NodeState;
use hearth_cluster::decisions::join;
use hearth_cluster::state::{self, LivenessRecord};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{ConsensusError, Lease, NamespacedClient};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::budget::Budgets;
use super::cache::Cache;
use super::reads::ReadIndex;
use super::status::unavailable;

/// Delay after a failed step.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// How often the write of a liveness key is attempted when the node's record changes concurrently.
const WRITE_ATTEMPTS: usize = 4;

/// Tracks the nodes whose heartbeats this curator receives, and owns its session.
pub struct HeartbeatTracker {
    own: NodeId,
    client: NamespacedClient,
    cache: Arc<Cache>,
    reads: Arc<ReadIndex>,
    bound: Duration,
    /// Time to live of the session's lease; `None`: that of the setting.
    ttl: Option<Duration>,
    session: watch::Sender<Option<Lease>>,
    budgets: Arc<Budgets>,
    held: Mutex<HashMap<NodeId, TrackedNode>>,
    streams: AtomicU64,
}

/// A node whose heartbeats this curator receives.
struct TrackedNode {
    boot_id: String,
    last: Instant,
    /// The stream of its last heartbeat.
    stream: u64,
    lease: Lease,
    /// The mod revision of its liveness key.
    revision: i64,
}

impl HeartbeatTracker {
    /// For the curator on node `own`. A node without a heartbeat for `bound` is declared lost.
    /// `ttl` is the time to live of the session's lease, instead of the cluster's setting.
    pub fn new(
        own: NodeId,
        client: NamespacedClient,
        cache: Arc<Cache>,
        reads: Arc<ReadIndex>,
        bound: Duration,
        ttl: Option<Duration>,
        budgets: Arc<Budgets>,
    ) -> Self {
        Self {
            own,
            client,
            cache,
            reads,
            bound,
            ttl,
            session: watch::Sender::new(None),
            budgets,
            held: Mutex::default(),
            streams: AtomicU64::new(0),
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<NodeId, TrackedNode>> {
        // No code that holds the lock panics halfway through a change.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new heartbeat stream.
    pub fn stream(&self) -> u64 {
        self.streams.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Checks that no other boot of the node is heard, for one that calls from `address`.
    pub fn hears(&self, node: NodeId, boot_id: &str, address: IpAddr) -> Result<(), Status> {
        let heard = self.cache.heard(node, |heard, status| {
            join::hear(heard, status, boot_id, address, self.bound)
        });
        heard.map_err(Status::from)
    }

    /// Processes one heartbeat, which comes from `address`. When this returns `Ok`, the node's liveness key is in etcd.
    pub async fn heartbeat(
        &self,
        stream: u64,
        node: NodeId,
        boot_id: &str,
        address: IpAddr,
    ) -> Result<(), Status> {
        self.reads.check()?;
        for _ in 0..WRITE_ATTEMPTS {
            let session = self.session().await?;
            if self.renewed(stream, node, boot_id, session)? {
                self.cache.record_heartbeat(node);
                return Ok(());
            }
            let known = self.cache.node(node);
            let Some((_, known)) = known.filter(|(record, _)| record.state == NodeState::Up) else {
                return Err(Status::permission_denied(format!(
                    "{node} is not UP in this cluster (any more)"
                )));
            };
            self.hears(node, boot_id, address)?;
            self.budgets.liveness(node)?;
            match self.attach(stream, node, boot_id, session, known).await {
                Ok(()) => {}
                // The node's record has changed: read it again.
                Err(WriteError::Conflict) => self.reads.linearizable().await?,
                Err(WriteError::Consensus(error)) if error.lease_is_gone() => {
                    self.session.send_if_modified(|current| {
                        let same = *current == Some(session);
                        if same {
                            *current = None;
                        }
                        same
                    });
                }
                Err(WriteError::Consensus(error)) => return Err(unavailable(&error)),
            }
        }
        Err(Status::unavailable(
            "the node's record keeps changing: send the heartbeat again",
        ))
    }

    async fn session(&self) -> Result<Lease, Status> {
        let mut session = self.session.subscribe();
        let wait = session.wait_for(Option::is_some);
        let lease = timeout(self.bound / 2, wait).await;
        lease
            .ok()
            .and_then(|lease| *lease.ok()?)
            .ok_or_else(|| Status::unavailable("this curator has no session: use another one"))
    }

    /// Whether the node's key is valid. Returns an error if this stream is not the node's current
    /// one any more.
    fn renewed(
        &self,
        stream: u64,
        node: NodeId,
        boot_id: &str,
        session: Lease,
    ) -> Result<bool, Status> {
        // Read the revision first: what is then read from the cache is at least as recent.
        let reached = self.cache.revision();
        let owner = self.cache.heartbeat_owner(node);
        let mut all = self.held();
        let Some(held) = all.get_mut(&node) else {
            return Ok(false);
        };
        if held.stream > stream {
            return Err(Status::aborted(
                "the node has opened another heartbeat stream",
            ));
        }
        let elsewhere =
            owner.filter(|(curator, revision)| *curator != self.own && *revision > held.revision);
        if let Some((curator, _)) = elsewhere {
            let same_stream = held.stream == stream;
            all.remove(&node);
            // With a new stream the node has moved back to this curator.
            return if same_stream {
                Err(Status::aborted(format!(
                    "the curator on {curator} receives the node's heartbeats now"
                )))
            } else {
                Ok(false)
            };
        }
        // The key existed and is gone: the lease has expired, or the node has just been declared
        // lost.
        let gone = owner.is_none() && reached >= held.revision;
        if gone || held.lease != session || held.boot_id != boot_id {
            return Ok(false);
        }
        held.stream = stream;
        held.last = Instant::now();
        Ok(true)
    }

    /// Writes the node's key on the condition that its record still has revision `known`.
    async fn attach(
        &self,
        stream: u64,
        node: NodeId,
        boot_id: &str,
        lease: Lease,
        known: i64,
    ) -> Result<(), WriteError> {
        let value = LivenessRecord::HeardBy(self.own).encode(boot_id);
        let write = Write::when(Condition::Unchanged(state::node_key(node), known)).put_leased(
            state::liveness_key(node),
            value,
            lease,
        );
        let revision = self.client.write(write).await?;
        let mut all = self.held();
        // A later stream may have finished first.
        if all.get(&node).is_none_or(|held| held.stream <= stream) {
            let held = TrackedNode {
                boot_id: boot_id.to_owned(),
                last: Instant::now(),
                stream,
                lease,
                revision,
            };
            if all.insert(node, held).is_none() {
                tracing::info!(%node, "receiving heartbeats");
            }
        }
        Ok(())
    }

    /// Declares nodes without heartbeats lost. Never returns.
    pub async fn expire_heartbeats(&self) -> Infallible {
        loop {
            sleep(self.bound / 20).await;
            // While this curator is stale it acknowledges nothing, so nodes may have stopped
            // sending heartbeats for that reason. They get the full timeout again.
            let Some(since) = self.reads.fresh_since() else {
                continue;
            };
            self.adopt();
            let silent: Vec<_> = self
                .held()
                .iter()
                .filter(|(_, held)| self.is_silent(held, since))
                .map(|(node, _)| *node)
                .collect();
            for node in silent {
                self.give_up(node, since).await;
            }
        }
    }

    fn is_silent(&self, held: &TrackedNode, since: Instant) -> bool {
        held.last.max(since) + self.bound < Instant::now()
    }

    /// Tracks all liveness keys that are attached to this session. The write of a key may be
    /// executed after the call of the heartbeat was cancelled, or after the write of a later
    /// stream. Without this no curator would notice when the heartbeats of such a node stop.
    fn adopt(&self) {
        let Some(lease) = *self.session.borrow() else {
            return;
        };
        let in_session = self.cache.nodes_in_session(lease);
        let mut all = self.held();
        for (node, revision) in in_session {
            let held = all.entry(node).or_insert_with(|| TrackedNode {
                boot_id: String::new(),
                last: Instant::now(),
                stream: 0,
                lease,
                revision,
            });
            held.revision = held.revision.max(revision);
        }
    }

    async fn give_up(&self, node: NodeId, since: Instant) {
        // A heartbeat may have arrived while other nodes were declared lost.
        let silent = self
            .held()
            .get(&node)
            .filter(|held| self.is_silent(held, since))
            .map(|held| (held.revision, held.boot_id.clone()));
        let Some((revision, boot_id)) = silent else {
            return;
        };
        let given_up = LivenessRecord::GivenUp;
        match self.record_end(node, revision, given_up, &boot_id).await {
            Ok(true) => tracing::warn!(%node, "no heartbeat for {:?}", self.bound),
            Ok(false) => {}
            Err(error) => tracing::warn!(%node, "cannot declare the node lost: {error}"),
        }
    }

    /// Handles the node's announcement that it shuts down or reboots. If it cannot be recorded, or
    /// another stream is the node's current one, the heartbeats stop all the same.
    pub async fn end_boot(&self, stream: u64, node: NodeId, boot_id: &str) {
        let revision = self
            .held()
            .get(&node)
            .filter(|held| held.stream == stream && held.boot_id == boot_id)
            .map(|held| held.revision);
        let Some(revision) = revision else {
            return;
        };
        let ended = LivenessRecord::Ended;
        match self.record_end(node, revision, ended, boot_id).await {
            Ok(true) => tracing::info!(%node, "the node shuts down or reboots"),
            Ok(false) => {}
            Err(error) => tracing::debug!(%node, "cannot record the end of its boot: {error}"),
        }
    }

    /// Records the end of the node's heartbeats and stops tracking it. False if the key is not the
    /// one of this revision any more.
    async fn record_end(
        &self,
        node: NodeId,
        revision: i64,
        record: LivenessRecord,
        boot_id: &str,
    ) -> Result<bool, ConsensusError> {
        let key = state::liveness_key(node);
        let write = Write::when(Condition::Unchanged(key.clone(), revision))
            .put(key, record.encode(boot_id));
        let is_recorded = match self.client.write(write).await {
            Ok(_) => true,
            // Another curator receives its heartbeats, or the key is gone with the session.
            Err(WriteError::Conflict) => false,
            Err(WriteError::Consensus(error)) => return Err(error),
        };
        let mut all = self.held();
        if all.get(&node).is_some_and(|held| held.revision == revision) {
            all.remove(&node);
        }
        Ok(is_recorded)
    }

    /// Starts a session and renews it; starts another one when it expires. Never returns.
    pub async fn keep_session(&self) -> Infallible {
        // The setting, and the keys of former sessions, must be in the cache first.
        self.cache.loaded().await;
        loop {
            let ttl = self.ttl.unwrap_or_else(|| self.cache.session_length());
            match self.client.grant(ttl).await {
                Ok(lease) => {
                    self.begin(lease).await;
                    self.keep(lease, ttl).await;
                    self.session.send_replace(None);
                    tracing::warn!("lease expired; starting a new session");
                }
                Err(error) => {
                    tracing::warn!("cannot start a session: {error}");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    /// Starts the session, so that heartbeats are accepted, and then revokes the leases of former
    /// sessions of this curator.
    async fn begin(&self, lease: Lease) {
        let former = self.cache.begin_session(lease);
        self.session.send_replace(Some(lease));
        for id in former {
            match self.client.revoke(Lease::from_id(id)).await {
                Ok(()) => tracing::debug!("revoked the lease of a former session"),
                Err(error) if error.lease_is_gone() => {}
                // The lease expires without this, only later.
                Err(error) => {
                    tracing::debug!("cannot revoke the lease of a former session: {error}")
                }
            }
        }
    }

    /// Becomes a candidate and renews the lease. Returns when the lease is gone.
    async fn keep(&self, lease: Lease, ttl: Duration) {
        let mut session = self.session.subscribe();
        let mut stands = self.stand(lease).await;
        loop {
            tokio::select! {
                () = sleep(ttl / 4) => {}
                // A heartbeat has found that the lease is gone.
                _ = session.wait_for(Option::is_none) => return,
            }
            match self.client.renew(lease).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::debug!("cannot renew the session: {error}"),
            }
            // This curator may have handed the leadership over to one that is gone.
            if !stands || self.cache.leader().is_none() {
                stands = self.stand(lease).await;
            }
        }
    }

    /// Becomes a candidate. The oldest one leads.
    async fn stand(&self, lease: Lease) -> bool {
        let key = state::candidate_key(lease.id());
        let write = Write::when(Condition::Absent(key.clone())).put_leased(
            key,
            state::encode_candidate(self.own),
            lease,
        );
        match self.client.write(write).await {
            // A conflict means that an earlier attempt has succeeded.
            Ok(_) | Err(WriteError::Conflict) => true,
            Err(WriteError::Consensus(error)) => {
                tracing::warn!("cannot become a candidate for leader: {error}");
                false
            }
        }
    }

    /// Revokes the session's lease at once. Otherwise nodes would count as alive, and this curator
    /// as a leader, until the lease expires.
    pub async fn end(&self) {
        let lease = *self.session.borrow();
        if let Some(lease) = lease
            && let Err(error) = self.client.bounded(RETRY_DELAY * 5).revoke(lease).await
        {
            tracing::debug!("cannot revoke the session's lease: {error}");
        }
    }
}
