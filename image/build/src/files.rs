//! Calls of the file system, each with an error that names the step and the path, and the log of a long build.

use std::fs::{self, DirEntry, File};
use std::io::{self, LineWriter, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A call of the file system failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct FileError {
    /// What was to be done ("read").
    pub action: &'static str,
    /// With which file.
    pub path: PathBuf,
    /// Why it was not.
    pub source: io::Error,
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> io::Error {
        io::Error::other(error)
    }
}

/// Makes an error out of that of the call: for `map_err`.
pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError {
        action,
        path,
        source,
    }
}

/// The file's bytes.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(failed("read", path))
}

/// The file's text.
pub fn read_text(path: &Path) -> Result<String, FileError> {
    fs::read_to_string(path).map_err(failed("read", path))
}

/// Writes a whole file.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<(), FileError> {
    fs::write(path, content).map_err(failed("write", path))
}

/// Makes a folder and those above it.
pub fn create_dir(path: &Path) -> Result<(), FileError> {
    fs::create_dir_all(path).map_err(failed("create", path))
}

/// What is in a folder, in the file system's order.
pub fn entries(folder: &Path) -> Result<Vec<DirEntry>, FileError> {
    let entries = folder.read_dir().map_err(failed("read", folder))?;
    entries
        .collect::<Result<_, _>>()
        .map_err(failed("read", folder))
}

/// Makes a symbolic link at `path`.
pub fn link(target: impl AsRef<Path>, path: &Path) -> Result<(), FileError> {
    symlink(target, path).map_err(failed("make the link", path))
}

/// Sets the mode of a file or folder.
pub fn set_mode(path: &Path, mode: u32) -> Result<(), FileError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))
}

/// Where what a long build says goes, line by line.
pub struct Log {
    path: PathBuf,
    file: LineWriter<File>,
}

impl Log {
    /// A new one; what was there is gone.
    pub fn create(path: PathBuf) -> Result<Log, FileError> {
        let file = File::create(&path).map_err(failed("create", &path))?;
        Ok(Log {
            path,
            file: LineWriter::new(file),
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line.
    pub fn line(&mut self, line: &str) -> Result<(), FileError> {
        writeln!(self.file, "{line}").map_err(failed("write the log", &self.path))
    }
}
