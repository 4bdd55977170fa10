//! A real TPM 2.0 for tests: the emulator swtpm, with its state in a temporary directory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Digest, Pcr, SwtpmSocket, Tpm};

/// How long the emulator may take to start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// What the emulator reports, in its directory: among others, each client that disconnects.
const LOG: &str = "log";

/// A running emulator, which is killed when this is dropped.
pub struct Swtpm {
    directory: TempDir,
    process: Child,
}

impl Swtpm {
    /// A new TPM, started as firmware does it.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let process = spawn(directory.path());
        let mut started = Self { directory, process };
        started.wait();
        started
    }

    /// The same TPM after a power cut: PCRs are reset, nothing is loaded.
    pub fn restart(&mut self) {
        self.stop();
        self.process = spawn(self.directory.path());
        self.wait();
    }

    /// The absolute path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub fn transport(&self) -> SwtpmSocket {
        SwtpmSocket::connect(&self.socket()).unwrap()
    }

    pub fn tpm(&self) -> Tpm {
        Tpm::new(self.transport())
    }

    fn wait(&mut self) {
        let deadline = Instant::now() + START_TIMEOUT;
        while let Err(error) = SwtpmSocket::connect(&self.socket()) {
            let ended = self.process.try_wait().unwrap();
            let is_late = Instant::now() > deadline;
            assert!(
                ended.is_none() && !is_late,
                "swtpm does not start ({error}): {}",
                std::fs::read_to_string(self.directory.path().join(LOG)).unwrap()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn stop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        // The next one makes it again; until then, nobody can connect.
        let _ = std::fs::remove_file(self.socket());
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn(directory: &Path) -> Child {
    let at = |name: &str| directory.join(name).display().to_string();
    Command::new("swtpm")
        .args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear"])
        .args(["--tpmstate", &format!("dir={}", directory.display())])
        .args(["--server", &format!("type=unixio,path={}", at("socket"))])
        // Where the libraries in C look for it.
        .args(["--ctrl", &format!("type=unixio,path={}", at("socket.ctrl"))])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(directory.join(LOG)).unwrap())
        .spawn()
        .unwrap_or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => panic!("no swtpm in PATH: `apt install swtpm`"),
            _ => panic!("swtpm: {error}"),
        })
}

impl Tpm {
    /// Extends a PCR, as firmware and loaders do.
    pub fn extend(&mut self, pcr: Pcr, measurement: &Digest) {
        self.call(|channel| channel.pcr_extend(pcr, measurement))
            .unwrap();
    }

    /// Clears the TPM, as an operator can in the firmware's menus.
    pub fn clear(&mut self) {
        self.call(|channel| channel.clear()).unwrap();
    }
}
