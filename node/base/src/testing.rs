//! Helpers for tests of runnables: waits with a time limit, and a supervisor for a single runnable
//! that restarts it quickly.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::event::{self, Value, Watcher};
use crate::logtree::{self, Backlog, Item, LogTree, Query, Severity};
use crate::supervisor::{
    Backoff, Context, Exit, Failure, NodeState, Options, Outcome, Runnable, State, Supervisor,
    restartable, runnable,
};

/// Longest wait of a test on a machine that works.
pub const BOUND: Duration = Duration::from_secs(30);

/// Waits for something that must happen.
pub async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(BOUND, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: timed out after {BOUND:?}"),
    }
}

/// How long a test waits for something that must not happen. Too short a time hides a bug, but
/// never fails a correct test.
const QUIET: Duration = Duration::from_millis(300);

/// Asserts that something does not happen.
pub async fn assert_never<T>(what: &str, future: impl Future<Output = T>) {
    let happened = tokio::time::timeout(QUIET, future).await.is_ok();
    assert!(!happened, "{what}");
}

/// Polls until the condition holds: for files, which notify nobody.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    within_timeout(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Pauses the process until it is sent SIGCONT. Returns when all its threads are stopped: after the signal they run for
/// a moment, in which they could answer.
pub async fn pause(process: Pid) {
    kill(process, Signal::SIGSTOP).unwrap();
    let tasks = format!("/proc/{process}/task");
    until("all threads of the process are stopped", || {
        let mut tasks = std::fs::read_dir(&tasks).unwrap();
        tasks.all(|task| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
            // The name before it may contain any character.
            stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
        })
    })
    .await;
}

/// Retries until the attempt succeeds.
pub async fn until_ok<T, E, F: Future<Output = Result<T, E>>>(
    what: &str,
    mut attempt: impl FnMut() -> F,
) -> T {
    within_timeout(what, async {
        loop {
            if let Ok(value) = attempt().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// A supervisor for one worker.
pub struct TestSupervisor {
    supervisor: Supervisor,
    log: LogTree,
}

impl TestSupervisor {
    pub fn run<F, Fut>(worker: F) -> Self
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        Self::run_it(runnable(worker))
    }

    /// Like [`TestSupervisor::run`], for a worker that may ask to be restarted.
    pub fn run_restartable<F, Fut>(worker: F) -> Self
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Exit, Failure>> + Send + 'static,
    {
        Self::run_it(restartable(worker))
    }

    fn run_it(worker: Runnable) -> Self {
        let log = LogTree::new(logtree::Options::default());
        // The supervisor takes it along to whatever thread it runs on.
        let logs = tracing_subscriber::registry().with(log.layer());
        let _guard = tracing::subscriber::set_default(logs);
        let root = runnable(move |ctx: Context| {
            let worker = worker.clone();
            async move {
                ctx.run_group(vec![("worker", worker)])?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        });
        let backoff = Backoff {
            initial: Duration::from_millis(20),
            cap: Duration::from_millis(100),
            ..Backoff::default()
        };
        let options = Options {
            backoff,
            ..Options::default()
        };
        Self {
            supervisor: Supervisor::start(root, options),
            log,
        }
    }

    async fn reaches(&self, what: &str, mut wanted: impl FnMut(&NodeState) -> bool) {
        let tree = self.supervisor.tree();
        let mut changes = tree.watch();
        within_timeout(what, async {
            while !tree.snapshot().iter().any(&mut wanted) {
                changes.next().await.unwrap();
            }
        })
        .await;
    }

    pub async fn is_healthy(&self) {
        let is_well =
            |node: &NodeState| node.name.ends_with(".worker") && node.state == State::Healthy;
        self.reaches("health", is_well).await;
    }

    /// Waits until the worker, or a part of it, has failed with this text, which operators see.
    pub async fn fails(&self, why: &str) {
        self.reaches(why, |node| {
            let error = node.last_error.as_deref();
            error.is_some_and(|error| error.contains(why))
        })
        .await;
    }

    /// Waits until the worker has asked to be restarted with this text.
    pub async fn restarts(&self, why: &str) {
        self.says(Severity::Info, why).await;
    }

    /// Waits until the worker, or a part of it, has restarted this many times.
    pub async fn restarted(&self, times: u64) {
        self.reaches("restarts", |node| node.restarts >= times)
            .await;
    }

    /// Prints the log, for a test that fails.
    pub fn print_log(&self) {
        let query = Query {
            dn: String::new(),
            subtree: true,
            min_severity: Severity::Info,
            backlog: Backlog::All,
            follow: false,
        };
        for entry in self.log.read(query).backlog {
            println!("{}", entry.concise(300));
        }
    }

    /// Asserts that the worker has not failed so far.
    pub fn is_fine(&self) {
        self.are_fine(|name| name.ends_with(".worker"));
    }

    /// Asserts that neither the worker nor any part of it has failed so far.
    pub fn all_is_fine(&self) {
        self.are_fine(|_| true);
    }

    fn are_fine(&self, of_interest: impl Fn(&str) -> bool) {
        let nodes = self.supervisor.tree().snapshot();
        for node in nodes.iter().filter(|node| of_interest(&node.name)) {
            let found = (node.restarts, &node.last_error);
            assert_eq!(found, (0, &None), "{}", node.name);
        }
    }

    /// Waits until the worker has logged a warning with this text.
    pub async fn warns(&self, words: &str) {
        self.says(Severity::Warning, words).await;
    }

    /// Waits until the worker has logged this text, at this severity or a higher one.
    pub async fn says(&self, min_severity: Severity, words: &str) {
        let mut reader = self.log.read(Query {
            dn: String::new(),
            subtree: true,
            min_severity,
            backlog: Backlog::All,
            follow: true,
        });
        if reader.backlog.iter().any(|e| e.message.contains(words)) {
            return;
        }
        let stream = reader.stream.as_mut().unwrap();
        within_timeout(words, async {
            loop {
                match stream.next().await.expect("the log is open") {
                    Item::Entry(entry) if entry.message.contains(words) => return,
                    _ => {}
                }
            }
        })
        .await;
    }

    pub async fn stop(self) {
        let stragglers = within_timeout("the worker stops", self.supervisor.shutdown()).await;
        assert!(stragglers.is_empty(), "{stragglers:?}");
    }
}

/// The next state of a value, which must come.
pub async fn next<T: Clone + Send + Sync + 'static>(what: &str, watcher: &mut Watcher<T>) -> T {
    within_timeout(what, watcher.next()).await.unwrap()
}

/// A value that never changes.
pub fn fixed<T: Clone + Send + Sync + 'static>(state: T) -> Value<T> {
    let (writer, value) = event::value();
    writer.set(state);
    value
}
