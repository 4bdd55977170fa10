//! A cluster whose pods and services have IPv4 and IPv6.

use std::net::Ipv6Addr;

use anyhow::{Context, ensure};
use hearth_qemu::switch::NetworkOptions;
use hearth_tests::kubernetes::{IMAGE_PORT, items};
use hearth_tests::{Cluster, Kubernetes, Outcome, TestCtx, bounds, here};
use serde_json::{Value, json};

use super::{ingress_policy, roles};

/// Pods of two nodes reach each other by both families: by address, through a service, by name, and through node ports.
/// A policy holds for both.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn pods_and_services_have_both_families() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 2, |number, plan| {
        Ok(plan.kubernetes()?.dual_stack(number))
    })
    .await?;
    cluster.add_nodes(&[2]).await?;
    cluster.set_roles(2, roles(None, Some(true))).await?;
    let ids = [1, 2].map(|number| cluster.node(number).id().to_owned());
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&ids[0], &ids[1]]).await?;
    for number in [1, 2] {
        let met = cluster.condition(number, "KubernetesDualStack", bounds::KUBERNETES, |c| c.met);
        met.await?;
    }
    nodes_have_both_addresses(&kubernetes).await?;

    kubernetes.probe("there", &ids[1]).await?;
    kubernetes.probe("here", &ids[0]).await?;
    for pod in ["here", "there"] {
        let [v4, v6] = addresses(&kubernetes, &["pod", pod], "/status/podIPs").await?;
        let other = if pod == "here" { "there" } else { "here" };
        for host in [format!("{v4}:{IMAGE_PORT}"), format!("[{v6}]:{IMAGE_PORT}")] {
            kubernetes.reaches(other, &host, pod).await?;
        }
    }
    let port = service(&kubernetes).await?;
    let [v4, v6] = addresses(&kubernetes, &["service", "there"], "/spec/clusterIPs").await?;
    for host in ["there", &v4, &format!("[{v6}]")] {
        kubernetes.reaches("here", host, "there").await?;
    }
    // Both nodes serve the port, whichever of them has the pod: to other machines, and to their own pods.
    machine(&kubernetes, &ids[0]).await?;
    let options = NetworkOptions::default();
    for (from, number) in [("machine", 2), ("here", 1), ("there", 2)] {
        let v4 = format!("{}:{port}", options.machine_address(number));
        let v6 = format!("[{}]:{port}", options.machine_address6(number));
        for host in [v4, v6] {
            kubernetes.reaches(from, &host, "there").await?;
        }
    }
    let name = "nslookup there.default.svc.cluster.local";
    let has_both = |said: &str| said.contains(&v4) && said.contains(&v6);
    kubernetes.says("here", name, has_both).await?;
    // The endpoints of a headless service.
    let headless = json!({ "clusterIP": "None", "ipFamilyPolicy": "RequireDualStack" });
    create_service(&kubernetes, "pods", headless).await?;
    let [_, pod] = addresses(&kubernetes, &["pod", "there"], "/status/podIPs").await?;
    let name = "nslookup pods.default.svc.cluster.local";
    kubernetes
        .says("here", name, |said| said.contains(&pod))
        .await?;

    policies_hold_for_both(&kubernetes, [&v4, &format!("[{v6}]")]).await?;
    drop(cluster);
    test.passed()
}

/// A pod in the network of its node.
async fn machine(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let level = "pod-security.kubernetes.io/enforce=privileged";
    kubernetes
        .kubectl(&["label", "namespace", "default", level])
        .await?;
    let in_host = |spec: &mut Value| {
        spec["hostNetwork"] = true.into();
        spec["containers"][0]["command"] = json!(["sleep", "3600"]);
    };
    kubernetes.probe_as("machine", node, in_host).await
}

/// Each node has an address of each family in its Node, IPv4 first.
async fn nodes_have_both_addresses(kubernetes: &Kubernetes) -> Outcome {
    let nodes = kubernetes.get(&["nodes"]).await?;
    for node in items(&nodes) {
        let all = node["status"]["addresses"].as_array().into_iter().flatten();
        let internal = all.filter(|address| address["type"] == "InternalIP");
        let found: Vec<&str> = internal.filter_map(|it| it["address"].as_str()).collect();
        let is_v6 = |text: &&str| text.parse::<Ipv6Addr>().is_ok();
        let both = found.len() == 2 && !is_v6(&found[0]) && is_v6(&found[1]);
        ensure!(both, "{found:?}");
    }
    Ok(())
}

/// The IPv4 and the IPv6 address in this field of an object.
async fn addresses(
    kubernetes: &Kubernetes,
    object: &[&str],
    field: &str,
) -> anyhow::Result<[String; 2]> {
    let object = kubernetes.get(object).await?;
    let found = object.pointer(field).context("no such field")?;
    let text = |index: usize| {
        let one = &found[index];
        let text = one.as_str().or_else(|| one["ip"].as_str());
        text.map(str::to_owned)
            .with_context(|| format!("{field}: {found}"))
    };
    let (v4, v6) = (text(0)?, text(1)?);
    ensure!(v4.contains('.') && v6.contains(':'), "{field}: {found}");
    Ok([v4, v6])
}

async fn create_service(kubernetes: &Kubernetes, name: &str, more: Value) -> Outcome {
    let mut spec = json!({
        "selector": { "app": "there" },
        "ports": [{ "port": 80, "targetPort": IMAGE_PORT }],
    });
    let fields = more.as_object().context("fields of a service")?;
    for (field, value) in fields {
        spec[field] = value.clone();
    }
    let object = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name },
        "spec": spec,
    });
    kubernetes.create(&object).await
}

/// Makes a service of both families with a node port; returns the port.
async fn service(kubernetes: &Kubernetes) -> anyhow::Result<u64> {
    let more = json!({ "type": "NodePort", "ipFamilyPolicy": "RequireDualStack" });
    create_service(kubernetes, "there", more).await?;
    let service = kubernetes.get(&["service", "there"]).await?;
    let port = service["spec"]["ports"][0]["nodePort"].as_u64();
    port.context("no node port")
}

/// A policy takes connections away by both families, and another one gives them back.
async fn policies_hold_for_both(kubernetes: &Kubernetes, service: [&str; 2]) -> Outcome {
    let policy = |name: &str, ingress: Value| ingress_policy(name, "there", &ingress);
    kubernetes.create(&policy("nobody", json!([]))).await?;
    let [_, v6] = addresses(kubernetes, &["pod", "there"], "/status/podIPs").await?;
    for host in service {
        kubernetes.reaches_not("here", host).await?;
    }
    let host = format!("[{v6}]:{IMAGE_PORT}");
    kubernetes.reaches_not("here", &host).await?;
    let here = json!([{
        "from": [{ "podSelector": { "matchLabels": { "app": "here" } } }],
        "ports": [{ "port": IMAGE_PORT }],
    }]);
    kubernetes.create(&policy("here", here)).await?;
    for host in service {
        kubernetes.reaches("here", host, "there").await?;
    }
    kubernetes.reaches("here", &host, "there").await
}
