//! The disk that a node boots from: its partitions, and the labels and types that the node finds them by.
//!
//! ```text
//! HEARTH-ESP      1 GiB    FAT32: boot loader, unified kernel image, perhaps parameters; room for two more images
//! HEARTH-EXT-A    1 GiB    extension slot: the extensions of the image, one after the other
//! HEARTH-EXT-B    1 GiB    extension slot: blank, for those of the next release
//! HEARTH-DATA     512 MiB  blank; last, because the node grows it to the disk's end
//! ```
//!
//! Every image has all four, so that each machine can be updated to any later image: the partitions of an installed
//! disk cannot be moved. The image file is sparse, so empty partitions take no space.
//!
//! The firmware starts systemd-boot, which starts the newest unified kernel image in `EFI/Linux` without a menu. It does
//! nothing that the firmware could not do with one image; with an update it counts the boots of the new one.
//!
//! The node defines the same names and types (`hearth_api::names`); neither side depends on the other, so each can be
//! built alone. A test of `xtask`, which depends on both, compares them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use uuid::{Uuid, uuid};

use crate::content::Content;
use crate::disk::{Disk, DiskError, Partition, PartitionContent, Seed};
use crate::fat::VolumeLabel;
use crate::sector::SectorSize;

const MIB: u64 = 1 << 20;

/// Where UEFI firmware looks for a program on a disk that has no boot entry.
pub const LOADER_PATH: &str = "EFI/BOOT/BOOTX64.EFI";
/// The configuration of systemd-boot.
pub const LOADER_CONFIGURATION_PATH: &str = "loader/loader.conf";
/// Neither a menu nor a change of the kernel's command line.
pub const LOADER_CONFIGURATION: &str = "timeout 0\neditor no\n";

/// Size of the EFI system partition: three UKIs of the size that firmware, microcode and drivers can make them.
pub const ESP_SIZE: u64 = 1024 * MIB;
/// Label of the EFI system partition.
pub const ESP_LABEL: &str = "HEARTH-ESP";
/// UEFI's type GUID of it.
pub const ESP_TYPE: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
/// Path of a note in the directory in which the node keeps its state. The directory exists from the start: while one is
/// being created, a power cut may leave its entry without its place in the FAT, and Linux then makes the file system
/// read-only.
pub const STATE_NOTE: &str = "hearth/README.txt";
/// Its text.
pub const STATE_NOTE_TEXT: &str =
    "The state of a Hearth node. It is bound to this machine: do not change or copy it.\n";
/// The files in which the node keeps its state, blank: it never has to create one, so that a power cut finds no half of a
/// directory entry. Each state has two.
pub const STATE_FILES: [&str; 8] = [
    "hearth/boot_record.0",
    "hearth/boot_record.1",
    "hearth/cluster_directory.0",
    "hearth/cluster_directory.1",
    "hearth/network.0",
    "hearth/network.1",
    "hearth/sealed_configuration.0",
    "hearth/sealed_configuration.1",
];
/// Their size in bytes, which is enough for a cluster of a hundred nodes. Larger states make them grow.
pub const STATE_FILE_SIZE: usize = 16 << 10;
/// Path of the node's parameters on it.
pub const PARAMETERS: &str = "hearth/parameters.pb";

/// The minimum of mkfs.xfs plus etcd's first files. The node grows it to the disk's end at the first boot.
pub const DATA_SIZE: u64 = 512 * MIB;
/// Label of the data partition.
pub const DATA_LABEL: &str = "HEARTH-DATA";
/// Its type GUID, specific to Hearth.
pub const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");

/// Type GUID of an extension slot.
pub const EXTENSION_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-686561727478");
/// Labels of the extension slots.
pub const SLOT_LABELS: [&str; 2] = ["HEARTH-EXT-A", "HEARTH-EXT-B"];
/// Size of an extension slot.
pub const SLOT_SIZE: u64 = 1024 * MIB;
/// An extension in a slot begins at a multiple of this many bytes: the block size of dm-verity.
pub const SLOT_BLOCK: u64 = 4096;

/// Why the disk could not be laid out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum LayoutError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot add {} to the disk", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The programs on the ESP.
#[derive(Debug, Clone)]
pub struct Boot {
    /// systemd-boot.
    pub loader: Content,
    /// The unified kernel image.
    pub uki: Content,
    /// The version in its file name: letters, digits, `.`, `_`, `-`, `~`, `^` and `+`.
    pub version: String,
}

impl Boot {
    /// The path of the unified kernel image of this version.
    pub fn uki_path(version: &str) -> String {
        format!("EFI/Linux/hearth-{version}.efi")
    }
}

/// The disk with these programs, parameters, and extensions in the order of their starts. The seed is made of the
/// content of all of them; the UKI contains the extensions' hashes.
pub fn disk(
    seed: Seed,
    boot: Boot,
    parameters: Option<&[u8]>,
    extensions: Vec<Content>,
    sector_size: SectorSize,
) -> Result<Disk, DiskError> {
    let note = Content::Bytes(STATE_NOTE_TEXT.into());
    let mut files = BTreeMap::from([(STATE_NOTE.to_owned(), note)]);
    let blank = STATE_FILES.map(|path| {
        let zeros = Content::Bytes(vec![0; STATE_FILE_SIZE]);
        (path.to_owned(), zeros)
    });
    files.extend(blank);
    if let Some(bytes) = parameters {
        files.insert(PARAMETERS.to_owned(), Content::Bytes(bytes.to_vec()));
    }
    let [first, second] = SLOT_LABELS;
    Ok(Disk {
        // They have the secrets of a cluster that is to be founded, or registered with.
        is_secret: parameters.is_some(),
        seed,
        sector_size,
        partitions: vec![
            esp_partition(ESP_LABEL, ESP_TYPE, ESP_SIZE, boot, files)?,
            slot(first, extensions),
            slot(second, Vec::new()),
            Partition {
                label: DATA_LABEL.to_owned(),
                type_guid: DATA_TYPE,
                size: DATA_SIZE,
                content: PartitionContent::Blank,
            },
        ],
    })
}

/// Where each extension begins in its slot, in blocks, by the lengths of all in bytes.
pub fn starts(lengths: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let place = |end: &mut u64, length: u64| {
        let start = *end;
        *end += length.div_ceil(SLOT_BLOCK);
        Some(start)
    };
    lengths.into_iter().scan(0, place).collect()
}

fn slot(label: &str, extensions: Vec<Content>) -> Partition {
    let places = starts(extensions.iter().map(Content::length));
    let places = places.into_iter().map(|block| block * SLOT_BLOCK);
    Partition {
        label: label.to_owned(),
        type_guid: EXTENSION_TYPE,
        size: SLOT_SIZE,
        content: PartitionContent::Bytes(places.zip(extensions).collect()),
    }
}

/// The content of a file.
pub fn content(path: &Path) -> Result<Content, LayoutError> {
    Content::of_file(path).map_err(|source| LayoutError::Unusable {
        path: path.to_owned(),
        source,
    })
}

/// An EFI system partition that boots, with `files` by their paths, and space for two more UKIs with some growth: an
/// update writes the new one before it removes an old one, and the one before that stays until the new one has proved
/// itself.
pub fn esp_partition(
    label: &str,
    type_guid: Uuid,
    size: u64,
    boot: Boot,
    mut files: BTreeMap<String, Content>,
) -> Result<Partition, DiskError> {
    let volume = VolumeLabel::parse(label).map_err(|source| DiskError::Fat {
        label: label.to_owned(),
        source,
    })?;
    let reserve = 2 * (boot.uki.length() + boot.uki.length() / 4);
    let configuration = Content::Bytes(LOADER_CONFIGURATION.into());
    files.insert(LOADER_PATH.to_owned(), boot.loader);
    files.insert(LOADER_CONFIGURATION_PATH.to_owned(), configuration);
    files.insert(Boot::uki_path(&boot.version), boot.uki);
    Ok(Partition {
        label: label.to_owned(),
        type_guid,
        size,
        content: PartitionContent::Fat32 {
            label: volume,
            files,
            reserve,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_follow_each_other_in_whole_blocks() {
        assert_eq!(starts([4096, 4097, 1, 8192]), [0, 1, 3, 4]);
        assert_eq!(starts([]), [0_u64; 0]);
    }
}
