//! The machine against a model of its disk and cluster: bootstrap and decisions. [`super::model`]
//! has the registrations.

use hearth_api::recovery::RecoveryKey;
use hearth_api::recovery::console::WrappedRecordKey;
use hearth_api::v1::{ColdStartPolicy, StorageSecurity, TpmUsage};
use hearth_host::storage::header::HeaderState;
use proptest::prelude::*;

use super::super::EnrolmentId;
use super::deciding::decide;
use super::world::*;
use super::*;
use crate::sealed::Stored;

fn run(world: &mut World, input: &ParametersInput, script: &Script) -> State {
    // A bootstrap has no cluster to ask.
    let mut nobody = Cluster::new(StorageSecurity::Insecure);
    run_in(world, &mut nobody, input, script)
}

fn settles(world: &mut World, input: &ParametersInput, script: &Script) {
    let end = run(world, input, script);
    assert!(matches!(end, State::Settled), "{script:?}: {end:?}");
    assert!(world.handed_over);
    assert_eq!(rank(&world.sealed), 3);
}

#[test]
fn a_blank_machine_becomes_home_and_comes_back() {
    let mut world = World::blank();
    settles(&mut world, &INPUT, &Vec::new());
    assert!(world.home);
    // With the parameters, without, and with invalid ones.
    for input in [
        INPUT.clone(),
        ParametersInput::Nothing,
        ParametersInput::Unusable("bad".into()),
    ] {
        world.power_cut();
        settles(&mut world, &input, &Vec::new());
        assert!(!world.home, "the membership worker says so, once it is");
        assert_eq!(world.enrolments, 1);
    }
}

/// FAULTS 1, 2, 33 for the bootstrap: every pair of faults at every pair of tasks.
#[test]
fn any_two_faults_anywhere_and_it_still_comes_home() {
    let clean = 13;
    for first in 0..clean {
        for first_fault in FAULTS {
            // The number of tasks that precede a boot that starts again.
            for second in first..first + clean + 1 {
                for second_fault in FAULTS {
                    let script = vec![(first, first_fault), (second, second_fault)];
                    settles(&mut World::blank(), &INPUT, &script);
                }
            }
        }
    }
}

/// An interrupted bootstrap does not need the parameters any more.
#[test]
fn a_founding_goes_on_without_parameters() {
    for cut in 4..13 {
        let mut world = World::blank();
        let script = vec![(cut, Fault::CutBefore)];
        // The first boot has parameters, the others have none.
        let mut nobody = Cluster::new(StorageSecurity::Insecure);
        let (mut machine, mut actions) = Machine::start(INPUT.clone());
        for _ in 0..cut {
            let Some(Action::Work(turn, work)) = actions.last().cloned() else {
                panic!("{script:?}: nothing to do");
            };
            let done = world.perform(&mut nobody, &work, None).unwrap();
            (machine, actions) = machine.step(Event::Done(turn, done));
        }
        drop((machine, actions));
        world.power_cut();
        settles(&mut world, &ParametersInput::Nothing, &Vec::new());
        assert_eq!(world.enrolments, 1, "the same enrolment continues");
    }
}

fn decided(input: &ParametersInput, sealed: SealedState, header: HeaderState) -> State {
    decide(input, DiskState { sealed, header })
}

fn stored(sealed: Sealed) -> SealedState {
    SealedState::Stored(Stored::Sealed(sealed))
}

fn corrupt() -> SealedState {
    SealedState::Corrupt("both slots: checksum mismatch".into())
}

fn locked() -> SealedState {
    locked_with(None)
}

fn locked_with(recovery: Option<WrappedRecordKey>) -> SealedState {
    SealedState::Locked {
        why: "PCR 7: expected 11, got 22".into(),
        recovery,
    }
}

fn refusal(state: State) -> String {
    match state {
        State::Refused(why) => why,
        other => panic!("not refused: {other:?}"),
    }
}

/// FAULTS 11 and similar: with bootstrap parameters present.
#[test]
fn what_cannot_be_explained_is_refused_and_says_how_to_give_up() {
    let absent = || SealedState::Stored(Stored::Absent);
    let never = || SealedState::Stored(Stored::NeverCompleted);
    let token = |enrolment: u8| format!("wipe.enrolment_id = {}", hex::encode([enrolment; 16]));
    let foreign = || HeaderState::Foreign("XFS".into());
    let cases = [
        // Corrupt, with any data partition.
        (corrupt(), ready(1), token(1)),
        (corrupt(), initialising(1), token(1)),
        (
            corrupt(),
            HeaderState::Blank,
            "image to the disk again".into(),
        ),
        (corrupt(), foreign(), "image to the disk again".into()),
        // Sealed by a TPM that does not open it.
        (locked(), ready(1), token(1)),
        (
            locked(),
            HeaderState::Blank,
            "PCR 7: expected 11, got 22. Nothing was changed. Restore ".into(),
        ),
        // Absent, with a data partition that is not blank.
        (absent(), ready(1), token(1)),
        (absent(), initialising(1), token(1)),
        (absent(), foreign(), "image to the disk again".into()),
        (
            absent(),
            HeaderState::Unfinished,
            "image to the disk again".into(),
        ),
        (never(), ready(1), token(1)),
        // A member without its disk.
        (
            stored(sealed_member(1, StorageSecurity::Insecure)),
            ready(2),
            token(1),
        ),
        (
            stored(sealed_member(1, StorageSecurity::Insecure)),
            HeaderState::Blank,
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
        // A founder whose disk has lost its content.
        (
            stored(sealed_founding(1, Some(ca(1)))),
            HeaderState::Blank,
            token(1),
        ),
        (
            stored(sealed_founding(1, Some(ca(1)))),
            HeaderState::Unfinished,
            token(1),
        ),
        (
            stored(sealed_founding(1, Some(ca(1)))),
            initialising(1),
            token(1),
        ),
    ];
    for (sealed, header, advice) in cases {
        let why = refusal(decided(&INPUT, sealed.clone(), header.clone()));
        assert!(why.contains(&advice), "{sealed:?}, {header:?}: {why}");
    }
}

#[test]
fn a_blank_machine_does_what_it_is_told_or_says_why_not() {
    for sealed in [Stored::Absent, Stored::NeverCompleted] {
        let decided = |input: &ParametersInput| {
            decided(
                input,
                SealedState::Stored(sealed.clone()),
                HeaderState::Blank,
            )
        };
        assert!(matches!(decided(&INPUT), State::AwaitingAddress(_)));
        assert!(refusal(decided(&ParametersInput::Nothing)).starts_with("no parameters"));
        let unusable = ParametersInput::Unusable("parameters from there: field: bad".into());
        assert_eq!(
            refusal(decided(&unusable)),
            "parameters from there: field: bad"
        );
    }
}

#[test]
fn an_encrypted_member_asks_for_its_key_first() {
    for security in [
        StorageSecurity::Encrypted,
        StorageSecurity::AuthenticatedEncrypted,
    ] {
        let state = decided(&INPUT, stored(sealed_member(1, security)), ready(1));
        assert!(matches!(state, State::Unlocking { .. }), "{state:?}");
    }
    let insecure = stored(sealed_member(1, StorageSecurity::Insecure));
    let state = decided(&INPUT, insecure, ready(1));
    assert!(matches!(state, State::Mounting { .. }), "{state:?}");
}

/// The console says once why the node waits, and the pace is the cluster's. A later failure is not
/// hidden by it.
#[test]
fn what_the_cluster_waits_for_is_shown_once() {
    let (machine, actions) = Machine::start(INPUT.clone());
    let Some(Action::Work(turn, Work::Inspect)) = actions.last() else {
        panic!("{actions:?}");
    };
    let disk = DiskState {
        sealed: stored(sealed_member(1, StorageSecurity::Encrypted)),
        header: ready(1),
    };
    let (mut machine, _) = machine.step(Event::Done(*turn, Done::Inspected(Box::new(disk))));
    let mut step = |event: fn(RequestId) -> Event| {
        let (next, actions) = machine.clone().step(event(machine.turn));
        machine = next;
        let actions = actions.into_iter().map(|action| match action {
            Action::Show(EnrolmentStatus::Waiting { reason, .. }) => format!("waits for {reason}"),
            Action::Show(EnrolmentStatus::Retrying { reason, .. }) => format!("failed: {reason}"),
            Action::Show(status) => format!("{status:?}"),
            Action::Work(_, work) => work.to_string(),
            Action::BackOff(_, pace) => format!("{pace:?}"),
            Action::Announce(phase) => format!("{phase:?}"),
        });
        actions.collect::<Vec<_>>()
    };
    let not_yet = |turn| {
        let ask_again = Duration::from_secs(2);
        let reason = "another boot".into();
        Event::Failed(turn, Failure::NotYet { reason, ask_again })
    };
    let get = "get the unlock key from the cluster";
    assert_eq!(step(not_yet), ["waits for another boot", "After(2s)"]);
    assert_eq!(step(Event::RetryDue), [get]);
    assert_eq!(step(not_yet), ["After(2s)"]);
    assert_eq!(step(Event::RetryDue), [get]);
    let failed = step(|turn| Event::Failed(turn, Failure::Again("silence".into())));
    assert_eq!(failed, ["failed: silence", "Growing"]);
    let working = format!("Working({get:?})");
    assert_eq!(step(Event::RetryDue), [&working, get]);
    assert_eq!(step(not_yet), ["waits for another boot", "After(2s)"]);
}

#[test]
fn a_member_that_has_both_halves_of_its_key_opens_its_disk_itself() {
    for (security, opens) in [
        (StorageSecurity::Encrypted, true),
        (StorageSecurity::AuthenticatedEncrypted, true),
        // It needs no key at all.
        (StorageSecurity::Insecure, false),
    ] {
        let mut founding = founding(1);
        founding.identity.storage_security = security;
        founding.identity.tpm_usage = TpmUsage::PresentAndUsed;
        founding.identity.cold_start_policy = ColdStartPolicy::Tpm;
        let member = founding.into_member(ca(1));
        assert_eq!(member.cluster_unlock_key.is_some(), opens);
        let state = decided(&INPUT, stored(Sealed::Member(Arc::new(member))), ready(1));
        let State::Mounting { volume, .. } = state else {
            panic!("{state:?}");
        };
        assert_eq!(volume.secrets.is_some(), opens);
        // Without a TPM that seals them it keeps one half only, whatever the policy.
        for usage in [TpmUsage::NotPresent, TpmUsage::PresentButUnused] {
            founding.identity.tpm_usage = usage;
            assert!(founding.into_member(ca(1)).cluster_unlock_key.is_none());
        }
    }
}

#[test]
fn what_the_tpm_does_not_open_waits_for_the_owner() {
    let key = RecoveryKey::generate();
    let wrapped = WrappedRecordKey::new(&key.recipient(), [1; 32], &[2; 32]);
    let state = decided(&input(None), locked_with(Some(wrapped.clone())), ready(1));
    let State::Locked { reason, recovery } = &state else {
        panic!("{state:?}");
    };
    assert_eq!(recovery, &wrapped);
    for part in [
        "PCR 7",
        "at its console with the recovery key",
        "wipe.enrolment_id",
    ] {
        assert!(reason.contains(part), "{reason}");
    }
    // Its owner can still give it up.
    let wiped = decided(
        &input(Some(1)),
        locked_with(Some(wrapped.clone())),
        ready(1),
    );
    assert!(matches!(
        wiped,
        State::Wiping {
            sealed: true,
            data: true
        }
    ));
    // Once it is open, the disk is looked at again.
    let (machine, actions) = Machine::start(input(None));
    let turn = |actions: &[Action]| match actions {
        [.., Action::Work(turn, _)] => *turn,
        other => panic!("{other:?}"),
    };
    let inspected = Done::Inspected(Box::new(DiskState {
        sealed: locked_with(Some(wrapped)),
        header: ready(1),
    }));
    let (machine, actions) = machine.step(Event::Done(turn(&actions), inspected));
    assert!(
        matches!(
            &actions[..],
            [
                Action::Show(EnrolmentStatus::Refused(_)),
                Action::Work(_, Work::Recover(_))
            ]
        ),
        "{actions:?}"
    );
    let (machine, _) = machine.step(Event::Done(turn(&actions), Done::Plain));
    assert!(matches!(machine.state(), State::Deciding));
}

#[test]
fn a_wipe_token_destroys_what_it_names_and_nothing_else() {
    let wiped =
        |token, sealed: SealedState, header| match decided(&input(Some(token)), sealed, header) {
            State::Wiping { sealed, data } => (sealed, data),
            _ => (false, false),
        };
    let member = |enrolment| stored(sealed_member(enrolment, StorageSecurity::Insecure));
    assert_eq!(wiped(1, member(1), ready(1)), (true, true));
    assert_eq!(wiped(2, member(1), ready(1)), (false, false));
    assert_eq!(wiped(1, member(1), ready(2)), (true, false));
    assert_eq!(wiped(2, member(1), ready(2)), (false, true));
    assert_eq!(
        wiped(1, member(1), HeaderState::Foreign("XFS".into())),
        (true, false)
    );
    assert_eq!(wiped(1, corrupt(), ready(1)), (true, true));
    assert_eq!(wiped(1, locked(), ready(1)), (true, true));
    assert_eq!(wiped(1, locked(), ready(2)), (false, false));
    assert_eq!(wiped(1, corrupt(), ready(2)), (false, false));
    assert_eq!(wiped(1, corrupt(), HeaderState::Blank), (false, false));
    let absent = SealedState::Stored(Stored::Absent);
    assert_eq!(wiped(1, absent.clone(), ready(1)), (false, true));
    assert_eq!(wiped(1, absent.clone(), HeaderState::Blank), (false, false));
    // An enrolment that ended within the first write of its header.
    let founding = stored(sealed_founding(1, None));
    let never = SealedState::Stored(Stored::NeverCompleted);
    assert_eq!(
        wiped(1, founding.clone(), HeaderState::Unfinished),
        (true, true)
    );
    assert_eq!(wiped(2, founding, HeaderState::Unfinished), (false, false));
    assert_eq!(wiped(1, absent, HeaderState::Unfinished), (false, true));
    assert_eq!(wiped(1, never, HeaderState::Unfinished), (true, true));
    assert_eq!(wiped(1, corrupt(), HeaderState::Unfinished), (false, false));
}

/// A wipe token that stays in the parameters works once, because the next enrolment has another ID.
/// With a fault at any point.
#[test]
fn a_wipe_happens_once_and_survives_power_cuts() {
    let mut former = World::blank();
    settles(&mut former, &INPUT, &Vec::new());
    former.power_cut();
    let input = input(Some(1));
    for at in 0..4 {
        for fault in FAULTS {
            let mut world = former.clone();
            settles(&mut world, &input, &vec![(at, fault)]);
            assert_eq!(world.enrolment(), 2);
            world.power_cut();
            settles(&mut world, &input, &Vec::new());
            assert_eq!(world.enrolment(), 2, "not wiped again");
        }
    }
}

#[test]
fn a_refusal_while_it_works_ends_it() {
    let (machine, actions) = Machine::start(INPUT.clone());
    let Some(Action::Work(turn, _)) = actions.last() else {
        panic!("{actions:?}");
    };
    let (machine, actions) = machine.step(Event::Failed(*turn, Failure::Refuse("no".into())));
    assert_eq!(refusal(machine.state().clone()), "no");
    assert!(matches!(
        &actions[..],
        [Action::Show(EnrolmentStatus::Refused(why))] if why == "no"
    ));
}

#[test]
fn a_founding_that_ends_with_another_ca_is_refused() {
    let founding = Arc::new(Founding {
        cluster_ca: Some(ca(1)),
        ..founding(1)
    });
    let done = Done::Credentials(credentials(2));
    let state = founding::after(&founding, FoundingStep::AwaitFounded, done).unwrap();
    assert!(refusal(state).contains("another CA"));
}

/// Any event, for a request near the current one; often the expected one.
fn event() -> impl Strategy<Value = (i64, usize)> {
    prop_oneof![Just((0, RIGHT)), (-2_i64..3, 0..=RIGHT)]
}

/// A placeholder for the result of the work in progress.
const RIGHT: usize = 8;

fn made(turn: RequestId, kind: usize, state: &State) -> Event {
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
        1 => Event::Done(turn, Done::Keys(Keys::Founding(Arc::new(founding(1))))),
        2 => Event::Done(turn, Done::Authority(ca(1))),
        3 => Event::Done(turn, Done::Credentials(credentials(1))),
        4 => Event::Failed(turn, Failure::Again("later".into())),
        5 => Event::RetryDue(turn),
        6 => Event::Failed(turn, Failure::Refuse("never".into())),
        _ => Event::Done(
            turn,
            Done::Inspected(Box::new(DiskState {
                sealed: SealedState::Stored(Stored::Absent),
                header: HeaderState::Blank,
            })),
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// FAULTS 32: late, repeated, reordered and mismatched results. No step is skipped, and there
    /// is never more than one task in progress.
    #[test]
    fn answers_in_any_order_skip_no_step(events in prop::collection::vec(event(), 0..80)) {
        let (mut machine, actions) = Machine::start(INPUT.clone());
        prop_assert_eq!(actions.len(), 2);
        let mut trace = vec![Work::Inspect.to_string()];
        for (offset, kind) in events {
            let now = machine.turn.0 as i64;
            let turn = RequestId(now.saturating_add(offset).max(0) as u64);
            let before = machine.clone();
            let event = made(turn, kind, machine.state());
            let (next, actions) = machine.step(event);
            machine = next;
            if offset != 0 {
                prop_assert!(actions.is_empty(), "a result of another request was accepted");
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
            "inspect the disk", "get an address", "generate keys",
            "save the sealed configuration", "initialise the data partition",
            "create the file system", "mark the data partition ready",
            "mount the data partition", "create the certificate authorities",
            "save the sealed configuration", "bootstrap the cluster",
            "save the sealed configuration", "hand over to the role server",
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
        settles(&mut World::blank(), &INPUT, &script);
    }

    /// For any disk: it is only initialised for a bootstrap without a CA, and only if it is blank
    /// or has the bootstrap's own unfinished header.
    #[test]
    fn no_finding_leads_to_a_lost_disk(sealed in 0..6_usize, header in 0..6_usize, token in 0_u8..4) {
        let sealed = match sealed {
            0 => SealedState::Stored(Stored::Absent),
            1 => SealedState::Stored(Stored::NeverCompleted),
            2 => corrupt(),
            3 => stored(sealed_founding(1, None)),
            4 => stored(sealed_founding(1, Some(ca(1)))),
            _ => stored(sealed_member(1, StorageSecurity::Insecure)),
        };
        let header = match header {
            0 => HeaderState::Blank,
            1 => HeaderState::Unfinished,
            2 => HeaderState::Foreign("XFS".into()),
            3 => ready(1),
            4 => initialising(1),
            _ => ready(2),
        };
        let state = decided(&input(Some(token)), sealed, header.clone());
        match state {
            State::Founding(founding, FoundingStep::Initialise) => {
                prop_assert!(founding.cluster_ca.is_none());
                prop_assert!(
                    header == HeaderState::Blank || header == HeaderState::Unfinished || header == initialising(1)
                );
            }
            State::AwaitingAddress(_) => prop_assert_eq!(header, HeaderState::Blank),
            State::Wiping { data: true, .. } => match header {
                HeaderState::Header(header) => {
                    prop_assert_eq!(header.owner.enrolment_id, EnrolmentId::from_bytes([token; 16]));
                }
                header => prop_assert_eq!(header, HeaderState::Unfinished, "wiped what bears no name"),
            },
            State::Founding(_, step) => prop_assert_eq!(step, FoundingStep::Mount),
            State::Wiping { .. } | State::Mounting { .. } | State::Refused(_) => {}
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
    }
}
