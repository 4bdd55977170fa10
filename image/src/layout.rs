//! The disk that a node boots from: its partitions, and the labels and types that the node finds them by.
//!
//! ```text
//! HEARTH-ESP        FAT32: the unified kernel image, perhaps parameters; room for a second image
//! HEARTH-EXT-NAME   one for each extension, sealed
//! HEARTH-DATA       blank; last, because the node grows it to the disk's end
//! ```
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
use crate::uki::BOOT_PATH;

const MIB: u64 = 1 << 20;

/// Two UKIs and space to grow. Small enough for 1-KiB clusters.
pub const ESP_SIZE: u64 = 128 * MIB;
/// Label of the EFI system partition.
pub const ESP_LABEL: &str = "HEARTH-ESP";
/// UEFI's type GUID of it.
pub const ESP_TYPE: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
/// Path of the node's parameters on it.
pub const PARAMETERS: &str = "hearth/parameters.pb";

/// The minimum of mkfs.xfs plus etcd's first files. The node grows it to the disk's end at the first boot.
pub const DATA_SIZE: u64 = 512 * MIB;
/// Label of the data partition.
pub const DATA_LABEL: &str = "HEARTH-DATA";
/// Its type GUID, specific to Hearth.
pub const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");

/// Type GUID of an extension's partition.
pub const EXTENSION_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-686561727478");

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

/// A sealed extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Label of its partition.
    pub label: String,
    /// Path of the file with the partition's bytes.
    pub file: PathBuf,
    /// The kernel command line argument that admits it.
    pub word: String,
}

impl Extension {
    /// Its partition, rounded up to whole MiB.
    fn partition(&self) -> Result<Partition, LayoutError> {
        let content = content(&self.file)?;
        Ok(Partition {
            label: self.label.clone(),
            type_guid: EXTENSION_TYPE,
            size: content.length().next_multiple_of(MIB),
            content: PartitionContent::Bytes(content),
        })
    }
}

/// The disk with the UKI at `uki`. Its seed is made of the content; the UKI contains the extensions' hashes.
pub fn disk_of(
    uki: &Path,
    parameters: Option<&[u8]>,
    extensions: &[Extension],
) -> Result<Disk, LayoutError> {
    let bytes = std::fs::read(uki).map_err(|source| LayoutError::Read {
        path: uki.to_owned(),
        source,
    })?;
    disk(
        Seed::of(&[&bytes, parameters.unwrap_or_default()]),
        content(uki)?,
        parameters,
        extensions,
    )
}

/// The disk with this UKI.
pub fn disk(
    seed: Seed,
    uki: Content,
    parameters: Option<&[u8]>,
    extensions: &[Extension],
) -> Result<Disk, LayoutError> {
    let files = parameters.map(|bytes| (PARAMETERS.to_owned(), Content::Bytes(bytes.to_vec())));
    let files = files.into_iter().collect();
    let mut partitions = vec![esp_partition(ESP_LABEL, ESP_TYPE, ESP_SIZE, uki, files)?];
    for extension in extensions {
        partitions.push(extension.partition()?);
    }
    partitions.push(Partition {
        label: DATA_LABEL.to_owned(),
        type_guid: DATA_TYPE,
        size: DATA_SIZE,
        content: PartitionContent::Blank,
    });
    Ok(Disk { seed, partitions })
}

fn content(path: &Path) -> Result<Content, LayoutError> {
    Content::of_file(path).map_err(|source| LayoutError::Unusable {
        path: path.to_owned(),
        source,
    })
}

/// An EFI system partition that starts `uki`, with `files` by their paths, and space for a second UKI of the same size
/// and some growth: an update writes the new one before it removes the old one.
pub fn esp_partition(
    label: &str,
    type_guid: Uuid,
    size: u64,
    uki: Content,
    mut files: BTreeMap<String, Content>,
) -> Result<Partition, DiskError> {
    let volume = VolumeLabel::parse(label).map_err(|source| DiskError::Fat {
        label: label.to_owned(),
        source,
    })?;
    let reserve = uki.length() + uki.length() / 4;
    files.insert(BOOT_PATH.to_owned(), uki);
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
