//! Extensions: what rides along with an image beside the initramfs.
//!
//! Each is a partition of the boot disk: a read-only file system, and behind it
//! dm-verity's hashes. The root hash stands in the kernel's command line, which
//! is part of what was booted; the disk has no say in it. An extension is
//! mounted at its place of [`ExtensionPlaces`] before the roles start.
//!
//! # Invariants
//! - What was mounted is what the image was built with, block by block: a block
//!   that is not can be mounted around, but never read ([`dm`]).
//! - An extension that is absent, broken or not understood never stops a node.
//!   It is refused, with the reason on the console, in the log, and for
//!   whoever asks.
//! - It is a static fact of a boot. Whoever needs one asks
//!   [`Extensions::get`] and says, where it is missing, what [`Missing`] says:
//!   an image without extensions is a whole image, and a node never pretends.
//!
//! Only the first block is read here. To read all of it at each boot would cost
//! seconds, and would say nothing about the reads afterwards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearth_api::chain;
use hearth_api::console::Report;
use hearth_api::extension::Admitted;
use hearth_api::names::disk::EXTENSION_TYPE;
use hearth_sys::block::{self, BlockError, Blocks, Disk, PartitionDevice};
use hearth_sys::dm::{DeviceMapper, DmError, Verity};
use hearth_sys::mounts::{self, MountError, MountFlags};

use crate::esp;
use crate::layout::{self, ExtensionPlaces};

/// dm-verity's block, of which the first holds the file system's description.
const BLOCK: usize = 4096;

/// The extensions of this boot.
#[derive(Clone, Debug, Default)]
pub struct Extensions {
    /// By name: where it is mounted, or why it is refused.
    by_name: BTreeMap<String, Result<PathBuf, String>>,
}

/// Why there is no such extension.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// The image was built without it.
    #[error("the image of this node has no extension {name}")]
    NotInstalled {
        /// The extension.
        name: String,
    },
    /// It is there, and not what the image was built with, or cannot be used.
    #[error("extension {name} is refused: {why}")]
    Refused {
        /// The extension.
        name: String,
        /// For an operator.
        why: String,
    },
}

impl Extensions {
    /// Of an image that has none.
    pub fn none() -> Self {
        Self::default()
    }

    /// The same with one more, which lies at a path.
    #[must_use]
    pub fn with(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.by_name.insert(name.to_owned(), Ok(path.into()));
        self
    }

    /// The same with one more, which is refused.
    #[must_use]
    pub fn with_refused(mut self, name: &str, why: &str) -> Self {
        self.by_name.insert(name.to_owned(), Err(why.to_owned()));
        self
    }

    /// Where an extension is mounted.
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
    #[error("cannot find the boot disk")]
    BootDisk(#[source] Box<BlockError>),
    #[error("the boot disk has no partition {label} of the right type")]
    Absent { label: String },
    #[error("the boot disk has {count} partitions {label}, exactly one is wanted")]
    Several { label: String, count: usize },
    #[error("cannot open partition {label} as a verified volume")]
    Open { label: String, source: Box<DmError> },
    #[error(
        "partition {label} does not hold what this image was built with: its content and the \
         root hash {hash} of the kernel's command line do not match"
    )]
    Mismatch { label: String, hash: String },
    #[error("cannot read partition {label}")]
    Read {
        label: String,
        source: Box<BlockError>,
    },
    #[error("cannot mount partition {label}")]
    Mount {
        label: String,
        source: Box<MountError>,
    },
}

/// Mounts all extensions that the kernel's command line admits, and says on the
/// console how that went.
pub async fn mount(places: &ExtensionPlaces, report: fn(&Report)) -> Extensions {
    let places = places.clone();
    let mounted = tokio::task::spawn_blocking(move || mount_blocking(&places, report)).await;
    mounted.unwrap_or_else(|error| {
        tracing::error!("extensions: {error}");
        Extensions::none()
    })
}

fn mount_blocking(places: &ExtensionPlaces, report: fn(&Report)) -> Extensions {
    let line = match std::fs::read_to_string(layout::COMMAND_LINE) {
        Ok(line) => line,
        Err(error) => {
            tracing::error!("{}: {error}", layout::COMMAND_LINE);
            return Extensions::none();
        }
    };
    let mut extensions = Extensions::none();
    for word in Admitted::of_command_line(&line) {
        let (name, mounted) = match word {
            Ok(admitted) => {
                let mounted = mount_one(&admitted, places).map_err(|error| chain(&error));
                (admitted.name.to_string(), mounted)
            }
            Err((name, error)) => (name, Err(error.to_string())),
        };
        extensions = match mounted {
            Ok(path) => {
                tracing::info!("extension {name} is mounted at {}", path.display());
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

fn mount_one(admitted: &Admitted, places: &ExtensionPlaces) -> Result<PathBuf, Refusal> {
    let label = admitted.name.label();
    let disk = esp::find()
        .map_err(|error| Refusal::BootDisk(error.into()))?
        .disk;
    let partition = partition(&disk, &label)?;
    let place = places.of(&admitted.name);
    let opened = |source: DmError| Refusal::Open {
        label: label.clone(),
        source: source.into(),
    };
    let mapper = DeviceMapper::open().map_err(opened)?;
    let volume = format!("ext-{}", admitted.name);
    let verity = Verity {
        blocks: admitted.blocks,
        root_hash: admitted.root_hash,
    };
    let device = mapper
        .open_verity(&volume, &partition.path, &verity)
        .map_err(opened)?;
    let mounted = check_and_mount(&mapper, &volume, &device, &place, admitted);
    if mounted.is_err() {
        // The error told is the first one.
        let _ = mapper.remove(&volume);
    }
    mounted.map(|()| place)
}

/// The one partition of this label and the extensions' type.
fn partition(disk: &Disk, label: &str) -> Result<PartitionDevice, Refusal> {
    let mut found = Blocks::default()
        .partitions(disk)
        .map_err(|error| Refusal::BootDisk(error.into()))?;
    found.retain(|partition| {
        partition.entry.type_guid == EXTENSION_TYPE && partition.entry.name == label
    });
    let label = label.to_owned();
    match <[_; 1]>::try_from(found) {
        Ok([one]) => Ok(one),
        Err(none) if none.is_empty() => Err(Refusal::Absent { label }),
        Err(several) => Err(Refusal::Several {
            label,
            count: several.len(),
        }),
    }
}

/// Reads the first block, which shows whether the root hash is of this
/// partition: the path from it to the root is checked with it.
fn check_and_mount(
    mapper: &DeviceMapper,
    volume: &str,
    device: &Path,
    place: &Path,
    admitted: &Admitted,
) -> Result<(), Refusal> {
    let label = || admitted.name.label();
    if let Err(source) = block::read_region(device, 0, BLOCK) {
        return Err(match mapper.is_intact(volume) {
            Ok(false) => Refusal::Mismatch {
                label: label(),
                hash: hex::encode(admitted.root_hash),
            },
            _ => Refusal::Read {
                label: label(),
                source: source.into(),
            },
        });
    }
    let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
    mounts::mount(device, place, "erofs", flags, "").map_err(|source| Refusal::Mount {
        label: label(),
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
