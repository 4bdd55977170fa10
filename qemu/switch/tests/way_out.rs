//! The way out: the real process, with simulated machines that connect to sockets of this host.
//!
//! Nothing leaves the host. Most of the sockets are on its loopback, which machines reach by an alias only: that of the
//! documentation's addresses. `the_network_of_the_host_is_reached` does without.

mod madeup;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use hearth_switch::{
    Faults, Lifetime, Network, NetworkOptions, NetworkStatus, ProxySettings, WayOut,
};
use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use madeup::world::{
    GATEWAY, HERE, QUERY, QUIET, World, accept, allows_pings, bytes, datagrams, hear, listener,
    own_address, read_all, resolver, response, soon, unreachable, way_out,
};

const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);

#[tokio::test]
async fn a_machine_ends_its_direction_and_still_receives() {
    let world = World::new(Some(way_out())).await;
    let (listener, port) = listener().await;
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    let sent = bytes(3 << 20);
    let (there, received) = tokio::join!(
        async {
            soon(connection.send(&sent)).await.expect("sent");
            connection.close();
        },
        read_all(&mut host)
    );
    let () = there;
    assert!(received == sent, "{} of {}", received.len(), sent.len());
    let status = world.network.status().await.expect("a status");
    assert_eq!(status.way_out.connections, 1);
    assert_eq!(status.connections, 0);
    let back = async {
        host.write_all(&sent).await.expect("sent");
        host.shutdown().await.expect("ended");
    };
    let ((), received) = tokio::join!(soon(back), soon(connection.receive_all()));
    assert!(received.expect("received") == sent);
    world.all_ended().await;
}

#[tokio::test]
async fn a_host_ends_its_direction_and_still_receives() {
    let world = World::new(Some(way_out())).await;
    let (listener, port) = listener().await;
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    host.write_all(b"all there is").await.expect("sent");
    host.shutdown().await.expect("ended");
    let received = soon(connection.receive_all()).await.expect("received");
    assert_eq!(received, b"all there is");
    soon(connection.send(b"thanks")).await.expect("sent");
    connection.close();
    assert_eq!(read_all(&mut host).await, b"thanks");
    world.all_ended().await;
}

#[tokio::test]
async fn who_refuses_or_resets_is_seen_by_the_other() {
    let world = World::new(Some(way_out())).await;
    let (listener, port) = listener().await;
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    connection.abort();
    let error = soon(host.read_u8()).await.expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    let connection = world.connect(port).await;
    let host = accept(&listener).await;
    host.set_zero_linger().expect("set");
    drop(host);
    let error = soon(connection.receive()).await.expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    drop(listener);
    world.refuses(SocketAddr::new(HERE.into(), port)).await;
    world.all_ended().await;
}

#[tokio::test]
async fn who_does_not_read_makes_the_other_wait() {
    let world = World::new(Some(way_out())).await;
    let (listener, port) = listener().await;
    // The machine sends until the buffers of the host, of the switch and of the machine are full. How much the host
    // itself buffers is not known.
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    let total = 32 << 20;
    let sent = bytes(total);
    let mut sending = Box::pin(connection.send(&sent));
    assert!(timeout(Duration::from_secs(2), &mut sending).await.is_err());
    let taken = |status: &NetworkStatus| status.ports[0].counters.received_bytes;
    let before = taken(&world.network.status().await.expect("a status"));
    assert!(before < 20 << 20, "{before}");
    let rest = async {
        sending.await.expect("sent");
        connection.close();
    };
    let ((), received) = tokio::join!(soon(rest), read_all(&mut host));
    assert!(received == sent);

    // The other direction: the machine's window closes.
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    let chunk = vec![7; 64 << 20];
    let written = timeout(Duration::from_secs(2), host.write_all(&chunk)).await;
    assert!(written.is_err(), "64 MiB were taken by nobody");
    let given = world.network.status().await.expect("a status").ports[0]
        .counters
        .sent_bytes;
    assert!(given < 8 << 20, "{given}");
    let first = soon(connection.receive()).await.expect("received");
    assert!(first.iter().all(|byte| *byte == 7));
}

#[tokio::test]
async fn bytes_arrive_over_a_bad_link() {
    // What is lost, and so what has to be repeated, differs: data, acknowledgements, either end.
    let mut links: JoinSet<()> = (1..=8).map(carry_over_a_bad_link).collect();
    while let Some(carried) = links.join_next().await {
        carried.expect("carried");
    }
}

async fn carry_over_a_bad_link(seed: u64) {
    let world = World::with_seed(seed, Some(way_out())).await;
    let (listener, port) = listener().await;
    let faults = Faults {
        loss: 0.02,
        delay: Duration::from_millis(1),
        jitter: Duration::from_millis(2),
        ..Faults::default()
    };
    world
        .network
        .set_faults("node-0", faults)
        .await
        .expect("set");
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    let sent = bytes(256 << 10);
    let there = async {
        connection.send(&sent).await.expect("sent");
        connection.close();
    };
    let ((), received) = tokio::join!(soon(there), read_all(&mut host));
    assert!(received == sent, "seed {seed}");
    let back = async {
        host.write_all(&sent).await.expect("sent");
        drop(host);
    };
    let ((), received) = tokio::join!(soon(back), soon(connection.receive_all()));
    assert!(received.expect("received") == sent, "seed {seed}");
    let status = world.network.status().await.expect("a status");
    assert!(status.ports[0].counters.dropped_loss > 0, "seed {seed}");
}

#[tokio::test]
async fn a_cut_link_is_silent_and_heals() {
    let world = World::new(Some(way_out())).await;
    let (listener, port) = listener().await;
    let connection = world.connect(port).await;
    let mut host = accept(&listener).await;
    let cut = Faults {
        cut: true,
        ..Faults::default()
    };
    world.network.set_faults("node-0", cut).await.expect("cut");
    host.write_all(b"meanwhile").await.expect("sent");
    world
        .until(|status| status.ports[0].counters.dropped_cut > 1)
        .await;
    assert_eq!(connection.state(), State::Established);
    let whole = Faults::default();
    world
        .network
        .set_faults("node-0", whole)
        .await
        .expect("restored");
    assert_eq!(
        soon(connection.receive()).await.expect("received"),
        b"meanwhile"
    );
}

#[tokio::test]
async fn datagrams_are_answered_from_where_they_were_sent() {
    let world = World::new(Some(way_out())).await;
    let (host, port) = datagrams().await;
    let (one, other) = (world.machine.udp(), world.machine.udp());
    let to = SocketAddr::new(HERE.into(), port);
    let mut sources = Vec::new();
    for (socket, text) in [
        (&one, &b"one"[..]),
        (&other, b"other"),
        (&one, b"one again"),
    ] {
        socket.send(to, text);
        let (heard, from) = hear(&host).await;
        assert_eq!(heard, text);
        host.send_to(&[text, b"!"].concat(), from)
            .await
            .expect("sent");
        assert_eq!(soon(socket.receive()).await, (to, [text, b"!"].concat()));
        sources.push(from);
    }
    assert_eq!(sources[0], sources[2], "one flow has one socket");
    assert_ne!(sources[0], sources[1]);
    let status = world.network.status().await.expect("a status");
    assert_eq!(status.way_out.flows, 2);

    // Another sender than the one that was addressed is not heard.
    let (stranger, _) = datagrams().await;
    stranger
        .send_to(b"stranger", sources[0])
        .await
        .expect("sent");
    assert!(timeout(QUIET, one.receive()).await.is_err());

    // What does not fit into a packet is lost, and nothing else.
    host.send_to(&[0; 1473], sources[0]).await.expect("sent");
    host.send_to(&[1; 1472], sources[0]).await.expect("sent");
    assert_eq!(soon(one.receive()).await, (to, vec![1; 1472]));

    drop(host);
    let (from, message) = unreachable(&one, to).await;
    assert_eq!((from, message), (HERE.into(), [3, 3]), "port unreachable");
}

#[tokio::test]
async fn a_flow_too_many_replaces_the_one_that_was_idle_longest() {
    let world = World::new(Some(way_out())).await;
    let (host, port) = datagrams().await;
    let to = SocketAddr::new(HERE.into(), port);
    let most = 256;
    let sockets: Vec<_> = (0..=most).map(|_| world.machine.udp()).collect();
    let mut first = None;
    for socket in &sockets {
        socket.send(to, b"hello");
        let (_, from) = hear(&host).await;
        first.get_or_insert(from);
        host.send_to(b"welcome", from).await.expect("sent");
        soon(socket.receive()).await;
    }
    let status = world.network.status().await.expect("a status");
    assert_eq!(status.way_out.flows, most);
    // The first one has got another port.
    sockets[0].send(to, b"again");
    let (_, from) = hear(&host).await;
    assert_ne!(Some(from), first);
}

#[tokio::test]
async fn the_gateway_resolves_names_by_udp_and_tcp() {
    let (resolver, by_tcp, port) = resolver().await;
    // The first one does not answer.
    let (silent, silent_port) = datagrams().await;
    let servers = [silent_port, port].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let world = World::new(Some(WayOut {
        resolvers: Some(servers.to_vec()),
        ..way_out()
    }))
    .await;
    assert_eq!(world.machine.lease().await.resolvers, [GATEWAY]);
    let gateway = SocketAddr::new(GATEWAY.into(), 53);
    let socket = world.machine.udp();
    for length in [100, 1472, 3000] {
        socket.send(gateway, QUERY);
        let (asked, from) = hear(&resolver).await;
        assert_eq!(asked, QUERY);
        // Made up by somebody else, who does not know the query.
        let mut forged = response(50);
        forged[0] ^= 1;
        resolver.send_to(&forged, from).await.expect("sent");
        let answer = response(length);
        resolver.send_to(&answer, from).await.expect("sent");
        let (from, received) = soon(socket.receive()).await;
        assert_eq!(from, gateway);
        if length <= 1472 {
            assert_eq!(received, answer);
        } else {
            assert_eq!(received[2] & 0x02, 0x02, "truncated: ask by TCP");
            assert_eq!(received[12..], QUERY[12..]);
        }
    }
    drop(silent);

    let connection = soon(world.machine.connect(gateway))
        .await
        .expect("connected");
    let mut host = accept(&by_tcp).await;
    host.write_all(b"welcome").await.expect("sent");
    drop(host);
    let received = soon(connection.receive_all()).await.expect("received");
    assert_eq!(received, b"welcome");
    connection.close();
    world.all_ended().await;
}

#[tokio::test]
async fn names_that_nobody_resolves_are_not_answered() {
    let world = World::new(Some(way_out())).await;
    let socket = world.machine.udp();
    socket.send(SocketAddr::new(GATEWAY.into(), 53), QUERY);
    assert!(timeout(QUIET, socket.receive()).await.is_err());
    let refused = soon(world.machine.connect(SocketAddr::new(GATEWAY.into(), 53))).await;
    assert_eq!(
        refused.err().map(|error| error.kind()),
        Some(ErrorKind::ConnectionRefused)
    );
}

#[tokio::test]
async fn without_a_way_out_nothing_is_reached_or_announced() {
    let world = World::new(None).await;
    let lease = world.machine.lease().await;
    assert_eq!((lease.router, lease.resolvers), (Some(GATEWAY), vec![]));
    let (listener, port) = listener().await;
    let (host, udp_port) = datagrams().await;
    let connection = world.machine.connecting(SocketAddr::new(HERE.into(), port));
    let socket = world.machine.udp();
    let here = HERE.into();
    for to in [here, own_address(ELSEWHERE.into()).unwrap_or(here)] {
        socket.send(SocketAddr::new(to, udp_port), b"hello");
    }
    let mut buffer = [0; 16];
    tokio::select! {
        _ = listener.accept() => panic!("connected"),
        _ = host.recv_from(&mut buffer) => panic!("received"),
        () = tokio::time::sleep(QUIET) => {}
    }
    assert_eq!(connection.state(), State::SynSent);
    // The gateway has no resolver, like no other service.
    let refused = soon(world.machine.connect(SocketAddr::new(GATEWAY.into(), 53))).await;
    assert!(refused.is_err());
    let status = world.network.status().await.expect("a status");
    assert_eq!(status.way_out, hearth_switch::WayOutStatus::default());
}

#[tokio::test]
async fn the_loopback_and_the_subnet_are_never_translated() {
    let world = World::new(Some(way_out())).await;
    let everywhere = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .await
        .expect("a port");
    let port = everywhere.local_addr().expect("an address").port();
    let (listener, tcp_port) = listener().await;
    let socket = world.machine.udp();
    for to in [
        [127, 0, 0, 1],
        [127, 0, 0, 53],
        [10, 98, 0, 1],
        [169, 254, 0, 1],
    ] {
        // Each from a socket of its own: smoltcp keeps what it cannot send at the head of the queue.
        let socket = world.machine.udp();
        socket.send(SocketAddr::new(to.into(), port), b"never");
    }
    let connection = world
        .machine
        .connecting(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), tcp_port));
    // Frames are processed in order: what was sent before this would have been received before it.
    socket.send(SocketAddr::new(HERE.into(), port), b"by the alias");
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
        eprintln!("skipped: this host has no address but those of its loopback");
        return;
    };
    let world = World::new(Some(way_out())).await;
    let listener = TcpListener::bind((own, 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let to = SocketAddr::new(own, port);
    let connection = soon(world.machine.connect(to)).await.expect("connected");
    let mut host = accept(&listener).await;
    soon(connection.send(b"hello")).await.expect("sent");
    connection.close();
    assert_eq!(read_all(&mut host).await, b"hello");

    let socket = UdpSocket::bind((own, 0)).await.expect("a port");
    let to = SocketAddr::new(own, socket.local_addr().expect("an address").port());
    let machine = world.machine.udp();
    machine.send(to, b"hello");
    let (_, from) = hear(&socket).await;
    socket.send_to(b"welcome", from).await.expect("sent");
    assert_eq!(soon(machine.receive()).await, (to, b"welcome".to_vec()));
}

/// Reads the head of a request.
async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon(stream.read_u8()).await.expect("a request"));
    }
    String::from_utf8(head).expect("text")
}

#[tokio::test]
async fn a_proxy_of_the_host_makes_the_connections() {
    let (proxy, proxy_port) = listener().await;
    let (direct, direct_port) = listener().await;
    let world = World::new(Some(WayOut {
        proxy: Some(ProxySettings {
            https: Some(format!("http://user:secret@127.0.0.1:{proxy_port}")),
            all: Some(format!("127.0.0.1:{proxy_port}")),
            ..ProxySettings::default()
        }),
        ..way_out()
    }))
    .await;
    let to = SocketAddr::new(ELSEWHERE.into(), 443);
    let connection = world.machine.connecting(to);
    let mut host = accept(&proxy).await;
    let request = head(&mut host).await;
    assert!(
        request.starts_with("CONNECT 203.0.113.2:443 HTTP/1.1\r\n"),
        "{request}"
    );
    assert!(
        request.contains("Proxy-Authorization: Basic dXNlcjpzZWNyZXQ="),
        "{request}"
    );
    assert_ne!(
        connection.state(),
        State::Established,
        "not before the proxy is connected"
    );
    // The remote host is the first to speak.
    let answer = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nwelcome";
    host.write_all(answer).await.expect("sent");
    assert_eq!(
        soon(connection.receive()).await.expect("received"),
        b"welcome"
    );
    soon(connection.send(b"thanks")).await.expect("sent");
    connection.close();
    assert_eq!(read_all(&mut host).await, b"thanks");
    drop(host);

    let refused = world
        .machine
        .connecting(SocketAddr::new(ELSEWHERE.into(), 22));
    let mut host = accept(&proxy).await;
    assert!(!head(&mut host).await.contains("Authorization"));
    host.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        .await
        .expect("sent");
    let error = soon(refused.receive()).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    // An alias needs none.
    world.connect(direct_port).await;
    accept(&direct).await;
    let log = std::fs::read_to_string(world.network.log()).expect("a log");
    assert!(log.contains("403 Forbidden"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}

#[tokio::test]
async fn pings_are_answered_where_the_host_allows_it() {
    let world = World::new(Some(way_out())).await;
    assert_eq!(
        soon(world.machine.ping(GATEWAY.into(), b"gateway")).await,
        b"gateway"
    );
    let log = || std::fs::read_to_string(world.network.log()).expect("a log");
    if allows_pings(HERE.into()) {
        for data in [&b"hello"[..], &bytes(1400)] {
            assert_eq!(soon(world.machine.ping(HERE.into(), data)).await, data);
        }
        return;
    }
    for _ in 0..2 {
        let ping = timeout(QUIET, world.machine.ping(HERE.into(), b"hello"));
        assert!(ping.await.is_err(), "answered without an ICMP socket");
    }
    assert_eq!(log().matches("ping_group_range").count(), 1, "{}", log());
}

#[tokio::test]
async fn an_alias_within_the_subnet_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch"));
    let inside: IpAddr = Ipv4Addr::new(10, 98, 0, 9).into();
    let options = NetworkOptions {
        way_out: Some(WayOut {
            aliases: BTreeMap::from([(inside, Ipv4Addr::LOCALHOST.into())]),
            ..WayOut::default()
        }),
        ..NetworkOptions::default()
    };
    let error = Network::start(&binary, folder.path(), options, Lifetime::KillWithParent)
        .await
        .expect_err("not reached")
        .to_string();
    assert!(error.contains("way_out.aliases: expected"), "{error}");
}
