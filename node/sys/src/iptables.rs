//! Packet filter rules, by the `iptables` program of the extension. Kubernetes uses the same
//! program: it must match the kernel, and two different ways to write one table would interfere.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::child::{Child, ChildError};

/// Wait for the lock of the tables, in seconds. kube-proxy may hold it for as long as it takes to
/// write some thousands of rules.
const LOCK_WAIT_SECONDS: &str = "20";
const RUN_LIMIT: Duration = Duration::from_secs(40);
/// Maximum number of quoted output lines; an error has one or two.
const MAX_QUOTED_LINES: usize = 8;

/// Why the rules cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum IptablesError {
    /// The program cannot be run.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The program timed out.
    #[error("iptables {arguments} timed out after {RUN_LIMIT:?}")]
    Late {
        /// The arguments of the program.
        arguments: String,
    },
    /// The program failed.
    #[error("iptables {arguments}: {status}: {said}")]
    Failed {
        /// The arguments of the program.
        arguments: String,
        /// The exit status.
        status: ExitStatus,
        /// The first lines of the output.
        said: String,
    },
}

/// The `iptables` program.
#[derive(Clone, Debug)]
pub struct Iptables {
    file: PathBuf,
}

/// The result of a run of the program.
pub struct Ended {
    arguments: String,
    status: ExitStatus,
    /// The first lines of the output, joined by spaces.
    pub said: String,
}

impl Ended {
    /// Returns an error if the program failed.
    pub fn well(self) -> Result<(), IptablesError> {
        match self.status.success() {
            true => Ok(()),
            false => Err(IptablesError::Failed {
                arguments: self.arguments,
                status: self.status,
                said: self.said,
            }),
        }
    }
}

impl Iptables {
    /// The program at this path.
    pub fn at(file: PathBuf) -> Self {
        Self { file }
    }

    /// Checks whether a chain or rule exists. The program fails if it does not, but also on most
    /// errors; then the next step reports the error.
    pub async fn holds(
        &self,
        table: &str,
        ask: &str,
        chain: &str,
        rule: &[&str],
    ) -> Result<bool, IptablesError> {
        Ok(self.run(table, ask, chain, rule).await?.status.success())
    }

    /// Changes a chain or rule.
    pub async fn change(
        &self,
        table: &str,
        what: &str,
        chain: &str,
        rule: &[&str],
    ) -> Result<(), IptablesError> {
        self.run(table, what, chain, rule).await?.well()
    }

    /// Runs the program once, with the command `what` (such as `-A`) on the chain of the table.
    pub async fn run(
        &self,
        table: &str,
        what: &str,
        chain: &str,
        rule: &[&str],
    ) -> Result<Ended, IptablesError> {
        let mut arguments = vec!["-w", LOCK_WAIT_SECONDS, "-t", table, what, chain];
        arguments.extend(rule);
        let mut command = Command::new(&self.file);
        command.args(&arguments).env_clear();
        command.env("PATH", self.file.parent().unwrap_or(Path::new("")));
        let arguments = arguments.join(" ");
        let said: Arc<Mutex<Vec<String>>> = Arc::default();
        let lines = said.clone();
        let mut child = Child::spawn(command, move |_, line| {
            let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.len() < MAX_QUOTED_LINES {
                lines.push(line.to_owned());
            }
        })
        .await?;
        let Ok(status) = timeout(RUN_LIMIT, child.wait()).await else {
            return Err(IptablesError::Late { arguments });
        };
        let said = said
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .join(" ");
        Ok(Ended {
            arguments,
            status: status?,
            said,
        })
    }
}
