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
//!             ▼                  │           ┌─► Founding ──► SavingMember ─┐
//!  start ─► Deciding ────────────┼─► AwaitingAddress ─► MakingKeys          │
//!             ▲                  │           └─► Asking ─► Entering         │
//!             └─── Renewing ◄────┤                             ▼            │
//!                                │   SavingMember ◄─ SavingCredentials      │
//!                                │        └──────────────────────┐          │
//!                                ├─► Unlocking ─► Mounting       ▼          ▼
//!                                │       │           └─► Loading… ─► HandingOver ─► Settled
//!                                │       └─► SavingDisowned ─┐
//!                                └─► Disowning ◄─────────────┘ ─► Disowned
//! ```
//!
//! [`founding`] and [`registering`] have the steps of their states, [`joining`]
//! and [`deciding`] the rest.
//!
//! # Invariants
//! - The data partition is made (Initialise, MakeFileSystem) only for a
//!   configuration that is durable, over a front that is blank, cut off in its
//!   first write, or INITIALISING for the same owner: a FOUNDING that knows no
//!   CA, or a REGISTERING that has the cluster's answer.
//! - What cannot be explained is refused: nothing is touched, and the reason
//!   says what was found and how to give it up.
//! - A node commits after its file system is made, so that the cluster never
//!   keeps the key of nothing.
//! - HOME is announced after the MEMBER configuration is durable, and that is
//!   saved after the credentials.
//! - Only an order that was checked leads to DISOWNED, and nothing but a wipe
//!   token leads away from it.
//! - An event that does not answer the work under way changes nothing.

mod deciding;
mod founding;
mod joining;
mod refusals;
mod registering;

use std::{fmt, sync::Arc, time::Duration};

use hearth_api::{
    identity::{ClusterUnlockKey, NodeCredentials, PublicKey},
    v1::ClusterDirectory,
};
use hearth_host::cluster_state::EnrolmentPhase;
use hearth_host::parameters::Parameters;
use hearth_host::storage::Volume;
use hearth_host::storage::header::Front;
use rustls_pki_types::CertificateDer;

use super::sealed::{Disowned, Founding, Member, Registering, Sealed, Stored};

pub use founding::FoundingStep;
pub use joining::disowned;
pub use registering::{Approval, AskingStep, Entering, EnteringStep, Reply};

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
    Keys(Keys),
    /// [`Work::MakeAuthorities`]: the cluster's CA.
    Authority(CertificateDer<'static>),
    /// [`Work::AwaitFounded`] and [`Work::LoadCredentials`].
    Credentials(Arc<NodeCredentials>),
    /// [`Work::Register`].
    Answered(Box<Reply>),
    /// [`Work::Commit`].
    Committed(Arc<Committed>),
    /// [`Work::Unlock`]: the cluster has given the key.
    Unlocked(ClusterUnlockKey, Option<Arc<ClusterDirectory>>),
    /// [`Work::Unlock`]: the cluster's CA has ordered the node to go, and the
    /// order has been checked.
    Removed,
}

/// All that is random in a life.
#[derive(Clone, Debug)]
pub enum Keys {
    /// Of a cluster's first node.
    Founding(Arc<Founding>),
    /// Of one that asks.
    Registering(Arc<Registering>),
}

/// What a node has in its hands after a commit.
#[derive(Clone, Debug)]
pub struct Committed {
    /// By which it speaks from now on.
    pub credentials: Arc<NodeCredentials>,
    /// Curators.
    pub directory: Arc<ClusterDirectory>,
    /// Of the cluster.
    pub owner: Option<PublicKey>,
}

/// Why a work failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may succeed later.
    Again(String),
    /// The cluster does not want it. It may succeed once people have done
    /// something, so it is tried again, rarely.
    Denied(String),
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
    Initialise(Volume),
    /// Make the file system.
    MakeFileSystem(Volume),
    /// Write the header in phase READY.
    MarkReady(Volume),
    /// Open and mount the data partition.
    Mount(Volume),
    /// Make the certificate authorities on the data partition, or find them.
    MakeAuthorities(Arc<Founding>),
    /// Hand the founding to the control plane and wait until it is durable.
    AwaitFounded(Arc<Founding>),
    /// Ask the cluster to take the node in, or whether it has done so by now.
    Register(Arc<Registering>),
    /// Hand the unlock key over, for the credentials.
    Commit(Entering),
    /// Make what the commit gave durable, but for the phase.
    SaveCredentials(Arc<Committed>),
    /// Ask the cluster for the key of the data partition.
    Unlock(Arc<Member>),
    /// Remove what a disowned node still has on its data partition.
    WipeDisowned(Disowned),
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
        /// Curators, if the cluster has just named them. Otherwise those that
        /// the ESP knows.
        directory: Option<Arc<ClusterDirectory>>,
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
            Self::Mount(_) => "mount the data partition",
            Self::MakeAuthorities(_) => "make the certificate authorities",
            Self::AwaitFounded(_) => "found the cluster",
            Self::Register(_) => "ask the cluster to take this node in",
            Self::Commit(_) => "commit this node to the cluster",
            Self::SaveCredentials(_) => "save the node's credentials",
            Self::Unlock(_) => "ask the cluster for the key of the data partition",
            Self::WipeDisowned(_) => "wipe what the cluster has disowned",
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
    /// Wait at this pace, and answer with [`Event::RetryDue`].
    BackOff(Turn, Pace),
    /// Let everyone know where enrolment stands.
    Show(Standing),
    /// Enrolment has come so far at least.
    Announce(EnrolmentPhase),
}

/// How long to wait before the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Longer each time in a row.
    Growing,
    /// As long as someone may need who has to do something first.
    Rare,
    /// So long.
    After(Duration),
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
    /// It cannot go on alone; nothing is wrong.
    Waiting(String),
    /// It will not go on by itself, and has touched nothing.
    Refused(String),
    /// The node is handed over to the role server.
    Settled,
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
    /// Begins a life.
    AwaitingAddress(Arc<Parameters>),
    /// Begins a life.
    MakingKeys(Arc<Parameters>),
    /// Founds a cluster.
    Founding(Arc<Founding>, FoundingStep),
    /// Asks a cluster that has not answered yet.
    Asking(Arc<Registering>, AskingStep),
    /// Asks in another way from now on.
    Renewing(Arc<Registering>),
    /// Enters the cluster that has answered.
    Entering(Entering, EnteringStep),
    /// Has committed; saves what it got.
    SavingCredentials(Entering, Arc<Committed>),
    /// Is in a cluster; saves the MEMBER configuration.
    SavingMember(
        Arc<Member>,
        Arc<NodeCredentials>,
        Option<Arc<ClusterDirectory>>,
    ),
    /// Returns to its cluster: asks it for the key.
    Unlocking(Arc<Member>),
    /// Returns to its cluster: mounts.
    Mounting {
        /// Who it is.
        member: Arc<Member>,
        /// What it mounts.
        volume: Volume,
        /// As in [`Work::HandOver`].
        directory: Option<Arc<ClusterDirectory>>,
    },
    /// Returns to its cluster: reads its credentials.
    LoadingCredentials(Arc<Member>, Option<Arc<ClusterDirectory>>),
    /// Hands over.
    HandingOver {
        /// Who it is.
        member: Arc<Member>,
        /// What it proves that with.
        credentials: Arc<NodeCredentials>,
        /// As in [`Work::HandOver`].
        home: bool,
        /// As in [`Work::HandOver`].
        directory: Option<Arc<ClusterDirectory>>,
    },
    /// Its cluster has removed it; saves the DISOWNED configuration.
    SavingDisowned(Disowned),
    /// Its cluster has removed it; wipes the rest.
    Disowning(Disowned),
    /// Its cluster has removed it, and there is nothing left to do.
    Disowned(Disowned),
    /// See [`Standing::Refused`].
    Refused(String),
    /// See [`Standing::Settled`].
    Settled,
}

impl State {
    /// The first step of a life.
    fn begin(told: &Told) -> Self {
        match told {
            Told::Nothing => Self::Refused(
                "no parameters, from fw_cfg or on the ESP: this machine was never told which \
                 cluster to found or to ask"
                    .into(),
            ),
            Told::Unusable(why) => Self::Refused(why.clone()),
            Told::Parameters(parameters) => Self::AwaitingAddress(parameters.clone()),
        }
    }

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
                    FoundingStep::Initialise => Work::Initialise(founding.volume()),
                    FoundingStep::MakeFileSystem => Work::MakeFileSystem(founding.volume()),
                    FoundingStep::MarkReady => Work::MarkReady(founding.volume()),
                    FoundingStep::Mount => Work::Mount(founding.volume()),
                    FoundingStep::MakeAuthorities => Work::MakeAuthorities(founding),
                    FoundingStep::AwaitFounded => Work::AwaitFounded(founding),
                }
            }
            Self::Asking(registering, AskingStep::Save) | Self::Renewing(registering) => {
                Work::SaveSealed(Sealed::Registering(registering.clone()))
            }
            Self::Asking(registering, AskingStep::Ask) => Work::Register(registering.clone()),
            Self::Entering(entering, step) => match step {
                EnteringStep::Save => {
                    Work::SaveSealed(Sealed::Registering(entering.registering().clone()))
                }
                EnteringStep::Initialise => Work::Initialise(entering.volume()),
                EnteringStep::MakeFileSystem => Work::MakeFileSystem(entering.volume()),
                EnteringStep::MarkReady => Work::MarkReady(entering.volume()),
                EnteringStep::Mount => Work::Mount(entering.volume()),
                EnteringStep::AwaitApproval { .. } => {
                    Work::Register(entering.registering().clone())
                }
                EnteringStep::Commit { .. } => Work::Commit(entering.clone()),
            },
            Self::SavingCredentials(_, committed) => Work::SaveCredentials(committed.clone()),
            Self::SavingMember(member, ..) => Work::SaveSealed(Sealed::Member(member.clone())),
            Self::Unlocking(member) => Work::Unlock(member.clone()),
            Self::Mounting { volume, .. } => Work::Mount(volume.clone()),
            Self::LoadingCredentials(member, _) => Work::LoadCredentials(member.clone()),
            Self::HandingOver {
                member,
                credentials,
                home,
                directory,
            } => Work::HandOver {
                member: member.clone(),
                credentials: credentials.clone(),
                home: *home,
                directory: directory.clone(),
            },
            Self::SavingDisowned(disowned) => Work::SaveSealed(Sealed::Disowned(*disowned)),
            Self::Disowning(disowned) => Work::WipeDisowned(*disowned),
            Self::Disowned(_) | Self::Refused(_) | Self::Settled => return None,
        })
    }

    fn standing(&self) -> Standing {
        match self {
            Self::Entering(entering, EnteringStep::AwaitApproval { waits: true }) => {
                Standing::Waiting(registering::wants_approval(entering))
            }
            Self::Disowned(disowned) => Standing::Waiting(joining::disowned(disowned)),
            Self::Refused(reason) => Standing::Refused(reason.clone()),
            Self::Settled => Standing::Settled,
            working => Standing::Working(working.work().map(|w| w.to_string()).unwrap_or_default()),
        }
    }

    /// What follows when the work must not be tried again.
    fn refused(&self, reason: String) -> Self {
        match self {
            Self::Asking(registering, _) => registering::refused(registering, &reason),
            Self::Entering(entering, _) => registering::refused(entering.registering(), &reason),
            _ => Self::Refused(reason),
        }
    }

    /// What is tried next, and when, after the work has failed.
    fn failed(&self, failure: Failure) -> Failed {
        use EnteringStep::{AwaitApproval, Commit};
        let ask_again = |entering: &Entering, reason, pace| Failed::Later {
            state: Self::Entering(entering.clone(), AwaitApproval { waits: false }),
            reason,
            pace,
        };
        match (self, failure) {
            (state, Failure::Refuse(reason)) => Failed::At(state.refused(reason)),
            // It may be approved already, and needs no ticket then.
            (Self::Entering(entering, AwaitApproval { .. }), Failure::Denied(ticket)) => {
                let refused = Some(ticket);
                Failed::At(Self::Entering(entering.clone(), Commit { refused }))
            }
            (
                Self::Entering(
                    entering,
                    Commit {
                        refused: Some(ticket),
                    },
                ),
                _,
            ) => ask_again(entering, ticket.clone(), Pace::Rare),
            (
                Self::Entering(entering, Commit { refused: None }),
                Failure::Again(reason) | Failure::Denied(reason),
            ) => ask_again(entering, reason, COMMIT_AGAIN),
            (state, Failure::Again(reason)) => Failed::Later {
                state: state.clone(),
                reason,
                pace: Pace::Growing,
            },
            (state, Failure::Denied(reason)) => Failed::Later {
                state: state.clone(),
                reason,
                pace: Pace::Rare,
            },
        }
    }
}

/// After a commit that failed; the approval is asked for again first, so the
/// attempts are no longer in a row.
const COMMIT_AGAIN: Pace = Pace::After(Duration::from_secs(3));

/// What follows a failure.
enum Failed {
    /// This, at once.
    At(State),
    /// This, after a while.
    Later {
        state: State,
        reason: String,
        pace: Pace,
    },
}

/// What follows a work that was done.
enum Next {
    /// This, at once.
    Enter(State),
    /// This, after a while, though nothing is wrong.
    Pause(State, Pace),
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Machine {
    told: Told,
    state: State,
    turn: Turn,
    phase: TurnPhase,
    shown: Option<Standing>,
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
            shown: None,
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
                let announced = announced(&done);
                let (machine, mut actions) = match self.next(done) {
                    Ok(Next::Enter(state)) => self.enter(state),
                    Ok(Next::Pause(state, pace)) => self.pause(state, pace),
                    Err(reason) => {
                        let state = self.state.clone();
                        return self.back_off(state, reason, Pace::Growing);
                    }
                };
                actions.splice(0..0, announced.map(Action::Announce));
                (machine, actions)
            }
            Event::Failed(turn, failure) if self.awaits(turn, TurnPhase::Working) => {
                match self.state.failed(failure) {
                    Failed::At(state) => self.enter(state),
                    Failed::Later {
                        state,
                        reason,
                        pace,
                    } => self.back_off(state, reason, pace),
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
        let mut actions = Vec::new();
        if matches!(state, State::Disowning(_)) {
            actions.push(Action::Announce(EnrolmentPhase::Disowned));
        }
        self.turn = Turn(self.turn.0 + 1);
        self.state = state;
        actions.extend(self.show(self.state.standing()));
        self.phase = match self.state.work() {
            Some(work) => {
                actions.push(Action::Work(self.turn, work));
                TurnPhase::Working
            }
            None => TurnPhase::Idle,
        };
        (self, actions)
    }

    fn pause(mut self, state: State, pace: Pace) -> (Self, Vec<Action>) {
        self.state = state;
        self.phase = TurnPhase::BackingOff;
        let mut actions: Vec<_> = self.show(self.state.standing()).into_iter().collect();
        actions.push(Action::BackOff(self.turn, pace));
        (self, actions)
    }

    fn back_off(mut self, state: State, reason: String, pace: Pace) -> (Self, Vec<Action>) {
        let work = self.state.work().map(|w| w.to_string()).unwrap_or_default();
        self.state = state;
        self.phase = TurnPhase::BackingOff;
        let mut actions: Vec<_> = self
            .show(Standing::Retrying { work, reason })
            .into_iter()
            .collect();
        actions.push(Action::BackOff(self.turn, pace));
        (self, actions)
    }

    /// What stands already is not said again.
    fn show(&mut self, standing: Standing) -> Option<Action> {
        if self.shown.as_ref() == Some(&standing) {
            return None;
        }
        self.shown = Some(standing.clone());
        Some(Action::Show(standing))
    }

    /// The state after the work of this one; an error is an answer that does
    /// not belong to the work, which is a bug of the driver.
    fn next(&self, done: Done) -> Result<Next, String> {
        Ok(Next::Enter(match (&self.state, done) {
            (State::Deciding, Done::Inspected(inspection)) => {
                deciding::decide(&self.told, *inspection)
            }
            (State::Wiping { .. } | State::Renewing(_), Done::Plain) => State::Deciding,
            (State::AwaitingAddress(parameters), Done::Plain) => {
                State::MakingKeys(parameters.clone())
            }
            (State::MakingKeys(_), Done::Keys(Keys::Founding(founding))) => {
                State::Founding(founding, FoundingStep::Save)
            }
            (State::MakingKeys(_), Done::Keys(Keys::Registering(registering))) => {
                State::Asking(registering, AskingStep::Save)
            }
            (State::Founding(founding, step), done) => founding::after(founding, *step, done)?,
            (State::Asking(registering, step), done) => {
                registering::after_asking(registering, *step, done)?
            }
            (State::Entering(entering, step), done) => {
                return registering::after_entering(entering, step, done);
            }
            (State::SavingCredentials(entering, committed), Done::Plain) => {
                let member = entering
                    .registering()
                    .into_member(entering.answer(), committed.owner);
                let Committed {
                    credentials,
                    directory,
                    ..
                } = Committed::clone(committed);
                State::SavingMember(Arc::new(member), credentials, Some(directory))
            }
            (State::SavingMember(member, credentials, directory), Done::Plain) => {
                State::HandingOver {
                    member: member.clone(),
                    credentials: credentials.clone(),
                    home: true,
                    directory: directory.clone(),
                }
            }
            (State::Unlocking(member), Done::Unlocked(key, directory)) => {
                match member.identity.volume(Some(&key)) {
                    Some(volume) => State::Mounting {
                        member: member.clone(),
                        volume,
                        directory,
                    },
                    None => return Err("this is a bug: a key that opens nothing".into()),
                }
            }
            (State::Unlocking(member), Done::Removed) => {
                State::SavingDisowned(member.into_disowned())
            }
            (
                State::Mounting {
                    member, directory, ..
                },
                Done::Plain,
            ) => State::LoadingCredentials(member.clone(), directory.clone()),
            (State::LoadingCredentials(member, directory), Done::Credentials(credentials)) => {
                State::HandingOver {
                    member: member.clone(),
                    credentials,
                    home: false,
                    directory: directory.clone(),
                }
            }
            (State::HandingOver { .. }, Done::Plain) => State::Settled,
            (State::SavingDisowned(disowned), Done::Plain) => State::Disowning(*disowned),
            (State::Disowning(disowned), Done::Plain) => State::Disowned(*disowned),
            (_, done) => return Err(misplaced(&done)),
        }))
    }
}

/// How far enrolment is at least, after this.
fn announced(done: &Done) -> Option<EnrolmentPhase> {
    match done {
        Done::Answered(reply) if reply.approval == Approval::Given => Some(EnrolmentPhase::Trusted),
        Done::Answered(_) => Some(EnrolmentPhase::Foreign),
        Done::Committed(_) => Some(EnrolmentPhase::Trusted),
        _ => None,
    }
}

fn misplaced(done: &Done) -> String {
    let what = match done {
        Done::Plain => "plain",
        Done::Inspected(_) => "inspection",
        Done::Keys(_) => "keys",
        Done::Authority(_) => "authority",
        Done::Credentials(_) => "credentials",
        Done::Answered(_) => "the cluster's answer",
        Done::Committed(_) => "commit",
        Done::Unlocked(..) => "unlock key",
        Done::Removed => "removal",
    };
    format!("this is a bug: the answer ({what}) does not belong to the question")
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
