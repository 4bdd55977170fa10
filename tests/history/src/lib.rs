//! Histories of what clients asked curators and were answered while things failed, and the check that they are
//! linearizable: that each answer is one that a single register could have given at a moment between the question and
//! the answer.
//!
//! The tests with real etcds on this host and those on booted machines use the same [`Clients`], which read and write
//! through curators and record each operation; faults are up to the test. [`History::check`] judges what was recorded,
//! and knows nothing of curators.
//!
//! | module | what |
//! |---|---|
//! | [`history`] | operations, and the recorder that gives them their times |
//! | [`check`] | from a history to a verdict, register by register |
//! | `judge` | what follows from the operations of one register without a search |
//! | `search` | the search for an order of one register's operations |
//! | `excerpt` | the fewest operations of a history that contradict each other |
//! | [`clients`] | clients of curators that record what they do |
//!
//! # Invariants
//! - A history that a correct cluster can produce is never refused, whatever is unknown in it: the search takes an
//!   operation without an answer for one that may happen at any time after its begin, or never.
//! - A history that is not linearizable is refused, or the check says that it was too much to decide.
//! - An excerpt is a contradiction by itself: nothing that was left out could explain it.
//!
//! # Why not a crate
//! `stateright` 0.31 has a tester. It takes an operation without an answer as the last one of its thread, which would
//! do; but it searches without remembering what it has tried, by recursion, and copies all that remains at each step,
//! so that a history of some thousand operations is too much for it. It also brings a model checker with a web server.
//! `todc-utils` 0.1 remembers, and has no operations without an answer. What is needed for registers is `search`.

pub mod check;
pub mod clients;
mod excerpt;
pub mod history;
mod judge;
mod search;
#[cfg(test)]
mod tests;

pub use check::{CheckError, Checked};
pub use clients::{Clients, Plan, Reads};
pub use history::{Action, Answer, History, Operation, Recorder, Register, Value};
