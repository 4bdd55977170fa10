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
    /// Its size, or its device's, cannot be determined, or its device is not as large as it says.
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

/// What the file system begins with: magic, size of a block, number of blocks.
const SUPERBLOCK_BYTES: usize = 16;
const MAGIC: &[u8] = b"XFSB";
/// Larger blocks do not exist.
const LARGEST_BLOCK: u64 = 64 << 10;

/// Writes the block up to which the file system on `device`, which is not mounted, will grow: to be sure that the device
/// is that large, the kernel reads it first, and under authenticated encryption nothing can be read that was never
/// written.
pub fn prepare_growth(device: &Path) -> Result<(), GrowError> {
    let failed = |source| GrowError::Device {
        device: device.to_owned(),
        source,
    };
    let start = block::read_region(device, 0, SUPERBLOCK_BYTES).map_err(failed)?;
    let Some((block, blocks)) = geometry(&start) else {
        // The mount will say what is wrong.
        return Ok(());
    };
    let wanted = block::size_of(device).map_err(failed)? / block;
    if wanted <= blocks {
        return Ok(());
    }
    let zeros = vec![0; block as usize];
    block::write_region(device, (wanted - 1) * block, &zeros).map_err(failed)
}

/// Size of a block in bytes, and number of blocks.
fn geometry(start: &[u8]) -> Option<(u64, u64)> {
    let (magic, rest) = start.split_at_checked(MAGIC.len())?;
    let (block, rest) = rest.split_first_chunk()?;
    let block = u64::from(u32::from_be_bytes(*block));
    let blocks = u64::from_be_bytes(*rest.first_chunk()?);
    let is_xfs = magic == MAGIC && block.is_power_of_two() && block <= LARGEST_BLOCK;
    is_xfs.then_some((block, blocks))
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_block_that_will_be_the_last_is_written_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path().join("device");
        let start = |magic: &[u8], blocks: u64| {
            let mut bytes = vec![0xff; 4096 * 8 + 100];
            let fields = [magic, &4096_u32.to_be_bytes(), &blocks.to_be_bytes()].concat();
            bytes[..fields.len()].copy_from_slice(&fields);
            bytes
        };
        for (magic, blocks, grows) in [(b"XFSB", 6, true), (b"XFSB", 8, false), (b"XFSX", 6, false)]
        {
            let before = start(magic, blocks);
            fs::write(&device, &before).unwrap();
            prepare_growth(&device).unwrap();
            let mut expected = before;
            if grows {
                expected[4096 * 7..4096 * 8].fill(0);
            }
            assert!(fs::read(&device).unwrap() == expected, "{blocks}");
        }
    }
}
