//! Which nodes this curator hears, and the session under which it says so.
//!
//! The curator has one lease in etcd, its session. For each node whose
//! heartbeats it receives there is one key on that lease, written when the
//! node comes and when it goes; the heartbeats themselves are counted here and
//! cost etcd nothing. A heartbeat is acknowledged only while the key stands.
//!
//! A node that is silent for too long is given up, and the key says so. A
//! stream that merely ends gives nothing up: the node is about to open the
//! next one, here or elsewhere. If it opens it elsewhere, the other curator
//! takes the key over, and this one lets go.
//!
//! If the lease lapses, because this curator was cut off or stood still, all
//! its keys are gone. It gets a new one, and each node's next heartbeat brings
//! its key back.
//!
//! The session also is this curator's candidacy for the leadership.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hearth_api::{identity::NodeId, v1::NodeState};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{Lease, NamespacedClient};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tonic::Status;

use super::{
    cache::Cache,
    reads::Reads,
    state::{self, LivenessRecord},
    status::unavailable,
};

/// After a step that failed.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// A node's record may change while its key is written; not for ever.
const WRITE_ATTEMPTS: usize = 4;

/// See the module.
pub struct Hearing {
    own: NodeId,
    client: NamespacedClient,
    cache: Arc<Cache>,
    reads: Arc<Reads>,
    bound: Duration,
    ttl: Duration,
    session: watch::Sender<Option<Lease>>,
    held: Mutex<HashMap<NodeId, Held>>,
    streams: AtomicU64,
}

/// A node that this curator hears.
struct Held {
    boot_id: String,
    last: Instant,
    /// The stream it came by last.
    stream: u64,
    lease: Lease,
    /// Of the key.
    revision: i64,
}

impl Hearing {
    /// Of the curator on node `own`. A node that is silent for `bound` is
    /// given up; the session lapses `ttl` after the curator did.
    pub fn new(
        own: NodeId,
        client: NamespacedClient,
        cache: Arc<Cache>,
        reads: Arc<Reads>,
        bound: Duration,
        ttl: Duration,
    ) -> Self {
        Self {
            own,
            client,
            cache,
            reads,
            bound,
            ttl,
            session: watch::Sender::new(None),
            held: Mutex::default(),
            streams: AtomicU64::new(0),
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<NodeId, Held>> {
        // Nothing below panics halfway through a change.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new heartbeat stream.
    pub fn stream(&self) -> u64 {
        self.streams.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes in one heartbeat. When this returns, the cluster holds the node
    /// as alive.
    pub async fn heartbeat(&self, stream: u64, node: NodeId, boot_id: &str) -> Result<(), Status> {
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
                    "{node} is not, or no longer, UP in this cluster"
                )));
            };
            match self.attach(stream, node, boot_id, session, known).await {
                Ok(()) => {}
                // The node's record has changed: look at what it is now.
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
            .ok_or_else(|| Status::unavailable("this curator has no session: ask another one"))
    }

    /// Whether the node's key stands. An error says that this stream is no
    /// longer the node's.
    fn renewed(
        &self,
        stream: u64,
        node: NodeId,
        boot_id: &str,
        session: Lease,
    ) -> Result<bool, Status> {
        // The revision first: what is in the cache is then at least as new.
        let reached = self.cache.revision();
        let owner = self.cache.heartbeat_owner(node);
        let mut all = self.held();
        let Some(held) = all.get_mut(&node) else {
            return Ok(false);
        };
        if held.stream > stream {
            return Err(Status::aborted(
                "the node has opened another heartbeat stream meanwhile",
            ));
        }
        let elsewhere =
            owner.filter(|(curator, revision)| *curator != self.own && *revision > held.revision);
        if let Some((curator, _)) = elsewhere {
            let same_stream = held.stream == stream;
            all.remove(&node);
            // A new stream says that the node has come back.
            return if same_stream {
                Err(Status::aborted(format!(
                    "the node is heard by the curator on {curator} now"
                )))
            } else {
                Ok(false)
            };
        }
        // The key was there and is gone: the lease has lapsed and nobody has
        // noticed yet, or the node has just been given up.
        let gone = owner.is_none() && reached >= held.revision;
        if gone || held.lease != session || held.boot_id != boot_id {
            return Ok(false);
        }
        held.stream = stream;
        held.last = Instant::now();
        Ok(true)
    }

    /// Writes the node's key, if its record still is what was `known`.
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
        // A later stream may have been quicker.
        if all.get(&node).is_none_or(|held| held.stream <= stream) {
            let held = Held {
                boot_id: boot_id.to_owned(),
                last: Instant::now(),
                stream,
                lease,
                revision,
            };
            if all.insert(node, held).is_none() {
                tracing::info!(%node, "heartbeats arrive");
            }
        }
        Ok(())
    }

    /// Gives up the silent, for ever.
    pub async fn give_up_the_silent(&self) -> Infallible {
        loop {
            sleep(self.bound / 20).await;
            // While this curator is out of touch it acknowledges nothing, so
            // nodes that have gone silent had a reason. They get the whole
            // time again.
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

    fn is_silent(&self, held: &Held, since: Instant) -> bool {
        held.last.max(since) + self.bound < Instant::now()
    }

    /// Takes charge of this session's keys as they stand. The write of a key
    /// may come to pass after the heartbeat that asked for it was given up, or
    /// after the one of a later stream; without this nobody would notice that
    /// such a node has gone silent.
    fn adopt(&self) {
        let Some(lease) = *self.session.borrow() else {
            return;
        };
        let standing = self.cache.nodes_in_session(lease);
        let mut all = self.held();
        for (node, revision) in standing {
            let held = all.entry(node).or_insert_with(|| Held {
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
        // It may have been heard again while others were given up.
        let silent = self
            .held()
            .get(&node)
            .filter(|held| self.is_silent(held, since))
            .map(|held| (held.revision, held.boot_id.clone()));
        let Some((revision, boot_id)) = silent else {
            return;
        };
        let key = state::liveness_key(node);
        let write = Write::when(Condition::Unchanged(key.clone(), revision))
            .put(key, LivenessRecord::GivenUp.encode(&boot_id));
        match self.client.write(write).await {
            Ok(_) => tracing::warn!(%node, "no heartbeat for {:?}", self.bound),
            // It is heard elsewhere, or its key went with the session.
            Err(WriteError::Conflict) => {}
            Err(WriteError::Consensus(error)) => {
                tracing::warn!(%node, "cannot give up the node yet: {error}");
                return;
            }
        }
        let mut all = self.held();
        if all.get(&node).is_some_and(|held| held.revision == revision) {
            all.remove(&node);
        }
    }

    /// Keeps a session, for ever.
    pub async fn keep_session(&self) -> Infallible {
        loop {
            match self.client.grant(self.ttl).await {
                Ok(lease) => {
                    // What earlier lives have left must be known before.
                    self.cache.loaded().await;
                    self.begin(lease).await;
                    self.keep(lease).await;
                    self.session.send_replace(None);
                    tracing::warn!("the curator's session has lapsed; beginning another");
                }
                Err(error) => {
                    tracing::warn!("cannot begin a session: {error}");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    /// From here on heartbeats are taken in; what earlier lives of this
    /// curator have left is cleared away after that.
    async fn begin(&self, lease: Lease) {
        let former = self.cache.begin_session(lease);
        self.session.send_replace(Some(lease));
        for id in former {
            match self.client.revoke(Lease::from_id(id)).await {
                Ok(()) => tracing::debug!("revoked the lease of an earlier life"),
                Err(error) if error.lease_is_gone() => {}
                // It lapses by itself.
                Err(error) => tracing::debug!("cannot revoke an old lease: {error}"),
            }
        }
    }

    /// Stands for election and renews the lease; returns when it is gone.
    async fn keep(&self, lease: Lease) {
        let mut session = self.session.subscribe();
        let mut stands = self.stand(lease).await;
        loop {
            tokio::select! {
                () = sleep(self.ttl / 4) => {}
                // Somebody has found out that the lease is gone.
                _ = session.wait_for(Option::is_none) => return,
            }
            match self.client.renew(lease).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::debug!("cannot renew the session: {error}"),
            }
            // It may have handed the leadership over, to one that is gone.
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
            // An earlier attempt has worked after all.
            Ok(_) | Err(WriteError::Conflict) => true,
            Err(WriteError::Consensus(error)) => {
                tracing::warn!("cannot stand for election: {error}");
                false
            }
        }
    }

    /// Ends the session at once, so that nodes are not thought alive, nor this
    /// curator a leader, until it lapses by itself.
    pub async fn end(&self) {
        let lease = *self.session.borrow();
        if let Some(lease) = lease
            && let Err(error) = self.client.bounded(RETRY_DELAY * 5).revoke(lease).await
        {
            tracing::debug!("cannot end the session: {error}");
        }
    }
}
