//! Consensus and curator on this node, if its roles say so.
//!
//! A founding and a later boot differ only in where the data come from: a
//! founding starts etcd for a new cluster, founds it and saves the node's
//! credentials; from then on both are the same. What has been founded is not
//! founded again when this worker restarts in the same boot: `Founded` goes
//! before the bootstrap data, which stay what they were.
//!
//! A later member joins: it has a role that names the member of etcd that the
//! curators have added for it, and gets from them a certificate and the names
//! of the others before it starts etcd. What the disk is the member of is held
//! against the role at each start (see [`standing`]); a role that is gone, or
//! that names another member, has everything of etcd wiped.
//!
//! The children of a runnable are fixed once it is healthy, so a change of
//! roles that starts or stops consensus is a restart of this worker, at any
//! time, while it still starts them, too: etcd may wait for a quorum for ever.

mod join;
mod serve;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_agent::{CuratorConnection, LocalControlPlane};
use hearth_api::identity::{ClusterId, NodeCredentials, NodeId};
use hearth_api::v1::NodeRoles;
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure};
use hearth_consensus::{Handle, MemberId, RootHandle};
use hearth_enrolment::disowning;
use hearth_host::cluster_state::ClusterState;
use hearth_host::handover::{BootstrapData, Disowned, Founded, MemberData};
use hearth_host::image::Image;
use hearth_host::layout::Root;

/// Where the image has it.
pub(crate) const ETCD: &str = "/usr/bin/etcd";
/// The role of the node that founded the cluster names no member.
const FOUNDER: MemberId = MemberId(0);

/// Runs etcd and the curator while this node's roles say so.
pub(crate) struct Worker {
    pub root: Root,
    pub image: Image,
    /// Takes etcd's log lines.
    pub log_tree: LogTree,
    /// Where etcd serves its peers.
    pub etcd_peers: SocketAddr,
    /// Where the curator serves.
    pub curator: SocketAddr,
    /// The program.
    pub etcd: PathBuf,
    /// See [`hearth_consensus::Config::quota_bytes`].
    pub etcd_quota: u64,
    /// Of the curator.
    pub timing: hearth_curator::Timing,
    /// See [`hearth_consensus::Config::peer_proxy`].
    pub peer_proxy: Option<SocketAddr>,
    pub bootstrap: Value<Arc<BootstrapData>>,
    pub member: Value<MemberData>,
    pub local_roles: Value<NodeRoles>,
    pub cluster_state: ClusterState,
    pub disowned: Value<Disowned>,
    /// By it this node asks for what a join needs.
    pub connection: Value<CuratorConnection>,
    pub founded: Writer<Founded>,
    pub control_plane: Writer<LocalControlPlane>,
    /// etcd, while it runs here.
    pub consensus: Writer<Option<Handle>>,
}

impl Worker {
    /// Tells the others what of the control plane is here.
    fn show(&self, control_plane: &LocalControlPlane, consensus: Option<&RootHandle>) {
        self.consensus.set(consensus.map(RootHandle::handle));
        self.control_plane.set(control_plane.clone());
    }
}

/// Where this node stands when the control plane starts.
enum Start {
    Found(Arc<BootstrapData>),
    Member(Member),
}

/// What a member's control plane needs.
struct Member {
    cluster_id: ClusterId,
    node_id: NodeId,
    credentials: Arc<NodeCredentials>,
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
    // What runs below ends now, and before this runs again.
    worker.show(&LocalControlPlane::default(), None);
    exit
}

/// Waits until the cluster has disowned this node.
async fn disowned(worker: &Worker) {
    if worker.disowned.watch().next().await.is_err() {
        // Nobody is there who could say so.
        std::future::pending().await
    }
}

/// Wipes what is left of the member, of which nothing runs any more, and rests.
async fn end_for_good(ctx: &Context, worker: &Worker) -> Result<Exit, Failure> {
    let data = worker.root.data.clone();
    tokio::task::spawn_blocking(move || disowning::wipe(&data)).await??;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(Exit::Done)
}

async fn work(ctx: &Context, worker: &Arc<Worker>) -> Result<Exit, Failure> {
    let start = start(worker).await?;
    let mut roles = worker.local_roles.watch();
    // A founding begins before any roles are known.
    let role = match &start {
        Start::Found(_) => FOUNDER,
        Start::Member(member) => {
            let role = consensus_role(&roles.next().await?);
            let ready = tokio::select! {
                ready = join::prepare(worker, member, role) => ready?,
                changed = changes(&mut roles, role) => return Ok(changed?),
            };
            match (ready, role) {
                (true, Some(role)) => role,
                _ => {
                    ctx.healthy();
                    return Ok(changes(&mut roles, role).await?);
                }
            }
        }
    };
    tokio::select! {
        outcome = serve::serve(ctx, worker, start, role) => outcome.map(|()| Exit::Done),
        changed = changes(&mut roles, Some(role)) => Ok(changed?),
    }
}

fn consensus_role(roles: &NodeRoles) -> Option<MemberId> {
    roles.consensus_member.map(|role| MemberId(role.member_id))
}

/// Waits until the role is another one: then this worker starts anew.
async fn changes(
    roles: &mut Watcher<NodeRoles>,
    from: Option<MemberId>,
) -> Result<Exit, event::Closed> {
    let roles = roles
        .wait_for(|roles| consensus_role(roles) != from)
        .await?;
    Ok(match consensus_role(&roles) {
        None => Exit::restart("this node is no consensus member any more"),
        Some(_) if from.is_none() => Exit::restart("this node is to become a consensus member"),
        Some(member) => Exit::restart(format_args!(
            "this node is to join consensus as member {member}"
        )),
    })
}

/// Waits until there is something to start from.
async fn start(worker: &Worker) -> Result<Start, event::Closed> {
    let of_member = |member: MemberData| Member {
        cluster_id: member.cluster_id,
        node_id: member.node_id,
        credentials: member.credentials,
    };
    if let (Some(founded), Some(data)) = (worker.founded.value().get(), worker.bootstrap.get()) {
        return Ok(Start::Member(Member {
            cluster_id: data.cluster_id,
            node_id: data.node_id,
            credentials: founded.credentials,
        }));
    }
    let (mut bootstrap, mut member) = (worker.bootstrap.watch(), worker.member.watch());
    tokio::select! {
        data = bootstrap.next() => Ok(Start::Found(data?)),
        data = member.next() => Ok(Start::Member(of_member(data?))),
    }
}
