//! Waiting for something on a machine, always with a bound, and with an error
//! that shows what the machine was doing instead.

use std::{fmt, fs, path::Path, time::Duration};

use hearth_api::console::{Milestone, Report};
use tokio::time::timeout;

use super::{Exit, Vm, ended};
use crate::console::{Line, Reported};

/// How many of the console's last lines an error shows.
const SHOWN: usize = 30;

/// What was waited for did not come.
#[derive(Debug, thiserror::Error)]
#[error("machine {machine:?}: {wanted} did not come: {why}\n{log}")]
pub struct WaitError {
    /// The machine.
    pub machine: String,
    /// What was waited for.
    pub wanted: String,
    /// Why it did not come.
    pub why: Why,
    /// What the machine said last.
    pub log: Box<Tail>,
}

/// Why something did not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Not within this time.
    Timeout(Duration),
    /// The machine ended first.
    Exited(Exit),
    /// The node says that it will not go on, and why.
    Refused(String),
    /// The node core ended first, and why.
    CoreEnded(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout(after) => write!(f, "waited for {:.1} s", after.as_secs_f64()),
            Self::Exited(exit) => write!(f, "{exit}"),
            Self::Refused(why) => write!(f, "the node refused: {why}"),
            Self::CoreEnded(why) => write!(f, "the node core ended: {why}"),
        }
    }
}

/// The end of a console's log, and where all of it is.
#[derive(Clone, Debug)]
pub struct Tail {
    /// The last lines, oldest first.
    pub lines: Vec<Line>,
    /// The log.
    pub path: std::path::PathBuf,
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        if self.lines.is_empty() {
            return write!(f, "its console is empty ({path})");
        }
        write!(f, "the last lines of its console ({path}):")?;
        for line in &self.lines {
            write!(f, "\n{:9.3}  {}", line.at.as_secs_f64(), line.text)?;
        }
        Ok(())
    }
}

impl Vm {
    /// The console's last lines, to be shown.
    pub fn tail(&self) -> Tail {
        Tail {
            lines: self.console.last(SHOWN),
            path: self.run_dir.serial_log(),
        }
    }

    /// Waits for a line, from the first of this start on: one that has come
    /// already counts. `wanted` says in words what is waited for.
    ///
    /// # Errors
    /// If it has not come within `bound`, or the machine ends without it.
    pub async fn wait_for(
        &self,
        wanted: &str,
        bound: Duration,
        mut predicate: impl FnMut(&str) -> bool,
    ) -> Result<Line, WaitError> {
        let mut lines = self.console.lines();
        let find = async {
            while let Some(line) = lines.next().await {
                if predicate(&line.text) {
                    return Some(Ok(line));
                }
            }
            None
        };
        self.bounded(wanted, bound, find).await
    }

    /// Waits for a report, from the first of this start on.
    ///
    /// # Errors
    /// If it has not come within `bound`, or the machine ends without it.
    pub async fn wait_for_report(
        &self,
        wanted: &str,
        bound: Duration,
        mut predicate: impl FnMut(&Report) -> bool,
    ) -> Result<Reported, WaitError> {
        let mut reports = self.console.reports();
        let find = async {
            while let Some(reported) = reports.next().await {
                if predicate(&reported.report) {
                    return Some(Ok(reported));
                }
            }
            None
        };
        self.bounded(wanted, bound, find).await
    }

    /// Waits until the node has come this far. Gives up at once when the node
    /// says that it will not: it refuses, or its core ends.
    ///
    /// # Errors
    /// If it has not within `bound`, says that it will not, or the machine
    /// ends.
    pub async fn reached(
        &self,
        milestone: Milestone,
        bound: Duration,
    ) -> Result<Reported, WaitError> {
        let mut reports = self.console.reports();
        let find = async {
            while let Some(reported) = reports.next().await {
                match reported.report {
                    Report::Reached(reached, _) if reached == milestone => {
                        return Some(Ok(reported));
                    }
                    Report::Refused(why) => return Some(Err(Why::Refused(why))),
                    Report::CoreEnded(why) => return Some(Err(Why::CoreEnded(why))),
                    _ => {}
                }
            }
            None
        };
        self.bounded(milestone.word(), bound, find).await
    }

    /// Waits until the machine has ended.
    ///
    /// # Errors
    /// If it has not within `bound`.
    pub async fn exited(&self, bound: Duration) -> Result<Exit, WaitError> {
        match timeout(bound, self.exit.clone().wait_for(Option::is_some)).await {
            Ok(Ok(exit)) => exit
                .clone()
                .ok_or_else(|| self.gave_up("its end", Why::Timeout(bound))),
            _ => Err(self.gave_up("its end", Why::Timeout(bound))),
        }
    }

    /// Does `work` (a client's call to the node, say) for at most `bound`, and
    /// no longer than the machine lives.
    ///
    /// # Errors
    /// If it takes longer, or the machine ends.
    pub async fn while_running<T>(
        &self,
        wanted: &str,
        bound: Duration,
        work: impl Future<Output = T>,
    ) -> Result<T, WaitError> {
        let mut exit = self.exit.clone();
        let find = async {
            tokio::select! {
                // Work that is done counts, also when the machine has ended.
                biased;
                done = work => Some(Ok(done)),
                _ = exit.wait_for(Option::is_some) => None,
            }
        };
        self.bounded(wanted, bound, find).await
    }

    /// `find` gives what was found, or why not; `None` if the machine ended.
    async fn bounded<T>(
        &self,
        wanted: &str,
        bound: Duration,
        find: impl Future<Output = Option<Result<T, Why>>>,
    ) -> Result<T, WaitError> {
        let why = match timeout(bound, find).await {
            Ok(Some(Ok(found))) => return Ok(found),
            Ok(Some(Err(why))) => why,
            Ok(None) => match ended(self.exit.clone()).await {
                Ok(exit) => Why::Exited(exit),
                // Nobody watches it any more; nothing will come.
                Err(_) => Why::Timeout(bound),
            },
            Err(_) => Why::Timeout(bound),
        };
        Err(self.gave_up(wanted, why))
    }

    fn gave_up(&self, wanted: &str, why: Why) -> WaitError {
        WaitError {
            machine: self.name.clone(),
            wanted: wanted.to_owned(),
            why,
            log: Box::new(self.tail()),
        }
    }
}

/// The last lines of a text file.
pub(super) fn end_of(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}
