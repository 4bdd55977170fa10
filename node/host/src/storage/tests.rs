use std::fs;
use std::os::unix::fs::FileExt;

use hearth_api::identity::ClusterUnlockKey;

use super::testing::{Files, volume};
use super::*;
use crate::layout::{self, Root};

fn modes() -> [Option<Mode>; 3] {
    [
        None,
        Some(Mode::Encrypted),
        Some(Mode::AuthenticatedEncrypted),
    ]
}

struct Disk {
    _dir: tempfile::TempDir,
    files: Files,
    data: layout::Data,
}

impl Disk {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::under(dir.path());
        Self {
            files: Files::new(dir.path()),
            data: root.data,
            _dir: dir,
        }
    }

    /// The partition as after a reboot.
    fn partition(&self) -> OwnedVolume<Files> {
        OwnedVolume::new(self.files.rebooted(), self.data.path().to_owned())
    }

    fn ready(volume: &Volume) -> Self {
        let disk = Self::new();
        let mut partition = disk.partition();
        partition.initialise(volume).unwrap();
        make_file_system(&mut partition, volume).unwrap();
        partition.mark_ready(volume).unwrap();
        disk
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.files.device_path()).unwrap()
    }
}

fn make_file_system(
    partition: &mut OwnedVolume<Files>,
    volume: &Volume,
) -> Result<(), StorageError> {
    partition.make_file_system(volume, &mut |_| {})
}

fn only_mount(partition: &mut OwnedVolume<Files>, volume: &Volume) -> Result<(), StorageError> {
    partition.mount(volume).map(drop)
}

#[test]
fn a_partition_is_made_once_and_mounted_ever_after() {
    for mode in modes() {
        let volume = volume(mode, 1);
        let disk = Disk::ready(&volume);
        let mut partition = disk.partition();
        assert!(partition.mount(&volume).unwrap());
        assert!(!partition.mount(&volume).unwrap(), "mounted once");
        disk.data.make_directories().unwrap();
        let roles = disk.data.node().roles();
        fs::write(&roles, "kept").unwrap();
        disk.partition().mount(&volume).unwrap();
        assert_eq!(fs::read(&roles).unwrap(), b"kept");
        // Once when it was made, and at the two boots.
        assert_eq!(disk.files.grown(), 3);
    }
}

#[test]
fn a_file_system_that_cannot_grow_is_mounted() {
    let volume = volume(None, 1);
    let disk = Disk::ready(&volume);
    // Find the device, grow the partition, find it again, open and mount it.
    disk.files.fail_after(5);
    assert!(disk.partition().mount(&volume).unwrap());
    disk.files.fail_after(4);
    assert!(disk.partition().mount(&volume).is_err());
}

#[test]
fn a_ready_partition_is_never_made_again() {
    for mode in modes() {
        let volume = volume(mode, 1);
        let disk = Disk::ready(&volume);
        let before = disk.content();
        for step in [OwnedVolume::<Files>::initialise, make_file_system] {
            let error = step(&mut disk.partition(), &volume).unwrap_err();
            assert!(matches!(error, StorageError::Phase { found: "READY", .. }));
            assert!(error.is_refusal());
        }
        // This step can be repeated.
        disk.partition().mark_ready(&volume).unwrap();
        assert!(disk.content() == before, "untouched");
    }
}

/// FAULTS 15, and a disk of an earlier enrolment of the same node.
#[test]
fn another_owners_partition_is_not_touched() {
    for (mine, theirs) in [(1, 9), (9, 1)] {
        let disk = Disk::ready(&volume(None, theirs));
        let before = disk.content();
        let volume = volume(None, mine);
        for step in [
            OwnedVolume::<Files>::initialise,
            make_file_system,
            OwnedVolume::<Files>::mark_ready,
            only_mount,
        ] {
            let error = step(&mut disk.partition(), &volume).unwrap_err();
            assert!(matches!(error, StorageError::OtherOwner { .. }), "{error}");
            assert!(error.is_refusal());
        }
        assert!(disk.content() == before, "untouched");
    }
}

/// FAULTS 14: a wrong key is detected before anything is opened with it.
#[test]
fn a_wrong_key_or_mode_opens_nothing() {
    let right = volume(Some(Mode::Encrypted), 1);
    let disk = Disk::ready(&right);
    let mut wrong = vec![
        volume(None, 1),
        volume(Some(Mode::AuthenticatedEncrypted), 1),
    ];
    let mut other_key = right.clone();
    other_key.secrets.as_mut().unwrap().cluster_unlock_key = ClusterUnlockKey::from_bytes([6; 32]);
    wrong.push(other_key);
    for volume in wrong {
        let error = disk.partition().mount(&volume).unwrap_err();
        assert!(matches!(error, StorageError::NotAuthentic), "{error}");
        assert!(error.is_refusal());
    }
    // INSECURE is not accepted as any other mode.
    let disk = Disk::ready(&volume(None, 1));
    let error = disk.partition().mount(&right).unwrap_err();
    assert!(matches!(error, StorageError::NotAuthentic), "{error}");
}

#[test]
fn foreign_content_is_not_touched_and_can_be_erased() {
    let disk = Disk::new();
    let device = fs::OpenOptions::new()
        .write(true)
        .open(disk.files.device_path())
        .unwrap();
    device.write_all_at(b"XFSB", 0).unwrap();
    let before = disk.content();
    let volume = volume(None, 1);
    for step in [
        OwnedVolume::<Files>::initialise,
        make_file_system,
        OwnedVolume::<Files>::mark_ready,
        only_mount,
    ] {
        let error = step(&mut disk.partition(), &volume).unwrap_err();
        assert!(matches!(error, StorageError::Foreign(_)), "{error}");
    }
    assert!(disk.content() == before, "untouched");
    disk.partition().erase().unwrap();
    assert_eq!(disk.partition().inspect().unwrap(), HeaderState::Blank);
    disk.partition().initialise(&volume).unwrap();
}

#[test]
fn steps_out_of_order_are_refused() {
    let volume = volume(Some(Mode::Encrypted), 1);
    let disk = Disk::new();
    let blank = |error: StorageError| {
        assert!(
            matches!(error, StorageError::Phase { found: "blank", .. }),
            "{error}"
        );
    };
    blank(make_file_system(&mut disk.partition(), &volume).unwrap_err());
    blank(disk.partition().mark_ready(&volume).unwrap_err());
    blank(disk.partition().mount(&volume).unwrap_err());
    disk.partition().initialise(&volume).unwrap();
    let error = disk.partition().mount(&volume).unwrap_err();
    assert!(matches!(
        error,
        StorageError::Phase {
            found: "INITIALISING",
            ..
        }
    ));
}

/// A wipe goes on where it was interrupted only if the key is the same.
#[test]
fn each_format_has_a_salt_of_its_own_unless_it_resumes_a_wipe() {
    for (mode, is_kept) in [
        (None, false),
        (Some(Mode::Encrypted), false),
        (Some(Mode::AuthenticatedEncrypted), true),
    ] {
        let volume = volume(mode, 1);
        let disk = Disk::new();
        let salt = || {
            disk.partition().initialise(&volume).unwrap();
            match disk.partition().inspect().unwrap() {
                HeaderState::Header(header) => header.salt,
                front => panic!("{front:?}"),
            }
        };
        let first = salt();
        assert_eq!(first == salt(), is_kept, "{mode:?}");
        disk.partition().erase().unwrap();
        assert_ne!(first, salt(), "{mode:?}");
    }
}
