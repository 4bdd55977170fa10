//! A cluster of three: any one of its nodes may fail, and nothing is lost.

use hearth_tests::{Outcome, TestCtx, here};

/// Each node in turn loses power during continuous writes. The other two continue, the node rejoins by itself, and no
/// acknowledged write is lost.
#[tokio::test]
async fn each_node_loses_power_in_turn_and_no_write_is_lost() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    for number in 1..=3 {
        cluster.node(number).cut().await?;
        // Any two of three are a quorum.
        writer.goes_on().await?;
        cluster.node(number).comes_back().await?;
        cluster.voters_with(&[1, 2, 3]).await?;
        cluster.all_healthy().await?;
        writer.goes_on().await?;
    }
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// All of them lose power at once, and restart together with everything that was acknowledged.
#[tokio::test]
async fn an_insecure_cluster_starts_cold() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let before = cluster.cluster_status().await?;
    let writer = cluster.writer(1).await?;
    cluster.cut_all().await?;
    cluster.start_all().await?;
    cluster.voters_with(&[1, 2, 3]).await?;
    cluster.all_healthy().await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;

    // The same nodes, in another boot.
    let after = cluster.cluster_status().await?;
    for node in cluster.nodes() {
        let (then, now) = (node.find(&before), node.find(&after));
        let boot = |node: Option<&hearth_api::v1::Node>| {
            node.and_then(|node| node.status.as_ref())
                .map(|status| status.boot_id.clone())
        };
        anyhow::ensure!(
            boot(then) != boot(now),
            "{} was not started again: {now:?}",
            node.name()
        );
    }
    drop(cluster);
    test.passed()
}
