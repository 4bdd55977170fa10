//! How a builder reports its progress: lines, and long work with its steps.
//!
//! A trait and not a channel: the receiver draws on the working thread, so a line appears before the work continues,
//! and nothing has to be drained.

/// Receives progress reports.
pub trait Progress {
    /// Shows a line that every user should see.
    fn say(&self, line: &str);

    /// Shows a line for verbose output: a command that is run.
    fn detail(&self, line: &str);

    /// Starts work. The work has failed if the returned task is dropped without [`Task::done`].
    fn start(&self, what: &str, length: Length) -> Box<dyn Task>;
}

/// The expected length of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Long, of unknown length.
    Unknown,
    /// Usually done at once.
    Moment,
    /// Long, with about this many steps.
    Steps(u64),
}

/// Work in progress. Steps may be reported from several threads.
pub trait Task: Sync {
    /// Reports what is being done now.
    fn now(&self, detail: &str);

    /// Reports one more step.
    fn step(&self);

    /// The work succeeded.
    fn done(self: Box<Self>);
}

/// Discards all reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn say(&self, _line: &str) {}

    fn detail(&self, _line: &str) {}

    fn start(&self, _what: &str, _length: Length) -> Box<dyn Task> {
        Box::new(Silent)
    }
}

impl Task for Silent {
    fn now(&self, _detail: &str) {}

    fn step(&self) {}

    fn done(self: Box<Self>) {}
}
