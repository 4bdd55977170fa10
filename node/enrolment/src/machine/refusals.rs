//! What is said of a disk with which a machine does not go on, and what an operator can do.

use hearth_host::storage::header::{Front, Phase};

use crate::EnrolmentId;
use crate::sealed::Stored;

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

/// Why a machine that is nobody does not begin with a disk that is not blank.
pub(super) fn orphaned(stored: &Stored, front: &Front) -> String {
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

/// What an operator can do who needs nothing of the disk.
pub(super) fn how_to_give_up(front: &Front) -> String {
    match front {
        Front::Header(header) => format!(
            "To give up what is on the disk, put wipe.enrolment_id = {} into the parameters",
            header.owner.enrolment_id
        ),
        _ => "To give up what is on the disk, write the image to it anew".into(),
    }
}
