//! The supervisor: a tree of named runnables that restarts what fails.
//!
//! A runnable is `async fn(Context) -> Outcome`. While it *starts* it may add
//! children and groups of children below itself; then it signals
//! [`Context::healthy`]. One that has nothing more to do signals
//! [`Context::done`] and returns `Ok`: it is *finished* and stays so, while its
//! children go on. Any other way out (an error, a panic, an early return, a
//! signal out of order) is a failure: all below it is cancelled, and when all
//! of that has ended, the runnable starts again after a backoff. One that wants
//! to be started anew says so by [`Exit::Restart`], which is no failure. The members of
//! a group fail and start again together. Children of a runnable that starts
//! again are forgotten; it adds them anew.
//!
//! Children only while starting: so "healthy" means that everything below was
//! at least begun, and the shape of the tree below a healthy runnable is fixed.
//!
//! A runnable owns everything it spawns (by a `JoinSet` inside it), so that it
//! has ended when its future has. [`Context::cancelled`] asks it to return. One
//! that does not is named in the log, and after a bound it is *abandoned*: its
//! task is aborted, its subtree starts again beside whatever is left of it, and
//! [`Tree::abandoned`] says so for as long as it lives. Signals of generations
//! that were abandoned or have ended are ignored.
//!
//! What this cannot do: a task that never yields cannot be aborted, it keeps
//! the thread of the runtime that it blocks, can hold up the runtime's timers
//! until another thread of it is woken, and such a runtime cannot be dropped
//! but only left (`shutdown_background`). The supervisor itself is not held up,
//! it names the runnable and starts it again as long as the runtime has threads
//! left. So the runtime must be a multi-threaded one, and work that blocks
//! belongs into `spawn_blocking`. A process that hangs altogether is for the
//! watchdog.
//!
//! Design: the rules are a plain data structure without clock or tasks
//! (`tree.rs`) behind a mutex. [`Context::run`] therefore can answer at once,
//! from any thread, and needs no await; and every rule can be tested with
//! generated histories. One driver (`driver.rs`), on a thread of its own, owns the
//! tasks of all runnables and does what the tree decides; it alone starts,
//! cancels and aborts, and no lock is held while it does, nor while anything
//! is logged. A task that owns the tree and is sent messages would have to be
//! awaited for each answer, and would be one more thing to hang.

mod backoff;
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
pub use context::Context;
pub use failure::{Exit, Failure, Outcome};
pub use health::Health;

use crate::event;
use driver::Ending;
use shared::Shared;

/// The name of the root runnable, and the first part of all others.
pub const ROOT: &str = "root";

type Starts<T> =
    dyn Fn(Context) -> Pin<Box<dyn Future<Output = Result<T, Failure>> + Send>> + Send + Sync;

/// Something the supervisor can start, again and again. Cheap to clone.
#[derive(Clone)]
pub struct Runnable(Run);

/// Two kinds, and no common one around them: what wraps a future is compiled
/// anew for each of them.
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

/// Makes a runnable of an async function. It is called at each start.
pub fn runnable<F, Fut>(run: F) -> Runnable
where
    F: Fn(Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    Runnable(Run::Plain(Arc::new(move |context| Box::pin(run(context)))))
}

/// Makes a runnable of an async function that may want to be started anew.
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

/// Where a runnable stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// It runs and is not healthy yet; only now may it add children.
    Starting,
    /// It runs and works.
    Healthy,
    /// It runs and may return.
    Done,
    /// It returned after it was done. Its children go on.
    Finished,
    /// It was told to stop and still runs.
    Stopping,
    /// It failed and has ended; it starts again when all that goes with it has
    /// ended and the backoff is over.
    Failed,
    /// It has ended because something above or beside it failed, because it
    /// asked to be started anew, or because the supervisor shuts down.
    Stopped,
}

impl State {
    /// One word, lower case.
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

/// Why children could not be added. Nothing was added then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpawnError {
    /// The name breaks the rules.
    #[error(
        "{parent}: {name:?} is no name for a runnable: 1 to 64 of a-z, 0-9, _ and - are wanted"
    )]
    NameInvalid {
        /// Dotted name of the runnable that wanted a child.
        parent: Arc<str>,
        /// The name it asked for, cut if very long.
        name: String,
    },
    /// There is a child of this name already.
    #[error("there is a runnable {name} already")]
    NameTaken {
        /// Dotted name of the child.
        name: Arc<str>,
    },
    /// The runnable is not starting any more.
    #[error("{parent} is {state}: children can be added only while it is starting")]
    NotStarting {
        /// Dotted name of the runnable that wanted a child.
        parent: Arc<str>,
        /// Its state.
        state: State,
    },
    /// The context belongs to a run of the runnable that is over.
    #[error("this run of {parent} is over: no children can be added")]
    Ended {
        /// Dotted name of the runnable that wanted a child.
        parent: Arc<str>,
    },
    /// A group without members.
    #[error("{parent}: a group needs at least one member")]
    EmptyGroup {
        /// Dotted name of the runnable that wanted children.
        parent: Arc<str>,
    },
}

/// How the supervisor behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// Delays before a failed runnable starts again.
    pub backoff: Backoff,
    /// A runnable that runs so long after it was told to stop is named in the
    /// log, if it has not said that it may take another time.
    pub stop_warning: Duration,
    /// A runnable that runs so long after it was told to stop is abandoned.
    pub stop_bound: Duration,
    /// Shutting down, also after the root failed, takes at most this long.
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

/// One runnable, as it is at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// Dotted name, `root.role.controlplane`.
    pub name: Arc<str>,
    /// Where it stands.
    pub state: State,
    /// How often it was started again since its parent added it.
    pub restarts: u64,
    /// Since when it stands there (by the wall clock of this moment, so that a
    /// clock set meanwhile does not matter).
    pub since: SystemTime,
    /// Its last failure since its parent added it.
    pub last_error: Option<String>,
}

/// A run of a runnable that ignored its cancellation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    /// Dotted name.
    pub name: Arc<str>,
    /// When it was given up.
    pub at: SystemTime,
    /// Whether it has ended after all.
    pub ended: bool,
}

/// The root runnable failed, and with it everything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the root runnable failed: {why}")]
pub struct RootFailure {
    /// The root's error.
    pub why: String,
    /// Those that had not stopped within the bound, dotted names.
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

    /// The runs that ignored their cancellation: all that still live, and the
    /// last few that have ended since. A node with one that lives is not well.
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

    /// Yields a new number after every change of what [`Tree::snapshot`] and
    /// [`Tree::abandoned`] say; closed when the supervisor and all handles of
    /// its tree are gone.
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
    /// What `ending` gave; it gives it only once.
    ended: Option<Ending>,
}

impl Supervisor {
    /// Starts the root runnable on the tokio runtime that this is called in
    /// (and panics outside of one). It logs to the `tracing` subscriber of this
    /// moment and this thread.
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

    /// A handle to look at the tree.
    pub fn tree(&self) -> Tree {
        self.tree.clone()
    }

    /// Waits, for ever if need be, until the root runnable has failed and
    /// everything has stopped (or the shutdown bound is over). Safe to cancel
    /// and to call again: for a `select!` beside other reasons to end.
    pub async fn failed(&mut self) -> RootFailure {
        let Ending { why, stragglers } = self.ended().await;
        RootFailure {
            why: why.unwrap_or_else(|| "it did not; all was shut down".into()),
            stragglers,
        }
    }

    /// Like [`Supervisor::failed`], for those who wait for nothing else.
    pub async fn wait(mut self) -> RootFailure {
        self.failed().await
    }

    /// Cancels everything and waits for it, at most for the shutdown bound;
    /// what still runs then is aborted. Gives the names of those that had not
    /// stopped by themselves, which the log names, too.
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
