//! A machine that another process has started.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hearth_process::process::{Process, Usage};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::{ClusterError, Record, find, records};
use crate::console::{self, Console};
use crate::control::{self, Shutdown};
use crate::network::PortForward;
use crate::qmp::{Qmp, QmpError};
use crate::run_dir::RunDir;

/// A running machine, whoever started it. Dropping the handle does not affect the machine.
#[derive(Debug)]
pub struct Attached {
    name: String,
    run_dir: RunDir,
    process: std::sync::Arc<Process>,
    qmp: Qmp,
    console: Console,
    forwards: Vec<PortForward>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

/// A running machine cannot be attached to.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The cluster cannot be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// QEMU does not answer.
    #[error("machine {machine:?} (process {pid}) does not answer: {source}")]
    Qmp {
        /// Name of the machine.
        machine: String,
        /// Process ID of its QEMU.
        pid: i32,
        /// The underlying error.
        source: QmpError,
    },
    /// Its process or console cannot be watched.
    #[error("machine {machine:?}: cannot {step}: {source}")]
    Watch {
        /// Name of the machine.
        machine: String,
        /// The step that failed.
        step: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
}

/// The running machines of the cluster in this folder, sorted by name. Empty if there is no such folder.
///
/// # Errors
/// If the cluster cannot be read, or one of its machines does not answer.
pub async fn attach(state: &Path) -> Result<Vec<Attached>, AttachError> {
    let mut machines = Vec::new();
    for (name, record) in records(state)? {
        if let Some(process) = find(&record)? {
            machines.push(Attached::new(state, name, record, process).await?);
        }
    }
    Ok(machines)
}

impl Attached {
    async fn new(
        state: &Path,
        name: String,
        record: Record,
        process: Process,
    ) -> Result<Self, AttachError> {
        let watch_error = |step| {
            let machine = name.clone();
            move |source| AttachError::Watch {
                machine,
                step,
                source,
            }
        };
        let run_dir = RunDir::open(state.join(&name)).map_err(ClusterError::from)?;
        let started = process
            .started()
            .map_err(watch_error("read its start time"))?;
        // Not the launcher's socket, which serves one client at a time, and not the launcher's log.
        let connected = async {
            let stream = run_dir.folder().connect(&run_dir.control_socket()).await?;
            Qmp::handshake(stream, &run_dir.file("control.log"), started).await
        };
        let qmp = connected.await.map_err(|source| AttachError::Qmp {
            machine: name.clone(),
            pid: process.pid(),
            source,
        })?;
        let ended = CancellationToken::new();
        let (console, follower) = console::follow(&run_dir.serial_log(), started, ended.clone())
            .map_err(watch_error("follow the console"))?;
        let process = std::sync::Arc::new(process);
        let watched = process.clone();
        let watcher = async move {
            if let Err(error) = watched.ended().await {
                tracing::error!(%error, "cannot wait for QEMU");
            }
            ended.cancel();
        };
        Ok(Self {
            run_dir,
            process,
            qmp,
            console,
            forwards: record.forwards,
            _tasks: [
                AbortOnDropHandle::new(tokio::spawn(follower)),
                AbortOnDropHandle::new(tokio::spawn(watcher)),
            ],
            name,
        })
    }

    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its folder.
    pub fn run_dir(&self) -> &RunDir {
        &self.run_dir
    }

    /// QEMU's process ID.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its QMP connection.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Its console, from the machine's start; lines from before this handle have the time of its creation.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Its ports that are forwarded to the host.
    pub fn forwards(&self) -> &[PortForward] {
        &self.forwards
    }

    /// The host address of this port of the guest.
    pub fn forwarded(&self, guest: u16) -> Option<SocketAddr> {
        self.forwards
            .iter()
            .find(|forwarded| forwarded.guest == guest)
            .map(|forwarded| forwarded.host)
    }

    /// QEMU's resource usage so far.
    ///
    /// # Errors
    /// If it has ended.
    pub fn usage(&self) -> io::Result<Usage> {
        self.process.usage()
    }

    /// Presses its power button and waits until it is off, for at most
    /// `bound`; then ends it forcibly.
    ///
    /// # Errors
    /// If the process cannot be waited for or killed.
    pub async fn shutdown(&self, bound: Duration) -> io::Result<Shutdown> {
        control::shut_down(&self.qmp, &self.process, bound).await
    }

    /// Cuts its power. When this returns, QEMU has ended.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub async fn power_cut(&self) -> io::Result<()> {
        self.process.kill()?;
        self.process.ended().await
    }
}
