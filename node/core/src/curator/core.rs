//! What the services of one curator share: who may still call, and when a
//! stream has to end.

use std::{sync::Arc, time::Duration};

use hearth_api::{
    identity::{NodeId, PublicKey},
    server::{Admission, Caller},
    tls::PeerCertificate,
};
use rustls_pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Timing, cache::Cache, liveness::Hearing, reads::Reads};
use crate::consensus::{Company, Members, NamespacedClient};

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
    /// The members of etcd.
    pub members: Members,
    /// Whether there are, or will be, other members.
    pub company: Company,
    /// The records.
    pub cache: Arc<Cache>,
    /// How recent they are.
    pub reads: Arc<Reads>,
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
        let mut changes = self.cache.watch();
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
        Ok(self.cluster()?.owner)
    }

    /// The cluster's record.
    pub fn cluster(&self) -> Result<super::state::ClusterRecord, Status> {
        self.cache.cluster().ok_or_else(|| {
            Status::unavailable("this curator has no record of its cluster yet: try again")
        })
    }

    /// A duration in milliseconds, as the wire has it.
    pub fn millis(duration: Duration) -> u32 {
        u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
    }
}
