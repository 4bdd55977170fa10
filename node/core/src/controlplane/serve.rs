//! Runs etcd and the curator on a node that is a consensus member or bootstraps its cluster.

use std::sync::Arc;
use std::time::SystemTime;

use hearth_agent::{LocalControlPlane, rolefetch};
use hearth_api::console::Milestone;
use hearth_api::identity::NodeCredentials;
use hearth_api::tls::{self, OwnCertificate};
use hearth_api::v1::ConsensusProgress;
use hearth_base::event::{self, Watcher};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_consensus::manifests::Manifests;
use hearth_consensus::{ConsensusUser, MemberId, PeerReadiness, RootHandle};
use hearth_curator::founding;
use hearth_host::handover::{BootstrapData, Founded};
use hearth_host::{console, credentials, failpoint, pki};

use super::{FOUNDER, Start, Worker, join};

/// Starts etcd and the curator and publishes what runs. Returns only with an error.
pub(super) async fn serve(
    ctx: &Context,
    worker: &Arc<Worker>,
    start: Start,
    role: MemberId,
) -> Outcome {
    let peers = PeerReadiness::default();
    let (mut handles, mut progresses) = start_consensus(ctx, worker, &start, &peers)?;
    let mut control_plane = LocalControlPlane::default();
    let mut handle = loop {
        let joins = async {
            match &start {
                Start::Member(own) if role != FOUNDER => {
                    join::keep_members_true(worker, own, role).await
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            // The learner is catching up.
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

    let (own, founded) = match start {
        Start::Found(data) => {
            let credentials = found(worker, &handle, &data).await?;
            let own = OwnCertificate::new(&credentials, tls::wall_clock())?;
            (own.clone(), Some(Founded { credentials, own }))
        }
        Start::Member(own) => (own, None),
    };
    let port = start_curator(ctx, worker, &handle, own, peers).await?;
    control_plane.curator_port = Some(port);
    worker.show(&control_plane, Some(&handle));
    console::report_once(Milestone::Curator);
    if let Some(founded) = founded {
        worker.founded.set(founded);
    }
    ctx.healthy();
    loop {
        tokio::select! {
            // An etcd that has exited is restarted below this runnable; calls by its old handle
            // fail as unavailable.
            next = handles.next() => handle = next?,
            progress = progresses.next() => control_plane.progress = Some(progress?),
        }
        worker.show(&control_plane, Some(&handle));
    }
}

/// Starts etcd below this runnable. A new handle is published each time etcd becomes ready.
fn start_consensus(
    ctx: &Context,
    worker: &Worker,
    start: &Start,
    peers: &PeerReadiness,
) -> Result<(Watcher<RootHandle>, Watcher<ConsensusProgress>), Failure> {
    let (node_id, cluster_id) = match start {
        Start::Found(data) => (data.node_id, data.cluster_id),
        Start::Member(own) => (own.node(), own.cluster()),
    };
    let view = worker.view.clone();
    let config = Arc::new(hearth_consensus::Config {
        node_id,
        cluster_id,
        etcd: worker.root.data.etcd(),
        credentials: worker.root.data.node().credentials(),
        socket_dir: worker.root.ephemeral.consensus(),
        peer_listen: worker.etcd_peers,
        member_of_curators: Arc::new(move |node| {
            view.get()
                .is_some_and(|view| view.has_consensus_member(node))
        }),
        founding: matches!(start, Start::Found(_)),
        peers: peers.clone(),
        users: ReadLock::default(),
        quota_bytes: worker.etcd_quota,
        binary: worker.etcd.clone(),
        peer_proxy: worker.peer_proxy,
        state: worker.cluster_state.clone(),
        log: worker.log_tree.clone(),
    });
    let (handle, handles) = event::value();
    let (progress, progresses) = event::value();
    let out = Arc::new(hearth_consensus::Outputs { handle, progress });
    ctx.run("consensus", move |ctx| {
        hearth_consensus::run(ctx, config.clone(), out.clone())
    })?;
    Ok((handles.watch(), progresses.watch()))
}

/// Writes the cluster's first records to etcd, then the credentials to the data partition. Each
/// step detects what an earlier run has completed.
#[expect(
    clippy::disallowed_methods,
    reason = "certificates end by the system clock"
)]
async fn found(
    worker: &Worker,
    handle: &RootHandle,
    data: &BootstrapData,
) -> Result<Arc<NodeCredentials>, Failure> {
    let etcd = worker.root.data.etcd();
    let node = worker.root.data.node();
    let saved = credentials::load(&node.credentials())?;
    let credentials = match saved {
        Some(credentials) => Arc::new(credentials),
        None => {
            let authorities = pki::load(&etcd, data.cluster_id)?;
            let client = handle.root().namespaced(ConsensusUser::Curator);
            let now = SystemTime::now();
            // Before the cluster exists: a cluster without them would never get them.
            let controllers = handle
                .root()
                .namespaced(ConsensusUser::KubernetesControllers);
            let manifests = Manifests::new(controllers);
            manifests.store(&data.seed.manifests).await?;
            let credentials = founding::found(&client, data, &authorities, now).await?;
            rolefetch::save(&node.roles(), &data.roles)?;
            failpoint!("founding.credentials.before");
            credentials::save(&node.credentials(), &credentials)?;
            failpoint!("founding.credentials.after");
            credentials
        }
    };
    pki::remove_authority_keys(&etcd)?;
    Ok(credentials)
}

/// Starts the curator below this runnable, waits until it is listening, and returns its port.
async fn start_curator(
    ctx: &Context,
    worker: &Worker,
    handle: &RootHandle,
    own: Arc<OwnCertificate>,
    peers: PeerReadiness,
) -> Result<u16, Failure> {
    let config = Arc::new(hearth_curator::Config {
        listen: worker.curator,
        own,
        time: worker.time.clone(),
        client: handle.root().namespaced(ConsensusUser::Curator),
        kubernetes_pki: handle.root().namespaced(ConsensusUser::KubernetesPki),
        kubernetes_secrets: handle.root().namespaced(ConsensusUser::KubernetesSecrets),
        members: handle.root().members(),
        peers,
        version: worker.image.version.clone(),
        timing: worker.timing,
    });
    let (writer, port) = event::value();
    let writer = Arc::new(writer);
    ctx.run("curator", move |ctx| {
        hearth_curator::run(ctx, config.clone(), writer.clone())
    })?;
    Ok(port.watch().next().await?)
}
