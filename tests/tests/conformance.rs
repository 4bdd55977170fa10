//! Kubernetes' own conformance cases, as far as they run without a registry:
//! `tests/conformance.txt` says which, and why not the others.
//!
//! Each area has a machine of its own. They take long: about twenty minutes
//! each without hardware virtualisation.

use hearth_tests::{Cluster, Outcome, TestCtx, here};

async fn conforms(test: TestCtx, area: &str) -> Outcome {
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| plan.kubernetes()).await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    kubernetes.conforms(&test, area).await?;
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// What the API server and the controllers do, without a pod or with few.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn objects() -> Outcome {
    conforms(TestCtx::begin(here!())?, "objects").await
}

/// Containers: how they start, end, are looked at and told of their world.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn pods() -> Outcome {
    conforms(TestCtx::begin(here!())?, "pods").await
}

/// Files in pods that come from objects, and directories that they share.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn volumes() -> Outcome {
    conforms(TestCtx::begin(here!())?, "volumes").await
}

/// Pods that others make: deployments, daemon and stateful sets, and who removes
/// what is left.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn workloads() -> Outcome {
    conforms(TestCtx::begin(here!())?, "workloads").await
}

/// Services, names and ways between pods.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn network() -> Outcome {
    conforms(TestCtx::begin(here!())?, "network").await
}

/// Pods that the API server asks.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn webhooks() -> Outcome {
    conforms(TestCtx::begin(here!())?, "webhooks").await
}

/// What users do by kubectl.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn kubectl() -> Outcome {
    conforms(TestCtx::begin(here!())?, "kubectl").await
}

/// Where pods go, where not, and who must give way.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn scheduling() -> Outcome {
    conforms(TestCtx::begin(here!())?, "scheduling").await
}
