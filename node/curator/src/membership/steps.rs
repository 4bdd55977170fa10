//! The steps themselves. Each can be done again.

use hearth_api::{
    identity::NodeId,
    private::StoredNode,
    v1::{NodeState, node_roles::ConsensusMember},
};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{ConsensusError, MemberId, Record};
use hearth_host::failpoint;
use prost::Message as _;
use zeroize::Zeroize as _;

use super::{
    plan::{Step, View},
    view::ViewError,
};
use crate::cache::Leadership;
use crate::core::Core;
use crate::reads::Stale;
use crate::state::{self, Intent, NodeRecord, RecordError, Wanted};

/// Why a step was not done, or is not known to be.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// Nothing is done on old records.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// Nothing can be seen.
    #[error(transparent)]
    View(#[from] ViewError),
    /// etcd does not do it.
    #[error("{}", in_full(.0))]
    Consensus(#[from] ConsensusError),
    /// The records are others by now, or the leader is.
    #[error("{what}: {source}")]
    Write {
        /// The step.
        what: &'static str,
        /// The cause.
        source: WriteError,
    },
    /// A record that cannot be changed.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Somebody else leads.
    #[error("this curator does not lead any more")]
    Replaced,
}

/// With what etcd said.
fn in_full(error: &ConsensusError) -> String {
    match error {
        ConsensusError::Failed { what, source } => format!("{what}: {}", source.message()),
        other => other.to_string(),
    }
}

/// A write that only the leader can do.
fn led(leadership: &Leadership) -> Write {
    Write::when(Condition::Created(leadership.key.clone(), leadership.since))
}

/// Sees that this curator leads still: the last thing before etcd is changed.
async fn confirm(core: &Core, leadership: &Leadership) -> Result<(), StepError> {
    core.reads.check()?;
    let key = core.client.get(&leadership.key).await?;
    let leads = key.is_some_and(|key| key.create_revision == leadership.since);
    leads.then_some(()).ok_or(StepError::Replaced)
}

/// Writes something, and tells where the log is after that.
pub(super) async fn mark(core: &Core, leadership: &Leadership) -> Result<u64, StepError> {
    write(core, "mark the log", led(leadership)).await?;
    Ok(core.members.status().await?.applied)
}

/// Does one step, and says so.
pub(super) async fn take(
    core: &Core,
    leadership: &Leadership,
    view: &View,
    step: Step,
) -> Result<(), StepError> {
    match step {
        Step::Add(node) => {
            confirm(core, leadership).await?;
            failpoint!("membership.add.before");
            let member = core.members.add_learner(node).await?;
            failpoint!("membership.add.after");
            tracing::info!(%node, %member, "a learner of consensus is added");
        }
        Step::Record(node, member) => record(core, leadership, view, node, member).await?,
        Step::Promote(node, member) => {
            confirm(core, leadership).await?;
            failpoint!("membership.promote.before");
            core.members.promote(member).await?;
            failpoint!("membership.promote.after");
            tracing::info!(%node, %member, "the node votes in consensus");
        }
        Step::Remove(node, member) => {
            confirm(core, leadership).await?;
            failpoint!("membership.remove.before");
            core.members.remove(member).await?;
            failpoint!("membership.remove.after");
            tracing::info!(%node, %member, "the member is taken out of consensus");
        }
        Step::Complete(node) => complete(core, leadership, node).await?,
        Step::Requeue(node) => requeue(core, leadership, node).await?,
        Step::Clear(node) => clear(core, leadership, node).await?,
        Step::HandOver => hand_over(core, leadership).await?,
        // The caller's: it has to remember the place.
        Step::Mark(_) => {}
    }
    Ok(())
}

async fn write(core: &Core, what: &'static str, write: Write) -> Result<i64, StepError> {
    let written = core.client.write(write).await;
    written.map_err(|source| StepError::Write { what, source })
}

/// The intent of a node as it stands now.
async fn intent(core: &Core, node: NodeId) -> Result<Option<(Intent, Record)>, StepError> {
    let key = state::intent_key(node);
    let Some(record) = core.client.get(&key).await? else {
        return Ok(None);
    };
    Ok(Some((Intent::decode(&key, &record.value)?, record)))
}

/// Adds to a write that the node's record is changed so, if there is one.
async fn change_node(
    core: &Core,
    write: Write,
    node: NodeId,
    change: impl FnOnce(&mut StoredNode),
) -> Result<Write, StepError> {
    let key = state::node_key(node);
    let Some(mut record) = core.client.get(&key).await? else {
        return Ok(write.and(Condition::Absent(key)));
    };
    // Judges it, its version above all.
    NodeRecord::decode(&key, &record.value)?;
    let stored = StoredNode::decode(&record.value[..]);
    record.value.zeroize();
    let mut stored = stored.map_err(|error| RecordError::Malformed {
        key: key.clone(),
        why: error.to_string(),
    })?;
    change(&mut stored);
    let value = stored.encode_to_vec();
    stored.cluster_unlock_key.zeroize();
    Ok(write
        .and(Condition::Unchanged(key.clone(), record.mod_revision))
        .put(key, value))
}

fn set_role(stored: &mut StoredNode, member: Option<MemberId>) {
    let mut roles = stored.roles.unwrap_or_default();
    roles.consensus_member = member.map(|id| ConsensusMember { member_id: id.0 });
    stored.roles = Some(roles);
}

/// Intent and role say which member the node is.
async fn record(
    core: &Core,
    leadership: &Leadership,
    view: &View,
    node: NodeId,
    member: MemberId,
) -> Result<(), StepError> {
    const WHAT: &str = "record the member";
    let Some((wanted, record)) = intent(core, node).await? else {
        return Ok(());
    };
    // It was decided on another one.
    let same = view.intents.contains(&wanted);
    let Wanted::Join { .. } = wanted.wanted else {
        return Ok(());
    };
    if !same {
        return Ok(());
    }
    let recorded = Intent {
        wanted: Wanted::Join {
            member: Some(member.0),
        },
        ..wanted
    };
    let led = led(leadership)
        .and(Condition::Unchanged(
            record.key.clone(),
            record.mod_revision,
        ))
        .put(record.key, recorded.encode());
    let change = |stored: &mut StoredNode| set_role(stored, Some(member));
    let led = change_node(core, led, node, change).await?;
    write(core, WHAT, led).await?;
    tracing::info!(%node, %member, "the node is to join consensus");
    Ok(())
}

async fn complete(core: &Core, leadership: &Leadership, node: NodeId) -> Result<(), StepError> {
    let Some((wanted, record)) = intent(core, node).await? else {
        return Ok(());
    };
    if !matches!(wanted.wanted, Wanted::Join { .. }) {
        return Ok(());
    }
    let led = led(leadership)
        .and(Condition::Unchanged(
            record.key.clone(),
            record.mod_revision,
        ))
        .delete(record.key);
    write(core, "complete a join", led).await?;
    tracing::info!(%node, "the node has joined consensus");
    Ok(())
}

async fn requeue(core: &Core, leadership: &Leadership, node: NodeId) -> Result<(), StepError> {
    let Some((wanted, record)) = intent(core, node).await? else {
        return Ok(());
    };
    if !matches!(wanted.wanted, Wanted::Join { member: Some(_) }) {
        return Ok(());
    }
    let queued = Intent {
        wanted: Wanted::Join { member: None },
        attempts: wanted.attempts.saturating_add(1),
        ..wanted
    };
    let led = led(leadership)
        .and(Condition::Unchanged(
            record.key.clone(),
            record.mod_revision,
        ))
        .put(record.key, queued.encode());
    let led = change_node(core, led, node, |stored| set_role(stored, None)).await?;
    write(core, "queue a join again", led).await?;
    tracing::warn!(
        %node,
        attempts = queued.attempts,
        "the node was not in sync in time: it is tried again after the others"
    );
    Ok(())
}

/// The node is no member: nor does its record say so, and nothing is wanted.
async fn clear(core: &Core, leadership: &Leadership, node: NodeId) -> Result<(), StepError> {
    let wanted = intent(core, node).await?;
    let mut decommission = false;
    let mut led = led(leadership);
    match wanted {
        Some((intent, record)) => {
            if let Wanted::Leave { decommission: yes } = intent.wanted {
                decommission = yes;
            }
            led = led
                .and(Condition::Unchanged(
                    record.key.clone(),
                    record.mod_revision,
                ))
                .delete(record.key);
        }
        None => led = led.and(Condition::Absent(state::intent_key(node))),
    }
    let led = change_node(core, led, node, |stored| {
        set_role(stored, None);
        if decommission {
            stored.set_state(NodeState::Decommissioned);
            stored.roles = None;
            stored.decommissioning = false;
            // Nothing opens its data any more.
            stored.cluster_unlock_key.zeroize();
            stored.certificate.clear();
        }
    })
    .await?;
    write(core, "clear the role", led).await?;
    tracing::info!(%node, decommission, "the node is out of consensus");
    Ok(())
}

/// Lets another curator lead, of which the caller has seen that there is one:
/// this node's own etcd is to leave, and who leaves does not see it done.
async fn hand_over(core: &Core, leadership: &Leadership) -> Result<(), StepError> {
    let led = led(leadership).delete(leadership.key.clone());
    write(core, "hand over the leadership", led).await?;
    tracing::info!("this node is to leave consensus: another curator leads");
    Ok(())
}
