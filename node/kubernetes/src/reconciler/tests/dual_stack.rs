//! A real API server of a dual-stack cluster: the addresses that it gives to services, and their names.

use hearth_api::testing::dual_stack_ranges;

use super::super::objects;
use super::*;

#[tokio::test]
async fn services_and_pods_have_names_of_both_families() {
    let Some(plane) = testing::Cluster::with(dual_stack_ranges()).await else {
        return;
    };
    let kube = plane.client(&Certificate::Reconciler);
    // With the permissions of nodes.
    for wanted in objects::constant() {
        eventually("an object of every cluster", || async {
            wanted.apply(&kube).await.ok()
        })
        .await;
    }
    let services = kube.within("default", kinds::SERVICES);
    let service = |name: &str, policy: &str, more: Json| {
        let mut service = json!({
            "metadata": { "name": name },
            "spec": {
                "ipFamilyPolicy": policy,
                "ports": [{ "name": "http", "port": 80 }],
            },
        });
        for (field, value) in more.as_object().unwrap() {
            service["spec"][field] = value.clone();
        }
        service
    };
    for (name, policy, more) in [
        (
            "both",
            "RequireDualStack",
            json!({ "clusterIP": "10.224.0.7", "clusterIPs": ["10.224.0.7", "fd00:2::7"] }),
        ),
        (
            "six",
            "SingleStack",
            json!({ "ipFamilies": ["IPv6"], "clusterIP": "fd00:2::8" }),
        ),
        ("four", "SingleStack", json!({ "clusterIP": "10.224.0.9" })),
        ("pods", "RequireDualStack", json!({ "clusterIP": "None" })),
    ] {
        services.create(service(name, policy, more)).await.unwrap();
    }
    let slices = kube.within("default", kinds::ENDPOINT_SLICES);
    for (name, family, address) in [
        ("pods-4", "IPv4", "10.208.1.5"),
        ("pods-6", "IPv6", "fd00:1:0:1::5"),
    ] {
        let slice = json!({
            "metadata": {
                "name": name,
                "labels": { "kubernetes.io/service-name": "pods" },
            },
            "addressType": family,
            "endpoints": [{ "addresses": [address] }],
            "ports": [],
        });
        slices.create(slice).await.unwrap();
    }
    // As Kubernetes' own controller makes it, of a service without endpoints.
    let empty = json!({
        "metadata": { "name": "both-x", "labels": { "kubernetes.io/service-name": "both" } },
        "addressType": "IPv6",
        "endpoints": null,
        "ports": null,
    });
    slices.create(empty).await.unwrap();

    let files = tempfile::tempdir().unwrap();
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Node(id(1))));
    let (zone, at) = serve_names(files.path(), clients, dual_stack_ranges()).await;
    let (a, aaaa) = (RecordType::A, RecordType::AAAA);
    for (name, kind, expected) in [
        ("both", a, &["10.224.0.7"][..]),
        ("both", aaaa, &["fd00:2::7"]),
        ("six", a, &[]),
        ("six", aaaa, &["fd00:2::8"]),
        ("four", a, &["10.224.0.9"]),
        ("four", aaaa, &[]),
        ("pods", a, &["10.208.1.5"]),
        ("pods", aaaa, &["fd00:1:0:1::5"]),
        // The API server's own service has the first family.
        ("kubernetes", a, &["10.224.0.1"]),
        ("kubernetes", aaaa, &[]),
    ] {
        let full = format!("{name}.default.svc.cluster.local.");
        eventually(&format!("{name} {kind}"), || async {
            (resolve_as(at, &full, kind).await == expected).then_some(())
        })
        .await;
    }
    zone.stop().await;
}
