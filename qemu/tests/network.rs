//! A real machine in the virtual network.

mod guest;
mod switch_program;

use std::time::Duration;

use hearth_qemu::network::{Link, Mac, Nic};
use hearth_qemu::switch::{Network, NetworkOptions, NetworkStatus};
use hearth_qemu::vm::{Lifetime, StartError, Vm};
use tokio::time::timeout;

use guest::{BOUND, Then, line};
use switch_program::switch_program;

/// Waits for a matching status.
async fn until(network: &Network, wanted: impl Fn(&NetworkStatus) -> bool) {
    let reached = async {
        while !wanted(&network.status().await.expect("a status")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(BOUND, reached).await.expect("in time");
}

#[tokio::test]
async fn a_real_machine_is_plugged_in_again_after_every_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let deep = folder.path().join("d".repeat(100)).join("net");
    let options = NetworkOptions::default();
    let network = Network::start(&switch_program(), &deep, options, Lifetime::KillWithParent)
        .await
        .expect("a network");
    let mac = Mac::of_machine(0);
    let address = NetworkOptions::default().machine_address(0);
    let port = network
        .add_port("node-0", mac, address)
        .await
        .expect("a port");
    let (mut machine, run_dir) = guest::machine(folder.path(), Then::Halt);
    machine.nics = vec![Nic {
        mac,
        link: Link::Switch {
            socket: port.socket,
        },
    }];
    // Without a switch it would run and never be connected.
    let mut lonely = machine.clone();
    let nowhere = folder.path().join("nowhere.sock");
    lonely.nics[0].link = Link::Switch {
        socket: nowhere.clone(),
    };
    let error = Vm::start(&lonely, &run_dir, Lifetime::KillWithParent)
        .await
        .expect_err("no switch");
    assert!(
        matches!(&error, StartError::NoSwitch { socket, .. } if *socket == nowhere),
        "{error}"
    );
    for start in 1..=2 {
        let vm = Vm::start(&machine, &run_dir, Lifetime::KillWithParent)
            .await
            .expect("a machine");
        until(&network, |status| status.ports[0].connected).await;
        let before = network.status().await.expect("a status").ports[0].counters;
        vm.wait_for("its line", BOUND, |text| text == line(start))
            .await
            .expect("it speaks");
        // The card announces itself, without the guest's help.
        let how = serde_json::json!({"initial": 1, "max": 10, "rounds": 1, "step": 1});
        vm.qmp()
            .execute("announce-self", how)
            .await
            .expect("announced");
        until(&network, |status| {
            status.ports[0].counters.received_frames > before.received_frames
        })
        .await;
        vm.power_cut().await.expect("cut");
        until(&network, |status| !status.ports[0].connected).await;
    }
}
