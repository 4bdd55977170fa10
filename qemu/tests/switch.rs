//! The virtual network: the real process, with machines that are made up.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use hearth_qemu::{
    network::Mac,
    switch::{Faults, Network, NetworkError, NetworkOptions, Refusal},
    vm::Lifetime,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

/// For what takes milliseconds on a quiet machine.
const BOUND: Duration = Duration::from_secs(60);

fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_hearth-switch"))
}

async fn start(dir: &Path) -> Network {
    Network::start(&binary(), dir, NetworkOptions::default(), Lifetime::Tied)
        .await
        .expect("a network")
}

/// A socket's address holds 107 bytes; folders are longer than that.
async fn plug(socket: &Path) -> UnixStream {
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("s");
    std::os::unix::fs::symlink(socket, &link).expect("a link");
    UnixStream::connect(link).await.expect("the switch listens")
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
    // A type that nobody speaks.
    [&to, &from.0, &[0x88, 0xb5][..], text.as_bytes()].concat()
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
    let connected = async {
        while network
            .status()
            .await
            .expect("a status")
            .ports
            .iter()
            .any(|port| !port.connected)
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(BOUND, connected).await.expect("plugged in");

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
    let lost = async {
        loop {
            let status = network.status().await.expect("a status");
            if status.port("node-1").expect("a port").counters.dropped_cut == 1 {
                return;
            }
        }
    };
    timeout(BOUND, lost).await.expect("counted");
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
    assert!(
        error.to_string().contains("there is no port \"nobody\""),
        "{error}"
    );
    let loss = Faults {
        loss: 2.0,
        ..Faults::default()
    };
    let error = network.set_faults("a", loss).await.expect_err("too much");
    assert!(error.to_string().contains("wanted 0 to 1"), "{error}");
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
    let error = Network::start(&binary(), &dir, NetworkOptions::default(), Lifetime::Tied)
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
