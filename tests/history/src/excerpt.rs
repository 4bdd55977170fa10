//! The fewest operations of a history that contradict each other.
//!
//! First all is left out that happened after the contradiction was complete: a history is linearizable only if each
//! beginning of it is. Then operations are left out in ever smaller groups, as long as the rest still is a
//! contradiction. Those that change nothing can be left out without harm to the others. A change is left out only if no
//! remaining operation found its value, or may have been refused because of it: otherwise the rest could be a
//! contradiction that the history does not have.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::history::{Action, Answer, Operation, Register, Value, shown};
use crate::judge::judge;
use crate::search::Found;

/// Operations of one register that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// The register.
    pub register: Register,
    /// The number of its operations in the history.
    pub among: usize,
    /// Some of them, by the time at which they began.
    pub operations: Vec<Operation>,
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            register,
            among,
            operations,
        } = self;
        write!(
            f,
            "{}: first {}; no order of these operations, of {among}, explains the answers",
            register.name,
            shown(register.initial)
        )?;
        for operation in operations {
            write!(f, "\n  {operation}")?;
        }
        Ok(())
    }
}

/// An excerpt of these operations of a register, which contradict each other.
pub(crate) fn of(register: &Register, operations: &[Operation]) -> Excerpt {
    let mut left = shortest_beginning(operations, register.initial);
    // As long as there are any, no change can be left out.
    let mut changed = left.clone();
    changed.retain(|operation| operation.answer != Answer::Differs);
    if contradicts(&changed, register.initial) {
        left = changed;
    }
    let mut size = left.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        let before = left.len();
        while at < left.len() {
            let end = left.len().min(at + size);
            let mut rest = left.clone();
            let gone: Vec<Operation> = rest.drain(at..end).collect();
            if may_be_left_out(&gone, &rest) && contradicts(&rest, register.initial) {
                left = rest;
            } else {
                at = end;
            }
        }
        // Single ones again, as long as that helps: others may be left out after the last of those that found their value.
        size = match (size, left.len() < before) {
            (1, true) => 1,
            _ => size / 2,
        };
    }
    left.sort_by_key(|operation| operation.invoked);
    Excerpt {
        register: register.clone(),
        among: operations.len(),
        operations: left,
    }
}

fn contradicts(operations: &[Operation], initial: Value) -> bool {
    judge(operations, initial) == Found::Contradiction
}

/// What had happened when the contradiction was complete.
fn shortest_beginning(operations: &[Operation], initial: Value) -> Vec<Operation> {
    let ends = operations.iter();
    let mut ends: Vec<Duration> = ends.filter_map(|operation| operation.returned).collect();
    ends.sort_unstable();
    let first = ends.partition_point(|end| !contradicts(&until(operations, *end), initial));
    match ends.get(first) {
        Some(end) => until(operations, *end),
        None => operations.to_vec(),
    }
}

/// What was known at this time.
fn until(operations: &[Operation], end: Duration) -> Vec<Operation> {
    let begun = operations
        .iter()
        .filter(|operation| operation.invoked <= end);
    begun
        .map(|operation| match operation.returned {
            Some(returned) if returned <= end => *operation,
            _ => Operation {
                answer: Answer::Unknown,
                returned: None,
                ..*operation
            },
        })
        .collect()
}

fn may_be_left_out(gone: &[Operation], rest: &[Operation]) -> bool {
    let may_change = |operation: &&Operation| {
        matches!(operation.answer, Answer::Done | Answer::Unknown)
            && operation.action.sets().is_some()
    };
    let set: BTreeSet<Value> = gone
        .iter()
        .filter(may_change)
        .map(|operation| operation.action.sets())
        .collect();
    if set.is_empty() {
        return true;
    }
    rest.iter()
        .all(|operation| match (operation.action, operation.answer) {
            (_, Answer::Differs) => false,
            (_, Answer::Value(value)) => !set.contains(&value),
            (Action::Exchange { expected, .. }, Answer::Done | Answer::Unknown) => {
                !set.contains(&expected)
            }
            _ => true,
        })
}
