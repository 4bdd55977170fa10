//! Runs hearthctl as a process against a curator on real sockets.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod disk;
mod etcd;
mod files;
mod image;
mod kubernetes;
mod node;
mod ownership;
mod parameters;
mod reference;
mod settings;
mod unlock;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;

use hearth_api::identity::{FirstContactSecret, NodeId, OwnerKey};
use hearth_api::owner;
use hearth_api::server::Limits;
use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::{
    self, AdmissionPolicy, ClusterConfiguration, ClusterState, ColdStartPolicy,
    GetConsensusStatusResponse, LogEntry, LogSeverity, MembershipChange, NodeHealth, NodeRoles,
    NodeState, NodeStatus, StorageSecurity, StorageSecurityPolicy, StorageStatus, TpmMode,
    TpmUsage, node_roles,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

/// An operator's home directory and a test cluster.
struct Fixture {
    home: tempfile::TempDir,
    key: OwnerKey,
    secret: FirstContactSecret,
    cluster: Arc<TestCluster>,
}

impl Fixture {
    fn new() -> Self {
        let home = tempfile::tempdir().expect("a folder");
        let key = owner::create_key(&home.path().join("owner-key.pem")).expect("a key");
        let secret = owner::create_first_contact_secret(&home.path().join("first-contact-secret"))
            .expect("a secret");
        Self {
            home,
            key,
            secret,
            cluster: Arc::new(TestCluster::new()),
        }
    }

    fn script(&self) -> Script {
        Script {
            nodes: vec![node("hearth-a1", NodeHealth::Healthy)],
            configuration: ClusterConfiguration {
                cluster_domain: "cluster.internal".into(),
                tpm_mode: TpmMode::Disabled.into(),
                storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
                cold_start_policy: ColdStartPolicy::None.into(),
                admission_policy: AdmissionPolicy::Any.into(),
                ..ClusterConfiguration::default()
            },
            first_contact_secret: Some(self.secret.clone()),
            owner: Some(self.key.public()),
            ..Script::default()
        }
    }

    async fn curator(&self) -> TestCurator {
        TestCurator::start(&self.cluster, self.script(), wall_clock()).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearthctl"));
        command
            .args(args)
            .env_clear()
            .env("HOME", self.home.path())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().await.expect("it runs")
    }

    /// Runs a command that has to succeed; its standard output.
    async fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args).await;
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("text")
    }

    async fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(args).await).expect("JSON")
    }

    /// Runs a command that has to fail; its exit code and standard error.
    async fn fails(&self, args: &[&str]) -> (i32, String) {
        let output = self.run(args).await;
        assert!(output.stdout.is_empty(), "{args:?} prints a result");
        let text = String::from_utf8(output.stderr).expect("text");
        (output.status.code().expect("an exit code"), text)
    }

    fn ownership<'a>(&self, endpoint: &'a str, key: &'a str, secret: &'a str) -> Vec<&'a str> {
        vec![
            "cluster",
            "take-ownership",
            "--endpoint",
            endpoint,
            "--owner-key",
            key,
            "--first-contact-secret",
            secret,
            "--name",
            "test",
        ]
    }

    async fn take_ownership(&self, curator: &TestCurator) {
        let endpoint = curator.endpoint().to_string();
        let (key, secret) = (
            self.path("owner-key.pem"),
            self.path("first-contact-secret"),
        );
        let printed = self
            .ok(&self.ownership(&endpoint, text(&key), text(&secret)))
            .await;
        assert!(printed.contains(&self.cluster.id.to_string()), "{printed}");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn node(id: &str, health: NodeHealth) -> v1::Node {
    v1::Node {
        id: id.into(),
        public_key: vec![1; 32],
        state: NodeState::Up.into(),
        roles: Some(NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            ..NodeRoles::default()
        }),
        status: Some(NodeStatus {
            external_address: "192.0.2.1".into(),
            second_address: "2001:db8::1".into(),
            curator_port: 7835,
            version: "1.2.3".into(),
            boot_id: "boot".into(),
            cluster_state: ClusterState::Home.into(),
            conditions: vec![v1::NodeCondition {
                r#type: "KubernetesWorker".into(),
                met: false,
                reason: "NotInstalled".into(),
                message: "no such extension".into(),
            }],
            storage: Some(StorageStatus {
                security: StorageSecurity::Encrypted.into(),
                cipher: "capi:xts(aes)-plain64".into(),
            }),
            ..NodeStatus::default()
        }),
        health: health.into(),
        labels: vec![v1::Label {
            key: "zone".into(),
            value: "a".into(),
        }],
        tpm_usage: TpmUsage::NotPresent.into(),
        storage_security: StorageSecurity::Insecure.into(),
        heartbeat_age_ms: Some(40),
        joins: vec![v1::NodeJoin {
            time: 1_700_000_000,
            address: "192.0.2.1".into(),
            boot_id: "boot".into(),
            image: vec![0xab; 32],
        }],
        ..v1::Node::default()
    }
}

#[tokio::test]
async fn an_owner_takes_a_cluster_and_looks_at_it() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    assert_eq!(
        curator.calls(),
        ["GetCACertificate", "Escrow", "GetNodes"],
        "nothing else is needed"
    );

    assert_eq!(
        f.json(&["node", "list", "-o", "json"]).await,
        json!([{
            "id": "hearth-a1",
            "public_key": "01".repeat(32),
            "state": "UP",
            "health": "HEALTHY",
            "health_reason": "",
            "cluster_state": "HOME",
            "roles": ["consensus-member"],
            "external_address": "192.0.2.1",
            "second_address": "2001:db8::1",
            "curator_port": 7835,
            "version": "1.2.3",
            "boot_id": "boot",
            "labels": {"zone": "a"},
            "settings": {},
            "storage_security": "INSECURE",
            "tpm_usage": "NOT_PRESENT",
            "heartbeat_age_ms": 40,
            "conditions": [{
                "type": "KubernetesWorker",
                "met": false,
                "reason": "NotInstalled",
                "message": "no such extension",
            }],
            "decommissioning": false,
            "joins": [{
                "time": 1_700_000_000,
                "address": "192.0.2.1",
                "boot_id": "boot",
                "image": "ab".repeat(32),
            }],
            "recorded_settings": null,
            "time": null,
            "storage": {"security": "ENCRYPTED", "cipher": "capi:xts(aes)-plain64"},
        }])
    );
    assert_eq!(
        f.ok(&["node", "list"]).await,
        "NODE       STATE  HEALTH   CLUSTER  ROLES             ADDRESS    VERSION\n\
         hearth-a1  UP     HEALTHY  HOME     consensus-member  192.0.2.1  1.2.3\n"
    );
    let info = f.json(&["cluster", "info", "-o", "json"]).await;
    assert_eq!(info["cluster_id"], f.cluster.id.to_string());
    assert_eq!(
        info["configuration"],
        json!({
            "cluster_domain": "cluster.internal",
            "tpm_mode": "DISABLED",
            "storage_security_policy": "NEEDS_INSECURE",
            "cold_start_policy": "NONE",
            "kubernetes.synchronized_labels": [],
            "kubernetes.pod_security_level": "BASELINE",
            "kubernetes.pod_security_exempt_namespaces": [],
            "kubernetes.control_plane_scheduling": "ALLOWED",
            "kubernetes.pod_network": "BUILT_IN",
            "kubernetes.registry_mirrors": [],
            "kubernetes.registry_authorities": [],
            "kubernetes.registry_credentials": [],
            "kubernetes.registry_proxy": "",
            "kubernetes.registry_proxy_exceptions": [],
            "kubernetes.api_address": "",
            "kubernetes.api_endpoint": "",
            "kubernetes.audit_level": "METADATA",
            "kubernetes.secrets_key_generation": 1,
            "kubernetes.pod_ranges": ["10.208.0.0/12"],
            "kubernetes.service_ranges": ["10.224.0.0/16"],
            "curator_session_seconds": 6,
            "time_servers": [],
            "certificate_lifetime_seconds": 604800,
            "certificate_names": [],
            "admission_policy": "ANY",
            "damaged_member_policy": "KEEP",
        })
    );
    assert_eq!(info["configuration_version"], 1);
    let shown = f.ok(&["cluster", "info"]).await;
    assert!(shown.contains("cluster.internal"), "{shown}");

    // Again, and nothing is lost.
    f.take_ownership(&curator).await;
    f.ok(&["node", "list"]).await;
}

#[tokio::test]
async fn contexts_are_listed_chosen_and_shown() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let list = f.ok(&["context", "list"]).await;
    assert!(list.contains("*        test"), "{list}");
    let shown = f.json(&["context", "show"]).await;
    assert_eq!(shown["cluster_id"], f.cluster.id.to_string());
    assert_eq!(shown["endpoints"], json!([curator.endpoint().to_string()]));
    assert!(!shown.to_string().contains("PRIVATE"), "{shown}");
    f.ok(&["context", "use", "test"]).await;
    let (code, why) = f.fails(&["context", "use", "other"]).await;
    assert_eq!(code, 5);
    assert!(why.contains("available contexts: test"), "{why}");
    let (code, why) = f.fails(&["--context", "other", "node", "list"]).await;
    assert_eq!(code, 5, "{why}");

    // With another contexts file.
    let elsewhere = f.path("elsewhere.json");
    let (code, why) = f
        .fails(&["--config", text(&elsewhere), "node", "list"])
        .await;
    assert_eq!(code, 5);
    assert!(why.contains("take-ownership"), "{why}");
}

#[tokio::test]
async fn secrets_stay_where_they_are() {
    use std::os::unix::fs::MetadataExt as _;

    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let folder = f.path(".config/hearth");
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        files += 1;
        let mode = std::fs::metadata(&path).expect("there").mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", path.display());
        let content = std::fs::read_to_string(&path).expect("text");
        assert!(!content.contains("PRIVATE KEY"), "{}", path.display());
        assert!(
            !content.contains(&hex::encode(f.secret.expose())),
            "{}",
            path.display()
        );
    }
    assert_eq!(files, 3, "the contexts, their lock, one certificate");
}

#[tokio::test]
async fn a_wrong_secret_or_key_is_refused() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let endpoint = curator.endpoint().to_string();
    let other = f.path("other");
    f.ok(&["owner", "init", text(&other)]).await;
    let (key, secret) = (
        other.join("owner-key.pem"),
        other.join("first-contact-secret"),
    );

    let own_key = f.path("owner-key.pem");
    let own_secret = f.path("first-contact-secret");
    let (code, why) = f
        .fails(&f.ownership(&endpoint, text(&own_key), text(&secret)))
        .await;
    assert_eq!(code, 4);
    assert!(why.contains(&endpoint) && why.contains("prove"), "{why}");
    assert_eq!(curator.calls(), ["GetCACertificate"], "no key was offered");
    let (code, why) = f
        .fails(&f.ownership(&endpoint, text(&key), text(&own_secret)))
        .await;
    assert_eq!(code, 4);
    assert!(why.contains("not the owner's"), "{why}");
    assert!(!f.path(".config").exists(), "nothing was remembered");

    // A file that is not a key; files that exist already.
    let (code, why) = f
        .fails(&f.ownership(&endpoint, text(&own_secret), text(&own_secret)))
        .await;
    assert_eq!(code, 5);
    assert!(why.contains("PKCS #8"), "{why}");
    let (code, why) = f.fails(&["owner", "init", text(&other)]).await;
    assert_eq!(code, 5);
    assert!(why.contains("not overwriting"), "{why}");
}

#[tokio::test]
async fn failures_tell_whom_what_and_what_to_do() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let endpoint = curator.endpoint().to_string();
    f.take_ownership(&curator).await;

    // A server of another cluster at the given endpoint.
    let other = Arc::new(TestCluster::new());
    let stranger = TestCurator::start(&other, Script::default(), wall_clock()).await;
    let elsewhere = stranger.endpoint().to_string();
    let (code, why) = f.fails(&["--endpoint", &elsewhere, "node", "list"]).await;
    assert_eq!(code, 4, "{why}");
    assert!(
        why.contains(&elsewhere) && why.contains("not issued by this cluster's CA"),
        "{why}"
    );

    // No server.
    curator.stop().await.expect("in order");
    for args in [&["node", "list"][..], &["cluster", "info"]] {
        let (code, why) = f.fails(args).await;
        assert_eq!(code, 3, "{why}");
        assert!(
            why.contains(&endpoint) && why.contains("--endpoint"),
            "{why}"
        );
    }

    // A server that does not answer.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mute = mute.local_addr().expect("an address").to_string();
    let (code, why) = f
        .fails(&["--timeout", "200ms", "--endpoint", &mute, "node", "list"])
        .await;
    assert_eq!(code, 3, "{why}");

    // An unknown output format.
    let (code, _) = f.fails(&["node", "list", "-o", "xml"]).await;
    assert_eq!(code, 2);
}

#[tokio::test]
async fn an_expired_certificate_is_renewed_and_called_that_if_no_curator_answers() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let name = hearth_api::identity::UserName::owner();
    let identity = hearth_api::identity::Identity::user(f.cluster.id, name);
    let expired = f.cluster.leaf(&identity, f.key.public(), |params| {
        params.not_after = params.not_before;
    });
    let pem = pem::encode(&pem::Pem::new("CERTIFICATE", expired.to_vec()));
    let path = f.path(".config/hearth/test.certificate.pem");
    std::fs::write(&path, &pem).expect("written");
    f.ok(&["node", "list"]).await;
    std::fs::write(&path, &pem).expect("written");
    let nobody = ["--endpoint", "127.0.0.1:1", "--timeout", "1s"];
    let (code, why) = f.fails(&[&nobody[..], &["node", "list"]].concat()).await;
    assert_eq!(code, 3, "{why}");
    assert!(
        why.contains("expired") && why.contains("take-ownership"),
        "{why}"
    );
}

#[tokio::test]
async fn watching_tells_each_change_and_survives_a_curator() {
    let f = Fixture::new();
    let first = f.curator().await;
    let second = f.curator().await;
    f.take_ownership(&first).await;
    let (one, two) = (first.endpoint().to_string(), second.endpoint().to_string());
    second.set_nodes(vec![node("hearth-b2", NodeHealth::Unknown)]);

    let args = [
        "--endpoint",
        &one,
        "--endpoint",
        &two,
        "node",
        "list",
        "--watch",
        "-o",
        "json",
    ];
    let mut child = f
        .command(&args)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut next = async || -> Value {
        let line = lines.next_line().await.expect("readable").expect("a line");
        serde_json::from_str(&line).expect("JSON")
    };
    let line = next().await;
    assert_eq!(line["type"], "node");
    assert_eq!(line["node"]["id"], "hearth-a1");
    assert_eq!(next().await, json!({"type": "synced"}));

    // The other curator knows another node, and not the first.
    first.stop().await.expect("in order");
    let line = next().await;
    assert_eq!(line["node"]["id"], "hearth-b2");
    assert_eq!(line["node"]["health"], "UNKNOWN");
    assert_eq!(next().await, json!({"type": "removed", "id": "hearth-a1"}));
    assert_eq!(next().await, json!({"type": "synced"}));
    child.kill().await.expect("it runs until it is killed");
}

/// Three nodes: a consensus member, a NEW one, and one without roles.
fn machines() -> Vec<v1::Node> {
    let new = v1::Node {
        public_key: vec![2; 32],
        state: NodeState::New.into(),
        roles: None,
        status: None,
        ..node("hearth-b2", NodeHealth::Unknown)
    };
    let worker = v1::Node {
        public_key: vec![3; 32],
        roles: None,
        ..node("hearth-c3", NodeHealth::Healthy)
    };
    vec![node("hearth-a1", NodeHealth::Healthy), new, worker]
}

fn by_id(curator: &TestCurator, id: &str) -> v1::Node {
    let nodes = curator.nodes();
    let node = nodes.into_iter().find(|node| node.id == id);
    node.expect("it is there")
}

#[tokio::test]
async fn a_machine_is_approved_by_any_name_that_means_it_alone() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    curator.set_nodes(machines());
    let printed = f.ok(&["node", "approve", &"02".repeat(32)]).await;
    assert!(printed.contains("hearth-b2 approved"), "{printed}");
    assert_eq!(by_id(&curator, "hearth-b2").state(), NodeState::Standby);
    // Again, and nothing happens.
    let shown = f.json(&["node", "approve", "b", "-o", "json"]).await;
    assert_eq!(shown["state"], "STANDBY");

    for (wanted, what) in [
        ("hearth-d", "no node has this ID"),
        ("hearth-", "no node has this"),
    ] {
        let (code, why) = f.fails(&["node", "approve", wanted]).await;
        assert_eq!(code, 1);
        assert!(why.contains(what) && why.contains("node list"), "{why}");
    }
    let mut nodes = machines();
    nodes.push(node("hearth-a2", NodeHealth::Healthy));
    curator.set_nodes(nodes);
    let (code, why) = f.fails(&["node", "describe", "a"]).await;
    assert_eq!(code, 1);
    assert!(why.contains("hearth-a1, hearth-a2"), "{why}");
    let shown = f.ok(&["node", "describe", "a1"]).await;
    let condition = "condition         KubernetesWorker: NotInstalled: no such extension\n";
    assert!(shown.ends_with(condition), "{shown}");
    for line in [
        "node              hearth-a1\n",
        "labels            zone=a\n",
    ] {
        assert!(shown.contains(line), "{shown}");
    }
}

#[tokio::test]
async fn labels_and_roles_are_set_and_removed() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    curator.set_nodes(machines());
    let args = [
        "node",
        "label",
        "set",
        "c3",
        "zone=b",
        "hostname=db1",
        "-o",
        "json",
    ];
    let shown = f.json(&args).await;
    assert_eq!(shown["labels"], json!({"zone": "b", "hostname": "db1"}));
    let args = ["node", "label", "remove", "db1", "zone", "-o", "json"];
    let shown = f.json(&args).await;
    assert_eq!(shown["labels"], json!({"hostname": "db1"}));
    let (code, _) = f.fails(&["node", "label", "set", "c3", "zone"]).await;
    assert_eq!(code, 2);
    // Invalid labels are not sent. Only the first "=" is a separator.
    let (code, said) = f.fails(&["node", "label", "set", "c3", "zone=b=1"]).await;
    assert_eq!(code, 1);
    assert!(
        said.contains("change the labels of c3: upsert[0].value: expected"),
        "{said}"
    );
    assert!(said.contains("got \"b=1\""), "{said}");

    let args = [
        "node",
        "role",
        "add",
        "c3",
        "kubernetes-worker",
        "-o",
        "json",
    ];
    let shown = f.json(&args).await;
    assert_eq!(shown["pending"], false);
    assert_eq!(shown["node"]["roles"], json!(["kubernetes-worker"]));
    let shown = f
        .ok(&["node", "role", "add", "c3", "consensus-member"])
        .await;
    assert!(shown.contains("etcd members"), "{shown}");
    f.ok(&["node", "role", "remove", "c3", "kubernetes-worker"])
        .await;
    let (code, why) = f
        .fails(&["node", "role", "add", "b2", "kubernetes-worker"])
        .await;
    assert_eq!(code, 1);
    assert!(why.contains("not UP"), "{why}");
    let (code, _) = f.fails(&["node", "role", "add", "b2", "king"]).await;
    assert_eq!(code, 2);
}

#[tokio::test]
async fn decommissioning_can_be_waited_for_and_comes_before_deletion() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    curator.set_nodes(machines());
    curator.set_consensus(GetConsensusStatusResponse {
        changes: vec![MembershipChange {
            node_id: "hearth-a1".into(),
            reason: "other members are away\x1b[2J".into(),
            ..MembershipChange::default()
        }],
        ..GetConsensusStatusResponse::default()
    });
    let (code, why) = f.fails(&["node", "delete", "a1"]).await;
    assert_eq!(code, 1);
    assert!(why.contains("decommission hearth-a1 --wait"), "{why}");

    let mut child = f
        .command(&["node", "decommission", "a1", "--wait", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    // It prints the consequences, and what the change is waiting for.
    let line = lines.next_line().await.expect("readable").expect("a line");
    assert!(line.contains("wipes its keys"), "{line}");
    let line = lines.next_line().await.expect("readable").expect("a line");
    assert!(
        line.ends_with("other members are away\u{fffd}[2J"),
        "{line}"
    );
    assert!(by_id(&curator, "hearth-a1").decommissioning);
    let mut nodes = machines();
    nodes[0].set_state(NodeState::Decommissioned);
    nodes[0].roles = None;
    curator.set_nodes(nodes);
    let output = child.wait_with_output().await.expect("it ends");
    assert!(output.status.success());
    let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(shown["pending"], false);
    assert_eq!(shown["node"]["state"], "DECOMMISSIONED");

    f.ok(&["node", "delete", "a1"]).await;
    let (code, why) = f.fails(&["node", "delete", "a1"]).await;
    assert_eq!(code, 1, "{why}");
    // A machine that is lost.
    f.ok(&["node", "delete", "c3", "--bypass-not-decommissioned"])
        .await;
    assert_eq!(curator.nodes().len(), 1);
}

#[tokio::test]
async fn an_interrupt_ends_the_waiting_and_nothing_else() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    curator.set_nodes(machines());
    let mut child = f
        .command(&["node", "role", "add", "c3", "consensus-member", "--wait"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let line = lines.next_line().await.expect("readable").expect("a line");
    assert!(line.contains("waiting for the node record"), "{line}");
    let pid = child.id().expect("it runs").to_string();
    let kill = Command::new("kill").args(["-INT", &pid]).status().await;
    assert!(kill.expect("it runs").success());
    let mut rest = String::new();
    while let Some(line) = lines.next_line().await.expect("readable") {
        rest.push_str(&line);
    }
    assert!(rest.contains("the change continues"), "{rest}");
    let status = child.wait().await.expect("it ends");
    assert_eq!(status.code(), Some(130));
}

#[tokio::test]
async fn a_node_is_asked_itself_where_it_is_reached_from_here() {
    let f = Fixture::new();
    let credentials = f.cluster.node();
    let id = NodeId::from_public_key(&credentials.key.public()).to_string();
    let entry = |dn: &str, severity: LogSeverity, message: &str| LogEntry {
        dn: dn.into(),
        severity: severity.into(),
        message: message.into(),
        time_ms: 951_782_400_000,
    };
    let script = Script {
        nodes: vec![node(&id, NodeHealth::Healthy)],
        logs: vec![
            entry("root", LogSeverity::Info, "begins"),
            entry("root.roles", LogSeverity::Warning, "odd\x1b[2J"),
        ],
        ..f.script()
    };
    let limits = Limits::default();
    let at = TestCurator::start_as(&f.cluster, &credentials, script, wall_clock(), limits).await;
    f.take_ownership(&at).await;
    let here = at.endpoint().to_string();

    // The address that the cluster knows is not reachable from here.
    let args = ["--timeout", "300ms", "node", "logs", &id];
    let (code, why) = f.fails(&args).await;
    assert_eq!(code, 3);
    assert!(
        why.contains("192.0.2.1:7836") && why.contains("--node-endpoint"),
        "{why}"
    );
    f.ok(&["context", "route", "192.0.2.1:7836", &here]).await;
    assert_eq!(
        f.ok(&["node", "logs", &id]).await,
        "2000-02-29T00:00:00.000Z INFO    root: begins\n\
         2000-02-29T00:00:00.000Z WARNING root.roles: odd\u{fffd}[2J\n"
    );
    let args = [
        "node",
        "logs",
        &id,
        "--severity",
        "warning",
        "--component",
        "root",
        "-o",
        "json",
    ];
    assert_eq!(
        f.json(&args).await,
        json!({
            "time": "2000-02-29T00:00:00.000Z",
            "dn": "root.roles",
            "severity": "WARNING",
            "message": "odd\u{1b}[2J",
        })
    );
    let own = "table inet hearth {\n}\n";
    assert_eq!(f.ok(&["node", "firewall", &id]).await, own);
    assert_eq!(
        f.json(&["node", "firewall", &id, "--all-tables", "-o", "json"])
            .await,
        json!({ "rules": format!("{own}table ip kube-proxy {{\n}}\n") })
    );
    f.ok(&["context", "route", "192.0.2.1:7836"]).await;

    // With a full ID and --node-endpoint, no control plane is needed.
    let before = at.calls();
    let args = [
        "--endpoint",
        "127.0.0.1:1",
        "node",
        "reboot",
        &id,
        "--node-endpoint",
        &here,
    ];
    f.ok(&args).await;
    f.ok(&["node", "poweroff", &id, "--node-endpoint", &here])
        .await;
    assert_eq!(at.calls()[before.len()..], ["Reboot", "PowerOff"]);

    // The certificate of another node at that address is rejected.
    let other = NodeId::from_bytes([9; 16]).to_string();
    let args = ["node", "reboot", &other, "--node-endpoint", &here];
    let (code, why) = f.fails(&args).await;
    assert_eq!(code, 4, "{why}");
    assert!(why.contains(&format!("expected node {other}")), "{why}");
}

#[tokio::test]
async fn a_reader_may_go_away() {
    let f = Fixture::new();
    let mut child = f
        .command(&["completion", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().await.expect("it ends");
    assert!(output.stderr.is_empty());
    assert!(output.status.success());
    assert!(f.ok(&["version"]).await.starts_with("hearthctl "));
}
