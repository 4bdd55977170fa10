//! Executes the decisions of the machine on the real node.
//!
//! One runnable, one task at a time. A failure is shown with its reason and retried with backoff,
//! without a limit; a refusal is shown once, and then nothing is changed any more. A restart of
//! this runnable restarts the machine, which continues from what is on the disk.
//!
//! On a node that its cluster has removed the runnable never completes, since there is no member to
//! hand over.

mod clock;
mod enrolled;
mod identity;
mod new_cluster;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::console::{Milestone, Report};
use hearth_api::identity::{ClusterUnlockKey, NodeCredentials};
use hearth_api::recovery::console::{RecordChallenger, WrappedRecordKey};
use hearth_api::tls::{self, OwnCertificate};
use hearth_api::v1::{ClusterDirectory, ColdStartPolicy, TpmUsage};
use hearth_base::event;
use hearth_base::supervisor::{Backoff, Context, Outcome, spawn_blocking};
use hearth_host::cluster_state::EnrolmentPhase;
use hearth_host::directory::DirectoryStore;
use hearth_host::handover::{BootstrapData, Founded, MemberData, TimeStatus};
use hearth_host::layout::Root;
use hearth_host::pki::{self, PkiError};
use hearth_host::power::{Power, PowerRequest};
use hearth_host::prover::Prover;
use hearth_host::storage::header::{Header, HeaderState, Owner, Phase};
use hearth_host::storage::upkeep::{self, Reporter};
use hearth_host::storage::{InUse, Mode, OwnedVolume, StorageBackend, StorageError, Volume};
use hearth_host::{around, credentials, failpoint, parameters};
use hearth_parameters::Cluster;
use tonic::Code;

use super::asking::{AskError, CuratorCaller, Joined};
use super::machine::{
    Action, AnsweredRegistration, Committed, DiskState, Done, EnrolmentStatus, Event, Failure,
    Machine, Pace, ParametersInput, SealedState, Work,
};
use super::sealed::{Disowned, Founding, Member, Registering, Sealed, SealedStore};
use super::unlocking::{OwnersKey, Waiting};
use super::{console, disowning};

pub use new_cluster::ClusterPreparation;

/// Delay before a retry for which an operator has to act first.
const RARE: Duration = Duration::from_secs(60);

/// Erases the further disks that have this owner.
pub type EraseDisks = Arc<dyn Fn(&Owner) -> Result<(), StorageError> + Send + Sync>;

/// What enrolment works with. `A` is the network's address value, of which only the existence
/// matters here.
pub struct Parts<M, A> {
    /// The parameters, read once at boot.
    pub parameters: Arc<parameters::Loaded>,
    /// All paths of the node.
    pub root: Root,
    /// The store of the sealed configuration.
    pub sealed: Arc<SealedStore>,
    /// The directory on the ESP.
    pub saved_directory: Arc<DirectoryStore>,
    /// The data partition.
    pub data: Arc<Mutex<OwnedVolume<M>>>,
    /// Erases the further disks that have this owner.
    pub erase_disks: EraseDisks,
    /// The client of the curators.
    pub asker: Arc<CuratorCaller>,
    /// Proves what this machine has booted; none without a TPM.
    pub prover: Option<Arc<Prover>>,
    /// Validity of the certificates that a bootstrap creates.
    pub lifetime: pki::Lifetime,
    /// The authorities of a cluster that is being bootstrapped.
    pub new_cluster: ClusterPreparation,
    /// Whether the image has the extension for the Kubernetes roles. If so, a first node whose
    /// parameters name no roles gets them.
    pub can_run_kubernetes: bool,
    /// Prints on the console.
    pub report: Reporter,
    /// The console of the machine.
    pub console: PathBuf,
    /// Restarts the machine.
    pub power: Power,
    /// Written: the member that waits for its key.
    pub waiting: event::Writer<Waiting>,
    /// Read: the key from the owner, for that member.
    pub owners_key: event::Value<OwnersKey>,
    /// Read: set once the node has an IP address.
    pub address: event::Value<A>,
    /// Read: the state of the clock, from the time service.
    pub time: event::Value<TimeStatus>,
    /// Read: the result of a bootstrap, from the control plane.
    pub founded: event::Value<Founded>,
    /// Written: how the mounted data partition is encrypted.
    pub storage: event::Writer<InUse>,
    /// Written: its owner and keys, once it is mounted.
    pub data_volume: event::Writer<Arc<Volume>>,
    /// Written: starts the control plane for a bootstrap.
    pub bootstrap: event::Writer<Arc<BootstrapData>>,
    /// Written: the member, after enrolment.
    pub member: event::Writer<MemberData>,
    /// Written: the status for other workers.
    pub status: event::Writer<EnrolmentStatus>,
    /// Written: the phase from which the cluster state is computed.
    pub enrolment_phase: event::Writer<EnrolmentPhase>,
}

/// The runnable. It completes when the node is handed over to the role server.
pub async fn run<M, A>(ctx: Context, parts: Arc<Parts<M, A>>) -> Outcome
where
    M: StorageBackend,
    A: Clone + Send + Sync + 'static,
{
    ctx.healthy();
    let (mut machine, mut actions) = Machine::start(parts.input());
    let mut retries = Retries::default();
    loop {
        let mut event = None;
        for action in actions {
            match action {
                Action::Show(status) => parts.show(status),
                Action::Announce(phase) => parts.announce(phase),
                Action::Work(turn, work) => {
                    retries.working_on(&work);
                    let result = tokio::select! {
                        result = parts.perform(work) => result,
                        () = ctx.cancelled() => return Ok(()),
                    };
                    event = Some(match result {
                        Ok(done) => Event::Done(turn, done),
                        Err(failure) => Event::Failed(turn, failure),
                    });
                }
                Action::BackOff(turn, pace) => {
                    tokio::select! {
                        () = tokio::time::sleep(retries.delay(pace)) => {}
                        _ = parts.key_of_owner(), if parts.is_waiting() => {}
                        () = ctx.cancelled() => return Ok(()),
                    }
                    event = Some(Event::RetryDue(turn));
                }
            }
        }
        let Some(event) = event else { break };
        (machine, actions) = machine.step(event);
    }
    if parts.status.value().get() == Some(EnrolmentStatus::Settled) {
        ctx.done();
    } else {
        ctx.cancelled().await;
    }
    Ok(())
}

/// Backoff that grows while the same work fails.
#[derive(Default)]
struct Retries {
    backoff: Backoff,
    work: String,
    failures: u32,
}

impl Retries {
    fn working_on(&mut self, work: &Work) {
        let work = work.to_string();
        if self.work != work {
            self.work = work;
            self.failures = 0;
        }
    }

    fn delay(&mut self, pace: Pace) -> Duration {
        match pace {
            Pace::Growing => {
                self.failures += 1;
                self.backoff.delay(self.failures)
            }
            // With jitter, so that the nodes of a cluster do not ask all at once.
            Pace::Rare => RARE + self.backoff.delay(u32::MAX),
            Pace::After(delay) => delay,
        }
    }
}

impl<M, A> Parts<M, A>
where
    M: StorageBackend,
    A: Clone + Send + Sync + 'static,
{
    fn input(&self) -> ParametersInput {
        match &*self.parameters {
            Ok(Some(found)) => ParametersInput::Parameters(Arc::new(found.parameters.clone())),
            Ok(None) => ParametersInput::Nothing,
            Err(error) => {
                // A node with a sealed configuration boots without parameters.
                tracing::warn!("{error}");
                ParametersInput::Unusable(error.to_string())
            }
        }
    }

    fn show(&self, status: EnrolmentStatus) {
        match &status {
            EnrolmentStatus::Working(work) => tracing::info!("enrolment: {work}"),
            EnrolmentStatus::Retrying { work, reason } => {
                tracing::warn!("enrolment: cannot {work}: {reason}");
                (self.report)(&Report::Waiting(format!(
                    "a retry: cannot {work}: {reason}"
                )));
            }
            EnrolmentStatus::Waiting { reason, .. } => {
                tracing::warn!("enrolment: waiting for {reason}");
                (self.report)(&Report::Waiting(reason.clone()));
            }
            EnrolmentStatus::Refused(reason) => {
                tracing::error!("enrolment: refused: {reason}");
                (self.report)(&Report::Refused(reason.clone()));
            }
            EnrolmentStatus::Settled => tracing::info!("enrolment: handed over to the role server"),
        }
        self.status.set(status);
    }

    /// Enrolment has reached at least this phase. It may be further already, if this runnable was
    /// restarted.
    fn announce(&self, phase: EnrolmentPhase) {
        if self.enrolment_phase.value().get() < Some(phase) {
            self.enrolment_phase.set(phase);
        }
    }

    async fn perform(&self, work: Work) -> Result<Done, Failure> {
        match work {
            Work::Inspect => self.inspect().await,
            Work::Recover(key) => self.recover(key).await,
            Work::Wipe { sealed, data } => self.wipe(sealed, data).await,
            Work::AwaitAddress => {
                let waited = self.address.watch().next().await;
                waited.map(|_| Done::Plain).map_err(again)
            }
            Work::MakeKeys(parameters) => self.make_keys(&parameters).await,
            Work::SaveSealed(sealed) => self.save_sealed(sealed).await,
            Work::Initialise(volume) => self.on_data(move |data| data.initialise(&volume)).await,
            Work::MakeFileSystem(volume) => {
                let report = self.report.clone();
                let mut told = move |progress| upkeep::tell(&*report, progress);
                self.on_data(move |data| data.make_file_system(&volume, &mut told))
                    .await
            }
            Work::MarkReady(volume) => self.on_data(move |data| data.mark_ready(&volume)).await,
            Work::Mount(volume) => self.mount(volume).await,
            Work::MakeAuthorities(founding) => self.make_authorities(founding).await,
            Work::AwaitFounded(founding) => self.await_founded(&founding).await,
            Work::Register(registering) => self.register(&registering).await,
            Work::Commit(entering) => self.commit(&entering).await,
            Work::SaveCredentials(committed) => self.save_credentials(committed).await,
            Work::Unlock(member) => self.unlock(&member).await,
            Work::WipeDisowned(disowned) => self.wipe_disowned(disowned).await,
            Work::EraseDisowned(disowned) => {
                self.wipe_disowned(disowned).await?;
                self.on_data(|data| data.erase()).await
            }
            Work::Restart => {
                let who = "the cluster, which has reset this node";
                self.power.ask(PowerRequest::Reboot, who);
                std::future::pending().await
            }
            Work::LoadCredentials(member) => self.load_credentials(member).await,
            Work::HandOver {
                member,
                credentials,
                home,
                directory,
            } => self.hand_over(&member, credentials, home, directory).await,
        }
    }

    async fn inspect(&self) -> Result<Done, Failure> {
        let store = self.sealed.clone();
        let sealed = match blocking(move || store.load()).await? {
            Ok(stored) => SealedState::Stored(stored),
            Err(error) if error.is_transient() => return Err(again(error)),
            Err(error) if error.is_locked() => SealedState::Locked {
                why: chain(error),
                recovery: self.recovery().await?,
            },
            Err(error) => SealedState::Corrupt(chain(error)),
        };
        if let Some(note) = enrolled::note(&self.parameters, &sealed) {
            tracing::info!("{note}");
        }
        let data = self.data.clone();
        let header = blocking(move || locked(&data).inspect()).await?;
        let header = header.map_err(storage_failure)?;
        Ok(Done::Inspected(Box::new(DiskState { sealed, header })))
    }

    /// The key of the sealed configuration for the owner.
    async fn recovery(&self) -> Result<Option<WrappedRecordKey>, Failure> {
        let store = self.sealed.clone();
        let recovery = blocking(move || store.recovery()).await?;
        recovery.map_err(again)
    }

    /// Opens the sealed configuration with what the owner enters at the console.
    async fn recover(&self, key: WrappedRecordKey) -> Result<Done, Failure> {
        let challenger = RecordChallenger::new(key);
        let challenge = challenger.console_challenge().to_text();
        let wants = "open the sealed configuration of this node";
        console::ask(&self.console, wants, &challenge, |answer| {
            let opened = challenger.accept_at_console(&answer).map_err(chain);
            let store = self.sealed.clone();
            async move {
                let key = opened?;
                let recovered = spawn_blocking(move || store.recover(&key)).await;
                recovered.map_err(chain)?.map_err(chain)
            }
        })
        .await;
        tracing::warn!("the owner has opened the sealed configuration at the console");
        Ok(Done::Plain)
    }

    async fn wipe(&self, sealed: bool, data: bool) -> Result<Done, Failure> {
        tracing::warn!(sealed, data, "wiping the enrolment");
        if sealed {
            let store = self.sealed.clone();
            blocking(move || store.erase()).await?.map_err(again)?;
        }
        if data {
            self.on_data(|data| data.erase()).await?;
        }
        Ok(Done::Plain)
    }

    async fn save_sealed(&self, sealed: Sealed) -> Result<Done, Failure> {
        let store = self.sealed.clone();
        let saved = blocking(move || match &sealed {
            Sealed::Founding(founding) if founding.cluster_ca.is_none() => {
                around!("enrolment.sealed_founding", store.save(&sealed))
            }
            Sealed::Founding(_) => around!("enrolment.sealed_authority", store.save(&sealed)),
            Sealed::Registering(registering) if registering.answer.is_none() => {
                around!("enrolment.sealed_registering", store.save(&sealed))
            }
            Sealed::Registering(_) => around!("enrolment.sealed_answer", store.save(&sealed)),
            Sealed::Member(_) => around!("enrolment.sealed_member", store.save(&sealed)),
            Sealed::Disowned(disowned) => disowning::seal(&store, *disowned),
        });
        saved.await?.map_err(|error| match error.is_locked() {
            // The cluster wants the TPM to be used, and this machine cannot.
            true => refuse(error),
            false => again(error),
        })?;
        Ok(Done::Plain)
    }

    async fn mount(&self, volume: Volume) -> Result<Done, Failure> {
        let (data, directories) = (self.data.clone(), self.root.data.clone());
        let volume = Arc::new(volume);
        let mounting = volume.clone();
        let detail = match volume.secrets.as_ref().map(|secrets| secrets.mode) {
            Some(Mode::Encrypted) => "encrypted",
            Some(Mode::AuthenticatedEncrypted) => "encrypted and authenticated",
            None => "insecure",
        };
        let mounted = blocking(move || {
            let mut data = locked(&data);
            let is_new = data.mount(&mounting)?;
            directories.make_directories()?;
            directories.remove_mount_points();
            Ok((is_new, data.in_use()?))
        });
        let (is_new, in_use) = mounted.await?.map_err(storage_failure)?;
        if is_new {
            (self.report)(&Report::Reached(Milestone::Storage, detail.into()));
        }
        self.storage.set(in_use);
        self.data_volume.set(volume);
        Ok(Done::Plain)
    }

    async fn make_authorities(&self, founding: Arc<Founding>) -> Result<Done, Failure> {
        let etcd = self.root.data.etcd();
        let cluster_id = founding.identity.cluster_id;
        let (lifetime, ahead) = (self.lifetime, self.new_cluster.take(cluster_id).await);
        let made = blocking(move || {
            let founder = pki::Bootstrapper {
                cluster_id,
                node_id: founding.identity.node_id,
                node_key: &founding.node_key,
            };
            pki::found(&etcd, &founder, || {
                ahead.unwrap_or_else(|| pki::NewCluster::make(&founder, lifetime))
            })
        });
        match made.await? {
            Ok(ca) => Ok(Done::Authority(ca)),
            Err(
                error
                @ (PkiError::Spoilt { .. } | PkiError::Lost { .. } | PkiError::Foreign { .. }),
            ) => Err(Failure::Refuse(chain(error))),
            Err(error) => Err(again(error)),
        }
    }

    async fn await_founded(&self, founding: &Founding) -> Result<Done, Failure> {
        let booted = self.booted().await;
        self.bootstrap
            .set(Arc::new(founding.bootstrap_data(booted)));
        let founded = self.founded.watch().next().await.map_err(again)?;
        Ok(Done::Credentials(founded.credentials))
    }

    /// Waits for an IP address, without which no curator can be asked. The network reports a delay
    /// itself.
    async fn has_address(&self) -> Result<(), Failure> {
        let waited = self.address.watch().next().await;
        waited.map(drop).map_err(again)
    }

    async fn register(&self, registering: &Registering) -> Result<Done, Failure> {
        clock::is_before_the_end(&registering.cluster_ca)?;
        self.has_address().await?;
        let first = registering.answer.is_none();
        if first {
            failpoint!("registering.asked.before");
        }
        let asked = self
            .asker
            .register(registering, self.sealed.can_seal())
            .await;
        let reply = asked.map_err(|error| match error.code() {
            Some(Code::InvalidArgument | Code::AlreadyExists) => refuse(error),
            Some(Code::PermissionDenied | Code::Unauthenticated) => Failure::Denied(chain(error)),
            _ => again(error),
        })?;
        if first {
            failpoint!("registering.asked.after");
        }
        Ok(Done::Answered(Box::new(reply)))
    }

    async fn commit(&self, entering: &AnsweredRegistration) -> Result<Done, Failure> {
        self.has_address().await?;
        failpoint!("registering.committed.before");
        let committed = self.asker.commit(entering).await;
        let committed = committed.map_err(|error| match error.code() {
            Some(Code::InvalidArgument | Code::PermissionDenied) => refuse(error),
            _ => again(error),
        })?;
        failpoint!("registering.committed.after");
        Ok(Done::Committed(Arc::new(committed)))
    }

    async fn save_credentials(&self, committed: Arc<Committed>) -> Result<Done, Failure> {
        let files = self.root.data.node().credentials();
        let directory = self.saved_directory.clone();
        blocking(move || {
            failpoint!("registering.credentials.before");
            credentials::save(&files, &committed.credentials).map_err(again)?;
            directory.save(&committed.directory).map_err(again)?;
            failpoint!("registering.credentials.after");
            Ok(Done::Plain)
        })
        .await?
    }

    /// Gets the unlock key, from the cluster or from the owner.
    async fn unlock(&self, member: &Arc<Member>) -> Result<Done, Failure> {
        clock::is_before_the_end(&member.cluster_ca)?;
        self.waiting.set(Some(member.clone()));
        let result = tokio::select! {
            key = self.key_of_owner() => Ok(Done::Unlocked(key, None)),
            answer = self.ask_for_key(member) => answer,
        };
        if matches!(result, Ok(_) | Err(Failure::Refuse(_))) {
            self.waiting.set(None);
        }
        result.map_err(|failure| match failure {
            Failure::Again(reason) => Failure::Again(without_curators(member, &reason)),
            other => other,
        })
    }

    fn is_waiting(&self) -> bool {
        self.waiting.value().get().flatten().is_some()
    }

    /// The key that the owner has given. Pending while there is none.
    async fn key_of_owner(&self) -> ClusterUnlockKey {
        match self.owners_key.watch().some().await {
            Ok(key) => key,
            Err(event::Closed) => std::future::pending().await,
        }
    }

    /// Gets the unlock key from the cluster. Any node of the cluster may pretend to be a curator, where a directory does
    /// not say who they are. So a key that does not open the data partition is not believed before each curator was asked
    /// alone.
    async fn ask_for_key(&self, member: &Member) -> Result<Done, Failure> {
        self.has_address().await?;
        let known = self.known_curators(member).await?;
        let answer = match self.asker.join(member, &known).await {
            Ok(answer) => answer,
            Err(error) if is_final(&error) => return Err(Failure::Denied(chain(error))),
            Err(AskError::NotYet {
                message, ask_again, ..
            }) => {
                return Err(Failure::NotYet {
                    reason: format!("the cluster to admit this boot: {message}"),
                    ask_again,
                });
            }
            Err(error) => return Err(again(error)),
        };
        if let Some(done) = self.accept(member, answer).await? {
            return Ok(done);
        }
        let mut unanswered = 0;
        for node in &known.nodes {
            let only = ClusterDirectory {
                nodes: vec![node.clone()],
            };
            let Ok(answer) = self.asker.join(member, &only).await else {
                unanswered += 1;
                continue;
            };
            if let Some(done) = self.accept(member, answer).await? {
                return Ok(done);
            }
        }
        match unanswered {
            0 => Err(refuse(StorageError::NotAuthentic)),
            count => Err(Failure::Again(format!(
                "the unlock key that a curator returned does not open the data partition, and {count} of {} curators \
                 did not answer",
                known.nodes.len()
            ))),
        }
    }

    /// What a curator has answered, unless it is a key that does not open the data partition.
    async fn accept(&self, member: &Member, answer: Joined) -> Result<Option<Done>, Failure> {
        let (key, directory) = match answer {
            Joined::Admitted { key, directory, .. } => (key, directory),
            Joined::Removed(afterwards) => return Ok(Some(Done::Removed(afterwards))),
        };
        let Some(volume) = member.identity.volume(Some(&key)) else {
            return Ok(None);
        };
        let data = self.data.clone();
        let opens = blocking(move || locked(&data).is_opened_by(&volume)).await?;
        let opens = opens.map_err(storage_failure)?;
        Ok(opens.then_some(Done::Unlocked(key, directory)))
    }

    /// The curators in the directory on the ESP, and those of the same cluster in the parameters,
    /// in case all others are gone.
    async fn known_curators(&self, member: &Member) -> Result<ClusterDirectory, Failure> {
        let mut known = self.load_directory().await?;
        if let Ok(Some(found)) = &*self.parameters
            && let Cluster::Register(register) = &found.parameters.cluster
            && register.ca == member.cluster_ca
        {
            known.nodes.extend(register.directory.nodes.clone());
        }
        Ok(known)
    }

    async fn load_directory(&self) -> Result<ClusterDirectory, Failure> {
        let store = self.saved_directory.clone();
        let directory = blocking(move || store.load()).await?;
        let directory = directory.unwrap_or_else(|error| {
            tracing::warn!("{}", chain(error));
            None
        });
        Ok(directory.unwrap_or_default())
    }

    /// Encrypted data are lost with their key; unencrypted data are removed. Further disks become empty.
    async fn wipe_disowned(&self, disowned: Disowned) -> Result<Done, Failure> {
        let owner = disowned.data_owner();
        let erase = self.erase_disks.clone();
        // A disk that fails does not keep the others from being erased, nor the node from being removed.
        if let Err(error) = blocking(move || erase(&owner)).await? {
            tracing::warn!("{}", chain(error));
        }
        let volume = Volume {
            owner,
            secrets: None,
        };
        let (data, root) = (self.data.clone(), self.root.clone());
        blocking(move || {
            let mut data = locked(&data);
            let is_open = |header: &Header| {
                header.owner == owner && header.phase == Phase::Ready && header.is_authentic(None)
            };
            match data.inspect().map_err(again)? {
                HeaderState::Header(header) if is_open(&header) => {}
                _ => return Ok(Done::Plain),
            }
            data.mount(&volume).map_err(again)?;
            root.data.make_directories().map_err(again)?;
            disowning::wipe(&root.data).map_err(again)?;
            Ok(Done::Plain)
        })
        .await?
    }

    async fn load_credentials(&self, member: Arc<Member>) -> Result<Done, Failure> {
        clock::is_before_the_end(&member.cluster_ca)?;
        let files = self.root.data.node().credentials();
        let loaded = blocking(move || credentials::load(&files)).await?;
        match loaded.map_err(again)? {
            Some(credentials) if credentials.ca == member.cluster_ca => {
                Ok(Done::Credentials(Arc::new(credentials)))
            }
            Some(_) => Err(Failure::Refuse(
                "the credentials on the data partition belong to another CA than the sealed \
                 configuration"
                    .into(),
            )),
            None => Err(Failure::Refuse(
                "this node is a member of its cluster, but its data partition has no credentials"
                    .into(),
            )),
        }
    }

    async fn hand_over(
        &self,
        member: &Member,
        credentials: Arc<NodeCredentials>,
        home: bool,
        directory: Option<Arc<ClusterDirectory>>,
    ) -> Result<Done, Failure> {
        let directory = match directory {
            Some(directory) => ClusterDirectory::clone(&directory),
            None => self.load_directory().await?,
        };
        let own = match self.founded.get() {
            Some(founded) => founded.own,
            None => OwnCertificate::new(&credentials, tls::wall_clock()).map_err(refuse)?,
        };
        let identity = &member.identity;
        if (own.cluster(), own.node()) != (identity.cluster_id, identity.node_id) {
            return Err(Failure::Refuse(format!(
                "the credentials on the data partition are those of {}, not of {}",
                own.node(),
                identity.node_id
            )));
        }
        // An earlier run may have stopped after it saved MEMBER.
        let entered = matches!(
            self.enrolment_phase.value().get(),
            Some(EnrolmentPhase::Foreign | EnrolmentPhase::Trusted)
        );
        self.announce(EnrolmentPhase::Member {
            in_touch: home || entered,
        });
        let uses_tpm = identity.tpm_usage == TpmUsage::PresentAndUsed;
        self.member.set(MemberData {
            own,
            directory,
            uses_tpm,
        });
        Ok(Done::Plain)
    }

    /// Runs a step on the data partition, on a thread that may block.
    async fn on_data(
        &self,
        step: impl FnOnce(&mut OwnedVolume<M>) -> Result<(), StorageError> + Send + 'static,
    ) -> Result<Done, Failure> {
        let data = self.data.clone();
        let result = blocking(move || step(&mut locked(&data))).await?;
        result.map(|()| Done::Plain).map_err(storage_failure)
    }
}

/// Why a node whose curators do not answer waits, and who can help it.
fn without_curators(member: &Member, reason: &str) -> String {
    let policy = member.identity.cold_start_policy;
    match member.owner_unlocks() {
        Some(_) => {
            format!("{reason}. If the cluster is not running, unlock it: hearthctl cluster unlock")
        }
        None if policy == ColdStartPolicy::None => format!(
            "{reason}. Only the running cluster can unlock this node: its cold-start policy is NONE"
        ),
        None => format!(
            "{reason}. Only the running cluster can unlock this node: it has no recovery recipient"
        ),
    }
}

/// Whether a curator has answered, so that asking again is useless until an operator has acted.
pub(super) fn is_final(error: &AskError) -> bool {
    match error {
        AskError::Refused { code, .. } => matches!(
            code,
            Code::NotFound
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::FailedPrecondition
                | Code::InvalidArgument
        ),
        AskError::Answer { .. } | AskError::Order(_) => true,
        AskError::NotYet { .. }
        | AskError::Nobody
        | AskError::Tls(_)
        | AskError::Ca(_)
        | AskError::Prove(_) => false,
    }
}

/// Runs blocking work.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    spawn_blocking(work).await.map_err(again)
}

fn locked<M>(data: &Mutex<OwnedVolume<M>>) -> std::sync::MutexGuard<'_, OwnedVolume<M>> {
    // It has no state that a panic could leave inconsistent.
    data.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn chain(error: impl std::error::Error + Send + Sync + 'static) -> String {
    hearth_api::chain(&error)
}

fn again(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::Again(chain(error))
}

fn refuse(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::Refuse(chain(error))
}

fn storage_failure(error: StorageError) -> Failure {
    if error.is_refusal() {
        refuse(error)
    } else {
        again(error)
    }
}

#[cfg(test)]
pub(super) mod tests;
#[cfg(test)]
mod unlock_tests;
