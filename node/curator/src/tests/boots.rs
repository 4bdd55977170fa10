//! Which boot of a node is heard, and which may join.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::pushback;
use hearth_api::v1::NodeHealth;
use hearth_api::v1::join_node_response::Answer;
use hearth_base::testing::within_timeout;
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::testing::Site;
use tonic::Code;

use super::super::testing::{BOOT_ID, Pulse, World, quick};
use super::machine::{Machine, copy, delete};

#[tokio::test(flavor = "multi_thread")]
async fn another_boot_joins_when_the_former_one_has_ended_or_is_silent() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    assert_eq!(machine.shown(&world).await.unwrap().joins, []);
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    machine.join(&world).await.unwrap();

    // The message says how long it takes and when to ask again, and nothing is recorded.
    let refused = machine.join_as(&world, "next").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("silent for 2 s"), "{refused}");
    assert_eq!(pushback::of(&refused), Some(Duration::from_secs(2)));
    let [joined] = &machine.shown(&world).await.unwrap().joins[..] else {
        panic!("one join");
    };
    assert_eq!((&*joined.address, &*joined.boot_id), ("127.0.0.1", BOOT_ID));
    assert!(joined.time > 0);

    // The boot that is heard never waits for itself, and is recorded once.
    machine.join(&world).await.unwrap();
    assert_eq!(machine.shown(&world).await.unwrap().joins.len(), 1);

    // The end of a stream that was replaced is not the end of the boot.
    let mut later = Pulse::open(&world, &node).await.unwrap();
    later.beat().await.unwrap();
    pulse.end_boot().await;
    let refused = machine.join_as(&world, "next").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let pulse = later;

    // An announced end counts at once.
    let end = pulse.end_boot().await;
    assert_eq!(end.code(), Code::Ok, "{end}");
    // A heartbeat after it: the boot lives after all.
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    let refused = machine.join_as(&world, "next").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    pulse.end_boot().await;
    let before = std::time::Instant::now();
    machine.join_as(&world, "next").await.unwrap();
    assert!(before.elapsed() < quick().heartbeat_bound);
    let shown = machine.shown(&world).await.unwrap();
    assert_eq!(shown.health(), NodeHealth::Timeout);
    assert!(shown.health_reason.contains("shut down"), "{shown:?}");
    let boots: Vec<_> = shown.joins.iter().map(|join| &*join.boot_id).collect();
    assert_eq!(boots, ["next", BOOT_ID]);

    // A crash, after which the curator has to wait.
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    pulse.beat_as("next").await.unwrap();
    drop(pulse);
    let refused = machine.join_as(&world, "third").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    world.becomes(machine.id(), NodeHealth::Timeout).await;
    machine.join_as(&world, "third").await.unwrap();

    delete(&world, machine.selector(), true).await.unwrap();
    let key = state::joins_key(machine.id());
    assert!(world.client().get(&key).await.unwrap().is_none());
    world.stop().await;
}

/// Of two machines with one disk, the one that is heard stays so: the other is refused, and says why. A boot that follows at the
/// same address takes the place of the first at once.
#[tokio::test(flavor = "multi_thread")]
async fn one_boot_of_a_node_is_heard() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    let mut first = Pulse::open(&world, &node).await.unwrap();
    first.beat().await.unwrap();
    // Not the address from which the tests call.
    world.report(&node, "192.0.2.7").await;
    for _ in 0..2 {
        let mut other = Pulse::open(&world, &node).await.unwrap();
        let refused = other.beat_as("other").await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("another boot"), "{refused}");
        let refused = world.report_as("other", &node, "127.0.0.1").await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        first.beat().await.unwrap();
    }
    let shown = machine.shown(&world).await.unwrap();
    assert_eq!(shown.health(), NodeHealth::Healthy, "{shown:?}");
    assert_eq!(shown.status.unwrap().boot_id, BOOT_ID);

    world.report(&node, "127.0.0.1").await;
    let mut next = Pulse::open(&world, &node).await.unwrap();
    next.beat_as("next").await.unwrap();
    world.report_as("next", &node, "127.0.0.1").await.unwrap();
    first.beat().await.unwrap_err();
    next.beat_as("next").await.unwrap();
    world.stop().await;
}

/// Which boot is heard is recorded in etcd, so every curator knows it, whichever leads. When the
/// curator that hears it shuts down, what is known of the boot goes with it.
#[tokio::test(flavor = "multi_thread")]
async fn every_curator_knows_which_boot_is_heard() {
    let world = World::new(quick()).await;
    let second_node = Arc::new(Machine::new().becomes_a_node(&world).await);
    let (second, ready) = world.curator_of(&second_node).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    let there = Endpoint::new(Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());
    let mut pulse = Pulse::open_at(there.clone(), &world, &node).await.unwrap();
    pulse.beat().await.unwrap();
    let at_both = [world.ready.get(), ready.get()];
    for curator in at_both {
        let machine = Machine {
            curator,
            ..copy(&machine)
        };
        let refused = machine.join_as(&world, "next").await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        machine.join(&world).await.unwrap();
    }
    // An end that is announced to one counts at the other.
    pulse.end_boot().await;
    machine.join_as(&world, "next").await.unwrap();

    let mut pulse = Pulse::open_at(there, &world, &node).await.unwrap();
    pulse.beat_as("next").await.unwrap();
    let refused = machine.join_as(&world, "third").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    within_timeout("the second curator stops", second.shutdown()).await;
    machine.join_as(&world, "third").await.unwrap();
    world.stop().await;
}

/// The node may be the member that has to make space, which it cannot do without its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_boot_is_admitted_while_etcd_is_full() {
    static VALUE: [u8; 256 << 10] = [7; 256 << 10];
    let mut site = Site::new();
    site.quota_bytes = 32 << 20;
    let world = World::at(site, quick()).await;
    let machine = Machine::new();
    machine.becomes_a_node(&world).await;
    // Different keys, so that no space can be freed.
    let mut keys = (0..).map(|number| format!("large/{number}"));
    let full = async {
        loop {
            let key = keys.next().unwrap();
            let write = Write::when(Condition::Absent(key.clone())).put(key, VALUE.into());
            match world.client().write(write).await {
                Err(WriteError::Consensus(error)) if error.is_full() => return,
                // It may not answer while it looks for space.
                _ => {}
            }
        }
    };
    within_timeout("a full store", full).await;
    let admitted = async {
        loop {
            match machine.join(&world).await {
                Err(status) if status.code() == Code::Unavailable => {}
                answered => return answered.unwrap().answer,
            }
        }
    };
    let admitted = within_timeout("an answer", admitted).await;
    assert!(matches!(admitted, Some(Answer::Admitted(_))));
    let joins = state::joins_key(machine.id());
    assert!(world.client().get(&joins).await.unwrap().is_none());
    world.stop().await;
}
