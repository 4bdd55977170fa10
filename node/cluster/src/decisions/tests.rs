//! Model test of the decisions, in memory: requests of several machines and operators, decided by
//! curators whose views lag, and written late, twice, in another order, or never.
//!
//! The reference model has no records. It predicts the result of a request, and the effect of an
//! executed write; after each write the records are compared with it.

use std::net::Ipv4Addr;

use hearth_api::identity::{ClusterUnlockKey, NodeId, PublicKey, SigningKey};
use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::node_roles::{ConsensusMember, KubernetesController, KubernetesWorker};
use hearth_api::v1::{NodeRoles, NodeState, StorageSecurity, TpmUsage};
use proptest::prelude::*;
use tonic::Code;

use super::commit::{Commit, Committed};
use super::join::Joined;
use super::registration::{Registered, Registration};
use super::removal::Bypass;
use super::roles::RoleChange;
use super::*;
use crate::state::{NodeRecord, Wanted};

mod configuration;
mod networking;
mod records;

use records::Records;

const MACHINES: u8 = 3;
const CURATORS: usize = 2;
const MEMBER: u64 = 77;

fn node_key(machine: u8) -> PublicKey {
    SigningKey::from_seed([machine + 1; 32]).public()
}

fn join_key(number: u8) -> PublicKey {
    SigningKey::from_seed([number + 101; 32]).public()
}

fn id(machine: u8) -> NodeId {
    registration::id_of(&node_key(machine))
}

fn unlock_key(number: u8) -> ClusterUnlockKey {
    ClusterUnlockKey::from_bytes([number; 32])
}

/// A request. Machines are numbers; their join and unlock keys are separate numbers, because a
/// machine may send wrong ones.
#[derive(Clone, Copy, Debug)]
enum Request {
    Rotate,
    Register { machine: u8, join: u8 },
    Approve(u8),
    Commit { machine: u8, unlock: u8 },
    Join { join: u8 },
    Role { machine: u8, wanted: bool },
    Controller { machine: u8, wanted: bool },
    Worker { machine: u8, wanted: bool },
    Decommission(u8),
    Delete { machine: u8, bypass: bool },
    Lead(u8, Lead),
}

/// A step of the leader for an intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lead {
    Add,
    Promote,
    Requeue,
    Remove,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Ask(usize, Request),
    /// The curator's view is brought up to date.
    Sync(usize),
    /// One of the pending writes is executed. It stays pending, so it may be executed again.
    Deliver(usize),
    /// One of the pending writes is dropped.
    Lose(usize),
}

/// The decision about a request.
fn decide(records: &Records, request: Request) -> Result<Option<Write>, Rejection> {
    let found = |machine: u8| {
        records.find(id(machine)).ok_or(Rejection::NoSuchNode {
            field: "node.node_id",
            wanted: id(machine).to_string(),
        })
    };
    match request {
        Request::Rotate => {
            let key = state::REGISTER_TICKET;
            let revision = records.store[key].2;
            let write = Write::when(Condition::Unchanged(key.into(), revision));
            Ok(Some(write.put(key, b"another".to_vec())))
        }
        Request::Register { machine, join } => register(records, machine, join),
        Request::Approve(machine) => transitions::approve(&found(machine)?),
        Request::Commit { machine, unlock } => commit(records, machine, unlock),
        Request::Join { join } => {
            let key = join_key(join);
            let id = records.join_key_of(&key);
            let found = join::Found {
                node: id.and_then(|id| records.node(id)),
                tombstone: id.and_then(|id| records.tombstone(id)),
                is_member: false,
            };
            let join = join::Join {
                join_key: key,
                tpm_usage: TpmUsage::NotPresent,
                boot_id: "boot".into(),
                address: Ipv4Addr::LOCALHOST.into(),
                admission: None,
            };
            let joined = join::decide(&join, found)?;
            // An admitted node has an unlock key.
            if let Joined::Admitted(id) = joined {
                let found = records.find(id).expect("it is there");
                assert!(found.full.content.unlock_key.is_some());
            }
            Ok(None)
        }
        Request::Role { machine, wanted } => {
            let wish = RoleChange {
                consensus_member: Some(wanted),
                ..Default::default()
            };
            Ok(roles::update(wish, &found(machine)?)?.write)
        }
        Request::Controller { machine, wanted } => {
            let wish = RoleChange {
                kubernetes_controller: Some(wanted),
                ..Default::default()
            };
            Ok(roles::update(wish, &found(machine)?)?.write)
        }
        Request::Worker { machine, wanted } => {
            let wish = RoleChange {
                kubernetes_worker: Some(wanted),
                ..Default::default()
            };
            Ok(roles::update(wish, &found(machine)?)?.write)
        }
        Request::Decommission(machine) => Ok(roles::decommission(&found(machine)?)?.write),
        Request::Delete { machine, bypass } => {
            let bypass = Bypass {
                not_decommissioned: bypass,
                has_roles: bypass,
            };
            Ok(Some(
                removal::decide(bypass, AfterRemoval::Wait, &found(machine)?)?.write,
            ))
        }
        Request::Lead(machine, what) => Ok(lead(records, machine, what)),
    }
}

fn register(records: &Records, machine: u8, join: u8) -> Result<Option<Write>, Rejection> {
    let registration = Registration {
        node_key: node_key(machine),
        join_key: join_key(join),
        tpm_is_present: false,
        labels: Vec::new(),
        admission: None,
    };
    let found = registration::Found {
        node: records.node(id(machine)),
        deleted: records.tombstone(id(machine)).is_some(),
        join_key_of: records.join_key_of(&registration.join_key),
        waiting: 0,
    };
    let ticket = records.store[state::REGISTER_TICKET].2;
    let configuration = records.configuration();
    Ok(
        match registration::decide(&registration, found, &configuration, ticket)? {
            Registered::Before(_) => None,
            Registered::Now(_, write) => Some(write),
        },
    )
}

fn commit(records: &Records, machine: u8, unlock: u8) -> Result<Option<Write>, Rejection> {
    let commit = Commit {
        node_key: node_key(machine),
        unlock_key: unlock_key(unlock),
        storage_security: StorageSecurity::Encrypted,
    };
    let found = records.find(id(machine));
    let deleted = records.tombstone(id(machine)).is_some();
    let configuration = records.configuration();
    match commit::decide(&commit, found.as_ref(), deleted, &configuration.content)? {
        Committed::Before(certificate) => {
            // The certificate that was issued for this commit.
            assert_eq!(certificate.as_deref(), Some(&[unlock; 4][..]));
            Ok(None)
        }
        Committed::Now => {
            let certificate = vec![unlock; 4].into();
            let found = found.expect("it was found");
            commit::write(&commit, &found, certificate, &configuration).map(Some)
        }
    }
}

/// The write of a leader's step, if the intent permits the step.
fn lead(records: &Records, machine: u8, what: Lead) -> Option<Write> {
    let found = records.find(id(machine))?;
    let intent = found.intent.as_ref()?.content;
    let key = state::intent_key(intent.node);
    let mut full = found.full.content.clone();
    let mut role = |member: Option<u64>| {
        full.node.roles.consensus_member = member.map(|member_id| ConsensusMember { member_id });
    };
    let wants = |wanted| Intent { wanted, ..intent }.encode();
    let write = found.all_unchanged();
    let write = match (what, intent.wanted) {
        (Lead::Add, Wanted::Join { member: None }) => {
            role(Some(MEMBER));
            let member = Some(MEMBER);
            write.put(key, wants(Wanted::Join { member }))
        }
        (Lead::Promote, Wanted::Join { member: Some(_) }) => write.delete(key),
        (Lead::Requeue, Wanted::Join { member: Some(_) }) => {
            role(None);
            write.put(key, wants(Wanted::Join { member: None }))
        }
        (Lead::Remove, Wanted::Leave { decommission }) => {
            role(None);
            if decommission {
                full.decommission();
            }
            write.delete(key)
        }
        _ => return None,
    };
    Some(put(write, &full))
}

/// The state of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Never,
    New,
    Standby,
    Up,
    Out,
    Gone,
}

/// The etcd membership of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Membership {
    #[default]
    None,
    Wanted,
    Added,
    Voter,
    Leaving {
        decommission: bool,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Reference {
    life: Life,
    join: Option<u8>,
    unlock: Option<u8>,
    membership: Membership,
    /// It has the role of a consensus member.
    role: bool,
    controller: bool,
    worker: bool,
}

type Machines = [Reference; MACHINES as usize];

/// The expected result of a request.
fn expected(machines: &Machines, request: Request) -> Result<(), Code> {
    use Life::{Gone, Never, New, Out, Standby, Up};
    let of = |machine: u8| machines[usize::from(machine)];
    let operator = |machine: u8| match of(machine).life {
        Never | Gone => Err(Code::NotFound),
        life => Ok(life),
    };
    match request {
        Request::Rotate | Request::Lead(..) => Ok(()),
        Request::Register { machine, join } => match of(machine).life {
            Out | Gone => Err(Code::PermissionDenied),
            Never if machines.iter().any(|m| m.join == Some(join)) => Err(Code::AlreadyExists),
            Never => Ok(()),
            _ if of(machine).join != Some(join) => Err(Code::FailedPrecondition),
            _ => Ok(()),
        },
        Request::Approve(machine) => match operator(machine)? {
            Out => Err(Code::PermissionDenied),
            _ => Ok(()),
        },
        Request::Commit { machine, unlock } => match of(machine).life {
            Never => Err(Code::NotFound),
            Out | Gone => Err(Code::PermissionDenied),
            New => Err(Code::FailedPrecondition),
            Up if of(machine).unlock != Some(unlock) => Err(Code::FailedPrecondition),
            Standby | Up => Ok(()),
        },
        Request::Join { join } => {
            let holder = machines.iter().find(|m| m.join == Some(join));
            match holder.map(|m| m.life) {
                None => Err(Code::NotFound),
                Some(New | Standby) => Err(Code::FailedPrecondition),
                Some(_) => Ok(()),
            }
        }
        Request::Role { machine, wanted } => match (operator(machine)?, of(machine).membership) {
            (Up, Membership::Leaving { decommission: true }) => Err(Code::FailedPrecondition),
            (Up, Membership::Leaving { .. }) if wanted => Err(Code::FailedPrecondition),
            (Up, _) if !wanted && of(machine).controller => Err(Code::FailedPrecondition),
            (Up, _) => Ok(()),
            _ => Err(Code::FailedPrecondition),
        },
        Request::Controller { machine, wanted } => {
            match (operator(machine)?, of(machine).membership) {
                (Up, Membership::None | Membership::Leaving { .. }) if wanted => {
                    Err(Code::FailedPrecondition)
                }
                (Up, _) => Ok(()),
                _ => Err(Code::FailedPrecondition),
            }
        }
        Request::Worker { machine, wanted } => match (operator(machine)?, of(machine).membership) {
            (Up, Membership::Leaving { decommission: true }) if wanted => {
                Err(Code::FailedPrecondition)
            }
            (Up, _) => Ok(()),
            _ => Err(Code::FailedPrecondition),
        },
        Request::Decommission(machine) => match operator(machine)? {
            Up | Out => Ok(()),
            _ => Err(Code::FailedPrecondition),
        },
        Request::Delete { machine, bypass } => match operator(machine)? {
            Up if !bypass => Err(Code::FailedPrecondition),
            _ => Ok(()),
        },
    }
}

/// Applies an executed write of this request to the model.
fn happened(machines: &mut Machines, request: Request) {
    let machine = match request {
        Request::Rotate | Request::Join { .. } => return,
        Request::Register { machine, .. }
        | Request::Approve(machine)
        | Request::Commit { machine, .. }
        | Request::Role { machine, .. }
        | Request::Controller { machine, .. }
        | Request::Worker { machine, .. }
        | Request::Decommission(machine)
        | Request::Delete { machine, .. }
        | Request::Lead(machine, _) => machine,
    };
    let m = &mut machines[usize::from(machine)];
    *m = after(*m, request);
}

/// The machine after a request. Panics if the request should not have written anything.
fn after(m: Reference, request: Request) -> Reference {
    let leaving = |decommission| Membership::Leaving { decommission };
    let (life, membership, role) = match (request, m.life, m.membership) {
        (Request::Register { join, .. }, Life::Never, _) => {
            return Reference {
                life: Life::New,
                join: Some(join),
                ..m
            };
        }
        (Request::Commit { unlock, .. }, Life::Standby, _) => {
            return Reference {
                life: Life::Up,
                unlock: Some(unlock),
                ..m
            };
        }
        (Request::Delete { .. }, _, _) => {
            return Reference {
                life: Life::Gone,
                ..out(m)
            };
        }
        (Request::Controller { wanted, .. }, Life::Up, _) if wanted != m.controller => {
            let controller = wanted;
            return Reference { controller, ..m };
        }
        (Request::Worker { wanted, .. }, Life::Up, _) if wanted != m.worker => {
            let worker = wanted;
            return Reference { worker, ..m };
        }
        (Request::Approve(_), Life::New, old) => (Life::Standby, old, m.role),
        (Request::Role { wanted: true, .. }, Life::Up, Membership::None) => {
            (Life::Up, Membership::Wanted, false)
        }
        (Request::Role { wanted: false, .. }, Life::Up, Membership::Wanted) => {
            (Life::Up, Membership::None, false)
        }
        (Request::Role { wanted: false, .. }, Life::Up, Membership::Added | Membership::Voter) => {
            (Life::Up, leaving(false), true)
        }
        (Request::Decommission(_), Life::Up, _) if m.role => {
            return Reference {
                membership: leaving(true),
                controller: false,
                worker: false,
                ..m
            };
        }
        (Request::Decommission(_), Life::Up, _) => return out(m),
        (Request::Lead(_, Lead::Add), Life::Up, Membership::Wanted) => {
            (Life::Up, Membership::Added, true)
        }
        (Request::Lead(_, Lead::Promote), Life::Up, Membership::Added) => {
            (Life::Up, Membership::Voter, true)
        }
        (Request::Lead(_, Lead::Requeue), Life::Up, Membership::Added) => {
            (Life::Up, Membership::Wanted, false)
        }
        (Request::Lead(_, Lead::Remove), Life::Up, Membership::Leaving { decommission }) => {
            if decommission {
                return out(m);
            }
            (Life::Up, Membership::None, false)
        }
        nothing => panic!("{nothing:?}: there was nothing to write"),
    };
    Reference {
        life,
        membership,
        role,
        ..m
    }
}

fn out(machine: Reference) -> Reference {
    Reference {
        life: Life::Out,
        join: machine.join,
        ..Default::default()
    }
}

/// Compares the records with the model.
fn check(records: &Records, machines: &Machines) {
    for (machine, reference) in (0..).zip(machines) {
        let id = id(machine);
        let found = records.find(id);
        let state = match reference.life {
            Life::Never | Life::Gone => None,
            Life::New => Some(NodeState::New),
            Life::Standby => Some(NodeState::Standby),
            Life::Up => Some(NodeState::Up),
            Life::Out => Some(NodeState::Decommissioned),
        };
        let full = found.as_ref().map(|found| &found.full.content);
        assert_eq!(full.map(|full| full.node.state), state, "machine {machine}");
        assert_eq!(
            records.tombstone(id).is_some(),
            reference.life == Life::Gone
        );
        // A join key belongs to one node, also after the node is deleted.
        if let Some(join) = reference.join {
            assert_eq!(records.join_key_of(&join_key(join)), Some(id));
        }
        let Some(full) = full else {
            assert!(!records.store.contains_key(&state::intent_key(id)));
            continue;
        };
        assert_eq!(full.node.public_key, node_key(machine));
        assert_eq!(Some(full.node.join_key), reference.join.map(join_key));
        // Only a node that is UP has an unlock key.
        assert_eq!(full.unlock_key, reference.unlock.map(unlock_key));
        assert_eq!(full.certificate.is_some(), reference.unlock.is_some());
        let roles = NodeRoles {
            consensus_member: reference
                .role
                .then_some(ConsensusMember { member_id: MEMBER }),
            kubernetes_controller: reference.controller.then_some(KubernetesController {}),
            kubernetes_worker: reference.worker.then_some(KubernetesWorker {}),
        };
        // A Kubernetes controller is, or becomes, a consensus member.
        let on_its_way = !matches!(
            reference.membership,
            Membership::None | Membership::Leaving { .. }
        );
        assert!(on_its_way || !reference.controller, "machine {machine}");
        assert_eq!(full.node.roles, roles, "machine {machine}");
        let intent = found.as_ref().and_then(|found| found.intent.as_ref());
        let wanted = match reference.membership {
            Membership::None | Membership::Voter => None,
            Membership::Wanted => Some(Wanted::Join { member: None }),
            Membership::Added => Some(Wanted::Join {
                member: Some(MEMBER),
            }),
            Membership::Leaving { decommission } => Some(Wanted::Leave { decommission }),
        };
        assert_eq!(intent.map(|intent| intent.content.wanted), wanted);
        let decommissioning = reference.membership == Membership::Leaving { decommission: true };
        assert_eq!(full.node.decommissioning, decommissioning);
    }
}

fn request() -> impl Strategy<Value = Request> {
    let machine = || 0..MACHINES;
    // Mostly the machine's own key.
    let join = |machine: u8| prop_oneof![6 => Just(machine), 1 => 0..MACHINES + 1];
    let lead = prop_oneof![
        3 => Just(Lead::Add),
        2 => Just(Lead::Promote),
        1 => Just(Lead::Requeue),
        3 => Just(Lead::Remove),
    ];
    prop_oneof![
        1 => Just(Request::Rotate),
        6 => machine().prop_flat_map(join_and(join)),
        5 => machine().prop_map(Request::Approve),
        6 => (machine(), prop_oneof![5 => Just(1_u8), 1 => Just(2_u8)])
            .prop_map(|(machine, unlock)| Request::Commit { machine, unlock }),
        2 => (0..=MACHINES).prop_map(|join| Request::Join { join }),
        5 => (machine(), any::<bool>())
            .prop_map(|(machine, wanted)| Request::Role { machine, wanted }),
        3 => (machine(), any::<bool>())
            .prop_map(|(machine, wanted)| Request::Controller { machine, wanted }),
        2 => (machine(), any::<bool>())
            .prop_map(|(machine, wanted)| Request::Worker { machine, wanted }),
        1 => machine().prop_map(Request::Decommission),
        1 => (machine(), any::<bool>())
            .prop_map(|(machine, bypass)| Request::Delete { machine, bypass }),
        6 => (machine(), lead).prop_map(|(machine, what)| Request::Lead(machine, what)),
    ]
}

fn join_and<S: Strategy<Value = u8> + 'static>(
    join: impl Fn(u8) -> S,
) -> impl Fn(u8) -> BoxedStrategy<Request> {
    move |machine| {
        let join = join(machine);
        join.prop_map(move |join| Request::Register { machine, join })
            .boxed()
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..CURATORS, request()).prop_map(|(curator, request)| Event::Ask(curator, request)),
        3 => (0..CURATORS).prop_map(Event::Sync),
        5 => (0..64_usize).prop_map(Event::Deliver),
        1 => (0..64_usize).prop_map(Event::Lose),
    ]
}

/// A cluster without nodes.
fn blank() -> Records {
    let write = Write::when(Condition::Absent(state::CLUSTER.into()))
        .put(state::CLUSTER, Vec::new())
        .put(state::REGISTER_TICKET, Vec::new());
    let mut records = Records::default();
    assert!(records.apply(&write));
    records
}

/// Plays the events, and returns the final states of the machines.
fn play(events: Vec<Event>) -> Machines {
    let mut records = blank();
    let mut machines = Machines::default();
    let mut views = vec![records.clone(); CURATORS];
    let mut under_way: Vec<(Request, Write)> = Vec::new();
    for event in events {
        match event {
            Event::Ask(curator, request) => {
                let view = &views[curator];
                let decided = decide(view, request);
                if view.revision == records.revision {
                    let came_to = decided.as_ref().map(drop).map_err(Rejection::code);
                    assert_eq!(came_to, expected(&machines, request), "{request:?}");
                }
                if let Ok(Some(write)) = decided {
                    under_way.push((request, write));
                }
            }
            Event::Sync(curator) => views[curator] = records.clone(),
            Event::Deliver(_) | Event::Lose(_) if under_way.is_empty() => {}
            Event::Deliver(index) => {
                let (request, write) = &under_way[index % under_way.len()];
                if records.apply(write) {
                    happened(&mut machines, *request);
                    check(&records, &machines);
                }
            }
            Event::Lose(index) => {
                drop(under_way.remove(index % under_way.len()));
            }
        }
    }
    machines
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_is_asked_of_whom_and_when_no_step_is_skipped(
        events in prop::collection::vec(event(), 0..200),
    ) {
        play(events);
    }
}

/// Checks that the model test reaches every state.
#[test]
fn the_model_goes_all_the_way() {
    let (machine, join, unlock) = (1, 1, 1);
    let steps = [
        Request::Register { machine, join },
        Request::Approve(machine),
        Request::Commit { machine, unlock },
        Request::Role {
            machine,
            wanted: true,
        },
        Request::Lead(machine, Lead::Add),
        Request::Lead(machine, Lead::Promote),
        Request::Controller {
            machine,
            wanted: true,
        },
        Request::Decommission(machine),
        Request::Lead(machine, Lead::Remove),
        Request::Delete {
            machine,
            bypass: false,
        },
    ];
    let lives = [
        Life::New,
        Life::Standby,
        Life::Up,
        Life::Up,
        Life::Up,
        Life::Up,
        Life::Up,
        Life::Up,
        Life::Out,
        Life::Gone,
    ];
    for (count, life) in (1..).zip(lives) {
        let mut events = Vec::new();
        for request in &steps[..count] {
            // The only pending write is that of this request.
            let any = 0;
            events.extend([
                Event::Sync(0),
                Event::Ask(0, *request),
                Event::Deliver(any),
                Event::Lose(any),
            ]);
        }
        assert_eq!(play(events)[usize::from(machine)].life, life);
    }
}

#[test]
fn only_so_many_wait() {
    let records = blank();
    let registration = Registration {
        node_key: node_key(0),
        join_key: join_key(0),
        tpm_is_present: true,
        labels: Vec::new(),
        admission: None,
    };
    let with = |waiting| {
        let found = registration::Found {
            node: None,
            deleted: false,
            join_key_of: None,
            waiting,
        };
        registration::decide(&registration, found, &records.configuration(), 1)
    };
    let Ok(Registered::Now(node, _)) = with(registration::MOST_WAITING - 1) else {
        panic!("expected a registration below the limit to succeed");
    };
    assert_eq!(node.tpm_usage, TpmUsage::PresentAndUsed);
    let refused = with(registration::MOST_WAITING).err();
    assert_eq!(
        refused.map(|refused| refused.code()),
        Some(Code::ResourceExhausted)
    );
}

/// One call may request several roles, and gets all of them or none.
#[test]
fn roles_are_granted_together_or_not_at_all() {
    let machine = 0;
    let mut records = blank();
    let ask = |records: &mut Records, request| {
        let write = decide(records, request).expect("granted").expect("news");
        assert!(records.apply(&write));
    };
    let (join, unlock) = (0, 1);
    ask(&mut records, Request::Register { machine, join });
    ask(&mut records, Request::Approve(machine));
    ask(&mut records, Request::Commit { machine, unlock });
    let update = |records: &Records, wish| {
        let found = records.find(id(machine)).expect("it is there");
        roles::update(wish, &found).map(|outcome| (outcome.write, outcome.pending))
    };
    let wish = |consensus_member, kubernetes_controller| RoleChange {
        consensus_member,
        kubernetes_controller,
        kubernetes_worker: Some(true),
    };
    let refused = update(&records, wish(None, Some(true))).err();
    let refused = refused.map(|refused| refused.to_string());
    assert!(refused.is_some_and(|why| why.contains("in the same call")));

    let (write, pending) = update(&records, wish(Some(true), Some(true))).expect("granted");
    assert!(pending && records.apply(&write.expect("news")));
    let found = records.find(id(machine)).expect("it is there");
    let roles = found.full.content.node.roles;
    assert!(roles.kubernetes_controller.is_some() && roles.kubernetes_worker.is_some());
    assert!(found.intent.is_some());
    // A repetition writes nothing.
    let again = update(&records, wish(Some(true), Some(true))).expect("granted");
    assert!(again.0.is_none() && again.1);

    assert!(update(&records, wish(Some(false), None)).is_err());
    let (write, pending) = update(&records, wish(Some(false), Some(false))).expect("granted");
    assert!(!pending && records.apply(&write.expect("news")));
    let found = records.find(id(machine)).expect("it is there");
    let roles = found.full.content.node.roles;
    assert!(roles.kubernetes_controller.is_none() && roles.kubernetes_worker.is_some());
    assert!(found.intent.is_none());
}
