//! A running machine.
//!
//! [`Vm::start`] returns a handle to one QEMU process. Dropping the handle ends the process; when the drop returns,
//! QEMU has ended and released its disks, so the same machine can be started again at once. If this whole process dies,
//! for any reason, the kernel ends QEMU (see [`Lifetime`]).
//!
//! A power cut is [`Vm::power_cut`] and another [`Vm::start`] with the same machine and folder.

mod cable;
mod disk_fault;
mod exit;
mod running;
mod screen;
mod start;
mod wait;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_process::process::Identity;
pub use hearth_process::process::Usage;
pub use hearth_process::spawn::Lifetime;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::command::Machine;
use crate::console::{self, Console};
use crate::control;
pub use crate::control::Shutdown;
use crate::keyboard::Keyboard;
use crate::network::PortForward;
use crate::qmp::{Qmp, QmpError};
use crate::run_dir::{RunDir, RunDirError};
pub use disk_fault::DiskFault;
pub use exit::{Cause, Exit};
use running::{KillOnDrop, Running, watch_process};
pub use start::StartError;
use start::Up;
pub use wait::{Tail, WaitError, Why};

/// A machine cannot be left running.
#[derive(Debug, thiserror::Error)]
#[error(
    "machine {0:?} was started as part of this process; only a detachable machine can be left running"
)]
pub struct NotDetachable(String);

/// A running machine.
#[derive(Debug)]
pub struct Vm {
    name: String,
    run_dir: RunDir,
    lifetime: Lifetime,
    // Dropped in this order: first the process, then the tasks that watch it.
    guard: KillOnDrop,
    running: Arc<Running>,
    console: Console,
    qmp: Qmp,
    exit: watch::Receiver<Option<Exit>>,
    forwards: Vec<PortForward>,
    started: Instant,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Vm {
    /// Starts a machine with its files in `run_dir`. When this returns, QEMU is running, its network is up and the
    /// first instruction of the firmware may have been executed.
    ///
    /// # Errors
    /// If the machine does not start; then nothing is left running.
    pub async fn start(
        machine: &Machine,
        run_dir: &RunDir,
        lifetime: Lifetime,
    ) -> Result<Self, StartError> {
        let Up {
            guard,
            running,
            qmp,
            forwards,
            started,
        } = start::bring_up(machine, run_dir, lifetime).await?;
        let ended = CancellationToken::new();
        let (console, follower) = console::follow(&run_dir.serial_log(), started, ended.clone())
            .map_err(|source| StartError::Watch {
                machine: machine.name.clone(),
                step: "follow the console",
                source,
            })?;
        let (exit_in, exit) = watch::channel(None);
        let watcher = watch_process(
            running.clone(),
            console.clone(),
            qmp.clone(),
            ended,
            started,
            exit_in,
        );
        Ok(Self {
            name: machine.name.clone(),
            run_dir: run_dir.clone(),
            lifetime,
            guard,
            running,
            console,
            qmp,
            exit,
            forwards,
            started,
            _tasks: [
                AbortOnDropHandle::new(tokio::spawn(follower)),
                AbortOnDropHandle::new(tokio::spawn(watcher)),
            ],
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

    /// Connects to its console, for typing. There can be one such connection at a time.
    ///
    /// # Errors
    /// If QEMU does not accept it.
    pub async fn keyboard(&self) -> Result<Keyboard, RunDirError> {
        let socket = self.run_dir.console_socket();
        let console = self.run_dir.folder().connect(&socket).await?;
        Ok(Keyboard::of(console))
    }

    /// Its console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Its QMP connection.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Its ports that are forwarded to the host.
    pub fn forwards(&self) -> &[PortForward] {
        &self.forwards
    }

    /// Adds ports that another process than QEMU forwards to the host.
    pub(crate) fn add_forwards(&mut self, forwards: &[PortForward]) {
        self.forwards.extend_from_slice(forwards);
    }

    /// The host address of this port of the guest.
    pub fn forwarded(&self, guest: u16) -> Option<std::net::SocketAddr> {
        self.forwards
            .iter()
            .find(|forwarded| forwarded.guest == guest)
            .map(|forwarded| forwarded.host)
    }

    /// When QEMU was started; times of console lines and events count from here.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// QEMU's process ID.
    pub fn pid(&self) -> i32 {
        self.running.process.pid()
    }

    /// The identity of QEMU's process, which other processes can find it by.
    ///
    /// # Errors
    /// If it has ended.
    pub fn identity(&self) -> io::Result<Identity> {
        self.running.process.identity()
    }

    /// QEMU's resource usage so far.
    ///
    /// # Errors
    /// If it has ended.
    pub fn usage(&self) -> io::Result<Usage> {
        self.running.process.usage()
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        self.exit.borrow().clone()
    }

    /// Pauses the machine; its clock stops.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn pause(&self) -> Result<(), QmpError> {
        self.qmp.execute("stop", Value::Null).await.map(drop)
    }

    /// Resumes the machine.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn resume(&self) -> Result<(), QmpError> {
        self.qmp.execute("cont", Value::Null).await.map(drop)
    }

    /// Presses its reset button.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn reset(&self) -> Result<(), QmpError> {
        self.qmp
            .execute("system_reset", Value::Null)
            .await
            .map(drop)
    }

    /// Cuts its power. When this returns, QEMU has ended; what the guest had written and QEMU accepted is in the disk's
    /// file.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub async fn power_cut(&self) -> io::Result<Exit> {
        self.running.kill()?;
        ended(self.exit.clone()).await
    }

    /// Presses its power button and waits until it is off, for at most
    /// `bound`; then ends it forcibly. The future does not borrow the handle, so that many machines can be shut down at
    /// once.
    ///
    /// # Errors
    /// If the process cannot be waited for or killed.
    pub fn shutdown(
        &self,
        bound: Duration,
    ) -> impl Future<Output = io::Result<(Shutdown, Exit)>> + Send + use<> {
        let (qmp, running, exit) = (self.qmp.clone(), self.running.clone(), self.exit.clone());
        async move {
            let shutdown = control::shut_down(&qmp, &running.process, bound).await?;
            Ok((shutdown, ended(exit).await?))
        }
    }

    /// Leaves the machine running without this process. It can be found by [`Self::identity`] and its folder.
    ///
    /// # Errors
    /// If it was not started as detachable. It is then killed, as by any drop.
    pub fn detach(mut self) -> Result<(), NotDetachable> {
        if self.lifetime != Lifetime::Detachable {
            return Err(NotDetachable(self.name.clone()));
        }
        self.guard.0 = None;
        Ok(())
    }
}

/// Waits for the end, without a bound.
async fn ended(mut exit: watch::Receiver<Option<Exit>>) -> io::Result<Exit> {
    let ended = exit.wait_for(Option::is_some).await;
    ended
        .ok()
        .and_then(|exit| exit.clone())
        .ok_or_else(|| io::Error::other("the process is no longer watched"))
}
