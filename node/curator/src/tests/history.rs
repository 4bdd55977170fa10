//! Clients of two curators, one of which does not hear from etcd for a while, and the check of what they saw.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::v1::NodeState;
use hearth_base::testing::{BOUND, within_timeout};
use hearth_consensus::RootClient;
use hearth_history::{CheckError, Checked, Clients, Plan, Reads};

use super::super::testing::{Who, World, quick};
use super::partition::Way;

/// Cuts one of two curators off from etcd and reconnects it, while clients read and write through both, as often as
/// the check of what they saw has this result.
async fn while_cut_off(
    reads: Reads,
    again: impl Fn(usize, &Result<Checked, CheckError>) -> bool,
) -> Result<Checked, CheckError> {
    let world = World::new(quick()).await;
    let other = Arc::new(world.add_node(NodeState::Up).await);
    let way = Way::to(world.site.config(false).socket_dir.join("client:0"));
    let etcd = RootClient::new(way.socket.clone());
    let (cut_off, ready) = world.curator_through(&etcd, &other).await;
    let there = Endpoint::new(Ipv4Addr::LOCALHOST.into(), ready.get().unwrap());
    let owner = world.owner().await;
    let channel = |endpoint| world.channel_to(endpoint, &Who::User(&owner));
    let plan = Plan {
        node: world.site.node_id.to_string(),
        labels: vec!["history".into()],
        reads,
        // Within the time that the curator which is cut off still takes its cache for recent.
        patience: Duration::from_millis(500),
        pace: Duration::from_millis(5),
    };
    // Several at the one that is cut off, so that one of them reads meanwhile.
    let channels = vec![
        channel(world.endpoint()),
        channel(there.clone()),
        channel(there.clone()),
        channel(there),
    ];
    let all: Vec<usize> = (0..channels.len()).collect();
    let clients = Clients::start(plan, channels, 1).await.unwrap();
    clients.go_on(&all, BOUND).await.unwrap();
    let checked = within_timeout("a history", async {
        for round in 1.. {
            way.cut.send_replace(true);
            clients.go_on(&[0], BOUND).await.unwrap();
            way.cut.send_replace(false);
            clients.go_on(&all, BOUND).await.unwrap();
            let checked = clients.history().check();
            if !again(round, &checked) {
                return checked;
            }
        }
        unreachable!("rounds have no end")
    });
    let checked = checked.await;
    drop(clients.stop().await.unwrap());
    within_timeout("the curator stops", cut_off.shutdown()).await;
    world.stop().await;
    checked
}

#[tokio::test(flavor = "multi_thread")]
async fn a_curator_that_is_cut_off_answers_nobody_by_old_records() {
    let checked = while_cut_off(Reads::Linearizable, |round, checked| {
        round < 3 && checked.is_ok()
    });
    match checked.await {
        Ok(checked) => assert!(checked.reads > 0 && checked.changes > 0, "{checked}"),
        Err(error) => panic!("{error}"),
    }
}

/// A planted bug: the read that [`crate::reads`] requires before an answer from the cache is left out.
#[tokio::test(flavor = "multi_thread")]
async fn reads_from_the_cache_are_found_out() {
    let checked = while_cut_off(Reads::FromCache, |_, checked| checked.is_ok()).await;
    let Err(CheckError::NotLinearizable(excerpt)) = checked else {
        panic!("{checked:?}");
    };
    // A value was replaced before it was read.
    assert!(excerpt.operations.len() <= 4, "{excerpt}");
}
