//! Extensions: programs that are part of an image, but not of its initramfs.
//!
//! An extension is a read-only file system followed by the hash tree of dm-verity, in one of the two
//! extension slots of the boot disk. Which slot, nobody says: the slot whose content has the root
//! hash that is on the kernel command line, which is part of the booted kernel image. So each image
//! finds its own extensions, whichever slot they were installed to, and the disk cannot change them.
//! An extension is mounted at its mount point in [`ExtensionMounts`] before the roles start.
//!
//! # Invariants
//! - Every block that is read is the one that the image was built with. An extension with an altered
//!   block can be mounted, but that block cannot be read ([`dm`](hearth_sys::dm)).
//! - An extension that is absent, corrupt or not understood never stops a node. It is refused; the
//!   reason is on the console, in the log and in the role's condition.
//! - The set of extensions does not change during a boot. Code that needs one calls
//!   [`Extensions::get`] and, if it is missing, reports [`Missing`]: an image without extensions is
//!   complete.
//!
//! Only the first block is verified at boot. Reading all blocks would take seconds at every boot,
//! and would not prove anything about later reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearth_api::chain;
use hearth_api::console::Report;
use hearth_api::extension::Admitted;
use hearth_api::names::disk::{EXTENSION_TYPE, SLOT_BLOCK};
use hearth_base::supervisor::spawn_blocking;
use hearth_sys::block::{self, BlockError, Blocks, Disk, PartitionDevice};
use hearth_sys::dm::{DeviceMapper, DmError, Verity};
use hearth_sys::mounts::{self, MountError, MountFlags};

use crate::layout::{self, ExtensionMounts};

/// The extensions of this boot.
#[derive(Clone, Debug, Default)]
pub struct Extensions {
    /// By name: the mount point, or the reason why the extension is refused.
    by_name: BTreeMap<String, Result<PathBuf, String>>,
}

/// Why an extension is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// The image was built without it.
    #[error("the image of this node has no extension {name}")]
    NotInstalled {
        /// The extension.
        name: String,
    },
    /// The extension does not match the image, or cannot be used.
    #[error("extension {name} is refused: {why}")]
    Refused {
        /// The extension.
        name: String,
        /// The reason, for operators.
        why: String,
    },
}

impl Extensions {
    /// The extensions of an image that has none.
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds an extension that is mounted at `path`.
    #[must_use]
    pub fn with(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.by_name.insert(name.to_owned(), Ok(path.into()));
        self
    }

    /// Adds an extension that is refused.
    #[must_use]
    pub fn with_refused(mut self, name: &str, why: &str) -> Self {
        self.by_name.insert(name.to_owned(), Err(why.to_owned()));
        self
    }

    /// The mount point of an extension.
    pub fn get(&self, name: &str) -> Result<&Path, Missing> {
        let name = || name.to_owned();
        match self.by_name.get(&name()) {
            Some(Ok(path)) => Ok(path),
            Some(Err(why)) => Err(Missing::Refused {
                name: name(),
                why: why.clone(),
            }),
            None => Err(Missing::NotInstalled { name: name() }),
        }
    }
}

/// Why an extension is refused.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
enum Refusal {
    #[error("cannot read the partitions of the boot disk")]
    BootDisk(#[source] Box<BlockError>),
    #[error("the boot disk has no extension slots")]
    NoSlots,
    #[error("slot {slot}: cannot open the extension as a verified volume")]
    Open { slot: String, source: Box<DmError> },
    #[error(
        "no extension slot has the content with root hash {hash}, which the kernel command line names"
    )]
    Mismatch { hash: String },
    #[error("slot {slot}: cannot read the extension")]
    Read {
        slot: String,
        source: Box<BlockError>,
    },
    #[error("slot {slot}: cannot mount the extension")]
    Mount {
        slot: String,
        source: Box<MountError>,
    },
}

/// Mounts all extensions that the kernel command line admits, from the boot disk, and reports each on the console.
pub async fn mount(boot_disk: &Disk, places: &ExtensionMounts, report: fn(&Report)) -> Extensions {
    let (boot_disk, places) = (boot_disk.clone(), places.clone());
    let mounted = move || mount_blocking(&boot_disk, &places, report);
    let mounted = spawn_blocking(mounted).await;
    mounted.unwrap_or_else(|error| {
        tracing::error!("cannot mount extensions: {error}");
        Extensions::none()
    })
}

fn mount_blocking(boot_disk: &Disk, places: &ExtensionMounts, report: fn(&Report)) -> Extensions {
    let line = match std::fs::read_to_string(layout::COMMAND_LINE) {
        Ok(line) => line,
        Err(error) => {
            tracing::error!("cannot read {}: {error}", layout::COMMAND_LINE);
            return Extensions::none();
        }
    };
    let mut extensions = Extensions::none();
    for word in Admitted::of_command_line(&line) {
        let (name, mounted) = match word {
            Ok(admitted) => {
                let mounted =
                    mount_one(boot_disk, &admitted, places).map_err(|error| chain(&error));
                (admitted.name.to_string(), mounted)
            }
            Err((name, error)) => (name, Err(error.to_string())),
        };
        extensions = match mounted {
            Ok(path) => {
                tracing::info!("mounted extension {name} at {}", path.display());
                report(&Report::Extension(name.clone(), None));
                extensions.with(&name, path)
            }
            Err(why) => {
                tracing::error!("extension {name} is refused: {why}");
                report(&Report::Extension(name.clone(), Some(why.clone())));
                extensions.with_refused(&name, &why)
            }
        };
    }
    extensions
}

fn mount_one(
    boot_disk: &Disk,
    admitted: &Admitted,
    places: &ExtensionMounts,
) -> Result<PathBuf, Refusal> {
    let place = places.of(&admitted.name);
    let mut reason = Refusal::NoSlots;
    for slot in slots(boot_disk)? {
        match mount_from(&slot, admitted, &place) {
            Ok(()) => return Ok(place),
            // A slot that cannot be read says more than one with other content.
            Err(Refusal::Mismatch { .. }) if !matches!(reason, Refusal::NoSlots) => {}
            Err(error) => reason = error,
        }
    }
    Err(reason)
}

fn slots(disk: &Disk) -> Result<Vec<PartitionDevice>, Refusal> {
    let mut slots = Blocks::default()
        .partitions(disk)
        .map_err(|error| Refusal::BootDisk(error.into()))?;
    slots.retain(|partition| partition.entry.type_guid == EXTENSION_TYPE);
    Ok(slots)
}

fn mount_from(slot: &PartitionDevice, admitted: &Admitted, place: &Path) -> Result<(), Refusal> {
    let label = &slot.entry.name;
    let opened = |source: DmError| Refusal::Open {
        slot: label.clone(),
        source: source.into(),
    };
    let mapper = DeviceMapper::open().map_err(opened)?;
    let (volume, part) = (
        format!("ext-{}", admitted.name),
        format!("ext-{}-part", admitted.name),
    );
    let verity = Verity {
        blocks: admitted.blocks,
        root_hash: admitted.root_hash,
    };
    let offset = admitted.start.saturating_mul(SLOT_BLOCK);
    let mounted = mapper
        .open_part(&part, &slot.path, offset)
        .and_then(|part| mapper.open_verity(&volume, &part, &verity))
        .map_err(opened)
        .and_then(|device| check_and_mount(&mapper, &volume, &device, place, label, admitted));
    if mounted.is_err() {
        // Return the original error.
        let _ = mapper.remove(&volume);
        let _ = mapper.remove(&part);
    }
    mounted
}

/// Reads the first block, which verifies that the root hash belongs to this content: the kernel
/// verifies the path from the block to the root.
fn check_and_mount(
    mapper: &DeviceMapper,
    volume: &str,
    device: &Path,
    place: &Path,
    slot: &str,
    admitted: &Admitted,
) -> Result<(), Refusal> {
    let slot = || slot.to_owned();
    if let Err(source) = block::read_region(device, 0, SLOT_BLOCK as usize) {
        return Err(match mapper.is_intact(volume) {
            Ok(false) => Refusal::Mismatch {
                hash: hex::encode(admitted.root_hash),
            },
            _ => Refusal::Read {
                slot: slot(),
                source: source.into(),
            },
        });
    }
    let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
    mounts::mount(device, place, "erofs", flags, "").map_err(|source| Refusal::Mount {
        slot: slot(),
        source: source.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_why() {
        let extensions = Extensions::none()
            .with("here", "/somewhere")
            .with_refused("broken", "its root hash differs");
        assert_eq!(extensions.get("here"), Ok(Path::new("/somewhere")));
        assert_eq!(
            extensions.get("broken").unwrap_err().to_string(),
            "extension broken is refused: its root hash differs"
        );
        assert_eq!(
            extensions.get("absent").unwrap_err(),
            Missing::NotInstalled {
                name: "absent".into()
            }
        );
    }
}
