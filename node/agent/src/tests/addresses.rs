//! Several nodes on loopback addresses: each listens on an address of its own, and all use the same
//! port, as the nodes of a cluster do.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::recovery::UnlockSettings;
use hearth_api::testing;
use hearth_api::testing::TestCluster;
use hearth_api::tls::wall_clock;
use hearth_api::v1::cluster_directory::{Address, Node};
use hearth_api::v1::{ClusterDirectory, ColdStartPolicy, NodeAddress, NodeState};
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::{LogTree, Options};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, next, within_timeout};
use hearth_host::cluster_state::{self, State};
use hearth_host::handover::MemberData;
use hearth_host::network_control;
use hearth_host::power::Power;
use prost::Message as _;

use crate::addresses::{AddressBook, Source, Worker, run};
use crate::known::{Seen, View};
use crate::learned::{AddressRecord, PeerAddresses};
use crate::nodemgmt;

const QUICK: Duration = Duration::from_millis(100);
/// Timeout for anything in these tests.
const LONG: Duration = Duration::from_secs(3600);

/// A link: addresses 127.77.NET.HOST, one port.
struct Net {
    cluster: TestCluster,
    number: u8,
    port: u16,
}

impl Net {
    fn new(number: u8) -> Self {
        let host = IpAddr::from([127, 77, number, 250]);
        let port = loop {
            let listener = TcpListener::bind((host, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            if UdpSocket::bind((host, port)).is_ok() {
                break port;
            }
        };
        Self {
            cluster: TestCluster::new(),
            number,
            port,
        }
    }

    fn host(&self, host: u8) -> IpAddr {
        [127, 77, self.number, host].into()
    }

    /// A machine whose directory has these members of its cluster.
    fn machine(&self, saved: &[(&NodeCredentials, u8)]) -> Machine {
        Machine::new(self, Arc::new(self.cluster.node()), saved)
    }

    fn directory(&self, saved: &[(&NodeCredentials, u8)]) -> ClusterDirectory {
        let entry = |(node, host): &(&NodeCredentials, u8)| Node {
            id: id(node).to_string(),
            addresses: vec![Address {
                host: self.host(*host).to_string(),
                port: 0,
            }],
            roles: None,
        };
        let nodes = saved.iter().map(entry).collect();
        ClusterDirectory { nodes }
    }
}

fn id(node: &NodeCredentials) -> NodeId {
    NodeId::from_public_key(&node.key.public())
}

/// The hosts 1 to 4 are on the link.
fn on_link(own: IpAddr, port: u16) -> Vec<SocketAddr> {
    let IpAddr::V4(own) = own else {
        panic!("expected a loopback address")
    };
    let [a, b, net, _] = own.octets();
    let hosts = (1..=4).map(|host| SocketAddr::from(([a, b, net, host], port)));
    hosts.collect()
}

fn nobody(_: IpAddr, _: u16) -> Vec<SocketAddr> {
    Vec::new()
}

/// A node that is powered off.
struct Machine {
    node: Arc<NodeCredentials>,
    saved: ClusterDirectory,
    file: PathBuf,
    _directory: tempfile::TempDir,
}

/// A node that is running.
struct Running {
    workers: [TestSupervisor; 2],
    address: Writer<IpAddr>,
    view: Writer<Arc<View>>,
    book: Arc<AddressBook>,
    learned: Value<PeerAddresses>,
    own_address: Value<AddressRecord>,
    _directory: Writer<ClusterDirectory>,
    state: cluster_state::Writer,
}

struct How {
    state: State,
    each: Duration,
    link: fn(IpAddr, u16) -> Vec<SocketAddr>,
}

const AT_HOME: How = How {
    state: State::Home,
    each: LONG,
    link: nobody,
};

impl Machine {
    fn new(net: &Net, node: Arc<NodeCredentials>, saved: &[(&NodeCredentials, u8)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            node,
            saved: net.directory(saved),
            file: directory.path().join("address.pb"),
            _directory: directory,
        }
    }

    /// Powers it on with this address of the link.
    fn start(&self, net: &Net, host: u8, how: How) -> Running {
        let How { state, each, link } = how;
        let listen = SocketAddr::from((net.host(host), net.port));
        let member = MemberData {
            own: testing::own(&self.node),
            directory: self.saved.clone(),
            uses_tpm: false,
        };
        let (book, learned) = AddressBook::new(wall_clock());
        let (address_writer, address) = event::value();
        let (view_writer, view) = event::value();
        let (directory_writer, directory) = event::value();
        let (own_writer, own_address) = event::value();
        let (state_writer, cluster_state) = cluster_state::new();
        state_writer.set(State::Home).unwrap();
        state_writer.set(state).unwrap();
        address_writer.set(net.host(host));
        let worker = Arc::new(Worker {
            file: self.file.clone(),
            book: book.clone(),
            listen,
            port: net.port,
            each,
            link,
            member: fixed(member.clone()),
            address,
            directory,
            view: view.clone(),
            cluster_state: cluster_state.clone(),
            learned: learned.clone(),
            own_address: own_writer,
        });
        let server = Arc::new(nodemgmt::Worker {
            listen,
            log_tree: LogTree::new(Options::default()),
            power: Power::default(),
            network_control: network_control::new().0,
            book: book.clone(),
            acknowledged: event::value().1,
            member: fixed(member),
            view,
            cluster_state,
            recorded: fixed(UnlockSettings {
                cold_start_policy: ColdStartPolicy::Unspecified,
                recovery_recipient: None,
                owner: None,
            }),
            packet_filter: event::value().1,
        });
        let server = TestSupervisor::run(move |ctx| nodemgmt::run(ctx, server.clone()));
        let worker = TestSupervisor::run(move |ctx| run(ctx, worker.clone()));
        Running {
            workers: [worker, server],
            address: address_writer,
            view: view_writer,
            book,
            learned,
            own_address,
            _directory: directory_writer,
            state: state_writer,
        }
    }
}

impl Running {
    /// Waits until it knows a node's address, and returns the record's counter.
    async fn finds(&self, node: &NodeCredentials, host: IpAddr) -> u64 {
        let is_there =
            |learned: &PeerAddresses| learned.get(&id(node)).is_some_and(|l| l.host == host);
        let mut learned = self.learned.watch();
        let learned = within_timeout("address of the node", learned.wait_for(is_there));
        learned.await.unwrap()[&id(node)].counter
    }

    async fn serves(&self) {
        for worker in &self.workers {
            worker.is_healthy().await;
        }
    }

    async fn stop(self) {
        for worker in self.workers {
            worker.all_is_fine();
            worker.stop().await;
        }
    }
}

#[tokio::test]
async fn a_node_that_moves_tells_the_others() {
    let net = Net::new(1);
    let b = net.machine(&[]);
    let a = net.machine(&[(&b.node, 2)]);
    let on_b = b.start(&net, 2, AT_HOME);
    on_b.serves().await;
    let on_a = a.start(&net, 1, AT_HOME);
    // At its boot it sends its address, and asks for those of the others.
    assert_eq!(on_b.finds(&a.node, net.host(1)).await, 1);
    assert_eq!(on_a.finds(&b.node, net.host(2)).await, 1);
    on_a.address.set(net.host(3));
    assert_eq!(on_b.finds(&a.node, net.host(3)).await, 2);
    on_a.stop().await;

    // Its counter survives a boot.
    let on_a = a.start(&net, 1, AT_HOME);
    assert_eq!(on_b.finds(&a.node, net.host(1)).await, 3);
    on_a.stop().await;
    on_b.stop().await;
}

/// No node has the address that the others know, and there is no quorum.
#[tokio::test]
async fn nodes_that_have_all_moved_at_once_find_each_other() {
    let net = Net::new(2);
    let nodes = [(); 3].map(|()| Arc::new(net.cluster.node()));
    let stale: Vec<_> = nodes.iter().zip(101..).map(|(n, h)| (&**n, h)).collect();
    let mut running = Vec::new();
    for (node, host) in nodes.iter().zip(1..) {
        let machine = Machine::new(&net, node.clone(), &stale);
        let how = How {
            state: State::Split,
            each: QUICK,
            link: on_link,
        };
        // One after the other, as machines boot.
        let on_node = machine.start(&net, host, how);
        on_node.serves().await;
        running.push((on_node, machine));
    }
    for (on_node, machine) in &running {
        for (node, host) in nodes.iter().zip(1..) {
            if !Arc::ptr_eq(node, &machine.node) {
                on_node.finds(node, net.host(host)).await;
            }
        }
    }
    for (on_node, _machine) in running {
        on_node.stop().await;
    }
}

/// One broadcast is enough, because the receivers answer.
#[tokio::test]
async fn who_comes_later_is_answered() {
    let net = Net::new(3);
    let (a, b) = (net.machine(&[]), net.machine(&[]));
    let alone = |link| How {
        link,
        each: LONG,
        state: State::Home,
    };
    let on_a = a.start(&net, 1, alone(nobody));
    on_a.serves().await;
    next("its word", &mut on_a.own_address.watch()).await;
    let on_b = b.start(&net, 2, alone(on_link));
    on_b.finds(&a.node, net.host(1)).await;
    on_a.finds(&b.node, net.host(2)).await;
    on_a.stop().await;
    on_b.stop().await;
}

#[tokio::test]
async fn who_is_disowned_says_nothing_any_more() {
    let net = Net::new(8);
    let (a, b) = (net.machine(&[]), net.machine(&[]));
    let on_a = a.start(&net, 1, AT_HOME);
    on_a.serves().await;
    next("its word", &mut on_a.own_address.watch()).await;
    on_a.state.set(State::Disowning).unwrap();
    let how = How {
        state: State::Split,
        each: QUICK,
        link: on_link,
    };
    let on_b = b.start(&net, 2, how);
    on_b.serves().await;
    assert_never("an answer", on_b.learned.watch().next()).await;
    on_a.stop().await;
    on_b.stop().await;
}

#[tokio::test]
async fn in_split_others_are_asked_again_and_pass_on_what_they_know() {
    let net = Net::new(4);
    let (b, c) = (net.machine(&[]), net.machine(&[]));
    let a = net.machine(&[(&b.node, 2), (&c.node, 103)]);
    let how = How {
        state: State::Split,
        each: QUICK,
        link: nobody,
    };
    let on_a = a.start(&net, 1, how);
    on_a.serves().await;
    assert_never("anybody", on_a.learned.watch().next()).await;
    // The first one returns, and learns the other's new address.
    let on_b = b.start(&net, 2, AT_HOME);
    on_b.serves().await;
    let moved = hearth_api::proofs::sign_address(&testing::own(&c.node), net.host(3), 1);
    let moved = [moved];
    let brought = on_b.book.store_valid(&moved, Source::Answer);
    assert_eq!(brought.await, 1);
    on_a.finds(&b.node, net.host(2)).await;
    on_a.finds(&c.node, net.host(3)).await;
    on_a.stop().await;
    on_b.stop().await;
}

#[tokio::test]
async fn a_counter_that_was_lost_is_heard_of_from_the_others() {
    let net = Net::new(5);
    let b = net.machine(&[]);
    let a = net.machine(&[(&b.node, 2)]);
    let on_b = b.start(&net, 2, AT_HOME);
    on_b.serves().await;
    let on_a = a.start(&net, 1, AT_HOME);
    for (host, counter) in [(3, 2), (4, 3)] {
        on_b.finds(&a.node, net.host(host - 2)).await;
        on_a.address.set(net.host(host));
        let found = on_b.finds(&a.node, net.host(host)).await;
        assert!(found >= counter, "{found}");
        if host == 3 {
            on_a.address.set(net.host(2));
        }
    }
    let before = on_b.learned.get().unwrap()[&id(&a.node)].counter;
    on_a.stop().await;
    fs::remove_file(&a.file).unwrap();
    let on_a = a.start(&net, 1, AT_HOME);
    let after = on_b.finds(&a.node, net.host(1)).await;
    assert!(after > before, "{after} after {before}");
    assert_eq!(on_a.own_address.get().unwrap().counter, after);
    on_a.stop().await;
    on_b.stop().await;
}

#[tokio::test]
async fn nothing_is_said_before_it_is_on_disk() {
    let net = Net::new(6);
    let b = net.machine(&[]);
    let mut a = net.machine(&[(&b.node, 2)]);
    let directory = a.file.parent().unwrap().join("missing");
    a.file = directory.join("address.pb");
    let on_b = b.start(&net, 2, AT_HOME);
    on_b.serves().await;
    let how = How {
        state: State::Home,
        each: QUICK,
        link: on_link,
    };
    let on_a = a.start(&net, 1, how);
    on_a.workers[0].fails("address.pb").await;
    assert_never("a word", on_b.learned.watch().next()).await;
    assert_eq!(on_a.own_address.get(), None);
    fs::create_dir(&directory).unwrap();
    on_b.finds(&a.node, net.host(1)).await;
    for worker in on_a.workers {
        worker.stop().await;
    }
    on_b.stop().await;
}

/// Whoever sends datagrams with the address of another machine has nothing sent there.
#[tokio::test]
async fn only_signed_words_are_answered() {
    let net = Net::new(21);
    let a = net.machine(&[]);
    let how = How {
        link: nobody,
        each: LONG,
        state: State::Home,
    };
    let on_a = a.start(&net, 1, how);
    on_a.serves().await;
    next("its word", &mut on_a.own_address.watch()).await;
    let answers = tokio::net::UdpSocket::bind((net.host(2), net.port));
    let answers = answers.await.unwrap();
    let socket = tokio::net::UdpSocket::bind((net.host(2), 0)).await.unwrap();
    let say = async |record: &NodeAddress| {
        let to = (net.host(1), net.port);
        socket.send_to(&record.encode_to_vec(), to).await.unwrap();
    };
    let mut answer = [0; 2048];
    let honest = net.cluster.node();
    let signed = hearth_api::proofs::sign_address(&testing::own(&honest), net.host(2), 1);
    let claim = |counter| NodeAddress {
        node_id: id(&honest).to_string(),
        counter,
        ..NodeAddress::default()
    };
    say(&claim(7)).await;
    say(&signed).await;
    within_timeout("an answer", answers.recv(&mut answer))
        .await
        .unwrap();
    // Its node is known now, and so are its address and this counter.
    say(&claim(0)).await;
    say(&claim(1)).await;
    assert_never("another answer", answers.recv(&mut answer)).await;
    say(&signed).await;
    within_timeout("an answer", answers.recv(&mut answer))
        .await
        .unwrap();
    on_a.stop().await;
}

#[tokio::test]
async fn forged_and_foreign_words_and_noise_change_nothing() {
    let net = Net::new(7);
    let a = net.machine(&[]);
    let on_a = a.start(&net, 1, AT_HOME);
    on_a.serves().await;
    next("its word", &mut on_a.own_address.watch()).await;
    let honest = net.cluster.node();
    let sign = |node: &NodeCredentials, host, counter| {
        hearth_api::proofs::sign_address(&testing::own(node), net.host(host), counter)
    };
    let forged = NodeAddress {
        counter: 9,
        ..sign(&honest, 2, 1)
    };
    let foreign = sign(&TestCluster::new().node(), 2, 1);
    let socket = tokio::net::UdpSocket::bind((net.host(2), 0)).await.unwrap();
    let to = (net.host(1), net.port);
    let say = async |datagram: Vec<u8>| {
        socket.send_to(&datagram, to).await.unwrap();
    };
    say(vec![0xff; 1400]).await;
    say(Vec::new()).await;
    say(forged.encode_to_vec()).await;
    say(foreign.encode_to_vec()).await;
    assert_never("news", on_a.learned.watch().next()).await;
    say(sign(&honest, 3, 1).encode_to_vec()).await;
    on_a.finds(&honest, net.host(3)).await;

    // Deleted nodes are dropped, and their records are rejected.
    let seen = Seen {
        state: NodeState::Up,
        roles: hearth_api::v1::NodeRoles::default(),
        located: None,
        second_address: None,
        curator_port: 0,
        labels: Vec::new(),
        settings: Vec::new(),
        networking: None,
    };
    let other = net.cluster.node();
    on_a.view.set(Arc::new(View {
        nodes: [(id(&other), seen)].into_iter().collect(),
        ..View::default()
    }));
    let mut learned = on_a.learned.watch();
    let lost_counter = learned.wait_for(|learned| learned.is_empty());
    within_timeout("deletion of the record", lost_counter)
        .await
        .unwrap();
    say(sign(&honest, 3, 2).encode_to_vec()).await;
    say(sign(&other, 4, 1).encode_to_vec()).await;
    on_a.finds(&other, net.host(4)).await;
    assert_eq!(on_a.learned.get().unwrap().len(), 1);
    on_a.stop().await;
}
