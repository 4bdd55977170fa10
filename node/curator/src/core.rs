//! What the services of one curator share: who may still call, and when a
//! stream has to end.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use hearth_api::{
    identity::{NodeId, PublicKey},
    server::{Admission, Caller},
    tls::{Clock, PeerCertificate},
    v1::Node,
};
use hearth_consensus::fenced::{Write, WriteError};
use hearth_consensus::{Members, NamespacedClient, PeerReadiness};
use rustls_pki_types::CertificateDer;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use zeroize::Zeroizing;

use super::{
    Timing,
    cache::Cache,
    decisions::{At, FoundNode},
    liveness::Hearing,
    pace::Pace,
    reads::Reads,
    state::{self, ClusterRecord, FullCluster, FullRecord, Intent},
    status::{unavailable, unusable},
};

/// How often a decision is made again because the records have changed
/// meanwhile. Somebody else got on with something each time.
const DECISION_ATTEMPTS: usize = 16;

/// One curator at work.
pub struct Core {
    /// The node it runs on.
    pub node_id: NodeId,
    /// The version of that node's image.
    pub version: String,
    /// The cluster's CA certificate.
    pub ca: CertificateDer<'static>,
    /// The curators' part of etcd.
    pub client: NamespacedClient,
    /// The part of etcd for Kubernetes' authorities.
    pub kubernetes_pki: NamespacedClient,
    /// The members of etcd.
    pub members: Members,
    /// Whether there are, or will be, other members.
    pub peers: PeerReadiness,
    /// The records.
    pub cache: Arc<Cache>,
    /// How recent they are.
    pub reads: Arc<Reads>,
    /// Tells until when a certificate is good.
    pub clock: Clock,
    /// When subscribers are told.
    pub pace: Pace,
    /// Who is alive.
    pub hearing: Hearing,
    /// Bounds.
    pub timing: Timing,
    /// Cancelled when the curator ends.
    pub ending: CancellationToken,
}

/// The certificate's own checks are over when this is asked.
impl Admission for Core {
    fn admit(&self, caller: &Caller, path: &str) -> Result<(), Status> {
        // Says itself how the curator is.
        if path.starts_with("/grpc.health.v1.Health/") {
            return Ok(());
        }
        // What strangers are told does not depend on the caller and is proven
        // by other means. For everything else the records must be recent.
        if path.starts_with("/hearth.v1.CuratorLocal/") {
            return Ok(());
        }
        self.reads.check()?;
        self.check_member(caller.peer())
    }

    /// The node may have become a member at another curator a moment ago, and
    /// take a refusal for its removal. So nobody is refused by what the cache
    /// may have missed: it is brought up to date first. Those who come
    /// meanwhile share the read, and it is bounded.
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
                // A certificate may be newer than what is known here.
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
    /// Refuses those who have a certificate of the cluster, but are no longer
    /// part of it.
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

    /// Whether a stream of this caller, which has something to send, may.
    pub fn may_go_on(&self, peer: &PeerCertificate) -> Result<(), Status> {
        self.reads.check()?;
        self.check_member(peer)
    }

    /// Waits until a stream of this caller has to end, and says why.
    pub async fn end_of_stream(&self, peer: &PeerCertificate) -> Status {
        tokio::select! {
            stale = self.reads.stale() => stale.into(),
            () = self.ending.cancelled() => {
                Status::unavailable("this curator is ending: ask another one")
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
                return Status::internal("the curator's records are gone");
            }
        }
    }

    /// The owner's key, as recent as can be.
    pub async fn owner(&self) -> Result<PublicKey, Status> {
        self.reads.linearizable().await?;
        Ok(self.cluster()?.content.owner)
    }

    /// The cluster's record.
    pub fn cluster(&self) -> Result<At<ClusterRecord>, Status> {
        self.cache.cluster().ok_or_else(|| {
            Status::unavailable("this curator has no record of its cluster yet: try again")
        })
    }

    /// The cluster's record with its secret, straight from etcd.
    pub async fn full_cluster(&self) -> Result<At<FullCluster>, Status> {
        let key = state::CLUSTER;
        let record = self.client.get(key).await;
        let record = record
            .map_err(|error| unavailable(&error))?
            .ok_or_else(|| Status::internal("this cluster has no record of itself"))?;
        let value = Zeroizing::new(record.value);
        Ok(At {
            content: FullCluster::decode(key, &value).map_err(|error| unusable(&error))?,
            revision: record.mod_revision,
        })
    }

    /// The node with all there is about it, straight from etcd.
    pub async fn find(&self, id: NodeId) -> Result<Option<FoundNode>, Status> {
        let (node, intent) = (state::node_key(id), state::intent_key(id));
        let both = tokio::try_join!(self.client.get(&node), self.client.get(&intent));
        let (record, wanted) = both.map_err(|error| unavailable(&error))?;
        let Some(record) = record else {
            return Ok(None);
        };
        let value = Zeroizing::new(record.value);
        let full = At {
            content: FullRecord::decode(&node, &value).map_err(|error| unusable(&error))?,
            revision: record.mod_revision,
        };
        let intent = wanted.map(|record| {
            let content = Intent::decode(&intent, &record.value).map_err(|e| unusable(&e))?;
            Ok::<_, Status>(At {
                content,
                revision: record.mod_revision,
            })
        });
        Ok(Some(FoundNode {
            full,
            intent: intent.transpose()?,
        }))
    }

    /// Writes what was decided; `None` if the records it rests on have changed
    /// meanwhile.
    pub async fn write(&self, write: Write) -> Result<Option<i64>, Status> {
        match self.client.write(write).await {
            Ok(revision) => Ok(Some(revision)),
            Err(WriteError::Conflict) => Ok(None),
            Err(WriteError::Consensus(error)) => Err(unavailable(&error)),
        }
    }

    /// Decides, and writes what was decided, until the records stay as they
    /// were meanwhile. Returns the answer, and the revision of the write if
    /// there was one.
    pub async fn settle<T, D>(&self, decide: impl Fn() -> D) -> Result<(T, Option<i64>), Status>
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
        Err(Status::unavailable("the records keep changing: try again"))
    }

    /// A node as it is shown, with everything up to this revision.
    pub async fn shown(&self, id: NodeId, revision: Option<i64>) -> Result<Node, Status> {
        let reached = self.cache.reached(revision.unwrap_or(0));
        timeout(self.timing.freshness, reached).await.map_err(|_| {
            Status::unavailable("it is done, but this curator lags behind: ask another one")
        })?;
        self.cache
            .shown(id)
            .ok_or_else(|| Status::aborted(format!("{id} has been deleted meanwhile")))
    }

    /// A duration in milliseconds, as the wire has it.
    pub fn millis(duration: Duration) -> u32 {
        u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
    }
}
