//! Disks that exist twice: restored from a copy, and in two machines.

use anyhow::{Context, ensure};
use hearth_api::console::Milestone;
use hearth_api::v1::{self, ClusterState};
use hearth_operator::ClusterStatus;
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here};

use crate::power_cut::OTHER_BOOT;

/// A consensus member whose disk went back in time votes no more. It says so, the others go on without it, and it is a member
/// again when it has been made one anew.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_restored_disk_does_not_start_etcd() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let before = starts(&mut cluster, 0).await?;
    cluster.node(3).power_off().await?;
    let copy = cluster.node(3).node.copy_disk("older.qcow2").await?;
    cluster.node(3).comes_back().await?;
    starts(&mut cluster, before).await?;
    cluster.node(3).cut().await?;

    cluster.node(3).node.restore_disk(&copy).await?;
    cluster.node(3).start().await?;
    let behind = |condition: &v1::NodeCondition| condition.reason == "DiskBehind";
    cluster
        .condition(3, "EtcdData", bounds::SETTLED, behind)
        .await?;
    let vm = cluster.node(3).vm()?;
    ensure!(
        !vm.has_reached(Milestone::Consensus),
        "etcd has started\n{}",
        vm.tail()
    );
    writer.goes_on().await?;

    cluster.set_consensus_member(3, false).await?;
    cluster.voters_with(&[1, 2]).await?;
    cluster.set_consensus_member(3, true).await?;
    cluster.voters_with(&[1, 2, 3]).await?;
    cluster.all_healthy().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// Waits until the curators know of more than this many starts of the third node's etcd; returns how many.
async fn starts(cluster: &mut Cluster, than: u64) -> anyhow::Result<u64> {
    let id = cluster.node(3).id().to_owned();
    let known = |status: &ClusterStatus| {
        let mut nodes = status.nodes.iter();
        let node = nodes.find(|node| node.id == id)?;
        Some(node.status.as_ref()?.etcd_starts?.count)
    };
    let wanted = format!("more than {than} starts of node-3");
    let status = cluster
        .until(&wanted, bounds::SETTLED, |status| {
            known(status).is_some_and(|count| count > than)
        })
        .await?;
    known(&status).context("no starts")
}

/// Of two machines with one disk, one is the node: the one that the cluster hears. The other waits, says what for, and
/// disturbs nobody. It is the node when the first has been silent for long enough, and then the first has to wait.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn of_two_machines_with_one_disk_one_is_the_node() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 3).await?;
    cluster.add_nodes(&[2]).await?;
    cluster.node(2).power_off().await?;
    let copy = cluster.node(2).node.copy_disk("copy.qcow2").await?;
    cluster.node(2).comes_back().await?;
    cluster.all_healthy().await?;
    let before = boot_id(&mut cluster).await?;

    cluster.node(3).node.restore_disk(&copy).await?;
    cluster.node(3).start().await?;
    cluster.node(3).vm()?.says(&[OTHER_BOOT]).await?;
    cluster.wait_cluster_state(3, ClusterState::Split).await?;
    cluster.wait_cluster_state(2, ClusterState::Home).await?;
    let after = boot_id(&mut cluster).await?;
    ensure!(after == before, "expected boot {before}, found {after}");

    cluster.node(2).cut().await?;
    cluster.wait_cluster_state(3, ClusterState::Home).await?;
    let copys = boot_id(&mut cluster).await?;
    ensure!(copys != before, "the copy has not reported");
    cluster.node(2).start().await?;
    cluster.node(2).vm()?.says(&[OTHER_BOOT]).await?;
    let after = boot_id(&mut cluster).await?;
    ensure!(after == copys, "expected boot {copys}, found {after}");
    drop(cluster);
    test.passed()
}

/// The boot that the second node reports.
async fn boot_id(cluster: &mut Cluster) -> anyhow::Result<String> {
    let status = cluster.cluster_status().await?;
    let status = cluster.node(2).status(&status);
    Ok(status.context("node-2 has not reported")?.boot_id.clone())
}
