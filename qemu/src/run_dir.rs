//! A machine's folder: all that it leaves behind stands in one place.
//!
//! | file | what |
//! |---|---|
//! | `serial.log` | everything the machine wrote to its console |
//! | `qmp.log` | what was said on QMP, with seconds since QEMU's start |
//! | `qemu.log` | QEMU's own standard output and error |
//! | `qemu.sh` | the command, to be run by hand |
//! | `vars.fd` | UEFI variables, kept over restarts |
//! | `fw_cfg-N.bin` | parameters given as bytes, mode 0600 |
//! | `qmp.sock`, `control.sock` | QMP for the launcher, and for everyone else |
//! | `netN.sock` | a link to the switch's socket that card N is plugged into |
//!
//! The logs are those of the last start; earlier ones are `serial.1.log`,
//! `serial.2.log` … up to [`KEPT`], each older than the one before.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

/// How many earlier logs are kept.
pub const KEPT: u32 = 5;

const LOGS: [&str; 3] = ["serial", "qmp", "qemu"];

/// A machine's folder. Cheap to clone; several handles are the same folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

/// The folder could not be used.
#[derive(Debug, thiserror::Error)]
#[error("machine folder: cannot {step} {path}: {source}")]
pub struct RunDirError {
    pub(crate) step: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) source: io::Error,
}

impl RunDirError {
    fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { step, path, source }
    }
}

impl RunDir {
    /// Takes this folder, which is made if it is not there, for its owner
    /// alone.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, RunDirError> {
        let path = path.as_ref();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(RunDirError::at("make", path))?;
        Self::open(path)
    }

    /// Takes this folder, which must be there.
    ///
    /// # Errors
    /// If it is not.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RunDirError> {
        let path = path.as_ref();
        // Absolute: QEMU runs in the folder itself.
        let path = path.canonicalize().map_err(RunDirError::at("find", path))?;
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

    /// The console's log.
    pub fn serial_log(&self) -> PathBuf {
        self.file("serial.log")
    }

    /// The log of QMP.
    pub fn qmp_log(&self) -> PathBuf {
        self.file("qmp.log")
    }

    /// QEMU's own words.
    pub fn qemu_log(&self) -> PathBuf {
        self.file("qemu.log")
    }

    /// The command, to be run by hand.
    pub fn script(&self) -> PathBuf {
        self.file("qemu.sh")
    }

    /// The UEFI variables.
    pub fn vars(&self) -> PathBuf {
        self.file("vars.fd")
    }

    /// The file of the fw_cfg item with this number.
    pub fn fw_cfg(&self, number: usize) -> PathBuf {
        self.file(&format!("fw_cfg-{number}.bin"))
    }

    /// QMP of whoever started the machine.
    pub fn qmp_socket(&self) -> PathBuf {
        self.file("qmp.sock")
    }

    /// QMP of everyone else: QEMU serves one client for each socket.
    pub fn control_socket(&self) -> PathBuf {
        self.file("control.sock")
    }

    /// The name, in the folder, of the socket that the network card with this
    /// number is plugged into.
    pub(crate) fn link_name(card: usize) -> String {
        format!("net{card}.sock")
    }

    /// Makes a switch's socket known under a short name in this folder.
    pub(crate) fn make_link(&self, card: usize, socket: &Path) -> Result<(), RunDirError> {
        let link = self.file(&Self::link_name(card));
        remove(&link)?;
        // QEMU runs in the folder, so what is relative must be resolved.
        let socket = std::path::absolute(socket).map_err(RunDirError::at("find", socket))?;
        symlink(socket, &link).map_err(RunDirError::at("make", &link))
    }

    /// Puts the logs of the last start aside and starts empty ones.
    pub(crate) fn rotate_logs(&self) -> Result<(), RunDirError> {
        for log in LOGS {
            for number in (0..KEPT).rev() {
                let (from, to) = (self.old_log(log, number), self.old_log(log, number + 1));
                match fs::rename(&from, &to) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(RunDirError::at("put aside", &from)(error));
                    }
                    _ => {}
                }
            }
            self.write_private(&self.old_log(log, 0), b"")?;
        }
        Ok(())
    }

    fn old_log(&self, log: &str, number: u32) -> PathBuf {
        match number {
            0 => self.file(&format!("{log}.log")),
            number => self.file(&format!("{log}.{number}.log")),
        }
    }

    /// Writes a file that nobody else may read.
    pub(crate) fn write_private(&self, path: &Path, bytes: &[u8]) -> Result<(), RunDirError> {
        write_with_mode(path, bytes, 0o600).map_err(RunDirError::at("write", path))
    }

    /// Writes the command so that it can be run by hand.
    pub(crate) fn write_script(&self, command: &[u8]) -> Result<(), RunDirError> {
        let script = [
            b"#!/bin/sh\n# Starts this machine again as it was last started, on the same disks.\ncd \"$(dirname \"$0\")\" || exit\nexec ",
            command,
        ]
        .concat();
        let path = self.script();
        write_with_mode(&path, &script, 0o700).map_err(RunDirError::at("write", &path))
    }

    /// Copies the template of the UEFI variables, unless they are there
    /// already.
    pub(crate) fn make_vars(&self, template: &Path) -> Result<(), RunDirError> {
        let path = self.vars();
        if path.exists() {
            return Ok(());
        }
        let bytes = fs::read(template).map_err(RunDirError::at("read", template))?;
        // By a rename, so that a half-written file is never taken for the
        // variables that are there already.
        let partial = self.file("vars.partial");
        self.write_private(&partial, &bytes)?;
        fs::rename(&partial, &path).map_err(RunDirError::at("make", &path))
    }

    /// Binds a listening socket of this name. It listens before QEMU is even
    /// started, so a client can connect at once and simply waits.
    pub(crate) fn listen(&self, path: &Path) -> Result<UnixListener, RunDirError> {
        remove(path)?;
        let (_folder, short) = self.short(path)?;
        UnixListener::bind(short).map_err(RunDirError::at("listen at", path))
    }

    /// Connects to a socket of this name.
    pub(crate) async fn connect(&self, path: &Path) -> Result<tokio::net::UnixStream, RunDirError> {
        let (_folder, short) = self.short(path)?;
        tokio::net::UnixStream::connect(short)
            .await
            .map_err(RunDirError::at("connect to", path))
    }

    /// A path to the same file that is short enough for a socket address,
    /// which holds 107 bytes; valid for as long as the folder is held open.
    fn short(&self, path: &Path) -> Result<(File, PathBuf), RunDirError> {
        let folder = File::open(&self.path).map_err(RunDirError::at("open", &self.path))?;
        let name = path.file_name().unwrap_or_default();
        let short = Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(name);
        Ok((folder, short))
    }
}

/// Removes a file, if it is there.
fn remove(path: &Path) -> Result<(), RunDirError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(RunDirError::at("remove", path)(error))
        }
        _ => Ok(()),
    }
}

fn write_with_mode(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
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
    fn logs_are_put_aside_and_the_oldest_dropped() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        for number in 0..=KEPT + 1 {
            run_dir.rotate_logs().expect("rotated");
            assert_eq!(fs::read(run_dir.serial_log()).expect("a new log"), b"");
            fs::write(run_dir.serial_log(), number.to_string()).expect("a log");
        }
        let read = |name: &str| fs::read_to_string(run_dir.file(name)).ok();
        assert_eq!(read("serial.log").as_deref(), Some("6"));
        assert_eq!(read("serial.1.log").as_deref(), Some("5"));
        assert_eq!(read("serial.5.log").as_deref(), Some("1"));
        assert_eq!(read("serial.6.log"), None);
    }

    #[test]
    fn private_files_are_private_even_if_they_were_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        assert_eq!(mode(run_dir.path()), 0o700);
        let path = run_dir.fw_cfg(0);
        fs::write(&path, "old and longer").expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("a mode");
        run_dir.write_private(&path, b"new").expect("written");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(fs::read(&path).expect("a file"), b"new");
    }

    #[tokio::test]
    async fn sockets_work_in_folders_of_any_depth() {
        let folder = tempfile::tempdir().expect("a folder");
        let deep = folder.path().join("d".repeat(100)).join("e".repeat(100));
        let run_dir = RunDir::create(deep).expect("a run dir");
        let path = run_dir.qmp_socket();
        let listener = run_dir.listen(&path).expect("listens");
        run_dir.connect(&path).await.expect("connects");
        drop(listener);
        // The dead socket's file does not stand in the way.
        run_dir.listen(&path).expect("listens again");
    }

    #[test]
    fn variables_are_made_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        let template = folder.path().join("template");
        fs::write(&template, "one").expect("a template");
        run_dir.make_vars(&template).expect("made");
        fs::write(&template, "two").expect("a template");
        run_dir.make_vars(&template).expect("kept");
        assert_eq!(fs::read(run_dir.vars()).expect("variables"), b"one");
        let error = RunDir::open(folder.path().join("absent")).expect_err("not there");
        assert!(error.to_string().contains("absent"), "{error}");
    }
}
