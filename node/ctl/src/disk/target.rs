//! What an image is written to: a device as a whole, or a file.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::device::{Device, DeviceError, Host};

/// Why nothing can be written to a target.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    /// It cannot be looked at.
    #[error("cannot look at it")]
    Look(#[source] io::Error),
    /// A directory, a pipe.
    #[error("expected a disk or a file")]
    Kind,
    /// A device that is misspelled, or not plugged in.
    #[error("there is no such device")]
    NoSuchDevice,
    /// The device is not for it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel says that somebody uses it.
    #[error("it is in use: somebody has mounted it, or opened it for himself")]
    Busy(#[source] io::Error),
    /// It cannot be opened.
    #[error("cannot open it")]
    Open(#[source] io::Error),
    /// It would be read and written at once.
    #[error("it is the image itself")]
    IsImage,
}

/// What an image is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Device(Device),
    /// A regular file, or none yet. Symbolic links have been followed.
    File {
        path: PathBuf,
        /// The size of a file that exists.
        size: Option<u64>,
    },
}

impl Target {
    /// What is at `path`.
    pub(crate) fn of(host: &Host, path: &Path) -> Result<Self, TargetError> {
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return new_file(path),
            Err(error) => return Err(TargetError::Look(error)),
        };
        let kind = metadata.file_type();
        if kind.is_block_device() {
            return Ok(Self::Device(Device::read(host, path, metadata.rdev())?));
        }
        if !kind.is_file() {
            return Err(TargetError::Kind);
        }
        Ok(Self::File {
            path: path.canonicalize().map_err(TargetError::Look)?,
            size: Some(metadata.len()),
        })
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Device(device) => &device.path,
            Self::File { path, .. } => path,
        }
    }

    /// Whether it is the file that is open with this metadata.
    pub(crate) fn check_is_not(&self, image: &Metadata) -> Result<(), TargetError> {
        let same = |own: Metadata| (own.dev(), own.ino()) == (image.dev(), image.ino());
        match fs::metadata(self.path()).is_ok_and(same) {
            true => Err(TargetError::IsImage),
            false => Ok(()),
        }
    }
}

/// Opens an existing target for reading and writing; a device only if nobody else uses it.
pub(crate) fn open(target: &Target) -> Result<File, TargetError> {
    let mut options = File::options();
    options.read(true).write(true);
    if let Target::Device(_) = target {
        options.custom_flags(OFlags::EXCL.bits() as i32);
    }
    options
        .open(target.path())
        .map_err(|error| match error.kind() == io::ErrorKind::ResourceBusy {
            true => TargetError::Busy(error),
            false => TargetError::Open(error),
        })
}

/// A file that is to be made.
fn new_file(path: &Path) -> Result<Target, TargetError> {
    if fs::symlink_metadata(path).is_ok() {
        // A link to nothing.
        return Err(TargetError::Look(io::ErrorKind::NotFound.into()));
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let folder = folder.canonicalize().map_err(TargetError::Look)?;
    if folder.starts_with("/dev") && !folder.starts_with("/dev/shm") {
        return Err(TargetError::NoSuchDevice);
    }
    Ok(Target::File {
        path: folder.join(path.file_name().ok_or(TargetError::Kind)?),
        size: None,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_are_told_from_what_is_none() {
        let root = tempfile::tempdir().expect("a folder");
        let of = |path: &Path| Target::of(&Host::this(), path);
        let path = root.path().join("disk.img");
        let new = of(&path).expect("a new file");
        assert_eq!(
            new,
            Target::File {
                path: path.canonicalize().unwrap_or(path.clone()),
                size: None
            }
        );
        fs::write(&path, "12345").expect("written");
        let link = root.path().join("link");
        symlink("disk.img", &link).expect("a link");
        let file = of(&link).expect("a file");
        assert!(
            matches!(&file, Target::File { size: Some(5), .. }),
            "{file:?}"
        );
        assert!(file.path().ends_with("disk.img"), "{file:?}");
        let metadata = fs::metadata(&path).expect("there");
        let error = file.check_is_not(&metadata).expect_err("it is");
        assert!(matches!(error, TargetError::IsImage));
        new.check_is_not(&fs::metadata(root.path()).expect("there"))
            .expect("another");

        let error = of(root.path()).expect_err("a folder");
        assert!(matches!(error, TargetError::Kind));
        symlink("nothing", root.path().join("dangling")).expect("a link");
        of(&root.path().join("dangling")).expect_err("a link to nothing");
        of(Path::new("/dev/null")).expect_err("no disk");
        let error = of(Path::new("/dev/sd-that-is-not-there")).expect_err("no device");
        assert!(matches!(error, TargetError::NoSuchDevice), "{error}");
    }
}
