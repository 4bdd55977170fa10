//! The encoding of the records in etcd, compared with fixtures.

use hearth_api::identity::{ClusterUnlockKey, MeshSecret, OwnerKey, SigningKey};
use hearth_api::ownership::Replacement;
use hearth_api::recovery::RecoveryKey;
use hearth_api::v1::{
    ClusterState, ConsensusProgress, KubernetesConfiguration, MemberStarts, NodeCondition,
    RecordedSettings, StorageSecurity, StorageSecurityPolicy, StorageStatus, TpmMode, node_roles,
};
use hearth_api::{fixture, stored_form};
use hearth_tpm::attestation::EndorsementKey;
use hearth_tpm::images::TrustedImage;

use super::*;

fn id() -> NodeId {
    NodeId::from_bytes([0x11; 16])
}

fn public_key(seed: u8) -> PublicKey {
    SigningKey::from_seed([seed; 32]).public()
}

fn mesh_key() -> MeshKey {
    MeshSecret::try_from(&[0x11; 32][..]).unwrap().public()
}

fn range() -> PodRange {
    "10.208.3.0/24".parse().unwrap()
}

/// A node with all fields set.
fn full_node() -> FullRecord {
    FullRecord {
        node: NodeRecord {
            id: id(),
            public_key: public_key(0x22),
            join_key: public_key(0x33),
            state: NodeState::Up,
            roles: NodeRoles {
                consensus_member: Some(node_roles::ConsensusMember {
                    member_id: 0x0102_0304_0506_0708,
                }),
                kubernetes_controller: Some(node_roles::KubernetesController {}),
                kubernetes_worker: Some(node_roles::KubernetesWorker {}),
            },
            labels: vec![
                Label {
                    key: "zone".into(),
                    value: "b".into(),
                },
                Label {
                    key: "example.org/rack".into(),
                    value: String::new(),
                },
            ],
            settings: Vec::new(),
            tpm_usage: TpmUsage::PresentButUnused,
            storage_security: StorageSecurity::Encrypted,
            decommissioning: true,
            networking: Some(Networking {
                key: mesh_key(),
                range: range(),
            }),
        },
        unlock_key: Some(ClusterUnlockKey::from_bytes([0x44; 32])),
        certificate: Some(b"a certificate".to_vec().into()),
    }
}

/// A node that has only registered.
fn new_node() -> FullRecord {
    let full = full_node();
    FullRecord {
        node: NodeRecord {
            state: NodeState::New,
            roles: NodeRoles::default(),
            labels: Vec::new(),
            settings: Vec::new(),
            tpm_usage: TpmUsage::NotPresent,
            storage_security: StorageSecurity::Unspecified,
            decommissioning: false,
            networking: None,
            ..full.node
        },
        unlock_key: None,
        certificate: None,
    }
}

fn read_node(stored: &[u8], wanted: &FullRecord) {
    let key = node_key(id());
    assert_eq!(NodeRecord::decode(&key, stored).as_ref(), Ok(&wanted.node));
    let read = FullRecord::decode(&key, stored).unwrap();
    assert_eq!(read.node, wanted.node);
    assert_eq!(read.unlock_key, wanted.unlock_key);
    assert_eq!(read.certificate, wanted.certificate);
}

#[test]
fn the_stored_form_of_nodes_stays() {
    let node = full_node();
    read_node(&stored_form!("etcd-node.pb", node.encode()), &node);
    let node = new_node();
    read_node(&stored_form!("etcd-node-new.pb", node.encode()), &node);
    let mut node = full_node();
    node.node.settings = vec![NodeSetting {
        name: "reserved.memory".into(),
        value: "512Mi".into(),
    }];
    read_node(&stored_form!("etcd-node-settings.pb", node.encode()), &node);
    let mut node = full_node();
    node.decommission();
    let stored = stored_form!("etcd-node-decommissioned.pb", node.encode());
    read_node(&stored, &node);

    let tombstone = Tombstone {
        id: id(),
        public_key: public_key(0x22),
        join_key: public_key(0x33),
        afterwards: AfterRemoval::Wait,
    };
    let stored = stored_form!("etcd-tombstone.pb", tombstone.encode());
    let key = tombstone_key(id());
    assert_eq!(Tombstone::decode(&key, &stored), Ok(tombstone));
}

/// Written at bootstrap, and by the test of that module, too.
#[test]
fn the_stored_form_of_the_cluster_stays() {
    let stored = fixture!("etcd-cluster.pb");
    let cluster = ClusterRecord::decode(CLUSTER, stored).unwrap();
    let configuration = ClusterConfiguration {
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
    };
    assert_eq!(cluster.id, ClusterId::from_bytes([0x55; 16]));
    let mut complete = settings::with_defaults(configuration.clone());
    complete.set_admission_policy(AdmissionPolicy::Any);
    assert_eq!(cluster.configuration, complete);
    assert_eq!(cluster.owner, public_key(0x66));
    assert_eq!(cluster.first_contact_secret.expose(), &[0x77; 32]);
    let recipient = RecoveryRecipient::from_field(&[0x99; 32]).unwrap();
    assert_eq!(cluster.recovery_recipient, recipient);
    let full = FullCluster::decode(CLUSTER, stored).unwrap();
    assert_eq!(full.configuration(), configuration);
    assert_eq!(full.encode_with(configuration.clone())[..], *stored);
    let longer = ClusterConfiguration {
        curator_session_seconds: 20,
        time_servers: Vec::new(),
        ..configuration
    };
    let written = full.encode_with(longer.clone());
    let written = stored_form!("etcd-cluster-session.pb", written);
    let full_again = FullCluster::decode(CLUSTER, &written).unwrap();
    assert_eq!(full_again.configuration(), longer);
    let replacement = Replacement::sign(
        ClusterId::from_bytes([0x55; 16]),
        &OwnerKey::from_seed([0x66; 32]),
        &OwnerKey::from_seed([0xaa; 32]),
        RecoveryKey::from_bytes([0xbb; 32]).recipient(),
    );
    let written = full.encode_replaced(&replacement);
    let written = stored_form!("etcd-cluster-replaced.pb", written);
    let replaced = ClusterRecord::decode(CLUSTER, &written).unwrap();
    assert_eq!(replaced.owner, OwnerKey::from_seed([0xaa; 32]).public());
    let recipient = RecoveryKey::from_bytes([0xbb; 32]).recipient();
    assert_eq!(replaced.recovery_recipient, Some(recipient));
    assert_eq!(replaced.owner_replacements, [replacement]);
    let written = full.encode_with(ClusterConfiguration::default());
    let stored = stored_form!("etcd-cluster-reconfigured.pb", written);
    let cluster = ClusterRecord::decode(CLUSTER, &stored).unwrap();
    let defaults = settings::with_defaults(ClusterConfiguration {
        cold_start_policy: ColdStartPolicy::None.into(),
        admission_policy: AdmissionPolicy::Any.into(),
        ..ClusterConfiguration::default()
    });
    assert_eq!(cluster.configuration, defaults);
    assert_eq!(cluster.owner, public_key(0x66));
}

#[test]
fn the_stored_form_of_intents_stays() {
    let read = |stored: &[u8], wanted: Intent| {
        assert_eq!(Intent::decode(&intent_key(id()), stored), Ok(wanted));
    };
    let intent = |wanted, attempts| Intent {
        node: id(),
        wanted,
        attempts,
        replaces: None,
    };
    let made = intent(Wanted::Join { member: None }, 0);
    read(&stored_form!("etcd-intent-join.pb", made.encode()), made);
    let member = Some(0x0102_0304_0506_0708);
    let made = intent(Wanted::Join { member }, 2);
    read(&stored_form!("etcd-intent-joining.pb", made.encode()), made);
    let made = Intent {
        replaces: Some(0x1112_1314_1516_1718),
        ..made
    };
    read(
        &stored_form!("etcd-intent-replacing.pb", made.encode()),
        made,
    );
    let decommission = false;
    let made = intent(Wanted::Leave { decommission }, 0);
    read(&stored_form!("etcd-intent-leave.pb", made.encode()), made);
    let decommission = true;
    let made = intent(Wanted::Leave { decommission }, 0);
    read(
        &stored_form!("etcd-intent-decommission.pb", made.encode()),
        made,
    );
}

#[test]
fn the_stored_form_of_a_ticket_stays() {
    let ticket = Ticket::from_bytes([0x88; 32]);
    let stored = stored_form!("etcd-register-ticket.pb", encode_ticket(&ticket));
    assert_eq!(decode_ticket(REGISTER_TICKET, &stored), Ok(ticket));
}

#[test]
fn the_stored_form_of_what_is_heard_of_a_node_stays() {
    let status = NodeStatus {
        external_address: "192.0.2.7".into(),
        curator_port: 7835,
        version: "1.2.3".into(),
        boot_id: "b0071d00-0000-4000-8000-000000000001".into(),
        sent_at: 1_700_000_000,
        cluster_state: ClusterState::Home.into(),
        consensus: Some(ConsensusProgress {
            member_id: 0x0102_0304_0506_0708,
            learner: true,
            applied_index: 300,
        }),
        address_counter: 9,
        conditions: vec![NodeCondition {
            r#type: "KubernetesWorker".into(),
            met: false,
            reason: "NotInstalled".into(),
            message: "there is none".into(),
        }],
        recorded_settings: None,
        time: None,
        second_address: String::new(),
        damaged_member_id: None,
        etcd_starts: None,
        storage: None,
    };
    let stored = stored_form!("etcd-status.pb", encode_status(status.clone()));
    assert_eq!(
        decode_status(&status_key(id()), &stored),
        Ok(status.clone())
    );
    let status = NodeStatus {
        recorded_settings: Some(RecordedSettings {
            cold_start_policy: ColdStartPolicy::Owner.into(),
            recovery_recipient: vec![0x99; 32],
            owner_public_key: vec![0xaa; 32],
        }),
        ..status
    };
    let stored = stored_form!("etcd-status-recorded.pb", encode_status(status.clone()));
    assert_eq!(
        decode_status(&status_key(id()), &stored),
        Ok(status.clone())
    );
    let status = NodeStatus {
        second_address: "2001:db8::7".into(),
        ..status
    };
    let stored = stored_form!(
        "etcd-status-second-address.pb",
        encode_status(status.clone())
    );
    assert_eq!(
        decode_status(&status_key(id()), &stored),
        Ok(status.clone())
    );
    let status = NodeStatus {
        damaged_member_id: Some(0),
        ..status
    };
    let stored = stored_form!("etcd-status-damaged.pb", encode_status(status.clone()));
    assert_eq!(
        decode_status(&status_key(id()), &stored),
        Ok(status.clone())
    );
    let status = NodeStatus {
        etcd_starts: Some(MemberStarts {
            member_id: 0x0102_0304_0506_0708,
            count: 9,
        }),
        ..status
    };
    let stored = stored_form!("etcd-status-starts.pb", encode_status(status.clone()));
    assert_eq!(
        decode_status(&status_key(id()), &stored),
        Ok(status.clone())
    );
    let status = NodeStatus {
        storage: Some(StorageStatus {
            security: StorageSecurity::Encrypted.into(),
            cipher: "capi:xts(aes)-plain64".into(),
        }),
        ..status
    };
    let stored = stored_form!("etcd-status-storage.pb", encode_status(status.clone()));
    assert_eq!(decode_status(&status_key(id()), &stored), Ok(status));

    let key = liveness_key(id());
    let boot_id = "b0071d00-0000-4000-8000-000000000001";
    let read = |stored: &[u8], wanted| {
        let read = LivenessRecord::decode(&key, stored);
        assert_eq!(read, Ok((wanted, boot_id.to_owned())));
    };
    let record = LivenessRecord::HeardBy(NodeId::from_bytes([0x99; 16]));
    let written = record.encode(boot_id);
    read(&stored_form!("etcd-liveness.pb", written), record);
    let record = LivenessRecord::GivenUp;
    let written = record.encode(boot_id);
    read(&stored_form!("etcd-liveness-given-up.pb", written), record);

    let record = LivenessRecord::Ended;
    let written = record.encode(boot_id);
    read(&stored_form!("etcd-liveness-ended.pb", written), record);

    let joins = vec![NodeJoin {
        time: 1_700_000_000,
        address: "192.0.2.7".into(),
        boot_id: boot_id.into(),
        image: Vec::new(),
    }];
    let stored = stored_form!("etcd-joins.pb", encode_joins(joins.clone()));
    assert_eq!(decode_joins(&joins_key(id()), &stored), Ok(joins));

    let stored = stored_form!("etcd-candidate.pb", encode_candidate(id()));
    assert_eq!(decode_candidate(&candidate_key(7), &stored), Ok(id()));
}

#[test]
fn the_stored_form_of_admission_stays() {
    let trusted = Trusted {
        image: TrustedImage {
            parts: Digest([0x11; 32]),
            programs: vec![Digest([0x21; 32]), Digest([0x22; 32]), Digest([0x23; 32])],
            command_lines: vec![Digest([0x31; 32])],
        },
        since: 1_700_000_000,
    };
    let stored = stored_form!("etcd-image.pb", trusted.clone().encode());
    let key = image_key(&trusted.image.parts);
    assert_eq!(Trusted::decode(&key, &stored), Ok(trusted));

    let point = [&[0, 32][..], &[0x41; 32], &[0, 31], &[0x42; 31]].concat();
    let endorsement = Endorsement {
        key: EndorsementKey::from_bytes(&point).unwrap(),
        certificate: vec![0x30, 0],
    };
    let stored = stored_form!("etcd-endorsement.pb", endorsement.encode());
    let key = endorsement_key(id());
    assert_eq!(Endorsement::decode(&key, &stored), Ok(endorsement));

    let keys = format!("{}\n{key}\n", image_key(&Digest([0x11; 32])));
    let stored = stored_form!("etcd-keys-admission.txt", keys);
    let keys = String::from_utf8(stored).unwrap();
    let keys: Vec<Key> = keys.lines().map(Key::parse).collect();
    assert_eq!(keys, [Key::Image(Digest([0x11; 32])), Key::Other]);
}

/// The node ID stored at a join key, a mesh key, a pod range and at the last departure.
#[test]
fn the_stored_form_of_owners_stays() {
    let stored = stored_form!("etcd-owner.txt", id().to_string());
    for key in [
        join_key_key(&public_key(0x33)),
        pod_range_key(range()),
        mesh_key_key(&mesh_key()),
    ] {
        assert_eq!(decode_owner(&key, &stored), Ok(id()));
    }
}

/// Keys are part of the stored format, too. One per line, without the curators' prefix.
#[test]
fn the_stored_keys_stay() {
    let join_key = public_key(0x33);
    let keys = [
        (CLUSTER.to_owned(), Key::Cluster),
        (CLUSTER_AUTHORITY.to_owned(), Key::Other),
        (ETCD_AUTHORITY.to_owned(), Key::Other),
        (REGISTER_TICKET.to_owned(), Key::RegisterTicket),
        (DEPARTURE.to_owned(), Key::Other),
        (node_key(id()), Key::Node(id())),
        (status_key(id()), Key::Status(id())),
        (liveness_key(id()), Key::Liveness(id())),
        (tombstone_key(id()), Key::Tombstone(id())),
        (intent_key(id()), Key::Intent(id())),
        (join_key_key(&join_key), Key::JoinKey(join_key)),
        (pod_range_key(range()), Key::PodRange(range())),
        (mesh_key_key(&mesh_key()), Key::MeshKey(mesh_key())),
        (candidate_key(0x0102_0304), Key::Candidate),
    ];
    let written: String = keys.iter().map(|(key, _)| format!("{key}\n")).collect();
    let stored = stored_form!("etcd-keys.txt", written);
    let stored = String::from_utf8(stored).unwrap();
    for (key, (_, wanted)) in stored.lines().zip(keys) {
        assert_eq!(Key::parse(key), wanted, "{key}");
    }
    // Of later releases.
    let written = format!("{}\n", joins_key(id()));
    let stored = stored_form!("etcd-keys-joins.txt", written);
    let key = String::from_utf8(stored).unwrap();
    assert_eq!(Key::parse(key.trim()), Key::Joins(id()));
}
