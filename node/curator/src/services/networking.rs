//! The method `Curator.UpdateNodeClusterNetworking`: a Kubernetes worker joins the mesh.

use hearth_api::identity::MeshKey;
use hearth_api::server::Caller;
use hearth_api::v1::{UpdateNodeClusterNetworkingRequest, UpdateNodeClusterNetworkingResponse};
use hearth_cluster::decisions::{Rejection, networking};
use tonic::{Request, Status};

use super::request::parse_node_id;
use crate::core::Core;

/// Stores the caller's mesh key and assigns its pod range.
pub(super) async fn update(
    core: &Core,
    request: Request<UpdateNodeClusterNetworkingRequest>,
) -> Result<UpdateNodeClusterNetworkingResponse, Status> {
    let caller = Caller::of(&request)?.node()?;
    let request = request.into_inner();
    if parse_node_id(&request.node_id)? != caller {
        return Err(Status::permission_denied(format!(
            "node_id: expected {caller}: a node may update only its own networking"
        )));
    }
    let key = MeshKey::try_from(&request.wireguard_public_key[..]);
    let key = key.map_err(|error| Rejection::Field {
        field: "wireguard_public_key",
        wanted: "a Curve25519 public key of 32 bytes",
        found: error.to_string(),
    })?;
    let known = core
        .cache
        .node(caller)
        .and_then(|(node, _)| node.networking);
    if known.is_none_or(|networking| networking.key != key) {
        core.budgets.mesh_key(caller)?;
    }
    let decide = || async {
        core.reads.linearizable().await?;
        let node = core.find(caller).await?.ok_or_else(|| {
            Status::permission_denied(format!("{caller} is no longer a member of this cluster"))
        })?;
        Ok(networking::decide(
            key,
            &node,
            core.cache.mesh(caller, &key, &core.reserved()?.ranges),
        )?)
    };
    let (networking, revision) = core.write_with_retry(decide).await?;
    if revision.is_some() {
        let range = networking.range;
        tracing::info!(node = %caller, %range, %key, "node joined mesh");
    }
    Ok(UpdateNodeClusterNetworkingResponse {
        networking: Some(networking.into()),
    })
}
