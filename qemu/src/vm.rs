//! A running machine.
//!
//! [`Vm::start`] gives a handle to one QEMU process. Dropping the handle ends
//! the process, and when the drop returns it is gone and has let go of its
//! disks, so the same machine can be started again at once. Should this whole
//! process die, of whatever, the kernel ends QEMU (see [`Lifetime`]).
//!
//! A power cut is [`Vm::power_cut`] and another [`Vm::start`] with the same
//! machine and folder.

mod exit;
mod running;
mod start;
mod wait;

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use hearth_process::process::Identity;
pub use hearth_process::{process::Usage, spawn::Lifetime};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

pub use crate::control::Shutdown;
use crate::{
    command::Machine,
    console::{self, Console},
    control,
    network::Forwarded,
    qmp::{Qmp, QmpError},
    run_dir::RunDir,
};
pub use exit::{Cause, Exit};
use running::{KillOnDrop, Running, watch_process};
pub use start::StartError;
use start::Up;
pub use wait::{Tail, WaitError, Why};

/// A machine cannot be left running.
#[derive(Debug, thiserror::Error)]
#[error(
    "machine {0:?} was started tied to this process; only a detachable one can be left running"
)]
pub struct Tied(String);

/// A running machine.
#[derive(Debug)]
pub struct Vm {
    name: String,
    run_dir: RunDir,
    lifetime: Lifetime,
    // Dropped in this order: first the process, then those who watch it.
    guard: KillOnDrop,
    running: Arc<Running>,
    console: Console,
    qmp: Qmp,
    exit: watch::Receiver<Option<Exit>>,
    forwards: Vec<Forwarded>,
    started: Instant,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl Vm {
    /// Starts a machine with its files in `run_dir`. When this returns, QEMU
    /// runs, its network is up and the first instruction of the firmware may
    /// have been executed.
    ///
    /// # Errors
    /// Whatever keeps it from that; then nothing is left running.
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

    /// Its console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Its QMP connection.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Its ports as they are found on the host.
    pub fn forwards(&self) -> &[Forwarded] {
        &self.forwards
    }

    /// Ports that somebody else than QEMU brings to the host.
    pub(crate) fn add_forwards(&mut self, forwards: &[Forwarded]) {
        self.forwards.extend_from_slice(forwards);
    }

    /// Where this port of the guest is found on the host.
    pub fn forwarded(&self, guest: u16) -> Option<std::net::SocketAddr> {
        self.forwards
            .iter()
            .find(|forwarded| forwarded.guest == guest)
            .map(|forwarded| forwarded.host)
    }

    /// When QEMU was started; console lines and events are dated from here.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// QEMU's process number.
    pub fn pid(&self) -> i32 {
        self.running.process.pid()
    }

    /// What tells QEMU's process from all others, later and elsewhere.
    ///
    /// # Errors
    /// If it has ended.
    pub fn identity(&self) -> io::Result<Identity> {
        self.running.process.identity()
    }

    /// What QEMU has used so far.
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

    /// Halts the machine between two instructions; its clock stands still.
    ///
    /// # Errors
    /// If QEMU does not do it.
    pub async fn pause(&self) -> Result<(), QmpError> {
        self.qmp.execute("stop", Value::Null).await.map(drop)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If QEMU does not do it.
    pub async fn resume(&self) -> Result<(), QmpError> {
        self.qmp.execute("cont", Value::Null).await.map(drop)
    }

    /// Presses its reset button.
    ///
    /// # Errors
    /// If QEMU does not do it.
    pub async fn reset(&self) -> Result<(), QmpError> {
        self.qmp
            .execute("system_reset", Value::Null)
            .await
            .map(drop)
    }

    /// Pulls its plug. When this returns, QEMU is gone; what the guest had
    /// written and QEMU taken is in the disk's file.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub async fn power_cut(&self) -> io::Result<Exit> {
        self.running.kill()?;
        ended(self.exit.clone()).await
    }

    /// Presses its power button and waits until it is down, for at most
    /// `bound`; then ends it less gently. The future does not borrow the
    /// handle, so that many machines can be shut down at once.
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

    /// Lets the machine go on without this process. It is found again by
    /// [`Self::identity`] and its folder.
    ///
    /// # Errors
    /// If it was not started for that. It is then killed, as by any drop.
    pub fn detach(mut self) -> Result<(), Tied> {
        if self.lifetime != Lifetime::Detachable {
            return Err(Tied(self.name.clone()));
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
