//! The reconciler, the volumes and the DNS server of nodes with a real control plane: API server,
//! etcd, and the controllers that bind volumes.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::ranges::ClusterRanges;
use hearth_base::event::{self, Writer};
use hearth_base::testing::TestSupervisor;
use hearth_host::networking::NodeSubnets;
use hearth_host::pki::kubernetes::Certificate;
use hearth_kubernetes_api::kinds::{self, Kind};
use hearth_kubernetes_api::{ApiError, Client, Objects};
use hearth_kubernetes_dns::Dns;
use hearth_network_policy::node::NodePolicy;
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use http::StatusCode;
use serde_json::{Value as Json, json};
use tokio::net::UdpSocket;

use super::nodes::{Cluster, Member};
use super::{Reconciler, Timing, lease, run};
use crate::program::Progress;
use crate::testing::{self, eventually};
use crate::volumes::{self, Volumes};

mod dual_stack;

fn id(digit: u8) -> NodeId {
    NodeId::from_bytes([digit; 16])
}

/// A service that has the cluster IP of the DNS service.
const SQUATTER: &str = "squatter";

fn quick() -> Timing {
    Timing {
        lease: lease::Timing {
            lasts: Duration::from_secs(6),
            each: Duration::from_secs(1),
        },
        drift: Duration::from_secs(2),
        again: Duration::from_millis(500),
        patience: Duration::from_secs(2),
    }
}

/// A reconciler, as on one of several controllers.
fn reconciler(
    plane: &testing::Cluster,
    digit: u8,
    cluster: &Writer<Arc<Cluster>>,
    volumes: &Path,
    constants: &Arc<Writer<Progress>>,
) -> TestSupervisor {
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Reconciler));
    let reconciler = Arc::new(Reconciler {
        identity: id(digit).to_string(),
        volumes: volumes.to_owned(),
        timing: quick(),
        client: clients,
        cluster: cluster.value(),
        constants: constants.clone(),
    });
    // The client's writer lives as long as the worker.
    let client = Arc::new(client);
    TestSupervisor::run(move |ctx| {
        let (reconciler, _client) = (reconciler.clone(), client.clone());
        async move {
            let _kept = _client;
            run(ctx, reconciler).await
        }
    })
}

/// An object; `None` if it does not exist, or if the API server does not answer.
async fn found(objects: &Objects, name: &str) -> Option<Json> {
    objects.get(name).await.ok()?
}

/// `None` if the API server does not answer.
async fn missing(objects: &Objects, name: &str) -> Option<()> {
    let found: Option<Json> = objects.get(name).await.ok()?;
    found.is_none().then_some(())
}

async fn label_of(kube: &Client, node: &str, key: &str) -> Option<String> {
    let node = found(&kube.all(kinds::NODES), node).await?;
    node["metadata"]["labels"][key].as_str().map(str::to_owned)
}

async fn dns_servers(kube: &Client) -> Option<Vec<String>> {
    let endpoints = kube.within("kube-system", kinds::ENDPOINTS);
    let known = found(&endpoints, "kube-dns").await?;
    let all = |of: &Json, what: &str| of[what].as_array().cloned().unwrap_or_default();
    let addresses = all(&known, "subsets")
        .into_iter()
        .flat_map(|subset| all(&subset, "addresses"));
    let ip = |address: Json| address["ip"].as_str().unwrap().to_owned();
    Some(addresses.map(ip).collect())
}

/// A Node as a kubelet creates it.
async fn make_node(kube: &Client, name: &str) {
    let node = json!({
        "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name, "set-by-hand": "stays",
        }},
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    kube.all(kinds::NODES).create(node).await.unwrap();
}

fn worker(last: u8, labels: &[(&str, &str)]) -> Member {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Member {
        worker: true,
        consensus: false,
        controller: false,
        labels: labels.iter().map(owned).collect(),
        taints: Vec::new(),
        gateway: Some(Ipv4Addr::new(10, 208, last, 1)),
        networks: vec![format!("10.208.{last}.0/24").parse().unwrap()],
    }
}

fn cluster(nodes: &[(u8, Member)]) -> Arc<Cluster> {
    let nodes = nodes.iter().map(|(digit, node)| (id(*digit), node.clone()));
    Arc::new(Cluster {
        nodes: nodes.collect::<BTreeMap<_, _>>(),
        patterns: vec!["rack".into(), "disk/*".into()],
        ..Cluster::default()
    })
}

/// One control plane for all tests, because its start takes longer than they do.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_real_control_plane() {
    let Some(mut plane) = testing::Cluster::start().await else {
        return;
    };
    plane.start_manager();
    let kube = plane.client(&Certificate::Reconciler);
    let (writer, _) = event::value();
    writer.set(cluster(&[
        (1, worker(1, &[("rack", "7"), ("secret", "x")])),
        (2, worker(2, &[])),
    ]));
    let base = tempfile::tempdir().unwrap();
    let volumes = base.path().join("volumes");
    let squatter = squat(&kube).await;
    let constants = Arc::new(event::value().0);
    let first = reconciler(&plane, 1, &writer, &volumes, &constants);
    what_stands_in_the_way_is_told(&squatter, &constants).await;
    constant_objects_are_there_and_stay(&kube).await;
    nodes_follow_the_cluster(&kube, &writer).await;
    only_workers_get_pods(&plane, &kube).await;
    ports_of_nodes_are_no_host_ports(&kube).await;
    private_directories_are_no_host_paths(&kube).await;
    policies_reach_the_nodes(&plane, &kube).await;
    volumes_come_and_go_with_claims(&plane, &kube, &volumes).await;
    let constants = Arc::new(event::value().0);
    let second = reconciler(&plane, 2, &writer, &volumes, &constants);
    are_there(&constants).await;
    another_takes_over(&kube, first, second).await;
    names_follow_services(&mut plane, &kube).await;
}

/// A service has the cluster IP of the DNS service; returns the other services.
async fn squat(kube: &Client) -> Objects {
    let services = kube.within("kube-system", kinds::SERVICES);
    let squatter = json!({
        "metadata": { "name": SQUATTER },
        "spec": { "clusterIP": "10.224.0.10", "ports": [{ "port": 53 }] },
    });
    eventually("a service", || async {
        services.create(squatter.clone()).await.ok()
    })
    .await;
    services
}

async fn what_stands_in_the_way_is_told(services: &Objects, constants: &Writer<Progress>) {
    eventually("whose address is taken is told", || async {
        match constants.value().get()? {
            Progress::Serving => panic!("two services have one address"),
            Progress::Failing(why) => why.starts_with("Service kube-dns: ").then_some(()),
            Progress::Starting => None,
        }
    })
    .await;
    services.delete(SQUATTER).await.unwrap();
    are_there(constants).await;
}

/// Another leader creates them.
async fn are_there(constants: &Writer<Progress>) {
    eventually("the first objects are there", || async {
        (constants.value().get()? == Progress::Serving).then_some(())
    })
    .await;
}

async fn constant_objects_are_there_and_stay(kube: &Client) {
    let classes = kube.all(kinds::STORAGE_CLASSES);
    let class = found(&classes, volumes::CLASS).await.unwrap();
    assert_eq!(class["volumeBindingMode"], "WaitForFirstConsumer");
    let roles = kube.all(kinds::CLUSTER_ROLES);
    found(&roles, "hearth:node").await.unwrap();
    let services = kube.within("kube-system", kinds::SERVICES);
    let service = found(&services, "kube-dns").await.unwrap();
    assert_eq!(service["spec"]["clusterIP"], "10.224.0.10");
    let runtimes = kube.all(kinds::RUNTIME_CLASSES);
    found(&runtimes, "runc").await.unwrap();

    // What others add to an object stays.
    let accounts = kube.within("default", kinds::SERVICE_ACCOUNTS);
    let secrets = json!([{ "name": "registry" }]);
    eventually("the first account exists", || async {
        let account = found(&accounts, "default").await?;
        let ours = account["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "hearth";
        ours.then_some(())
    })
    .await;
    let added = json!({ "imagePullSecrets": secrets });
    accounts.merge("default", &added).await.unwrap();

    // One object is deleted and another one changed by hand.
    classes.delete(volumes::CLASS).await.unwrap();
    let weaker = json!({ "rules": [] });
    roles.merge("hearth:node", &weaker).await.unwrap();
    eventually("what was taken away is there again", || async {
        let role = found(&roles, "hearth:node").await?;
        let whole = role["rules"].as_array()?.len() == 3;
        (whole && found(&classes, volumes::CLASS).await.is_some()).then_some(())
    })
    .await;
    let account = found(&accounts, "default").await.unwrap();
    assert_eq!(account["imagePullSecrets"], secrets);
}

/// Why an object is not created; waits until it is not, because policies take effect after a moment.
async fn refusal(objects: &Objects, object: &Json) -> String {
    eventually("it is refused", || async {
        match objects.create(object.clone()).await {
            Err(error) if error.is(StatusCode::UNPROCESSABLE_ENTITY) => {
                Some(hearth_api::chain(&error))
            }
            _ => None,
        }
    })
    .await
}

/// A machine that is not a worker of the cluster does not become a Node, and no pod is bound to it.
async fn only_workers_get_pods(plane: &testing::Cluster, kube: &Client) {
    let deleted = id(9).to_string();
    let kubelet = plane.client(&Certificate::KubeletClient(id(9)));
    let node = json!({ "metadata": { "name": deleted } });
    let why = refusal(&kubelet.all(kinds::NODES), &node).await;
    let expected = format!("{deleted} is not a worker of this cluster");
    assert!(why.contains(&expected), "{why}");

    let pods = kube.within("default", kinds::PODS);
    let bind = async |node: &str| {
        let pod = json!({
            "metadata": { "generateName": "bound-" },
            "spec": { "containers": [{ "name": "c", "image": "i" }] },
        });
        let pod = pods.create(pod).await.unwrap();
        let name = &pod["metadata"]["name"];
        let path = format!("pods/{}/binding", name.as_str().unwrap());
        let binding = Kind {
            name: "Binding",
            plural: String::leak(path),
            ..kinds::PODS
        };
        let target = json!({ "apiVersion": "v1", "kind": "Node", "name": node });
        let object = json!({ "metadata": { "name": name }, "target": target });
        let bound = kube.within("default", binding).create(object).await;
        bound.map_err(|error| hearth_api::chain(&error))
    };
    let why = eventually("it is refused", || async { bind(&deleted).await.err() }).await;
    assert!(why.contains(&expected), "{why}");
    bind(&id(1).to_string()).await.unwrap();
}

async fn ports_of_nodes_are_no_host_ports(kube: &Client) {
    let pod = |ports: Json| {
        json!({
            "metadata": { "generateName": "port-" },
            "spec": { "containers": [{ "name": "c", "image": "i", "ports": ports }] },
        })
    };
    let pods = kube.within("default", kinds::PODS);
    let taken = json!([
        { "containerPort": 80, "hostPort": 8080 },
        { "containerPort": 80, "hostPort": 7835 },
        { "containerPort": 80, "hostPort": 7839, "protocol": "UDP" },
    ]);
    let why = refusal(&pods, &pod(taken)).await;
    assert!(
        why.contains("host port 7835, 7839 is used by the node itself"),
        "{why}"
    );
    for free in [
        json!([]),
        json!([{ "containerPort": 7835 }]),
        json!([{ "containerPort": 53, "hostPort": 53, "protocol": "UDP" }]),
        json!([{ "containerPort": 80, "hostPort": 7835, "protocol": "UDP" }]),
    ] {
        pods.create(pod(free)).await.unwrap();
    }
}

async fn private_directories_are_no_host_paths(kube: &Client) {
    let pod = |path: &str| {
        json!({
            "metadata": { "generateName": "path-" },
            "spec": {
                "containers": [{ "name": "c", "image": "i" }],
                "volumes": [
                    { "name": "empty", "emptyDir": {} },
                    { "name": "host", "hostPath": { "path": path } },
                ],
            },
        })
    };
    let volume = |path: &str| {
        json!({
            "metadata": { "generateName": "path-" },
            "spec": {
                "hostPath": { "path": path },
                "capacity": { "storage": "1" },
                "accessModes": ["ReadWriteOnce"],
            },
        })
    };
    let namespace = json!({ "metadata": {
        "name": "privileged",
        "labels": { "pod-security.kubernetes.io/enforce": "privileged" },
    }});
    kube.all(kinds::NAMESPACES).create(namespace).await.unwrap();
    for namespace in ["privileged", "kube-system"] {
        let accounts = kube.within(namespace, kinds::SERVICE_ACCOUNTS);
        let account = json!({ "metadata": { "name": "default" } });
        match accounts.create(account).await {
            // The controller manager was faster.
            Err(error) if error.is(StatusCode::CONFLICT) => {}
            made => drop(made.unwrap()),
        }
    }
    let users = kube.within("privileged", kinds::PODS);
    let own = kube.within("kube-system", kinds::PODS);
    let volumes = kube.all(kinds::VOLUMES);
    for path in [
        "/",
        "/data",
        "//data/./etcd/member",
        "/data/node/",
        "/ephemeral/consensus",
        "/esp",
        "/proc/1/root/usr",
    ] {
        let why = refusal(&users, &pod(path)).await;
        assert!(
            why.contains("a private directory of the node"),
            "{path}: {why}"
        );
        let why = refusal(&volumes, &volume(path)).await;
        assert!(
            why.contains("a private directory of the node"),
            "{path}: {why}"
        );
        own.create(pod(path)).await.unwrap();
    }
    for path in ["/data/etcd-backup", "/data/kubernetes/log", "/dev", "/sys"] {
        users.create(pod(path)).await.unwrap();
        volumes.create(volume(path)).await.unwrap();
    }
}

async fn nodes_follow_the_cluster(kube: &Client, writer: &Writer<Arc<Cluster>>) {
    let [one, two, gone] = [1, 2, 9].map(|digit| id(digit).to_string());
    for name in [&one, &two, &gone] {
        make_node(kube, name).await;
    }
    make_node(kube, "somebody-elses").await;
    eventually("labels are taken over", || async {
        (label_of(kube, &one, "rack").await? == "7").then_some(())
    })
    .await;
    let secret = label_of(kube, &one, "secret").await;
    assert_eq!(secret, None, "no pattern means it");
    let role = label_of(kube, &one, "node-role.kubernetes.io/worker").await;
    assert_eq!(role.as_deref(), Some(""));
    eventually("both resolve names", || async {
        (dns_servers(kube).await? == ["10.208.1.1", "10.208.2.1"]).then_some(())
    })
    .await;
    let nodes = kube.all(kinds::NODES);
    eventually("the node that is none is removed", || {
        missing(&nodes, &gone)
    })
    .await;
    assert!(found(&nodes, "somebody-elses").await.is_some());

    // One label changes and one is added; the other node is not a worker any more.
    let labels = [("disk/ssd", "yes")];
    writer.set(cluster(&[(1, worker(1, &labels))]));
    eventually("labels follow", || async {
        let ssd = label_of(kube, &one, "disk/ssd").await? == "yes";
        (ssd && label_of(kube, &one, "rack").await.is_none()).then_some(())
    })
    .await;
    let by_hand = label_of(kube, &one, "set-by-hand").await;
    assert_eq!(by_hand.as_deref(), Some("stays"));
    eventually("the other is removed and asked no more", || async {
        missing(&nodes, &two).await?;
        (dns_servers(kube).await? == ["10.208.1.1"]).then_some(())
    })
    .await;
}

/// Annotation of a claim: the node that was selected for its pod.
const SELECTED: &str = "volume.kubernetes.io/selected-node";

/// A claim as the scheduler leaves it, with the default class.
fn claim(name: &str, mode: &str) -> Json {
    json!({
        "metadata": { "name": name, "annotations": { SELECTED: id(1).to_string() }},
        "spec": {
            "accessModes": [mode],
            "resources": { "requests": { "storage": "10Mi" } },
        },
    })
}

fn uid(object: &Json) -> &str {
    object["metadata"]["uid"].as_str().unwrap()
}

async fn volumes_come_and_go_with_claims(plane: &testing::Cluster, kube: &Client, at: &Path) {
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Node(id(1))));
    let agent = Arc::new(Volumes {
        node: id(1),
        directory: at.to_owned(),
        client: clients,
    });
    let agent = TestSupervisor::run(move |ctx| volumes::run(ctx, agent.clone()));

    eventually("the namespace", || async {
        kube.text("/api/v1/namespaces/default").await.ok()
    })
    .await;
    let claims = kube.within("default", kinds::CLAIMS);
    let made = claims.create(claim("data", "ReadWriteOnce")).await.unwrap();
    let name = format!("pvc-{}", uid(&made));
    let directory = at.join(&name);
    eventually("the claim is bound and has a directory", || async {
        let claim = found(&claims, "data").await?;
        let bound = claim["status"]["phase"] == "Bound";
        (bound && directory.is_dir()).then_some(())
    })
    .await;
    std::fs::write(directory.join("file"), "content").unwrap();
    // A node may not remove the finalizer before the volume is being deleted.
    let mine = plane.client(&Certificate::Node(id(1))).all(kinds::VOLUMES);
    let patch = json!({ "metadata": { "finalizers": [] } });
    denied(mine.merge(&name, &patch).await);
    let volumes = kube.all(kinds::VOLUMES);
    // A volume in use is deleted, and then another volume is created.
    volumes.delete(&name).await.unwrap();
    let kept = claims.create(claim("kept", "ReadWriteOnce")).await.unwrap();
    let kept = format!("pvc-{}", uid(&kept));
    eventually("another claim is bound and has a directory", || async {
        let claim = found(&claims, "kept").await?;
        let bound = claim["status"]["phase"] == "Bound";
        (bound && at.join(&kept).is_dir()).then_some(())
    })
    .await;
    assert!(directory.join("file").exists());
    claims.delete("data").await.unwrap();
    eventually("the directory and the object are gone", || async {
        missing(&volumes, &name).await?;
        (!directory.exists()).then_some(())
    })
    .await;
    let old = at.join(format!(".old-{name}"));
    eventually("what was in it, too", || async {
        (!old.exists()).then_some(())
    })
    .await;

    let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
    volumes.merge(&kept, &retain).await.unwrap();
    claims.delete("kept").await.unwrap();
    eventually("its volume is released", || async {
        let volume = found(&volumes, &kept).await?;
        (volume["status"]["phase"] == "Released").then_some(())
    })
    .await;
    volumes.delete(&kept).await.unwrap();
    eventually("its object is gone", || missing(&volumes, &kept)).await;
    assert!(at.join(&kept).is_dir());
    let rights = kube.all(kinds::CLUSTER_ROLES);
    let right = super::objects::letting_go_name(id(1));
    eventually("the right to it is gone", || missing(&rights, &right)).await;

    let mut astray = claim("astray", "ReadWriteOnce");
    astray["metadata"]["annotations"] = json!({ SELECTED: id(2).to_string() });
    claims.create(astray).await.unwrap();
    eventually("another node is to be chosen", || async {
        let claim = found(&claims, "astray").await?;
        claim["metadata"]["annotations"][SELECTED]
            .is_null()
            .then_some(())
    })
    .await;

    let made = claims.create(claim("wrong", "ReadWriteMany")).await;
    let event = format!("wrong.{}", uid(&made.unwrap()));
    let events = kube.within("default", kinds::EVENTS);
    let told = eventually("the reason is told", || found(&events, &event)).await;
    assert!(told["message"].as_str().unwrap().contains("ReadWriteMany"));
    agent.stop().await;
    nodes_have_no_more_rights_than_they_need(plane).await;
}

/// What a node reads of the policies of the cluster.
async fn published(kube: &Client, node: NodeId) -> Option<NodePolicy> {
    let maps = kube.within("hearth-network-policy", kinds::CONFIG_MAPS);
    let map = found(&maps, &node.to_string()).await?;
    NodePolicy::parse(map["data"]["policy"].as_str()?).ok()
}

async fn policies_reach_the_nodes(plane: &testing::Cluster, kube: &Client) {
    let node = plane.client(&Certificate::Node(id(1)));
    eventually("nodes without policies", async || {
        (published(&node, id(1)).await? == NodePolicy::default()).then_some(())
    })
    .await;
    let policies = kube.within("default", kinds::NETWORK_POLICIES);
    let policy = json!({ "metadata": { "name": "deny" }, "spec": { "podSelector": {} } });
    policies.create(policy).await.unwrap();
    eventually("a policy on the node", async || {
        published(&node, id(1)).await?.enforced.then_some(())
    })
    .await;
    // What somebody changes by hand is written again.
    let maps = "hearth-network-policy";
    let open = json!({ "data": { "policy": NodePolicy::default().to_text() } });
    let name = id(1).to_string();
    denied(
        node.within(maps, kinds::CONFIG_MAPS)
            .merge(&name, &open)
            .await,
    );
    let maps = kube.within(maps, kinds::CONFIG_MAPS);
    maps.merge(&name, &open).await.unwrap();
    eventually("the policy on the node again", async || {
        published(&node, id(1)).await?.enforced.then_some(())
    })
    .await;
    policies.delete("deny").await.unwrap();
    eventually("no policy on the node", async || {
        (!published(&node, id(1)).await?.enforced).then_some(())
    })
    .await;
}

fn denied<T: std::fmt::Debug>(result: Result<T, ApiError>) {
    let error = result.unwrap_err();
    assert!(error.is(StatusCode::FORBIDDEN), "{error}");
}

async fn nodes_have_no_more_rights_than_they_need(plane: &testing::Cluster) {
    let node = plane.client(&Certificate::Node(id(1)));
    let volume = json!({
        "metadata": { "name": "mine" },
        "spec": { "hostPath": { "path": "/" }, "capacity": { "storage": "1" } },
    });
    let volumes = node.all(kinds::VOLUMES);
    denied(volumes.create(volume).await);
    denied(volumes.delete("x").await);
    // A node may read Nodes, and nothing else of them.
    let nodes = node.all(kinds::NODES);
    let own: Option<Json> = nodes.get(&id(1).to_string()).await.unwrap();
    assert!(own.is_some());
    denied(nodes.delete(&id(1).to_string()).await);
    denied(nodes.merge(&id(1).to_string(), &json!({})).await);
    for others in ["pods", "secrets", "configmaps"] {
        denied(node.text(&format!("/api/v1/{others}")).await);
    }
}

async fn another_takes_over(kube: &Client, first: TestSupervisor, second: TestSupervisor) {
    second.is_healthy().await;
    first.stop().await;
    let classes = kube.all(kinds::STORAGE_CLASSES);
    classes.delete(volumes::CLASS).await.unwrap();
    eventually("the second one does it", || found(&classes, volumes::CLASS)).await;
    second.stop().await;
}

async fn names_follow_services(plane: &mut testing::Cluster, kube: &Client) {
    let files = tempfile::tempdir().unwrap();
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Node(id(1))));
    let (zone, at) = serve_names(files.path(), clients, ClusterRanges::DEFAULT).await;
    let services = kube.within("default", kinds::SERVICES);
    let service = json!({
        "metadata": { "name": "web" },
        "spec": { "clusterIP": "10.224.7.7", "ports": [{ "name": "http", "port": 80 }] },
    });
    services.create(service).await.unwrap();
    let web = "web.default.svc.cluster.local.";
    eventually("the name", || async {
        (resolve(at, web).await == ["10.224.7.7"]).then_some(())
    })
    .await;
    assert_eq!(
        resolve(at, "kubernetes.default.svc.cluster.local.").await,
        ["10.224.0.1"]
    );

    // Without an API server the last zone is served; afterwards it is updated.
    plane.kill_apiserver().await;
    assert_eq!(resolve(at, web).await, ["10.224.7.7"]);
    plane.start_apiserver().await;
    eventually("the service is deleted", || async {
        services.delete("web").await.ok()
    })
    .await;
    eventually("the name is gone", || async {
        resolve(at, web).await.is_empty().then_some(())
    })
    .await;
    zone.stop().await;
}

/// The DNS server of a node, at an address of this machine.
async fn serve_names(
    files: &Path,
    client: event::Value<Client>,
    ranges: ClusterRanges,
) -> (TestSupervisor, SocketAddr) {
    let free = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = free.local_addr().unwrap();
    drop(free);
    let (writer, pod_network) = event::value();
    writer.set(Some(hearth_host::handover::PodNetwork {
        ranges,
        subnets: NodeSubnets {
            v4: "127.0.0.0/24".parse().unwrap(),
            v6: None,
        },
        mtu: 1420,
    }));
    let dns = Arc::new(Dns {
        resolv_conf: files.join("resolv.conf"),
        port: at.port(),
        admits: |_, _| true,
        pod_network,
        client,
    });
    let writer = Arc::new(writer);
    let served = TestSupervisor::run(move |ctx| {
        let (dns, writer) = (dns.clone(), writer.clone());
        async move {
            let _kept = writer;
            hearth_kubernetes_dns::run(ctx, dns).await
        }
    });
    served.is_healthy().await;
    (served, at)
}

async fn resolve(at: SocketAddr, name: &str) -> Vec<String> {
    resolve_as(at, name, RecordType::A).await
}

async fn resolve_as(at: SocketAddr, name: &str, kind: RecordType) -> Vec<String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut question = Message::new(7, MessageType::Query, OpCode::Query);
    question.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    socket
        .send_to(&question.to_vec().unwrap(), at)
        .await
        .unwrap();
    let mut buffer = [0; 1500];
    let answer = socket.recv(&mut buffer);
    let Ok(size) = tokio::time::timeout(Duration::from_secs(5), answer).await else {
        return vec!["no answer".to_owned()];
    };
    let answer = Message::from_vec(&buffer[..size.unwrap()]).unwrap();
    answer
        .answers
        .iter()
        .map(|record| record.data.to_string())
        .collect()
}
