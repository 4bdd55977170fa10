//! The TPM 2.0 of a machine: swtpm, a process beside QEMU.
//!
//! The machine's folder has everything of it in `tpm/`: `state/`, which is kept over restarts like the disk, and
//! `manufacturer/`, the authority that signed the certificates of its endorsement keys when it was made. swtpm listens
//! on a socket that it inherits, so QEMU can connect at once and the length of the folder's path does not matter.
//!
//! Invariants: swtpm ends with QEMU, however that ends: by itself when the connection is lost (`--terminate`), because a
//! detached machine has nobody else to end it, and by [`Emulator::end`], so that the end of a machine is also that of its
//! TPM. A state is complete or absent. A state that is in use is waited for: after a power cut by another process, swtpm
//! may end a little later than QEMU.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, io};

use hearth_process::process::Process;
use hearth_process::spawn::{self, Lifetime};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::time::{sleep, timeout};

use crate::command_line::CommandLine;
use crate::run_dir::{RunDir, RunDirError};

/// Bound for making a TPM: two endorsement keys and three certificates, a second on a quiet machine.
const SETUP_BOUND: Duration = Duration::from_secs(120);
/// Bound for the end of a process that was killed or has lost its connection.
const END_BOUND: Duration = Duration::from_secs(10);
/// Interval of looking whether the state is still in use.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The emulator, and the package that has it.
pub const SWTPM: [&str; 2] = ["swtpm", "swtpm"];
/// The program that makes a TPM like its manufacturer, and the package that has it.
pub const SWTPM_SETUP: [&str; 2] = ["swtpm_setup", "swtpm-tools"];
/// The program that signs its certificates, and the package that has it.
const SWTPM_LOCALCA: [&str; 2] = ["swtpm_localca", "swtpm-tools"];

/// A machine has no TPM.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// A program is not installed.
    #[error(
        "expected the program {program} in PATH, got none; install the package {package} (`cargo xtask setup`)"
    )]
    Absent {
        /// The program.
        program: &'static str,
        /// Debian's package.
        package: &'static str,
    },
    /// swtpm would take a part of the path for another option.
    #[error("expected a folder without commas in its path, got {}", .0.display())]
    Comma(PathBuf),
    /// A file operation failed.
    #[error(transparent)]
    Folder(#[from] RunDirError),
    /// A process could not be started or watched.
    #[error("cannot {step} {program}: {source}")]
    Process {
        /// The step that failed.
        step: &'static str,
        /// The program.
        program: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The TPM could not be made.
    #[error("swtpm_setup failed ({how}); the end of its log ({}):\n{words}", log.display())]
    Setup {
        /// How it ended.
        how: String,
        /// The end of its log.
        words: String,
        /// Path of the log.
        log: PathBuf,
    },
    /// Another swtpm has the state.
    #[error("the TPM's state in {} is in use by another process", .0.display())]
    InUse(PathBuf),
}

/// The swtpm process of a machine.
#[derive(Debug)]
pub(crate) struct Emulator {
    process: Process,
    child: Mutex<Child>,
}

/// Ends the emulator unless it is taken out.
#[derive(Debug)]
pub(crate) struct EndOnDrop(pub(crate) Option<Emulator>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if let Some(emulator) = &self.0 {
            emulator.end();
        }
    }
}

impl Emulator {
    /// Makes the machine's TPM, unless it exists, and starts it.
    pub(crate) async fn start(run_dir: &RunDir, lifetime: Lifetime) -> Result<Self, TpmError> {
        let program = find(SWTPM)?;
        if run_dir.path().as_os_str().as_bytes().contains(&b',') {
            return Err(TpmError::Comma(run_dir.path().to_owned()));
        }
        if !state(run_dir).exists() {
            make(run_dir).await?;
        }
        unused(run_dir).await?;
        let folder = run_dir.folder();
        let socket = folder.listen(&run_dir.tpm_socket())?;
        let log = create(&run_dir.tpm_log())?;
        let failed = failed("start", SWTPM);
        let mut command =
            command(program, run_dir, Control::Inherited(socket.as_raw_fd())).to_std();
        command
            .current_dir(run_dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(&failed)?)
            .stderr(log);
        let inherited = Arc::from([OwnedFd::from(socket)]);
        let child = spawn::spawn(command, lifetime, inherited).await;
        let mut child = child.map_err(&failed)?;
        match Process::of_child(child.id()) {
            Ok(process) => Ok(Self {
                process,
                child: Mutex::new(child),
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(error))
            }
        }
    }

    /// Ends it, if it has not ended by itself, and waits until it has.
    pub(crate) fn end(&self) {
        if let Err(error) = self.process.kill() {
            tracing::warn!(%error, "cannot kill swtpm");
        }
        if self.process.ended_within(END_BOUND) {
            let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = child.try_wait();
        }
    }
}

/// Where swtpm listens.
#[derive(Clone, Copy)]
enum Control {
    /// On an inherited socket.
    Inherited(RawFd),
    /// On one that it makes itself, in its working directory; then it goes to the background.
    Made,
}

/// The command that serves an existing TPM, for a machine that is started by hand; it returns at once.
pub(crate) fn by_hand(run_dir: &RunDir) -> CommandLine {
    command(SWTPM[0].into(), run_dir, Control::Made)
}

fn command(program: PathBuf, run_dir: &RunDir, control: Control) -> CommandLine {
    let mut state_option = OsString::from("dir=");
    state_option.push(state(run_dir));
    state_option.push(",mode=0600");
    let mut line = CommandLine::new(program);
    line.arg("socket")
        .arg("--tpm2")
        .option("--tpmstate", state_option)
        // The machine's end is the end of the connection.
        .arg("--terminate");
    match control {
        Control::Inherited(fd) => line.option("--ctrl", format!("type=unixio,fd={fd}")),
        Control::Made => line
            .option("--ctrl", format!("type=unixio,path={}", RunDir::TPM_SOCKET))
            .arg("--daemon"),
    };
    line
}

fn state(run_dir: &RunDir) -> PathBuf {
    run_dir.tpm().join("state")
}

/// Whether a process serves the machine's TPM. A TPM that was never made is not in use.
///
/// # Errors
/// If the lock of its state cannot be tried.
pub fn is_in_use(run_dir: &RunDir) -> io::Result<bool> {
    let lock = File::options()
        .write(true)
        .open(state(run_dir).join(".lock"));
    let lock = match lock {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        lock => lock?,
    };
    // Released again by closing the file.
    match fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(Errno::ACCESS | Errno::AGAIN) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

async fn unused(run_dir: &RunDir) -> Result<(), TpmError> {
    let lock = state(run_dir).join(".lock");
    let released = async {
        while is_in_use(run_dir).map_err(RunDirError::at("lock", &lock))? {
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    };
    let waited = timeout(END_BOUND, released).await;
    waited.unwrap_or_else(|_| Err(TpmError::InUse(state(run_dir))))
}

/// Makes a TPM as its manufacturer does: with endorsement keys, and certificates for them and for the platform.
async fn make(run_dir: &RunDir) -> Result<(), TpmError> {
    let program = find(SWTPM_SETUP)?;
    let authority = find(SWTPM_LOCALCA)?;
    let folder = run_dir.tpm();
    let (partial, manufacturer) = (folder.join("state.partial"), folder.join("manufacturer"));
    // Left by a setup that was interrupted.
    match fs::remove_dir_all(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(RunDirError::at("remove", &partial)(error).into());
        }
        _ => {}
    }
    for made in [&partial, &manufacturer] {
        fs::create_dir_all(made).map_err(RunDirError::at("make", made))?;
    }
    let configuration = configure(&folder, &manufacturer, &authority)?;
    let mut line = CommandLine::new(program);
    line.arg("--tpm2")
        .option("--tpmstate", &partial)
        .option("--config", &configuration)
        .arg("--create-ek-cert")
        .arg("--create-platform-cert")
        .arg("--lock-nvram");
    let log = folder.join("setup.log");
    let how = match timeout(SETUP_BOUND, run(&line, &log)).await {
        Ok(status) if status.as_ref().is_ok_and(|status| status.success()) => {
            let complete = state(run_dir);
            let renamed = fs::rename(&partial, &complete);
            return Ok(renamed.map_err(RunDirError::at("make", &complete))?);
        }
        Ok(status) => status?.to_string(),
        Err(_) => format!("not done after {} s", SETUP_BOUND.as_secs()),
    };
    let words = fs::read(&log).unwrap_or_default();
    let words = String::from_utf8_lossy(&words);
    let last: Vec<&str> = words.lines().rev().take(10).collect();
    Err(TpmError::Setup {
        how,
        words: last.into_iter().rev().collect::<Vec<_>>().join("\n"),
        log,
    })
}

/// Writes the configuration of swtpm_setup and of the authority. The host's would put every machine's certificates under
/// an authority in `/var/lib` that only root can write to.
fn configure(folder: &Path, manufacturer: &Path, authority: &Path) -> Result<PathBuf, TpmError> {
    let write = |name: &str, lines: &[(&str, &Path)]| -> Result<PathBuf, TpmError> {
        let path = folder.join(name);
        let line = |(key, value): &(&str, &Path)| format!("{key} = {}\n", value.display());
        let text: String = lines.iter().map(line).collect();
        fs::write(&path, text).map_err(RunDirError::at("write", &path))?;
        Ok(path)
    };
    let options = folder.join("localca.options");
    let platform = "--platform-manufacturer Hearth\n--platform-version 1\n--platform-model QEMU\n";
    fs::write(&options, platform).map_err(RunDirError::at("write", &options))?;
    let localca = write(
        "localca.conf",
        &[
            ("statedir", manufacturer),
            ("signingkey", &manufacturer.join("signing-key.pem")),
            ("issuercert", &manufacturer.join("certificate.pem")),
            ("certserial", &manufacturer.join("serial")),
        ],
    )?;
    write(
        "setup.conf",
        &[
            ("create_certs_tool", authority),
            ("create_certs_tool_config", &localca),
            ("create_certs_tool_options", &options),
            ("active_pcr_banks", Path::new("sha256")),
        ],
    )
}

/// Runs swtpm_setup; if this is dropped, it and what it has started end.
async fn run(line: &CommandLine, log: &Path) -> Result<ExitStatus, TpmError> {
    let output = create(log)?;
    let failed = failed("run", SWTPM_SETUP);
    let mut command = line.to_std();
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(&failed)?)
        .stderr(output);
    let child = spawn::spawn(command, Lifetime::KillWithParent, Arc::from([])).await;
    let mut group = Group(child.map_err(&failed)?);
    let process = Process::of_child(group.0.id()).map_err(&failed)?;
    process.ended().await.map_err(&failed)?;
    group.0.wait().map_err(&failed)
}

/// A child that leads a process group, which ends with this handle.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0.id().cast_signed()) {
            // Usually there is none any more.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn create(path: &Path) -> Result<File, TpmError> {
    Ok(File::create(path).map_err(RunDirError::at("make", path))?)
}

fn failed(step: &'static str, [program, _]: [&'static str; 2]) -> impl Fn(io::Error) -> TpmError {
    move |source| TpmError::Process {
        step,
        program,
        source,
    }
}

/// The path of a program.
fn find([program, package]: [&'static str; 2]) -> Result<PathBuf, TpmError> {
    let path = env::var_os("PATH").unwrap_or_default();
    find_in(&path, program).ok_or(TpmError::Absent { program, package })
}

fn find_in(path: &OsStr, program: &str) -> Option<PathBuf> {
    env::split_paths(path)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_program_is_named_with_its_package() {
        let nowhere = find_in("/nonexistent".as_ref(), SWTPM[0]);
        assert_eq!(nowhere, None);
        let [program, package] = SWTPM_SETUP;
        let text = TpmError::Absent { program, package }.to_string();
        assert!(text.contains("swtpm_setup in PATH, got none"), "{text}");
        assert!(text.contains("the package swtpm-tools"), "{text}");
    }

    #[tokio::test]
    async fn a_setup_that_fails_leaves_no_state_and_shows_its_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let mut line = CommandLine::new("sh");
        line.option("-c", "echo no room; exit 3");
        let status = run(&line, &log).await.expect("it ran");
        assert_eq!(status.code(), Some(3));
        assert_eq!(fs::read_to_string(&log).expect("a log"), "no room\n");
    }

    #[test]
    fn a_tpm_that_was_never_made_is_not_in_use() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        assert!(!is_in_use(&run_dir).expect("looked"));
    }

    #[test]
    fn a_tpm_is_served_until_the_machine_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("vm")).expect("a run dir");
        let line = command(SWTPM[0].into(), &run_dir, Control::Inherited(9));
        assert_eq!(line.values_of("--ctrl"), ["type=unixio,fd=9"]);
        assert!(line.args().iter().any(|arg| arg == "--terminate"));
        let line = by_hand(&run_dir);
        assert_eq!(line.values_of("--ctrl"), ["type=unixio,path=tpm.sock"]);
        assert!(line.args().iter().any(|arg| arg == "--daemon"));
    }
}
