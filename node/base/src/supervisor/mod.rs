//! The supervisor: a tree of named runnables that restarts what fails.
//!
//! A runnable is `async fn(Context) -> Outcome`. While it is *starting* it may add children, singly
//! or in groups; then it signals [`Context::healthy`]. A runnable that has nothing more to do
//! signals [`Context::done`] and returns `Ok`: it is *finished* and is not restarted, and its
//! children keep running. Any other exit (an error, a panic, an early return, a signal out of
//! order) is a failure: everything below it is cancelled, and when all of that has ended, the
//! runnable is restarted after a backoff. A runnable that asks to be restarted returns
//! [`Exit::Restart`], which is not a failure. The members of a group fail and restart together.
//! When a runnable restarts, its children are forgotten; it adds them again.
//!
//! Children can be added only while starting, so "healthy" means that everything below was at least
//! started, and the shape of the tree below a healthy runnable is fixed.
//!
//! A runnable owns everything it spawns (in a `JoinSet` inside it), so nothing of it remains when
//! its future ends. [`Context::cancelled`] asks it to return. If it does not, the log names it, and
//! after a time limit it is *abandoned*: its task is aborted, its subtree is restarted beside
//! whatever is left of it, and [`Tree::abandoned`] lists it for as long as it lives. Signals of
//! abandoned or ended generations are ignored.
//!
//! Limits: a task that never yields cannot be aborted. It keeps the runtime thread that it blocks,
//! can delay the runtime's timers until another of its threads is woken, and its runtime cannot be
//! dropped but only left (`shutdown_background`). The supervisor itself is not delayed: it names
//! the runnable and restarts it as long as the runtime has threads left. So the runtime must be
//! multi-threaded, and blocking work belongs in [`spawn_blocking`]. A process that hangs altogether
//! is left to the watchdog.
//!
//! Design: the rules are a plain data structure without clock or tasks (`tree.rs`) behind a mutex.
//! So [`Context::run`] can answer at once, from any thread, without an await, and every rule can be
//! tested with generated histories. One driver (`driver.rs`), on a thread of its own, owns the
//! tasks of all runnables and executes the tree's actions. Only the driver starts, cancels and
//! aborts, and no lock is held while it does so or while anything is logged. The alternative, a
//! task that owns the tree and receives messages, would have to be awaited for each answer, and
//! would be one more thing that can hang.

mod backoff;
mod blocking;
mod context;
mod driver;
mod failure;
mod health;
mod panics;
mod shared;
#[cfg(test)]
mod tests;
mod tree;
#[cfg(test)]
mod tree_tests;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

pub use backoff::Backoff;
pub use blocking::{Blocking, spawn_blocking};
pub use context::Context;
pub use failure::{Exit, Failure, Outcome};
pub use health::Health;

use crate::event;
use driver::Ending;
use shared::Shared;

/// The name of the root runnable, and the first part of all other names.
pub const ROOT: &str = "root";

type Starts<T> =
    dyn Fn(Context) -> Pin<Box<dyn Future<Output = Result<T, Failure>> + Send>> + Send + Sync;

/// A function that the supervisor can start any number of times. Cheap to clone.
#[derive(Clone)]
pub struct Runnable(Run);

/// Two variants without a common wrapper: what wraps a future is compiled again for each of them.
#[derive(Clone)]
enum Run {
    Plain(Arc<Starts<()>>),
    Restartable(Arc<Starts<Exit>>),
}

impl Runnable {
    async fn run(self, context: Context) -> Result<Exit, Failure> {
        match self.0 {
            Run::Plain(start) => start(context).await.map(|()| Exit::Done),
            Run::Restartable(start) => start(context).await,
        }
    }
}

/// Makes a runnable from an async function, which is called at each start.
pub fn runnable<F, Fut>(run: F) -> Runnable
where
    F: Fn(Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    Runnable(Run::Plain(Arc::new(move |context| Box::pin(run(context)))))
}

/// Makes a runnable from an async function that may ask to be restarted.
pub fn restartable<F, Fut>(run: F) -> Runnable
where
    F: Fn(Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Exit, Failure>> + Send + 'static,
{
    Runnable(Run::Restartable(Arc::new(move |context| {
        Box::pin(run(context))
    })))
}

impl std::fmt::Debug for Runnable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Runnable")
    }
}

/// The state of a runnable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Running, not healthy yet; only in this state may it add children.
    Starting,
    /// Running and healthy.
    Healthy,
    /// Running, and allowed to return.
    Done,
    /// Returned after it signalled done. Its children keep running.
    Finished,
    /// Cancelled, still running.
    Stopping,
    /// Failed and ended; it restarts when everything that restarts with it has ended and the
    /// backoff is over.
    Failed,
    /// Ended because something above or beside it failed, because it asked to be restarted, or
    /// because the supervisor is shutting down.
    Stopped,
}

impl State {
    /// The state as one lowercase word.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Healthy => "healthy",
            State::Done => "done",
            State::Finished => "finished",
            State::Stopping => "stopping",
            State::Failed => "failed",
            State::Stopped => "stopped",
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why children could not be added. None was added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpawnError {
    /// The name is invalid.
    #[error(
        "{parent}: runnable name: expected 1 to 64 characters of a-z, 0-9, _ and -, got {name:?}"
    )]
    NameInvalid {
        /// Dotted name of the parent.
        parent: Arc<str>,
        /// The name, cut if it is very long.
        name: String,
    },
    /// A child of this name exists already.
    #[error("runnable {name} already exists")]
    NameTaken {
        /// Dotted name of the child.
        name: Arc<str>,
    },
    /// The runnable is no longer starting.
    #[error("{parent} is {state}: children can be added only while it is starting")]
    NotStarting {
        /// Dotted name of the parent.
        parent: Arc<str>,
        /// The parent's state.
        state: State,
    },
    /// The context belongs to a run of the runnable that has ended.
    #[error("this run of {parent} has ended: no children can be added")]
    Ended {
        /// Dotted name of the parent.
        parent: Arc<str>,
    },
    /// A group without members.
    #[error("{parent}: a group needs at least one member")]
    EmptyGroup {
        /// Dotted name of the parent.
        parent: Arc<str>,
    },
}

/// Options of a supervisor.
#[derive(Debug, Clone)]
pub struct Options {
    /// Delay before a failed runnable restarts.
    pub backoff: Backoff,
    /// A runnable that is still running this long after it was cancelled is named in the log,
    /// unless it set another time ([`Context::ends_within`]).
    pub stop_warning: Duration,
    /// A runnable that is still running this long after it was cancelled is abandoned.
    pub stop_bound: Duration,
    /// Shutting down, also after a failure of the root, takes at most this long.
    pub shutdown_bound: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            backoff: Backoff::default(),
            stop_warning: Duration::from_secs(5),
            stop_bound: Duration::from_secs(30),
            shutdown_bound: Duration::from_secs(10),
        }
    }
}

/// The state of one runnable at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// Dotted name, `root.role.controlplane`.
    pub name: Arc<str>,
    /// Its current state.
    pub state: State,
    /// Number of restarts since its parent added it.
    pub restarts: u64,
    /// When it entered this state (computed from the current wall clock, so that setting the clock
    /// meanwhile does not matter).
    pub since: SystemTime,
    /// Its last failure since its parent added it.
    pub last_error: Option<String>,
}

/// A run of a runnable that ignored its cancellation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    /// Dotted name.
    pub name: Arc<str>,
    /// When it was abandoned.
    pub at: SystemTime,
    /// Whether it has ended since.
    pub ended: bool,
}

/// The root runnable failed, so the whole tree was stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the root runnable failed: {why}")]
pub struct RootFailure {
    /// The root's error.
    pub why: String,
    /// Dotted names of the runnables that had not stopped within the shutdown bound.
    pub stragglers: Vec<Arc<str>>,
}

/// A view of the tree. Cheap to clone; outlives the supervisor.
#[derive(Clone)]
pub struct Tree {
    shared: Arc<Shared>,
}

impl Tree {
    /// Every runnable, sorted by name.
    pub fn snapshot(&self) -> Vec<NodeState> {
        let wall = self.shared.wall_clock();
        let views = self.shared.tree().views();
        let state = |view: tree::View| NodeState {
            name: view.name,
            state: view.state,
            restarts: view.restarts,
            since: wall(view.since),
            last_error: view.last_error,
        };
        views.into_iter().map(state).collect()
    }

    /// The runs that ignored their cancellation: all that are still running, and the last few that
    /// have ended since. A node with one that is still running is not healthy.
    pub fn abandoned(&self) -> Vec<Abandoned> {
        let wall = self.shared.wall_clock();
        let tree = self.shared.tree();
        let entry = |entry: &tree::Abandonment| Abandoned {
            name: entry.name.clone(),
            at: wall(entry.at),
            ended: entry.ended,
        };
        tree.abandoned().map(entry).collect()
    }

    /// Yields a new number after every change of what [`Tree::snapshot`] and [`Tree::abandoned`]
    /// return; closed when the supervisor and all handles of its tree were dropped.
    pub fn watch(&self) -> event::Watcher<u64> {
        self.shared.revision.value().watch()
    }
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tree").field(&self.snapshot()).finish()
    }
}

/// A running tree of runnables. Dropping it aborts them all.
#[derive(Debug)]
pub struct Supervisor {
    tree: Tree,
    stop: CancellationToken,
    ending: oneshot::Receiver<Ending>,
    /// The result of `ending`, which yields it only once.
    ended: Option<Ending>,
}

impl Supervisor {
    /// Starts the root runnable on the current tokio runtime (panics outside of one). The
    /// supervisor logs to the `tracing` subscriber that is the current thread's at this moment.
    pub fn start(root: Runnable, options: Options) -> Supervisor {
        panics::note_places();
        let shared = Arc::new(Shared::new(root, &options));
        let stop = CancellationToken::new();
        let ending = driver::start(shared.clone(), stop.clone(), options.shutdown_bound);
        Supervisor {
            tree: Tree { shared },
            stop,
            ending,
            ended: None,
        }
    }

    /// A handle for reading the tree.
    pub fn tree(&self) -> Tree {
        self.tree.clone()
    }

    /// Waits, possibly forever, until the root runnable has failed and everything has stopped (or
    /// the shutdown bound has passed). Safe to cancel and to call again: for a `select!` with other
    /// reasons to end.
    pub async fn failed(&mut self) -> RootFailure {
        let Ending { why, stragglers } = self.ended().await;
        RootFailure {
            why: why.unwrap_or_else(|| "no failure: the supervisor was shut down".into()),
            stragglers,
        }
    }

    /// Like [`Supervisor::failed`], for callers that wait for nothing else.
    pub async fn wait(mut self) -> RootFailure {
        self.failed().await
    }

    /// Cancels everything and waits for it, at most for the shutdown bound; what is still running
    /// then is aborted. Returns the names of the runnables that had not stopped by themselves; the
    /// log names them, too.
    pub async fn shutdown(mut self) -> Vec<Arc<str>> {
        self.stop.cancel();
        self.ended().await.stragglers
    }

    async fn ended(&mut self) -> Ending {
        if let Some(ending) = &self.ended {
            return ending.clone();
        }
        let ending = (&mut self.ending).await.unwrap_or_else(|_| Ending {
            why: Some("the supervisor itself failed".into()),
            stragglers: self.tree.shared.tree().still_running(),
        });
        self.ended = Some(ending.clone());
        ending
    }
}
