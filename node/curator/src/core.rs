//! State shared by the services of one curator: access checks of callers and of open streams, reads
//! from etcd, and the loop that decides and writes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::server::{Admission, Caller};
use hearth_api::settings::SettingError;
use hearth_api::tls::{self, Clock, PeerCertificate};
use hearth_api::v1::Node;
use hearth_base::event::Value;
use hearth_cluster::decisions::kubernetes::Reserved;
use hearth_cluster::decisions::{FoundNode, Rejection, Versioned};
use hearth_cluster::state::{self, ClusterRecord, FullCluster, FullRecord, Intent, RecordError};
use hearth_consensus::fenced::{Write, WriteError};
use hearth_consensus::secrets_keys::SecretsKeys;
use hearth_consensus::{Members, NamespacedClient, PeerReadiness, Record};
use hearth_host::handover::{TimeProblem, TimeStatus};
use rustls_pki_types::CertificateDer;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use zeroize::Zeroizing;

use super::Timing;
use super::budget::Budgets;
use super::cache::Cache;
use super::liveness::HeartbeatTracker;
use super::pace::Pace;
use super::reads::ReadIndex;
use super::status::{unavailable, unusable};

/// How often a decision is attempted when its records change concurrently. Each conflict means
/// that another writer made progress.
const DECISION_ATTEMPTS: usize = 16;

/// The state of a running curator.
pub struct Core {
    /// The node that this curator runs on.
    pub node_id: NodeId,
    /// The version of that node's image.
    pub version: String,
    /// The cluster's CA certificate.
    pub ca: CertificateDer<'static>,
    /// Client of the curators' namespace in etcd.
    pub client: NamespacedClient,
    /// Client of the namespace of Kubernetes' authorities in etcd.
    pub kubernetes_pki: NamespacedClient,
    /// The keys of Kubernetes' Secrets.
    pub secrets_keys: SecretsKeys,
    /// The members of etcd.
    pub members: Members,
    /// Whether etcd has peers, or will get some.
    pub peers: PeerReadiness,
    /// The records in memory.
    pub cache: Arc<Cache>,
    /// How recent the cache is.
    pub reads: Arc<ReadIndex>,
    /// Clock for the validity of certificates.
    pub clock: Clock,
    /// The state of that clock.
    pub time: Value<TimeStatus>,
    /// Limits the rate of messages to subscribers.
    pub pace: Pace,
    /// What a single node may cost.
    pub budgets: Arc<Budgets>,
    /// Receives heartbeats.
    pub hearing: HeartbeatTracker,
    /// Intervals and timeouts.
    pub timing: Timing,
    /// Cancelled when the curator shuts down.
    pub ending: CancellationToken,
}

/// TLS has verified the caller's certificate before these methods are called.
impl Admission for Core {
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status> {
        // The health service reports itself whether the curator is serving.
        if path.starts_with("/grpc.health.v1.Health/") {
            return Ok(());
        }
        // Answers to unauthenticated clients do not depend on the caller, and the client verifies
        // them by other means. For everything else the records must be recent.
        if path.starts_with("/hearth.v1.CuratorLocal/") {
            return Ok(());
        }
        self.reads.check()?;
        self.check_member(caller.peer())
    }

    /// The node may have become a member at another curator a moment ago, and would take a refusal
    /// for its removal. So the cache is brought up to date before a caller is refused. Concurrent
    /// callers share one read, which is bounded.
    fn reconsider(
        self: Arc<Self>,
        caller: Caller,
        path: String,
        refusal: Status,
    ) -> BoxFuture<'static, Result<(), Status>> {
        Box::pin(async move {
            if refusal.code() != Code::PermissionDenied {
                return Err(refusal);
            }
            self.reads.linearizable().await?;
            self.admit(&caller, &path)
        })
    }

    fn revoked(self: Arc<Self>, peer: PeerCertificate) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            loop {
                // A certificate may be newer than the records in the cache.
                self.cache.loaded().await;
                drop(self.no_longer_member(&peer).await);
                match self.reads.linearizable().await {
                    Ok(()) if self.check_member(&peer).is_err() => return,
                    Ok(()) => {}
                    Err(_) => self.reads.fresh().await,
                }
            }
        })
    }
}

impl Core {
    /// Refuses callers that have a certificate of the cluster but are no longer members.
    fn check_member(&self, peer: &PeerCertificate) -> Result<(), Status> {
        let PeerCertificate::Identified {
            identity,
            public_key,
            ..
        } = peer
        else {
            return Ok(());
        };
        self.cache
            .admits(identity, public_key)
            .map_err(|refused| Status::permission_denied(refused.to_string()))
    }

    /// Whether a stream may send its next message to this caller.
    pub fn recheck_access(&self, peer: &PeerCertificate) -> Result<(), Status> {
        self.reads.check()?;
        self.check_member(peer)
    }

    /// Waits until a stream of this caller has to end, and returns the reason.
    pub async fn end_of_stream(&self, peer: &PeerCertificate) -> Status {
        tokio::select! {
            stale = self.reads.stale() => stale.into(),
            () = self.ending.cancelled() => {
                Status::unavailable("this curator is shutting down: use another one")
            }
            refused = self.no_longer_member(peer) => refused,
        }
    }

    async fn no_longer_member(&self, peer: &PeerCertificate) -> Status {
        let mut changes = self.cache.watch_members();
        loop {
            changes.mark_unchanged();
            if let Err(refused) = self.check_member(peer) {
                return refused;
            }
            if changes.changed().await.is_err() {
                return Status::internal("the curator's cache is gone");
            }
        }
    }

    /// The time by the curator's clock, in whole seconds: that from which certificates are valid for a
    /// limited time.
    pub fn now(&self) -> SystemTime {
        tls::system_time(&self.clock)
    }

    /// Refuses to issue a certificate while the clock is known to be wrong. Another curator's may be right.
    pub fn check_clock(&self) -> Result<(), Status> {
        match self.time.get().and_then(|status| status.problem) {
            Some(TimeProblem::Wrong(reason)) => Err(Status::unavailable(format!(
                "no certificate is issued while the clock of {} is wrong: {reason}",
                self.node_id
            ))),
            Some(TimeProblem::Unknown(_)) | None => Ok(()),
        }
    }

    /// The owner's key, by a linearizable read.
    pub async fn owner(&self) -> Result<PublicKey, Status> {
        self.reads.linearizable().await?;
        Ok(self.cluster()?.content.owner)
    }

    /// The cluster's record.
    pub fn cluster(&self) -> Result<Versioned<ClusterRecord>, Status> {
        self.cache.cluster().ok_or_else(|| {
            Status::unavailable("this curator has not loaded the cluster's record yet: retry")
        })
    }

    /// The same, for callers that do not repeat a call: a curator that has just started first loads it.
    pub async fn loaded_cluster(&self) -> Result<Versioned<ClusterRecord>, Status> {
        if self.cache.cluster().is_none() {
            self.reads.linearizable().await?;
        }
        self.cluster()
    }

    /// The addresses that no node of the cluster has for its own.
    pub fn reserved(&self) -> Result<Reserved, Status> {
        let configuration = self.cluster()?.content.configuration;
        let reserved = Reserved::of(&configuration.kubernetes.unwrap_or_default());
        let reserved = reserved.map_err(SettingError::from);
        Ok(reserved.map_err(Rejection::from)?)
    }

    /// The cluster's record with its secret, straight from etcd.
    pub async fn full_cluster(&self) -> Result<Versioned<FullCluster>, Status> {
        let key = state::CLUSTER;
        let record = self.client.get(key).await;
        let record = record
            .map_err(|error| unavailable(&error))?
            .ok_or_else(|| Status::internal("etcd has no record of this cluster"))?;
        let value = Zeroizing::new(record.value);
        Ok(Versioned {
            content: FullCluster::decode(key, &value).map_err(|error| unusable(&error))?,
            revision: record.mod_revision,
        })
    }

    /// The node's record with its secrets, and its intent, straight from etcd.
    pub async fn find(&self, id: NodeId) -> Result<Option<FoundNode>, Status> {
        let (node, intent) = (state::node_key(id), state::intent_key(id));
        let both = self.client.get_all([&node, &intent]).await;
        let [record, wanted] = both.map_err(|error| unavailable(&error))?;
        let Some(record) = record else {
            return Ok(None);
        };
        let value = Zeroizing::new(record.value);
        let full = Versioned {
            content: FullRecord::decode(&node, &value).map_err(|error| unusable(&error))?,
            revision: record.mod_revision,
        };
        let intent = versioned(wanted, Intent::decode)?;
        Ok(Some(FoundNode { full, intent }))
    }

    /// Executes a write; `None` if a record that it depends on has changed.
    pub async fn write(&self, write: Write) -> Result<Option<i64>, Status> {
        match self.client.write(write).await {
            Ok(revision) => Ok(Some(revision)),
            Err(WriteError::Conflict) => Ok(None),
            Err(WriteError::Consensus(error)) => Err(unavailable(&error)),
        }
    }

    /// Decides and writes, and repeats both if a record that the decision depends on has changed.
    /// Returns the answer, and the revision of the write if there was one.
    pub async fn write_with_retry<T, D>(
        &self,
        decide: impl Fn() -> D,
    ) -> Result<(T, Option<i64>), Status>
    where
        D: Future<Output = Result<(T, Option<Write>), Status>>,
    {
        for _ in 0..DECISION_ATTEMPTS {
            let (answer, write) = decide().await?;
            let Some(write) = write else {
                return Ok((answer, None));
            };
            if let Some(revision) = self.write(write).await? {
                return Ok((answer, Some(revision)));
            }
        }
        Err(Status::unavailable("the records keep changing: retry"))
    }

    /// Waits until later calls to this curator see the write of this revision; returns whether they do. One that lags
    /// for longer than calls may be answered with old records refuses them.
    pub async fn settle(&self, revision: Option<i64>) -> bool {
        let reached = self.cache.reached(revision.unwrap_or(0));
        timeout(self.timing.freshness, reached).await.is_ok()
    }

    /// A node as clients see it, with all changes up to this revision.
    pub async fn shown(&self, id: NodeId, revision: Option<i64>) -> Result<Node, Status> {
        if !self.settle(revision).await {
            let lags = "the change is written, but this curator lags: use another one";
            return Err(Status::unavailable(lags));
        }
        self.cache
            .shown(id)
            .ok_or_else(|| Status::aborted(format!("{id} has been deleted concurrently")))
    }

    /// A duration in milliseconds, as used in the API.
    pub fn millis(duration: Duration) -> u32 {
        u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
    }
}

/// A record that was read, decoded; `None` if there is none.
pub fn versioned<T>(
    record: Option<Record>,
    decode: impl FnOnce(&str, &[u8]) -> Result<T, RecordError>,
) -> Result<Option<Versioned<T>>, Status> {
    let Some(record) = record else {
        return Ok(None);
    };
    let content = decode(&record.key, &record.value).map_err(|error| unusable(&error))?;
    Ok(Some(Versioned {
        content,
        revision: record.mod_revision,
    }))
}
