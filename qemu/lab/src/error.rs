//! Errors, with messages for the user of a command.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::owner::OwnerFileError;
use hearth_operator::OwnershipError;
use hearth_operator::unlock::MixedClusters;
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

/// Result of an operation of this crate.
pub type Result<T, E = LabError> = std::result::Result<T, E>;

/// An operation of this crate failed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A file operation failed.
    #[error("cannot {step} {}", path.display())]
    File {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The cluster's record has another format.
    #[error("cannot parse {}; {OVER}", shown(path).display())]
    Record {
        /// Path of the record.
        path: PathBuf,
        /// The underlying error.
        source: RecordError,
    },
    /// The parameters of a node are not those of a node.
    #[error("cannot parse the parameters of a node")]
    Parameters(#[from] prost::DecodeError),
    /// There is no cluster in the state folder.
    #[error("no cluster exists; create one with `cargo xtask run`")]
    NoCluster,
    /// The existing cluster does not match the options.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// Another run is active.
    #[error(
        "another `cargo xtask run` is starting a node (process {holder}); wait for it, or interrupt it"
    )]
    Busy {
        /// Its process, as text.
        holder: String,
    },
    /// A machine of the cluster is running.
    #[error(
        "{machine} is already running (QEMU process {pid}); power it off with `cargo xtask stop`"
    )]
    Running {
        /// The machine.
        machine: String,
        /// Process ID of its QEMU.
        pid: i32,
    },
    /// The cluster has no such machine.
    #[error("no machine {name:?}; this cluster has {has}")]
    NoMachine {
        /// The requested name.
        name: String,
        /// The existing machines.
        has: String,
    },
    /// The image and hardware of the machines are not recorded.
    #[error("the image of the machines is not recorded; boot them with `cargo xtask run`")]
    Unmade,
    /// The machine has never been started.
    #[error("{0} has never been started")]
    NeverStarted(String),
    /// The network does not forward a port of a machine, or has no address for it.
    #[error("{machine}: no {what} in the network")]
    Unplugged {
        /// The machine.
        machine: String,
        /// What is missing.
        what: &'static str,
    },
    /// A node did not become HOME.
    #[error(
        "{machine} did not reach HOME: {why}\n\n{words}\nrun `cargo xtask run` again to continue, or with --fresh to start over"
    )]
    NotHome {
        /// The machine.
        machine: String,
        /// The reason.
        why: String,
        /// The last lines of its console, and where all of them are.
        words: String,
    },
    /// A machine ended unexpectedly.
    #[error("{machine} ended: {exit}\n\n{tail}")]
    Ended {
        /// The machine.
        machine: String,
        /// How it ended.
        exit: String,
        /// The last lines of its console.
        tail: String,
    },
    /// Machines did not shut down cleanly; the reason for each.
    #[error("{}", .0.join("\n\n"))]
    Unclean(Vec<String>),
    /// Kubernetes did not become ready.
    #[error("Kubernetes is not ready: {why}\n\n{words}\nrun `cargo xtask run` again to continue")]
    NoKubernetes {
        /// The reason.
        why: String,
        /// The last console lines of the first controller.
        words: String,
    },
    /// The run that has the other machines did not start the requested one.
    #[error(
        "the `cargo xtask run` of the other nodes did not start {machine} within {} s; it accepts requests once its cluster is complete", bound.as_secs()
    )]
    NotStarted {
        /// The machine.
        machine: String,
        /// The timeout.
        bound: Duration,
    },
    /// An operation timed out.
    #[error("no {what} within {bound:?}")]
    Late {
        /// The missing object.
        what: &'static str,
        /// The timeout.
        bound: Duration,
    },
    /// A machine's output or answer was unexpected.
    #[error("expected {wanted}, got {found}\n{tail}")]
    Unexpected {
        /// The expected output or answer.
        wanted: &'static str,
        /// The actual one.
        found: String,
        /// The last lines of the machine's console.
        tail: String,
    },
    /// A call to the cluster failed.
    #[error("{call} failed")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// The returned status.
        source: Box<Status>,
    },
    /// The addresses of the machines lead to nodes of two clusters.
    #[error(transparent)]
    MixedClusters(Box<MixedClusters>),
    /// Taking ownership failed.
    #[error(transparent)]
    Ownership(Box<OwnershipError>),
    /// A file of the owner cannot be used.
    #[error("cannot {step}")]
    OwnerFile {
        /// The step that failed.
        step: &'static str,
        /// The underlying error.
        source: OwnerFileError,
    },
    /// A program's output could not be parsed.
    #[error("{what}")]
    Output {
        /// The whole message, which names the program.
        what: &'static str,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// A file is not the archive of an image.
    #[error("{} is not an OCI layout with an image: no {what}", archive.display())]
    NotAnImage {
        /// The file.
        archive: PathBuf,
        /// What it lacks.
        what: &'static str,
    },
    /// The registry of images does not serve.
    #[error("the registry does not serve; its output is in {}", shown(log).display())]
    Unserved {
        /// Path of its log.
        log: PathBuf,
    },
    /// A program failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A cluster operation failed.
    #[error(transparent)]
    Cluster(Box<ClusterError>),
    /// Machines that were left running cannot be attached to.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A network operation failed.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A machine did not start.
    #[error(transparent)]
    Start(Box<StartError>),
    /// Waiting for a machine timed out.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// A machine's folder cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A disk could not be created.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// No firmware was found.
    #[error(transparent)]
    Firmware(#[from] NoFirmware),
    /// The name of a fw_cfg item is invalid.
    #[error(transparent)]
    FwCfg(#[from] NameError),
    /// The requested accelerator is not usable.
    #[error("--accel")]
    Accel(#[from] AccelError),
    /// A process cannot be waited for, or killed.
    #[error("cannot {step}")]
    Process {
        /// The step that failed.
        step: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
}

impl LabError {
    /// Makes an error of a file operation, for `map_err`.
    pub(crate) fn file(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LabError {
        let path = path.to_owned();
        move |source| LabError::File { step, path, source }
    }

    /// Makes an error of a call, for `map_err`.
    pub(crate) fn call(call: &'static str) -> impl FnOnce(Status) -> LabError {
        move |status| LabError::Call {
            call,
            source: Box::new(status),
        }
    }

    /// Makes an error of a process operation, for `map_err`.
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

impl From<MixedClusters> for LabError {
    fn from(error: MixedClusters) -> LabError {
        LabError::MixedClusters(Box::new(error))
    }
}

impl From<OwnershipError> for LabError {
    fn from(error: OwnershipError) -> LabError {
        LabError::Ownership(Box::new(error))
    }
}

/// A path for display: relative if it is below the current folder.
pub(crate) fn shown(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    let short = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    short.unwrap_or_else(|| path.to_owned())
}
