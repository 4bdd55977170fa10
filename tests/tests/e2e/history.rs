//! What clients of all curators see while members of a cluster of three fail in turn is linearizable
//! (`hearth_history`): no read is older than an answer before it, no acknowledged write is lost, and none happens that
//! was refused. The tests of `hearth-core` do the same with processes on this host.
//!
//! All are run by `cargo xtask test e2e history --long` only.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_history::{CheckError, Reads};
use hearth_operator::ClusterStatus;
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here};

use crate::clock::ahead;

const ALL: [u16; 3] = [1, 2, 3];
const HOUR: Duration = Duration::from_secs(3600);

/// Separates a node from the two others, but not from clients.
async fn isolate(cluster: &Cluster, number: u16) -> Outcome {
    let alone = format!("node-{number}");
    let rest = cluster.others(number).into_iter();
    let rest: Vec<String> = rest.map(|number| format!("node-{number}")).collect();
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    Ok(cluster.network().part(&[&[&alone], &rest]).await?)
}

/// The leader of etcd, which orders all writes.
async fn leader_of_etcd(cluster: &mut Cluster) -> anyhow::Result<u16> {
    let leads = |status: &ClusterStatus| {
        let mut members = status.consensus.members.iter();
        let leader = members.find(|member| member.leader);
        leader.map(|leader| leader.node_id.clone())
    };
    let known = |status: &ClusterStatus| leads(status).is_some();
    let status = cluster.until("a leader of etcd", bounds::SETTLED, known);
    let leader = leads(&status.await?);
    let mut nodes = cluster.nodes().iter();
    let leader = nodes.find(|node| leader.as_deref() == Some(node.id()));
    Ok(leader.context("an unknown leader")?.number())
}

/// The leader is isolated, then the next one is paused, then each node loses power. One of them returns with a clock that
/// is an hour ahead, until the others correct it.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_clients_see_of_links_pauses_power_and_clocks_is_linearizable() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let clients = cluster.clients(1, Reads::Linearizable).await?;

    let leader = leader_of_etcd(&mut cluster).await?;
    isolate(&cluster, leader).await?;
    clients.go_on(&cluster.others(leader)).await?;
    cluster.network().part(&[]).await?;
    clients.go_on(&ALL).await?;

    let leader = leader_of_etcd(&mut cluster).await?;
    cluster.node(leader).vm()?.pause().await?;
    clients.go_on(&cluster.others(leader)).await?;
    cluster.node(leader).vm()?.resume().await?;
    clients.go_on(&ALL).await?;

    for number in ALL {
        let node = cluster.node(number);
        node.cut().await?;
        if number == 1 {
            node.node.clock(ahead(HOUR));
        }
        clients.go_on(&cluster.others(number)).await?;
        cluster.node(number).comes_back().await?;
        clients.go_on(&ALL).await?;
    }
    println!("{}", clients.verify().await?);
    drop(cluster);
    test.passed()
}

/// All lose power at once: what was acknowledged is there afterwards, and what nobody saw may be.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_clients_see_of_a_cold_start_is_linearizable() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let clients = cluster.clients(1, Reads::Linearizable).await?;
    cluster.cut_all().await?;
    cluster.start_all().await?;
    clients.go_on(&ALL).await?;
    println!("{}", clients.verify().await?);
    drop(cluster);
    test.passed()
}

/// A planted bug is caught: clients that read from the caches of curators, one of which is isolated.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn reads_from_the_cache_are_found_out() -> Outcome {
    /// Times that a node is isolated. One is enough if its client reads then; a write of it waits until the end of the round.
    const MOST_ROUNDS: usize = 30;
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let clients = cluster.clients(1, Reads::FromCache).await?;
    let leader = leader_of_etcd(&mut cluster).await?;
    let follower = cluster.others(leader)[0];
    for _ in 0..MOST_ROUNDS {
        isolate(&cluster, follower).await?;
        clients.go_on(&cluster.others(follower)).await?;
        cluster.network().part(&[]).await?;
        clients.go_on(&ALL).await?;
        match clients.check() {
            Ok(_) => {}
            Err(CheckError::NotLinearizable(excerpt)) => {
                ensure!(excerpt.operations.len() <= 4, "{excerpt}");
                drop(cluster);
                return test.passed();
            }
            Err(other) => bail!(other),
        }
    }
    bail!("old values were not found in {MOST_ROUNDS} rounds");
}
