//! Authenticated volumes, and why they are wiped before a file system uses them.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hearth_sys::block::{self, PartitionDevice};
use hearth_sys::dm::{AeadKey, DeviceMapper, Writes};
use hearth_sys::{mkfs, mounts};
use zeroize::Zeroizing;

use super::{TARGET, find_the_file, keep_a_file, mount};

pub(super) const LOWER: &str = "check-integrity";
const UPPER: &str = "check-aead";
/// Enough for a file system.
const SMALL: u64 = 320 << 20;

/// Not written through a journal, and then opened with one, as a node does.
pub(super) async fn check(data: &PartitionDevice) -> Result<((), String)> {
    let mapper = DeviceMapper::open()?;
    let error = match mapper.open_integrity(LOWER, &data.path, Writes::Journaled) {
        Ok(_) => bail!("opened before it was formatted"),
        Err(error) => error.to_string(),
    };
    let reopen = |key| {
        close(&mapper)?;
        open(&mapper, &data.path, key, Writes::Journaled)
    };
    mapper.format_integrity(LOWER, &data.path)?;
    let volume = open(&mapper, &data.path, 1, Writes::Direct)?;
    ensure!(
        !block::is_readable(&volume, 0, 4096)?,
        "a block that was never written can be read"
    );
    block::zero_range(&volume, 0, 1 << 20)?;
    let volume = reopen(1)?;
    ensure!(
        block::is_blank(&volume, 0, 1 << 20)? && !block::is_readable(&volume, 1 << 20, 4096)?,
        "other blocks can be read than were written"
    );
    mkfs::xfs(&volume).await?;
    keep_a_file(&volume)?;
    let status = mapper.status(LOWER)?;
    find_the_file(&reopen(1)?)?;
    let volume = reopen(2)?;
    ensure!(
        !block::is_readable(&volume, 0, 4096)?,
        "a wrong key could read the volume"
    );
    close(&mapper)?;
    Ok(((), format!("status {status:?}; unformatted: {error}")))
}

/// A file system whose machine loses power after its log was written, and before the blocks that the log is about. When it
/// is mounted again, XFS reads these blocks before it writes them: on a volume that was wiped it finds everything, and on
/// one that was not it cannot be mounted any more.
pub(super) async fn crash(data: &PartitionDevice) -> Result<((), String)> {
    const PART: &str = "check-part";
    let mapper = DeviceMapper::open()?;
    let size = block::size_of(&data.path)?;
    let part = mapper.open_part(PART, &data.path, size.saturating_sub(SMALL))?;
    let unwiped = recovered(&mapper, &part, 5, false).await;
    let wiped = recovered(&mapper, &part, 6, true).await;
    mapper.remove(PART)?;
    let error = match unwiped? {
        Ok(_) => bail!("a volume that was not wiped has recovered: it need not be wiped"),
        Err(error) => error,
    };
    let files = wiped?.context("a volume that was wiped has not recovered")?;
    ensure!(files == DIRECTORIES * FILES, "{files} files have recovered");
    Ok(((), format!("{files} files; without a wipe: {error:#}")))
}

const DIRECTORIES: usize = 4;
/// Enough for several blocks of a directory.
const FILES: usize = 400;

/// The number of files after the crash, or why the file system cannot be mounted.
async fn recovered(
    mapper: &DeviceMapper,
    device: &Path,
    key: u8,
    wiped: bool,
) -> Result<Result<usize>> {
    mapper.format_integrity(LOWER, device)?;
    if wiped {
        let volume = open(mapper, device, key, Writes::Direct)?;
        block::zero_range(&volume, 0, block::size_of(&volume)?)?;
        close(mapper)?;
    }
    let volume = open(mapper, device, key, Writes::Journaled)?;
    mkfs::xfs(&volume).await?;
    mount(&volume)?;
    let crashed = crash_with_files();
    mounts::unmount(Path::new(TARGET))?;
    close(mapper)?;
    crashed?;
    let volume = open(mapper, device, key, Writes::Journaled)?;
    let found = mount(&volume).and_then(|()| {
        let files = count_files();
        mounts::unmount(Path::new(TARGET))?;
        files
    });
    close(mapper)?;
    Ok(found)
}

fn directory(number: usize) -> PathBuf {
    Path::new(TARGET).join(format!("directory-{number}"))
}

/// Makes files, and ends the file system when its log is durable and little else.
fn crash_with_files() -> Result<()> {
    for number in 0..DIRECTORIES {
        let directory = directory(number);
        fs::create_dir(&directory)?;
        for file in 0..FILES {
            fs::write(
                directory.join(format!("a-file-with-a-long-name-{file}")),
                [],
            )?;
        }
    }
    // _IOR('X', 125, __u32), with the flag that lets the log be written first.
    const XFS_IOC_GOINGDOWN: libc::c_ulong = 2 << 30 | 4 << 16 | (b'X' as libc::c_ulong) << 8 | 125;
    let flush_log: u32 = 1;
    let root = fs::File::open(TARGET)?;
    #[expect(
        unsafe_code,
        reason = "nothing else ends a file system like a power cut does"
    )]
    // SAFETY: the argument is an integer of 32 bits, which outlives the call; the call reads it.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), XFS_IOC_GOINGDOWN, &raw const flush_log) };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

fn count_files() -> Result<usize> {
    let mut files = 0;
    for number in 0..DIRECTORIES {
        for entry in fs::read_dir(directory(number))? {
            entry?.metadata()?;
            files += 1;
        }
    }
    Ok(files)
}

pub(super) fn key(byte: u8) -> AeadKey {
    AeadKey::new(Zeroizing::new(std::array::from_fn(|i| {
        byte.wrapping_mul(i as u8 + 1)
    })))
}

pub(super) fn open(
    mapper: &DeviceMapper,
    device: &Path,
    number: u8,
    writes: Writes,
) -> Result<PathBuf> {
    let integrity = mapper.open_integrity(LOWER, device, writes)?;
    Ok(mapper.open_authenticated(UPPER, &integrity, &key(number))?)
}

pub(super) fn close(mapper: &DeviceMapper) -> Result<()> {
    mapper.remove(UPPER)?;
    Ok(mapper.remove(LOWER)?)
}
