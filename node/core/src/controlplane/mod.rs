//! Runs etcd and the curator on this node while its roles say so.
//!
//! Bootstrap and a later boot differ only in where the data come from. Bootstrap starts etcd for a
//! new cluster, writes the cluster's first records and saves the node's credentials; from then on
//! both are the same. When this worker restarts in the same boot it does not bootstrap again:
//! `Founded` takes precedence over the bootstrap data, which are still set.
//!
//! A later member joins. Its role names the etcd member that the curators have added for it. It
//! gets a certificate and the list of the other members from the curators before it starts etcd.
//! Each start compares the member whose data are on disk with the role (see
//! [`hearth_consensus::member_record`]). If the role is gone or names another member, all etcd data
//! are wiped. Each start is counted; on a disk that is behind what others remember, etcd is not started (see [`starts`]).
//!
//! The children of a runnable are fixed once it is healthy, so a role change that starts or stops
//! etcd restarts this worker. That can happen at any time, also while it still starts its children:
//! etcd may wait for a quorum indefinitely.

mod founder;
mod join;
mod serve;
mod starts;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{CuratorConnection, EtcdData, LocalControlPlane, View};
use hearth_api::tls::OwnCertificate;
use hearth_api::v1::NodeRoles;
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure, spawn_blocking};
use hearth_consensus::starts::Behind;
use hearth_consensus::{Handle, MemberId, RootHandle};
use hearth_enrolment::disowning;
use hearth_host::cluster_state::ClusterState;
use hearth_host::handover::{BootstrapData, Disowned, Founded, MemberData, TimeStatus};
use hearth_host::image::Image;
use hearth_host::layout::Root;
use hearth_host::prover::Prover;

use self::starts::Witnesses;

/// Path of etcd's binary in the image.
pub(crate) const ETCD: &str = "/usr/bin/etcd";
/// See [`Worker::ask_bound`]. A whole cluster that starts waits for so long.
pub(crate) const ASK_BOUND: Duration = Duration::from_secs(2);
/// The role of the node that bootstrapped the cluster names no etcd member.
const FOUNDER: MemberId = MemberId(0);

/// Runs etcd and the curator while this node's roles say so.
pub(crate) struct Worker {
    pub root: Root,
    pub image: Image,
    /// Receives etcd's log lines.
    pub log_tree: LogTree,
    /// The address on which etcd listens for peers.
    pub etcd_peers: SocketAddr,
    /// The address on which the curator listens.
    pub curator: SocketAddr,
    /// Path of etcd's binary.
    pub etcd: PathBuf,
    /// See [`hearth_consensus::Config::quota_bytes`].
    pub etcd_quota: u64,
    /// See [`hearth_consensus::Config::hash_check_interval`].
    pub etcd_hash_check: Duration,
    pub timing: hearth_curator::Timing,
    /// See [`hearth_consensus::Config::peer_proxy`].
    pub peer_proxy: Option<SocketAddr>,
    pub bootstrap: Value<Arc<BootstrapData>>,
    pub member: Value<MemberData>,
    pub local_roles: Value<NodeRoles>,
    pub cluster_state: ClusterState,
    pub disowned: Value<Disowned>,
    /// The state of the clock.
    pub time: Value<TimeStatus>,
    /// The nodes of the cluster: who may be a peer of etcd.
    pub view: Value<Arc<View>>,
    /// Used to get the certificate and the member list for a join.
    pub connection: Value<CuratorConnection>,
    /// How long curators are asked for what they remember of this member.
    pub ask_bound: Duration,
    /// Has the TPM, in which starts are counted.
    pub prover: Option<Arc<Prover>>,
    pub founded: Writer<Founded>,
    pub control_plane: Writer<LocalControlPlane>,
    /// The handle of etcd; `None` while it does not run on this node.
    pub consensus: Writer<Option<Handle>>,
}

impl Worker {
    /// Publishes which parts of the control plane run on this node.
    fn show(&self, control_plane: &LocalControlPlane, consensus: Option<&RootHandle>) {
        self.consensus.set(consensus.map(RootHandle::handle));
        self.control_plane.set(control_plane.clone());
    }
}

/// What the control plane starts from.
enum Start {
    Found(Arc<BootstrapData>),
    Member {
        own: Arc<OwnCertificate>,
        witnesses: Witnesses,
    },
}

pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Result<Exit, Failure> {
    worker.show(&LocalControlPlane::default(), None);
    if worker.disowned.get().is_some() {
        return end_for_good(&ctx, &worker).await;
    }
    let exit = tokio::select! {
        exit = work(&ctx, &worker) => exit,
        () = disowned(&worker) => Ok(Exit::restart("the cluster has disowned this node")),
        () = ctx.cancelled() => Ok(Exit::Done),
    };
    // The children are stopped now, before this worker runs again.
    worker.show(&LocalControlPlane::default(), None);
    exit
}

/// Waits until the cluster has disowned this node.
async fn disowned(worker: &Worker) {
    if worker.disowned.watch().next().await.is_err() {
        // The writer is gone: the value will never be set.
        std::future::pending().await
    }
}

/// Wipes the etcd data of a disowned node, whose etcd and curator have stopped, and idles.
async fn end_for_good(ctx: &Context, worker: &Worker) -> Result<Exit, Failure> {
    let data = worker.root.data.clone();
    spawn_blocking(move || disowning::wipe(&data)).await??;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(Exit::Done)
}

async fn work(ctx: &Context, worker: &Arc<Worker>) -> Result<Exit, Failure> {
    let start = start(worker).await?;
    let mut roles = worker.local_roles.watch();
    // Bootstrap starts before any roles are known.
    let (role, starts) = match &start {
        Start::Found(_) => (FOUNDER, None),
        Start::Member { own, witnesses } => {
            let role = consensus_role(&roles.next().await?);
            let ready = tokio::select! {
                ready = join::prepare(worker, own, role) => ready?,
                changed = changes(&mut roles, role) => return Ok(changed?),
            };
            let (true, Some(member)) = (ready, role) else {
                ctx.healthy();
                return Ok(changes(&mut roles, role).await?);
            };
            match starts::count(worker, *witnesses, member).await? {
                Ok(starts) => (member, Some(starts)),
                Err(behind) => {
                    tracing::error!("{behind}");
                    worker.show(&behind_others(&behind), None);
                    ctx.healthy();
                    return Ok(changes(&mut roles, role).await?);
                }
            }
        }
    };
    tokio::select! {
        outcome = serve::serve(ctx, worker, start, role, starts) => outcome.map(|()| Exit::Done),
        changed = changes(&mut roles, Some(role)) => Ok(changed?),
    }
}

/// The report of a disk on which etcd must not run. The cluster does not replace its member by itself: the right disk may be
/// in another machine that runs.
fn behind_others(behind: &Behind) -> LocalControlPlane {
    LocalControlPlane {
        data: Some(EtcdData {
            damaged_member: None,
            reason: "DiskBehind",
            message: behind.to_string(),
        }),
        ..LocalControlPlane::default()
    }
}

fn consensus_role(roles: &NodeRoles) -> Option<MemberId> {
    roles.consensus_member.map(|role| MemberId(role.member_id))
}

/// Waits until the consensus role differs from `from`; the worker restarts then.
async fn changes(
    roles: &mut Watcher<NodeRoles>,
    from: Option<MemberId>,
) -> Result<Exit, event::Closed> {
    let roles = roles
        .wait_for(|roles| consensus_role(roles) != from)
        .await?;
    Ok(match consensus_role(&roles) {
        None => Exit::restart("role consensus-member was removed"),
        Some(_) if from.is_none() => Exit::restart("role consensus-member was added"),
        Some(member) => Exit::restart(format_args!(
            "role consensus-member names a new etcd member, {member}"
        )),
    })
}

/// Waits for bootstrap data or member data, whichever is set first.
async fn start(worker: &Worker) -> Result<Start, event::Closed> {
    if let Some(founded) = worker.founded.value().get() {
        let member = worker.member.get();
        return Ok(Start::Member {
            own: founded.own,
            witnesses: member.as_ref().map(Witnesses::of).unwrap_or_default(),
        });
    }
    let (mut bootstrap, mut member) = (worker.bootstrap.watch(), worker.member.watch());
    tokio::select! {
        data = bootstrap.next() => Ok(Start::Found(data?)),
        data = member.next() => {
            let data = data?;
            let witnesses = Witnesses::of(&data);
            Ok(Start::Member { own: data.own, witnesses })
        }
    }
}
