//! The model below the machine: durable state and a cluster.
//!
//! [`World`] is what survives a power cut: the sealed configuration, the header of the data
//! partition, its file system and the node's files in it. Each task has an effect on it, and a
//! [`Fault`] may happen before the effect, in the middle of it, or after it and before the result
//! is returned. "The middle" is what the slots and headers guarantee: the old state, the new one,
//! or an incomplete first write. The world asserts the invariants at each effect.
//!
//! [`Cluster`] is the smallest correct cluster: a table of nodes and a table of deleted nodes.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use hearth_api::identity::{ClusterId, JoinKey, NodeId, NodeKey, NodeUnlockKey, PublicKey, Ticket};
use hearth_api::v1::{ColdStartPolicy, NodeState, StorageSecurity, StorageSecurityPolicy};
use hearth_host::storage::header::{Header, HeaderState, Owner, Phase};
use hearth_parameters::{Network, Register};

use super::super::sealed::{Answer, Asking, Stored};
use super::super::{EnrolmentId, testing};
use super::*;

pub(super) static BASE: LazyLock<Arc<Founding>> =
    LazyLock::new(|| testing::founding(0, StorageSecurity::Insecure));
pub(super) static INPUT: LazyLock<ParametersInput> = LazyLock::new(|| input(None));

pub(super) fn input(wipe: Option<u8>) -> ParametersInput {
    let policy = StorageSecurityPolicy::NeedsInsecure;
    ParametersInput::Parameters(Arc::new(testing::bootstrap(policy, wipe)))
}

pub(super) fn founding(enrolment: u8) -> Founding {
    let mut founding = Founding::clone(&BASE);
    founding.identity.enrolment_id = EnrolmentId::from_bytes([enrolment; 16]);
    founding.identity.cluster_id = ClusterId::from_bytes([enrolment; 16]);
    founding.identity.node_id = NodeId::from_bytes([enrolment; 16]);
    founding
}

pub(super) fn ca(enrolment: u8) -> CertificateDer<'static> {
    CertificateDer::from(vec![enrolment; 4])
}

pub(super) fn credentials(enrolment: u8) -> Arc<NodeCredentials> {
    static KEY: LazyLock<NodeKey> = LazyLock::new(|| NodeKey::from_seed([0xb3; 32]));
    Arc::new(NodeCredentials {
        key: KEY.clone(),
        certificate: CertificateDer::from(vec![enrolment; 8]),
        ca: ca(enrolment),
    })
}

pub(super) fn header(phase: Phase, owner: Owner) -> HeaderState {
    HeaderState::Header(Header::new(phase, owner, [7; 32], None))
}

pub(super) fn ready(enrolment: u8) -> HeaderState {
    header(Phase::Ready, founding(enrolment).identity.data_owner())
}

pub(super) fn initialising(enrolment: u8) -> HeaderState {
    header(
        Phase::Initialising,
        founding(enrolment).identity.data_owner(),
    )
}

pub(super) fn sealed_founding(
    enrolment: u8,
    cluster_ca: Option<CertificateDer<'static>>,
) -> Sealed {
    Sealed::Founding(Arc::new(Founding {
        cluster_ca,
        ..founding(enrolment)
    }))
}

pub(super) fn sealed_member(enrolment: u8, storage_security: StorageSecurity) -> Sealed {
    let mut founding = founding(enrolment);
    founding.identity.storage_security = storage_security;
    Sealed::Member(Arc::new(founding.into_member(ca(enrolment))))
}

/// A fault of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It fails without an effect.
    FailsBefore,
    /// It takes effect, and returns a failure.
    FailsAfter,
    /// The power fails before it.
    CutBefore,
    /// The power fails in the middle; the number selects one of the possible states.
    CutDuring(usize),
    /// The power fails after it, before the result.
    CutAfter,
    /// It is executed twice, as by a request that was sent again.
    Twice,
}

pub(super) const FAULTS: [Fault; 8] = [
    Fault::FailsBefore,
    Fault::FailsAfter,
    Fault::CutBefore,
    Fault::CutDuring(0),
    Fault::CutDuring(1),
    Fault::CutDuring(2),
    Fault::CutAfter,
    Fault::Twice,
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileSystem {
    None,
    Half,
    Made(Content),
}

/// What the control plane leaves on the data partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) authorities: bool,
    pub(super) authority_keys: bool,
    /// The enrolment whose bootstrap transaction is committed.
    pub(super) founded: Option<u8>,
    pub(super) credentials: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) sealed: Stored,
    /// Rank of the last acknowledged configuration; see [`rank`].
    acknowledged: u8,
    pub(super) header: HeaderState,
    pub(super) files: FileSystem,
    pub(super) mounted: bool,
    /// The cluster unlock key with which the disk was initialised.
    key: Option<[u8; 32]>,
    pub(super) enrolments: u8,
    /// Number of a machine that registers; `None` for one that bootstraps.
    asks_as: Option<u8>,
    pub(super) home: bool,
    pub(super) handed_over: bool,
}

/// Progress of an enrolment, by its configuration.
pub(super) fn rank(sealed: &Stored) -> u8 {
    match sealed {
        Stored::Absent | Stored::NeverCompleted => 0,
        Stored::Sealed(Sealed::Founding(founding)) if founding.cluster_ca.is_none() => 1,
        Stored::Sealed(Sealed::Founding(_)) => 2,
        Stored::Sealed(Sealed::Registering(registering)) if registering.answer.is_none() => 1,
        Stored::Sealed(Sealed::Registering(_)) => 2,
        Stored::Sealed(Sealed::Member(_)) => 3,
        Stored::Sealed(Sealed::Disowned(_)) => 4,
    }
}

impl World {
    pub(super) fn blank() -> Self {
        Self {
            sealed: Stored::Absent,
            acknowledged: 0,
            header: HeaderState::Blank,
            files: FileSystem::None,
            mounted: false,
            key: None,
            enrolments: 0,
            asks_as: None,
            home: false,
            handed_over: false,
        }
    }

    /// The machine of this number, which registers.
    pub(super) fn asking(machine: u8) -> Self {
        Self {
            asks_as: Some(machine),
            ..Self::blank()
        }
    }

    pub(super) fn power_cut(&mut self) {
        self.mounted = false;
        self.home = false;
        self.handed_over = false;
        assert!(
            rank(&self.sealed) >= self.acknowledged,
            "an acknowledged configuration is lost"
        );
    }

    pub(super) fn enrolment(&self) -> u8 {
        match &self.sealed {
            Stored::Sealed(sealed) => sealed.enrolment_id().as_bytes()[0],
            other => panic!("no configuration is durable: {other:?}"),
        }
    }

    pub(super) fn content(&mut self) -> &mut Content {
        assert!(self.mounted, "not mounted");
        match &mut self.files {
            FileSystem::Made(content) => content,
            other => panic!("no file system: {other:?}"),
        }
    }

    /// What must hold whenever the data partition is initialised.
    fn may_make(&self, wanted: &Volume) {
        assert!(!self.mounted);
        let durable = match &self.sealed {
            Stored::Sealed(Sealed::Founding(durable)) => {
                assert!(durable.cluster_ca.is_none(), "its authorities are made");
                durable.identity.data_owner()
            }
            Stored::Sealed(Sealed::Registering(durable)) => {
                let answer = durable.answer.as_ref();
                let answer = answer.expect("the cluster has not answered");
                durable.volume(answer).owner
            }
            other => panic!("made without a life that begins: {other:?}"),
        };
        assert_eq!(durable, wanted.owner, "another enrolment is durable");
        match &self.header {
            HeaderState::Blank | HeaderState::Unfinished => {}
            HeaderState::Header(header) => {
                assert_eq!(header.owner, wanted.owner, "foreign");
                assert_eq!(
                    header.phase,
                    Phase::Initialising,
                    "READY is never made again"
                );
            }
            HeaderState::Foreign(why) => panic!("foreign: {why}"),
        }
    }

    /// Executes a task, up to the point `during`; `None` is to the end.
    pub(super) fn perform(
        &mut self,
        cluster: &mut Cluster,
        work: &Work,
        during: Option<usize>,
    ) -> Result<Done, Failure> {
        match work {
            Work::Inspect => {
                return Ok(Done::Inspected(Box::new(DiskState {
                    sealed: SealedState::Stored(self.sealed.clone()),
                    header: self.header.clone(),
                })));
            }
            Work::Recover(_) => unreachable!("the model has no TPM"),
            Work::Wipe { sealed, data } => self.wipe(*sealed, *data, during),
            Work::AwaitAddress => {}
            Work::MakeKeys(parameters) => {
                self.enrolments += 1;
                return Ok(Done::Keys(match &parameters.cluster {
                    hearth_parameters::Cluster::Bootstrap(_) => {
                        Keys::Founding(Arc::new(founding(self.enrolments)))
                    }
                    hearth_parameters::Cluster::Register(register) => {
                        Keys::Registering(Arc::new(self.registering(register)))
                    }
                }));
            }
            Work::SaveSealed(sealed) => self.save(sealed, during),
            Work::Initialise(volume) => self.initialise(volume, during),
            Work::MakeFileSystem(volume) => {
                self.may_make(volume);
                assert!(
                    matches!(self.header, HeaderState::Header(_)),
                    "no header yet"
                );
                self.files = match during {
                    Some(_) => FileSystem::Half,
                    None => FileSystem::Made(Content::default()),
                };
            }
            Work::MarkReady(volume) => {
                assert!(
                    matches!(self.files, FileSystem::Made(_)),
                    "{:?}",
                    self.files
                );
                if !matches!(during, Some(0)) {
                    self.header = header(Phase::Ready, volume.owner);
                    self.key = unlock_key(volume);
                }
            }
            Work::Mount(volume) => {
                let HeaderState::Header(header) = &self.header else {
                    panic!("mounted without a header");
                };
                assert_eq!(header.phase, Phase::Ready);
                assert_eq!(header.owner, volume.owner);
                assert_eq!(self.key, unlock_key(volume), "another key");
                assert!(matches!(self.files, FileSystem::Made(_)));
                self.mounted = true;
            }
            Work::MakeAuthorities(_) => {
                let enrolment = self.enrolment();
                let content = self.content();
                if !matches!(during, Some(0)) {
                    assert_eq!(content.founded, None, "new authorities for an old cluster");
                    content.authorities = true;
                    content.authority_keys = true;
                }
                return Ok(Done::Authority(ca(enrolment)));
            }
            Work::AwaitFounded(founding) => {
                assert_eq!(rank(&self.sealed), 2, "the CA is not durable");
                assert!(founding.cluster_ca.is_some());
                let enrolment = self.enrolment();
                self.found(enrolment, during);
                return Ok(Done::Credentials(credentials(enrolment)));
            }
            Work::Register(registering) => {
                let durable = Stored::Sealed(Sealed::Registering(registering.clone()));
                assert!(rank(&durable) <= rank(&self.sealed), "asks before it saves");
                if during != Some(0) {
                    let reply = cluster.register(registering)?;
                    return Ok(Done::Answered(Box::new(reply)));
                }
            }
            Work::Commit(entering) => {
                assert!(self.mounted, "commits before it has a file system");
                if during != Some(0) {
                    let committed = cluster.commit(entering)?;
                    return Ok(Done::Committed(Arc::new(committed)));
                }
            }
            Work::SaveCredentials(_) => {
                if during != Some(0) {
                    self.content().credentials = true;
                }
            }
            Work::Unlock(member) => {
                assert!(!self.mounted);
                return cluster.join(member);
            }
            Work::WipeDisowned(disowned) => {
                assert_eq!(rank(&self.sealed), 4, "wiped before it is disowned");
                assert_eq!(self.enrolment(), disowned.enrolment_id.as_bytes()[0]);
                if let (FileSystem::Made(content), None) = (&mut self.files, during) {
                    content.credentials = false;
                }
            }
            Work::EraseDisowned(disowned) => {
                assert_eq!(rank(&self.sealed), 4, "erased before it is disowned");
                assert_eq!(self.enrolment(), disowned.enrolment_id.as_bytes()[0]);
                if during != Some(0)
                    && let FileSystem::Made(content) = &mut self.files
                {
                    content.credentials = false;
                }
                if during.is_none() {
                    self.header = HeaderState::Blank;
                    self.files = FileSystem::None;
                }
            }
            Work::Restart => unreachable!("whoever performs it starts the machine again"),
            Work::LoadCredentials(_) => {
                let enrolment = self.enrolment();
                assert!(self.content().credentials);
                return Ok(Done::Credentials(credentials(enrolment)));
            }
            Work::HandOver { home, .. } => self.hand_over(*home),
        }
        Ok(Done::Plain)
    }

    fn hand_over(&mut self, home: bool) {
        assert_eq!(
            rank(&self.sealed),
            3,
            "handed over before it is a durable MEMBER"
        );
        let (enrolment, founds) = (self.enrolment(), self.asks_as.is_none());
        let content = self.content();
        assert!(content.credentials, "home without credentials");
        assert!(!founds || content.founded == Some(enrolment));
        assert!(!content.authority_keys, "a CA's key is left on the disk");
        self.home = home;
        self.handed_over = true;
    }

    /// New keys.
    fn registering(&self, register: &Register) -> Registering {
        let machine = self.asks_as.expect("a machine that registers");
        let seed = |purpose: u8| {
            let mut seed = [purpose; 32];
            seed[..2].copy_from_slice(&[machine, self.enrolments]);
            seed
        };
        let node_key = NodeKey::from_seed(seed(1));
        Registering {
            enrolment_id: EnrolmentId::from_bytes([self.enrolments; 16]),
            node_id: NodeId::from_public_key(&node_key.public()),
            node_key,
            node_unlock_key: NodeUnlockKey::from_bytes(seed(2)),
            cluster_unlock_key: ClusterUnlockKey::from_bytes(seed(3)),
            join_key: JoinKey::from_seed(seed(4)),
            cluster_ca: register.ca.clone(),
            asking: Asking::from(register),
            answer: None,
            network: Network::default(),
        }
    }

    fn wipe(&mut self, sealed: bool, data: bool, during: Option<usize>) {
        if sealed && during != Some(0) {
            self.sealed = match during {
                Some(1) => Stored::NeverCompleted,
                _ => Stored::Absent,
            };
            self.acknowledged = 0;
        }
        if data && during.is_none() {
            self.header = HeaderState::Blank;
            self.files = FileSystem::None;
        }
    }

    fn save(&mut self, new: &Sealed, during: Option<usize>) {
        let new = Stored::Sealed(new.clone());
        match during {
            Some(0) => {}
            Some(1) if rank(&self.sealed) == 0 => self.sealed = Stored::NeverCompleted,
            _ => {
                // An unanswered enrolment may be replaced by another one, and a ticket by another
                // one.
                assert!(rank(&new) >= rank(&self.sealed), "back to {new:?}");
                self.sealed = new;
            }
        }
        if during.is_none() {
            self.acknowledged = rank(&self.sealed);
        }
    }

    fn initialise(&mut self, volume: &Volume, during: Option<usize>) {
        self.may_make(volume);
        match during {
            Some(0) => {}
            Some(1) if self.header == HeaderState::Blank => self.header = HeaderState::Unfinished,
            _ => {
                self.header = header(Phase::Initialising, volume.owner);
                self.files = FileSystem::Half;
            }
        }
    }

    /// The control plane's part: transaction, credentials, keys removed.
    fn found(&mut self, enrolment: u8, during: Option<usize>) {
        let content = self.content();
        if !content.credentials {
            assert!(content.authority_keys, "nothing to found with");
        }
        let steps = during.unwrap_or(3);
        if steps >= 1 {
            assert!(
                content.founded.is_none_or(|l| l == enrolment),
                "a second cluster"
            );
            content.founded = Some(enrolment);
        }
        if steps >= 2 {
            content.credentials = true;
        }
        if steps >= 3 {
            content.authority_keys = false;
        }
    }
}

/// The cluster unlock key, if there is one.
fn unlock_key(volume: &Volume) -> Option<[u8; 32]> {
    let secrets = volume.secrets.as_ref()?;
    Some(*secrets.cluster_unlock_key.expose())
}

/// One node in a cluster's records.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) key: PublicKey,
    pub(super) join_key: PublicKey,
    pub(super) state: NodeState,
    pub(super) cluster_unlock_key: Option<ClusterUnlockKey>,
}

/// The reference cluster.
#[derive(Clone, Debug)]
pub(super) struct Cluster {
    pub(super) storage_security: StorageSecurity,
    pub(super) ticket: u8,
    pub(super) nodes: BTreeMap<NodeId, Record>,
    /// The join keys of deleted nodes.
    /// The join key, and what the machine is ordered to do.
    pub(super) tombstones: BTreeMap<NodeId, (PublicKey, AfterRemoval)>,
}

/// The CA of the reference cluster.
pub(super) const CA: u8 = 0xca;

impl Cluster {
    pub(super) fn new(storage_security: StorageSecurity) -> Self {
        Self {
            storage_security,
            ticket: 0,
            nodes: BTreeMap::new(),
            tombstones: BTreeMap::new(),
        }
    }

    /// The register parameters for a machine.
    pub(super) fn input(&self, wipe: Option<u8>) -> ParametersInput {
        ParametersInput::Parameters(Arc::new(Parameters {
            cluster: hearth_parameters::Cluster::Register(Register {
                directory: testing::directory("192.0.2.1"),
                ticket: Ticket::from_bytes([self.ticket; 32]),
                ca: ca(CA),
                labels: Vec::new(),
            }),
            network: Network::default(),
            wipe: wipe.map(|enrolment| EnrolmentId::from_bytes([enrolment; 16])),
            time_servers: Vec::new(),
            install: None,
        }))
    }

    pub(super) fn register(&mut self, asks: &Registering) -> Result<Reply, Failure> {
        let denied = |why: &str| Err(Failure::Denied(why.into()));
        if asks.asking.ticket != Ticket::from_bytes([self.ticket; 32]) {
            return denied("wrong ticket");
        }
        let (id, key) = (asks.node_id, asks.node_key.public());
        if self.tombstones.contains_key(&id) {
            return denied("deleted");
        }
        let join_key = asks.join_key.public();
        let other =
            |(other, record): (&NodeId, &Record)| *other != id && record.join_key == join_key;
        if self.nodes.iter().any(other) {
            return Err(Failure::Refuse("another node's join key".into()));
        }
        let record = self.nodes.entry(id).or_insert(Record {
            key,
            join_key,
            state: NodeState::New,
            cluster_unlock_key: None,
        });
        if record.key != key {
            return Err(Failure::Refuse("another key".into()));
        }
        Ok(Reply {
            answer: Answer {
                cluster_id: ClusterId::from_bytes([CA; 16]),
                storage_security: self.storage_security,
                tpm_usage: hearth_api::v1::TpmUsage::NotPresent,
                cold_start_policy: ColdStartPolicy::None,
            },
            approval: match record.state {
                NodeState::New => Approval::Waits {
                    ask_again: Duration::ZERO,
                },
                NodeState::Decommissioned => return denied("out of service"),
                _ => Approval::Given,
            },
            directory: ClusterDirectory::default(),
        })
    }

    pub(super) fn commit(&mut self, entering: &AnsweredRegistration) -> Result<Committed, Failure> {
        let asks = entering.registering();
        let id = asks.node_id;
        if self.tombstones.contains_key(&id) {
            return Err(Failure::Refuse("deleted".into()));
        }
        let again = |why: &str| Err(Failure::Again(why.into()));
        let Some(record) = self.nodes.get_mut(&id) else {
            return again("unknown");
        };
        assert_eq!(record.key, asks.node_key.public());
        match record.state {
            NodeState::New => return again("not approved"),
            NodeState::Standby => {
                record.state = NodeState::Up;
                record.cluster_unlock_key = Some(asks.cluster_unlock_key.clone());
            }
            NodeState::Up => {
                let kept = record.cluster_unlock_key.as_ref();
                assert_eq!(kept, Some(&asks.cluster_unlock_key), "another unlock key");
            }
            _ => return Err(Failure::Refuse("out of service".into())),
        }
        Ok(Committed {
            credentials: credentials(CA),
            directory: Arc::new(testing::directory("192.0.2.2")),
            owner: None,
            recovery: None,
        })
    }

    pub(super) fn join(&self, member: &Member) -> Result<Done, Failure> {
        let key = member.identity.join_key.public();
        let mut tombstones = self.tombstones.values();
        if let Some((_, afterwards)) = tombstones.find(|(deleted, _)| *deleted == key) {
            return Ok(Done::Removed(*afterwards));
        }
        let mut nodes = self.nodes.values();
        match nodes.find(|record| record.join_key == key) {
            None => Err(Failure::Denied("unknown node".into())),
            Some(record) => match (record.state, &record.cluster_unlock_key) {
                (NodeState::Up, Some(key)) => Ok(Done::Unlocked(key.clone(), None)),
                (NodeState::Decommissioned, _) => Ok(Done::Removed(AfterRemoval::Wait)),
                _ => Err(Failure::Denied("not up".into())),
            },
        }
    }

    /// An operator's approval by public key. One step.
    pub(super) fn approve(&mut self, id: NodeId) {
        if let Some(record) = self.nodes.get_mut(&id)
            && record.state == NodeState::New
        {
            record.state = NodeState::Standby;
        }
    }

    pub(super) fn delete(&mut self, id: NodeId) {
        self.remove(id, AfterRemoval::Wait);
    }

    pub(super) fn reset(&mut self, id: NodeId) {
        self.remove(id, AfterRemoval::Reset);
    }

    fn remove(&mut self, id: NodeId, afterwards: AfterRemoval) {
        if let Some(record) = self.nodes.remove(&id) {
            self.tombstones.insert(id, (record.join_key, afterwards));
        }
    }

    pub(super) fn decommission(&mut self, id: NodeId) {
        if let Some(record) = self.nodes.get_mut(&id)
            && record.state == NodeState::Up
        {
            record.state = NodeState::Decommissioned;
        }
    }
}

/// The fault of each task, counted over all boots.
pub(super) type Script = Vec<(usize, Fault)>;

/// More tasks than any run with a finite number of faults needs.
const BOUND: usize = 160;

/// Boots, executes tasks and reboots until the machine is idle. An operator approves every node
/// that waits.
pub(super) fn run_in(
    world: &mut World,
    cluster: &mut Cluster,
    input: &ParametersInput,
    script: &Script,
) -> State {
    let mut works = 0;
    'boot: loop {
        let (mut machine, mut actions) = Machine::start(input.clone());
        loop {
            let Some((turn, work)) = actions.iter().find_map(|action| match action {
                Action::Work(turn, work) => Some((*turn, work.clone())),
                _ => None,
            }) else {
                let Some(Action::BackOff(turn, _)) = actions.last() else {
                    return machine.state().clone();
                };
                for id in cluster.nodes.keys().copied().collect::<Vec<_>>() {
                    cluster.approve(id);
                }
                (machine, actions) = machine.step(Event::RetryDue(*turn));
                continue;
            };
            assert!(works < BOUND, "it does not end: {script:?}");
            let fault = script.iter().find(|(at, _)| *at == works).map(|(_, f)| *f);
            works += 1;
            match world.suffer(cluster, turn, &work, fault) {
                Some(event) => (machine, actions) = machine.step(event),
                None => continue 'boot,
            }
        }
    }
}

impl World {
    /// Executes a task with this fault. `None`: the power has failed.
    pub(super) fn suffer(
        &mut self,
        cluster: &mut Cluster,
        turn: RequestId,
        work: &Work,
        fault: Option<Fault>,
    ) -> Option<Event> {
        if matches!(work, Work::Restart) {
            return None;
        }
        let injected = || Some(Event::Failed(turn, Failure::Again("injected".into())));
        match fault {
            None => {}
            Some(Fault::Twice) => drop(self.perform(cluster, work, None)),
            Some(Fault::FailsBefore) => return injected(),
            Some(Fault::FailsAfter) => {
                drop(self.perform(cluster, work, None));
                return injected();
            }
            Some(cut) => {
                match cut {
                    Fault::CutDuring(remains) => {
                        drop(self.perform(cluster, work, Some(remains)));
                    }
                    Fault::CutAfter => drop(self.perform(cluster, work, None)),
                    _ => {}
                }
                self.power_cut();
                return None;
            }
        }
        Some(match self.perform(cluster, work, None) {
            Ok(done) => Event::Done(turn, done),
            Err(failure) => Event::Failed(turn, failure),
        })
    }
}
