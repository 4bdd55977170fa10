//! The disk that a node boots from: which partitions it has, and by what the node finds them.
//!
//! ```text
//! HEARTH-ESP        FAT32: the unified kernel image, perhaps parameters; room for a second image
//! HEARTH-EXT-NAME   one for each extension, sealed
//! HEARTH-DATA       blank; last, since the node lets it grow to the disk's end
//! ```
//!
//! The node holds the same names and types (`hearth_api::names`), and neither side knows the other: both can be built
//! without it. A test of `xtask`, which knows both, compares them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use uuid::{Uuid, uuid};

use crate::content::Content;
use crate::disk::{Disk, DiskError, Partition, PartitionContent, Seed};
use crate::fat::VolumeLabel;
use crate::uki::BOOT_PATH;

const MIB: u64 = 1 << 20;

/// Two UKIs and room to grow. Small enough for 1-KiB clusters.
pub const ESP_SIZE: u64 = 128 * MIB;
/// Label of the EFI system partition.
pub const ESP_LABEL: &str = "HEARTH-ESP";
/// UEFI's type of it.
pub const ESP_TYPE: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
/// Where parameters of the node lie on it.
pub const PARAMETERS: &str = "hearth/parameters.pb";

/// What mkfs.xfs wants at least, and etcd's first files. The node grows it to the disk's end at the first boot.
pub const DATA_SIZE: u64 = 512 * MIB;
/// Label of the data partition.
pub const DATA_LABEL: &str = "HEARTH-DATA";
/// Its type, Hearth's own.
pub const DATA_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-68656172746a");

/// Type of an extension's partition.
pub const EXTENSION_TYPE: Uuid = uuid!("6c5ab0f2-3d0e-4b5f-9d1c-686561727478");

/// Why the disk could not be laid out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say it.
pub enum LayoutError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot use {}", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// An extension that is sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Label of its partition.
    pub label: String,
    /// The partition's bytes.
    pub file: PathBuf,
    /// The word of the kernel's command line that admits it.
    pub word: String,
}

impl Extension {
    /// Its partition, in whole MiB.
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

/// The disk with the UKI at `uki`; its seed is made of the content, of which the extensions' hashes are in the UKI.
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

/// An EFI system partition that starts `uki`, with `files` beside it by their paths, and room for a second UKI of the
/// same size and some growth: an update writes the new one before the old one goes.
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
