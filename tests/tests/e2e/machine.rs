//! The node's foundations on its own kernel: an init that tests disks, device-mapper, file systems, devices and the
//! network, and nothing else.

use anyhow::ensure;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::vm::Cause;
use hearth_tests::{Outcome, TestCtx, bounds, here};

/// All of its checks: one that is missing in the output has failed.
const CHECKS: &[&str] = &[
    "mounts",
    "fw_cfg",
    "dhcp",
    "power-button",
    "watchdog",
    "kernel-log",
    "clock",
    "host-name",
    "wireguard",
    "partitions",
    "extension",
    "grow",
    "slots",
    "zero-range",
    "encrypted",
    "quotas",
    "authenticated",
    "crash",
];

/// It needs a disk that is larger than the partition table says.
const MORE: u64 = 768 << 20;

#[tokio::test]
async fn the_kernel_and_the_foundations_go_together() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let image = test.artifacts().machine_check.clone();
    let node = test
        .node("node")
        .image(image)
        .cpus(2)
        .online()
        .larger_by(MORE);
    let mut node = node.install().await?;
    node.parameters = None;
    let item = Item::bytes("opt/dev.hearth/machine-check", *b"hello")?;
    node.more_fw_cfg.push(item);
    let vm = node.power_on().await?;
    let exit = vm.exited(bounds::HOME).await?;
    ensure!(exit.cause == Cause::GuestShutdown, "{exit}\n{}", vm.tail());
    let lines = vm.console().last(usize::MAX);
    let said = |wanted: &str| lines.iter().any(|line| line.text.starts_with(wanted));
    for check in CHECKS {
        ensure!(
            said(&format!("machine-check: {check} ok")),
            "{check} is not ok\n{}",
            vm.tail()
        );
    }
    ensure!(
        said("machine-check: done, 0 failed"),
        "it did not end as expected\n{}",
        vm.tail()
    );
    drop(vm);
    test.passed()
}
