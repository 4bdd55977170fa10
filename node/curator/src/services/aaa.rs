//! The service `Aaa`: issues certificates to users.

use std::sync::Arc;

use hearth_api::identity::UserName;
use hearth_api::server::Caller;
use hearth_api::v1::aaa_server::Aaa;
use hearth_api::v1::{EscrowRequest, EscrowResponse};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::request::p256_key;
use crate::core::Core;
use crate::leaves;

/// Maximum number of concurrent calls that issue a certificate: each reads the authority from etcd
/// and signs.
const MOST_CONCURRENT_CALLS: usize = 4;

pub(super) struct Service {
    core: Arc<Core>,
    places: Semaphore,
}

impl Service {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            places: Semaphore::new(MOST_CONCURRENT_CALLS),
        }
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
                "identity: expected {:?}, the only user",
                UserName::OWNER
            )));
        }
        // Checked first, so that unauthenticated clients cannot use up the permits.
        if self.core.owner().await? != key {
            return Err(Status::permission_denied(
                "this is not the owner's key: connect with the key whose public key is in the \
                 bootstrap parameters",
            ));
        }
        let _place = self
            .places
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("too many concurrent calls: retry"))?;
        let p256 = p256_key(&request.get_ref().p256_public_key)?;
        let leaves = leaves::of_owner(&self.core, key, p256).await?;
        tracing::info!(%remote, "issued owner certificate");
        Ok(Response::new(EscrowResponse {
            certificate: leaves.certificate.to_vec(),
            ca_certificate: self.core.ca.to_vec(),
            p256_certificate: leaves.p256.map(|leaf| leaf.to_vec()).unwrap_or_default(),
        }))
    }
}
