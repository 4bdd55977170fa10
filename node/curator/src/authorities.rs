//! The cluster's authorities, out of etcd, for as long as one signature takes.
//!
//! Their private keys lie in etcd and nowhere else; what is read here is wiped
//! when it is dropped.

use hearth_api::private::StoredAuthority;
use hearth_consensus::kubernetes_authorities::{self, AuthoritiesError};
use hearth_host::pki::Authority;
use hearth_host::pki::kubernetes::Authorities;
use prost::Message as _;
use tonic::Status;
use zeroize::{Zeroize as _, Zeroizing};

use super::{core::Core, state, status::unavailable};

/// Vouches for nodes and users.
pub async fn cluster(core: &Core) -> Result<Authority, Status> {
    read(core, state::CLUSTER_AUTHORITY).await
}

/// Vouches for etcd's members.
pub async fn etcd(core: &Core) -> Result<Authority, Status> {
    read(core, state::ETCD_AUTHORITY).await
}

/// Kubernetes' own. Made, if nobody has needed them before.
pub async fn kubernetes(core: &Core) -> Result<Authorities, Status> {
    let authorities = kubernetes_authorities::ensure(&core.kubernetes_pki, &core.ca).await;
    authorities.map_err(|error| match error {
        AuthoritiesError::Consensus(error) => unavailable(&error),
        error => cannot(&error),
    })
}

/// What a caller is told when nothing could be signed.
pub fn cannot(error: &dyn std::error::Error) -> Status {
    tracing::error!("cannot issue a certificate: {error}");
    Status::internal(error.to_string())
}

async fn read(core: &Core, key: &str) -> Result<Authority, Status> {
    let record = core.client.get(key).await;
    let record = record
        .map_err(|error| unavailable(&error))?
        .ok_or_else(|| Status::internal(format!("this cluster has no authority at {key}")))?;
    let bytes = Zeroizing::new(record.value);
    let mut stored = StoredAuthority::decode(bytes.as_slice())
        .map_err(|_| Status::internal(format!("the authority at {key} is spoilt")))?;
    let authority = Authority::from_stored(&stored);
    stored.private_key.zeroize();
    authority.map_err(|error| cannot(&error))
}
