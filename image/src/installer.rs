//! The media from which a machine installs a node on one of its disks: a stick, or an optical disc.
//!
//! Both have a FAT file system with systemd-boot and a unified kernel image, which is that of the node but for one word
//! on its command line ([`KERNEL_WORD`]), and a volume with the label [`LABEL`], by which the installer finds its medium.
//! On the volume are the [`crate::payload`] and, perhaps, parameters, below a directory:
//!
//! | medium | boot | volume |
//! |---|---|---|
//! | stick | EFI system partition in a GPT | the same, FAT32; parameters can be put there later |
//! | disc | El Torito: a FAT32 image in the volume | ISO 9660 |
//!
//! A stick has no data partition, so no node ever takes it for its disk. The names are the node's, too
//! (`hearth_api::names`), as those in [`crate::layout`].

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::Path;

use crate::content::Content;
use crate::disk::{Disk, DiskError, Partition, PartitionContent, Seed};
use crate::fat::{FatError, FatSpec, VolumeLabel};
use crate::iso::{Iso, IsoError};
use crate::layout::{
    Boot, ESP_TYPE, LOADER_CONFIGURATION, LOADER_CONFIGURATION_PATH, LOADER_PATH, PARAMETERS,
};
use crate::output::{Output, OutputError};
use crate::sector::SectorSize;

/// The word on the kernel's command line that makes a node an installer.
pub const KERNEL_WORD: &str = "hearth.installer";
/// Label of the volume with the payload, and of a stick's partition.
pub const LABEL: &str = "HEARTH-INST";
/// Path of the payload on it.
pub const PAYLOAD: &str = "hearth/payload.bin";

const MIB: u64 = 1 << 20;
/// What a FAT32 file system needs at least, with its own structures, in small sectors.
const SMALLEST: u64 = 34 * MIB;
/// Room for FAT's structures and, on a stick, for parameters.
const SPARE: u64 = 8 * MIB;

/// Why a medium could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum MediumError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error("cannot lay out the file system that the firmware reads")]
    Fat(#[from] FatError),
    #[error("cannot lay out the disc")]
    Iso(#[from] IsoError),
    #[error("cannot write the disc")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// An installation medium.
#[derive(Debug, Clone)]
pub struct Medium {
    /// Seed of GUIDs and volume IDs.
    pub seed: Seed,
    /// The programs with which it boots.
    pub boot: Boot,
    /// What it installs.
    pub payload: Content,
    /// Parameters of the machines that it installs.
    pub parameters: Option<Vec<u8>>,
}

impl Medium {
    /// Writes the image of a stick, which appears when it is complete.
    pub fn write_stick(&self, destination: &Path) -> Result<(), MediumError> {
        let mut files = self.boot_files();
        files.insert(PAYLOAD.to_owned(), self.payload.clone());
        if let Some(parameters) = &self.parameters {
            let parameters = Content::Bytes(parameters.clone());
            files.insert(PARAMETERS.to_owned(), parameters);
        }
        let disk = Disk {
            seed: self.seed,
            // Sticks emulate small sectors.
            sector_size: SectorSize::B512,
            is_secret: self.parameters.is_some(),
            partitions: vec![Partition {
                label: LABEL.to_owned(),
                type_guid: ESP_TYPE,
                size: size_for(&files),
                content: PartitionContent::Fat32 {
                    label: VolumeLabel::parse(LABEL)?,
                    files,
                    reserve: MIB,
                },
            }],
        };
        Ok(disk.write(destination)?)
    }

    /// Writes the image of a disc, which appears when it is complete.
    pub fn write_disc(&self, destination: &Path) -> Result<(), MediumError> {
        let mut files = BTreeMap::from([(PAYLOAD.to_ascii_uppercase(), self.payload.clone())]);
        if let Some(parameters) = &self.parameters {
            let parameters = Content::Bytes(parameters.clone());
            files.insert(PARAMETERS.to_ascii_uppercase(), parameters);
        }
        let iso = Iso {
            label: LABEL.to_owned(),
            files,
            boot: Content::Bytes(self.boot_image()?),
        };
        let plan = iso.plan()?;
        let mut output = Output::create(destination)?;
        if self.parameters.is_some() {
            output = output.secret()?;
        }
        let file = output.file();
        file.set_len(plan.size()).map_err(MediumError::Write)?;
        plan.write_to(file).map_err(MediumError::Write)?;
        file.flush().map_err(MediumError::Write)?;
        output.publish()?;
        Ok(())
    }

    /// The files that the firmware and the boot loader read.
    fn boot_files(&self) -> BTreeMap<String, Content> {
        let Boot {
            loader,
            uki,
            version,
        } = self.boot.clone();
        let configuration = Content::Bytes(LOADER_CONFIGURATION.into());
        BTreeMap::from([
            (LOADER_PATH.to_owned(), loader),
            (LOADER_CONFIGURATION_PATH.to_owned(), configuration),
            (Boot::uki_path(&version), uki),
        ])
    }

    /// The FAT file system on a disc. Its label is another one, so that there is one volume with the payload.
    fn boot_image(&self) -> Result<Vec<u8>, MediumError> {
        let files = self.boot_files();
        let spec = FatSpec {
            size: size_for(&files),
            sector_size: SectorSize::B512,
            hidden_sectors: 0,
            label: VolumeLabel::parse("HEARTH-BOOT")?,
            volume_id: self.seed.volume_id("boot image"),
            reserve: 0,
            files,
        };
        let mut image = io::Cursor::new(Vec::new());
        let plan = spec.plan()?;
        plan.write_to(&mut image, 0).map_err(MediumError::Write)?;
        let mut bytes = image.into_inner();
        bytes.resize(spec.size as usize, 0);
        Ok(bytes)
    }
}

/// The size of a file system with these files, in whole MiB.
fn size_for(files: &BTreeMap<String, Content>) -> u64 {
    let content: u64 = files.values().map(Content::length).sum();
    // Two FATs of four bytes for each cluster of 512 bytes or more.
    let needed = content + content / 32 + SPARE;
    needed.next_multiple_of(MIB).max(SMALLEST)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use fatfs::{FileSystem, FsOptions};

    use super::*;

    fn medium(parameters: Option<&[u8]>) -> Medium {
        Medium {
            seed: Seed::of(&[b"x"]),
            boot: Boot {
                loader: vec![6; 10_000].into(),
                uki: vec![7; 100_000].into(),
                version: "1".into(),
            },
            payload: vec![8; 5000].into(),
            parameters: parameters.map(<[u8]>::to_vec),
        }
    }

    fn content(image: &[u8], path: &str) -> Option<Vec<u8>> {
        let volume = FileSystem::new(io::Cursor::new(image.to_vec()), FsOptions::new()).unwrap();
        let mut bytes = Vec::new();
        let mut file = volume.root_dir().open_file(path).ok()?;
        file.read_to_end(&mut bytes).unwrap();
        Some(bytes)
    }

    #[test]
    fn a_stick_has_everything_on_its_partition() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stick.img");
        medium(Some(b"secret")).write_stick(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let bytes = fs::read(&path).unwrap();
        let partition = &bytes[MIB as usize..bytes.len() - MIB as usize];
        assert_eq!(content(partition, PAYLOAD), Some(vec![8; 5000]));
        assert_eq!(content(partition, PARAMETERS), Some(b"secret".to_vec()));
        assert_eq!(content(partition, LOADER_PATH), Some(vec![6; 10_000]));
        medium(None).write_stick(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        let partition = &bytes[MIB as usize..bytes.len() - MIB as usize];
        assert_eq!(content(partition, PARAMETERS), None);
        // There is a directory for them.
        assert!(content(partition, PAYLOAD).is_some());
    }

    #[test]
    fn a_disc_has_a_file_system_for_the_firmware_and_another_one_for_the_installer() {
        let medium = medium(None);
        let boot = medium.boot_image().unwrap();
        assert_eq!(content(&boot, LOADER_PATH), Some(vec![6; 10_000]));
        assert_eq!(content(&boot, &Boot::uki_path("1")), Some(vec![7; 100_000]));
        assert_eq!(content(&boot, PAYLOAD), None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disc.iso");
        medium.write_disc(&path).unwrap();
        let first = fs::read(&path).unwrap();
        assert!(first.ends_with(&boot));
        medium.write_disc(&path).unwrap();
        assert!(fs::read(&path).unwrap() == first, "not reproducible");
    }
}
