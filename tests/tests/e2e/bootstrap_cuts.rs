//! The power is cut at a durable step of a bootstrap: before it or after it. The next boot has to continue from there,
//! to one healthy node that is HOME: the same node, if its keys were durable already.
//!
//! A representative set is run by default: the first and the last, and those at which different parts of the node are
//! active before and after. `cargo xtask test e2e bootstrap_cuts --long` runs the others, too.

use anyhow::ensure;
use hearth_tests::{Outcome, TestCtx, cuts};

/// Before this one nothing of the future cluster is durable.
const FIRST: &str = "enrolment.sealed_founding.before";

/// The story of every test here.
async fn cut(place: &str, failpoint: &'static str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let mut node = test.node("node").install().await?;
    node.failpoint = Some(failpoint);
    let vm = node.power_on().await?;
    vm.failpoint(failpoint).await?;
    let begun = vm.founding_node().await?;
    vm.cut().await?;

    node.failpoint = None;
    if failpoint != FIRST {
        // All parameters are in the sealed configuration.
        node.parameters = None;
    }
    let vm = node.power_on().await?;
    vm.home().await?;
    let listed = vm.owned().await?.one_healthy_node().await?;
    ensure!(
        (listed.id == begun) == (failpoint != FIRST),
        "expected node {begun}, got {}",
        listed.id
    );
    // And it is a member like any other.
    vm.cut().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.cut().await?;
    test.passed()
}

cuts! {
    cut at all of "BOOTSTRAP" {
        before_the_founding_configuration at "enrolment.sealed_founding.before";
        #[ignore = "long: --long runs it"]
        after_the_founding_configuration at "enrolment.sealed_founding.after";
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
        before_the_authorities at "founding.authorities.before";
        #[ignore = "long: --long runs it"]
        after_the_authorities at "founding.authorities.after";
        #[ignore = "long: --long runs it"]
        before_the_sealed_authority at "enrolment.sealed_authority.before";
        #[ignore = "long: --long runs it"]
        after_the_sealed_authority at "enrolment.sealed_authority.after";
        #[ignore = "long: --long runs it"]
        before_the_founding_transaction at "founding.transaction.before";
        after_the_founding_transaction at "founding.transaction.after";
        #[ignore = "long: --long runs it"]
        before_the_credentials at "founding.credentials.before";
        #[ignore = "long: --long runs it"]
        after_the_credentials at "founding.credentials.after";
        #[ignore = "long: --long runs it"]
        before_the_authorities_keys_are_removed at "founding.authority_keys_removed.before";
        after_the_authorities_keys_are_removed at "founding.authority_keys_removed.after";
        #[ignore = "long: --long runs it"]
        before_the_member_configuration at "enrolment.sealed_member.before";
        #[ignore = "long: --long runs it"]
        after_the_member_configuration at "enrolment.sealed_member.after";
    }
}
