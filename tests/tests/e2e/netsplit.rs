//! Split clusters: by the network, by power cuts, by a paused machine. Acknowledged writes are kept, what cannot be
//! decided fails with an error, and afterwards everything is as before.
//!
//! Some are not run by default; `cargo xtask test e2e netsplit --long` runs all of them.

use anyhow::{Context, bail, ensure};
use hearth_api::v1::ClusterState;
use hearth_tests::{Cluster, Operator, Outcome, TestCtx, bounds, here};
use tonic::Code;

const ALL: [u16; 3] = [1, 2, 3];

/// The answer of a curator without quorum: at once or after a while, but within its bound, and with the advice to use
/// another one.
async fn refuses_for_want_of_quorum(operator: &Operator) -> Outcome {
    match operator.once().nodes().await {
        Ok(_) => bail!("a curator without quorum has answered"),
        Err(status) => ensure!(
            status.code() == Code::Unavailable,
            "expected Unavailable: {status:?}"
        ),
    }
    Ok(())
}

/// Waits until the curator of this node answers Unavailable.
async fn falls_silent(cluster: &Cluster, number: u16) -> Outcome {
    let operator = cluster.owner_at(number)?;
    let mut last = Ok(());
    let silent = async {
        loop {
            last = refuses_for_want_of_quorum(&operator).await;
            if last.is_ok() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    let within_bound = tokio::time::timeout(bounds::SETTLED, silent).await.is_ok();
    ensure!(within_bound, "node-{number} still answers: {last:?}");
    Ok(())
}

/// The leader is isolated from the two others, but not from clients: it stops deciding, the others continue with
/// another leader, and it rejoins them.
#[tokio::test]
async fn an_isolated_leader_decides_nothing_and_heals() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let leader = cluster.leader().await?;
    let writer = cluster.writer(leader).await?;
    let alone = format!("node-{leader}");
    let rest: Vec<String> = cluster
        .others(leader)
        .iter()
        .map(|n| format!("node-{n}"))
        .collect();
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    cluster.network().part(&[&[&alone], &rest]).await?;

    falls_silent(&cluster, leader).await?;
    cluster.led_by_another_than(leader).await?;
    writer.goes_on().await?;
    cluster
        .wait_cluster_state(leader, ClusterState::Split)
        .await?;
    // The two consider it lost, whichever of them it was connected to.
    cluster.wait_unreachable(leader).await?;
    // It still answers Unavailable: requests from its clients do not change that.
    refuses_for_want_of_quorum(&cluster.owner_at(leader)?).await?;

    cluster.network().part(&[]).await?;
    cluster
        .wait_cluster_state(leader, ClusterState::Home)
        .await?;
    cluster.all_healthy().await?;
    cluster.voters_with(&ALL).await?;
    cluster.one_leads(&ALL).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// One of three is lost: no effect. Two are: the last one reports the missing quorum. One of them returns: the cluster
/// continues.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn one_may_be_lost_and_two_are_one_too_many() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    cluster.node(3).cut().await?;
    writer.goes_on().await?;

    cluster.node(2).cut().await?;
    falls_silent(&cluster, 1).await?;
    cluster.wait_cluster_state(1, ClusterState::Split).await?;

    cluster.node(2).comes_back().await?;
    cluster.wait_cluster_state(1, ClusterState::Home).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The leader's machine is paused until the others have declared it lost, and then resumed: it must not act on its old
/// state.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_leader_that_stood_still_leads_no_more() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let leader = cluster.leader().await?;
    let writer = cluster.writer(leader).await?;
    cluster.node(leader).vm()?.pause().await?;

    cluster.led_by_another_than(leader).await?;
    writer.goes_on().await?;
    cluster.wait_unreachable(leader).await?;

    cluster.node(leader).vm()?.resume().await?;
    cluster.all_healthy().await?;
    let own_view = cluster.owner_at(leader)?;
    own_view.nodes().await.context("the node that was paused")?;
    cluster.one_leads(&ALL).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}
