//! Nodes that ask for more than their share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hearth_api::client::Channel;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::{
    ClusterState, IssueCertificateRequest, NodeState, NodeStatus, UpdateNodeStatusRequest,
    WatchEvent, WatchRequest,
};
use hearth_base::testing::within_timeout;
use hearth_consensus::fenced::EPOCH;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use super::super::Timing;
use super::super::budget::{self, Rate};
use super::super::testing::{BOOT_ID, Pulse, Who, World, id_of, quick, unlimited};
use super::machine::Machine;

fn timing(budget: budget::Limits) -> Timing {
    Timing { budget, ..quick() }
}

/// A status that differs from that with another number.
fn status(number: u32) -> NodeStatus {
    NodeStatus {
        external_address: "192.0.2.1".into(),
        curator_port: 7835,
        version: format!("0.1.{number}"),
        boot_id: BOOT_ID.into(),
        cluster_state: ClusterState::Home.into(),
        ..NodeStatus::default()
    }
}

async fn report(
    mut curator: CuratorClient<Channel>,
    node_id: String,
    number: u32,
) -> Result<(), Status> {
    let status = Some(status(number));
    let request = UpdateNodeStatusRequest { node_id, status };
    curator.update_node_status(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reports_all_the_time_fills_no_store() {
    let every = Duration::from_millis(200);
    let limits = budget::Limits {
        status: Rate { burst: 4, every },
        ..unlimited()
    };
    let world = World::new(timing(limits)).await;
    let hostile = Arc::new(world.add_node(NodeState::Up).await);
    let client = world.client();
    let revision = async || client.get(EPOCH).await.unwrap().unwrap().mod_revision;
    let id = id_of(&hostile).to_string();
    let before = revision().await;
    let began = Instant::now();
    let (numbers, ended) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut flood = JoinSet::new();
    for _ in 0..16 {
        let curator = CuratorClient::new(world.channel(&Who::Node(&hostile)));
        let (numbers, ended) = (numbers.clone(), ended.clone());
        let id = id.clone();
        flood.spawn(async move {
            let mut superseded = 0_u32;
            while !ended.load(Ordering::Relaxed) {
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                match report(curator.clone(), id.clone(), number).await {
                    Ok(()) => {}
                    Err(status) if status.code() == Code::Aborted => superseded += 1,
                    Err(status) => panic!("{status}"),
                }
            }
            superseded
        });
    }
    // Somebody else is not held up.
    for number in 0..10 {
        world
            .report(&world.node, &format!("192.0.2.{}", number + 10))
            .await;
    }
    tokio::time::sleep(every * 5).await;
    ended.store(true, Ordering::Relaxed);
    let superseded: u32 = flood.join_all().await.into_iter().sum();
    let elapsed = began.elapsed().as_millis() / every.as_millis();
    let written = revision().await - before;
    // Revisions are of all writes; the others are those of the node in order.
    let permitted = 4 + i64::try_from(elapsed).unwrap() + 1 + 10;
    assert!(written <= permitted, "{written} of at most {permitted}");
    assert!(superseded > 0, "all of {numbers:?} were taken");

    // The last word is kept.
    let curator = CuratorClient::new(world.channel(&Who::Node(&hostile)));
    let last = numbers.load(Ordering::Relaxed) + 1;
    within_timeout("the last report", report(curator, id.clone(), last))
        .await
        .unwrap();
    let nodes = world.nodes().await;
    let node = nodes.iter().find(|node| node.id == id).unwrap();
    assert_eq!(node.status.as_ref().unwrap().version, status(last).version);
    world.stop().await;
}

async fn end(stream: &mut Streaming<WatchEvent>) -> Code {
    within_timeout("the end of the stream", async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return Code::Ok,
                Err(status) => return status.code(),
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_streams_the_newest_are_kept() {
    let limits = budget::Limits {
        watches: 2,
        heartbeats: 1,
        ..unlimited()
    };
    let world = World::new(timing(limits)).await;
    let mut curator = world.curator(&world.node);
    let mut streams = Vec::new();
    for _ in 0..4 {
        let stream = curator.watch(WatchRequest::default()).await.unwrap();
        streams.push(stream.into_inner());
    }
    assert_eq!(end(&mut streams[0]).await, Code::Aborted);
    assert_eq!(end(&mut streams[1]).await, Code::Aborted);
    for stream in &mut streams[2..] {
        within_timeout("an event", stream.message())
            .await
            .unwrap()
            .unwrap();
    }
    // Others have their own.
    let other = world.add_node(NodeState::Up).await;
    let stream = world.curator(&other).watch(WatchRequest::default()).await;
    let mut stream = stream.unwrap().into_inner();
    within_timeout("an event", stream.message())
        .await
        .unwrap()
        .unwrap();
    within_timeout("an event", streams[3].message())
        .await
        .unwrap()
        .unwrap();

    let mut first = Pulse::open(&world, &world.node).await.unwrap();
    first.beat().await.unwrap();
    let mut second = Pulse::open(&world, &world.node).await.unwrap();
    second.beat().await.unwrap();
    assert_eq!(first.end().await.code(), Code::Aborted);
    second.beat().await.unwrap();
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_changes_its_boot_all_the_time_is_refused() {
    let limits = budget::Limits {
        liveness: Rate {
            burst: 3,
            every: Duration::from_secs(60),
        },
        ..unlimited()
    };
    let world = World::new(timing(limits)).await;
    let beat = async |boot: &str| {
        let mut pulse = Pulse::open(&world, &world.node).await?;
        pulse.beat_as(boot).await?;
        // The next one follows at the same address.
        world.report_as(boot, &world.node, "127.0.0.1").await?;
        Ok::<_, Status>(pulse)
    };
    let mut last = None;
    for boot in ["boot-1", "boot-2", "boot-3"] {
        last = Some(beat(boot).await.unwrap());
    }
    let refused = beat("boot-4").await.err().unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("budget"), "{refused}");
    // The boot that is heard is heard on.
    last.unwrap().beat_as("boot-3").await.unwrap();
    let other = world.add_node(NodeState::Up).await;
    Pulse::open(&world, &other)
        .await
        .unwrap()
        .beat()
        .await
        .unwrap();
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn joins_and_certificates_have_budgets() {
    let few = Rate {
        burst: 2,
        every: Duration::from_secs(60),
    };
    let limits = budget::Limits {
        joins: few,
        certificates: few,
        ..unlimited()
    };
    let world = World::new(timing(limits)).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    let mut refused = None;
    for _ in 0..3 {
        refused = machine.join(&world).await.err();
    }
    let refused = refused.unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");

    // Whatever the answer is: refusals for other reasons cost as much.
    let mut codes = Vec::new();
    for _ in 0..3 {
        let request = IssueCertificateRequest {
            kind: Some(Kind::EtcdPeer(EtcdPeer {})),
        };
        let answer = world.curator(&node).issue_certificate(request).await;
        codes.push(answer.map_or_else(|status| status.code(), |_| Code::Ok));
    }
    assert_eq!(codes[2], Code::ResourceExhausted, "{codes:?}");
    assert!(!codes[..2].contains(&Code::ResourceExhausted), "{codes:?}");
    world.stop().await;
}
