//! Reads the current state: records, liveness and etcd's members.
//!
//! The order matters. Intents are read first, then comes a linearizable read, then the nodes: a
//! node that became UP and got an intent right after would otherwise be seen with an intent but not
//! UP, and such intents are dropped. Records are read before members: a member that a record names
//! was in etcd earlier, so if etcd does not have it, it has been removed, and is not about to be
//! added.

use std::collections::BTreeMap;

use hearth_api::identity::NodeId;
use hearth_api::v1::{DamagedMemberPolicy, Node, NodeHealth, NodeState};
use hearth_cluster::state::{self, Intent, RecordError};
use hearth_consensus::{ConsensusError, MemberId};
use tonic::Status;

use super::plan::{Learner, NodeView, Progress, View};
use crate::core::Core;
use crate::reads::Stale;
use crate::status::unavailable;

/// Why the state cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ViewError {
    /// The curator is stale.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// A request to etcd failed.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    /// A record is of a newer version.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Reads the current state for a service.
pub(super) async fn look(core: &Core) -> Result<View, Status> {
    take(core, Learner::default())
        .await
        .map_err(|error| match error {
            ViewError::Stale(stale) => stale.into(),
            ViewError::Consensus(error) => unavailable(&error),
            ViewError::Record(error) => Status::failed_precondition(error.to_string()),
        })
}

/// Reads the current state.
pub(super) async fn take(core: &Core, learner: Learner) -> Result<View, ViewError> {
    let intents = intents(core).await?;
    core.reads.linearizable().await?;
    let nodes = core.cache.nodes(|_| true);
    let nodes: BTreeMap<_, _> = nodes.iter().filter_map(node_view).collect();
    let replaces_damaged = core.cache.cluster().is_some_and(|cluster| {
        let policy = cluster.content.configuration.damaged_member_policy();
        policy == DamagedMemberPolicy::Replace
    });
    // Read only if it matters.
    let asks = replaces_damaged && nodes.values().any(|node| node.damaged.is_some());
    Ok(View {
        own: core.node_id,
        replaces_damaged,
        has_just_replaced: asks && core.client.get(state::REPLACED).await?.is_some(),
        nodes,
        unreadable: core.cache.unreadable_nodes(),
        intents,
        members: core.members.list().await?,
        peer_timing_ready: core.peers.is_peer_timing_ready(),
        learner,
    })
}

/// The pending intents, in the order in which they are executed.
async fn intents(core: &Core) -> Result<Vec<Intent>, ViewError> {
    let mut records = core.client.list(state::MEMBERSHIP).await?.records;
    records.sort_by_key(|record| record.create_revision);
    let mut intents = Vec::new();
    for record in records {
        match Intent::decode(&record.key, &record.value) {
            Ok(intent) => intents.push(intent),
            Err(error @ RecordError::TooNew { .. }) => return Err(error.into()),
            Err(error) => tracing::error!("{error}; ignoring the record"),
        }
    }
    intents.sort_by_key(|intent| intent.attempts);
    Ok(intents)
}

fn node_view(node: &Node) -> Option<(NodeId, NodeView)> {
    let id = node.id.parse().ok()?;
    let member = node.roles.and_then(|roles| roles.consensus_member);
    let progress = node.status.as_ref().and_then(|status| status.consensus);
    Some((
        id,
        NodeView {
            up: node.state() == NodeState::Up,
            role: member.map(|member| member.member_id),
            alive: node.health() == NodeHealth::Healthy,
            damaged: node.status.as_ref().and_then(|s| s.damaged_member_id),
            progress: progress.map(|progress| Progress {
                member: MemberId(progress.member_id),
                learner: progress.learner,
                applied: progress.applied_index,
            }),
        },
    ))
}
