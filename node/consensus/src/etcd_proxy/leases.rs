//! Leases, which have no keys: their ID tells whose they are.
//!
//! They are few, and latency does not matter, so they use the node's own etcd client.

use hearth_api::identity::random_bytes;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::super::wire::lease_client::LeaseClient;
use super::super::wire::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseLeasesRequest, LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};
use super::{EtcdProxy, bounded};

/// How many further IDs to draw if one is taken.
const LEASE_ID_DRAWS: usize = 4;
/// The upper half of the ID of every lease that is granted here. IDs are positive, and etcd draws
/// its own at random.
const LEASE_ID_MARK: i64 = 0x4b75_6265;

/// etcd's own message, which its clients recognize.
pub(super) const NO_SUCH_LEASE: &str = "etcdserver: requested lease not found";

/// Whether the lease was granted by this proxy.
pub(super) const fn is_ours(lease: i64) -> bool {
    lease >> 32 == LEASE_ID_MARK
}

/// Draws an ID for a new lease.
fn draw() -> i64 {
    (LEASE_ID_MARK << 32) | i64::from(u32::from_ne_bytes(random_bytes()))
}

impl EtcdProxy {
    fn leases(&self) -> LeaseClient<Channel> {
        LeaseClient::new(self.client.channel())
    }

    /// Grants a lease with an ID of this proxy.
    pub(super) async fn grant(
        &self,
        LeaseGrantRequest { ttl, id }: LeaseGrantRequest,
    ) -> Result<LeaseGrantResponse, Status> {
        if id != 0 && !is_ours(id) {
            return Err(Status::invalid_argument(
                "the lease ID is not in this user's range: use 0 and let the server choose",
            ));
        }
        self.has_capacity()?;
        let grant = async |id| {
            let request = LeaseGrantRequest { ttl, id };
            bounded(self.leases().lease_grant(request)).await
        };
        if id != 0 {
            return grant(id).await;
        }
        let mut again = 0..LEASE_ID_DRAWS;
        loop {
            match grant(draw()).await {
                // The ID is taken.
                Err(status)
                    if status.code() == Code::FailedPrecondition && again.next().is_some() => {}
                answer => return answer,
            }
        }
    }

    /// Revokes a lease of this proxy.
    pub(super) async fn revoke(
        &self,
        request: LeaseRevokeRequest,
    ) -> Result<LeaseRevokeResponse, Status> {
        if !is_ours(request.id) {
            return Err(Status::not_found(NO_SUCH_LEASE));
        }
        bounded(self.leases().lease_revoke(request)).await
    }

    /// Renews a lease of this proxy; any other one is answered as expired.
    pub(super) async fn renew(
        &self,
        LeaseKeepAliveRequest { id }: LeaseKeepAliveRequest,
    ) -> Result<LeaseKeepAliveResponse, Status> {
        let gone = LeaseKeepAliveResponse {
            id,
            ttl: 0,
            ..Default::default()
        };
        if !is_ours(id) {
            return Ok(gone);
        }
        let request = tokio_stream::once(LeaseKeepAliveRequest { id });
        let mut client = self.leases();
        let renewal = async {
            let mut answers = client.lease_keep_alive(request).await?.into_inner();
            Ok(Response::new(answers.message().await?))
        };
        Ok(bounded(renewal).await?.unwrap_or(gone))
    }

    /// Remaining time and keys of a lease of this proxy.
    pub(super) async fn time_to_live(
        &self,
        request: LeaseTimeToLiveRequest,
    ) -> Result<LeaseTimeToLiveResponse, Status> {
        if !is_ours(request.id) {
            return Ok(LeaseTimeToLiveResponse {
                id: request.id,
                ttl: -1,
                ..Default::default()
            });
        }
        let mut answer = bounded(self.leases().lease_time_to_live(request)).await?;
        for key in &mut answer.keys {
            self.prefix.down(key)?;
        }
        Ok(answer)
    }

    /// Lists the leases of this proxy.
    pub(super) async fn list_leases(
        &self,
        request: LeaseLeasesRequest,
    ) -> Result<LeaseLeasesResponse, Status> {
        let mut answer = bounded(self.leases().lease_leases(request)).await?;
        answer.leases.retain(|lease| is_ours(lease.id));
        Ok(answer)
    }
}
