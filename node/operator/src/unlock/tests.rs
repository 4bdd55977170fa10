use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::identity::ClusterId;
use hearth_api::names::{PORT_CURATOR, PORT_UNLOCK};
use hearth_api::testing::{LockedNode, Script, TestCluster, TestCurator, TestLockedNode};
use hearth_api::tls::wall_clock;
use hearth_api::v1::{ClusterDirectory, cluster_directory};

use super::*;

/// Connections are to this machine.
const TIMEOUT: Duration = Duration::from_secs(20);

fn id(number: u8) -> NodeId {
    NodeId::from_bytes([number; 16])
}

/// The address of a node in its cluster's network.
fn address(number: u8, port: u16) -> Endpoint {
    Endpoint::new(IpAddr::from([192, 0, 2, number]), port)
}

fn directory(numbers: &[u8]) -> ClusterDirectory {
    let entry = |number: &u8| entry(&id(*number).to_string(), *number);
    ClusterDirectory {
        nodes: numbers.iter().map(entry).collect(),
    }
}

fn entry(id: &str, number: u8) -> cluster_directory::Node {
    cluster_directory::Node {
        id: id.to_owned(),
        addresses: vec![cluster_directory::Address {
            host: format!("192.0.2.{number}"),
            port: 0,
        }],
        roles: None,
    }
}

/// An owner, and a cluster whose nodes have addresses that are not reachable from here.
struct World {
    keys: Keys,
    cluster_id: ClusterId,
    routes: BTreeMap<Endpoint, Endpoint>,
}

impl World {
    fn new() -> Self {
        Self {
            keys: Keys {
                owner: OwnerKey::generate(),
                recovery: RecoveryKey::generate(),
            },
            cluster_id: ClusterId::generate(),
            // Everything else is refused at once.
            routes: (1..=9)
                .flat_map(|number| {
                    [PORT_CURATOR, 7836, PORT_UNLOCK].map(|port| address(number, port))
                })
                .map(|from| (from, Endpoint::new(IpAddr::from([127, 0, 0, 1]), 1)))
                .collect(),
        }
    }

    fn node(&self, number: u8, curators: &[u8]) -> LockedNode {
        LockedNode {
            cluster_id: self.cluster_id,
            node_id: id(number),
            owner: self.keys.owner.public(),
            recipient: self.keys.recovery.recipient(),
            directory: directory(curators),
            other_disk: false,
        }
    }

    /// Starts a node at its address.
    async fn start(&mut self, number: u8, node: LockedNode) -> TestLockedNode {
        let node = TestLockedNode::start(node).await;
        let at = address(number, PORT_UNLOCK);
        self.routes.insert(at, node.endpoint());
        node
    }

    fn search(&self, given: &[u8]) -> Search {
        let given = given
            .iter()
            .map(|number| &self.routes[&address(*number, PORT_UNLOCK)]);
        Search {
            endpoints: given.cloned().collect(),
            routes: self.routes.clone(),
            cluster: None,
            running: BTreeSet::new(),
            timeout: TIMEOUT,
            clock: wall_clock(),
        }
    }

    async fn unlock(&self, found: &Found, scope: Scope) -> (Outcome, Vec<String>) {
        let mut steps = Vec::new();
        let told = |step: Step<'_>| steps.push(step.to_string());
        let outcome = unlock(found, &self.keys, scope, TIMEOUT, told).await;
        (outcome, steps)
    }
}

fn states(outcome: &Outcome) -> Vec<(NodeId, &'static str)> {
    let nodes = outcome.nodes.iter();
    nodes.map(|(id, node)| (*id, node.state.word())).collect()
}

#[tokio::test]
async fn a_majority_is_found_by_one_address_and_unlocked() {
    let mut world = World::new();
    let mut nodes = Vec::new();
    for number in 1..=3 {
        let node = world.node(number, &[1, 2, 3]);
        nodes.push(world.start(number, node).await);
    }
    let found = world.search(&[2]).find().await.expect("one cluster");
    assert_eq!(found.cluster, Some(world.cluster_id));
    assert_eq!(found.locked.len(), 3);
    assert_eq!(
        found.locked[0].id(),
        id(2),
        "the given address is the first"
    );

    let (outcome, steps) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached());
    assert_eq!(outcome.quorum.up, 2);
    assert_eq!(steps.len(), 2, "{steps:?}");
    let unlocked = nodes.iter().filter(|node| node.is_unlocked());
    assert_eq!(unlocked.count(), 2);
    assert_eq!(
        states(&outcome),
        [(id(1), "UNLOCKED"), (id(2), "UNLOCKED"), (id(3), "LOCKED")]
    );

    // The last one, if that is requested.
    let found = world.search(&[3]).find().await.expect("one cluster");
    let (outcome, _) = world.unlock(&found, Scope::All).await;
    assert_eq!(outcome.unlocked(), BTreeSet::from([id(3)]));
    assert!(nodes[2].is_unlocked());
}

#[tokio::test]
async fn who_is_running_is_counted_and_who_is_missing_is_named() {
    let mut world = World::new();
    let cluster = Arc::new(TestCluster::new());
    world.cluster_id = cluster.id;
    let curator = TestCurator::start(&cluster, Script::default(), wall_clock()).await;
    let runs = curator.node_id;
    // At its management port: it has no quorum.
    world.routes.insert(address(4, 7836), curator.endpoint());
    let mut node = world.node(2, &[2, 5]);
    node.directory.nodes.push(entry(&runs.to_string(), 4));
    let locked = world.start(2, node).await;

    let found = world.search(&[1, 2]).find().await.expect("one cluster");
    assert_eq!(found.running, BTreeSet::from([runs]));
    assert!(!found.silent.is_empty());
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached() && locked.is_unlocked());
    assert_eq!(outcome.quorum.missing, BTreeSet::from([id(5)]));
    let states = states(&outcome);
    assert!(states.contains(&(runs, "RUNNING")), "{states:?}");
    assert!(states.contains(&(id(5), "SILENT")), "{states:?}");
}

#[tokio::test]
async fn too_few_are_unlocked_nevertheless() {
    let mut world = World::new();
    let node = world.node(3, &[1, 2, 3]);
    let node = world.start(3, node).await;
    let found = world.search(&[3]).find().await.expect("one cluster");
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(node.is_unlocked() && !outcome.quorum.is_reached());
    assert_eq!((outcome.quorum.up, outcome.quorum.needed()), (1, 2));
    assert_eq!(outcome.quorum.missing, BTreeSet::from([id(1), id(2)]));

    // What was unlocked before is counted.
    let mut search = world.search(&[]);
    search.running = outcome.unlocked();
    let node = world.node(1, &[1, 2, 3]);
    let node = world.start(1, node).await;
    search.endpoints = vec![node.endpoint()];
    let found = search.find().await.expect("one cluster");
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached() && node.is_unlocked());
}

#[tokio::test]
async fn wrong_keys_are_told_apart() {
    let mut world = World::new();
    let node = world.node(1, &[1]);
    let node = world.start(1, node).await;
    let found = world.search(&[1]).find().await.expect("one cluster");
    let right = world.keys.clone();

    world.keys.recovery = RecoveryKey::generate();
    let (outcome, steps) = world.unlock(&found, Scope::Quorum).await;
    let [(_, UnlockError::RecoveryKey(_))] = outcome.failures().collect::<Vec<_>>()[..] else {
        panic!("{outcome:?}");
    };
    assert!(steps[0].contains("nothing was sent"), "{steps:?}");
    assert_eq!(node.answers(), 0, "nothing was sent");

    world.keys = Keys {
        owner: OwnerKey::generate(),
        ..right.clone()
    };
    let (outcome, _) = world.unlock(&found, Scope::All).await;
    let [(_, UnlockError::OwnerKey { .. })] = outcome.failures().collect::<Vec<_>>()[..] else {
        panic!("{outcome:?}");
    };
    assert_eq!(states(&outcome), [(id(1), "FAILED")]);
    assert!(!outcome.quorum.is_reached() && !node.is_unlocked());

    world.keys = right;
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached() && node.is_unlocked());
}

#[tokio::test]
async fn another_node_is_taken_for_one_that_fails() {
    let mut world = World::new();
    let mut node = world.node(1, &[1, 2, 3]);
    node.other_disk = true;
    let broken = world.start(1, node).await;
    let node = world.node(2, &[1, 2, 3]);
    let two = world.start(2, node).await;
    let node = world.node(3, &[1, 2, 3]);
    let three = world.start(3, node).await;
    let found = world.search(&[1]).find().await.expect("one cluster");
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    let [(failed, UnlockError::Key { .. })] = outcome.failures().collect::<Vec<_>>()[..] else {
        panic!("{outcome:?}");
    };
    assert_eq!(failed, broken.id());
    assert!(outcome.quorum.is_reached() && two.is_unlocked() && three.is_unlocked());
}

#[tokio::test]
async fn who_only_claims_to_be_a_node_counts_for_nothing() {
    let mut world = World::new();
    let node = world.node(1, &[1]);
    let node = world.start(1, node).await;
    // The ID of the node, and the cluster's; but the key is encrypted to somebody else.
    let false_node = LockedNode {
        recipient: RecoveryKey::generate().recipient(),
        directory: directory(&[1, 6, 7]),
        ..world.node(1, &[])
    };
    let false_node = world.start(9, false_node).await;
    let found = world.search(&[9, 1]).find().await.expect("one cluster");
    assert_eq!(found.locked.len(), 2);
    let (outcome, steps) = world.unlock(&found, Scope::All).await;
    assert_eq!(false_node.answers(), 0, "{steps:?}");
    assert!(outcome.quorum.is_reached() && node.is_unlocked());
    assert_eq!(outcome.quorum.voters, 1, "its directory does not count");
    assert_eq!(outcome.nodes[&id(1)].endpoint, Some(node.endpoint()));
}

#[tokio::test]
async fn a_node_that_has_restarted_since_is_unlocked() {
    let mut world = World::new();
    let node = world.node(1, &[1]);
    let node = world.start(1, node).await;
    let found = world.search(&[1]).find().await.expect("one cluster");
    node.restart();
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached() && node.is_unlocked());
    assert_eq!(node.answers(), 2);
}

#[tokio::test]
async fn nodes_of_another_cluster_are_left_alone() {
    let mut world = World::new();
    let node = world.node(1, &[1]);
    let own = world.start(1, node).await;
    let other = ClusterId::generate();
    let stranger = LockedNode {
        cluster_id: other,
        ..world.node(2, &[2])
    };
    let stranger = world.start(2, stranger).await;

    let error = world.search(&[1, 2]).find().await.expect_err("a mixture");
    assert_eq!((error.first, error.other), (world.cluster_id, other));
    assert_eq!(
        (error.first_at, error.other_at),
        (own.endpoint(), stranger.endpoint())
    );

    let mut search = world.search(&[2, 1]);
    search.cluster = Some(world.cluster_id);
    let found = search.find().await.expect("the other one is ignored");
    assert_eq!(found.strangers.len(), 1);
    let (outcome, _) = world.unlock(&found, Scope::All).await;
    assert!(own.is_unlocked() && !stranger.is_unlocked());
    assert_eq!(outcome.nodes.len(), 1);
    assert_eq!(stranger.answers(), 0);
}

#[tokio::test]
async fn a_node_without_a_directory_is_a_cluster_of_its_own() {
    let mut world = World::new();
    let node = world.node(1, &[]);
    let node = world.start(1, node).await;
    let found = world.search(&[1]).find().await.expect("one cluster");
    let (outcome, _) = world.unlock(&found, Scope::Quorum).await;
    assert!(outcome.quorum.is_reached() && node.is_unlocked());
}

#[tokio::test]
async fn nobody_is_found_where_nobody_waits() {
    let world = World::new();
    let mut search = world.search(&[1]);
    // A server that says nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    search
        .endpoints
        .push(mute.local_addr().expect("an address").into());
    search.timeout = Duration::from_millis(200);
    let found = search.find().await.expect("nobody");
    assert_eq!((found.cluster, found.locked.len()), (None, 0));
    assert_eq!(found.silent.len(), 2);
}
