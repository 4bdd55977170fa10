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

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{CuratorConnection, LocalControlPlane, refused, rolefetch};
use hearth_api::console::Milestone;
use hearth_api::identity::{ClusterId, NodeCredentials, NodeId};
use hearth_api::tls;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::{
    ConsensusProgress, GetConsensusStatusRequest, GetConsensusStatusResponse,
    IssueCertificateRequest, NodeRoles,
};
use hearth_base::event::{self, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_consensus::standing::{self, Verdict};
use hearth_consensus::{Company, ConsensusUser, Handle, Joining, MemberId, RootHandle};
use hearth_curator::founding;
use hearth_enrolment::disowning;
use hearth_host::handover::{BootstrapData, Founded, MemberData};
use hearth_host::{console, credentials, failpoint, pki};

use crate::compose::Inputs;

/// Where the image has it.
pub(super) const ETCD: &str = "/usr/bin/etcd";
/// Between two attempts to get what a join needs.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Of a restart for a new role.
const AT_ONCE: Duration = Duration::from_millis(10);
/// One attempt may take so long.
const ASK_BOUND: Duration = Duration::from_secs(10);
/// The role of the node that founded the cluster names no member.
const FOUNDER: MemberId = MemberId(0);

pub(super) struct Worker {
    /// Will be read: bootstrap and member data, disowned. Will be written:
    /// founded.
    pub inputs: Arc<Inputs>,
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
    /// Will be read.
    pub local_roles: Value<NodeRoles>,
    /// Will be read: by it this node asks for what a join needs.
    pub connection: Value<CuratorConnection>,
    /// Will be written.
    pub control_plane: Writer<LocalControlPlane>,
    /// Will be written: etcd, while it runs here.
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

pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    worker.show(&LocalControlPlane::default(), None);
    if worker.inputs.disowned.get().is_some() {
        return end_for_good(&ctx, &worker.inputs).await;
    }
    let outcome = tokio::select! {
        outcome = work(&ctx, &worker) => outcome,
        () = disowned(&worker.inputs) => Err(Failure::msg("the cluster has disowned this node")),
        () = ctx.cancelled() => Ok(()),
    };
    // What runs below ends now, and before this runs again.
    worker.show(&LocalControlPlane::default(), None);
    outcome
}

/// Waits until the cluster has disowned this node.
async fn disowned(inputs: &Inputs) {
    if inputs.disowned.watch().next().await.is_err() {
        // Nobody is there who could say so.
        std::future::pending().await
    }
}

/// Wipes what is left of the member, of which nothing runs any more, and rests.
async fn end_for_good(ctx: &Context, inputs: &Inputs) -> Outcome {
    let data = inputs.root.data.clone();
    tokio::task::spawn_blocking(move || disowning::wipe(&data)).await??;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}

async fn work(ctx: &Context, worker: &Arc<Worker>) -> Outcome {
    let start = start(&worker.inputs).await?;
    let mut roles = worker.local_roles.watch();
    // A founding begins before any roles are known.
    let role = match &start {
        Start::Found(_) => FOUNDER,
        Start::Member(member) => {
            let role = consensus_role(&roles.next().await?);
            let ready = tokio::select! {
                ready = prepare(worker, member, role) => ready?,
                changed = changes(&mut roles, role) => return Err(changed?),
            };
            match (ready, role) {
                (true, Some(role)) => role,
                _ => {
                    ctx.healthy();
                    let changed = changes(&mut roles, role).await?;
                    // Nothing has failed that would be better later.
                    ctx.restart_within(Some(AT_ONCE));
                    return Err(changed);
                }
            }
        }
    };
    tokio::select! {
        outcome = serve(ctx, worker, start, role) => outcome,
        changed = changes(&mut roles, Some(role)) => Err(changed?),
    }
}

fn consensus_role(roles: &NodeRoles) -> Option<MemberId> {
    roles.consensus_member.map(|role| MemberId(role.member_id))
}

/// Waits until the role is another one, and says so.
async fn changes(
    roles: &mut Watcher<NodeRoles>,
    from: Option<MemberId>,
) -> Result<Failure, event::Closed> {
    let roles = roles
        .wait_for(|roles| consensus_role(roles) != from)
        .await?;
    Ok(match consensus_role(&roles) {
        None => Failure::msg("this node is no consensus member any more"),
        Some(_) if from.is_none() => Failure::msg("this node is to become a consensus member"),
        Some(member) => Failure::msg(format!("this node is to join consensus as member {member}")),
    })
}

/// Brings the disk to what the role says. Tells whether etcd is to be started.
async fn prepare(
    worker: &Worker,
    member: &Member,
    role: Option<MemberId>,
) -> Result<bool, Failure> {
    let etcd = worker.inputs.root.data.etcd();
    loop {
        let found = standing::find(&etcd)?;
        match (standing::judge(role, found), role) {
            (Verdict::Wipe, _) => {
                tracing::warn!(
                    "this node is not the member of consensus any more that its disk is of: \
                     etcd's data are wiped"
                );
                standing::wipe(&etcd)?;
            }
            (Verdict::Join, Some(role)) => join(worker, member, role).await?,
            (Verdict::Start, _) => return Ok(true),
            (Verdict::Rest | Verdict::Join, _) => return Ok(false),
            (Verdict::Refuse, _) => {
                return Err(Failure::msg(
                    "the node's role is that of the founder of consensus, but its data are of \
                     another member: take the role from it, and give it again",
                ));
            }
        }
    }
}

/// Gets what a join needs from the curators, for as long as it takes.
async fn join(worker: &Worker, member: &Member, id: MemberId) -> Outcome {
    let mut said = String::new();
    worker.connection.watch().next().await?;
    loop {
        match tokio::time::timeout(ASK_BOUND, get_ready(worker, member, id)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let why = error.to_string();
                if said != why {
                    tracing::warn!("cannot join consensus yet: {why}");
                    said = why;
                }
            }
            Err(_) => tracing::warn!("cannot join consensus yet: no answer for {ASK_BOUND:?}"),
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Peer files first, the record last: what was cut off is done again.
async fn get_ready(worker: &Worker, member: &Member, id: MemberId) -> Outcome {
    let joining = ask_for_members(worker, member, id).await?;
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let request = IssueCertificateRequest {
        kind: Some(Kind::EtcdPeer(EtcdPeer {})),
    };
    let issued = connection.curator().issue_certificate(request).await;
    let issued = issued.map_err(refused)?.into_inner();
    let etcd = worker.inputs.root.data.etcd();
    pki::save_peer(
        &etcd.peer(),
        &member.credentials.key,
        &issued.certificate,
        &issued.ca_certificate,
    )?;
    standing::save(&etcd, &joining)?;
    tracing::info!(member = %id, "this node joins consensus");
    Ok(())
}

async fn ask_for_members(
    worker: &Worker,
    member: &Member,
    id: MemberId,
) -> Result<Joining, Failure> {
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let mut curator = connection.curator();
    let status = curator.get_consensus_status(GetConsensusStatusRequest {});
    let status = status.await.map_err(refused)?.into_inner();
    initial_cluster(&status, member.node_id, id)
}

/// All members by their node IDs, as etcd wants to know them.
fn initial_cluster(
    status: &GetConsensusStatusResponse,
    own: NodeId,
    id: MemberId,
) -> Result<Joining, Failure> {
    let own = own.to_string();
    let known = |member: &&hearth_api::v1::ConsensusMemberStatus| {
        member.member_id == id.0 && member.node_id == own
    };
    if !status.members.iter().any(|member| known(&member)) {
        return Err(Failure::msg(format!(
            "the curators know of no member {id} of consensus on this node"
        )));
    }
    let members = status.members.iter().flat_map(|member| {
        let urls = member.peer_urls.iter();
        urls.map(|url| format!("{}={url}", member.node_id))
    });
    Ok(Joining {
        member: id,
        initial_cluster: members.collect::<Vec<_>>().join(","),
    })
}

/// Keeps the record of the others true until etcd has taken part, which wants
/// it to be exact: they may change meanwhile.
async fn keep_members_true(worker: &Worker, member: &Member, id: MemberId) -> Failure {
    let etcd = worker.inputs.root.data.etcd();
    while !standing::has_joined(&etcd) {
        tokio::time::sleep(ASK_AGAIN).await;
        let asked = tokio::time::timeout(ASK_BOUND, ask_for_members(worker, member, id)).await;
        let Ok(Ok(joining)) = asked else {
            continue;
        };
        match standing::load(&etcd) {
            Ok(Some(known)) if known != joining => {
                if let Err(error) = standing::save(&etcd, &joining) {
                    return error.into();
                }
            }
            Ok(_) => {}
            Err(error) => return error.into(),
        }
    }
    std::future::pending().await
}

/// Starts etcd and the curator and says what of them is there; ends by an
/// error only.
async fn serve(ctx: &Context, worker: &Arc<Worker>, start: Start, role: MemberId) -> Outcome {
    let company = Company::default();
    let (mut handles, mut progresses) = start_consensus(ctx, worker, &start, &company)?;
    let mut control_plane = LocalControlPlane::default();
    let mut handle = loop {
        let joins = async {
            match &start {
                Start::Member(member) if role != FOUNDER => {
                    keep_members_true(worker, member, role).await
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            // A learner catches up.
            progress = progresses.next() => {
                control_plane.progress = Some(progress?);
                worker.show(&control_plane, None);
            }
            handle = handles.next() => break handle?,
            failure = joins => return Err(failure),
        }
    };
    worker.show(&control_plane, Some(&handle));
    console::report_once(Milestone::Consensus);

    let founding = matches!(start, Start::Found(_));
    let member = match start {
        Start::Found(data) => found(&worker.inputs, &handle, &data).await?,
        Start::Member(member) => member,
    };
    let credentials = member.credentials.clone();
    let port = start_curator(ctx, worker, &handle, member, company).await?;
    control_plane.curator_port = Some(port);
    worker.show(&control_plane, Some(&handle));
    console::report_once(Milestone::Curator);
    if founding {
        worker.inputs.founded.set(Founded { credentials });
    }
    ctx.healthy();
    loop {
        tokio::select! {
            // An etcd that has ended is started again below us; who holds its
            // old handle is only told that it does not serve.
            next = handles.next() => handle = next?,
            progress = progresses.next() => control_plane.progress = Some(progress?),
        }
        worker.show(&control_plane, Some(&handle));
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
    company: &Company,
) -> Result<(Watcher<RootHandle>, Watcher<ConsensusProgress>), Failure> {
    let inputs = &worker.inputs;
    let (node_id, cluster_id) = match start {
        Start::Found(data) => (data.node_id, data.cluster_id),
        Start::Member(member) => (member.node_id, member.cluster_id),
    };
    let config = Arc::new(hearth_consensus::Config {
        node_id,
        cluster_id,
        etcd: inputs.root.data.etcd(),
        credentials: inputs.root.data.node().credentials(),
        socket_dir: inputs.root.ephemeral.consensus(),
        peer_listen: worker.etcd_peers,
        founding: matches!(start, Start::Found(_)),
        company: company.clone(),
        quota_bytes: worker.etcd_quota,
        binary: worker.etcd.clone(),
        peer_proxy: worker.peer_proxy,
        state: inputs.cluster_state.clone(),
        log: inputs.log_tree.clone(),
    });
    let (handle, handles) = event::value();
    let (progress, progresses) = event::value();
    let out = Arc::new(hearth_consensus::Outlets { handle, progress });
    ctx.run("consensus", move |ctx| {
        hearth_consensus::run(ctx, config.clone(), out.clone())
    })?;
    Ok((handles.watch(), progresses.watch()))
}

/// Makes the founding durable in etcd, then on the data partition. Each step
/// finds what an earlier run has done.
async fn found(
    inputs: &Inputs,
    handle: &RootHandle,
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
    handle: &RootHandle,
    member: Member,
    company: Company,
) -> Result<u16, Failure> {
    let inputs = &worker.inputs;
    let config = Arc::new(hearth_curator::Config {
        listen: worker.curator,
        credentials: member.credentials,
        client: handle.root().namespaced(ConsensusUser::Curator),
        kubernetes_pki: handle.root().namespaced(ConsensusUser::KubernetesPki),
        members: handle.root().members(),
        company,
        version: inputs.image.version.clone(),
        clock: tls::wall_clock(),
        timing: worker.timing,
    });
    let (writer, port) = event::value();
    let writer = Arc::new(writer);
    ctx.run("curator", move |ctx| {
        hearth_curator::run(ctx, config.clone(), writer.clone())
    })?;
    Ok(port.watch().next().await?)
}
