//! The reasons why a machine does not continue with a disk, and what an operator can do.

use hearth_host::storage::header::{HeaderState, Phase};

use crate::EnrolmentId;
use crate::sealed::Stored;

fn describe(header: &HeaderState) -> String {
    match header {
        HeaderState::Blank => "is blank".into(),
        HeaderState::Unfinished => "has an incomplete header".into(),
        HeaderState::Header(header) => {
            let phase = match header.phase {
                Phase::Initialising => "is being initialised for",
                Phase::Ready => "belongs to",
            };
            format!("{phase} {}", header.owner)
        }
        HeaderState::Foreign(why) => format!("has unknown content ({why})"),
    }
}

/// Why a machine that has an enrolment does not continue with this data partition.
pub(super) fn mismatch(enrolment: EnrolmentId, is: &str, header: &HeaderState) -> String {
    format!(
        "this machine {is}, but its data partition {}. Attach the right disk, or wipe the \
         enrolment with wipe.enrolment_id = {enrolment} in the parameters",
        describe(header)
    )
}

/// Why a machine without an enrolment does not start one on a disk that is not blank.
pub(super) fn orphaned(stored: &Stored, header: &HeaderState) -> String {
    let sealed = match stored {
        Stored::NeverCompleted => "an incomplete sealed configuration",
        _ => "no sealed configuration",
    };
    format!(
        "the ESP has {sealed}, but the data partition {}. {}",
        describe(header),
        how_to_discard(header)
    )
}

/// Why a machine does not continue whose TPM does not release its keys.
pub(super) fn locked(why: &str, recoverable: bool, header: &HeaderState) -> String {
    let or_recover = match recoverable {
        true => ", or open it at its console with the recovery key",
        false => "",
    };
    format!(
        "{why}. Nothing was changed. Restore what the keys were sealed to (this disk in its own machine, with the \
         Secure Boot settings and an image of the same builder as before) and restart it{or_recover}. {}",
        how_to_discard(header)
    )
}

/// How an operator can discard the content of the disk.
pub(super) fn how_to_discard(header: &HeaderState) -> String {
    match header {
        HeaderState::Header(header) => format!(
            "To discard the content of the disk, set wipe.enrolment_id = {} in the parameters",
            header.owner.enrolment_id
        ),
        _ => "To discard the content of the disk, write the image to the disk again".into(),
    }
}
