//! What a node shall run, and the way out of service.
//!
//! The role of a consensus member follows etcd's membership: what is written
//! here is what is *wanted*, and the leader makes it so. A wish that has not
//! been acted upon can be taken back; one that may have been is seen through.

use hearth_api::v1::NodeState;
use hearth_api::v1::node_roles::{KubernetesController, KubernetesWorker};
use hearth_consensus::fenced::Write;

use super::{
    FoundNode, Refused, put,
    standing::{Step, after, wants_up},
};
use crate::state::{self, Intent, Wanted};

/// What an operator wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// `None`: as it is.
    pub consensus_member: Option<bool>,
    /// The same.
    pub kubernetes_controller: Option<bool>,
    /// The same.
    pub kubernetes_worker: Option<bool>,
}

/// What comes of it.
pub struct Outcome {
    /// To be written; nothing if it is so already.
    pub write: Option<Write>,
    /// Consensus has to change first.
    pub pending: bool,
    /// The write makes the node leave consensus: it must be able to.
    pub leaves: bool,
}

impl Outcome {
    const fn as_it_is(pending: bool) -> Self {
        Self {
            write: None,
            pending,
            leaves: false,
        }
    }
}

/// Decides about roles. Of a wish that cannot be granted whole nothing is done.
pub fn update(wish: Wish, found: &FoundNode) -> Result<Outcome, Refused> {
    let node = &found.full.content.node;
    let gives = [
        wish.consensus_member,
        wish.kubernetes_controller,
        wish.kubernetes_worker,
    ];
    wants_up(node)?;
    if node.decommissioning && (wish.consensus_member.is_some() || gives.contains(&Some(true))) {
        return Err(Refused::Decommissioning(node.id));
    }
    let mut full = found.full.content.clone();
    let roles = &mut full.node.roles;
    if let Some(held) = wish.kubernetes_controller {
        roles.kubernetes_controller = held.then_some(KubernetesController {});
    }
    if let Some(held) = wish.kubernetes_worker {
        roles.kubernetes_worker = held.then_some(KubernetesWorker {});
    }
    if roles.kubernetes_controller.is_some() {
        if wish.consensus_member == Some(false) {
            return Err(Refused::ControllerStill(node.id));
        }
        if wish.kubernetes_controller == Some(true) && !stays_member(wish, found) {
            return Err(Refused::ControllerAlone(node.id));
        }
    }
    let consensus = match wish.consensus_member {
        Some(true) => join(found)?,
        Some(false) => leave(found),
        None => Outcome::as_it_is(false),
    };
    if full.node.roles == node.roles {
        return Ok(consensus);
    }
    let write = consensus.write.unwrap_or_else(|| found.all_unchanged());
    Ok(Outcome {
        write: Some(put(write, &full)),
        ..consensus
    })
}

/// Whether the node is a consensus member, or is about to become one, once the
/// wish is granted. An API server is of use nowhere else.
fn stays_member(wish: Wish, found: &FoundNode) -> bool {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    match found.intent.as_ref().map(|intent| intent.content.wanted) {
        Some(Wanted::Leave { .. }) => false,
        Some(Wanted::Join { .. }) => true,
        None => is_member || wish.consensus_member == Some(true),
    }
}

fn join(found: &FoundNode) -> Result<Outcome, Refused> {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    match found.intent.as_ref().map(|intent| intent.content.wanted) {
        // The member may be gone any moment, and its role with it.
        Some(Wanted::Leave { .. }) => Err(Refused::Leaving(found.id())),
        Some(Wanted::Join { .. }) => Ok(Outcome::as_it_is(true)),
        None if is_member => Ok(Outcome::as_it_is(false)),
        None => Ok(Outcome {
            write: Some(want(found, Wanted::Join { member: None })),
            pending: true,
            leaves: false,
        }),
    }
}

fn leave(found: &FoundNode) -> Outcome {
    let is_member = found.full.content.node.roles.consensus_member.is_some();
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    match (is_member, wanted) {
        (_, Some(Wanted::Leave { .. })) => Outcome::as_it_is(true),
        (false, None) => Outcome::as_it_is(false),
        // Nobody has been added for it, or nobody that this record would let
        // stay: the leader removes members for which no record stands.
        (false, Some(Wanted::Join { member: None })) => Outcome {
            write: Some(found.all_unchanged().delete(state::intent_key(found.id()))),
            pending: false,
            leaves: false,
        },
        (true, _) | (false, Some(Wanted::Join { member: Some(_) })) => {
            let wanted = Wanted::Leave {
                decommission: false,
            };
            Outcome {
                write: Some(want(found, wanted)),
                pending: true,
                leaves: true,
            }
        }
    }
}

/// Decides about the way out of service.
pub fn decommission(found: &FoundNode) -> Result<Outcome, Refused> {
    let mut full = found.full.content.clone();
    let node = &full.node;
    if node.state == NodeState::Decommissioned {
        return Ok(Outcome::as_it_is(false));
    }
    after(node.id, node.state, Step::Decommission)?;
    let wanted = found.intent.as_ref().map(|intent| intent.content.wanted);
    if node.decommissioning && wanted == Some(Wanted::Leave { decommission: true }) {
        return Ok(Outcome::as_it_is(true));
    }
    let is_member = node.roles.consensus_member.is_some();
    if !is_member && matches!(wanted, None | Some(Wanted::Join { member: None })) {
        full.decommission();
        let mut write = put(found.all_unchanged(), &full);
        if wanted.is_some() {
            write = write.delete(state::intent_key(found.id()));
        }
        return Ok(Outcome {
            write: Some(write),
            pending: false,
            leaves: false,
        });
    }
    full.node.decommissioning = true;
    full.node.roles.kubernetes_controller = None;
    full.node.roles.kubernetes_worker = None;
    let write = want(found, Wanted::Leave { decommission: true });
    Ok(Outcome {
        write: Some(put(write, &full)),
        pending: true,
        // On its way out already, it was found able to leave.
        leaves: !matches!(wanted, Some(Wanted::Leave { .. })),
    })
}

/// Writes down what is wanted, in place of what was.
fn want(found: &FoundNode, wanted: Wanted) -> Write {
    let intent = Intent {
        node: found.id(),
        wanted,
        attempts: 0,
    };
    found
        .all_unchanged()
        .put(state::intent_key(found.id()), intent.encode())
}
