//! Names: this node's own, those of all others, and the way back after a
//! power cut.
//!
//! As soon as the node knows who it is, it has a host name and a machine-id,
//! and a hosts file made of what the ESP remembers: etcd finds its peers by
//! their node IDs, and they have to be found before there is any curator to
//! ask. From then on whatever is better known replaces it (see [`known`]), and
//! the directory of those who can be asked for the cluster follows it: live
//! for this node's own client, and on the ESP for the next boot.
//!
//! The ESP is slow and wears, so it is written only when what is on it
//! differs, and not more often than [`REST`] allows; what comes meanwhile
//! waits, and only the newest of it is written. An empty directory, of which
//! nobody could ask for the cluster, is never written.
//!
//! Three parts that fail apart: `nodes` follows the curators, `names` writes
//! the hosts file, `directory` the ESP. None of them needs that the others
//! work at this moment.
//!
//! [`known`]: super::known

use std::fs;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::v1::{ClusterDirectory, WatchRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::directory;
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_sys::files;
use hearth_sys::hostname::HostnameError;

use super::known::{Known, View};
use super::learned::Learned;
use super::names;
use crate::connection::{self, CuratorConnection, next_event, over_each, refused};

/// See [`Worker::rest`].
pub const REST: Duration = Duration::from_secs(5);
const PUBLIC: u32 = 0o644;

/// Follows the other nodes, and writes where they are.
pub struct Worker {
    /// Has `/etc/hosts` and the directory on the ESP.
    pub root: Root,
    /// Gives the machine its name.
    pub set_hostname: fn(&str) -> Result<(), HostnameError>,
    /// At least so long between two writes to the ESP.
    pub rest: Duration,
    /// A curator that says nothing for so long is left for another one.
    pub silence: Duration,
    /// Held while the ESP is written: by a thread, which ends later than a
    /// worker that is cancelled.
    pub writing: Arc<Mutex<()>>,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub connection: Value<CuratorConnection>,
    /// Will be read.
    pub address: Value<IpAddr>,
    /// Will be read.
    pub learned: Value<Learned>,
    /// Will be written: the nodes, once curators have told all of them.
    pub view: Writer<Arc<View>>,
    /// Will be written: the consensus members, as far as known, never empty.
    pub directory: Writer<ClusterDirectory>,
    /// Will be written: this node's address of which the ESP knows, or would if
    /// it were a consensus member's, beside all those of the members.
    pub directory_saved: Writer<IpAddr>,
}

/// What the ESP is to hold.
#[derive(Clone)]
struct Wanted {
    directory: ClusterDirectory,
    /// What may be reported once it does.
    reportable: Option<IpAddr>,
}

/// Publishes the view of the nodes, and keeps files that name them.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let member = tokio::select! {
        member = async { worker.member.watch().next().await } => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    name_machine(&worker, &member.node_id)?;
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

/// Host name and machine-id.
fn name_machine(worker: &Worker, node_id: &NodeId) -> Outcome {
    (worker.set_hostname)(&node_id.to_string())?;
    let machine_id = format!("{}\n", node_id.bare());
    let path = worker.root.ephemeral.machine_id();
    files::write_atomic(&path, machine_id.as_bytes(), PUBLIC)?;
    Ok(())
}

async fn follow_nodes(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.restart_within(Some(connection::ASK_AGAIN_WITHIN));
    let health = Health::of(&ctx);
    let follow = |connection| follow(&health, &worker, connection);
    ctx.until_cancelled(over_each(&worker.connection, follow))
        .await
}

/// Follows the curators' nodes. Nothing of a listing is told before it is
/// complete: what was known before is better than half of it. Ends by an error
/// only.
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
        // Marks of progress come all the time.
        if completes || complete && news {
            worker.view.set(Arc::new(view.clone()));
        }
    }
}

/// Writes the hosts file, and says what the directory is now.
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
    let mut addresses = worker.address.watch();
    let mut learned = worker.learned.watch();
    let mut views = worker.view.value().watch();
    let mut known = Known {
        own: member.node_id,
        own_address: worker.address.get(),
        saved: member.directory.clone(),
        learned: worker.learned.get().unwrap_or_default(),
        view: worker.view.value().get(),
    };
    let health = Health::of(ctx);
    let mut written = String::new();
    loop {
        write_hosts(&worker.root, &known, &mut written)?;
        tell_directory(worker, &known, wanted);
        health.good();
        tokio::select! {
            address = addresses.next() => known.own_address = Some(address?),
            news = learned.next() => known.learned = news?,
            view = views.next() => known.view = Some(view?),
        }
    }
}

fn write_hosts(root: &Root, known: &Known, written: &mut String) -> Outcome {
    let path = root.ephemeral.hosts();
    let domain = known.view.as_ref().map(|view| view.domain.as_str());
    let text = names::hosts(&known.addresses(), domain);
    if *written == text {
        return Ok(());
    }
    files::write_atomic(&path, text.as_bytes(), PUBLIC)?;
    // What counts is what readers of the file will find.
    if let Some(address) = known.own_address {
        let own = known.own.to_string();
        let found = names::resolve(&fs::read_to_string(&path)?, &own);
        if found != [address] {
            let path = path.display();
            return Err(Failure::msg(format!(
                "{path}: {own} is {found:?}, wanted {address}"
            )));
        }
    }
    *written = text;
    Ok(())
}

/// Tells the directory to whoever asks curators, and to the ESP.
fn tell_directory(worker: &Worker, known: &Known, wanted: &Writer<Wanted>) {
    let directory = known.directory();
    // A view without consensus members cannot be true: somebody showed it.
    if directory.nodes.is_empty() {
        return;
    }
    if worker.directory.value().get().as_ref() != Some(&directory) {
        worker.directory.set(directory.clone());
    }
    wanted.set(Wanted {
        directory,
        // Until the curators have told who the members are now, the directory
        // is not the one that the next boot will need.
        reportable: known.own_address.filter(|_| known.view.is_some()),
    });
}

/// Keeps the newest directory on the ESP.
async fn keep_directory(ctx: Context, worker: Arc<Worker>, wanted: Value<Wanted>) -> Outcome {
    ctx.until_cancelled(save_changes(&ctx, &worker, wanted))
        .await
}

/// Ends by an error only.
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

/// Makes this the directory on the ESP, durably; tells whether another one, or
/// none, was there.
async fn save_directory(worker: &Worker, directory: ClusterDirectory) -> Result<bool, Failure> {
    let (esp, writing) = (worker.root.esp.clone(), worker.writing.clone());
    // The ESP is mounted synchronously; the write takes as long as the disk.
    let save = move || {
        let _writing = writing.lock().unwrap_or_else(PoisonError::into_inner);
        match directory::load(&esp) {
            Ok(Some(saved)) if saved == directory => return Ok(false),
            Ok(_) => {}
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::warn!("replaced, for it cannot be read: {error}");
            }
        }
        directory::save(&esp, &directory).map(|()| true)
    };
    Ok(tokio::task::spawn_blocking(save).await??)
}
