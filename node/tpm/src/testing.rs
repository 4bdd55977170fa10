//! A real TPM 2.0 for tests: the emulator swtpm, with its state in a temporary directory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::boot_log::BootEvent;
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

    /// Its process ID.
    pub fn id(&self) -> u32 {
        self.process.id()
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

/// The log of a firmware that has measured these digests, with hashes of SHA-1 and SHA-256.
pub fn event_log(events: &[BootEvent]) -> Vec<u8> {
    const NO_ACTION: u32 = 3;
    const EVENT: u32 = 0x8000_0003;
    let hashes = [4_u16, 20, 0x0b, 32].map(u16::to_le_bytes).concat();
    let mut spec = b"Spec ID Event03\0".to_vec();
    spec.extend([0, 0, 0, 0, 0, 2, 0, 2, 2, 0, 0, 0]);
    spec.extend(hashes);
    spec.push(0);
    let mut log = [0, NO_ACTION].map(u32::to_le_bytes).concat();
    log.extend([0; 20]);
    log.extend((spec.len() as u32).to_le_bytes());
    log.extend(spec);
    for event in events {
        log.extend(
            [event.pcr.index().into(), EVENT, 2]
                .map(u32::to_le_bytes)
                .concat(),
        );
        log.extend(4_u16.to_le_bytes());
        log.extend([0; 20]);
        log.extend(0x0b_u16.to_le_bytes());
        log.extend(event.digest.0);
        log.extend(0_u32.to_le_bytes());
    }
    log
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

    /// Stores a certificate of the endorsement key, as manufacturers do.
    pub fn certify(&mut self, certificate: &[u8]) {
        self.call(|channel| channel.store_certificate(certificate))
            .unwrap();
    }

    /// Clears the TPM, as an operator can in the firmware's menus.
    pub fn clear(&mut self) {
        self.call(|channel| channel.clear()).unwrap();
    }
}
