//! How a founding goes on.

use std::sync::Arc;

use hearth_host::storage::header::{Front, Phase};

use super::{Done, State, misplaced, refusals};
use crate::sealed::Founding;

/// How far a founding is: the work that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FoundingStep {
    /// The FOUNDING configuration, without a CA.
    Save,
    /// Header INITIALISING.
    Initialise,
    /// File system.
    MakeFileSystem,
    /// Header READY.
    MarkReady,
    /// Mounted.
    Mount,
    /// Both authorities.
    MakeAuthorities,
    /// The FOUNDING configuration, with the CA.
    SaveAuthority,
    /// The founding transaction.
    AwaitFounded,
}

/// Where a founding goes on that a boot finds on its disk.
pub(super) fn go_on(founding: Arc<Founding>, front: &Front) -> State {
    let owner = founding.identity.data_owner();
    let step = match front {
        Front::Header(header) if header.owner != owner => None,
        Front::Header(header) if header.phase == Phase::Ready => Some(FoundingStep::Mount),
        Front::Foreign(_) => None,
        // The CA becomes known after READY is durable: this is not the disk
        // on which the authorities are.
        Front::Header(_) | Front::Blank | Front::Unfinished if founding.cluster_ca.is_some() => {
            None
        }
        Front::Header(_) | Front::Blank | Front::Unfinished => Some(FoundingStep::Initialise),
    };
    match step {
        Some(step) => State::Founding(founding, step),
        None => State::Refused(refusals::mismatch(
            owner.enrolment_id,
            &format!("was founding {owner}"),
            front,
        )),
    }
}

/// The state after this step.
pub(super) fn after(
    founding: &Arc<Founding>,
    step: FoundingStep,
    done: Done,
) -> Result<State, String> {
    let go = |step| Ok(State::Founding(founding.clone(), step));
    match (step, done) {
        (FoundingStep::Save, Done::Plain) => go(FoundingStep::Initialise),
        (FoundingStep::Initialise, Done::Plain) => go(FoundingStep::MakeFileSystem),
        (FoundingStep::MakeFileSystem, Done::Plain) => go(FoundingStep::MarkReady),
        (FoundingStep::MarkReady, Done::Plain) => go(FoundingStep::Mount),
        // Once the CA is known the authorities have been made, and the
        // control plane may have taken their keys off the disk.
        (FoundingStep::Mount, Done::Plain) if founding.cluster_ca.is_some() => {
            go(FoundingStep::AwaitFounded)
        }
        (FoundingStep::Mount, Done::Plain) => go(FoundingStep::MakeAuthorities),
        (FoundingStep::MakeAuthorities, Done::Authority(ca)) => {
            let founding = Founding {
                cluster_ca: Some(ca),
                ..Founding::clone(founding)
            };
            Ok(State::Founding(
                Arc::new(founding),
                FoundingStep::SaveAuthority,
            ))
        }
        (FoundingStep::SaveAuthority, Done::Plain) => go(FoundingStep::AwaitFounded),
        (FoundingStep::AwaitFounded, Done::Credentials(credentials)) => {
            if founding.cluster_ca.as_ref() != Some(&credentials.ca) {
                return Ok(State::Refused(
                    "the founding ended with another CA than it began with: this is a bug".into(),
                ));
            }
            let member = founding.into_member(credentials.ca.clone());
            Ok(State::SavingMember(Arc::new(member), credentials, None))
        }
        (_, done) => Err(misplaced(&done)),
    }
}
