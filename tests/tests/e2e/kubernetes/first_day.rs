//! What clusters get on their first day, from the manifests that its makers publish.

use anyhow::{Context, ensure};
use hearth_lab::{manifests, tool};
use hearth_qemu::command::CommandLine;
use hearth_tests::registry::{LOGIN, Registry};
use hearth_tests::{Kubernetes, Outcome, TestCtx, here};

/// The image in the metrics server's manifests: registry, name and tag.
const METRICS_SERVER: (&str, &str, &str) = (
    "gcr.io",
    "k8s-staging-metrics-server/metrics-server",
    "master",
);

/// A cluster that was founded with the metrics server's manifests, unchanged, answers `kubectl top`. The image comes from
/// a mirror of the registry that the manifests name.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_cluster_founded_with_the_metrics_server_answers_kubectl_top() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let programs = test.kubernetes()?;
    let metrics_server = programs.metrics_server.as_ref();
    let metrics_server = metrics_server.context("the metrics server is not built")?;
    let mut kustomize = CommandLine::new(&programs.kubectl);
    kustomize.arg("kustomize").arg(&metrics_server.manifests);
    let yaml = test.folder().join("metrics-server.yaml");
    std::fs::write(&yaml, tool::run(&kustomize).await?)?;
    let objects = manifests::read(&programs.kubectl, &[yaml]).await?;
    ensure!(objects.len() > 5, "{} objects", objects.len());

    let registry = Registry::start(&test).await?;
    let (upstream, name, tag) = METRICS_SERVER;
    registry.add(&metrics_server.image, name, tag).await?;
    let machine = test.node("node").kubernetes()?.online();
    let machine = machine.with_manifests(objects).install().await?;
    let vm = machine.power_on().await?;
    vm.home().await?;
    let node = vm.owned().await?.one_healthy_node().await?.id;
    let kubernetes = Kubernetes::at(&test, &vm, machine.folder()).await?;
    kubernetes.ready(&[&node]).await?;
    let of_registry = registry.name();
    let authorities = format!("kubernetes.registry_authorities={}", registry.authority()?);
    let credentials = format!("kubernetes.registry_credentials={upstream}={LOGIN}");
    let mirrors = format!("kubernetes.registry_mirrors={upstream}=https://{of_registry}");
    kubernetes
        .set(&[&authorities, &credentials, &mirrors])
        .await?;

    let used = kubernetes
        .answers(&["top", "nodes", "--no-headers"])
        .await?;
    ensure!(used.starts_with(&node), "{used}");
    let of_pods = ["top", "pods", "--namespace", "kube-system", "--no-headers"];
    let used = kubernetes.answers(&of_pods).await?;
    ensure!(used.contains("metrics-server"), "{used}");
    vm.power_off().await?;
    test.passed()
}
