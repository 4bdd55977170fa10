//! The power of a registering machine is cut at a durable step: before it or after it. The next boot continues from
//! there, as the same node, if its keys were durable already.
//!
//! A representative set is run by default, the others by
//! `cargo xtask test e2e register_cuts --long`.

use anyhow::ensure;
use hearth_tests::{Cluster, Outcome, TestCtx, cuts};

/// Before this one nothing of the future node is durable.
const FIRST: &str = "enrolment.sealed_registering.before";
/// From here on the node has been approved.
const APPROVED: &str = "registering.committed.before";

/// The story of every test here.
async fn cut(place: &str, failpoint: &'static str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let mut cluster = Cluster::founded(&test, 2).await?;
    let told = cluster.owner().register_parameters().await?;
    cluster.node(2).node.failpoint = Some(failpoint);
    cluster.register(&[2]).await?;
    let position = |name| CUTS.iter().position(|cut| *cut == name);
    let approved = position(failpoint) >= position(APPROVED);
    if approved {
        cluster.approve(2).await?;
    }
    cluster.node(2).vm()?.failpoint(failpoint).await?;
    let begun = cluster.node(2).vm()?.registering_node().await;
    cluster.node(2).cut().await?;

    cluster.node(2).node.failpoint = None;
    if failpoint == FIRST {
        cluster.node(2).node.tell(&told);
    }
    cluster.node(2).start().await?;
    if !approved {
        cluster.approve(2).await?;
    }
    cluster.node(2).home().await?;
    cluster.all_healthy().await?;
    let is = cluster.node(2).id().to_owned();
    let begun = begun?;
    ensure!(
        (is == begun) == (failpoint != FIRST),
        "expected node {begun}, got {is}"
    );
    let nodes = cluster.owner().nodes().await?;
    ensure!(
        nodes.len() == 2,
        "one machine has registered twice: {nodes:#?}"
    );
    // And it is a member like any other.
    cluster.node(2).cut().await?;
    cluster.node(2).comes_back().await?;
    cluster.all_healthy().await?;
    drop(cluster);
    test.passed()
}

cuts! {
    cut at all of "REGISTER" {
        #[ignore = "long: --long runs it"]
        before_the_first_configuration at "enrolment.sealed_registering.before";
        #[ignore = "long: --long runs it"]
        after_the_first_configuration at "enrolment.sealed_registering.after";
        #[ignore = "long: --long runs it"]
        before_the_cluster_is_asked at "registering.asked.before";
        after_the_cluster_is_asked at "registering.asked.after";
        #[ignore = "long: --long runs it"]
        before_the_answer_is_sealed at "enrolment.sealed_answer.before";
        #[ignore = "long: --long runs it"]
        after_the_answer_is_sealed at "enrolment.sealed_answer.after";
        #[ignore = "long: --long runs it"]
        before_the_first_header at "storage.header_initialising.before";
        #[ignore = "long: --long runs it"]
        after_the_first_header at "storage.header_initialising.after";
        #[ignore = "long: --long runs it"]
        before_the_file_system at "storage.file_system.before";
        after_the_file_system at "storage.file_system.after";
        #[ignore = "long: --long runs it"]
        before_the_second_header at "storage.header_ready.before";
        #[ignore = "long: --long runs it"]
        after_the_second_header at "storage.header_ready.after";
        #[ignore = "long: --long runs it"]
        before_the_commit at "registering.committed.before";
        after_the_commit at "registering.committed.after";
        #[ignore = "long: --long runs it"]
        before_the_credentials at "registering.credentials.before";
        #[ignore = "long: --long runs it"]
        after_the_credentials at "registering.credentials.after";
        #[ignore = "long: --long runs it"]
        before_the_member_configuration at "enrolment.sealed_member.before";
        after_the_member_configuration at "enrolment.sealed_member.after";
    }
}
