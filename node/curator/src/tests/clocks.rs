//! Clocks that differ, and clocks that jump.
//!
//! A curator uses its wall clock only to verify certificates: leases are timed by etcd, heartbeats
//! and freshness by the monotonic clock. So with two curators whose clocks differ by five minutes,
//! and one of which then jumps by an hour, no node and no session may be affected.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::testing::Ahead;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::{GetCurrentLeaderRequest, NodeHealth, NodeState, WatchEvent, WatchRequest};
use hearth_base::testing::within_timeout;
use hearth_cluster::state;
use tokio::time::Instant;
use tonic::Streaming;

use super::super::testing::{Pulse, Who, World, id_of, quick};

/// All liveness and candidate records with their leases: a record that expires and is written again
/// differs.
async fn sessions(world: &World) -> BTreeMap<String, i64> {
    let mut sessions = BTreeMap::new();
    for prefix in [state::ELECTION, state::LIVENESS] {
        for record in world.client().list(prefix).await.unwrap().records {
            sessions.insert(record.key, record.lease);
        }
    }
    sessions
}

/// Fails when a node is reported as not healthy after it was healthy.
async fn all_stay_healthy(mut events: Streaming<WatchEvent>) {
    let mut healthy = std::collections::BTreeSet::new();
    loop {
        let event = events.message().await.expect("the watch continues");
        for node in event.expect("the watch continues").nodes {
            match node.health() {
                NodeHealth::Healthy => drop(healthy.insert(node.id)),
                other => assert!(!healthy.contains(&node.id), "{}: {other:?}", node.id),
            }
        }
    }
}

/// Keeps a node alive for so long; each heartbeat is acknowledged.
async fn beats_for(pulse: &mut Pulse, time: Duration) {
    let begin = Instant::now();
    let mut due = tokio::time::interval(quick().heartbeat_interval);
    while begin.elapsed() < time {
        due.tick().await;
        pulse.beat().await.expect("an acknowledgement");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_differ_and_clocks_that_jump_are_noticed_by_nobody() {
    let mut world = World::new(quick()).await;
    let second = Arc::new(world.add_node(NodeState::Up).await);
    let (here, there) = (
        world.add_node(NodeState::Up).await,
        world.add_node(NodeState::Up).await,
    );
    let (leading, other) = (Ahead::by(0), Ahead::by(5 * 60));
    world.stop_curator().await;
    let (leader, ready) = world.curator_by(leading.clone(), &world.node).await;
    let leader_at = Endpoint::new(Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());
    world.ready = ready;
    let (follower, ready) = world.curator_by(other.clone(), &second).await;
    let other_at = Endpoint::new(Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());

    let mut pulses = [
        Pulse::open_at(leader_at.clone(), &world, &here)
            .await
            .unwrap(),
        Pulse::open_at(other_at.clone(), &world, &there)
            .await
            .unwrap(),
    ];
    for pulse in &mut pulses {
        pulse.beat().await.unwrap();
    }
    let mut watches = Vec::new();
    for at in [&leader_at, &other_at] {
        let channel = world.channel_to(at.clone(), &Who::Node(&world.node));
        let call = CuratorClient::new(channel)
            .watch(WatchRequest::default())
            .await;
        watches.push(call.unwrap().into_inner());
    }
    let [first_watch, second_watch] = <[_; 2]>::try_from(watches).unwrap();
    let before = sessions(&world).await;
    assert_eq!(before.len(), 4, "two curators, two nodes: {before:?}");
    let mut local = CuratorLocalClient::new(world.channel_to(other_at, &Who::Nobody));
    let leaders = local.get_current_leader(GetCurrentLeaderRequest {}).await;
    let mut leaders = leaders.unwrap().into_inner();
    let led = within_timeout("the leader", leaders.message())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(led.leader_node_id, world.site.node_id.to_string());

    // Longer than the session's lease and the heartbeat timeout, by each of these clocks.
    let while_ = quick().session.unwrap() + quick().heartbeat_bound;
    let [pulse, other_pulse] = &mut pulses;
    let scenario = async {
        for (mine, theirs) in [(0, 300), (3600, 300), (0, 300), (0, 3600)] {
            leading.set(mine);
            other.set(theirs);
            tokio::join!(beats_for(pulse, while_), beats_for(other_pulse, while_));
        }
    };
    tokio::select! {
        () = scenario => {}
        () = all_stay_healthy(first_watch) => {}
        () = all_stay_healthy(second_watch) => {}
        change = leaders.message() => panic!("{change:?}"),
    }
    assert_eq!(sessions(&world).await, before, "no lease has expired");
    for node in [&here, &there] {
        assert_eq!(world.health(id_of(node)).await, NodeHealth::Healthy);
    }
    within_timeout("the curators stop", follower.shutdown()).await;
    within_timeout("the curators stop", leader.shutdown()).await;
    world.etcd.stop().await;
}
