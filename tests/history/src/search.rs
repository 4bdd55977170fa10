//! The search for an order of one register's operations.
//!
//! It is that of Wing and Gong with the memory that Lowe added: operations are put in order one by one; the next may be
//! any that began before all others that remain have returned, and whose answer fits the value of the moment. The same
//! set of operations with the same value is tried once.
//!
//! What makes it fast for registers: an operation that changes nothing and fits is put in order at once, because that
//! takes nothing away from the others. So only changes branch, and of those only the ones that overlap in time. Each
//! value is set once, so a change is not tried while a remaining operation needs the value that it replaces.
//!
//! Operations that may never happen overlap with all that follow, but only those come here whose value nobody saw
//! ([`crate::judge`]). They can explain one thing: that an exchange found another value than the one it expected. So one
//! is put in order only before such an exchange, and it is indifferent which: each could happen later as well, but for
//! an exchange, which could not because the value that it expects does not come back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::history::Value;

/// How many sets of operations are tried. Some hundred bytes of memory each; a history of a sound cluster needs about as
/// many as it has changes.
const MOST_TRIED: usize = 500_000;

/// What an operation does to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing; the value is this.
    Sees(Value),
    /// Nothing; the value is not this.
    SeesOther(Value),
    /// Sets it.
    Sets(u64),
    /// Sets it if it is the first.
    Exchanges(Value, u64),
}

impl Effect {
    /// The value that it needs.
    pub(crate) fn needs(self) -> Option<Value> {
        match self {
            Self::Sees(value) | Self::Exchanges(value, _) => Some(value),
            Self::SeesOther(_) | Self::Sets(_) => None,
        }
    }

    /// The number that it sets.
    pub(crate) fn sets(self) -> Option<u64> {
        match self {
            Self::Sets(new) | Self::Exchanges(_, new) => Some(new),
            Self::Sees(_) | Self::SeesOther(_) => None,
        }
    }

    /// The value after it; `None` if it cannot happen at this one.
    fn on(self, value: Value) -> Option<Value> {
        match self {
            Self::Sees(seen) => (value == seen).then_some(value),
            Self::SeesOther(other) => (value != other).then_some(value),
            Self::Sets(new) => Some(Some(new)),
            Self::Exchanges(expected, new) => (value == expected).then_some(Some(new)),
        }
    }
}

/// An operation as the search needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) effect: Effect,
    pub(crate) invoked: Duration,
    /// It has happened before this. `None`: it happens at any time after it was invoked, or never, and no step that is
    /// certain sees its value.
    pub(crate) returned: Option<Duration>,
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// There is an order.
    Order,
    /// There is none.
    Contradiction,
    /// Undecided after [`MOST_TRIED`].
    TooLarge,
}

/// A set of operations that have an order, and the value after them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Done {
    /// All certain steps before this one are in it.
    below: usize,
    /// The further certain steps that are, in ascending order.
    further: Vec<usize>,
    /// The uncertain steps that are, in ascending order.
    uncertain: Vec<usize>,
    value: Value,
}

impl Done {
    fn has(&self, step: usize) -> bool {
        step < self.below || self.further.binary_search(&step).is_ok()
    }

    fn add(&mut self, step: usize) {
        if let Err(at) = self.further.binary_search(&step) {
            self.further.insert(at, step);
        }
        while self.further.first() == Some(&self.below) {
            self.further.remove(0);
            self.below += 1;
        }
    }
}

struct Search {
    /// Those that have happened, by the time at which they were invoked.
    certain: Vec<(Step, Duration)>,
    /// The others.
    uncertain: Vec<Step>,
    /// The certain steps that need a value.
    needing: HashMap<Value, Vec<usize>>,
}

/// Searches for an order of these operations on a register with this value.
pub(crate) fn order(steps: &[Step], initial: Value) -> Found {
    let certain = steps
        .iter()
        .filter_map(|step| Some((*step, step.returned?)));
    let uncertain = steps.iter().filter(|step| step.returned.is_none());
    let mut search = Search {
        certain: certain.collect(),
        uncertain: uncertain.copied().collect(),
        needing: HashMap::new(),
    };
    search.certain.sort_by_key(|(step, _)| step.invoked);
    for (number, (step, _)) in search.certain.iter().enumerate() {
        if let Some(value) = step.effect.needs() {
            search.needing.entry(value).or_default().push(number);
        }
    }
    search.run(initial)
}

impl Search {
    fn run(&self, initial: Value) -> Found {
        let mut tried = HashSet::new();
        // Not by recursion: the depth is the number of changes.
        let mut next = vec![Done {
            below: 0,
            further: Vec::new(),
            uncertain: Vec::new(),
            value: initial,
        }];
        while let Some(mut done) = next.pop() {
            let (candidates, bound) = self.observe(&mut done);
            if done.below == self.certain.len() {
                return Found::Order;
            }
            if tried.contains(&done) {
                continue;
            }
            // What is tried last comes first.
            next.extend(self.explained(&done, &candidates, bound));
            for step in candidates.into_iter().rev() {
                if let Some(value) = self.certain[step].0.effect.on(done.value)
                    && self.may_replace(&done, Some(step))
                {
                    let mut with = done.clone();
                    with.add(step);
                    with.value = value;
                    next.push(with);
                }
            }
            tried.insert(done);
            if tried.len() > MOST_TRIED {
                return Found::TooLarge;
            }
        }
        Found::Contradiction
    }

    /// Whether no remaining step needs the value, but for the one that replaces it.
    fn may_replace(&self, done: &Done, by: Option<usize>) -> bool {
        let mut needing = self.needing.get(&done.value).into_iter().flatten();
        needing.all(|step| done.has(*step) || Some(*step) == by)
    }

    /// With an uncertain step more, if that explains a candidate.
    fn explained(&self, done: &Done, candidates: &[usize], bound: Duration) -> Option<Done> {
        // All others of its kind have been observed.
        let is_refused =
            |step: &usize| matches!(self.certain[*step].0.effect, Effect::SeesOther(_));
        if !candidates.iter().any(is_refused) || !self.may_replace(done, None) {
            return None;
        }
        let open = self.uncertain.iter().enumerate();
        let open = open.filter_map(|(number, step)| {
            let value = step.effect.on(done.value)?;
            let is_write = matches!(step.effect, Effect::Sets(_));
            (step.invoked <= bound).then_some((is_write, number, value))
        });
        let mut open = open.filter(|(_, number, _)| !done.uncertain.contains(number));
        let first = open.clone().find(|(is_write, ..)| !is_write);
        let (_, number, value) = first.or_else(|| open.next())?;
        let mut with = done.clone();
        if let Err(at) = with.uncertain.binary_search(&number) {
            with.uncertain.insert(at, number);
        }
        with.value = value;
        Some(with)
    }

    /// Adds all steps that change nothing and fit. Returns the steps that may be next, the one that returned first
    /// first, and the time before which the next one was invoked.
    fn observe(&self, done: &mut Done) -> (Vec<usize>, Duration) {
        loop {
            let (candidates, bound) = self.candidates(done);
            let fitting = |step: &&usize| {
                let effect = self.certain[**step].0.effect;
                let observes = matches!(effect, Effect::Sees(_) | Effect::SeesOther(_));
                observes && effect.on(done.value).is_some()
            };
            let fitting: Vec<usize> = candidates.iter().filter(fitting).copied().collect();
            if fitting.is_empty() {
                return (candidates, bound);
            }
            for step in fitting {
                done.add(step);
            }
        }
    }

    fn candidates(&self, done: &Done) -> (Vec<usize>, Duration) {
        let mut bound = Duration::MAX;
        let mut candidates = Vec::new();
        for (number, (step, returned)) in self.certain.iter().enumerate().skip(done.below) {
            if step.invoked > bound {
                break;
            }
            if !done.has(number) {
                bound = bound.min(*returned);
                candidates.push(number);
            }
        }
        candidates.sort_by_key(|step| self.certain[*step].1);
        (candidates, bound)
    }
}
