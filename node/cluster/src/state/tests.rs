//! Records as bytes, and back.

use hearth_api::identity::{MeshSecret, SigningKey};
use proptest::prelude::*;

use super::*;

fn id() -> NodeId {
    NodeId::from_bytes([5; 16])
}

fn stored_node() -> StoredNode {
    StoredNode {
        version: VERSION,
        id: id().to_string(),
        public_key: SigningKey::from_seed([1; 32]).public().as_bytes().to_vec(),
        join_key: SigningKey::from_seed([2; 32]).public().as_bytes().to_vec(),
        cluster_unlock_key: vec![7; 32],
        state: NodeState::Up.into(),
        ..Default::default()
    }
}

#[test]
fn keys_read_back() {
    assert_eq!(Key::parse(CLUSTER), Key::Cluster);
    assert_eq!(Key::parse(&node_key(id())), Key::Node(id()));
    assert_eq!(Key::parse(&status_key(id())), Key::Status(id()));
    assert_eq!(Key::parse(&liveness_key(id())), Key::Liveness(id()));
    assert_eq!(Key::parse(&joins_key(id())), Key::Joins(id()));
    assert_eq!(Key::parse(&candidate_key(-1)), Key::Candidate);
    let join_key = SigningKey::from_seed([2; 32]).public();
    let key = join_key_key(&join_key);
    assert_eq!(Key::parse(&key), Key::JoinKey(join_key));
    assert_eq!(decode_owner(&key, id().to_string().as_bytes()), Ok(id()));
    let range: PodRange = "10.208.3.0/24".parse().unwrap();
    let pod_range = pod_range_key(range);
    assert_eq!(pod_range, "networking/ranges/10.208.3.0/24");
    assert_eq!(Key::parse(&pod_range), Key::PodRange(range));
    let public = MeshSecret::generate().public();
    let mesh_key = mesh_key_key(&public);
    assert_eq!(Key::parse(&mesh_key), Key::MeshKey(public));
    assert_eq!(Key::parse("networking/keys/00"), Key::Other);
    assert_eq!(Key::parse("join_keys/xyz"), Key::Other);
    assert_eq!(Key::parse("epoch"), Key::Other);
    assert_eq!(Key::parse("nodes/x"), Key::Other);
    for followed in [
        CLUSTER,
        REGISTER_TICKET,
        &node_key(id()),
        &status_key(id()),
        &liveness_key(id()),
        &joins_key(id()),
        &image_key(&Digest::ZERO),
        &tombstone_key(id()),
        &intent_key(id()),
        &key,
        &pod_range,
        &mesh_key,
        &candidate_key(7),
    ] {
        let by = FOLLOWED.iter().filter(|p| followed.starts_with(**p));
        assert_eq!(by.count(), 1, "{followed}");
    }
    for other in [CLUSTER_AUTHORITY, ETCD_AUTHORITY] {
        assert!(!FOLLOWED.iter().any(|prefix| other.starts_with(prefix)));
    }
}

#[test]
fn a_newer_record_is_told_apart_from_a_broken_one() {
    let key = node_key(id());
    let mut stored = stored_node();
    assert!(NodeRecord::decode(&key, &stored.encode_to_vec()).is_ok());
    stored.version = VERSION + 1;
    assert!(matches!(
        NodeRecord::decode(&key, &stored.encode_to_vec()),
        Err(RecordError::TooNew { found, .. }) if found == VERSION + 1
    ));
    stored.version = 0;
    assert!(matches!(
        NodeRecord::decode(&key, &stored.encode_to_vec()),
        Err(RecordError::Malformed { .. })
    ));
}

#[test]
fn a_record_is_about_its_key() {
    let other = node_key(NodeId::from_bytes([6; 16]));
    let error = NodeRecord::decode(&other, &stored_node().encode_to_vec()).unwrap_err();
    assert!(error.to_string().contains(&id().to_string()), "{error}");
}

#[test]
fn a_node_is_in_a_state_that_this_image_knows() {
    let key = node_key(id());
    let of_state = |state: i32| {
        let stored = StoredNode {
            state,
            ..stored_node()
        };
        let bytes = stored.encode_to_vec();
        let record = NodeRecord::decode(&key, &bytes);
        let full = FullRecord::decode(&key, &bytes).map(|full| full.node);
        assert_eq!(record, full);
        record
    };
    for state in 1..=4 {
        assert_eq!(i32::from(of_state(state).unwrap().state), state);
    }
    for found in [0, 5, -1, i32::MAX] {
        let error = of_state(found).unwrap_err();
        assert!(
            matches!(&error, RecordError::Field { key: of, field: "state", found: n, .. }
                if *of == key && *n == found),
            "{error}"
        );
        let message = error.to_string();
        for part in [&key, "state", "NEW", &found.to_string()] {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn a_node_without_a_usable_key_is_none() {
    let mut stored = stored_node();
    stored.public_key = vec![0; 32];
    assert!(NodeRecord::decode(&node_key(id()), &stored.encode_to_vec()).is_err());
    let mut stored = stored_node();
    stored.join_key.clear();
    assert!(NodeRecord::decode(&node_key(id()), &stored.encode_to_vec()).is_err());
}

#[test]
fn intents_and_tombstones_read_back() {
    for wanted in [
        Wanted::Join { member: None },
        Wanted::Join { member: Some(7) },
        Wanted::Leave { decommission: true },
    ] {
        let intent = Intent {
            node: id(),
            wanted,
            attempts: 2,
            replaces: None,
        };
        assert_eq!(
            Intent::decode(&intent_key(id()), &intent.encode()),
            Ok(intent)
        );
    }
    let tombstone = Tombstone {
        id: id(),
        public_key: SigningKey::from_seed([1; 32]).public(),
        join_key: SigningKey::from_seed([2; 32]).public(),
        afterwards: AfterRemoval::Reset,
    };
    let key = tombstone_key(id());
    assert_eq!(Tombstone::decode(&key, &tombstone.encode()), Ok(tombstone));
    assert_eq!(Key::parse(&key), Key::Tombstone(id()));
    assert_eq!(Key::parse(&intent_key(id())), Key::Intent(id()));
    assert_eq!(Key::parse(REGISTER_TICKET), Key::RegisterTicket);
}

#[test]
fn a_ticket_reads_back() {
    let ticket = Ticket::from_bytes([3; 32]);
    let stored = encode_ticket(&ticket);
    assert_eq!(decode_ticket(REGISTER_TICKET, &stored), Ok(ticket));
}

#[test]
fn a_full_record_reads_back() {
    let key = node_key(id());
    let bytes = stored_node().encode_to_vec();
    let full = FullRecord::decode(&key, &bytes).unwrap();
    assert_eq!(full.encode()[..], bytes[..]);
    assert!(full.unlock_key.is_some() && full.certificate.is_none());
    assert_eq!(NodeRecord::decode(&key, &bytes), Ok(full.node));
}

#[test]
fn liveness_and_candidates_read_back() {
    for record in [
        LivenessRecord::HeardBy(id()),
        LivenessRecord::GivenUp,
        LivenessRecord::Ended,
    ] {
        assert_eq!(
            LivenessRecord::decode("liveness/x", &record.encode("boot")),
            Ok((record, "boot".to_owned()))
        );
    }
    assert_eq!(decode_candidate("x", &encode_candidate(id())), Ok(id()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn arbitrary_bytes_are_a_record_or_an_error(key: String, bytes: Vec<u8>) {
        let _ = Key::parse(&key);
        let _ = NodeRecord::decode(&key, &bytes);
        let _ = ClusterRecord::decode(&key, &bytes);
        let _ = LivenessRecord::decode(&key, &bytes);
        let _ = Tombstone::decode(&key, &bytes);
        let _ = Intent::decode(&key, &bytes);
        let _ = FullRecord::decode(&key, &bytes);
        let _ = FullCluster::decode(&key, &bytes);
        let _ = decode_ticket(&key, &bytes);
        let _ = decode_owner(&key, &bytes);
        let _ = decode_status(&key, &bytes);
        let _ = decode_joins(&key, &bytes);
        let _ = decode_candidate(&key, &bytes);
    }

    #[test]
    fn a_damaged_record_is_a_record_or_an_error(at: prop::sample::Index, value: u8, cut: prop::sample::Index) {
        let mut bytes = stored_node().encode_to_vec();
        let index = at.index(bytes.len());
        bytes[index] = value;
        bytes.truncate(cut.index(bytes.len() + 1));
        if let Ok(record) = NodeRecord::decode(&node_key(id()), &bytes) {
            prop_assert_eq!(record.id, id());
        }
    }
}
