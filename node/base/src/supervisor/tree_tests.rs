//! The rules of the supervisor, without tasks and without time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::tree::{Action, End, Generation, StopTimeouts, Tree};
use super::{Backoff, SpawnError, State};
use crate::logtree::{Severity, is_within};

const WARNING: Duration = Duration::from_secs(5);
const BOUND: Duration = Duration::from_secs(30);

fn backoff() -> Backoff {
    Backoff {
        random: Arc::new(|| 0.5),
        ..Backoff::default()
    }
}

/// A task as the driver would run it.
#[derive(Debug, Clone)]
struct Task {
    name: Arc<str>,
    cancelled: bool,
    aborted: bool,
}

/// A tree with the tasks that it requested, the clock, and the log. Each step checks the tree's
/// actions against the invariants.
struct World {
    tree: Tree<()>,
    now: Duration,
    live: BTreeMap<Generation, Task>,
    past: Vec<Generation>,
    log: Vec<(Arc<str>, Severity, String)>,
}

impl World {
    fn new() -> World {
        let patience = StopTimeouts {
            warning: WARNING,
            bound: BOUND,
        };
        let mut world = World {
            tree: Tree::new("root", (), backoff(), patience),
            now: Duration::ZERO,
            live: BTreeMap::new(),
            past: Vec::new(),
            log: Vec::new(),
        };
        world.act();
        world
    }

    /// Executes the tree's actions, as the driver does.
    fn act(&mut self) {
        let closing_before = self.tree.is_closing();
        for action in self.tree.take_actions() {
            match action {
                Action::Start {
                    name, generation, ..
                } => self.started(name, generation, closing_before),
                Action::Cancel { generation } => {
                    let task = self.live.get_mut(&generation).expect("cancels who lives");
                    assert!(!task.cancelled, "{task:?} is cancelled twice");
                    task.cancelled = true;
                }
                Action::Abort { generation } => {
                    let task = self.live.get_mut(&generation).expect("aborts who lives");
                    assert!(
                        task.cancelled && !task.aborted,
                        "{task:?} was not asked first"
                    );
                    task.aborted = true;
                }
                Action::Log {
                    name,
                    severity,
                    text,
                } => self.log.push((name, severity, text)),
            }
        }
        self.check();
    }

    fn started(&mut self, name: Arc<str>, generation: Generation, closing: bool) {
        assert!(!closing, "{name} starts in a closing tree");
        let below = |task: &&Task| is_within(&task.name, &name) && !task.aborted;
        let still = self.live.values().find(below);
        assert!(still.is_none(), "{name} starts over {still:?}");
        let newest = self.live.keys().chain(&self.past).max();
        assert!(newest < Some(&generation), "generations are new");
        let task = Task {
            name,
            cancelled: false,
            aborted: false,
        };
        self.live.insert(generation, task);
    }

    /// Invariants that hold at every moment.
    fn check(&self) {
        let views = self.tree.views();
        let state: BTreeMap<&str, State> = views.iter().map(|v| (&*v.name, v.state)).collect();
        for (name, state_here) in &state {
            let tasks: Vec<&Task> = self
                .live
                .values()
                .filter(|task| *task.name == **name && !task.aborted)
                .collect();
            match state_here {
                State::Starting | State::Healthy | State::Done => {
                    assert!(matches!(
                        tasks[..],
                        [Task {
                            cancelled: false,
                            ..
                        }]
                    ));
                    let parent = name.rsplit_once('.').map(|(parent, _)| state[parent]);
                    let fine = [
                        State::Starting,
                        State::Healthy,
                        State::Done,
                        State::Finished,
                    ];
                    assert!(
                        parent.is_none_or(|p| fine.contains(&p)),
                        "{name} is an orphan"
                    );
                }
                State::Stopping => assert!(matches!(
                    tasks[..],
                    [Task {
                        cancelled: true,
                        ..
                    }]
                )),
                State::Finished | State::Failed | State::Stopped => assert!(tasks.is_empty()),
            }
        }
        for task in self.live.values().filter(|task| !task.aborted) {
            assert!(state.contains_key(&*task.name), "{task:?} was forgotten");
        }
    }

    fn generation(&self, name: &str) -> Generation {
        let own = |(_, task): &(&Generation, &Task)| *task.name == *name && !task.aborted;
        let found = self.live.iter().find(own);
        *found.unwrap_or_else(|| panic!("{name} does not run")).0
    }

    fn spawn(&mut self, parent: &str, members: &[&str]) -> Result<(), SpawnError> {
        let generation = self.generation(parent);
        let members = members.iter().map(|name| (*name, ())).collect();
        let result = self.tree.spawn(parent, generation, members, self.now);
        self.act();
        result
    }

    fn healthy(&mut self, name: &str) {
        self.tree.healthy(self.generation(name), self.now);
        self.act();
    }

    fn done(&mut self, name: &str) {
        self.tree.done(self.generation(name), self.now);
        self.act();
    }

    fn end(&mut self, name: &str, end: End) {
        self.end_generation(self.generation(name), end);
    }

    fn end_generation(&mut self, generation: Generation, end: End) {
        self.live.remove(&generation).expect("it lives");
        self.past.push(generation);
        self.tree.ended(generation, end, self.now);
        self.act();
    }

    fn fail(&mut self, name: &str) {
        self.end(name, End::Failed("no luck".into()));
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.tree.tick(self.now);
        self.act();
        assert!(self.tree.deadline() > Some(self.now) || self.tree.deadline().is_none());
    }

    /// Lets every cancelled task end, and lets the time pass for everything that waits.
    fn come_to_rest(&mut self) {
        for _ in 0..100 {
            let told: Vec<Generation> = self
                .live
                .iter()
                .filter(|(_, task)| task.cancelled)
                .map(|(generation, _)| *generation)
                .collect();
            let deadline = self.tree.deadline();
            if told.is_empty() && deadline.is_none() {
                return;
            }
            for generation in told {
                self.end_generation(generation, End::Returned);
            }
            if let Some(at) = deadline {
                self.advance(at.saturating_sub(self.now));
            }
        }
        panic!("the tree does not settle");
    }

    fn state(&self, name: &str) -> State {
        let view = self.tree.views().into_iter().find(|v| *v.name == *name);
        view.unwrap_or_else(|| panic!("there is no {name}")).state
    }

    fn runs(&self, name: &str) -> bool {
        let running = |task: &Task| *task.name == *name && !task.cancelled;
        self.live.values().any(running)
    }

    fn logged(&self, name: &str, part: &str) -> usize {
        let about = |entry: &&(Arc<str>, Severity, String)| *entry.0 == *name;
        let entries = self.log.iter().filter(about);
        entries.filter(|entry| entry.2.contains(part)).count()
    }
}

/// A root with children a, a.x and b, all healthy.
fn small_world() -> World {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    world.spawn("root", &["b"]).expect("b");
    world.spawn("root.a", &["x"]).expect("x");
    for name in ["root", "root.a", "root.b", "root.a.x"] {
        world.healthy(name);
    }
    world
}

#[test]
fn a_failure_takes_its_subtree_and_nothing_else() {
    let mut world = small_world();
    world.fail("root.a");
    assert_eq!(world.state("root.a"), State::Failed);
    assert_eq!(world.state("root.a.x"), State::Stopping);
    assert!(world.runs("root.b") && world.runs("root"));
    // No restart, however long it takes, before everything below has ended.
    world.advance(Duration::from_secs(4));
    assert_eq!(world.state("root.a"), State::Failed);
    world.fail("root.a.x");
    assert_eq!(
        world.state("root.a.x"),
        State::Stopped,
        "an error while stopping does not count"
    );
    world.advance(Duration::from_millis(499));
    assert_eq!(world.state("root.a"), State::Failed);
    world.advance(Duration::from_millis(1));
    assert_eq!(world.state("root.a"), State::Starting);
    let names: Vec<_> = world.tree.views().into_iter().map(|v| v.name).collect();
    assert_eq!(
        names,
        ["root", "root.a", "root.b"].map(Arc::from),
        "the child is forgotten"
    );
}

#[test]
fn the_backoff_grows_and_healthy_resets_it() {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    for millis in [500, 750, 1125] {
        world.fail("root.a");
        let wait = world.tree.deadline().map(|at| at - world.now);
        assert_eq!(wait, Some(Duration::from_millis(millis)));
        world.come_to_rest();
    }
    world.healthy("root.a");
    world.fail("root.a");
    let wait = world.tree.deadline().map(|at| at - world.now);
    assert_eq!(wait, Some(Duration::from_millis(500)));
}

#[test]
fn a_run_can_cap_its_own_backoff() {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    let mut wait_with = |bound| {
        let generation = world.generation("root.a");
        world.tree.restart_within(generation, bound);
        world.fail("root.a");
        let wait = world.tree.deadline().map(|at| at - world.now);
        world.come_to_rest();
        wait.expect("it restarts").as_millis()
    };
    let cap = Some(Duration::from_millis(600));
    assert_eq!(wait_with(cap), 500);
    assert_eq!(wait_with(cap), 600);
    assert_eq!(wait_with(None), 1125, "said in each run anew");
}

#[test]
fn who_asks_to_be_started_anew_has_not_failed() {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    world.spawn("root.a", &["x"]).expect("x");
    world.fail("root.a");
    world.come_to_rest();
    for _ in 0..3 {
        world.spawn("root.a", &["x"]).expect("x");
        world.healthy("root.a");
        let restart = End::Restart {
            why: "another role".into(),
            after: Duration::from_millis(10),
        };
        world.end("root.a", restart);
        let views = world.tree.views();
        let of = |name: &str| views.iter().find(|view| &*view.name == name).expect("it");
        assert_eq!(of("root.a").state, State::Stopped);
        assert_eq!(of("root.a").last_error.as_deref(), Some("no luck"));
        assert_eq!(
            of("root.a.x").state,
            State::Stopping,
            "it goes down with it"
        );
        world.end("root.a.x", End::Returned);
        let wait = world.tree.deadline().map(|at| at - world.now);
        assert_eq!(wait, Some(Duration::from_millis(10)), "no backoff");
        world.come_to_rest();
    }
    assert!(world.tree.root_failure().is_none());
}

#[test]
fn the_backoff_is_capped_with_any_jitter() {
    for random in [0.0, 0.999_999] {
        let backoff = Backoff {
            random: Arc::new(move || random),
            ..Backoff::default()
        };
        let first = backoff.delay(1).as_secs_f64();
        assert!((first - 0.5 * (0.9 + 0.2 * random)).abs() < 1e-9, "{first}");
        for failures in [0, 30, 1000, u32::MAX] {
            assert!(backoff.delay(failures) <= backoff.cap);
        }
        assert!(backoff.delay(u32::MAX) >= backoff.cap.mul_f64(0.9));
    }
}

#[test]
fn groups_fall_and_rise_together() {
    let mut world = World::new();
    world.spawn("root", &["a", "b", "c"]).expect("group");
    world.spawn("root", &["d"]).expect("d");
    world.spawn("root.b", &["x"]).expect("x");
    for name in ["root", "root.a", "root.b", "root.c"] {
        world.healthy(name);
    }
    world.done("root.c");
    world.end("root.c", End::Returned);
    world.fail("root.a");
    assert_eq!(world.state("root.b"), State::Stopping);
    assert_eq!(world.state("root.b.x"), State::Stopping);
    assert!(world.runs("root.d"));
    world.end("root.b", End::Returned);
    world.advance(Duration::from_secs(2));
    assert_eq!(world.state("root.a"), State::Failed, "b.x still runs");
    world.end("root.b.x", End::Returned);
    world.advance(Duration::from_millis(500));
    for name in ["root.a", "root.b", "root.c"] {
        assert_eq!(world.state(name), State::Starting, "{name}");
    }
}

#[test]
fn done_and_returned_is_finished_and_the_children_go_on() {
    let mut world = small_world();
    world.done("root.a");
    world.end("root.a", End::Returned);
    assert_eq!(world.state("root.a"), State::Finished);
    world.fail("root.a.x");
    world.come_to_rest();
    assert_eq!(world.state("root.a"), State::Finished);
    assert!(world.runs("root.a.x"), "it has its own restarts");
}

#[test]
fn early_returns_are_failures() {
    let mut world = small_world();
    world.end("root.b", End::Returned);
    world.end("root.a.x", End::Failed("after being healthy".into()));
    assert_eq!(
        world.logged("root.b", "returned without signalling done"),
        1
    );
    world.come_to_rest();
    world.end("root.b", End::Returned);
    assert_eq!(
        world.logged("root.b", "returned before signalling healthy"),
        1
    );
    world.come_to_rest();
    assert!(world.runs("root.b") && world.runs("root.a.x"));
    let views = world.tree.views();
    let b = views.iter().find(|v| &*v.name == "root.b").expect("b");
    assert_eq!(b.restarts, 2);
    assert_eq!(
        b.last_error.as_deref(),
        Some("returned before signalling healthy")
    );
}

#[test]
fn wrong_signals_fail_the_runnable_alone() {
    type Signal = fn(&mut World, &str);
    let cases: [(&[Signal], &str); 4] = [
        (&[World::done], "signalled done before healthy"),
        (&[World::healthy, World::healthy], "signalled healthy twice"),
        (
            &[World::healthy, World::done, World::done],
            "signalled done twice",
        ),
        (
            &[World::healthy, World::done, World::healthy],
            "signalled healthy after done",
        ),
    ];
    for (signals, complaint) in cases {
        let mut world = World::new();
        world.spawn("root", &["a"]).expect("a");
        world.spawn("root", &["b"]).expect("b");
        for signal in signals {
            signal(&mut world, "root.a");
        }
        assert_eq!(world.state("root.a"), State::Stopping, "{complaint}");
        assert_eq!(world.logged("root.a", complaint), 1);
        assert!(world.runs("root.b"));
        // Its signals are ignored from here on.
        world.healthy("root.a");
        world.end("root.a", End::Returned);
        assert_eq!(world.state("root.a"), State::Failed);
        world.come_to_rest();
        assert_eq!(world.state("root.a"), State::Starting);
    }
}

#[test]
fn whoever_falls_with_its_parent_does_not_start_by_itself() {
    for told_first in [true, false] {
        let mut world = small_world();
        if told_first {
            // Still stopping for its own failure when its parent fails.
            world.healthy("root.a.x");
            world.fail("root.a");
            world.end("root.a.x", End::Returned);
        } else {
            // Already waiting for its restart when its parent fails.
            world.fail("root.a.x");
            assert_eq!(world.state("root.a.x"), State::Failed);
            world.fail("root.a");
        }
        assert_eq!(world.state("root.a.x"), State::Stopped);
        world.come_to_rest();
        assert!(world.runs("root.a") && !world.runs("root.a.x"));
    }
}

#[test]
fn who_ignores_the_cancellation_is_named_then_abandoned() {
    let mut world = small_world();
    world.fail("root.a");
    let stuck = world.generation("root.a.x");
    world.advance(WARNING - Duration::from_millis(1));
    assert_eq!(world.logged("root.a.x", "still running"), 0);
    world.advance(Duration::from_millis(1));
    world.advance(Duration::from_secs(10));
    assert_eq!(
        world.logged("root.a.x", "still running"),
        1,
        "once is enough"
    );
    world.advance(BOUND);
    assert_eq!(world.logged("root.a.x", "abandoned"), 1);
    assert!(world.live[&stuck].aborted);
    world.advance(Duration::from_secs(1));
    assert!(world.runs("root.a"), "the subtree continues without it");
    world
        .spawn("root.a", &["x"])
        .expect("a new x beside the old");
    // The abandoned run signals: everything is ignored.
    world.tree.healthy(stuck, world.now);
    world.tree.done(stuck, world.now);
    let late = world
        .tree
        .spawn("root.a.x", stuck, vec![("y", ())], world.now);
    assert!(matches!(late, Err(SpawnError::Ended { .. })), "{late:?}");
    world.act();
    assert_eq!(world.state("root.a.x"), State::Starting);
    let abandoned: Vec<_> = world
        .tree
        .abandoned()
        .map(|a| (&*a.name, a.ended))
        .collect();
    assert_eq!(abandoned, [("root.a.x", false)]);
    world.end_generation(stuck, End::Panicked("at last".into()));
    assert_eq!(world.state("root.a.x"), State::Starting);
    assert!(world.tree.abandoned().all(|a| a.ended));
}

#[test]
fn a_run_can_say_how_long_its_end_takes() {
    for (bound, named_after) in [(2, 2), (20, 20), (300, 30)].map(|(a, b)| {
        let seconds = Duration::from_secs;
        (seconds(a), seconds(b))
    }) {
        let mut world = small_world();
        let generation = world.generation("root.a.x");
        world.tree.ends_within(generation, bound);
        world.fail("root.a");
        world.advance(named_after - Duration::from_millis(1));
        assert_eq!(world.logged("root.a.x", "still running"), 0, "{bound:?}");
        assert_eq!(
            world.tree.deadline(),
            Some(world.now + Duration::from_millis(1)),
            "{bound:?}"
        );
        world.advance(Duration::from_millis(1));
        let named = world.logged("root.a.x", "still running");
        let abandoned = world.logged("root.a.x", "abandoned");
        assert_eq!(
            (named, abandoned),
            if bound < BOUND { (1, 0) } else { (0, 1) }
        );
        world.advance(BOUND);
        assert_eq!(world.logged("root.a.x", "abandoned"), 1, "{bound:?}");
    }
}

#[test]
fn how_long_an_end_takes_is_said_in_each_run_anew() {
    let mut world = small_world();
    let first = world.generation("root.b");
    world.tree.ends_within(first, 4 * WARNING);
    world.fail("root.b");
    world.come_to_rest();
    world.tree.ends_within(first, 4 * WARNING);
    world.fail("root");
    world.advance(WARNING);
    assert_eq!(world.logged("root.b", "still running"), 1);
}

#[test]
fn ended_abandonments_are_remembered_within_bounds() {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    for _ in 0..100 {
        world.healthy("root.a");
        world.healthy("root.a");
        let stuck = world.generation("root.a");
        world.advance(BOUND);
        world.end_generation(stuck, End::Returned);
        world.advance(Duration::from_secs(1));
    }
    assert_eq!(world.tree.abandoned().count(), 32);
}

#[test]
fn children_only_while_starting() {
    let mut world = World::new();
    world.spawn("root", &["a"]).expect("a");
    let ended = world.generation("root.a");
    world.fail("root.a");
    let late = world
        .tree
        .spawn("root.a", ended, vec![("x", ())], world.now);
    assert_eq!(
        late,
        Err(SpawnError::Ended {
            parent: "root.a".into()
        })
    );
    world.healthy("root");
    let refused = SpawnError::NotStarting {
        parent: "root".into(),
        state: State::Healthy,
    };
    assert_eq!(world.spawn("root", &["b"]), Err(refused));
}

#[test]
fn names_are_checked_at_the_call() {
    let mut world = World::new();
    let long = "x".repeat(64);
    world
        .spawn("root", &[&long, "0", "a-b_c"])
        .expect("good names");
    let too_long = "x".repeat(65);
    for bad in ["", ".", "a.b", "A", "a b", "ä", "a/b", "a\n", &too_long] {
        let result = world.spawn("root", &["fine", bad]);
        let Err(SpawnError::NameInvalid { name, .. }) = result else {
            panic!("{bad:?} gave {result:?}");
        };
        assert_eq!(name, bad);
    }
    for taken in [["0", "fine"], ["fine", "fine"]] {
        let result = world.spawn("root", &taken);
        assert!(
            matches!(result, Err(SpawnError::NameTaken { .. })),
            "{result:?}"
        );
    }
    assert!(matches!(
        world.spawn("root", &[]),
        Err(SpawnError::EmptyGroup { .. })
    ));
    world
        .spawn("root", &["fine"])
        .expect("the refused groups left nothing behind");
}

#[test]
fn the_root_never_restarts() {
    for wrong in [false, true] {
        let mut world = small_world();
        if wrong {
            world.healthy("root");
        } else {
            world.fail("root");
        }
        assert!(world.tree.is_closing());
        let why = if wrong {
            "signalled healthy twice"
        } else {
            "no luck"
        };
        assert_eq!(world.tree.root_failure(), Some(why));
        assert_eq!(world.state("root.a.x"), State::Stopping);
        world.come_to_rest();
        assert!(world.tree.all_ended() && world.live.is_empty());
    }
}

#[test]
fn closing_stops_all_and_starts_nothing() {
    let mut world = small_world();
    world.fail("root.b");
    world.tree.close(world.now);
    world.act();
    assert_eq!(world.tree.root_failure(), None);
    assert_eq!(world.tree.still_running().len(), 3);
    world.come_to_rest();
    assert!(world.tree.all_ended());
    assert_eq!(world.state("root.b"), State::Stopped);
}

#[derive(Debug, Clone)]
enum Step {
    Spawn(usize, BTreeSet<usize>),
    Healthy(usize),
    Done(usize),
    EndsWithin(usize, u64),
    End(usize, u8),
    Stale(usize),
    Advance(u64),
    Close,
}

const NAMES: [&str; 4] = ["a", "b", "a-a", "c"];

fn step() -> impl Strategy<Value = Step> {
    let who = 0..12_usize;
    let group = prop::collection::btree_set(0..NAMES.len(), 1..4);
    prop_oneof![
        8 => (who.clone(), group).prop_map(|(who, group)| Step::Spawn(who, group)),
        6 => who.clone().prop_map(Step::Healthy),
        3 => who.clone().prop_map(Step::Done),
        2 => (who.clone(), 0..60_000_u64).prop_map(|(who, millis)| Step::EndsWithin(who, millis)),
        6 => (who.clone(), 0..4_u8).prop_map(|(who, how)| Step::End(who, how)),
        2 => who.prop_map(Step::Stale),
        6 => prop_oneof![0..1000_u64, 0..40_000_u64].prop_map(Step::Advance),
        // Rare, otherwise no history gets long.
        1 => prop::bool::weighted(0.1).prop_map(|close| if close { Step::Close } else { Step::Advance(0) }),
    ]
}

impl World {
    /// Any running task, by number; small numbers are near the root.
    fn pick(&self, number: usize) -> (Generation, Arc<str>) {
        let (generation, task) = self
            .live
            .iter()
            .nth(number % self.live.len())
            .expect("in range");
        (*generation, task.name.clone())
    }

    fn step(&mut self, step: Step) {
        if self.live.is_empty() {
            self.advance(Duration::from_secs(1));
            return;
        }
        match step {
            Step::Spawn(who, group) => {
                let (generation, name) = self.pick(who);
                let group = group.iter().map(|number| (NAMES[*number], ())).collect();
                let may = !self.live[&generation].cancelled && self.state(&name) == State::Starting;
                let result = self.tree.spawn(&name, generation, group, self.now);
                assert!(may || result.is_err());
            }
            Step::Healthy(who) => self.tree.healthy(self.pick(who).0, self.now),
            Step::Done(who) => self.tree.done(self.pick(who).0, self.now),
            Step::EndsWithin(who, millis) => {
                let bound = Duration::from_millis(millis);
                self.tree.ends_within(self.pick(who).0, bound);
            }
            Step::End(who, how) => {
                let end = match how {
                    0 => End::Returned,
                    1 => End::Failed("error".into()),
                    2 => End::Restart {
                        why: "anew".into(),
                        after: Duration::from_millis(10),
                    },
                    _ => End::Panicked("panic".into()),
                };
                self.end_generation(self.pick(who).0, end);
            }
            Step::Stale(who) => {
                let past = self.past.get(who % self.past.len().max(1)).copied();
                let before = self.tree.revision();
                self.tree.healthy(past.unwrap_or(0), self.now);
                self.tree.done(past.unwrap_or(0), self.now);
                self.tree.ended(past.unwrap_or(0), End::Returned, self.now);
                assert_eq!(self.tree.revision(), before, "late signals change nothing");
            }
            Step::Advance(millis) => self.advance(Duration::from_millis(millis)),
            Step::Close => self.tree.close(self.now),
        }
        self.act();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any history, then a quiet phase: the world checks the invariants at each step; at the end no
    /// runnable waits for something that cannot happen.
    #[test]
    fn any_history_comes_to_rest(steps in prop::collection::vec(step(), 0..120)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.come_to_rest();
        if world.tree.is_closing() {
            prop_assert!(world.tree.all_ended());
            return Ok(());
        }
        for view in world.tree.views() {
            let rests = matches!(
                view.state,
                State::Starting | State::Healthy | State::Done | State::Finished
            );
            prop_assert!(rests, "{} is left {}", view.name, view.state);
        }
    }
}
