//! The decisions of enrolment, and nothing else: no clock, no socket, no disk.
//!
//! [`Machine::step`] takes the machine and an event and gives the machine that
//! follows and what is to be done. At most one [`Work`] is under way at a
//! time, and which one follows from the state alone ([`State::work`]); so a
//! failed one is repeated by asking the state again, and a machine that was
//! lost in a power cut is replaced by a new one that looks at what was durable.
//!
//! ```text
//!             ┌──────── Wiping ◄─┐ (wipe token)
//!             ▼                  │
//!  start ─► Deciding ────────────┤
//!                                ├─► AwaitingAddress ─► MakingKeys ─┐
//!     Save ◄────────────────────────────────────────────────────────┘
//!      └─► Initialise ─► MakeFileSystem ─► MarkReady ─► Mount        (FOUNDING
//!             ▲              each of these may be where              goes on
//!             └────────────  a later boot goes on ─────┘             here)
//!     Mount ─► MakeAuthorities ─► SaveAuthority ─► AwaitFounded ─► SaveMember
//!                                                                     │
//!  Joining: Mount ─► LoadCredentials ─► HandingOver ◄─────────────────┘
//!                                            └─► Settled
//! ```
//!
//! # Invariants
//! - The data partition is made (Initialise, MakeFileSystem) only for a
//!   FOUNDING configuration that is durable and knows no CA, over a front that
//!   is blank, cut off in its first write, or INITIALISING for the same owner.
//! - What cannot be explained is refused: nothing is touched, and the reason
//!   says what was found and how to give it up.
//! - HOME is announced after the MEMBER configuration is durable.
//! - An event that does not answer the work under way changes nothing.

use std::{fmt, sync::Arc};

use hearth_api::{identity::NodeCredentials, v1::StorageSecurity};
use rustls_pki_types::CertificateDer;

use super::{
    EnrolmentId,
    sealed::{Founding, Member, Sealed, Stored},
};
use crate::{
    parameters::{Cluster, Parameters},
    storage::header::{Front, Phase},
};

/// What the machine was told before its first boot.
#[derive(Clone, Debug)]
pub enum Told {
    /// Something usable.
    Parameters(Arc<Parameters>),
    /// Something that cannot be used, and why.
    Unusable(String),
    /// Nothing.
    Nothing,
}

/// What is on the ESP.
#[derive(Clone, Debug)]
pub enum SealedFound {
    /// What could be read.
    Stored(Stored),
    /// Something is there that is no sealed configuration, and why.
    Corrupt(String),
}

/// What is on the disk.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// On the ESP.
    pub sealed: SealedFound,
    /// In front of the data partition.
    pub front: Front,
}

/// Tells answers to the work under way from late ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn(u64);

/// What has happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The work of this turn is done.
    Done(Turn, Done),
    /// The work of this turn failed.
    Failed(Turn, Failure),
    /// It is time to repeat the work of this turn.
    RetryDue(Turn),
}

/// What a work came to.
#[derive(Clone, Debug)]
pub enum Done {
    /// No more than that it is done; durable, if it writes.
    Plain,
    /// [`Work::Inspect`].
    Inspected(Box<Inspection>),
    /// [`Work::MakeKeys`].
    Keys(Arc<Founding>),
    /// [`Work::MakeAuthorities`]: the cluster's CA.
    Authority(CertificateDer<'static>),
    /// [`Work::AwaitFounded`] and [`Work::LoadCredentials`].
    Credentials(Arc<NodeCredentials>),
}

/// Why a work failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may succeed later.
    Again(String),
    /// It must not be tried again.
    Refuse(String),
}

/// Something to do. Each may be repeated after it was done, in part or whole.
#[derive(Clone, Debug)]
pub enum Work {
    /// Read the sealed configuration and the front of the data partition.
    Inspect,
    /// Give up what bears the enrolment ID that the parameters name, the
    /// sealed configuration first.
    Wipe {
        /// Remove the sealed configuration.
        sealed: bool,
        /// Make the front of the data partition blank.
        data: bool,
    },
    /// Wait until the node has an address.
    AwaitAddress,
    /// Make all that is random, for these parameters.
    MakeKeys(Arc<Parameters>),
    /// Make the sealed configuration durable.
    SaveSealed(Sealed),
    /// Write the header in phase INITIALISING.
    Initialise(Arc<Founding>),
    /// Make the file system.
    MakeFileSystem(Arc<Founding>),
    /// Write the header in phase READY.
    MarkReady(Arc<Founding>),
    /// Open and mount the data partition.
    MountFounding(Arc<Founding>),
    /// Make the certificate authorities on the data partition, or find them.
    MakeAuthorities(Arc<Founding>),
    /// Hand the founding to the control plane and wait until it is durable.
    AwaitFounded(Arc<Founding>),
    /// Open and mount the data partition. INSECURE only.
    MountMember(Arc<Member>),
    /// Read the credentials from the data partition.
    LoadCredentials(Arc<Member>),
    /// Hand the member to the role server.
    HandOver {
        /// Who it is.
        member: Arc<Member>,
        /// What it proves that with.
        credentials: Arc<NodeCredentials>,
        /// Whether it is home already (it has just founded), or will be when
        /// its cluster answers.
        home: bool,
    },
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inspect => "read what is on the disk",
            Self::Wipe { .. } => "wipe what the parameters name",
            Self::AwaitAddress => "get an address",
            Self::MakeKeys(_) => "make keys",
            Self::SaveSealed(_) => "save the sealed configuration",
            Self::Initialise(_) => "begin the data partition",
            Self::MakeFileSystem(_) => "make the file system",
            Self::MarkReady(_) => "complete the data partition",
            Self::MountFounding(_) | Self::MountMember(_) => "mount the data partition",
            Self::MakeAuthorities(_) => "make the certificate authorities",
            Self::AwaitFounded(_) => "found the cluster",
            Self::LoadCredentials(_) => "read the node's credentials",
            Self::HandOver { .. } => "hand over to the role server",
        })
    }
}

/// What the driver is to do.
#[derive(Clone, Debug)]
pub enum Action {
    /// Do this, and answer with [`Event::Done`] or [`Event::Failed`].
    Work(Turn, Work),
    /// Wait, longer each time in a row, and answer with [`Event::RetryDue`].
    BackOff(Turn),
    /// Let everyone know where enrolment stands.
    Show(Standing),
}

/// Where enrolment stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It works on this.
    Working(String),
    /// This failed for this reason and will be tried again.
    Retrying {
        /// What.
        work: String,
        /// Why.
        reason: String,
    },
    /// It cannot go on in this release, or not alone; nothing is wrong.
    Waiting(String),
    /// It will not go on by itself, and has touched nothing.
    Refused(String),
    /// The node is handed over to the role server.
    Settled,
}

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

/// Where the machine is.
#[derive(Clone, Debug)]
pub enum State {
    /// Looks at what is on the disk.
    Deciding,
    /// Gives up a former life.
    Wiping {
        /// On the ESP.
        sealed: bool,
        /// On the data partition.
        data: bool,
    },
    /// Will found a cluster.
    AwaitingAddress(Arc<Parameters>),
    /// Will found a cluster.
    MakingKeys(Arc<Parameters>),
    /// Founds a cluster.
    Founding(Arc<Founding>, FoundingStep),
    /// Has founded a cluster; saves the MEMBER configuration.
    SavingMember(Arc<Member>, Arc<NodeCredentials>),
    /// Returns to its cluster: mounts.
    Mounting(Arc<Member>),
    /// Returns to its cluster: reads its credentials.
    LoadingCredentials(Arc<Member>),
    /// Hands over.
    HandingOver {
        /// Who it is.
        member: Arc<Member>,
        /// What it proves that with.
        credentials: Arc<NodeCredentials>,
        /// As in [`Work::HandOver`].
        home: bool,
    },
    /// See [`Standing::Waiting`].
    Waiting(String),
    /// See [`Standing::Refused`].
    Refused(String),
    /// See [`Standing::Settled`].
    Settled,
}

impl State {
    /// The work that is under way in this state.
    pub fn work(&self) -> Option<Work> {
        Some(match self {
            Self::Deciding => Work::Inspect,
            Self::Wiping { sealed, data } => Work::Wipe {
                sealed: *sealed,
                data: *data,
            },
            Self::AwaitingAddress(_) => Work::AwaitAddress,
            Self::MakingKeys(parameters) => Work::MakeKeys(parameters.clone()),
            Self::Founding(founding, step) => {
                let founding = founding.clone();
                match step {
                    FoundingStep::Save | FoundingStep::SaveAuthority => {
                        Work::SaveSealed(Sealed::Founding(founding))
                    }
                    FoundingStep::Initialise => Work::Initialise(founding),
                    FoundingStep::MakeFileSystem => Work::MakeFileSystem(founding),
                    FoundingStep::MarkReady => Work::MarkReady(founding),
                    FoundingStep::Mount => Work::MountFounding(founding),
                    FoundingStep::MakeAuthorities => Work::MakeAuthorities(founding),
                    FoundingStep::AwaitFounded => Work::AwaitFounded(founding),
                }
            }
            Self::SavingMember(member, _) => Work::SaveSealed(Sealed::Member(member.clone())),
            Self::Mounting(member) => Work::MountMember(member.clone()),
            Self::LoadingCredentials(member) => Work::LoadCredentials(member.clone()),
            Self::HandingOver {
                member,
                credentials,
                home,
            } => Work::HandOver {
                member: member.clone(),
                credentials: credentials.clone(),
                home: *home,
            },
            Self::Waiting(_) | Self::Refused(_) | Self::Settled => return None,
        })
    }

    fn standing(&self) -> Standing {
        match self {
            Self::Waiting(reason) => Standing::Waiting(reason.clone()),
            Self::Refused(reason) => Standing::Refused(reason.clone()),
            Self::Settled => Standing::Settled,
            working => Standing::Working(working.work().map(|w| w.to_string()).unwrap_or_default()),
        }
    }
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Machine {
    told: Told,
    state: State,
    turn: Turn,
    phase: TurnPhase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnPhase {
    Working,
    BackingOff,
    Idle,
}

impl Machine {
    /// A machine that has just been switched on.
    pub fn start(told: Told) -> (Self, Vec<Action>) {
        let machine = Self {
            told,
            state: State::Deciding,
            turn: Turn(0),
            phase: TurnPhase::Idle,
        };
        machine.enter(State::Deciding)
    }

    /// Where it is.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What follows from this event, and what is to be done.
    pub fn step(self, event: Event) -> (Self, Vec<Action>) {
        match event {
            Event::Done(turn, done) if self.awaits(turn, TurnPhase::Working) => {
                match self.next(done) {
                    Ok(state) => self.enter(state),
                    Err(reason) => self.back_off(reason),
                }
            }
            Event::Failed(turn, failure) if self.awaits(turn, TurnPhase::Working) => {
                match failure {
                    Failure::Again(reason) => self.back_off(reason),
                    Failure::Refuse(reason) => self.enter(State::Refused(reason)),
                }
            }
            Event::RetryDue(turn) if self.awaits(turn, TurnPhase::BackingOff) => {
                let state = self.state.clone();
                self.enter(state)
            }
            _ => (self, Vec::new()),
        }
    }

    fn awaits(&self, turn: Turn, phase: TurnPhase) -> bool {
        self.turn == turn && self.phase == phase
    }

    fn enter(mut self, state: State) -> (Self, Vec<Action>) {
        self.turn = Turn(self.turn.0 + 1);
        self.state = state;
        let mut actions = vec![Action::Show(self.state.standing())];
        self.phase = match self.state.work() {
            Some(work) => {
                actions.push(Action::Work(self.turn, work));
                TurnPhase::Working
            }
            None => TurnPhase::Idle,
        };
        (self, actions)
    }

    fn back_off(mut self, reason: String) -> (Self, Vec<Action>) {
        self.phase = TurnPhase::BackingOff;
        let work = self.state.work().map(|w| w.to_string()).unwrap_or_default();
        let actions = vec![
            Action::Show(Standing::Retrying { work, reason }),
            Action::BackOff(self.turn),
        ];
        (self, actions)
    }

    /// The state after the work of this one; an error is an answer that does
    /// not belong to the work, which is a bug of the driver.
    fn next(&self, done: Done) -> Result<State, String> {
        Ok(match (&self.state, done) {
            (State::Deciding, Done::Inspected(inspection)) => decide(&self.told, *inspection),
            (State::Wiping { .. }, Done::Plain) => State::Deciding,
            (State::AwaitingAddress(parameters), Done::Plain) => {
                State::MakingKeys(parameters.clone())
            }
            (State::MakingKeys(_), Done::Keys(founding)) => {
                State::Founding(founding, FoundingStep::Save)
            }
            (State::Founding(founding, step), done) => founding_after(founding, *step, done)?,
            (State::SavingMember(member, credentials), Done::Plain) => State::HandingOver {
                member: member.clone(),
                credentials: credentials.clone(),
                home: true,
            },
            (State::Mounting(member), Done::Plain) => State::LoadingCredentials(member.clone()),
            (State::LoadingCredentials(member), Done::Credentials(credentials)) => {
                State::HandingOver {
                    member: member.clone(),
                    credentials,
                    home: false,
                }
            }
            (State::HandingOver { .. }, Done::Plain) => State::Settled,
            (_, done) => return Err(misplaced(&done)),
        })
    }
}

fn misplaced(done: &Done) -> String {
    let what = match done {
        Done::Plain => "plain",
        Done::Inspected(_) => "inspection",
        Done::Keys(_) => "keys",
        Done::Authority(_) => "authority",
        Done::Credentials(_) => "credentials",
    };
    format!("this is a bug: the answer ({what}) does not belong to the question")
}

fn founding_after(
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
            Ok(State::SavingMember(Arc::new(member), credentials))
        }
        (_, done) => Err(misplaced(&done)),
    }
}

/// What a machine is to do that finds this on its disk.
fn decide(told: &Told, inspection: Inspection) -> State {
    if let Some(wiping) = wipe(told, &inspection) {
        return wiping;
    }
    let Inspection { sealed, front } = inspection;
    match sealed {
        SealedFound::Stored(Stored::Sealed(Sealed::Founding(founding))) => {
            go_on_founding(founding, front)
        }
        SealedFound::Stored(Stored::Sealed(Sealed::Member(member))) => join(member, front),
        SealedFound::Stored(Stored::Sealed(Sealed::Registering(registering))) => {
            State::Waiting(format!(
                "a release that can register: this machine has begun to, enrolment {}",
                registering.enrolment_id
            ))
        }
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

fn begin(told: &Told) -> State {
    match told {
        Told::Nothing => State::Refused(
            "no parameters, from fw_cfg or on the ESP: this machine was never told which cluster \
             to found or to ask"
                .into(),
        ),
        Told::Unusable(why) => State::Refused(why.clone()),
        Told::Parameters(parameters) => match &parameters.cluster {
            Cluster::Bootstrap(_) => State::AwaitingAddress(parameters.clone()),
            Cluster::Register(_) => State::Refused(
                "cluster_register: wanted cluster_bootstrap, as this release cannot register yet"
                    .into(),
            ),
        },
    }
}

fn go_on_founding(founding: Arc<Founding>, front: Front) -> State {
    let owner = founding.identity.data_owner();
    let step = match &front {
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
        None => State::Refused(mismatch(owner.enrolment_id, "was founding", &owner, &front)),
    }
}

fn join(member: Arc<Member>, front: Front) -> State {
    let owner = member.identity.data_owner();
    match &front {
        Front::Header(header) if header.owner == owner && header.phase == Phase::Ready => {}
        front => {
            return State::Refused(mismatch(owner.enrolment_id, "is", &owner, front));
        }
    }
    match member.identity.storage_security {
        StorageSecurity::Insecure => State::Mounting(member),
        _ => State::Waiting(format!(
            "cluster {} to unlock the data partition: nobody answers, as this release can \
             neither ask a living cluster nor cold-start an encrypted one",
            owner.cluster_id
        )),
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

fn mismatch(enrolment: EnrolmentId, is: &str, owner: &impl fmt::Display, front: &Front) -> String {
    format!(
        "this machine {is} {owner}, and its data partition {}. Attach the right disk, or give up \
         this machine's life by wipe.enrolment_id = {enrolment} in its parameters",
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

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
