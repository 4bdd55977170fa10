//! What an operator is told when something fails.

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;

use hearth_api::client::{AttemptError, ConnectError};
use hearth_api::labels::LabelError;
use tonic::{Code, Status};

use crate::table::printable;

/// What kind of failure it is: the exit code, for scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The cluster has answered, and it was an error; or it would be, by rules
    /// that both know.
    Cluster = 1,
    // 2 is a wrong command line; clap ends the program itself.
    /// No node can be reached, or none answered in time.
    Unreachable = 3,
    /// One side has refused the other: certificates, permissions.
    Refused = 4,
    /// Something on this machine: files, contexts.
    Local = 5,
    /// An interrupt, as shells number it.
    Interrupted = 130,
}

/// A failure: what was to be done, why it was not, and what to do now.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    what: String,
    why: Option<Box<dyn Error + Send + Sync>>,
    advice: Option<String>,
}

impl Failure {
    /// A failure of this kind to do `what`.
    pub(crate) fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            why: None,
            advice: None,
        }
    }

    /// Because of this.
    #[must_use]
    pub(crate) fn because(mut self, why: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// What to do about it.
    #[must_use]
    pub(crate) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Our output has nowhere to go.
    pub(crate) fn output(error: io::Error) -> Self {
        Self::new(Kind::Local, "print the result").because(error)
    }

    /// A call has failed.
    pub(crate) fn call(what: impl Into<String>, status: Status) -> Self {
        let kind = kind_of(&status);
        let advice = match kind {
            Kind::Unreachable => Some(
                "check that the cluster runs and that the addresses are right; \
                 --endpoint tries another, --timeout gives it longer",
            ),
            Kind::Refused => Some(
                "check that the context is for this cluster; \
                 `hearthctl cluster take-ownership` gets a new certificate",
            ),
            Kind::Cluster | Kind::Local | Kind::Interrupted => None,
        };
        let mut failure = Self::new(kind, what).because(status);
        failure.advice = advice.map(str::to_owned);
        failure
    }

    /// Labels break the rules, in the words and with the exit code of a
    /// curator that is asked for the same.
    pub(crate) fn labels(what: impl Into<String>, error: LabelError) -> Self {
        Self::new(Kind::Cluster, what).because(error)
    }

    /// Whether it is only that whoever read our output has stopped reading.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        self.why
            .as_ref()
            .and_then(|why| why.downcast_ref::<io::Error>())
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// For scripts.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.kind as u8)
    }
}

/// `tonic` reports everything that is wrong with a connection as a status.
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
    // A node that refuses our certificate says so after the handshake, for
    // that is how TLS 1.3 goes.
    if hearth_api::chain(status).contains("received fatal alert") {
        return Kind::Refused;
    }
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => Kind::Unreachable,
        Code::Unauthenticated | Code::PermissionDenied => Kind::Refused,
        _ => Kind::Cluster,
    }
}

/// A status as people read it: its message, and what is behind it.
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
            // Part of it may come from whoever has answered.
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
