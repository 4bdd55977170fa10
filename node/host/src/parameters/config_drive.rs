//! Parameters on a config drive: a volume with the label [`names::config_drive::LABEL`], FAT or ISO 9660,
//! that somebody has attached beside the boot disk.
//!
//! It is found by its label, on any disk, partition or optical drive but those of the boot disk, and
//! mounted read-only for as long as the file is read. A volume with the label and without the file is
//! an error: it was attached for its parameters.

use std::path::PathBuf;

use hearth_api::names;
use hearth_parameters::MAX_SIZE;
use hearth_sys::block::{BlockError, Blocks};
use hearth_sys::files::{self, FileError};
use hearth_sys::mounts::{self, MountError, MountFlags};
use hearth_sys::volume::Kind;

use crate::volumes;

/// Why the parameters on a config drive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The devices of this machine cannot be listed.
    #[error(transparent)]
    Devices(#[from] BlockError),
    /// One of them is meant, and nobody knows which.
    #[error(
        "expected one volume with the label {}, got {}",
        names::config_drive::LABEL,
        display(volumes)
    )]
    Several {
        /// Their devices.
        volumes: Vec<PathBuf>,
    },
    /// The volume cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The file exists, but cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file does not exist.
    #[error("{}: expected a file {}", device.display(), names::config_drive::PARAMETERS)]
    NoFile {
        /// The device.
        device: PathBuf,
    },
}

fn display(volumes: &[PathBuf]) -> String {
    let volumes = volumes.iter().map(|path| path.display().to_string());
    volumes.collect::<Vec<_>>().join(" and ")
}

/// Where a config drive may be.
#[derive(Clone, Debug)]
pub struct ConfigDrive {
    /// The devices of this machine.
    pub blocks: Blocks,
    /// The name of the disk that is none.
    pub boot_disk: String,
    /// Where it is mounted meanwhile.
    pub mount_point: PathBuf,
}

impl ConfigDrive {
    /// The device of the volume; `None` if there is none.
    pub(super) fn find(&self) -> Result<Option<(PathBuf, Kind)>, DriveError> {
        let own = Some(&self.boot_disk[..]);
        let mut found = volumes::with_label(&self.blocks, own, names::config_drive::LABEL)?;
        match found.len() {
            0 | 1 => Ok(found.pop()),
            _ => Err(DriveError::Several {
                volumes: found.into_iter().map(|(device, _)| device).collect(),
            }),
        }
    }

    /// The content of the file on it.
    pub(super) fn read(&self) -> Result<Option<Vec<u8>>, DriveError> {
        let Some((device, kind)) = self.find()? else {
            return Ok(None);
        };
        let flags =
            MountFlags::RDONLY | MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
        mounts::mount(&device, &self.mount_point, kind.name(), flags, "")?;
        let path = self.mount_point.join(names::config_drive::PARAMETERS);
        let read = files::read_limited(&path, MAX_SIZE as u64);
        mounts::unmount(&self.mount_point)?;
        match read? {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(DriveError::NoFile { device }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_sys::volume::testing::{fat16, fat32, iso9660};

    use super::*;

    const LABEL: &[u8; 11] = b"HEARTH-CONF";

    /// A machine with these devices, in files; `sda` is its boot disk.
    fn machine(devices: &[(&str, Vec<u8>)]) -> (tempfile::TempDir, ConfigDrive) {
        let root = tempfile::tempdir().unwrap();
        let (sys, dev) = (root.path().join("sys"), root.path().join("dev"));
        fs::create_dir_all(&dev).unwrap();
        fs::create_dir_all(sys.join("block/loop0")).unwrap();
        for (name, content) in devices {
            fs::write(dev.join(name), content).unwrap();
            let disk = sys.join("block").join(&name[..3]);
            fs::create_dir_all(disk.join("queue")).unwrap();
            if disk.file_name().unwrap() != *name {
                fs::create_dir_all(disk.join(name)).unwrap();
                fs::write(disk.join(name).join("partition"), "1\n").unwrap();
            }
        }
        let drive = ConfigDrive {
            blocks: Blocks::at(sys, &dev),
            boot_disk: "sda".to_owned(),
            mount_point: root.path().join("mounted"),
        };
        (root, drive)
    }

    #[test]
    fn it_is_found_on_disks_partitions_and_optical_drives() {
        let none = vec![0; 1 << 16];
        let found = |name: &str, content: Vec<u8>| {
            let devices = [
                ("sda", fat32(LABEL, None)),
                ("sda1", fat32(LABEL, None)),
                ("sdb", none.clone()),
                ("sr0", Vec::new()),
                (name, content),
            ];
            let (root, drive) = machine(&devices);
            let found = drive.find().unwrap();
            found.map(|(path, kind)| {
                let path = path.strip_prefix(root.path().join("dev")).unwrap();
                (path.to_owned(), kind)
            })
        };
        let expected = |name: &str, kind| Some((PathBuf::from(name), kind));
        assert_eq!(found("sdc", fat16(LABEL, None)), expected("sdc", Kind::Fat));
        assert_eq!(
            found("sdb1", fat32(LABEL, None)),
            expected("sdb1", Kind::Fat)
        );
        let iso = iso9660("HEARTH-CONF");
        assert_eq!(found("sr1", iso), expected("sr1", Kind::Iso9660));
        // Another label, and the boot disk itself.
        assert_eq!(found("sdc", iso9660("HEARTH-CONFIG")), None);
        assert_eq!(found("sda2", fat32(LABEL, None)), None);
    }

    #[test]
    fn of_two_none_is_chosen() {
        let (_root, drive) = machine(&[
            ("sdb1", fat32(LABEL, None)),
            ("sdc", iso9660("HEARTH-CONF")),
        ]);
        let error = drive.find().unwrap_err().to_string();
        assert!(
            error.contains("sdb1 and ") && error.contains("label HEARTH-CONF"),
            "{error}"
        );
    }
}
