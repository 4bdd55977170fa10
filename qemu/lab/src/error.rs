//! What can go wrong, in the words that the user of a command reads.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::operator::OwnershipError;
use hearth_api::owner::OwnerFileError;
use hearth_qemu::accel::AccelError;
use hearth_qemu::cluster::{AttachError, ClusterError};
use hearth_qemu::disk::DiskError;
use hearth_qemu::firmware::NoFirmware;
use hearth_qemu::fw_cfg::NameError;
use hearth_qemu::run_dir::RunDirError;
use hearth_qemu::switch::NetworkError;
use hearth_qemu::vm::{StartError, WaitError};
use tonic::Status;

use crate::record::{Conflict, OVER, RecordError};
use crate::tool::ToolError;

/// What something in the laboratory comes to.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

/// Something in the laboratory has failed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A file cannot be used.
    #[error("cannot {step} {}", path.display())]
    File {
        /// What failed.
        step: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What is kept of a cluster is of another form.
    #[error("{} is not understood; {OVER}", shown(path).display())]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong with it.
        source: RecordError,
    },
    /// Nothing is kept.
    #[error("there is no cluster; `cargo xtask run` founds one")]
    NoCluster,
    /// The cluster that is there is not what is wished for.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// Another run is at work.
    #[error(
        "another `cargo xtask run` is about to start a node (process {holder}); wait for it, or interrupt it"
    )]
    Busy {
        /// Its process.
        holder: String,
    },
    /// A machine of the cluster runs.
    #[error(
        "{machine} is running already (QEMU is process {pid}); `cargo xtask stop` powers it off"
    )]
    Running {
        /// The machine.
        machine: String,
        /// Its process.
        pid: i32,
    },
    /// The cluster has no such machine.
    #[error("there is no machine {name:?}; this cluster has {has}")]
    NoMachine {
        /// What was asked for.
        name: String,
        /// Those that it has.
        has: String,
    },
    /// Nobody has said what the machines are made of.
    #[error("it is not known what the machines are made of; `cargo xtask run` boots them")]
    Unmade,
    /// A machine that must have been started was not.
    #[error("{0} was never started")]
    NeverStarted(String),
    /// The network does not bring a port of a machine to the host, or has no address for it.
    #[error("{machine}: the network has no {what} for it")]
    Unplugged {
        /// The machine.
        machine: String,
        /// What it lacks.
        what: &'static str,
    },
    /// A node has not come home.
    #[error(
        "{machine} did not come home: {why}\n\n{words}\n`cargo xtask run` tries again from where it was, --fresh starts over"
    )]
    NotHome {
        /// The machine.
        machine: String,
        /// Why.
        why: String,
        /// Its last words, and where all of them are.
        words: String,
    },
    /// A machine has ended that was to go on.
    #[error("{machine} ended: {exit}\n\n{tail}")]
    Ended {
        /// The machine.
        machine: String,
        /// How.
        exit: String,
        /// Its last words.
        tail: String,
    },
    /// Machines have not gone down in order; why, of each.
    #[error("{}", .0.join("\n\n"))]
    Unclean(Vec<String>),
    /// Kubernetes does not come to be what it is to be.
    #[error(
        "Kubernetes is not ready: {why}\n\n{words}\n`cargo xtask run` tries again from where it was"
    )]
    NoKubernetes {
        /// Why.
        why: String,
        /// The first controller's last words.
        words: String,
    },
    /// A machine was asked for, and whoever has the others does not start it.
    #[error(
        "the `cargo xtask run` that has the other nodes did not start {machine} within {} s; it takes requests once its cluster is complete", bound.as_secs()
    )]
    NotStarted {
        /// The machine.
        machine: String,
        /// How long was waited.
        bound: Duration,
    },
    /// Something has not happened in time.
    #[error("no {what} within {bound:?}")]
    Late {
        /// What.
        what: &'static str,
        /// How long was waited.
        bound: Duration,
    },
    /// What a machine has shown or answered is not what was wanted.
    #[error("{wanted}, but {found}\n{tail}")]
    Unexpected {
        /// What was wanted.
        wanted: &'static str,
        /// What came.
        found: String,
        /// The machine's last words.
        tail: String,
    },
    /// A call to the cluster has failed.
    #[error("{call}")]
    Call {
        /// Which.
        call: &'static str,
        /// What it was answered.
        source: Box<Status>,
    },
    /// Ownership was not taken.
    #[error(transparent)]
    Ownership(Box<OwnershipError>),
    /// A file of the owner's cannot be used.
    #[error("cannot {step}")]
    OwnerFile {
        /// What failed.
        step: &'static str,
        /// What is wrong.
        source: OwnerFileError,
    },
    /// A program's output is not what it is known to print.
    #[error("{what}")]
    Output {
        /// Whose output, and that it is not understood.
        what: &'static str,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A program has failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The machines did not do.
    #[error(transparent)]
    Cluster(Box<ClusterError>),
    /// Machines that were left running cannot be reached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The network did not do.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A machine did not start.
    #[error(transparent)]
    Start(Box<StartError>),
    /// A machine has not done in time what was waited for.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// A machine's folder cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A disk was not made.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// There is no firmware.
    #[error(transparent)]
    Firmware(#[from] NoFirmware),
    /// No item of fw_cfg can have this name.
    #[error(transparent)]
    FwCfg(#[from] NameError),
    /// Machines cannot run as is wished.
    #[error("--accel")]
    Accel(#[from] AccelError),
    /// A process cannot be waited for, or ended.
    #[error("cannot {step}")]
    Process {
        /// What failed.
        step: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl LabError {
    /// For a file's error.
    pub(crate) fn file(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LabError {
        let path = path.to_owned();
        move |source| LabError::File { step, path, source }
    }

    /// For a call's.
    pub(crate) fn call(call: &'static str) -> impl FnOnce(Status) -> LabError {
        move |status| LabError::Call {
            call,
            source: Box::new(status),
        }
    }

    /// For a process's.
    pub(crate) fn process(step: &'static str) -> impl FnOnce(io::Error) -> LabError {
        move |source| LabError::Process { step, source }
    }
}

impl From<ClusterError> for LabError {
    fn from(error: ClusterError) -> LabError {
        LabError::Cluster(Box::new(error))
    }
}

impl From<StartError> for LabError {
    fn from(error: StartError) -> LabError {
        LabError::Start(Box::new(error))
    }
}

impl From<OwnershipError> for LabError {
    fn from(error: OwnershipError) -> LabError {
        LabError::Ownership(Box::new(error))
    }
}

/// A path as the user would type it here: relative where it lies below the current folder.
pub(crate) fn shown(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    let short = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    short.unwrap_or_else(|| path.to_owned())
}
