//! The membership of consensus: what operators want, and what etcd has.

use hearth_api::identity::NodeId;
use tonic::Status;

use super::core::Core;

/// Whether the node may leave consensus: not if it is the last voter, nor if
/// those that stay, as far as they are alive, would have no quorum.
pub async fn may_leave(_core: &Core, _node: NodeId) -> Result<(), Status> {
    Err(Status::unimplemented("leaving consensus"))
}
