//! The virtual network: the real process, with simulated machines. The tests of hearth-qemu use a real one.

mod madeup;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use hearth_switch::{
    Faults, Lifetime, Mac, Network, NetworkError, NetworkOptions, NetworkStatus, Refusal,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use madeup::plug;

/// For operations that take milliseconds on a quiet machine.
const BOUND: Duration = Duration::from_secs(60);

fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch"))
}

async fn start(dir: &Path) -> Network {
    Network::start(
        &binary(),
        dir,
        NetworkOptions::default(),
        Lifetime::KillWithParent,
    )
    .await
    .expect("a network")
}

async fn send(stream: &mut UnixStream, frame: &[u8]) {
    let length = u32::try_from(frame.len()).expect("a short frame");
    let bytes = [&length.to_be_bytes(), frame].concat();
    stream.write_all(&bytes).await.expect("sent");
}

async fn receive(stream: &mut UnixStream) -> Vec<u8> {
    let read = async {
        let length = stream.read_u32().await?;
        let mut frame = vec![0; length as usize];
        stream.read_exact(&mut frame).await?;
        Ok::<_, std::io::Error>(frame)
    };
    timeout(BOUND, read)
        .await
        .expect("in time")
        .expect("a frame")
}

fn frame(to: [u8; 6], from: Mac, text: &str) -> Vec<u8> {
    // An unused type.
    [&to, &from.0, &[0x88, 0xb5][..], text.as_bytes()].concat()
}

/// Waits for a matching status.
async fn until(network: &Network, wanted: impl Fn(&NetworkStatus) -> bool) {
    let reached = async {
        while !wanted(&network.status().await.expect("a status")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BOUND, reached).await.expect("in time");
}

/// Whether a process of this number is running; a zombie is not.
fn runs(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

/// Waits for the end of a process that is not a child of this one.
async fn gone(pid: i32) {
    let ended = async {
        while runs(pid) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(BOUND, ended)
        .await
        .expect("the process ends");
}

#[tokio::test]
async fn machines_hear_each_other_and_links_fail_on_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let deep = folder.path().join("d".repeat(100)).join("net");
    let network = start(&deep).await;
    let options = NetworkOptions::default();
    let macs = [Mac::of_machine(0), Mac::of_machine(1)];
    let mut machines = Vec::new();
    for (number, mac) in (0..).zip(macs) {
        let name = format!("node-{number}");
        let address = options.machine_address(number);
        let port = network.add_port(&name, mac, address).await.expect("a port");
        assert_eq!(port.address, address);
        assert_eq!(
            network
                .add_port(&name, mac, address)
                .await
                .expect("the port"),
            port
        );
        machines.push(plug(&port.socket).await);
    }
    until(&network, |status| {
        status.ports.iter().all(|port| port.connected)
    })
    .await;

    let [a, b] = &mut machines[..] else {
        panic!("two")
    };
    send(a, &frame([0xff; 6], macs[0], "to all")).await;
    assert_eq!(receive(b).await, frame([0xff; 6], macs[0], "to all"));
    send(b, &frame(macs[0].0, macs[1], "back")).await;
    assert_eq!(receive(a).await, frame(macs[0].0, macs[1], "back"));

    let cut = Faults {
        cut: true,
        ..Faults::default()
    };
    network.set_faults("node-1", cut).await.expect("cut");
    assert_eq!(network.faults("node-1").await.expect("faults"), cut);
    send(a, &frame(macs[1].0, macs[0], "lost")).await;
    until(&network, |status| {
        status.port("node-1").expect("a port").counters.dropped_cut == 1
    })
    .await;
    network
        .set_faults("node-1", Faults::default())
        .await
        .expect("restored");
    send(a, &frame(macs[1].0, macs[0], "heard")).await;
    assert_eq!(receive(b).await, frame(macs[1].0, macs[0], "heard"));
    network.stop().await.expect("stopped");
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let options = NetworkOptions::default();
    let (mac, address) = (Mac::of_machine(0), options.machine_address(0));
    network.add_port("a", mac, address).await.expect("a port");
    let refusal = |result: Result<_, NetworkError>| match result {
        Err(NetworkError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    let add = async |name: &str, mac, address| refusal(network.add_port(name, mac, address).await);
    let other = Mac::of_machine(1);
    assert_eq!(
        add("a/b", other, address).await,
        Refusal::Name("a/b".to_owned())
    );
    let owner = "a".to_owned();
    assert_eq!(
        add("a", other, address).await,
        Refusal::PortTaken {
            name: owner.clone(),
            mac
        }
    );
    assert_eq!(
        add("b", mac, options.machine_address(1)).await,
        Refusal::MacTaken {
            mac,
            owner: owner.clone()
        }
    );
    assert_eq!(
        add("b", other, address).await,
        Refusal::AddressTaken { address, owner }
    );
    let error = add("b", other, options.gateway).await;
    assert!(matches!(error, Refusal::BadAddress { .. }), "{error}");
    let error = network
        .block("a", "nobody", true)
        .await
        .expect_err("nobody");
    assert!(error.to_string().contains("no port \"nobody\""), "{error}");
    let loss = Faults {
        loss: 2.0,
        ..Faults::default()
    };
    let error = network.set_faults("a", loss).await.expect_err("too much");
    assert!(error.to_string().contains("expected 0 to 1"), "{error}");
}

#[tokio::test]
async fn a_network_is_parted_and_made_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let options = NetworkOptions::default();
    for number in 0..4 {
        let name = ["a", "b", "c", "d"][usize::from(number)];
        let mac = Mac::of_machine(number);
        let address = options.machine_address(number);
        network.add_port(name, mac, address).await.expect("a port");
    }
    let blocks = async || {
        let blocks = network.status().await.expect("a status").blocks;
        blocks
            .iter()
            .map(|(a, b)| format!("{a}{b}"))
            .collect::<Vec<_>>()
    };
    network.block("c", "d", true).await.expect("blocked");
    network.part(&[&["a"], &["b", "c"]]).await.expect("parted");
    assert_eq!(blocks().await, ["ab", "ac"]);
    for groups in [&[&["a"][..], &["a"]][..], &[&["a", "e"]]] {
        network.part(groups).await.expect_err("no such groups");
    }
    assert_eq!(blocks().await, ["ab", "ac"]);
    network.part(&[]).await.expect("whole");
    assert!(blocks().await.is_empty());
}

#[tokio::test]
async fn the_last_to_come_is_plugged_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let macs = [Mac::of_machine(0), Mac::of_machine(1)];
    let mut sockets = Vec::new();
    for (number, mac) in (0..).zip(macs) {
        let address = NetworkOptions::default().machine_address(number);
        let port = network
            .add_port(&format!("node-{number}"), mac, address)
            .await;
        sockets.push(port.expect("a port").socket);
    }
    let mut other = plug(&sockets[1]).await;
    let mut old = plug(&sockets[0]).await;
    until(&network, |status| {
        status.ports.iter().all(|port| port.connected)
    })
    .await;
    let mut new = plug(&sockets[0]).await;
    let end = timeout(BOUND, old.read_u8()).await.expect("in time");
    end.expect_err("the old one is unplugged");
    send(&mut new, &frame([0xff; 6], macs[0], "back again")).await;
    assert_eq!(
        receive(&mut other).await,
        frame([0xff; 6], macs[0], "back again")
    );
    // A peer that sends anything else is disconnected.
    new.write_all(&[0xff; 4]).await.expect("sent");
    let end = timeout(BOUND, new.read_u8()).await.expect("in time");
    end.expect_err("unplugged");
    until(&network, |status| !status.ports[0].connected).await;
}

#[tokio::test]
async fn a_network_left_running_is_found_and_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("net");
    let error = Network::attach(&dir).await.expect_err("nothing there");
    assert!(matches!(error, NetworkError::NotRunning(_)), "{error}");
    let network = Network::start(
        &binary(),
        &dir,
        NetworkOptions::default(),
        Lifetime::Detachable,
    )
    .await
    .expect("a network");
    let pid = network.pid();
    network.detach().expect("detached");
    let error = Network::start(
        &binary(),
        &dir,
        NetworkOptions::default(),
        Lifetime::KillWithParent,
    )
    .await
    .expect_err("it runs");
    assert!(
        matches!(error, NetworkError::Running { pid: found, .. } if found == pid),
        "{error}"
    );

    let network = Network::attach(&dir).await.expect("found");
    assert_eq!(network.pid(), pid);
    network.stop().await.expect("stopped");
    assert!(!Path::new(&format!("/proc/{pid}/exe")).exists());
    let error = Network::attach(&dir).await.expect_err("it is gone");
    assert!(matches!(error, NetworkError::NotRunning(_)), "{error}");
    start(&dir).await;
}

/// As when one command powers the machines off, and the launcher notices.
#[tokio::test]
async fn a_network_that_ends_while_it_is_looked_for_is_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let process = Pid::from_raw(network.pid()).expect("a process");
    // It is running, and does not answer.
    kill_process(process, Signal::STOP).expect("stopped");
    let looked = Network::attach(folder.path());
    let ended = async { kill_process(process, Signal::KILL) };
    let (looked, ended) = tokio::join!(looked, ended);
    ended.expect("killed");
    let error = looked.expect_err("it is gone");
    assert!(matches!(error, NetworkError::NotRunning(_)), "{error}");
}

/// A killed launcher: none of its code runs after that.
#[tokio::test]
async fn a_launcher_that_is_killed_leaves_no_network_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut launcher = Command::new(example())
        .arg(binary())
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example starts");
    let mut said = String::new();
    BufReader::new(launcher.stdout.take().expect("piped"))
        .read_line(&mut said)
        .expect("it says where its network is");
    let pid: i32 = said.trim().parse().expect("a process number");
    assert!(runs(pid));
    let network = Network::attach(folder.path()).await.expect("attached");
    launcher.kill().expect("killed");
    launcher.wait().expect("waited for");
    gone(pid).await;
    let error = network.status().await.expect_err("it is gone");
    assert!(matches!(error, NetworkError::Ended { .. }), "{error}");
    start(folder.path()).await;
}

/// Cargo builds the examples with the tests, beside the folder of the tests.
fn example() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let target = test
        .parent()
        .and_then(Path::parent)
        .expect("the target folder");
    let example = target.join("examples/hold_network");
    assert!(
        example.exists(),
        "not built: cargo build -p hearth-switch --example hold_network"
    );
    example
}

#[tokio::test]
async fn a_dropped_handle_ends_the_process_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let network = start(folder.path()).await;
    let pid = network.pid();
    let other = Network::attach(folder.path()).await.expect("attached");
    drop(other);
    assert!(runs(pid), "only a handle");
    drop(network);
    assert!(!runs(pid));

    let network = start(folder.path()).await;
    let pid = network.pid();
    let error = network.detach().expect_err("it is tied");
    assert!(matches!(error, NetworkError::NotDetachable(_)), "{error}");
    assert!(!runs(pid));
}

#[tokio::test]
async fn what_keeps_a_network_from_starting_is_told_in_its_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let usual = NetworkOptions::default();
    for (options, words) in [
        (
            NetworkOptions {
                prefix: 31,
                ..usual.clone()
            },
            "prefix: expected 8 to 30, got 31",
        ),
        (
            NetworkOptions {
                gateway6: "2001:db8::1".parse().expect("an address"),
                ..usual
            },
            "gateway6: expected a host address in a unique local prefix (fc00::/7), got 2001:db8::1",
        ),
    ] {
        let error = Network::start(&binary(), folder.path(), options, Lifetime::KillWithParent)
            .await
            .expect_err("no such subnet");
        assert!(matches!(error, NetworkError::Ended { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(words), "{error}");
    }
    let nowhere = folder.path().join("nowhere");
    let error = Network::start(
        &nowhere,
        folder.path(),
        NetworkOptions::default(),
        Lifetime::KillWithParent,
    )
    .await
    .expect_err("no such program");
    assert!(matches!(error, NetworkError::Spawn { .. }), "{error:?}");
}
