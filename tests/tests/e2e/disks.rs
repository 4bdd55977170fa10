//! Which disk a node uses, and what it does if it cannot know.
//!
//! All of them are run with `--long` only.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::ensure;
use hearth_api::console::Report;
use hearth_lab::tool;
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::CommandLine;
use hearth_tests::node::{Node, Running};
use hearth_tests::{Outcome, TestCtx, bounds, here};

/// SHA-256 of a whole disk.
fn digest(path: &Path) -> anyhow::Result<String> {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    let mut file = File::open(path)?;
    let mut block = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut file, &mut block)? {
            0 => return Ok(hex::encode(hash.finish())),
            length => hash.update(&block[..length]),
        }
    }
}

async fn comes_home(node: &Node) -> Outcome {
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.power_off().await?;
    Ok(())
}

/// Waits until it has looked for its disk this often.
async fn looks_again(vm: &Running, times: u32) -> Outcome {
    let mut seen = 0;
    let wanted = format!("{times} looks at several disks");
    vm.wait_for_report(&wanted, bounds::SETTLED, |report| {
        let what = "several EFI system partitions";
        seen += u32::from(matches!(report, Report::Waiting(why) if why.contains(what)));
        seen == times
    })
    .await?;
    Ok(())
}

/// FIELD K4: a disk that does not emulate sectors of 512 bytes.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_disk_with_sectors_of_4096_bytes_boots_and_is_used() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let disk = test.folder().join("hearth.img");
    let mut command = CommandLine::new(&test.artifacts().xtask);
    command
        .arg("image")
        .option("--sector-size", "4096")
        .option("--output", &disk);
    tool::run(&command).await?;
    let image = Image {
        disk,
        ..test.artifacts().release.clone()
    };
    let plan = test
        .node("node")
        .image(image)
        .sector_bytes(4096)
        .larger_by(1 << 30);
    let node = plan.uefi().install().await?;
    comes_home(&node).await?;
    comes_home(&node).await?;
    test.passed()
}

/// FIELD K1: the same image on two disks. The firmware names a partition that both have, and boots the first.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn of_two_copies_the_one_that_was_booted_is_used() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").twin_disks().uefi().install().await?;
    let before = digest(node.twin_path()?)?;
    comes_home(&node).await?;
    // What it keeps there, it finds at the next boot.
    comes_home(&node).await?;
    ensure!(digest(node.twin_path()?)? == before, "the copy was changed");
    test.passed()
}

/// FIELD K1: a founded disk and its snapshot, without a word of the firmware. Nothing is changed on either; when the
/// table of the snapshot is damaged, it does not count.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn two_copies_that_nobody_tells_apart_are_left_alone() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").twin_disks().install().await?;
    let before = [digest(node.disk_path())?, digest(node.twin_path()?)?];
    let vm = node.power_on().await?;
    looks_again(&vm, 3).await?;
    vm.cut().await?;
    let after = [digest(node.disk_path())?, digest(node.twin_path()?)?];
    ensure!(before == after, "a disk was changed");

    let twin = File::options().write(true).open(node.twin_path()?)?;
    twin.write_all_at(&[0; 1 << 20], 0)?;
    comes_home(&node).await?;
    test.passed()
}
