//! A program of the bundle as a supervised child process: command line, log lines, health probes,
//! graceful shutdown.
//!
//! A program is ready when its probe succeeds, not when its process exists; until then its runnable
//! is starting. A program that does not answer its probe any more is restarted after a while, and
//! so is one that answers that it is unhealthy; [`health`] decides when. A program that does not
//! end after SIGTERM is killed after a timeout, so that nothing that waits for its end (removal of
//! the role, shutdown of the machine) is blocked.
//!
//! What is specific to a program ([`Profile`]) is defined in the module that runs it; nothing here
//! depends on it.
//!
//! A program does not inherit the node's environment: its variables are the bundle's `PATH` and
//! what the caller adds; it has a working directory of its own.

pub mod health;
mod log;
pub mod probe;

use std::convert::Infallible;
use std::ffi::OsString;
use std::future::pending;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io};

use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_sys::child::{self, Child, ChildError};
use hearth_sys::confine::Confinement;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use health::{HealthTracker, Verdict};

pub use health::Thresholds;
pub use log::LogFormat;
pub use probe::ProbeFailure;

/// Timeout of a probe: emulated machines are slow.
const PROBE_ANSWERS_WITHIN: Duration = Duration::from_secs(20);
/// Usual time between SIGTERM and SIGKILL: an API server closes its connections and completes
/// requests in flight.
const STOP_WITHIN: Duration = Duration::from_secs(4);
/// Time for the kernel to end a killed process: at a shutdown all processes end at once.
const GONE_WITHIN: Duration = Duration::from_secs(4);
/// How long a service waits for its users: by then a program has exited or been killed.
pub const USERS_WITHIN: Duration = STOP_WITHIN.saturating_add(GONE_WITHIN);
/// The lowest priority: only processor time that nothing else uses.
const NICENESS_WITHOUT_SERVERS: i8 = 19;

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The working directory cannot be created.
    #[error("cannot create {path}, the working directory of {program}, or give it to its user")]
    Directory {
        /// Name of the program.
        program: &'static str,
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process cannot be started, awaited or ended.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The program exited by itself.
    #[error("{program} exited with {status}{}", said(.last_words))]
    Ended {
        /// Name of the program.
        program: &'static str,
        /// Exit status.
        status: ExitStatus,
        /// The last fatal message that it has logged.
        last_words: Option<String>,
    },
    /// The program did not become ready.
    #[error("{program} is not ready {within:?} after its start: {why}")]
    NotReady {
        /// Name of the program.
        program: &'static str,
        /// The timeout.
        within: Duration,
        /// The last result of the probe.
        why: String,
    },
    /// The program was ready, and has been unhealthy for too long.
    #[error("{program} has been unhealthy for {within:?}: {why}")]
    Hung {
        /// Name of the program.
        program: &'static str,
        /// The timeout.
        within: Duration,
        /// The last result of the probe.
        why: String,
    },
}

fn said(words: &Option<String>) -> String {
    words.as_ref().map(|w| format!(": {w}")).unwrap_or_default()
}

/// The constant properties of a program.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// The binary.
    pub binary: Binary,
    /// Format of its log lines.
    pub log_format: LogFormat,
    /// Its priority when the processors are busy. etcd and the node itself have a higher one.
    pub niceness: i8,
    /// Time between SIGTERM and SIGKILL.
    pub stop_within: Duration,
    /// When it is restarted because of its health.
    pub health: Thresholds,
}

impl Profile {
    /// The usual profile of a Kubernetes program.
    pub const fn usual(binary: Binary) -> Self {
        Self {
            binary,
            log_format: LogFormat::Klog,
            niceness: 0,
            stop_within: STOP_WITHIN,
            health: Thresholds::USUAL,
        }
    }
}

/// How a program is started.
#[derive(Clone, Debug)]
pub struct Program {
    /// The constant properties.
    pub profile: Profile,
    /// Path of the binary.
    pub file: PathBuf,
    /// Arguments, without the name of the program.
    pub arguments: Vec<OsString>,
    /// The complete environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// Working directory. It is created with mode 0700 if it is missing.
    pub directory: PathBuf,
    /// How many of the servers that it depends on are ready, if it depends on any. While there are
    /// none, it has little to do and runs at the lowest priority: a server that it waits for may be
    /// starting on the same processors.
    pub servers: Option<Value<usize>>,
    /// How it is confined. Its working directory is then its own.
    pub confinement: Option<Confinement>,
}

impl Program {
    /// A program of the bundle with working directory `directory` and without arguments.
    pub fn new(bundle: &Bundle, profile: Profile, directory: &Path) -> Self {
        Self {
            profile,
            file: bundle.program(profile.binary),
            arguments: Vec::new(),
            environment: vec![("PATH", bundle.programs().into())],
            directory: directory.to_owned(),
            servers: None,
            confinement: None,
        }
    }

    /// Name of the program.
    pub const fn name(&self) -> &'static str {
        self.profile.binary.name()
    }

    /// Sets how many of the servers that it depends on are ready.
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

    /// Starts the program. Its log lines go into the log tree under `dn`.
    pub async fn start(&self, log: &LogTree, dn: &str) -> Result<Running, ProgramError> {
        let program = self.name();
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory);
        let directory = |source| ProgramError::Directory {
            program,
            path: self.directory.clone(),
            source,
        };
        made.map_err(directory)?;
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
        if let Some(confinement) = &self.confinement {
            let user = Some(confinement.user);
            std::os::unix::fs::chown(&self.directory, user, user).map_err(directory)?;
            confinement.apply(&mut command);
        }
        let last_words = Arc::new(Mutex::new(None));
        let (log, dn, words) = (log.clone(), dn.to_owned(), last_words.clone());
        let log_format = self.profile.log_format;
        let child = Child::spawn(command, move |_, line| {
            let parsed = log_format.parse(line);
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

/// A running program. Dropping it kills the process and its process group.
pub struct Running {
    program: &'static str,
    stop_within: Duration,
    child: Child,
    /// The last fatal log message.
    last_words: Arc<Mutex<Option<String>>>,
}

impl Running {
    /// The process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it exits by itself. Safe to cancel.
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

    /// Sends SIGTERM, and SIGKILL if it takes too long.
    pub async fn stop(mut self) -> Result<(), ProgramError> {
        self.child.terminate(self.stop_within).await?;
        Ok(())
    }
}

/// The state of a program, for the condition of its role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is starting and has not failed since the role was started.
    Starting,
    /// It is ready.
    Serving,
    /// It is unhealthy or has exited, with the reason for operators. It stays so until it is ready.
    Failing(String),
}

/// Runs a program until the runnable is cancelled or until its configuration is outdated:
/// `outdated` returns the reason, the program is stopped, and the runnable restarts at once.
/// Returns otherwise only on an error. The runnable is healthy once the probe has succeeded; its
/// shutdown timeout is that of the program.
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
    F: Future<Output = Result<(), ProbeFailure>>,
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
    Ok(Exit::restart(format_args!("restarting {name}: {}", why?)))
}

/// Runs a program until `over` completes, for a program that is still needed for a while after the
/// runnable is cancelled. The caller limits that time, and declares it to the supervisor.
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
    F: Future<Output = Result<(), ProbeFailure>>,
{
    if progress.value().get().is_none() {
        progress.set(Progress::Starting);
    }
    let outcome = live(ctx, program, log, progress, probe, over).await;
    progress.set(match &outcome {
        Err(error) => Progress::Failing(error.to_string()),
        // Stopped on request: to restart it with another configuration, or finally.
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
    F: Future<Output = Result<(), ProbeFailure>>,
{
    let started = Instant::now();
    let dn = format!("{}.{}", ctx.name(), program.name());
    let mut running = program.start(log, &dn).await?;
    let pid = running.id();
    tracing::info!(pid, "started {}", program.name());
    let ready = || {
        tracing::info!(after = ?started.elapsed(), "{} is ready", program.name());
        progress.set(Progress::Serving);
        ctx.healthy();
    };
    let outcome = tokio::select! {
        error = running.ended() => return Err(error),
        () = over => Ok(()),
        error = watch_health(program, pid, progress, &probe, ready) => Err(error),
        never = raise_priority_when_ready(program, pid) => match never {},
    };
    running.stop().await?;
    outcome
}

/// Sets the usual priority of a process once a server is ready.
async fn raise_priority_when_ready(program: &Program, pid: u32) -> Infallible {
    if let Some(servers) = &program.servers
        && servers.watch().wait_for(|ready| *ready > 0).await.is_ok()
        && let Err(error) = child::renice(pid, program.profile.niceness)
    {
        tracing::warn!("cannot set the niceness of {}: {error}", program.name());
    }
    pending().await
}

/// Probes the process periodically, calls `ready` when it becomes ready for the first time, and
/// returns when it has been unhealthy for too long.
async fn watch_health<P, F>(
    program: &Program,
    pid: u32,
    progress: &Writer<Progress>,
    probe: &P,
    ready: impl Fn(),
) -> ProgramError
where
    P: Fn() -> F,
    F: Future<Output = Result<(), ProbeFailure>>,
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
                tracing::warn!("{name} is unhealthy: {why}");
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

/// The CPU time that a process has used. Zero if it cannot be read: then the process counts as
/// idle.
fn cpu_time(pid: u32) -> Duration {
    child::processor_time(pid).unwrap_or_default()
}

async fn ask<P, F>(probe: &P) -> Result<(), ProbeFailure>
where
    P: Fn() -> F,
    F: Future<Output = Result<(), ProbeFailure>>,
{
    match timeout(PROBE_ANSWERS_WITHIN, probe()).await {
        Ok(answer) => answer,
        Err(_) => {
            let why = format!("no answer within {PROBE_ANSWERS_WITHIN:?}");
            Err(ProbeFailure::silent(why))
        }
    }
}

#[cfg(test)]
mod tests;
