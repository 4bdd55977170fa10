//! A machine's disks.
//!
//! A machine never writes to a built image: it gets a qcow2 overlay, which takes 40 ms and no space to create, can be
//! larger than the image, and is the only file to delete for starting over.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use crate::command_line::CommandLine;
use crate::hardware::MediumKind;

/// Format of a disk file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As on a disk.
    Raw,
    /// QEMU's format, which supports a base image.
    Qcow2,
}

impl Format {
    pub(crate) fn driver(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// How the host handles the guest's writes and flushes.
///
/// Killing QEMU is a power cut for the guest, never for the host: flushed data is in the file or in the host's page
/// cache, and is available again in all three modes. Data that was written and not flushed may be lost, as on real
/// hardware: qcow2 keeps its tables in QEMU's memory until a flush. The modes differ in what remains after a crash of
/// the host, and in speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Writes go to the host's page cache; a guest's flush flushes the file. Like a disk with a write cache, and so the
    /// default.
    #[default]
    Writeback,
    /// Guest flushes are ignored. For speed, if the state after a crash of the host does not matter; independent of
    /// whether the guest flushes.
    Unsafe,
    /// Bypasses the host's page cache, and each write is on the disk before it is acknowledged to the guest: a disk
    /// without a write cache. Slow; requires a file system with O_DIRECT (tmpfs has none).
    Directsync,
}

impl Cache {
    /// Whether writes bypass the host's page cache.
    pub(crate) fn direct(self) -> bool {
        self == Self::Directsync
    }

    /// Whether guest flushes are ignored.
    pub(crate) fn no_flush(self) -> bool {
        self == Self::Unsafe
    }

    /// Whether the guest sees a write cache that it has to flush.
    pub(crate) fn write_cache(self) -> bool {
        self != Self::Directsync
    }
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The file.
    pub path: PathBuf,
    /// Format of the file.
    pub format: Format,
    /// Its cache mode.
    pub cache: Cache,
    /// Size of its logical sectors in bytes, 512 or 4096; the latter not on SATA and not as an SD card.
    pub sector_bytes: u32,
    /// The log of what the guest writes and when it flushes, an existing file that is overwritten; in the format of
    /// Linux' `dm-log-writes`. What QEMU has told the guest to be complete is in it.
    pub log: Option<PathBuf>,
}

impl Disk {
    /// A disk with the default cache mode.
    pub fn new(path: impl Into<PathBuf>, format: Format) -> Self {
        Self {
            path: path.into(),
            format,
            cache: Cache::default(),
            sector_bytes: 512,
            log: None,
        }
    }
}

/// A medium in a machine that has its disks beside it, raw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Medium {
    /// The file. A machine can write to a stick.
    pub path: PathBuf,
    /// How it is attached.
    pub kind: MediumKind,
}

/// A disk could not be created.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The base image is not accessible.
    #[error("cannot open base image {path}: {source}")]
    Base {
        /// Path of the image.
        path: PathBuf,
        /// The underlying I/O error.
        source: std::io::Error,
    },
    /// The requested size is smaller than the base: the guest would see a truncated image.
    #[error(
        "overlay on {base}: size: expected at least the {has} bytes of the image, got {wanted}"
    )]
    TooSmall {
        /// Path of the image.
        base: PathBuf,
        /// Requested size in bytes.
        wanted: u64,
        /// Size of the image in bytes.
        has: u64,
    },
    /// qemu-img did not start.
    #[error("cannot start qemu-img (package qemu-utils): {0}")]
    Start(#[source] std::io::Error),
    /// qemu-img failed.
    #[error("{command}: {message}")]
    Failed {
        /// The command line.
        command: Box<CommandLine>,
        /// Its standard error, or its exit status.
        message: String,
    },
    /// The finished file could not be renamed.
    #[error("cannot rename to {path}: {source}")]
    Place {
        /// The final path.
        path: PathBuf,
        /// The underlying I/O error.
        source: std::io::Error,
    },
}

/// Makes `overlay`, a qcow2 file on the raw image `base`, of `size` bytes (the size of the image, if none). The base's
/// path is written into the overlay unchanged; a relative one is relative to the overlay.
///
/// The file appears under its name when it is complete.
///
/// # Errors
/// If the base is absent or larger than `size`, or qemu-img fails.
pub async fn make_overlay(base: &Path, overlay: &Path, size: Option<u64>) -> Result<(), DiskError> {
    let folder = overlay.parent().unwrap_or(Path::new("."));
    let at = folder.join(base);
    let has = fs::metadata(&at)
        .map_err(|source| DiskError::Base {
            path: at.clone(),
            source,
        })?
        .len();
    let wanted = size.unwrap_or(has);
    if wanted < has {
        return Err(DiskError::TooSmall {
            base: at,
            wanted,
            has,
        });
    }
    let partial = overlay.with_extension("partial");
    let mut command = CommandLine::new("qemu-img");
    command
        .arg("create")
        .arg("-q")
        .option("-f", "qcow2")
        // The format of the base is given, not detected: a guest that writes a qcow2 header to a raw disk must not be
        // able to read other files.
        .option("-F", "raw")
        .option("-b", base)
        .arg(&partial)
        .arg(wanted.to_string());
    run(&command).await?;
    fs::rename(&partial, overlay).map_err(|source| DiskError::Place {
        path: overlay.to_owned(),
        source,
    })
}

async fn run(command: &CommandLine) -> Result<(), DiskError> {
    tracing::debug!(target: "hearth_qemu::command", "{command}");
    let Output { status, stderr, .. } = tokio::process::Command::from(command.to_std())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(DiskError::Start)?;
    if status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&stderr);
    Err(DiskError::Failed {
        command: Box::new(command.clone()),
        message: match stderr.trim() {
            "" => status.to_string(),
            words => words.to_owned(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_overlay_is_made_on_its_base() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("base.img"), vec![7; 65536]).expect("a base");
        let overlay = folder.path().join("disk.qcow2");
        make_overlay(Path::new("base.img"), &overlay, Some(1 << 20))
            .await
            .expect("an overlay");
        let header = fs::read(&overlay).expect("the overlay");
        assert_eq!(header[..4], *b"QFI\xfb");
        assert_eq!(header[24..32], (1u64 << 20).to_be_bytes());
        assert!(!folder.path().join("disk.partial").exists());

        let error = make_overlay(Path::new("base.img"), &overlay, Some(512)).await;
        assert!(
            matches!(error, Err(DiskError::TooSmall { has: 65536, .. })),
            "{error:?}"
        );
        let error = make_overlay(Path::new("none.img"), &overlay, None).await;
        assert!(matches!(error, Err(DiskError::Base { .. })), "{error:?}");
    }

    #[tokio::test]
    async fn the_last_words_of_qemu_img_are_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let base = folder.path().join("base.img");
        fs::write(&base, vec![0; 512]).expect("a base");
        let overlay = folder.path().join("absent/disk.qcow2");
        let error = make_overlay(&base, &overlay, None)
            .await
            .expect_err("no such folder");
        assert!(error.to_string().contains("No such file"), "{error}");
    }
}
