//! The decision at boot, from what is on the disk.

use hearth_api::proofs::AfterRemoval;
use hearth_host::storage::header::HeaderState;

use super::refusals::{how_to_discard, locked, orphaned};
use super::{
    DiskState, ParametersInput, ResetStep, SealedState, State, founding, joining, registering,
};
use crate::sealed::{Sealed, Stored};

/// The first state for this disk.
pub(super) fn decide(input: &ParametersInput, inspection: DiskState) -> State {
    if let Some(wiping) = wipe(input, &inspection) {
        return wiping;
    }
    let DiskState { sealed, header } = inspection;
    match sealed {
        SealedState::Stored(Stored::Sealed(sealed)) => match sealed {
            Sealed::Founding(founding) => founding::go_on(founding, &header),
            Sealed::Registering(registering) => registering::go_on(input, registering, &header),
            Sealed::Member(member) => joining::go_on(member, &header),
            // Final, whatever is on the data partition and in the parameters.
            Sealed::Disowned(disowned) => match disowned.afterwards {
                AfterRemoval::Wait => State::Disowning(disowned),
                AfterRemoval::Reset => {
                    State::Resetting(disowned, ResetStep::after(&disowned, &header))
                }
            },
        },
        SealedState::Stored(stored) => match header {
            HeaderState::Blank => State::begin(input),
            header => State::Refused(orphaned(&stored, &header)),
        },
        SealedState::Locked { why, recovery } => {
            let reason = locked(&why, recovery.is_some(), &header);
            match recovery {
                Some(recovery) => State::Locked { reason, recovery },
                None => State::Refused(reason),
            }
        }
        SealedState::Corrupt(why) => State::Refused(format!(
            "the sealed configuration on the ESP is damaged: {why}. {}",
            how_to_discard(&header)
        )),
    }
}

/// A wipe token erases what has its enrolment ID. A damaged sealed configuration has no readable
/// ID, and is erased together with a data partition that has the ID; so is one that does not open.
fn wipe(input: &ParametersInput, inspection: &DiskState) -> Option<State> {
    let ParametersInput::Parameters(parameters) = input else {
        return None;
    };
    let token = parameters.wipe?;
    let data = match (&inspection.header, &inspection.sealed) {
        (HeaderState::Header(header), _) => header.owner.enrolment_id == token,
        // An unfinished header has no ID, and nothing was written after it. It is erased with its
        // sealed configuration, also if that was erased before.
        (HeaderState::Unfinished, SealedState::Stored(Stored::Sealed(sealed))) => {
            sealed.enrolment_id() == token
        }
        (HeaderState::Unfinished, SealedState::Stored(Stored::Absent | Stored::NeverCompleted)) => {
            true
        }
        _ => false,
    };
    let sealed = match &inspection.sealed {
        SealedState::Stored(Stored::Sealed(sealed)) => sealed.enrolment_id() == token,
        SealedState::Stored(Stored::NeverCompleted)
        | SealedState::Corrupt(_)
        | SealedState::Locked { .. } => data,
        SealedState::Stored(Stored::Absent) => false,
    };
    (sealed || data).then_some(State::Wiping { sealed, data })
}
