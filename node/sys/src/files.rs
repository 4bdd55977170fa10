//! Durable files: written completely or not at all.
//!
//! A power cut at any moment leaves either the old content or the new one, and once
//! [`write_atomic`] has returned, always the new one. That takes four steps in this order: write a
//! temporary file next to the target, fsync it, rename it over the target, fsync the directory.
//! Leaving out the last step is a common mistake: the rename itself may then be lost.
//!
//! This holds for the file systems of the data partition and for tmpfs. On FAT a rename is not
//! atomic; state on the ESP is stored with [`super::slots`].
//!
//! The temporary name is fixed (`.NAME.tmp`), so that a power cut leaves at most one stray file,
//! which the next write replaces. So a path must have only one writer at a time.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The mode of a file that only root can read.
pub const PRIVATE_FILE: u32 = 0o600;
/// The mode of a directory that only root can access.
pub const PRIVATE_DIRECTORY: u32 = 0o700;

/// An operation on a file failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The path has no file name or no directory.
    #[error("{path}: not a file path")]
    NotAFilePath {
        /// The given path.
        path: PathBuf,
    },
    /// The file exists, but is larger than the caller allows.
    #[error("{path}: exceeds the maximum size of {max} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The maximum size, in bytes.
        max: u64,
    },
    /// A system call failed.
    #[error("{path}: cannot {step}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation, as a verb: "open", "sync", …
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl FileError {
    pub(super) fn io(path: &Path, step: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, step, source }
    }
}

/// Replaces the content of the file at `path` by `bytes`, with the permission bits `mode`.
///
/// When this returns, the content is durable under its name. The directory must exist.
pub fn write_atomic(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    let (temporary, file) = write_temporary(path, bytes, mode)?;
    file.sync_all().map_err(FileError::io(&temporary, "sync"))?;
    drop(file);
    fs::rename(&temporary, path).map_err(FileError::io(path, "replace the file"))?;
    sync_dir(directory_of(path)?)
}

/// The same for several files of one file system, with as many flushes of the disk as for one. All are durable when this
/// returns; a power cut before leaves each of them old or new.
pub fn write_all_atomic(files: &[(&Path, &[u8])], mode: u32) -> Result<(), FileError> {
    let temporaries = files
        .iter()
        .map(|(path, bytes)| Ok((write_temporary(path, bytes, mode)?.0, *path)))
        .collect::<Result<Vec<_>, FileError>>()?;
    let Some((first, _)) = temporaries.first() else {
        return Ok(());
    };
    sync_file_system(directory_of(first)?)?;
    for (temporary, path) in &temporaries {
        fs::rename(temporary, path).map_err(FileError::io(path, "replace the file"))?;
    }
    sync_file_system(directory_of(first)?)
}

/// Writes what will be the file at `path` under its temporary name.
fn write_temporary(path: &Path, bytes: &[u8], mode: u32) -> Result<(PathBuf, File), FileError> {
    let temporary = temporary_name(path)?;
    // The mode passed to open() does not apply to a stray file of an earlier power cut, hence the
    // explicit chmod below, before the file has any content.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(&temporary)
        .map_err(FileError::io(&temporary, "open"))?;
    file.set_permissions(fs::Permissions::from_mode(mode))
        .map_err(FileError::io(&temporary, "set the permissions"))?;
    file.write_all(bytes)
        .map_err(FileError::io(&temporary, "write"))?;
    Ok((temporary, file))
}

/// Reads the whole file; `None` if it does not exist.
///
/// Fails if the file has more than `max` bytes, without reading all of it.
pub fn read_limited(path: &Path, max: u64) -> Result<Option<Vec<u8>>, FileError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(FileError::io(path, "open")(error)),
    };
    let mut bytes = Vec::new();
    // The file's size cannot be used: procfs and sysfs do not report it.
    file.take(max.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(FileError::io(path, "read"))?;
    if bytes.len() as u64 > max {
        return Err(FileError::TooLarge {
            path: path.to_owned(),
            max,
        });
    }
    Ok(Some(bytes))
}

/// Removes the file durably. Succeeds if it does not exist.
pub fn remove_durably(path: &Path) -> Result<(), FileError> {
    let directory = directory_of(path)?;
    match fs::remove_file(path) {
        Ok(()) => {}
        // Sync anyway: an earlier removal may not have been synced.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if !directory.exists() {
                return Ok(());
            }
        }
        Err(error) => return Err(FileError::io(path, "remove")(error)),
    }
    sync_dir(directory)
}

/// Overwrites the file in place with zeros, so that its blocks no longer hold what it had, and removes it, durably.
/// Succeeds if it does not exist.
pub fn erase_durably(path: &Path) -> Result<(), FileError> {
    overwrite(path)?;
    remove_durably(path)
}

/// Erases all files below the directory in this way, and removes it, durably. Succeeds if it does not exist.
pub fn erase_directory(directory: &Path) -> Result<(), FileError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return match directory_of(directory)? {
                parent if parent.exists() => sync_dir(parent),
                _ => Ok(()),
            };
        }
        entries => entries.map_err(FileError::io(directory, "read the directory"))?,
    };
    for entry in entries {
        let entry = entry.map_err(FileError::io(directory, "read the directory"))?;
        let path = entry.path();
        let kind = entry.file_type();
        let kind = kind.map_err(FileError::io(&path, "get the type"))?;
        if kind.is_dir() {
            erase_directory(&path)?;
        } else {
            if kind.is_file() {
                overwrite(&path)?;
            }
            fs::remove_file(&path).map_err(FileError::io(&path, "remove"))?;
        }
    }
    fs::remove_dir(directory).map_err(FileError::io(directory, "remove the directory"))?;
    sync_dir(directory_of(directory)?)
}

/// Overwrites the file with zeros, durably. Succeeds if it does not exist.
fn overwrite(path: &Path) -> Result<(), FileError> {
    let mut file = match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file.map_err(FileError::io(path, "open"))?,
    };
    let length = file
        .metadata()
        .map_err(FileError::io(path, "get the size"))?;
    io::copy(&mut io::repeat(0).take(length.len()), &mut file)
        .map_err(FileError::io(path, "overwrite"))?;
    file.sync_all().map_err(FileError::io(path, "sync"))
}

/// Makes changes of names in a directory durable: creations, renames, removals.
pub fn sync_dir(directory: &Path) -> Result<(), FileError> {
    File::open(directory)
        .map_err(FileError::io(directory, "open the directory"))?
        .sync_all()
        .map_err(FileError::io(directory, "sync the directory"))
}

/// Syncs the file system that contains the directory.
pub fn sync_file_system(directory: &Path) -> Result<(), FileError> {
    let wrong = FileError::io(directory, "sync the file system");
    let file = File::open(directory).map_err(FileError::io(directory, "open the directory"))?;
    rustix::fs::syncfs(file).map_err(|errno| wrong(errno.into()))
}

/// Creates a directory and its missing parents, and gives it the permission bits `mode`. An existing directory keeps its
/// content and gets these bits. It is durable once its parents are synced ([`sync_dir`]).
pub fn create_dir(directory: &Path, mode: u32) -> Result<(), FileError> {
    fs::create_dir_all(directory).map_err(FileError::io(directory, "create the directory"))?;
    fs::set_permissions(directory, fs::Permissions::from_mode(mode))
        .map_err(FileError::io(directory, "set the permissions"))
}

/// Creates a directory and its missing parents with the permission bits `mode`, durably. An
/// existing directory keeps its content and gets these bits.
pub fn create_dir_durably(directory: &Path, mode: u32) -> Result<(), FileError> {
    if !directory.is_dir() {
        if let Some(parent) = directory.parent().filter(|p| !p.as_os_str().is_empty()) {
            if !parent.is_dir() {
                create_dir_durably(parent, mode)?;
            }
            match fs::create_dir(directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(FileError::io(directory, "create the directory")(error));
                }
                _ => sync_dir(parent)?,
            }
        } else {
            return Err(FileError::NotAFilePath {
                path: directory.to_owned(),
            });
        }
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(mode))
        .map_err(FileError::io(directory, "set the permissions"))
}

fn temporary_name(path: &Path) -> Result<PathBuf, FileError> {
    let mut temporary = OsString::from(".");
    temporary.push(name_of(path)?);
    temporary.push(".tmp");
    Ok(path.with_file_name(temporary))
}

pub(super) fn name_of(path: &Path) -> Result<&OsStr, FileError> {
    path.file_name().ok_or_else(|| FileError::NotAFilePath {
        path: path.to_owned(),
    })
}

pub(super) fn directory_of(path: &Path) -> Result<&Path, FileError> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => Err(FileError::NotAFilePath {
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn written_content_is_read_back_with_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write_atomic(&path, b"first", PRIVATE_FILE).unwrap();
        write_atomic(&path, b"2nd", 0o640).unwrap();
        assert_eq!(read_limited(&path, 5).unwrap().unwrap(), b"2nd");
        assert_eq!(mode_of(&path), 0o640);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// The blocks are seen by a second name of the file.
    #[test]
    fn several_files_are_written_together_or_an_error_says_which() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        for bytes in [&b"first, and longer"[..], b"second"] {
            write_all_atomic(&[(&one, bytes), (&two, b"same")], PRIVATE_FILE).unwrap();
            assert_eq!(fs::read(&one).unwrap(), bytes);
            assert_eq!(fs::read(&two).unwrap(), b"same");
        }
        assert_eq!(mode_of(&one), PRIVATE_FILE);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        // None of them is replaced if one cannot be written.
        let nowhere = dir.path().join("no/such");
        let error = write_all_atomic(&[(&one, b"third"), (&nowhere, b"")], PRIVATE_FILE);
        assert!(error.unwrap_err().to_string().contains("no/"));
        assert_eq!(fs::read(&one).unwrap(), b"second");
        write_all_atomic(&[], PRIVATE_FILE).unwrap();
    }

    #[test]
    fn erased_files_are_overwritten_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("etcd");
        fs::create_dir_all(tree.join("member/snap")).unwrap();
        let content = vec![7; (64 << 10) + 1];
        let mut other_names = Vec::new();
        for (number, path) in ["member/snap/db", "authorities"].iter().enumerate() {
            fs::write(tree.join(path), &content).unwrap();
            let other = dir.path().join(number.to_string());
            fs::hard_link(tree.join(path), &other).unwrap();
            other_names.push(other);
        }
        // A link is removed, and what it leads to is not touched.
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();

        erase_durably(&tree.join("authorities")).unwrap();
        assert!(!tree.join("authorities").exists());
        erase_directory(&tree).unwrap();
        assert!(!tree.exists());
        for other in other_names {
            let left = fs::read(other).unwrap();
            assert!(left.len() == content.len() && left.iter().all(|byte| *byte == 0));
        }
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
        // Again, as after a power cut.
        erase_directory(&tree).unwrap();
        erase_durably(&tree.join("authorities")).unwrap();
    }

    #[test]
    fn a_stale_longer_temporary_file_leaves_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roles.pb");
        let stale = dir.path().join(".roles.pb.tmp");
        fs::write(&stale, [b'x'; 4096]).unwrap();
        fs::set_permissions(&stale, fs::Permissions::from_mode(0o666)).unwrap();
        write_atomic(&path, b"short", PRIVATE_FILE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"short");
        assert_eq!(mode_of(&path), PRIVATE_FILE);
        assert!(!stale.exists());
    }

    #[test]
    fn a_temporary_name_that_is_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, b"precious").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(".state.tmp")).unwrap();
        let error = write_atomic(&dir.path().join("state"), b"x", PRIVATE_FILE).unwrap_err();
        assert!(matches!(error, FileError::Io { step: "open", .. }));
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn absent_is_none_and_too_large_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert!(read_limited(&path, 10).unwrap().is_none());
        fs::write(&path, [0; 11]).unwrap();
        assert!(matches!(
            read_limited(&path, 10).unwrap_err(),
            FileError::TooLarge { max: 10, .. }
        ));
        assert_eq!(read_limited(&path, 11).unwrap().unwrap().len(), 11);
    }

    #[test]
    fn a_directory_in_the_place_of_the_file_is_an_error_not_absence() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_limited(dir.path(), 10).is_err());
    }

    #[test]
    fn a_missing_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = write_atomic(&dir.path().join("no/such"), b"", PRIVATE_FILE).unwrap_err();
        assert!(error.to_string().contains("no/.such.tmp"), "{error}");
    }

    #[test]
    fn removal_is_idempotent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, b"x").unwrap();
        remove_durably(&path).unwrap();
        remove_durably(&path).unwrap();
        remove_durably(&dir.path().join("no/such")).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn directories_are_made_with_their_parents() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        create_dir_durably(&deep, PRIVATE_DIRECTORY).unwrap();
        create_dir_durably(&deep, 0o750).unwrap();
        assert_eq!(mode_of(&deep), 0o750);
        assert_eq!(mode_of(&dir.path().join("a")), PRIVATE_DIRECTORY);
    }
}
