//! How a machine asks a cluster to take it in.
//!
//! ```text
//!  Asking:    Save ─► Ask ─► (the answer)
//!  Entering:  Save ─► Initialise ─► MakeFileSystem ─► MarkReady ─► Mount
//!               ─► AwaitApproval ⟲ ─► Commit ─► SavingCredentials ─► SavingMember
//! ```
//!
//! Until the cluster has answered, nothing is made, and other parameters may
//! begin another life. From then on only how it asks may change: the ticket,
//! whom, the labels.
//!
//! A cluster that refuses the ticket of a node it may have approved already is
//! asked to take the commit all the same: the ticket is the right to ask, and
//! a node that is approved needs it no more. So a ticket that was rotated
//! after a reply was lost keeps nobody out, and a node that was deleted while
//! it waited finds out that it was.

use std::{sync::Arc, time::Duration};

use hearth_api::v1::{ClusterDirectory, TpmUsage};
use hearth_host::parameters::{Cluster, Register};
use hearth_host::storage::Volume;
use hearth_host::storage::header::{Front, Phase};

use super::{Done, Next, Pace, State, Told, misplaced, refusals};
use crate::sealed::{Answer, Asking, Registering};

/// Whatever a curator says, a node asks no more often …
const OFTENEST: Duration = Duration::from_millis(200);
/// … and no less often than so.
const RAREST: Duration = Duration::from_secs(60);

/// What a cluster says to a machine that asks.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// What it is to become.
    pub answer: Answer,
    /// Whether it may commit.
    pub approval: Approval,
    /// Curators.
    pub directory: ClusterDirectory,
}

/// Whether an operator has approved the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Approval {
    /// Not yet.
    Waits {
        /// When the cluster wants to be asked again.
        ask_again: Duration,
    },
    /// It may commit, or has.
    Given,
}

/// How far a machine is that has no answer yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskingStep {
    /// The REGISTERING configuration.
    Save,
    /// The first call.
    Ask,
}

/// A registration with the cluster's answer.
#[derive(Clone, Debug)]
pub struct Entering {
    registering: Arc<Registering>,
    answer: Answer,
}

impl Entering {
    /// If it is answered.
    pub fn of(registering: Arc<Registering>) -> Option<Self> {
        let answer = registering.answer.clone()?;
        Some(Self {
            registering,
            answer,
        })
    }

    /// What makes it the same node when it asks again.
    pub fn registering(&self) -> &Arc<Registering> {
        &self.registering
    }

    /// What the cluster said.
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// The data partition that the cluster asked for.
    pub fn volume(&self) -> Volume {
        self.registering.volume(&self.answer)
    }
}

/// How far a machine is that has the cluster's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnteringStep {
    /// The REGISTERING configuration, with the answer.
    Save,
    /// Header INITIALISING.
    Initialise,
    /// File system.
    MakeFileSystem,
    /// Header READY.
    MarkReady,
    /// Mounted.
    Mount,
    /// An operator's approval.
    AwaitApproval {
        /// The cluster has said in this boot that there is none yet.
        waits: bool,
    },
    /// The cluster keeps the unlock key.
    Commit {
        /// Tried because the ticket was refused, with these words.
        refused: Option<String>,
    },
}

/// Where a registration goes on that a boot finds on its disk.
pub(super) fn go_on(told: &Told, registering: Arc<Registering>, front: &Front) -> State {
    let begun_anew = registering.answer.is_none() && *front == Front::Blank;
    match renewed(told, &registering) {
        Renewal::Same => {}
        Renewal::Asking(renewed) => return State::Renewing(renewed),
        Renewal::OtherCluster if begun_anew => return State::begin(told),
        Renewal::OtherCluster => {}
    }
    let enrolment = registering.enrolment_id;
    let Some(entering) = Entering::of(registering.clone()) else {
        return match front {
            Front::Blank => State::Asking(registering, AskingStep::Ask),
            front => State::Refused(refusals::mismatch(
                enrolment,
                "has only begun to register with a cluster",
                front,
            )),
        };
    };
    let owner = entering.volume().owner;
    match front {
        Front::Header(header) if header.owner == owner && header.phase == Phase::Ready => {
            State::Entering(entering, EnteringStep::Mount)
        }
        Front::Header(header) if header.owner != owner => refused_disk(&entering, front),
        Front::Foreign(_) => refused_disk(&entering, front),
        // Nothing of value is on the disk before the node is a member.
        Front::Header(_) | Front::Blank | Front::Unfinished => {
            State::Entering(entering, EnteringStep::Initialise)
        }
    }
}

fn refused_disk(entering: &Entering, front: &Front) -> State {
    let owner = entering.volume().owner;
    State::Refused(refusals::mismatch(
        owner.enrolment_id,
        &format!("was becoming {owner}"),
        front,
    ))
}

/// What the parameters of this boot make of a registration.
enum Renewal {
    /// Nothing.
    Same,
    /// It asks in another way.
    Asking(Arc<Registering>),
    /// They name another cluster.
    OtherCluster,
}

fn renewed(told: &Told, registering: &Registering) -> Renewal {
    let Told::Parameters(parameters) = told else {
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

/// The directory in the sealed configuration has grown by what the cluster
/// said.
fn asks_alike(told: &Asking, sealed: &Asking) -> bool {
    let knows = |node| sealed.directory.nodes.contains(node);
    told.ticket == sealed.ticket
        && told.labels == sealed.labels
        && told.directory.nodes.iter().all(knows)
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
    if let Err(why) = can_do(&reply.answer) {
        return State::Refused(why);
    }
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
    let entering = Entering {
        registering: Arc::new(registering),
        answer: reply.answer.clone(),
    };
    State::Entering(entering, EnteringStep::Save)
}

/// Whether this release can be what the cluster asks for.
fn can_do(answer: &Answer) -> Result<(), String> {
    use hearth_api::v1::ColdStartPolicy;
    if answer.tpm_usage == TpmUsage::PresentAndUsed {
        return Err(
            "the cluster wants this node's keys sealed by its TPM, which this release \
                    cannot do yet"
                .into(),
        );
    }
    match answer.cold_start_policy {
        ColdStartPolicy::None => Ok(()),
        other => Err(format!(
            "the cluster's cold-start policy is {}, which this release cannot do yet",
            other.as_str_name()
        )),
    }
}

/// What follows a step with an answer.
pub(super) fn after_entering(
    entering: &Entering,
    step: &EnteringStep,
    done: Done,
) -> Result<Next, String> {
    let go = |step| Ok(Next::Enter(State::Entering(entering.clone(), step)));
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
                    "the cluster has committed this node under another CA than it registered \
                     with: this is a bug"
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

fn approval(entering: &Entering, reply: &Reply) -> Next {
    if reply.answer.cluster_id != entering.answer.cluster_id {
        return Next::Enter(State::Refused(format!(
            "the cluster was {} when this machine registered, and now is {}",
            entering.answer.cluster_id, reply.answer.cluster_id
        )));
    }
    let at = |step| State::Entering(entering.clone(), step);
    match reply.approval {
        Approval::Given => Next::Enter(at(EnteringStep::Commit { refused: None })),
        Approval::Waits { ask_again } => Next::Pause(
            at(EnteringStep::AwaitApproval { waits: true }),
            Pace::After(ask_again.clamp(OFTENEST, RAREST)),
        ),
    }
}

/// What is told while an operator has not approved the node.
pub(super) fn wants_approval(entering: &Entering) -> String {
    let key = entering.registering.node_key.public();
    format!(
        "approval by an operator of cluster {}. The public key of this node is {key}; compare it \
         and run: hearthctl node approve {key}",
        entering.answer.cluster_id
    )
}

/// A refusal in this phase, with the way out.
pub(super) fn refused(registering: &Registering, reason: &str) -> State {
    State::Refused(format!(
        "{reason}. To begin anew with other keys, put wipe.enrolment_id = {} into the parameters",
        registering.enrolment_id
    ))
}
