//! XFS: grows a mounted file system to the size of its device, and tells the disk what is unused.
//!
//! The kernel does the work and survives a power cut in it; `xfs_growfs` and `fstrim` would only make the same calls. A file
//! system that fills its device is left alone, so this is called at every boot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::block::{self, BlockError};
use crate::raw::{self, XfsGeometry};

/// Why a file system cannot grow, or cannot tell what is unused.
#[derive(Debug, thiserror::Error)]
pub enum XfsError {
    /// The size of its device cannot be determined.
    #[error("cannot get the size of {device}")]
    Device {
        /// The device.
        device: PathBuf,
        /// The error of the device.
        source: BlockError,
    },
    /// The kernel refuses.
    #[error("{at}: cannot {step} the file system")]
    Kernel {
        /// The mount point.
        at: PathBuf,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Sizes in bytes before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    /// The size before.
    pub from: u64,
    /// The size now; less than that of the device by at most 64 blocks.
    pub to: u64,
}

/// A file system never ends with a group of fewer blocks; it leaves them unused.
const SMALLEST_GROUP: u64 = 64;

/// A file system that is mounted.
struct Mounted {
    root: File,
    geometry: XfsGeometry,
}

impl Mounted {
    fn at(at: &Path) -> Result<Self, XfsError> {
        let root = File::open(at).map_err(refused(at, "open"))?;
        let geometry = raw::xfs_geometry(root.as_fd()).map_err(refused(at, "get the size of"))?;
        Ok(Self { root, geometry })
    }

    fn block(&self) -> u64 {
        u64::from(self.geometry.block_size).max(1)
    }

    /// The number of blocks of its device.
    fn possible(&self, device: &Path) -> Result<u64, XfsError> {
        let size = block::size_of(device).map_err(|source| XfsError::Device {
            device: device.to_owned(),
            source,
        })?;
        Ok(size / self.block())
    }
}

fn refused(at: &Path, step: &'static str) -> impl FnOnce(io::Error) -> XfsError {
    let at = at.to_owned();
    move |source| XfsError::Kernel { at, step, source }
}

/// What the file system on `device`, mounted at `at`, can grow into, in bytes of the device; `None` if that is nothing.
pub fn room(device: &Path, at: &Path) -> Result<Option<Range<u64>>, XfsError> {
    let mounted = Mounted::at(at)?;
    let (now, possible) = (mounted.geometry.blocks, mounted.possible(device)?);
    let is_useful = possible >= now.saturating_add(SMALLEST_GROUP);
    Ok(is_useful.then(|| now * mounted.block()..possible * mounted.block()))
}

/// Grows the file system on `device`, mounted at `at`; `None` if it fills its device already. To be sure that the device is
/// that large, the kernel reads its last block first.
pub fn grow(device: &Path, at: &Path) -> Result<Option<Grown>, XfsError> {
    let before = Mounted::at(at)?;
    let XfsGeometry {
        blocks,
        largest_inode_share: inodes,
        ..
    } = before.geometry;
    let wanted = before.possible(device)?;
    if wanted <= blocks {
        return Ok(None);
    }
    raw::grow_xfs(before.root.as_fd(), wanted, inodes).map_err(refused(at, "grow"))?;
    let after = Mounted::at(at)?.geometry;
    Ok((after.blocks > blocks).then(|| Grown {
        from: blocks * before.block(),
        to: after.blocks * before.block(),
    }))
}

/// Tells the disk below the file system mounted at `at` which blocks are not used; returns their size in bytes. `None` if
/// the device does not pass that on, as under authenticated encryption.
pub fn discard_unused(at: &Path) -> Result<Option<u64>, XfsError> {
    let root = File::open(at).map_err(refused(at, "open"))?;
    match raw::trim(root.as_fd()) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
        Err(error) => Err(refused(at, "discard the unused blocks of")(error)),
    }
}
