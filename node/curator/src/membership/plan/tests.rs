//! Model test: etcd, records and nodes as plain data, and a leader that may fail after any half of
//! a step.

use hearth_consensus::peer_url;
use proptest::prelude::*;

use super::*;

fn node(number: u8) -> NodeId {
    NodeId::from_bytes([number + 1; 16])
}

fn member(number: u8, id: u64, learner: bool) -> Member {
    Member {
        id: MemberId(id),
        name: node(number).to_string(),
        peer_urls: vec![peer_url(node(number))],
        learner,
    }
}

fn up(role: Option<u64>) -> NodeView {
    NodeView {
        up: true,
        role,
        alive: true,
        progress: None,
        damaged: None,
    }
}

/// A cluster with this many voters; the first has bootstrapped it and leads.
fn voters(count: u8) -> View {
    View {
        own: node(0),
        members: (0..count)
            .map(|n| member(n, 100 + u64::from(n), false))
            .collect(),
        nodes: (0..count)
            .map(|n| {
                (
                    node(n),
                    up(Some(if n == 0 { 0 } else { 100 + u64::from(n) })),
                )
            })
            .collect(),
        unreadable: BTreeSet::new(),
        intents: Vec::new(),
        peer_timing_ready: true,
        learner: Learner::default(),
        replaces_damaged: false,
        has_just_replaced: false,
    }
}

fn wants(number: u8, wanted: Wanted) -> Intent {
    Intent {
        node: node(number),
        wanted,
        attempts: 0,
        replaces: None,
    }
}

const JOIN: Wanted = Wanted::Join { member: None };
const LEAVE: Wanted = Wanted::Leave {
    decommission: false,
};

#[test]
fn nothing_is_done_when_nothing_is_wanted() {
    for count in 1..5 {
        assert_eq!(plan(&voters(count)), None);
    }
}

#[test]
fn a_join_goes_its_way() {
    let mut view = voters(1);
    view.nodes.insert(node(1), up(None));
    view.intents = vec![wants(1, JOIN)];
    view.peer_timing_ready = false;
    assert_eq!(plan(&view), None, "etcd has the timing of a single member");
    view.peer_timing_ready = true;
    assert_eq!(plan(&view), Some(Step::Add(node(1))));

    let mut learner = member(1, 7, true);
    learner.name.clear();
    view.members.push(learner);
    let id = MemberId(7);
    assert_eq!(plan(&view), Some(Step::Record(node(1), id)));
    view.intents[0].wanted = Wanted::Join { member: Some(7) };
    view.nodes.insert(node(1), up(Some(7)));
    assert_eq!(plan(&view), None, "it has not started");
    let progress = |applied| {
        Some(Progress {
            member: id,
            learner: true,
            applied,
        })
    };
    // A learner that never started is not promoted, whatever it reports.
    view.learner.mark = Some((id, 10));
    view.nodes.get_mut(&node(1)).unwrap().progress = progress(10);
    assert_eq!(plan(&view), None);
    view.members[1].name = node(1).to_string();
    view.learner.mark = None;
    assert_eq!(plan(&view), Some(Step::Mark(id)));
    view.learner.mark = Some((id, 11));
    assert_eq!(plan(&view), None, "not in sync");
    view.learner.mark = Some((MemberId(8), 1));
    assert_eq!(
        plan(&view),
        Some(Step::Mark(id)),
        "the mark of another learner"
    );
    view.learner.mark = Some((id, 10));
    assert_eq!(plan(&view), Some(Step::Promote(node(1), id)));
    view.nodes.get_mut(&node(1)).unwrap().alive = false;
    assert_eq!(plan(&view), None, "not healthy");
    view.learner.overdue = Some(id);
    assert_eq!(plan(&view), Some(Step::Remove(node(1), id)));
    view.members.pop();
    assert_eq!(plan(&view), Some(Step::Requeue(node(1))));
}

#[test]
fn learners_are_added_one_at_a_time_and_the_unlucky_wait() {
    let mut view = voters(1);
    for n in 1..4 {
        view.nodes.insert(node(n), up(None));
    }
    view.intents = vec![wants(2, JOIN), wants(1, JOIN)];
    assert_eq!(plan(&view), Some(Step::Add(node(2))));
    view.members.push(member(2, 7, true));
    assert_eq!(plan(&view), Some(Step::Record(node(2), MemberId(7))));
    view.intents[0].wanted = Wanted::Join { member: Some(7) };
    view.nodes.insert(node(2), up(Some(7)));
    assert_eq!(plan(&view), None);
    let reason = step_of(&view, &view.intents[1]).unwrap_err();
    assert!(reason.contains(&node(2).to_string()), "{reason}");
    // While its member is gone, and its intent not requeued yet.
    view.members.pop();
    view.intents.swap(0, 1);
    assert_eq!(plan(&view), Some(Step::Requeue(node(2))));
}

#[test]
fn who_leaves_is_missed_by_none() {
    let mut view = voters(3);
    view.intents = vec![wants(1, LEAVE)];
    assert_eq!(plan(&view), Some(Step::Remove(node(1), MemberId(101))));
    // The leader itself.
    view.own = node(1);
    assert_eq!(plan(&view), Some(Step::HandOver));
    view.own = node(0);
    // One of the others is not healthy.
    view.nodes.get_mut(&node(2)).unwrap().alive = false;
    assert_eq!(plan(&view), None);
    let reason = step_of(&view, &view.intents[0]).unwrap_err();
    assert!(reason.contains(&node(2).to_string()), "{reason}");
    // The one that is not healthy can itself be removed.
    assert_eq!(view.may_leave(node(2)), Ok(()));
    // The member is removed; the role follows.
    view.members.remove(1);
    assert_eq!(plan(&view), Some(Step::Clear(node(1))));
    // The last one cannot leave.
    let mut view = voters(1);
    view.intents = vec![wants(0, LEAVE)];
    assert_eq!(plan(&view), None);
    assert_eq!(view.may_leave(node(0)), Err(CannotLeave::Last(node(0))));
    // All of them cannot leave at once either.
    let mut view = voters(2);
    view.intents = vec![wants(0, LEAVE)];
    assert_eq!(
        view.may_leave_after_all(node(1)),
        Err(CannotLeave::Last(node(1)))
    );
}

#[test]
fn a_member_whose_record_cannot_be_read_stays() {
    let mut view = voters(3);
    view.nodes.remove(&node(2));
    view.unreadable.insert(node(2));
    assert_eq!(plan(&view), None);
    view.unreadable.clear();
    assert_eq!(plan(&view), Some(Step::Remove(node(2), MemberId(102))));
}

#[test]
fn what_no_record_stands_for_is_removed() {
    // A deleted node.
    let mut view = voters(3);
    view.nodes.remove(&node(2));
    assert_eq!(plan(&view), Some(Step::Remove(node(2), MemberId(102))));
    // Not if the others would lose quorum.
    view.nodes.get_mut(&node(1)).unwrap().alive = false;
    assert_eq!(plan(&view), None);
    // A learner of an abandoned attempt.
    let mut view = voters(2);
    view.nodes.insert(node(2), up(None));
    view.members.push(member(2, 9, true));
    assert_eq!(plan(&view), Some(Step::Remove(node(2), MemberId(9))));
    // A role without a member.
    let mut view = voters(2);
    view.nodes.insert(node(2), up(Some(9)));
    assert_eq!(plan(&view), Some(Step::Clear(node(2))));
    // While etcd has a member whose node is not known, no role is cleared.
    let mut stranger = member(3, 10, false);
    stranger.peer_urls = vec!["https://10.0.0.1:7834".into()];
    view.members.push(stranger);
    assert_eq!(plan(&view), None);
}

/// Three voters that run, of which the last one reports damage.
fn damaged() -> View {
    let mut view = voters(3);
    view.replaces_damaged = true;
    run(&mut view);
    let node_view = view.nodes.get_mut(&node(2)).unwrap();
    node_view.progress = None;
    node_view.damaged = node_view.role;
    view
}

/// Every voter reports that its etcd runs.
fn run(view: &mut View) {
    for member in &view.members {
        let node_view = view.nodes.get_mut(&member.node().unwrap()).unwrap();
        node_view.progress = Some(Progress {
            member: member.id,
            learner: false,
            applied: 0,
        });
    }
}

#[test]
fn a_damaged_member_is_replaced_where_the_cluster_may() {
    let replace = Some(Step::Replace(node(2), MemberId(102)));
    assert_eq!(plan(&damaged()), replace);
    let cannot = |what: &str, change: fn(&mut View)| {
        let mut view = damaged();
        change(&mut view);
        assert_eq!(plan(&view), None, "{what}");
    };
    cannot("the setting", |view| view.replaces_damaged = false);
    cannot("another one was replaced", |view| {
        view.has_just_replaced = true
    });
    cannot("the report is of another member", |view| {
        view.nodes.get_mut(&node(2)).unwrap().damaged = Some(7);
    });
    cannot("the report is of a node that was the founder", |view| {
        view.nodes.get_mut(&node(2)).unwrap().damaged = Some(0);
    });
    cannot("its node is not in contact", |view| {
        view.nodes.get_mut(&node(2)).unwrap().alive = false;
    });
    cannot("another one is not alive", |view| {
        view.nodes.get_mut(&node(1)).unwrap().alive = false;
    });
    cannot("the etcd of another one does not run", |view| {
        view.nodes.get_mut(&node(1)).unwrap().progress = None;
    });
    cannot("a change is pending", |view| {
        view.nodes.insert(node(3), up(None));
        view.intents = vec![wants(3, JOIN)];
        view.peer_timing_ready = false;
    });
    cannot("one of two", |view| {
        view.members.remove(1);
        view.nodes.remove(&node(1));
    });

    // The founder, whose role names no member.
    let mut view = damaged();
    view.own = node(1);
    let founder = view.nodes.get_mut(&node(0)).unwrap();
    founder.damaged = Some(0);
    founder.progress = None;
    let repaired = view.nodes.get_mut(&node(2)).unwrap();
    repaired.damaged = None;
    run(&mut view);
    assert_eq!(plan(&view), Some(Step::Replace(node(0), MemberId(100))));
}

#[test]
fn a_replacement_begins_with_a_removal_and_goes_on_as_a_join() {
    let mut view = damaged();
    view.intents = vec![Intent {
        replaces: Some(102),
        ..wants(2, JOIN)
    }];
    assert_eq!(plan(&view), Some(Step::Remove(node(2), MemberId(102))));
    for change in [
        (|view| view.replaces_damaged = false) as fn(&mut View),
        |view| view.nodes.get_mut(&node(2)).unwrap().damaged = None,
    ] {
        let mut view = view.clone();
        change(&mut view);
        assert_eq!(plan(&view), Some(Step::Complete(node(2))));
    }
    let mut few = view.clone();
    few.nodes.get_mut(&node(1)).unwrap().alive = false;
    assert_eq!(plan(&few), None);
    view.members.pop();
    assert_eq!(plan(&view), Some(Step::Add(node(2))));
    view.members.push(member(2, 103, true));
    let id = MemberId(103);
    assert_eq!(plan(&view), Some(Step::Record(node(2), id)));
    view.intents[0].wanted = Wanted::Join { member: Some(103) };
    view.nodes.get_mut(&node(2)).unwrap().role = Some(103);
    // What it has reported of its former member is of no interest.
    assert_eq!(plan(&view), None);
    view.members[2].learner = false;
    assert_eq!(plan(&view), Some(Step::Complete(node(2))));
}

/// The state of the model.
#[derive(Clone, Debug)]
struct World {
    view: View,
    next_member: u64,
    log: u64,
    /// The nodes that start etcd when their role says so.
    starts: BTreeSet<NodeId>,
    /// How long the current learner has existed.
    age: u32,
}

/// An event of the model.
#[derive(Clone, Debug)]
enum Event {
    /// The leader executes a step, completely (`whole`) or only its half in etcd.
    Lead { whole: bool },
    /// Nodes follow their roles.
    Nodes,
    /// An operator requests that a node join.
    Join(u8),
    /// An operator requests that a node leave.
    Leave(u8),
    /// An operator deletes a node.
    Delete(u8),
    /// A node dies, or recovers.
    Alive(u8, bool),
    /// A node's etcd stops starting, or starts again.
    Starts(u8, bool),
    /// The data of a node's member are damaged, or found to be good after all.
    Damaged(u8, bool),
    /// Another curator becomes leader.
    Leader(u8),
    /// The learner's time limit comes closer.
    Time,
}

fn event() -> impl Strategy<Value = Event> {
    let any_node = 0..5u8;
    prop_oneof![
        8 => any::<bool>().prop_map(|whole| Event::Lead { whole }),
        4 => Just(Event::Nodes),
        2 => any_node.clone().prop_map(Event::Join),
        2 => any_node.clone().prop_map(Event::Leave),
        1 => any_node.clone().prop_map(Event::Delete),
        2 => (any_node.clone(), any::<bool>()).prop_map(|(n, b)| Event::Alive(n, b)),
        1 => (any_node.clone(), any::<bool>()).prop_map(|(n, b)| Event::Starts(n, b)),
        2 => (any_node.clone(), any::<bool>()).prop_map(|(n, b)| Event::Damaged(n, b)),
        2 => any_node.prop_map(Event::Leader),
        1 => Just(Event::Time),
    ]
}

impl World {
    fn new() -> Self {
        let mut view = voters(1);
        for n in 1..5 {
            view.nodes.insert(node(n), up(None));
        }
        view.replaces_damaged = true;
        Self {
            view,
            next_member: 200,
            log: 1,
            starts: (0..5).map(node).collect(),
            age: 0,
        }
    }

    fn voters(&self) -> Vec<NodeId> {
        let voters = self.view.members.iter().filter(|m| !m.learner);
        voters.filter_map(Member::node).collect()
    }

    fn alive(&self, id: NodeId) -> bool {
        let node_view = self.view.nodes.get(&id);
        node_view.is_none_or(|n| n.alive && !n.is_damaged())
    }

    fn has_quorum(&self) -> bool {
        let voters = self.voters();
        let alive = voters.iter().filter(|id| self.alive(**id)).count();
        alive > voters.len() / 2
    }

    fn apply(&mut self, event: &Event) {
        self.log += 1;
        match event {
            Event::Lead { whole } => self.lead(*whole),
            Event::Nodes => self.nodes(),
            Event::Join(n) => self.want(*n, JOIN),
            Event::Leave(n) => {
                let id = node(*n);
                if self.view.may_leave_after_all(id).is_ok() {
                    self.want(*n, LEAVE);
                }
            }
            Event::Delete(n) => {
                let id = node(*n);
                // The service does not authorize the departure of a voter that the quorum needs.
                if !self.view.votes(id) || self.view.may_leave_after_all(id).is_ok() {
                    self.view.nodes.remove(&id);
                }
            }
            Event::Alive(n, alive) => {
                if let Some(node_view) = self.view.nodes.get_mut(&node(*n)) {
                    node_view.alive = *alive;
                }
            }
            Event::Starts(n, starts) => {
                if *starts {
                    self.starts.insert(node(*n));
                } else {
                    self.starts.remove(&node(*n));
                }
            }
            Event::Damaged(n, damaged) => {
                if let Some(node_view) = self.view.nodes.get_mut(&node(*n)) {
                    node_view.damaged = node_view.role.filter(|_| *damaged);
                    if *damaged {
                        node_view.progress = None;
                    }
                }
            }
            Event::Leader(n) => self.elect(node(*n)),
            Event::Time => {
                self.age += 1;
                let learner = self.view.members.iter().find(|m| m.learner);
                if self.age > 5 {
                    self.view.learner.overdue = learner.map(|m| m.id);
                }
                self.view.learner.mark = None;
            }
        }
    }

    /// Only live voters lead; a new leader starts without memory.
    fn elect(&mut self, id: NodeId) {
        if self.voters().contains(&id) && self.alive(id) {
            self.view.own = id;
            self.view.learner = Learner::default();
            self.age = 0;
        }
    }

    fn want(&mut self, n: u8, wanted: Wanted) {
        let id = node(n);
        if !self.view.nodes.contains_key(&id) {
            return;
        }
        match self.view.intent_of(id).map(|intent| intent.wanted) {
            None => self.view.intents.push(wants(n, wanted)),
            // The leader had not begun a step.
            Some(Wanted::Join { member: None }) => {
                self.view.intents.retain(|intent| intent.node != id);
            }
            Some(_) => {}
        }
    }

    /// Nodes start etcd according to their roles, and report its progress.
    fn nodes(&mut self) {
        let log = self.log;
        for member in &mut self.view.members {
            let Some(id) = member.node() else { continue };
            let Some(node_view) = self.view.nodes.get_mut(&id) else {
                continue;
            };
            // Data that it wipes are not damaged any more.
            node_view.damaged = node_view
                .damaged
                .filter(|_| node_view.damaged == node_view.role);
            let founder = node_view.role == Some(0) && !member.learner;
            let starts = node_view.damaged.is_none() && self.starts.contains(&id);
            if node_view.alive && starts && (founder || node_view.role == Some(member.id.0)) {
                member.name = id.to_string();
                node_view.progress = Some(Progress {
                    member: member.id,
                    learner: member.learner,
                    applied: log,
                });
            }
        }
    }

    /// The leader executes one step.
    fn lead(&mut self, whole: bool) {
        if !self.alive(self.view.own) || !self.voters().contains(&self.view.own) {
            let leader = self.voters().into_iter().find(|id| self.alive(*id));
            if let Some(leader) = leader {
                self.elect(leader);
            }
        }
        if !self.has_quorum() {
            return;
        }
        let Some(step) = plan(&self.view) else { return };
        self.take(step, whole);
    }

    fn take(&mut self, step: Step, whole: bool) {
        match step {
            Step::Add(id) => {
                assert!(
                    self.view.members.iter().all(|m| !m.learner),
                    "one learner at a time"
                );
                self.next_member += 1;
                self.view.members.push(Member {
                    id: MemberId(self.next_member),
                    name: String::new(),
                    peer_urls: vec![peer_url(id)],
                    learner: true,
                });
                self.age = 0;
                self.view.learner = Learner::default();
            }
            Step::Promote(id, promoted) => {
                assert!(self.alive(id), "a dead learner is not promoted");
                let member = self.view.members.iter_mut().find(|m| m.id == promoted);
                let member = member.expect("it is a member");
                assert!(member.started() && member.learner);
                member.learner = false;
            }
            Step::Remove(_, removed) => {
                let voted = self
                    .view
                    .members
                    .iter()
                    .any(|m| m.id == removed && !m.learner);
                self.view.members.retain(|m| m.id != removed);
                assert!(!self.voters().is_empty(), "the last voter stays");
                assert!(!voted || self.has_quorum(), "those that stay have a quorum");
            }
            Step::Mark(id) => self.view.learner.mark = Some((id, self.log)),
            Step::HandOver => {
                let own = self.view.own;
                let mut others = self.voters().into_iter().filter(|id| *id != own);
                if let Some(other) = others.find(|id| self.alive(*id)) {
                    self.elect(other);
                }
            }
            // These steps change only records, in one atomic transaction.
            Step::Record(..)
            | Step::Complete(_)
            | Step::Requeue(_)
            | Step::Clear(_)
            | Step::Replace(..)
                if !whole => {}
            Step::Replace(id, member) => {
                let damaged = self.node_view(id).damaged;
                assert!(damaged.is_some(), "what is not damaged stays");
                assert!(damaged == self.node_view(id).role, "nor a later member");
                let joins = |i: &Intent| matches!(i.wanted, Wanted::Join { .. });
                assert!(!self.view.intents.iter().any(joins), "one at a time");
                if self.view.may_leave_after_all(id).is_ok() {
                    self.view.intents.push(Intent {
                        node: id,
                        wanted: JOIN,
                        attempts: 0,
                        replaces: Some(member.0),
                    });
                }
            }
            Step::Record(id, member) => {
                self.intent(id).wanted = Wanted::Join {
                    member: Some(member.0),
                };
                self.node_view(id).role = Some(member.0);
            }
            Step::Complete(id) => self.view.intents.retain(|intent| intent.node != id),
            Step::Requeue(id) => {
                let intent = self.intent(id);
                intent.wanted = JOIN;
                intent.attempts += 1;
                self.node_view(id).role = None;
                self.view.intents.sort_by_key(|intent| intent.attempts);
            }
            Step::Clear(id) => {
                assert!(self.view.member_of(id).is_none(), "members keep their role");
                self.view.intents.retain(|intent| intent.node != id);
                if let Some(node_view) = self.view.nodes.get_mut(&id) {
                    node_view.role = None;
                    node_view.progress = None;
                }
            }
        }
    }

    fn intent(&mut self, id: NodeId) -> &mut Intent {
        let mut intents = self.view.intents.iter_mut();
        intents.find(|intent| intent.node == id).expect("an intent")
    }

    fn node_view(&mut self, id: NodeId) -> &mut NodeView {
        self.view.nodes.get_mut(&id).expect("a node")
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn whatever_happens_consensus_stays_and_comes_to_what_is_wanted(
        events in prop::collection::vec(event(), 0..80)
    ) {
        let mut world = World::new();
        for event in &events {
            world.apply(event);
        }
        // Then there are no failures for a while.
        for node_view in world.view.nodes.values_mut() {
            node_view.alive = true;
        }
        world.starts = (0..5).map(node).collect();
        prop_assume!(world.has_quorum());
        for _ in 0..200 {
            // A learner does not come to be in sync without its etcd.
            let mut learners = world.view.members.iter().filter(|m| m.learner);
            if learners.any(|m| world.view.is_damaged(m)) {
                (0..7).for_each(|_| world.apply(&Event::Time));
            }
            world.apply(&Event::Nodes);
            world.apply(&Event::Lead { whole: true });
        }
        let view = &world.view;
        // Only intents that cannot be executed remain: the last voter cannot leave.
        for intent in &view.intents {
            prop_assert!(matches!(intent.wanted, Wanted::Leave { .. }), "{view:#?}");
            prop_assert_eq!(view.may_leave(intent.node), Err(CannotLeave::Last(intent.node)));
        }
        // Exactly the nodes with the role are voters.
        prop_assert!(view.members.iter().all(|m| !m.learner), "{view:#?}");
        for (id, node_view) in &view.nodes {
            prop_assert_eq!(view.votes(*id), node_view.role.is_some(), "{:#?}", view);
        }
        for member in &view.members {
            let id = member.node().unwrap();
            if let Some(node_view) = view.nodes.get(&id) {
                prop_assert!(matches!(node_view.role, Some(0)) || node_view.role == Some(member.id.0));
            } else {
                // A deleted node that the quorum needs.
                prop_assert_eq!(view.may_leave(id), Err(CannotLeave::Last(id)));
            }
        }
    }
}
