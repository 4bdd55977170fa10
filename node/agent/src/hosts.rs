//! Names: the host name, `/etc/hosts`, and the cluster directory on the ESP.
//!
//! Once the node knows its identity, it has a host name, a machine-id and a hosts file made from
//! the directory on the ESP: etcd reaches its peers by their node IDs, and these have to resolve
//! before any curator can be asked. Later, more recent addresses replace those (see [`known`]). The
//! directory of the consensus members is updated as well: in memory for this node's own client, and
//! on the ESP for the next boot.
//!
//! The ESP is slow and wears out. So it is written only if its content differs, and not more often
//! than [`REST`]; of several changes in between only the last one is written. An empty directory,
//! which would leave no curator to ask, is never written.
//!
//! Three runnables that fail independently: `nodes` follows the curators, `names` writes the hosts
//! file, `directory` writes the ESP.
//!
//! [`known`]: super::known

use std::fs;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::v1::{ClusterDirectory, WatchRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome, spawn_blocking};
use hearth_host::directory::DirectoryStore;
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_sys::files;
use hearth_sys::hostname::HostnameError;

use super::known::{PeerResolver, PeerWatcher, View};
use super::learned::PeerAddresses;
use super::names;
use crate::connection::{self, CuratorConnection, for_each_connection, next_event, refused};

/// Default of [`Worker::rest`].
pub const REST: Duration = Duration::from_secs(5);
const PUBLIC: u32 = 0o644;

/// Follows the other nodes, and saves their addresses.
pub struct Worker {
    /// Has `/etc/hosts`.
    pub root: Root,
    /// Sets the machine's host name.
    pub set_hostname: fn(&str) -> Result<(), HostnameError>,
    /// Minimum interval between two writes to the ESP.
    pub rest: Duration,
    /// Timeout of a watch without events, after which another curator is used.
    pub silence: Duration,
    /// The directory on the ESP.
    pub saved_directory: Arc<DirectoryStore>,
    /// Read: this node's identity and saved directory.
    pub member: Value<MemberData>,
    /// Read: the connection to the curators.
    pub connection: Value<CuratorConnection>,
    /// Read: this node's address.
    pub address: Value<IpAddr>,
    /// Read: the signed addresses of other nodes.
    pub learned: Value<PeerAddresses>,
    /// Written: all nodes, once a curator's listing is complete.
    pub view: Writer<Arc<View>>,
    /// Written: the known consensus members, never empty.
    pub directory: Writer<ClusterDirectory>,
    /// Written: this node's address, once the current directory is saved on the ESP (it includes
    /// this address if the node is a consensus member).
    pub directory_saved: Writer<IpAddr>,
}

/// The directory to save on the ESP.
#[derive(Clone)]
struct Wanted {
    directory: ClusterDirectory,
    /// The address to publish once it is saved.
    reportable: Option<IpAddr>,
}

/// Publishes the view of the nodes, and writes the hosts file and the directory.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    name_machine(&worker, member.own.node())?;
    let (wanted_writer, wanted) = event::value();
    let (wanted_writer, member) = (Arc::new(wanted_writer), Arc::new(member));
    let all = worker.clone();
    ctx.run("names", move |ctx| {
        keep_names(ctx, all.clone(), member.clone(), wanted_writer.clone())
    })?;
    let all = worker.clone();
    ctx.run("nodes", move |ctx| follow_nodes(ctx, all.clone()))?;
    ctx.run("directory", move |ctx| {
        keep_directory(ctx, worker.clone(), wanted.clone())
    })?;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}

/// Sets the host name and writes the machine-id.
fn name_machine(worker: &Worker, node_id: NodeId) -> Outcome {
    (worker.set_hostname)(&node_id.to_string())?;
    let machine_id = format!("{}\n", node_id.bare());
    let path = worker.root.ephemeral.machine_id();
    files::write_atomic(&path, machine_id.as_bytes(), PUBLIC)?;
    Ok(())
}

async fn follow_nodes(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.restart_within(Some(connection::MAX_RETRY_DELAY));
    let health = Health::of(&ctx);
    let follow = |connection| follow(&health, &worker, connection);
    ctx.until_cancelled(for_each_connection(&worker.connection, follow))
        .await
}

/// Follows the curators' nodes. A listing is published only once it is complete: older data are
/// better than an incomplete list. Only returns errors.
async fn follow(health: &Health<'_>, worker: &Worker, connection: CuratorConnection) -> Outcome {
    let domain = connection.cluster_domain().await?;
    let mut curator = connection.curator();
    let events = curator.watch(WatchRequest::default()).await;
    let mut events = events.map_err(refused)?.into_inner();
    let mut view = View {
        domain,
        ..View::default()
    };
    let mut complete = false;
    loop {
        let event = next_event(&connection, &mut events, worker.silence).await?;
        let news = !(event.nodes.is_empty() && event.tombstones.is_empty());
        view.apply(&event.nodes, &event.tombstones);
        let completes = event.backlog_complete && !complete;
        complete |= completes;
        if complete {
            health.good();
        }
        // Progress events without changes are frequent.
        if completes || complete && news {
            worker.view.set(Arc::new(view.clone()));
        }
    }
}

/// Writes the hosts file, and publishes the directory.
async fn keep_names(
    ctx: Context,
    worker: Arc<Worker>,
    member: Arc<MemberData>,
    wanted: Arc<Writer<Wanted>>,
) -> Outcome {
    ctx.until_cancelled(follow_names(&ctx, &worker, &member, &wanted))
        .await
}

async fn follow_names(
    ctx: &Context,
    worker: &Worker,
    member: &MemberData,
    wanted: &Writer<Wanted>,
) -> Outcome {
    let view = worker.view.value();
    let mut peers = PeerWatcher::new(member, &view, &worker.learned, &worker.address);
    let health = Health::of(ctx);
    let mut written = String::new();
    loop {
        write_hosts(&worker.root, peers.known(), &mut written)?;
        tell_directory(worker, peers.known(), wanted);
        health.good();
        peers.changed().await?;
    }
}

fn write_hosts(root: &Root, known: &PeerResolver, written: &mut String) -> Outcome {
    let path = root.ephemeral.hosts();
    let domain = known.view.as_ref().map(|view| view.domain.as_str());
    let text = names::hosts(&known.addresses(), domain);
    if *written == text {
        return Ok(());
    }
    files::write_atomic(&path, text.as_bytes(), PUBLIC)?;
    // Verifies that readers of the file get the address.
    if let Some(address) = known.own_address {
        let own = known.own.to_string();
        let found = names::resolve(&fs::read_to_string(&path)?, &own);
        if found != [address] {
            let path = path.display();
            return Err(Failure::msg(format!(
                "{path}: {own}: expected {address}, got {found:?}"
            )));
        }
    }
    *written = text;
    Ok(())
}

/// Publishes the directory for the connection, and for the ESP.
fn tell_directory(worker: &Worker, known: &PeerResolver, wanted: &Writer<Wanted>) {
    let directory = known.directory();
    // A view without consensus members must be wrong: a curator has sent it.
    if directory.nodes.is_empty() {
        return;
    }
    if worker.directory.value().get().as_ref() != Some(&directory) {
        worker.directory.set(directory.clone());
    }
    wanted.set(Wanted {
        directory,
        // Until the curators have listed the members, this may not be the directory that the next
        // boot needs.
        reportable: known.own_address.filter(|_| known.view.is_some()),
    });
}

/// Keeps the directory on the ESP up to date.
async fn keep_directory(ctx: Context, worker: Arc<Worker>, wanted: Value<Wanted>) -> Outcome {
    ctx.until_cancelled(save_changes(&ctx, &worker, wanted))
        .await
}

/// Only returns errors.
async fn save_changes(ctx: &Context, worker: &Worker, wanted: Value<Wanted>) -> Outcome {
    let mut wanted = wanted.watch();
    let health = Health::of(ctx);
    loop {
        let Wanted {
            directory,
            reportable,
        } = wanted.next().await?;
        let wrote = save_directory(worker, directory).await?;
        health.good();
        if let Some(address) = reportable
            && worker.directory_saved.value().get() != Some(address)
        {
            worker.directory_saved.set(address);
        }
        if wrote {
            tokio::time::sleep(worker.rest).await;
        }
    }
}

/// Saves the directory on the ESP durably; returns whether the ESP had another one, or none.
async fn save_directory(worker: &Worker, directory: ClusterDirectory) -> Result<bool, Failure> {
    let store = worker.saved_directory.clone();
    // The ESP is mounted with `sync`: the write takes as long as the disk.
    let save = move || store.save(&directory);
    Ok(spawn_blocking(save).await??)
}
