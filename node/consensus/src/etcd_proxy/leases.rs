//! Leases, which have no keys: their ID tells whose they are.

use hearth_api::identity::random_bytes;
use tonic::{Code, Status};

use super::EtcdProxy;
use super::messages::{Call, Upward};
use super::wire::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseLeasesRequest, LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};

/// How many further IDs to draw if one is taken.
const LEASE_ID_DRAWS: usize = 4;
/// The upper half of the ID of every lease that is granted here. IDs are positive. etcd composes its
/// own from a member's number and a count that begins with the time: one member in 2^32 would give
/// a lease of another user this mark.
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
    /// Grants a lease with an ID of this proxy.
    pub(super) async fn grant(
        &self,
        up: &Upward<'_>,
        LeaseGrantRequest { ttl, id }: LeaseGrantRequest,
    ) -> Result<LeaseGrantResponse, Status> {
        if id != 0 && !is_ours(id) {
            return Err(Status::invalid_argument(
                "the lease ID is not in this user's range: use 0 and let the server choose",
            ));
        }
        self.has_capacity()?;
        let grant = async |id| up.ask(&LeaseGrantRequest { ttl, id }).await;
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
        up: &Upward<'_>,
        request: LeaseRevokeRequest,
    ) -> Result<LeaseRevokeResponse, Status> {
        if !is_ours(request.id) {
            return Err(Status::not_found(NO_SUCH_LEASE));
        }
        up.ask(&request).await
    }

    /// Renews a lease of this proxy; any other one is answered as expired.
    pub(super) async fn renew(
        &self,
        up: &Upward<'_>,
        request: LeaseKeepAliveRequest,
    ) -> Result<LeaseKeepAliveResponse, Status> {
        if !is_ours(request.id) {
            return Ok(LeaseKeepAliveResponse {
                id: request.id,
                ttl: 0,
                ..Default::default()
            });
        }
        up.ask(&request).await
    }

    /// Remaining time and keys of a lease of this proxy.
    pub(super) async fn time_to_live(
        &self,
        up: &Upward<'_>,
        request: LeaseTimeToLiveRequest,
    ) -> Result<LeaseTimeToLiveResponse, Status> {
        if !is_ours(request.id) {
            return Ok(LeaseTimeToLiveResponse {
                id: request.id,
                ttl: -1,
                ..Default::default()
            });
        }
        let mut answer = up.ask(&request).await?;
        for key in &mut answer.keys {
            self.prefix.down(key)?;
        }
        Ok(answer)
    }

    /// Lists the leases of this proxy.
    pub(super) async fn list_leases(
        &self,
        up: &Upward<'_>,
        request: LeaseLeasesRequest,
    ) -> Result<LeaseLeasesResponse, Status> {
        let mut answer = up.ask(&request).await?;
        answer.leases.retain(|lease| is_ours(lease.id));
        Ok(answer)
    }
}

impl Call for LeaseGrantRequest {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseGrant";
    type Answer = LeaseGrantResponse;
}

impl Call for LeaseRevokeRequest {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseRevoke";
    type Answer = LeaseRevokeResponse;
}

impl Call for LeaseTimeToLiveRequest {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseTimeToLive";
    type Answer = LeaseTimeToLiveResponse;
}

impl Call for LeaseLeasesRequest {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseLeases";
    type Answer = LeaseLeasesResponse;
}

/// A stream of renewals in etcd. Each is forwarded as a call of its own: they are few.
impl Call for LeaseKeepAliveRequest {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseKeepAlive";
    type Answer = LeaseKeepAliveResponse;
}
