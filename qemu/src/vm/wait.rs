//! Waiting for events of a machine, always with a bound, and with an error that shows the machine's last console lines.
//!
//! A machine that stands still prints nothing that says why, so when the bound has passed QEMU is asked where its
//! processors are; `qmp.log` has the answers, or shows that there were none.

use std::path::Path;
use std::time::Duration;
use std::{fmt, fs};

use hearth_api::console::{Milestone, Report};
use tokio::time::timeout;

use super::{Exit, Vm, ended};
use crate::console::{Line, Reported};

/// Number of console lines that an error shows.
const SHOWN: usize = 30;

/// What QEMU is asked when the bound has passed: where the processors are and whether they sleep, and the timer and the
/// interrupts that would wake them.
const PROCESSORS: [&str; 3] = ["info registers -a", "info lapic", "info irq"];

/// Waiting for an event failed.
#[derive(Debug, thiserror::Error)]
#[error("machine {machine:?}: waiting for {wanted} failed: {why}\n{log}")]
pub struct WaitError {
    /// Name of the machine.
    pub machine: String,
    /// The expected event.
    pub wanted: String,
    /// The reason.
    pub why: Why,
    /// The machine's last console lines.
    pub log: Box<Tail>,
}

/// Why waiting failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Timed out after this time.
    Timeout(Duration),
    /// The machine ended first.
    Exited(Exit),
    /// The node rejected its parameters or disk; the reason.
    Refused(String),
    /// The node core ended first; the reason.
    CoreEnded(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout(after) => write!(f, "timed out after {:.1} s", after.as_secs_f64()),
            Self::Exited(exit) => write!(f, "{exit}"),
            Self::Refused(why) => write!(f, "the node rejected its parameters or disk: {why}"),
            Self::CoreEnded(why) => write!(f, "the node core ended: {why}"),
        }
    }
}

/// The end of a console's log, and its path.
#[derive(Clone, Debug)]
pub struct Tail {
    /// The last lines, oldest first.
    pub lines: Vec<Line>,
    /// Path of the log.
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
    /// The console's last lines, for display.
    pub fn tail(&self) -> Tail {
        Tail {
            lines: self.console.last(SHOWN),
            path: self.run_dir.serial_log(),
        }
    }

    /// Waits for a line, from the first of this start on, so an earlier line counts. `wanted` describes it in errors.
    ///
    /// # Errors
    /// If it does not appear within `bound`, or the machine ends without it.
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
    /// If it does not appear within `bound`, or the machine ends without it.
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

    /// Waits until the node has reached this milestone. Fails at once if the node reports that it will not: it rejects
    /// its parameters or disk, or its core ends.
    ///
    /// # Errors
    /// If it has not within `bound`, reports that it will not, or the machine ends.
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
            _ => Err(self.gave_up("its end", self.timed_out(bound).await)),
        }
    }

    /// Runs `work` (a client's call to the node, say) for at most `bound`, and while the machine is running.
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
                // Completed work counts, even if the machine has ended.
                biased;
                done = work => Some(Ok(done)),
                _ = exit.wait_for(Option::is_some) => None,
            }
        };
        self.bounded(wanted, bound, find).await
    }

    /// `find` returns the result, or why there is none; `None` if the machine ended.
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
                // The machine is no longer watched; nothing will come.
                Err(_) => Why::Timeout(bound),
            },
            Err(_) => self.timed_out(bound).await,
        };
        Err(self.gave_up(wanted, why))
    }

    async fn timed_out(&self, bound: Duration) -> Why {
        for question in PROCESSORS {
            if let Err(error) = self.qmp.human(question).await {
                tracing::warn!(machine = self.name, %error, "cannot ask where its processors are");
                break;
            }
        }
        Why::Timeout(bound)
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
