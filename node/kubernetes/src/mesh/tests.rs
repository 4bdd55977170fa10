//! The worker of the mesh, with a fake kernel that can fail, and a scripted curator.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use hearth_agent::testing::{Fake, record};
use hearth_api::identity::MeshKey;
use hearth_api::testing::{Script, dual_stack_ranges};
use hearth_api::v1::node_roles::KubernetesWorker;
use hearth_api::v1::{ClusterNetworking, Node};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, next};
use hearth_host::networking::NodeSubnets;
use hearth_sys::netlink::NetlinkError;
use hearth_sys::nftables::Nftables;
use tokio::sync::watch;
use tonic::Status;

use super::machine::MachineError;
use super::*;

/// The state of the fake kernel.
#[derive(Clone, Debug, Default, PartialEq)]
struct State {
    /// Public key and range.
    own: Option<(MeshKey, NodeSubnets)>,
    peers: Vec<Peer>,
    /// For these ranges.
    forwards: Option<ClusterRanges>,
    mtu: u32,
}

struct Fakery {
    state: watch::Sender<State>,
    /// How many of the next changes fail.
    failing: Mutex<u32>,
}

impl Fakery {
    fn failing(&self) -> MutexGuard<'_, u32> {
        self.failing.lock().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut State)) -> Result<(), MachineError> {
        let mut failing = self.failing();
        if *failing > 0 {
            *failing -= 1;
            return Err(NetlinkError::NoLink("that works".into()).into());
        }
        self.state.send_modify(change);
        Ok(())
    }
}

#[async_trait]
impl Machine for Arc<Fakery> {
    async fn set_up(&self, own: &Own) -> Result<(), MachineError> {
        let (mtu, own) = (own.mtu, (own.secret.public(), own.subnets));
        self.change(|state| {
            state.own = Some(own);
            state.mtu = mtu;
        })
    }

    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError> {
        let peers = peers.to_vec();
        self.change(|state| {
            assert!(state.own.is_some(), "there is an interface to have them");
            state.peers = peers;
        })
    }

    async fn forward(&self, ranges: &ClusterRanges) -> Result<(), MachineError> {
        self.change(|state| state.forwards = Some(*ranges))
    }

    async fn take_down(&self) -> Result<(), MachineError> {
        self.change(|state| *state = State::default())
    }
}

struct Meshing {
    fake: Fake,
    machine: Arc<Fakery>,
    state: watch::Receiver<State>,
    pods: Writer<PodsPossible>,
    connection: Writer<CuratorConnection>,
    view: Writer<Arc<View>>,
    learned: Writer<PeerAddresses>,
    pod_network: Value<Option<PodNetwork>>,
    packet_filter: Writer<PacketFilter>,
    file: PathBuf,
    uplink_mtu: Writer<u32>,
    worker: TestSupervisor,
    /// Kept, because a closed value would end the worker.
    _address: Writer<IpAddr>,
    _directory: tempfile::TempDir,
}

fn held(worker: bool) -> NodeRoles {
    NodeRoles {
        kubernetes_worker: worker.then(KubernetesWorker::default),
        ..NodeRoles::default()
    }
}

impl Meshing {
    /// There may be pods, the packet filter is in place, and there is no connection yet.
    async fn new() -> Self {
        Self::after(|_| ()).await
    }

    /// The same, with a prepared file.
    async fn after(prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        prepare(&directory.path().join("mesh.pb"));
        let test = Self::with(directory, BUILT_IN).await;
        test.filter();
        test
    }

    async fn with(directory: tempfile::TempDir, may: PodsPossible) -> Self {
        let file = directory.path().join("mesh.pb");
        let fake = Fake::new(Script::default()).await;
        let (pods, may_have_pods) = event::value();
        let (connection_writer, connection) = event::value();
        let (view_writer, view) = event::value();
        let (learned_writer, learned) = event::value();
        let (pod_network_writer, pod_network) = event::value();
        let (packet_filter_writer, packet_filter) = event::value();
        let (address_writer, address) = event::value();
        address_writer.set(IpAddr::from([192, 0, 2, 1]));
        let (uplink_mtu, mtu) = event::value();
        uplink_mtu.set(1500);
        let (sender, state) = watch::channel(State::default());
        let machine = Arc::new(Fakery {
            state: sender,
            failing: Mutex::default(),
        });
        pods.set(may);
        let worker = Arc::new(Worker {
            file: file.clone(),
            machine: machine.clone(),
            member: fixed(fake.member()),
            may_have_pods,
            connection,
            view,
            learned,
            address,
            mtu,
            packet_filter,
            pod_network: pod_network_writer,
        });
        Self {
            fake,
            machine,
            state,
            pods,
            connection: connection_writer,
            view: view_writer,
            learned: learned_writer,
            pod_network,
            packet_filter: packet_filter_writer,
            file,
            uplink_mtu,
            worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
            _address: address_writer,
            _directory: directory,
        }
    }

    fn filter(&self) {
        self.filter_for(Some(ClusterRanges::DEFAULT));
    }

    fn filter_for(&self, ranges: Option<ClusterRanges>) {
        self.packet_filter.set(PacketFilter {
            nftables: Nftables::at("nft".into()),
            table: "hearth",
            ranges,
        });
    }

    fn connect(&self) {
        self.connection.set(self.fake.connection());
    }

    async fn until(&mut self, what: &str, wanted: impl Fn(&State) -> bool) -> State {
        let found = self.state.wait_for(|state| wanted(state));
        hearth_base::testing::within_timeout(what, found)
            .await
            .unwrap()
            .clone()
    }

    fn sees(&self, nodes: &[Node]) {
        let mut view = View::default();
        view.apply(nodes, &[]);
        self.view.set(Arc::new(view));
    }
}

const BUILT_IN: PodsPossible = PodsPossible::BuiltIn(ClusterRanges::DEFAULT);

fn range(number: usize) -> PodRange {
    PodRange::all(&ClusterRanges::DEFAULT).nth(number).unwrap()
}

fn subnets(number: usize) -> NodeSubnets {
    range(number).subnets(&ClusterRanges::DEFAULT).unwrap()
}

fn key(number: u8) -> MeshKey {
    MeshSecret::try_from(&[number; 32][..]).unwrap().public()
}

/// A worker whose address, key and range are derived from this number.
fn worker(number: u8) -> Node {
    let id = format!("hearth-{number:032x}");
    let networking = Networking {
        key: key(number),
        range: range(number.into()),
    };
    Node {
        networking: Some(networking.into()),
        ..record(&id, &format!("192.0.2.{number}"), held(true))
    }
}

fn peer(number: u8, endpoint: &str) -> Peer {
    Peer {
        key: *key(number).as_bytes(),
        endpoint: Some(endpoint.parse().unwrap()),
        networks: [range(number.into()).cidr()].into(),
    }
}

#[tokio::test]
async fn a_node_takes_part_while_it_may_have_pods() {
    let mut test = Meshing::new().await;
    test.fake.curator.set_pod_range(Ok("10.208.3.0/24".into()));
    assert_never("a range of nobody's", test.pod_network.watch().next()).await;
    test.connect();
    let mut networks = test.pod_network.watch();
    let network = next("the pods' network", &mut networks).await.unwrap();
    assert_eq!(network.subnets, subnets(3));
    assert_eq!(network.ranges, ClusterRanges::DEFAULT);
    let state = test
        .until("it is set up", |state| state.own.is_some())
        .await;
    let (public, of) = state.own.unwrap();
    assert_eq!(of, subnets(3));
    let said = test.fake.curator.seen().mesh_keys;
    assert_eq!(said, [public.as_bytes().to_vec()]);

    test.pods.set(PodsPossible::None);
    assert_eq!(next("its end", &mut networks).await, None);
    test.until("all is taken away", |state| *state == State::default())
        .await;
    // Set up again immediately, with the same key.
    test.pods.set(BUILT_IN);
    let state = test.until("it is back", |state| state.own.is_some()).await;
    assert_eq!(state.own, Some((public, subnets(3))));
    let again = next("the pods' network", &mut networks).await;
    assert_eq!(again, Some(network));
}

#[tokio::test]
async fn the_mesh_follows_the_mtu_of_the_network_below_it() {
    let mut test = Meshing::new().await;
    test.fake.curator.set_pod_range(Ok("10.208.3.0/24".into()));
    test.connect();
    test.until("the usual MTU", |state| state.mtu == 1420).await;
    test.uplink_mtu.set(1400);
    test.until("a smaller one", |state| state.mtu == 1320).await;
    let mut networks = test.pod_network.watch();
    let told = networks.wait_for(|it| it.is_some_and(|it| it.mtu == 1320));
    hearth_base::testing::within_timeout("the pods' MTU", told)
        .await
        .unwrap();
}

#[test]
fn the_mesh_carries_what_ip_requires() {
    let dual = hearth_api::testing::dual_stack_ranges();
    for (uplink, alone, both) in [
        (1500, 1420, 1420),
        (9000, 8920, 8920),
        (1280, 1200, 1280),
        (576, 576, 1280),
        (0, 576, 1280),
    ] {
        assert_eq!(mtu(uplink, &ClusterRanges::DEFAULT), alone);
        assert_eq!(mtu(uplink, &dual), both);
    }
}

#[tokio::test]
async fn peers_are_the_other_workers_wherever_they_are() {
    let mut test = Meshing::new().await;
    test.fake.curator.set_pod_range(Ok("10.208.0.0/24".into()));
    test.connect();
    let own = Node {
        networking: None,
        ..record(&test.fake.node_id.to_string(), "192.0.2.1", held(true))
    };
    let not_yet = Node {
        networking: None,
        ..worker(7)
    };
    let out = Node {
        state: hearth_api::v1::NodeState::Decommissioned.into(),
        ..worker(8)
    };
    let no_worker = Node {
        roles: Some(held(false)),
        ..worker(9)
    };
    let corrupt = Node {
        networking: Some(ClusterNetworking::default()),
        ..worker(10)
    };
    let all = [
        own.clone(),
        worker(2),
        worker(3),
        not_yet,
        out,
        no_worker,
        corrupt,
    ];
    test.sees(&all);
    let both = vec![peer(2, "192.0.2.2:7839"), peer(3, "192.0.2.3:7839")];
    test.until("two peers", |state| state.peers == both).await;

    // One has a new address, and announces it before the curators know.
    let id = worker(3).id.parse().unwrap();
    let moved = hearth_agent::AddressRecord {
        host: "2001:db8::3".parse().unwrap(),
        counter: 1,
    };
    test.learned.set(Arc::new(BTreeMap::from([(id, moved)])));
    let wanted = vec![peer(2, "192.0.2.2:7839"), peer(3, "[2001:db8::3]:7839")];
    test.until("it is found", |state| state.peers == wanted)
        .await;

    // One has been removed, one has another key and one is new.
    let other_key = Node {
        networking: Some(
            Networking {
                key: key(33),
                range: range(3),
            }
            .into(),
        ),
        ..worker(3)
    };
    test.sees(&[own, other_key, worker(4)]);
    let mut wanted = vec![peer(3, "[2001:db8::3]:7839"), peer(4, "192.0.2.4:7839")];
    wanted[0].key = *key(33).as_bytes();
    test.until("others", |state| state.peers == wanted).await;
}

#[tokio::test]
async fn what_fails_is_done_again_and_what_is_asked_for_once_is_known() {
    let mut test = Meshing::new().await;
    test.connect();
    // The curators do not know the role yet.
    test.worker.fails("no Kubernetes worker").await;
    *test.machine.failing() = 2;
    test.fake.curator.set_pod_range(Ok("10.208.5.0/24".into()));
    let state = test
        .until("it is set up", |state| state.own.is_some())
        .await;
    assert_eq!(state.own.unwrap().1, subnets(5));
    *test.machine.failing() = 1;
    test.sees(&[worker(2)]);
    test.until("a peer", |state| state.peers.len() == 1).await;
    *test.machine.failing() = 1;
    test.pods.set(PodsPossible::None);
    test.until("all is taken away", |state| *state == State::default())
        .await;
}

#[tokio::test]
async fn a_node_that_was_given_a_range_needs_no_curator_for_it() {
    let secret = MeshSecret::generate();
    let public = secret.public();
    let kept = Kept {
        secret,
        range: Some(range(9)),
    };
    let mut test = Meshing::after(|file| key::save(file, &kept).unwrap()).await;
    let given = Some((public, subnets(9)));
    test.until("it is set up", |state| state.own == given).await;

    // The curators have another range, because the node's disk was restored from a backup.
    test.fake.curator.set_pod_range(Ok("10.208.6.0/24".into()));
    test.connect();
    let given = Some((public, subnets(6)));
    test.until("it has the other one", |state| state.own == given)
        .await;
    let of_disk = key::load_or_make(&test.file).unwrap();
    assert_eq!(of_disk.range, Some(range(6)));

    // The curators lose it: it is published again.
    let own = test.fake.node_id.to_string();
    test.sees(&[record(&own, "192.0.2.1", held(true))]);
    let again = test.fake.curator.until(|seen| seen.mesh_keys.len() >= 2);
    hearth_base::testing::within_timeout("it asks again", again).await;
}

#[tokio::test]
async fn a_key_that_is_another_nodes_is_left_to_it() {
    let mut test = Meshing::new().await;
    let taken = Status::already_exists("it is that of another node");
    test.fake.curator.set_pod_range(Err(taken));
    test.connect();
    let seen = test.fake.curator.until(|seen| seen.mesh_keys.len() >= 2);
    let keys = hearth_base::testing::within_timeout("another key", seen)
        .await
        .mesh_keys;
    assert_ne!(keys[0], keys[1]);
    test.fake.curator.set_pod_range(Ok("10.208.1.0/24".into()));
    let state = test
        .until("it is set up", |state| state.own.is_some())
        .await;
    let (public, _) = state.own.unwrap();
    assert_ne!(public.as_bytes()[..], keys[0]);
}

#[tokio::test]
async fn nothing_is_forwarded_before_the_packet_filter_is_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let mut test = Meshing::with(directory, BUILT_IN).await;
    test.fake.curator.set_pod_range(Ok("10.208.1.0/24".into()));
    test.connect();
    let asked = test.fake.curator.until(|seen| !seen.mesh_keys.is_empty());
    hearth_base::testing::within_timeout("its range", asked).await;
    assert_never("a network", test.pod_network.watch().some()).await;
    assert_eq!(*test.state.borrow_and_update(), State::default());
    // With rules of a time when the node did not know the cluster's settings.
    test.filter_for(None);
    assert_never("a network", test.pod_network.watch().some()).await;
    test.filter();
    test.until("it is set up", |state| state.own.is_some())
        .await;
}

#[tokio::test]
async fn in_a_dual_stack_cluster_there_is_a_subnet_of_each_family() {
    let directory = tempfile::tempdir().unwrap();
    let mut test = Meshing::with(directory, PodsPossible::BuiltIn(dual_stack_ranges())).await;
    test.filter_for(Some(dual_stack_ranges()));
    test.fake.curator.set_pod_range(Ok("10.208.1.0/24".into()));
    test.connect();
    let state = test.until("it is set up", |state| state.own.is_some());
    let (_, of) = state.await.own.unwrap();
    assert_eq!(of, range(1).subnets(&dual_stack_ranges()).unwrap());
    // One peer has addresses of another cluster's network.
    let foreign = Node {
        networking: Some(ClusterNetworking {
            pod_range: "192.168.1.0/24".into(),
            ..Networking {
                key: key(3),
                range: range(3),
            }
            .into()
        }),
        ..worker(3)
    };
    test.sees(&[worker(2), foreign]);
    let networks = ["10.208.2.0/24", "fd00:1:0:2::/64"];
    let wanted = vec![Peer {
        networks: networks.map(|network| network.parse().unwrap()).into(),
        ..peer(2, "192.0.2.2:7839")
    }];
    test.until("one peer", |state| state.peers == wanted).await;
}

#[tokio::test]
async fn without_pods_nothing_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let mut test = Meshing::with(directory, PodsPossible::None).await;
    test.fake.curator.set_pod_range(Ok("10.208.1.0/24".into()));
    test.connect();
    assert_never("a network", test.pod_network.watch().some()).await;
    assert!(!test.file.exists());
    assert_eq!(*test.state.borrow_and_update(), State::default());
    assert!(test.fake.curator.calls().is_empty());
}

#[tokio::test]
async fn for_another_network_packets_are_forwarded_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut test = Meshing::with(
        directory,
        PodsPossible::OtherNetwork(ClusterRanges::DEFAULT),
    )
    .await;
    test.connect();
    assert_never("a network", test.pod_network.watch().some()).await;
    assert_eq!(*test.state.borrow_and_update(), State::default());
    test.filter();
    let forwarding = State {
        forwards: Some(ClusterRanges::DEFAULT),
        ..State::default()
    };
    test.until("it forwards", |state| *state == forwarding)
        .await;
    assert!(test.pod_network.get().flatten().is_none());
    assert!(!test.file.exists());
    assert!(test.fake.curator.calls().is_empty());
    test.pods.set(PodsPossible::None);
    test.until("its end", |state| *state == State::default())
        .await;
}
