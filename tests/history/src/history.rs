//! Operations on registers, and the recorder of a history.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a register has: a number, or nothing yet.
pub type Value = Option<u64>;

/// What a client asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The value.
    Read,
    /// To set the value, whatever it was.
    Write(u64),
    /// To set the value if it is the expected one.
    Exchange {
        /// The expected value.
        expected: Value,
        /// The one to set.
        new: u64,
    },
}

impl Action {
    /// The number that it sets.
    pub fn sets(self) -> Option<u64> {
        match self {
            Self::Read => None,
            Self::Write(new) | Self::Exchange { new, .. } => Some(new),
        }
    }
}

/// What became of it, as far as the client knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A read: the value.
    Value(Value),
    /// A write or an exchange was made.
    Done,
    /// An exchange was refused: the value is not the expected one.
    Differs,
    /// It was not made, and never will be.
    Failed,
    /// There is no answer, or one that leaves it open: it was made, will be made later, or never.
    Unknown,
}

/// An operation of a client. Its times are since the begin of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The number of the client.
    pub client: usize,
    /// The number of the register in the history.
    pub register: usize,
    /// What was asked for.
    pub action: Action,
    /// What became of it.
    pub answer: Answer,
    /// Before the question was sent.
    pub invoked: Duration,
    /// After the answer was received, or the client gave up; `None` while it waits.
    pub returned: Option<Duration>,
}

/// One register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Register {
    /// Its name in messages.
    pub name: String,
    /// Its value before the first operation.
    pub initial: Value,
}

/// What all clients did. No value of a register is set by two operations of it, and none sets its initial value.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The registers; operations name them by their position.
    pub registers: Vec<Register>,
    /// The operations, in the order in which they began.
    pub operations: Vec<Operation>,
}

/// Records a history by one monotonic clock.
#[derive(Debug)]
pub struct Recorder {
    begin: Instant,
    history: Mutex<History>,
}

/// A recorded operation that has not returned.
#[derive(Debug)]
#[must_use]
pub struct Pending(usize);

impl Recorder {
    /// Begins a history of these registers.
    pub fn new(registers: Vec<Register>) -> Self {
        Self {
            begin: Instant::now(),
            history: Mutex::new(History {
                registers,
                operations: Vec::new(),
            }),
        }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before an operation is sent. It is unknown what becomes of it until [`Self::returns`]: the client may end first.
    pub fn invokes(&self, client: usize, register: usize, action: Action) -> Pending {
        let mut history = self.history();
        history.operations.push(Operation {
            client,
            register,
            action,
            answer: Answer::Unknown,
            invoked: self.begin.elapsed(),
            returned: None,
        });
        Pending(history.operations.len() - 1)
    }

    /// After its answer was received, or the client gave up.
    pub fn returns(&self, Pending(number): Pending, answer: Answer) {
        let mut history = self.history();
        let operation = &mut history.operations[number];
        operation.answer = answer;
        operation.returned = Some(self.begin.elapsed());
    }

    /// What has been recorded so far.
    pub fn snapshot(&self) -> History {
        self.history().clone()
    }
}

/// A value in messages.
pub(crate) fn shown(value: Value) -> String {
    value.map_or_else(|| "nothing".to_owned(), |value| value.to_string())
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:9.4} s ..", self.invoked.as_secs_f64())?;
        match self.returned {
            Some(returned) => write!(f, "{:9.4} s", returned.as_secs_f64())?,
            None => write!(f, "{:11}", "")?,
        }
        let action = match self.action {
            Action::Read => "reads".to_owned(),
            Action::Write(new) => format!("writes {new}"),
            Action::Exchange { expected, new } => {
                format!("exchanges {} for {new}", shown(expected))
            }
        };
        let answer = match self.answer {
            Answer::Value(value) => shown(value),
            Answer::Done => "done".to_owned(),
            Answer::Differs => "another value".to_owned(),
            Answer::Failed => "failed".to_owned(),
            Answer::Unknown => "unknown".to_owned(),
        };
        write!(f, "  client {:<2} {action:24} {answer}", self.client)
    }
}
