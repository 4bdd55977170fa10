use std::collections::BTreeMap;

use hearth_api::identity::{Identity, PublicKey, SigningKey, Ticket, UserName};
use hearth_api::private::{StoredCluster, StoredNode};
use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::{Node, NodeHealth, NodeJoin, NodeState};
use hearth_cluster::state::{Intent, LivenessRecord, Tombstone};
use hearth_consensus::Record;
use proptest::prelude::*;
use prost::Message as _;

use super::*;

const LONG: Duration = Duration::from_secs(3600);

fn id(number: u8) -> NodeId {
    NodeId::from_bytes([number; 16])
}

fn cache() -> Cache {
    Cache::new(id(0), LONG, LONG)
}

fn key_of(number: u8) -> PublicKey {
    SigningKey::from_seed([number; 32]).public()
}

fn record(key: String, value: Vec<u8>, revision: i64) -> Record {
    Record {
        key,
        value,
        create_revision: revision,
        mod_revision: revision,
        lease: 0,
    }
}

fn node(number: u8, state: NodeState, revision: i64) -> Record {
    let stored = StoredNode {
        version: state::VERSION,
        id: id(number).to_string(),
        public_key: key_of(number).as_bytes().to_vec(),
        join_key: key_of(number + 100).as_bytes().to_vec(),
        state: state.into(),
        ..Default::default()
    };
    record(
        state::node_key(id(number)),
        stored.encode_to_vec(),
        revision,
    )
}

fn heard(number: u8, curator: u8, lease: i64, revision: i64) -> Record {
    let value = LivenessRecord::HeardBy(id(curator)).encode("boot");
    Record {
        lease,
        ..record(state::liveness_key(id(number)), value, revision)
    }
}

fn put(cache: &Cache, record: Record) {
    cache.apply(vec![Change::Put(record)]).unwrap();
}

fn delete(cache: &Cache, key: String, revision: i64) {
    cache
        .apply(vec![Change::Deleted { key, revision }])
        .unwrap();
}

fn health(cache: &Cache, number: u8) -> NodeHealth {
    let name = id(number).to_string();
    cache.nodes(|node| node.id == name)[0].health()
}

#[test]
fn a_newer_record_ends_it_and_a_spoilt_one_harms_its_own_node_only() {
    let cache = cache();
    put(&cache, node(1, NodeState::Up, 1));
    put(&cache, node(2, NodeState::Up, 2));
    put(&cache, record(state::node_key(id(1)), vec![0xff], 3));
    assert!(cache.node(id(1)).is_none());
    assert_eq!(cache.unreadable_nodes(), [id(1)].into());
    put(&cache, node(1, NodeState::Up, 4));
    assert!(cache.node(id(1)).is_some());
    assert_eq!(cache.unreadable_nodes(), [].into());
    put(&cache, node(1, NodeState::Unspecified, 5));
    assert!(cache.node(id(1)).is_none());
    assert!(cache.node(id(2)).is_some());
    let newer = StoredNode {
        version: state::VERSION + 1,
        ..Default::default()
    };
    let newer = record(state::node_key(id(3)), newer.encode_to_vec(), 6);
    assert!(matches!(
        cache.apply(vec![Change::Put(newer)]),
        Err(RecordError::TooNew { .. })
    ));
}

#[test]
fn what_is_not_about_nodes_is_found_until_it_is_gone() {
    use hearth_cluster::state::Wanted;
    let cache = cache();
    let (ticket, join_key) = (Ticket::from_bytes([7; 32]), key_of(9));
    let tombstone = Tombstone {
        id: id(2),
        public_key: key_of(2),
        join_key,
        afterwards: AfterRemoval::Wait,
    };
    let intent = Intent {
        node: id(3),
        wanted: Wanted::Join { member: Some(5) },
        attempts: 1,
        replaces: None,
    };
    let stored = state::encode_ticket(&ticket).to_vec();
    let name = id(2).to_string().into_bytes();
    let records = [
        (state::REGISTER_TICKET.to_owned(), stored),
        (state::tombstone_key(id(2)), tombstone.encode()),
        (state::intent_key(id(3)), intent.encode()),
        (state::join_key_key(&join_key), name),
    ];
    for (key, value) in &records {
        put(&cache, record(key.clone(), value.clone(), 4));
    }
    assert!(
        cache
            .ticket()
            .is_some_and(|t| t.content == ticket && t.revision == 4)
    );
    assert_eq!(cache.tombstone(id(2)), Some(tombstone));
    assert_eq!(cache.intent(id(3)).map(|i| i.content), Some(intent));
    assert_eq!(cache.join_key_of(&join_key), Some(id(2)));
    // Deleted by a watch, and by a list without the keys.
    delete(&cache, state::intent_key(id(3)), 5);
    assert!(cache.intent(id(3)).is_none());
    let listing = Listing {
        records: Vec::new(),
        revision: 6,
    };
    cache.replace(listing).unwrap();
    assert!(cache.ticket().is_none() && cache.tombstone(id(2)).is_none());
    assert_eq!(cache.join_key_of(&join_key), None);
    assert_eq!(cache.revision(), 6);
}

#[test]
fn members_are_admitted_by_key_and_standing() {
    let cache = cache();
    let cluster = hearth_api::identity::ClusterId::from_bytes([9; 16]);
    let stored = StoredCluster {
        version: state::VERSION,
        cluster_id: cluster.as_bytes().to_vec(),
        owner_public_key: key_of(7).as_bytes().to_vec(),
        first_contact_secret: vec![1; 32],
        ..Default::default()
    };
    let of = |number| Identity::node(cluster, id(number));
    assert!(matches!(
        cache.admits(&of(1), &key_of(1)),
        Err(NotMember::Unknown(_))
    ));
    put(
        &cache,
        record(state::CLUSTER.into(), stored.encode_to_vec(), 1),
    );
    put(&cache, node(1, NodeState::Up, 2));
    put(&cache, node(2, NodeState::Decommissioned, 3));
    assert_eq!(cache.admits(&of(1), &key_of(1)), Ok(()));
    let other_key = cache.admits(&of(1), &key_of(2));
    assert!(matches!(other_key, Err(NotMember::OtherKey(_))));
    let not_up = cache.admits(&of(2), &key_of(2));
    assert!(matches!(not_up, Err(NotMember::NotUp(..))));
    let owner = Identity::user(cluster, UserName::owner());
    assert_eq!(cache.admits(&owner, &key_of(7)), Ok(()));
    assert!(cache.admits(&owner, &key_of(1)).is_err());
    let else_where = Identity::node(hearth_api::identity::ClusterId::from_bytes([8; 16]), id(1));
    assert!(cache.admits(&else_where, &key_of(1)).is_err());
    let user = Identity::user(cluster, UserName::new("someone").unwrap());
    assert!(cache.admits(&user, &key_of(7)).is_err());
    delete(&cache, state::node_key(id(1)), 9);
    assert!(cache.admits(&of(1), &key_of(1)).is_err());
}

#[test]
fn a_session_is_as_long_as_the_setting_says() {
    let cache = cache();
    assert_eq!(cache.session_length(), Duration::from_secs(6));
    let mut stored = StoredCluster {
        version: state::VERSION,
        cluster_id: vec![9; 16],
        owner_public_key: key_of(7).as_bytes().to_vec(),
        first_contact_secret: vec![1; 32],
        ..Default::default()
    };
    for (revision, setting, expected) in [(1, 0, 6), (2, 20, 20)] {
        let configuration = stored.configuration.get_or_insert_default();
        configuration.curator_session_seconds = setting;
        let stored = stored.encode_to_vec();
        put(&cache, record(state::CLUSTER.into(), stored, revision));
        assert_eq!(cache.session_length(), Duration::from_secs(expected));
    }
}

#[test]
fn what_an_earlier_life_has_left_is_noted_and_not_believed() {
    let cache = cache();
    put(&cache, node(1, NodeState::Up, 1));
    put(&cache, node(2, NodeState::Up, 2));
    put(&cache, heard(1, 0, 77, 3));
    put(&cache, heard(2, 5, 78, 4));
    assert_eq!(health(&cache, 1), NodeHealth::Unknown);
    assert_eq!(health(&cache, 2), NodeHealth::Healthy);
    let former = cache.begin_session(Lease::from_id(80));
    assert_eq!(former.into_iter().collect::<Vec<_>>(), [77]);

    put(&cache, heard(1, 0, 80, 5));
    assert_eq!(health(&cache, 1), NodeHealth::Healthy);
    // The session expires, and the next one begins before the watch reports it.
    let former = cache.begin_session(Lease::from_id(81));
    assert_eq!(former.into_iter().collect::<Vec<_>>(), [80]);
    assert_eq!(health(&cache, 1), NodeHealth::Unknown);
    assert_eq!(health(&cache, 2), NodeHealth::Healthy);
}

#[tokio::test]
async fn the_end_of_a_grace_is_an_event() {
    let cache = Cache::new(id(0), LONG, Duration::from_millis(50));
    put(&cache, node(1, NodeState::Up, 1));
    put(&cache, heard(1, 5, 9, 2));
    delete(&cache, state::liveness_key(id(1)), 3);
    assert_eq!(health(&cache, 1), NodeHealth::Unknown);
    let version = *cache.watch().borrow();
    cache.next_overdue().await;
    cache.mark_overdue();
    assert_eq!(health(&cache, 1), NodeHealth::Timeout);
    let changes = cache.changes_since(version, None, 10, 1 << 20);
    assert_eq!(changes.nodes.len(), 1);
}

#[test]
fn the_oldest_candidate_leads() {
    let cache = cache();
    let candidate = |lease, curator, revision| {
        let value = state::encode_candidate(id(curator));
        Record {
            lease,
            ..record(state::candidate_key(lease), value, revision)
        }
    };
    assert!(cache.leader().is_none());
    put(&cache, candidate(9, 1, 5));
    put(&cache, candidate(3, 2, 6));
    assert_eq!(cache.leader().unwrap().node, id(1));
    delete(&cache, state::candidate_key(9), 7);
    assert_eq!(cache.leader().unwrap().node, id(2));
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, bool),
    Delete(u8),
    Heard(u8),
    Lost(u8),
    GivenUp(u8),
    Ended(u8),
    Joined(u8),
    Relist,
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    let node = 1_u8..6;
    prop_oneof![
        (node.clone(), any::<bool>()).prop_map(|(n, up)| Step::Put(n, up)),
        node.clone().prop_map(Step::Delete),
        node.clone().prop_map(Step::Heard),
        node.clone().prop_map(Step::Lost),
        node.clone().prop_map(Step::GivenUp),
        node.clone().prop_map(Step::Ended),
        node.prop_map(Step::Joined),
        Just(Step::Relist),
        Just(Step::Look),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whenever a subscriber reads, and however small its messages are, it ends up with the current
    /// state.
    #[test]
    fn a_subscriber_ends_with_what_is_there(
        steps in prop::collection::vec(step(), 0..40), most in 1_usize..4,
    ) {
        let cache = cache();
        let mut store = BTreeMap::<String, Record>::new();
        let mut seen = BTreeMap::<String, Node>::new();
        let mut version = 0;
        let mut look = |seen: &mut BTreeMap<String, Node>| loop {
            let changes = cache.changes_since(version, None, most, 1 << 20);
            let end = changes.nodes.is_empty() && changes.tombstones.is_empty();
            version = changes.version;
            let nodes = changes.nodes.into_iter().map(|node| Node::decode(node).unwrap());
            seen.extend(nodes.map(|node| (node.id.clone(), node)));
            for id in changes.tombstones {
                seen.remove(&id);
            }
            if end {
                return;
            }
        };
        for (revision, step) in (1..).zip(steps) {
            let change = match step {
                Step::Put(n, up) => {
                    let state = if up { NodeState::Up } else { NodeState::Standby };
                    Change::Put(node(n, state, revision))
                }
                Step::Heard(n) => Change::Put(heard(n, 5, 1, revision)),
                Step::GivenUp(n) => {
                    let value = LivenessRecord::GivenUp.encode("boot");
                    Change::Put(record(state::liveness_key(id(n)), value, revision))
                }
                Step::Ended(n) => {
                    let value = LivenessRecord::Ended.encode("boot");
                    Change::Put(record(state::liveness_key(id(n)), value, revision))
                }
                Step::Joined(n) => {
                    let join = NodeJoin {
                        time: revision,
                        ..NodeJoin::default()
                    };
                    let value = state::encode_joins(vec![join]);
                    Change::Put(record(state::joins_key(id(n)), value, revision))
                }
                Step::Delete(n) => Change::Deleted { key: state::node_key(id(n)), revision },
                Step::Lost(n) => Change::Deleted { key: state::liveness_key(id(n)), revision },
                Step::Relist => {
                    let records = store.values().cloned().collect();
                    cache.replace(Listing { records, revision }).unwrap();
                    continue;
                }
                Step::Look => {
                    look(&mut seen);
                    continue;
                }
            };
            match &change {
                Change::Put(record) => {
                    store.insert(record.key.clone(), record.clone());
                }
                Change::Deleted { key, .. } => {
                    store.remove(key);
                }
            }
            cache.apply(vec![change]).unwrap();
        }
        look(&mut seen);
        let there: BTreeMap<_, _> =
            cache.nodes(|_| true).into_iter().map(|node| (node.id.clone(), node)).collect();
        prop_assert_eq!(seen, there);
        let all = cache.nodes_after(None, 100);
        let stored = store.keys().filter(|key| key.starts_with("nodes/")).count();
        prop_assert_eq!(all.len(), stored);
    }
}
