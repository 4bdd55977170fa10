//! Device-mapper: encrypted, authenticated, and verified read-only volumes.
//!
//! The kernel's interface consists of a dozen ioctls on one control device, each with a fixed
//! header and, for tables, a list of targets. This module implements it directly; the only unsafe
//! call is in `raw`.
//!
//! # Invariants
//! - Keys are in [`XtsKey`] and [`AeadKey`], which are not printable and are zeroized on drop. No
//!   table has a key: it names one in the kernel's keyring, so that nobody can read it from an open
//!   volume.
//! - A device whose table was rejected is removed again: after an error nothing of a volume
//!   remains.
//! - [`DeviceMapper::open_integrity`] never formats; only [`DeviceMapper::format_integrity`] does.
//!
//! # Formats
//! An encrypted volume is `aes-xts-plain64` in sectors of 4096 bytes over the whole device. An
//! authenticated volume has two layers: dm-integrity, which stores 32 bytes with every block (16 of
//! IV, 16 of tag) and writes both through a journal, and AEGIS-128 with random IVs on top of it.
//! Blocks that were never written have no valid tag and cannot be read. XFS reads such blocks after a
//! power cut, so a new volume is wiped: it is opened once without the journal for that. (docs/decisions/0064)
//!
//! A verified volume is dm-verity version 1: SHA-256, no salt, blocks of 4096 bytes, and the hash
//! tree directly after the data on the same device. Reading a block that does not match its hash
//! fails; no block is verified before it is read. The machine keeps running: the reader gets the
//! error, and a reboot does not repair a disk.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use zeroize::Zeroizing;

use super::block::{self, BlockError};
use super::keyring::ThreadKey;
use super::raw::{self, DM_HEADER};

/// The sector size of a volume, in bytes.
const SECTOR: u64 = 4096;
/// The unit of device-mapper tables, in bytes.
const UNIT: u64 = 512;
/// The cipher of an authenticated volume.
const AEAD: &str = "capi:aegis128-random";
/// The size of IV and tag for each sector of an authenticated volume.
const TAG_LENGTH: u32 = 32;
/// The same with AES-GCM, which former releases used.
const FORMER_TAG_LENGTH: u32 = 28;
/// A larger table is an internal error.
const MAX_TABLE: usize = 16 * 1024;

mod command {
    pub(crate) const VERSION: u8 = 0;
    pub(crate) const DEV_CREATE: u8 = 3;
    pub(crate) const DEV_REMOVE: u8 = 4;
    pub(crate) const DEV_SUSPEND: u8 = 6;
    pub(crate) const DEV_STATUS: u8 = 7;
    pub(crate) const TABLE_LOAD: u8 = 9;
    pub(super) const TABLE_STATUS: u8 = 12;
}

mod flag {
    pub(crate) const READ_ONLY: u32 = 1;
    pub(super) const STATUS_TABLE: u32 = 1 << 4;
    pub(crate) const BUFFER_FULL: u32 = 1 << 8;
}

/// Why a volume cannot be opened, formatted or closed.
#[derive(Debug, thiserror::Error)]
pub enum DmError {
    /// The kernel has no device-mapper, or its device node cannot be created.
    #[error("device-mapper is not available: cannot {step} {path}")]
    Control {
        /// The operation, as a verb.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The name is empty, too long, or holds a slash or a control character.
    #[error("invalid volume name {0:?}")]
    BadName(String),
    /// The kernel rejected an operation.
    #[error("volume {name}: cannot {step}")]
    Refused {
        /// The volume.
        name: String,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The device is too small for the volume.
    #[error("volume {name}: {device} is too small: {size} bytes")]
    TooSmall {
        /// The volume.
        name: String,
        /// The underlying device.
        device: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The device does not begin with a valid dm-integrity superblock.
    #[error("volume {name}: {device} has no valid dm-integrity superblock ({problem})")]
    NotIntegrity {
        /// The volume.
        name: String,
        /// The underlying device.
        device: PathBuf,
        /// What is wrong with the superblock.
        problem: String,
    },
    /// The device was formatted for the cipher of a former release.
    #[error(
        "volume {name}: {device} was formatted by a former release: \
         expected a tag size of {TAG_LENGTH}, got {FORMER_TAG_LENGTH}"
    )]
    FormerFormat {
        /// The volume.
        name: String,
        /// The underlying device.
        device: PathBuf,
    },
    /// I/O on the underlying device failed.
    #[error("cannot access the device of volume {name}")]
    Block {
        /// The volume.
        name: String,
        /// The error of the device.
        source: BlockError,
    },
    /// The kernel returned an invalid answer.
    #[error("volume {name}: the kernel returned an invalid answer to {step:?}")]
    Answer {
        /// The volume.
        name: String,
        /// The operation, as a verb.
        step: &'static str,
    },
}

/// The key of an encrypted volume.
pub struct XtsKey(Zeroizing<[u8; 64]>);

/// The key of an authenticated volume.
pub struct AeadKey(Zeroizing<[u8; 16]>);

impl XtsKey {
    /// Two AES-256 keys, which must differ; derived ones do.
    pub fn new(bytes: Zeroizing<[u8; 64]>) -> Self {
        Self(bytes)
    }
}

impl AeadKey {
    /// A key of AEGIS-128.
    pub fn new(bytes: Zeroizing<[u8; 16]>) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for XtsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("XtsKey")
    }
}

impl fmt::Debug for AeadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AeadKey")
    }
}

/// The parameters of a verified volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verity {
    /// The number of data blocks, of 4096 bytes each.
    pub blocks: u64,
    /// The root hash of the hash tree.
    pub root_hash: [u8; 32],
}

/// How dm-integrity writes a block and its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Through a journal: after a power cut both are the new ones, or both the old ones.
    Journaled,
    /// At once, which is twice as fast. A block that was being written during a power cut cannot be read afterwards.
    Direct,
}

/// A target that covers the whole device, as all of ours do.
struct Target {
    kind: &'static str,
    sectors: u64,
    parameters: String,
    read_only: bool,
}

/// The kernel's device-mapper.
#[derive(Debug)]
pub struct DeviceMapper {
    control: File,
}

impl DeviceMapper {
    /// Opens the control device; creates its node if `/dev` has none.
    pub fn open() -> Result<Self, DmError> {
        Self::open_in(Path::new("/sys"), Path::new("/dev"))
    }

    fn open_in(sys: &Path, dev: &Path) -> Result<Self, DmError> {
        let path = dev.join("mapper/control");
        let failed = |step: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| DmError::Control { step, path, source }
        };
        if !path.exists() {
            let numbers = sys.join("class/misc/device-mapper/dev");
            let text = fs::read_to_string(&numbers).map_err(failed("read", &numbers))?;
            let device = device_number(&text)
                .ok_or_else(|| failed("parse", &numbers)(io::ErrorKind::InvalidData.into()))?;
            let directory = dev.join("mapper");
            fs::create_dir_all(&directory).map_err(failed("create", &directory))?;
            use rustix::fs::{CWD, FileType, Mode, mknodat};
            mknodat(
                CWD,
                &path,
                FileType::CharacterDevice,
                Mode::RUSR | Mode::WUSR,
                device,
            )
            .map_err(|errno| failed("create", &path)(errno.into()))?;
        }
        let control = OpenOptions::new().read(true).write(true).open(&path);
        Ok(Self {
            control: control.map_err(failed("open", &path))?,
        })
    }

    /// The version of the kernel's interface.
    pub fn version(&self) -> Result<(u32, u32, u32), DmError> {
        let answer = self.send("-", command::VERSION, "ask for the version", 0, &[])?;
        Ok((
            u32_at(&answer, header::VERSION_MAJOR),
            u32_at(&answer, header::VERSION_MINOR),
            u32_at(&answer, header::VERSION_PATCH),
        ))
    }

    /// Opens the part of a device from `offset` (in bytes) on as a volume of its own: nothing
    /// before `offset` is accessible through it.
    pub fn open_part(&self, name: &str, device: &Path, offset: u64) -> Result<PathBuf, DmError> {
        let (total, skipped) = (usable_sectors(name, device)?, offset.div_ceil(UNIT));
        let sectors = total.saturating_sub(skipped);
        if sectors == 0 {
            return Err(DmError::TooSmall {
                name: name.to_owned(),
                device: device.to_owned(),
                size: total * UNIT,
            });
        }
        self.open_volume(
            name,
            &Target {
                kind: "linear",
                sectors,
                parameters: format!("{} {skipped}", device.display()),
                read_only: false,
            },
        )
    }

    /// Opens an encrypted volume on a device; returns the volume's device node.
    ///
    /// A wrong key is not detected here, but by the software that reads the content.
    pub fn open_encrypted(
        &self,
        name: &str,
        device: &Path,
        key: &XtsKey,
    ) -> Result<PathBuf, DmError> {
        let sectors = usable_sectors(name, device)?;
        let key = thread_key(name, &key.0[..])?;
        let parameters = format!(
            "capi:xts(aes)-plain64 {} 0 {} 0 2 allow_discards sector_size:{SECTOR}",
            key.name(),
            device.display()
        );
        self.open_volume(
            name,
            &Target {
                kind: "crypt",
                sectors,
                parameters,
                read_only: false,
            },
        )
    }

    /// Opens the upper layer of an authenticated volume, on a device returned by
    /// [`DeviceMapper::open_integrity`].
    ///
    /// With a wrong key every read fails.
    pub fn open_authenticated(
        &self,
        name: &str,
        integrity: &Path,
        key: &AeadKey,
    ) -> Result<PathBuf, DmError> {
        let sectors = usable_sectors(name, integrity)?;
        let key = thread_key(name, &key.0[..])?;
        let parameters = format!(
            "{AEAD} {} 0 {} 0 2 integrity:{TAG_LENGTH}:aead sector_size:{SECTOR}",
            key.name(),
            integrity.display()
        );
        self.open_volume(
            name,
            &Target {
                kind: "crypt",
                sectors,
                parameters,
                read_only: false,
            },
        )
    }

    /// Formats a device as the lower layer of an authenticated volume. Its content is lost.
    pub fn format_integrity(&self, name: &str, device: &Path) -> Result<(), DmError> {
        block::zero_range(device, 0, SECTOR).map_err(block_failed(name))?;
        // If the superblock is zero, the kernel writes a new one. The length of the volume is not
        // known yet, so the first table has the minimum length.
        let shortest = SECTOR / UNIT;
        self.open_volume(name, &integrity_target(device, shortest, Writes::Journaled))?;
        self.remove(name)?;
        superblock(name, device).map(drop)
    }

    /// Opens the lower layer of an authenticated volume, which grows if its device has grown.
    pub fn open_integrity(
        &self,
        name: &str,
        device: &Path,
        writes: Writes,
    ) -> Result<PathBuf, DmError> {
        let sectors = superblock(name, device)?;
        let volume = self.open_volume(name, &integrity_target(device, sectors, writes))?;
        // The kernel compares the size of the device with the superblock when the volume is opened,
        // and writes what the volume can have now; the table still has what it had.
        let possible = superblock(name, device)?;
        if possible <= sectors {
            return Ok(volume);
        }
        self.remove(name)?;
        self.open_volume(name, &integrity_target(device, possible, writes))
    }

    /// Opens the verified volume at the beginning of a device.
    ///
    /// A wrong root hash is not detected here, but by the first read, which fails, and by
    /// [`DeviceMapper::is_intact`] from then on.
    pub fn open_verity(
        &self,
        name: &str,
        device: &Path,
        verity: &Verity,
    ) -> Result<PathBuf, DmError> {
        let size = block::size_of(device).map_err(block_failed(name))?;
        if verity.blocks == 0 || size / SECTOR < verity.blocks {
            return Err(DmError::TooSmall {
                name: name.to_owned(),
                device: device.to_owned(),
                size,
            });
        }
        self.open_volume(name, &verity_target(device, verity))
    }

    /// Whether all blocks of a verified volume that were read matched their hashes.
    pub fn is_intact(&self, name: &str) -> Result<bool, DmError> {
        Ok(self.status(name)?.starts_with('V'))
    }

    /// Closes a volume. Succeeds if it does not exist; fails if it is in use.
    pub fn remove(&self, name: &str) -> Result<(), DmError> {
        match self.send(name, command::DEV_REMOVE, "remove it", 0, &[]) {
            Err(DmError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENXIO) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// The device node of a volume; `None` if it does not exist.
    pub fn find(&self, name: &str) -> Result<Option<PathBuf>, DmError> {
        match self.send(name, command::DEV_STATUS, "look it up", 0, &[]) {
            Ok(answer) => Ok(Some(node(&answer))),
            Err(DmError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENXIO) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The status line of a volume's target, such as the number of integrity mismatches so far.
    pub fn status(&self, name: &str) -> Result<String, DmError> {
        self.target_line(name, 0)
    }

    /// The parameters of a volume's target, as the kernel tells them to whoever asks.
    pub fn table(&self, name: &str) -> Result<String, DmError> {
        self.target_line(name, flag::STATUS_TABLE)
    }

    fn target_line(&self, name: &str, flags: u32) -> Result<String, DmError> {
        let step = "read its status";
        let room = [0; 4096];
        let answer = self.send(name, command::TABLE_STATUS, step, flags, &room)?;
        let senseless = || DmError::Answer {
            name: name.to_owned(),
            step,
        };
        if u32_at(&answer, header::FLAGS) & flag::BUFFER_FULL != 0 {
            return Err(senseless());
        }
        let start = u32_at(&answer, header::DATA_START) as usize + target_spec::LENGTH;
        let text = answer.get(start..).ok_or_else(senseless)?;
        let end = text.iter().position(|byte| *byte == 0);
        let text = &text[..end.ok_or_else(senseless)?];
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn open_volume(&self, name: &str, target: &Target) -> Result<PathBuf, DmError> {
        self.send(name, command::DEV_CREATE, "create it", 0, &[])?;
        let opened = self.activate(name, target);
        if opened.is_err() {
            // Removes only what was created above; the original error is returned.
            let _ = self.remove(name);
        }
        opened
    }

    fn activate(&self, name: &str, target: &Target) -> Result<PathBuf, DmError> {
        let table = target.encode();
        let flags = match target.read_only {
            true => flag::READ_ONLY,
            false => 0,
        };
        self.send(name, command::TABLE_LOAD, "load its table", flags, &table)?;
        // Without the suspend flag this command resumes the device.
        let answer = self.send(name, command::DEV_SUSPEND, "activate it", 0, &[])?;
        if u32_at(&answer, header::FLAGS) & flag::READ_ONLY != 0 && !target.read_only {
            return Err(DmError::Refused {
                name: name.to_owned(),
                step: "open it for writing",
                source: io::ErrorKind::ReadOnlyFilesystem.into(),
            });
        }
        Ok(node(&answer))
    }

    /// Sends a command for a volume, with a payload after the header.
    fn send(
        &self,
        name: &str,
        command: u8,
        step: &'static str,
        flags: u32,
        payload: &[u8],
    ) -> Result<Vec<u8>, DmError> {
        let mut buffer = request(name, flags, payload)?;
        raw::device_mapper(self.control.as_fd(), command, &mut buffer).map_err(|source| {
            DmError::Refused {
                name: name.to_owned(),
                step,
                source,
            }
        })?;
        Ok(buffer)
    }
}

/// The offsets in the kernel's `struct dm_ioctl`, with which each request and each answer begins.
/// The total length, at 12..16, is set by `raw`, because the soundness of the call depends on it.
mod header {
    use std::ops::Range;

    pub(super) const VERSION_MAJOR: Range<usize> = 0..4;
    pub(super) const VERSION_MINOR: Range<usize> = 4..8;
    pub(super) const VERSION_PATCH: Range<usize> = 8..12;
    pub(super) const DATA_START: Range<usize> = 16..20;
    pub(super) const TARGET_COUNT: Range<usize> = 20..24;
    pub(super) const FLAGS: Range<usize> = 28..32;
    pub(super) const DEVICE: Range<usize> = 40..48;
    /// Including the terminating zero.
    pub(super) const NAME: Range<usize> = 48..176;
}

/// The offsets in the kernel's `struct dm_target_spec`, which precedes a target's parameters. Its
/// start and its status are zero.
mod target_spec {
    use std::ops::Range;

    pub(super) const SECTOR_COUNT: Range<usize> = 8..16;
    /// The offset of the next one, relative to the beginning of this one.
    pub(super) const NEXT: Range<usize> = 20..24;
    pub(super) const TYPE: Range<usize> = 24..40;
    pub(super) const LENGTH: usize = 40;
}

/// The offsets in dm-integrity's superblock, which is little-endian.
mod integrity_superblock {
    use std::ops::Range;

    pub(super) const MAGIC: Range<usize> = 0..8;
    pub(super) const TAG_LENGTH: Range<usize> = 10..12;
    pub(super) const PROVIDED_SECTORS: Range<usize> = 16..24;
}

impl Target {
    /// The table with only this target.
    fn encode(&self) -> Vec<u8> {
        // The parameters are zero-terminated, and the total length is a multiple of 8.
        let length = (target_spec::LENGTH + self.parameters.len() + 1).next_multiple_of(8);
        assert!(length <= MAX_TABLE, "parameters of {length} bytes");
        let mut bytes = vec![0; length];
        bytes[target_spec::SECTOR_COUNT].copy_from_slice(&self.sectors.to_ne_bytes());
        bytes[target_spec::NEXT].copy_from_slice(&(length as u32).to_ne_bytes());
        put_text(&mut bytes[target_spec::TYPE], self.kind);
        put_text(&mut bytes[target_spec::LENGTH..], &self.parameters);
        bytes
    }
}

/// The header of `dm-ioctl.h`, followed by the payload.
fn request(name: &str, flags: u32, payload: &[u8]) -> Result<Vec<u8>, DmError> {
    let bad = name.is_empty()
        || name.len() >= header::NAME.len()
        || name.contains(|c: char| c == '/' || c.is_control() || c.is_whitespace());
    if bad {
        return Err(DmError::BadName(name.to_owned()));
    }
    let mut buffer = vec![0; DM_HEADER + payload.len()];
    // Version 4.0.0 is the oldest with all of these commands; newer kernels accept it.
    buffer[header::VERSION_MAJOR].copy_from_slice(&4_u32.to_ne_bytes());
    buffer[header::DATA_START].copy_from_slice(&(DM_HEADER as u32).to_ne_bytes());
    let targets = u32::from(!payload.is_empty());
    buffer[header::TARGET_COUNT].copy_from_slice(&targets.to_ne_bytes());
    buffer[header::FLAGS].copy_from_slice(&flags.to_ne_bytes());
    put_text(&mut buffer[header::NAME], name);
    buffer[DM_HEADER..].copy_from_slice(payload);
    Ok(buffer)
}

fn integrity_target(device: &Path, sectors: u64, writes: Writes) -> Target {
    let device = device.display();
    let mode = match writes {
        Writes::Journaled => 'J',
        Writes::Direct => 'D',
    };
    Target {
        kind: "integrity",
        sectors,
        parameters: format!("{device} 0 {TAG_LENGTH} {mode} 1 block_size:{SECTOR}"),
        read_only: false,
    }
}

fn verity_target(device: &Path, verity: &Verity) -> Target {
    let (device, blocks) = (device.display(), verity.blocks);
    let hash: String = verity.root_hash.map(|byte| format!("{byte:02x}")).concat();
    Target {
        kind: "verity",
        sectors: blocks * (SECTOR / UNIT),
        // Version, data device, hash device, data block size, hash block size, number of data
        // blocks, first hash block, algorithm, root hash, salt.
        parameters: format!(
            "1 {device} {device} {SECTOR} {SECTOR} {blocks} {blocks} sha256 {hash} -"
        ),
        read_only: true,
    }
}

/// Checks the dm-integrity superblock at the beginning of a device; returns the number of sectors
/// (of 512 bytes) that it provides.
fn superblock(name: &str, device: &Path) -> Result<u64, DmError> {
    let bytes = block::read_region(device, 0, 512).map_err(block_failed(name))?;
    let not_ours = |problem: String| DmError::NotIntegrity {
        name: name.to_owned(),
        device: device.to_owned(),
        problem,
    };
    if &bytes[integrity_superblock::MAGIC] != b"integrt\0" {
        return Err(not_ours("the magic number is missing".into()));
    }
    let tag = u16::from_le_bytes(array_at(&bytes, integrity_superblock::TAG_LENGTH));
    let tag = u32::from(tag);
    if tag == FORMER_TAG_LENGTH {
        return Err(DmError::FormerFormat {
            name: name.to_owned(),
            device: device.to_owned(),
        });
    }
    if tag != TAG_LENGTH {
        return Err(not_ours(format!(
            "expected a tag size of {TAG_LENGTH}, got {tag}"
        )));
    }
    let sectors = array_at(&bytes, integrity_superblock::PROVIDED_SECTORS);
    let sectors = u64::from_le_bytes(sectors);
    let size = block::size_of(device).map_err(block_failed(name))?;
    if sectors == 0 || sectors > size / UNIT {
        return Err(not_ours(format!("invalid number of sectors: {sectors}")));
    }
    Ok(sectors / (SECTOR / UNIT) * (SECTOR / UNIT))
}

/// The usable sectors of a device, in table units.
fn usable_sectors(name: &str, device: &Path) -> Result<u64, DmError> {
    let size = block::size_of(device).map_err(block_failed(name))?;
    let sectors = size / SECTOR * (SECTOR / UNIT);
    if sectors == 0 {
        return Err(DmError::TooSmall {
            name: name.to_owned(),
            device: device.to_owned(),
            size,
        });
    }
    Ok(sectors)
}

fn block_failed(name: &str) -> impl FnOnce(BlockError) -> DmError {
    let name = name.to_owned();
    move |source| DmError::Block { name, source }
}

/// Hands a volume's key to the kernel, for this thread.
fn thread_key(name: &str, key: &[u8]) -> Result<ThreadKey, DmError> {
    ThreadKey::add(name, key).map_err(|source| DmError::Refused {
        name: name.to_owned(),
        step: "hand its key to the kernel",
        source,
    })
}

/// The node that devtmpfs creates for the device in an answer.
fn node(answer: &[u8]) -> PathBuf {
    // The kernel's long encoding of device numbers: 12 bits of major number, with the 20 bits of
    // the minor number on both sides.
    let device = u64::from_ne_bytes(array_at(answer, header::DEVICE));
    let minor = (device & 0xff) | ((device >> 12) & 0xf_ff00);
    PathBuf::from(format!("/dev/dm-{minor}"))
}

fn device_number(text: &str) -> Option<rustix::fs::Dev> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(
        major.parse().ok()?,
        minor.parse().ok()?,
    ))
}

/// Copies a text to the beginning of a zeroed field.
fn put_text(field: &mut [u8], text: &str) {
    field[..text.len()].copy_from_slice(text.as_bytes());
}

fn u32_at(bytes: &[u8], field: Range<usize>) -> u32 {
    u32::from_ne_bytes(array_at(bytes, field))
}

/// The bytes of a field that has the length of the array.
fn array_at<const N: usize>(bytes: &[u8], field: Range<usize>) -> [u8; N] {
    debug_assert_eq!(field.len(), N);
    std::array::from_fn(|i| bytes[field.start + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_laid_out_as_the_kernel_reads_it() {
        let target = Target {
            kind: "crypt",
            sectors: 8,
            parameters: "abc".into(),
            read_only: false,
        };
        let table = target.encode();
        assert_eq!(table.len(), 48);
        assert_eq!(table[..8], [0; 8]);
        assert_eq!(table[8..16], 8_u64.to_ne_bytes());
        assert_eq!(table[20..24], 48_u32.to_ne_bytes());
        assert_eq!(&table[24..30], b"crypt\0");
        assert_eq!(&table[40..], b"abc\0\0\0\0\0");
    }

    #[test]
    fn a_request_bears_name_flags_and_payload() {
        let request = request("data", flag::STATUS_TABLE, b"payload!").unwrap();
        assert_eq!(request.len(), DM_HEADER + 8);
        assert_eq!(request[..4], 4_u32.to_ne_bytes());
        assert_eq!(u32_at(&request, 16..20) as usize, DM_HEADER);
        assert_eq!(u32_at(&request, 20..24), 1);
        assert_eq!(u32_at(&request, 28..32), flag::STATUS_TABLE);
        assert_eq!(&request[48..53], b"data\0");
        assert_eq!(&request[DM_HEADER..], b"payload!");
    }

    #[test]
    fn names_that_could_not_be_nodes_are_refused() {
        let long = "x".repeat(header::NAME.len());
        for name in ["", "a/b", "a b", "a\n", long.as_str()] {
            assert!(matches!(request(name, 0, &[]), Err(DmError::BadName(_))));
        }
    }

    #[test]
    fn keys_cannot_be_printed() {
        let key = XtsKey::new(Zeroizing::new([0xab; 64]));
        assert_eq!(format!("{key:?}"), "XtsKey");
        let key = AeadKey::new(Zeroizing::new([0xab; 16]));
        assert_eq!(format!("{key:?}"), "AeadKey");
    }

    #[test]
    fn the_node_follows_from_the_device_number() {
        let mut answer = vec![0; DM_HEADER];
        // 253:3, and a minor number beyond 255.
        answer[40..48].copy_from_slice(&0xfd03_u64.to_ne_bytes());
        assert_eq!(node(&answer), Path::new("/dev/dm-3"));
        answer[40..48].copy_from_slice(&0x10_fd02_u64.to_ne_bytes());
        assert_eq!(node(&answer), Path::new("/dev/dm-258"));
    }

    #[test]
    fn a_verified_volume_has_its_hashes_behind_its_data() {
        let verity = Verity {
            blocks: 12,
            root_hash: [0xa5; 32],
        };
        let target = verity_target(Path::new("/dev/vda2"), &verity);
        assert_eq!((target.sectors, target.read_only), (96, true));
        let hash = "a5".repeat(32);
        let wanted = format!("1 /dev/vda2 /dev/vda2 4096 4096 12 12 sha256 {hash} -");
        assert_eq!(target.parameters.as_str(), wanted);
    }

    #[test]
    fn a_foreign_superblock_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("device");
        let mut bytes = vec![0; 1 << 20];
        let check = |bytes: &[u8]| {
            fs::write(&device, bytes).unwrap();
            superblock("data", &device)
        };
        assert!(matches!(check(&bytes), Err(DmError::NotIntegrity { .. })));
        bytes[..8].copy_from_slice(b"integrt\0");
        bytes[10] = 4;
        let error = check(&bytes).unwrap_err().to_string();
        assert!(error.contains("got 4"), "{error}");
        bytes[10] = 28;
        assert!(matches!(check(&bytes), Err(DmError::FormerFormat { .. })));
        bytes[10] = 32;
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(check(&bytes).is_err());
        bytes[16..24].copy_from_slice(&1001_u64.to_le_bytes());
        assert_eq!(check(&bytes).unwrap(), 1000);
    }

    #[test]
    fn a_kernel_without_device_mapper_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = DeviceMapper::open_in(dir.path(), dir.path()).unwrap_err();
        assert!(error.to_string().contains("class/misc"), "{error}");
    }
}
