//! File system calls whose errors name the step and the path, and the log of a long build.

use std::fs::{self, DirEntry, File};
use std::io::{self, LineWriter, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A file system call failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct FileError {
    /// The attempted action ("read").
    pub action: &'static str,
    /// The path of the file.
    pub path: PathBuf,
    /// The underlying I/O error.
    pub source: io::Error,
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> io::Error {
        io::Error::other(error)
    }
}

/// Makes an error from that of the call, for `map_err`.
pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError {
        action,
        path,
        source,
    }
}

/// Reads the file's bytes.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(failed("read", path))
}

/// Reads the file's text.
pub fn read_text(path: &Path) -> Result<String, FileError> {
    fs::read_to_string(path).map_err(failed("read", path))
}

/// The file's length in bytes.
pub fn length(path: &Path) -> Result<u64, FileError> {
    let metadata = fs::metadata(path).map_err(failed("read the metadata of", path))?;
    Ok(metadata.len())
}

/// Writes a whole file.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<(), FileError> {
    fs::write(path, content).map_err(failed("write", path))
}

/// Creates a folder and its parents.
pub fn create_dir(path: &Path) -> Result<(), FileError> {
    fs::create_dir_all(path).map_err(failed("create", path))
}

/// The entries of a folder, in the file system's order.
pub fn entries(folder: &Path) -> Result<Vec<DirEntry>, FileError> {
    let entries = folder.read_dir().map_err(failed("read", folder))?;
    entries
        .collect::<Result<_, _>>()
        .map_err(failed("read", folder))
}

/// Creates a symbolic link at `path`.
pub fn link(target: impl AsRef<Path>, path: &Path) -> Result<(), FileError> {
    symlink(target, path).map_err(failed("create the link", path))
}

/// Sets the mode of a file or folder.
pub fn set_mode(path: &Path, mode: u32) -> Result<(), FileError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))
}

/// The log of a long build, written line by line.
pub struct Log {
    path: PathBuf,
    file: LineWriter<File>,
}

impl Log {
    /// Creates the log, replacing an existing file.
    pub fn create(path: PathBuf) -> Result<Log, FileError> {
        let file = File::create(&path).map_err(failed("create", &path))?;
        Ok(Log {
            path,
            file: LineWriter::new(file),
        })
    }

    /// Path of the log file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line.
    pub fn line(&mut self, line: &str) -> Result<(), FileError> {
        writeln!(self.file, "{line}").map_err(failed("write the log", &self.path))
    }
}
