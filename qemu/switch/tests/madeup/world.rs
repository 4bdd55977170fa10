//! A network with a way out, a machine in it, and sockets of this host.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_switch::{Lifetime, Mac, Network, NetworkOptions, NetworkStatus, ProxySettings, WayOut};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::timeout;

use super::client::{Client, Connection, Datagrams};

/// For operations that take milliseconds on a quiet machine.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

/// In which nothing is expected to happen.
pub(crate) const QUIET: Duration = Duration::from_millis(300);

/// Stands for the host's loopback.
pub(crate) const HERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The same in IPv6.
pub(crate) const HERE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);

/// A way out that depends on nothing of the host's configuration.
pub(crate) fn way_out() -> WayOut {
    WayOut {
        resolvers: Some(Vec::new()),
        proxy: Some(ProxySettings::default()),
        aliases: BTreeMap::from([
            (HERE.into(), Ipv4Addr::LOCALHOST.into()),
            (HERE6.into(), Ipv6Addr::LOCALHOST.into()),
        ]),
    }
}

/// A network with a way out, and a machine.
pub(crate) struct World {
    _folder: tempfile::TempDir,
    pub(crate) network: Network,
    pub(crate) machine: Client,
}

impl World {
    pub(crate) async fn new(way_out: Option<WayOut>) -> Self {
        Self::with_seed(1, way_out).await
    }

    /// One whose random faults have this seed.
    pub(crate) async fn with_seed(seed: u64, way_out: Option<WayOut>) -> Self {
        let binary = PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch"));
        Self::of(&binary, seed, way_out).await
    }

    /// One whose process is this program.
    pub(crate) async fn of(binary: &Path, seed: u64, way_out: Option<WayOut>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let options = NetworkOptions {
            seed: Some(seed),
            way_out,
            ..NetworkOptions::default()
        };
        let lifetime = Lifetime::KillWithParent;
        let network = Network::start(binary, folder.path(), options, lifetime)
            .await
            .expect("a network");
        let (mac, address) = (
            Mac::of_machine(0),
            NetworkOptions::default().machine_address(0),
        );
        let port = network
            .add_port("node-0", mac, address)
            .await
            .expect("a port");
        let machine = soon(Client::start(&port.socket, mac)).await;
        Self {
            _folder: folder,
            network,
            machine,
        }
    }

    pub(crate) async fn connect(&self, port: u16) -> Connection {
        let to = SocketAddr::new(HERE.into(), port);
        soon(self.machine.connect(to)).await.expect("a connection")
    }

    /// Waits for a matching status.
    pub(crate) async fn until(&self, wanted: impl Fn(&NetworkStatus) -> bool) -> NetworkStatus {
        soon(async {
            loop {
                let status = self.network.status().await.expect("a status");
                if wanted(&status) {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
    }

    /// Waits until connections to a listener that was dropped are refused. While another test starts a process, that has a
    /// copy of the listener until its program runs.
    pub(crate) async fn refuses(&self, to: SocketAddr) {
        soon(async {
            loop {
                match self.machine.connect(to).await {
                    Ok(connection) => connection.close(),
                    Err(error) => return assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
                }
            }
        })
        .await;
    }

    pub(crate) async fn all_ended(&self) {
        self.until(|status| status.way_out.connections == 0).await;
    }
}

pub(crate) async fn soon<T>(work: impl Future<Output = T>) -> T {
    timeout(BOUND, work).await.expect("in time")
}

/// Sends datagrams to a socket that was dropped until there is an error: who has sent it, its type and its code. As with
/// [`World::refuses`], another process may have a copy of the socket for a moment.
pub(crate) async fn unreachable(machine: &Datagrams, to: SocketAddr) -> (IpAddr, [u8; 2]) {
    soon(async {
        loop {
            machine.send(to, b"nobody");
            if let Ok(error) = timeout(QUIET, machine.receive_error()).await {
                return error;
            }
        }
    })
    .await
}

/// A listener on the loopback.
pub(crate) async fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

pub(crate) async fn accept(listener: &TcpListener) -> TcpStream {
    soon(listener.accept()).await.expect("a connection").0
}

/// A UDP socket on the loopback.
pub(crate) async fn datagrams() -> (UdpSocket, u16) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("a port");
    let port = socket.local_addr().expect("an address").port();
    (socket, port)
}

/// The sockets of a resolver: one port for datagrams and for connections.
pub(crate) async fn resolver() -> (UdpSocket, TcpListener, u16) {
    loop {
        let (socket, port) = datagrams().await;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            Ok(listener) => return (socket, listener, port),
            // It is free for datagrams only.
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => panic!("no port: {error}"),
        }
    }
}

pub(crate) async fn hear(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 2000];
    let (length, from) = soon(socket.recv_from(&mut buffer)).await.expect("received");
    buffer.truncate(length);
    (buffer, from)
}

pub(crate) async fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut read = Vec::new();
    soon(stream.read_to_end(&mut read)).await.expect("received");
    read
}

/// Bytes that show when they are misplaced.
pub(crate) fn bytes(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
        .collect()
}

/// A query for the addresses of a.example.
pub(crate) const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01";

/// A response to it of this length.
pub(crate) fn response(length: usize) -> Vec<u8> {
    let mut response = QUERY.to_vec();
    response[2] |= 0x80;
    response.resize(length, 0);
    response
}

/// The address with which this host would reach another one; none if that is on its loopback. Nothing is sent.
pub(crate) fn own_address(other: IpAddr) -> Option<IpAddr> {
    let any = match other {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect((other, 9)).ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_loopback()).then_some(own)
}

/// Whether this host allows ICMP sockets to its users, of the version of this address.
pub(crate) fn allows_pings(address: IpAddr) -> bool {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
    let (family, protocol) = match address {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    let flags = SocketFlags::CLOEXEC;
    socket_with(family, SocketType::DGRAM, flags, Some(protocol)).is_ok()
}
