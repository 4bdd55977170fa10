//! Clusters that are torn apart: by the network, by power cuts, by a machine
//! that stands still. What was acknowledged stays, what cannot be decided is
//! refused with a word, and afterwards all is as before.
//!
//! Some are left out by default; `cargo xtask test e2e netsplit --long` runs them all.

use anyhow::{Context, bail, ensure};
use hearth_api::v1::ClusterState;
use hearth_tests::{Cluster, Operator, Outcome, TestCtx, bounds, here};
use tonic::Code;

const ALL: [u16; 3] = [1, 2, 3];

/// What a curator says that has lost the others: at once or after a while, but
/// within its bound, and that another one is to be asked.
async fn refuses_for_want_of_quorum(operator: &Operator) -> Outcome {
    match operator.once().nodes().await {
        Ok(_) => bail!("a curator without quorum has answered"),
        Err(status) => ensure!(
            status.code() == Code::Unavailable,
            "wanted Unavailable: {status:?}"
        ),
    }
    Ok(())
}

/// Waits until the curator of this node refuses.
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

/// The leader is cut off from the two others, with clients that still reach
/// it: it stops deciding, the others go on under another leader, and it comes
/// back as one of them.
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
    cluster.sees(leader, ClusterState::Split).await?;
    // The two hold it for lost, whoever heard it before.
    cluster.misses(leader).await?;
    // It still refuses: nothing that it hears from its clients changes that.
    refuses_for_want_of_quorum(&cluster.owner_at(leader)?).await?;

    cluster.network().part(&[]).await?;
    cluster.sees(leader, ClusterState::Home).await?;
    cluster.all_healthy().await?;
    cluster.voters_with(&ALL).await?;
    cluster.one_leads(&ALL).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// One of three is lost: nobody minds. Two are: the last one says what it
/// lacks. One of them returns: all goes on.
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
    cluster.sees(1, ClusterState::Split).await?;

    cluster.node(2).comes_back().await?;
    cluster.sees(1, ClusterState::Home).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The machine of the leader stands still until the others have given it up,
/// then goes on as if nothing had been: it must not act on what it believed.
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
    cluster.misses(leader).await?;

    cluster.node(leader).vm()?.resume().await?;
    cluster.all_healthy().await?;
    let own_view = cluster.owner_at(leader)?;
    own_view.nodes().await.context("the one that stood still")?;
    cluster.one_leads(&ALL).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}
