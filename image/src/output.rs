//! Output files that are complete or absent.
//!
//! An interrupted build must leave nothing that looks like an image (a truncated disk boots just far enough to be
//! confusing). So the bytes go to an *unnamed* file (`O_TMPFILE`) in the destination's directory, which gets its name
//! when it is complete. However the build ends, SIGKILL included, the kernel removes the unnamed file. A named
//! temporary file that a guard removes would leave hundreds of megabytes behind if the guard does not run; it is the
//! fallback for file systems without `O_TMPFILE`.
//!
//! Nothing is synced to the disk: an image is a build product that can be rebuilt like an object file, and a sync takes
//! longer than the whole assembly.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

/// Why an output file could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {}", path.display())]
pub struct OutputError {
    /// The step that failed ("open").
    pub step: &'static str,
    /// The path that it failed on.
    pub path: PathBuf,
    /// The underlying I/O error.
    pub source: io::Error,
}

enum Backing {
    Unnamed(File),
    Named(tempfile::NamedTempFile),
}

/// A file being written, invisible until [`Output::publish`].
pub struct Output {
    backing: Backing,
    destination: PathBuf,
}

impl Output {
    /// Starts an output that will appear at `destination`, whose directory must exist. A destination that exists and is
    /// not a regular file (a disk, say) is refused: publishing would replace it by a file.
    pub fn create(destination: &Path) -> Result<Output, OutputError> {
        match std::fs::metadata(destination) {
            Ok(found) if !found.is_file() => {
                let what = if found.is_dir() {
                    "a directory"
                } else {
                    "a device or pipe"
                };
                return Err(OutputError {
                    step: "replace",
                    path: destination.to_owned(),
                    source: io::Error::other(format!("expected a regular file, got {what}")),
                });
            }
            _ => {}
        }
        let directory = directory_of(destination);
        let backing = match rustix::fs::openat(
            CWD,
            directory,
            OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o666),
        ) {
            Ok(descriptor) => Backing::Unnamed(File::from(descriptor)),
            // A missing directory or permission fails here too, with a better error.
            Err(_) => Backing::Named(named_in(directory, destination)?),
        };
        Ok(Output {
            backing,
            destination: destination.to_owned(),
        })
    }

    /// The file will be readable by its owner only, whatever the umask.
    pub fn secret(self) -> Result<Output, OutputError> {
        let file = match &self.backing {
            Backing::Unnamed(file) => file,
            Backing::Named(file) => file.as_file(),
        };
        rustix::fs::fchmod(file, Mode::from_raw_mode(0o600)).map_err(|source| OutputError {
            step: "restrict access to",
            path: self.destination.clone(),
            source: source.into(),
        })?;
        Ok(self)
    }

    /// The file, open for reading and writing.
    pub fn file(&mut self) -> &mut File {
        match &mut self.backing {
            Backing::Unnamed(file) => file,
            Backing::Named(file) => file.as_file_mut(),
        }
    }

    /// A path that a child process of this one can open the file by.
    pub fn reachable_path(&self) -> PathBuf {
        match &self.backing {
            Backing::Unnamed(file) => descriptor_path(file, std::process::id()),
            Backing::Named(file) => file.path().to_owned(),
        }
    }

    /// Gives the file its name, replacing an existing file. Readers see either the old file or the complete new one.
    pub fn publish(self) -> Result<(), OutputError> {
        let destination = self.destination;
        let failed = |source| OutputError {
            step: "publish",
            path: destination.clone(),
            source,
        };
        match self.backing {
            Backing::Named(file) => {
                file.persist(&destination).map_err(|e| failed(e.error))?;
            }
            Backing::Unnamed(file) => {
                // link() cannot replace an existing name, rename() can: link to a temporary name, then rename.
                let step = destination.with_file_name(format!(
                    ".{}.{}",
                    destination
                        .file_name()
                        .unwrap_or_default()
                        .to_string_lossy(),
                    std::process::id()
                ));
                let own = descriptor_path(&file, std::process::id());
                let link = || rustix::fs::linkat(CWD, &own, CWD, &step, AtFlags::SYMLINK_FOLLOW);
                match link() {
                    // Left by a process with the same ID that died between the two calls.
                    Err(rustix::io::Errno::EXIST) => {
                        std::fs::remove_file(&step).map_err(failed)?;
                        link().map_err(|e| failed(e.into()))?;
                    }
                    other => other.map_err(|e| failed(e.into()))?,
                }
                if let Err(error) = std::fs::rename(&step, &destination) {
                    // The rename's error matters; a failure here would hide it.
                    let _ = std::fs::remove_file(&step);
                    return Err(failed(error));
                }
            }
        }
        Ok(())
    }
}

/// Writes `bytes` to `destination`, completely or not at all.
pub fn write(destination: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    let mut output = Output::create(destination)?;
    io::Write::write_all(output.file(), bytes).map_err(|source| OutputError {
        step: "write",
        path: destination.to_owned(),
        source,
    })?;
    output.publish()
}

/// Writes `bytes` unless the file has them already, so that its modification time is kept.
pub fn write_if_changed(destination: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    if std::fs::read(destination).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    write(destination, bytes)
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn descriptor_path(file: &File, process: u32) -> PathBuf {
    format!("/proc/{process}/fd/{}", file.as_raw_fd()).into()
}

fn named_in(directory: &Path, destination: &Path) -> Result<tempfile::NamedTempFile, OutputError> {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix(".hearth-output-")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(directory)
        .map_err(|source| OutputError {
            step: "create",
            path: destination.to_owned(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_shows_before_publish_and_nothing_stays_without_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let mut output = Output::create(&path).unwrap();
        output.file().write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(output);
        assert_eq!(names(directory.path()), Vec::<String>::new());
    }

    #[test]
    fn publish_replaces_the_old_file_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, "a much longer old image").unwrap();
        let mut output = Output::create(&path).unwrap();
        output.file().write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"a much longer old image");
        output.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(directory.path()), ["disk.img"]);
    }

    #[test]
    fn the_named_fallback_behaves_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, "old").unwrap();
        let fallback = || Output {
            backing: Backing::Named(named_in(directory.path(), &path).unwrap()),
            destination: path.clone(),
        };
        let mut dropped = fallback();
        dropped.file().write_all(b"half").unwrap();
        drop(dropped);
        assert_eq!(names(directory.path()), ["disk.img"]);
        let mut published = fallback();
        published.file().write_all(b"new").unwrap();
        published.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(directory.path()), ["disk.img"]);
    }

    #[test]
    fn a_secret_is_for_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, "old").unwrap();
        let output = Output::create(&path).unwrap();
        output.secret().unwrap().publish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let fallback = Output {
            backing: Backing::Named(named_in(directory.path(), &path).unwrap()),
            destination: path.clone(),
        };
        fallback.secret().unwrap().publish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_leftover_of_the_step_name_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let leftover = directory
            .path()
            .join(format!(".disk.img.{}", std::process::id()));
        std::fs::write(leftover, "stale").unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(directory.path()), ["disk.img"]);
    }

    #[test]
    fn what_is_not_a_regular_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Output::create(directory.path()).is_err());
        assert!(Output::create(Path::new("/dev/null")).is_err());
        let absent = Output::create(&directory.path().join("absent/disk.img"));
        let message = absent.err().unwrap();
        assert!(message.path.ends_with("absent/disk.img"));
    }

    #[test]
    fn a_child_process_reaches_the_unnamed_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let output = Output::create(&path).unwrap();
        let status = std::process::Command::new("cp")
            .arg("/proc/self/cmdline")
            .arg(output.reachable_path())
            .status()
            .unwrap();
        assert!(status.success());
        output.publish().unwrap();
        assert!(std::fs::read(&path).unwrap().starts_with(b"cp\0"));
    }

    #[test]
    fn an_unchanged_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_if_changed(&path, b"one").unwrap();
        let inode = |path| fs::metadata(path).unwrap().ino();
        let first = inode(&path);
        write_if_changed(&path, b"one").unwrap();
        assert_eq!(inode(&path), first);
        write_if_changed(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }
}
