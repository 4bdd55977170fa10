//! Executes the tree's actions; owns the tasks, the tokens and the timer.
//!
//! The driver has a thread and a small runtime of its own; only the runnables' tasks are on the
//! caller's runtime. A tokio task that is woken by another may have to wait until that one yields
//! (it is put into a slot from which no other thread takes it), and a thread that blocks can delay
//! the timers of its whole runtime. On its own thread, the supervisor can still log a runnable that
//! blocks, and restart it beside the blocked task.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use tracing::dispatcher::{self, Dispatch};
use tracing::instrument::WithSubscriber;
use tracing::subscriber::NoSubscriber;

use super::shared::Shared;
use super::tree::{Action, End, Generation};
use super::{Context, Exit, Runnable, panics};
use crate::logtree::Severity;

/// How the whole tree ended.
#[derive(Debug, Clone)]
pub(super) struct Ending {
    /// The root's failure, `None` after a shutdown.
    pub(super) why: Option<String>,
    pub(super) stragglers: Vec<Arc<str>>,
}

impl Ending {
    fn impossible(why: String) -> Ending {
        Ending {
            why: Some(why),
            stragglers: Vec::new(),
        }
    }
}

/// Starts the driver's thread. The receiver gets the ending; dropping it stops the driver at once,
/// and with it all tasks.
pub(super) fn start(
    shared: Arc<Shared>,
    stop: CancellationToken,
    shutdown_bound: Duration,
) -> oneshot::Receiver<Ending> {
    let (sender, receiver) = oneshot::channel();
    let tasks = Tasks::new(Handle::current());
    let thread = std::thread::Builder::new().name("supervisor".into());
    let run = move || {
        let dispatch = tasks.dispatch.clone();
        let run = || match Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime.block_on(drive(shared, tasks, stop, shutdown_bound, sender)),
            Err(error) => {
                let why = format!("cannot create the supervisor's runtime: {error}");
                // The receiver may be gone; then the ending is of no interest.
                let _ = sender.send(Ending::impossible(why));
            }
        };
        match dispatch {
            Some(dispatch) => dispatcher::with_default(&dispatch, run),
            None => run(),
        }
    };
    match thread.spawn(run) {
        Ok(_) => receiver,
        Err(error) => {
            let (sender, receiver) = oneshot::channel();
            let why = format!("cannot start the supervisor's thread: {error}");
            let _ = sender.send(Ending::impossible(why));
            receiver
        }
    }
}

/// Runs until the tree is closed and everything has ended, or the shutdown bound has passed, or the
/// receiver of the ending is dropped.
async fn drive(
    shared: Arc<Shared>,
    mut tasks: Tasks,
    stop: CancellationToken,
    shutdown_bound: Duration,
    mut sender: oneshot::Sender<Ending>,
) {
    let mut closing_until = None;
    let mut published = None;
    loop {
        let now = shared.now();
        let (actions, deadline, closing, all_ended, revision) = {
            let mut tree = shared.tree();
            tree.tick(now);
            let actions = tree.take_actions();
            let (closing, all_ended) = (tree.is_closing(), tree.all_ended());
            (
                actions,
                tree.deadline(),
                closing,
                all_ended,
                tree.revision(),
            )
        };
        for action in actions {
            tasks.perform(action, &shared);
        }
        if published != Some(revision) {
            published = Some(revision);
            shared.revision.set(revision);
        }
        if closing {
            let until = *closing_until.get_or_insert(now + shutdown_bound);
            if all_ended || now >= until {
                break;
            }
        }
        let deadline = deadline.into_iter().chain(closing_until).min();
        let sleep = tokio::time::sleep(deadline.unwrap_or_default().saturating_sub(now));
        tokio::select! {
            () = shared.wake.notified() => {}
            Some((generation, end)) = tasks.next_end() => {
                shared.tree().ended(generation, end, shared.now());
            }
            () = sleep, if deadline.is_some() => {}
            () = stop.cancelled(), if !closing => shared.tree().close(shared.now()),
            () = sender.closed() => return,
        }
    }
    let ending = {
        let tree = shared.tree();
        Ending {
            why: tree.root_failure().map(Into::into),
            stragglers: tree.still_running(),
        }
    };
    for name in &ending.stragglers {
        tracing::error!(dn = %name, "did not stop within {shutdown_bound:?} of shutdown");
    }
    drop(tasks);
    let _ = sender.send(ending);
}

/// The tasks of all runnables. Dropping this aborts them.
struct Tasks {
    /// The runtime that they run on.
    runtime: Handle,
    /// Where they log: to the subscriber of the thread that started the supervisor. If there was
    /// none, to the global one, which may be set later.
    dispatch: Option<Dispatch>,
    set: JoinSet<End>,
    generations: HashMap<Id, Generation>,
    handles: HashMap<Generation, (CancellationToken, AbortHandle)>,
}

impl Tasks {
    fn new(runtime: Handle) -> Tasks {
        let dispatch = dispatcher::get_default(Dispatch::clone);
        Tasks {
            runtime,
            dispatch: (!dispatch.is::<NoSubscriber>()).then_some(dispatch),
            set: JoinSet::new(),
            generations: HashMap::new(),
            handles: HashMap::new(),
        }
    }

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
            let run = panics::caught(runnable.run(context));
            match run.await {
                Ok(Ok(Exit::Done)) => End::Returned,
                Ok(Ok(Exit::Restart { why, after })) => End::Restart { why, after },
                Ok(Err(failure)) => End::Failed(failure.to_string()),
                Err(panic) => End::Panicked(panic),
            }
        };
        let run = run.instrument(span);
        let handle = match self.dispatch.clone() {
            Some(dispatch) => {
                let run = run.with_subscriber(dispatch);
                self.set.spawn_on(run, &self.runtime)
            }
            None => self.set.spawn_on(run, &self.runtime),
        };
        self.generations.insert(handle.id(), generation);
        self.handles.insert(generation, (token, handle));
    }

    /// The next task that ends; `None` at once if there is none. Cancel safe.
    async fn next_end(&mut self) -> Option<(Generation, End)> {
        let (id, end) = match self.set.join_next_with_id().await? {
            Ok((id, end)) => (id, end),
            Err(error) => (error.id(), End::Panicked(describe(error))),
        };
        let generation = self.generations.remove(&id)?;
        self.handles.remove(&generation);
        Some((generation, end))
    }
}

/// Panics of the runnable itself are caught earlier; what is left is a panic while its state was
/// dropped, or an abort.
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
