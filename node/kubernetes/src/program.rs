//! One program of the bundle as a supervised child: its command line, its log
//! lines, whether it works, and its end in order.
//!
//! A program counts as working when a probe says so, not when its process is
//! there; until then its runnable starts. One that does not answer any more is
//! ended and started again after a while, and so is one that answers that it is
//! not well: [`health`] judges when. A program that does not end when asked is
//! killed after a bound, so that what depends on its end (the role is gone, the
//! machine goes down) is never held up.
//!
//! What sets one program apart from the others ([`Profile`]) stands beside what
//! runs it; nothing here knows any of them.
//!
//! A program sees nothing of the node's own environment: its variables are
//! the bundle's `PATH` and what its caller adds, its working directory is its
//! own.

pub mod health;
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
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_sys::child::{self, Child, ChildError};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use health::{HealthTracker, Verdict};

pub use health::Thresholds;
pub use in_use::InUse;
pub use log::Dialect;
pub use probe::Unwell;

/// One answer may take so long: emulated machines are slow.
const PROBE_ANSWERS_WITHIN: Duration = Duration::from_secs(20);
/// How long one may take to end: an API server ends its connections, and calls
/// that are under way.
const STOP_WITHIN: Duration = Duration::from_secs(4);
/// For the kernel to take away one that was killed: at a power off, all that
/// runs ends at once.
const GONE_WITHIN: Duration = Duration::from_secs(4);
/// After everything else, on processors that nobody else wants.
const NICENESS_WITHOUT_SERVERS: i8 = 19;

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

/// What is the same at each start of a program.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Which one.
    pub binary: Binary,
    /// How it writes its log.
    pub dialect: Dialect,
    /// Its place when the processors are busy. Before it go consensus and the
    /// node itself.
    pub niceness: i8,
    /// How long it may take to end when asked.
    pub stop_within: Duration,
    /// When it is given up.
    pub health: Thresholds,
}

impl Profile {
    /// Of a program of Kubernetes that is as all others.
    pub const fn usual(binary: Binary) -> Self {
        Self {
            binary,
            dialect: Dialect::Klog,
            niceness: 0,
            stop_within: STOP_WITHIN,
            health: Thresholds::USUAL,
        }
    }
}

/// What runs, and how.
#[derive(Clone, Debug)]
pub struct Program {
    /// What it is at each start.
    pub profile: Profile,
    /// Where it lies.
    pub file: PathBuf,
    /// Without its name.
    pub arguments: Vec<OsString>,
    /// Everything in its environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// Where it works. Made if it is not there, for root alone.
    pub directory: PathBuf,
    /// How many of the servers are ready that it works with, if it needs any.
    /// While there are none it has little to do and goes after everything else:
    /// what it waits for may be starting on the same processors.
    pub servers: Option<Value<usize>>,
}

impl Program {
    /// A program of the bundle that works in `directory`, with nothing to be
    /// told yet.
    pub fn new(bundle: &Bundle, profile: Profile, directory: &Path) -> Self {
        Self {
            profile,
            file: bundle.program(profile.binary),
            arguments: Vec::new(),
            environment: vec![("PATH", bundle.programs().into())],
            directory: directory.to_owned(),
            servers: None,
        }
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.profile.binary.name()
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
        let program = self.name();
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
            Some(_) => NICENESS_WITHOUT_SERVERS,
            None => self.profile.niceness,
        };
        child::nice(&mut command, niceness);
        let last_words = Arc::new(Mutex::new(None));
        let (log, dn, words) = (log.clone(), dn.to_owned(), last_words.clone());
        let dialect = self.profile.dialect;
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
            stop_within: self.profile.stop_within,
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
) -> Result<Exit, Failure>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    ctx.ends_within(program.profile.stop_within + GONE_WITHIN);
    let mut outdated_by = None;
    let over = async {
        tokio::select! {
            why = outdated => outdated_by = Some(why),
            () = ctx.cancelled() => {}
        }
    };
    run_until(ctx, program, log, progress, probe, over).await?;
    let Some(why) = outdated_by else {
        return Ok(Exit::Done);
    };
    let name = program.name();
    Ok(Exit::restart(format_args!("{name} starts again: {}", why?)))
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
    let started = Instant::now();
    let dn = format!("{}.{}", ctx.name(), program.name());
    let mut running = program.start(log, &dn).await?;
    let pid = running.id();
    tracing::info!(pid, "{} is started", program.name());
    let ready = || {
        tracing::info!(after = ?started.elapsed(), "{} works", program.name());
        progress.set(Progress::Serving);
        ctx.healthy();
    };
    let outcome = tokio::select! {
        error = running.ended() => return Err(error),
        () = over => Ok(()),
        error = watch_health(program, pid, progress, &probe, ready) => Err(error),
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
        && let Err(error) = child::renice(pid, program.profile.niceness)
    {
        tracing::warn!("the niceness of {}: {error}", program.name());
    }
    pending().await
}

/// Probes the process again and again, calls `ready` when it works for the first
/// time, and ends when it has not worked for too long.
async fn watch_health<P, F>(
    program: &Program,
    pid: u32,
    progress: &Writer<Progress>,
    probe: &P,
    ready: impl Fn(),
) -> ProgramError
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    let name = program.name();
    let thresholds = program.profile.health;
    let mut health = HealthTracker::new(thresholds, Instant::now(), cpu_time(pid));
    loop {
        let answer = ask(probe).await;
        let now = Instant::now();
        match health.judge(now, cpu_time(pid), answer) {
            Verdict::Unchanged => {}
            Verdict::Ready => ready(),
            Verdict::Recovered => progress.set(Progress::Serving),
            Verdict::Failing { why } => {
                tracing::warn!("{name} is not well: {why}");
                progress.set(Progress::Failing(why));
            }
            Verdict::NotReady { within, why } => {
                return ProgramError::NotReady {
                    program: name,
                    within,
                    why,
                };
            }
            Verdict::Hung { within, why } => {
                return ProgramError::Hung {
                    program: name,
                    within,
                    why,
                };
            }
        }
        sleep(health.next_probe_in(now)).await;
    }
}

/// How much of processors a process has had. None, if that cannot be found out:
/// then it counts as idle.
fn cpu_time(pid: u32) -> Duration {
    child::processor_time(pid).unwrap_or_default()
}

async fn ask<P, F>(probe: &P) -> Result<(), Unwell>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), Unwell>>,
{
    match timeout(PROBE_ANSWERS_WITHIN, probe()).await {
        Ok(answer) => answer,
        Err(_) => {
            let why = format!("no answer within {PROBE_ANSWERS_WITHIN:?}");
            Err(Unwell::silent(why))
        }
    }
}

#[cfg(test)]
mod tests;
