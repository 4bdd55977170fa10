//! `hearthctl kubernetes`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hearth_api::identity::{SecretsKey, SigningKey};
use hearth_api::recovery::{RecoveryKey, RecoveryRecipient, WrappedKey};
use hearth_api::secrets_keys::{ControllerKey, Generation};
use hearth_api::v1::get_secrets_keys_response::{Controller, Key};
use hearth_api::v1::{GetSecretsKeysResponse, WrappedSecretsKey};
use tokio::net::TcpListener;

use super::*;

/// Stands in for the certificate of Kubernetes' CA.
const CA: &[u8] = b"the authority";

fn with_servers(fixture: &Fixture, servers: &[&str]) -> Script {
    let servers = servers.iter().map(|&s| s.to_owned()).collect();
    Script {
        kubernetes: Some((servers, CA.to_vec())),
        ..fixture.script()
    }
}

pub(super) async fn start(fixture: &Fixture, servers: &[&str]) -> TestCurator {
    let script = with_servers(fixture, servers);
    let curator = TestCurator::start(&fixture.cluster, script, wall_clock()).await;
    fixture.take_ownership(&curator).await;
    curator
}

fn decoded(value: &Value) -> String {
    let bytes = BASE64
        .decode(value.as_str().expect("text"))
        .expect("base64");
    String::from_utf8(bytes).expect("text")
}

/// The public halves of a certificate's key and of a private key, PEM both.
fn halves(certificate: &str, key: &str) -> (Vec<u8>, Vec<u8>) {
    let (_, pem) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).expect("PEM");
    let leaf = pem.parse_x509().expect("a certificate");
    let certified = leaf.public_key().subject_public_key.data.to_vec();
    let key = SigningKey::from_pkcs8_pem(key).expect("a key");
    (certified, key.public().as_bytes().to_vec())
}

#[tokio::test]
async fn kubectl_is_told_how_to_call_this_program() {
    let fixture = Fixture::new();
    let curator = start(&fixture, &["https://192.0.2.1:6443"]).await;
    let file = fixture.path("folder/kubeconfig");
    let kubeconfig = [
        "kubernetes",
        "kubeconfig",
        "--server",
        "https://127.0.0.1:7",
    ];
    let written = [&kubeconfig[..], &["--output-file", text(&file)]].concat();
    let output = fixture.run(&written).await;
    assert!(output.status.success(), "{output:?}");
    let hint = String::from_utf8_lossy(&output.stderr);
    assert!(
        hint.contains(&format!("--kubeconfig {}", file.display())),
        "{hint}"
    );
    assert_eq!(
        std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).expect("there")) & 0o777,
        0o600
    );
    let content = std::fs::read_to_string(&file).expect("there");
    let config: Value = serde_json::from_str(&content).expect("JSON");
    assert_eq!(
        config,
        fixture.json(&kubeconfig).await,
        "the same as printed"
    );
    assert!(!content.contains("PRIVATE"));
    assert_eq!(config["current-context"], "hearth-test");
    let cluster = &config["clusters"][0]["cluster"];
    assert_eq!(cluster["server"], "https://127.0.0.1:7");
    assert_eq!(cluster["tls-server-name"], "kubernetes");
    let ca = decoded(&cluster["certificate-authority-data"]);
    let (_, pem) = x509_parser::pem::parse_x509_pem(ca.as_bytes()).expect("PEM");
    assert_eq!(pem.contents, CA);

    // Called with the kubeconfig's arguments, in another directory, it prints an ExecCredential.
    let exec = &config["users"][0]["user"]["exec"];
    let called = Command::new(exec["command"].as_str().expect("a program"))
        .args(
            exec["args"]
                .as_array()
                .expect("arguments")
                .iter()
                .map(|arg| arg.as_str().expect("text")),
        )
        .env_clear()
        .current_dir("/")
        .output()
        .await
        .expect("it runs");
    assert!(called.status.success(), "{called:?}");
    let credential: Value = serde_json::from_slice(&called.stdout).expect("JSON");
    assert_eq!(credential["apiVersion"], exec["apiVersion"]);
    assert_eq!(credential["kind"], "ExecCredential");
    let status = &credential["status"];
    let part = |name: &str| status[name].as_str().expect("text").to_owned();
    let (certified, held) = halves(&part("clientCertificateData"), &part("clientKeyData"));
    assert_eq!(certified, held);
    assert!(part("expirationTimestamp").ends_with('Z'));
    // Each call generates a key.
    let again = fixture.json(&["kubernetes", "credential"]).await;
    assert_ne!(again["status"]["clientKeyData"], status["clientKeyData"]);
    drop(curator);
}

#[tokio::test]
async fn an_embedded_certificate_stands_alone() {
    let fixture = Fixture::new();
    let _curator = start(&fixture, &["https://192.0.2.1:6443"]).await;
    let args = [
        "kubernetes",
        "kubeconfig",
        "--embed",
        "--server",
        "https://[::1]:7",
    ];
    let named = [&args[..], &["--tls-server-name", "localhost"]].concat();
    let config = fixture.json(&named).await;
    let cluster = &config["clusters"][0]["cluster"];
    assert_eq!(cluster["tls-server-name"], "localhost");
    let user = &config["users"][0]["user"];
    assert!(user.get("exec").is_none());
    let certificate = decoded(&user["client-certificate-data"]);
    let (certified, held) = halves(&certificate, &decoded(&user["client-key-data"]));
    assert_eq!(certified, held);
}

#[tokio::test]
async fn the_server_is_one_that_answers_by_the_way_that_leads_there() {
    let fixture = Fixture::new();
    // A port without a listener.
    let closed = {
        let gone = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        gone.local_addr().expect("an address")
    };
    let routed = "https://10.77.0.11:6443";
    let _curator = start(&fixture, &[&format!("https://{closed}"), routed]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let via = listener.local_addr().expect("an address").to_string();
    fixture
        .ok(&["context", "route", "10.77.0.11:6443", &via])
        .await;
    let config = fixture.json(&["kubernetes", "kubeconfig"]).await;
    let cluster = &config["clusters"][0]["cluster"];
    assert_eq!(cluster["server"], format!("https://{via}"));
    assert_eq!(cluster["tls-server-name"], "kubernetes");
}

#[tokio::test]
async fn who_has_no_kubernetes_is_told_what_to_do() {
    let fixture = Fixture::new();
    let curator = fixture.curator().await;
    fixture.take_ownership(&curator).await;
    for args in [["kubernetes", "kubeconfig"], ["kubernetes", "credential"]] {
        let (code, said) = fixture.fails(&args).await;
        assert_eq!(code, 1);
        assert!(said.contains("no node is a controller"), "{said}");
    }
    let (code, said) = fixture
        .fails(&["kubernetes", "kubeconfig", "--server", "http://127.0.0.1:1"])
        .await;
    assert_eq!(code, 2);
    assert!(said.contains("expected https://"), "{said}");
}

#[tokio::test]
async fn what_kubernetes_waits_for_is_shown_as_the_nodes_report_it() {
    let fixture = Fixture::new();
    let mut script = fixture.script();
    let roles = NodeRoles {
        kubernetes_controller: Some(node_roles::KubernetesController {}),
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
        ..NodeRoles::default()
    };
    let condition = |kind: &str, met: bool, reason: &str, message: &str| v1::NodeCondition {
        r#type: kind.to_owned(),
        met,
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    let with = |id: &str, conditions: Vec<v1::NodeCondition>| v1::Node {
        roles: Some(roles),
        status: Some(NodeStatus {
            conditions,
            ..NodeStatus::default()
        }),
        ..node(id, NodeHealth::Healthy)
    };
    script.nodes.push(with(
        "hearth-a2",
        vec![
            condition(
                "KubernetesController",
                false,
                "Failing",
                "kube-scheduler: it ended",
            ),
            condition(
                "KubernetesApiAddress",
                true,
                "Holder",
                "this node has 192.0.2.100",
            ),
        ],
    ));
    let kubernetes = script.configuration.kubernetes.get_or_insert_default();
    kubernetes.api_address = "192.0.2.100".to_owned();
    let curator = TestCurator::start(&fixture.cluster, script, wall_clock()).await;
    fixture.take_ownership(&curator).await;

    let shown = fixture.run(&["kubernetes", "status"]).await;
    assert_eq!(shown.status.code(), Some(7));
    assert_eq!(
        String::from_utf8_lossy(&shown.stdout),
        "API servers: https://192.0.2.100:6443\n\
         NODE       HEALTH   CONDITION             MET  REASON   MESSAGE\n\
         hearth-a2  HEALTHY  KubernetesController  no   Failing  kube-scheduler: it ended\n\
         hearth-a2  HEALTHY  KubernetesApiAddress  yes  Holder   this node has 192.0.2.100\n\
         hearth-a2  HEALTHY  KubernetesWorker      no   -        not reported yet\n"
    );
    let shown = fixture
        .run(&["kubernetes", "status", "--output", "json"])
        .await;
    assert_eq!(shown.status.code(), Some(7));
    let shown: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    assert_eq!(shown["servers"], json!(["https://192.0.2.100:6443"]));
    assert_eq!(shown["nodes"].as_array().expect("nodes").len(), 1);
    assert_eq!(shown["nodes"][0]["conditions"][0]["reason"], "Failing");
}

/// A cluster with two keys, to which the first controller has access and the second has not.
struct Secrets {
    recovery: RecoveryKey,
    second: ControllerKey,
    keys: [SecretsKey; 2],
}

impl Secrets {
    fn new() -> Self {
        Self {
            recovery: RecoveryKey::generate(),
            second: ControllerKey::generate(),
            keys: [(); 2].map(|()| SecretsKey::generate()),
        }
    }

    fn generation(fixture: &Fixture, number: u32) -> Generation {
        Generation {
            cluster: fixture.cluster.id,
            number,
        }
    }

    fn known(&self, fixture: &Fixture, rewritten: bool) -> GetSecretsKeysResponse {
        let first = ControllerKey::generate().recipient();
        let key = |(number, key): (u32, &SecretsKey)| {
            let of = Self::generation(fixture, number);
            let wrapped = |to: &RecoveryRecipient| WrappedSecretsKey {
                recipient: to.as_bytes().to_vec(),
                wrapped_key: of.wrap(to, key).expect("a recipient").as_bytes().to_vec(),
            };
            Key {
                generation: number,
                id: of.id(key),
                wrapped: vec![wrapped(&first), wrapped(&self.recovery.recipient())],
                rewritten: number == 1 || rewritten,
            }
        };
        let controller = |id: &str, to: RecoveryRecipient, generation| Controller {
            node_id: id.to_owned(),
            recipient: to.as_bytes().to_vec(),
            generation,
        };
        GetSecretsKeysResponse {
            keys: (1..).zip(&self.keys).map(key).collect(),
            controllers: vec![
                controller("node-1", first, 2),
                controller("node-2", self.second.recipient(), 0),
            ],
        }
    }
}

#[tokio::test]
async fn the_recovery_key_gives_controllers_access() {
    let (fixture, secrets) = (Fixture::new(), Secrets::new());
    let script = Script {
        secrets_keys: secrets.known(&fixture, true),
        ..fixture.script()
    };
    let curator = TestCurator::start(&fixture.cluster, script, wall_clock()).await;
    fixture.take_ownership(&curator).await;
    let file = fixture.path("a-recovery-key");
    let command = [
        "kubernetes",
        "recover-secrets-key",
        "--recovery-key",
        text(&file),
    ];
    let write = |key: &RecoveryKey| {
        std::fs::write(&file, hex::encode(key.expose())).expect("it is written");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&file, private).expect("it is the user's");
    };

    write(&RecoveryKey::generate());
    let (code, said) = fixture.fails(&command).await;
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("not encrypted to this recovery key"),
        "{said}"
    );

    write(&secrets.recovery);
    let output = fixture.run(&command).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("gave access to node-2"),
        "{said}"
    );
    let known = curator.secrets_keys();
    for (key, secret) in known.keys.iter().zip(&secrets.keys) {
        let own = secrets.second.recipient();
        let given = key
            .wrapped
            .iter()
            .find(|one| one.recipient == own.as_bytes());
        let given = WrappedKey::try_from(&given.expect("it is given").wrapped_key[..]);
        let of = Secrets::generation(&fixture, key.generation);
        let opened = of.open(&secrets.second, &given.expect("a wrapped key"));
        assert_eq!(opened.as_ref(), Ok(secret));
    }

    let printed = fixture
        .json(&[&command[..], &["-o", "json"]].concat())
        .await;
    assert_eq!(printed["controllers"][1]["has_access"], true);
    assert_eq!(curator.secrets_keys(), known, "nothing is given twice");
}

#[tokio::test]
async fn a_rotation_asks_for_the_next_key_and_says_what_it_waits_for() {
    let (fixture, secrets) = (Fixture::new(), Secrets::new());
    let script = Script {
        secrets_keys: secrets.known(&fixture, false),
        ..fixture.script()
    };
    let curator = TestCurator::start(&fixture.cluster, script, wall_clock()).await;
    fixture.take_ownership(&curator).await;
    let rotate = ["kubernetes", "rotate-secrets-key", "--wait"];
    let setting = [
        "cluster",
        "get",
        "kubernetes.secrets_key_generation",
        "-o",
        "json",
    ];
    let waits = [&rotate[..], &["1s"]].concat();
    let output = fixture.run(&waits).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("waiting for a controller to generate the key"),
        "{said}"
    );
    assert!(said.contains("go on without this command"), "{said}");
    let set = fixture.json(&setting).await;
    assert_eq!(
        set["settings"]["kubernetes.secrets_key_generation"]["value"],
        3
    );

    // Without a wait it says what there is.
    let printed = fixture.ok(&[&rotate[..], &["0"]].concat()).await;
    assert!(
        printed.contains("GENERATION") && printed.contains("node-2"),
        "{printed}"
    );
}
