//! Disks that are slow, or fail in part.

use std::net::Ipv4Addr;

use anyhow::ensure;
use hearth_api::console::Report;
use hearth_api::names::disk::ESP_STATE_FILES;
use hearth_api::v1::{self, ClusterState, DeleteNodeRequest, NodeCondition};
use hearth_operator::ClusterStatus;
use hearth_qemu::vm::DiskFault;
use hearth_tests::cluster::Member;
use hearth_tests::node::Node;
use hearth_tests::writer::Writer;
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here, retry_unavailable};

/// So few writes in a second that etcd waits for seconds, as on a disk that is worn out, or shared with too many.
const SLOW: DiskFault = DiskFault::SlowWrites { per_second: 4 };

/// How often each leadership may change because of one slow disk: once when its node falls silent, and once more on a busy
/// host.
const CHANGES: usize = 2;

/// How often each node has become SPLIT.
fn splits(cluster: &mut Cluster) -> anyhow::Result<Vec<usize>> {
    let of = |member: &mut Member| {
        let states = member.vm()?.states();
        Ok(states.iter().filter(|state| *state == "SPLIT").count())
    };
    cluster.nodes().iter_mut().map(of).collect()
}

/// Makes the disk of this node slow until `shown` is so, and well again. Writes go on, leaders stay or change once, no node is
/// SPLIT again and again, and all is well when the disk is.
async fn while_slow(
    cluster: &mut Cluster,
    number: u16,
    writer: &Writer,
    shown: impl AsyncFnOnce(&Cluster) -> Outcome,
) -> Outcome {
    // Nodes that were off together are SPLIT until they have a quorum.
    let before = splits(cluster)?;
    let leaders = cluster.leaders();
    let vm = cluster.node(number).vm()?;
    vm.set_disk_fault(0, Some(&SLOW)).await?;
    shown(cluster).await?;
    for _ in 0..3 {
        writer.goes_on().await?;
    }
    cluster.node(number).vm()?.set_disk_fault(0, None).await?;
    cluster.all_healthy().await?;
    cluster
        .no_condition(number, "EtcdDisk", bounds::SETTLED)
        .await?;
    let seen = leaders.seen()?;
    ensure!(
        seen.curator.len() <= 1 + CHANGES && seen.etcd.len() <= 1 + CHANGES,
        "leaders while the disk of node-{number} was slow: {seen:?}"
    );
    // Each reaches a curator of another node even if its own is late; on a busy host not always at once.
    for (node, (before, after)) in (1..).zip(before.into_iter().zip(splits(cluster)?)) {
        let times = after - before;
        ensure!(times <= 1, "node-{node} was SPLIT {times} times");
    }
    Ok(())
}

/// A follower of etcd has the slow disk: it is told.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_slow_disk_of_a_follower_is_told_and_churn_is_bounded() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let leader = cluster.etcd_leader().await?;
    let follower = cluster.others(leader)[0];
    let told = |condition: &NodeCondition| {
        condition.reason == "Slow" && condition.message.contains("slow fdatasync")
    };
    while_slow(&mut cluster, follower, &writer, async |cluster| {
        let condition = cluster.condition(follower, "EtcdDisk", bounds::SETTLED, told);
        condition.await
    })
    .await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The leader of etcd has it: all writes wait for its disk, so there are fewer of them, and it need not be slow enough to be
/// told.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_slow_disk_of_the_leader_delays_and_churn_is_bounded() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let leader = cluster.etcd_leader().await?;
    while_slow(&mut cluster, leader, &writer, async |_| Ok(())).await?;
    cluster.voters_with(&[1, 2, 3]).await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The ESP of this node's disk, which has been used and is not in use, takes no writes: neither to the files of the node's
/// state nor to the directory of them.
async fn failing_esp(node: &Node) -> anyhow::Result<DiskFault> {
    let disk = node.disk().await?;
    let mut sectors = Vec::new();
    for path in ["hearth"].iter().chain(&ESP_STATE_FILES) {
        sectors.extend(disk.esp_sectors(&format!("/{path}")).await?);
    }
    Ok(DiskFault::FailingWrites { sectors })
}

fn cannot_write_esp(condition: &NodeCondition) -> bool {
    let told = ["cannot be written", "Input/output error"];
    condition.r#type == "Esp"
        && !condition.met
        && told.iter().all(|part| condition.message.contains(part))
}

/// A node is booted whose ESP can be read and not written: it comes HOME, says so, tries again, and is well when the disk
/// is.
#[tokio::test]
async fn an_esp_that_takes_no_writes_is_told_and_written_again() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").raw_disk().install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    // Its directory is saved: the status is reported after that.
    vm.cut().await?;

    let fault = failing_esp(&node).await?;
    let vm = node.power_on().await?;
    vm.set_disk_fault(0, Some(&fault)).await?;
    vm.says(&["cannot write the boot record", "Input/output error"])
        .await?;
    vm.home().await?;
    let owner = vm.owned().await?;
    let conditions = |node: &v1::Node| node.status.clone().unwrap_or_default().conditions;
    owner
        .one_healthy_node_that(|node| conditions(node).iter().any(cannot_write_esp))
        .await?;

    vm.set_disk_fault(0, None).await?;
    owner
        .one_healthy_node_that(|node| conditions(node).is_empty())
        .await?;
    vm.power_off().await?;
    test.passed()
}

/// The ESP of a node stops to take writes while it runs. Its consensus role changes, then its address: the cluster follows,
/// but is not told of an address that the next boot would not know. Then it is deleted: its keys stay until they
/// can be wiped. Each is made good when the disk is.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_cannot_be_saved_is_not_acknowledged_and_made_good() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 2, |_, plan| Ok(plan.raw_disk())).await?;
    cluster.add_nodes(&[2]).await?;
    cluster.all_healthy().await?;
    // The files have their sectors once they are all written.
    cluster.node(2).cut().await?;
    let fault = failing_esp(&cluster.node(2).node).await?;
    cluster.node(2).comes_back().await?;
    cluster.all_healthy().await?;
    let vm = cluster.node(2).vm()?;
    vm.set_disk_fault(0, Some(&fault)).await?;

    cluster.set_consensus_member(2, true).await?;
    cluster.voters_with(&[1, 2]).await?;
    cluster
        .condition(2, "Esp", bounds::SETTLED, cannot_write_esp)
        .await?;
    let (id, known) = (cluster.node(2).id().to_owned(), cluster.node(2).address());
    let moved = Ipv4Addr::from(u32::from(known) + 100);
    cluster.network().set_address("node-2", moved).await?;
    // Nodes tell each other.
    cluster.resolves(1, &id, moved).await?;
    cluster.all_healthy().await?;
    let reported = |cluster_status: &ClusterStatus| {
        let node = cluster_status.nodes.iter().find(|node| node.id == id);
        let status = node.and_then(|node| node.status.clone());
        status.unwrap_or_default().external_address
    };
    let address = reported(&cluster.cluster_status().await?);
    ensure!(address == known.to_string(), "reported: {address}");

    // A boot finds what was saved, reports with the address that is known, and cannot save another one.
    cluster.node(2).cut().await?;
    cluster.node(2).start().await?;
    let vm = cluster.node(2).vm()?;
    vm.set_disk_fault(0, Some(&fault)).await?;
    cluster.node(2).home().await?;
    cluster.all_healthy().await?;
    cluster
        .condition(2, "Esp", bounds::SETTLED, |condition| {
            cannot_write_esp(condition) && condition.message.contains("the cluster directory")
        })
        .await?;
    let address = reported(&cluster.cluster_status().await?);
    ensure!(address == known.to_string(), "reported: {address}");

    cluster.node(2).vm()?.set_disk_fault(0, None).await?;
    cluster.no_condition(2, "Esp", bounds::SETTLED).await?;
    cluster
        .until("the new address", bounds::SETTLED, |cluster_status| {
            reported(cluster_status) == moved.to_string()
        })
        .await?;
    cluster.all_healthy().await?;

    let vm = cluster.node(2).vm()?;
    vm.set_disk_fault(0, Some(&fault)).await?;
    let request = DeleteNodeRequest {
        node: Some(cluster.node(2).selector()),
        bypass_not_decommissioned: true,
        bypass_has_roles: true,
        reset: false,
    };
    retry_unavailable(|| cluster.owner().once().delete(request.clone())).await?;
    let vm = cluster.node(2).vm()?;
    let mut times = 0;
    vm.wait_for_report("two attempts to wipe", bounds::SOON, |report| {
        let told = ["its keys cannot be wiped", "Input/output error"];
        if let Report::Waiting(what) = report {
            times += usize::from(told.iter().all(|part| what.contains(part)));
        }
        times == 2
    })
    .await?;
    ensure!(!vm.states().contains(&"DISOWNING".to_owned()), "not yet");
    vm.set_disk_fault(0, None).await?;
    cluster
        .wait_cluster_state(2, ClusterState::Disowning)
        .await?;
    drop(cluster);
    test.passed()
}
