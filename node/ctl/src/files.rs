//! Files that are read and written for the user, or standard input and standard output, both named [`STANDARD_STREAM`].
//!
//! A regular file is replaced atomically: after an interruption there is either the old content or the new one. Symbolic
//! links are followed, so a file that is kept elsewhere stays there. Everything else, such as a pipe or a terminal, is
//! written to and never replaced.
//!
//! What is read, changed and written again is locked meanwhile ([`Lock`]): several processes change it one after the other.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Kind};

/// The name of a file that stands for standard input or standard output.
pub(crate) const STANDARD_STREAM: &str = "-";

/// As many links are followed as by the kernel.
const MAX_LINKS: usize = 40;

/// The content of a file, or of standard input. Of a larger one a byte more than `limit`.
pub(crate) fn read(path: &Path, limit: usize) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| {
        Failure::new(Kind::Local, format!("read {}", read_from(path))).because(error)
    };
    let source: Box<dyn io::Read> = match path == STANDARD_STREAM {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(path).map_err(failed)?),
    };
    let mut bytes = Vec::new();
    let limit = (limit as u64).saturating_add(1);
    source.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Where something is read from, for a message.
pub(crate) fn read_from(path: &Path) -> String {
    match path == STANDARD_STREAM {
        true => "standard input".to_owned(),
        false => path.display().to_string(),
    }
}

/// The file that output goes to; `None`: to standard output.
pub(crate) fn output_file(path: Option<&Path>) -> Option<&Path> {
    path.filter(|path| *path != STANDARD_STREAM)
}

/// The same as [`write_private`], with a failure that names the file.
pub(crate) fn write_output(path: &Path, content: &[u8]) -> Result<(), Failure> {
    write_private(path, content).map_err(|error| {
        Failure::new(Kind::Local, format!("write {}", path.display())).because(error)
    })
}

/// Writes a file, with mode 0600 if it is a regular one. Creates missing directories with mode 0700.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    match Place::of(path)? {
        Place::File(path) => replace(&path, content),
        Place::Stream(path) => {
            let mut stream = File::options().write(true).open(path)?;
            stream.write_all(content)?;
            stream.flush()
        }
    }
}

/// Where content goes.
enum Place {
    /// A regular file, or none yet; not a link.
    File(PathBuf),
    /// A pipe, a device, or a file that is open already, such as `/dev/stdout`.
    Stream(PathBuf),
}

impl Place {
    fn of(path: &Path) -> io::Result<Self> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            // The links in there lead to open files, which have no name that could be replaced.
            if path.starts_with("/proc") || path.starts_with("/dev") {
                return Ok(Self::Stream(path));
            }
            match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_symlink() => {
                    path = directory_of(&path).join(fs::read_link(&path)?);
                }
                Ok(metadata) if metadata.is_file() => return Ok(Self::File(path)),
                Ok(_) => return Ok(Self::Stream(path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Self::File(path));
                }
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("too many symbolic links"))
    }
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = directory_of(path);
    create_private_folder(folder)?;
    // Created with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder)?.sync_all()
}

/// Held by the one process that changes a file.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until no other process holds the lock of this file. The lock is a file of its own beside it, which stays there;
    /// the kernel releases it when its holder ends in whatever way.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let path = match Place::of(path)? {
            Place::File(path) | Place::Stream(path) => path,
        };
        let folder = directory_of(&path);
        create_private_folder(folder)?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        let mut options = File::options();
        options.write(true).create(true).mode(0o600);
        let file = options.open(folder.join(name))?;
        file.lock()?;
        Ok(Self { _file: file })
    }
}

fn directory_of(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn create_private_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn what_is_written_is_whole_and_private() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("a/b/file");
        for content in ["first, and longer", "second"] {
            write_private(&path, content.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("there"), content);
        }
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        let folder = path.parent().expect("a folder");
        assert_eq!(fs::metadata(folder).expect("there").mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(folder).expect("a folder").count(), 1);
    }

    #[test]
    fn links_are_followed_and_stay() {
        let root = tempfile::tempdir().expect("a folder");
        let (file, first) = (root.path().join("kept/file"), root.path().join("first"));
        let second = root.path().join("second");
        symlink("kept/file", &first).expect("a link");
        symlink(&first, &second).expect("a link");
        // The file need not exist.
        for content in ["one", "another"] {
            write_private(&second, content.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(&file).expect("there"), content);
            for link in [&first, &second] {
                assert!(fs::symlink_metadata(link).expect("there").is_symlink());
            }
        }
        let lock = Lock::of(&second).expect("locked");
        drop(lock);
        assert!(root.path().join("kept/file.lock").exists());
        symlink("loop", root.path().join("loop")).expect("a link");
        let error = write_private(&root.path().join("loop"), b"").expect_err("no end");
        assert!(error.to_string().contains("links"), "{error}");
    }

    #[test]
    fn only_regular_files_are_replaced() {
        write_private(Path::new("/dev/null"), b"gone").expect("written");
        let null = fs::metadata("/dev/null").expect("there");
        assert!(!null.is_file(), "a device has become a file");
        let folder = tempfile::tempdir().expect("a folder");
        write_private(folder.path(), b"").expect_err("a folder");
    }
}
