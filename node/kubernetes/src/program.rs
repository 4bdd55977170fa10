//! One program of the bundle as a supervised child: its command line, its log
//! lines, whether it works, and its end in order.
//!
//! A program counts as working when a probe says so, not when its process is
//! there; until then its runnable starts. One that does not answer any more is
//! ended and started again after a while, and so is one that answers that it is
//! not well, which may take longer: others may have to mend that. One that does
//! not answer and has processors all the same is given longer, too: mostly it has
//! more to do than the machine can, and a start would be still more, from which
//! an API server on a busy machine may not come back. A program that does not
//! end when asked is killed after a bound, so that what depends on its end (the
//! role is gone, the machine goes down) is never held up.
//!
//! A program sees nothing of the node's own environment: its variables are
//! the bundle's `PATH` and what its caller adds, its working directory is its
//! own.

mod in_use;
mod log;
pub mod probe;

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::future::pending;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_sys::child::{self, Child, ChildError};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::AT_ONCE;

pub use in_use::InUse;
pub use log::Dialect;
pub use probe::Unwell;

/// At least so long lies between two questions whether a program works already.
const ASK_STARTING: Duration = Duration::from_millis(250);
/// The longer it takes, the rarer it is asked, for each answer takes processors
/// from what it makes ready: that it works is seen late by at most this part of
/// its start.
const SEEN_LATE: f64 = 0.02;
/// One answer may take so long: emulated machines are slow.
const ANSWER: Duration = Duration::from_secs(20);
/// A program that has not worked for so long is ended and started again.
const HUNG: Duration = Duration::from_secs(120);
/// One that does not work yet, or says nothing, may be at work for so long.
const SLOW: Duration = Duration::from_secs(600);
/// It is at work if it has this part of a processor.
const AT_WORK: f64 = 0.1;
/// One that says that it lacks others may be right about that for so long.
const WITHOUT_OTHERS: Duration = Duration::from_secs(1800);
/// How long one may take to end: an API server ends its connections, and calls
/// that are under way.
const STOP_WITHIN: Duration = Duration::from_secs(4);
/// For the kernel to take away one that was killed: at a power off, all that
/// runs ends at once.
const GONE_WITHIN: Duration = Duration::from_secs(4);
/// Kubernetes is as everyone else. Before it go consensus and the node itself.
const ORDINARY: i8 = 0;
/// A tenth of an ordinary one's weight.
const BEHIND: i8 = 10;
/// After everything else, on processors that nobody else wants.
const IDLE: i8 = 19;

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// Its working directory.
    #[error("make {path}, the working directory of {program}")]
    Directory {
        /// The program.
        program: &'static str,
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// It ended, which it should not of itself.
    #[error("{program} ended with {status}{}", said(.last_words))]
    Ended {
        /// The program.
        program: &'static str,
        /// How.
        status: ExitStatus,
        /// What it gave as its reason.
        last_words: Option<String>,
    },
    /// It was to do one thing, and did not come to an end.
    #[error("{program} has not ended within {within:?}")]
    Endless {
        /// The program.
        program: &'static str,
        /// What it was given.
        within: Duration,
    },
    /// It did not begin to answer.
    #[error("{program} does not work {within:?} after its start: {why}")]
    NotReady {
        /// The program.
        program: &'static str,
        /// What it was given.
        within: Duration,
        /// The probe's last answer.
        why: String,
    },
    /// It is not well, and nobody else can help it.
    #[error("{program} has not worked for {within:?}: {why}")]
    Hung {
        /// The program.
        program: &'static str,
        /// What it was given.
        within: Duration,
        /// The probe's last answer.
        why: String,
    },
}

fn said(words: &Option<String>) -> String {
    words.as_ref().map(|w| format!(": {w}")).unwrap_or_default()
}

/// What runs, and how.
#[derive(Clone, Debug)]
pub struct Program {
    /// Which one.
    pub binary: Binary,
    /// Where it lies.
    pub file: PathBuf,
    /// Without its name.
    pub arguments: Vec<OsString>,
    /// Everything in its environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// Where it works. Made if it is not there, for root alone.
    pub directory: PathBuf,
    /// How it writes its log.
    pub dialect: Dialect,
    /// How long it may take to begin to work. If it is still at work then, it is
    /// given `slow_after` on top: the next start would have to do the same again.
    pub ready_within: Duration,
    /// How long it may take to end when asked.
    pub stop_within: Duration,
    /// How long it may say nothing and do nothing, once it has worked.
    pub hung_after: Duration,
    /// How long it may be at work and not answer.
    pub slow_after: Duration,
    /// How long it may say of itself that it is not well.
    pub unwell_after: Duration,
    /// Between two questions whether it works still.
    pub ask_every: Duration,
    /// Its place when the processors are busy.
    pub niceness: i8,
    /// How many of the servers are ready that it works with, if it needs any.
    /// While there are none it has little to do and goes after everything else:
    /// what it waits for may be starting on the same processors.
    pub servers: Option<Value<usize>>,
}

impl Program {
    /// A program of the bundle that works in `directory`, with nothing to be
    /// told yet.
    pub fn new(bundle: &Bundle, binary: Binary, directory: &Path) -> Self {
        Self {
            binary,
            file: bundle.program(binary),
            arguments: Vec::new(),
            environment: vec![("PATH", bundle.programs().into())],
            directory: directory.to_owned(),
            dialect: match binary {
                Binary::Containerd => Dialect::Logrus,
                _ => Dialect::Klog,
            },
            ready_within: Duration::from_secs(600),
            stop_within: STOP_WITHIN,
            hung_after: HUNG,
            slow_after: SLOW,
            unwell_after: match binary {
                // Without a quorum no API server is ready, and none that starts
                // becomes so; the one that runs knows what it has read.
                Binary::Apiserver => WITHOUT_OTHERS,
                _ => HUNG,
            },
            ask_every: Duration::from_secs(10),
            niceness: match binary {
                // As where it is a pod, which by custom asks for a tenth of a
                // processor: its rules matter to pods that run, and what makes
                // pods run goes first.
                Binary::Proxy => BEHIND,
                _ => ORDINARY,
            },
            servers: None,
        }
    }

    /// Names the servers that it works with, by how many are ready.
    #[must_use]
    pub fn with_servers(mut self, ready: Value<usize>) -> Self {
        self.servers = Some(ready);
        self
    }

    /// Adds `--name=value`.
    #[must_use]
    pub fn flag(mut self, name: &str, value: impl Into<OsString>) -> Self {
        let mut argument = OsString::from(format!("--{name}="));
        argument.push(value.into());
        self.arguments.push(argument);
        self
    }

    /// Starts it. Its log lines go into the log tree under `dn`.
    pub async fn start(&self, log: &LogTree, dn: &str) -> Result<Running, ProgramError> {
        let program = self.binary.name();
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory);
        made.map_err(|source| ProgramError::Directory {
            program,
            path: self.directory.clone(),
            source,
        })?;
        let mut command = Command::new(&self.file);
        command
            .args(&self.arguments)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.directory);
        let niceness = match self.servers {
            Some(_) => IDLE,
            None => self.niceness,
        };
        child::nice(&mut command, niceness);
        let last_words = Arc::new(Mutex::new(None));
        let (log, dn, words) = (log.clone(), dn.to_owned(), last_words.clone());
        let dialect = self.dialect;
        let child = Child::spawn(command, move |_, line| {
            let parsed = dialect.parse(line);
            log.append_raw(&dn, parsed.severity, &parsed.message);
            if parsed.fatal {
                *words.lock().unwrap_or_else(PoisonError::into_inner) = Some(parsed.message);
            }
        })
        .await?;
        Ok(Running {
            program,
            stop_within: self.stop_within,
            child,
            last_words,
        })
    }
}

impl Program {
    /// Runs one that does something and ends, and waits for that. Its log lines
    /// go into the log tree under `dn`.
    pub async fn complete(
        &self,
        log: &LogTree,
        dn: &str,
        within: Duration,
    ) -> Result<(), ProgramError> {
        let mut running = self.start(log, dn).await?;
        match timeout(within, running.ended()).await {
            Ok(ProgramError::Ended { status, .. }) if status.success() => Ok(()),
            Ok(error) => Err(error),
            Err(_) => Err(ProgramError::Endless {
                program: running.program,
                within,
            }),
        }
    }
}

/// A process of a program. Dropping it kills it and its process group.
pub struct Running {
    program: &'static str,
    stop_within: Duration,
    child: Child,
    /// The last line that told a reason to give up.
    last_words: Arc<Mutex<Option<String>>>,
}

impl Running {
    /// Its process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it ends by itself. Safe to cancel.
    pub async fn ended(&mut self) -> ProgramError {
        match self.child.wait().await {
            Ok(status) => ProgramError::Ended {
                program: self.program,
                status,
                last_words: self
                    .last_words
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            },
            Err(error) => error.into(),
        }
    }

    /// Ends it in order, by force if it takes too long.
    pub async fn stop(mut self) -> Result<(), ProgramError> {
        self.child.terminate(self.stop_within).await?;
        Ok(())
    }
}

/// How a program stands, for those who tell the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has been started and has never failed since this role began.
    Starting,
    /// It answers.
    Serving,
    /// It does not, or has ended; for an operator. Stays so until it answers.
    Failing(String),
}

/// Runs a program until the runnable is cancelled, or what the program was told
/// is not true any more: `outdated` says what, the program ends in order, and
/// the runnable begins again at once. Ends otherwise by an error only. The
/// runnable is healthy once the probe has first succeeded, which says in words
/// why not yet, and has as long to end as the program has.
pub async fn run_until_outdated<P, F>(
    ctx: &Context,
    program: &Program,
    log: &LogTree,
    progress: &Writer<Progress>,
    probe: P,
    outdated: impl Future<Output = Result<&'static str, event::Closed>>,
) -> Outcome
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    ctx.ends_within(program.stop_within + GONE_WITHIN);
    let mut outdated_by = None;
    let over = async {
        tokio::select! {
            why = outdated => outdated_by = Some(why),
            () = ctx.cancelled() => {}
        }
    };
    run_until(ctx, program, log, progress, probe, over).await?;
    let Some(why) = outdated_by else {
        return Ok(());
    };
    // Nothing has failed that would be better later.
    ctx.restart_within(Some(AT_ONCE));
    let name = program.binary.name();
    Err(Failure::msg(format!("{name} starts again: {}", why?)))
}

/// The same until something else has happened, for a program that is of use
/// for a while after the runnable is cancelled. The caller bounds that, and
/// tells the supervisor.
pub async fn run_until<P, F>(
    ctx: &Context,
    program: &Program,
    log: &LogTree,
    progress: &Writer<Progress>,
    probe: P,
    over: impl Future<Output = ()>,
) -> Outcome
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    if progress.value().get().is_none() {
        progress.set(Progress::Starting);
    }
    let outcome = live(ctx, program, log, progress, probe, over).await;
    progress.set(match &outcome {
        Err(error) => Progress::Failing(error.to_string()),
        // In order, to start again with something else, or for good.
        Ok(()) => Progress::Starting,
    });
    Ok(outcome?)
}

async fn live<P, F>(
    ctx: &Context,
    program: &Program,
    log: &LogTree,
    progress: &Writer<Progress>,
    probe: P,
    over: impl Future<Output = ()>,
) -> Result<(), ProgramError>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    let begin = Instant::now();
    let dn = format!("{}.{}", ctx.name(), program.binary.name());
    let mut running = program.start(log, &dn).await?;
    let pid = running.id();
    tracing::info!(pid, "{} is started", program.binary.name());
    let watched = async {
        becomes_ready(program, pid, &probe).await?;
        tracing::info!(after = ?begin.elapsed(), "{} works", program.binary.name());
        progress.set(Progress::Serving);
        ctx.healthy();
        Err(stays_ready(program, pid, progress, &probe).await)
    };
    let outcome = tokio::select! {
        error = running.ended() => return Err(error),
        () = over => Ok(()),
        outcome = watched => outcome,
        never = takes_its_place(program, pid) => match never {},
    };
    running.stop().await?;
    outcome
}

/// Lets a program's process no longer go after everything else, once there is
/// a server.
async fn takes_its_place(program: &Program, pid: u32) -> Infallible {
    if let Some(servers) = &program.servers
        && servers.watch().wait_for(|ready| *ready > 0).await.is_ok()
        && let Err(error) = child::renice(pid, program.niceness)
    {
        tracing::warn!("the niceness of {}: {error}", program.binary.name());
    }
    pending().await
}

/// Waits until the probe succeeds, for as long as the program is given.
async fn becomes_ready<P, F>(program: &Program, pid: u32, probe: &P) -> Result<(), ProgramError>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    let mut seen = Seen::well(pid);
    let begin = seen.well;
    loop {
        let answer = ask(probe).await;
        seen.note(&answer);
        let Err(Unwell { why, .. }) = answer else {
            return Ok(());
        };
        if let Some(within) = seen.not_in_time(program) {
            return Err(ProgramError::NotReady {
                program: program.binary.name(),
                within,
                why,
            });
        }
        sleep(ASK_STARTING.max(begin.elapsed().mul_f64(SEEN_LATE))).await;
    }
}

/// Asks on, and ends when the program has not worked for too long.
async fn stays_ready<P, F>(
    program: &Program,
    pid: u32,
    progress: &Writer<Progress>,
    probe: &P,
) -> ProgramError
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    let mut seen = Seen::well(pid);
    let mut said = false;
    loop {
        sleep(program.ask_every).await;
        let answer = ask(probe).await;
        seen.note(&answer);
        match answer {
            Ok(()) => {
                if std::mem::take(&mut said) {
                    progress.set(Progress::Serving);
                }
            }
            Err(Unwell { answered, why }) => {
                let name = program.binary.name();
                if let Some(within) = seen.too_long(program, answered) {
                    return ProgramError::Hung {
                        program: name,
                        within,
                        why,
                    };
                }
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!("{name} is not well: {why}");
                    progress.set(Progress::Failing(why));
                }
            }
        }
    }
}

/// When a program was last seen as it should be. It starts well.
struct Seen {
    pid: u32,
    /// It said that it was well.
    well: Instant,
    /// It said anything.
    heard: Instant,
    /// It was at work, whatever it said.
    at_work: Instant,
    /// When that was looked at, and how long it had had processors.
    looked: (Instant, Duration),
}

impl Seen {
    fn well(pid: u32) -> Self {
        let now = Instant::now();
        Self {
            pid,
            well: now,
            heard: now,
            at_work: now,
            looked: (now, had_processors(pid)),
        }
    }

    fn note(&mut self, answer: &Result<(), Unwell>) {
        let now = Instant::now();
        let (before, had_before) = self.looked;
        self.looked = (now, had_processors(self.pid));
        let had_since = self.looked.1.saturating_sub(had_before);
        if had_since >= (now - before).mul_f64(AT_WORK) {
            self.at_work = now;
        }
        match answer {
            Ok(()) => (self.well, self.heard) = (now, now),
            Err(unwell) if unwell.answered => self.heard = now,
            Err(_) => {}
        }
    }

    /// What one that starts was given, if that is over.
    fn not_in_time(&self, program: &Program) -> Option<Duration> {
        let had = self.well.elapsed();
        let idle = self.at_work.elapsed() > program.hung_after;
        let at_most = program.ready_within + program.slow_after;
        if had > at_most {
            Some(at_most)
        } else {
            (idle && had > program.ready_within).then_some(program.ready_within)
        }
    }

    /// What one that works was given, if that is over.
    fn too_long(&self, program: &Program, answered: bool) -> Option<Duration> {
        let over = |since: Instant, within| (since.elapsed() > within).then_some(within);
        if answered {
            return over(self.well, program.unwell_after);
        }
        let stirred = self.heard.max(self.at_work);
        over(stirred, program.hung_after).or_else(|| over(self.heard, program.slow_after))
    }
}

/// None, if that cannot be found out: then it counts as idle.
fn had_processors(pid: u32) -> Duration {
    child::processor_time(pid).unwrap_or_default()
}

async fn ask<P, F>(probe: &P) -> Result<(), Unwell>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    match timeout(ANSWER, probe()).await {
        Ok(answer) => answer,
        Err(_) => Err(Unwell::silent(format!("no answer within {ANSWER:?}"))),
    }
}

#[cfg(test)]
mod tests;
