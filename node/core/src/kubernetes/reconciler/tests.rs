//! The reconciler, the nodes' volumes and their names against a real control
//! plane: API server, etcd, and the controllers that bind volumes.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_base::event::{self, Writer};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use k8s_openapi::api::core::v1::{
    Namespace, Node, PersistentVolume, PersistentVolumeClaim, Service,
};
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::{Value as Json, json};
use tokio::net::UdpSocket;

use super::nodes::{Cluster, Member};
use super::{Reconciler, Timing, lease, run};
use crate::kubernetes::dns::{self, Dns};
use crate::kubernetes::testing::{self, eventually};
use crate::kubernetes::volumes::{self, Volumes};
use crate::pki::kubernetes::Certificate;
use crate::roles::testing::Alone;

fn id(digit: u8) -> NodeId {
    NodeId::from_bytes([digit; 16])
}

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

fn from<T: serde::de::DeserializeOwned>(json: Json) -> T {
    serde_json::from_value(json).unwrap()
}

/// A reconciler of its own, as on one of several controllers.
fn reconciler(
    plane: &testing::Cluster,
    digit: u8,
    cluster: &Writer<Arc<Cluster>>,
    volumes: &Path,
) -> Alone {
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Reconciler));
    let reconciler = Arc::new(Reconciler {
        identity: id(digit).to_string(),
        volumes: volumes.to_owned(),
        timing: quick(),
        client: clients,
        cluster: cluster.value(),
    });
    // The client's writer lives as long as the worker.
    let client = Arc::new(client);
    Alone::run(move |ctx| {
        let (reconciler, _client) = (reconciler.clone(), client.clone());
        async move {
            let _kept = _client;
            run(ctx, reconciler).await
        }
    })
}

/// What the tests look at and change, as an owner would.
struct Kube(Client);

impl Kube {
    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.0.clone())
    }

    async fn label_of(&self, node: &str, key: &str) -> Option<String> {
        let node = self.all::<Node>().get(node).await.ok()?;
        node.labels().get(key).cloned()
    }

    async fn dns_servers(&self) -> Option<Vec<String>> {
        let kind = GroupVersionKind::gvk("", "v1", "Endpoints");
        let kind = ApiResource::from_gvk_with_plural(&kind, "endpoints");
        let api = Api::<DynamicObject>::namespaced_with(self.0.clone(), "kube-system", &kind);
        let found = api.get_opt("kube-dns").await.ok()??;
        let subsets = found.data["subsets"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let addresses = subsets.iter().flat_map(|subset| {
            let addresses = subset["addresses"].as_array().cloned();
            addresses.unwrap_or_default()
        });
        Some(
            addresses
                .map(|address| address["ip"].as_str().unwrap().to_owned())
                .collect(),
        )
    }

    async fn make_node(&self, name: &str) {
        let node: Node = from(json!({ "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name, "set-by-hand": "stays",
        }}}));
        let nodes = self.all::<Node>();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        let patch = Patch::Merge(&ready);
        nodes
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

fn worker(last: u8, labels: &[(&str, &str)]) -> Member {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Member {
        worker: true,
        controller: false,
        labels: labels.iter().map(owned).collect(),
        gateway: Some(Ipv4Addr::new(10, 208, last, 1)),
    }
}

fn cluster(nodes: &[(u8, Member)]) -> Arc<Cluster> {
    let nodes = nodes.iter().map(|(digit, node)| (id(*digit), node.clone()));
    Arc::new(Cluster {
        nodes: nodes.collect::<BTreeMap<_, _>>(),
        patterns: vec!["rack".into(), "disk/*".into()],
    })
}

/// One control plane for all of it: it takes longer to start than all of this.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_real_control_plane() {
    let Some(mut plane) = testing::Cluster::start().await else {
        return;
    };
    plane.start_manager();
    let kube = Kube(plane.client(&Certificate::Reconciler));
    let (writer, _) = event::value();
    writer.set(cluster(&[
        (1, worker(1, &[("rack", "7"), ("secret", "x")])),
        (2, worker(2, &[])),
    ]));
    let base = tempfile::tempdir().unwrap();
    let volumes = base.path().join("volumes");
    let first = reconciler(&plane, 1, &writer, &volumes);
    constant_objects_are_there_and_stay(&kube).await;
    nodes_follow_the_cluster(&kube, &writer).await;
    volumes_come_and_go_with_claims(&plane, &kube, &volumes).await;
    let second = reconciler(&plane, 2, &writer, &volumes);
    another_takes_over(&kube, first, second).await;
    names_follow_services(&mut plane, &kube).await;
}

async fn constant_objects_are_there_and_stay(kube: &Kube) {
    let classes = kube.all::<StorageClass>();
    let class = eventually("the class of volumes", || async {
        classes.get_opt(volumes::CLASS).await.ok()?
    })
    .await;
    assert_eq!(
        class.volume_binding_mode.as_deref(),
        Some("WaitForFirstConsumer")
    );
    let roles = kube.all::<ClusterRole>();
    eventually("the nodes' role", || async {
        roles.get_opt("hearth:node").await.ok()?
    })
    .await;
    let services = Api::<Service>::namespaced(kube.0.clone(), "kube-system");
    let service = eventually("the service of names", || async {
        services.get_opt("kube-dns").await.ok()?
    })
    .await;
    assert_eq!(
        service.spec.unwrap().cluster_ip.as_deref(),
        Some("10.224.0.10")
    );
    let kind = GroupVersionKind::gvk("node.k8s.io", "v1", "RuntimeClass");
    let kind = ApiResource::from_gvk_with_plural(&kind, "runtimeclasses");
    let runtimes = Api::<DynamicObject>::all_with(kube.0.clone(), &kind);
    eventually("the class of runtimes", || async {
        runtimes.get_opt("runc").await.ok()?
    })
    .await;

    // Somebody takes away what nodes need, and changes another.
    classes
        .delete(volumes::CLASS, &DeleteParams::default())
        .await
        .unwrap();
    let weaker = json!({ "rules": [] });
    let patch = Patch::Merge(&weaker);
    roles
        .patch("hearth:node", &PatchParams::default(), &patch)
        .await
        .unwrap();
    eventually("what was taken away is there again", || async {
        let role = roles.get("hearth:node").await.ok()?;
        let whole = role.rules.is_some_and(|rules| rules.len() == 2);
        (whole && classes.get_opt(volumes::CLASS).await.ok()?.is_some()).then_some(())
    })
    .await;
}

async fn nodes_follow_the_cluster(kube: &Kube, writer: &Writer<Arc<Cluster>>) {
    let [one, two, gone] = [1, 2, 9].map(|digit| id(digit).to_string());
    for name in [&one, &two, &gone] {
        kube.make_node(name).await;
    }
    kube.make_node("somebody-elses").await;
    eventually("labels are taken over", || async {
        (kube.label_of(&one, "rack").await? == "7").then_some(())
    })
    .await;
    assert_eq!(
        kube.label_of(&one, "secret").await,
        None,
        "no pattern means it"
    );
    let role = kube.label_of(&one, "node-role.kubernetes.io/worker").await;
    assert_eq!(role.as_deref(), Some(""));
    eventually("both resolve names", || async {
        let servers = kube.dns_servers().await?;
        (servers == ["10.208.1.1", "10.208.2.1"]).then_some(())
    })
    .await;
    let nodes = kube.all::<Node>();
    eventually("the node that is none is removed", || async {
        nodes.get_opt(&gone).await.ok()?.is_none().then_some(())
    })
    .await;
    assert!(nodes.get_opt("somebody-elses").await.unwrap().is_some());

    // A label changes and one comes; the other node is no worker any more.
    let labels = [("disk/ssd", "yes")];
    writer.set(cluster(&[(1, worker(1, &labels))]));
    eventually("labels follow", || async {
        let ssd = kube.label_of(&one, "disk/ssd").await? == "yes";
        (ssd && kube.label_of(&one, "rack").await.is_none()).then_some(())
    })
    .await;
    assert_eq!(
        kube.label_of(&one, "set-by-hand").await.as_deref(),
        Some("stays")
    );
    eventually("the other is removed and asked no more", || async {
        let removed = nodes.get_opt(&two).await.ok()?.is_none();
        (removed && kube.dns_servers().await? == ["10.208.1.1"]).then_some(())
    })
    .await;
}

async fn volumes_come_and_go_with_claims(plane: &testing::Cluster, kube: &Kube, at: &Path) {
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Node(id(1))));
    let agent = Arc::new(Volumes {
        node: id(1),
        directory: at.to_owned(),
        client: clients,
    });
    let agent = Alone::run(move |ctx| volumes::run(ctx, agent.clone()));

    eventually("the namespace", || async {
        kube.all::<Namespace>().get_opt("default").await.ok()?
    })
    .await;
    let claims = Api::<PersistentVolumeClaim>::namespaced(kube.0.clone(), "default");
    let claim = |name: &str, mode: &str| -> PersistentVolumeClaim {
        from(json!({
            "metadata": { "name": name, "annotations": {
                // As the scheduler says it.
                "volume.kubernetes.io/selected-node": id(1).to_string(),
            }},
            "spec": {
                // The class is the default one.
                "accessModes": [mode],
                "resources": { "requests": { "storage": "10Mi" } },
            },
        }))
    };
    let params = PostParams::default();
    let made = claims
        .create(&params, &claim("data", "ReadWriteOnce"))
        .await
        .unwrap();
    let name = format!("pvc-{}", made.uid().unwrap());
    let directory = at.join(&name);
    eventually("the claim is bound and has a directory", || async {
        let status = claims.get("data").await.ok()?.status?;
        let bound = status.phase.as_deref() == Some("Bound");
        (bound && directory.is_dir()).then_some(())
    })
    .await;
    std::fs::write(directory.join("file"), "content").unwrap();
    claims
        .delete("data", &DeleteParams::default())
        .await
        .unwrap();
    let volumes = kube.all::<PersistentVolume>();
    eventually("the directory and the object are gone", || async {
        let gone = volumes.get_opt(&name).await.ok()?.is_none();
        (gone && !directory.exists()).then_some(())
    })
    .await;

    claims
        .create(&params, &claim("wrong", "ReadWriteMany"))
        .await
        .unwrap();
    let kind = GroupVersionKind::gvk("", "v1", "Event");
    let kind = ApiResource::from_gvk_with_plural(&kind, "events");
    let events = Api::<DynamicObject>::namespaced_with(kube.0.clone(), "default", &kind);
    eventually("the reason is told", || async {
        let events = events.list(&Default::default()).await.ok()?;
        let told = |event: &DynamicObject| {
            let message = event.data["message"].as_str().unwrap_or_default();
            message.contains("ReadWriteMany")
        };
        events.iter().any(told).then_some(())
    })
    .await;
    agent.stop().await;
    nodes_have_no_more_rights_than_they_need(plane).await;
}

async fn nodes_have_no_more_rights_than_they_need(plane: &testing::Cluster) {
    let node = plane.client(&Certificate::Node(id(1)));
    let denied = |result: Result<(), kube::Error>| match result {
        Err(kube::Error::Api(status)) => status.code == 403,
        _ => false,
    };
    let object: PersistentVolume = from(json!({
        "metadata": { "name": "mine" },
        "spec": { "hostPath": { "path": "/" }, "capacity": { "storage": "1" } },
    }));
    let volumes = Api::<PersistentVolume>::all(node.clone());
    let made = volumes.create(&PostParams::default(), &object).await;
    assert!(denied(made.map(drop)));
    let deleted = volumes.delete("x", &DeleteParams::default()).await;
    assert!(denied(deleted.map(drop)));
    let nodes = Api::<Node>::all(node).list(&Default::default()).await;
    assert!(denied(nodes.map(drop)));
}

async fn another_takes_over(kube: &Kube, first: Alone, second: Alone) {
    second.is_healthy().await;
    first.stop().await;
    let classes = kube.all::<StorageClass>();
    classes
        .delete(volumes::CLASS, &DeleteParams::default())
        .await
        .unwrap();
    eventually("the second one does it", || async {
        classes.get_opt(volumes::CLASS).await.ok()?
    })
    .await;
    second.stop().await;
}

async fn names_follow_services(plane: &mut testing::Cluster, kube: &Kube) {
    let files = tempfile::tempdir().unwrap();
    let (client, clients) = event::value();
    client.set(plane.client(&Certificate::Node(id(1))));
    let (zone, at) = serve_names(files.path(), clients).await;
    let services = Api::<Service>::namespaced(kube.0.clone(), "default");
    let service: Service = from(json!({
        "metadata": { "name": "web" },
        "spec": { "clusterIP": "10.224.7.7", "ports": [{ "name": "http", "port": 80 }] },
    }));
    services
        .create(&PostParams::default(), &service)
        .await
        .unwrap();
    let web = "web.default.svc.cluster.local.";
    eventually("the name", || async {
        (resolve(at, web).await == ["10.224.7.7"]).then_some(())
    })
    .await;
    assert_eq!(
        resolve(at, "kubernetes.default.svc.cluster.local.").await,
        ["10.224.0.1"]
    );

    // Without an API server names stay; with it again they follow.
    plane.kill_apiserver().await;
    assert_eq!(resolve(at, web).await, ["10.224.7.7"]);
    plane.start_apiserver().await;
    let params = DeleteParams::default();
    eventually("the service is deleted", || async {
        services.delete("web", &params).await.ok().map(drop)
    })
    .await;
    eventually("the name is gone", || async {
        resolve(at, web).await.is_empty().then_some(())
    })
    .await;
    zone.stop().await;
}

/// Names as a node serves them, but at an address of this machine.
async fn serve_names(files: &Path, client: event::Value<Client>) -> (Alone, SocketAddr) {
    let free = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = free.local_addr().unwrap();
    drop(free);
    let (writer, pod_network) = event::value();
    writer.set(crate::handover::PodNetwork {
        range: "127.0.0.0/8".parse().unwrap(),
        gateway: at.ip(),
    });
    let dns = Arc::new(Dns {
        resolv_conf: files.join("resolv.conf"),
        port: at.port(),
        admits: |_| true,
        pod_network,
        client,
    });
    let writer = Arc::new(writer);
    let served = Alone::run(move |ctx| {
        let (dns, writer) = (dns.clone(), writer.clone());
        async move {
            let _kept = writer;
            dns::run(ctx, dns).await
        }
    });
    served.is_healthy().await;
    (served, at)
}

async fn resolve(at: SocketAddr, name: &str) -> Vec<String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut question = Message::new(7, MessageType::Query, OpCode::Query);
    question.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
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
