use hearth_api::registries::HIDDEN;
use hearth_api::v1::{
    ClusterBootstrap, ClusterConfiguration, ClusterDirectory, ClusterRegister, Install,
    KubernetesConfiguration, Label, NetworkConfig, NodeRoles, Wipe, cluster_directory,
    network_config, node_parameters, node_roles,
};
use node_parameters::Cluster;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;

const NOTATIONS: [Notation; 2] = [Notation::Yaml, Notation::Json];

fn founding(bootstrap: ClusterBootstrap) -> NodeParameters {
    NodeParameters {
        cluster: Some(Cluster::ClusterBootstrap(bootstrap)),
        ..NodeParameters::default()
    }
}

fn example() -> NodeParameters {
    NodeParameters {
        network_config: Some(NetworkConfig {
            mac: "52:54:00:12:34:56".into(),
            addresses: vec!["192.0.2.10/24".into()],
            vlan: 7,
            ..NetworkConfig::default()
        }),
        ..founding(ClusterBootstrap {
            owner_public_key: vec![1; 32],
            first_contact_secret: vec![2; 32],
            initial_cluster_configuration: Some(ClusterConfiguration {
                tpm_mode: 1,
                ..ClusterConfiguration::default()
            }),
            initial_roles: Some(NodeRoles {
                consensus_member: Some(node_roles::ConsensusMember::default()),
                ..NodeRoles::default()
            }),
            labels: vec![Label {
                key: "zone".into(),
                value: "no".into(),
            }],
            ..ClusterBootstrap::default()
        })
    }
}

const EXAMPLE: &str = "\
cluster_bootstrap:
  owner_public_key: AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=
  first_contact_secret: AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=
  initial_cluster_configuration:
    tpm_mode: TPM_MODE_REQUIRED
  initial_roles:
    consensus_member: {}
  labels:
  - key: zone
    value: \"no\"
network_config:
  mac: \"52:54:00:12:34:56\"
  addresses:
  - 192.0.2.10/24
  vlan: 7
";

#[test]
fn text_has_the_names_of_the_proto_file() {
    assert_eq!(write(&example(), Notation::Yaml), EXAMPLE);
    assert_eq!(read(EXAMPLE), Ok(example()));
    let json = write(&example(), Notation::Json);
    assert!(
        json.starts_with("{\n  \"cluster_bootstrap\": {\n    \"owner_public_key\": \"AQEB"),
        "{json}"
    );
    assert_eq!(read(&json), Ok(example()));
}

#[test]
fn both_names_of_a_field_are_read_and_what_the_mapping_leaves_open() {
    let message = read(
        "clusterBootstrap:\n  ownerPublicKey: AQ\n  accept_loss: true\n  \
         initialClusterConfiguration: {tpmMode: 2, certificateLifetimeSeconds: \"7\"}\n\
         networkConfig: null\ntimeServers: [192.0.2.1]\n",
    );
    let expected = NodeParameters {
        time_servers: vec!["192.0.2.1".into()],
        ..founding(ClusterBootstrap {
            owner_public_key: vec![1],
            accept_loss: true,
            initial_cluster_configuration: Some(ClusterConfiguration {
                tpm_mode: 2,
                certificate_lifetime_seconds: 7,
                ..ClusterConfiguration::default()
            }),
            ..ClusterBootstrap::default()
        })
    };
    assert_eq!(message, Ok(expected));
}

#[test]
fn what_is_not_in_the_message_is_refused_by_its_path() {
    for (text, expected) in [
        (
            "",
            "expected the fields of hearth.v1.NodeParameters, got nothing",
        ),
        (
            "wype: {}",
            "expected one of the fields cluster_bootstrap, cluster_register, network_config, wipe, \
             time_servers, install, got \"wype\"",
        ),
        (
            "cluster_bootstrap: {labels: [{key: a}, {kye: b}]}",
            "cluster_bootstrap.labels[1]: expected one of the fields key, value, got \"kye\"",
        ),
        (
            "cluster_bootstrap: {initial_roles: {kubernetes_worker: {x: 1}}}",
            "cluster_bootstrap.initial_roles.kubernetes_worker: expected no field, got \"x\"",
        ),
        (
            "network_config: {vlan: 1}\nnetworkConfig: {vlan: 2}",
            "network_config: expected one value, got network_config and networkConfig",
        ),
        (
            "cluster_bootstrap: {}\ncluster_register: {}",
            "expected either cluster_bootstrap or cluster_register, got both",
        ),
        (
            "cluster_bootstrap: {labels: [{key: zone, value: 7}]}",
            "cluster_bootstrap.labels[0].value: expected text, in quotation marks, got 7",
        ),
        (
            "cluster_bootstrap: {labels: {zone: a}}",
            "cluster_bootstrap.labels: expected a list, got fields",
        ),
        (
            "cluster_bootstrap: {accept_loss: \"yes\"}",
            "cluster_bootstrap.accept_loss: expected true or false, got \"yes\"",
        ),
        (
            "cluster_bootstrap: {initial_cluster_configuration: {tpm_mode: REQUIRED}}",
            "cluster_bootstrap.initial_cluster_configuration.tpm_mode: expected one of \
             TPM_MODE_UNSPECIFIED, TPM_MODE_REQUIRED, TPM_MODE_BEST_EFFORT, TPM_MODE_DISABLED, got \
             \"REQUIRED\"",
        ),
        (
            "cluster_bootstrap: {first_contact_secret: REDACTED}",
            "cluster_bootstrap.first_contact_secret: expected the secret (show it with \
             --show-secrets), got REDACTED",
        ),
        (
            "cluster_bootstrap: {owner_public_key: 12}",
            "cluster_bootstrap.owner_public_key: expected bytes in base64, got 12",
        ),
        (
            "network_config: [1]",
            "network_config: expected the fields of hearth.v1.NetworkConfig, got a list",
        ),
    ] {
        assert_eq!(read(text).unwrap_err().to_string(), expected, "{text}");
    }
    // What the mapping finds wrong itself.
    for (text, path) in [
        ("network_config: {vlan: -1}", "network_config.vlan: "),
        ("network_config: {vlan: seven}", "network_config.vlan: "),
        (
            "cluster_register: {register_ticket: \"?\"}",
            "cluster_register.register_ticket: ",
        ),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.starts_with(path), "{error}");
    }
}

#[test]
fn what_is_neither_yaml_nor_json_is_refused_with_the_place() {
    for (text, expected) in [
        (
            "{\"wipe\": {}, \"wipe\": {}}",
            "not Json: \"wipe\" occurs twice at line 1",
        ),
        (
            "{\"wipe\": {},}",
            "not Json: trailing comma at line 1 column 13",
        ),
        ("wipe: [", "not Yaml: "),
        ("vlan: 1\nvlan: 2", "not Yaml: "),
        ("wipe: !mine {}", "not Yaml: "),
        ("a: 1\n---\nb: 1", "not Yaml: "),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn secrets_are_redacted_and_nothing_else() {
    let mut message = example();
    let kubernetes = KubernetesConfiguration {
        registry_credentials: vec!["registry.example=user:pass-word".into()],
        ..KubernetesConfiguration::default()
    };
    let Some(Cluster::ClusterBootstrap(bootstrap)) = &mut message.cluster else {
        panic!("not a bootstrap");
    };
    let configuration = bootstrap.initial_cluster_configuration.as_mut();
    configuration.unwrap().kubernetes = Some(kubernetes);
    let shown = redacted(&message, Notation::Yaml);
    let whole = write(&message, Notation::Yaml);
    let expected = whole
        .replace("AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=", HIDDEN)
        .replace("pass-word", HIDDEN);
    assert_eq!(shown, expected);
    assert!(read(&shown).is_err());

    let registering = NodeParameters {
        cluster: Some(Cluster::ClusterRegister(ClusterRegister {
            register_ticket: vec![3; 32],
            ..ClusterRegister::default()
        })),
        ..NodeParameters::default()
    };
    for notation in NOTATIONS {
        let shown = redacted(&registering, notation);
        assert!(!shown.contains("AwMD") && shown.contains(HIDDEN), "{shown}");
    }
}

/// What means something else in YAML or JSON.
const SPECIAL: &[&str] = &[
    "no",
    "null",
    "~",
    "true",
    "0x1f",
    "0o7",
    "010",
    "1e3",
    ".inf",
    ".NaN",
    "1_000",
    "1:30",
    "2026-01-01",
    "",
    " ",
    " a",
    "a ",
    "a: b",
    "a #b",
    "#",
    "- a",
    "-",
    "?",
    "&a",
    "*a",
    "!a",
    "%a",
    "@a",
    "`a",
    "|",
    ">",
    "{",
    "[",
    "}",
    ",",
    "'",
    "\"",
    "\\",
    "<<",
    "---",
    "...",
    "\n",
    "a\nb",
    "a\n\n",
    "\n a",
    "\t",
    "a\tb",
    "\r\n",
    "\u{85}",
    "\u{2028}",
    "\u{feff}",
    "\u{7f}",
    "\u{0}",
    "é",
    "🦀",
    "=",
    "y",
    "N",
    "Off",
];

/// Text of any characters, and such text.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(SPECIAL).prop_map(str::to_owned),
        "[ -~]{0,100}",
        any::<String>(),
    ]
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..70)
}

fn roles() -> impl Strategy<Value = NodeRoles> {
    (option::of(any::<u64>()), any::<bool>(), any::<bool>()).prop_map(
        |(member, controller, worker)| NodeRoles {
            consensus_member: member.map(|member_id| node_roles::ConsensusMember { member_id }),
            kubernetes_controller: controller.then_some(node_roles::KubernetesController {}),
            kubernetes_worker: worker.then_some(node_roles::KubernetesWorker {}),
        },
    )
}

fn labels() -> impl Strategy<Value = Vec<Label>> {
    vec(
        (text(), text()).prop_map(|(key, value)| Label { key, value }),
        0..3,
    )
}

fn configuration() -> impl Strategy<Value = ClusterConfiguration> {
    let kubernetes = (vec(text(), 0..3), text(), -1..9_i32, any::<u32>());
    let kubernetes =
        kubernetes.prop_map(|(list, one, level, generation)| KubernetesConfiguration {
            registry_credentials: list,
            registry_proxy: one,
            pod_security_level: level,
            secrets_key_generation: generation,
            ..KubernetesConfiguration::default()
        });
    (text(), any::<i32>(), 0..4_i32, option::of(kubernetes)).prop_map(
        |(cluster_domain, tpm_mode, storage, kubernetes)| ClusterConfiguration {
            cluster_domain,
            tpm_mode,
            storage_security_policy: storage,
            kubernetes,
            ..ClusterConfiguration::default()
        },
    )
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let bootstrap = (
        (bytes(), bytes(), bytes()),
        (option::of(configuration()), option::of(roles()), labels()),
        any::<bool>(),
        vec(text(), 0..3),
    );
    let bootstrap = bootstrap.prop_map(
        |((owner, secret, recipient), (configuration, roles, labels), accept_loss, manifests)| {
            Cluster::ClusterBootstrap(ClusterBootstrap {
                owner_public_key: owner,
                first_contact_secret: secret,
                recovery_recipient: recipient,
                initial_cluster_configuration: configuration,
                initial_roles: roles,
                labels,
                accept_loss,
                manifests,
            })
        },
    );
    let address = (text(), any::<u32>());
    let address = address.prop_map(|(host, port)| cluster_directory::Address { host, port });
    let node = (text(), vec(address, 0..2), option::of(roles()));
    let node = node.prop_map(|(id, addresses, roles)| cluster_directory::Node {
        id,
        addresses,
        roles,
    });
    let directory = option::of(vec(node, 0..2).prop_map(|nodes| ClusterDirectory { nodes }));
    let register = (directory, bytes(), bytes(), labels());
    let register = register.prop_map(|(directory, ticket, ca, labels)| {
        Cluster::ClusterRegister(ClusterRegister {
            cluster_directory: directory,
            register_ticket: ticket,
            ca_certificate: ca,
            labels,
        })
    });
    prop_oneof![bootstrap, register]
}

fn route() -> impl Strategy<Value = network_config::Route> {
    (text(), text()).prop_map(|(destination, gateway)| network_config::Route {
        destination,
        gateway,
    })
}

fn interface() -> impl Strategy<Value = network_config::Interface> {
    let bond =
        (vec(text(), 0..3), 0..3).prop_map(|(macs, mode)| network_config::Bond { macs, mode });
    (
        text(),
        option::of(bond),
        any::<u32>(),
        vec(text(), 0..3),
        vec(route(), 0..2),
        any::<u32>(),
    )
        .prop_map(
            |(mac, bond, vlan, addresses, routes, mtu)| network_config::Interface {
                mac,
                bond,
                vlan,
                addresses,
                routes,
                mtu,
            },
        )
}

fn network() -> impl Strategy<Value = NetworkConfig> {
    (
        text(),
        vec(text(), 0..3),
        vec(route(), 0..3),
        vec(text(), 0..2),
        any::<u32>(),
        vec(text(), 0..2),
        vec(interface(), 0..3),
    )
        .prop_map(
            |(mac, addresses, routes, nameservers, vlan, search_domains, interfaces)| {
                NetworkConfig {
                    mac,
                    addresses,
                    routes,
                    nameservers,
                    vlan,
                    search_domains,
                    interfaces,
                }
            },
        )
}

fn message() -> impl Strategy<Value = NodeParameters> {
    let wipe = option::of(bytes().prop_map(|enrolment_id| Wipe { enrolment_id }));
    (
        option::of(cluster()),
        option::of(network()),
        wipe,
        vec(text(), 0..3),
        option::of((text(), text(), any::<u64>())),
    )
        .prop_map(
            |(cluster, network_config, wipe, time_servers, install)| NodeParameters {
                cluster,
                network_config,
                wipe,
                time_servers,
                install: install.map(|(serial, overwrite, max_size_bytes)| Install {
                    serial,
                    overwrite,
                    max_size_bytes,
                    ..Install::default()
                }),
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Also for messages that a machine would refuse.
    #[test]
    fn message_and_text_become_each_other(message in message()) {
        for notation in NOTATIONS {
            let written = write(&message, notation);
            let again = read(&written);
            prop_assert_eq!(again.as_ref(), Ok(&message), "{}", written);
            prop_assert_eq!(write(&message, notation), written);
        }
    }

    #[test]
    fn no_text_panics(text in text(), yaml in "[a-z:{}\\[\\]&*!|>'\"\n -]{0,60}") {
        let _ = read(&text);
        let _ = read(&yaml);
    }
}
