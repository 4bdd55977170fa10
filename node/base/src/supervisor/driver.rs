//! Does what the tree decides: owns the tasks, the tokens and the timer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::tree::{Action, Generation, Patience, Tree};
use super::{Context, Options, ROOT, Runnable, panics};
use crate::event;
use crate::logtree::Severity;

/// What contexts, handles and the driver have in common.
pub(super) struct Shared {
    tree: Mutex<Tree<Runnable>>,
    /// The tree has actions, or another deadline.
    pub(super) wake: Notify,
    pub(super) revision: event::Writer<u64>,
    started: Instant,
}

impl Shared {
    pub(super) fn new(root: Runnable, options: &Options) -> Shared {
        let patience = Patience {
            warning: options.stop_warning,
            bound: options.stop_bound,
        };
        Shared {
            tree: Mutex::new(Tree::new(ROOT, root, options.backoff.clone(), patience)),
            wake: Notify::new(),
            revision: event::value().0,
            started: Instant::now(),
        }
    }

    /// The tree leaves no method half done by a panic short of a bug in it, so
    /// a poisoned lock is no reason to take everything down.
    pub(super) fn tree(&self) -> MutexGuard<'_, Tree<Runnable>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tree's clock: since the start.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Turns times of the tree's clock into those of the wall clock.
    pub(super) fn wall_clock(&self) -> impl Fn(Duration) -> SystemTime + use<> {
        let (now, wall) = (self.now(), SystemTime::now());
        move |at| wall.checked_sub(now.saturating_sub(at)).unwrap_or(wall)
    }
}

/// How it all ended.
#[derive(Debug)]
pub(super) struct Ending {
    /// The root's failure, `None` after a shutdown.
    pub(super) why: Option<String>,
    pub(super) stragglers: Vec<Arc<str>>,
}

/// Runs until the tree is closed and everything has ended or the bound is over.
pub(super) async fn drive(
    shared: Arc<Shared>,
    stop: CancellationToken,
    shutdown_bound: Duration,
) -> Ending {
    let mut tasks = Tasks::default();
    let mut closing_until = None;
    loop {
        let (actions, deadline, closing, revision) = {
            let mut tree = shared.tree();
            tree.tick(shared.now());
            let actions = tree.take_actions();
            (actions, tree.deadline(), tree.is_closing(), tree.revision())
        };
        for action in actions {
            tasks.perform(action, &shared);
        }
        if shared.revision.value().get() != Some(revision) {
            shared.revision.set(revision);
        }
        if closing {
            let now = shared.now();
            let until = *closing_until.get_or_insert(now + shutdown_bound);
            if now >= until || shared.tree().all_ended() {
                break;
            }
        }
        let deadline = deadline.into_iter().chain(closing_until).min();
        let sleep = tokio::time::sleep_until(match deadline {
            Some(deadline) => shared.started + deadline,
            // Nothing waits for time; the condition below keeps it from counting.
            None => shared.started,
        });
        tokio::select! {
            () = shared.wake.notified() => {}
            Some((generation, outcome)) = tasks.next_end() => {
                shared.tree().ended(generation, outcome, shared.now());
            }
            () = sleep, if deadline.is_some() => {}
            () = stop.cancelled(), if !closing => shared.tree().close(shared.now()),
        }
    }
    let tree = shared.tree();
    let ending = Ending {
        why: tree.root_failure().map(Into::into),
        stragglers: tree.still_running(),
    };
    drop(tree);
    for name in &ending.stragglers {
        tracing::error!(dn = %name, "did not stop within {shutdown_bound:?} of the shutdown");
    }
    ending
}

/// The tasks of all runnables. Dropping this aborts them.
#[derive(Default)]
struct Tasks {
    set: JoinSet<Result<(), String>>,
    generations: HashMap<Id, Generation>,
    handles: HashMap<Generation, (CancellationToken, AbortHandle)>,
}

impl Tasks {
    fn perform(&mut self, action: Action<Runnable>, shared: &Arc<Shared>) {
        match action {
            Action::Start {
                name,
                generation,
                payload,
            } => self.start(name, generation, payload, shared),
            Action::Cancel { generation } => {
                if let Some((token, _)) = self.handles.get(&generation) {
                    token.cancel();
                }
            }
            Action::Abort { generation } => {
                if let Some((_, handle)) = self.handles.get(&generation) {
                    handle.abort();
                }
            }
            Action::Log {
                name,
                severity,
                text,
            } => log(&name, severity, &text),
        }
    }

    fn start(
        &mut self,
        name: Arc<str>,
        generation: Generation,
        runnable: Runnable,
        shared: &Arc<Shared>,
    ) {
        let token = CancellationToken::new();
        // An error span: it must exist whatever level is kept.
        let span = tracing::error_span!(parent: None, "runnable", dn = %name);
        let context = Context {
            shared: shared.clone(),
            name,
            generation,
            token: token.clone(),
        };
        let run = async move {
            // Calling the function may panic as well as awaiting it.
            let run = panics::caught(async move { (runnable.0)(context).await });
            match run.await {
                Ok(outcome) => outcome.map_err(|failure| failure.to_string()),
                Err(panic) => Err(panic),
            }
        };
        let handle = self.set.spawn(run.instrument(span));
        self.generations.insert(handle.id(), generation);
        self.handles.insert(generation, (token, handle));
    }

    /// The next task that ends; `None` at once if there is none. Safe to cancel.
    async fn next_end(&mut self) -> Option<(Generation, Result<(), String>)> {
        let (id, outcome) = match self.set.join_next_with_id().await? {
            Ok((id, outcome)) => (id, outcome),
            Err(error) => (error.id(), Err(describe(error))),
        };
        let generation = self.generations.remove(&id)?;
        self.handles.remove(&generation);
        Some((generation, outcome))
    }
}

/// Panics of the runnable itself are caught before; what is left is a panic
/// while its remains were dropped, or an abort.
fn describe(error: JoinError) -> String {
    match error.try_into_panic() {
        Ok(payload) => panics::describe(payload.as_ref(), None),
        Err(_) => "aborted".into(),
    }
}

fn log(name: &str, severity: Severity, text: &str) {
    match severity {
        Severity::Trace => tracing::trace!(dn = name, "{text}"),
        Severity::Debug => tracing::debug!(dn = name, "{text}"),
        Severity::Info => tracing::info!(dn = name, "{text}"),
        Severity::Warning => tracing::warn!(dn = name, "{text}"),
        Severity::Error => tracing::error!(dn = name, "{text}"),
    }
}
