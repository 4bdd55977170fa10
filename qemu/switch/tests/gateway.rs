//! The host's access to the virtual network: the real process, with simulated machines that serve TCP.

mod madeup;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_switch::{Faults, Lifetime, Mac, Network, NetworkOptions, NetworkStatus, PortStatus};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use madeup::{Machine, Service, Shared};

/// For operations that take milliseconds on a quiet machine.
const BOUND: Duration = Duration::from_secs(60);

const PORT: u16 = 7835;
const OTHER_PORT: u16 = 7836;

fn options() -> NetworkOptions {
    NetworkOptions {
        seed: Some(1),
        ..NetworkOptions::default()
    }
}

async fn start(dir: &Path) -> Network {
    start_with(dir, options()).await
}

async fn start_with(dir: &Path, options: NetworkOptions) -> Network {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch"));
    Network::start(&binary, dir, options, Lifetime::KillWithParent)
        .await
        .expect("a network")
}

/// A machine that has its address.
async fn machine(network: &Network, number: u16, services: &[(u16, Service, usize)]) -> Machine {
    let (mac, address) = (Mac::of_machine(number), options().machine_address(number));
    let port = network
        .add_port(&name(number), mac, address)
        .await
        .expect("a port");
    let mut machine = Machine::start(&port.socket, mac, services).await;
    timeout(BOUND, machine.has_address(address))
        .await
        .expect("DHCP");
    machine
}

fn name(number: u16) -> String {
    format!("node-{number}")
}

async fn connect(address: SocketAddr) -> TcpStream {
    timeout(BOUND, TcpStream::connect(address))
        .await
        .expect("in time")
        .expect("the switch listens")
}

/// Sends bytes and an end, and returns everything received until the peer's end.
async fn exchange(stream: TcpStream, bytes: Vec<u8>) -> Vec<u8> {
    let (mut input, mut output) = stream.into_split();
    let mut read = Vec::new();
    let send = async {
        output.write_all(&bytes).await?;
        output.shutdown().await
    };
    let (sent, received) = timeout(BOUND, async {
        tokio::join!(send, input.read_to_end(&mut read))
    })
    .await
    .expect("in time");
    sent.expect("sent");
    received.expect("received");
    read
}

async fn say(stream: &mut TcpStream, text: &[u8]) {
    timeout(BOUND, stream.write_all(text))
        .await
        .expect("in time")
        .expect("sent");
}

async fn hear(stream: &mut TcpStream, text: &[u8]) {
    let mut read = vec![0; text.len()];
    timeout(BOUND, stream.read_exact(&mut read))
        .await
        .expect("in time")
        .expect("received");
    assert_eq!(read, text);
}

/// Waits for a matching status.
async fn until(network: &Network, wanted: impl Fn(&NetworkStatus) -> bool) -> NetworkStatus {
    let reached = async {
        loop {
            let status = network.status().await.expect("a status");
            if wanted(&status) {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BOUND, reached).await.expect("in time")
}

fn port(status: &NetworkStatus, number: u16) -> &PortStatus {
    status.port(&name(number)).expect("a port")
}

/// Bytes that show when they are misplaced.
fn bytes(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
        .collect()
}

#[tokio::test]
async fn the_host_reaches_a_machine_at_its_own_address() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 4)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    assert!(address.ip().is_loopback());
    assert_eq!(
        network.forward("node-0", PORT).await.expect("again"),
        address
    );
    assert_ne!(
        network.forward("node-0", OTHER_PORT).await.expect("other"),
        address
    );

    let sent = bytes(3 << 20);
    let received = exchange(connect(address).await, sent.clone()).await;
    assert!(received == sent, "{} of {}", received.len(), sent.len());
    let status = until(&network, |status| status.connections == 0).await;
    let port = port(&status, 0);
    assert!(port.connected);
    assert_eq!(port.leased, Some(options().machine_address(0)));
    assert_eq!(port.forwards.len(), 2);
    assert!(port.counters.received_bytes > 3 << 20, "{port:?}");
}

#[tokio::test]
async fn who_refuses_or_resets_is_seen_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Reset, 1)]).await;
    let refused = network
        .forward("node-0", OTHER_PORT)
        .await
        .expect("forwarded");
    let reset = network.forward("node-0", PORT).await.expect("forwarded");
    for address in [refused, reset] {
        let mut stream = connect(address).await;
        // May be too late already.
        let _ = stream.write_all(b"hello").await;
        let mut read = Vec::new();
        let error = timeout(BOUND, stream.read_to_end(&mut read))
            .await
            .expect("in time")
            .expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    until(&network, |status| status.connections == 0).await;
}

#[tokio::test]
async fn a_host_that_goes_away_is_seen_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 1)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    // The machine serves one at a time, so each must end before the next.
    for _ in 0..3 {
        let mut stream = connect(address).await;
        say(&mut stream, b"hello").await;
        hear(&mut stream, b"hello").await;
        stream.set_zero_linger().expect("set");
        drop(stream);
        until(&network, |status| status.connections == 0).await;
    }
}

#[tokio::test]
async fn a_cut_link_is_silent_and_heals() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 2)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let mut stream = connect(address).await;
    say(&mut stream, b"before").await;
    hear(&mut stream, b"before").await;

    let cut = Faults {
        cut: true,
        ..Faults::default()
    };
    network.set_faults("node-0", cut).await.expect("cut");
    let before = network.status().await.expect("a status");
    say(&mut stream, b"meanwhile").await;
    let status = until(&network, |status| {
        port(status, 0).counters.dropped_cut > port(&before, 0).counters.dropped_cut + 1
    })
    .await;
    assert!(port(&status, 0).connected, "its card stays plugged in");
    assert_eq!(status.connections, 1);
    let heard = stream.try_read(&mut [0; 16]).expect_err("nothing");
    assert_eq!(heard.kind(), ErrorKind::WouldBlock);

    network
        .set_faults("node-0", Faults::default())
        .await
        .expect("restored");
    hear(&mut stream, b"meanwhile").await;
}

#[tokio::test]
async fn bytes_arrive_over_a_bad_link() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 1)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let faults = Faults {
        loss: 0.02,
        delay: Duration::from_millis(1),
        jitter: Duration::from_millis(2),
        ..Faults::default()
    };
    network.set_faults("node-0", faults).await.expect("set");
    let sent = bytes(128 << 10);
    assert!(exchange(connect(address).await, sent.clone()).await == sent);
    let status = network.status().await.expect("a status");
    assert_eq!(port(&status, 0).faults, faults);
    assert!(port(&status, 0).counters.dropped_loss > 0);
    assert_eq!(status.seed, 1);
}

#[tokio::test]
async fn large_packets_disappear_in_a_black_hole() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 1)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let faults = Faults {
        mtu: Some(1000),
        ..Faults::default()
    };
    network.set_faults("node-0", faults).await.expect("set");
    let mut stream = connect(address).await;
    say(&mut stream, b"small").await;
    hear(&mut stream, b"small").await;
    say(&mut stream, &[7; 1400]).await;
    until(&network, |status| port(status, 0).counters.dropped_mtu > 0).await;
    network
        .set_faults("node-0", Faults::default())
        .await
        .expect("mended");
    hear(&mut stream, &[7; 1400]).await;
}

#[tokio::test]
async fn a_changed_address_is_taken_at_the_renewal() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = NetworkOptions {
        lease: Duration::from_secs(2),
        ..options()
    };
    let network = start_with(folder.path(), options.clone()).await;
    let mut machine = machine(&network, 0, &[(PORT, Service::Echo, 2)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let (old, new) = (options.machine_address(0), options.machine_address(77));
    network.set_address("node-0", new).await.expect("set");
    // The host reaches it before and after.
    let here = exchange(connect(address).await, b"hello".to_vec()).await;
    assert_eq!(here, b"hello");
    timeout(BOUND, machine.has_address(new))
        .await
        .expect("renewed");
    let status = until(&network, |status| port(status, 0).leased == Some(new)).await;
    assert_eq!(port(&status, 0).address, new);
    let there = exchange(connect(address).await, b"hello".to_vec()).await;
    assert_eq!(there, b"hello");
    // And the old address is free.
    let mac = Mac::of_machine(1);
    network.add_port("node-1", mac, old).await.expect("a port");
}

#[tokio::test]
async fn an_address_that_comes_late_is_taken_all_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let (mac, address) = (Mac::of_machine(0), options().machine_address(0));
    let port = network
        .add_port("node-0", mac, address)
        .await
        .expect("a port");
    network.set_dhcp("node-0", false).await.expect("silenced");
    let services = [(PORT, Service::Echo, 1)];
    let mut machine = Machine::start(&port.socket, mac, &services).await;
    let status = until(&network, |status| {
        self::port(status, 0).counters.received_frames > 0
    })
    .await;
    assert!(!self::port(&status, 0).dhcp);
    assert_eq!(
        (self::port(&status, 0).leased, machine.address()),
        (None, None)
    );
    network.set_dhcp("node-0", true).await.expect("served");
    timeout(BOUND, machine.has_address(address))
        .await
        .expect("asked again");
    let forward = network.forward("node-0", PORT).await.expect("forwarded");
    assert_eq!(
        exchange(connect(forward).await, b"hello".to_vec()).await,
        b"hello"
    );
}

#[tokio::test]
async fn six_hundred_connections_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 600)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let mut streams = Vec::new();
    for number in 0..600_u16 {
        let mut stream = connect(address).await;
        say(&mut stream, &number.to_be_bytes()).await;
        streams.push(stream);
    }
    for (number, stream) in (0..600_u16).zip(&mut streams) {
        hear(stream, &number.to_be_bytes()).await;
    }
    let status = network.status().await.expect("a status");
    assert_eq!(status.connections, 600);
    let mut exchanges = JoinSet::new();
    for stream in streams {
        let sent = bytes(20_000);
        exchanges.spawn(async move { exchange(stream, sent.clone()).await == sent });
    }
    assert!(exchanges.join_all().await.into_iter().all(|whole| whole));
    until(&network, |status| status.connections == 0).await;
}

#[tokio::test]
async fn who_does_not_read_makes_the_other_wait() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let total = 8 << 20;
    let services = [
        (PORT, Service::Ignore, 1),
        (OTHER_PORT, Service::Give(total), 1),
    ];
    let _machine = machine(&network, 0, &services).await;
    // Fills the buffers of the host, of the switch and of the machine, and then stops. How much the host itself buffers
    // is not known.
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    let mut stream = connect(address).await;
    let chunk = vec![0; 1 << 20];
    let endless = async {
        for _ in 0..64 {
            stream.write_all(&chunk).await.expect("sent");
        }
    };
    let written = timeout(Duration::from_secs(2), endless).await;
    assert!(written.is_err(), "64 MiB were taken by nobody");
    let status = network.status().await.expect("a status");
    let given = port(&status, 0).counters.sent_bytes;
    assert!(given < 1 << 20, "{given}");

    // The other direction: a host that reads late gets everything.
    let address = network
        .forward("node-0", OTHER_PORT)
        .await
        .expect("forwarded");
    let mut stream = connect(address).await;
    until(&network, |status| {
        port(status, 0).counters.received_bytes > 64 << 10
    })
    .await;
    let mut read = Vec::new();
    timeout(BOUND, stream.read_to_end(&mut read))
        .await
        .expect("in time")
        .expect("received");
    assert_eq!(read.len(), total);
}

#[tokio::test]
async fn parted_machines_are_still_seen_by_the_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machines = [
        machine(&network, 0, &[(PORT, Service::Echo, 1)]).await,
        machine(&network, 1, &[(PORT, Service::Echo, 1)]).await,
    ];
    network
        .block("node-1", "node-0", true)
        .await
        .expect("blocked");
    let status = network.status().await.expect("a status");
    assert_eq!(status.blocks, [(name(0), name(1))]);
    for number in [0, 1] {
        let address = network
            .forward(&name(number), PORT)
            .await
            .expect("forwarded");
        assert_eq!(
            exchange(connect(address).await, b"hello".to_vec()).await,
            b"hello"
        );
    }
    // Their broadcasts, if nothing else, no longer reach each other.
    until(&network, |status| {
        port(status, 0).counters.dropped_blocked > 0 && port(status, 1).counters.dropped_blocked > 0
    })
    .await;
}

#[tokio::test]
async fn what_was_on_the_wire_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let _machine = machine(&network, 0, &[(PORT, Service::Echo, 1)]).await;
    let address = network.forward("node-0", PORT).await.expect("forwarded");
    exchange(
        connect(address).await,
        b"a word that is found again".to_vec(),
    )
    .await;
    let capture = network
        .status()
        .await
        .expect("a status")
        .capture
        .expect("a capture");
    assert_eq!(capture.dropped, 0);
    network.stop().await.expect("stopped");

    let file = std::fs::read(capture.path).expect("the capture");
    assert_eq!(file[..4], 0xa1b2_c3d4_u32.to_le_bytes());
    let mut frames = Vec::new();
    let mut rest = &file[24..];
    while !rest.is_empty() {
        let length = u32::from_le_bytes(rest[8..12].try_into().expect("four")) as usize;
        frames.push(&rest[16..16 + length]);
        rest = &rest[16 + length..];
    }
    assert!(frames.len() as u64 >= capture.frames);
    let word = b"a word that is found again";
    let with_word = frames
        .iter()
        .filter(|frame| frame.windows(word.len()).any(|part| part == word));
    // Both directions.
    assert!(with_word.count() >= 2);
}

#[tokio::test]
async fn connections_to_a_shared_address_go_to_the_machine_that_has_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    // Each is known by the number of bytes that it gives.
    let services = |bytes| {
        [
            (PORT, Service::Give(bytes), 2),
            (OTHER_PORT, Service::Echo, 1),
        ]
    };
    let first = machine(&network, 1, &services(1)).await;
    let second = machine(&network, 2, &services(2)).await;
    let address = options().shared_address();
    let host = network.forward_shared(address, PORT).await.expect("a port");
    let again = network.forward_shared(address, PORT).await.expect("a port");
    assert_eq!(host, again);

    let given = async || exchange(connect(host).await, Vec::new()).await.len();
    let has_it = |announced| Shared {
        address: Some(address),
        announced,
    };
    // It is asked who has it.
    first.share(has_it(false)).await;
    assert_eq!(given().await, 1);
    assert_eq!(given().await, 1);
    let other = network.forward_shared(address, OTHER_PORT).await;
    let mut open = connect(other.expect("a port")).await;
    say(&mut open, b"before").await;
    hear(&mut open, b"before").await;

    // It moves, and the new holder says so: to whom has asked for a connection before, too.
    first.share(Shared::default()).await;
    let early = connect(host).await;
    second.share(has_it(true)).await;
    assert_eq!(exchange(early, Vec::new()).await.len(), 2);
    assert_eq!(given().await, 2);
    // A connection to the last holder is reset by the new one.
    say(&mut open, b"after").await;
    let error = timeout(BOUND, open.read_u8()).await.expect("in time");
    let error = error.expect_err("it is unknown");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    for (address, wanted) in [
        (options().machine_address(1), "in use by port"),
        (
            "192.0.2.1".parse().expect("an address"),
            "expected a host address",
        ),
    ] {
        let refused = network.forward_shared(address, PORT).await;
        let refused = refused.expect_err("not an address to share").to_string();
        assert!(refused.contains(wanted), "{refused}");
    }
    network.stop().await.expect("stopped");
}
