//! Registration against a reference cluster: one machine with every fault, and several machines
//! with events in any order.

use std::collections::{BTreeMap, BTreeSet};

use hearth_api::identity::NodeId;
use hearth_api::v1::{NodeState, StorageSecurity};
use hearth_host::cluster_state::EnrolmentPhase;
use hearth_host::storage::header::{Header, HeaderState, Phase};
use proptest::prelude::*;

use super::deciding::decide;
use super::world::*;
use super::*;
use crate::sealed::Stored;
use crate::testing;

/// Registers without a fault until it is HOME.
fn settles(world: &mut World, cluster: &mut Cluster, input: &ParametersInput, script: &Script) {
    let end = run_in(world, cluster, input, script);
    assert!(matches!(end, State::Settled), "{script:?}: {end:?}");
    assert!(world.handed_over);
    assert_eq!(rank(&world.sealed), 3);
    let states: Vec<_> = cluster.nodes.values().map(|record| record.state).collect();
    assert_eq!(states, [NodeState::Up], "{script:?}");
}

#[test]
fn a_machine_registers_and_comes_back() {
    for security in [StorageSecurity::Insecure, StorageSecurity::Encrypted] {
        let mut cluster = Cluster::new(security);
        let mut world = World::asking(1);
        let input = cluster.input(None);
        settles(&mut world, &mut cluster, &input, &Vec::new());
        assert!(world.home);
        // With parameters, without, with invalid ones, and with a rotated ticket: a member needs no
        // ticket.
        for input in [
            input,
            ParametersInput::Nothing,
            ParametersInput::Unusable("bad".into()),
        ] {
            cluster.ticket += 1;
            world.power_cut();
            settles(&mut world, &mut cluster, &input, &Vec::new());
            assert!(!world.home, "the membership worker says so, once it is");
            assert_eq!(world.enrolments, 1);
        }
    }
}

/// FAULTS 3, 4, 32, 33: every pair of faults at every pair of tasks. The cluster knows exactly one
/// node, which is the one on the disk.
#[test]
fn any_two_faults_anywhere_and_it_is_still_the_same_node() {
    let clean = 15;
    let blank = Cluster::new(StorageSecurity::Encrypted);
    let input = blank.input(None);
    for first in 0..clean {
        for first_fault in FAULTS {
            for second in first..first + clean {
                for second_fault in FAULTS {
                    let script = vec![(first, first_fault), (second, second_fault)];
                    let (mut world, mut cluster) = (World::asking(1), blank.clone());
                    settles(&mut world, &mut cluster, &input, &script);
                }
            }
        }
    }
}

fn decided(input: &ParametersInput, registering: &Arc<Registering>, header: HeaderState) -> State {
    let sealed = SealedState::Stored(Stored::Sealed(Sealed::Registering(registering.clone())));
    decide(input, DiskState { sealed, header })
}

/// A disk of another enrolment is not changed, and the refusal names the way out.
#[test]
fn a_registration_goes_on_with_its_own_disk_only() {
    let asks = testing::registering(1, None);
    let answered = testing::registering(1, Some(StorageSecurity::Insecure));
    let own = answered.volume(answered.answer.as_ref().unwrap()).owner;
    let other = founding(2).identity.data_owner();
    let header = |phase, owner| HeaderState::Header(Header::new(phase, owner, [7; 32], None));
    let (initialising, ready) = (Phase::Initialising, Phase::Ready);
    let name = |state: State| match state {
        State::Asking(_, step) => format!("{step:?}"),
        State::AnsweredRegistration(_, step) => format!("{step:?}"),
        State::Refused(why) => {
            let token = format!("wipe.enrolment_id = {}", asks.enrolment_id);
            assert!(why.contains(&token), "{why}");
            "Refused".into()
        }
        other => format!("{other:?}"),
    };
    for (registering, header, wanted) in [
        (&asks, HeaderState::Blank, "Ask"),
        (&asks, HeaderState::Unfinished, "Refused"),
        (&asks, header(initialising, own), "Refused"),
        (&asks, header(ready, other), "Refused"),
        (&asks, HeaderState::Foreign("XFS".into()), "Refused"),
        (&answered, HeaderState::Blank, "Initialise"),
        (&answered, HeaderState::Unfinished, "Initialise"),
        (&answered, header(initialising, own), "Initialise"),
        (&answered, header(ready, own), "Mount"),
        (&answered, header(initialising, other), "Refused"),
        (&answered, header(ready, other), "Refused"),
        (&answered, HeaderState::Foreign("XFS".into()), "Refused"),
    ] {
        let state = decided(&ParametersInput::Nothing, registering, header.clone());
        assert_eq!(name(state), wanted, "{header:?}");
    }
}

/// What the parameters of a later boot may change, and what they may not.
#[test]
fn later_parameters_change_how_it_asks_and_nothing_else() {
    let mut cluster = Cluster::new(StorageSecurity::Insecure);
    let mut world = World::asking(1);
    let first = cluster.input(None);
    let mut boot = Machine::start(first.clone());
    while !matches!(boot.0.state(), State::Asking(_, AskingStep::Ask)) {
        let Some(Action::Work(turn, work)) = boot.1.last().cloned() else {
            panic!("{:?}", boot.1);
        };
        let done = world.perform(&mut cluster, &work, None).unwrap();
        boot = boot.0.step(Event::Done(turn, done));
    }
    let Stored::Sealed(Sealed::Registering(asks)) = world.sealed.clone() else {
        panic!("{:?}", world.sealed);
    };
    let same = decided(&first, &asks, HeaderState::Blank);
    assert!(matches!(same, State::Asking(..)), "{same:?}");
    // The cluster has named more curators than the parameters did.
    let mut knows_more = Registering::clone(&asks);
    let more = testing::directory("192.0.2.77").nodes;
    knows_more.asking.directory.nodes.extend(more);
    let same = decided(&first, &Arc::new(knows_more), HeaderState::Blank);
    assert!(matches!(same, State::Asking(..)), "{same:?}");

    cluster.ticket += 1;
    let State::Renewing(renewed) = decided(&cluster.input(None), &asks, HeaderState::Blank) else {
        panic!("another ticket");
    };
    assert_ne!(renewed.asking.ticket, asks.asking.ticket);
    assert_eq!(renewed.node_key.public(), asks.node_key.public());
    assert_eq!(renewed.enrolment_id, asks.enrolment_id);
    assert!(renewed.answer.is_none());
    // Parameters for a bootstrap need a new enrolment.
    let state = decided(&INPUT, &asks, HeaderState::Blank);
    assert!(matches!(state, State::AwaitingAddress(_)), "{state:?}");
    let answered = testing::registering(1, Some(StorageSecurity::Insecure));
    let state = decided(&INPUT, &answered, HeaderState::Blank);
    assert!(
        matches!(state, State::AnsweredRegistration(..)),
        "{state:?}"
    );
}

/// A machine, its parameters, and its view of the cluster.
struct Seat {
    world: World,
    input: ParametersInput,
    machine: Machine,
    actions: Vec<Action>,
    phase: Option<EnrolmentPhase>,
    /// Enrolments that a cluster has ended.
    ended: BTreeSet<u8>,
}

impl Seat {
    fn new(number: u8, input: ParametersInput) -> Self {
        let (machine, actions) = Machine::start(input.clone());
        Self {
            world: World::asking(number),
            input,
            machine,
            actions,
            phase: None,
            ended: BTreeSet::new(),
        }
    }

    fn boot(&mut self) {
        self.world.power_cut();
        self.phase = None;
        (self.machine, self.actions) = Machine::start(self.input.clone());
    }

    /// Like the driver, which only moves forward.
    fn announce(&mut self) {
        for action in &self.actions {
            if let Action::Announce(to) = *action {
                self.phase = self.phase.max(Some(to));
            }
        }
    }

    /// Executes one step. Returns the request to the cluster, if any.
    fn step(&mut self, cluster: &mut Cluster, fault: Option<Fault>) -> Option<Work> {
        let work = self.actions.iter().find_map(|action| match action {
            Action::Work(turn, work) => Some((*turn, work.clone())),
            _ => None,
        });
        let event = match (work.clone(), self.actions.last()) {
            (Some((turn, work)), _) => self.world.suffer(cluster, turn, &work, fault),
            (None, Some(Action::BackOff(turn, _))) => Some(Event::RetryDue(*turn)),
            (None, _) => {
                self.rejoin(cluster);
                return None;
            }
        };
        match event {
            Some(event) => {
                (self.machine, self.actions) = self.machine.clone().step(event);
                self.announce();
            }
            None => self.boot(),
        }
        work.map(|(_, work)| work)
    }

    /// The workers that run on a member.
    fn rejoin(&mut self, cluster: &Cluster) {
        if let Stored::Sealed(Sealed::Member(member)) = &self.world.sealed
            && matches!(self.machine.state(), State::Settled)
            && let Ok(Done::Removed(afterwards)) = cluster.join(member)
        {
            let disowned = member.into_disowned(afterwards);
            self.world.sealed = Stored::Sealed(Sealed::Disowned(disowned));
            if afterwards == AfterRemoval::Reset {
                self.boot();
            }
        }
    }

    fn node_id(&self) -> Option<NodeId> {
        match &self.world.sealed {
            Stored::Sealed(Sealed::Registering(registering)) => Some(registering.node_id),
            Stored::Sealed(Sealed::Member(member)) => Some(member.identity.node_id),
            Stored::Sealed(Sealed::Disowned(disowned)) => Some(disowned.node_id),
            _ => None,
        }
    }
}

/// An event of the model.
#[derive(Clone, Debug)]
enum Op {
    /// A step on a machine.
    Step(usize, Option<usize>),
    /// A machine reboots with its parameters.
    Cut(usize),
    /// A machine reboots, and gets the current ticket.
    Tell(usize),
    /// A machine gets a wipe token.
    Wipe(usize),
    Approve(usize),
    Delete(usize),
    /// An operator deletes a node and has its machine reset.
    Reset(usize),
    Decommission(usize),
    Rotate,
    /// The cluster loses a node, as by a restored backup.
    Forget(usize),
    /// A delayed request arrives once more.
    Late(usize),
}

const MACHINES: usize = 3;

fn op() -> impl Strategy<Value = Op> {
    let machine = 0..MACHINES;
    prop_oneof![
        24 => (machine.clone(), Just(None)).prop_map(|(m, fault)| Op::Step(m, fault)),
        6 => (machine.clone(), 0..FAULTS.len()).prop_map(|(m, fault)| Op::Step(m, Some(fault))),
        6 => machine.clone().prop_map(Op::Approve),
        1 => machine.clone().prop_map(Op::Cut),
        1 => machine.clone().prop_map(Op::Tell),
        1 => machine.clone().prop_map(Op::Wipe),
        1 => machine.clone().prop_map(Op::Delete),
        1 => machine.clone().prop_map(Op::Reset),
        1 => machine.clone().prop_map(Op::Decommission),
        1 => machine.prop_map(Op::Forget),
        1 => Just(Op::Rotate),
        3 => (0..16_usize).prop_map(Op::Late),
    ]
}

/// The whole model.
struct Model {
    cluster: Cluster,
    seats: Vec<Seat>,
    sent: Vec<Work>,
    forgotten: BTreeSet<NodeId>,
    /// Nodes that were deleted or decommissioned at any time: an order is permanent.
    removed: BTreeSet<NodeId>,
}

impl Model {
    fn new(security: StorageSecurity) -> Self {
        let cluster = Cluster::new(security);
        let seats = (0..MACHINES).map(|m| Seat::new(m as u8, cluster.input(None)));
        Self {
            seats: seats.collect(),
            cluster,
            sent: Vec::new(),
            forgotten: BTreeSet::new(),
            removed: BTreeSet::new(),
        }
    }

    fn apply(&mut self, op: &Op) {
        let before = self.cluster.nodes.clone();
        match *op {
            Op::Step(machine, fault) => {
                let fault = fault.map(|fault| FAULTS[fault]);
                let asked = self.seats[machine].step(&mut self.cluster, fault);
                if let Some(work @ (Work::Register(_) | Work::Commit(_))) = asked {
                    self.sent.push(work);
                }
            }
            Op::Cut(machine) => self.seats[machine].boot(),
            Op::Tell(machine) => {
                self.seats[machine].input = self.cluster.input(None);
                self.seats[machine].boot();
            }
            Op::Wipe(machine) => {
                let seat = &mut self.seats[machine];
                if let Stored::Sealed(sealed) = &seat.world.sealed {
                    let enrolment = sealed.enrolment_id().as_bytes()[0];
                    seat.input = self.cluster.input(Some(enrolment));
                    seat.boot();
                }
            }
            Op::Approve(machine) => self.on_record(machine, Cluster::approve),
            Op::Delete(machine) => self.on_record(machine, Cluster::delete),
            Op::Reset(machine) => self.on_record(machine, Cluster::reset),
            Op::Decommission(machine) => self.on_record(machine, Cluster::decommission),
            Op::Forget(machine) => {
                if let Some(id) = self.seats[machine].node_id()
                    && self.cluster.nodes.remove(&id).is_some()
                {
                    self.forgotten.insert(id);
                }
            }
            Op::Rotate => self.cluster.ticket += 1,
            Op::Late(index) => {
                let index = index % self.sent.len().max(1);
                match self.sent.get(index) {
                    Some(Work::Register(asks)) => drop(self.cluster.register(asks)),
                    Some(Work::Commit(entering)) => drop(self.cluster.commit(entering)),
                    _ => {}
                }
            }
        }
        self.check_records(&before);
        self.removed.extend(self.cluster.tombstones.keys());
        let nodes = self.cluster.nodes.iter();
        let out = nodes.filter(|(_, record)| record.state == NodeState::Decommissioned);
        self.removed.extend(out.map(|(id, _)| id));
        for seat in &mut self.seats {
            check_seat(seat, &self.cluster, &self.forgotten, &self.removed);
        }
    }

    fn on_record(&mut self, machine: usize, act: fn(&mut Cluster, NodeId)) {
        if let Some(id) = self.seats[machine].node_id() {
            act(&mut self.cluster, id);
        }
    }

    /// No state is skipped, and there is one node for each key.
    fn check_records(&self, before: &BTreeMap<NodeId, Record>) {
        use NodeState::{Decommissioned, New, Standby, Up};
        let mut join_keys = BTreeSet::new();
        for (id, record) in &self.cluster.nodes {
            assert_eq!(*id, NodeId::from_public_key(&record.key));
            assert!(join_keys.insert(*record.join_key.as_bytes()));
            assert!(!self.cluster.tombstones.contains_key(id), "risen");
            let was = before.get(id).map(|record| record.state);
            assert!(
                matches!(
                    (was, record.state),
                    (None, New)
                        | (Some(New), New | Standby)
                        | (Some(Standby), Standby | Up)
                        | (Some(Up), Up | Decommissioned)
                        | (Some(Decommissioned), Decommissioned)
                ),
                "{was:?} to {:?}",
                record.state
            );
            let committed = record.cluster_unlock_key.is_some();
            assert_eq!(committed, matches!(record.state, Up | Decommissioned));
        }
    }

    /// Without further faults every machine gets what it needs.
    fn settle(&mut self) {
        for machine in 0..MACHINES {
            self.apply(&Op::Tell(machine));
        }
        for _ in 0..60 {
            for machine in 0..MACHINES {
                self.apply(&Op::Approve(machine));
                self.apply(&Op::Step(machine, None));
            }
        }
        for seat in &self.seats {
            let Some(id) = seat.node_id() else {
                // An interrupted wipe has to be requested again: without that, the content of the
                // disk has no owner.
                let end = seat.machine.state();
                assert!(matches!(end, State::Refused(_)), "{end:?}");
                assert_ne!(seat.world.header, HeaderState::Blank);
                continue;
            };
            let deleted = self.cluster.tombstones.contains_key(&id);
            let record = self.cluster.nodes.get(&id).map(|record| record.state);
            let removed = deleted || record == Some(NodeState::Decommissioned);
            let end = seat.machine.state();
            let right = match &seat.world.sealed {
                Stored::Sealed(Sealed::Disowned(_)) => true,
                Stored::Sealed(Sealed::Member(_)) => match end {
                    State::Settled => !removed,
                    // Nobody has the key of a node that the cluster lost.
                    State::Unlocking { .. } => self.forgotten.contains(&id),
                    _ => false,
                },
                // Without an answer it cannot distinguish a deletion from a wrong ticket, and keeps
                // retrying.
                Stored::Sealed(Sealed::Registering(_)) => {
                    removed && matches!(end, State::Refused(_) | State::Asking(..))
                }
                _ => false,
            };
            assert!(right, "{end:?}: removed: {removed}, recorded: {record:?}");
        }
    }
}

fn check_seat(
    seat: &mut Seat,
    cluster: &Cluster,
    forgotten: &BTreeSet<NodeId>,
    removed: &BTreeSet<NodeId>,
) {
    let Stored::Sealed(sealed) = &seat.world.sealed else {
        return;
    };
    let enrolment = sealed.enrolment_id().as_bytes()[0];
    let id = seat.node_id().expect("it is sealed");
    let record = cluster.nodes.get(&id);
    match sealed {
        Sealed::Registering(registering) => {
            if let Some(kept) = record.and_then(|record| record.cluster_unlock_key.as_ref()) {
                assert_eq!(*kept, registering.cluster_unlock_key);
                assert!(registering.answer.is_some(), "committed without an answer");
            }
        }
        Sealed::Member(_) => {
            let pending = record.is_some_and(|record| record.cluster_unlock_key.is_none());
            assert!(!pending || forgotten.contains(&id), "a member of nothing");
            let FileSystem::Made(content) = &seat.world.files else {
                panic!("a member without a file system");
            };
            assert!(content.credentials, "a member without credentials");
        }
        Sealed::Disowned(_) => {
            assert!(removed.contains(&id), "disowned without an order");
            seat.ended.insert(enrolment);
        }
        Sealed::Founding(_) => panic!("unexpected bootstrap"),
    }
    let disowned = matches!(sealed, Sealed::Disowned(_));
    assert_eq!(
        disowned,
        seat.ended.contains(&enrolment),
        "disowned is permanent"
    );
    if seat.world.home {
        assert!(rank(&seat.world.sealed) >= 3, "home and no member");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// FAULTS 32, 33, 34: several machines, with any events in any order.
    #[test]
    fn whatever_happens_the_promises_hold_and_it_settles(
        encrypted: bool,
        ops in prop::collection::vec(op(), 0..250),
    ) {
        let security = match encrypted {
            true => StorageSecurity::Encrypted,
            false => StorageSecurity::Insecure,
        };
        let mut model = Model::new(security);
        for op in &ops {
            model.apply(op);
        }
        model.settle();
    }
}
