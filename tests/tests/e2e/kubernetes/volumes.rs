//! Volumes: the directories that claims get, and further disks.

use anyhow::{bail, ensure};
use hearth_tests::kubernetes::{VOLUME, items};
use hearth_tests::{Cluster, Kubernetes, Outcome, TestCtx, bounds, here};
use serde_json::json;

/// A claim becomes a directory with the claim's size as its limit, survives pods and power cuts, and is removed with
/// its claim. A local volume makes a further disk available to pods, and its files last as well. A Node object that
/// is deleted while its node has the role is created again, automatically.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_volume_has_its_limit_and_outlives_its_pod() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| {
        Ok(plan.kubernetes()?.second_disk(2 << 30))
    })
    .await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    let disk = ["disk.scratch=size:1G..3G"];
    kubernetes.node_settings("set", &node, &disk).await?;
    further_disk(&kubernetes, &node).await?;
    let write_to_disk = format!("df -P -m {VOLUME} | tail -n 1; echo kept > {VOLUME}/file; sync");
    kubernetes.probe_with("scratch", &node, "scratch").await?;
    let words = ["exec", "scratch", "--", "sh", "-c", &write_to_disk];
    let space = kubernetes.kubectl(&words).await?;
    let megabytes = space.split_whitespace().nth(1).map(str::parse::<u32>);
    ensure!(
        matches!(megabytes, Some(Ok(1800..=2048))),
        "not the disk of 2 GiB: {space}"
    );
    kubernetes.claim("files", "8Mi").await?;
    kubernetes.probe_with("first", &node, "files").await?;
    let write = |file: &'static str, megabytes: &'static str| {
        let file = format!("of={VOLUME}/{file}");
        let count = format!("count={megabytes}");
        let kubernetes = kubernetes.clone();
        async move {
            let dd = ["dd", "if=/dev/zero", "bs=1M", "conv=fsync", &file, &count];
            let words = [&["exec", "first", "--"], &dd[..]].concat();
            kubernetes.kubectl(&words).await
        }
    };
    write("kept", "2").await?;
    let refused = write("too-much", "16").await;
    let Err(refused) = refused else {
        bail!("16 MiB fit into a volume of 8");
    };
    let refused = format!("{refused:#}");
    ensure!(refused.contains("No space left on device"), "{refused}");

    // Another pod, after a power cut.
    kubernetes
        .kubectl(&["delete", "pod", "first", "scratch"])
        .await?;
    cluster.node(1).cut().await?;
    cluster.node(1).comes_back().await?;
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.probe_with("second", &node, "files").await?;
    let kept = format!("{VOLUME}/kept");
    let words = ["exec", "second", "--", "stat", "-c", "%s", &kept];
    let size = kubernetes.kubectl(&words).await?;
    ensure!(size.trim() == "2097152", "{size}");
    kubernetes.probe_with("scratch", &node, "scratch").await?;
    let kept = format!("{VOLUME}/file");
    let words = ["exec", "scratch", "--", "cat", &kept];
    let kept = kubernetes.kubectl(&words).await?;
    ensure!(kept == "kept\n", "{kept:?}");

    let pods = ["delete", "pod", "second", "scratch"];
    kubernetes.kubectl(&pods).await?;
    let claims = ["delete", "pvc", "files", "scratch"];
    kubernetes.kubectl(&claims).await?;
    kubernetes.kubectl(&["delete", "pv", "scratch"]).await?;
    let none = |volumes: &serde_json::Value| items(volumes).is_empty();
    kubernetes
        .until("no volume", bounds::WORKLOAD, &["pv"], none)
        .await?;

    kubernetes.kubectl(&["delete", "node", &node]).await?;
    kubernetes.ready(&[&node]).await?;
    drop(cluster);
    test.passed()
}

/// A volume on the further disk `scratch` of this node, as docs/kubernetes.md describes it, and its claim.
async fn further_disk(kubernetes: &Kubernetes, node: &str) -> Outcome {
    kubernetes
        .create(&json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": { "name": "scratch" },
            "spec": {
                "capacity": { "storage": "1Gi" },
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "scratch",
                "local": { "path": "/data/disks/scratch" },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [{
                    "key": "kubernetes.io/hostname",
                    "operator": "In",
                    "values": [node],
                }]}]}},
            },
        }))
        .await?;
    kubernetes
        .create(&json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": "scratch" },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "scratch",
                "resources": { "requests": { "storage": "1Gi" } },
            },
        }))
        .await
}
