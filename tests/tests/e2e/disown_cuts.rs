//! The power of a node that its cluster has removed is cut at a durable step of the wipe of its keys: before it or
//! after it. The next boot continues from there: the node is disowned, has no keys, and is idle.
//!
//! One is run by default, the others by
//! `cargo xtask test e2e disown_cuts --long`.

use anyhow::ensure;
use hearth_api::v1::{ClusterState, DeleteNodeRequest};
use hearth_tests::{Cluster, Outcome, TestCtx, cuts, debug, retry_unavailable};

/// The story of every test here.
async fn cut(place: &str, failpoint: &'static str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    cluster.node(2).node.failpoint = Some(failpoint);
    cluster.add_nodes(&[2]).await?;
    let former = cluster.node(2).id().to_owned();
    let request = DeleteNodeRequest {
        node: Some(cluster.node(2).selector()),
        bypass_not_decommissioned: true,
        bypass_has_roles: true,
        reset: false,
    };
    retry_unavailable(|| cluster.owner().once().delete(request.clone())).await?;
    cluster.node(2).vm()?.failpoint(failpoint).await?;
    cluster.node(2).cut().await?;

    cluster.node(2).node.failpoint = None;
    cluster.node(2).start().await?;
    // With its keys it still starts as a member, and then learns again that it is removed.
    let why = cluster.node(2).vm()?.waits_in_the_end().await?;
    ensure!(why.contains(&former), "{why}");
    cluster
        .wait_cluster_state(2, ClusterState::Disowning)
        .await?;
    // It is idle: nothing fails, and nothing is retried.
    let debug = cluster.node(2).debug().await?;
    let state = debug.state().await?;
    let record = debug::runnable(&state, "root.record");
    ensure!(
        record.is_some_and(|record| record.restarts == 0),
        "{state:#?}"
    );
    cluster.node(1).home().await?;
    let nodes = cluster.owner().nodes().await?;
    ensure!(nodes.len() == 1, "it is listed again: {nodes:#?}");
    drop(cluster);
    test.passed()
}

cuts! {
    cut at all of "DISOWN" {
        #[ignore = "long: --long runs it"]
        before_the_configuration_loses_its_keys at "enrolment.sealed_disowned.before";
        after_the_configuration_lost_its_keys at "enrolment.sealed_disowned.after";
        #[ignore = "long: --long runs it"]
        before_the_disk_is_wiped at "disowning.wiped.before";
        #[ignore = "long: --long runs it"]
        after_the_disk_is_wiped at "disowning.wiped.after";
    }
}
