//! What there is: records, liveness and etcd's members, put together.
//!
//! The order matters. Intents come first, then a linearizable read, then the
//! nodes: a node that became UP and was at once wanted as a member would
//! otherwise be seen as wanted and not UP, for which intents are dropped.
//! Records come before members: what a record says of a member was true of
//! etcd earlier, so that a member that a record names and etcd does not have
//! is gone, not yet to come.

use hearth_api::{
    identity::NodeId,
    v1::{Node, NodeHealth, NodeState},
};
use hearth_consensus::{ConsensusError, MemberId};

use super::plan::{Learner, Progress, Standing, View};
use crate::core::Core;
use crate::reads::Stale;
use crate::state::{self, Intent, RecordError};

/// Why nothing can be seen.
#[derive(Debug, thiserror::Error)]
pub(super) enum ViewError {
    /// Nothing is seen on old records.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// etcd does not answer.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
    /// A record that is too new.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Looks.
pub(super) async fn take(core: &Core, learner: Learner) -> Result<View, ViewError> {
    let intents = intents(core).await?;
    core.reads.linearizable().await?;
    let nodes = core.cache.nodes(|_| true);
    Ok(View {
        own: core.node_id,
        nodes: nodes.iter().filter_map(standing).collect(),
        intents,
        members: core.members.list().await?,
        peer_timing_ready: core.peers.is_peer_timing_ready(),
        learner,
    })
}

/// Those that are wanted, in the order in which they are served.
async fn intents(core: &Core) -> Result<Vec<Intent>, ViewError> {
    let mut records = core.client.list(state::MEMBERSHIP).await?.records;
    records.sort_by_key(|record| record.create_revision);
    let mut intents = Vec::new();
    for record in records {
        match Intent::decode(&record.key, &record.value) {
            Ok(intent) => intents.push(intent),
            Err(error @ RecordError::TooNew { .. }) => return Err(error.into()),
            Err(error) => tracing::error!("{error}; it counts as absent"),
        }
    }
    intents.sort_by_key(|intent| intent.attempts);
    Ok(intents)
}

fn standing(node: &Node) -> Option<(NodeId, Standing)> {
    let id = node.id.parse().ok()?;
    let member = node.roles.and_then(|roles| roles.consensus_member);
    let progress = node.status.as_ref().and_then(|status| status.consensus);
    Some((
        id,
        Standing {
            up: node.state() == NodeState::Up,
            role: member.map(|member| member.member_id),
            alive: node.health() == NodeHealth::Healthy,
            progress: progress.map(|progress| Progress {
                member: MemberId(progress.member_id),
                learner: progress.learner,
                applied: progress.applied_index,
            }),
        },
    ))
}
