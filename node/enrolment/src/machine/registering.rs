//! How a machine registers with a cluster.
//!
//! ```text
//!  Asking:    Save ─► Ask ─► (the answer)
//!  Entering:  Save ─► Initialise ─► MakeFileSystem ─► MarkReady ─► Mount
//!               ─► AwaitApproval ⟲ ─► Commit ─► SavingCredentials ─► SavingMember
//! ```
//!
//! Until the cluster has answered, nothing is created on the data partition, and other parameters
//! may start a new enrolment. After that, new parameters may only change the register ticket, the
//! curators to ask and the labels.
//!
//! If the cluster refuses the ticket of a node that it may have approved already, the node tries to
//! commit all the same: the ticket gives the right to register, and an approved node does not need
//! it any more. So a ticket that was rotated after a lost reply locks nobody out, and a node that
//! was deleted while it waited finds that out.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::v1::ClusterDirectory;
use hearth_host::storage::Volume;
use hearth_host::storage::header::{HeaderState, Phase};
use hearth_parameters::{Cluster, Register};

use super::{Done, Next, Pace, ParametersInput, State, misplaced, refusals};
use crate::sealed::{Answer, Asking, Registering};

/// Minimum interval between two requests, whatever interval a curator asks for.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum interval between two requests, whatever interval a curator asks for.
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// A cluster's reply to a registration.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The identity and settings for the node.
    pub answer: Answer,
    /// Whether the node may commit.
    pub approval: Approval,
    /// Addresses of curators.
    pub directory: ClusterDirectory,
}

/// Whether an operator has approved the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Approval {
    /// Not yet.
    Waits {
        /// When the curator wants the next request.
        ask_again: Duration,
    },
    /// It may commit, or has committed.
    Given,
}

/// Step of a registration without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskingStep {
    /// Save the REGISTERING configuration.
    Save,
    /// Register for the first time.
    Ask,
}

/// A registration with the cluster's answer.
#[derive(Clone, Debug)]
pub struct AnsweredRegistration {
    registering: Arc<Registering>,
    answer: Answer,
}

impl AnsweredRegistration {
    /// The registration, if it has an answer.
    pub fn of(registering: Arc<Registering>) -> Option<Self> {
        let answer = registering.answer.clone()?;
        Some(Self {
            registering,
            answer,
        })
    }

    /// The keys of the registration, and how to ask.
    pub fn registering(&self) -> &Arc<Registering> {
        &self.registering
    }

    /// The cluster's answer.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// The data partition with the settings in the answer.
    pub fn volume(&self) -> Volume {
        self.registering.volume(&self.answer)
    }
}

/// Step of a registration with an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnteringStep {
    /// Save the REGISTERING configuration, with the answer.
    Save,
    /// Write the header in phase INITIALISING.
    Initialise,
    /// Create the file system.
    MakeFileSystem,
    /// Write the header in phase READY.
    MarkReady,
    /// Mount the data partition.
    Mount,
    /// Wait for an operator's approval.
    AwaitApproval {
        /// The cluster has told in this boot that the approval is pending.
        waits: bool,
    },
    /// Commit: the cluster stores the unlock key.
    Commit {
        /// The error with which the ticket was refused, if that is why the commit is tried.
        refused: Option<String>,
    },
}

/// The state in which a boot continues an interrupted registration.
pub(super) fn go_on(
    input: &ParametersInput,
    registering: Arc<Registering>,
    header: &HeaderState,
) -> State {
    let may_start_again = registering.answer.is_none() && *header == HeaderState::Blank;
    match renewed(input, &registering) {
        Renewal::Same => {}
        Renewal::Asking(renewed) => return State::Renewing(renewed),
        Renewal::OtherCluster if may_start_again => return State::begin(input),
        Renewal::OtherCluster => {}
    }
    let enrolment = registering.enrolment_id;
    let Some(entering) = AnsweredRegistration::of(registering.clone()) else {
        return match header {
            HeaderState::Blank => State::Asking(registering, AskingStep::Ask),
            header => State::Refused(refusals::mismatch(
                enrolment,
                "has started to register with a cluster",
                header,
            )),
        };
    };
    let owner = entering.volume().owner;
    match header {
        HeaderState::Header(found) if found.owner == owner && found.phase == Phase::Ready => {
            State::AnsweredRegistration(entering, EnteringStep::Mount)
        }
        HeaderState::Header(found) if found.owner != owner => refused_disk(&entering, header),
        HeaderState::Foreign(_) => refused_disk(&entering, header),
        // There are no valuable data on the disk before the node is a member.
        HeaderState::Header(_) | HeaderState::Blank | HeaderState::Unfinished => {
            State::AnsweredRegistration(entering, EnteringStep::Initialise)
        }
    }
}

fn refused_disk(entering: &AnsweredRegistration, header: &HeaderState) -> State {
    let owner = entering.volume().owner;
    State::Refused(refusals::mismatch(
        owner.enrolment_id,
        &format!("was registering as {owner}"),
        header,
    ))
}

/// The effect of this boot's parameters on a registration.
enum Renewal {
    /// None.
    Same,
    /// They change the ticket, the curators, the labels or the network.
    Asking(Arc<Registering>),
    /// They name another cluster.
    OtherCluster,
}

fn renewed(input: &ParametersInput, registering: &Registering) -> Renewal {
    let ParametersInput::Parameters(parameters) = input else {
        return Renewal::Same;
    };
    let Cluster::Register(register) = &parameters.cluster else {
        return Renewal::OtherCluster;
    };
    if register.ca != registering.cluster_ca {
        return Renewal::OtherCluster;
    }
    let asking = Asking::from(register);
    if asks_alike(&asking, &registering.asking) && parameters.network == registering.network {
        return Renewal::Same;
    }
    Renewal::Asking(Arc::new(Registering {
        asking,
        network: parameters.network.clone(),
        ..registering.clone()
    }))
}

/// The directory in the sealed configuration also has the curators that the cluster has named.
fn asks_alike(input: &Asking, sealed: &Asking) -> bool {
    let knows = |node| sealed.directory.nodes.contains(node);
    input.ticket == sealed.ticket
        && input.labels == sealed.labels
        && input.directory.nodes.iter().all(knows)
}

impl From<&Register> for Asking {
    fn from(register: &Register) -> Self {
        Self {
            directory: register.directory.clone(),
            ticket: register.ticket.clone(),
            labels: register.labels.clone(),
        }
    }
}

/// The state after a step without an answer.
pub(super) fn after_asking(
    registering: &Arc<Registering>,
    step: AskingStep,
    done: Done,
) -> Result<State, String> {
    match (step, done) {
        (AskingStep::Save, Done::Plain) => Ok(State::Asking(registering.clone(), AskingStep::Ask)),
        (AskingStep::Ask, Done::Answered(reply)) => Ok(answered(registering, &reply)),
        (_, done) => Err(misplaced(&done)),
    }
}

fn answered(registering: &Arc<Registering>, reply: &Reply) -> State {
    let mut asking = registering.asking.clone();
    for node in &reply.directory.nodes {
        if !asking.directory.nodes.contains(node) {
            asking.directory.nodes.push(node.clone());
        }
    }
    let registering = Registering {
        asking,
        answer: Some(reply.answer.clone()),
        ..Registering::clone(registering)
    };
    let entering = AnsweredRegistration {
        registering: Arc::new(registering),
        answer: reply.answer.clone(),
    };
    State::AnsweredRegistration(entering, EnteringStep::Save)
}

/// The state after a step with an answer.
pub(super) fn after_entering(
    entering: &AnsweredRegistration,
    step: &EnteringStep,
    done: Done,
) -> Result<Next, String> {
    let go = |step| {
        Ok(Next::Enter(State::AnsweredRegistration(
            entering.clone(),
            step,
        )))
    };
    match (step, done) {
        (EnteringStep::Save, Done::Plain) => go(EnteringStep::Initialise),
        (EnteringStep::Initialise, Done::Plain) => go(EnteringStep::MakeFileSystem),
        (EnteringStep::MakeFileSystem, Done::Plain) => go(EnteringStep::MarkReady),
        (EnteringStep::MarkReady, Done::Plain) => go(EnteringStep::Mount),
        (EnteringStep::Mount, Done::Plain) => go(EnteringStep::AwaitApproval { waits: false }),
        (EnteringStep::AwaitApproval { .. }, Done::Answered(reply)) => {
            Ok(approval(entering, &reply))
        }
        (EnteringStep::Commit { .. }, Done::Committed(committed)) => {
            if committed.credentials.ca != entering.registering.cluster_ca {
                return Ok(Next::Enter(State::Refused(
                    "internal error: the cluster has issued the certificate under another CA than \
                     it registered with"
                        .into(),
                )));
            }
            Ok(Next::Enter(State::SavingCredentials(
                entering.clone(),
                committed,
            )))
        }
        (_, done) => Err(misplaced(&done)),
    }
}

fn approval(entering: &AnsweredRegistration, reply: &Reply) -> Next {
    if reply.answer.cluster_id != entering.answer.cluster_id {
        return Next::Enter(State::Refused(format!(
            "this machine registered with cluster {}, but the curator now belongs to cluster {}",
            entering.answer.cluster_id, reply.answer.cluster_id
        )));
    }
    let at = |step| State::AnsweredRegistration(entering.clone(), step);
    match reply.approval {
        Approval::Given => Next::Enter(at(EnteringStep::Commit { refused: None })),
        Approval::Waits { ask_again } => Next::Pause(
            at(EnteringStep::AwaitApproval { waits: true }),
            Pace::After(ask_again.clamp(MIN_INTERVAL, MAX_INTERVAL)),
        ),
    }
}

/// What a node is waiting for that an operator has not approved.
pub(super) fn wants_approval(entering: &AnsweredRegistration) -> String {
    let key = entering.registering.node_key.public();
    format!(
        "approval by an operator of cluster {}. The public key of this node is {key}. Compare it, \
         then run: hearthctl node approve {key}",
        entering.answer.cluster_id
    )
}

/// A refusal during registration, with the way out.
pub(super) fn refused(registering: &Registering, reason: &str) -> State {
    State::Refused(format!(
        "{reason}. To register again with new keys, set wipe.enrolment_id = {} in the parameters",
        registering.enrolment_id
    ))
}
