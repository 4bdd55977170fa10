//! What a runnable returns.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// The result of a runnable. `Ok` is right only after `done` was signalled, or
/// when it was told to stop.
pub type Outcome = Result<(), Failure>;

/// How a runnable ends of which nothing has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was told to stop, or is done.
    Done,
    /// It wants to be started anew, with all that is below it: what it was
    /// started for is not so any more. That is no failure: it neither counts
    /// as one nor is it shown as one.
    Restart {
        /// For the log.
        why: String,
        /// How long to wait.
        after: Duration,
    },
}

impl Exit {
    /// To start anew at once, but not so soon that it could do nothing else.
    pub fn restart(why: impl fmt::Display) -> Self {
        const AT_ONCE: Duration = Duration::from_millis(10);
        Self::Restart {
            why: why.to_string(),
            after: AT_ONCE,
        }
    }
}

/// Why a runnable gave up: any error with its chain of sources.
///
/// It is deliberately not itself an `Error`: so that every error converts into
/// it by `?`, and so that it ends where the supervisor reports it.
pub struct Failure(Box<dyn Error + Send + Sync + 'static>);

impl Failure {
    /// A failure that is only words.
    pub fn msg(message: impl fmt::Display) -> Failure {
        Failure(message.to_string().into())
    }

    /// A failure from an error that is boxed already.
    pub fn boxed(error: Box<dyn Error + Send + Sync + 'static>) -> Failure {
        Failure(error)
    }

    /// The error itself, for example to downcast it.
    pub fn error(&self) -> &(dyn Error + Send + Sync + 'static) {
        self.0.as_ref()
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure(Box::new(error))
    }
}

/// The error and its sources in one line, `outer: inner: innermost`. A source
/// that its parent already quotes at its end is not repeated.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            source = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Failure({self})")
    }
}
