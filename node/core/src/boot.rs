//! The node core from start to exit: bring-up, the root runnable and the orderly shutdown.
//!
//! Only what the supervisor itself needs happens before the supervisor runs: mounts, the lower
//! bound of the clock, the log. Everything else is a runnable, so that it has a name, a log and
//! restarts. The root runnable starts the others in dependency order and then only waits. If it
//! fails, the node cannot operate (it has no ESP, for example), and the machine reboots with the
//! reason on its console.
//!
//! The exit code tells PID 1 what to do: see [`PowerRequest`].

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::chain;
use hearth_api::console::{Milestone, Report};
use hearth_base::event;
use hearth_base::logtree::{self, Entry, LogTree, Severity};
use hearth_base::supervisor::{
    Context, Failure, Options, Outcome, Supervisor, runnable, spawn_blocking,
};
use hearth_enrolment::sealed::{SealedStore, Sealer, Stored};
use hearth_host::boot_record::{BootCounter, NotWritten};
use hearth_host::bundle::Binary;
use hearth_host::clock::BootClock;
use hearth_host::cluster_state::{self, ClusterState, NotHome, State};
use hearth_host::console::{report, report_once};
use hearth_host::handover::TimeStatus;
use hearth_host::image::Image;
use hearth_host::layout::{self, Esp, Root};
use hearth_host::network_setting::NetworkSettingStore;
use hearth_host::parameters::cloud::{self, Cloud};
use hearth_host::parameters::{Loaded, Sources};
use hearth_host::power::{self, Power, PowerRequest};
use hearth_host::prover::Prover;
use hearth_host::{esp, extensions, network_control};
use hearth_installer::Installer;
use hearth_kubernetes::AUDIT_LOG;
use hearth_sys::kmsg::{self, Kmsg};
use hearth_sys::{cgroups, child, files, memory, mount_table, mounts, rcu, sysctl, tpm, watchdog};
use nix::sys::signal::SigSet;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::compose;
use crate::network::{self, Network};

/// How long the console may take to print the last log lines before shutdown.
const FLUSH_BOUND: Duration = Duration::from_secs(5);
/// How long shutdown waits for the last write to the ESP, and for threads that are blocked on a
/// disk. After that the machine goes down regardless.
const REST_BOUND: Duration = Duration::from_secs(5);
/// The watchdog resets the machine when the core has been unresponsive for this long.
const WATCHDOG_BOUND: Duration = Duration::from_secs(30);
/// A node that has been HOME for this long is stable: the count of failed boots is reset.
const WELL_AFTER: Duration = Duration::from_secs(600);
/// How long all runnables together may take to stop at shutdown, including pods and the programs
/// that manage them.
const SHUTDOWN_BOUND: Duration = Duration::from_secs(25);
/// When memory runs out, pods lose theirs before the core, etcd and the programs of Kubernetes, which
/// inherit this: a pod's score is -997 or more.
const OOM_SCORE: i16 = -998;
/// When the CPUs are busy, the node and etcd get three times the CPU share of the Kubernetes
/// control plane. A node that misses heartbeats while an API server starts costs the cluster more
/// than a slower start does.
const NICENESS: i8 = -5;
/// The registers of the TPM that say what was booted: the programs that the firmware loaded, its
/// Secure Boot keys, the image, and the command line.
const SHOWN_PCRS: [u8; 4] = [4, 7, 11, 12];

/// State shared by the runnables below the root.
struct Node {
    image: Image,
    root: Root,
    log_tree: LogTree,
    power: Power,
    clock: BootClock,
    record: Mutex<Option<BootCounter>>,
    #[cfg(feature = "debug-service")]
    tree: event::Value<hearth_base::supervisor::Tree>,
    #[cfg(feature = "debug-service")]
    injected_faults: Arc<crate::debug::InjectedFaults>,
}

/// Runs the core. PID 1 starts it as a separate process.
pub fn run() -> ExitCode {
    // A separate session, so that signals of the console's terminal to its foreground group do not
    // reach the core. It fails only for a process that already leads a session.
    if let Err(errno) = nix::unistd::setsid() {
        eprintln!("core: cannot create a session: {errno}");
    }
    // PID 1 blocks its signals to wait for them, and the mask is inherited by the core and by
    // every child of the core; such a child would not receive SIGTERM.
    if let Err(errno) = SigSet::empty().thread_set_mask() {
        eprintln!("core: cannot unblock signals: {errno}");
    }
    // Niceness is per thread: set it before the runtime starts threads.
    if let Err(error) = child::nice_this(NICENESS) {
        eprintln!("core: cannot set niceness: {error}");
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
            // Dropping the runtime would wait for blocked threads without a bound.
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

/// Runs until a shutdown or reboot is requested. On an error PID 1 reboots the machine.
async fn core() -> Result<PowerRequest, Error> {
    mounts::bring_up()?;
    let expedited = rcu::expedite(true);
    // Aside, because the kernel takes as long for it as for all that follows until the supervisor runs.
    let grouped = spawn_blocking(|| {
        let group = cgroups::Group::root().child(layout::NODE_GROUP);
        group.make().and_then(|()| group.enter())
    });
    let root = Root::system();
    root.ephemeral.make_directories()?;
    write_etc()?;
    link_etc(&root)?;
    let image = Image::of_system()?;
    let log_tree = start_log();
    let console = logtree::console(&log_tree, std::io::stdout(), is_for_console, 0)?;
    let clock = BootClock::begin(image.build_time);
    raise_file_limit();
    if let Err(error) = memory::set_oom_score(OOM_SCORE) {
        tracing::warn!(%error, "cannot protect the node from running out of memory first");
    }
    tracing::info!(version = image.version, variant = image.variant, "Hearth");
    warn_of(expedited);
    if let Err(error) = sysctl::set(sysctl::MAX_USER_NAMESPACES, "0") {
        tracing::warn!("{}", chain(&error));
    }

    // Before there are other processes: they inherit the group.
    grouped.await??;

    #[cfg(feature = "debug-service")]
    let (tree_writer, tree) = event::value();
    let node = Arc::new(Node {
        image,
        root,
        log_tree,
        power: Power::default(),
        clock,
        record: Mutex::new(None),
        #[cfg(feature = "debug-service")]
        tree,
        #[cfg(feature = "debug-service")]
        injected_faults: Arc::default(),
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
                Ok(Err(error)) => tracing::warn!("{error}"),
                Err(_) => tracing::warn!("cannot write the boot record: the ESP does not respond"),
            }
            go_down(&node.root);
            console.flush(FLUSH_BOUND);
            report(&Report::Down(match ending {
                PowerRequest::PowerOff => "power off".to_owned(),
                PowerRequest::Reboot => "reboot".to_owned(),
            }));
            Ok(ending)
        }
    }
}

/// Writes the files of `/etc` that never change.
fn write_etc() -> Result<(), files::FileError> {
    for (path, content) in layout::ETC_FILES {
        files::write_atomic(Path::new(path), content.as_bytes(), 0o644)?;
    }
    Ok(())
}

/// Links the files of `/etc` that change at run time to their targets in `/ephemeral`.
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
    // Info events of libraries are useful only to their developers.
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

/// Whether the console shows an entry. A serial line is slow: info messages of the kernel and of
/// etcd, and the audit log, go to the log only. Kubernetes' programs warn of many transient conditions, so the console
/// shows only their errors.
fn is_for_console(entry: &Entry) -> bool {
    let program = entry.dn.rsplit('.').next().unwrap_or_default();
    if Binary::ALL.iter().any(|binary| binary.name() == program) {
        return entry.severity > Severity::Warning;
    }
    let talkative = matches!(program, "kernel" | "etcd" | AUDIT_LOG);
    !talkative || entry.severity > Severity::Info
}

/// Raises the limit of open files: etcd and the curator hold a connection per node and per watcher.
fn raise_file_limit() {
    use nix::sys::resource::{Resource, setrlimit};
    const FILES: u64 = 1 << 20;
    if let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES) {
        tracing::warn!(%errno, "cannot raise the limit of open files");
    }
}

/// Unmounts the data partition and the ESP. Everything that writes to them has stopped.
fn go_down(root: &Root) {
    // The container runtime and the kubelet leave mounts below the data partition, and below the part of it that is
    // mounted elsewhere.
    for path in [root.kubelet.as_path(), root.data.path()] {
        if let Err(error) = mount_table::unmount_inside(path) {
            tracing::warn!(path = %path.display(), %error, "cannot unmount everything below");
        }
    }
    for path in [root.kubelet.as_path(), root.data.path(), root.esp.path()] {
        let Err(error) = mounts::unmount(path) else {
            continue;
        };
        // The file system is still in use: a read-only remount writes back what is dirty.
        tracing::warn!(path = %path.display(), %error, "cannot unmount; remounting read-only");
        if let Err(error) = mounts::remount_read_only(path) {
            tracing::warn!(path = %path.display(), %error, "cannot remount read-only");
        }
    }
}

/// Starts all other runnables in dependency order, then waits for shutdown.
async fn root_runnable(ctx: Context, node: Arc<Node>) -> Outcome {
    let log_tree = node.log_tree.clone();
    ctx.run("kernel", move |ctx| log_kernel(ctx, log_tree.clone()))?;
    let power = node.power.clone();
    ctx.run("power", move |ctx| power::run(ctx, power.clone()))?;
    ctx.run("watchdog", |ctx| {
        watchdog::run(ctx, Path::new(watchdog::DEVICE), WATCHDOG_BOUND)
    })?;
    ctx.run("tpm", log_tpm)?;
    if hearth_installer::is_booted()? {
        return install(&ctx, &node).await;
    }
    let (cluster_state_writer, cluster_state) = cluster_state::new();
    let state = cluster_state.clone();
    ctx.run("announce", move |ctx| announce(ctx, state.clone()))?;

    let (address_writer, address) = event::value();
    let (second_address_writer, second_address) = event::value();
    let (mtu_writer, mtu) = event::value();
    let (dhcp_time_servers_writer, dhcp_time_servers) = event::value();
    let (network_problems_writer, network_problems) = event::value();
    let settings = event::value().0;
    let (time_writer, time) = event::value();
    let (network_control, calls) = network_control::new();
    let network_configuration = event::value().0;
    let (network_followed_writer, network_followed) = event::value();
    let network = Arc::new(Network {
        network_configuration: network_configuration.value(),
        network_followed: network_followed_writer,
        root: node.root.clone(),
        settings: settings.value(),
        address: Arc::new(address_writer),
        second_address: Arc::new(second_address_writer),
        mtu: Arc::new(mtu_writer),
        network_problems: Arc::new(network_problems_writer),
        dhcp_time_servers: Arc::new(dhcp_time_servers_writer),
    });
    // Enrolment will wait for an address, so it begins before the disk is found; its configuration follows.
    ctx.run("network", move |ctx| network::run(ctx, network.clone()))?;

    let boot_disk = esp::mount(&node.root.esp).await?.disk;
    let sources = Sources::of_machine(&node.root, &boot_disk.name);
    #[cfg(feature = "failpoints")]
    if let Some(name) = hearth_host::failpoint::arm_from_fw_cfg(&sources.fw_cfg, report)? {
        tracing::warn!(name, "test image: failpoint armed");
    }
    // The ESP is slow, and may not respond at all.
    let (sealed, parameters, cloud, given_network) = tokio::task::block_in_place(|| {
        let sealed = Arc::new(SealedStore::new(&node.root.esp, sealer(&node.root)));
        let (parameters, cloud) = local_parameters(&sources, &sealed);
        let given_network = network::of_parameters(&parameters, &sealed);
        (sealed, parameters, cloud, given_network)
    });
    let control = Arc::new(network::control::Control {
        parameters: given_network,
        store: NetworkSettingStore::new(&node.root.esp),
        calls,
        network_configuration,
        network_followed,
        address: address.clone(),
        network_problems: network_problems.clone(),
    });
    ctx.run("netcontrol", move |ctx| {
        network::control::run(ctx, control.clone())
    })?;
    let boot_record = tokio::task::block_in_place(|| {
        make_directories(&node.root.esp);
        keep_record(&ctx, &node, &cluster_state, &time)
    })?;
    let extensions = Arc::new(extensions::mount(&boot_disk, &node.root.extensions, report).await);
    // Until they are known, nothing that follows has anything to do.
    let parameters = match cloud {
        Some(asked) => tokio::select! {
            loaded = cloud::load(asked, &address, report) => loaded?,
            () = ctx.cancelled() => return Ok(()),
        },
        None => parameters,
    };
    let inputs = compose::Inputs {
        root: node.root.clone(),
        image: node.image.clone(),
        boot_disk,
        log_tree: node.log_tree.clone(),
        power: node.power.clone(),
        parameters: Arc::new(parameters),
        sealed,
        prover: prover(),
        extensions,
        address,
        second_address,
        mtu,
        network_problems,
        network_control,
        dhcp_time_servers,
        settings,
        boot_record,
        time: time_writer,
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

/// Installs a node, in the place of being one, and then waits for the reboot.
async fn install(ctx: &Context, node: &Node) -> Outcome {
    let installer = Arc::new(Installer {
        root: node.root.clone(),
        power: node.power.clone(),
    });
    ctx.run("installer", move |ctx| {
        hearth_installer::run(ctx, installer.clone())
    })?;
    ctx.healthy();
    stay(ctx, node).await
}

/// The parameters that this machine has itself, and, if it has none and needs them because it is new,
/// the cloud whose metadata service is to be asked.
fn local_parameters(sources: &Sources, sealed: &SealedStore) -> (Loaded, Option<Cloud>) {
    let loaded = sources.load();
    // One that does not open is one, too: its owner can open it.
    let is_new = || matches!(sealed.load(), Ok(Stored::Absent | Stored::NeverCompleted));
    if !matches!(loaded, Ok(None)) || !is_new() {
        return (loaded, None);
    }
    match Cloud::of(&sources.smbios) {
        Ok(Some(cloud)) => (loaded, Some(cloud)),
        Ok(None) => (sources.load_when_detected(), None),
        Err(error) => {
            tracing::warn!(
                "cannot tell whether this is a machine of a cloud: {}",
                chain(&error)
            );
            (sources.load_when_detected(), None)
        }
    }
}

/// The directory is missing only on the first boot. Code that saves a file reports an error where it matters.
fn make_directories(esp: &Esp) {
    if let Err(error) = esp.make_directories() {
        tracing::warn!("{}", chain(&error));
    }
}

/// Logs which TPM the machine has, and what was measured into it. Nothing waits for it: a TPM may be
/// slow, or not respond.
async fn log_tpm(ctx: Context) -> Outcome {
    let read = || tpm::read(Path::new("/sys"), &SHOWN_PCRS);
    match spawn_blocking(read).await? {
        Ok(Some(tpm)) => tracing::info!("TPM {tpm}"),
        Ok(None) => tracing::debug!("no TPM found"),
        Err(error) => tracing::warn!("cannot read the TPM: {}", chain(&error)),
    }
    ctx.healthy();
    ctx.done();
    Ok(())
}

/// Proves what was booted, by the machine's TPM.
fn prover() -> Option<Arc<Prover>> {
    match Prover::of_machine() {
        Ok(prover) => prover.map(Arc::new),
        Err(error) => {
            tracing::warn!("cannot prove what was booted: {}", chain(&error));
            None
        }
    }
}

/// The machine's TPM, if it has one that can seal the node's keys.
fn sealer(root: &Root) -> Option<Arc<Sealer>> {
    match Sealer::of_machine(&root.loader) {
        Ok(sealer) => sealer.map(Arc::new),
        Err(error) => {
            tracing::warn!("the TPM is not used: {}", chain(&error));
            None
        }
    }
}

/// Copies the kernel's log into the log tree, under the name of this runnable.
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
            kmsg::Item::Missed => tracing::warn!("kernel log records were lost before being read"),
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
        injected_faults: node.injected_faults.clone(),
    });
    ctx.run("debug", move |ctx| crate::debug::run(ctx, debug.clone()))?;
    Ok(())
}

/// Waits for shutdown, or for an injected failure in debug images.
async fn stay(ctx: &Context, node: &Node) -> Outcome {
    #[cfg(feature = "debug-service")]
    tokio::select! {
        () = node.injected_faults.root_error.notified() => {
            Err(Failure::msg("injected error"))
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

/// Reports every change of the cluster state on the console.
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
            warn_of(rcu::expedite(false));
        }
    }
}

fn warn_of(expedited: std::io::Result<()>) {
    if let Err(error) = expedited {
        tracing::warn!(%error, "cannot change how the kernel waits for its CPUs");
    }
}

/// Counts this boot, tells PID 1 how long to wait before a reboot should the core fail, and starts
/// the runnables that write the count, reset it once the node is stable, and save the time after the
/// clock was set. Returns how the last write of the boot record ended; nothing if it cannot be kept.
fn keep_record(
    ctx: &Context,
    node: &Arc<Node>,
    cluster_state: &ClusterState,
    time: &event::Value<TimeStatus>,
) -> Result<Option<event::Value<Option<String>>>, Failure> {
    let keeper = match BootCounter::begin(&node.root.esp.boot_record(), node.clock) {
        Ok(keeper) => keeper,
        Err(error) => {
            tracing::warn!("cannot update boot record: {}", chain(&error));
            return Ok(None);
        }
    };
    let last_write = keeper.last_write().value();
    let delay = keeper.reboot_delay().as_secs().to_string();
    files::write_atomic(Path::new(layout::REBOOT_DELAY), delay.as_bytes(), 0o644)?;
    *node.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(keeper);
    let (clocked, time) = (node.clone(), time.clone());
    ctx.run("savetime", move |ctx| {
        save_when_set(ctx, clocked.clone(), time.clone())
    })?;
    let (node, cluster_state) = (node.clone(), cluster_state.clone());
    ctx.run("record", move |ctx| {
        rest_when_well(ctx, node.clone(), cluster_state.clone())
    })?;
    Ok(Some(last_write))
}

/// Saves the time whenever the time service has set the clock: otherwise the next boot would find
/// the time that was saved with the wrong clock.
async fn save_when_set(ctx: Context, node: Arc<Node>, time: event::Value<TimeStatus>) -> Outcome {
    ctx.healthy();
    let mut times = time.watch();
    let mut saved = 0;
    loop {
        let status = tokio::select! {
            status = times.wait_for(|status| status.steps != saved) => status?,
            () = ctx.cancelled() => return Ok(()),
        };
        saved = status.steps;
        node.clone().record(BootCounter::save).await?;
    }
}

/// Writes that this boot was counted, resets the count once the node has been HOME for [`WELL_AFTER`], and then saves
/// the time at the same interval. A write that failed is repeated until it succeeds.
async fn rest_when_well(ctx: Context, node: Arc<Node>, cluster_state: ClusterState) -> Outcome {
    node.clone().record(BootCounter::save).await?;
    ctx.healthy();
    tokio::select! {
        home = cluster_state.get_home() => match home {
            Ok(()) => {}
            // A disowned node has nothing left to do, so a reboot would not help it.
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
    /// Resets the count of failed boots in the boot record and saves the current time.
    async fn rest(self: Arc<Self>) -> Outcome {
        self.record(BootCounter::rest).await
    }

    /// Changes the boot record, if there is one.
    async fn record(
        self: Arc<Self>,
        change: fn(&mut BootCounter) -> Result<(), NotWritten>,
    ) -> Outcome {
        spawn_blocking(move || {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            match record.as_mut() {
                Some(keeper) => change(keeper),
                None => Ok(()),
            }
        })
        .await??;
        Ok(())
    }
}
