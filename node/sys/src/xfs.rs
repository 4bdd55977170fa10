//! XFS: grows a mounted file system to the size of its device.
//!
//! The kernel does the work and survives a power cut in it; `xfs_growfs` would only make the same call. A file system
//! that fills its device is left alone, so this is called at every boot.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::block::{self, BlockError};
use crate::raw;

/// Why a file system cannot grow.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// Its size, or its device's, cannot be determined.
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

/// Grows the file system on `device`, mounted at `at`; `None` if it fills its device already.
pub fn grow(device: &Path, at: &Path) -> Result<Option<Grown>, GrowError> {
    let failed = |step| {
        let at = at.to_owned();
        move |source| GrowError::Kernel { at, step, source }
    };
    let root = File::open(at).map_err(failed("open"))?;
    let size = block::size_of(device).map_err(|source| GrowError::Device {
        device: device.to_owned(),
        source,
    })?;
    let before = raw::xfs_geometry(root.as_fd()).map_err(failed("get the size of"))?;
    let block = u64::from(before.block_size).max(1);
    let wanted = size / block;
    if wanted <= before.blocks {
        return Ok(None);
    }
    raw::grow_xfs(root.as_fd(), wanted, before.largest_inode_share).map_err(failed("grow"))?;
    let after = raw::xfs_geometry(root.as_fd()).map_err(failed("get the size of"))?;
    Ok((after.blocks > before.blocks).then(|| Grown {
        from: before.blocks * block,
        to: after.blocks * block,
    }))
}
