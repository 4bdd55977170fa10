//! Changes of a node's roles, and decommissioning.
//!
//! The role of a consensus member follows etcd's membership: these decisions write an *intent*,
//! which the leader executes. An intent that the leader has not begun to execute can be withdrawn;
//! one that it may have begun is completed first.

use hearth_api::v1::NodeState;
use hearth_api::v1::node_roles::{KubernetesController, KubernetesWorker};
use hearth_consensus::fenced::Write;

use super::transitions::{Step, after, check_up};
use super::{FoundNode, Rejection, put};
use crate::state::{self, Intent, Wanted};

/// A requested change of roles. `Some(true)` adds a role, `Some(false)` removes it, `None` leaves
/// it as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleChange {
    /// The role of a consensus member.
    pub consensus_member: Option<bool>,
    /// The role of a Kubernetes controller.
    pub kubernetes_controller: Option<bool>,
    /// The role of a Kubernetes worker.
    pub kubernetes_worker: Option<bool>,
}

/// The decision.
pub struct RoleDecision {
    /// The write; `None` if nothing changes.
    pub write: Option<Write>,
    /// The change is complete only after a change of etcd's members.
    pub pending: bool,
    /// The write makes the node leave etcd, so its departure has to be authorized.
    pub leaves: bool,
}

impl RoleDecision {
    const fn as_it_is(pending: bool) -> Self {
        Self {
            write: None,
            pending,
            leaves: false,
        }
    }
}

/// Decides about roles. If a part of the change is rejected, all of it is.
pub fn update(change: RoleChange, found: &FoundNode) -> Result<RoleDecision, Rejection> {
    let node = &found.full.content.node;
    let gives = [
        change.consensus_member,
        change.kubernetes_controller,
        change.kubernetes_worker,
    ];
    check_up(node)?;
    if node.decommissioning && (change.consensus_member.is_some() || gives.contains(&Some(true))) {
        return Err(Rejection::Decommissioning(node.id));
    }
    let mut full = found.full.content.clone();
    let roles = &mut full.node.roles;
    if let Some(held) = change.kubernetes_controller {
        roles.kubernetes_controller = held.then_some(KubernetesController {});
    }
    if let Some(held) = change.kubernetes_worker {
        roles.kubernetes_worker = held.then_some(KubernetesWorker {});
    }
    if roles.kubernetes_controller.is_some() {
        if change.consensus_member == Some(false) {
            return Err(Rejection::ControllerStill(node.id));
        }
        if change.kubernetes_controller == Some(true) && !stays_member(change, found) {
            return Err(Rejection::ControllerAlone(node.id));
        }
    }
    let consensus = match change.consensus_member {
        Some(true) => join(found)?,
        Some(false) => leave(found),
        None => RoleDecision::as_it_is(false),
    };
    if full.node.roles == node.roles {
        return Ok(consensus);
    }
    let write = consensus.write.unwrap_or_else(|| found.all_unchanged());
    Ok(RoleDecision {
        write: Some(put(write, &full)),
        ..consensus
    })
}

/// Whether the node is a consensus member after the change, or is about to become one. An API
/// server runs only on a consensus member.
fn stays_member(change: RoleChange, found: &FoundNode) -> bool {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    match found.intent.as_ref().map(|intent| intent.content.wanted) {
        Some(Wanted::Leave { .. }) => false,
        Some(Wanted::Join { .. }) => true,
        None => is_member || change.consensus_member == Some(true),
    }
}

fn join(found: &FoundNode) -> Result<RoleDecision, Rejection> {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    match found.intent.as_ref().map(|intent| intent.content.wanted) {
        // The leader may remove the member, and then its role, at any moment.
        Some(Wanted::Leave { .. }) => Err(Rejection::Leaving(found.id())),
        Some(Wanted::Join { .. }) => Ok(RoleDecision::as_it_is(true)),
        None if is_member => Ok(RoleDecision::as_it_is(false)),
        None => Ok(RoleDecision {
            write: Some(want(found, Wanted::Join { member: None })),
            pending: true,
            leaves: false,
        }),
    }
}

fn leave(found: &FoundNode) -> RoleDecision {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    match (is_member, wanted) {
        (_, Some(Wanted::Leave { .. })) => RoleDecision::as_it_is(true),
        (false, None) => RoleDecision::as_it_is(false),
        // No member has been added for it, or one that is not recorded yet: the leader removes
        // members without a record.
        (false, Some(Wanted::Join { member: None })) => RoleDecision {
            write: Some(found.all_unchanged().delete(state::intent_key(found.id()))),
            pending: false,
            leaves: false,
        },
        (true, _) | (false, Some(Wanted::Join { member: Some(_) })) => {
            let wanted = Wanted::Leave {
                decommission: false,
            };
            RoleDecision {
                write: Some(want(found, wanted)),
                pending: true,
                leaves: true,
            }
        }
    }
}

/// Decides about decommissioning.
pub fn decommission(found: &FoundNode) -> Result<RoleDecision, Rejection> {
    let mut full = found.full.content.clone();
    let node = &full.node;
    if node.state == NodeState::Decommissioned {
        return Ok(RoleDecision::as_it_is(false));
    }
    after(node.id, node.state, Step::Decommission)?;
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    if node.decommissioning && wanted == Some(Wanted::Leave { decommission: true }) {
        return Ok(RoleDecision::as_it_is(true));
    }
    let is_member = node.roles.consensus_member.is_some();
    if !is_member && matches!(wanted, None | Some(Wanted::Join { member: None })) {
        full.decommission();
        let mut write = put(found.all_unchanged(), &full);
        if wanted.is_some() {
            write = write.delete(state::intent_key(found.id()));
        }
        return Ok(RoleDecision {
            write: Some(write),
            pending: false,
            leaves: false,
        });
    }
    full.node.decommissioning = true;
    full.node.roles.kubernetes_controller = None;
    full.node.roles.kubernetes_worker = None;
    let write = want(found, Wanted::Leave { decommission: true });
    Ok(RoleDecision {
        write: Some(put(write, &full)),
        pending: true,
        // If it is already leaving, its departure has been authorized.
        leaves: !matches!(wanted, Some(Wanted::Leave { .. })),
    })
}

/// Writes an intent, replacing an earlier one.
fn want(found: &FoundNode, wanted: Wanted) -> Write {
    let intent = Intent {
        node: found.id(),
        wanted,
        attempts: 0,
        replaces: None,
    };
    found
        .all_unchanged()
        .put(state::intent_key(found.id()), intent.encode())
}
