//! What the kernel and udev say of a block device: what it is, what is on it, and who uses it.
//!
//! It is what an operator needs to recognise a disk, read from sysfs, `/proc` and udev's database.
//! All of it may be missing, in a container for example; only size and sector size may not.

use std::path::{Path, PathBuf};
use std::{fs, io};

use hearth_sys::identity::Identity;
use rustix::fs::{major, makedev, minor};

use super::layout::Layout;
use super::size_text;
use crate::table::printable;

/// The unit of sizes in sysfs, whatever the sectors are.
const SYSFS_SECTOR: u64 = 512;

/// Why a block device cannot be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// The kernel does not describe it.
    #[error("cannot read {}", path.display())]
    Sysfs { path: PathBuf, source: io::Error },
    /// An attribute that is not a number.
    #[error("{}: expected a number, got {found:?}", path.display())]
    Number { path: PathBuf, found: String },
    /// A part of a disk.
    #[error("it is a partition; name the whole disk, /dev/{disk}")]
    Partition { disk: String },
    /// A drive without a card, for example.
    #[error("it is empty: there is no medium in it")]
    NoMedium,
    /// Its switch for that is set.
    #[error("it is read-only")]
    ReadOnly,
    /// It is too small.
    #[error("expected at least {} ({expected} bytes), got {} ({found} bytes)", size_text(*expected), size_text(*found))]
    TooSmall { expected: u64, found: u64 },
    /// Firmware would not find the partition table.
    #[error(
        "the image is for disks with sectors of {expected} bytes, and those of this one have {found}; \
         build the image with --sector-size {found}"
    )]
    SectorSize { expected: u32, found: u32 },
    /// It is in use.
    #[error("it is in use: {}", uses.join(", "))]
    InUse { uses: Vec<String> },
}

/// Where the kernel and udev describe devices.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    sys: PathBuf,
    proc: PathBuf,
    udev: PathBuf,
}

impl Host {
    /// This one.
    pub(crate) fn this() -> Self {
        Self::under(Path::new("/"))
    }

    fn under(root: &Path) -> Self {
        Self {
            sys: root.join("sys"),
            proc: root.join("proc"),
            udev: root.join("run/udev/data"),
        }
    }
}

/// A whole block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// As it was named.
    pub path: PathBuf,
    /// The kernel's name of it.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// In bytes.
    pub sector_size: u32,
    pub model: Option<String>,
    pub serial: Option<String>,
    pub is_removable: bool,
    is_read_only: bool,
    /// One line for the file system on it, or for each partition.
    content: Vec<String>,
    uses: Vec<String>,
}

impl Device {
    /// The device with this number.
    pub(crate) fn read(host: &Host, path: &Path, number: u64) -> Result<Self, DeviceError> {
        let directory = host.directory(number)?;
        let name = name_of(&directory);
        if directory.join("partition").exists() {
            let disk = directory.parent().map(name_of).unwrap_or_default();
            return Err(DeviceError::Partition { disk });
        }
        let parts = partitions(&directory)?;
        let content = match parts.is_empty() {
            true => host.file_system(&directory).into_iter().collect(),
            false => parts.iter().map(|part| host.content(part)).collect(),
        };
        let whole = std::iter::once(&directory).chain(&parts);
        let identity = Identity::read(&directory);
        Ok(Self {
            path: path.to_owned(),
            size: attribute(&directory.join("size"))?.saturating_mul(SYSFS_SECTOR),
            sector_size: attribute(&directory.join("queue/logical_block_size"))? as u32,
            model: identity.model,
            serial: identity.serial,
            is_removable: attribute(&directory.join("removable")).is_ok_and(|value| value == 1),
            is_read_only: attribute(&directory.join("ro"))? != 0,
            content,
            uses: whole.flat_map(|part| host.uses(part)).collect(),
            name,
        })
    }

    /// Whether an image with this layout can be written to it.
    pub(crate) fn check(&self, image: &Layout) -> Result<(), DeviceError> {
        self.check_use()?;
        if self.size < image.size {
            return Err(DeviceError::TooSmall {
                expected: image.size,
                found: self.size,
            });
        }
        match self.sector_size == image.sector_size {
            true => Ok(()),
            false => Err(DeviceError::SectorSize {
                expected: image.sector_size,
                found: self.sector_size,
            }),
        }
    }

    /// Whether anything can be written to it.
    pub(crate) fn check_use(&self) -> Result<(), DeviceError> {
        match (self.size, self.is_read_only, &self.uses[..]) {
            (0, _, _) => Err(DeviceError::NoMedium),
            (_, true, _) => Err(DeviceError::ReadOnly),
            (_, _, []) => Ok(()),
            (_, _, uses) => Err(DeviceError::InUse {
                uses: uses.to_vec(),
            }),
        }
    }

    /// What it is, on one line, and what is on it, on a line each.
    pub(crate) fn text(&self) -> String {
        let mut words: Vec<String> = self.model.iter().map(|model| printable(model)).collect();
        let serial = self.serial.iter();
        words.extend(serial.map(|serial| format!("serial {}", printable(serial))));
        words.push(size_text(self.size));
        if self.is_removable {
            words.push("removable".to_owned());
        }
        let mut text = format!("{}: {}\n", self.path.display(), words.join(", "));
        for line in &self.content {
            text.push_str(&format!("  {}\n", printable(line)));
        }
        if self.content.is_empty() {
            text.push_str("  no partitions, and no known file system\n");
        }
        text
    }
}

impl Host {
    fn directory(&self, number: u64) -> Result<PathBuf, DeviceError> {
        let number = format!("{}:{}", major(number), minor(number));
        let path = self.sys.join("dev/block").join(number);
        path.canonicalize()
            .map_err(|source| DeviceError::Sysfs { path, source })
    }

    /// A partition on one line.
    fn content(&self, part: &Path) -> String {
        let size = attribute(&part.join("size")).unwrap_or(0);
        let mut words = vec![name_of(part), size_text(size.saturating_mul(SYSFS_SECTOR))];
        let events = fs::read_to_string(part.join("uevent")).unwrap_or_default();
        let label = events
            .lines()
            .find_map(|line| line.strip_prefix("PARTNAME="));
        words.extend(label.map(|label| format!("{label:?}")));
        words.extend(self.file_system(part));
        words.join("  ")
    }

    /// What udev has found on a device.
    fn file_system(&self, part: &Path) -> Option<String> {
        let number = trimmed(&part.join("dev"))?;
        let known = fs::read_to_string(self.udev.join(format!("b{number}"))).ok()?;
        let value = |key: &str| {
            let mut lines = known.lines();
            lines.find_map(|line| {
                line.strip_prefix("E:")?
                    .strip_prefix(key)?
                    .strip_prefix('=')
            })
        };
        let kind = value("ID_FS_TYPE")?;
        Some(match value("ID_FS_LABEL") {
            Some(label) => format!("{kind} {label:?}"),
            None => kind.to_owned(),
        })
    }

    /// By whom a device or a partition is used.
    fn uses(&self, part: &Path) -> Vec<String> {
        let name = name_of(part);
        let mut uses = Vec::new();
        if let Some(number) = trimmed(&part.join("dev")) {
            let mounts = fs::read_to_string(self.proc.join("self/mountinfo")).unwrap_or_default();
            let mounts = mounts.lines().filter_map(|line| mounted(line, &number));
            uses.extend(mounts.map(|place| format!("{name} is mounted on {place}")));
            let swaps = fs::read_to_string(self.proc.join("swaps")).unwrap_or_default();
            if swaps.lines().any(|line| is_of(line, &number)) {
                uses.push(format!("{name} is swap space"));
            }
        }
        let holders = fs::read_dir(part.join("holders")).into_iter().flatten();
        uses.extend(
            holders.flatten().map(|holder| {
                format!("{name} is part of {}", holder.file_name().to_string_lossy())
            }),
        );
        uses
    }
}

/// Where a device is mounted, if a line of `mountinfo` says so. Some file systems have a number of
/// their own there; then the device that was mounted decides.
fn mounted(line: &str, number: &str) -> Option<String> {
    let (place, source) = line.split_once(" - ")?;
    let place: Vec<&str> = place.split(' ').collect();
    let source = source.split(' ').nth(1)?;
    let is_it = *place.get(2)? == number || is_of(source, number);
    is_it.then(|| place.get(4).unwrap_or(&"").to_string())
}

/// Whether the first word is the path of the device with this number.
fn is_of(line: &str, number: &str) -> bool {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    let path = line.split_whitespace().next().unwrap_or_default();
    let device = fs::metadata(path)
        .ok()
        .filter(|m| m.file_type().is_block_device());
    let numbers = number.split_once(':');
    let numbers = numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match (device, numbers) {
        (Some(device), Some((major, minor))) => device.rdev() == makedev(major, minor),
        _ => false,
    }
}

fn name_of(directory: &Path) -> String {
    let name = directory.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn partitions(directory: &Path) -> Result<Vec<PathBuf>, DeviceError> {
    let failed = |source| DeviceError::Sysfs {
        path: directory.to_owned(),
        source,
    };
    let mut parts = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Ok(number) = attribute(&path.join("partition")) {
            parts.push((number, path));
        }
    }
    parts.sort();
    Ok(parts.into_iter().map(|(_, path)| path).collect())
}

fn attribute(path: &Path) -> Result<u64, DeviceError> {
    let text = fs::read_to_string(path).map_err(|source| DeviceError::Sysfs {
        path: path.to_owned(),
        source,
    })?;
    text.trim().parse().map_err(|_| DeviceError::Number {
        path: path.to_owned(),
        found: text.trim().to_owned(),
    })
}

/// The text of an attribute, if it says anything.
fn trimmed(path: &Path) -> Option<String> {
    let text = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
