//! What a runnable returns.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// The result of a runnable. `Ok` is correct only after [`done`](super::Context::done) was
/// signalled, or after the runnable was cancelled.
pub type Outcome = Result<(), Failure>;

/// How a runnable ends without a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It was cancelled, or is done.
    Done,
    /// It asks to be restarted, with everything below it, because what it was started for has
    /// changed. This is not a failure: it is neither counted nor shown as one.
    Restart {
        /// The reason, for the log.
        why: String,
        /// How long to wait before the restart.
        after: Duration,
    },
}

impl Exit {
    /// A restart almost at once: after 10 ms, so that a runnable that keeps asking does not occupy
    /// the supervisor.
    pub fn restart(why: impl fmt::Display) -> Self {
        const AT_ONCE: Duration = Duration::from_millis(10);
        Self::Restart {
            why: why.to_string(),
            after: AT_ONCE,
        }
    }
}

/// Why a runnable failed: any error with its chain of sources.
///
/// It is deliberately not an `Error` itself, so that every error converts into it with `?`, and so
/// that it goes no further than the supervisor, which reports it.
pub struct Failure(Box<dyn Error + Send + Sync + 'static>);

impl Failure {
    /// A failure from a message alone.
    pub fn msg(message: impl fmt::Display) -> Failure {
        Failure(message.to_string().into())
    }

    /// A failure from a boxed error.
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

/// The error and its sources in one line, `outer: inner: innermost`. A source that its parent
/// already quotes at its end is not repeated.
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
