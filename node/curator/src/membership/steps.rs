//! Execution of the leader's steps. Each step is idempotent.

use hearth_api::identity::NodeId;
use hearth_api::private::StoredNode;
use hearth_api::v1::NodeState;
use hearth_api::v1::node_roles::ConsensusMember;
use hearth_cluster::state::{self, Intent, NodeRecord, RecordError, Wanted};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{ConsensusError, MemberId, Record};
use hearth_host::failpoint;
use prost::Message as _;
use tonic::Status;
use zeroize::Zeroize as _;

use super::departure;
use super::plan::{Step, View};
use super::view::ViewError;
use crate::cache::Leadership;
use crate::core::Core;
use crate::reads::Stale;

/// Why a step was not executed, or may not have been.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// The curator is stale.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// The state cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A request to etcd failed.
    #[error("{}", in_full(.0))]
    Consensus(#[from] ConsensusError),
    /// A write failed; in case of a conflict, a record or the leader has changed.
    #[error("cannot {what}: {source}")]
    Write {
        /// The step, as the object of "cannot".
        what: &'static str,
        /// The error of the write.
        source: WriteError,
    },
    /// A record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A member may not leave now.
    #[error("{}", .0.message())]
    Departure(Status),
    /// Another curator leads.
    #[error("this curator is not the leader any more")]
    Replaced,
}

/// The error with etcd's message.
fn in_full(error: &ConsensusError) -> String {
    match error {
        ConsensusError::Failed { what, source } => format!("{what}: {}", source.message()),
        other => other.to_string(),
    }
}

/// A write on the condition that this curator leads.
fn led(leadership: &Leadership) -> Write {
    Write::when(Condition::Created(leadership.key.clone(), leadership.since))
}

/// Checks that this curator still leads; called right before a change of etcd's members.
async fn confirm(core: &Core, leadership: &Leadership) -> Result<(), StepError> {
    core.reads.check()?;
    let key = core.client.get(&leadership.key).await?;
    let leads = key.is_some_and(|key| key.create_revision == leadership.since);
    leads.then_some(()).ok_or(StepError::Replaced)
}

/// Appends an entry to the log, and returns the applied index after it.
pub(super) async fn mark(core: &Core, leadership: &Leadership) -> Result<u64, StepError> {
    write(core, "mark the log", led(leadership)).await?;
    Ok(core.members.status().await?.applied)
}

/// Executes one step and logs it.
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
            tracing::info!(%node, %member, "added etcd learner");
        }
        Step::Record(node, member) => record(core, leadership, view, node, member).await?,
        Step::Promote(node, member) => {
            confirm(core, leadership).await?;
            failpoint!("membership.promote.before");
            core.members.promote(member).await?;
            failpoint!("membership.promote.after");
            tracing::info!(%node, %member, "promoted etcd learner to voter");
        }
        Step::Remove(node, member) => {
            confirm(core, leadership).await?;
            failpoint!("membership.remove.before");
            core.members.remove(member).await?;
            failpoint!("membership.remove.after");
            tracing::info!(%node, %member, "removed etcd member");
        }
        Step::Complete(node) => complete(core, leadership, node).await?,
        Step::Requeue(node) => requeue(core, leadership, node).await?,
        Step::Clear(node) => clear(core, leadership, node).await?,
        Step::HandOver => hand_over(core, leadership).await?,
        Step::Replace(node, member) => replace(core, leadership, node, member).await?,
        // Executed by the caller, which has to remember the index.
        Step::Mark(_) => {}
    }
    Ok(())
}

async fn write(core: &Core, what: &'static str, write: Write) -> Result<i64, StepError> {
    let written = core.client.write(write).await;
    written.map_err(|source| StepError::Write { what, source })
}

/// The current intent of a node.
async fn intent(core: &Core, node: NodeId) -> Result<Option<(Intent, Record)>, StepError> {
    let key = state::intent_key(node);
    let Some(record) = core.client.get(&key).await? else {
        return Ok(None);
    };
    Ok(Some((Intent::decode(&key, &record.value)?, record)))
}

/// Adds a change of the node's record to a write, if the node exists.
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
    // Validates the record, above all its version.
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

/// Writes the member ID to the intent and to the role.
async fn record(
    core: &Core,
    leadership: &Leadership,
    view: &View,
    node: NodeId,
    member: MemberId,
) -> Result<(), StepError> {
    const WHAT: &str = "record the member ID";
    let Some((wanted, record)) = intent(core, node).await? else {
        return Ok(());
    };
    // The step was derived from another intent.
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
    tracing::info!(%node, %member, "recorded etcd member ID; the node is going to join");
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
    write(core, "complete the join", led).await?;
    match wanted.wanted {
        Wanted::Join { member: None } if wanted.replaces.is_some() => {
            tracing::info!(%node, "etcd member is not damaged any more: not replacing it");
        }
        _ => tracing::info!(%node, "node joined etcd cluster"),
    }
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
    write(core, "requeue the join", led).await?;
    tracing::warn!(
        %node,
        attempts = queued.attempts,
        "etcd learner was not in sync in time; retrying after the other joins"
    );
    Ok(())
}

/// Writes the intent to replace a damaged member. The next step removes the member, if it is still damaged then.
async fn replace(
    core: &Core,
    leadership: &Leadership,
    node: NodeId,
    member: MemberId,
) -> Result<(), StepError> {
    let departure = departure::authorize(core, node).await;
    let Some(departure) = departure.map_err(StepError::Departure)? else {
        return Ok(());
    };
    let intent = Intent {
        node,
        wanted: Wanted::Join { member: None },
        attempts: 0,
        replaces: Some(member.0),
    };
    let lease = core.client.grant(core.timing.replacement).await?;
    let key = state::intent_key(node);
    let led = led(leadership)
        .and(Condition::Absent(state::REPLACED.to_owned()))
        .and(Condition::Absent(key.clone()))
        .put(key, intent.encode())
        .put_leased(state::REPLACED, node.to_string().into_bytes(), lease);
    let written = write(core, "replace a damaged member", departure.add_to(led)).await;
    if let Err(error) = written {
        // Otherwise it would only expire.
        let _ = core.client.revoke(lease).await;
        return Err(error);
    }
    tracing::warn!(%node, %member, "the data of an etcd member are damaged: replacing it");
    Ok(())
}

/// Removes the role and the intent of a node that is not a member any more.
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
            // Without this key the node's data cannot be unlocked any more.
            stored.cluster_unlock_key.zeroize();
            stored.certificate.clear();
        }
    })
    .await?;
    write(core, "remove the role", led).await?;
    tracing::info!(%node, decommission, "node left etcd cluster");
    Ok(())
}

/// Hands over the leadership; the caller has checked that there is another candidate. This node's
/// own member is to leave, and a leader cannot complete that itself.
async fn hand_over(core: &Core, leadership: &Leadership) -> Result<(), StepError> {
    let led = led(leadership).delete(leadership.key.clone());
    write(core, "hand over the leadership", led).await?;
    tracing::info!("this node is leaving etcd; handed over the leadership");
    Ok(())
}
