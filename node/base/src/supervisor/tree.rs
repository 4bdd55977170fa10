//! The tree of runnables as a plain data structure: no clock, no task, no lock.
//!
//! Every event (a signal, an end, the passing of time) is a method call with its time; everything
//! that must be done in response is returned by [`Tree::take_actions`]. So all rules of the
//! supervisor are in this file and can be tested with any order of events.
//!
//! Invariants:
//! - Each start of a runnable has a generation, a number that is never reused. Signals of an ended
//!   or abandoned generation are ignored.
//! - A group starts (again) only when every member, and everything below the members, has ended or
//!   was abandoned.
//! - A runnable that is `Stopped` has an ancestor or group member that failed and will restart it
//!   or forget it, or the whole tree is closing.
//! - The root never restarts: when it fails, the tree closes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::backoff::Backoff;
use super::{SpawnError, State};
use crate::logtree::{Severity, is_within};

/// One start of one runnable.
pub(super) type Generation = u64;

/// Longest name of a runnable among its siblings.
const MAX_NAME: usize = 64;

/// How many abandoned generations are remembered after they have ended.
const MAX_ENDED_ABANDONED: usize = 32;

/// How a task has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// It returned `Ok`.
    Returned,
    /// It asked to be restarted after this time.
    Restart { why: String, after: Duration },
    /// It returned an error.
    Failed(String),
    /// It panicked, or its task was aborted.
    Panicked(String),
}

/// Time limits for a runnable that was cancelled.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopTimeouts {
    /// After this the log names it, unless it set another time.
    pub(super) warning: Duration,
    /// After this it is abandoned.
    pub(super) bound: Duration,
}

/// What the driver has to do, in this order.
#[derive(Debug)]
pub(super) enum Action<R> {
    /// Start a task for this runnable.
    Start {
        name: Arc<str>,
        generation: Generation,
        payload: R,
    },
    /// Ask this generation to stop.
    Cancel { generation: Generation },
    /// Abort the task, at its next await.
    Abort { generation: Generation },
    /// Log this under the runnable's name.
    Log {
        name: Arc<str>,
        severity: Severity,
        text: String,
    },
}

/// A runnable's phase; [`State`] is its public form.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Starting,
    Healthy,
    Done,
    Finished,
    /// Cancelled, its task is still running. `fault`: it failed by itself (a signal out of order),
    /// so it is the one that restarts.
    Stopping {
        told: Duration,
        warned: bool,
        fault: bool,
    },
    /// Ended by its own failure, or at its own request; `restart_at` is set as soon as everything
    /// that restarts with it has ended.
    Ended {
        failed: bool,
        restart_at: Option<Duration>,
    },
    Stopped,
}

impl Phase {
    fn has_ended(self) -> bool {
        matches!(self, Phase::Finished | Phase::Ended { .. } | Phase::Stopped)
    }

    fn state(self) -> State {
        match self {
            Phase::Starting => State::Starting,
            Phase::Healthy => State::Healthy,
            Phase::Done => State::Done,
            Phase::Finished => State::Finished,
            Phase::Stopping { .. } => State::Stopping,
            Phase::Ended { failed: true, .. } => State::Failed,
            Phase::Ended { failed: false, .. } | Phase::Stopped => State::Stopped,
        }
    }
}

#[derive(Debug)]
struct Node<R> {
    payload: R,
    /// All members of its group, including itself.
    group: Arc<[Arc<str>]>,
    generation: Generation,
    phase: Phase,
    /// When the phase was entered.
    since: Duration,
    restarts: u64,
    /// Failures since it was last healthy.
    failures: u32,
    /// Cap on the backoff if this run fails.
    restart_within: Option<Duration>,
    /// Delay before its next start, if it asked for a restart.
    restart_after: Option<Duration>,
    /// How long this run may take to stop, if not the default.
    ends_within: Option<Duration>,
    last_error: Option<String>,
}

/// A generation that ignored its cancellation and was abandoned.
#[derive(Debug, Clone)]
pub(super) struct Abandonment {
    pub(super) name: Arc<str>,
    pub(super) generation: Generation,
    pub(super) at: Duration,
    pub(super) ended: bool,
}

/// The readable state of one runnable.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) name: Arc<str>,
    pub(super) state: State,
    pub(super) restarts: u64,
    pub(super) since: Duration,
    pub(super) last_error: Option<String>,
}

/// The tree. `R` is what the driver needs to start a runnable.
#[derive(Debug)]
pub(super) struct Tree<R> {
    nodes: BTreeMap<Arc<str>, Node<R>>,
    /// The generations whose tasks are running and were not abandoned.
    running: BTreeMap<Generation, Arc<str>>,
    abandoned: VecDeque<Abandonment>,
    root: Arc<str>,
    root_failure: Option<String>,
    closing: bool,
    last_generation: Generation,
    revision: u64,
    actions: Vec<Action<R>>,
    backoff: Backoff,
    patience: StopTimeouts,
}

impl<R: Clone> Tree<R> {
    /// A tree whose root is about to start.
    pub(super) fn new(root: &str, payload: R, backoff: Backoff, patience: StopTimeouts) -> Self {
        let root: Arc<str> = root.into();
        let mut tree = Tree {
            nodes: BTreeMap::new(),
            running: BTreeMap::new(),
            abandoned: VecDeque::new(),
            root: root.clone(),
            root_failure: None,
            closing: false,
            last_generation: 0,
            revision: 0,
            actions: Vec::new(),
            backoff,
            patience,
        };
        let group: Arc<[Arc<str>]> = [root.clone()].into();
        tree.add(root.clone(), payload, group);
        tree.start(&root, Duration::ZERO);
        tree
    }

    /// Adds a group of children below the runnable of `parent` and starts them: all of them or, on
    /// error, none.
    pub(super) fn spawn(
        &mut self,
        parent_name: &str,
        parent: Generation,
        members: Vec<(&str, R)>,
        now: Duration,
    ) -> Result<(), SpawnError> {
        let phase = self
            .running
            .get(&parent)
            .and_then(|name| self.nodes.get(name))
            .map(|node| node.phase);
        match phase {
            Some(Phase::Starting) => {}
            Some(phase) => {
                return Err(SpawnError::NotStarting {
                    parent: parent_name.into(),
                    state: phase.state(),
                });
            }
            None => {
                return Err(SpawnError::Ended {
                    parent: parent_name.into(),
                });
            }
        }
        if members.is_empty() {
            return Err(SpawnError::EmptyGroup {
                parent: parent_name.into(),
            });
        }
        let mut names: Vec<Arc<str>> = Vec::with_capacity(members.len());
        for (name, _) in &members {
            check_name(parent_name, name)?;
            let full: Arc<str> = format!("{parent_name}.{name}").into();
            if self.nodes.contains_key(&full) || names.contains(&full) {
                return Err(SpawnError::NameTaken { name: full });
            }
            names.push(full);
        }
        let group: Arc<[Arc<str>]> = names.into();
        for (name, (_, payload)) in group.iter().zip(members) {
            self.add(name.clone(), payload, group.clone());
        }
        for name in group.iter() {
            self.start(name, now);
        }
        Ok(())
    }

    /// The runnable signals that it is healthy.
    pub(super) fn healthy(&mut self, generation: Generation, now: Duration) {
        let Some((name, phase)) = self.of(generation) else {
            return;
        };
        match phase {
            Phase::Starting => {
                self.enter(&name, Phase::Healthy, now);
                if let Some(node) = self.nodes.get_mut(&name) {
                    node.failures = 0;
                }
            }
            Phase::Healthy => self.violated(&name, "signalled healthy twice", now),
            Phase::Done => self.violated(&name, "signalled healthy after done", now),
            _ => {}
        }
    }

    /// The runnable caps its backoff after a failure.
    pub(super) fn restart_within(&mut self, generation: Generation, bound: Option<Duration>) {
        let Some((name, _)) = self.of(generation) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(&name) {
            node.restart_within = bound;
        }
    }

    /// The runnable states how long it may take to stop.
    pub(super) fn ends_within(&mut self, generation: Generation, bound: Duration) {
        let Some((name, _)) = self.of(generation) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(&name) {
            node.ends_within = Some(bound);
        }
    }

    /// The runnable signals that it may return now.
    pub(super) fn done(&mut self, generation: Generation, now: Duration) {
        let Some((name, phase)) = self.of(generation) else {
            return;
        };
        match phase {
            Phase::Starting => self.violated(&name, "signalled done before healthy", now),
            Phase::Healthy => self.enter(&name, Phase::Done, now),
            Phase::Done => self.violated(&name, "signalled done twice", now),
            _ => {}
        }
    }

    /// The task of a generation has ended.
    pub(super) fn ended(&mut self, generation: Generation, end: End, now: Duration) {
        let Some(name) = self.running.remove(&generation) else {
            self.abandoned_ended(generation);
            return;
        };
        let Some(phase) = self.nodes.get(&name).map(|node| node.phase) else {
            return;
        };
        match (phase, end) {
            (Phase::Stopping { .. }, end) => self.stopped_by(&name, phase, end, now),
            (_, End::Failed(why) | End::Panicked(why)) => self.failed(&name, why, now),
            (_, End::Restart { why, after }) => self.asked_for_restart(&name, why, after, now),
            (Phase::Done, End::Returned) => self.enter(&name, Phase::Finished, now),
            (Phase::Healthy, End::Returned) => {
                self.failed(&name, "returned without signalling done".into(), now);
            }
            (_, End::Returned) => {
                self.failed(&name, "returned before signalling healthy".into(), now);
            }
        }
        self.settle(now);
    }

    /// Time has passed: logs stragglers, abandons them, restarts what is due.
    pub(super) fn tick(&mut self, now: Duration) {
        for (name, warning, told, warned) in self.stopping() {
            let waited = now.saturating_sub(told);
            if waited >= self.patience.bound {
                self.abandon(&name, now);
            } else if waited >= warning && !warned {
                let text = format!("still running {waited:.1?} after it was told to stop");
                self.log(&name, Severity::Warning, text);
                if let Some(Node {
                    phase: Phase::Stopping { warned, .. },
                    ..
                }) = self.nodes.get_mut(&name)
                {
                    *warned = true;
                }
            }
        }
        self.settle(now);
        for name in self.due(now) {
            self.restart(&name, now);
        }
    }

    /// When [`Tree::tick`] has to be called next, `None` if nothing is waiting.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let next = |node: &Node<R>| match node.phase {
            Phase::Stopping { told, warned, .. } if warned => Some(told + self.patience.bound),
            Phase::Stopping { told, .. } => {
                Some(told + self.warning(node).min(self.patience.bound))
            }
            Phase::Ended { restart_at, .. } => restart_at,
            _ => None,
        };
        self.nodes.values().filter_map(next).min()
    }

    /// Cancels everything; nothing restarts afterwards.
    pub(super) fn close(&mut self, now: Duration) {
        self.closing = true;
        let root = self.root.clone();
        self.cancel(&root, now);
    }

    /// Whether the tree is closing, after [`Tree::close`] or a failure of the root.
    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Why the root failed, if it did.
    pub(super) fn root_failure(&self) -> Option<&str> {
        self.root_failure.as_deref()
    }

    /// The runnables that are still running, including abandoned ones.
    pub(super) fn still_running(&self) -> Vec<Arc<str>> {
        let abandoned = self.abandoned.iter().filter(|a| !a.ended);
        let abandoned = abandoned.map(|a| a.name.clone());
        self.running.values().cloned().chain(abandoned).collect()
    }

    /// Whether every task has ended, except abandoned ones.
    pub(super) fn all_ended(&self) -> bool {
        self.running.is_empty()
    }

    pub(super) fn take_actions(&mut self) -> Vec<Action<R>> {
        std::mem::take(&mut self.actions)
    }

    /// Grows with every change of what [`Tree::views`] or [`Tree::abandoned`] return.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Every runnable, sorted by name.
    pub(super) fn views(&self) -> Vec<View> {
        let view = |(name, node): (&Arc<str>, &Node<R>)| View {
            name: name.clone(),
            state: node.phase.state(),
            restarts: node.restarts,
            since: node.since,
            last_error: node.last_error.clone(),
        };
        self.nodes.iter().map(view).collect()
    }

    /// The abandoned generations: all that are still running, and the last ones that ended.
    pub(super) fn abandoned(&self) -> impl Iterator<Item = &Abandonment> {
        self.abandoned.iter()
    }

    fn add(&mut self, name: Arc<str>, payload: R, group: Arc<[Arc<str>]>) {
        let node = Node {
            payload,
            group,
            generation: 0,
            phase: Phase::Stopped,
            since: Duration::ZERO,
            restarts: 0,
            failures: 0,
            restart_within: None,
            restart_after: None,
            ends_within: None,
            last_error: None,
        };
        self.nodes.insert(name, node);
    }

    fn start(&mut self, name: &Arc<str>, now: Duration) {
        self.last_generation += 1;
        let generation = self.last_generation;
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        node.generation = generation;
        node.restart_within = None;
        node.restart_after = None;
        node.ends_within = None;
        self.actions.push(Action::Start {
            name: name.clone(),
            generation,
            payload: node.payload.clone(),
        });
        self.running.insert(generation, name.clone());
        self.enter(name, Phase::Starting, now);
    }

    fn enter(&mut self, name: &str, phase: Phase, now: Duration) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.phase = phase;
            node.since = now;
            self.revision += 1;
        }
    }

    fn of(&self, generation: Generation) -> Option<(Arc<str>, Phase)> {
        let name = self.running.get(&generation)?;
        Some((name.clone(), self.nodes.get(name)?.phase))
    }

    /// The task ended by itself although it should keep running.
    fn failed(&mut self, name: &Arc<str>, why: String, now: Duration) {
        let phase = Phase::Ended {
            failed: true,
            restart_at: None,
        };
        self.enter(name, phase, now);
        self.blame(name, why, now);
    }

    /// The task asked to be restarted: nothing has failed, but everything that restarts with it
    /// goes down. The root cannot ask for it.
    fn asked_for_restart(&mut self, name: &Arc<str>, why: String, after: Duration, now: Duration) {
        if *name == self.root {
            return self.failed(name, why, now);
        }
        self.log(name, Severity::Info, why);
        let phase = Phase::Ended {
            failed: false,
            restart_at: None,
        };
        self.enter(name, phase, now);
        if let Some(node) = self.nodes.get_mut(name) {
            node.restart_after = Some(after);
        }
        self.take_down(name, now);
    }

    /// The task broke the rules and is still running: it is cancelled, and counts as failed when it
    /// has ended.
    fn violated(&mut self, name: &Arc<str>, why: &str, now: Duration) {
        self.stop(name, true, now);
        self.blame(name, why.into(), now);
    }

    /// Records a failure and stops everything that restarts with this runnable.
    fn blame(&mut self, name: &Arc<str>, why: String, now: Duration) {
        self.log(name, Severity::Error, why.clone());
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        node.failures = node.failures.saturating_add(1);
        node.last_error = Some(why.clone());
        if *name == self.root {
            self.root_failure = Some(why);
            self.closing = true;
        }
        self.take_down(name, now);
    }

    /// Stops everything that restarts with this runnable.
    fn take_down(&mut self, name: &Arc<str>, now: Duration) {
        let Some(group) = self.nodes.get(name).map(|node| node.group.clone()) else {
            return;
        };
        for below in self.below(name) {
            self.cancel_one(&below, now);
        }
        for member in group.iter().filter(|member| *member != name) {
            self.cancel(member, now);
        }
        self.settle(now);
    }

    /// Cancels a runnable and everything below it, for a reason other than its own failure.
    fn cancel(&mut self, name: &Arc<str>, now: Duration) {
        self.cancel_one(name, now);
        for below in self.below(name) {
            self.cancel_one(&below, now);
        }
    }

    fn cancel_one(&mut self, name: &Arc<str>, now: Duration) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        match &mut node.phase {
            Phase::Starting | Phase::Healthy | Phase::Done => self.stop(name, false, now),
            // What takes it down now also decides when it restarts.
            Phase::Stopping { fault, .. } => *fault = false,
            Phase::Ended { .. } => self.enter(name, Phase::Stopped, now),
            Phase::Finished | Phase::Stopped => {}
        }
    }

    fn stop(&mut self, name: &Arc<str>, fault: bool, now: Duration) {
        let phase = Phase::Stopping {
            told: now,
            warned: false,
            fault,
        };
        self.enter(name, phase, now);
        if let Some(node) = self.nodes.get(name) {
            let generation = node.generation;
            self.actions.push(Action::Cancel { generation });
        }
    }

    /// A cancelled task has ended by itself. Errors are usual then (what it worked with is torn
    /// down, too), panics are not.
    fn stopped_by(&mut self, name: &Arc<str>, phase: Phase, end: End, now: Duration) {
        match end {
            End::Returned | End::Restart { .. } => {}
            End::Failed(why) => self.log(name, Severity::Debug, format!("stopped: {why}")),
            End::Panicked(why) => {
                self.log(name, Severity::Error, format!("while stopping: {why}"));
                if let Some(node) = self.nodes.get_mut(name) {
                    node.last_error = Some(why);
                }
            }
        }
        self.stopped(name, phase, now);
    }

    /// A cancelled task has ended, or was abandoned.
    fn stopped(&mut self, name: &Arc<str>, phase: Phase, now: Duration) {
        let fault = matches!(phase, Phase::Stopping { fault: true, .. });
        let phase = if fault {
            Phase::Ended {
                failed: true,
                restart_at: None,
            }
        } else {
            Phase::Stopped
        };
        self.enter(name, phase, now);
    }

    fn abandon(&mut self, name: &Arc<str>, now: Duration) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        let (generation, phase) = (node.generation, node.phase);
        let bound = self.patience.bound;
        let why = format!("ignored its cancellation for {bound:?}; abandoned");
        node.last_error = Some(why.clone());
        self.running.remove(&generation);
        self.abandoned.push_back(Abandonment {
            name: name.clone(),
            generation,
            at: now,
            ended: false,
        });
        self.actions.push(Action::Abort { generation });
        self.log(name, Severity::Error, why);
        self.stopped(name, phase, now);
    }

    fn abandoned_ended(&mut self, generation: Generation) {
        let Some(entry) = self
            .abandoned
            .iter_mut()
            .find(|a| a.generation == generation && !a.ended)
        else {
            return;
        };
        entry.ended = true;
        let name = entry.name.clone();
        self.revision += 1;
        self.log(
            &name,
            Severity::Warning,
            "the abandoned run has ended".into(),
        );
        let ended = self.abandoned.iter().filter(|a| a.ended).count();
        if ended > MAX_ENDED_ABANDONED
            && let Some(oldest) = self.abandoned.iter().position(|a| a.ended)
        {
            self.abandoned.remove(oldest);
        }
    }

    /// Sets the restart time of each failed runnable whose group and subtrees have ended. Looks at
    /// the whole tree each time, so there is no state that could get out of step.
    fn settle(&mut self, now: Duration) {
        if self.closing {
            return;
        }
        let waiting = |node: &Node<R>| {
            matches!(
                node.phase,
                Phase::Ended {
                    restart_at: None,
                    ..
                }
            )
        };
        let ended: Vec<Arc<str>> = self
            .nodes
            .iter()
            .filter(|(_, node)| waiting(node))
            .map(|(name, _)| name.clone())
            .collect();
        for name in ended {
            let Some(node) = self.nodes.get(&name) else {
                continue;
            };
            if !node.group.iter().all(|member| self.subtree_ended(member)) {
                continue;
            }
            let delay = node.restart_after.unwrap_or_else(|| {
                let delay = self.backoff.delay(node.failures);
                node.restart_within.map_or(delay, |bound| delay.min(bound))
            });
            self.log(&name, Severity::Info, format!("restarts in {delay:.1?}"));
            if let Some(Node {
                phase: Phase::Ended { restart_at, .. },
                ..
            }) = self.nodes.get_mut(&name)
            {
                *restart_at = Some(now + delay);
            }
        }
    }

    fn due(&self, now: Duration) -> Vec<Arc<str>> {
        let due = |node: &Node<R>| matches!(node.phase, Phase::Ended { restart_at: Some(at), .. } if at <= now);
        let due = self.nodes.iter().filter(|(_, node)| due(node));
        due.map(|(name, _)| name.clone()).collect()
    }

    fn restart(&mut self, name: &Arc<str>, now: Duration) {
        let Some(group) = self.nodes.get(name).map(|node| node.group.clone()) else {
            return;
        };
        for member in group.iter() {
            for below in self.below(member) {
                self.nodes.remove(&below);
            }
            if let Some(node) = self.nodes.get_mut(member) {
                node.restarts += 1;
            }
            self.start(member, now);
        }
    }

    /// The cancelled runnables that are still running: when each is to be logged, when it was
    /// cancelled, and whether it has been logged.
    fn stopping(&self) -> Vec<(Arc<str>, Duration, Duration, bool)> {
        let stopping = |(name, node): (&Arc<str>, &Node<R>)| match node.phase {
            Phase::Stopping { told, warned, .. } => {
                Some((name.clone(), self.warning(node), told, warned))
            }
            _ => None,
        };
        self.nodes.iter().filter_map(stopping).collect()
    }

    /// How long after its cancellation the runnable is logged as a straggler.
    fn warning(&self, node: &Node<R>) -> Duration {
        node.ends_within.unwrap_or(self.patience.warning)
    }

    fn below(&self, name: &str) -> Vec<Arc<str>> {
        let below = |other: &&Arc<str>| is_within(other, name) && other.as_ref() != name;
        self.nodes.keys().filter(below).cloned().collect()
    }

    fn subtree_ended(&self, name: &str) -> bool {
        let mut inside = self
            .nodes
            .iter()
            .filter(|(other, _)| is_within(other, name));
        inside.all(|(_, node)| node.phase.has_ended())
    }

    fn log(&mut self, name: &Arc<str>, severity: Severity, text: String) {
        self.actions.push(Action::Log {
            name: name.clone(),
            severity,
            text,
        });
    }
}

fn check_name(parent: &str, name: &str) -> Result<(), SpawnError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(allowed) {
        return Err(SpawnError::NameInvalid {
            parent: parent.into(),
            name: name.chars().take(2 * MAX_NAME).collect(),
        });
    }
    Ok(())
}
