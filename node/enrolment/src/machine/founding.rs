//! The steps of a bootstrap.

use std::sync::Arc;

use hearth_host::storage::header::{HeaderState, Phase};

use super::{Done, State, misplaced, refusals};
use crate::sealed::Founding;

/// Step of a bootstrap: the work in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FoundingStep {
    /// Save the FOUNDING configuration, without a CA.
    Save,
    /// Write the header in phase INITIALISING.
    Initialise,
    /// Create the file system.
    MakeFileSystem,
    /// Write the header in phase READY.
    MarkReady,
    /// Mount the data partition.
    Mount,
    /// Create the certificate authorities of the cluster and of etcd.
    MakeAuthorities,
    /// Save the FOUNDING configuration, with the CA.
    SaveAuthority,
    /// Wait for the transaction that creates the cluster.
    AwaitFounded,
}

/// The state in which a boot continues an interrupted bootstrap.
pub(super) fn go_on(founding: Arc<Founding>, header: &HeaderState) -> State {
    let owner = founding.identity.data_owner();
    let step = match header {
        HeaderState::Header(header) if header.owner != owner => None,
        HeaderState::Header(header) if header.phase == Phase::Ready => Some(FoundingStep::Mount),
        HeaderState::Foreign(_) => None,
        // The CA is saved after READY is durable, so this is not the disk with the authorities.
        HeaderState::Header(_) | HeaderState::Blank | HeaderState::Unfinished
            if founding.cluster_ca.is_some() =>
        {
            None
        }
        HeaderState::Header(_) | HeaderState::Blank | HeaderState::Unfinished => {
            Some(FoundingStep::Initialise)
        }
    };
    match step {
        Some(step) => State::Founding(founding, step),
        None => State::Refused(refusals::mismatch(
            owner.enrolment_id,
            &format!("was bootstrapping {owner}"),
            header,
        )),
    }
}

/// The state after a step.
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
        // If the CA is known, the authorities exist, and the control plane may have removed their
        // keys from the disk.
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
                    "internal error: bootstrap ended with another CA than it started with".into(),
                ));
            }
            let member = founding.into_member(credentials.ca.clone());
            Ok(State::SavingMember(Arc::new(member), credentials, None))
        }
        (_, done) => Err(misplaced(&done)),
    }
}
