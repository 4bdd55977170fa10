//! Consensus and curator on this node, if its roles say so.
//!
//! A founding and a later boot differ only in where the data come from: a
//! founding starts etcd for a new cluster, founds it and saves the node's
//! credentials; from then on both are the same. What has been founded is not
//! founded again when this worker restarts in the same boot: `Founded` goes
//! before the bootstrap data, which stay what they were.
//!
//! The children of a runnable are fixed once it is healthy, so a change of
//! roles that starts or stops consensus is a restart of this worker, at any
//! time, while it still starts them, too: etcd may wait for a quorum for ever.

use std::net::SocketAddr;
use std::sync::Arc;

use hearth_api::console::Milestone;
use hearth_api::identity::{ClusterId, NodeCredentials, NodeId};
use hearth_api::tls;
use hearth_api::v1::{ConsensusProgress, NodeRoles};
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};

use super::{Inputs, rolefetch};
use crate::consensus::{self, Company, ConsensusUser, Timing};
use crate::curator::{self, founding};
use crate::handover::{BootstrapData, Founded, MemberData};
use crate::{boot, credentials, failpoint, pki};

const ETCD: &str = "/usr/bin/etcd";

/// What of the control plane runs on this node.
#[derive(Clone, Default)]
pub struct ControlPlane {
    /// etcd, while it runs here.
    pub consensus: Option<consensus::Handle>,
    /// Where the curator listens on this machine, while it does.
    pub curator_port: Option<u16>,
    /// How far etcd is, while it runs here.
    pub progress: Option<ConsensusProgress>,
}

pub(super) struct Worker {
    /// Will be read: bootstrap and member data. Will be written: founded.
    pub inputs: Arc<Inputs>,
    /// Where etcd serves its peers.
    pub etcd_peers: SocketAddr,
    /// Where the curator serves.
    pub curator: SocketAddr,
    /// Will be read.
    pub local_roles: Value<NodeRoles>,
    /// Will be written.
    pub control_plane: Writer<ControlPlane>,
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

pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    worker.control_plane.set(ControlPlane::default());
    let outcome = tokio::select! {
        outcome = work(&ctx, &worker) => outcome,
        () = ctx.cancelled() => Ok(()),
    };
    // What runs below ends now, and before this runs again.
    worker.control_plane.set(ControlPlane::default());
    outcome
}

async fn work(ctx: &Context, worker: &Arc<Worker>) -> Outcome {
    let start = start(&worker.inputs).await?;
    let mut roles = worker.local_roles.watch();
    if let Start::Member(_) = start
        && roles.next().await?.consensus_member.is_none()
    {
        ctx.healthy();
        roles
            .wait_for(|roles| roles.consensus_member.is_some())
            .await?;
        return Err(Failure::msg("this node is to become a consensus member"));
    }
    // A founding begins before any roles are known.
    tokio::select! {
        outcome = serve(ctx, worker, start) => outcome,
        removed = roles.wait_for(|roles| roles.consensus_member.is_none()) => {
            removed?;
            Err(Failure::msg("this node is no consensus member any more"))
        }
    }
}

/// Starts etcd and the curator and says what of them is there; ends by an
/// error only.
async fn serve(ctx: &Context, worker: &Arc<Worker>, start: Start) -> Outcome {
    let mut handles = start_consensus(ctx, worker, &start)?;
    let handle = handles.next().await?;
    let mut control_plane = ControlPlane {
        consensus: Some(handle.clone()),
        curator_port: None,
        progress: None,
    };
    worker.control_plane.set(control_plane.clone());
    boot::report_once(Milestone::Consensus);

    let founding = matches!(start, Start::Found(_));
    let member = match start {
        Start::Found(data) => found(&worker.inputs, &handle, &data).await?,
        Start::Member(member) => member,
    };
    let credentials = member.credentials.clone();
    let port = start_curator(ctx, worker, &handle, member).await?;
    control_plane.curator_port = Some(port);
    worker.control_plane.set(control_plane.clone());
    boot::report_once(Milestone::Curator);
    if founding {
        worker.inputs.founded.set(Founded { credentials });
    }
    ctx.healthy();
    loop {
        // An etcd that has ended is started again below us; who holds its old
        // handle is only told that it does not serve.
        control_plane.consensus = Some(handles.next().await?);
        worker.control_plane.set(control_plane.clone());
    }
}

/// Waits until there is something to start from.
async fn start(inputs: &Inputs) -> Result<Start, event::Closed> {
    let of_member = |member: MemberData| Member {
        cluster_id: member.cluster_id,
        node_id: member.node_id,
        credentials: member.credentials,
    };
    if let (Some(founded), Some(data)) = (inputs.founded.value().get(), inputs.bootstrap.get()) {
        return Ok(Start::Member(Member {
            cluster_id: data.cluster_id,
            node_id: data.node_id,
            credentials: founded.credentials,
        }));
    }
    let (mut bootstrap, mut member) = (inputs.bootstrap.watch(), inputs.member.watch());
    tokio::select! {
        data = bootstrap.next() => Ok(Start::Found(data?)),
        data = member.next() => Ok(Start::Member(of_member(data?))),
    }
}

/// Starts etcd below this runnable. There is a handle each time that it serves.
fn start_consensus(
    ctx: &Context,
    worker: &Worker,
    start: &Start,
) -> Result<Watcher<consensus::Handle>, Failure> {
    let inputs = &worker.inputs;
    let (node_id, cluster_id) = match start {
        Start::Found(data) => (data.node_id, data.cluster_id),
        Start::Member(member) => (member.node_id, member.cluster_id),
    };
    let config = Arc::new(consensus::Config {
        node_id,
        cluster_id,
        etcd: inputs.root.data.etcd(),
        credentials: inputs.root.data.node().credentials(),
        socket_dir: inputs.root.ephemeral.consensus(),
        peer_listen: worker.etcd_peers,
        founding: matches!(start, Start::Found(_)),
        timing: Timing::Alone,
        quota_bytes: consensus::DEFAULT_QUOTA,
        binary: ETCD.into(),
        state: inputs.cluster_state.clone(),
        log: inputs.log_tree.clone(),
    });
    let (writer, handles) = event::value();
    let writer = Arc::new(writer);
    ctx.run("consensus", move |ctx| {
        consensus::run(ctx, config.clone(), writer.clone())
    })?;
    Ok(handles.watch())
}

/// Makes the founding durable in etcd, then on the data partition. Each step
/// finds what an earlier run has done.
async fn found(
    inputs: &Inputs,
    handle: &consensus::Handle,
    data: &BootstrapData,
) -> Result<Member, Failure> {
    let etcd = inputs.root.data.etcd();
    let node = inputs.root.data.node();
    let saved = credentials::load(&node.credentials())?;
    let credentials = match saved {
        Some(credentials) => Arc::new(credentials),
        None => {
            let authorities = pki::load(&etcd, data.cluster_id)?;
            let client = handle.root().namespaced(ConsensusUser::Curator);
            let credentials = founding::found(&client, data, &authorities).await?;
            rolefetch::save(&node.roles(), &data.roles)?;
            failpoint!("founding.credentials.before");
            credentials::save(&node.credentials(), &credentials)?;
            failpoint!("founding.credentials.after");
            credentials
        }
    };
    pki::remove_authority_keys(&etcd)?;
    Ok(Member {
        cluster_id: data.cluster_id,
        node_id: data.node_id,
        credentials,
    })
}

/// Starts the curator below this runnable, waits until it serves, and tells at
/// which port.
async fn start_curator(
    ctx: &Context,
    worker: &Worker,
    handle: &consensus::Handle,
    member: Member,
) -> Result<u16, Failure> {
    let inputs = &worker.inputs;
    let config = Arc::new(curator::Config {
        listen: worker.curator,
        credentials: member.credentials,
        client: handle.root().namespaced(ConsensusUser::Curator),
        members: handle.root().members(),
        company: Company::default(),
        version: inputs.image.version.clone(),
        clock: tls::wall_clock(),
        timing: curator::Timing::default(),
    });
    let (writer, port) = event::value();
    let writer = Arc::new(writer);
    ctx.run("curator", move |ctx| {
        curator::run(ctx, config.clone(), writer.clone())
    })?;
    Ok(port.watch().next().await?)
}
