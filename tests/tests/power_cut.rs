//! The plug is pulled out of a member of a cluster.

use anyhow::ensure;
use hearth_api::v1::{self, RebootRequest};
use hearth_tests::{Outcome, TestCtx, here};

/// An insecure node comes back to the same cluster by itself, without the
/// parameters that it was founded with: after a power cut, and when its owner
/// starts it again.
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

    // By the credentials of before: nothing has to be taken anew.
    node.parameters = None;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = operator.at(vec![vm.curator()?])?;
    for boot in 1..=2 {
        // What it reported before the cut stands until it reports anew.
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

/// What does not change from one boot to the next.
fn without_status(node: &v1::Node) -> v1::Node {
    v1::Node {
        status: None,
        heartbeat_age_ms: None,
        ..node.clone()
    }
}
