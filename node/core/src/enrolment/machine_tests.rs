//! The machine against a model of the machine below it.
//!
//! [`World`] is what survives a power cut: the sealed configuration, the front
//! of the data partition, its file system and what the control plane keeps in
//! it. Each work has an effect on it, which a [`Fault`] may precede, cut in the
//! middle, or follow before the answer arrives. What is "the middle" is what
//! the slots and headers promise: the old state, the new one, or a first write
//! that was never completed. The world asserts the invariants at each effect.

use std::sync::LazyLock;

use hearth_api::{
    identity::{ClusterId, NodeId, NodeKey},
    v1::StorageSecurityPolicy,
};
use proptest::prelude::*;

use super::{
    super::{sealed::Registering, testing},
    *,
};
use crate::storage::header::{Header, Owner};

static BASE: LazyLock<Arc<Founding>> =
    LazyLock::new(|| testing::founding(0, StorageSecurity::Insecure));
static TOLD: LazyLock<Told> = LazyLock::new(|| told(None));

fn told(wipe: Option<u8>) -> Told {
    let policy = StorageSecurityPolicy::NeedsInsecure;
    Told::Parameters(Arc::new(testing::bootstrap(policy, wipe)))
}

fn founding(life: u8) -> Founding {
    let mut founding = Founding::clone(&BASE);
    founding.identity.enrolment_id = EnrolmentId::from_bytes([life; 16]);
    founding.identity.cluster_id = ClusterId::from_bytes([life; 16]);
    founding.identity.node_id = NodeId::from_bytes([life; 16]);
    founding
}

fn ca(life: u8) -> CertificateDer<'static> {
    CertificateDer::from(vec![life; 4])
}

fn credentials(life: u8) -> Arc<NodeCredentials> {
    static KEY: LazyLock<NodeKey> = LazyLock::new(|| NodeKey::from_seed([0xb3; 32]));
    Arc::new(NodeCredentials {
        key: KEY.clone(),
        certificate: CertificateDer::from(vec![life; 8]),
        ca: ca(life),
    })
}

fn header(phase: Phase, owner: Owner) -> Front {
    Front::Header(Header::new(phase, owner, [7; 32], None))
}

fn ready(life: u8) -> Front {
    header(Phase::Ready, founding(life).identity.data_owner())
}

fn initialising(life: u8) -> Front {
    header(Phase::Initialising, founding(life).identity.data_owner())
}

fn sealed_founding(life: u8, cluster_ca: Option<CertificateDer<'static>>) -> Sealed {
    Sealed::Founding(Arc::new(Founding {
        cluster_ca,
        ..founding(life)
    }))
}

fn sealed_member(life: u8, storage_security: StorageSecurity) -> Sealed {
    let mut founding = founding(life);
    founding.identity.storage_security = storage_security;
    Sealed::Member(Arc::new(founding.into_member(ca(life))))
}

/// What goes wrong with one work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It fails and has done nothing.
    FailsBefore,
    /// It is done, and the answer is a failure.
    FailsAfter,
    /// The power goes before it.
    CutBefore,
    /// The power goes in its midst; the number selects which of the possible
    /// remains is left.
    CutDuring(usize),
    /// The power goes after it, before the answer.
    CutAfter,
}

const FAULTS: [Fault; 7] = [
    Fault::FailsBefore,
    Fault::FailsAfter,
    Fault::CutBefore,
    Fault::CutDuring(0),
    Fault::CutDuring(1),
    Fault::CutDuring(2),
    Fault::CutAfter,
];

#[derive(Clone, Debug, PartialEq, Eq)]
enum FileSystem {
    None,
    Half,
    Made(Content),
}

/// What the control plane leaves on the data partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
    authorities: bool,
    authority_keys: bool,
    /// The founding transaction, and by which life.
    founded: Option<u8>,
    credentials: bool,
}

#[derive(Clone, Debug)]
struct World {
    sealed: Stored,
    /// How far the last configuration that was acknowledged is; see [`rank`].
    acknowledged: u8,
    front: Front,
    files: FileSystem,
    mounted: bool,
    lives: u8,
    home: bool,
    handed_over: bool,
}

fn rank(sealed: &Stored) -> u8 {
    match sealed {
        Stored::Absent | Stored::NeverCompleted => 0,
        Stored::Sealed(Sealed::Founding(founding)) if founding.cluster_ca.is_none() => 1,
        Stored::Sealed(Sealed::Founding(_)) => 2,
        Stored::Sealed(Sealed::Registering(_)) => panic!("not in this release"),
        Stored::Sealed(Sealed::Member(_)) => 3,
    }
}

impl World {
    fn blank() -> Self {
        Self {
            sealed: Stored::Absent,
            acknowledged: 0,
            front: Front::Blank,
            files: FileSystem::None,
            mounted: false,
            lives: 0,
            home: false,
            handed_over: false,
        }
    }

    fn power_cut(&mut self) {
        self.mounted = false;
        self.home = false;
        self.handed_over = false;
        assert!(
            rank(&self.sealed) >= self.acknowledged,
            "an acknowledged configuration is lost"
        );
    }

    fn life(&self) -> u8 {
        match &self.sealed {
            Stored::Sealed(sealed) => sealed.enrolment_id().as_bytes()[0],
            other => panic!("no configuration is durable: {other:?}"),
        }
    }

    fn content(&mut self) -> &mut Content {
        assert!(self.mounted, "not mounted");
        match &mut self.files {
            FileSystem::Made(content) => content,
            other => panic!("no file system: {other:?}"),
        }
    }

    /// What must hold whenever the data partition is made.
    fn may_make(&self, wanted: &Founding) {
        assert!(!self.mounted);
        match &self.sealed {
            Stored::Sealed(Sealed::Founding(durable)) => {
                assert_eq!(
                    durable.identity.enrolment_id, wanted.identity.enrolment_id,
                    "another life is durable"
                );
                assert!(durable.cluster_ca.is_none(), "its authorities are made");
            }
            other => panic!("made without a durable FOUNDING: {other:?}"),
        }
        match &self.front {
            Front::Blank | Front::Unfinished => {}
            Front::Header(header) => {
                assert_eq!(header.owner, wanted.identity.data_owner(), "foreign");
                assert_eq!(
                    header.phase,
                    Phase::Initialising,
                    "READY is never made again"
                );
            }
            Front::Foreign(why) => panic!("foreign: {why}"),
        }
    }

    /// Does a work, as far as `during` says: `None` is to its end.
    fn perform(&mut self, work: &Work, during: Option<usize>) -> Done {
        match work {
            Work::Inspect => {
                return Done::Inspected(Box::new(Inspection {
                    sealed: SealedFound::Stored(self.sealed.clone()),
                    front: self.front.clone(),
                }));
            }
            Work::Wipe { sealed, data } => self.wipe(*sealed, *data, during),
            Work::AwaitAddress => {}
            Work::MakeKeys(_) => {
                self.lives += 1;
                return Done::Keys(Arc::new(founding(self.lives)));
            }
            Work::SaveSealed(sealed) => self.save(sealed, during),
            Work::Initialise(founding) => self.initialise(founding, during),
            Work::MakeFileSystem(founding) => {
                self.may_make(founding);
                assert!(matches!(self.front, Front::Header(_)), "no header yet");
                self.files = match during {
                    Some(_) => FileSystem::Half,
                    None => FileSystem::Made(Content::default()),
                };
            }
            Work::MarkReady(founding) => {
                assert!(
                    matches!(self.files, FileSystem::Made(_)),
                    "{:?}",
                    self.files
                );
                if !matches!(during, Some(0)) {
                    self.front = header(Phase::Ready, founding.identity.data_owner());
                }
            }
            Work::MountFounding(_) | Work::MountMember(_) => {
                let Front::Header(header) = &self.front else {
                    panic!("mounted without a header");
                };
                assert_eq!(header.phase, Phase::Ready);
                assert!(matches!(self.files, FileSystem::Made(_)));
                self.mounted = true;
            }
            Work::MakeAuthorities(_) => {
                let life = self.life();
                let content = self.content();
                if !matches!(during, Some(0)) {
                    assert_eq!(content.founded, None, "new authorities for an old cluster");
                    content.authorities = true;
                    content.authority_keys = true;
                }
                return Done::Authority(ca(life));
            }
            Work::AwaitFounded(founding) => {
                assert_eq!(rank(&self.sealed), 2, "the CA is not durable");
                assert!(founding.cluster_ca.is_some());
                let life = self.life();
                self.found(life, during);
                return Done::Credentials(credentials(life));
            }
            Work::LoadCredentials(_) => {
                let life = self.life();
                assert!(self.content().credentials);
                return Done::Credentials(credentials(life));
            }
            Work::HandOver { home, .. } => {
                assert_eq!(
                    rank(&self.sealed),
                    3,
                    "handed over before it is a durable MEMBER"
                );
                let life = self.life();
                let content = self.content();
                assert!(content.credentials && content.founded == Some(life));
                assert!(!content.authority_keys, "a CA's key is left on the disk");
                self.home = *home;
                self.handed_over = true;
            }
        }
        Done::Plain
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
            self.front = Front::Blank;
            self.files = FileSystem::None;
        }
    }

    fn save(&mut self, new: &Sealed, during: Option<usize>) {
        let new = Stored::Sealed(new.clone());
        match during {
            Some(0) => {}
            Some(1) if rank(&self.sealed) == 0 => self.sealed = Stored::NeverCompleted,
            _ => {
                assert!(rank(&new) >= rank(&self.sealed), "back to {new:?}");
                self.sealed = new;
            }
        }
        if during.is_none() {
            self.acknowledged = rank(&self.sealed);
        }
    }

    fn initialise(&mut self, founding: &Founding, during: Option<usize>) {
        self.may_make(founding);
        match during {
            Some(0) => {}
            Some(1) if self.front == Front::Blank => self.front = Front::Unfinished,
            _ => {
                self.front = header(Phase::Initialising, founding.identity.data_owner());
                self.files = FileSystem::Half;
            }
        }
    }

    /// The control plane's part: transaction, credentials, keys removed.
    fn found(&mut self, life: u8, during: Option<usize>) {
        let content = self.content();
        if !content.credentials {
            assert!(content.authority_keys, "nothing to found with");
        }
        let steps = during.unwrap_or(3);
        if steps >= 1 {
            assert!(
                content.founded.is_none_or(|l| l == life),
                "a second cluster"
            );
            content.founded = Some(life);
        }
        if steps >= 2 {
            content.credentials = true;
        }
        if steps >= 3 {
            content.authority_keys = false;
        }
    }
}

/// Which work, counted over all boots, meets which fault.
type Script = Vec<(usize, Fault)>;

/// More works than any run can need whose faults end.
const BOUND: usize = 120;

/// Boots, works and boots again until the machine wants nothing any more.
fn run(world: &mut World, told: &Told, script: &Script) -> State {
    let mut works = 0;
    'boot: loop {
        let (mut machine, mut actions) = Machine::start(told.clone());
        loop {
            let Some((turn, work)) = actions.iter().find_map(|action| match action {
                Action::Work(turn, work) => Some((*turn, work.clone())),
                _ => None,
            }) else {
                let Some(Action::BackOff(turn)) = actions.last() else {
                    return machine.state().clone();
                };
                (machine, actions) = machine.step(Event::RetryDue(*turn));
                continue;
            };
            assert!(works < BOUND, "it does not end: {script:?}");
            let fault = script.iter().find(|(at, _)| *at == works).map(|(_, f)| *f);
            works += 1;
            let event = match fault {
                None => Event::Done(turn, world.perform(&work, None)),
                Some(Fault::FailsBefore) => Event::Failed(turn, Failure::Again("injected".into())),
                Some(Fault::FailsAfter) => {
                    world.perform(&work, None);
                    Event::Failed(turn, Failure::Again("injected".into()))
                }
                Some(cut) => {
                    match cut {
                        Fault::CutDuring(remains) => drop(world.perform(&work, Some(remains))),
                        Fault::CutAfter => drop(world.perform(&work, None)),
                        _ => {}
                    }
                    world.power_cut();
                    continue 'boot;
                }
            };
            (machine, actions) = machine.step(event);
        }
    }
}

fn settles(world: &mut World, told: &Told, script: &Script) {
    let end = run(world, told, script);
    assert!(matches!(end, State::Settled), "{script:?}: {end:?}");
    assert!(world.handed_over);
    assert_eq!(rank(&world.sealed), 3);
}

#[test]
fn a_blank_machine_becomes_home_and_comes_back() {
    let mut world = World::blank();
    settles(&mut world, &TOLD, &Vec::new());
    assert!(world.home);
    // With the parameters, without, and with unusable ones.
    for told in [TOLD.clone(), Told::Nothing, Told::Unusable("bad".into())] {
        world.power_cut();
        settles(&mut world, &told, &Vec::new());
        assert!(!world.home, "the membership worker says so, once it is");
        assert_eq!(world.lives, 1);
    }
}

/// FAULTS 1, 2, 33 for the bootstrap: every pair of faults at every pair of
/// works.
#[test]
fn any_two_faults_anywhere_and_it_still_comes_home() {
    let clean = 13;
    for first in 0..clean {
        for first_fault in FAULTS {
            // A boot that starts again has that many works before it.
            for second in first..first + clean + 1 {
                for second_fault in FAULTS {
                    let script = vec![(first, first_fault), (second, second_fault)];
                    settles(&mut World::blank(), &TOLD, &script);
                }
            }
        }
    }
}

/// A machine that has begun needs its parameters no more.
#[test]
fn a_founding_goes_on_without_parameters() {
    for cut in 4..13 {
        let mut world = World::blank();
        let script = vec![(cut, Fault::CutBefore)];
        // The first boot is told, the others are not.
        let (mut machine, mut actions) = Machine::start(TOLD.clone());
        for _ in 0..cut {
            let Some(Action::Work(turn, work)) = actions.last().cloned() else {
                panic!("{script:?}: nothing to do");
            };
            let done = world.perform(&work, None);
            (machine, actions) = machine.step(Event::Done(turn, done));
        }
        drop((machine, actions));
        world.power_cut();
        settles(&mut world, &Told::Nothing, &Vec::new());
        assert_eq!(world.lives, 1, "the same life goes on");
    }
}

fn decided(told: &Told, sealed: SealedFound, front: Front) -> State {
    decide(told, Inspection { sealed, front })
}

fn stored(sealed: Sealed) -> SealedFound {
    SealedFound::Stored(Stored::Sealed(sealed))
}

fn corrupt() -> SealedFound {
    SealedFound::Corrupt("both slots: checksum mismatch".into())
}

fn refusal(state: State) -> String {
    match state {
        State::Refused(why) => why,
        other => panic!("not refused: {other:?}"),
    }
}

/// FAULTS 11 and what is like it: with bootstrap parameters at hand.
#[test]
fn what_cannot_be_explained_is_refused_and_says_how_to_give_up() {
    let absent = || SealedFound::Stored(Stored::Absent);
    let never = || SealedFound::Stored(Stored::NeverCompleted);
    let token = |life: u8| format!("wipe.enrolment_id = {}", hex::encode([life; 16]));
    let foreign = || Front::Foreign("XFS".into());
    let cases = [
        // Corrupt, over whatever.
        (corrupt(), ready(1), token(1)),
        (corrupt(), initialising(1), token(1)),
        (corrupt(), Front::Blank, "image to it anew".into()),
        (corrupt(), foreign(), "image to it anew".into()),
        // Absent, over something.
        (absent(), ready(1), token(1)),
        (absent(), initialising(1), token(1)),
        (absent(), foreign(), "image to it anew".into()),
        (absent(), Front::Unfinished, "image to it anew".into()),
        (never(), ready(1), token(1)),
        // A member without its disk.
        (
            stored(sealed_member(1, StorageSecurity::Insecure)),
            ready(2),
            token(1),
        ),
        (
            stored(sealed_member(1, StorageSecurity::Insecure)),
            Front::Blank,
            token(1),
        ),
        (
            stored(sealed_member(1, StorageSecurity::Insecure)),
            initialising(1),
            token(1),
        ),
        (
            stored(sealed_member(1, StorageSecurity::Encrypted)),
            foreign(),
            token(1),
        ),
        // A founder with another disk.
        (stored(sealed_founding(1, None)), ready(2), token(1)),
        (stored(sealed_founding(1, None)), initialising(2), token(1)),
        (stored(sealed_founding(1, None)), foreign(), token(1)),
        // A founder whose disk has lost what was made on it.
        (
            stored(sealed_founding(1, Some(ca(1)))),
            Front::Blank,
            token(1),
        ),
        (
            stored(sealed_founding(1, Some(ca(1)))),
            Front::Unfinished,
            token(1),
        ),
        (
            stored(sealed_founding(1, Some(ca(1)))),
            initialising(1),
            token(1),
        ),
    ];
    for (sealed, front, advice) in cases {
        let why = refusal(decided(&TOLD, sealed.clone(), front.clone()));
        assert!(why.contains(&advice), "{sealed:?}, {front:?}: {why}");
    }
}

#[test]
fn a_blank_machine_does_what_it_is_told_or_says_why_not() {
    for sealed in [Stored::Absent, Stored::NeverCompleted] {
        let decided =
            |told: &Told| decided(told, SealedFound::Stored(sealed.clone()), Front::Blank);
        assert!(matches!(decided(&TOLD), State::AwaitingAddress(_)));
        assert!(refusal(decided(&Told::Nothing)).starts_with("no parameters"));
        let unusable = Told::Unusable("parameters from there: field: bad".into());
        assert_eq!(
            refusal(decided(&unusable)),
            "parameters from there: field: bad"
        );
    }
}

#[test]
fn what_this_release_cannot_do_waits_with_a_reason() {
    for security in [
        StorageSecurity::Encrypted,
        StorageSecurity::AuthenticatedEncrypted,
    ] {
        let state = decided(&TOLD, stored(sealed_member(1, security)), ready(1));
        let State::Waiting(reason) = state else {
            panic!("{state:?}");
        };
        assert!(reason.contains("cold-start"), "{reason}");
    }
    let base = founding(1);
    let registering = Sealed::Registering(Arc::new(Registering {
        enrolment_id: base.identity.enrolment_id,
        node_id: base.identity.node_id,
        node_key: base.node_key.clone(),
        node_unlock_key: base.identity.node_unlock_key.clone(),
        cluster_unlock_key: base.cluster_unlock_key.clone(),
        join_key: base.identity.join_key.clone(),
        cluster_ca: ca(1),
        network: None,
    }));
    let state = decided(&TOLD, stored(registering), Front::Blank);
    assert!(matches!(state, State::Waiting(_)), "{state:?}");
}

#[test]
fn a_wipe_token_destroys_what_it_names_and_nothing_else() {
    let wiped = |token, sealed: SealedFound, front| match decided(&told(Some(token)), sealed, front)
    {
        State::Wiping { sealed, data } => (sealed, data),
        _ => (false, false),
    };
    let member = |life| stored(sealed_member(life, StorageSecurity::Insecure));
    assert_eq!(wiped(1, member(1), ready(1)), (true, true));
    assert_eq!(wiped(2, member(1), ready(1)), (false, false));
    assert_eq!(wiped(1, member(1), ready(2)), (true, false));
    assert_eq!(wiped(2, member(1), ready(2)), (false, true));
    assert_eq!(
        wiped(1, member(1), Front::Foreign("XFS".into())),
        (true, false)
    );
    assert_eq!(wiped(1, corrupt(), ready(1)), (true, true));
    assert_eq!(wiped(1, corrupt(), ready(2)), (false, false));
    assert_eq!(wiped(1, corrupt(), Front::Blank), (false, false));
    let absent = SealedFound::Stored(Stored::Absent);
    assert_eq!(wiped(1, absent.clone(), ready(1)), (false, true));
    assert_eq!(wiped(1, absent.clone(), Front::Blank), (false, false));
    // A life that ended within the first write of its header.
    let founding = stored(sealed_founding(1, None));
    let never = SealedFound::Stored(Stored::NeverCompleted);
    assert_eq!(wiped(1, founding.clone(), Front::Unfinished), (true, true));
    assert_eq!(wiped(2, founding, Front::Unfinished), (false, false));
    assert_eq!(wiped(1, absent, Front::Unfinished), (false, true));
    assert_eq!(wiped(1, never, Front::Unfinished), (true, true));
    assert_eq!(wiped(1, corrupt(), Front::Unfinished), (false, false));
}

/// A token in parameters that stay there works once: the next life has another
/// enrolment ID. With a fault anywhere on the way.
#[test]
fn a_wipe_happens_once_and_survives_power_cuts() {
    let mut former = World::blank();
    settles(&mut former, &TOLD, &Vec::new());
    former.power_cut();
    let told = told(Some(1));
    for at in 0..4 {
        for fault in FAULTS {
            let mut world = former.clone();
            settles(&mut world, &told, &vec![(at, fault)]);
            assert_eq!(world.life(), 2);
            world.power_cut();
            settles(&mut world, &told, &Vec::new());
            assert_eq!(world.life(), 2, "not wiped again");
        }
    }
}

#[test]
fn a_refusal_while_it_works_ends_it() {
    let (machine, actions) = Machine::start(TOLD.clone());
    let Some(Action::Work(turn, _)) = actions.last() else {
        panic!("{actions:?}");
    };
    let (machine, actions) = machine.step(Event::Failed(*turn, Failure::Refuse("no".into())));
    assert_eq!(refusal(machine.state().clone()), "no");
    assert!(matches!(
        &actions[..],
        [Action::Show(Standing::Refused(why))] if why == "no"
    ));
}

#[test]
fn a_founding_that_ends_with_another_ca_is_refused() {
    let founding = Arc::new(Founding {
        cluster_ca: Some(ca(1)),
        ..founding(1)
    });
    let done = Done::Credentials(credentials(2));
    let state = founding_after(&founding, FoundingStep::AwaitFounded, done).unwrap();
    assert!(refusal(state).contains("another CA"));
}

/// Any event, from a turn near the present one; often the right one.
fn event() -> impl Strategy<Value = (i64, usize)> {
    prop_oneof![Just((0, RIGHT)), (-2_i64..3, 0..=RIGHT)]
}

/// Stands for the answer that the work under way asks for.
const RIGHT: usize = 8;

fn made(turn: Turn, kind: usize, state: &State) -> Event {
    let kind = match (kind, state.work()) {
        (RIGHT, Some(Work::Inspect)) => 7,
        (RIGHT, Some(Work::MakeKeys(_))) => 1,
        (RIGHT, Some(Work::MakeAuthorities(_))) => 2,
        (RIGHT, Some(Work::AwaitFounded(_))) => 3,
        (RIGHT, _) => 0,
        (kind, _) => kind,
    };
    match kind {
        0 => Event::Done(turn, Done::Plain),
        1 => Event::Done(turn, Done::Keys(Arc::new(founding(1)))),
        2 => Event::Done(turn, Done::Authority(ca(1))),
        3 => Event::Done(turn, Done::Credentials(credentials(1))),
        4 => Event::Failed(turn, Failure::Again("later".into())),
        5 => Event::RetryDue(turn),
        6 => Event::Failed(turn, Failure::Refuse("never".into())),
        _ => Event::Done(
            turn,
            Done::Inspected(Box::new(Inspection {
                sealed: SealedFound::Stored(Stored::Absent),
                front: Front::Blank,
            })),
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// FAULTS 32: late, repeated, reordered and misplaced answers. No step is
    /// skipped, and there is never more than one work under way.
    #[test]
    fn answers_in_any_order_skip_no_step(events in prop::collection::vec(event(), 0..80)) {
        let (mut machine, actions) = Machine::start(TOLD.clone());
        prop_assert_eq!(actions.len(), 2);
        let mut trace = vec![Work::Inspect.to_string()];
        for (offset, kind) in events {
            let now = machine.turn.0 as i64;
            let turn = Turn(now.saturating_add(offset).max(0) as u64);
            let before = machine.clone();
            let event = made(turn, kind, machine.state());
            let (next, actions) = machine.step(event);
            machine = next;
            if offset != 0 {
                prop_assert!(actions.is_empty(), "an answer to another question counts");
                prop_assert_eq!(machine.turn, before.turn);
            }
            let works = actions.iter().filter(|a| matches!(a, Action::Work(..))).count();
            prop_assert!(works <= 1);
            if let Some(Action::Work(_, work)) = actions.last() {
                let name = work.to_string();
                if trace.last() != Some(&name) {
                    trace.push(name);
                }
            }
        }
        let order = [
            "read what is on the disk", "get an address", "make keys",
            "save the sealed configuration", "begin the data partition", "make the file system",
            "complete the data partition", "mount the data partition",
            "make the certificate authorities", "save the sealed configuration",
            "found the cluster", "save the sealed configuration", "hand over to the role server",
        ];
        for (step, name) in trace.iter().enumerate() {
            prop_assert_eq!(name, order[step], "{:?}", &trace);
        }
    }

    /// Longer runs with more faults than the exhaustive test can try.
    #[test]
    fn many_faults_delay_and_break_nothing(
        faults in prop::collection::btree_map(0_usize..60, 0..FAULTS.len(), 0..20),
    ) {
        let script: Script = faults.into_iter().map(|(at, fault)| (at, FAULTS[fault])).collect();
        settles(&mut World::blank(), &TOLD, &script);
    }

    /// Whatever is found: the disk is made only for a founding that knows no
    /// CA, over nothing or over its own beginnings.
    #[test]
    fn no_finding_leads_to_a_lost_disk(sealed in 0..6_usize, front in 0..6_usize, token in 0_u8..4) {
        let sealed = match sealed {
            0 => SealedFound::Stored(Stored::Absent),
            1 => SealedFound::Stored(Stored::NeverCompleted),
            2 => corrupt(),
            3 => stored(sealed_founding(1, None)),
            4 => stored(sealed_founding(1, Some(ca(1)))),
            _ => stored(sealed_member(1, StorageSecurity::Insecure)),
        };
        let front = match front {
            0 => Front::Blank,
            1 => Front::Unfinished,
            2 => Front::Foreign("XFS".into()),
            3 => ready(1),
            4 => initialising(1),
            _ => ready(2),
        };
        let state = decided(&told(Some(token)), sealed, front.clone());
        match state {
            State::Founding(founding, FoundingStep::Initialise) => {
                prop_assert!(founding.cluster_ca.is_none());
                prop_assert!(
                    front == Front::Blank || front == Front::Unfinished || front == initialising(1)
                );
            }
            State::AwaitingAddress(_) => prop_assert_eq!(front, Front::Blank),
            State::Wiping { data: true, .. } => match front {
                Front::Header(header) => {
                    prop_assert_eq!(header.owner.enrolment_id, EnrolmentId::from_bytes([token; 16]));
                }
                front => prop_assert_eq!(front, Front::Unfinished, "wiped what bears no name"),
            },
            State::Founding(_, step) => prop_assert_eq!(step, FoundingStep::Mount),
            State::Wiping { .. } | State::Mounting(_) | State::Refused(_) => {}
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
    }
}
