//! The drivers of the kernel: nodes with the disks and the network cards of real machines and of other hypervisors, and
//! with such that have no driver.
//!
//! `docs/hardware.md` calls a driver booted because a machine here goes through it.

use anyhow::ensure;
use hearth_api::console::Report;
use hearth_qemu::hardware::{Card, DiskBus};
use hearth_tests::{Outcome, TestCtx, bounds, here};

/// How a machine boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Firmware,
    Direct,
}

/// Defines a test for each machine, and the list of all of them.
macro_rules! machines {
    ($($(#[$meta:meta])* $name:ident: $bus:ident, $card:ident, $by:ident;)*) => {
        const MACHINES: &[(DiskBus, Card)] = &[$((DiskBus::$bus, Card::$card)),*];

        $($(#[$meta])*
        #[tokio::test]
        async fn $name() -> Outcome {
            let test = TestCtx::begin(here!())?;
            comes_home(&test, DiskBus::$bus, Card::$card, By::$by).await?;
            test.passed()
        })*
    };
}

machines! {
    nvme_and_e1000e_through_firmware: Nvme, E1000e, Firmware;
    virtio_scsi_and_vmxnet3: VirtioScsi, Vmxnet3, Direct;
    #[ignore = "long: --long runs it"]
    nvme_and_e1000e: Nvme, E1000e, Direct;
    #[ignore = "long: --long runs it"]
    ahci_and_rtl8139_through_firmware: Ahci, Rtl8139, Firmware;
    #[ignore = "long: --long runs it"]
    virtio_scsi_and_virtio_through_firmware: VirtioScsi, Virtio, Firmware;
    #[ignore = "long: --long runs it"]
    pvscsi_and_vmxnet3: Pvscsi, Vmxnet3, Direct;
    #[ignore = "long: --long runs it"]
    usb_and_e1000_through_firmware: Usb, E1000, Firmware;
    #[ignore = "long: --long runs it"]
    sdhci_and_legacy_virtio: Sdhci, VirtioLegacy, Direct;
    #[ignore = "long: --long runs it"]
    megasas_and_e1000e: Megasas, E1000e, Direct;
    #[ignore = "long: --long runs it"]
    virtio_and_legacy_virtio_through_firmware: Virtio, VirtioLegacy, Firmware;
}

/// Twice: the second boot finds what the first has written.
async fn comes_home(test: &TestCtx, bus: DiskBus, card: Card, by: By) -> Outcome {
    let mut plan = test.node("node").release().hardware(bus, card);
    if by == By::Firmware {
        plan = plan.uefi();
    }
    let node = plan.install().await?;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let vm = node.power_on().await?;
        let line = vm.says(&["mounted the ESP", "partition="]).await?;
        ensure!(line.contains(esp_on(bus)), "{line:?} is not on {bus}");
        vm.home().await?;
        ids.push(vm.owned().await?.one_healthy_node().await?.id);
        vm.power_off().await?;
    }
    ensure!(ids[0] == ids[1], "another node after a reboot: {ids:?}");
    Ok(())
}

/// The device of the ESP, on the only disk of this kind.
fn esp_on(bus: DiskBus) -> &'static str {
    match bus {
        DiskBus::Virtio => "/dev/vda1",
        DiskBus::Nvme => "/dev/nvme0n1p1",
        DiskBus::Sdhci => "/dev/mmcblk0p1",
        DiskBus::Ahci | DiskBus::VirtioScsi | DiskBus::Pvscsi | DiskBus::Usb | DiskBus::Megasas => {
            "/dev/sda1"
        }
    }
}

#[test]
fn every_kind_of_device_is_booted() {
    for bus in DiskBus::ALL {
        assert!(MACHINES.iter().any(|(booted, _)| *booted == bus), "{bus}");
    }
    for card in Card::ALL {
        assert!(MACHINES.iter().any(|(_, booted)| *booted == card), "{card}");
    }
}

/// A SCSI controller of 1996, and no other disk.
#[tokio::test]
async fn a_disk_without_a_driver_is_named() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").release().device("lsi53c895a");
    let mut node = plan.install().await?;
    node.remove_disk();
    let vm = node.power_on().await?;
    let what = vm.waiting().await?;
    ensure!(
        what.contains(
            "disks: none; PCI devices without a driver in this kernel: 1000:0012 (class 010000) at "
        ),
        "{what}"
    );
    // It looks again, and says the same.
    let mut said = 0;
    vm.wait_for_report("the same once more", bounds::SETTLED, |report| {
        let same =
            matches!(report, Report::Waiting(why) if why.contains("1000:0012 (class 010000)"));
        said += u32::from(same);
        said == 2
    })
    .await?;
    vm.cut().await?;
    test.passed()
}

/// A network card of 1998, and no other.
#[tokio::test]
async fn a_card_without_a_driver_is_named() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let plan = test.node("node").release().without_card();
    let node = plan.device("pcnet,romfile=").install().await?;
    let vm = node.power_on().await?;
    let what = vm.waiting().await?;
    ensure!(
        what.contains("an Ethernet interface; PCI devices without a driver in this kernel: 1022:2000 (class 020000) at "),
        "{what}"
    );
    vm.cut().await?;
    test.passed()
}
