//! Status, watch and heartbeats of nodes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_api::client::Endpoint;
use hearth_api::identity::NodeCredentials;
use hearth_api::tls::wall_clock;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::{
    ClusterState, GetClusterInfoRequest, GetCurrentLeaderRequest, GetNodesRequest,
    HeartbeatRequest, Node, NodeHealth, NodeState, NodeStatus, UpdateNodeStatusRequest, WatchEvent,
    WatchRequest,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::state::{self, LivenessRecord};
use hearth_consensus::Lease;
use hearth_consensus::fenced::{Condition, EPOCH, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tonic::{Code, Status, Streaming};

use super::super::testing::{BOOT_ID, Pulse, Who, World, id_of, quick};

fn status(address: &str) -> NodeStatus {
    NodeStatus {
        external_address: address.into(),
        curator_port: 7835,
        version: "0.1.0".into(),
        boot_id: BOOT_ID.into(),
        sent_at: 1,
        cluster_state: ClusterState::Home.into(),
        consensus: None,
        address_counter: 1,
        conditions: Vec::new(),
        recorded_settings: None,
        time: None,
        second_address: String::new(),
        damaged_member_id: None,
        etcd_starts: None,
        storage: None,
    }
}

async fn report(
    world: &World,
    node: &NodeCredentials,
    node_id: &str,
    status: Option<NodeStatus>,
) -> Result<(), Status> {
    let node_id = node_id.to_owned();
    let request = UpdateNodeStatusRequest { node_id, status };
    let mut curator = world.curator(node);
    within_timeout("a report", curator.update_node_status(request))
        .await
        .map(drop)
}

/// The state of a watcher: each node's state and health.
#[derive(Default)]
struct Picture {
    nodes: BTreeMap<String, (NodeState, NodeHealth)>,
    complete: usize,
}

impl Picture {
    fn take_in(&mut self, event: WatchEvent) {
        for node in event.nodes {
            let seen = (node.state(), node.health());
            self.nodes.insert(node.id, seen);
        }
        for id in event.tombstones {
            self.nodes.remove(&id);
        }
        self.complete += usize::from(event.backlog_complete);
    }

    async fn until(&mut self, events: &mut Streaming<WatchEvent>, wanted: impl Fn(&Self) -> bool) {
        within_timeout("what is watched for", async {
            while !wanted(self) {
                self.take_in(events.message().await.unwrap().unwrap());
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_sees_what_there_is_and_what_becomes_of_it() {
    let world = World::new(quick()).await;
    let first = world.site.node_id.to_string();
    let other = world.add_node(NodeState::Up).await;
    let id = id_of(&other).to_string();
    let mut curator = world.curator(&world.node);
    let watch = |node_id: String| WatchRequest { node_id };

    let mut all = curator
        .watch(watch(String::new()))
        .await
        .unwrap()
        .into_inner();
    let mut picture = Picture::default();
    picture.until(&mut all, |p| p.complete == 1).await;
    assert_eq!(picture.nodes.keys().collect::<Vec<_>>().len(), 2);

    let third = world.add_node(NodeState::New).await;
    let third_id = id_of(&third).to_string();
    picture
        .until(&mut all, |p| p.nodes.contains_key(&third_id))
        .await;
    assert_eq!(
        picture.nodes[&third_id],
        (NodeState::New, NodeHealth::Unknown)
    );

    // One node alone, with its end.
    let mut only = curator.watch(watch(id.clone())).await.unwrap().into_inner();
    let mut of_one = Picture::default();
    of_one.until(&mut only, |p| p.complete == 1).await;
    assert_eq!(of_one.nodes.keys().collect::<Vec<_>>(), [&id]);
    world.delete_node(id_of(&third)).await;
    world.delete_node(id_of(&other)).await;
    of_one.until(&mut only, |p| p.nodes.is_empty()).await;
    picture
        .until(&mut all, |p| p.nodes.keys().eq([&first]))
        .await;
    assert_eq!((picture.complete, of_one.complete), (1, 1));

    // A node that does not exist.
    let mut gone = curator.watch(watch(id.clone())).await.unwrap().into_inner();
    let event = within_timeout("an event", gone.message())
        .await
        .unwrap()
        .unwrap();
    assert!(event.backlog_complete && event.tombstones == [id]);
    let refused = curator.watch(watch("x".into())).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_knows_how_current_it_is() {
    let world = World::new(quick()).await;
    let own = world.site.node_id.to_string();
    let other = world.add_node(NodeState::Up).await;
    let mut curator = world.curator(&world.node);
    let mut watches = Vec::new();
    for node_id in [String::new(), own.clone()] {
        let call = curator.watch(WatchRequest { node_id });
        let mut events = within_timeout("a watch", call).await.unwrap().into_inner();
        let first = within_timeout("the backlog", events.message())
            .await
            .unwrap();
        let first = first.unwrap();
        assert!(first.backlog_complete && first.progress > 0, "{first:?}");
        watches.push((events, first.progress));
    }
    // The first watcher gets the change; the second gets only the revision.
    let other_id = id_of(&other).to_string();
    report(&world, &other, &other_id, Some(status("192.0.2.9")))
        .await
        .unwrap();
    let epoch = world.client().get(EPOCH).await.unwrap().unwrap();
    for (index, (events, begun)) in watches.iter_mut().enumerate() {
        let mut last = *begun;
        let mut seen = false;
        within_timeout("progress", async {
            while last < epoch.mod_revision {
                let event = events.message().await.unwrap().unwrap();
                assert!(
                    event.progress >= last && !event.backlog_complete,
                    "{event:?}"
                );
                last = event.progress;
                seen |= event.nodes.iter().any(|node| node.id == other_id);
            }
        })
        .await;
        assert_eq!(seen, index == 0, "only the first watcher gets the change");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_of_the_boot_before_is_not_taken_for_health() {
    let world = World::new(quick()).await;
    let (id, own) = (world.site.node_id, world.site.node_id.to_string());
    report(&world, &world.node, &own, Some(status("192.0.2.1")))
        .await
        .unwrap();
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat_as("next-boot").await.unwrap();
    let node = world.nodes().await.remove(0);
    assert_eq!(node.health(), NodeHealth::Unknown);
    assert!(node.health_reason.contains("rebooted"), "{node:?}");
    let next = NodeStatus {
        boot_id: "next-boot".into(),
        ..status("192.0.2.1")
    };
    report(&world, &world.node, &own, Some(next)).await.unwrap();
    world.becomes(id, NodeHealth::Healthy).await;
    world.stop().await;
}

/// Reads until some node has this address.
async fn reads_until(events: &mut Streaming<WatchEvent>, address: &str) {
    let has = |node: &Node| {
        let status = node.status.as_ref();
        status.is_some_and(|status| status.external_address == address)
    };
    loop {
        let event = events.message().await.unwrap().unwrap();
        if event.nodes.iter().any(has) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_watchers_hold_up_nobody_and_miss_no_end() {
    const LAST: &str = "192.0.2.49";
    let world = World::new(quick()).await;
    let (mut slow, mut fast) = (Vec::new(), JoinSet::new());
    // A connection permits a hundred streams.
    for _ in 0..5 {
        let mut curator = world.curator(&world.node);
        for _ in 0..50 {
            let call = curator.watch(WatchRequest::default());
            slow.push(within_timeout("a watch", call).await.unwrap().into_inner());
            let call = curator.watch(WatchRequest::default());
            let mut events = within_timeout("a watch", call).await.unwrap().into_inner();
            fast.spawn(async move { within_timeout(LAST, reads_until(&mut events, LAST)).await });
        }
    }
    assert_eq!(slow.len() + fast.len(), 500);
    let id = world.site.node_id;
    for number in 0..50_u32 {
        let address = format!("192.0.2.{number}");
        report(&world, &world.node, &id.to_string(), Some(status(&address)))
            .await
            .unwrap();
    }
    // The slow watchers have read nothing yet, and the fast ones need not wait for them.
    within_timeout("all that are fast", async {
        while let Some(read) = fast.join_next().await {
            read.unwrap();
        }
    })
    .await;
    // Each gets the last state, however late it begins to read.
    for events in &mut slow {
        within_timeout("the last state", reads_until(events, LAST)).await;
    }
    world.stop().await;
}

/// A watcher takes a stream without events for dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_to_whose_nodes_nothing_happens_is_told_so() {
    let world = World::new(quick()).await;
    let mut curator = world.curator(&world.node);
    let call = curator.watch(WatchRequest::default());
    let mut events = within_timeout("a watch", call).await.unwrap().into_inner();
    let mut last = -1;
    within_timeout("two marks with the same revision", async {
        loop {
            let event = events.message().await.unwrap().unwrap();
            let is_mark = event.nodes.is_empty() && event.tombstones.is_empty();
            if is_mark && event.progress == last {
                return;
            }
            last = event.progress;
        }
    })
    .await;
    world.stop().await;
}

/// A connection with small receive windows.
async fn narrow(world: &World, node: &NodeCredentials) -> tonic::transport::Channel {
    let config = hearth_api::testing::node_client_config(node, wall_clock());
    let address = (Ipv4Addr::LOCALHOST, world.ready.get().unwrap());
    let connector = tower::service_fn(move |_| {
        let tls = TlsConnector::from(config.clone());
        async move {
            let tcp = TcpStream::connect(address).await?;
            let stream = tls.connect(IpAddr::V4(address.0).into(), tcp).await?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    tonic::transport::Endpoint::from_static("http://curator.invalid")
        .initial_stream_window_size(1 << 10)
        .connect_with_connector(connector)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_read_is_not_heard_and_burdens_nobody() {
    let world = World::new(quick()).await;
    let deaf = world.add_node(NodeState::Up).await;
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    let mut curator = CuratorClient::new(narrow(&world, &deaf).await);
    let beat = || HeartbeatRequest {
        boot_id: BOOT_ID.into(),
        protocol_version: 1,
        ending: false,
    };
    let beats = futures::stream::repeat_with(beat).then(|beat| async move {
        tokio::time::sleep(Duration::from_millis(2)).await;
        beat
    });
    let answers = curator.heartbeat(beats).await;
    let mut answers = answers.unwrap().into_inner();
    within_timeout("an answer", answers.message())
        .await
        .unwrap();

    // It continues to send, and the curator cannot send its answers.
    let keep = async {
        loop {
            pulse.beat().await.unwrap();
            tokio::time::sleep(quick().heartbeat_interval).await;
        }
    };
    let given_up = async {
        world.becomes(id_of(&deaf), NodeHealth::Timeout).await;
        assert_eq!(world.health(world.site.node_id).await, NodeHealth::Healthy);
        // As soon as it reads, its stream can continue.
        let read = async { while answers.message().await.is_ok() {} };
        tokio::select! {
            () = read => panic!("the stream has ended"),
            _ = world.becomes(id_of(&deaf), NodeHealth::Healthy) => {}
        }
    };
    tokio::select! {
        never = keep => never,
        () = given_up => {}
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_reports_about_itself_and_only_news_is_written() {
    let world = World::new(quick()).await;
    let own = world.site.node_id.to_string();
    let other = world.add_node(NodeState::Up).await;
    let client = world.client();
    let epoch = || async { client.get(EPOCH).await.unwrap().unwrap().mod_revision };

    let refused = report(&world, &other, &own, Some(status("192.0.2.1"))).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    let refused = report(&world, &world.node, "", Some(status("192.0.2.1"))).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    let refused = report(&world, &world.node, &own, None).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);

    report(&world, &world.node, &own, Some(status("192.0.2.1")))
        .await
        .unwrap();
    let nodes = world.nodes().await;
    let node = nodes.iter().find(|node| node.id == own).unwrap();
    assert_eq!(node.status, Some(status("192.0.2.1")));
    assert_eq!(node.labels, world.data.seed.labels);
    let before = epoch().await;
    let later = NodeStatus {
        sent_at: 99,
        ..status("192.0.2.1")
    };
    report(&world, &world.node, &own, Some(later))
        .await
        .unwrap();
    assert_eq!(epoch().await, before, "nothing was written");

    // Its address is now in the directory and in the answer about the leader.
    let mut management = world.management().await;
    let info = management
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    let [listed] = &info.directory.unwrap().nodes[..] else {
        panic!("consensus members only");
    };
    assert_eq!(
        (&listed.id, &listed.addresses[0].host[..]),
        (&own, "192.0.2.1")
    );
    let mut local = CuratorLocalClient::new(world.channel(&Who::Nobody));
    let call = local.get_current_leader(GetCurrentLeaderRequest {});
    let mut leaders = within_timeout("leaders", call).await.unwrap().into_inner();
    within_timeout("the leader", async {
        loop {
            let leader = leaders.message().await.unwrap().unwrap();
            if leader.leader_node_id == own && leader.leader_host == "192.0.2.1" {
                assert_eq!(
                    (leader.leader_port, leader.this_node_id == own),
                    (7835, true)
                );
                return;
            }
        }
    })
    .await;
    // When its address changes, so does the answer about the leader.
    report(&world, &world.node, &own, Some(status("192.0.2.2")))
        .await
        .unwrap();
    let moved = within_timeout("the move", leaders.message())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(moved.leader_host, "192.0.2.2");

    let filter = GetNodesRequest {
        states: vec![NodeState::Decommissioned.into()],
        ..Default::default()
    };
    let mut none = management.get_nodes(filter).await.unwrap().into_inner();
    let answer = within_timeout("an answer", none.message())
        .await
        .unwrap()
        .unwrap();
    assert!(answer.nodes.is_empty());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_healthy_while_it_is_heard_and_not_long_after() {
    let timing = quick();
    let world = World::new(timing).await;
    let id = world.site.node_id;
    assert_eq!(world.health(id).await, NodeHealth::Unknown);

    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    let answer = pulse.beat().await.unwrap();
    assert_eq!((answer.interval_ms, answer.bound_ms), (100, 2000));
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    let node = world.nodes().await.remove(0);
    assert!(node.health_reason.is_empty() && node.heartbeat_age_ms.is_some());

    // Heartbeats themselves do not write to etcd.
    let client = world.client();
    let before = client.get(EPOCH).await.unwrap().unwrap().mod_revision;
    for _ in 0..20 {
        pulse.beat().await.unwrap();
    }
    let after = client.get(EPOCH).await.unwrap().unwrap().mod_revision;
    assert_eq!(before, after);

    // A stream that ends and is opened again does not change the health.
    drop(pulse);
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    // Of two streams the newer one counts.
    let mut newer = Pulse::open(&world, &world.node).await.unwrap();
    newer.beat().await.unwrap();
    assert_eq!(pulse.beat().await.unwrap_err().code(), Code::Aborted);
    newer.beat().await.unwrap();

    drop(newer);
    let took = world.becomes(id, NodeHealth::Timeout).await;
    assert!(took >= timing.heartbeat_bound / 2, "{took:?}");
    assert!(took < timing.heartbeat_bound * 2, "{took:?}");
    let reason = world.nodes().await.remove(0).health_reason;
    assert!(reason.contains("no heartbeat for 2 s"), "{reason}");

    // And it recovers.
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    // The stream of a node without heartbeats is ended, too.
    let begin = std::time::Instant::now();
    assert_eq!(pulse.end().await.code(), Code::DeadlineExceeded);
    assert!(begin.elapsed() < timing.heartbeat_bound * 2);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_was_written_late_does_not_keep_a_node_alive() {
    let world = World::new(quick()).await;
    let (client, own) = (world.client(), world.site.node_id);
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    // The write of an earlier stream, which is executed late.
    let key = state::liveness_key(own);
    let record = client.get(&key).await.unwrap().unwrap();
    let lease = Lease::from_id(record.lease);
    let again = Write::when(Condition::Unchanged(key.clone(), record.mod_revision));
    let again = again.put_leased(key, record.value, lease);
    client.write(again).await.unwrap();
    // And that of a stream that ended before it was answered.
    let other = id_of(&world.add_node(NodeState::Up).await);
    let key = state::liveness_key(other);
    let value = LivenessRecord::HeardBy(own).encode(BOOT_ID);
    let orphan = Write::when(Condition::Absent(key.clone())).put_leased(key, value, lease);
    client.write(orphan).await.unwrap();
    for id in [own, other] {
        assert_eq!(world.health(id).await, NodeHealth::Healthy);
    }
    pulse.beat().await.unwrap();
    drop(pulse);
    for id in [own, other] {
        world.becomes(id, NodeHealth::Timeout).await;
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_says_what_it_has_to() {
    let world = World::new(quick()).await;
    for wrong in ["", "a b", &"x".repeat(65)] {
        let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
        let refused = pulse.beat_as(wrong).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{wrong:?}");
    }
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat_as("one-boot").await.unwrap();
    let refused = pulse.beat_as("another-boot").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // A new boot, at the same address, opens a new stream.
    let reported = world.report_as("one-boot", &world.node, "127.0.0.1");
    reported.await.unwrap();
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat_as("another-boot").await.unwrap();

    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beats.send(Default::default()).await.unwrap();
    assert_eq!(pulse.end().await.code(), Code::FailedPrecondition);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_lost_its_curator_has_a_grace() {
    let mut world = World::new(quick()).await;
    let id = world.site.node_id;
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    world.stop_curator().await;
    assert!(pulse.beat().await.is_err());

    // The restarted curator ignores the records of its former session.
    world.start_curator().await;
    assert_eq!(world.health(id).await, NodeHealth::Unknown);
    let node = world.nodes().await.remove(0);
    assert!(
        node.health_reason
            .contains("no curator receives its heartbeats"),
        "{node:?}"
    );
    let took = world.becomes(id, NodeHealth::Timeout).await;
    assert!(took < quick().grace * 3, "{took:?}");
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_curators_serve_the_same_cluster() {
    let mut world = World::new(quick()).await;
    let other = Arc::new(world.add_node(NodeState::Up).await);
    let (second, ready) = world.curator_of(&other).await;
    let port = ready.get().unwrap();
    let there = || Endpoint::new(Ipv4Addr::LOCALHOST.into(), port);
    let id = world.site.node_id;

    // A node is healthy at both curators; when it moves to the second, the first stops tracking it.
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    let channel = world.channel_to(there(), &Who::Node(&other));
    let mut events = CuratorClient::new(channel)
        .watch(WatchRequest::default())
        .await
        .unwrap()
        .into_inner();
    let mut picture = Picture::default();
    let healthy = |p: &Picture| {
        let node = p.nodes.get(&id.to_string());
        node.is_some_and(|(_, health)| *health == NodeHealth::Healthy)
    };
    picture.until(&mut events, healthy).await;
    let mut moved = Pulse::open_at(there(), &world, &world.node).await.unwrap();
    moved.beat().await.unwrap();
    let authorize_departure = within_timeout("the first curator stops tracking the node", async {
        loop {
            if let Err(status) = pulse.beat().await {
                return status;
            }
        }
    });
    assert_eq!(authorize_departure.await.code(), Code::Aborted);
    moved.beat().await.unwrap();

    // The first one leads; when it stops, the second leads, and the node that is connected to the
    // second stays healthy.
    let channel = world.channel_to(there(), &Who::Nobody);
    let mut leaders = CuratorLocalClient::new(channel)
        .get_current_leader(GetCurrentLeaderRequest {})
        .await
        .unwrap()
        .into_inner();
    let mut leads = async |node: String| {
        within_timeout("a leader", async {
            while leaders.message().await.unwrap().unwrap().leader_node_id != node {}
        })
        .await;
    };
    leads(id.to_string()).await;
    world.stop_curator().await;
    leads(id_of(&other).to_string()).await;
    moved.beat().await.unwrap();
    within_timeout("the second curator stops", second.shutdown()).await;
    world.start_curator().await;
    world.stop().await;
}
