//! Loads the cluster's certificate authorities from etcd, each for one signature.
//!
//! Their private keys are stored only in etcd; the copies read here are wiped when dropped. None is
//! loaded while this node's clock is known to be wrong, because the certificate would be valid at
//! another time than is meant.

use hearth_api::private::StoredAuthority;
use hearth_cluster::state;
use hearth_consensus::kubernetes_authorities::{self, AuthoritiesError};
use hearth_host::pki::Authority;
use hearth_host::pki::kubernetes::Authorities;
use prost::Message as _;
use tonic::Status;
use zeroize::{Zeroize as _, Zeroizing};

use super::core::Core;
use super::status::unavailable;

/// The authority that signs certificates of nodes and users.
pub async fn cluster(core: &Core) -> Result<Authority, Status> {
    read(core, state::CLUSTER_AUTHORITY).await
}

/// The authority that signs certificates of etcd members.
pub async fn etcd(core: &Core) -> Result<Authority, Status> {
    read(core, state::ETCD_AUTHORITY).await
}

/// The authorities of Kubernetes; created at first use.
pub async fn kubernetes(core: &Core) -> Result<Authorities, Status> {
    core.check_clock()?;
    let authorities = kubernetes_authorities::ensure(&core.kubernetes_pki, &core.ca).await;
    authorities.map_err(|error| match error {
        AuthoritiesError::Consensus(error) => unavailable(&error),
        error => cannot(&error),
    })
}

/// The status for a caller whose certificate cannot be signed. Logs the error.
pub fn cannot(error: &dyn std::error::Error) -> Status {
    tracing::error!("cannot issue a certificate: {error}");
    Status::internal(error.to_string())
}

async fn read(core: &Core, key: &str) -> Result<Authority, Status> {
    core.check_clock()?;
    let record = core.client.get(key).await;
    let record = record
        .map_err(|error| unavailable(&error))?
        .ok_or_else(|| Status::internal(format!("etcd has no authority at {key}")))?;
    let bytes = Zeroizing::new(record.value);
    let mut stored = StoredAuthority::decode(bytes.as_slice())
        .map_err(|_| Status::internal(format!("the authority at {key} is corrupt")))?;
    let authority = Authority::from_stored(&stored);
    stored.private_key.zeroize();
    authority.map_err(|error| cannot(&error))
}
