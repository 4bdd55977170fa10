//! The data partition of a real machine: partition, device-mapper, XFS.
//!
//! ```text
//!   /data                    XFS
//!   hearth-data              dm-crypt          (not INSECURE)
//!   hearth-data-new-end      dm-crypt again    (while the file system cannot use a new end yet)
//!   hearth-data-integrity    dm-integrity      (AUTHENTICATED_ENCRYPTED)
//!   hearth-data-payload      dm-linear         everything after the header
//!   partition of type DATA_TYPE on the boot disk
//! ```
//!
//! The linear volume is used in every mode, so that nothing above it can access the header, and so
//! that the payload has the same offset in all modes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use hearth_api::names::disk::DATA_TYPE;
use hearth_sys::block::{self, BlockError, Blocks, Disk, PartitionDevice};
use hearth_sys::dm::{AeadKey, DeviceMapper, DmError, Writes, XtsKey};
use hearth_sys::mkfs;
use hearth_sys::mounts::{self, MountFlags};
use hearth_sys::xfs::{self, Grown};
use tokio::runtime::Handle;

use super::header::REGION;
use super::keys::VolumeKey;
use super::wipe::{Pace, Wipe};
use super::{BoxError, OnProgress, StorageBackend, StorageError};
use crate::failpoint;

const GROW: &str = "grow the file system";

const VOLUME: &str = "hearth-data";
const INTEGRITY: &str = "hearth-data-integrity";
const PAYLOAD: &str = "hearth-data-payload";
/// A second opening of the authenticated volume, to write behind the end of the file system on the first one: the kernel
/// lets nobody write to a device that is mounted.
const NEW_END: &str = "hearth-data-new-end";

/// The [`StorageBackend`] of a real machine.
pub struct System {
    boot_disk: Disk,
    quotas: bool,
    partition: Option<PartitionDevice>,
    new_end: Option<Wiping>,
}

impl System {
    /// `quotas`: whether the file system is mounted with project quotas, which volumes of pods need. The first mount
    /// with them takes a while: it counts all files.
    pub fn new(boot_disk: Disk, quotas: bool) -> Self {
        Self {
            boot_disk,
            quotas,
            partition: None,
            new_end: None,
        }
    }

    fn partition(&mut self) -> Result<PartitionDevice, StorageError> {
        if let Some(partition) = &self.partition {
            return Ok(partition.clone());
        }
        let found = Blocks::default()
            .only_partition(&self.boot_disk, DATA_TYPE)
            .map_err(failed("find the data partition"))?;
        self.partition = Some(found.clone());
        Ok(found)
    }
}

fn failed<E: Into<BoxError>>(step: &'static str) -> impl FnOnce(E) -> StorageError {
    move |error| StorageError::machinery(step)(error.into())
}

/// Closes the volumes of an earlier attempt, from the top down, and opens the payload.
fn reopen_payload(device: &Path) -> Result<(DeviceMapper, PathBuf), DmError> {
    let mapper = DeviceMapper::open()?;
    for name in [NEW_END, VOLUME, INTEGRITY, PAYLOAD] {
        mapper.remove(name)?;
    }
    let payload = mapper.open_part(PAYLOAD, device, REGION)?;
    Ok((mapper, payload))
}

fn open(key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, DmError> {
    let (mapper, payload) = reopen_payload(device)?;
    match key {
        None => Ok(payload),
        Some(VolumeKey::Xts(key)) => mapper.open_encrypted(VOLUME, &payload, &XtsKey::new(key)),
        Some(VolumeKey::Aead(key)) => {
            open_layers(&mapper, &payload, &AeadKey::new(key), Writes::Journaled)
        }
    }
}

/// Opens both layers of an authenticated volume.
fn open_layers(
    mapper: &DeviceMapper,
    payload: &Path,
    key: &AeadKey,
    writes: Writes,
) -> Result<PathBuf, DmError> {
    let integrity = mapper.open_integrity(INTEGRITY, payload, writes)?;
    mapper.open_authenticated(VOLUME, &integrity, key)
}

fn close_layers(mapper: &DeviceMapper) -> Result<(), DmError> {
    mapper.remove(VOLUME)?;
    mapper.remove(INTEGRITY)
}

/// A wipe of an open volume.
struct Wiping {
    wipe: Wipe,
    pace: Pace,
    volume: PathBuf,
}

impl Wiping {
    fn new(wipe: Wipe, volume: PathBuf) -> Self {
        Self {
            pace: Pace::new(&wipe, Instant::now()),
            wipe,
            volume,
        }
    }

    /// Wipes one chunk; false at the end.
    fn step(&mut self, on_progress: OnProgress<'_>) -> Result<bool, StorageError> {
        let mut tell = |wipe: &Wipe| {
            if let Some(progress) = self.pace.tells(wipe, Instant::now()) {
                on_progress(progress);
            }
        };
        tell(&self.wipe);
        let Some(chunk) = self.wipe.chunk() else {
            return Ok(false);
        };
        block::zero_range(&self.volume, chunk.start, chunk.end - chunk.start).map_err(
            |source| StorageError::Wipe {
                from: chunk.start,
                to: chunk.end,
                source,
            },
        )?;
        self.wipe.written();
        tell(&self.wipe);
        Ok(true)
    }
}

fn is_readable(volume: &Path, offset: u64) -> Result<bool, BlockError> {
    const BLOCK: usize = 4096;
    block::is_readable(volume, offset, BLOCK)
}

/// Wipes a new authenticated volume.
fn make_readable(
    key: &AeadKey,
    device: &Path,
    on_progress: OnProgress<'_>,
) -> Result<(), StorageError> {
    const FORMAT: &str = "format the data partition for authentication";
    let (mapper, mut wiping) = begin(key, device).map_err(StorageError::machinery(FORMAT))?;
    while wiping.step(on_progress)? {
        if wiping.wipe.is_half_done() {
            failpoint!("storage.half_wiped");
        }
    }
    close_layers(&mapper).map_err(failed(FORMAT))
}

/// Formats the lower layer of an authenticated volume, or goes on where an earlier attempt with the same key was
/// interrupted.
fn begin(key: &AeadKey, device: &Path) -> Result<(DeviceMapper, Wiping), BoxError> {
    let (mapper, payload) = reopen_payload(device)?;
    let begun = match open_layers(&mapper, &payload, key, Writes::Journaled) {
        // What the journal has of a file system that was being made is written where it belongs.
        Ok(volume) if is_readable(&volume, 0)? => {
            let part = 0..block::size_of(&volume)?;
            Some(Wipe::resumed(part, |offset| is_readable(&volume, offset))?)
        }
        // Whatever is there was not begun with this key.
        Ok(_) | Err(_) => None,
    };
    close_layers(&mapper)?;
    if begun.is_none() {
        mapper.format_integrity(INTEGRITY, &payload)?;
    }
    // What a power cut damages is written again.
    let volume = open_layers(&mapper, &payload, key, Writes::Direct)?;
    let wipe = match begun {
        Some(wipe) => wipe,
        None => Wipe::new(0..block::size_of(&volume)?),
    };
    Ok((mapper, Wiping::new(wipe, volume)))
}

fn grow(payload: &Path, at: &Path) -> Result<(), StorageError> {
    let grown = xfs::grow(payload, at).map_err(failed(GROW))?;
    if let Some(Grown { from, to }) = grown {
        tracing::info!(
            from,
            to,
            "grew the file system to the size of the data partition"
        );
    }
    Ok(())
}

impl StorageBackend for System {
    fn device(&mut self) -> Result<PathBuf, StorageError> {
        Ok(self.partition()?.path)
    }

    fn grow(&mut self) -> Result<(), StorageError> {
        let partition = self.partition()?;
        let grown = Blocks::default()
            .grow(&partition)
            .map_err(failed("grow the data partition"))?;
        if grown.size() != partition.size() {
            tracing::info!(
                from = partition.size(),
                to = grown.size(),
                "grew the data partition to the end of the disk"
            );
        }
        self.partition = Some(grown);
        Ok(())
    }

    fn prepare(
        &mut self,
        key: VolumeKey,
        device: &Path,
        on_progress: OnProgress<'_>,
    ) -> Result<(), StorageError> {
        match key {
            VolumeKey::Xts(_) => Ok(()),
            VolumeKey::Aead(key) => make_readable(&AeadKey::new(key), device, on_progress),
        }
    }

    fn open(&mut self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, StorageError> {
        open(key, device).map_err(|error| match error {
            DmError::FormerFormat { .. } => StorageError::FormerFormat(error.into()),
            _ => failed("open the data partition")(error),
        })
    }

    /// Blocks until the program exits. Called on a thread that may block, within the runtime that
    /// owns the child.
    fn make_file_system(&mut self, payload: &Path) -> Result<(), StorageError> {
        Handle::current()
            .block_on(mkfs::xfs(payload))
            .map_err(failed("create a file system"))
    }

    fn is_mounted(&mut self, at: &Path) -> Result<bool, StorageError> {
        if !at.exists() {
            return Ok(false);
        }
        mounts::is_mount_point(at).map_err(failed("check whether the data partition is mounted"))
    }

    fn mount(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError> {
        let flags = MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
        let options = if self.quotas { "prjquota" } else { "" };
        mounts::mount(payload, at, "xfs", flags, options)
            .map_err(failed("mount the data partition"))
    }

    fn grow_file_system(
        &mut self,
        key: Option<VolumeKey>,
        payload: &Path,
        at: &Path,
    ) -> Result<(), StorageError> {
        let Some(VolumeKey::Aead(key)) = key else {
            return grow(payload, at);
        };
        let Some(room) = xfs::room(payload, at).map_err(failed(GROW))? else {
            return Ok(());
        };
        let open = || -> Result<Wiping, BoxError> {
            let mapper = DeviceMapper::open()?;
            mapper.remove(NEW_END)?;
            let integrity = mapper
                .find(INTEGRITY)?
                .ok_or("its lower layer is not open")?;
            let volume = mapper.open_authenticated(NEW_END, &integrity, &AeadKey::new(key))?;
            let wipe = Wipe::resumed(room, |offset| is_readable(&volume, offset))?;
            Ok(Wiping::new(wipe, volume))
        };
        self.new_end = Some(open().map_err(StorageError::machinery(GROW))?);
        Ok(())
    }

    fn grow_further(
        &mut self,
        payload: &Path,
        at: &Path,
        on_progress: OnProgress<'_>,
    ) -> Result<bool, StorageError> {
        let Some(wiping) = &mut self.new_end else {
            return Ok(false);
        };
        if wiping.step(on_progress)? {
            return Ok(true);
        }
        let closed = DeviceMapper::open().and_then(|mapper| mapper.remove(NEW_END));
        closed.map_err(failed(GROW))?;
        self.new_end = None;
        grow(payload, at)?;
        Ok(false)
    }

    fn discard_unused(&mut self, at: &Path) -> Result<Option<u64>, StorageError> {
        xfs::discard_unused(at).map_err(failed("discard what the file system does not use"))
    }

    fn table(&mut self) -> Result<Option<String>, StorageError> {
        let table = || {
            let mapper = DeviceMapper::open()?;
            match mapper.find(VOLUME)? {
                Some(_) => mapper.table(VOLUME).map(Some),
                None => Ok(None),
            }
        };
        table().map_err(failed("ask the kernel how the data partition is encrypted"))
    }
}
