//! Compiles and runs test programs, several at once.
//!
//! `cargo test` runs one program after the other. Most of ours spend their time waiting: for an election, a retry, a
//! lease. So cargo only compiles them ([`compile`]), and several run at once ([`run_all`]), beside whatever else this
//! machine has to do. Their output is read for the summary ([`Report`]); [`Compilation`] is what was slow to compile.
//!
//! Nothing here prints or knows what is tested: `cargo xtask test` selects, orders and shows.

mod programs;
mod report;
mod timings;

use std::io;
use std::path::PathBuf;

use hearth_build::command::CommandError;
pub use programs::{Options, Program, compile, run_all, run_examples};
pub use report::{Report, Test};
pub use timings::{Compilation, Crate};

/// Why tests were not compiled, or not run.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// They do not compile; the compiler's messages have been shown.
    #[error("the tests do not compile")]
    DoesNotCompile,
    /// Cargo reported something unknown.
    #[error("expected a message of cargo, got {0}")]
    Message(String),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// A package without a name.
    #[error("{} has no name", .0.display())]
    NoName(PathBuf),
    /// Cargo's timing report has another format.
    #[error("{}: expected UNIT_DATA", .0.display())]
    Timings(PathBuf),
    /// A command failed.
    #[error(transparent)]
    Command(#[from] CommandError),
}
