//! Volumes of a real machine: partition or disk, device-mapper, XFS.
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
//! A further disk is used whole: `/data/disks/NAME` is on `hearth-disk-NAME`, that on `hearth-disk-NAME.integrity`, and so on.
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

/// The names of the kernel's devices of one volume.
struct Names {
    volume: String,
    integrity: String,
    payload: String,
    /// A second opening of the authenticated volume, to write behind the end of the file system on the first one: the
    /// kernel lets nobody write to a device that is mounted.
    new_end: String,
}

/// What a volume is on.
enum Place {
    /// The data partition of this disk.
    DataPartition {
        boot_disk: Disk,
        found: Option<Box<PartitionDevice>>,
    },
    /// All of the disk with this device.
    WholeDisk(PathBuf),
}

/// The [`StorageBackend`] of a real machine.
pub struct System {
    place: Place,
    names: Names,
    quotas: bool,
    new_end: Option<Wiping>,
}

impl System {
    /// `quotas`: whether the file system is mounted with project quotas, which volumes of pods need. The first mount
    /// with them takes a while: it counts all files.
    pub fn data_partition(boot_disk: Disk, quotas: bool) -> Self {
        Self {
            place: Place::DataPartition {
                boot_disk,
                found: None,
            },
            names: Names::of("hearth-data", '-'),
            quotas,
            new_end: None,
        }
    }

    /// The disk with this device, as the volume with this name.
    pub fn whole_disk(device: &Path, name: &str) -> Self {
        Self {
            place: Place::WholeDisk(device.to_owned()),
            // No name of a volume has a point.
            names: Names::of(&format!("hearth-disk-{name}"), '.'),
            quotas: false,
            new_end: None,
        }
    }

    /// `None`: the volume is on no partition.
    fn partition(&mut self) -> Result<Option<PartitionDevice>, StorageError> {
        match &mut self.place {
            Place::WholeDisk(_) => Ok(None),
            Place::DataPartition {
                found: Some(found), ..
            } => Ok(Some((**found).clone())),
            Place::DataPartition { boot_disk, found } => {
                let partition = Blocks::default()
                    .only_partition(boot_disk, DATA_TYPE)
                    .map_err(failed("find the data partition"))?;
                *found = Some(Box::new(partition.clone()));
                Ok(Some(partition))
            }
        }
    }
}

fn failed<E: Into<BoxError>>(step: &'static str) -> impl FnOnce(E) -> StorageError {
    move |error| StorageError::machinery(step)(error.into())
}

impl Names {
    fn of(prefix: &str, separator: char) -> Self {
        let name = |part: &str| format!("{prefix}{separator}{part}");
        Self {
            volume: prefix.to_owned(),
            integrity: name("integrity"),
            payload: name("payload"),
            new_end: name("new-end"),
        }
    }

    /// Closes everything, from the top down.
    fn close(&self) -> Result<DeviceMapper, DmError> {
        let mapper = DeviceMapper::open()?;
        for name in [&self.new_end, &self.volume, &self.integrity, &self.payload] {
            mapper.remove(name)?;
        }
        Ok(mapper)
    }

    /// Closes the volumes of an earlier attempt, and opens the payload.
    fn reopen_payload(&self, device: &Path) -> Result<(DeviceMapper, PathBuf), DmError> {
        let mapper = self.close()?;
        let payload = mapper.open_part(&self.payload, device, REGION)?;
        Ok((mapper, payload))
    }

    fn open(&self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, DmError> {
        let (mapper, payload) = self.reopen_payload(device)?;
        match key {
            None => Ok(payload),
            Some(VolumeKey::Xts(key)) => {
                mapper.open_encrypted(&self.volume, &payload, &XtsKey::new(key))
            }
            Some(VolumeKey::Aead(key)) => {
                self.open_layers(&mapper, &payload, &AeadKey::new(key), Writes::Journaled)
            }
        }
    }

    /// Opens both layers of an authenticated volume.
    fn open_layers(
        &self,
        mapper: &DeviceMapper,
        payload: &Path,
        key: &AeadKey,
        writes: Writes,
    ) -> Result<PathBuf, DmError> {
        let integrity = mapper.open_integrity(&self.integrity, payload, writes)?;
        mapper.open_authenticated(&self.volume, &integrity, key)
    }

    fn close_layers(&self, mapper: &DeviceMapper) -> Result<(), DmError> {
        mapper.remove(&self.volume)?;
        mapper.remove(&self.integrity)
    }

    /// Wipes a new authenticated volume.
    fn make_readable(
        &self,
        key: &AeadKey,
        device: &Path,
        on_progress: OnProgress<'_>,
    ) -> Result<(), StorageError> {
        const FORMAT: &str = "format the volume for authentication";
        let begun = self.begin(key, device);
        let (mapper, mut wiping) = begun.map_err(StorageError::machinery(FORMAT))?;
        while wiping.step(on_progress)? {
            if wiping.wipe.is_half_done() {
                failpoint!("storage.half_wiped");
            }
        }
        self.close_layers(&mapper).map_err(failed(FORMAT))
    }

    /// Formats the lower layer of an authenticated volume, or goes on where an earlier attempt with the same key was
    /// interrupted.
    fn begin(&self, key: &AeadKey, device: &Path) -> Result<(DeviceMapper, Wiping), BoxError> {
        let (mapper, payload) = self.reopen_payload(device)?;
        let begun = match self.open_layers(&mapper, &payload, key, Writes::Journaled) {
            // What the journal has of a file system that was being made is written where it belongs.
            Ok(volume) if is_readable(&volume, 0)? => {
                let part = 0..block::size_of(&volume)?;
                Some(Wipe::resumed(part, |offset| is_readable(&volume, offset))?)
            }
            // Whatever is there was not begun with this key.
            Ok(_) | Err(_) => None,
        };
        self.close_layers(&mapper)?;
        if begun.is_none() {
            mapper.format_integrity(&self.integrity, &payload)?;
        }
        // What a power cut damages is written again.
        let volume = self.open_layers(&mapper, &payload, key, Writes::Direct)?;
        let wipe = match begun {
            Some(wipe) => wipe,
            None => Wipe::new(0..block::size_of(&volume)?),
        };
        Ok((mapper, Wiping::new(wipe, volume)))
    }
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

fn grow(payload: &Path, at: &Path) -> Result<(), StorageError> {
    let grown = xfs::grow(payload, at).map_err(failed(GROW))?;
    if let Some(Grown { from, to }) = grown {
        tracing::info!(from, to, "grew the file system to the size of the volume");
    }
    Ok(())
}

impl StorageBackend for System {
    fn device(&mut self) -> Result<PathBuf, StorageError> {
        if let Place::WholeDisk(device) = &self.place {
            return Ok(device.clone());
        }
        let partition = self.partition()?;
        partition.map(|it| it.path).ok_or_else(|| {
            StorageError::machinery("find the data partition")("there is none".into())
        })
    }

    fn grow(&mut self) -> Result<(), StorageError> {
        let Some(partition) = self.partition()? else {
            return Ok(());
        };
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
        if let Place::DataPartition { found, .. } = &mut self.place {
            *found = Some(Box::new(grown));
        }
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
            VolumeKey::Aead(key) => {
                self.names
                    .make_readable(&AeadKey::new(key), device, on_progress)
            }
        }
    }

    fn open(&mut self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, StorageError> {
        self.names.open(key, device).map_err(|error| match error {
            DmError::FormerFormat { .. } => StorageError::FormerFormat(error.into()),
            _ => failed("open the volume")(error),
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
        mounts::is_mount_point(at).map_err(failed("check whether the volume is mounted"))
    }

    fn mount(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError> {
        let flags = MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
        let options = if self.quotas { "prjquota" } else { "" };
        mounts::mount(payload, at, "xfs", flags, options).map_err(failed("mount the volume"))
    }

    fn unmount(&mut self, at: &Path) -> Result<(), StorageError> {
        mounts::unmount(at).map_err(failed("unmount the volume"))
    }

    fn close(&mut self) -> Result<(), StorageError> {
        self.new_end = None;
        let closed = self.names.close();
        closed.map(drop).map_err(failed("close the volume"))
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
        let names = &self.names;
        let open = || -> Result<Wiping, BoxError> {
            let mapper = DeviceMapper::open()?;
            mapper.remove(&names.new_end)?;
            let integrity = mapper
                .find(&names.integrity)?
                .ok_or("its lower layer is not open")?;
            let key = AeadKey::new(key);
            let volume = mapper.open_authenticated(&names.new_end, &integrity, &key)?;
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
        let closed = DeviceMapper::open().and_then(|mapper| mapper.remove(&self.names.new_end));
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
            match mapper.find(&self.names.volume)? {
                Some(_) => mapper.table(&self.names.volume).map(Some),
                None => Ok(None),
            }
        };
        table().map_err(failed("ask the kernel how the volume is encrypted"))
    }
}
