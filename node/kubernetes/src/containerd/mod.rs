//! containerd on this node: its configuration, its process, its end, and the
//! images that the extension brings.
//!
//! containerd is well when the container runtime in it says so over the same
//! socket that the kubelet uses ([`Connection::works`]). Its own death harms
//! no pod: the processes that watch over containers (the *shims*) are not its
//! children, and the next containerd finds them again.
//!
//! The end is another matter. Whoever runs pods by it ([`InUse`]) ends first;
//! then the pods are stopped, in order and for no longer than [`DRAIN_WITHIN`],
//! because nobody watches over them any more; then containerd. What is left
//! after that is killed with its control group by whoever clears up.
//!
//! Registries: where the extension has `registries/`, containerd reads from
//! there how each is reached, and from `authorities.pem` who vouches for them.

mod archive;
pub(crate) mod config;
mod connection;
mod images;
mod unpacked;
/// What is sent to containerd and comes back, from `proto/containerd`.
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
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::layout::Root;
use hearth_sys::{cgroups, files};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::program::{self, Dialect, InUse, Profile, Program, Progress};

use config::Config;
pub(crate) use connection::Connection;
use unpacked::Unpacked;

/// containerd's control group, with the shims.
pub(crate) const GROUP: &str = "containerd";
/// What a container is given to end by itself.
const CONTAINER_ENDS_WITHIN: Duration = Duration::from_secs(4);
/// For all pods to be stopped. With what the kubelet and containerd itself take
/// to end it stays below the bound after which a runnable is given up, and that
/// of the machine's way down.
const DRAIN_WITHIN: Duration = Duration::from_secs(8);
/// For the whole end, with what it has unpacked being written: as long as the
/// machine's way down leaves for it.
const END_WITHIN: Duration = Duration::from_secs(24);
/// Only root of this machine.
const PRIVATE: u32 = 0o600;

const PROFILE: Profile = Profile {
    dialect: Dialect::Logrus,
    ..Profile::usual(Binary::Containerd)
};

/// What runs containerd.
pub(crate) struct Worker {
    /// What all of Kubernetes on this node has.
    pub parts: Arc<crate::Worker>,
    /// The programs.
    pub bundle: Arc<Bundle>,
    /// Who uses it.
    pub in_use: InUse,
    /// Will be written: how containerd fares.
    pub progress: Writer<Progress>,
}

/// Runs containerd, and ends it when its users have ended.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.ends_within(END_WITHIN);
    let root = &worker.parts.root;
    let connection = Connection::to(&root.ephemeral.containerd_socket());
    let program = worker.program()?;
    let unpacked = Unpacked::of(root);
    let begun = unpacked.clone();
    worker.parts.machine.take(move || begun.begin()).await??;
    let mut end_by = None;
    let over = async {
        ctx.cancelled().await;
        end_by = Some(Instant::now() + END_WITHIN);
        worker.in_use.is_over("the kubelet").await;
        if timeout(DRAIN_WITHIN, drain(&connection)).await.is_err() {
            tracing::warn!("not all pods have ended within {DRAIN_WITHIN:?}");
        }
    };
    let works = || connection.works();
    let (log, progress) = (&worker.parts.log_tree, &worker.progress);
    program::run_until(&ctx, &program, log, progress, works, over).await?;
    let ended = worker.parts.machine.take(move || unpacked.end());
    match timeout_at(end_by.unwrap_or_else(Instant::now), ended).await {
        Ok(written) => written??,
        Err(_) => tracing::warn!("not all is on the disk in time: it will be unpacked again"),
    }
    Ok(())
}

impl Worker {
    /// Writes its configuration and makes what it wants to find.
    fn program(&self) -> Result<Program, Failure> {
        let root = &self.parts.root;
        let worker = root.ephemeral.kubernetes().worker();
        cgroups::Group::root().child(GROUP).make()?;
        let config = Config {
            root: &root.data.containerd(),
            state: &root.ephemeral.containerd(),
            socket: &root.ephemeral.containerd_socket(),
            runc: &self.bundle.program(Binary::Runc),
            network_plugins: &self.bundle.network_plugins(),
            network: &worker.network(),
            registries: self.bundle.registries().as_deref(),
            group: &format!("/{GROUP}"),
        }
        .to_toml();
        let file = worker.config(Binary::Containerd.name());
        files::write_atomic(&file, config.as_bytes(), PRIVATE)?;
        Ok(command(root, &self.bundle))
    }
}

/// How it is started.
fn command(root: &Root, bundle: &Bundle) -> Program {
    let name = Binary::Containerd.name();
    let kubernetes = root.ephemeral.kubernetes();
    let config = kubernetes.worker().config(name);
    let mut program = Program::new(bundle, PROFILE, &kubernetes.work(name)).flag("config", config);
    if let Some(authorities) = bundle.authorities() {
        let authorities = ("SSL_CERT_FILE", authorities.into());
        program.environment.push(authorities);
    }
    program
}

/// Stops all pods: their containers first, which are given time to end.
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
        Err(status) => tracing::warn!("which containers run: {}", status.message()),
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
        Err(status) => tracing::warn!("which pods are there: {}", status.message()),
    }
    told(stops, "a pod").await;
}

/// Waits for all of them, and tells what went wrong.
async fn told(mut stops: JoinSet<Result<(), tonic::Status>>, what: &str) {
    while let Some(stopped) = stops.join_next().await {
        if let Ok(Err(status)) = stopped {
            tracing::warn!("{what} was not stopped: {}", status.message());
        }
    }
}

/// What imports the extension's images.
pub(crate) struct Importer {
    /// What all of Kubernetes on this node has.
    pub parts: Arc<crate::Worker>,
    /// The images are in it.
    pub bundle: Arc<Bundle>,
    /// Will be read: once containerd serves, there is something to import to.
    pub containerd: Value<Progress>,
    /// Will be written: whether the images are there.
    pub imported: Writer<Imported>,
}

/// All that can be imported is, or why it is not yet, for an operator.
pub(crate) type Imported = Result<(), String>;

/// Has what cannot be believed forgotten, imports what is not there yet, and
/// ends.
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
                    "what was unpacked may not be on the disk: it is unpacked again"
                );
            }
            unpacked.believe()?;
        }
        for archive in importer.bundle.images()? {
            for name in images::import(&connection, &archive).await? {
                tracing::info!(name, "an image of the extension is imported");
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
