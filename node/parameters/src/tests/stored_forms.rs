//! The stored form of parameters.

use hearth_api::settings::with_defaults;
use hearth_api::v1::AdmissionPolicy;
use hearth_api::{fixture, stored_form};

use super::*;

/// The CA certificate in a fixture or, if the fixture does not exist yet, a new one.
fn stored_ca(fixture: &[u8]) -> Vec<u8> {
    match NodeParameters::decode(fixture).unwrap().cluster {
        Some(node_parameters::Cluster::ClusterRegister(register)) => register.ca_certificate,
        _ => register().ca_certificate,
    }
}

/// Parameters as installers write them on the ESP.
#[test]
fn the_stored_form_stays() {
    let labels = vec![Label {
        key: "zone".into(),
        value: "b".into(),
    }];
    let network = NetworkConfig {
        mac: "52:54:00:12:34:56".into(),
        addresses: vec!["192.0.2.10/24".into()],
        routes: vec![network_config::Route {
            destination: "0.0.0.0/0".into(),
            gateway: "192.0.2.1".into(),
        }],
        nameservers: vec!["192.0.2.53".into()],
        vlan: 7,
        ..NetworkConfig::default()
    };
    let asked = ClusterBootstrap {
        initial_cluster_configuration: Some(ClusterConfiguration {
            cluster_domain: "example.internal".into(),
            tpm_mode: TpmMode::Disabled.into(),
            storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
            cold_start_policy: ColdStartPolicy::None.into(),
            kubernetes: Some(KubernetesConfiguration {
                synchronized_labels: vec!["zone".into()],
                ..KubernetesConfiguration::default()
            }),
            curator_session_seconds: 0,
            time_servers: Vec::new(),
            certificate_lifetime_seconds: 0,
            certificate_names: Vec::new(),
            admission_policy: 0,
            damaged_member_policy: 0,
        }),
        initial_roles: Some(NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember { member_id: 0 }),
            kubernetes_worker: Some(node_roles::KubernetesWorker {}),
            ..NodeRoles::default()
        }),
        labels: labels.clone(),
        recovery_recipient: Vec::new(),
        ..bootstrap()
    };
    let whole = |asked: &ClusterBootstrap| NodeParameters {
        network_config: Some(network.clone()),
        wipe: Some(Wipe {
            enrolment_id: vec![4; 16],
        }),
        ..founding(asked.clone())
    };
    // Of a release in which nobody had to accept the loss.
    let message = whole(&asked);
    let stored = stored_form!("parameters-bootstrap.pb", message.encode_to_vec());
    let refused = parse(&stored).unwrap_err().to_string();
    assert!(
        refused.contains("cluster_bootstrap.accept_loss: expected true"),
        "{refused}"
    );

    let asked = ClusterBootstrap {
        accept_loss: true,
        recovery_recipient: recipient().as_bytes().to_vec(),
        ..asked
    };
    let message = whole(&asked);
    let stored = stored_form!("parameters-bootstrap-recovery.pb", message.encode_to_vec());
    let read = parse(&stored).unwrap();
    let Cluster::Bootstrap(found) = read.cluster else {
        panic!("not a bootstrap");
    };
    assert_eq!(found.seed.owner, SigningKey::from_seed([1; 32]).public());
    assert_eq!(found.seed.first_contact_secret.expose(), &[2; 32]);
    assert_eq!(found.seed.recovery_recipient, Some(recipient()));
    assert!(found.accept_loss);
    let mut complete = with_defaults(asked.initial_cluster_configuration.unwrap_or_default());
    complete.set_admission_policy(AdmissionPolicy::Any);
    assert_eq!(found.seed.configuration, complete);
    assert_eq!(found.roles, asked.initial_roles);
    assert_eq!(found.seed.labels, labels);
    assert_eq!(read.network.to_message(), Some(network));
    assert_eq!(read.wipe, Some(EnrolmentId::from_bytes([4; 16])));

    let ca = stored_ca(fixture!("parameters-register.pb"));
    let message = registering(ClusterRegister {
        ca_certificate: ca.clone(),
        labels: labels.clone(),
        ..register()
    });
    let stored = stored_form!("parameters-register.pb", message.encode_to_vec());
    let read = parse(&stored).unwrap();
    let Cluster::Register(found) = read.cluster else {
        panic!("not a registration");
    };
    assert_eq!(Some(found.directory), register().cluster_directory);
    assert_eq!(found.ticket.expose(), &[3; 32]);
    assert_eq!(found.ca[..], ca);
    assert_eq!(found.labels, labels);
    assert!(read.network == Network::default() && read.wipe.is_none());
}
