//! Disk images: partitions in a GPT, written sparsely.
//!
//! Partitions follow each other from 1 MiB on, in whole MiB; 1 MiB after the last one is left for the backup table.
//! Only data that is not zero is written, so an image takes as much of the host's disk as it has content. All GUIDs and
//! volume IDs are derived from a seed that the caller makes of the content: the same content gives the same image, and
//! two different images in one machine can be told apart.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use uuid::Uuid;

use crate::content::Content;
use crate::fat::{FatError, FatSpec, VolumeLabel};
use crate::output::{Output, OutputError};
use crate::sector::SectorSize;

/// Why an image could not be written. Sizes are bytes.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum DiskError {
    #[error("partition {label}: expected a size that is a multiple of 1 MiB, got {size}")]
    PartitionSize { label: String, size: u64 },
    #[error("partition label {label:?} is not 1 to 36 UTF-16 units long")]
    PartitionLabel { label: String },
    #[error("partition {label}: {length} bytes do not fit into {size}")]
    TooLong {
        label: String,
        size: u64,
        length: u64,
    },
    #[error("{0} partitions exceed the GPT's limit of 128")]
    TooManyPartitions(usize),
    #[error("partition {label}: cannot lay out its file system")]
    Fat { label: String, source: FatError },
    #[error("cannot write the {part}")]
    Write { part: String, source: io::Error },
    #[error("cannot write the partition table")]
    Gpt(#[from] gpt::GptError),
    #[error("cannot write the protective MBR")]
    Mbr(#[from] gpt::mbr::MBRError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

const MIB: u64 = 1 << 20;

fn of_gpt(size: SectorSize) -> LogicalBlockSize {
    match size {
        SectorSize::B512 => LogicalBlockSize::Lb512,
        SectorSize::B4096 => LogicalBlockSize::Lb4096,
    }
}

/// The seed of GUIDs and volume IDs; a hash of the content, say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub [u8; 32]);

impl Seed {
    /// A seed made of the content's parts.
    pub fn of(parts: &[&[u8]]) -> Seed {
        let mut context = ring::digest::Context::new(&ring::digest::SHA256);
        for part in parts {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        Seed::from_digest(context.finish())
    }

    fn from_digest(digest: ring::digest::Digest) -> Seed {
        let mut seed = [0; 32];
        seed.copy_from_slice(digest.as_ref());
        Seed(seed)
    }

    fn derive(&self, purpose: &str) -> [u8; 32] {
        Seed::of(&[&self.0, purpose.as_bytes()]).0
    }

    pub(crate) fn guid(&self, purpose: &str) -> Uuid {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.derive(purpose)[..16]);
        // Version 8: custom.
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    }

    pub(crate) fn volume_id(&self, purpose: &str) -> u32 {
        let hash = self.derive(purpose);
        u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]])
    }
}

/// A disk to be written.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Seed of GUIDs and volume IDs.
    pub seed: Seed,
    /// Of the disk that it is for.
    pub sector_size: SectorSize,
    /// In their order on the disk.
    pub partitions: Vec<Partition>,
    /// Whether its image is for its owner only.
    pub is_secret: bool,
}

/// One partition.
#[derive(Debug, Clone)]
pub struct Partition {
    /// Its name in the partition table.
    pub label: String,
    /// Its type.
    pub type_guid: Uuid,
    /// Size in bytes, a multiple of 1 MiB.
    pub size: u64,
    /// Its content.
    pub content: PartitionContent,
}

/// The content of a partition.
#[derive(Debug, Clone)]
pub enum PartitionContent {
    /// All zero.
    Blank,
    /// A FAT32 file system.
    Fat32 {
        /// Its volume label.
        label: VolumeLabel,
        /// Files by path.
        files: BTreeMap<String, Content>,
        /// Bytes that must stay free.
        reserve: u64,
    },
    /// These bytes at these offsets, in ascending order, and zeros elsewhere.
    Bytes(Vec<(u64, Content)>),
}

impl Disk {
    /// The image's size in bytes.
    pub fn size(&self) -> u64 {
        2 * MIB + self.partitions.iter().map(|p| p.size).sum::<u64>()
    }

    /// Writes the image to `destination`, which appears, or is replaced, when the image is complete.
    pub fn write(&self, destination: &Path) -> Result<(), DiskError> {
        let mut output = Output::create(destination)?;
        if self.is_secret {
            output = output.secret()?;
        }
        self.write_into(output.file())?;
        output.publish()?;
        Ok(())
    }

    /// Writes the image into an empty file.
    pub fn write_into(&self, file: &mut File) -> Result<(), DiskError> {
        self.check()?;
        let failed = |part: &str| {
            let part = part.to_owned();
            move |source| DiskError::Write { part, source }
        };
        file.set_len(self.size()).map_err(failed("image's size"))?;
        let mut start = MIB;
        for (number, partition) in self.partitions.iter().enumerate() {
            let label = &partition.label;
            if let Some(spec) = partition.fat(self, number, start) {
                let plan = spec.plan().map_err(|source| DiskError::Fat {
                    label: label.clone(),
                    source,
                })?;
                plan.write_to(file, start)
                    .map_err(failed(&format!("partition {label}")))?;
            }
            for (offset, content) in partition.bytes() {
                file.seek(SeekFrom::Start(start + offset))
                    .and_then(|_| content.copy_to(file))
                    .map_err(failed(&format!("partition {label}")))?;
            }
            start += partition.size;
        }
        self.write_tables(file)?;
        file.flush().map_err(failed("image"))
    }

    fn check(&self) -> Result<(), DiskError> {
        if self.partitions.len() > 128 {
            return Err(DiskError::TooManyPartitions(self.partitions.len()));
        }
        for partition in &self.partitions {
            let Partition { label, size, .. } = partition;
            if *size == 0 || !size.is_multiple_of(MIB) || *size > 1 << 50 {
                return Err(DiskError::PartitionSize {
                    label: label.clone(),
                    size: *size,
                });
            }
            if !(1..=36).contains(&label.encode_utf16().count()) || label.contains('\0') {
                return Err(DiskError::PartitionLabel {
                    label: label.clone(),
                });
            }
            let ends = partition.bytes().iter();
            let length = ends
                .map(|(offset, content)| offset + content.length())
                .max();
            if let Some(length) = length.filter(|length| length > size) {
                return Err(DiskError::TooLong {
                    label: label.clone(),
                    size: *size,
                    length,
                });
            }
        }
        Ok(())
    }

    fn write_tables(&self, file: &mut File) -> Result<(), DiskError> {
        let sector = self.sector_size.bytes();
        // All sectors but the first; the field's largest number also means any larger one.
        let protected = u32::try_from(self.size() / sector - 1).unwrap_or(u32::MAX);
        ProtectiveMBR::with_lb_size(protected).overwrite_lba0(file)?;
        file.rewind().map_err(|source| DiskError::Write {
            part: "partition table".into(),
            source,
        })?;
        let mut start = MIB;
        let mut table = BTreeMap::new();
        for (number, partition) in (1u32..).zip(&self.partitions) {
            let end = start + partition.size;
            table.insert(
                number,
                gpt::partition::Partition {
                    part_type_guid: gpt::partition_types::Type {
                        guid: partition.type_guid,
                        os: gpt::partition_types::OperatingSystem::None,
                    },
                    part_guid: self.seed.guid(&format!("partition {number}")),
                    first_lba: start / sector,
                    last_lba: end / sector - 1,
                    flags: 0,
                    name: partition.label.clone(),
                },
            );
            start = end;
        }
        let mut disk = gpt::GptConfig::new()
            .writable(true)
            .logical_block_size(of_gpt(self.sector_size))
            .create_from_device(&mut *file, Some(self.seed.guid("disk")))?;
        disk.update_partitions(table)?;
        disk.write()?;
        Ok(())
    }
}

impl Partition {
    fn bytes(&self) -> &[(u64, Content)] {
        match &self.content {
            PartitionContent::Bytes(bytes) => bytes,
            PartitionContent::Blank | PartitionContent::Fat32 { .. } => &[],
        }
    }

    fn fat(&self, disk: &Disk, number: usize, start: u64) -> Option<FatSpec> {
        let PartitionContent::Fat32 {
            label,
            files,
            reserve,
        } = &self.content
        else {
            return None;
        };
        Some(FatSpec {
            size: self.size,
            sector_size: disk.sector_size,
            // Informative; systems that read it do not have an ESP beyond 2 TiB.
            hidden_sectors: u32::try_from(start / disk.sector_size.bytes()).unwrap_or(0),
            label: label.clone(),
            volume_id: disk.seed.volume_id(&format!("volume {number}")),
            reserve: *reserve,
            files: files.clone(),
        })
    }
}
