//! What a boot does with what it finds.

use hearth_host::storage::header::Front;

use super::refusals::{how_to_give_up, orphaned};
use super::{Inspection, SealedFound, State, Told, founding, joining, registering};
use crate::sealed::{Sealed, Stored};

/// What a machine is to do that finds this on its disk.
pub(super) fn decide(told: &Told, inspection: Inspection) -> State {
    if let Some(wiping) = wipe(told, &inspection) {
        return wiping;
    }
    let Inspection { sealed, front } = inspection;
    match sealed {
        SealedFound::Stored(Stored::Sealed(sealed)) => match sealed {
            Sealed::Founding(founding) => founding::go_on(founding, &front),
            Sealed::Registering(registering) => registering::go_on(told, registering, &front),
            Sealed::Member(member) => joining::go_on(member, &front),
            // For ever, whatever the disk holds and the parameters say.
            Sealed::Disowned(disowned) => State::Disowning(disowned),
        },
        SealedFound::Stored(stored) => match front {
            Front::Blank => State::begin(told),
            front => State::Refused(orphaned(&stored, &front)),
        },
        SealedFound::Corrupt(why) => State::Refused(format!(
            "the sealed configuration on the ESP is damaged: {why}. {}",
            how_to_give_up(&front)
        )),
    }
}

/// A wipe token destroys what bears its enrolment ID. A damaged sealed
/// configuration bears none any more, and goes with the data partition that
/// does.
fn wipe(told: &Told, inspection: &Inspection) -> Option<State> {
    let Told::Parameters(parameters) = told else {
        return None;
    };
    let token = parameters.wipe?;
    let data = match (&inspection.front, &inspection.sealed) {
        (Front::Header(header), _) => header.owner.enrolment_id == token,
        // The beginning of a header bears no ID, and nothing stands behind it.
        // It goes with its sealed configuration, also if that went before.
        (Front::Unfinished, SealedFound::Stored(Stored::Sealed(sealed))) => {
            sealed.enrolment_id() == token
        }
        (Front::Unfinished, SealedFound::Stored(Stored::Absent | Stored::NeverCompleted)) => true,
        _ => false,
    };
    let sealed = match &inspection.sealed {
        SealedFound::Stored(Stored::Sealed(sealed)) => sealed.enrolment_id() == token,
        SealedFound::Stored(Stored::NeverCompleted) | SealedFound::Corrupt(_) => data,
        SealedFound::Stored(Stored::Absent) => false,
    };
    (sealed || data).then_some(State::Wiping { sealed, data })
}
