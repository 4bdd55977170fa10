//! The working folder of a process: accessible for its owner only, and its sockets work at any path depth.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A working folder. Cheap to clone; clones refer to the same folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    path: PathBuf,
}

/// A folder operation failed.
#[derive(Debug, thiserror::Error)]
#[error("machine folder: cannot {step} {path}: {source}")]
pub struct FolderError {
    /// The step that failed.
    pub step: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The underlying I/O error.
    pub source: io::Error,
}

impl FolderError {
    /// Makes an error, for `map_err`.
    pub fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { step, path, source }
    }
}

impl Folder {
    /// Opens this folder, creating it if it is absent, and restricts it to its owner.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, FolderError> {
        let path = path.as_ref();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(FolderError::at("make", path))?;
        Self::open(path)
    }

    /// Opens this folder, which must exist.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FolderError> {
        let path = path.as_ref();
        // Absolute: the process may have the folder as its working directory.
        let path = path.canonicalize().map_err(FolderError::at("find", path))?;
        Ok(Self { path })
    }

    /// The absolute path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file that only its owner can read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_private(&self, path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
        write_with_mode(path, bytes, 0o600).map_err(FolderError::at("write", path))
    }

    /// Binds a listening socket of this name. It listens before the process is started, so a client can connect at once
    /// and then waits.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn listen(&self, path: &Path) -> Result<UnixListener, FolderError> {
        remove(path)?;
        let (_folder, short) = self.short(path)?;
        UnixListener::bind(short).map_err(FolderError::at("listen on", path))
    }

    /// Connects to a socket of this name.
    ///
    /// # Errors
    /// If nothing listens on it.
    pub async fn connect(&self, path: &Path) -> Result<tokio::net::UnixStream, FolderError> {
        let (_folder, short) = self.short(path)?;
        tokio::net::UnixStream::connect(short)
            .await
            .map_err(FolderError::at("connect to", path))
    }

    /// A path to the same file that is short enough for a socket address, which holds 107 bytes; valid while the folder
    /// is open.
    fn short(&self, path: &Path) -> Result<(File, PathBuf), FolderError> {
        let folder = File::open(&self.path).map_err(FolderError::at("open", &self.path))?;
        let name = path.file_name().unwrap_or_default();
        let short = Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(name);
        Ok((folder, short))
    }
}

/// Removes a file, if it exists.
///
/// # Errors
/// If it exists and cannot be removed.
pub fn remove(path: &Path) -> Result<(), FolderError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(FolderError::at("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Writes a file with this mode, even if it exists with another.
///
/// # Errors
/// If it cannot be written.
pub fn write_with_mode(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)?;
    // An existing file would have kept its old mode.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("metadata").permissions().mode() & 0o777
    }

    #[test]
    fn private_files_are_private_even_if_they_were_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = Folder::create(folder.path().join("vm")).expect("a folder of its own");
        assert_eq!(mode(kept.path()), 0o700);
        let path = kept.file("secret");
        fs::write(&path, "old and longer").expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("a mode");
        kept.write_private(&path, b"new").expect("written");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(fs::read(&path).expect("a file"), b"new");
    }

    #[tokio::test]
    async fn sockets_work_in_folders_of_any_depth() {
        let folder = tempfile::tempdir().expect("a folder");
        let deep = folder.path().join("d".repeat(100)).join("e".repeat(100));
        let kept = Folder::create(deep).expect("a folder of its own");
        let path = kept.file("qmp.sock");
        let listener = kept.listen(&path).expect("listens");
        kept.connect(&path).await.expect("connects");
        drop(listener);
        // The file of the closed socket does not prevent it.
        kept.listen(&path).expect("listens again");
    }
}
