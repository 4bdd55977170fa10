//! The stored form of the sealed configuration, against the fixtures.

use std::fs;

use hearth_api::identity::{FirstContactSecret, SigningKey};
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::stored_form;
use hearth_api::v1::{
    ClusterConfiguration, KubernetesConfiguration, NetworkConfig, StorageSecurityPolicy, TpmMode,
    cluster_directory, network_config, node_roles,
};
use hearth_host::layout::Root;
use hearth_parameters::{ClusterSeed, Network};

use super::*;

fn ca() -> CertificateDer<'static> {
    CertificateDer::from(b"an authority".to_vec())
}

fn owner() -> PublicKey {
    SigningKey::from_seed([0x41; 32]).public()
}

fn labels() -> Vec<Label> {
    [("zone", "b"), ("example.org/rack", "")]
        .map(|(key, value)| Label {
            key: key.into(),
            value: value.into(),
        })
        .to_vec()
}

fn network() -> Network {
    let message = NetworkConfig {
        mac: "52:54:00:12:34:56".into(),
        addresses: vec!["192.0.2.10/24".into(), "2001:db8::10/64".into()],
        routes: [("0.0.0.0/0", "192.0.2.1"), ("198.51.100.0/24", "")]
            .map(|(destination, gateway)| network_config::Route {
                destination: destination.into(),
                gateway: gateway.into(),
            })
            .to_vec(),
        nameservers: vec!["192.0.2.53".into()],
        vlan: 7,
        ..NetworkConfig::default()
    };
    Network::parse(message).unwrap()
}

fn roles() -> NodeRoles {
    NodeRoles {
        consensus_member: Some(node_roles::ConsensusMember { member_id: 0 }),
        kubernetes_controller: Some(node_roles::KubernetesController {}),
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
    }
}

fn identity() -> Identity {
    Identity {
        enrolment_id: EnrolmentId::from_bytes([0x11; 16]),
        cluster_id: ClusterId::from_bytes([0x22; 16]),
        node_id: NodeId::from_bytes([0x33; 16]),
        node_unlock_key: NodeUnlockKey::from_bytes([0x44; 32]),
        join_key: JoinKey::from_seed([0x55; 32]),
        storage_security: StorageSecurity::Encrypted,
        tpm_usage: TpmUsage::PresentButUnused,
        cold_start_policy: ColdStartPolicy::Owner,
        key_epoch: 3,
        network: network(),
    }
}

fn recipient() -> RecoveryRecipient {
    RecoveryRecipient::try_from(&[0x99; 32][..]).unwrap()
}

/// With the minimum of fields.
fn founding() -> Founding {
    Founding {
        identity: Identity {
            storage_security: StorageSecurity::Insecure,
            tpm_usage: TpmUsage::NotPresent,
            cold_start_policy: ColdStartPolicy::None,
            key_epoch: 0,
            network: Network::default(),
            ..identity()
        },
        node_key: NodeKey::from_seed([0x66; 32]),
        cluster_unlock_key: ClusterUnlockKey::from_bytes([0x77; 32]),
        recovery: None,
        cluster_ca: None,
        seed: ClusterSeed {
            owner: owner(),
            first_contact_secret: FirstContactSecret::from_bytes([0x88; 32]),
            recovery_recipient: None,
            configuration: ClusterConfiguration::default(),
            labels: Vec::new(),
            manifests: Vec::new(),
        },
        roles: NodeRoles::default(),
    }
}

/// With all fields.
fn full_founding() -> Founding {
    Founding {
        identity: identity(),
        cluster_ca: Some(ca()),
        seed: ClusterSeed {
            recovery_recipient: Some(recipient()),
            configuration: ClusterConfiguration {
                cluster_domain: "example.internal".into(),
                tpm_mode: TpmMode::BestEffort.into(),
                storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
                cold_start_policy: ColdStartPolicy::Owner.into(),
                kubernetes: Some(KubernetesConfiguration {
                    synchronized_labels: vec!["zone".into(), "example.org/*".into()],
                    ..KubernetesConfiguration::default()
                }),
                curator_session_seconds: 0,
                time_servers: Vec::new(),
                certificate_lifetime_seconds: 0,
                certificate_names: Vec::new(),
                admission_policy: 0,
                damaged_member_policy: 0,
            },
            labels: labels(),
            ..founding().seed
        },
        roles: roles(),
        ..founding()
    }
}

fn registering() -> Registering {
    let founding = founding();
    Registering {
        enrolment_id: founding.identity.enrolment_id,
        node_id: founding.identity.node_id,
        node_key: founding.node_key,
        node_unlock_key: founding.identity.node_unlock_key,
        cluster_unlock_key: founding.cluster_unlock_key,
        join_key: founding.identity.join_key,
        cluster_ca: ca(),
        asking: Asking {
            directory: ClusterDirectory {
                nodes: vec![cluster_directory::Node {
                    id: NodeId::from_bytes([0xaa; 16]).to_string(),
                    addresses: vec![cluster_directory::Address {
                        host: "192.0.2.1".into(),
                        port: 7835,
                    }],
                    roles: Some(roles()),
                }],
            },
            ticket: Ticket::from_bytes([0xbb; 32]),
            labels: labels(),
        },
        answer: None,
        network: network(),
    }
}

fn answered() -> Registering {
    Registering {
        answer: Some(Answer {
            cluster_id: ClusterId::from_bytes([0x22; 16]),
            storage_security: StorageSecurity::AuthenticatedEncrypted,
            tpm_usage: TpmUsage::PresentAndUsed,
            cold_start_policy: ColdStartPolicy::Tpm,
        }),
        network: Network::default(),
        ..registering()
    }
}

fn member() -> Member {
    full_founding().into_member(ca())
}

/// A member that has registered and does not know the owner.
fn ownerless() -> Member {
    Member {
        cluster_unlock_key: None,
        ..that_opens_itself()
    }
}

/// The same, with both halves of its key.
fn that_opens_itself() -> Member {
    let registering = answered();
    let answer = registering.answer.clone().unwrap();
    registering.into_member(&answer, None, None)
}

/// A member that its owner can unlock.
fn recoverable() -> Member {
    Member {
        recovery: Some(Recovery {
            recipient: recipient(),
            wrapped_key: WrappedKey::try_from(&[0xcc; 80][..]).unwrap(),
        }),
        ..member()
    }
}

/// An answer to a machine whose TPM is not used, so that its record is plain.
fn answered_without_tpm() -> Registering {
    let answer = answered().answer.map(|answer| Answer {
        tpm_usage: TpmUsage::PresentButUnused,
        ..answer
    });
    Registering {
        answer,
        ..answered()
    }
}

/// Asserts that the fixture decodes to this configuration.
fn read(bytes: &[u8], wanted: &Sealed) {
    let read = Sealed::decode(bytes).unwrap();
    assert!(read.is_same(wanted), "{read:?}");
    assert_eq!(format!("{read:?}"), format!("{wanted:?}"));
}

#[test]
fn the_stored_form_stays() {
    let sealed = Sealed::Founding(Arc::new(founding()));
    read(
        &stored_form!("sealed-founding.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Founding(Arc::new(full_founding()));
    read(
        &stored_form!("sealed-founding-full.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Registering(Arc::new(registering()));
    read(
        &stored_form!("sealed-registering.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Registering(Arc::new(answered()));
    read(
        &stored_form!("sealed-registering-answered.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Member(Arc::new(member()));
    read(&stored_form!("sealed-member.pb", sealed.encode()), &sealed);
    let sealed = Sealed::Member(Arc::new(ownerless()));
    read(
        &stored_form!("sealed-member-ownerless.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Member(Arc::new(that_opens_itself()));
    read(
        &stored_form!("sealed-member-with-both-keys.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Member(Arc::new(recoverable()));
    read(
        &stored_form!("sealed-member-recoverable.pb", sealed.encode()),
        &sealed,
    );
    let sealed = Sealed::Disowned(member().into_disowned(AfterRemoval::Wait));
    read(
        &stored_form!("sealed-disowned.pb", sealed.encode()),
        &sealed,
    );
}

/// Secrets are not printed and hence not compared above.
#[test]
fn the_stored_secrets_are_read() {
    let bytes = hearth_api::fixture!("sealed-founding-full.pb");
    let Sealed::Founding(founding) = Sealed::decode(bytes).unwrap() else {
        panic!("another phase");
    };
    assert_eq!(founding.identity.node_unlock_key.expose(), &[0x44; 32]);
    assert_eq!(*founding.identity.join_key.expose_seed(), [0x55; 32]);
    assert_eq!(*founding.node_key.expose_seed(), [0x66; 32]);
    assert_eq!(founding.cluster_unlock_key.expose(), &[0x77; 32]);
    assert_eq!(founding.seed.first_contact_secret.expose(), &[0x88; 32]);

    let bytes = hearth_api::fixture!("sealed-registering-answered.pb");
    let Sealed::Registering(asking) = Sealed::decode(bytes).unwrap() else {
        panic!("another phase");
    };
    assert_eq!(asking.node_unlock_key.expose(), &[0x44; 32]);
    assert_eq!(*asking.join_key.expose_seed(), [0x55; 32]);
    assert_eq!(*asking.node_key.expose_seed(), [0x66; 32]);
    assert_eq!(asking.cluster_unlock_key.expose(), &[0x77; 32]);
    assert_eq!(asking.asking, registering().asking);

    let bytes = hearth_api::fixture!("sealed-member-with-both-keys.pb");
    let Sealed::Member(member) = Sealed::decode(bytes).unwrap() else {
        panic!("another phase");
    };
    let key = member.cluster_unlock_key.as_ref();
    assert_eq!(key.unwrap().expose(), &[0x77; 32]);

    let bytes = hearth_api::fixture!("sealed-member.pb");
    let Sealed::Member(member) = Sealed::decode(bytes).unwrap() else {
        panic!("another phase");
    };
    assert_eq!(member.identity.node_unlock_key.expose(), &[0x44; 32]);
    assert_eq!(*member.identity.join_key.expose_seed(), [0x55; 32]);
}

/// A blank ESP.
fn esp() -> (tempfile::TempDir, Root) {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(directory.path());
    fs::create_dir(root.esp.path()).unwrap();
    root.esp.make_directories().unwrap();
    (directory, root)
}

/// Saves it and returns the content of both slots.
fn saved(root: &Root, store: &SealedStore, sealed: &Sealed) -> Vec<u8> {
    store.save(sealed).unwrap();
    let [a, b] = root
        .esp
        .sealed_configuration()
        .paths()
        .map(|path| fs::read(path).unwrap());
    assert_eq!(a, b);
    a
}

/// Either slot of the fixture decodes to this configuration.
fn load(slot: &[u8], wanted: &Sealed) {
    for only in [0, 1] {
        let (_directory, root) = esp();
        fs::write(&root.esp.sealed_configuration().paths()[only], slot).unwrap();
        // The first slot alone may be the result of an interrupted first save.
        let Stored::Sealed(read) = SealedStore::new(&root.esp, None).load().unwrap() else {
            panic!("not read");
        };
        assert!(read.is_same(wanted), "{read:?}");
    }
}

/// All phases of an enrolment on one ESP: the generation increases, and a longer content is
/// overwritten.
#[test]
fn the_stored_slots_stay() {
    let (_directory, root) = esp();
    let store = SealedStore::new(&root.esp, None);
    let names = root.esp.sealed_configuration().paths();
    let names = names.map(|path| {
        let path = path.strip_prefix(root.esp.path()).unwrap();
        path.display().to_string()
    });
    assert_eq!(
        names,
        [
            "hearth/sealed_configuration.0",
            "hearth/sealed_configuration.1"
        ]
    );

    let sealed = Sealed::Founding(Arc::new(full_founding()));
    let written = saved(&root, &store, &sealed);
    load(&stored_form!("sealed-1-founding.slot", written), &sealed);
    let sealed = Sealed::Member(Arc::new(member()));
    let written = saved(&root, &store, &sealed);
    load(&stored_form!("sealed-2-member.slot", written), &sealed);
    let sealed = Sealed::Disowned(member().into_disowned(AfterRemoval::Wait));
    let written = saved(&root, &store, &sealed);
    load(&stored_form!("sealed-3-disowned.slot", written), &sealed);

    let (_directory, root) = esp();
    let store = SealedStore::new(&root.esp, None);
    let sealed = Sealed::Registering(Arc::new(registering()));
    let written = saved(&root, &store, &sealed);
    load(&stored_form!("sealed-1-registering.slot", written), &sealed);
    let sealed = Sealed::Registering(Arc::new(answered_without_tpm()));
    let written = saved(&root, &store, &sealed);
    load(
        &stored_form!("sealed-2-registering-answered.slot", written),
        &sealed,
    );
}
