//! The data partition of a real machine: partition, device-mapper, XFS.
//!
//! ```text
//!   /data                    XFS
//!   hearth-data              dm-crypt          (not INSECURE)
//!   hearth-data-integrity    dm-integrity      (AUTHENTICATED_ENCRYPTED)
//!   hearth-data-payload      dm-linear         everything after the header
//!   partition of type DATA_TYPE on the boot disk
//! ```
//!
//! The linear volume is used in every mode, so that nothing above it can access the header, and so
//! that the payload has the same offset in all modes.

use std::path::{Path, PathBuf};

use hearth_api::names::disk::DATA_TYPE;
use hearth_sys::block::{Blocks, Disk, PartitionDevice};
use hearth_sys::dm::{AeadKey, DeviceMapper, DmError, XtsKey};
use hearth_sys::mkfs;
use hearth_sys::mounts::{self, MountFlags};
use hearth_sys::xfs::{self, Grown};
use tokio::runtime::Handle;

use super::header::REGION;
use super::keys::{Mode, VolumeKey};
use super::{BoxError, StorageBackend, StorageError};

const VOLUME: &str = "hearth-data";
const INTEGRITY: &str = "hearth-data-integrity";
const PAYLOAD: &str = "hearth-data-payload";

/// The [`StorageBackend`] of a real machine.
pub struct System {
    boot_disk: Disk,
    quotas: bool,
    partition: Option<PartitionDevice>,
}

impl System {
    /// `quotas`: whether the file system is mounted with project quotas, which volumes of pods need. The first mount
    /// with them takes a while: it counts all files.
    pub fn new(boot_disk: Disk, quotas: bool) -> Self {
        Self {
            boot_disk,
            quotas,
            partition: None,
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
    for name in [VOLUME, INTEGRITY, PAYLOAD] {
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
            let integrity = mapper.open_integrity(INTEGRITY, &payload)?;
            mapper.open_authenticated(VOLUME, &integrity, &AeadKey::new(key))
        }
    }
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

    fn prepare(&mut self, mode: Mode, device: &Path) -> Result<(), StorageError> {
        match mode {
            Mode::Encrypted => Ok(()),
            Mode::AuthenticatedEncrypted => reopen_payload(device)
                .and_then(|(mapper, payload)| mapper.format_integrity(INTEGRITY, &payload))
                .map_err(failed("format the data partition for authentication")),
        }
    }

    fn open(&mut self, key: Option<VolumeKey>, device: &Path) -> Result<PathBuf, StorageError> {
        open(key, device).map_err(failed("open the data partition"))
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
        // It can be mounted all the same, with the size that it has.
        super::warn_of(xfs::prepare_growth(payload));
        let flags = MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
        let options = if self.quotas { "prjquota" } else { "" };
        mounts::mount(payload, at, "xfs", flags, options)
            .map_err(failed("mount the data partition"))
    }

    fn grow_file_system(&mut self, payload: &Path, at: &Path) -> Result<(), StorageError> {
        let grown = xfs::grow(payload, at).map_err(failed("grow the file system"))?;
        if let Some(Grown { from, to }) = grown {
            tracing::info!(
                from,
                to,
                "grew the file system to the size of the data partition"
            );
        }
        Ok(())
    }
}
