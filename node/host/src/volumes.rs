//! File systems that are found by their label, on media that somebody has attached.

use std::fs::File;
use std::path::PathBuf;

use hearth_sys::block::{BlockError, Blocks};
use hearth_sys::volume::{self, Kind};
use rustix::io::Errno;

/// The devices with a file system of this label, on any disk, partition or optical drive but those of the disk with the
/// name `except`.
///
/// # Errors
/// If the devices cannot be listed. One that cannot be read is logged and left out.
pub fn with_label(
    blocks: &Blocks,
    except: Option<&str>,
    label: &str,
) -> Result<Vec<(PathBuf, Kind)>, BlockError> {
    let mut found = Vec::new();
    for device in blocks.volumes(except)? {
        let volume = File::open(&device).and_then(|file| volume::of(&file));
        match volume {
            Ok(Some(volume)) if volume.label == label.as_bytes() => {
                found.push((device, volume.kind));
            }
            Ok(_) => {}
            // A drive without a medium.
            Err(error) if error.raw_os_error() == Some(Errno::NOMEDIUM.raw_os_error()) => {}
            // A disk that does not work is not this one's business.
            Err(error) => {
                let device = device.display();
                tracing::warn!(%device, %error, "cannot look for a volume {label} on it");
            }
        }
    }
    Ok(found)
}
