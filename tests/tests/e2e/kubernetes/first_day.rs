//! What clusters get on their first day, from the manifests that its makers publish, unchanged. Images have the names
//! that the manifests give them, and come from a mirror of the registries that these name.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use hearth_lab::registry::{LOGIN, Registry};
use hearth_lab::{manifests, tool};
use hearth_qemu::artifacts::AddOns;
use hearth_qemu::command::CommandLine;
use hearth_tests::kubernetes::IMAGE_PORT;
use hearth_tests::{Kubernetes, Outcome, TestCtx, here};
use serde_json::{Value, json};

/// The registries that the manifests name.
const REGISTRIES: [&str; 2] = ["docker.io", "gcr.io"];
const TRAEFIK: &str = "docker.io/traefik/traefik:latest";
const VICTORIA_LOGS: &str = "docker.io/victoriametrics/victoria-logs:latest";
/// The namespace in the manifests of the collector.
const MONITORING: &str = "monitoring";
/// The heading above the collector's manifests in its documentation.
const DAEMON_SET: &str = "### Deploy on Kubernetes without Helm";

/// A cluster that was founded with the metrics server's manifests answers `kubectl top`, and gets a collector of logs and
/// a gateway.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn what_most_clusters_add_works() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let programs = test.kubernetes()?;
    let add_ons = programs.add_ons.as_ref();
    let add_ons = add_ons.context("the add-ons are not built")?;
    let registry = filled(&test, add_ons).await?;

    let mut kustomize = CommandLine::new(&programs.kubectl);
    kustomize
        .arg("kustomize")
        .arg(&add_ons.metrics_server.manifests);
    let yaml = test.folder().join("metrics-server.yaml");
    fs::write(&yaml, tool::run(&kustomize).await?)?;
    let objects = manifests::read(&programs.kubectl, &[yaml]).await?;
    ensure!(objects.len() > 5, "{} objects", objects.len());
    let machine = test.node("node").kubernetes()?.online();
    let machine = machine.with_manifests(objects).install().await?;
    let vm = machine.power_on().await?;
    vm.home().await?;
    let node = vm.owned().await?.one_healthy_node().await?.id;
    let kubernetes = Kubernetes::at(&test, &vm, machine.folder()).await?;
    kubernetes.ready(&[&node]).await?;
    images_come_from(&kubernetes, &registry).await?;

    usage_is_measured(&kubernetes, &node).await?;
    let manifests = test.folder().join("vlagent.yaml");
    fs::write(
        &manifests,
        yaml_below(&add_ons.vlagent.manifests.join("vlagent.md"), DAEMON_SET)?,
    )?;
    logs_are_collected(&kubernetes, &node, &manifests).await?;
    requests_pass_a_gateway(&kubernetes, &node, &add_ons.traefik.manifests).await?;
    vm.power_off().await?;
    test.passed()
}

/// A registry with all images.
async fn filled(test: &TestCtx, add_ons: &AddOns) -> anyhow::Result<Registry> {
    let registry = test.registry().await?;
    for (add_on, name, tag) in [
        (
            &add_ons.metrics_server,
            "k8s-staging-metrics-server/metrics-server",
            "master",
        ),
        (&add_ons.traefik, "traefik/traefik", "latest"),
        (
            &add_ons.victoria_logs,
            "victoriametrics/victoria-logs",
            "latest",
        ),
        (&add_ons.vlagent, "victoriametrics/vlagent", "v1.51.0"),
    ] {
        registry.add(&add_on.image, name, tag).await?;
    }
    Ok(registry)
}

/// Makes the registry the mirror of those that the manifests name.
async fn images_come_from(kubernetes: &Kubernetes, registry: &Registry) -> Outcome {
    let of_all = |element: &dyn Fn(&str) -> String| REGISTRIES.map(element).join(",");
    let mirror = registry.name();
    let authorities = format!("kubernetes.registry_authorities={}", registry.authority()?);
    let credentials = of_all(&|upstream| format!("{upstream}={LOGIN}"));
    let credentials = format!("kubernetes.registry_credentials={credentials}");
    let mirrors = of_all(&|upstream| format!("{upstream}=https://{mirror}"));
    let mirrors = format!("kubernetes.registry_mirrors={mirrors}");
    kubernetes
        .set(&[&authorities, &credentials, &mirrors])
        .await
}

/// `kubectl top`, from the metrics server with which the cluster was founded.
async fn usage_is_measured(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let used = kubernetes
        .answers(&["top", "nodes", "--no-headers"])
        .await?;
    ensure!(used.starts_with(node), "{used}");
    let of_pods = ["top", "pods", "--namespace", "kube-system", "--no-headers"];
    let used = kubernetes.answers(&of_pods).await?;
    ensure!(used.contains("metrics-server"), "{used}");
    Ok(())
}

/// What a pod prints is found in the store of logs, with the pod's name. The collector reads the machine's files, for
/// which its namespace must be labelled.
async fn logs_are_collected(kubernetes: &Kubernetes, node: &str, manifests: &Path) -> Outcome {
    let store = json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": MONITORING,
                    "labels": { "pod-security.kubernetes.io/enforce": "privileged" },
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": "victoria-logs",
                    "namespace": MONITORING,
                    "labels": { "app": "victoria-logs" },
                },
                "spec": { "containers": [{ "name": "store", "image": VICTORIA_LOGS }] },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": { "name": "victoria-logs", "namespace": MONITORING },
                "spec": {
                    "selector": { "app": "victoria-logs" },
                    "ports": [{ "port": 9428 }],
                },
            },
        ],
    });
    kubernetes.create(&store).await?;
    apply(kubernetes, manifests).await?;
    let talk = |spec: &mut Value| {
        spec["containers"][0]["command"] = json!(["sh", "-c", "echo remarkable words; sleep 3600"]);
    };
    kubernetes.probe_as("talker", node, talk).await?;
    let found = "services/victoria-logs:9428/proxy/select/logsql/query?query=remarkable";
    let found = format!("/api/v1/namespaces/{MONITORING}/{found}");
    kubernetes
        .prints(&["get", "--raw", &found], |found| {
            found.contains("remarkable words") && found.contains("talker")
        })
        .await
}

/// A request for a host reaches the service that a route names for it. The manifests forbid to pull the image, so a pod
/// has pulled it before.
async fn requests_pass_a_gateway(kubernetes: &Kubernetes, node: &str, folder: &Path) -> Outcome {
    let pulls = |spec: &mut Value| {
        spec["containers"][0] = json!({ "name": "traefik", "image": TRAEFIK });
    };
    kubernetes.probe_as("puller", node, pulls).await?;
    kubernetes.kubectl(&["delete", "pod", "puller"]).await?;
    for file in ["kinds.yaml", "rbac.yaml", "traefik.yaml"] {
        apply(kubernetes, &folder.join(file)).await?;
    }
    kubernetes.probe("server", node).await?;
    let port = format!("--target-port={IMAGE_PORT}");
    kubernetes
        .kubectl(&["expose", "pod", "server", "--port=80", &port])
        .await?;
    let routed = json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "Gateway",
                "metadata": { "name": "outside" },
                "spec": {
                    "gatewayClassName": "traefik",
                    "listeners": [{ "name": "web", "port": 80, "protocol": "HTTP" }],
                },
            },
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "HTTPRoute",
                "metadata": { "name": "server" },
                "spec": {
                    "parentRefs": [{ "name": "outside" }],
                    "hostnames": ["server.example"],
                    "rules": [{ "backendRefs": [{ "name": "server", "port": 80 }] }],
                },
            },
        ],
    });
    kubernetes.create(&routed).await?;
    let ask = "timeout 5 wget -q -O - --header 'Host: server.example' \
               http://traefik.traefik/cgi-bin/hostname";
    kubernetes
        .says("talker", ask, |said| said.trim() == "server")
        .await
}

/// Applies a file. Server-side, because the definitions of the gateway's kinds are too large for an annotation.
async fn apply(kubernetes: &Kubernetes, file: &Path) -> Outcome {
    let file = file.to_string_lossy();
    let words = ["apply", "--server-side", "--filename", &file];
    kubernetes.answers(&words).await.map(drop)
}

/// The blocks of YAML in a Markdown file from this heading to the next of its level, as one file of YAML.
fn yaml_below(file: &Path, heading: &str) -> anyhow::Result<String> {
    let text = fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let from = text.find(heading).context(heading.to_owned())?;
    let section = &text[from + heading.len()..];
    let section = section
        .split_once("\n## ")
        .map_or(section, |(section, _)| section);
    let blocks = section.split("```yaml\n").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split_once("```"));
    let blocks: Vec<&str> = blocks.map(|(block, _)| block).collect();
    ensure!(!blocks.is_empty(), "no YAML below {heading:?}");
    Ok(blocks.join("---\n"))
}
