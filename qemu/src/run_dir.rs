//! A machine's folder: all files of a machine are in one place.
//!
//! | file | what |
//! |---|---|
//! | `serial.log` | everything the machine wrote to its console |
//! | `console.sock` | its console, for typing; meanwhile the log may have a character twice |
//! | `qmp.log` | messages on QMP, with seconds since QEMU's start; where the processors were when a wait timed out |
//! | `qemu.log` | QEMU's own standard output and error |
//! | `qemu.sh` | the command, for running it by hand |
//! | `vars.fd` | UEFI variables, kept over restarts |
//! | `fw_cfg-N.bin` | parameters given as bytes, mode 0600 |
//! | `smbios-N.txt` | strings of the SMBIOS table, mode 0600 |
//! | `qmp.sock`, `control.sock` | QMP for the launcher, and for everyone else |
//! | `tpm/`, `tpm.sock`, `tpm.log` | the TPM's state, kept over restarts, its socket, and swtpm's output |
//! | `netN.sock` | a link to the switch's socket that card N is plugged into |
//!
//! The logs are those of the last start; earlier ones are `serial.1.log`,
//! `serial.2.log` … up to [`KEPT`], each older than the one before.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{fs, io};

pub use hearth_process::folder::FolderError as RunDirError;
use hearth_process::folder::{Folder, remove, write_with_mode};

/// Number of earlier logs that are kept.
pub const KEPT: u32 = 5;

const LOGS: [&str; 3] = ["serial", "qmp", "qemu"];

/// A machine's folder. Cheap to clone; clones refer to the same folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    folder: Folder,
}

impl RunDir {
    /// Opens this folder, creating it if it is absent, and restricts it to its owner.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, RunDirError> {
        let folder = Folder::create(path)?;
        Ok(Self { folder })
    }

    /// Opens this folder, which must exist.
    ///
    /// # Errors
    /// If it does not exist.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RunDirError> {
        let folder = Folder::open(path)?;
        Ok(Self { folder })
    }

    /// The absolute path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.file(name)
    }

    /// The folder without the machine's file names.
    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// The log of the console.
    pub fn serial_log(&self) -> PathBuf {
        self.file("serial.log")
    }

    /// The socket of the console. QEMU serves one client at a time.
    pub fn console_socket(&self) -> PathBuf {
        self.file("console.sock")
    }

    /// The log of QMP.
    pub fn qmp_log(&self) -> PathBuf {
        self.file("qmp.log")
    }

    /// The log of QEMU's output.
    pub fn qemu_log(&self) -> PathBuf {
        self.file("qemu.log")
    }

    /// The command as a script, for running it by hand.
    pub fn script(&self) -> PathBuf {
        self.file("qemu.sh")
    }

    /// The UEFI variables.
    pub fn vars(&self) -> PathBuf {
        self.file("vars.fd")
    }

    /// The file of the string for the SMBIOS table with this number.
    pub fn smbios(&self, number: usize) -> PathBuf {
        self.file(&format!("smbios-{number}.txt"))
    }

    /// The file of the fw_cfg item with this number.
    pub fn fw_cfg(&self, number: usize) -> PathBuf {
        self.file(&format!("fw_cfg-{number}.bin"))
    }

    /// The QMP socket of the launcher.
    pub fn qmp_socket(&self) -> PathBuf {
        self.file("qmp.sock")
    }

    /// The QMP socket of everyone else: QEMU serves one client per socket.
    pub fn control_socket(&self) -> PathBuf {
        self.file("control.sock")
    }

    /// The name of [`Self::tpm_socket`] in the folder.
    pub(crate) const TPM_SOCKET: &str = "tpm.sock";

    /// The folder of the TPM.
    pub fn tpm(&self) -> PathBuf {
        self.file("tpm")
    }

    /// The socket of the TPM's emulator.
    pub fn tpm_socket(&self) -> PathBuf {
        self.file(Self::TPM_SOCKET)
    }

    /// The log of the TPM's emulator.
    pub fn tpm_log(&self) -> PathBuf {
        self.file("tpm.log")
    }

    /// The name, in the folder, of the socket that the network card with this number is connected to.
    pub(crate) fn link_name(card: usize) -> String {
        format!("net{card}.sock")
    }

    /// Makes a switch's socket accessible by a short name in this folder.
    pub(crate) fn make_link(&self, card: usize, socket: &Path) -> Result<(), RunDirError> {
        let link = self.file(&Self::link_name(card));
        remove(&link)?;
        // QEMU's working directory is the folder, so a relative path must be resolved.
        let socket = std::path::absolute(socket).map_err(RunDirError::at("find", socket))?;
        symlink(socket, &link).map_err(RunDirError::at("make", &link))
    }

    /// Renames the logs of the last start and starts empty ones.
    pub(crate) fn rotate_logs(&self) -> Result<(), RunDirError> {
        for log in LOGS {
            for number in (0..KEPT).rev() {
                let (from, to) = (self.old_log(log, number), self.old_log(log, number + 1));
                match fs::rename(&from, &to) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(RunDirError::at("rename", &from)(error));
                    }
                    _ => {}
                }
            }
            self.folder.write_private(&self.old_log(log, 0), b"")?;
        }
        Ok(())
    }

    fn old_log(&self, log: &str, number: u32) -> PathBuf {
        match number {
            0 => self.file(&format!("{log}.log")),
            number => self.file(&format!("{log}.{number}.log")),
        }
    }

    /// Writes the command as a script, for running it by hand, after what has to be started before it.
    pub(crate) fn write_script(&self, before: &[u8], command: &[u8]) -> Result<(), RunDirError> {
        let script = [
            b"#!/bin/sh\n# Starts this machine again as it was last started, on the same disks.\ncd \"$(dirname \"$0\")\" || exit\n",
            before,
            b"exec ",
            command,
        ]
        .concat();
        let path = self.script();
        write_with_mode(&path, &script, 0o700).map_err(RunDirError::at("write", &path))
    }

    /// Copies the template of the UEFI variables, unless they exist.
    pub(crate) fn make_vars(&self, template: &Path) -> Result<(), RunDirError> {
        let path = self.vars();
        if path.exists() {
            return Ok(());
        }
        let bytes = fs::read(template).map_err(RunDirError::at("read", template))?;
        // By a rename, so that a partial file is never taken for existing variables.
        let partial = self.file("vars.partial");
        self.folder.write_private(&partial, &bytes)?;
        fs::rename(&partial, &path).map_err(RunDirError::at("make", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
