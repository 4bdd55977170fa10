//! The leading curator is partitioned from etcd, and reconnects.

use std::path::PathBuf;
use std::sync::Arc;

use hearth_api::client::Endpoint;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    GetClusterInfoRequest, GetCurrentLeaderRequest, GetCurrentLeaderResponse, NodeHealth,
    NodeState, WatchRequest,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::state;
use hearth_consensus::RootClient;
use hearth_consensus::fenced::{Condition, Write, WriteError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::{Code, Streaming};

use super::super::testing::{Pulse, Who, World, id_of, quick};

/// A proxy to etcd that forwards nothing while it is cut. The connections stay open.
pub(super) struct Way {
    pub(super) cut: watch::Sender<bool>,
    pub(super) socket: PathBuf,
    _folder: tempfile::TempDir,
    _tasks: JoinSet<()>,
}

impl Way {
    pub(super) fn to(etcd: PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("etcd");
        let listener = UnixListener::bind(&socket).unwrap();
        let (cut, is_cut) = watch::channel(false);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut pipes = JoinSet::new();
            while let Ok((here, _)) = listener.accept().await {
                let Ok(there) = UnixStream::connect(&etcd).await else {
                    continue;
                };
                let (from_here, to_here) = here.into_split();
                let (from_there, to_there) = there.into_split();
                pipes.spawn(pipe(from_here, to_there, is_cut.clone()));
                pipes.spawn(pipe(from_there, to_here, is_cut.clone()));
            }
        });
        Self {
            cut,
            socket,
            _folder: folder,
            _tasks: tasks,
        }
    }
}

async fn pipe(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut cut: watch::Receiver<bool>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if cut.wait_for(|cut| !cut).await.is_err() || to.write_all(&buffer[..count]).await.is_err()
        {
            return;
        }
    }
}

async fn leaders(world: &World, at: Endpoint) -> Streaming<GetCurrentLeaderResponse> {
    let mut local = CuratorLocalClient::new(world.channel_to(at, &Who::Nobody));
    let call = local.get_current_leader(GetCurrentLeaderRequest {});
    within_timeout("leaders", call).await.unwrap().into_inner()
}

/// Waits until this node leads, according to the curator at this endpoint.
async fn leads(world: &World, at: Endpoint, node: String) {
    within_timeout("a leader", async {
        loop {
            let mut leaders = leaders(world, at.clone()).await;
            while let Ok(Some(leader)) = leaders.message().await {
                if leader.leader_node_id == node {
                    return;
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_cut_off_neither_leads_nor_acknowledges() {
    let mut world = World::new(quick()).await;
    let other = Arc::new(world.add_node(NodeState::Up).await);
    let way = Way::to(world.site.config(false).socket_dir.join("client:0"));
    let etcd = RootClient::new(way.socket.clone());

    // The curator behind the proxy is the only one, so it leads; then the first one starts again
    // and does not lead.
    world.stop_curator().await;
    let (cut_off, ready) = world.curator_through(&etcd, &other).await;
    let there = Endpoint::new(std::net::Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());
    leads(&world, there.clone(), id_of(&other).to_string()).await;
    world.start_curator().await;
    leads(&world, world.endpoint(), id_of(&other).to_string()).await;
    let candidates = world.client().list("election/").await.unwrap().records;
    let leader = candidates.iter().min_by_key(|c| c.create_revision).unwrap();
    let fence = Condition::Created(leader.key.clone(), leader.create_revision);

    let node = world.node.clone();
    let mut pulse = Pulse::open_at(there.clone(), &world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    let channel = world.channel_to(there.clone(), &Who::Node(&node));
    let call = CuratorClient::new(channel)
        .watch(WatchRequest::default())
        .await;
    let mut events = call.unwrap().into_inner();

    way.cut.send_replace(true);
    // Its streams end, and it does not answer calls that need recent records.
    let end = within_timeout("the watch ends", async {
        loop {
            if let Err(status) = events.message().await {
                return status;
            }
        }
    })
    .await;
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    // Nothing was sent meanwhile: the end of the stream may be detected first.
    let end = pulse.end().await.code();
    let ends = [Code::Unavailable, Code::DeadlineExceeded];
    assert!(ends.contains(&end), "{end:?}");
    let owner = world.owner().await;
    let channel = world.channel_to(there.clone(), &Who::User(&owner));
    let mut management = ManagementClient::new(channel);
    let refused = management.get_cluster_info(GetClusterInfoRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    // The other one leads once the session has expired, and serves all the time.
    leads(&world, world.endpoint(), world.site.node_id.to_string()).await;
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    assert_eq!(world.health(id_of(&node)).await, NodeHealth::Healthy);

    // Writes of the former leader are refused, however late.
    let late = Write::when(fence).put(state::status_key(id_of(&node)), vec![1]);
    let late = world.client().write(late).await;
    assert!(matches!(late, Err(WriteError::Conflict)), "{late:?}");

    // After the partition it serves again, and sees the new leader.
    way.cut.send_replace(false);
    within_timeout("it serves again", async {
        while management
            .get_cluster_info(GetClusterInfoRequest {})
            .await
            .is_err()
        {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
    leads(&world, there, world.site.node_id.to_string()).await;
    within_timeout("the curator stops", cut_off.shutdown()).await;
    world.stop().await;
}
