//! Failures of etcd: paused, killed, lease lost, history compacted.

use std::time::{Duration, Instant};

use hearth_api::v1::{GetClusterInfoRequest, NodeHealth, NodeState, WatchRequest};
use hearth_base::testing::within_timeout;
use hearth_consensus::testing::compact;
use nix::sys::signal::Signal;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::super::Timing;
use super::super::testing::{Pulse, Who, World, id_of, quick};

#[tokio::test(flavor = "multi_thread")]
async fn without_consensus_a_curator_says_so_and_afterwards_goes_on() {
    let world = World::new(Timing {
        read_interval: quick().read_interval,
        ..Default::default()
    })
    .await;
    let id = world.site.node_id;
    let mut management = world.management().await;
    let mut health = HealthClient::new(world.channel(&Who::Nobody));
    let check = |service: &str| HealthCheckRequest {
        service: service.into(),
    };
    for service in ["", "hearth.v1.Curator", "hearth.v1.Management"] {
        let answer = health.check(check(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = health.check(check("x")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);

    let mut curator = world.curator(&world.node);
    let mut events = curator
        .watch(WatchRequest::default())
        .await
        .unwrap()
        .into_inner();
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();

    world.site.pause_etcd().await;
    let begin = Instant::now();
    let end = within_timeout("the watch ends", async {
        loop {
            if let Err(status) = events.message().await {
                return status;
            }
        }
    })
    .await;
    let after = begin.elapsed();
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    // Three seconds of freshness, and some margin for a busy machine.
    assert!(after < Duration::from_secs(5), "{after:?}");
    assert_eq!(pulse.end().await.code(), Code::Unavailable);
    let begin = Instant::now();
    let refused = management.get_cluster_info(GetClusterInfoRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "it is refused at once"
    );
    within_timeout("health is NOT_SERVING", async {
        loop {
            let answer = health.check(check("")).await.unwrap().into_inner();
            if answer.status() == ServingStatus::NotServing {
                return;
            }
        }
    })
    .await;

    world.site.signal_etcd(Signal::SIGCONT);
    within_timeout("calls are answered again", async {
        while management
            .get_cluster_info(GetClusterInfoRequest {})
            .await
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    // The node was not declared lost while the curator could not acknowledge.
    assert_ne!(world.health(id).await, NodeHealth::Timeout);
    within_timeout("a heartbeat is acknowledged", async {
        loop {
            let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
            if pulse.beat().await.is_ok() {
                return;
            }
        }
    })
    .await;
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_curator_outlives_its_etcd() {
    let world = World::new(quick()).await;
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    let mut handles = world.etcd.handles.watch();
    handles.next().await.unwrap();
    world.site.signal_etcd(Signal::SIGKILL);
    within_timeout("etcd serves again", handles.next())
        .await
        .unwrap();
    // etcd was down for less than the freshness bound, so nothing has failed.
    within_timeout("a heartbeat is acknowledged", async {
        while pulse.beat().await.is_err() {
            pulse = Pulse::open(&world, &world.node).await.unwrap();
        }
    })
    .await;
    let node = world.add_node(NodeState::Up).await;
    assert_eq!(world.nodes().await.len(), 2);
    assert_eq!(world.health(id_of(&node)).await, NodeHealth::Unknown);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_lapsed_is_begun_again() {
    let timing = Timing {
        freshness: Duration::from_secs(20),
        ..quick()
    };
    let world = World::new(timing).await;
    let id = world.site.node_id;
    let mut pulse = Pulse::open(&world, &world.node).await.unwrap();
    pulse.beat().await.unwrap();
    // As if it had expired: the lease is revoked, and the key with it.
    let key = hearth_cluster::state::liveness_key(id);
    let lease = world.client().get(&key).await.unwrap().unwrap().lease;
    let lease = hearth_consensus::Lease::from_id(lease);
    world.client().revoke(lease).await.unwrap();
    world.becomes(id, NodeHealth::Unknown).await;
    // The next heartbeat is acknowledged only under a new session.
    pulse.beat().await.unwrap();
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    within_timeout("the node is attached to a new session", async {
        loop {
            pulse.beat().await.unwrap();
            let record = world.client().get(&key).await.unwrap();
            if record.is_some_and(|record| record.lease != lease.id()) {
                return;
            }
        }
    })
    .await;
    assert_eq!(world.health(id).await, NodeHealth::Healthy);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_history_is_read_anew() {
    let mut world = World::new(quick()).await;
    // The watch of a curator that starts late begins before the compaction.
    let client = world.client();
    let mut old = client.watch(1).await.unwrap();
    within_timeout("the first changes", old.next())
        .await
        .unwrap();
    let revision = client.list("").await.unwrap().revision;
    compact(world.etcd.handle().root(), revision).await;
    let mut late = client.watch(1).await.unwrap();
    let end = within_timeout("the end", async {
        loop {
            if let Err(end) = late.next().await {
                return end;
            }
        }
    });
    assert!(matches!(
        end.await,
        hearth_consensus::WatchEnd::Compacted(_)
    ));
    // The running curator continues, and a new one can start.
    world.add_node(NodeState::Up).await;
    assert_eq!(world.nodes().await.len(), 2);
    world.stop_curator().await;
    world.start_curator().await;
    assert_eq!(world.nodes().await.len(), 2);
    world.stop().await;
}
