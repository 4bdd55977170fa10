//! What a builder tells whoever waits for it: lines, and long work with its steps.
//!
//! A trait and not a channel: the receiver draws on the thread that works, so what is said stands before what the work does
//! next, and nothing has to be drained.

/// Whoever is told.
pub trait Progress {
    /// One line that is worth to be read.
    fn say(&self, line: &str);

    /// One line for those who look closely: a command that is run.
    fn detail(&self, line: &str);

    /// Work begins. It has come to nothing where what is returned is dropped without [`Task::done`].
    fn start(&self, what: &str, length: Length) -> Box<dyn Task>;
}

/// How long work is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Long, nobody knows how long.
    Unknown,
    /// Done in a moment most of the time.
    Moment,
    /// Long, about so many steps.
    Steps(u64),
}

/// Work in progress. Steps may be told by several threads.
pub trait Task: Sync {
    /// What is being done right now.
    fn now(&self, detail: &str);

    /// One step further.
    fn step(&self);

    /// The work succeeded.
    fn done(self: Box<Self>);
}

/// Tells nobody.
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
