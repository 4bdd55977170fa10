//! The decisions of enrolment: a state machine without a clock, a socket or a disk.
//!
//! [`Machine::step`] takes the machine and an event, and returns the next machine and the actions
//! to perform. At most one [`Work`] is in progress at a time, and the state alone determines which
//! one ([`State::work`]). A failed task is therefore repeated by asking the state again, and after
//! a power cut a new machine starts from what is durable.
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
//!                                ├─► Disowning ◄─────────────┤ ─► Disowned
//!                                └─► Resetting ◄─────────────┘ ─► (restart)
//! ```
//!
//! [`founding`] and [`registering`] have the steps within their states, [`joining`] and
//! [`deciding`] the rest.
//!
//! # Invariants
//! - The data partition is created (Initialise, MakeFileSystem) only for a configuration that is
//!   durable, and only if its header is blank, an interrupted first write, or INITIALISING for the
//!   same owner. The configuration is a FOUNDING one without a CA, or a REGISTERING one with the
//!   cluster's answer.
//! - An unexpected disk content is refused: nothing is changed, and the reason states what is on
//!   the disk and how to discard it.
//! - A node commits after its file system is created, so that the cluster never stores the key of a
//!   data partition that does not exist.
//! - HOME is announced after the MEMBER configuration is durable, and that is saved after the
//!   credentials.
//! - Only a verified order leads to DISOWNED, and only a wipe token, or the same order, leads away from it.
//! - A reset destroys the data partition first and the DISOWNED configuration last, so that it is continued after a power cut.
//!   The machine restarts then: the state DISOWNING is final for a boot.
//! - An event that does not belong to the work in progress changes nothing.

mod deciding;
mod founding;
mod input;
mod joining;
mod refusals;
mod registering;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{ClusterUnlockKey, NodeCredentials, PublicKey};
use hearth_api::proofs::AfterRemoval;
use hearth_api::recovery::console::WrappedRecordKey;
use hearth_api::v1::ClusterDirectory;
use hearth_host::cluster_state::EnrolmentPhase;
use hearth_host::storage::Volume;
use hearth_parameters::Parameters;
use rustls_pki_types::CertificateDer;

use super::sealed::{Disowned, Founding, Member, Registering, Sealed};

pub use founding::FoundingStep;
pub use input::{Committed, DiskState, Failure, Keys, ParametersInput, SealedState};
pub use joining::{ResetStep, disowned};
pub use registering::{AnsweredRegistration, Approval, AskingStep, EnteringStep, Reply};

/// Distinguishes the result of the work in progress from late ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(u64);

/// An event from the driver.
#[derive(Clone, Debug)]
pub enum Event {
    /// The work of this request is done.
    Done(RequestId, Done),
    /// The work of this request failed.
    Failed(RequestId, Failure),
    /// The delay before the retry of this request is over.
    RetryDue(RequestId),
}

/// Result of a task.
#[derive(Clone, Debug)]
pub enum Done {
    /// Done, without data; durable, if the task writes.
    Plain,
    /// Result of [`Work::Inspect`].
    Inspected(Box<DiskState>),
    /// Result of [`Work::MakeKeys`].
    Keys(Keys),
    /// Result of [`Work::MakeAuthorities`]: the certificate of the cluster CA.
    Authority(CertificateDer<'static>),
    /// Result of [`Work::AwaitFounded`] and [`Work::LoadCredentials`].
    Credentials(Arc<NodeCredentials>),
    /// Result of [`Work::Register`].
    Answered(Box<Reply>),
    /// Result of [`Work::Commit`].
    Committed(Arc<Committed>),
    /// Result of [`Work::Unlock`]: the cluster has returned the cluster unlock key.
    Unlocked(ClusterUnlockKey, Option<Arc<ClusterDirectory>>),
    /// Result of [`Work::Unlock`]: the cluster CA has ordered the node to leave, and the order is
    /// verified.
    Removed(AfterRemoval),
}

/// A task for the driver. Each may be repeated after it was done, in part or as a whole.
#[derive(Clone, Debug)]
pub enum Work {
    /// Read the sealed configuration and the header of the data partition.
    Inspect,
    /// Ask the owner at the console for the key of the sealed configuration, and open it.
    Recover(WrappedRecordKey),
    /// Erase what has the enrolment ID in the parameters' wipe token, the sealed configuration
    /// first.
    Wipe {
        /// Erase the sealed configuration.
        sealed: bool,
        /// Erase the header of the data partition.
        data: bool,
    },
    /// Wait until the node has an IP address.
    AwaitAddress,
    /// Generate keys and IDs for these parameters.
    MakeKeys(Arc<Parameters>),
    /// Save the sealed configuration durably.
    SaveSealed(Sealed),
    /// Write the data partition's header in phase INITIALISING.
    Initialise(Volume),
    /// Create the file system on the data partition.
    MakeFileSystem(Volume),
    /// Write the data partition's header in phase READY.
    MarkReady(Volume),
    /// Unlock and mount the data partition.
    Mount(Volume),
    /// Create the certificate authorities on the data partition, unless they exist.
    MakeAuthorities(Arc<Founding>),
    /// Pass the bootstrap data to the control plane and wait until the new cluster is durable.
    AwaitFounded(Arc<Founding>),
    /// Register with the cluster, or ask whether the node is approved by now.
    Register(Arc<Registering>),
    /// Give the cluster unlock key to the cluster, and get credentials.
    Commit(AnsweredRegistration),
    /// Save the result of the commit durably, except for the phase.
    SaveCredentials(Arc<Committed>),
    /// Ask the cluster for the cluster unlock key.
    Unlock(Arc<Member>),
    /// Remove the data of a disowned node from its data partition.
    WipeDisowned(Disowned),
    /// The same, and then erase the header of the data partition.
    EraseDisowned(Disowned),
    /// Reboot the machine.
    Restart,
    /// Read the credentials from the data partition.
    LoadCredentials(Arc<Member>),
    /// Hand the member over to the role server.
    HandOver {
        /// The member.
        member: Arc<Member>,
        /// Its credentials.
        credentials: Arc<NodeCredentials>,
        /// Whether the node is in contact with its cluster already (it has just bootstrapped or
        /// committed); otherwise it is HOME once the cluster answers.
        home: bool,
        /// Curators, if the cluster has just named them. Otherwise the directory on the ESP is
        /// used.
        directory: Option<Arc<ClusterDirectory>>,
    },
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inspect => "inspect the disk",
            Self::Recover(_) => "open the sealed configuration with the recovery key",
            Self::Wipe { .. } => "wipe the enrolment",
            Self::AwaitAddress => "get an address",
            Self::MakeKeys(_) => "generate keys",
            Self::SaveSealed(_) => "save the sealed configuration",
            Self::Initialise(_) => "initialise the data partition",
            Self::MakeFileSystem(_) => "create the file system",
            Self::MarkReady(_) => "mark the data partition ready",
            Self::Mount(_) => "mount the data partition",
            Self::MakeAuthorities(_) => "create the certificate authorities",
            Self::AwaitFounded(_) => "bootstrap the cluster",
            Self::Register(_) => "register with the cluster",
            Self::Commit(_) => "commit the registration",
            Self::SaveCredentials(_) => "save the node's credentials",
            Self::Unlock(_) => "get the unlock key from the cluster",
            Self::WipeDisowned(_) => "wipe the disowned node's data",
            Self::EraseDisowned(_) => "destroy the disowned node's data",
            Self::Restart => "restart the machine",
            Self::LoadCredentials(_) => "read the node's credentials",
            Self::HandOver { .. } => "hand over to the role server",
        })
    }
}

/// An instruction to the driver.
#[derive(Clone, Debug)]
pub enum Action {
    /// Perform this work, and answer with [`Event::Done`] or [`Event::Failed`].
    Work(RequestId, Work),
    /// Wait at this pace, then answer with [`Event::RetryDue`].
    BackOff(RequestId, Pace),
    /// Publish the status of enrolment.
    Show(EnrolmentStatus),
    /// Enrolment has reached at least this phase.
    Announce(EnrolmentPhase),
}

/// The delay before the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Exponential backoff.
    Growing,
    /// Long: an operator has to act first.
    Rare,
    /// A fixed delay.
    After(Duration),
}

/// The status of enrolment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnrolmentStatus {
    /// This task is in progress.
    Working(String),
    /// This task failed and will be retried.
    Retrying {
        /// The work, as a verb phrase.
        work: String,
        /// The error.
        reason: String,
    },
    /// An operator has to act, or time to pass; nothing is wrong.
    Waiting {
        /// For what.
        reason: String,
        /// The public key of this node, if an operator has to approve it.
        unapproved: Option<PublicKey>,
    },
    /// Stopped until the next boot, or until the owner has acted at the console; nothing was changed
    /// on the disk.
    Refused(String),
    /// Done: the node is handed over to the role server.
    Settled,
}

impl EnrolmentStatus {
    fn waiting(reason: String) -> Self {
        Self::Waiting {
            reason,
            unapproved: None,
        }
    }
}

/// The state of the machine.
#[derive(Clone, Debug)]
pub enum State {
    /// Inspects the disk.
    Deciding,
    /// The TPM does not open the sealed configuration: waits for the owner, who can.
    Locked {
        /// What the owner is told.
        reason: String,
        /// The key of the sealed configuration.
        recovery: WrappedRecordKey,
    },
    /// Wipes the enrolment named by the wipe token.
    Wiping {
        /// The sealed configuration on the ESP.
        sealed: bool,
        /// The header of the data partition.
        data: bool,
    },
    /// A new enrolment: waits for an IP address.
    AwaitingAddress(Arc<Parameters>),
    /// A new enrolment: generates keys.
    MakingKeys(Arc<Parameters>),
    /// Bootstraps a cluster.
    Founding(Arc<Founding>, FoundingStep),
    /// Registers with a cluster that has not answered yet.
    Asking(Arc<Registering>, AskingStep),
    /// Saves a registration that new parameters have changed.
    Renewing(Arc<Registering>),
    /// Registers with a cluster that has answered.
    AnsweredRegistration(AnsweredRegistration, EnteringStep),
    /// Has committed; saves the credentials.
    SavingCredentials(AnsweredRegistration, Arc<Committed>),
    /// Belongs to a cluster; saves the MEMBER configuration.
    SavingMember(
        Arc<Member>,
        Arc<NodeCredentials>,
        Option<Arc<ClusterDirectory>>,
    ),
    /// Rejoins its cluster: gets the unlock key.
    Unlocking {
        /// The member.
        member: Arc<Member>,
        /// Why the cluster does not return the key yet: shown once, not with each attempt.
        waits: Option<String>,
    },
    /// Rejoins its cluster: mounts the data partition.
    Mounting {
        /// The member.
        member: Arc<Member>,
        /// Its data partition.
        volume: Volume,
        /// As in [`Work::HandOver`].
        directory: Option<Arc<ClusterDirectory>>,
    },
    /// Rejoins its cluster: reads its credentials.
    LoadingCredentials(Arc<Member>, Option<Arc<ClusterDirectory>>),
    /// Hands over to the role server.
    HandingOver {
        /// The member.
        member: Arc<Member>,
        /// Its credentials.
        credentials: Arc<NodeCredentials>,
        /// As in [`Work::HandOver`].
        home: bool,
        /// As in [`Work::HandOver`].
        directory: Option<Arc<ClusterDirectory>>,
    },
    /// The cluster has removed it; saves the DISOWNED configuration.
    SavingDisowned(Disowned),
    /// The cluster has removed it; wipes its data.
    Disowning(Disowned),
    /// The cluster has removed it, and has ordered a reset.
    Resetting(Disowned, ResetStep),
    /// The cluster has removed it, and everything is wiped.
    Disowned(Disowned),
    /// See [`EnrolmentStatus::Refused`].
    Refused(String),
    /// See [`EnrolmentStatus::Settled`].
    Settled,
}

impl State {
    /// The first state of a new enrolment.
    fn begin(input: &ParametersInput) -> Self {
        match input {
            ParametersInput::Nothing => Self::Refused(
                "no parameters in any source: they name the cluster to bootstrap or \
                 to register with"
                    .into(),
            ),
            ParametersInput::Unusable(why) => Self::Refused(why.clone()),
            ParametersInput::Parameters(parameters) => Self::AwaitingAddress(parameters.clone()),
        }
    }

    /// The work in progress in this state.
    pub fn work(&self) -> Option<Work> {
        Some(match self {
            Self::Deciding => Work::Inspect,
            Self::Locked { recovery, .. } => Work::Recover(recovery.clone()),
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
            Self::AnsweredRegistration(entering, step) => match step {
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
            Self::Unlocking { member, .. } => Work::Unlock(member.clone()),
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
            Self::Resetting(disowned, ResetStep::Data) => Work::EraseDisowned(*disowned),
            Self::Resetting(_, ResetStep::Sealed) => Work::Wipe {
                sealed: true,
                data: false,
            },
            Self::Resetting(_, ResetStep::Restart) => Work::Restart,
            Self::Disowned(_) | Self::Refused(_) | Self::Settled => return None,
        })
    }

    fn status(&self) -> EnrolmentStatus {
        match self {
            Self::AnsweredRegistration(entering, EnteringStep::AwaitApproval { waits: true }) => {
                EnrolmentStatus::Waiting {
                    reason: registering::wants_approval(entering),
                    unapproved: Some(entering.registering().node_key.public()),
                }
            }
            Self::Unlocking {
                waits: Some(reason),
                ..
            } => EnrolmentStatus::waiting(reason.clone()),
            Self::Disowned(disowned) => EnrolmentStatus::waiting(joining::disowned(disowned)),
            Self::Refused(reason) | Self::Locked { reason, .. } => {
                EnrolmentStatus::Refused(reason.clone())
            }
            Self::Settled => EnrolmentStatus::Settled,
            working => {
                EnrolmentStatus::Working(working.work().map(|w| w.to_string()).unwrap_or_default())
            }
        }
    }

    /// The next state if the work must not be retried.
    fn refused(&self, reason: String) -> Self {
        match self {
            Self::Asking(registering, _) => registering::refused(registering, &reason),
            Self::AnsweredRegistration(entering, _) => {
                registering::refused(entering.registering(), &reason)
            }
            _ => Self::Refused(reason),
        }
    }

    /// The next state, and the delay before it, after the work has failed.
    fn failed(&self, failure: Failure) -> Failed {
        use EnteringStep::{AwaitApproval, Commit};
        let ask_again = |entering: &AnsweredRegistration, reason, pace| Failed::Later {
            state: Self::AnsweredRegistration(entering.clone(), AwaitApproval { waits: false }),
            reason,
            pace,
        };
        match (self, failure) {
            (state, Failure::Refuse(reason)) => Failed::At(state.refused(reason)),
            // It may be approved already, and then needs no ticket.
            (
                Self::AnsweredRegistration(entering, AwaitApproval { .. }),
                Failure::Denied(ticket),
            ) => {
                let refused = Some(ticket);
                Failed::At(Self::AnsweredRegistration(
                    entering.clone(),
                    Commit { refused },
                ))
            }
            (
                Self::AnsweredRegistration(
                    entering,
                    Commit {
                        refused: Some(ticket),
                    },
                ),
                _,
            ) => ask_again(entering, ticket.clone(), Pace::Rare),
            (
                Self::AnsweredRegistration(entering, Commit { refused: None }),
                Failure::Again(reason) | Failure::Denied(reason),
            ) => ask_again(entering, reason, COMMIT_AGAIN),
            (Self::Unlocking { member, .. }, Failure::NotYet { reason, ask_again }) => {
                let state = joining::unlocking(member.clone(), Some(reason));
                Failed::Waits(state, Pace::After(ask_again))
            }
            (state, Failure::NotYet { reason, ask_again }) => {
                state.later(reason, Pace::After(ask_again))
            }
            (state, Failure::Again(reason)) => state.later(reason, Pace::Growing),
            (state, Failure::Denied(reason)) => state.later(reason, Pace::Rare),
        }
    }

    /// The same work after a delay. What the cluster has waited for may be over.
    fn later(&self, reason: String, pace: Pace) -> Failed {
        let state = match self {
            Self::Unlocking { member, .. } => joining::unlocking(member.clone(), None),
            other => other.clone(),
        };
        Failed::Later {
            state,
            reason,
            pace,
        }
    }
}

/// Delay after a failed commit. The approval is requested again first, so these attempts are not
/// consecutive failures of one task and have no backoff.
const COMMIT_AGAIN: Pace = Pace::After(Duration::from_secs(3));

/// The reaction to a failure.
enum Failed {
    /// Enter this state at once.
    At(State),
    /// Enter this state after a delay that is not caused by an error.
    Waits(State, Pace),
    /// Enter this state after a delay.
    Later {
        state: State,
        reason: String,
        pace: Pace,
    },
}

/// The reaction to a completed task.
enum Next {
    /// Enter this state at once.
    Enter(State),
    /// Enter this state after a delay that is not caused by an error.
    Pause(State, Pace),
}

/// The state machine of enrolment.
#[derive(Clone, Debug)]
pub struct Machine {
    input: ParametersInput,
    state: State,
    turn: RequestId,
    phase: TurnPhase,
    shown: Option<EnrolmentStatus>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnPhase {
    Working,
    BackingOff,
    Idle,
}

impl Machine {
    /// The machine at the start of a boot.
    pub fn start(input: ParametersInput) -> (Self, Vec<Action>) {
        let machine = Self {
            input,
            state: State::Deciding,
            turn: RequestId(0),
            phase: TurnPhase::Idle,
            shown: None,
        };
        machine.enter(State::Deciding)
    }

    /// The current state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The next machine after this event, and the actions to perform.
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
                    Failed::Waits(state, pace) => self.pause(state, pace),
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

    fn awaits(&self, turn: RequestId, phase: TurnPhase) -> bool {
        self.turn == turn && self.phase == phase
    }

    fn enter(mut self, state: State) -> (Self, Vec<Action>) {
        let mut actions = Vec::new();
        if matches!(state, State::Disowning(_) | State::Resetting(..)) {
            actions.push(Action::Announce(EnrolmentPhase::Disowned));
        }
        self.turn = RequestId(self.turn.0 + 1);
        self.state = state;
        actions.extend(self.show(self.state.status()));
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
        let mut actions: Vec<_> = self.show(self.state.status()).into_iter().collect();
        actions.push(Action::BackOff(self.turn, pace));
        (self, actions)
    }

    fn back_off(mut self, state: State, reason: String, pace: Pace) -> (Self, Vec<Action>) {
        let work = self.state.work().map(|w| w.to_string()).unwrap_or_default();
        self.state = state;
        self.phase = TurnPhase::BackingOff;
        let mut actions: Vec<_> = self
            .show(EnrolmentStatus::Retrying { work, reason })
            .into_iter()
            .collect();
        actions.push(Action::BackOff(self.turn, pace));
        (self, actions)
    }

    /// A status that is shown already is not repeated.
    fn show(&mut self, status: EnrolmentStatus) -> Option<Action> {
        if self.shown.as_ref() == Some(&status) {
            return None;
        }
        self.shown = Some(status.clone());
        Some(Action::Show(status))
    }

    /// The state after the current work is done. An error means that the result does not belong to
    /// the work, which is a bug in the driver.
    fn next(&self, done: Done) -> Result<Next, String> {
        Ok(Next::Enter(match (&self.state, done) {
            (State::Deciding, Done::Inspected(inspection)) => {
                deciding::decide(&self.input, *inspection)
            }
            (State::Wiping { .. } | State::Renewing(_) | State::Locked { .. }, Done::Plain) => {
                State::Deciding
            }
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
            (State::AnsweredRegistration(entering, step), done) => {
                return registering::after_entering(entering, step, done);
            }
            (State::SavingCredentials(entering, committed), Done::Plain) => {
                let member = entering.registering().into_member(
                    entering.answer(),
                    committed.owner,
                    committed.recovery.clone(),
                );
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
            (State::Unlocking { member, .. }, Done::Unlocked(key, directory)) => {
                match member.identity.volume(Some(&key)) {
                    Some(volume) => State::Mounting {
                        member: member.clone(),
                        volume,
                        directory,
                    },
                    None => return Err("internal error: the unlock key opens no volume".into()),
                }
            }
            (State::Unlocking { member, .. }, Done::Removed(afterwards)) => {
                State::SavingDisowned(member.into_disowned(afterwards))
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
            (State::SavingDisowned(disowned), Done::Plain) => match disowned.afterwards {
                AfterRemoval::Wait => State::Disowning(*disowned),
                AfterRemoval::Reset => State::Resetting(*disowned, ResetStep::Data),
            },
            (State::Resetting(disowned, step), Done::Plain) => {
                State::Resetting(*disowned, step.next())
            }
            (State::Disowning(disowned), Done::Plain) => State::Disowned(*disowned),
            (_, done) => return Err(misplaced(&done)),
        }))
    }
}

/// The phase that enrolment has reached at least, after this result.
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
        Done::Inspected(_) => "disk state",
        Done::Keys(_) => "keys",
        Done::Authority(_) => "authority",
        Done::Credentials(_) => "credentials",
        Done::Answered(_) => "registration reply",
        Done::Committed(_) => "commit",
        Done::Unlocked(..) => "unlock key",
        Done::Removed(_) => "removal",
    };
    format!("internal error: result ({what}) does not match the work in progress")
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
