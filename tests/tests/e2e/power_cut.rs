//! Power cuts of a member of a cluster.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use hearth_api::console::{Milestone, Report};
use hearth_api::v1::{self, NodeJoin, RebootRequest, StorageSecurityPolicy};
use hearth_operator::ClusterStatus;
use hearth_tests::node::Running;
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here};

/// Part of the reason that a node shows while its cluster still hears its former boot.
pub(crate) const OTHER_BOOT: &str = "the cluster still hears another boot of this node";

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
        joins: Vec::new(),
        ..node.clone()
    }
}

/// An encrypted node gets its key for one boot at a time; here its data are authenticated as well, the strictest form.
/// After an orderly reboot it does not wait, because its former boot has announced its end; after a reset it waits until
/// that is silent, and says so. The cluster records each boot.
#[tokio::test]
async fn an_encrypted_member_waits_for_the_end_of_its_former_boot() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let sealed = StorageSecurityPolicy::NeedsEncryptionAndAuthentication;
    let mut cluster = Cluster::founded_as(&test, 2, |_, plan| {
        Ok(plan.configured(|settings| settings.set_storage_security_policy(sealed)))
    })
    .await?;
    cluster.add_nodes(&[2]).await?;
    cluster.all_healthy().await?;
    joined(&mut cluster, 1).await?;

    let owner = cluster.owner().clone();
    let id = cluster.node(2).id().to_owned();
    let vm = cluster.node(2).vm()?;
    let mut management = vm.management(&owner, &id)?;
    management.reboot(RebootRequest {}).await?;
    vm.home_in_boot(2).await?;
    ensure!(
        !has_waited(vm),
        "it has waited for a boot that has ended in order\n{}",
        vm.tail()
    );
    cluster.all_healthy().await?;
    joined(&mut cluster, 2).await?;

    // The curator stands still during the boot, which may take longer than the former boot has to be silent.
    cluster.node(1).vm()?.pause().await?;
    let vm = cluster.node(2).vm()?;
    vm.reset().await?;
    let mut boot = 0;
    vm.wait_for_report("the network in boot 3", bounds::HOME, |report| {
        boot += u32::from(matches!(report, Report::Reached(Milestone::Kernel, _)));
        boot == 3 && matches!(report, Report::Reached(Milestone::Network, _))
    })
    .await?;
    cluster.node(1).vm()?.resume().await?;
    let vm = cluster.node(2).vm()?;
    vm.wait_for_report(
        "why it waits",
        bounds::HOME,
        |report| matches!(report, Report::Waiting(why) if why.contains(OTHER_BOOT)),
    )
    .await?;
    vm.home_in_boot(3).await?;
    cluster.all_healthy().await?;
    joined(&mut cluster, 3).await?;
    drop(cluster);
    test.passed()
}

fn has_waited(vm: &Running) -> bool {
    let lines = vm.console().last(usize::MAX);
    lines.iter().any(|line| line.text.contains(OTHER_BOOT))
}

/// Waits until this many boots of the second node are recorded. All are different and from its address, and the last
/// one is the boot that the node reports.
async fn joined(cluster: &mut Cluster, boots: usize) -> Outcome {
    let id = cluster.node(2).id().to_owned();
    let address = cluster.node(2).address().to_string();
    let find = |status: &ClusterStatus| {
        let mut nodes = status.nodes.iter();
        nodes.find(|node| node.id == id).cloned()
    };
    let wanted = format!("{boots} joins of node-2");
    let status = cluster
        .until(&wanted, bounds::SETTLED, |status| {
            find(status).is_some_and(|node| node.joins.len() == boots)
        })
        .await?;
    let node = find(&status).context("node-2 is not listed")?;
    let of_boot = |join: &NodeJoin| join.boot_id.clone();
    let different: BTreeSet<_> = node.joins.iter().map(of_boot).collect();
    ensure!(different.len() == boots, "{:#?}", node.joins);
    ensure!(
        node.joins.iter().all(|join| join.address == address),
        "expected joins from {address}, found {:#?}",
        node.joins
    );
    ensure!(
        node.joins.first().map(of_boot).as_deref() == boot_id(&node),
        "{node:#?}"
    );
    Ok(())
}
