//! The medium from which the machine was booted: the volume with the payload.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_api::console::Report;
use hearth_api::names::installer::LABEL;
use hearth_host::layout::Esp;
use hearth_host::volumes;
use hearth_sys::block::{BlockError, Blocks};
use hearth_sys::mounts::{self, MountError, MountFlags};
use hearth_sys::uevents::Uevents;
use hearth_sys::volume::Kind;

/// Within this time a medium usually appears.
const USUAL: Duration = Duration::from_secs(5);
/// No disk appears any more when none has for this long.
const QUIET: Duration = Duration::from_secs(2);
/// How long disks that appear one after the other are waited for.
const DISKS_BOUND: Duration = Duration::from_secs(30);

/// Why the medium cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub(crate) enum MediumError {
    #[error(transparent)]
    Devices(#[from] BlockError),
    #[error("expected one volume with the label {LABEL}, got {}", display(.0))]
    NotOne(Vec<PathBuf>),
    #[error(transparent)]
    Mount(#[from] MountError),
}

fn display(volumes: &[PathBuf]) -> String {
    let volumes = volumes.iter().map(|path| path.display().to_string());
    let volumes: Vec<String> = volumes.collect();
    match volumes.is_empty() {
        true => "none".to_owned(),
        false => volumes.join(" and "),
    }
}

/// Mounts the medium in the place of the ESP, which the machine does not have yet, and returns the name of the disk or
/// drive. Waits for it, and then until no more disks appear.
///
/// Blocks its thread.
pub(crate) fn mount(
    blocks: &Blocks,
    place: &Esp,
    tell: &dyn Fn(&Report),
) -> Result<String, MediumError> {
    // Opened before the first look, so that nothing appears unnoticed between the two.
    let events = Uevents::open().map_err(BlockError::Events)?;
    let (device, kind) = loop {
        let missing = match find(blocks) {
            Err(error @ MediumError::NotOne(_)) => error,
            found => break found?,
        };
        let changed = events.changed(Instant::now() + USUAL);
        if !changed.map_err(BlockError::Events)? {
            tell(&Report::Waiting(format!(
                "the installation medium: {missing}"
            )));
        }
    };
    let deadline = Instant::now() + DISKS_BOUND;
    while Instant::now() < deadline {
        let changed = events.changed(Instant::now() + QUIET);
        if !changed.map_err(BlockError::Events)? {
            break;
        }
    }
    let flags = MountFlags::RDONLY | MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOSUID;
    if !(place.path().exists() && mounts::is_mount_point(place.path())?) {
        mounts::mount(&device, place.path(), kind.name(), flags, "")?;
    }
    Ok(blocks.disk_of(&device)?)
}

fn find(blocks: &Blocks) -> Result<(PathBuf, Kind), MediumError> {
    let found = volumes::with_label(blocks, None, LABEL)?;
    match <[_; 1]>::try_from(found) {
        Ok([one]) => Ok(one),
        Err(others) => {
            let devices = others.into_iter().map(|(device, _)| device);
            Err(MediumError::NotOne(devices.collect()))
        }
    }
}
