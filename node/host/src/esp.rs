//! The EFI system partition: finds it on the boot disk and mounts it at `/esp`.
//!
//! It is mounted with `sync`: little is written there, and none of it may be lost. If it cannot be
//! mounted read-write, it is mounted read-only, so that a member can still join its cluster and
//! report the error.

use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use hearth_api::chain;
use hearth_api::console::Report;
use hearth_api::names::disk::DATA_TYPE;
use hearth_base::supervisor::{Failure, spawn_blocking};
use hearth_sys::block::{BlockError, Blocks, PartitionDevice};
use hearth_sys::firmware::{self, Booted};
use hearth_sys::mounts::{self, MountFlags};
use hearth_sys::uevents::Uevents;
use tokio::time::timeout;

use crate::console::report;
use crate::layout::Esp;

/// How long a disk may take to appear after user space has started. A disk on USB takes a second, an
/// SD card under emulation eight.
const DISKS_BOUND: Duration = Duration::from_secs(30);
/// Within this time disks usually appear.
const USUAL: Duration = Duration::from_secs(2);
/// How long it may take to find the boot disk and to mount its ESP, beside [`DISKS_BOUND`]: twice as long as the kernel gives
/// a request to a SATA or NVMe disk.
const ANSWER_BOUND: Duration = Duration::from_secs(60);

/// The first of the pauses between attempts to find the boot disk, each of which is twice as long as
/// the one before, up to the last.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// Finds the ESP, mounts it, and returns it: the node's other partitions are on the same disk. While
/// the boot disk is missing, or is not the only one that it can be, it tries again and says on the
/// console why: somebody has to attach or detach a disk, and to reboot would not help.
pub async fn mount(esp: &Esp) -> Result<PartitionDevice, Failure> {
    let [mut pause, longest] = PAUSES;
    loop {
        match answered(spawn_blocking(find), report).await? {
            Ok(partition) => {
                let (esp, found) = (esp.clone(), partition.clone());
                let mounted = spawn_blocking(move || mount_partition(&esp, &found));
                answered(mounted, report).await??;
                return Ok(partition);
            }
            Err(error) if error.is_of_disks() => {
                let why = format!("the boot disk: {}", chain(&error));
                tracing::error!("{why}");
                report(&Report::Waiting(why));
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(pause).await;
        pause = longest.min(pause * 2);
    }
}

/// Waits for work with the boot disk. A disk that does not answer need not make it fail, ever: the kernel waits for a virtual
/// disk without a bound. So the console says when it takes too long.
async fn answered<T>(work: impl Future<Output = T>, report: impl FnOnce(&Report)) -> T {
    let mut work = pin!(work);
    let bound = DISKS_BOUND + ANSWER_BOUND;
    if let Ok(done) = timeout(bound, &mut work).await {
        return done;
    }
    let why = format!("the boot disk: no answer for {} s", bound.as_secs());
    report(&Report::Waiting(why));
    work.await
}

fn mount_partition(esp: &Esp, partition: &PartitionDevice) -> Result<(), Failure> {
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
    tracing::info!(partition = %partition.path.display(), "mounted the ESP");
    Ok(())
}

/// The ESP from which this system was booted. Waits for its disk; if that takes longer than usual, it
/// says on the console what it waits for.
///
/// Blocks its thread.
fn find() -> Result<PartitionDevice, BlockError> {
    let booted = Booted::read(Path::new(firmware::EFIVARS))?;
    let begin = Instant::now();
    let mut said = false;
    // Opened before the first look, so that no disk appears unnoticed between the two.
    let events = Uevents::open().map_err(BlockError::Events)?;
    loop {
        let missing = match Blocks::default().boot_partition(&booted, DATA_TYPE) {
            Err(error) if error.is_missing() => error,
            found => return found,
        };
        let bound = if said { DISKS_BOUND } else { USUAL };
        let changed = events.changed(begin + bound);
        match (changed.map_err(BlockError::Events)?, said) {
            (true, _) => {}
            (false, true) => return Err(missing),
            (false, false) => {
                said = true;
                report(&Report::Waiting(format!("the boot disk: {missing}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_does_not_answer_is_told_once() {
        let told = RefCell::new(Vec::new());
        let report = |report: &Report| told.borrow_mut().push(report.to_string());
        let takes = |seconds| async move {
            sleep(Duration::from_secs(seconds)).await;
            seconds
        };
        assert_eq!(answered(takes(80), report).await, 80);
        assert!(told.borrow().is_empty());
        assert_eq!(answered(takes(1000), report).await, 1000);
        let expected = "hearth: waiting for the boot disk: no answer for 90 s";
        assert_eq!(told.into_inner(), [expected]);
    }
}
