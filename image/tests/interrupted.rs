//! A killed build leaves no file, and the old image unchanged.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use hearth_image::Uuid;
use hearth_image::content::Content;
use hearth_image::disk::{Disk, Seed};
use hearth_image::layout::{Boot, esp_partition};
use hearth_image::sector::SectorSize;

const FOLDER: &str = "HEARTH_INTERRUPTED_TEST_FOLDER";
const UKI_LENGTH: u64 = 8 << 20;

/// Not a test of its own: the process that [`a_killed_build_leaves_nothing`] kills.
#[test]
#[ignore = "run by a_killed_build_leaves_nothing"]
fn build_that_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    // A pipe: copying it waits until the other end is written or closed.
    let uki = Content::File {
        path: folder.join("pipe"),
        length: UKI_LENGTH,
    };
    let boot = Boot {
        loader: vec![1; 5000].into(),
        uki,
        version: "1".into(),
    };
    let esp = esp_partition("ESP", Uuid::nil(), 64 << 20, boot, BTreeMap::new()).unwrap();
    let disk = Disk {
        seed: Seed::of(&[]),
        sector_size: SectorSize::B512,
        partitions: vec![esp],
        is_secret: false,
    };
    disk.write(&folder.join("disk.img")).unwrap();
}

#[test]
fn a_killed_build_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("mkfifo")
        .arg(folder.path().join("pipe"))
        .status()
        .unwrap();
    assert!(made.success());
    let names = || {
        let entries = std::fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for old in [None, Some("the image of before")] {
        if let Some(old) = old {
            std::fs::write(folder.path().join("disk.img"), old).unwrap();
        }
        let before = names();
        let mut build = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "build_that_is_killed", "--ignored"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Opens when the build has opened its end, so everything before the UKI has been written.
        let mut pipe = File::options()
            .write(true)
            .open(folder.path().join("pipe"))
            .unwrap();
        // More than a pipe holds: once this is written, the build has copied most of it and waits for the rest.
        pipe.write_all(&vec![0xee; UKI_LENGTH as usize / 2])
            .unwrap();
        assert_eq!(names(), before, "visible before it is complete");
        build.kill().unwrap();
        build.wait().unwrap();
        assert_eq!(names(), before, "left behind");
        if let Some(old) = old {
            assert_eq!(
                std::fs::read_to_string(folder.path().join("disk.img")).unwrap(),
                old
            );
        }
    }
}
