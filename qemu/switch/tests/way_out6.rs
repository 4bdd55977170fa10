//! The way out for IPv6: what differs from IPv4, by the same means as in `way_out.rs`.
//!
//! Nothing leaves the host. Machines reach its loopback by an alias only. Where it has no IPv6, as in many containers,
//! the tests that need it are skipped; those of the gateway itself, and of a host without IPv6, are not.

mod madeup;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use hearth_switch::{NetworkOptions, WayOut};
use smoltcp::socket::tcp::State;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, UdpSocket};
use tokio::time::timeout;

use madeup::world::{
    HERE6, QUERY, QUIET, World, accept, allows_pings, bytes, hear, own_address, read_all, resolver,
    response, soon, unreachable, way_out,
};

const MACHINE: Ipv6Addr = Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 0x10);
const ELSEWHERE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
fn gateway() -> Ipv6Addr {
    NetworkOptions::default().gateway6
}

/// A network whose machine has an IPv6 address, too.
async fn world(way_out: WayOut) -> World {
    let world = World::new(Some(way_out)).await;
    world.machine.configure6(MACHINE, gateway());
    world
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::new(HERE6.into(), port)
}

/// A listener and a UDP socket on an address of this host, with their ports; None if it has no such address.
async fn sockets(address: impl Into<IpAddr>) -> Option<(TcpListener, u16, UdpSocket, u16)> {
    let address = address.into();
    let listener = match TcpListener::bind((address, 0)).await {
        Ok(listener) => listener,
        Err(error) => {
            eprintln!("skipped: this host has no {address}: {error}");
            return None;
        }
    };
    let socket = UdpSocket::bind((address, 0)).await.expect("a port");
    let tcp = listener.local_addr().expect("an address").port();
    let udp = socket.local_addr().expect("an address").port();
    Some((listener, tcp, socket, udp))
}

#[tokio::test]
async fn connections_are_made_refused_and_reset() {
    let Some((listener, port, _, _)) = sockets(Ipv6Addr::LOCALHOST).await else {
        return;
    };
    let world = world(way_out()).await;
    let connection = soon(world.machine.connect(here(port))).await;
    let connection = connection.expect("connected");
    let mut host = accept(&listener).await;
    let sent = bytes(1 << 20);
    let there = async {
        connection.send(&sent).await.expect("sent");
        connection.close();
    };
    let ((), received) = tokio::join!(soon(there), read_all(&mut host));
    assert!(received == sent, "{} of {}", received.len(), sent.len());
    let back = async {
        host.write_all(&sent).await.expect("sent");
        drop(host);
    };
    let ((), received) = tokio::join!(soon(back), soon(connection.receive_all()));
    assert!(received.expect("received") == sent);

    let connection = soon(world.machine.connect(here(port))).await;
    let connection = connection.expect("connected");
    let host = accept(&listener).await;
    host.set_zero_linger().expect("set");
    drop(host);
    let error = soon(connection.receive()).await.expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    drop(listener);
    world.refuses(here(port)).await;
    world.all_ended().await;
}

#[tokio::test]
async fn datagrams_are_answered_from_where_they_were_sent() {
    let Some((_, _, host, port)) = sockets(Ipv6Addr::LOCALHOST).await else {
        return;
    };
    let world = world(way_out()).await;
    let machine = world.machine.udp();
    machine.send(here(port), b"hello");
    let (heard, from) = hear(&host).await;
    assert_eq!(heard, b"hello");
    // What does not fit into a packet is lost, and nothing else.
    host.send_to(&[0; 1453], from).await.expect("sent");
    host.send_to(&[1; 1452], from).await.expect("sent");
    let received = soon(machine.receive()).await;
    assert_eq!(received, (here(port), vec![1; 1452]));
    let status = world.network.status().await.expect("a status");
    assert_eq!(status.way_out.flows, 1);

    drop(host);
    let (from, message) = unreachable(&machine, here(port)).await;
    assert_eq!((from, message), (HERE6.into(), [1, 4]), "port unreachable");
}

#[tokio::test]
async fn the_gateway_resolves_names_whichever_version_its_resolver_has() {
    let (resolver, by_tcp, port) = resolver().await;
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let world = world(WayOut {
        resolvers: Some(vec![server]),
        ..way_out()
    })
    .await;
    let asked = SocketAddr::new(gateway().into(), 53);
    let machine = world.machine.udp();
    for length in [100, 1452, 1453] {
        machine.send(asked, QUERY);
        let (query, from) = hear(&resolver).await;
        assert_eq!(query, QUERY);
        let answer = response(length);
        resolver.send_to(&answer, from).await.expect("sent");
        let (from, received) = soon(machine.receive()).await;
        assert_eq!(from, asked);
        if length <= 1452 {
            assert_eq!(received, answer);
        } else {
            assert_eq!(received[2] & 0x02, 0x02, "truncated: ask by TCP");
        }
    }
    let connection = soon(world.machine.connect(asked)).await;
    let connection = connection.expect("connected");
    let mut host = accept(&by_tcp).await;
    host.write_all(b"welcome").await.expect("sent");
    drop(host);
    let received = soon(connection.receive_all()).await.expect("received");
    assert_eq!(received, b"welcome");
}

#[tokio::test]
async fn pings_are_answered_where_the_host_allows_it() {
    let world = world(way_out()).await;
    let data = b"gateway";
    assert_eq!(soon(world.machine.ping(gateway().into(), data)).await, data);
    if !allows_pings(HERE6.into()) || sockets(Ipv6Addr::LOCALHOST).await.is_none() {
        eprintln!("skipped: this host allows no ICMPv6 sockets");
        return;
    }
    for data in [&b"hello"[..], &bytes(1400)] {
        assert_eq!(soon(world.machine.ping(HERE6.into(), data)).await, data);
    }
}

#[tokio::test]
async fn the_loopback_the_link_and_the_subnet_are_never_translated() {
    let Some((listener, tcp_port, everywhere, port)) = sockets(Ipv6Addr::UNSPECIFIED).await else {
        return;
    };
    let world = world(way_out()).await;
    for to in [
        "::1",
        "::ffff:127.0.0.1",
        "fe80::1",
        "fd68:6561:7274::1",
        "fd68:6561:7274::11",
    ] {
        // Each from a socket of its own: smoltcp keeps what it cannot send at the head of the queue.
        let machine = world.machine.udp();
        let to: IpAddr = to.parse().expect("an address");
        machine.send(SocketAddr::new(to, port), b"never");
    }
    let loopback = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), tcp_port);
    let connection = world.machine.connecting(loopback);
    // Frames are processed in order: what was sent before this would have been received before it.
    let machine = world.machine.udp();
    machine.send(here(port), b"by the alias");
    let (heard, _) = hear(&everywhere).await;
    assert_eq!(heard, b"by the alias");
    assert!(timeout(QUIET, listener.accept()).await.is_err());
    assert_ne!(connection.state(), State::Established);
    let status = world.network.status().await.expect("a status");
    assert_eq!((status.way_out.connections, status.way_out.flows), (0, 1));
}

#[tokio::test]
async fn the_network_of_the_host_is_reached() {
    let Some(own) = own_address(ELSEWHERE.into()) else {
        eprintln!("skipped: this host has no IPv6 address but that of its loopback");
        return;
    };
    let Some((listener, tcp_port, socket, udp_port)) = sockets(own).await else {
        return;
    };
    let world = world(way_out()).await;
    let to = SocketAddr::new(own, tcp_port);
    let connection = soon(world.machine.connect(to)).await.expect("connected");
    let mut host = accept(&listener).await;
    soon(connection.send(b"hello")).await.expect("sent");
    connection.close();
    assert_eq!(read_all(&mut host).await, b"hello");

    let to = SocketAddr::new(own, udp_port);
    let machine = world.machine.udp();
    machine.send(to, b"hello");
    let (_, from) = hear(&socket).await;
    socket.send_to(b"welcome", from).await.expect("sent");
    assert_eq!(soon(machine.receive()).await, (to, b"welcome".to_vec()));
}

#[tokio::test]
async fn a_host_without_ipv6_refuses_it_and_says_so_once() {
    // A network namespace of its own has no route to anywhere.
    let unshare = ["--user", "--map-root-user", "--net"];
    let allowed = Command::new("unshare").args(unshare).arg("true").status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this host allows its users no network namespaces");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("switch");
    let script = format!(
        "#!/bin/sh\nexec unshare {} {} \"$@\"\n",
        unshare.join(" "),
        PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch")).display()
    );
    std::fs::write(&program, script).expect("written");
    let executable = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(&program, executable).expect("executable");
    let world = World::of(&program, 1, Some(way_out())).await;
    world.machine.configure6(MACHINE, gateway());
    for _ in 0..2 {
        let machine = world.machine.udp();
        machine.send(SocketAddr::new(ELSEWHERE.into(), 123), b"hello");
        let (from, message) = soon(machine.receive_error()).await;
        assert_eq!((from, message), (gateway().into(), [1, 0]), "no route");
    }
    let connection = world
        .machine
        .connecting(SocketAddr::new(ELSEWHERE.into(), 80));
    world.all_ended().await;
    assert_ne!(connection.state(), State::Established);
    let log = std::fs::read_to_string(world.network.log()).expect("a log");
    assert_eq!(log.matches("no route to IPv6 networks").count(), 1, "{log}");
}
