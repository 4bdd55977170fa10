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
mod wait;

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    process::{Child, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hearth_process::{
    process::{Identity, Process},
    spawn,
};
use serde_json::Value;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

pub use exit::{Cause, Exit};
pub use wait::{Tail, WaitError, Why};

pub use crate::control::Shutdown;
use crate::{
    command::{Boot, Machine, MachineError, QEMU, Sockets},
    console::{self, Console},
    control,
    fw_cfg::Content,
    network::{self, Forwarded, Link},
    qmp::{Qmp, QmpError},
    run_dir::{RunDir, RunDirError},
};
pub use hearth_process::{process::Usage, spawn::Lifetime};

/// After its end is noticed: how long the rest of what QEMU said may take to
/// arrive. It is all in buffers already.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// How often QEMU is asked for what it does not tell.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// A machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It cannot be such a machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Its folder cannot be used.
    #[error("machine {machine:?}: {source}")]
    RunDir {
        /// The machine.
        machine: String,
        /// Which step failed.
        source: RunDirError,
    },
    /// A port that it should have on the host belongs to somebody else.
    #[error(
        "machine {machine:?}: port {port} of this host is taken; choose another, or 0 for any that is free"
    )]
    PortTaken {
        /// The machine.
        machine: String,
        /// The port.
        port: u16,
    },
    /// A card should be plugged into a switch that does not run. QEMU itself
    /// would start, and never try again.
    #[error("machine {machine:?}: nothing listens at {socket}; the switch must run first")]
    NoSwitch {
        /// The machine.
        machine: String,
        /// Where the switch should be.
        socket: PathBuf,
    },
    /// QEMU is not there, or may not run.
    #[error("machine {machine:?}: {QEMU} does not start (package qemu-system-x86): {source}")]
    Spawn {
        /// The machine.
        machine: String,
        /// What the system said.
        source: io::Error,
    },
    /// QEMU did not like what it was told.
    #[error("machine {machine:?}: QEMU ended at once ({status}); its words ({}):\n{words}", log.display())]
    Ended {
        /// The machine.
        machine: String,
        /// How it ended.
        status: String,
        /// The end of its log.
        words: String,
        /// Where all of it is.
        log: PathBuf,
    },
    /// QEMU runs and does not speak as it should.
    #[error("machine {machine:?}: {source}")]
    Qmp {
        /// The machine.
        machine: String,
        /// What is wrong.
        source: QmpError,
    },
    /// The process or its console cannot be watched.
    #[error("machine {machine:?}: cannot {step}: {source}")]
    Watch {
        /// The machine.
        machine: String,
        /// What failed.
        step: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// A machine cannot be left running.
#[derive(Debug, thiserror::Error)]
#[error(
    "machine {0:?} was started tied to this process; only a detachable one can be left running"
)]
pub struct Tied(String);

/// The QEMU process; shared by the handle and the task that waits for its end.
#[derive(Debug)]
struct Running {
    process: Process,
    child: Mutex<Child>,
    /// Set before we kill it, so that its death is known to be ours.
    cut: AtomicBool,
}

impl Running {
    fn kill(&self) -> io::Result<()> {
        self.cut.store(true, Ordering::SeqCst);
        self.process.kill()
    }

    /// Takes its exit status, if it has ended. May be asked again.
    fn reap(&self) -> io::Result<Option<ExitStatus>> {
        self.child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .try_wait()
    }
}

/// Kills the process when it goes, and waits until it is gone.
#[derive(Debug)]
struct KillOnDrop(Option<Arc<Running>>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let Some(running) = &self.0 else { return };
        if let Err(error) = running.kill() {
            tracing::warn!(%error, "cannot kill QEMU");
        }
        // Some milliseconds, in which this thread does nothing else: only
        // when it is gone are its disks and ports free again.
        if running.process.ended_within(LAST_WORDS) {
            let _ = running.reap();
        }
    }
}

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
        let name = machine.name.clone();
        let watch_error = |step| {
            let machine = name.clone();
            move |source| StartError::Watch {
                machine,
                step,
                source,
            }
        };
        let folder_error = |source| StartError::RunDir {
            machine: name.clone(),
            source,
        };
        // For the script; and a machine that cannot be is found out before
        // anything is written.
        let by_hand = machine.command(run_dir, Sockets::Made)?;
        check_ports(machine)?;
        prepare(machine, run_dir).map_err(folder_error)?;
        run_dir
            .write_script(&by_hand.to_script())
            .map_err(folder_error)?;

        let started = Instant::now();
        let guard = spawn_qemu(machine, run_dir, lifetime).await?;
        let Some(running) = guard.0.clone() else {
            unreachable!("a new process is guarded");
        };
        let qmp = match shake_hands(run_dir, started).await {
            Ok(qmp) => qmp,
            Err(error) => return Err(not_up(&name, run_dir, &running, error).await),
        };
        let qmp_error = |source| StartError::Qmp {
            machine: name.clone(),
            source,
        };
        if let Some(socket) = not_plugged(machine, &qmp).await.map_err(qmp_error)? {
            return Err(StartError::NoSwitch {
                machine: name,
                socket,
            });
        }
        let forwards = forwards(machine, &qmp).await.map_err(qmp_error)?;

        let ended = CancellationToken::new();
        let (console, follower) = console::follow(&run_dir.serial_log(), started, ended.clone())
            .map_err(watch_error("follow the console"))?;
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

/// QEMU would say it too, in its own words and after everything else is done.
fn check_ports(machine: &Machine) -> Result<(), StartError> {
    let taken = machine
        .nics
        .iter()
        .filter_map(|nic| match &nic.link {
            Link::User(user) => Some(&user.forwards),
            Link::Unplugged | Link::Switch { .. } => None,
        })
        .flatten()
        .find(|forward| !network::is_free(forward.host));
    match taken {
        Some(forward) => Err(StartError::PortTaken {
            machine: machine.name.clone(),
            port: forward.host,
        }),
        None => Ok(()),
    }
}

/// Makes the files that QEMU is to find.
fn prepare(machine: &Machine, run_dir: &RunDir) -> Result<(), RunDirError> {
    run_dir.rotate_logs()?;
    if let Boot::Uefi(firmware) = &machine.boot {
        run_dir.make_vars(&firmware.vars)?;
    }
    for (card, nic) in machine.nics.iter().enumerate() {
        if let Link::Switch { socket } = &nic.link {
            run_dir.make_link(card, socket)?;
        }
    }
    for (number, item) in machine.fw_cfg.iter().enumerate() {
        if let Content::Bytes(bytes) = &item.content {
            run_dir
                .folder()
                .write_private(&run_dir.fw_cfg(number), bytes)?;
        }
    }
    Ok(())
}

async fn spawn_qemu(
    machine: &Machine,
    run_dir: &RunDir,
    lifetime: Lifetime,
) -> Result<KillOnDrop, StartError> {
    let folder_error = |source| StartError::RunDir {
        machine: machine.name.clone(),
        source,
    };
    let spawn_error = |source| StartError::Spawn {
        machine: machine.name.clone(),
        source,
    };
    let qmp = run_dir
        .folder()
        .listen(&run_dir.qmp_socket())
        .map_err(folder_error)?;
    let control = run_dir
        .folder()
        .listen(&run_dir.control_socket())
        .map_err(folder_error)?;
    let sockets = Sockets::Inherited {
        qmp: qmp.as_raw_fd(),
        control: control.as_raw_fd(),
    };
    let line = machine.command(run_dir, sockets)?;
    tracing::debug!(target: "hearth_qemu::command", "{line}");

    let log = File::options()
        .append(true)
        .open(run_dir.qemu_log())
        .map_err(spawn_error)?;
    let mut command = line.to_std();
    command
        .current_dir(run_dir.path())
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(spawn_error)?)
        .stderr(log);
    // Ours are closed with the command: then the death of QEMU before it has
    // taken the connection ends the connection, too.
    let inherited: Arc<[OwnedFd]> = Arc::from([OwnedFd::from(qmp), OwnedFd::from(control)]);
    let mut child = spawn::spawn(command, lifetime, inherited)
        .await
        .map_err(spawn_error)?;
    match Process::of_child(child.id()) {
        Ok(process) => Ok(KillOnDrop(Some(Arc::new(Running {
            process,
            child: Mutex::new(child),
            cut: AtomicBool::new(false),
        })))),
        Err(source) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(spawn_error(source))
        }
    }
}

async fn shake_hands(run_dir: &RunDir, started: Instant) -> Result<Qmp, QmpError> {
    let stream = run_dir.folder().connect(&run_dir.qmp_socket()).await?;
    Qmp::handshake(stream, &run_dir.qmp_log(), started).await
}

/// Why QEMU did not come up: mostly because it ended, and its log says why.
async fn not_up(name: &str, run_dir: &RunDir, running: &Running, source: QmpError) -> StartError {
    let ended = timeout(LAST_WORDS, running.process.ended()).await.is_ok();
    match running.reap() {
        Ok(Some(status)) if ended => StartError::Ended {
            machine: name.to_owned(),
            status: status.to_string(),
            words: wait::end_of(&run_dir.qemu_log()),
            log: run_dir.qemu_log(),
        },
        _ => StartError::Qmp {
            machine: name.to_owned(),
            source,
        },
    }
}

/// Asks QEMU where it has put the ports.
async fn forwards(machine: &Machine, qmp: &Qmp) -> Result<Vec<Forwarded>, QmpError> {
    let user = |link: &Link| matches!(link, Link::User(user) if !user.forwards.is_empty());
    if !machine.nics.iter().any(|nic| user(&nic.link)) {
        return Ok(Vec::new());
    }
    Ok(network::parse_usernet(&qmp.human("info usernet").await?))
}

/// The first switch that a card could not be plugged into, if there is one.
async fn not_plugged(machine: &Machine, qmp: &Qmp) -> Result<Option<PathBuf>, QmpError> {
    for (card, nic) in machine.nics.iter().enumerate() {
        let Link::Switch { socket } = &nic.link else {
            continue;
        };
        let plugged = async {
            loop {
                let text = qmp.human("info network").await?;
                match network::parse_plugged(&text, card) {
                    Some(plugged) => return Ok::<_, QmpError>(plugged),
                    // Under way; QEMU tells of a success by an event, and of a
                    // failure not at all.
                    None => sleep(ASK_AGAIN).await,
                }
            }
        };
        // A socket of this host is there at once or never.
        if !timeout(LAST_WORDS, plugged).await.unwrap_or(Ok(false))? {
            return Ok(Some(socket.clone()));
        }
    }
    Ok(None)
}

/// Waits for the end and tells how it was, once all that was said before it
/// has been read.
async fn watch_process(
    running: Arc<Running>,
    console: Console,
    qmp: Qmp,
    ended: CancellationToken,
    started: Instant,
    exit: watch::Sender<Option<Exit>>,
) {
    if let Err(error) = running.process.ended().await {
        // Readers of `exit` see that nobody watches any more.
        tracing::error!(%error, "cannot wait for QEMU");
        return;
    }
    let at = started.elapsed();
    ended.cancel();
    let read = async { tokio::join!(console.ended(), qmp.ended()) };
    if timeout(LAST_WORDS, read).await.is_err() {
        tracing::warn!("not all that QEMU said has been read");
    }
    match running.reap() {
        Ok(Some(status)) => {
            let cut = running.cut.load(Ordering::SeqCst);
            let cause = Cause::of(status, cut, &qmp.last_events());
            exit.send_replace(Some(Exit { cause, status, at }));
        }
        Ok(None) => tracing::error!("QEMU has ended and left no status"),
        Err(error) => tracing::error!(%error, "cannot wait for QEMU"),
    }
}
