//! Where the parts of an image are: on its disk, and thus on every disk that it is written to. An image is a node's, or that
//! of a stick that installs one.

use std::fs::File;
use std::ops::Range;

use hearth_api::names::disk::{DATA_TYPE, ESP_TYPE};
use hearth_api::names::installer;
use hearth_sys::gpt::{self, GptError, Partition, Table};
use uuid::Uuid;

/// The sector sizes of disks, and of the images for them.
const SECTOR_SIZES: [u32; 2] = [512, 4096];

/// Why something is not a node's disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    /// Nothing is read in a partition table of either sector size.
    #[error("expected a raw disk image with a partition table: {0}")]
    Table(#[from] GptError),
    /// The backup of the table is right, the table is not.
    #[error("its partition table is damaged: write the image again")]
    Damaged,
    /// It is the disk of another system.
    #[error("expected the partitions of a node, but it has {count} of type {kind}")]
    Partitions { kind: &'static str, count: usize },
}

/// An image, or a device that has one. In bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Its size, which for a device is that of the device.
    pub size: u64,
    /// Of its sectors.
    pub sector_size: u32,
    /// What is before the first partition: the table.
    pub head: u64,
    /// The EFI system partition.
    pub esp: Range<u64>,
    /// It is a medium that installs a node, and no node's disk.
    pub is_installer: bool,
}

impl Layout {
    /// Reads the partition table of an image or a device.
    pub(crate) fn of(file: &File) -> Result<Self, LayoutError> {
        let [small, large] = SECTOR_SIZES;
        let (table, sector_size) = match (gpt::read(file, small), gpt::read(file, large)) {
            (Ok(table), _) => (table, small),
            (Err(_), Ok(table)) => (table, large),
            (Err(error), Err(_)) => return Err(error.into()),
        };
        if table.from_backup {
            return Err(LayoutError::Damaged);
        }
        let esp = only(&table, "ESP", ESP_TYPE)?;
        let is_installer = esp.name == installer::LABEL;
        if !is_installer {
            only(&table, "data", DATA_TYPE)?;
        }
        let bytes = |sectors: u64| sectors * u64::from(sector_size);
        let first = table.partitions.iter().map(|one| one.first).min();
        Ok(Self {
            size: gpt::Medium::size(file).map_err(|source| GptError::Io {
                step: "get the size",
                source,
            })?,
            sector_size,
            head: bytes(first.unwrap_or(0)),
            esp: bytes(esp.first)..bytes(esp.last + 1),
            is_installer,
        })
    }
}

fn only(table: &Table, kind: &'static str, type_guid: Uuid) -> Result<Partition, LayoutError> {
    let mut partitions = table.partitions.clone();
    partitions.retain(|partition| partition.type_guid == type_guid);
    match <[_; 1]>::try_from(partitions) {
        Ok([one]) => Ok(one),
        Err(others) => Err(LayoutError::Partitions {
            kind,
            count: others.len(),
        }),
    }
}
