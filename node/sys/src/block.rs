//! Disks and partitions: lists them from sysfs and identifies partitions by type GUID.
//!
//! The kernel lists disks and partition devices; the purpose of a partition is read from the
//! partition table on the disk. Partitions are identified by type GUID on the *boot disk*, never by
//! device name, which depends on the order in which disks are detected.
//!
//! A disk that cannot be read, or has no partition table, does not hide the others: it is skipped,
//! and the errors of this module list the disks that exist.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use rustix::fs::FallocateFlags;
use uuid::{Uuid, uuid};

use super::firmware::{Booted, DevicePath, EfiVariableError};
use super::gpt::{self, GptError};
use super::identity::Identity;
use super::pci::{self, Purpose};
use super::raw;

/// The partition type of an EFI system partition.
pub const ESP: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");

/// The unit of sizes in sysfs, regardless of the disk's sector size.
const SYSFS_SECTOR: u64 = 512;

/// Why a disk or partition cannot be found or changed.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// A file or directory in sysfs cannot be read.
    #[error("cannot read {path}")]
    Sysfs {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A sysfs attribute of a device has an invalid value.
    #[error("{path}: expected {wanted}, got {found:?}")]
    Attribute {
        /// The file.
        path: PathBuf,
        /// The actual content.
        found: String,
        /// The expected content.
        wanted: &'static str,
    },
    /// No disk has the partitions of a node.
    #[error("cannot find a disk with an EFI system partition and a data partition; disks: {found}")]
    NoEsp {
        /// The disks, and the state of each.
        found: Found,
    },
    /// The partition from which the firmware booted does not exist.
    #[error("cannot find partition {wanted}, from which the firmware booted; disks: {found}")]
    BootPartitionMissing {
        /// The partition named by the firmware.
        wanted: Uuid,
        /// The disks, and the state of each.
        found: Found,
    },
    /// There are several, and none can be chosen: the firmware names none, or not well enough to
    /// distinguish copies of one image.
    #[error(
        "several EFI system partitions, and it is unknown from which one this machine was booted \
         (attach one disk only: the firmware does not tell these apart): {}",
        display_all(candidates)
    )]
    AmbiguousEsp {
        /// All EFI system partitions.
        candidates: Vec<PartitionDevice>,
    },
    /// The boot disk has no partition of this type, or several.
    #[error("{disk}: expected exactly one partition of type {type_guid}, got {count}")]
    NotOnePartition {
        /// The disk.
        disk: PathBuf,
        /// The expected partition type.
        type_guid: Uuid,
        /// The actual number of partitions.
        count: usize,
    },
    /// The firmware does not say from where this machine was booted.
    #[error(transparent)]
    EfiVariable(#[from] EfiVariableError),
    /// A partition table cannot be read or changed.
    #[error("cannot access the partition table of {disk}")]
    Table {
        /// The disk.
        disk: PathBuf,
        /// The error of the partition table.
        source: GptError,
    },
    /// The kernel's announcements of new disks cannot be received.
    #[error("cannot wait for a disk to appear")]
    Events(#[source] io::Error),
    /// I/O on a device failed.
    #[error("{device}: cannot {step}")]
    Io {
        /// The device.
        device: PathBuf,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl BlockError {
    /// Whether attaching or detaching a disk can end it.
    pub fn is_of_disks(&self) -> bool {
        matches!(
            self,
            Self::NoEsp { .. } | Self::BootPartitionMissing { .. } | Self::AmbiguousEsp { .. }
        )
    }

    /// Whether the boot disk is missing, which ends when it appears.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::NoEsp { .. } | Self::BootPartitionMissing { .. })
    }

    fn io(device: &Path, step: &'static str) -> impl FnOnce(io::Error) -> Self {
        let device = device.to_owned();
        move |source| Self::Io {
            device,
            step,
            source,
        }
    }
}

/// The disks that exist, for errors, and what might have reached others.
#[derive(Debug, Default)]
pub struct Found {
    disks: Vec<(Disk, String)>,
    /// The controllers without a driver, as the end of a message.
    without_driver: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.disks.is_empty() {
            f.write_str("none")?;
        }
        for (i, (disk, what)) in self.disks.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{} ({what})", disk.path.display())?;
        }
        f.write_str(&self.without_driver)
    }
}

/// A whole disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name of the disk, such as `vda`.
    pub name: String,
    /// The path of its device node.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// The size of its sectors in bytes.
    pub sector_size: u32,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
}

/// A partition with its table entry and its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionDevice {
    /// The disk that contains it.
    pub disk: Disk,
    /// The path of its device node.
    pub path: PathBuf,
    /// The entry in the partition table.
    pub entry: gpt::Partition,
}

impl PartitionDevice {
    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.entry.sectors() * u64::from(self.disk.sector_size)
    }
}

fn display_all(partitions: &[PartitionDevice]) -> String {
    let show = |p: &PartitionDevice| format!("{} ({})", p.path.display(), p.entry.guid);
    partitions.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// The block devices of a machine.
#[derive(Clone, Debug)]
pub struct Blocks {
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for Blocks {
    fn default() -> Self {
        Self::at("/sys", "/dev")
    }
}

impl Blocks {
    /// The block devices in these directories, which are `/sys` and `/dev` except in tests.
    pub fn at(sys: impl Into<PathBuf>, dev: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            dev: dev.into(),
        }
    }

    /// All disks from which a machine can be booted, sorted by name. Virtual devices (loop, RAM,
    /// device-mapper), hardware partitions of eMMC and empty drives are excluded.
    pub fn disks(&self) -> Result<Vec<Disk>, BlockError> {
        let directory = self.sys.join("block");
        let failed = |source| BlockError::Sysfs {
            path: directory.clone(),
            source,
        };
        let mut disks = Vec::new();
        for entry in fs::read_dir(&directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let Some(name) = name.to_str() else { continue };
            if !is_disk(name) {
                continue;
            }
            match self.disk(name) {
                Ok(disk) if disk.size > 0 => disks.push(disk),
                Ok(_empty_drive) => {}
                // A disk that was removed meanwhile or is defective must not affect the others.
                Err(error) => tracing::warn!(disk = name, %error, "cannot read disk; skipping it"),
            }
        }
        disks.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(disks)
    }

    /// The devices that can have a file system, sorted by name: all disks and optical drives but
    /// the one with the name `except`, and their partitions. Empty drives are among them.
    pub fn volumes(&self, except: Option<&str>) -> Result<Vec<PathBuf>, BlockError> {
        let directory = self.sys.join("block");
        let mut volumes = Vec::new();
        for name in names(&directory)? {
            if Some(&name[..]) == except || !(is_disk(&name) || name.starts_with("sr")) {
                continue;
            }
            // A disk that was removed meanwhile has no partitions.
            for part in names(&directory.join(&name)).unwrap_or_default() {
                if directory.join(&name).join(&part).join("partition").exists() {
                    volumes.push(self.dev.join(part));
                }
            }
            volumes.push(self.dev.join(name));
        }
        volumes.sort();
        Ok(volumes)
    }

    /// The name of the disk or optical drive that this device is, or a partition of.
    pub fn disk_of(&self, device: &Path) -> Result<String, BlockError> {
        let directory = self.sys.join("block");
        let device = device.file_name().and_then(|name| name.to_str());
        let device = device.unwrap_or_default();
        let is_part = |disk: &String| directory.join(disk).join(device).join("partition").exists();
        let disk = names(&directory)?.into_iter().find(is_part);
        Ok(disk.unwrap_or_else(|| device.to_owned()))
    }

    /// What the disk with this name is.
    pub fn identity(&self, name: &str) -> Identity {
        Identity::read(&self.sys.join("block").join(name))
    }

    fn disk(&self, name: &str) -> Result<Disk, BlockError> {
        let directory = self.sys.join("block").join(name);
        let size = number(&directory.join("size"))?;
        let sector_size = number(&directory.join("queue/logical_block_size"))?;
        Ok(Disk {
            name: name.to_owned(),
            path: self.dev.join(name),
            size: size.saturating_mul(SYSFS_SECTOR),
            sector_size: sector_size.clamp(512, 65536) as u32,
            read_only: number(&directory.join("ro"))? != 0,
        })
    }

    /// The partitions of a disk that the kernel also lists.
    pub fn partitions(&self, disk: &Disk) -> Result<Vec<PartitionDevice>, BlockError> {
        self.read(disk).map(|(partitions, _)| partitions)
    }

    /// The partitions, and whether they are those of the backup table.
    fn read(&self, disk: &Disk) -> Result<(Vec<PartitionDevice>, bool), BlockError> {
        let device = File::open(&disk.path).map_err(BlockError::io(&disk.path, "open"))?;
        let table = gpt::read(&device, disk.sector_size).map_err(|source| BlockError::Table {
            disk: disk.path.clone(),
            source,
        })?;
        if table.from_backup {
            tracing::warn!(disk = %disk.path.display(), "the primary partition table is corrupt; using the backup");
        }
        let directory = self.sys.join("block").join(&disk.name);
        let mut partitions = Vec::new();
        for entry in table.partitions {
            let name = partition_name(disk, entry.number);
            if directory.join(&name).join("partition").exists() {
                partitions.push(PartitionDevice {
                    disk: disk.clone(),
                    path: self.dev.join(name),
                    entry,
                });
            }
        }
        Ok((partitions, table.from_backup))
    }

    /// Finds the EFI system partition from which this system was booted: of the disks with a
    /// partition of type `data`, the one that the firmware names. If it names none, or if the disks
    /// are copies of each other, the only one whose partition table is undamaged.
    pub fn boot_partition(
        &self,
        booted: &Booted,
        data: Uuid,
    ) -> Result<PartitionDevice, BlockError> {
        let mut found = Found::default();
        let mut candidates = Vec::new();
        for disk in self.disks()? {
            let what = match self.read(&disk) {
                Ok((partitions, from_backup)) => {
                    let what = format!("{} partitions", partitions.len());
                    candidates.extend(candidate(partitions, data, from_backup));
                    what
                }
                Err(BlockError::Table { source, .. }) => source.to_string(),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    format!("{error}: {}", cause.unwrap_or_default())
                }
            };
            found.disks.push((disk, what));
        }
        let is_at = |path: &DevicePath, disk: &Disk| path.is(&self.sys, &disk.name);
        choose(candidates, booted, is_at, found).map_err(|error| self.with_controllers(error))
    }

    /// Adds the controllers without a driver to the error of a disk that is missing: it may be
    /// behind one of them.
    fn with_controllers(&self, mut error: BlockError) -> BlockError {
        if let BlockError::NoEsp { found } | BlockError::BootPartitionMissing { found, .. } =
            &mut error
        {
            found.without_driver = pci::without_driver(&self.sys, Purpose::Disk);
        }
        error
    }

    /// The only partition of this type on a disk.
    pub fn only_partition(
        &self,
        disk: &Disk,
        type_guid: Uuid,
    ) -> Result<PartitionDevice, BlockError> {
        let mut partitions = self.partitions(disk)?;
        partitions.retain(|partition| partition.entry.type_guid == type_guid);
        match <[_; 1]>::try_from(partitions) {
            Ok([one]) => Ok(one),
            Err(others) => Err(BlockError::NotOnePartition {
                disk: disk.path.clone(),
                type_guid,
                count: others.len(),
            }),
        }
    }

    /// Grows the last partition of a disk to the end of the disk, in the partition table and in the
    /// kernel. Idempotent; the partition may be in use.
    pub fn grow(&self, partition: &PartitionDevice) -> Result<PartitionDevice, BlockError> {
        let disk = &partition.disk;
        let device = OpenOptions::new().read(true).write(true).open(&disk.path);
        let device = device.map_err(BlockError::io(&disk.path, "open for writing"))?;
        let table_failed = |source| BlockError::Table {
            disk: disk.path.clone(),
            source,
        };
        let guid = partition.entry.guid;
        gpt::grow_last(&device, disk.sector_size, guid).map_err(table_failed)?;
        let table = gpt::read(&device, disk.sector_size).map_err(table_failed)?;
        let entry = table.partitions.into_iter().find(|p| p.guid == guid);
        let entry = entry.ok_or_else(|| table_failed(GptError::NoSuchPartition(guid)))?;
        let grown = PartitionDevice {
            disk: disk.clone(),
            path: partition.path.clone(),
            entry,
        };
        // Also if the table was correct already: after a power cut between the two steps the kernel
        // sees the new size only at the next boot, but the partition is used in this one.
        if self.kernel_size(&grown)? != grown.size() {
            let start = grown.entry.first * u64::from(disk.sector_size);
            raw::change_partition(
                &device,
                raw::PartitionChange::Resize,
                grown.entry.number,
                start,
                grown.size(),
            )
            .map_err(BlockError::io(
                &grown.path,
                "set the new size in the kernel",
            ))?;
        }
        Ok(grown)
    }

    /// Shows the kernel a partition that is in no table on the disk yet.
    pub fn show(&self, disk: &Disk, entry: gpt::Partition) -> Result<PartitionDevice, BlockError> {
        let partition = PartitionDevice {
            disk: disk.clone(),
            path: self.dev.join(partition_name(disk, entry.number)),
            entry,
        };
        let start = partition.entry.first * u64::from(disk.sector_size);
        self.change(&partition, raw::PartitionChange::Add, start)?;
        Ok(partition)
    }

    /// Hides such a partition again, which must not be in use.
    pub fn hide(&self, partition: &PartitionDevice) -> Result<(), BlockError> {
        self.change(partition, raw::PartitionChange::Remove, 0)
    }

    fn change(
        &self,
        partition: &PartitionDevice,
        change: raw::PartitionChange,
        start: u64,
    ) -> Result<(), BlockError> {
        let path = &partition.disk.path;
        let device = File::open(path).map_err(BlockError::io(path, "open"))?;
        let (number, length) = (partition.entry.number, partition.size());
        raw::change_partition(&device, change, number, start, length).map_err(BlockError::io(
            path,
            "change what the kernel knows of its partitions",
        ))
    }

    fn kernel_size(&self, partition: &PartitionDevice) -> Result<u64, BlockError> {
        let name = partition.path.file_name().unwrap_or_default();
        let directory = self.sys.join("block").join(&partition.disk.name);
        let sectors = number(&directory.join(name).join("size"))?;
        Ok(sectors.saturating_mul(SYSFS_SECTOR))
    }
}

/// The kernel's name of a partition.
fn partition_name(disk: &Disk, number: u32) -> String {
    let separator = match disk.name.ends_with(|c: char| c.is_ascii_digit()) {
        true => "p",
        false => "",
    };
    format!("{}{separator}{number}", disk.name)
}

/// The names in a directory, as far as they are text.
fn names(directory: &Path) -> Result<Vec<String>, BlockError> {
    let failed = |source| BlockError::Sysfs {
        path: directory.to_owned(),
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

/// Whether a block device of this name can be a disk from which a machine is booted.
fn is_disk(name: &str) -> bool {
    let virtual_kinds = ["loop", "ram", "zram", "dm-", "md", "nbd", "sr", "fd"];
    // eMMC has small areas of its own for boot loaders: `mmcblk0boot0`, `mmcblk0rpmb`.
    let area = name.strip_prefix("mmcblk").is_some_and(|number| {
        let number = number.trim_start_matches(|c: char| c.is_ascii_digit());
        !number.is_empty()
    });
    !area && !virtual_kinds.iter().any(|kind| name.starts_with(kind))
}

/// An EFI system partition that this machine may have been booted from.
struct Candidate {
    partition: PartitionDevice,
    /// Whether the table of its disk is damaged.
    from_backup: bool,
}

/// The EFI system partitions of a disk. One without a data partition is another system's.
fn candidate(
    partitions: Vec<PartitionDevice>,
    data: Uuid,
    from_backup: bool,
) -> impl Iterator<Item = Candidate> {
    let is_ours = partitions.iter().any(|p| p.entry.type_guid == data);
    let esps = partitions
        .into_iter()
        .filter(move |p| is_ours && p.entry.type_guid == ESP);
    esps.map(move |partition| Candidate {
        partition,
        from_backup,
    })
}

fn choose(
    mut candidates: Vec<Candidate>,
    booted: &Booted,
    is_at: impl Fn(&DevicePath, &Disk) -> bool,
    found: Found,
) -> Result<PartitionDevice, BlockError> {
    if let Some(wanted) = booted.partition {
        candidates.retain(|candidate| candidate.partition.entry.guid == wanted);
        if candidates.is_empty() {
            return Err(BlockError::BootPartitionMissing { wanted, found });
        }
    }
    if let Some(path) = &booted.disk {
        prefer(&mut candidates, |c| is_at(path, &c.partition.disk));
    }
    prefer(&mut candidates, |candidate| !candidate.from_backup);
    let candidates: Vec<PartitionDevice> = candidates
        .into_iter()
        .map(|candidate| candidate.partition)
        .collect();
    match <[_; 1]>::try_from(candidates) {
        Ok([one]) => Ok(one),
        Err(none) if none.is_empty() => Err(BlockError::NoEsp { found }),
        Err(candidates) => Err(BlockError::AmbiguousEsp { candidates }),
    }
}

/// Keeps those for which this holds, if there are any.
fn prefer(candidates: &mut Vec<Candidate>, holds: impl Fn(&Candidate) -> bool) {
    if candidates.iter().any(&holds) {
        candidates.retain(holds);
    }
}

/// The size of a block device or file, in bytes.
pub fn size_of(device: &Path) -> Result<u64, BlockError> {
    let file = File::open(device).map_err(BlockError::io(device, "open"))?;
    gpt::Medium::size(&file).map_err(BlockError::io(device, "get the size"))
}

/// Reads `length` bytes at `offset`.
pub fn read_region(device: &Path, offset: u64, length: usize) -> Result<Vec<u8>, BlockError> {
    let file = File::open(device).map_err(BlockError::io(device, "open"))?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset)
        .map_err(BlockError::io(device, "read"))?;
    Ok(bytes)
}

/// Whether `length` bytes at `offset` can be read. Nothing after them is read.
pub fn is_readable(device: &Path, offset: u64, length: usize) -> Result<bool, BlockError> {
    let file = File::open(device).map_err(BlockError::io(device, "open"))?;
    // The kernel reads ahead otherwise, and logs each block that it cannot read.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)
        .map_err(|errno| BlockError::io(device, "read")(errno.into()))?;
    Ok(file.read_exact_at(&mut vec![0; length], offset).is_ok())
}

/// Writes bytes at `offset`, durably.
pub fn write_region(device: &Path, offset: u64, bytes: &[u8]) -> Result<(), BlockError> {
    let file = OpenOptions::new().write(true).open(device);
    let file = file.map_err(BlockError::io(device, "open for writing"))?;
    file.write_all_at(bytes, offset)
        .map_err(BlockError::io(device, "write"))?;
    file.sync_all().map_err(BlockError::io(device, "sync"))
}

/// Whether a range contains only zeros.
pub fn is_blank(device: &Path, offset: u64, length: u64) -> Result<bool, BlockError> {
    let file = File::open(device).map_err(BlockError::io(device, "open"))?;
    let mut buffer = vec![0; CHUNK_LENGTH];
    for (at, length) in chunks(offset, length) {
        let chunk = &mut buffer[..length];
        file.read_exact_at(chunk, at)
            .map_err(BlockError::io(device, "read"))?;
        if chunk.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fills a range with zeros, durably. If the device supports it, no data is transferred.
pub fn zero_range(device: &Path, offset: u64, length: u64) -> Result<(), BlockError> {
    let file = OpenOptions::new().write(true).open(device);
    let file = file.map_err(BlockError::io(device, "open for writing"))?;
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    if length > 0 && rustix::fs::fallocate(&file, flags, offset, length).is_err() {
        // Not every device and file system supports it; writing always works.
        let zeros = vec![0; CHUNK_LENGTH];
        for (at, length) in chunks(offset, length) {
            file.write_all_at(&zeros[..length], at)
                .map_err(BlockError::io(device, "write zeros"))?;
        }
    }
    file.sync_all().map_err(BlockError::io(device, "sync"))
}

/// Makes the kernel read the partition table of a disk again, which it refuses while a partition is in
/// use, and for devices that cannot have partitions.
pub fn reread_partitions(disk: &File) -> io::Result<()> {
    raw::reread_partitions(disk)
}

const CHUNK_LENGTH: usize = 1024 * 1024;

fn chunks(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..length).step_by(CHUNK_LENGTH).map(move |done| {
        (
            offset + done,
            (length - done).min(CHUNK_LENGTH as u64) as usize,
        )
    })
}

fn number(path: &Path) -> Result<u64, BlockError> {
    let text = fs::read_to_string(path).map_err(|source| BlockError::Sysfs {
        path: path.to_owned(),
        source,
    })?;
    text.trim().parse().map_err(|_| BlockError::Attribute {
        path: path.to_owned(),
        found: text.trim().to_owned(),
        wanted: "a number",
    })
}

#[cfg(test)]
mod tests;
