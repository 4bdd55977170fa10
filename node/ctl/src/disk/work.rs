//! What is done to a target once it is confirmed.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use hearth_sys::block;
use rustix::fs::{Advice, fadvise};
use tempfile::NamedTempFile;

use super::copy::{CopyError, Job};
use super::esp::{EspError, read_parameters, write_parameters};
use super::layout::{Layout, LayoutError};
use super::target::{Target, TargetError, open};

/// For the owner alone: parameters have the secrets of a cluster.
const SECRET: u32 = 0o600;
/// As other programs make files: the rest is up to the umask.
const PUBLIC: u32 = 0o666;

/// Why a target is not as it should be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    /// The target cannot be used.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// There is no image on it.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The image was not copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The EFI system partition cannot be read or written.
    #[error(transparent)]
    Esp(#[from] EspError),
    /// A step of it failed.
    #[error("cannot {step}")]
    Io {
        step: &'static str,
        source: io::Error,
    },
    /// The device has something else.
    #[error("the parameters that were read back are not those that were written")]
    Mismatch,
}

impl WorkError {
    fn io(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { step, source }
    }
}

/// An image that is to be written.
#[derive(Debug)]
pub(crate) struct Image {
    pub file: File,
    pub layout: Layout,
    /// Its own.
    pub parameters: Option<Vec<u8>>,
}

impl Image {
    /// Reads what is needed of an image.
    pub(crate) fn read(file: File) -> Result<Self, WorkError> {
        let layout = Layout::of(&file)?;
        Ok(Self {
            parameters: read_parameters(&file, &layout)?,
            layout,
            file,
        })
    }
}

/// What is to be done.
#[derive(Debug)]
pub(crate) struct Work {
    /// `None`: the target has one.
    pub image: Option<Image>,
    /// `None`: those of the image.
    pub parameters: Option<Vec<u8>>,
    pub target: Target,
}

/// What was done.
#[derive(Debug)]
pub(crate) struct Done {
    /// The bytes that were copied; `None` without an image.
    pub copied: Option<u64>,
    /// Parameters that were there have been replaced.
    pub has_replaced: bool,
    /// The parameters that a machine reads now.
    pub parameters: Option<Vec<u8>>,
    /// What was written is, or is on, an installation medium.
    pub is_installer: bool,
    /// This system's view of the partitions is that of before.
    pub is_stale: bool,
}

impl Work {
    /// Does it durably, and reads back what a machine will read.
    pub(crate) fn run(&self, stop: &AtomicBool, progress: &dyn Fn(u64)) -> Result<Done, WorkError> {
        let mut done = Done {
            copied: None,
            has_replaced: false,
            parameters: None,
            is_installer: false,
            is_stale: false,
        };
        let had = match (&self.image, &self.target) {
            (Some(image), Target::Device(device)) => {
                let disk = open(&self.target)?;
                let size = Some(device.size);
                done.copied = Some(self.job(image, &disk, size, stop, progress).run()?);
                done.is_installer = image.layout.is_installer;
                // It is also refused for a device that cannot have partitions.
                done.is_stale = block::reread_partitions(&disk)
                    .is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy);
                done.parameters = self.read_back(&disk)?;
                image.parameters.is_some()
            }
            (Some(image), Target::File { path, .. }) => {
                let is_secret = image.parameters.is_some() || self.parameters.is_some();
                let file = new_file(path, is_secret)?;
                let disk = file.as_file();
                done.copied = Some(self.job(image, disk, None, stop, progress).run()?);
                done.is_installer = image.layout.is_installer;
                done.parameters = self.read_back(disk)?;
                publish(file, path)?;
                image.parameters.is_some()
            }
            (None, _) => {
                let disk = open(&self.target)?;
                let layout = Layout::of(&disk)?;
                done.is_installer = layout.is_installer;
                let had = read_parameters(&disk, &layout)?.is_some();
                if let Some(parameters) = &self.parameters {
                    write_parameters(&disk, &layout, parameters)?;
                }
                disk.sync_all().map_err(WorkError::io("sync"))?;
                done.parameters = self.read_back(&disk)?;
                had
            }
        };
        done.has_replaced = had && self.parameters.is_some();
        Ok(done)
    }

    fn job<'a>(
        &'a self,
        image: &'a Image,
        target: &'a File,
        device: Option<u64>,
        stop: &'a AtomicBool,
        progress: &'a dyn Fn(u64),
    ) -> Job<'a> {
        Job {
            image: &image.file,
            layout: &image.layout,
            target,
            device,
            parameters: self.parameters.as_deref(),
            stop,
            progress,
        }
    }

    /// Reads the parameters as a machine will.
    fn read_back(&self, disk: &File) -> Result<Option<Vec<u8>>, WorkError> {
        // Not from memory: what the device has.
        fadvise(disk, 0, None, Advice::DontNeed)
            .map_err(|errno| WorkError::io("forget what was written")(errno.into()))?;
        let found = read_parameters(disk, &Layout::of(disk)?)?;
        match &self.parameters {
            Some(wanted) if found.as_ref() != Some(wanted) => Err(WorkError::Mismatch),
            Some(_) | None => Ok(found),
        }
    }
}

/// A file beside the one that it will become.
fn new_file(path: &Path, is_secret: bool) -> Result<NamedTempFile, WorkError> {
    let mode = if is_secret { SECRET } else { PUBLIC };
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(path.parent().unwrap_or(Path::new("/")))
        .map_err(WorkError::io("make a file"))
}

/// Gives a file, which is synced, its name.
fn publish(file: NamedTempFile, path: &Path) -> Result<(), WorkError> {
    file.persist(path)
        .map_err(|error| WorkError::io("name the file")(error.error))?;
    File::open(path.parent().unwrap_or(Path::new("/")))
        .and_then(|folder| folder.sync_all())
        .map_err(WorkError::io("sync the directory"))
}
