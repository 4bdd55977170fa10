//! The node core from its first instruction to its last: bring-up, the root
//! runnable, and the orderly way down.
//!
//! What happens before the supervisor runs is only what the supervisor itself
//! needs: mounts, the clock's floor, the log. Everything else is a runnable,
//! so that it has a name, a log and a second chance. The root runnable starts
//! them in the order in which they need each other and then only waits; if it
//! errs, the node cannot be what it is meant to be (no ESP, for one), and the
//! machine reboots with the reason on its console.
//!
//! The exit code tells PID 1 what to do: see [`Ending`].

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::chain;
use hearth_api::console::{Milestone, Report};
use hearth_base::event;
use hearth_base::logtree::{self, Entry, LogTree, Severity};
use hearth_base::supervisor::{Context, Failure, Options, Outcome, Supervisor, runnable};
use hearth_enrolment::sealed::SealedStore;
use hearth_host::boot_record::{self, Keeper};
use hearth_host::bundle::Binary;
use hearth_host::cluster_state::{self, ClusterState, NotHome, State};
use hearth_host::console::{report, report_once};
use hearth_host::extensions;
use hearth_host::image::Image;
use hearth_host::layout::{self, Root};
use hearth_host::power::Ending;
use hearth_host::power::{self, Power};
use hearth_host::{esp, parameters};
use hearth_sys::fw_cfg::FwCfg;
use hearth_sys::kmsg::{self, Kmsg};
use hearth_sys::{cgroups, child, files, mount_table, mounts, watchdog};
use nix::sys::signal::SigSet;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::compose;
use crate::network::{self, Network};

/// How long the console may take to print what led to the end.
const FLUSH_BOUND: Duration = Duration::from_secs(5);
/// How long the last write to the ESP may take, and threads that still block
/// on a disk, before the machine goes down without them.
const REST_BOUND: Duration = Duration::from_secs(5);
/// A core that has hung for so long is not coming back.
const WATCHDOG_BOUND: Duration = Duration::from_secs(30);
/// A node that has been home for so long is well.
const WELL_AFTER: Duration = Duration::from_secs(600);
/// For all that runs to end in order when the machine goes down, pods and what
/// watches over them among it.
const SHUTDOWN_BOUND: Duration = Duration::from_secs(25);
/// The control group of the core and its children: the root is for dividing
/// the machine.
const GROUP: &str = "hearth";
/// When processors are busy the node and the cluster's consensus go before
/// Kubernetes' control plane, three to one: a node that misses its heartbeats
/// while an API server starts costs all nodes more than that start is worth.
const NICENESS: i8 = -5;

/// What everything below the root runnable shares.
struct Node {
    image: Image,
    root: Root,
    log_tree: LogTree,
    power: Power,
    record: Mutex<Option<Keeper>>,
    #[cfg(feature = "debug-service")]
    tree: event::Value<hearth_base::supervisor::Tree>,
    #[cfg(feature = "debug-service")]
    provocations: Arc<crate::debug::Provocations>,
}

/// Runs the core; called by PID 1 in a process of its own.
pub fn run() -> ExitCode {
    // A session of its own: what the console's terminal does to the
    // foreground group is none of our business. It fails only for a process
    // that leads a session already.
    if let Err(errno) = nix::unistd::setsid() {
        eprintln!("core: setsid: {errno}");
    }
    // PID 1 waits for its signals blocked, and a mask is inherited: by us, and
    // by every child of ours, which then could not be asked to end.
    if let Err(errno) = SigSet::empty().thread_set_mask() {
        eprintln!("core: unblock signals: {errno}");
    }
    // Before there are threads.
    if let Err(error) = child::nice_this(NICENESS) {
        eprintln!("core: niceness: {error}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(
            std::thread::available_parallelism()
                .map_or(2, usize::from)
                .clamp(2, 8),
        )
        .enable_all()
        .build();
    let ended = match runtime {
        Ok(runtime) => {
            let ended = runtime.block_on(core());
            // Dropped, it would wait for whatever blocks, without a bound.
            runtime.shutdown_timeout(REST_BOUND);
            ended
        }
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(ending) => ExitCode::from(ending.exit_code()),
        Err(error) => {
            eprintln!("core: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Runs until the machine is to go down; an error is what PID 1 reboots for.
async fn core() -> Result<Ending, Error> {
    mounts::bring_up()?;
    let group = cgroups::Group::root().child(GROUP);
    group.make().and_then(|()| group.enter())?;
    let root = Root::system();
    root.ephemeral.make_directories()?;
    link_etc(&root)?;
    let image = Image::of_system()?;
    let log_tree = start_log();
    let console = logtree::console(&log_tree, std::io::stdout(), is_for_console, 0)?;
    boot_record::raise_clock(image.build_time);
    raise_file_limit();
    tracing::info!(version = image.version, variant = image.variant, "Hearth");

    #[cfg(feature = "debug-service")]
    let (tree_writer, tree) = event::value();
    let node = Arc::new(Node {
        image,
        root,
        log_tree,
        power: Power::default(),
        record: Mutex::new(None),
        #[cfg(feature = "debug-service")]
        tree,
        #[cfg(feature = "debug-service")]
        provocations: Arc::default(),
    });
    let root = node.clone();
    let root = runnable(move |ctx| root_runnable(ctx, root.clone()));
    let options = Options {
        shutdown_bound: SHUTDOWN_BOUND,
        ..Options::default()
    };
    let mut supervisor = Supervisor::start(root, options);
    #[cfg(feature = "debug-service")]
    tree_writer.set(supervisor.tree());

    tokio::select! {
        failure = supervisor.failed() => {
            tracing::error!("{failure}");
            console.flush(FLUSH_BOUND);
            Err(failure.into())
        }
        ending = node.power.asked() => {
            supervisor.shutdown().await;
            match tokio::time::timeout(REST_BOUND, node.clone().rest()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!("the boot record: {error}"),
                Err(_) => tracing::warn!("the boot record: the ESP does not answer"),
            }
            go_down(&node.root);
            console.flush(FLUSH_BOUND);
            report(&Report::Down(match ending {
                Ending::PowerOff => "power off".to_owned(),
                Ending::Reboot => "reboot".to_owned(),
            }));
            Ok(ending)
        }
    }
}

/// The files of `/etc` that this boot writes lie in `/ephemeral`.
fn link_etc(root: &Root) -> std::io::Result<()> {
    for (link, target) in layout::etc_links(&root.ephemeral) {
        match std::os::unix::fs::symlink(&target, link) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            linked => linked?,
        }
    }
    Ok(())
}

fn start_log() -> LogTree {
    let log_tree = LogTree::new(logtree::Options::default());
    // The libraries' own events are of use to their developers.
    let ours = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("hearth_", LevelFilter::INFO);
    tracing_subscriber::registry()
        .with(ours)
        .with(log_tree.layer())
        .init();
    logtree::log_panics();
    log_tree
}

/// What the console shows. A serial line is slow: what the kernel and etcd say
/// when all is well is for the log, and of Kubernetes' programs, which warn of
/// much that passes, all but what makes them give up.
fn is_for_console(entry: &Entry) -> bool {
    let program = entry.dn.rsplit('.').next().unwrap_or_default();
    if Binary::ALL.iter().any(|binary| binary.name() == program) {
        return entry.severity > Severity::Warning;
    }
    let talkative = matches!(program, "kernel" | "etcd");
    !talkative || entry.severity > Severity::Info
}

/// etcd and the curator hold a connection for each node and watcher.
fn raise_file_limit() {
    use nix::sys::resource::{Resource, setrlimit};
    const FILES: u64 = 1 << 20;
    if let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES) {
        tracing::warn!(%errno, "the limit of open files stays as it is");
    }
}

/// Everything that writes has stopped: lets go of the disk.
fn go_down(root: &Root) {
    // What ran pods has mounts of its own in there.
    if let Err(error) = mount_table::unmount_inside(root.data.path()) {
        tracing::warn!(%error, "something is still mounted below the data partition");
    }
    for path in [root.data.path(), root.esp.path()] {
        let Err(error) = mounts::unmount(path) else {
            continue;
        };
        // Somebody still uses it: what has been written is written back.
        tracing::warn!(path = %path.display(), %error, "cannot unmount; making it read-only");
        if let Err(error) = mounts::remount_read_only(path) {
            tracing::warn!(path = %path.display(), %error, "cannot make it read-only");
        }
    }
}

/// Starts everything and waits.
async fn root_runnable(ctx: Context, node: Arc<Node>) -> Outcome {
    let log_tree = node.log_tree.clone();
    ctx.run("kernel", move |ctx| log_kernel(ctx, log_tree.clone()))?;
    let power = node.power.clone();
    ctx.run("power", move |ctx| power::run(ctx, power.clone()))?;
    ctx.run("watchdog", |ctx| {
        watchdog::run(ctx, Path::new(watchdog::DEVICE), WATCHDOG_BOUND)
    })?;
    let (cluster_state_writer, cluster_state) = cluster_state::new();
    let state = cluster_state.clone();
    ctx.run("announce", move |ctx| announce(ctx, state.clone()))?;

    esp::mount(&node.root.esp).await?;
    let fw_cfg = FwCfg::default();
    #[cfg(feature = "failpoints")]
    if let Some(name) = hearth_host::failpoint::arm_from_fw_cfg(&fw_cfg, report)? {
        tracing::warn!(name, "test image: a failpoint is armed");
    }
    // The ESP is slow, and may not answer at all.
    let sealed = Arc::new(SealedStore::new(&node.root.esp));
    let (parameters, configuration) = tokio::task::block_in_place(|| {
        keep_record(&ctx, &node, &cluster_state)?;
        let parameters = Arc::new(parameters::load(&fw_cfg, &node.root.esp));
        let configuration = network::configuration(&parameters, &sealed);
        Ok::<_, Failure>((parameters, configuration))
    })?;
    let (address_writer, address) = event::value();
    let network = Arc::new(Network {
        configuration,
        root: node.root.clone(),
        address: Arc::new(address_writer),
    });
    ctx.run("network", move |ctx| network::run(ctx, network.clone()))?;
    let extensions = Arc::new(extensions::mount(&node.root.extensions, report).await);
    let inputs = compose::Inputs {
        root: node.root.clone(),
        image: node.image.clone(),
        log_tree: node.log_tree.clone(),
        power: node.power.clone(),
        parameters,
        sealed,
        extensions,
        address,
        cluster_state: cluster_state_writer,
    };
    let member = compose::start(&ctx, inputs)?;
    #[cfg(feature = "debug-service")]
    start_debug_service(&ctx, &node, cluster_state, member)?;
    #[cfg(not(feature = "debug-service"))]
    drop(member);
    ctx.healthy();
    stay(&ctx, &node).await
}

/// Brings the kernel's log into ours, under the name of this runnable.
async fn log_kernel(ctx: Context, log_tree: LogTree) -> Outcome {
    let mut kernel = Kmsg::open(Path::new(kmsg::DEVICE))?;
    ctx.healthy();
    loop {
        let item = tokio::select! {
            item = kernel.next() => item?,
            () = ctx.cancelled() => return Ok(()),
        };
        match item {
            kmsg::Item::Record(record) => {
                let severity = match record.level {
                    0..=3 => Severity::Error,
                    4 => Severity::Warning,
                    5 | 6 => Severity::Info,
                    _ => continue,
                };
                log_tree.append_raw(ctx.name(), severity, &record.text);
            }
            kmsg::Item::Missed => tracing::warn!("the kernel said more than could be read in time"),
        }
    }
}

#[cfg(feature = "debug-service")]
fn start_debug_service(
    ctx: &Context,
    node: &Arc<Node>,
    cluster_state: ClusterState,
    member: event::Value<hearth_host::handover::MemberData>,
) -> Outcome {
    let debug = Arc::new(crate::debug::Debug {
        tree: node.tree.clone(),
        log_tree: node.log_tree.clone(),
        cluster_state,
        member,
        root: node.root.clone(),
        provocations: node.provocations.clone(),
    });
    ctx.run("debug", move |ctx| crate::debug::run(ctx, debug.clone()))?;
    Ok(())
}

/// What the root runnable does once all others are there.
async fn stay(ctx: &Context, node: &Node) -> Outcome {
    #[cfg(feature = "debug-service")]
    tokio::select! {
        () = node.provocations.root_error.notified() => {
            Err(Failure::msg("a provoked error"))
        }
        () = ctx.cancelled() => Ok(()),
    }
    #[cfg(not(feature = "debug-service"))]
    {
        let _ = node;
        ctx.cancelled().await;
        Ok(())
    }
}

/// Puts every change of the cluster state on the console.
async fn announce(ctx: Context, cluster_state: ClusterState) -> Outcome {
    ctx.healthy();
    let mut states = cluster_state.watch();
    loop {
        let state = tokio::select! {
            state = states.next() => state?,
            () = ctx.cancelled() => return Ok(()),
        };
        report(&Report::State(state.to_string()));
        if state == State::Home {
            report_once(Milestone::Home);
        }
    }
}

/// Counts this boot, tells PID 1 how long to wait should the core die, and
/// lets the record rest once the node is well.
fn keep_record(ctx: &Context, node: &Arc<Node>, cluster_state: &ClusterState) -> Outcome {
    let keeper = match Keeper::begin(&node.root.esp.boot_record()) {
        Ok(keeper) => keeper,
        Err(error) => {
            tracing::warn!("the boot record cannot be kept: {}", chain(&error));
            return Ok(());
        }
    };
    let delay = keeper.reboot_delay().as_secs().to_string();
    files::write_atomic(Path::new(layout::REBOOT_DELAY), delay.as_bytes(), 0o644)?;
    *node.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(keeper);
    let (node, cluster_state) = (node.clone(), cluster_state.clone());
    ctx.run("record", move |ctx| {
        rest_when_well(ctx, node.clone(), cluster_state.clone())
    })?;
    Ok(())
}

async fn rest_when_well(ctx: Context, node: Arc<Node>, cluster_state: ClusterState) -> Outcome {
    ctx.healthy();
    tokio::select! {
        home = cluster_state.get_home() => match home {
            Ok(()) => {}
            // It is well as it is: there is nothing for which to boot it again.
            Err(NotHome::Disowned) => {}
            Err(error) => return Err(error.into()),
        },
        () = ctx.cancelled() => return Ok(()),
    }
    let mut due = tokio::time::interval(WELL_AFTER);
    due.tick().await;
    loop {
        tokio::select! {
            _ = due.tick() => node.clone().rest().await?,
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

impl Node {
    /// The boot record rests: this boot does not count as restless, and the
    /// time is saved.
    async fn rest(self: Arc<Self>) -> Outcome {
        tokio::task::spawn_blocking(move || {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            match record.as_mut() {
                Some(keeper) => keeper.rest(),
                None => Ok(()),
            }
        })
        .await??;
        Ok(())
    }
}
