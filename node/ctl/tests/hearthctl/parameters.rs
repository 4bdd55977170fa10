//! Parameters of machines: made of flags and files, shown, and checked by the node's own decoder.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Output;

use hearth_api::testing::TestCurator;
use hearth_api::tls::wall_clock;
use hearth_api::v1::node_parameters::Cluster;
use hearth_api::v1::{
    ClusterBootstrap, ClusterDirectory, ClusterRegister, Install, NodeParameters,
    cluster_directory, network_config,
};
use hearth_parameters::parse;
use prost::Message as _;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use super::{Fixture, Script, Stdio, text};

impl Fixture {
    /// Runs a command with this standard input.
    async fn piped(&self, args: &[&str], input: &[u8]) -> Output {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it runs");
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(input).await.expect("written");
        drop(stdin);
        child.wait_with_output().await.expect("it ends")
    }

    /// Runs a command that has to succeed; the bytes of its standard output.
    async fn bytes(&self, args: &[&str]) -> Vec<u8> {
        let output = self.run(args).await;
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {why}");
        output.stdout
    }

    /// A folder with the files of an owner.
    async fn owner(&self) -> String {
        let folder = self.path("owner");
        std::fs::create_dir(&folder).expect("a folder");
        self.ok(&["owner", "init", text(&folder)]).await;
        text(&folder).to_owned()
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("written");
        text(&path).to_owned()
    }
}

fn decoded(bytes: &[u8]) -> NodeParameters {
    NodeParameters::decode(bytes).expect("a message")
}

fn bootstrap_of(message: &NodeParameters) -> &ClusterBootstrap {
    match &message.cluster {
        Some(Cluster::ClusterBootstrap(bootstrap)) => bootstrap,
        other => panic!("not a bootstrap: {other:?}"),
    }
}

fn register_of(message: &NodeParameters) -> &ClusterRegister {
    match &message.cluster {
        Some(Cluster::ClusterRegister(register)) => register,
        other => panic!("not a registration: {other:?}"),
    }
}

#[tokio::test]
async fn the_files_of_an_owner_are_enough_for_a_first_machine() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let printed = f
        .ok(&["owner", "public-key", &format!("{owner}/owner-key.pem")])
        .await;
    let file = f.path("node-1.pb");
    let output = f
        .run(&[
            "parameters",
            "bootstrap",
            "--owner",
            &owner,
            "--output-file",
            text(&file),
        ])
        .await;
    assert!(output.status.success() && output.stdout.is_empty());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("hearth/parameters.pb"), "{said}");
    let metadata = std::fs::metadata(&file).expect("there");
    assert_eq!(metadata.mode() & 0o777, 0o600);

    let bytes = std::fs::read(&file).expect("there");
    parse(&bytes).expect("a machine accepts it");
    let message = decoded(&bytes);
    let bootstrap = bootstrap_of(&message);
    assert_eq!(hex::encode(&bootstrap.owner_public_key), printed.trim());
    let secret = std::fs::read_to_string(format!("{owner}/first-contact-secret")).expect("there");
    assert_eq!(hex::encode(&bootstrap.first_contact_secret), secret.trim());
    let recovery = f
        .ok(&["owner", "public-key", &format!("{owner}/recovery-key")])
        .await;
    assert_eq!(hex::encode(&bootstrap.recovery_recipient), recovery.trim());
    assert_eq!(message.network_config, None);

    // The same with the public halves alone, on standard output.
    let secret = format!("{owner}/first-contact-secret");
    let public = [
        "parameters",
        "bootstrap",
        "--owner-public-key",
        printed.trim(),
        "--recovery-recipient",
        recovery.trim(),
        "--first-contact-secret",
        &secret,
    ];
    assert_eq!(f.bytes(&public).await, bytes);
}

#[tokio::test]
async fn flags_set_their_fields_whatever_the_file_says() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let file = f.file(
        "node.yaml",
        "clusterBootstrap:\n  labels:\n  - {key: rack, value: r1}\n  - {key: zone, value: a}\n  \
         initial_cluster_configuration:\n    cluster_domain: example.internal\n    \
         tpm_mode: TPM_MODE_DISABLED\nnetwork_config:\n  addresses: [192.0.2.1/24]\n  \
         nameservers: [192.0.2.53]\n  routes: [{destination: 198.51.100.0/24}]\n\
         time_servers: [192.0.2.123]\n",
    );
    let manifest = f.file(
        "objects.json",
        r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"a"}}
           {"kind":"List","items":[{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"b"}}]}"#,
    );
    let args = [
        "parameters",
        "bootstrap",
        "-f",
        &file,
        "--owner",
        &owner,
        "--label",
        "zone=b",
        "--label",
        "row=7",
        "--set",
        "tpm_mode=BEST_EFFORT",
        "--set",
        "cold_start_policy=OWNER",
        "--role",
        "consensus-member",
        "--role",
        "kubernetes-worker",
        "--manifest",
        &manifest,
        "--address",
        "192.0.2.10/24",
        "--address",
        "2001:db8::a/64",
        "--gateway",
        "192.0.2.254",
        "--gateway",
        "2001:db8::1",
        "--route",
        "203.0.113.0/24=192.0.2.253",
        "--mac",
        "52:54:00:12:34:56",
        "--vlan",
        "7",
        "--wipe",
        "00112233445566778899aabbccddeeff",
    ];
    let message = decoded(&f.bytes(&args).await);
    let bootstrap = bootstrap_of(&message);
    let labels = bootstrap.labels.iter();
    let labels: Vec<_> = labels
        .map(|label| format!("{}={}", label.key, label.value))
        .collect();
    assert_eq!(labels, ["rack=r1", "zone=b", "row=7"]);
    let configuration = bootstrap
        .initial_cluster_configuration
        .as_ref()
        .expect("given");
    assert_eq!(configuration.cluster_domain, "example.internal");
    assert_eq!(
        configuration.tpm_mode().as_str_name(),
        "TPM_MODE_BEST_EFFORT"
    );
    let roles = bootstrap.initial_roles.expect("given");
    assert!(roles.kubernetes_worker.is_some() && roles.kubernetes_controller.is_none());
    assert_eq!(bootstrap.manifests.len(), 2);
    let network = message.network_config.as_ref().expect("given");
    assert_eq!(network.addresses, ["192.0.2.10/24", "2001:db8::a/64"]);
    assert_eq!(network.nameservers, ["192.0.2.53"], "no flag names it");
    let route = |destination: &str, gateway: &str| network_config::Route {
        destination: destination.into(),
        gateway: gateway.into(),
    };
    assert_eq!(
        network.routes,
        [
            route("0.0.0.0/0", "192.0.2.254"),
            route("::/0", "2001:db8::1"),
            route("203.0.113.0/24", "192.0.2.253"),
        ]
    );
    assert_eq!((&network.mac[..], network.vlan), ("52:54:00:12:34:56", 7));
    assert_eq!(message.time_servers, ["192.0.2.123"]);
    assert_eq!(
        hex::encode(&message.wipe.as_ref().expect("given").enrolment_id),
        "00112233445566778899aabbccddeeff"
    );

    // As text, and back, it is the same message.
    for form in ["yaml", "json"] {
        let made = f.bytes(&[&args[..], &["-o", form]].concat()).await;
        let again = f
            .piped(&["parameters", "bootstrap", "-f", "-"], &made)
            .await;
        let why = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success(), "{why}");
        assert_eq!(decoded(&again.stdout), message);
    }
}

#[tokio::test]
async fn what_a_machine_would_refuse_is_not_written() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let file = f.path("node.pb");
    let args = |more: &[&'static str]| {
        let mut args = vec!["parameters", "bootstrap", "--output-file", text(&file)];
        args.extend(["--owner", &owner]);
        args.extend(more);
        args.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    for (more, expected) in [
        (
            &["--address", "192.0.2.10"][..],
            "network_config.addresses[0]: expected an address with its prefix length, such as \
             \"192.0.2.10/24\", got \"192.0.2.10\"",
        ),
        (
            &["--mac", "52:54"],
            "network_config.mac: expected a MAC address such as",
        ),
        (
            &["--set", "cold_start_policy=NONE"],
            "cluster_bootstrap.accept_loss: expected true",
        ),
        (
            &["--role", "kubernetes-worker"],
            "cluster_bootstrap.initial_roles.consensus_member: expected the role",
        ),
        (
            &["--set", "tpm_mode=MAYBE"],
            "tpm_mode: expected REQUIRED, BEST_EFFORT or DISABLED, got \"MAYBE\"",
        ),
        (
            &["--set", "tpm_mode=REQUIRED", "--set", "tpm_mode=DISABLED"],
            "tpm_mode: expected one value, got several",
        ),
    ] {
        let args = args(more);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (code, why) = f.fails(&args).await;
        assert_eq!(code, 1, "{why}");
        assert!(why.contains(expected), "{why}");
        assert!(!file.exists(), "{more:?}");
    }
    let (code, why) = f.fails(&["parameters", "bootstrap"]).await;
    assert_eq!(code, 1);
    assert!(
        why.contains("cluster_bootstrap.owner_public_key: expected 32 bytes, got 0"),
        "{why}"
    );

    // Files that are not what they should be.
    let other = f.file("other.yaml", "cluster_register: {}\n");
    let wrong = f.file("wrong.yaml", "cluster_bootstrap: {owner: me}\n");
    let missing = f.path("missing");
    let binary = f.path("binary");
    std::fs::write(&binary, [0x0a, 0xff]).expect("written");
    for (from, expected) in [
        (&other[..], "expected cluster_bootstrap"),
        (
            &wrong,
            "cluster_bootstrap: expected one of the fields owner_public_key, ",
        ),
        (text(&missing), "No such file"),
        (text(&binary), "it is not text"),
    ] {
        let (code, why) = f.fails(&["parameters", "bootstrap", "-f", from]).await;
        assert_eq!(code, 5, "{why}");
        assert!(why.contains(from) && why.contains(expected), "{why}");
    }
    let manifest = f.file("objects.yaml", "kind: Namespace\n");
    let args = ["parameters", "bootstrap", "--manifest", &manifest];
    let (code, why) = f.fails(&args).await;
    assert_eq!(code, 5, "{why}");
    assert!(why.contains("kubectl"), "{why}");
}

#[tokio::test]
async fn secrets_are_shown_on_demand_only() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let made = f
        .bytes(&["parameters", "bootstrap", "--owner", &owner])
        .await;
    let shown = f.piped(&["parameters", "show", "-"], &made).await;
    let shown = String::from_utf8(shown.stdout).expect("text");
    assert!(
        shown.contains("first_contact_secret: REDACTED\n"),
        "{shown}"
    );
    let refused = f
        .piped(&["parameters", "bootstrap", "-f", "-"], shown.as_bytes())
        .await;
    assert_eq!(refused.status.code(), Some(5));
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(
        why.contains("standard input") && why.contains("--show-secrets"),
        "{why}"
    );

    let show = ["parameters", "show", "--show-secrets", "-o", "json", "-"];
    let shown = f.piped(&show, &made).await.stdout;
    let again = f
        .piped(&["parameters", "bootstrap", "-f", "-"], &shown)
        .await;
    assert_eq!(again.stdout, made);

    // What a machine would not accept is shown, but not what no release knows.
    let mut message = decoded(&made);
    message.time_servers = vec!["pool.ntp.org".into()];
    let wrong = message.encode_to_vec();
    let shown = f.piped(&["parameters", "show", "-"], &wrong).await;
    let shown = String::from_utf8(shown.stdout).expect("text");
    assert!(
        shown.ends_with("time_servers:\n- pool.ntp.org\n"),
        "{shown}"
    );
    let unknown = [&made[..], &[0x78, 1]].concat();
    let refused = f.piped(&["parameters", "show", "-"], &unknown).await;
    let why = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{why}");
    assert!(why.contains("standard input: unknown field 15"), "{why}");
}

/// Both ends of a new terminal.
fn terminal() -> (OwnedFd, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&ours).expect("a terminal");
    unlockpt(&ours).expect("a terminal");
    let name = ptsname(&ours, Vec::new()).expect("its name");
    let path = OsStr::from_bytes(name.to_bytes());
    let theirs = File::options().read(true).write(true).open(path);
    (ours, theirs.expect("its other end"))
}

#[tokio::test]
async fn a_terminal_gets_text_only() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let (_ours, theirs) = terminal();
    for (form, code) in [("binary", Some(5)), ("yaml", Some(0))] {
        let mut command = f.command(&["parameters", "bootstrap", "--owner", &owner, "-o", form]);
        command
            .stdout(theirs.try_clone().expect("a terminal"))
            .stderr(Stdio::piped());
        let child = command.spawn().expect("it runs");
        let output = child.wait_with_output().await.expect("it ends");
        let why = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), code, "{why}");
        assert_eq!(why.contains("--output-file"), form == "binary", "{why}");
    }
}

#[tokio::test]
async fn a_check_says_what_a_machine_would_do() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let args = [
        "parameters",
        "bootstrap",
        "--owner",
        &owner,
        "--address",
        "192.0.2.10/24",
        "--gateway",
        "192.0.2.1",
        "--set",
        "tpm_mode=REQUIRED",
    ];
    let made = f.bytes(&args).await;
    let shown = f.piped(&["parameters", "check", "-"], &made).await.stdout;
    let shown = String::from_utf8(shown).expect("text");
    for line in [
        "cluster             founds a new one, cluster.internal\n",
        "storage security    ENCRYPTED\n",
        "with a TPM          founds it, with cold-start policy TPM\n",
        "without a TPM       refuses to found it: the TPM mode is REQUIRED\n",
        "network             192.0.2.10/24, 0.0.0.0/0 by 192.0.2.1\n",
        "time servers        -\n",
    ] {
        assert!(shown.contains(line), "{shown}");
    }
    let checked = f
        .piped(&["parameters", "check", "-o", "json", "-"], &made)
        .await
        .stdout;
    let checked: serde_json::Value = serde_json::from_slice(&checked).expect("JSON");
    assert_eq!(checked["register"], json!(null));
    assert_eq!(
        checked["bootstrap"]["with_tpm"],
        json!({
            "tpm_usage": "PRESENT_AND_USED",
            "cold_start_policy": "TPM",
            "refusal": null,
        })
    );
    assert_eq!(
        checked["bootstrap"]["configuration"]["tpm_mode"],
        "REQUIRED"
    );
    assert_eq!(
        checked["network"]["interfaces"][0]["routes"],
        json!([{"destination": "0.0.0.0/0", "gateway": "192.0.2.1"}])
    );

    let file = f.path("node.pb");
    for (content, expected) in [
        (
            &b""[..],
            "empty: expected a hearth.v1.NodeParameters message",
        ),
        (
            b"# no parameters\n",
            "not a hearth.v1.NodeParameters message",
        ),
        (
            &vec![0; 300_000],
            "too large: expected at most 262144 bytes",
        ),
    ] {
        std::fs::write(&file, content).expect("written");
        let (code, why) = f.fails(&["parameters", "check", text(&file)]).await;
        assert_eq!(code, 1, "{why}");
        assert!(why.contains(text(&file)) && why.contains(expected), "{why}");
    }
    std::fs::remove_file(&file).expect("removed");
    let (code, why) = f.fails(&["parameters", "check", text(&file)]).await;
    assert_eq!(code, 5, "{why}");
}

#[tokio::test]
async fn a_further_machine_gets_what_the_cluster_says() {
    let f = Fixture::new();
    let node = cluster_directory::Node {
        id: format!("hearth-{}", "a1".repeat(16)),
        addresses: vec![cluster_directory::Address {
            host: "192.0.2.1".into(),
            port: 0,
        }],
        roles: None,
    };
    let script = Script {
        register_ticket: vec![7; 32],
        directory: ClusterDirectory { nodes: vec![node] },
        ..f.script()
    };
    let curator = TestCurator::start(&f.cluster, script, wall_clock()).await;
    f.take_ownership(&curator).await;
    let before = curator.calls().len();
    let made = f
        .bytes(&["parameters", "register", "--label", "zone=b"])
        .await;
    assert_eq!(
        curator.calls()[before..],
        ["GetRegisterTicket", "GetClusterInfo"]
    );
    parse(&made).expect("a machine accepts it");
    let message = decoded(&made);
    let register = register_of(&message);
    assert_eq!(register.register_ticket, [7; 32]);
    assert_eq!(register.ca_certificate, f.cluster.ca().to_vec());
    assert_eq!(register.labels[0].value, "b");
    let checked = f.piped(&["parameters", "check", "-"], &made).await.stdout;
    let checked = String::from_utf8(checked).expect("text");
    assert!(checked.contains("at 192.0.2.1:7835\n"), "{checked}");

    // A file that has all of it needs no cluster; what it lacks is asked.
    curator.stop().await.expect("in order");
    let show = ["parameters", "show", "--show-secrets", "-"];
    let shown = f.piped(&show, &made).await.stdout;
    let make = [
        "parameters",
        "register",
        "-f",
        "-",
        "--address",
        "192.0.2.12/24",
    ];
    let again = f.piped(&make, &shown).await;
    let again = decoded(&again.stdout);
    assert_eq!(again.cluster, message.cluster);
    assert_eq!(
        again.network_config.expect("given").addresses,
        ["192.0.2.12/24"]
    );
    let shown = String::from_utf8(shown).expect("text");
    let lines = shown.split_inclusive('\n');
    let lacking: String = lines
        .filter(|line| !line.contains("register_ticket"))
        .collect();
    let asked = f.piped(&make, lacking.as_bytes()).await;
    let why = String::from_utf8_lossy(&asked.stderr);
    assert_eq!(asked.status.code(), Some(3), "{why}");
    assert!(why.contains("get the register ticket"), "{why}");
}

#[tokio::test]
async fn sources_that_take_text_get_it() {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let f = Fixture::new();
    let owner = f.owner().await;
    let make = ["parameters", "bootstrap", "--owner", &owner];
    let binary = f.bytes(&make).await;
    let text = format!("{}\n", STANDARD.encode(&binary));
    let base64 = f.ok(&[&make[..], &["-o", "base64"]].concat()).await;
    assert_eq!(base64, text);
    let smbios = f.ok(&[&make[..], &["-o", "smbios"]].concat()).await;
    assert_eq!(smbios, format!("dev.hearth.parameters={text}"));
}

#[tokio::test]
async fn the_disk_of_an_installation_is_one_of_the_parameters() {
    let f = Fixture::new();
    let owner = f.owner().await;
    let make = async |flags: &[&str]| {
        let args = [&["parameters", "bootstrap", "--owner", &owner], flags].concat();
        f.bytes(&args).await
    };
    assert_eq!(decoded(&make(&[]).await).install, None);
    let any = decoded(&make(&["--install"]).await).install;
    assert_eq!(any, Some(Install::default()));
    let file = f.file(
        "node.yaml",
        "install: {serial: S1, wwn: \"0x5000c500a1b2c3d4\", max_size_bytes: 4000000000000}\n",
    );
    let flags = [
        "-f",
        &file,
        "--install-serial",
        "S2",
        "--install-min-size",
        "1000",
    ];
    let made = make(&flags).await;
    let expected = Install {
        serial: "S2".to_owned(),
        wwn: "0x5000c500a1b2c3d4".to_owned(),
        min_size_bytes: 1000,
        max_size_bytes: 4_000_000_000_000,
        ..Install::default()
    };
    assert_eq!(decoded(&made).install, Some(expected));
    let checked = f.piped(&["parameters", "check", "-"], &made).await.stdout;
    let checked = String::from_utf8(checked).expect("text");
    let line = "installs on         an empty disk, serial S2, WWN 0x5000c500a1b2c3d4, at least 1000 bytes, \
                at most 4000000000000 bytes\n";
    assert!(checked.contains(line), "{checked}");

    let refused = ["--install-min-size", "2", "--install-max-size", "1"];
    let args = [
        &["parameters", "bootstrap", "--owner", &owner],
        &refused[..],
    ]
    .concat();
    let (code, why) = f.fails(&args).await;
    assert_eq!(code, 1, "{why}");
    let expected = "install.max_size_bytes: expected at least min_size_bytes, 2, got 1";
    assert!(why.contains(expected), "{why}");
}
