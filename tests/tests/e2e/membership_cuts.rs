//! The power of the node whose curator is the leader is cut at a step of a consensus change: before it or after it.
//! When the node is back the change is completed, once.
//!
//! Run by `cargo xtask test e2e membership_cuts --long`.

use anyhow::ensure;
use hearth_api::v1::UpdateNodeRolesRequest;
use hearth_tests::{Cluster, Outcome, TestCtx, cuts, retry_unavailable};

/// The story of every test here: the second of two nodes becomes a voter, or ceases to be one.
async fn cut(place: &str, failpoint: &'static str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    cluster.add_nodes(&[2]).await?;
    let joins = !failpoint.starts_with("membership.remove");
    if !joins {
        cluster.set_consensus_member(2, true).await?;
        cluster.voters_with(&[1, 2]).await?;
    }
    // Either of two voters may be the leader, so both have the failpoint.
    for number in [1, 2] {
        cluster.node(number).cut().await?;
    }
    for number in [1, 2] {
        cluster.node(number).node.failpoint = Some(failpoint);
        cluster.node(number).start().await?;
    }
    for number in [1, 2] {
        cluster.node(number).home().await?;
    }
    cluster.all_healthy().await?;

    let request = UpdateNodeRolesRequest {
        node: Some(cluster.node(2).selector()),
        consensus_member: Some(joins),
        ..UpdateNodeRolesRequest::default()
    };
    let owner = cluster.owner().once().clone();
    let (first, second) = match &*cluster.nodes() {
        [first, second] => (first.vm()?, second.vm()?),
        _ => unreachable!("two nodes"),
    };
    tokio::select! {
        // The leader stops, and may not answer.
        stands = first.failpoint(failpoint) => stands?,
        stands = second.failpoint(failpoint) => stands?,
        failed = async {
            match retry_unavailable(|| owner.update_roles(request.clone())).await {
                Ok(_) => std::future::pending().await,
                Err(status) => status,
            }
        } => return Err(failed.into()),
    }
    // Both, so that the other one does not stop in its place.
    for number in [1, 2] {
        cluster.node(number).cut().await?;
        cluster.node(number).node.failpoint = None;
    }
    for number in [1, 2] {
        cluster.node(number).start().await?;
    }
    let voters: &[u16] = if joins { &[1, 2] } else { &[1] };
    cluster.voters_with(voters).await?;
    for number in [1, 2] {
        cluster.node(number).home().await?;
    }
    cluster.all_healthy().await?;
    let nodes = cluster.owner().nodes().await?;
    ensure!(nodes.len() == 2, "{nodes:#?}");
    drop(cluster);
    test.passed()
}

cuts! {
    cut at all of "MEMBERSHIP" {
        #[ignore = "long: --long runs it"]
        before_a_member_is_added at "membership.add.before";
        #[ignore = "long: --long runs it"]
        after_a_member_was_added at "membership.add.after";
        #[ignore = "long: --long runs it"]
        before_a_member_is_promoted at "membership.promote.before";
        #[ignore = "long: --long runs it"]
        after_a_member_was_promoted at "membership.promote.after";
        #[ignore = "long: --long runs it"]
        before_a_member_is_removed at "membership.remove.before";
        #[ignore = "long: --long runs it"]
        after_a_member_was_removed at "membership.remove.after";
    }
}
