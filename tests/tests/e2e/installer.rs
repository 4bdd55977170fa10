//! Installation media: a stick and a disc, booted by firmware, and the disks that they are to install on.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hearth_api::console::Report;
use hearth_api::v1::{Install, NodeParameters};
use hearth_lab::tool;
use hearth_qemu::artifacts::Installer;
use hearth_qemu::command::CommandLine;
use hearth_qemu::hardware::{Card, DiskBus, MediumKind};
use hearth_tests::node::{Node, Plan, Running};
use hearth_tests::owner::parameters_for_domain;
use hearth_tests::{Outcome, TestCtx, bounds, here};
use prost::Message;

/// The serial number that QEMU gives to the first NVMe disk.
const SERIAL: &str = "disk0";
/// Larger than the image, so that the backup partition table is not where the image has it.
const LARGER_BY: u64 = 1 << 30;

fn media(test: &TestCtx) -> anyhow::Result<Installer> {
    let media = test.artifacts().installer.clone();
    media.context("the media were not built, because none of these tests was selected")
}

/// A machine with a new NVMe disk, that boots by firmware.
fn machine(test: &TestCtx) -> Plan<'_> {
    let plan = test.node("node").release().uefi();
    plan.hardware(DiskBus::Nvme, Card::Virtio)
        .blank_disk()
        .larger_by(LARGER_BY)
}

/// What makes a machine an installer that boots without firmware, which takes less time; and a node again.
const WORDS: [&str; 2] = ["quiet", "quiet hearth.installer"];

/// A machine with a new NVMe disk and a stick, that boots as an installer, without firmware.
async fn booted_directly(test: &TestCtx) -> anyhow::Result<Node> {
    let plan = test.node("node").release().blank_disk();
    let plan = plan.hardware(DiskBus::Nvme, Card::Virtio);
    let mut node = plan.larger_by(LARGER_BY).install().await?;
    let [node_words, installer_words] = WORDS;
    node.change_word(node_words, installer_words)?;
    node.insert_medium(MediumKind::Stick, &media(test)?.stick)
        .await?;
    Ok(node)
}

/// Waits until the disk is installed, and boots the node from it, with the stick still in the machine.
async fn boots_the_node(vm: Running, node: &mut Node) -> anyhow::Result<Running> {
    installed(&vm).await?;
    vm.cut().await?;
    let [node_words, installer_words] = WORDS;
    node.change_word(installer_words, node_words)?;
    node.power_on().await
}

/// Powers the node off. It has moved the backup of its partition table to the end of the disk, which is larger than the
/// image.
async fn is_whole(vm: Running, node: &Node) -> Outcome {
    vm.power_off().await?;
    node.disk().await?.check_table().await
}

/// Parameters of a node that founds a cluster with this domain, and is installed on this disk.
fn parameters(node: &Node, domain: &str, install: Option<Install>) -> NodeParameters {
    let mut parameters = parameters_for_domain(&node.owner, domain);
    parameters.install = install;
    parameters
}

/// Writes parameters onto the stick in the node's folder, as its owner does it.
async fn set_parameters(test: &TestCtx, node: &Node, parameters: &NodeParameters) -> Outcome {
    let file = node.file("node.pb");
    std::fs::write(&file, parameters.encode_to_vec())?;
    let mut set = CommandLine::new(&test.artifacts().hearthctl);
    set.arg("image").arg("set-parameters").arg(&file);
    set.arg(node.file("stick.img")).arg("--yes");
    tool::run(&set).await?;
    Ok(())
}

/// Waits until an installation is complete; returns the disk.
async fn installed(vm: &Running) -> anyhow::Result<String> {
    let mut disk = None;
    vm.wait_for_report("an installation", bounds::HOME, |report| {
        if let Report::Installed(name) = report {
            disk = Some(name.clone());
        }
        disk.is_some()
    })
    .await?;
    disk.context("no disk")
}

/// Waits until an installation is this far.
async fn installing(vm: &Running, what: &str) -> Outcome {
    let wanted = format!("an installation, {what}");
    vm.wait_for_report(
        &wanted,
        bounds::HOME,
        |report| matches!(report, Report::Installing(progress) if progress.contains(what)),
    )
    .await?;
    Ok(())
}

/// The node becomes HOME in a cluster with this domain, in the boot of this number.
async fn founds(vm: &Running, boot: u32, domain: &str) -> Outcome {
    vm.home_in_boot(boot).await?;
    let info = vm.owned().await?.info().await?;
    let found = info.configuration.context("no configuration")?;
    ensure!(found.cluster_domain == domain, "{}", found.cluster_domain);
    Ok(())
}

/// A system of others: a partition table with a name, and a file system.
async fn foreign_system(node: &Node) -> anyhow::Result<PathBuf> {
    let disk = node.disk_path().to_owned();
    let mut table = CommandLine::new("sgdisk");
    table
        .option("-n", "1:2048:0")
        .option("-c", "1:ARCHIVE")
        .arg(&disk);
    tool::run(&table).await?;
    let file = File::options().write(true).open(&disk)?;
    file.write_all_at(b"XFSB", 2048 * 512)?;
    // Where the node's data partition will be: a node formats it only if it is blank.
    file.write_all_at(&[0x5a; 8192], 3200 << 20)?;
    Ok(disk)
}

fn bytes_at(disk: &Path, at: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    File::open(disk)?.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// The whole way, with the stick left in the machine, which the firmware would boot first.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_empty_disk_is_installed_from_a_stick_and_the_node_boots() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = machine(&test).install().await?;
    node.parameters = None;
    let stick = media(&test)?.stick;
    node.insert_medium(MediumKind::Stick, &stick).await?;
    let wanted = parameters(&node, "stick.example", Some(Install::default()));
    set_parameters(&test, &node, &wanted).await?;
    let vm = node.power_on().await?;
    let disk = installed(&vm).await?;
    ensure!(disk == "nvme0n1", "{disk}");
    // The reboot goes to the disk, and the parameters are on it.
    founds(&vm, 2, "stick.example").await?;
    vm.says(&["mounted the ESP", "partition=/dev/nvme0n1p1"])
        .await?;
    let id = vm.owned().await?.one_healthy_node().await?.id;
    is_whole(vm, &node).await?;

    // Firmware that has forgotten its boot entries starts the stick: nothing is written again.
    std::fs::remove_file(node.file("vars.fd")).context("the variables of the firmware")?;
    let vm = node.power_on().await?;
    let disk = installed(&vm).await?;
    ensure!(disk.starts_with("nvme0n1 already"), "{disk}");
    founds(&vm, 2, "stick.example").await?;
    let again = vm.owned().await?.one_healthy_node().await?.id;
    ensure!(again == id, "another node: {id}, then {again}");
    vm.power_off().await?;

    // Without the stick.
    node.eject_media();
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.power_off().await?;
    test.passed()
}

#[tokio::test]
async fn a_disk_with_another_system_is_refused_and_overwritten_only_by_its_name() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = booted_directly(&test).await?;
    let disk = foreign_system(&node).await?;
    node.tell(&parameters(&node, "x.example", Some(Install::default())));
    let vm = node.power_on().await?;
    let refusal = vm.refusal().await?;
    let wanted =
        "expected an empty disk, got a partition table (GPT) with 1 partition: \"ARCHIVE\"";
    ensure!(refusal.contains(wanted), "{refusal}");
    // It asks, and takes no other answer than the name, twice.
    vm.waits_in_the_end().await?;
    let mut keyboard = vm.keyboard().await?;
    for (typed, shown) in [
        ("yes", "expected the name of a disk, got \"yes\""),
        ("nvme0n1", "Everything on it will be lost"),
        ("no", "nothing was changed"),
    ] {
        keyboard.enter(typed).await?;
        keyboard.shows(shown).await?;
    }
    drop(keyboard);
    vm.cut().await?;
    ensure!(bytes_at(&disk, 2048 * 512)? == b"XFSB", "it was written to");

    let by_name = Install {
        overwrite: SERIAL.to_owned(),
        ..Install::default()
    };
    node.tell(&parameters(&node, "named.example", Some(by_name)));
    let vm = node.power_on().await?;
    let vm = boots_the_node(vm, &mut node).await?;
    founds(&vm, 1, "named.example").await?;
    is_whole(vm, &node).await?;
    test.passed()
}

/// Without parameters, on the console alone.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_disk_is_chosen_on_the_console() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = booted_directly(&test).await?;
    let founding = node.parameters.take();
    let vm = node.power_on().await?;
    let what = vm.waits_in_the_end().await?;
    ensure!(what == "the name of a disk on the console", "{what}");
    let mut keyboard = vm.keyboard().await?;
    keyboard.enter("nvme0n1").await?;
    keyboard.shows("hearth: installing").await?;
    drop(keyboard);
    node.parameters = founding;
    let vm = boots_the_node(vm, &mut node).await?;
    vm.home().await?;
    is_whole(vm, &node).await?;
    test.passed()
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_installation_that_loses_power_is_completed_by_the_next() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = booted_directly(&test).await?;
    node.tell(&parameters(&node, "cut.example", Some(Install::default())));
    for moment in [
        "50 % cleared",
        "10 % written",
        "90 % written",
        "50 % verified",
    ] {
        let vm = node.power_on().await?;
        installing(&vm, moment).await?;
        vm.cut().await?;
        let has_table = node.disk().await.is_ok();
        ensure!(!has_table, "after {moment} there is a partition table");
    }
    let vm = node.power_on().await?;
    let vm = boots_the_node(vm, &mut node).await?;
    founds(&vm, 1, "cut.example").await?;
    is_whole(vm, &node).await?;
    test.passed()
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_empty_disk_is_installed_from_a_disc() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut node = machine(&test).install().await?;
    let disc = media(&test)?.disc;
    node.insert_medium(MediumKind::Disc, &disc).await?;
    let by_serial = Install {
        serial: SERIAL.to_owned(),
        min_size_bytes: 4 << 30,
        ..Install::default()
    };
    node.tell(&parameters(&node, "disc.example", Some(by_serial)));
    let vm = node.power_on().await?;
    installed(&vm).await?;
    founds(&vm, 2, "disc.example").await?;
    is_whole(vm, &node).await?;
    test.passed()
}
