//! The kernel's tables of packet rules, by the program of the extension, which
//! Kubernetes' own rules go through, too: kernel and program have to agree, and
//! two ways to write one table do not get along.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::child::{Child, ChildError};
use tokio::process::Command;
use tokio::time::timeout;

/// In seconds. Others may hold the tables' lock: kube-proxy, for as long as it
/// takes to write some thousands of rules.
const LOCK_WAIT_SECONDS: &str = "20";
const RUN_LIMIT: Duration = Duration::from_secs(40);
/// An error is a line or two.
const MAX_QUOTED_LINES: usize = 8;

/// Why the rules are not as they should be.
#[derive(Debug, thiserror::Error)]
pub enum IptablesError {
    /// The program did not run.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// It took too long.
    #[error("iptables {arguments} has not ended within {RUN_LIMIT:?}")]
    Late {
        /// What it was told.
        arguments: String,
    },
    /// It failed.
    #[error("iptables {arguments}: {status}: {said}")]
    Failed {
        /// What it was told.
        arguments: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        said: String,
    },
}

/// The program.
#[derive(Clone, Debug)]
pub struct Iptables {
    file: PathBuf,
}

/// How a run of the program has ended.
pub struct Ended {
    arguments: String,
    status: ExitStatus,
    /// Its first lines, with spaces between them.
    pub said: String,
}

impl Ended {
    /// An error if it has failed.
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
    /// The program in this file.
    pub fn at(file: PathBuf) -> Self {
        Self { file }
    }

    /// Asks whether something is there. The program tells its absence, as most
    /// of what goes wrong, by failing; then the next step tells more.
    pub async fn holds(
        &self,
        table: &str,
        ask: &str,
        chain: &str,
        rule: &[&str],
    ) -> Result<bool, IptablesError> {
        Ok(self.run(table, ask, chain, rule).await?.status.success())
    }

    /// Changes something.
    pub async fn change(
        &self,
        table: &str,
        what: &str,
        chain: &str,
        rule: &[&str],
    ) -> Result<(), IptablesError> {
        self.run(table, what, chain, rule).await?.well()
    }

    /// Runs it once: `what` (such as `-A`) is done with the chain of the table.
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
