//! Runs etcd and the curator on a node that is a consensus member or bootstraps its cluster.

use std::sync::Arc;

use hearth_agent::{EtcdData, LocalControlPlane};
use hearth_api::console::Milestone;
use hearth_api::tls::OwnCertificate;
use hearth_api::v1::{ConsensusProgress, MemberStarts};
use hearth_base::event::{self, Watcher};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Blocking, Context, Failure, Outcome};
use hearth_consensus::starts::Starts;
use hearth_consensus::{ConsensusUser, DataReport, MemberId, PeerReadiness, RootHandle, SlowDisk};
use hearth_host::console;

use super::founder::Founder;
use super::{FOUNDER, Start, Worker, join};

/// Starts etcd and the curator and publishes what runs. Returns only with an error.
pub(super) async fn serve(
    ctx: &Context,
    worker: &Arc<Worker>,
    start: Start,
    role: MemberId,
    starts: Option<Starts>,
) -> Outcome {
    let peers = PeerReadiness::default();
    let Etcd {
        mut handles,
        mut progresses,
        mut data_reports,
        mut slow_disks,
    } = start_consensus(ctx, worker, &start, &peers)?;
    let own = match start {
        Start::Found(data) => Own::Certifying(Founder::certify_aside(&worker.root.data, data)),
        Start::Member { own, .. } => Own::Certified(own),
    };
    let mut control_plane = LocalControlPlane {
        starts: starts.map(|starts| MemberStarts {
            member_id: starts.member.0,
            count: starts.count,
        }),
        ..LocalControlPlane::default()
    };
    let mut handle = loop {
        let joins = async {
            match &own {
                Own::Certified(own) if role != FOUNDER => {
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
            report = data_reports.next() => {
                report_data(&mut control_plane, report?, role);
                worker.show(&control_plane, None);
            }
            slow_disk = slow_disks.next() => {
                control_plane.slow_disk = slow_disk?.map(|slow| slow.to_string());
                worker.show(&control_plane, None);
            }
            handle = handles.next() => break handle?,
            failure = joins => return Err(failure),
        }
    };
    worker.show(&control_plane, Some(&handle));
    console::report_once(Milestone::Consensus);

    let (own, founder) = match own {
        Own::Certifying(certifying) => {
            let founder = certifying.await??;
            founder.found(&handle).await?;
            (founder.own(), Some(founder))
        }
        Own::Certified(own) => (own, None),
    };
    // Nobody is told of the curator before both are done.
    let save = async {
        match &founder {
            Some(founder) => founder.save(&worker.root.data).await,
            None => Ok(()),
        }
    };
    let curator = start_curator(ctx, worker, &handle, own, peers);
    let (port, ()) = tokio::try_join!(curator, save)?;
    control_plane.curator_port = Some(port);
    worker.show(&control_plane, Some(&handle));
    console::report_once(Milestone::Curator);
    if let Some(founder) = founder {
        worker.founded.set(founder.founded());
    }
    ctx.healthy();
    loop {
        tokio::select! {
            // An etcd that has exited is restarted below this runnable; calls by its old handle
            // fail as unavailable.
            next = handles.next() => handle = next?,
            progress = progresses.next() => control_plane.progress = Some(progress?),
            report = data_reports.next() => report_data(&mut control_plane, report?, role),
            slow_disk = slow_disks.next() => {
                control_plane.slow_disk = slow_disk?.map(|slow| slow.to_string());
            }
        }
        worker.show(&control_plane, Some(&handle));
    }
}

/// Notes what etcd's data are like.
fn report_data(control_plane: &mut LocalControlPlane, report: Option<DataReport>, role: MemberId) {
    control_plane.data = report.map(|report| match report {
        DataReport::Damaged(damaged) => {
            control_plane.progress = None;
            EtcdData {
                damaged_member: Some(role.0),
                reason: damaged.damage.reason(),
                message: damaged.to_string(),
            }
        }
        DataReport::Undecided => EtcdData {
            damaged_member: None,
            reason: "MembersDiffer",
            message: "etcd's members have different data, and no majority of them agrees: remove the role \
                      consensus-member from the node whose data are damaged, or restore a backup"
                .into(),
        },
    });
}

/// What etcd publishes.
struct Etcd {
    handles: Watcher<RootHandle>,
    progresses: Watcher<ConsensusProgress>,
    data_reports: Watcher<Option<DataReport>>,
    slow_disks: Watcher<Option<SlowDisk>>,
}

/// The certificates with which the curator will serve.
enum Own {
    /// Of a new cluster's first node; being issued.
    Certifying(Blocking<Result<Founder, Failure>>),
    /// Of a member.
    Certified(Arc<OwnCertificate>),
}

/// Starts etcd below this runnable. A new handle is published each time etcd becomes ready.
fn start_consensus(
    ctx: &Context,
    worker: &Worker,
    start: &Start,
    peers: &PeerReadiness,
) -> Result<Etcd, Failure> {
    let (node_id, cluster_id) = match start {
        Start::Found(data) => (data.node_id, data.cluster_id),
        Start::Member { own, .. } => (own.node(), own.cluster()),
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
        hash_check_interval: worker.etcd_hash_check,
        binary: worker.etcd.clone(),
        peer_proxy: worker.peer_proxy,
        state: worker.cluster_state.clone(),
        log: worker.log_tree.clone(),
    });
    let (handle, handles) = event::value();
    let (progress, progresses) = event::value();
    let (data_report, data_reports) = event::value();
    let (slow_disk, slow_disks) = event::value();
    let out = Arc::new(hearth_consensus::Outputs {
        handle,
        progress,
        data_report,
        slow_disk,
    });
    ctx.run("consensus", move |ctx| {
        hearth_consensus::run(ctx, config.clone(), out.clone())
    })?;
    Ok(Etcd {
        handles: handles.watch(),
        progresses: progresses.watch(),
        data_reports: data_reports.watch(),
        slow_disks: slow_disks.watch(),
    })
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
