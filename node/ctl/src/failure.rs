//! Errors as operators see them: message, advice and exit code.

use std::error::Error;
use std::process::ExitCode;
use std::{fmt, io};

use hearth_api::client::{AttemptError, ConnectError};
use tonic::{Code, Status};

use crate::table::printable;

/// The kind of a failure; the value is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The cluster has answered with an error, or would: requests that break the API's rules are
    /// not sent.
    Cluster = 1,
    // 2 is an invalid command line; clap exits with it.
    /// No node can be reached, or none answered in time.
    Unreachable = 3,
    /// Authentication or authorization failed, on either side.
    Refused = 4,
    /// An error on this machine: files, contexts.
    Local = 5,
    /// The cluster's settings have changed since they were read.
    Conflict = 6,
    /// Something is not as it should be, as the command has shown.
    NotReady = 7,
    /// The wait was interrupted; shells use this code for SIGINT.
    Interrupted = 130,
}

/// A failed operation, its cause, and what to do about it.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    what: String,
    why: Option<Box<dyn Error + Send + Sync>>,
    advice: Option<String>,
}

impl Failure {
    /// A failure of the operation `what`, which follows "cannot" in the message.
    pub(crate) fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            why: None,
            advice: None,
        }
    }

    /// Adds the cause.
    #[must_use]
    pub(crate) fn because(mut self, why: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// Adds what to do about it.
    #[must_use]
    pub(crate) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Whether no node could be reached.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.kind == Kind::Unreachable
    }

    /// Adds another line of advice.
    #[must_use]
    pub(crate) fn also_advise(mut self, advice: impl Into<String>) -> Self {
        let more = advice.into();
        self.advice = Some(match self.advice {
            Some(first) => format!("{first}\n  {more}"),
            None => more,
        });
        self
    }

    /// Standard output cannot be written.
    pub(crate) fn output(error: io::Error) -> Self {
        Self::new(Kind::Local, "print the result").because(error)
    }

    /// A failed call; kind and advice depend on the status.
    pub(crate) fn call(what: impl Into<String>, status: Status) -> Self {
        let kind = kind_of(&status);
        let advice = match kind {
            Kind::Unreachable => Some(
                "check that the cluster is running and that the addresses are right; \
                 try another node with --endpoint, or a longer --timeout",
            ),
            Kind::Refused => Some(
                "check that the context is for this cluster; \
                 get a new certificate with `hearthctl cluster take-ownership`",
            ),
            Kind::Cluster | Kind::Conflict | Kind::Local | Kind::NotReady | Kind::Interrupted => {
                None
            }
        };
        let mut failure = Self::new(kind, what).because(status);
        failure.advice = advice.map(str::to_owned);
        failure
    }

    /// The kind.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Invalid input that was found before a call: message and exit code are those that a curator's answer would give.
    pub(crate) fn invalid(
        what: impl Into<String>,
        error: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::new(Kind::Cluster, what).because(error)
    }

    /// Whether the cause is that the reader of standard output has closed the pipe.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        self.why
            .as_ref()
            .and_then(|why| why.downcast_ref::<io::Error>())
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The exit code, for scripts.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.kind as u8)
    }
}

/// The kind of a failed call. `tonic` reports connection errors as a status, too.
fn kind_of(status: &Status) -> Kind {
    let mut source = status.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<ConnectError>() {
            let certificate =
                |(_, error): &(_, AttemptError)| matches!(error, AttemptError::Certificate(_));
            return match error.attempts.iter().any(certificate) {
                true => Kind::Refused,
                false => Kind::Unreachable,
            };
        }
        source = error.source();
    }
    // In TLS 1.3 a server rejects the client's certificate after the client's handshake has
    // completed: the alert arrives with the call.
    if hearth_api::chain(status).contains("received fatal alert") {
        return Kind::Refused;
    }
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => Kind::Unreachable,
        Code::Unauthenticated | Code::PermissionDenied => Kind::Refused,
        _ => Kind::Cluster,
    }
}

/// The text of a cause. For a status: its message and the sources that add something to it.
fn reason(error: &(dyn Error + 'static)) -> String {
    let Some(status) = error.downcast_ref::<Status>() else {
        return hearth_api::chain(error);
    };
    let mut text = status.message().to_owned();
    if text.is_empty() {
        text = status.code().description().to_owned();
    }
    let mut source = status.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if cause != "transport error" && !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        source = error.source();
    }
    text
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.what)?;
        if let Some(why) = &self.why {
            // Part of it may come from the server.
            write!(f, ": {}", printable(&reason(&**why)))?;
        }
        if let Some(advice) = &self.advice {
            write!(f, "\n  {advice}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_are_not_driven_by_what_servers_say() {
        let status = Status::internal("a\x1b[2Jb\nhearthctl: all is well");
        let text = Failure::call("ask", status).to_string();
        assert_eq!(
            text,
            "cannot ask: a\u{fffd}[2Jb\u{fffd}hearthctl: all is well"
        );
        let refused = Failure::call("ask", Status::permission_denied("no")).to_string();
        assert_eq!(refused.lines().count(), 2, "{refused}");
    }
}
