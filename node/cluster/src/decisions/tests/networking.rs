//! Model test of pod ranges and mesh keys: requested, changed and released by several nodes at
//! curators whose views lag, and written late, twice or never. After each write no two nodes have
//! the same range or key, and the indexes agree with the records of the nodes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hearth_api::identity::{MeshKey, MeshSecret};
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::node_roles::KubernetesWorker;
use hearth_host::networking::{Networking, PodRange};

use super::super::networking::Found;
use super::*;

const NODES: u8 = 4;
const KEYS: u8 = 5;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A node sends a key. Its record and the indexes are read at different moments.
    Ask {
        node: u8,
        key: u8,
        record: usize,
        rest: usize,
    },
    Sync(usize),
    Deliver(usize),
    Lose(usize),
    /// An operator deletes the node.
    Delete(u8),
    /// It registers, and becomes a worker.
    Add(u8),
    /// An operator adds or removes the role.
    Role(u8, bool),
}

fn key(number: u8) -> MeshKey {
    // Generated once, because that is slow.
    static MADE: LazyLock<Vec<MeshKey>> = LazyLock::new(|| {
        let secrets = (1..=KEYS).map(|number| MeshSecret::try_from(&[number; 32][..]));
        secrets.map(|secret| secret.unwrap().public()).collect()
    });
    MADE[usize::from(number)]
}

fn worker(roles: bool) -> NodeRoles {
    NodeRoles {
        kubernetes_worker: roles.then(KubernetesWorker::default),
        ..Default::default()
    }
}

fn full(node: u8) -> FullRecord {
    FullRecord {
        node: NodeRecord {
            id: id(node),
            public_key: node_key(node),
            join_key: join_key(node),
            state: NodeState::Up,
            roles: worker(true),
            labels: Vec::new(),
            settings: Vec::new(),
            tpm_usage: TpmUsage::NotPresent,
            storage_security: StorageSecurity::Encrypted,
            decommissioning: false,
            networking: None,
        },
        unlock_key: None,
        certificate: None,
    }
}

/// What the curator's cache would return.
fn found(records: &Records, id: NodeId, key: &MeshKey) -> Found {
    let owner = |range| records.at(state::pod_range_key(range), state::decode_owner);
    // The lowest ranges are assigned first, so these are enough.
    let ranges = || PodRange::all(&ClusterRanges::DEFAULT).take(usize::from(NODES) + 1);
    let mut own = ranges().filter_map(|range| Some(owner(range)?.map(|owner| (owner, range))));
    Found {
        own: own
            .find(|at| at.content.0 == id)
            .map(|at| at.map(|(_, range)| range)),
        free: ranges().find(|range| owner(*range).is_none()),
        key_of: records.at(state::mesh_key_key(key), state::decode_owner),
    }
}

fn parts(records: &Records) -> BTreeMap<NodeId, Networking> {
    let nodes = (0..NODES).filter_map(|node| records.node(id(node)));
    nodes
        .filter_map(|node| Some((node.id, node.networking?)))
        .collect()
}

/// Checks that the indexes agree with the records, so that no range or key is assigned twice.
fn check(records: &Records) {
    let mut wanted = BTreeMap::new();
    for (id, networking) in parts(records) {
        for key in [
            state::pod_range_key(networking.range),
            state::mesh_key_key(&networking.key),
        ] {
            let owner = wanted.insert(key.clone(), id.to_string().into_bytes());
            assert_eq!(owner, None, "{key} is two nodes'");
        }
    }
    let indexes = records.store.iter();
    let indexes = indexes.filter(|(key, _)| key.starts_with("networking/"));
    let indexes = indexes.map(|(key, (value, ..))| (key.clone(), value.clone()));
    assert_eq!(indexes.collect::<BTreeMap<_, _>>(), wanted);
}

/// Operators' writes are decided and executed at once; only those of nodes are late.
fn operate(records: &mut Records, event: Event) {
    let write = match event {
        Event::Add(node) => {
            let absent = |key| Condition::Absent(key);
            let full = full(node);
            let key = state::node_key(full.node.id);
            let write = Write::when(absent(key.clone()));
            let write = write.and(absent(state::tombstone_key(full.node.id)));
            write.put(key, full.encode().to_vec())
        }
        Event::Delete(node) => {
            let bypass = Bypass {
                not_decommissioned: true,
                has_roles: true,
            };
            let Some(found) = records.find(id(node)) else {
                return;
            };
            removal::decide(bypass, AfterRemoval::Wait, &found)
                .unwrap()
                .write
        }
        Event::Role(node, held) => {
            let Some(found) = records.find(id(node)) else {
                return;
            };
            let mut full = found.full.content.clone();
            full.node.roles = worker(held);
            put(found.unchanged(), &full)
        }
        _ => return,
    };
    records.apply(&write);
}

fn play(events: Vec<Event>) -> Records {
    let mut records = blank();
    for node in 0..NODES {
        operate(&mut records, Event::Add(node));
    }
    let mut views = vec![records.clone(); CURATORS];
    let mut under_way: Vec<Write> = Vec::new();
    for event in events {
        let before = parts(&records);
        match event {
            Event::Ask {
                node,
                key: number,
                record,
                rest,
            } => {
                let Some(node) = views[record].find(id(node)) else {
                    continue;
                };
                let found = found(&views[rest], node.id(), &key(number));
                let is_worker = node.full.content.node.roles == worker(true);
                let key_of = found.key_of.as_ref().map(|at| at.content);
                match super::super::networking::decide(key(number), &node, found) {
                    Ok((networking, write)) => {
                        assert!(is_worker);
                        assert_eq!(networking.key, key(number));
                        let held = node.full.content.node.networking;
                        assert_eq!(write.is_none(), held == Some(networking));
                        under_way.extend(write);
                    }
                    Err(Rejection::NoWorker(_)) => assert!(!is_worker),
                    Err(Rejection::MeshKeyTaken(other)) => assert_eq!(key_of, Some(other)),
                    Err(other) => panic!("{other}"),
                }
            }
            Event::Sync(view) => views[view] = records.clone(),
            Event::Deliver(_) | Event::Lose(_) if under_way.is_empty() => {}
            Event::Deliver(index) => {
                let _ = records.apply(&under_way[index % under_way.len()]);
            }
            Event::Lose(index) => drop(under_way.remove(index % under_way.len())),
            operators => operate(&mut records, operators),
        }
        check(&records);
        for (id, networking) in parts(&records) {
            let moved = before.get(&id).filter(|old| old.range != networking.range);
            assert_eq!(moved, None, "{id} has another range now");
        }
    }
    records
}

fn event() -> impl Strategy<Value = Event> {
    let node = || 0..NODES;
    let ask = (node(), 0..KEYS, 0..CURATORS, 0..CURATORS);
    prop_oneof![
        8 => ask.prop_map(|(node, key, record, rest)| Event::Ask { node, key, record, rest }),
        4 => (0..CURATORS).prop_map(Event::Sync),
        6 => (0..64_usize).prop_map(Event::Deliver),
        1 => (0..64_usize).prop_map(Event::Lose),
        1 => node().prop_map(Event::Delete),
        1 => (node(), any::<bool>()).prop_map(|(node, held)| Event::Role(node, held)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_two_nodes_have_the_same_range_or_key(
        events in prop::collection::vec(event(), 0..120),
    ) {
        play(events);
    }
}

fn asks(node: u8, key: u8) -> Vec<Event> {
    let (record, rest) = (0, 0);
    vec![
        Event::Sync(0),
        Event::Ask {
            node,
            key,
            record,
            rest,
        },
        Event::Deliver(0),
        Event::Lose(0),
    ]
}

#[test]
fn ranges_are_given_from_the_lowest_and_kept() {
    let range = |records: &Records, node: u8| {
        let part = parts(records).get(&id(node)).copied();
        part.map(|part| part.range.to_string())
    };
    let mut events = [asks(0, 0), asks(1, 1), asks(2, 2)].concat();
    let records = play(events.clone());
    assert_eq!(range(&records, 2).unwrap(), "10.208.2.0/24");

    // Without the role the range is kept, with another key, too; range and key of a deleted node
    // are released.
    events.push(Event::Role(0, false));
    events.push(Event::Delete(1));
    events.extend(asks(2, 4));
    events.extend(asks(3, 1));
    let records = play(events);
    assert_eq!(range(&records, 0).unwrap(), "10.208.0.0/24");
    assert_eq!(range(&records, 1), None);
    assert_eq!(range(&records, 2).unwrap(), "10.208.2.0/24");
    assert_eq!(range(&records, 3).unwrap(), "10.208.1.0/24");
    assert_eq!(parts(&records)[&id(2)].key, key(4));
}

#[test]
fn what_cannot_be_given_is_refused() {
    let mut records = blank();
    operate(&mut records, Event::Add(0));
    let node = records.find(id(0)).unwrap();
    let decide = |node: &FoundNode, found| {
        let decided = super::super::networking::decide(key(0), node, found);
        decided.map(|(networking, _)| networking.range)
    };
    let none = Found::default;
    assert_eq!(decide(&node, none()), Err(Rejection::NoPodRange));
    // A range that an older image has dropped from the record is found by the index.
    let content = PodRange::all(&ClusterRanges::DEFAULT).nth(7).unwrap();
    let own = Some(Versioned {
        content,
        revision: 1,
    });
    assert_eq!(decide(&node, Found { own, ..none() }), Ok(content));
    let mut down = node.clone();
    down.full.content.node.state = NodeState::Decommissioned;
    assert!(matches!(
        decide(&down, none()),
        Err(Rejection::State { .. })
    ));
}
