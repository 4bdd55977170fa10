//! The balancer with real servers that die, stall, recover and are removed.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::v1::node_roles::{ConsensusMember, KubernetesController};
use hearth_api::v1::{ClusterDirectory, Node, NodeRoles, NodeState, NodeStatus};
use hearth_base::testing::{TestSupervisor, until_ok, within_timeout};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::AbortHandle;

use super::*;

/// A server that sends its number to each client, and then echoes.
struct Server {
    address: SocketAddr,
    task: AbortHandle,
}

impl Server {
    async fn start(number: u8) -> Self {
        Self::start_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), number).await
    }

    async fn start_at(address: SocketAddr, number: u8) -> Self {
        let bind = || TcpListener::bind(address);
        let listener = until_ok("the port is free", bind).await;
        let address = listener.local_addr().unwrap();
        let serve = async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections.spawn(async move {
                    stream.write_all(&[number]).await.ok();
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await.ok();
                });
            }
        };
        Self {
            address,
            task: tokio::spawn(serve).abort_handle(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn number(stream: &mut TcpStream) -> Option<u8> {
    let mut number = [0];
    stream.read_exact(&mut number).await.ok()?;
    Some(number[0])
}

/// A server is ready if it sends a number.
struct SaysItsNumber;

impl Probes for SaysItsNumber {
    type Probe = SocketAddr;

    fn probe(&self, server: SocketAddr) -> SocketAddr {
        server
    }
}

impl Probe for SocketAddr {
    async fn ready(&mut self) -> Result<(), ProbeError> {
        let not_ready = |why: &str| ProbeError::NotReady(why.to_owned());
        let connected = TcpStream::connect(*self).await;
        let mut stream = connected.map_err(|error| not_ready(&error.to_string()))?;
        let answer = number(&mut stream).await;
        answer.map(drop).ok_or_else(|| not_ready("it ended"))
    }
}

struct World {
    _alone: TestSupervisor,
    listen: SocketAddr,
    servers: Writer<Servers>,
    ready: Value<usize>,
}

impl World {
    async fn new() -> Self {
        Self::holding(Duration::from_millis(500)).await
    }

    /// Holds connections for this long.
    async fn holding(hold: Duration) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listen = free.local_addr().unwrap();
        drop(free);
        let (servers, told) = event::value();
        let (ready_writer, ready) = event::value();
        let balancer = Arc::new(Balancer {
            listen,
            probes: SaysItsNumber,
            timing: Timing {
                every: Duration::from_millis(50),
                probe_every_unready: Duration::from_millis(50),
                answer: Duration::from_millis(500),
                connect: Duration::from_millis(500),
                hold,
            },
            servers: told,
            ready: ready_writer,
        });
        let alone = TestSupervisor::run(move |ctx| run(ctx, balancer.clone()));
        Self {
            _alone: alone,
            listen,
            servers,
            ready,
        }
    }

    fn set(&self, own: Option<&Server>, others: &[&Server]) {
        let others = others.iter().map(|server| server.address);
        self.servers.set(Servers {
            own: own.map(|server| server.address),
            others: others.collect(),
        });
    }

    async fn ready(&self, wanted: usize) {
        let mut ready = self.ready.watch();
        let reached = ready.wait_for(|ready| *ready == wanted);
        within_timeout("so many are ready", reached).await.unwrap();
    }

    /// Connects; with the number of the server.
    async fn connect(&self) -> Option<(TcpStream, u8)> {
        let connect = || TcpStream::connect(self.listen);
        let mut stream = until_ok("the balancer listens", connect).await;
        let number = within_timeout("an answer or an end", number(&mut stream)).await?;
        Some((stream, number))
    }
}

#[tokio::test]
async fn the_own_server_first_and_another_when_it_is_gone() {
    let world = World::new().await;
    let (own, other) = (Server::start(1).await, Server::start(2).await);
    world.set(Some(&own), &[&other]);
    world.ready(2).await;
    for _ in 0..3 {
        assert_eq!(world.connect().await.unwrap().1, 1);
    }
    let address = own.address;
    drop(own);
    // At once, whatever its state was before.
    assert_eq!(world.connect().await.unwrap().1, 2);
    world.ready(1).await;
    let _back = Server::start_at(address, 3).await;
    world.ready(2).await;
    let (mut stream, number) = world.connect().await.unwrap();
    assert_eq!(number, 3);
    stream.write_all(b"hello").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut echo = Vec::new();
    let read = stream.read_to_end(&mut echo);
    within_timeout("both ends end", read).await.unwrap();
    assert_eq!(echo, b"hello");
}

#[tokio::test]
async fn the_others_take_turns() {
    let world = World::new().await;
    let servers = [1, 2, 3].map(Server::start);
    let servers = futures::future::join_all(servers).await;
    world.set(None, &servers.iter().collect::<Vec<_>>());
    world.ready(3).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(world.connect().await.unwrap().1);
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3]);
}

#[tokio::test]
async fn a_server_that_stalls_loses_its_connections_and_gets_no_new_ones() {
    let world = World::new().await;
    let (first, second) = (Server::start(1).await, Server::start(2).await);
    world.set(Some(&first), &[]);
    world.ready(1).await;
    let (mut held, number) = world.connect().await.unwrap();
    assert_eq!(number, 1);
    // It stalls: its connections stay open without answers.
    let address = first.address;
    first.task.abort();
    let listener = until_ok("the port is free", || TcpListener::bind(address)).await;
    let mut rest = Vec::new();
    // The connections to this server were closed with it; one to the stalled server is open.
    within_timeout("the end", held.read_to_end(&mut rest))
        .await
        .ok();
    let connect = TcpStream::connect(world.listen);
    let mut stuck = within_timeout("the balancer takes it", connect)
        .await
        .unwrap();
    let (_accepted, _) = within_timeout("it reaches the server", listener.accept())
        .await
        .unwrap();
    world.ready(0).await;
    world.set(Some(&first), &[&second]);
    world.ready(1).await;
    assert_eq!(world.connect().await.unwrap().1, 2);
    let read = stuck.read_to_end(&mut rest);
    within_timeout("the stuck one is cut", read).await.ok();

    // It recovers.
    drop(listener);
    let _back = Server::start_at(address, 3).await;
    world.ready(2).await;
    assert_eq!(world.connect().await.unwrap().1, 3);
}

#[tokio::test]
async fn a_connection_waits_for_a_server() {
    let world = World::holding(Duration::from_secs(600)).await;
    let server = Server::start(1).await;
    let address = server.address;
    drop(server);
    let connect = || TcpStream::connect(world.listen);
    let mut nobody = until_ok("the balancer listens", connect).await;
    nobody.write_all(b"hello").await.unwrap();
    // A server that does not accept connections.
    world.servers.set(Servers {
        own: Some(address),
        others: Vec::new(),
    });
    world.ready(0).await;
    let mut refused = connect().await.unwrap();
    let _back = Server::start_at(address, 2).await;
    for waiting in [&mut nobody, &mut refused] {
        let number = within_timeout("it is passed on", number(waiting)).await;
        assert_eq!(number, Some(2));
    }
    // Data that was sent meanwhile is not lost.
    let mut hello = [0; 5];
    within_timeout("an echo", nobody.read_exact(&mut hello))
        .await
        .unwrap();
    assert_eq!(&hello, b"hello");
}

#[tokio::test]
async fn without_a_server_a_connection_ends() {
    let world = World::new().await;
    assert!(world.connect().await.is_none());
    let server = Server::start(1).await;
    world.set(None, &[&server]);
    let connected = || async { world.connect().await.ok_or(()) };
    let (mut stream, _) = until_ok("it is connected", connected).await;
    // Connections to a removed server are closed.
    world.set(None, &[]);
    let mut rest = Vec::new();
    within_timeout("it is cut", stream.read_to_end(&mut rest))
        .await
        .ok();
    assert!(world.connect().await.is_none());
    world.ready(0).await;
}

fn node(digit: char, address: &str, roles: NodeRoles, state: NodeState) -> Node {
    Node {
        id: format!("hearth-{}", String::from(digit).repeat(32)),
        state: state.into(),
        status: Some(NodeStatus {
            external_address: address.into(),
            ..NodeStatus::default()
        }),
        roles: Some(roles),
        ..Node::default()
    }
}

#[test]
fn controllers_that_are_up_are_the_servers() {
    let controller = NodeRoles {
        kubernetes_controller: Some(KubernetesController::default()),
        ..NodeRoles::default()
    };
    let member = NodeRoles {
        consensus_member: Some(ConsensusMember::default()),
        ..NodeRoles::default()
    };
    let up = NodeState::Up;
    let nodes = [
        node('a', "192.0.2.1", controller, up),
        node('b', "192.0.2.2", controller, up),
        node('c', "192.0.2.3", member, up),
        node('d', "192.0.2.4", controller, NodeState::Decommissioned),
        node('e', "", controller, up),
        node('f', "2001:db8::6", controller, up),
    ];
    let mut view = View::default();
    view.apply(&nodes, &[]);
    let known = PeerResolver {
        own: nodes[0].id.parse().unwrap(),
        own_address: Some([192, 0, 2, 99].into()),
        saved: ClusterDirectory::default(),
        learned: Arc::default(),
        view: Some(Arc::new(view)),
    };
    let servers = Servers::of(&known);
    assert_eq!(servers.own, Some("192.0.2.99:6443".parse().unwrap()));
    let others = ["192.0.2.2:6443", "[2001:db8::6]:6443"];
    assert_eq!(servers.others, others.map(|other| other.parse().unwrap()));
    assert_eq!(
        Servers::of(&PeerResolver {
            view: None,
            ..known
        }),
        Servers::default()
    );
}
