//! How a member returns to its cluster, and how it ends.

use std::sync::Arc;

use hearth_api::v1::StorageSecurity;
use hearth_host::storage::header::{Front, Phase};

use super::{State, refusals};
use crate::sealed::{Disowned, Member};

/// Where a member goes on that a boot finds on its disk.
pub(super) fn go_on(member: Arc<Member>, front: &Front) -> State {
    let owner = member.identity.data_owner();
    match front {
        Front::Header(header) if header.owner == owner && header.phase == Phase::Ready => {}
        front => {
            return State::Refused(refusals::mismatch(
                owner.enrolment_id,
                &format!("is {owner}"),
                front,
            ));
        }
    }
    match (
        member.identity.storage_security,
        member.identity.volume(None),
    ) {
        (StorageSecurity::Insecure, Some(volume)) => State::Mounting {
            member,
            volume,
            directory: None,
        },
        _ => State::Unlocking(member),
    }
}

/// What is told about a node that its cluster has removed.
pub fn disowned(disowned: &Disowned) -> String {
    format!(
        "new parameters: cluster {} has removed this node, {}, for good, and its keys are wiped. \
         To begin anew put wipe.enrolment_id = {} into them",
        disowned.cluster_id, disowned.node_id, disowned.enrolment_id
    )
}
