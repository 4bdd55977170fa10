//! The EFI system partition: finds it on the boot disk and mounts it at `/esp`.
//!
//! It is mounted with `sync`: little is written there, and none of it may be lost. If it cannot be
//! mounted read-write, it is mounted read-only, so that a member can still join its cluster and
//! report the error.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_api::chain;
use hearth_base::supervisor::Failure;
use hearth_sys::block::{self, BlockError, Blocks, PartitionDevice};
use hearth_sys::mounts::{self, MountFlags};

use crate::layout::Esp;

/// A disk (USB, NVMe) may not be ready yet when user space starts.
const DISKS_BOUND: Duration = Duration::from_secs(10);
/// Interval at which the kernel's list of disks is polled meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Finds the ESP and mounts it.
pub async fn mount(esp: &Esp) -> Result<(), Failure> {
    let esp = esp.clone();
    tokio::task::spawn_blocking(move || mount_blocking(&esp)).await?
}

fn mount_blocking(esp: &Esp) -> Result<(), Failure> {
    let partition = find()?;
    let flags =
        MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::SYNCHRONOUS;
    let path = esp.path();
    if path.exists() && mounts::is_mount_point(path)? {
        return Ok(());
    }
    let options = "umask=077,errors=remount-ro";
    if let Err(error) = mounts::mount(&partition.path, path, "vfat", flags, options) {
        tracing::warn!(%error, "cannot mount the ESP read-write; trying read-only");
        mounts::mount(
            &partition.path,
            path,
            "vfat",
            flags | MountFlags::RDONLY,
            options,
        )?;
        return Ok(());
    }
    // The directory is missing only on the first boot. Code that saves a file creates it again, and
    // reports an error where it matters.
    if let Err(error) = esp.make_directories() {
        tracing::warn!("{}", chain(&error));
    }
    tracing::info!(partition = %partition.path.display(), "mounted the ESP");
    Ok(())
}

/// The ESP from which this system was booted.
pub fn find() -> Result<PartitionDevice, BlockError> {
    let named = block::loader_partition(Path::new(block::EFIVARS))?;
    let begin = Instant::now();
    loop {
        match Blocks::default().boot_partition(named) {
            Err(BlockError::NoEsp { .. } | BlockError::BootPartitionMissing { .. })
                if begin.elapsed() < DISKS_BOUND =>
            {
                std::thread::sleep(LOOK_AGAIN);
            }
            found => return found,
        }
    }
}
