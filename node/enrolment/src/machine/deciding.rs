//! What a boot does with what it finds.

use hearth_host::storage::header::{Front, Phase};

use super::{Inspection, SealedFound, State, Told, founding, joining, registering};
use crate::EnrolmentId;
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
            Front::Blank => begin(told),
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

/// The first step of a life.
pub(super) fn begin(told: &Told) -> State {
    match told {
        Told::Nothing => State::Refused(
            "no parameters, from fw_cfg or on the ESP: this machine was never told which cluster \
             to found or to ask"
                .into(),
        ),
        Told::Unusable(why) => State::Refused(why.clone()),
        Told::Parameters(parameters) => State::AwaitingAddress(parameters.clone()),
    }
}

fn describe(front: &Front) -> String {
    match front {
        Front::Blank => "is blank".into(),
        Front::Unfinished => "holds the beginning of a header".into(),
        Front::Header(header) => {
            let phase = match header.phase {
                Phase::Initialising => "is being made",
                Phase::Ready => "is",
            };
            format!("{phase} that of {}", header.owner)
        }
        Front::Foreign(why) => format!("holds something else ({why})"),
    }
}

/// Why a machine that is somebody already does not go on with this disk.
pub(super) fn mismatch(enrolment: EnrolmentId, is: &str, front: &Front) -> String {
    format!(
        "this machine {is}, and its data partition {}. Attach the right disk, or give up this \
         machine's life by wipe.enrolment_id = {enrolment} in its parameters",
        describe(front)
    )
}

fn orphaned(stored: &Stored, front: &Front) -> String {
    let sealed = match stored {
        Stored::NeverCompleted => "only the beginning of a sealed configuration",
        _ => "no sealed configuration",
    };
    format!(
        "the ESP holds {sealed}, and the data partition {}. {}",
        describe(front),
        how_to_give_up(front)
    )
}

fn how_to_give_up(front: &Front) -> String {
    match front {
        Front::Header(header) => format!(
            "To give up what is on the disk, put wipe.enrolment_id = {} into the parameters",
            header.owner.enrolment_id
        ),
        _ => "To give up what is on the disk, write the image to it anew".into(),
    }
}
