//! Pods that take all that they can get, on one node with all roles and 2 GiB: only they suffer.
//!
//! Each of them runs alone beside a pod that needs little, and is watched until it has ended or been ended. After it
//! the same API server, the same etcd and the other pod still serve, and the kernel has killed no program of the node.

use anyhow::{Context, ensure};
use hearth_tests::{Cluster, Kubernetes, Outcome, TestCtx, bounds, here};
use serde_json::{Value, json};

/// A pod that takes something: its name, what it does, and what it needs for that.
struct Greedy {
    name: &'static str,
    script: &'static str,
    change: fn(&mut Value),
}

/// Each script ends by itself if nobody ends it.
const ALL: [Greedy; 5] = [
    Greedy {
        name: "memory",
        script: "exec timeout 120 tail /dev/zero",
        change: |_| (),
    },
    // As many bytes as two of its memory volumes can have, each half of the memory.
    Greedy {
        name: "memory-volumes",
        script: "for volume in one two; do timeout 60 dd if=/dev/zero of=/$volume/file bs=1M; done; sleep 20",
        change: |spec| {
            volumes(spec, json!({ "medium": "Memory" }));
        },
    },
    // Killed last of all pods, because it asks for all that the scheduler has.
    Greedy {
        name: "guaranteed",
        script: "exec timeout 120 tail /dev/zero",
        change: |spec| {
            let all = json!({ "memory": "512Mi", "cpu": "200m" });
            spec["containers"][0]["resources"] = json!({ "requests": all, "limits": all });
        },
    },
    Greedy {
        name: "disk",
        script: "for volume in one two; do timeout 120 dd if=/dev/zero of=/$volume/file bs=1M; done; sleep 20",
        change: |spec| {
            volumes(spec, json!({}));
        },
    },
    Greedy {
        name: "processes",
        script: "fork() { fork & fork & wait; }; fork & sleep 60",
        change: |_| (),
    },
];

fn volumes(spec: &mut Value, kind: Value) {
    spec["volumes"] = json!([
        { "name": "one", "emptyDir": kind },
        { "name": "two", "emptyDir": kind },
    ]);
    spec["containers"][0]["volumeMounts"] = json!([
        { "name": "one", "mountPath": "/one" },
        { "name": "two", "mountPath": "/two" },
    ]);
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_greedy_pod_harms_itself_alone() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| plan.kubernetes()).await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    kubernetes.probe("modest", &node).await?;
    let modest = kubernetes.container("modest").await?;
    for greedy in &ALL {
        greedy.run(&kubernetes, &node).await?;
        kubernetes.ready(&[&node]).await?;
        let name = format!("after-{}", greedy.name);
        let words = ["create", "configmap", &name];
        kubernetes.kubectl(&words).await?;
        kubernetes
            .reaches("modest", "127.0.0.1:8080", "modest")
            .await?;
        ensure!(
            kubernetes.container("modest").await? == modest,
            "the pod beside {} was restarted",
            greedy.name
        );
        let logs = cluster.node(1).node.serial_logs()?;
        ensure!(
            logs.len() == 1,
            "the machine restarted after {}",
            greedy.name
        );
        killed_no_program_of_the_node(&String::from_utf8_lossy(&logs[0].1), greedy.name)?;
    }
    drop(cluster);
    test.passed()
}

impl Greedy {
    /// Runs it until it has ended.
    async fn run(&self, kubernetes: &Kubernetes, node: &str) -> Outcome {
        let script = json!(["sh", "-c", self.script]);
        let change = |spec: &mut Value| {
            spec["restartPolicy"] = "Never".into();
            spec["containers"][0]["command"] = script;
            (self.change)(spec);
        };
        kubernetes.begin(self.name, node, change).await?;
        let what = format!("pod {} has ended", self.name);
        let ended = |pod: &Value| {
            let phase = pod["status"]["phase"].as_str();
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        let words = ["pod", self.name];
        let pod = kubernetes
            .until(&what, bounds::WORKLOAD, &words, ended)
            .await?;
        let why = pod["status"]["containerStatuses"][0]["state"]["terminated"].clone();
        println!("{}: {} {why}", self.name, pod["status"]["reason"]);
        let words = ["delete", "pod", self.name];
        kubernetes.kubectl(&words).await.map(drop)
    }
}

/// The kernel says on the console whom it kills for want of memory.
fn killed_no_program_of_the_node(console: &str, after: &str) -> Outcome {
    for line in console
        .lines()
        .filter(|line| line.contains("Killed process"))
    {
        let name = line.split('(').nth(1).context("no name")?;
        let ours = ["init", "etcd", "kube", "containerd", "runc"];
        ensure!(
            !ours.iter().any(|ours| name.starts_with(ours)),
            "after {after}: {line}"
        );
    }
    Ok(())
}
