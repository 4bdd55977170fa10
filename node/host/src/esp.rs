//! The EFI system partition: found on the boot disk, mounted at `/esp`.
//!
//! It is mounted `sync`: little is written there, and all of that must not be
//! lost. One that cannot be mounted for writing is mounted for reading: a
//! member can still come home, and says what is wrong.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_api::chain;
use hearth_base::supervisor::Failure;
use hearth_sys::block::{self, BlockError, Blocks, PartitionDevice};
use hearth_sys::mounts::{self, MountFlags};

use crate::layout::Esp;

/// A disk may still be coming up when user space starts (USB, NVMe).
const DISKS_BOUND: Duration = Duration::from_secs(10);
/// How often the kernel's list is looked at meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Finds and mounts it.
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
        tracing::warn!(%error, "the ESP cannot be mounted for writing; trying read-only");
        mounts::mount(
            &partition.path,
            path,
            "vfat",
            flags | MountFlags::RDONLY,
            options,
        )?;
        return Ok(());
    }
    // It is there already but on the first boot; whoever saves something makes
    // it again, and says what is wrong where that matters.
    if let Err(error) = esp.make_directories() {
        tracing::warn!("{}", chain(&error));
    }
    tracing::info!(partition = %partition.path.display(), "ESP mounted");
    Ok(())
}

/// The partition this system was booted from.
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
