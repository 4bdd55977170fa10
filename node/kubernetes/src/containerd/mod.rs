//! containerd on this node: configuration, process, shutdown, and the images of the extension.
//!
//! containerd is healthy when its container runtime reports that it is ready, over the socket that
//! the kubelet uses ([`Connection::works`]). If it exits, pods are not affected: the processes that
//! supervise containers (the *shims*) are not its children, and the next containerd finds them.
//!
//! At a shutdown, first its users end ([`ReadLock`]: the kubelet); then all pods are stopped,
//! within [`DRAIN_WITHIN`], because nothing manages them any more; then containerd. Processes that
//! are left after that are killed with their control group by the cleanup.
//!
//! Registries: containerd reads at each pull what the cluster's settings say
//! ([`registries`]), and for other registries `registries/` in the extension, if it
//! has one. The public authorities are those of `authorities.pem` in the extension. A proxy is part of
//! containerd's environment, so when the proxy changes, containerd is restarted, without its pods.

mod archive;
pub(crate) mod config;
mod connection;
mod images;
mod pulls;
mod unpacked;
/// Generated messages and clients of containerd, from `proto/containerd`.
#[allow(unreachable_pub)] // Generated.
mod wire {
    pub(super) mod content {
        tonic::include_proto!("containerd.services.content.v1");
    }
    pub(super) mod images {
        tonic::include_proto!("containerd.services.images.v1");
    }
    pub(super) mod leases {
        tonic::include_proto!("containerd.services.leases.v1");
    }
    pub(super) mod snapshots {
        tonic::include_proto!("containerd.services.snapshots.v1");
    }
    pub(super) mod cri {
        tonic::include_proto!("runtime.v1");
    }
}

use std::sync::Arc;
use std::time::Duration;

use hearth_base::event::{Value, Writer};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Exit, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::layout::Root;
use hearth_sys::{cgroups, files};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::program::{self, LogFormat, Profile, Program, Progress, USERS_WITHIN};
use super::registries::{self, Proxy};
use config::Config;
pub(crate) use connection::Connection;
pub(crate) use pulls::{Pulls, follow};
use unpacked::Unpacked;

/// Control group of containerd and its shims.
pub(crate) const GROUP: &str = "containerd";
/// Time between SIGTERM and SIGKILL of a container.
const CONTAINER_ENDS_WITHIN: Duration = Duration::from_secs(4);
/// Timeout for stopping all pods. Together with the shutdown of the kubelet and of containerd it is
/// below the shutdown timeout of a runnable, and below that of the machine.
const DRAIN_WITHIN: Duration = Duration::from_secs(8);
/// Timeout of the whole shutdown, including the sync of unpacked layers: what the shutdown of the
/// machine leaves for it.
const END_WITHIN: Duration = Duration::from_secs(24);
/// File mode: readable by root only.
const PRIVATE: u32 = 0o600;

const PROFILE: Profile = Profile {
    log_format: LogFormat::Logrus,
    ..Profile::usual(Binary::Containerd)
};

/// Inputs and output of the runnable of containerd.
pub(crate) struct Worker {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// The programs.
    pub bundle: Arc<Bundle>,
    /// Held by the users of containerd.
    pub in_use: ReadLock,
    /// Input: the proxy to registries. It is set when the files for registries have been written.
    pub proxy: Value<Proxy>,
    /// Output: the state of containerd.
    pub progress: Writer<Progress>,
}

/// Runs containerd, and stops it after its users have ended.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Result<Exit, Failure> {
    ctx.ends_within(END_WITHIN);
    let root = &worker.parts.root;
    let connection = Connection::to(&root.ephemeral.containerd_socket());
    let mut proxies = worker.proxy.watch();
    let proxy = tokio::select! {
        proxy = proxies.next() => proxy?,
        () = ctx.cancelled() => return Ok(Exit::Done),
    };
    let program = worker.program(&proxy)?;
    let unpacked = Unpacked::of(root);
    let begun = unpacked.clone();
    worker.parts.machine.take(move || begun.begin()).await??;
    let mut end_by = None;
    let over = async {
        tokio::select! {
            Ok(_) = proxies.wait_for(|now| *now != proxy) => return,
            () = ctx.cancelled() => {}
        }
        end_by = Some(Instant::now() + END_WITHIN);
        worker.in_use.is_over("the kubelet", USERS_WITHIN).await;
        if timeout(DRAIN_WITHIN, drain(&connection)).await.is_err() {
            tracing::warn!("not all pods were stopped within {DRAIN_WITHIN:?}");
        }
    };
    let works = || connection.works();
    let (log, progress) = (&worker.parts.log_tree, &worker.progress);
    program::run_until(&ctx, &program, log, progress, works, over).await?;
    let ended = worker.parts.machine.take(move || unpacked.end());
    let Some(end_by) = end_by else {
        ended.await??;
        return Ok(Exit::restart(
            "restarting containerd: the proxy has changed",
        ));
    };
    match timeout_at(end_by, ended).await {
        Ok(written) => written??,
        Err(_) => tracing::warn!("sync timed out: images will be unpacked again"),
    }
    Ok(Exit::Done)
}

impl Worker {
    /// Writes its configuration and creates its control group.
    fn program(&self, proxy: &Proxy) -> Result<Program, Failure> {
        let root = &self.parts.root;
        let worker = root.ephemeral.kubernetes().worker();
        let settings = registries::host_root(&worker.registries());
        let of_extension = self.bundle.registries();
        let registries: Vec<_> = [settings].into_iter().chain(of_extension).collect();
        cgroups::Group::root().child(GROUP).make()?;
        let config = Config {
            root: &root.data.containerd(),
            state: &root.ephemeral.containerd(),
            socket: &root.ephemeral.containerd_socket(),
            runc: &self.bundle.program(Binary::Runc),
            // Those of the extension first: nothing that is installed replaces them.
            network_plugins: &[
                self.bundle.network_plugins(),
                root.data.kubernetes().network_plugins(),
            ],
            network: &worker.network(),
            registries: &registries,
            group: &format!("/{GROUP}"),
        }
        .to_toml();
        let file = worker.config(Binary::Containerd.name());
        files::write_atomic(&file, config.as_bytes(), PRIVATE)?;
        Ok(command(root, &self.bundle, proxy))
    }
}

/// The command line.
fn command(root: &Root, bundle: &Bundle, proxy: &Proxy) -> Program {
    let name = Binary::Containerd.name();
    let kubernetes = root.ephemeral.kubernetes();
    let config = kubernetes.worker().config(name);
    let mut program = Program::new(bundle, PROFILE, &kubernetes.work(name)).flag("config", config);
    if let Some(authorities) = bundle.authorities() {
        let authorities = ("SSL_CERT_FILE", authorities.into());
        program.environment.push(authorities);
    }
    let proxy = proxy.environment().into_iter();
    let proxy = proxy.map(|(name, value)| (name, value.into()));
    program.environment.extend(proxy);
    program
}

/// Stops all pods, first their containers with a grace period.
async fn drain(connection: &Connection) {
    let mut stops = JoinSet::new();
    match connection.running().await {
        Ok(containers) => {
            for id in containers {
                let connection = connection.clone();
                stops.spawn(
                    async move { connection.stop_container(id, CONTAINER_ENDS_WITHIN).await },
                );
            }
        }
        Err(status) => tracing::warn!("cannot list containers: {}", status.message()),
    }
    told(stops, "a container").await;
    let mut stops = JoinSet::new();
    match connection.ready_pods().await {
        Ok(pods) => {
            for id in pods {
                let connection = connection.clone();
                stops.spawn(async move { connection.stop_pod(id).await });
            }
        }
        Err(status) => tracing::warn!("cannot list pods: {}", status.message()),
    }
    told(stops, "a pod").await;
}

/// Waits for all calls, and logs errors.
async fn told(mut stops: JoinSet<Result<(), tonic::Status>>, what: &str) {
    while let Some(stopped) = stops.join_next().await {
        if let Ok(Err(status)) = stopped {
            tracing::warn!("cannot stop {what}: {}", status.message());
        }
    }
}

/// Inputs and output of the runnable that imports images.
pub(crate) struct Importer {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// The bundle with the images.
    pub bundle: Arc<Bundle>,
    /// Input: the state of containerd; the import starts when it is ready.
    pub containerd: Value<Progress>,
    /// Output: whether the images have been imported.
    pub imported: Writer<Imported>,
}

/// `Ok` when all images have been imported, or the reason why not, for operators.
pub(crate) type Imported = Result<(), String>;

/// Deletes unpacked layers that may be incomplete, imports missing images, and ends.
pub(crate) async fn import(ctx: Context, importer: Arc<Importer>) -> Outcome {
    let work = async {
        let mut containerd = importer.containerd.watch();
        let serves = |progress: &Progress| *progress == Progress::Serving;
        containerd.wait_for(serves).await?;
        let socket = importer.parts.root.ephemeral.containerd_socket();
        let connection = Connection::to(&socket);
        let unpacked = Unpacked::of(&importer.parts.root);
        if !unpacked.is_believed() {
            let forgotten = unpacked::forget(&connection).await?;
            if forgotten > 0 {
                tracing::info!(
                    forgotten,
                    "deleted snapshots that may be incomplete on the disk"
                );
            }
            unpacked.believe()?;
        }
        for archive in importer.bundle.images()? {
            for name in images::import(&connection, &archive).await? {
                tracing::info!(name, "imported image of the extension");
            }
        }
        Ok::<_, Failure>(())
    };
    let outcome = tokio::select! {
        outcome = work => outcome,
        () = ctx.cancelled() => return Ok(()),
    };
    let told = outcome.as_ref().map_err(Failure::to_string);
    importer.imported.set(told.copied());
    outcome?;
    ctx.healthy();
    ctx.done();
    Ok(())
}

#[cfg(test)]
mod tests;
