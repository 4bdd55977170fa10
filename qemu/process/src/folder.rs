//! A folder that a process works in: for its owner alone, and its sockets work however deep it lies.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

/// Such a folder. Cheap to clone; several handles are the same folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    path: PathBuf,
}

/// The folder could not be used.
#[derive(Debug, thiserror::Error)]
#[error("machine folder: cannot {step} {path}: {source}")]
pub struct FolderError {
    /// What failed.
    pub step: &'static str,
    /// With which file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl FolderError {
    /// Makes one of what the system said: for `map_err`.
    pub fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { step, path, source }
    }
}

impl Folder {
    /// Takes this folder, which is made if it is not there, for its owner
    /// alone.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, FolderError> {
        let path = path.as_ref();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(FolderError::at("make", path))?;
        Self::open(path)
    }

    /// Takes this folder, which must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FolderError> {
        let path = path.as_ref();
        // Absolute: the process may run in the folder itself.
        let path = path.canonicalize().map_err(FolderError::at("find", path))?;
        Ok(Self { path })
    }

    /// The folder, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file that nobody else may read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_private(&self, path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
        write_with_mode(path, bytes, 0o600).map_err(FolderError::at("write", path))
    }

    /// Binds a listening socket of this name. It listens before the
    /// process is even started, so a client can connect at once and simply waits.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn listen(&self, path: &Path) -> Result<UnixListener, FolderError> {
        remove(path)?;
        let (_folder, short) = self.short(path)?;
        UnixListener::bind(short).map_err(FolderError::at("listen at", path))
    }

    /// Connects to a socket of this name.
    ///
    /// # Errors
    /// If nobody listens.
    pub async fn connect(&self, path: &Path) -> Result<tokio::net::UnixStream, FolderError> {
        let (_folder, short) = self.short(path)?;
        tokio::net::UnixStream::connect(short)
            .await
            .map_err(FolderError::at("connect to", path))
    }

    /// A path to the same file that is short enough for a socket address,
    /// which holds 107 bytes; valid for as long as the folder is held open.
    fn short(&self, path: &Path) -> Result<(File, PathBuf), FolderError> {
        let folder = File::open(&self.path).map_err(FolderError::at("open", &self.path))?;
        let name = path.file_name().unwrap_or_default();
        let short = Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(name);
        Ok((folder, short))
    }
}

/// Removes a file, if it is there.
///
/// # Errors
/// If it is there and cannot be removed.
pub fn remove(path: &Path) -> Result<(), FolderError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(FolderError::at("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Writes a file of this mode, whether it was there or not.
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
    // Where the file was there already, its old mode would have stayed.
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
        // The dead socket's file does not stand in the way.
        kept.listen(&path).expect("listens again");
    }
}
