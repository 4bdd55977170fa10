//! Misbehaving runnables under the real supervisor. Rules that depend on time are tested in
//! `tree_tests.rs`; here limits are short and every wait is for a condition.

use std::future::pending;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tokio::time::timeout;
use tracing::Instrument;
use tracing_subscriber::layer::SubscriberExt;

use super::*;
use crate::logtree::{self, LogTree, Query};

const LONG: Duration = Duration::from_secs(20);

fn options() -> Options {
    Options {
        backoff: Backoff {
            initial: Duration::from_millis(2),
            cap: Duration::from_millis(5),
            ..Backoff::default()
        },
        stop_warning: Duration::from_millis(20),
        stop_bound: Duration::from_millis(60),
        shutdown_bound: Duration::from_millis(300),
    }
}

/// A supervisor that logs into a tree of its own.
fn start<F, Fut>(options: Options, root: F) -> (Supervisor, LogTree)
where
    F: Fn(Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    let log_tree = LogTree::new(logtree::Options::default());
    let subscriber = tracing_subscriber::registry().with(log_tree.layer());
    let guard = tracing::subscriber::set_default(subscriber);
    let supervisor = Supervisor::start(runnable(root), options);
    drop(guard);
    (supervisor, log_tree)
}

fn logged(log_tree: &LogTree, dn: &str) -> Vec<String> {
    let entries = log_tree.read(Query::exact(dn)).backlog;
    entries
        .into_iter()
        .map(|entry| entry.message.to_string())
        .collect()
}

/// Waits for a condition on the tree.
async fn until(tree: &Tree, wanted: impl Fn(&Tree) -> bool) {
    let mut watcher = tree.watch();
    let wait = async {
        while !wanted(tree) {
            watcher.next().await.expect("the handle keeps it open");
        }
    };
    let waited = timeout(LONG, wait).await;
    assert!(waited.is_ok(), "timed out: {:#?}", tree.snapshot());
}

fn find(tree: &Tree, name: &str) -> Option<NodeState> {
    tree.snapshot().into_iter().find(|node| *node.name == *name)
}

fn is(name: &'static str, state: State) -> impl Fn(&Tree) -> bool {
    move |tree| find(tree, name).is_some_and(|node| node.state == state)
}

fn restarted(name: &'static str, times: u64) -> impl Fn(&Tree) -> bool {
    move |tree| find(tree, name).is_some_and(|node| node.restarts >= times)
}

async fn works(context: Context) -> Outcome {
    context.healthy();
    context.cancelled().await;
    Ok(())
}

/// Fails at its first run and works afterwards.
fn fails_once<E: Into<Failure> + 'static>(error: fn() -> E) -> impl Fn(Context) -> BoxedOutcome {
    let runs = AtomicUsize::new(0);
    move |context| match runs.fetch_add(1, Ordering::SeqCst) {
        0 => Box::pin(async move { Err(error().into()) }),
        _ => Box::pin(works(context)),
    }
}

type BoxedOutcome = Pin<Box<dyn Future<Output = Outcome> + Send>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_stays_and_its_children_go_on() {
    let options = Options {
        shutdown_bound: 10 * LONG,
        ..options()
    };
    let (supervisor, log_tree) = start(options, |context| async move {
        context.run("child", works)?;
        context.healthy();
        context.done();
        Ok(())
    });
    let tree = supervisor.tree();
    until(&tree, is("root", State::Finished)).await;
    until(&tree, is("root.child", State::Healthy)).await;
    let stragglers = timeout(LONG, supervisor.shutdown()).await;
    assert_eq!(
        stragglers,
        Ok(vec![]),
        "shutdown does not wait for its bound without need"
    );
    assert!(is("root.child", State::Stopped)(&tree));
    assert_eq!(logged(&log_tree, "root"), Vec::<String>::new());
}

#[derive(Debug, thiserror::Error)]
#[error("cannot open the door")]
struct Door(#[source] io::Error);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_told_with_its_sources_and_restarts() {
    let (supervisor, log_tree) = start(options(), |context| async move {
        let error = || Door(io::Error::other("the key is missing"));
        context.run("child", fails_once(error))?;
        works(context).await
    });
    let tree = supervisor.tree();
    until(&tree, is("root.child", State::Healthy)).await;
    let child = find(&tree, "root.child").expect("it is there");
    let why = "cannot open the door: the key is missing";
    assert_eq!(child.last_error.as_deref(), Some(why));
    assert_eq!(child.restarts, 1);
    let log = logged(&log_tree, "root.child");
    assert!(
        log[0] == why && log[1].starts_with("restarts in "),
        "{log:?}"
    );
    supervisor.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panics_are_caught_with_their_place() {
    let (supervisor, log_tree) = start(options(), |context| async move {
        context.run("awaits", |_| async {
            tokio::task::yield_now().await;
            panic!("half way {}", "through");
        })?;
        context.run("calls", |_| -> BoxedOutcome { panic!("at once") })?;
        context.run("drops", |_| async {
            struct Trap;
            impl Drop for Trap {
                fn drop(&mut self) {
                    panic!("in a destructor");
                }
            }
            let _trap = Trap;
            Err(Failure::msg("a plain error"))
        })?;
        context.run("fine", works)?;
        works(context).await
    });
    let tree = supervisor.tree();
    let file = file!().rsplit('/').next().expect("a file");
    for (name, message) in [
        ("root.awaits", "half way through"),
        ("root.calls", "at once"),
        ("root.drops", "in a destructor"),
    ] {
        until(&tree, restarted(name, 2)).await;
        let why = find(&tree, name).and_then(|node| node.last_error);
        let why = why.expect("it failed");
        assert!(
            why.starts_with("panicked at ") && why.ends_with(message),
            "{why}"
        );
        assert!(why.contains(file), "{why}");
        assert!(logged(&log_tree, name).contains(&why));
    }
    let fine = find(&tree, "root.fine").expect("it is there");
    assert_eq!((fine.state, fine.restarts), (State::Healthy, 0));
    supervisor.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_returns_and_wrong_signals_are_failures() {
    let (supervisor, _) = start(options(), |context| async move {
        context.run("early", |_| async { Ok(()) })?;
        context.run("undone", |context| async move {
            context.healthy();
            Ok(())
        })?;
        context.run("twice", |context| async move {
            context.healthy();
            works(context).await
        })?;
        context.run("reversed", |context| async move {
            context.done();
            context.cancelled().await;
            Ok(())
        })?;
        works(context).await
    });
    let tree = supervisor.tree();
    for (name, why) in [
        ("root.early", "returned before signalling healthy"),
        ("root.undone", "returned without signalling done"),
        ("root.twice", "signalled healthy twice"),
        ("root.reversed", "signalled done before healthy"),
    ] {
        until(&tree, restarted(name, 2)).await;
        let error = find(&tree, name).and_then(|node| node.last_error);
        assert_eq!(error.as_deref(), Some(why));
    }
    assert!(is("root", State::Healthy)(&tree));
    assert!(supervisor.shutdown().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_restart_together_after_all_have_ended() {
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (counts, peak) = (running.clone(), most.clone());
    let member = move |fails: bool| {
        let (counts, peak) = (counts.clone(), peak.clone());
        runnable(move |context: Context| {
            let (counts, peak) = (counts.clone(), peak.clone());
            async move {
                peak.fetch_max(counts.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                context.healthy();
                if !fails {
                    context.cancelled().await;
                    // Slow to stop: nothing may start meanwhile.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                counts.fetch_sub(1, Ordering::SeqCst);
                Err(Failure::msg("enough"))
            }
        })
    };
    let (supervisor, _) = start(options(), move |context| {
        let group = vec![
            ("a", member(false)),
            ("b", member(true)),
            ("c", member(false)),
        ];
        async move {
            context.run_group(group)?;
            works(context).await
        }
    });
    let tree = supervisor.tree();
    until(&tree, restarted("root.b", 3)).await;
    until(&tree, restarted("root.a", 3)).await;
    assert!(most.load(Ordering::SeqCst) <= 3, "two runs at a time");
    assert_eq!(find(&tree, "root.a").and_then(|node| node.last_error), None);
    assert!(supervisor.shutdown().await.is_empty());
    assert_eq!(running.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_are_refused_after_healthy_and_from_the_past() {
    let kept: Arc<Mutex<Option<Context>>> = Arc::default();
    let shelf = kept.clone();
    let refused: Arc<Mutex<Vec<SpawnError>>> = Arc::default();
    let errors = refused.clone();
    let (supervisor, _) = start(options(), move |context| {
        let (shelf, errors) = (shelf.clone(), errors.clone());
        async move {
            context.run("child", move |context| {
                let (shelf, errors) = (shelf.clone(), errors.clone());
                async move {
                    let first = shelf.lock().expect("whole").replace(context.clone());
                    if first.is_none() {
                        return Err(Failure::msg("once"));
                    }
                    let old = first.expect("just seen");
                    errors
                        .lock()
                        .expect("whole")
                        .extend(old.run("late", works).err());
                    old.healthy();
                    old.done();
                    context.healthy();
                    errors
                        .lock()
                        .expect("whole")
                        .extend(context.run("late", works).err());
                    context.cancelled().await;
                    Ok(())
                }
            })?;
            works(context).await
        }
    });
    let tree = supervisor.tree();
    let both = |_: &Tree| refused.lock().expect("whole").len() == 2;
    timeout(LONG, async {
        while !both(&tree) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("both are refused");
    let (parent, state): (Arc<str>, _) = ("root.child".into(), State::Healthy);
    let expected = [
        SpawnError::Ended {
            parent: parent.clone(),
        },
        SpawnError::NotStarting { parent, state },
    ];
    assert_eq!(*refused.lock().expect("whole"), expected);
    assert!(is("root.child", State::Healthy)(&tree));
    assert!(find(&tree, "root.child.late").is_none());
    supervisor.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_ignores_cancellation_is_named_abandoned_and_aborted() {
    let (supervisor, log_tree) = start(options(), |context| async move {
        context.run("parent", |context| async move {
            context.run("deaf", |context| async move {
                context.healthy();
                pending().await
            })?;
            context.healthy();
            Err(Failure::msg("down"))
        })?;
        works(context).await
    });
    let tree = supervisor.tree();
    until(&tree, restarted("root.parent", 1)).await;
    until(&tree, |tree| tree.abandoned().iter().any(|a| a.ended)).await;
    assert_eq!(&*tree.abandoned()[0].name, "root.parent.deaf");
    let log = logged(&log_tree, "root.parent.deaf");
    assert!(
        log.iter().any(|line| line.starts_with("still running")),
        "{log:?}"
    );
    assert!(log.iter().any(|line| line.contains("abandoned")), "{log:?}");
    supervisor.shutdown().await;
}

/// The worst moment to block is right after a signal: the task that the signal wakes is then queued
/// behind the one that blocks.
#[test]
fn who_blocks_its_thread_is_named_and_replaced() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(Some(released));
    runtime.block_on(async {
        let (supervisor, log_tree) = start(options(), move |context| {
            let released = released.lock().expect("whole").take();
            let released = Mutex::new(released);
            async move {
                context.run("stuck", move |context| {
                    let released = released.lock().expect("whole").take();
                    async move {
                        if let Some(released) = released {
                            // Called twice: a failure, so the runnable is cancelled.
                            context.healthy();
                            context.healthy();
                            // Ends when the other side is dropped.
                            let _ = released.recv();
                            context.done();
                            return Ok(());
                        }
                        works(context).await
                    }
                })?;
                context.run("other", works)?;
                works(context).await
            }
        });
        let tree = supervisor.tree();
        until(&tree, restarted("root.stuck", 1)).await;
        until(&tree, is("root.stuck", State::Healthy)).await;
        until(&tree, is("root.other", State::Healthy)).await;
        let abandoned = tree.abandoned();
        assert_eq!(
            (&*abandoned[0].name, abandoned[0].ended),
            ("root.stuck", false)
        );
        crate::testing::within_timeout("the log", async {
            let says = |line: &String| line.starts_with("still running");
            while !logged(&log_tree, "root.stuck").iter().any(says) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        drop(release);
        until(&tree, |tree| tree.abandoned()[0].ended).await;
        assert!(
            is("root.stuck", State::Healthy)(&tree),
            "the end of the abandoned run is ignored"
        );
        supervisor.shutdown().await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_root_failing_ends_everything_and_says_why() {
    let (supervisor, log_tree) = start(options(), |context| async move {
        context.run("good", works)?;
        context.run("deaf", |context| async move {
            context.healthy();
            pending().await
        })?;
        context.healthy();
        Err(Failure::msg("no consensus"))
    });
    let options_bound = Options {
        stop_bound: LONG,
        ..options()
    };
    let tree = supervisor.tree();
    let failure = timeout(LONG, supervisor.wait()).await.expect("it ends");
    assert_eq!(
        failure.to_string(),
        "the root runnable failed: no consensus"
    );
    assert!(is("root.good", State::Stopped)(&tree));
    assert_eq!(&*tree.abandoned()[0].name, "root.deaf");
    assert!(!logged(&log_tree, "root.deaf").is_empty());

    let (mut supervisor, log_tree) = start(options_bound, |context| async move {
        context.run("deaf", |_| pending())?;
        panic!("root panics");
    });
    let failure = timeout(LONG, supervisor.failed()).await.expect("it ends");
    assert!(failure.why.ends_with("root panics"), "{failure:?}");
    assert_eq!(failure.stragglers, [Arc::from("root.deaf")]);
    let log = logged(&log_tree, "root.deaf").pop().expect("it is named");
    assert!(log.starts_with("did not stop within 300ms"), "{log}");
    assert_eq!(supervisor.failed().await, failure, "may be asked again");
    assert_eq!(supervisor.shutdown().await, failure.stragglers);
}

#[tokio::test]
async fn shutdown_is_bounded_on_a_single_thread_too() {
    let options = Options {
        stop_bound: LONG,
        ..options()
    };
    let (supervisor, _) = start(options, |context| async move {
        context.run("good", works)?;
        context.run("deaf", |_| pending())?;
        works(context).await
    });
    let tree = supervisor.tree();
    until(&tree, is("root.good", State::Healthy)).await;
    let stragglers = timeout(LONG, supervisor.shutdown()).await.expect("bounded");
    assert_eq!(stragglers, [Arc::from("root.deaf")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_supervisor_aborts_everything() {
    let (gone, mut went) = tokio::sync::mpsc::channel::<()>(1);
    let (supervisor, _) = start(options(), move |context| {
        let gone = gone.clone();
        async move {
            context.run("child", move |_| {
                let gone = gone.clone();
                async move {
                    let _held = gone;
                    pending().await
                }
            })?;
            pending().await
        }
    });
    let tree = supervisor.tree();
    until(&tree, is("root.child", State::Starting)).await;
    drop((supervisor, tree));
    // Closed when every clone, also those in the runnables, is dropped.
    let closed = timeout(LONG, went.recv()).await;
    assert_eq!(closed, Ok(None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_logged_under_the_runnables_name() {
    let (supervisor, log_tree) = start(options(), |context| async move {
        context.run("child", |context| async move {
            tracing::info!(port = 7835, "listens");
            let task = async {
                tokio::task::yield_now().await;
                tracing::info_span!("inner", step = 2).in_scope(|| tracing::warn!("task"));
            };
            let mut tasks = tokio::task::JoinSet::new();
            use tracing::instrument::WithSubscriber;
            tasks.spawn(task.in_current_span().with_current_subscriber());
            tasks.join_all().await;
            works(context).await
        })?;
        tracing::info!("begins");
        works(context).await
    });
    let tree = supervisor.tree();
    until(&tree, is("root.child", State::Healthy)).await;
    until(&tree, is("root", State::Healthy)).await;
    supervisor.shutdown().await;
    assert_eq!(logged(&log_tree, "root"), ["begins"]);
    assert_eq!(
        logged(&log_tree, "root.child"),
        ["listens port=7835", "task"]
    );
}

#[test]
fn failures_print_each_source_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("outer: {0}")]
    struct Quoting(#[source] Door);
    let failure = Failure::from(Quoting(Door(io::Error::other("inner"))));
    assert_eq!(failure.to_string(), "outer: cannot open the door: inner");
    assert!(failure.error().is::<Quoting>());
    assert_eq!(Failure::msg("just words").to_string(), "just words");
    assert_eq!(Failure::boxed("boxed".into()).to_string(), "boxed");
}
