//! A controller with the real programs and a real etcd on this machine. The tests need a bundle
//! (`cargo xtask bundle`) and are skipped without it.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use hearth_api::manifests::Manifest;
use hearth_api::testing::{Script, TestClock};
use hearth_api::v1::NodeRoles;
use hearth_api::v1::node_roles::KubernetesController;
use hearth_base::event::Watcher;
use hearth_base::logtree::Query;
use hearth_base::testing::TestSupervisor;
use hearth_consensus::testing::Site;
use hearth_host::extensions::Extensions;
use hearth_kubernetes_api::{Client, kinds};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value as Json, json};

use super::*;
use crate::calendar::CertificateClock;
use crate::tests::Fake;
use crate::{access, testing};

/// Timeout on a busy machine.
const SLOW: Duration = Duration::from_secs(300);
/// In seconds.
const DAY: u64 = 24 * 3600;
/// The etcd prefix under which API servers register.
const SERVERS: &str = "/registry/masterleases/";

const ALL: [Binary; 3] = [
    Binary::Apiserver,
    Binary::ControllerManager,
    Binary::Scheduler,
];

fn bundle() -> Option<Arc<Bundle>> {
    let root = testing::bundle_or_skip()?;
    Some(Arc::new(Bundle::open(&root).unwrap()))
}

fn free_ports() -> Ports {
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let [apiserver, controller_manager, scheduler] =
        listeners.map(|listener| listener.local_addr().unwrap().port());
    Ports {
        apiserver,
        controller_manager,
        scheduler,
    }
}

/// The processes of a program that this test has started: those with a working directory below its
/// root.
fn pids(root: &Path, binary: Binary) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|pid| {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let works_here =
            std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(root));
        let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
        works_here && name.ends_with(binary.name().as_bytes())
    })
    .collect()
}

async fn slowly<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(SLOW, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {SLOW:?}"),
    }
}

/// A control plane with the real programs.
struct Plane {
    site: Site,
    etcd: hearth_consensus::testing::Running,
    fake: Fake,
    /// The curator that the node asks.
    curator: hearth_agent::testing::Fake,
    ports: Ports,
    alone: TestSupervisor,
    standings: Watcher<RoleCondition>,
    manifests: Watcher<ManifestsStatus>,
}

impl Plane {
    /// `None` without a bundle.
    async fn start(calendar: CertificateClock) -> Option<Self> {
        Self::founded_with(calendar, &[]).await
    }

    /// The same, with objects that the cluster was founded with.
    async fn founded_with(calendar: CertificateClock, manifests: &[Manifest]) -> Option<Self> {
        let bundle = bundle()?;
        let site = Site::new();
        site.state
            .0
            .set(hearth_host::cluster_state::State::Home)
            .unwrap();
        let etcd = site.start(true).await;
        let controllers = etcd
            .handle()
            .root()
            .namespaced(ConsensusUser::KubernetesControllers);
        Manifests::new(controllers).store(manifests).await.unwrap();
        let fake = Fake::by(calendar, |_| Extensions::none());
        // Not a loopback address, which an API server refuses to advertise. Nothing connects to it.
        fake.address.set([192, 0, 2, 7].into());
        fake.consensus.set(Some(etcd.handle().handle()));
        let curator = hearth_agent::testing::Fake::new(Script::default()).await;
        fake.connection.set(curator.connection());
        fake.roles.set(NodeRoles {
            kubernetes_controller: Some(KubernetesController {}),
            ..NodeRoles::default()
        });
        let (ports, parts) = (free_ports(), fake.parts.clone());
        let condition = Arc::new(event::value::<RoleCondition>().0);
        let standings = condition.value().watch();
        let manifests_status = Arc::new(event::value::<ManifestsStatus>().0);
        let manifests = manifests_status.value().watch();
        let alone = TestSupervisor::run(move |ctx| {
            let (parts, bundle, condition) = (parts.clone(), bundle.clone(), condition.clone());
            let manifests_status = manifests_status.clone();
            async move {
                let (writer, server_hosts) = event::value();
                let (recipient_writer, recovery_recipient) = event::value();
                let settings = Arc::new(crate::settings::Worker {
                    parts: parts.clone(),
                    server_hosts: writer,
                    recovery_recipient: recipient_writer,
                });
                ctx.run_worker("settings", &settings, crate::settings::run)?;
                let outer = Shared {
                    condition: &condition,
                    address_status: &Arc::new(event::value().0),
                    manifests_status: &manifests_status,
                    server_hosts: &server_hosts,
                    recovery_recipient: &recovery_recipient,
                };
                ctx.until_cancelled(run(&ctx, &parts, bundle, ports, outer))
                    .await
            }
        });
        let mut plane = Self {
            site,
            etcd,
            fake,
            curator,
            ports,
            alone,
            standings,
            manifests,
        };
        plane.works("the control plane works").await;
        Some(plane)
    }

    /// A client of the API server that may do everything.
    async fn client(&self) -> Client {
        let etcd = self.etcd.handle();
        let pki = etcd.root().namespaced(ConsensusUser::KubernetesPki);
        let member = self.fake.parts.member.get().unwrap();
        let authorities = kubernetes_authorities::ensure(&pki, member.own.ca().certificate()).await;
        let authorities = authorities.unwrap();
        let now = SystemTime::now();
        let own = authorities.issue(&Certificate::Reconciler, now).unwrap();
        let url = programs::url(Ipv4Addr::LOCALHOST.into(), self.ports.apiserver);
        access::client(&url, authorities.ca(), &own).unwrap()
    }

    /// A control plane that does not work prints its log.
    async fn works(&mut self, what: &str) {
        let met = self
            .standings
            .wait_for(|condition| *condition == RoleCondition::Met);
        match tokio::time::timeout(SLOW, met).await {
            Ok(met) => drop(met.unwrap()),
            Err(_) => {
                self.alone.print_log();
                panic!("{what}: not within {SLOW:?}");
            }
        }
    }

    async fn does_not_work(&mut self, what: &str) {
        let failed = self
            .standings
            .wait_for(|condition| *condition != RoleCondition::Met);
        slowly(what, failed).await.unwrap();
    }

    fn root(&self) -> &Path {
        self.fake.parts.root.ephemeral.path()
    }

    /// The process ID of a program.
    fn one(&self, binary: Binary) -> i32 {
        let found = pids(self.root(), binary);
        assert_eq!(found.len(), 1, "{binary:?}: {found:?}");
        found[0]
    }

    async fn stop(self) {
        let root = self.root().to_owned();
        let handle = self.etcd.handle();
        let store = handle.root().namespaced(ConsensusUser::Kubernetes);
        let servers = async || store.list(SERVERS).await.unwrap().records.len();
        // It registers itself some time after it has become ready.
        slowly("the API server has signed on", async {
            while servers().await == 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
        assert_eq!(servers().await, 1);
        self.alone.stop().await;
        for binary in ALL {
            assert_eq!(pids(&root, binary), [] as [i32; 0], "{binary:?}");
        }
        // Its access to etcd was available until the API server had ended.
        assert_eq!(servers().await, 0, "it has not deregistered");
        self.etcd.stop().await;
        drop(self.site);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_plane_serves_survives_the_death_of_a_part_and_ends() {
    let calendar = CertificateClock::of_this_machine();
    let Some(mut plane) = Plane::founded_with(calendar, &founding_objects()).await else {
        return;
    };
    founding_objects_are_applied(&mut plane).await;
    // Its data is in its own namespace of etcd only.
    let root = plane.etcd.handle();
    let store = root.root().namespaced(ConsensusUser::Kubernetes);
    let kept = store.list("registry/").await.unwrap();
    let kept = kept.records.len() + store.list("/registry/").await.unwrap().records.len();
    assert!(kept > 50, "{kept} objects");

    let (apiserver, scheduler) = (plane.one(Binary::Apiserver), plane.one(Binary::Scheduler));
    kill(Pid::from_raw(scheduler), Signal::SIGKILL).unwrap();
    plane.does_not_work("the death is told").await;
    plane.works("the scheduler is back").await;
    assert_ne!(plane.one(Binary::Scheduler), scheduler);
    assert_eq!(
        plane.one(Binary::Apiserver),
        apiserver,
        "nobody else restarts"
    );
    plane.stop().await;
}

/// The first one needs the next two, and the last one is refused.
fn founding_objects() -> Vec<Manifest> {
    let names = json!({ "plural": "things", "kind": "Thing" });
    let any = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let schema = json!({ "openAPIV3Schema": any });
    let versions = json!([{ "name": "v1", "served": true, "storage": true, "schema": schema }]);
    let object = |version: &str, kind: &str, metadata: Json, spec: Json| {
        let object = json!({
            "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec,
        });
        Manifest::parse("manifest", &object.to_string()).unwrap()
    };
    vec![
        object(
            "example.org/v1",
            "Thing",
            json!({ "name": "first", "namespace": "shop" }),
            json!({}),
        ),
        object("v1", "Namespace", json!({ "name": "shop" }), json!({})),
        object(
            "apiextensions.k8s.io/v1",
            "CustomResourceDefinition",
            json!({ "name": "things.example.org" }),
            json!({
                "group": "example.org",
                "scope": "Namespaced",
                "names": names,
                "versions": versions,
            }),
        ),
        object(
            "apps/v1",
            "Deployment",
            json!({ "name": "refused" }),
            json!({ "selector": {} }),
        ),
    ]
}

/// Those that can be applied are, and of the other one the reason is told.
async fn founding_objects_are_applied(plane: &mut Plane) {
    let is_told = |status: &ManifestsStatus| match status {
        ManifestsStatus::Left { count: 1, why } => {
            why.starts_with("Deployment refused: Deployment.apps \"refused\" is invalid")
        }
        _ => false,
    };
    let told = plane.manifests.wait_for(is_told);
    let told = slowly("one is left", told).await.unwrap();
    let condition = told.condition().unwrap();
    assert!(!condition.met && condition.reason == "NotApplied");
    let client = plane.client().await;
    let path = "/apis/example.org/v1/namespaces/shop/things/first";
    assert!(client.text(path).await.unwrap().contains("\"first\""));

    let etcd = plane.etcd.handle();
    let controllers = etcd.root().namespaced(ConsensusUser::KubernetesControllers);
    let left = Manifests::new(controllers).pending().await.unwrap();
    let left: Vec<&str> = left.iter().map(|one| one.manifest.name()).collect();
    assert_eq!(left, ["refused"]);

    // What users make instead counts.
    let labels = json!({ "app": "better" });
    let container = json!({ "name": "c", "image": "i" });
    let better = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "refused" },
        "spec": {
            "replicas": 0,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": { "containers": [container] } },
        },
    });
    let deployments = client.resource("apps/v1", "Deployment").await;
    let deployments = deployments.unwrap().unwrap();
    let made = client.apply(&deployments, (None, "refused"), &better).await;
    made.unwrap();
    let none = plane
        .manifests
        .wait_for(|status| *status == ManifestsStatus::Done);
    slowly("none is left", none).await.unwrap();
}

/// What a pod may ask for follows the cluster's settings; the default is the level baseline.
#[tokio::test(flavor = "multi_thread")]
async fn pods_may_ask_for_what_the_cluster_permits() {
    let calendar = CertificateClock::of_this_machine();
    let Some(mut plane) = Plane::start(calendar).await else {
        return;
    };
    let client = plane.client().await;
    let create = async |namespace: &str| {
        let pods = client.within(namespace, kinds::PODS);
        let pod = json!({
            "metadata": { "generateName": "pod-" },
            "spec": {
                "containers": [{ "name": "c", "image": "i" }],
                "volumes": [{ "name": "v", "hostPath": { "path": "/sys" } }],
            },
        });
        match pods.create(pod).await {
            Ok(_) => Ok(()),
            Err(error) => Err(hearth_api::chain(&error)),
        }
    };
    // The accounts of pods exist some time after the API server is ready.
    let account = async |namespace: &str| {
        let accounts = client.within(namespace, kinds::SERVICE_ACCOUNTS);
        slowly("the account of pods", async {
            while !matches!(accounts.get::<Json>("default").await, Ok(Some(_))) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
    };
    account("default").await;
    account("kube-system").await;
    creation_is_recorded(&plane, &client).await;
    let refused = create("default").await.unwrap_err();
    assert!(
        refused.contains("violates PodSecurity \"baseline:latest\": hostPath volumes"),
        "{refused}"
    );
    assert_eq!(create("kube-system").await, Ok(()));

    plane
        .curator
        .curator
        .set_kubernetes(KubernetesConfiguration {
            pod_security_exempt_namespaces: vec!["default".into()],
            ..KubernetesConfiguration::default()
        });
    slowly("another API server, which permits it", async {
        while create("default").await.is_err() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    plane.works("the control plane works again").await;
    plane.stop().await;
}

/// The node's log has who created an object, and not what is in it.
async fn creation_is_recorded(plane: &Plane, client: &Client) {
    let object = json!({
        "metadata": { "name": "recorded" },
        "data": { "key": "never-recorded" },
    });
    let config_maps = client.within("default", kinds::CONFIG_MAPS);
    config_maps.create(object).await.unwrap();
    let query = || Query::subtree("");
    slowly("the record of the request", async {
        loop {
            let entries = plane.fake.parts.log_tree.read(query()).backlog;
            let mut lines = entries.iter().map(|entry| &entry.message[..]);
            assert!(lines.clone().all(|line| !line.contains("never-recorded")));
            let is_it = |line: &str| {
                line.contains("\"auditID\"")
                    && line.contains("\"verb\":\"create\"")
                    && line.contains("\"name\":\"recorded\"")
                    && line.contains("hearth:reconciler")
            };
            if lines.any(is_it) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

/// Nothing of a Secret is in etcd in clear, and a change of the setting encrypts it with another key.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_encrypted_and_a_new_key_reaches_all_of_them() {
    const ENCRYPTED: &[u8] = b"k8s:enc:kms:v2:hearth:";
    let calendar = CertificateClock::of_this_machine();
    let Some(plane) = Plane::start(calendar).await else {
        return;
    };
    let secrets = plane.client().await.within("default", kinds::SECRETS);
    let object = json!({
        "metadata": { "name": "it" },
        "stringData": { "key": "never-in-clear" },
    });
    let made = secrets.create(object).await.unwrap();
    let root = plane.etcd.handle();
    let store = root.root().namespaced(ConsensusUser::Kubernetes);
    let contains = |stored: &[u8], text: &[u8]| stored.windows(text.len()).any(|part| part == text);
    let stored = async || {
        let found = store.get("/registry/secrets/default/it").await.unwrap();
        let value = found.expect("it is stored").value;
        assert!(value.starts_with(ENCRYPTED));
        for clear in ["never-in-clear", "bmV2ZXItaW4tY2xlYXI"] {
            assert!(!contains(&value, clear.as_bytes()), "{clear}");
        }
        value
    };
    // Key IDs have 16 digits.
    let encrypted_with = |stored: &[u8], generation: u32| {
        let id = format!("{generation}-");
        stored.windows(18).any(|part| {
            part.starts_with(id.as_bytes()) && part[2..].iter().all(u8::is_ascii_hexdigit)
        })
    };
    assert!(encrypted_with(&stored().await, 1));

    plane
        .curator
        .curator
        .set_kubernetes(KubernetesConfiguration {
            secrets_key_generation: 2,
            ..KubernetesConfiguration::default()
        });
    // The API server asks for the key each minute.
    slowly("the Secret is rewritten", async {
        while !encrypted_with(&stored().await, 2) {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    let read: Json = secrets.get("it").await.unwrap().unwrap();
    assert_eq!(read["data"], made["data"]);
    plane.stop().await;
}

/// Certificates are valid for 30 days, of which 20 pass.
#[tokio::test(flavor = "multi_thread")]
async fn programs_whose_certificates_are_due_start_again_with_new_ones() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let clock = TestClock::new();
    clock.set(now.as_secs());
    let calendar = CertificateClock::by(clock.clone(), Duration::from_millis(50));
    let Some(mut plane) = Plane::start(calendar).await else {
        return;
    };
    let old = ALL.map(|binary| plane.one(binary));
    let shown = |plane: &Plane| {
        let files = plane.fake.parts.root.ephemeral.kubernetes().controller();
        std::fs::read(files.keys("apiserver").certificate()).unwrap()
    };
    let before = shown(&plane);
    clock.set(now.as_secs() + 21 * DAY);
    plane.does_not_work("they end").await;
    slowly("all have started again", async {
        loop {
            let new = ALL.map(|binary| pids(plane.root(), binary));
            if new
                .iter()
                .zip(old)
                .all(|(new, old)| new.len() == 1 && new[0] != old)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    assert_ne!(shown(&plane), before);
    plane.works("they work again").await;
    plane.stop().await;
}

#[test]
fn a_full_store_is_told_when_nothing_is_worse() {
    let all = |progress: Option<Progress>| ALL.map(|binary| (binary, progress.clone())).into_iter();
    let full = Some(Capacity::Full {
        in_use: 800 << 20,
        limit: 768 << 20,
    });
    for programs in [Some(Progress::Serving), Some(Progress::Starting), None] {
        let RoleCondition::Unmet { reason, message } = judge(all(programs), full, None) else {
            panic!("it is met");
        };
        assert_eq!(reason, "StoreFull");
        assert!(
            message.contains("800 MiB") && message.contains("768"),
            "{message}"
        );
    }
    let failing = judge(all(Some(Progress::Failing("it ended".into()))), full, None);
    assert!(
        matches!(
            failing,
            RoleCondition::Unmet {
                reason: "Failing",
                ..
            }
        ),
        "{failing:?}"
    );
}

#[test]
fn a_controller_stands_when_the_objects_are_there_that_users_count_on() {
    let programs = || {
        ALL.map(|binary| (binary, Some(Progress::Serving)))
            .into_iter()
    };
    let now = |objects| judge(programs(), Some(Capacity::Enough), objects);
    assert_eq!(now(Some(Progress::Serving)), RoleCondition::Met);
    let made = "applying the objects of the cluster";
    assert_eq!(now(None), RoleCondition::unmet("Starting", made));
    let why = "cannot apply StorageClass local: denied";
    assert_eq!(
        now(Some(Progress::Failing("StorageClass local: denied".into()))),
        RoleCondition::unmet("Failing", why)
    );
}
