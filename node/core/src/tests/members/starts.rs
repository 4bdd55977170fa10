//! Disks that went back in time.

use std::fs;
use std::path::Path;

use hearth_tpm::testing::Swtpm;
use tempfile::TempDir;

use super::*;

/// A copy of what a node has of etcd.
struct Snapshot(TempDir);

impl Snapshot {
    fn of(node: &Node) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy(node.site.root.data.etcd().path(), folder.path());
        Self(folder)
    }

    fn restore(&self, node: &Node) {
        let etcd = node.site.root.data.etcd();
        fs::remove_dir_all(etcd.path()).unwrap();
        fs::create_dir(etcd.path()).unwrap();
        copy(self.0.path(), etcd.path());
    }
}

/// Copies a folder into another one that is empty. Keeps permissions.
fn copy(from: &Path, to: &Path) {
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let there = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            fs::create_dir(&there).unwrap();
            copy(&entry.path(), &there);
        } else {
            fs::copy(entry.path(), there).unwrap();
        }
    }
}

impl Cluster {
    /// Waits until curators know that a node has started etcd so often.
    async fn knows_starts(&self, number: usize, count: u64) {
        let has_counted = |status: &NodeStatus| {
            let starts = status.etcd_starts.as_ref();
            starts.is_some_and(|starts| starts.count == count)
        };
        self.reported(number, "starts", has_counted).await;
    }

    /// Waits until a node has refused to start etcd, and checks that it does not run.
    async fn refuses(&self, number: usize, why: &str) {
        let node = &self.nodes[number];
        let control = &node.boot.as_ref().unwrap().control;
        control.says(Severity::Error, why).await;
        assert!(node.site.etcd_pids().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_disk_went_back_in_time_does_not_start_etcd() {
    let mut cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster.knows_starts(2, 1).await;
    cluster.stop(2).await;
    let snapshot = Snapshot::of(&cluster.nodes[2]);
    cluster.boot(2);
    cluster.knows_starts(2, 2).await;
    cluster.stop(2).await;
    // The right disk starts, as often as it likes.
    cluster.boot(2);
    cluster.knows_starts(2, 3).await;
    cluster.stop(2).await;
    snapshot.restore(&cluster.nodes[2]);
    cluster.boot(2);
    let why = "it has counted 1 starts of etcd, and the curators remember 3";
    cluster.refuses(2, why).await;
    // Also the next time, although it has reported since.
    cluster.stop(2).await;
    cluster.boot(2);
    cluster.refuses(2, why).await;

    cluster.set_member(2, false).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    cluster.knows_starts(2, 1).await;

    // One of the others is off, so the one that remains has no quorum, and must not get one by this disk.
    cluster.stop(2).await;
    let snapshot = Snapshot::of(&cluster.nodes[2]);
    cluster.boot(2);
    cluster.knows_starts(2, 2).await;
    cluster.stop(2).await;
    cluster.cut_power(1).await;
    snapshot.restore(&cluster.nodes[2]);
    cluster.boot(2);
    let why = "it has counted 1 starts of etcd, and the curators remember 2";
    cluster.refuses(2, why).await;
    cluster.end().await;
}

/// All of them start at once, and nobody is there to be asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_cluster_starts_without_being_able_to_ask() {
    let mut cluster = Cluster::new(2, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    cluster.knows_starts(1, 1).await;
    cluster.stop(0).await;
    cluster.stop(1).await;
    cluster.ask_bound = controlplane::ASK_BOUND;
    cluster.boot(0);
    cluster.boot(1);
    cluster.becomes(&[0, 1]).await;
    cluster.knows_starts(1, 2).await;
    cluster.end().await;
}

/// The TPM remembers where there is nobody to ask.
#[tokio::test(flavor = "multi_thread")]
async fn a_tpm_remembers_the_starts_of_the_only_member() {
    let swtpm = Swtpm::start();
    let mut cluster = Cluster::new(1, quick()).await;
    cluster.stop(0).await;
    cluster.nodes[0].tpm = Some(Arc::new(Prover::new(swtpm.tpm(), Path::new("/nowhere"))));
    cluster.boot(0);
    cluster.becomes(&[0]).await;
    cluster.stop(0).await;
    let snapshot = Snapshot::of(&cluster.nodes[0]);
    for _ in 0..2 {
        cluster.boot(0);
        cluster.becomes(&[0]).await;
        cluster.stop(0).await;
    }
    snapshot.restore(&cluster.nodes[0]);
    cluster.boot(0);
    cluster.refuses(0, "the disk went back in time").await;
    cluster.refuses(0, "and the TPM's counter is at").await;
    cluster.end().await;
}
