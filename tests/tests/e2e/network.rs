//! Faulty networks, and changing networks.
//!
//! Some are not run by default; `cargo xtask test e2e network --long` runs all of them.

use std::time::Duration;

use anyhow::{Context, ensure};
use hearth_api::v1::ClusterState;
use hearth_qemu::switch::Faults;
use hearth_tests::{Cluster, Outcome, TestCtx, here};

/// A member's address changes while it runs and another member is off: the others follow, consensus continues with the
/// new address, and the member that restarts with an old directory finds it.
#[tokio::test]
async fn an_address_changes_and_everyone_follows() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    cluster.node(3).cut().await?;

    let (id, address) = {
        let node = cluster.node(1);
        (node.id().to_owned(), node.unused_address())
    };
    cluster.network().set_address("node-1", address).await?;
    cluster.is_at(&id, address).await?;
    cluster.all_healthy().await?;
    for number in [1, 2] {
        cluster.node(number).is_named().await?;
        cluster.resolves(number, &id, address).await?;
    }
    writer.goes_on().await?;

    // Node 3's saved directory has a wrong address of node 1.
    cluster.node(3).comes_back().await?;
    cluster.all_healthy().await?;
    // The two connect at their current addresses: the third is off.
    cluster.node(2).cut().await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// All addresses of a directory but one are unreachable.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn one_address_that_lives_is_enough() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    cluster.set_consensus_member(2, false).await?;
    cluster.voters_with(&[1, 3]).await?;
    cluster.set_consensus_member(3, false).await?;
    cluster.voters_with(&[1]).await?;
    cluster.all_healthy().await?;
    let writer = cluster.writer(1).await?;
    cluster.node(3).cut().await?;
    cluster.node(2).cut().await?;
    cluster.node(3).comes_back().await?;
    cluster.all_healthy().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The addresses of all running members change at once: no curator can distribute them, and they find each other all
/// the same.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn all_addresses_change_at_once() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    for number in 1..=3 {
        let (name, address) = {
            let node = cluster.node(number);
            (node.name().to_owned(), node.unused_address())
        };
        cluster.network().set_address(&name, address).await?;
    }
    for number in 1..=3 {
        let node = cluster.node(number);
        let (id, address) = (node.id().to_owned(), node.unused_address());
        cluster.is_at(&id, address).await?;
    }
    cluster.all_healthy().await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// A machine registers, is approved, commits and becomes a voter over a network that loses, delays and reorders frames.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_node_joins_over_a_bad_network() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    let bad = Faults {
        loss: 0.05,
        delay: Duration::from_millis(100),
        jitter: Duration::from_millis(50),
        ..Faults::default()
    };
    becomes_a_voter_over(&mut cluster, bad).await?;
    drop(cluster);
    test.passed()
}

/// The second machine, behind a link with these faults, joins the cluster of the first one and its consensus.
async fn becomes_a_voter_over(cluster: &mut Cluster, faults: Faults) -> anyhow::Result<()> {
    cluster.network().set_faults("node-2", faults).await?;
    cluster.add_nodes(&[2]).await?;
    cluster.set_consensus_member(2, true).await?;
    cluster.voters_with(&[1, 2]).await?;
    cluster.all_healthy().await
}

/// A link is cut before a machine is powered on, and again when it is a member: it waits, is declared unreachable,
/// reports SPLIT, and is back when the link is. No peer sends a reset meanwhile.
#[tokio::test]
async fn a_cable_is_pulled_and_put_back() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    let pulled = Faults {
        cut: true,
        ..Faults::default()
    };
    cluster.network().set_faults("node-2", pulled).await?;
    cluster.register(&[2]).await?;
    let said = cluster.node(2).vm()?.says(&["enrolment: get an address"]);
    said.await.context("the wait for an address")?;
    let whole = Faults::default();
    cluster.network().set_faults("node-2", whole).await?;
    cluster.approve(2).await?;
    cluster.node(2).home().await?;
    let states = cluster.node(2).vm()?.states();
    ensure!(
        states == ["UNKNOWN", "FOREIGN", "TRUSTED", "HOME"],
        "{states:?}"
    );
    cluster.all_healthy().await?;

    cluster.network().set_faults("node-2", pulled).await?;
    cluster.wait_unreachable(2).await?;
    cluster.node(2).vm()?.says(&["state SPLIT"]).await?;
    cluster.network().set_faults("node-2", whole).await?;
    cluster.wait_cluster_state(2, ClusterState::Home).await?;
    cluster.all_healthy().await?;
    let cluster_status = cluster.cluster_status().await?;
    ensure!(cluster_status.nodes.len() == 2, "{cluster_status:#?}");
    drop(cluster);
    test.passed()
}

/// A path carries 1400 bytes and loses larger frames without a word. A machine registers, joins and becomes a voter over
/// it, and a snapshot of etcd's data reaches it.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_path_that_carries_less_than_it_says() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    let narrow = Faults {
        mtu: Some(1400),
        ..Faults::default()
    };
    becomes_a_voter_over(&mut cluster, narrow).await?;
    let writer = cluster.writer(2).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}
