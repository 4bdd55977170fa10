//! Power cuts of a member of a cluster.

use anyhow::ensure;
use hearth_api::v1::{self, RebootRequest};
use hearth_tests::{Outcome, TestCtx, here};

/// A node with insecure storage rejoins the same cluster by itself, without the parameters that founded it: after a
/// power cut, and after a reboot by its owner.
#[tokio::test]
async fn a_member_comes_back_home() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let mut before = operator.one_healthy_node().await?;
    let cluster = operator.info().await?;
    vm.cut().await?;

    // With the earlier credentials: ownership is not taken again.
    node.parameters = None;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = operator.at(vec![vm.curator()?])?;
    for boot in 1..=2 {
        // Its report from before the cut remains until the next one.
        let anew = |node: &v1::Node| boot_id(node) != boot_id(&before);
        let after = operator.one_healthy_node_that(anew).await?;
        ensure!(
            without_status(&after) == without_status(&before),
            "{after:?} was {before:?}"
        );
        ensure!(
            operator.info().await? == cluster,
            "the cluster is another one"
        );
        before = after;
        if boot == 1 {
            let mut management = vm.management(&operator, &before.id)?;
            management.reboot(RebootRequest {}).await?;
            vm.home_in_boot(2).await?;
        }
    }
    vm.cut().await?;
    test.passed()
}

fn boot_id(node: &v1::Node) -> Option<&str> {
    Some(&node.status.as_ref()?.boot_id)
}

/// The entry without what changes from one boot to the next.
fn without_status(node: &v1::Node) -> v1::Node {
    v1::Node {
        status: None,
        heartbeat_age_ms: None,
        ..node.clone()
    }
}
