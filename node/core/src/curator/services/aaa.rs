//! `Aaa`: credentials for people.

use std::sync::Arc;

use hearth_api::{
    identity::UserName,
    private::StoredAuthority,
    server::Caller,
    v1::{EscrowRequest, EscrowResponse, aaa_server::Aaa},
};
use prost::Message as _;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};
use zeroize::{Zeroize as _, Zeroizing};

use crate::{
    curator::{core::Core, liveness::unavailable, state},
    pki::Authority,
};

/// Strangers may call this, so few are served at a time; each takes a moment.
const AT_A_TIME: usize = 4;

/// See the module.
pub struct Service {
    core: Arc<Core>,
    places: Semaphore,
}

impl Service {
    pub fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            places: Semaphore::new(AT_A_TIME),
        }
    }

    /// The authority with its key, for as long as one certificate takes.
    async fn authority(&self) -> Result<Authority, Status> {
        let record = self.core.client.get(state::CLUSTER_AUTHORITY).await;
        let record = record
            .map_err(|error| unavailable(&error))?
            .ok_or_else(|| Status::internal("this cluster has no certificate authority"))?;
        let bytes = Zeroizing::new(record.value);
        let mut stored = StoredAuthority::decode(bytes.as_slice())
            .map_err(|_| Status::internal("the cluster's certificate authority is spoilt"))?;
        let authority = Authority::from_stored(&stored);
        stored.private_key.zeroize();
        authority.map_err(|error| {
            tracing::error!("cannot issue certificates: {error}");
            Status::internal(error.to_string())
        })
    }
}

#[tonic::async_trait]
impl Aaa for Service {
    async fn escrow(
        &self,
        request: Request<EscrowRequest>,
    ) -> Result<Response<EscrowResponse>, Status> {
        let caller = Caller::of(&request)?;
        let key = caller.public_key()?;
        let remote = caller.remote();
        let wanted = &request.get_ref().identity;
        if wanted != UserName::OWNER {
            return Err(Status::invalid_argument(format!(
                "identity: wanted {:?}, the only user there is",
                UserName::OWNER
            )));
        }
        let _place = self
            .places
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("too many calls at a time: try again"))?;
        if self.core.owner().await? != key {
            return Err(Status::permission_denied(
                "this is not the owner's key: connect with the key whose public half was in the \
                 bootstrap parameters",
            ));
        }
        let cluster = self.core.cluster()?.id;
        let certificate = self
            .authority()
            .await?
            .issue_user(cluster, &UserName::owner(), key)
            .map_err(|error| {
                tracing::error!("cannot issue the owner's certificate: {error}");
                Status::internal(error.to_string())
            })?;
        tracing::info!(%remote, "issued a certificate to the owner");
        Ok(Response::new(EscrowResponse {
            certificate: certificate.to_vec(),
            ca_certificate: self.core.ca.to_vec(),
        }))
    }
}
