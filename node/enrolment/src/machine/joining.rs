//! How a member rejoins its cluster, and what becomes of it after its removal.

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

/// How far a reset is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetStep {
    /// Destroys what is on the data partition.
    Data,
    /// Erases the sealed configuration.
    Sealed,
    /// Nothing is left: restarts.
    Restart,
}

impl ResetStep {
    /// What a reset has not done yet. A data partition of others stays.
    pub(super) fn after(disowned: &Disowned, header: &HeaderState) -> Self {
        match header {
            HeaderState::Header(header) if header.owner == disowned.data_owner() => Self::Data,
            HeaderState::Unfinished => Self::Data,
            HeaderState::Header(_) | HeaderState::Blank | HeaderState::Foreign(_) => Self::Sealed,
        }
    }

    pub(super) const fn next(self) -> Self {
        match self {
            Self::Data => Self::Sealed,
            Self::Sealed | Self::Restart => Self::Restart,
        }
    }
}

/// What a removed node is waiting for, and what an operator can do.
pub fn disowned(disowned: &Disowned) -> String {
    format!(
        "new parameters: cluster {} has removed this node ({}) permanently, and its keys are \
         wiped. To enrol the machine again, set wipe.enrolment_id = {} in the parameters",
        disowned.cluster_id, disowned.node_id, disowned.enrolment_id
    )
}
