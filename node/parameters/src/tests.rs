mod admission;
mod stored_forms;

use hearth_api::identity::SigningKey;
use hearth_api::recovery::{RecoveryKey, RecoveryRecipient};
use hearth_api::v1::{
    AuditLevel, ClusterBootstrap, ClusterConfiguration, ClusterDirectory, ClusterRegister,
    ColdStartPolicy, ControlPlaneScheduling, KubernetesConfiguration, Label, NetworkConfig,
    NodeRoles, PodNetwork, PodSecurityLevel, StorageSecurity, StorageSecurityPolicy, TpmMode, Wipe,
    cluster_directory, network_config, node_roles,
};
use proptest::prelude::*;
use prost::bytes::BufMut;

use super::*;

/// The smallest valid bootstrap.
fn bootstrap() -> ClusterBootstrap {
    ClusterBootstrap {
        recovery_recipient: recipient().as_bytes().to_vec(),
        owner_public_key: SigningKey::from_seed([1; 32]).public().as_bytes().to_vec(),
        first_contact_secret: vec![2; 32],
        ..ClusterBootstrap::default()
    }
}

fn recipient() -> RecoveryRecipient {
    RecoveryKey::from_bytes([5; 32]).recipient()
}

fn register() -> ClusterRegister {
    let authority = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut ca = rcgen::CertificateParams::default();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    ClusterRegister {
        cluster_directory: Some(ClusterDirectory {
            nodes: vec![cluster_directory::Node {
                id: format!("hearth-{}", "0".repeat(32)),
                addresses: vec![cluster_directory::Address {
                    host: "192.0.2.1".into(),
                    port: 0,
                }],
                roles: None,
            }],
        }),
        register_ticket: vec![3; 32],
        ca_certificate: ca.self_signed(&authority).unwrap().der().to_vec(),
        labels: Vec::new(),
    }
}

fn founding(bootstrap: ClusterBootstrap) -> NodeParameters {
    NodeParameters {
        cluster: Some(node_parameters::Cluster::ClusterBootstrap(bootstrap)),
        ..NodeParameters::default()
    }
}

fn registering(register: ClusterRegister) -> NodeParameters {
    NodeParameters {
        cluster: Some(node_parameters::Cluster::ClusterRegister(register)),
        ..NodeParameters::default()
    }
}

fn parsed(message: &NodeParameters) -> Result<Parameters, String> {
    parse(&message.encode_to_vec()).map_err(|error| error.to_string())
}

fn refusal(message: &NodeParameters) -> String {
    parsed(message).expect_err("the parameters should be rejected")
}

fn refused_bootstrap(change: impl FnOnce(&mut ClusterBootstrap)) -> String {
    let mut message = bootstrap();
    change(&mut message);
    refusal(&founding(message))
}

fn refused_network(change: impl FnOnce(&mut NetworkConfig)) -> String {
    let mut network = NetworkConfig {
        addresses: vec!["192.0.2.10/24".into()],
        ..NetworkConfig::default()
    };
    change(&mut network);
    refusal(&NodeParameters {
        network_config: Some(network),
        ..founding(bootstrap())
    })
}

fn configured(change: impl FnOnce(&mut ClusterConfiguration)) -> ClusterBootstrap {
    let mut configuration = ClusterConfiguration::default();
    change(&mut configuration);
    ClusterBootstrap {
        initial_cluster_configuration: Some(configuration),
        ..bootstrap()
    }
}

fn label(key: &str, value: &str) -> Label {
    Label {
        key: key.into(),
        value: value.into(),
    }
}

#[test]
fn what_is_unset_has_a_default() {
    let parameters = parsed(&founding(bootstrap())).unwrap();
    let Cluster::Bootstrap(bootstrap) = parameters.cluster else {
        panic!("not a bootstrap");
    };
    assert_eq!(
        bootstrap.seed.configuration.cluster_domain,
        "cluster.internal"
    );
    assert_eq!(bootstrap.seed.configuration.tpm_mode(), TpmMode::BestEffort);
    assert_eq!(
        bootstrap.seed.configuration.storage_security_policy(),
        StorageSecurityPolicy::NeedsEncryption
    );
    assert_eq!(
        bootstrap.seed.configuration.cold_start_policy(),
        ColdStartPolicy::Unspecified
    );
    assert_eq!(bootstrap.seed.recovery_recipient, Some(recipient()));
    assert!(!bootstrap.accept_loss);
    assert_eq!(bootstrap.storage_security, StorageSecurity::Encrypted);
    assert_eq!(bootstrap.roles, None);
    let held = |can_run_kubernetes| {
        let roles = bootstrap.roles(can_run_kubernetes);
        let kubernetes = (roles.kubernetes_controller, roles.kubernetes_worker);
        assert_eq!(roles.consensus_member, Some(Default::default()));
        (kubernetes.0.is_some(), kubernetes.1.is_some())
    };
    assert_eq!(held(false), (false, false));
    assert_eq!(held(true), (true, true));
    assert_eq!(parameters.network, Network::default());
    assert_eq!(parameters.wipe, None);
}

#[test]
fn the_policy_decides_how_the_first_node_stores() {
    for (policy, wanted) in [
        (
            StorageSecurityPolicy::Permissive,
            StorageSecurity::Encrypted,
        ),
        (
            StorageSecurityPolicy::NeedsEncryption,
            StorageSecurity::Encrypted,
        ),
        (
            StorageSecurityPolicy::NeedsEncryptionAndAuthentication,
            StorageSecurity::AuthenticatedEncrypted,
        ),
        (
            StorageSecurityPolicy::NeedsInsecure,
            StorageSecurity::Insecure,
        ),
    ] {
        let message = configured(|c| c.storage_security_policy = policy.into());
        let Cluster::Bootstrap(bootstrap) = parsed(&founding(message)).unwrap().cluster else {
            panic!("not a bootstrap");
        };
        assert_eq!(bootstrap.storage_security, wanted, "{policy:?}");
    }
}

#[test]
fn what_kubernetes_takes_over_is_kept_and_checked() {
    let patterns = |patterns: &[&str]| KubernetesConfiguration {
        synchronized_labels: patterns.iter().map(|&p| p.to_owned()).collect(),
        ..KubernetesConfiguration::default()
    };
    let wanted = patterns(&["rack", "topology.example/*"]);
    let message = configured(|c| c.kubernetes = Some(wanted.clone()));
    let Cluster::Bootstrap(bootstrap) = parsed(&founding(message)).unwrap().cluster else {
        panic!("not a bootstrap");
    };
    let expected = KubernetesConfiguration {
        pod_security_level: PodSecurityLevel::Baseline.into(),
        control_plane_scheduling: ControlPlaneScheduling::Allowed.into(),
        pod_network: PodNetwork::BuiltIn.into(),
        audit_level: AuditLevel::Metadata.into(),
        secrets_key_generation: 1,
        pod_ranges: vec!["10.208.0.0/12".into()],
        service_ranges: vec!["10.224.0.0/16".into()],
        ..wanted
    };
    assert_eq!(bootstrap.seed.configuration.kubernetes, Some(expected));

    let message = configured(|c| c.kubernetes = Some(patterns(&["rack", "a b"])));
    let refused = refusal(&founding(message));
    let field = "initial_cluster_configuration.kubernetes.synchronized_labels[1]: expected";
    assert!(refused.contains(field), "{refused}");
}

#[test]
fn a_cluster_of_ipv6_alone_is_refused_with_the_reason() {
    let message = configured(|c| {
        let kubernetes = c.kubernetes.get_or_insert_default();
        kubernetes.pod_ranges = vec!["fd00:1::/48".into()];
        kubernetes.service_ranges = vec!["fd00:2::/112".into()];
    });
    let refused = refusal(&founding(message));
    let reason = "initial_cluster_configuration.kubernetes.pod_ranges: expected an IPv4 range, \
                  besides one of IPv6 (IPv6 alone is not supported: ";
    assert!(refused.contains(reason), "{refused}");
}

#[test]
fn each_field_that_will_not_do_is_named() {
    let configuration = "cluster_bootstrap.initial_cluster_configuration";
    for (found, wanted) in [
        (
            refused_bootstrap(|b| b.owner_public_key = vec![1; 31]),
            "cluster_bootstrap.owner_public_key: expected 32 bytes, got 31".to_owned(),
        ),
        (
            refused_bootstrap(|b| b.owner_public_key = vec![0; 32]),
            "cluster_bootstrap.owner_public_key: expected an Ed25519 public key, got an invalid \
             Ed25519 public key"
                .into(),
        ),
        (
            refused_bootstrap(|b| b.first_contact_secret.clear()),
            "cluster_bootstrap.first_contact_secret: expected 32 bytes, got 0".into(),
        ),
        (
            refused_bootstrap(|b| b.recovery_recipient = vec![1; 31]),
            "cluster_bootstrap.recovery_recipient: expected 32 bytes, got 31 bytes".into(),
        ),
        (
            refused_bootstrap(|b| b.recovery_recipient = vec![0; 32]),
            "cluster_bootstrap.recovery_recipient: expected an X25519 public key, got a point of \
             small order"
                .into(),
        ),
        (
            refused_bootstrap(|b| b.recovery_recipient.clear()),
            "cluster_bootstrap.recovery_recipient: expected 32 bytes (`hearthctl owner init` makes \
             a recovery key), or accept_loss, as without a recovery key the data are lost with the \
             TPMs of the nodes, got none"
                .into(),
        ),
        (
            refused_bootstrap(|b| {
                *b = configured(|c| c.cold_start_policy = ColdStartPolicy::None.into());
            }),
            "cluster_bootstrap.accept_loss: expected true, as with cold-start policy NONE the data \
             are lost when all nodes are off, got false"
                .into(),
        ),
        (
            refused_bootstrap(|b| *b = configured(|c| c.tpm_mode = 77)),
            format!(
                "{configuration}.tpm_mode: expected REQUIRED, BEST_EFFORT or DISABLED, got 77"
            ),
        ),
        (
            refused_bootstrap(|b| {
                *b = configured(|c| c.cold_start_policy = ColdStartPolicy::Owner.into());
                b.recovery_recipient.clear();
                b.accept_loss = true;
            }),
            "cluster_bootstrap.recovery_recipient: expected 32 bytes, as the cold-start policy is \
             OWNER (`hearthctl owner init` makes a recovery key), got none"
                .into(),
        ),
        (
            refused_bootstrap(|b| *b = configured(|c| c.cold_start_policy = 77)),
            format!("{configuration}.cold_start_policy: expected TPM, OWNER or NONE, got 77"),
        ),
        (
            refused_bootstrap(|b| *b = configured(|c| c.storage_security_policy = 77)),
            format!(
                "{configuration}.storage_security_policy: expected PERMISSIVE, NEEDS_ENCRYPTION, \
                 NEEDS_ENCRYPTION_AND_AUTHENTICATION or NEEDS_INSECURE, got 77"
            ),
        ),
        (
            refused_bootstrap(|b| *b = configured(|c| c.cluster_domain = "a..b".into())),
            format!(
                "{configuration}.cluster_domain: expected a lower-case DNS name of at most 80 \
                 characters, got \"a..b\""
            ),
        ),
        (
            refused_bootstrap(|b| {
                b.initial_roles = Some(NodeRoles {
                    consensus_member: Some(node_roles::ConsensusMember { member_id: 7 }),
                    ..NodeRoles::default()
                });
            }),
            "cluster_bootstrap.initial_roles.consensus_member.member_id: expected 0 (a new cluster \
             has no members), got 7"
                .into(),
        ),
        (
            refused_bootstrap(|b| b.manifests = vec![r#"{"apiVersion":"v1"}"#.into()]),
            "cluster_bootstrap.manifests[0].kind: expected a kind, such as \"Deployment\", got \
             nothing"
                .into(),
        ),
        (
            refused_bootstrap(|b| b.initial_roles = Some(NodeRoles::default())),
            "cluster_bootstrap.initial_roles.consensus_member: expected the role (the first \
             node must be a consensus member), got no role"
                .into(),
        ),
        (
            refused_network(|n| n.addresses.push("10.208.7.7/24".into())),
            "network_config: expected addresses outside of the ranges of pods (10.208.0.0/12) and services \
             (10.224.0.0/16), got 10.208.7.7"
                .into(),
        ),
        (
            refused_network(|n| n.vlan = 4095),
            "network_config.vlan: expected 0 for none, or 1 to 4094, got 4095".into(),
        ),
        (
            refused_network(|n| n.mac = "52:54:00:12:34".into()),
            "network_config.mac: expected a MAC address such as \"52:54:00:12:34:56\", got \
             \"52:54:00:12:34\""
                .into(),
        ),
        (
            refusal(&NodeParameters {
                wipe: Some(Wipe {
                    enrolment_id: vec![1; 15],
                }),
                ..founding(bootstrap())
            }),
            "wipe.enrolment_id: expected 16 bytes, got 15".into(),
        ),
        (
            refusal(&NodeParameters {
                wipe: Some(Wipe {
                    enrolment_id: vec![1; 16],
                }),
                ..NodeParameters::default()
            }),
            "cluster: expected cluster_bootstrap or cluster_register, got neither".into(),
        ),
    ] {
        assert_eq!(found, wanted);
    }
}

#[test]
fn domains_are_dns_names_of_80_characters() {
    let accepted =
        |domain: &str| parsed(&founding(configured(|c| c.cluster_domain = domain.into()))).is_ok();
    let longest = format!("{}.{}", "a".repeat(63), "b".repeat(16));
    assert_eq!(longest.len(), 80);
    for domain in ["cluster.internal", "a", "x-1.example", &longest] {
        assert!(accepted(domain), "{domain}");
    }
    for domain in [
        "A.example",
        "-a",
        "a-",
        ".",
        "a.",
        "ä.example",
        "a_b",
        &format!("{longest}c"),
        &"a".repeat(64),
    ] {
        assert!(!accepted(domain), "{domain}");
    }
}

#[test]
fn labels_follow_their_rules() {
    let accepted = |labels: Vec<Label>| {
        parsed(&founding(ClusterBootstrap {
            labels,
            ..bootstrap()
        }))
        .is_ok()
    };
    let longest = "k".repeat(63);
    for key in ["zone", "a.b_c-D9", "example.com/zone", longest.as_str()] {
        assert!(accepted(vec![label(key, "")]), "{key}");
    }
    let prefix_only = format!("{}/k", "a".repeat(64));
    let too_long = format!("{longest}k");
    for key in [
        "",
        "-a",
        "a-",
        "a/b/c",
        "/a",
        "a/",
        "Example.com/zone",
        "a b",
        "é",
        &too_long,
        &prefix_only,
    ] {
        assert!(!accepted(vec![label(key, "")]), "{key}");
    }
    for (value, right) in [("", true), ("x.y_z-1", true), ("-x", false), ("x y", false)] {
        assert_eq!(accepted(vec![label("k", value)]), right, "{value}");
    }
    assert!(
        !accepted(vec![label("k", ""), label("k", "x")]),
        "duplicate key"
    );
    let many = |count| (0..count).map(|i| label(&format!("k{i}"), "")).collect();
    assert!(accepted(many(64)));
    assert!(!accepted(many(65)));
    // The message goes to the console and must be short, whatever the length of the value.
    let refused = refused_bootstrap(|b| b.labels = vec![label(&"x y".repeat(20_000), "")]);
    assert!(refused.len() < 400, "{refused}");
}

#[test]
fn a_static_network_is_understood_and_written_again() {
    let message = NetworkConfig {
        mac: "52:54:00:12:34:56".into(),
        addresses: vec!["192.0.2.10/24".into(), "2001:db8::10/64".into()],
        routes: vec![
            network_config::Route {
                destination: "0.0.0.0/0".into(),
                gateway: "192.0.2.1".into(),
            },
            network_config::Route {
                destination: "198.51.100.0/24".into(),
                gateway: String::new(),
            },
        ],
        nameservers: vec!["192.0.2.53".into()],
        vlan: 7,
        ..NetworkConfig::default()
    };
    let network = parsed(&NodeParameters {
        network_config: Some(message.clone()),
        ..founding(bootstrap())
    })
    .unwrap()
    .network;
    let [interface] = &network.interfaces[..] else {
        panic!("{network:?}");
    };
    let mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
    assert_eq!(interface.device, Device::WithMac(mac));
    assert_eq!(interface.vlan, Some(7));
    assert_eq!(interface.routes[1].gateway, None);
    assert_eq!(network.to_message(), Some(message));
}

#[test]
fn time_servers_are_few_addresses() {
    let with = |servers: &[&str]| NodeParameters {
        time_servers: servers.iter().map(ToString::to_string).collect(),
        ..founding(bootstrap())
    };
    let servers = ["192.0.2.1", "[2001:db8::1]:1123"];
    let found = parsed(&with(&servers)).unwrap().time_servers;
    assert_eq!(found, servers.map(|text| text.parse().unwrap()));
    assert_eq!(
        refusal(&with(&["192.0.2.1", "pool.ntp.org"])),
        "time_servers[1]: expected the IP address of a time server (names are not resolved), got \
         \"pool.ntp.org\""
    );
    assert_eq!(
        refusal(&with(&["192.0.2.1"; 9])),
        "time_servers: expected at most 8 servers, got 9"
    );
}

#[test]
fn networks_that_cannot_be_are_refused() {
    for address in [
        "192.0.2.10",
        "192.0.2.10/33",
        "::/129",
        "x/1",
        "192.0.2.1/+8",
    ] {
        assert!(
            refused_network(|n| n.addresses = vec![address.into()])
                .starts_with("network_config.addresses[0]: expected an address with its prefix"),
        );
    }
    for address in ["0.0.0.0/8", "224.0.0.1/4", "127.0.0.1/8", "::1/128"] {
        assert!(
            refused_network(|n| n.addresses.push(address.into()))
                .starts_with("network_config.addresses[1]: expected a host address"),
        );
    }
    let route = |destination: &str, gateway: &str| network_config::Route {
        destination: destination.into(),
        gateway: gateway.into(),
    };
    assert!(
        refused_network(|n| n.routes = vec![route("0.0.0.0/0", "2001:db8::1")])
            .starts_with("network_config.routes[0].gateway: expected an address of the dest"),
    );
    assert!(
        refused_network(|n| n.routes = vec![route("", "192.0.2.1")])
            .starts_with("network_config.routes[0].destination: "),
    );
    assert!(
        refused_network(|n| n.nameservers = vec!["dns.example".into()])
            .starts_with("network_config.nameservers[0]: expected an IP address"),
    );
}

#[test]
fn a_registration_is_checked_before_it_is_tried() {
    let refused = |change: fn(&mut ClusterRegister)| {
        let mut message = register();
        change(&mut message);
        refusal(&registering(message))
    };
    let Cluster::Register(right) = parsed(&registering(register())).unwrap().cluster else {
        panic!("not a registration");
    };
    assert_eq!(right.directory.nodes.len(), 1);

    // Several nodes, with several addresses and ports each.
    let mut message = register();
    let directory = message.cluster_directory.as_mut().unwrap();
    let more = [("2001:db8::1", 7835), ("192.0.2.1", 1)];
    directory.nodes[0]
        .addresses
        .extend(more.map(|(host, port)| cluster_directory::Address {
            host: host.into(),
            port,
        }));
    directory.nodes.push(cluster_directory::Node {
        id: format!("hearth-{}", "1".repeat(32)),
        // In the form that the cluster itself uses.
        roles: Some(NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember { member_id: 7 }),
            ..NodeRoles::default()
        }),
        ..directory.nodes[0].clone()
    });
    message.labels = vec![label("zone", "a")];
    let Cluster::Register(many) = parsed(&registering(message.clone())).unwrap().cluster else {
        panic!("not a registration");
    };
    assert_eq!(Some(many.directory), message.cluster_directory);
    assert_eq!(many.labels, message.labels);
    assert_eq!(many.ticket.expose().as_slice(), message.register_ticket);

    for (found, wanted) in [
        (
            refused(|r| r.register_ticket.truncate(31)),
            "cluster_register.register_ticket: expected 32 bytes, got 31",
        ),
        (
            refused(|r| r.cluster_directory = None),
            "cluster_register.cluster_directory.nodes: expected at least one node, got none",
        ),
        (
            refused(|r| {
                r.cluster_directory.as_mut().unwrap().nodes[0]
                    .addresses
                    .clear()
            }),
            "cluster_register.cluster_directory.nodes[0].addresses: expected at least one address, \
             got none",
        ),
        (
            refused(|r| {
                r.cluster_directory.as_mut().unwrap().nodes[0].addresses[0].host = "a.b".into();
            }),
            "cluster_register.cluster_directory.nodes[0].addresses[0].host: expected an IP address, \
             got \"a.b\"",
        ),
        (
            refused(|r| r.ca_certificate.push(0)),
            "cluster_register.ca_certificate: expected a cluster CA certificate in DER, got ",
        ),
        (
            refused(|r| r.ca_certificate.clear()),
            "cluster_register.ca_certificate: expected a cluster CA certificate in DER, got 0 bytes",
        ),
        (
            refused(|r| {
                let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
                let leaf = rcgen::CertificateParams::default().self_signed(&key);
                r.ca_certificate = leaf.unwrap().der().to_vec();
            }),
            "cluster_register.ca_certificate: expected a cluster CA certificate in DER, got ",
        ),
        (
            refused(|r| r.register_ticket.push(0)),
            "cluster_register.register_ticket: expected 32 bytes, got 33",
        ),
        (
            refused(|r| {
                let nodes = &mut r.cluster_directory.as_mut().unwrap().nodes;
                nodes.extend(vec![nodes[0].clone(); 64]);
            }),
            "cluster_register.cluster_directory.nodes: expected at most 64 nodes, got 65",
        ),
        (
            refused(|r| {
                let addresses = &mut r.cluster_directory.as_mut().unwrap().nodes[0].addresses;
                addresses.extend(vec![addresses[0].clone(); 8]);
            }),
            "cluster_register.cluster_directory.nodes[0].addresses: expected at most 8 addresses, \
             got 9",
        ),
        (
            refused(|r| {
                r.cluster_directory.as_mut().unwrap().nodes[0].addresses[0].port = 65_536;
            }),
            "cluster_register.cluster_directory.nodes[0].addresses[0].port: expected 0 for the \
             default port, or a port, got 65536",
        ),
        (
            refused(|r| r.labels = vec![label("", "x")]),
            "cluster_register.labels[0].key: expected ",
        ),
    ] {
        assert!(found.starts_with(wanted), "{found}");
    }
}

/// FAULTS 65: not our message, truncated, unknown fields, both variants.
#[test]
fn the_wire_is_read_strictly() {
    let refused = |bytes: &[u8]| parse(bytes).unwrap_err().to_string();
    let right = founding(bootstrap()).encode_to_vec();
    assert!(parse(&right).is_ok());

    assert_eq!(
        refused(b""),
        "empty: expected a hearth.v1.NodeParameters message, got no bytes"
    );
    assert_eq!(
        refused(&vec![0; MAX_SIZE + 1]),
        "too large: expected at most 262144 bytes, got 262145"
    );
    for length in 1..right.len() {
        refused(&right[..length]);
    }
    for other in [
        b"#!/bin/sh\nexit 0\n".as_slice(),
        b"{\"cluster_bootstrap\": {}}",
        b"\x7fELF\x02\x01\x01",
        &[0; 512],
        &[0xff; 512],
    ] {
        refused(other);
    }

    let mut both = right.clone();
    both.extend(registering(register()).encode_to_vec());
    assert_eq!(
        refused(&both),
        "expected either cluster_bootstrap or cluster_register, got both"
    );
    let twice = [&right[..], &right[..]].concat();
    assert_eq!(
        refused(&twice),
        "cluster_bootstrap: expected one value, got several"
    );

    let mut unknown = right.clone();
    unknown.extend([0x78, 1]); // field 15, a number
    assert_eq!(refused(&unknown), "unknown field 15");
    let mut inner = bootstrap().encode_to_vec();
    inner.extend([0x4a, 0]); // field 9, no bytes
    let mut nested = vec![0x0a];
    nested.put_u8(inner.len() as u8);
    nested.extend(inner);
    assert_eq!(refused(&nested), "cluster_bootstrap: unknown field 9");
    assert_eq!(
        refused(&[0x08, 1]),
        "cluster_bootstrap: not a hearth.v1.NodeParameters message: unexpected wire type 0"
    );
}

#[test]
fn no_secret_is_printed() {
    let secret = || vec![0xa5; 32];
    let mut message = bootstrap();
    message.first_contact_secret = secret();
    let printed = format!("{:?}", parsed(&founding(message)).unwrap());
    let mut message = register();
    message.register_ticket = secret();
    let printed = printed + &format!("{:?}", parsed(&registering(message)).unwrap());
    // Long enough that a random key or certificate does not contain it by chance.
    for form in ["165, ".repeat(8), "a5".repeat(8)] {
        assert!(!printed.contains(&form), "{printed}");
    }
}

fn labels() -> impl Strategy<Value = Vec<Label>> {
    let one = ("[a-z]{1,8}", "[A-Z0-9]{0,8}");
    prop::collection::btree_map(one.0, one.1, 0..4)
        .prop_map(|map| map.into_iter().map(|(k, v)| label(&k, &v)).collect())
}

fn valid() -> impl Strategy<Value = NodeParameters> {
    (
        any::<[u8; 32]>(),
        any::<[u8; 32]>(),
        prop::option::of("[a-z]{1,10}\\.[a-z]{1,10}"),
        0..5_i32,
        labels(),
        prop::option::of((any::<[u8; 4]>(), 0_u8..=32, 0_u32..4095)),
        prop::option::of(any::<[u8; 16]>()),
        prop::collection::vec("192\\.0\\.2\\.[1-9](:1123)?", 0..3),
    )
        .prop_map(
            |(seed, secret, domain, policy, labels, network, wipe, time_servers)| NodeParameters {
                cluster: Some(node_parameters::Cluster::ClusterBootstrap(
                    ClusterBootstrap {
                        owner_public_key: SigningKey::from_seed(seed).public().as_bytes().to_vec(),
                        first_contact_secret: secret.to_vec(),
                        initial_cluster_configuration: domain.map(|cluster_domain| {
                            ClusterConfiguration {
                                cluster_domain,
                                storage_security_policy: policy,
                                ..ClusterConfiguration::default()
                            }
                        }),
                        labels,
                        accept_loss: true,
                        ..ClusterBootstrap::default()
                    },
                )),
                network_config: network.map(|([_, b, c, d], length, vlan)| NetworkConfig {
                    addresses: vec![format!("172.{b}.{c}.{d}/{length}")],
                    vlan,
                    ..NetworkConfig::default()
                }),
                wipe: wipe.map(|id| Wipe {
                    enrolment_id: id.to_vec(),
                }),
                time_servers,
                install: None,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn valid_parameters_keep_what_they_say(message in valid()) {
        let parameters = parsed(&message).map_err(TestCaseError::fail)?;
        let Cluster::Bootstrap(bootstrap) = &parameters.cluster else {
            return Err(TestCaseError::fail("not a bootstrap"));
        };
        let Some(node_parameters::Cluster::ClusterBootstrap(asked)) = &message.cluster else {
            unreachable!("as generated");
        };
        prop_assert_eq!(bootstrap.seed.owner.as_bytes().as_slice(), &asked.owner_public_key);
        prop_assert_eq!(bootstrap.seed.first_contact_secret.expose().as_slice(), &asked.first_contact_secret);
        prop_assert_eq!(&bootstrap.seed.labels, &asked.labels);
        prop_assert_eq!(parameters.network.to_message(), message.network_config);
        prop_assert_eq!(
            parameters.wipe.map(|id| id.as_bytes().to_vec()),
            message.wipe.map(|wipe| wipe.enrolment_id)
        );
        let servers: Vec<_> = parameters.time_servers.iter().map(ToString::to_string).collect();
        prop_assert_eq!(servers, message.time_servers);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = parse(&bytes);
    }

    #[test]
    fn damaged_parameters_never_panic(message in valid(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        let mut bytes = message.encode_to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = parse(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = parse(&bytes);
    }
}
