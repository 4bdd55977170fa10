//! What a runnable holds of its supervisor.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::shared::Shared;
use super::tree::Generation;
use super::{Exit, Failure, Outcome, Runnable, SpawnError, restartable, runnable};

/// One run of one runnable: its name, its signals, its cancellation, and the
/// place where its children go. Belongs to that run alone: kept beyond it, its
/// signals are ignored and children are refused.
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

    /// Adds a child that is a function of its context and of a worker that all
    /// its runs share. Only before [`Context::healthy`].
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

    /// The same of one that may want to be started anew.
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

    /// Works until the work ends, or until the runnable is told to return.
    pub async fn until_cancelled(&self, work: impl Future<Output = Outcome>) -> Outcome {
        tokio::select! {
            outcome = work => outcome,
            () = self.cancelled() => Ok(()),
        }
    }

    /// Adds children that fail together: if one dies, all are stopped and then
    /// started again. Only before [`Context::healthy`]. All are added or none.
    pub fn run_group(&self, group: Vec<(&str, Runnable)>) -> Result<(), SpawnError> {
        let now = self.shared.now();
        let result = self
            .shared
            .tree()
            .spawn(&self.name, self.generation, group, now);
        self.shared.wake.notify_one();
        result
    }

    /// Says that the runnable works. Once, before [`Context::done`]; a second
    /// time is a failure of the runnable. Resets its backoff.
    pub fn healthy(&self) {
        let now = self.shared.now();
        self.shared.tree().healthy(self.generation, now);
        self.shared.wake.notify_one();
    }

    /// Caps the backoff, should this run fail: for a runnable whose failures
    /// are somebody else's absence, so that it does not sleep for long when
    /// they are back. `None` takes it back. The next run begins without.
    pub fn restart_within(&self, bound: Option<Duration>) {
        self.shared.tree().restart_within(self.generation, bound);
    }

    /// How long this run may take to end when it is told to, if that is known
    /// better here: it is named in the log after that and not after the time
    /// that is usual. The bound after which it is abandoned stays. The next run
    /// begins without.
    pub fn ends_within(&self, bound: Duration) {
        self.shared.tree().ends_within(self.generation, bound);
        self.shared.wake.notify_one();
    }

    /// Says that the runnable may now return without being started again.
    /// Once, after [`Context::healthy`]; otherwise a failure of the runnable.
    pub fn done(&self) {
        let now = self.shared.now();
        self.shared.tree().done(self.generation, now);
        self.shared.wake.notify_one();
    }

    /// Whether the runnable has been told to return.
    pub fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until the runnable is told to return.
    pub async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// The cancellation itself, for parts that take a token. Cancelling it by
    /// hand affects only those who look at it.
    pub fn token(&self) -> CancellationToken {
        self.token.child_token()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} #{})", self.name, self.generation)
    }
}
