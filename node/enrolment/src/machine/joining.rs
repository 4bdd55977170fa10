//! How a member rejoins its cluster, and what is shown after its removal.

use std::sync::Arc;

use hearth_host::storage::header::{HeaderState, Phase};

use super::{State, refusals};
use crate::sealed::{Disowned, Member};

/// The state in which a boot continues as a member.
pub(super) fn go_on(member: Arc<Member>, header: &HeaderState) -> State {
    let owner = member.identity.data_owner();
    match header {
        HeaderState::Header(header) if header.owner == owner && header.phase == Phase::Ready => {}
        header => {
            return State::Refused(refusals::mismatch(
                owner.enrolment_id,
                &format!("is {owner}"),
                header,
            ));
        }
    }
    match member.identity.volume(member.cluster_unlock_key.as_ref()) {
        Some(volume) => State::Mounting {
            member,
            volume,
            directory: None,
        },
        None => unlocking(member, None),
    }
}

/// Asks the cluster for the key. `waits` is why it has not returned it yet, by its last answer.
pub(super) fn unlocking(member: Arc<Member>, waits: Option<String>) -> State {
    State::Unlocking { member, waits }
}

/// What a removed node is waiting for, and what an operator can do.
pub fn disowned(disowned: &Disowned) -> String {
    format!(
        "new parameters: cluster {} has removed this node ({}) permanently, and its keys are \
         wiped. To enrol the machine again, set wipe.enrolment_id = {} in the parameters",
        disowned.cluster_id, disowned.node_id, disowned.enrolment_id
    )
}
