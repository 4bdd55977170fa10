//! From a history to a verdict.
//!
//! Linearizability is a property of each register by itself, so registers are checked one by one.
//!
//! Time and memory grow with the number of operations, and with the number of changes that overlap. Ten thousand
//! operations of eight clients take well under a second, and an excerpt of them some seconds; a search that becomes too
//! large is given up ([`CheckError::TooLarge`]).

use std::collections::BTreeSet;
use std::fmt;

use crate::excerpt::{self, Excerpt};
use crate::history::{Action, Answer, History, Operation, Register};
use crate::judge::judge;
use crate::search::Found;

/// Numbers of a history that is linearizable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Reads that were answered.
    pub reads: usize,
    /// Writes and exchanges that were made.
    pub changes: usize,
    /// Exchanges that were refused because the value was another one.
    pub refused: usize,
    /// Operations that certainly failed.
    pub failed: usize,
    /// Writes and exchanges of which it is not known whether they were made.
    pub unknown: usize,
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            reads,
            changes,
            refused,
            failed,
            unknown,
        } = self;
        write!(
            f,
            "{reads} reads, {changes} changes, {refused} refused exchanges, {failed} failed, {unknown} unknown"
        )
    }
}

/// Why a history is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// It is not linearizable.
    #[error("not linearizable: {0}")]
    NotLinearizable(Excerpt),
    /// An error of the test: the check relies on each value being set once.
    #[error("{register}: two operations set {value}")]
    SetTwice {
        /// The register.
        register: String,
        /// The value.
        value: u64,
    },
    /// An error of the test: an answer that the operation cannot have.
    #[error("{register}: not an answer to this operation: {operation}")]
    Mismatched {
        /// The register.
        register: String,
        /// The operation.
        operation: Box<Operation>,
    },
    /// Undecided: too many overlapping changes, or too many of which it is not known whether they were made.
    #[error("{register}: too large to be checked: {operations} operations, {unknown} unknown")]
    TooLarge {
        /// The register.
        register: String,
        /// The number of its operations.
        operations: usize,
        /// How many of these are unknown.
        unknown: usize,
    },
}

impl History {
    /// Checks that there is an order of the operations of each register that explains all answers, and in which an
    /// operation that returned before another began comes first.
    ///
    /// # Errors
    /// If there is none, or that cannot be decided.
    pub fn check(&self) -> Result<Checked, CheckError> {
        let mut checked = Checked::default();
        for (number, register) in self.registers.iter().enumerate() {
            let of_it = self.operations.iter();
            let of_it = of_it.filter(|operation| operation.register == number);
            let operations: Vec<Operation> = of_it.copied().collect();
            check_register(register, &operations)?;
            for operation in &operations {
                checked.count(operation);
            }
        }
        Ok(checked)
    }
}

impl Checked {
    fn count(&mut self, operation: &Operation) {
        match (operation.answer, operation.action) {
            (Answer::Value(_), _) => self.reads += 1,
            (Answer::Done, _) => self.changes += 1,
            (Answer::Differs, _) => self.refused += 1,
            (Answer::Failed, _) | (Answer::Unknown, Action::Read) => self.failed += 1,
            (Answer::Unknown, _) => self.unknown += 1,
        }
    }
}

fn check_register(register: &Register, operations: &[Operation]) -> Result<(), CheckError> {
    let mut set: BTreeSet<u64> = register.initial.into_iter().collect();
    for operation in operations {
        if !is_an_answer(operation) {
            return Err(CheckError::Mismatched {
                register: register.name.clone(),
                operation: Box::new(*operation),
            });
        }
        if let Some(value) = operation.action.sets()
            && !set.insert(value)
        {
            return Err(CheckError::SetTwice {
                register: register.name.clone(),
                value,
            });
        }
    }
    match judge(operations, register.initial) {
        Found::Order => Ok(()),
        Found::Contradiction => {
            let excerpt = excerpt::of(register, operations);
            Err(CheckError::NotLinearizable(excerpt))
        }
        Found::TooLarge => {
            let unknown = operations.iter();
            let unknown = unknown.filter(|operation| operation.answer == Answer::Unknown);
            Err(CheckError::TooLarge {
                register: register.name.clone(),
                operations: operations.len(),
                unknown: unknown.count(),
            })
        }
    }
}

fn is_an_answer(operation: &Operation) -> bool {
    match (operation.action, operation.answer) {
        (_, Answer::Unknown) => true,
        _ if operation.returned.is_none() => false,
        (_, Answer::Failed) => true,
        (Action::Read, answer) => matches!(answer, Answer::Value(_)),
        (Action::Write(_), answer) => answer == Answer::Done,
        (Action::Exchange { .. }, answer) => matches!(answer, Answer::Done | Answer::Differs),
    }
}
