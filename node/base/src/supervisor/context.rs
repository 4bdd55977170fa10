//! The handle that a runnable has to its supervisor.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::shared::Shared;
use super::tree::Generation;
use super::{Exit, Failure, Outcome, Runnable, SpawnError, restartable, runnable};

/// One run of one runnable: its name, its signals, its cancellation, and the parent of its
/// children. Belongs to that run alone: after the run has ended, its signals are ignored and
/// children are rejected.
#[derive(Clone)]
pub struct Context {
    pub(super) shared: Arc<Shared>,
    pub(super) name: Arc<str>,
    pub(super) generation: Generation,
    pub(super) token: CancellationToken,
}

impl Context {
    /// The dotted name, `root.role.controlplane`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a child and starts it. Only before [`Context::healthy`].
    pub fn run<F, Fut>(&self, name: &str, run: F) -> Result<(), SpawnError>
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        self.run_group(vec![(name, runnable(run))])
    }

    /// Adds a child that is a function of its context and of a worker that all its runs share. Only
    /// before [`Context::healthy`].
    pub fn run_worker<W, F, Fut>(
        &self,
        name: &str,
        worker: &Arc<W>,
        run: F,
    ) -> Result<(), SpawnError>
    where
        W: Send + Sync + 'static,
        F: Fn(Context, Arc<W>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        let worker = worker.clone();
        self.run(name, move |context| run(context, worker.clone()))
    }

    /// Like [`Context::run_worker`], for a child that may ask to be restarted.
    pub fn run_restartable<W, F, Fut>(
        &self,
        name: &str,
        worker: &Arc<W>,
        run: F,
    ) -> Result<(), SpawnError>
    where
        W: Send + Sync + 'static,
        F: Fn(Context, Arc<W>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Exit, Failure>> + Send + 'static,
    {
        let worker = worker.clone();
        let run = restartable(move |context| run(context, worker.clone()));
        self.run_group(vec![(name, run)])
    }

    /// Runs `work` until it ends or the runnable is cancelled.
    pub async fn until_cancelled(&self, work: impl Future<Output = Outcome>) -> Outcome {
        tokio::select! {
            outcome = work => outcome,
            () = self.cancelled() => Ok(()),
        }
    }

    /// Adds children that fail together: if one fails, all are stopped and then restarted. Only
    /// before [`Context::healthy`]. Adds all of them or none.
    pub fn run_group(&self, group: Vec<(&str, Runnable)>) -> Result<(), SpawnError> {
        let now = self.shared.now();
        let result = self
            .shared
            .tree()
            .spawn(&self.name, self.generation, group, now);
        self.shared.wake.notify_one();
        result
    }

    /// Signals that the runnable is healthy, and resets its backoff. Once, before
    /// [`Context::done`]; a second call is a failure of the runnable.
    pub fn healthy(&self) {
        let now = self.shared.now();
        self.shared.tree().healthy(self.generation, now);
        self.shared.wake.notify_one();
    }

    /// Caps the backoff if this run fails: for a runnable that fails because a peer is absent, so
    /// that it does not wait long once the peer is back. `None` removes the cap. It does not carry
    /// over to the next run.
    pub fn restart_within(&self, bound: Option<Duration>) {
        self.shared.tree().restart_within(self.generation, bound);
    }

    /// How long this run may take to stop when it is cancelled, if that differs from the default:
    /// it is logged as a straggler after this time. The bound after which it is abandoned does not
    /// change. It does not carry over to the next run.
    pub fn ends_within(&self, bound: Duration) {
        self.shared.tree().ends_within(self.generation, bound);
        self.shared.wake.notify_one();
    }

    /// Signals that the runnable may now return without being restarted. Once, after
    /// [`Context::healthy`]; otherwise a failure of the runnable.
    pub fn done(&self) {
        let now = self.shared.now();
        self.shared.tree().done(self.generation, now);
        self.shared.wake.notify_one();
    }

    /// Whether the runnable has been cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until the runnable is cancelled.
    pub async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// The cancellation as a token, for parts that take one. Cancelling this token affects only
    /// those who watch it.
    pub fn token(&self) -> CancellationToken {
        self.token.child_token()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} #{})", self.name, self.generation)
    }
}
