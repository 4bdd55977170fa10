//! The process: one thread with a task for each source of events.
//!
//! The tasks share the state without locks, since none of them holds it while it waits. All tasks are in one set; the
//! process ends with the set, and a task that panics ends the process with an error, instead of leaving a network with
//! a part missing.

mod forwards;
mod links;
mod orders;
mod way_out;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinError, JoinSet, LocalSet};
use tokio::time::{sleep, sleep_until};

use super::capture::Capture;
use super::fabric::Fabric;
use super::gateway::Gateway;
use super::{MASK6, NetworkOptions};
use crate::way_out::Policy;
use crate::wire::Clock;
use crate::{Mac, PortForward};
use way_out::Sockets;

const CAPTURE: &str = "capture.pcap";

/// Maximum time until a frame is in the capture's file.
const FLUSH: Duration = Duration::from_millis(500);

/// Delay after a failed accept.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The process failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It was not started in the way of [`super::Network::start`].
    #[error("usage: hearth-switch DIR OPTIONS, with a listening socket as standard input")]
    Arguments,
    /// Its options are malformed.
    #[error("options: {0}")]
    Options(#[from] serde_json::Error),
    /// An option is invalid.
    #[error("options: {field}: expected {wanted}, got {found}")]
    Option {
        /// Name of the field.
        field: &'static str,
        /// Actual value.
        found: String,
        /// Valid values.
        wanted: &'static str,
    },
    /// A system call failed.
    #[error("cannot {step}: {source}")]
    System {
        /// The step that failed.
        step: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// A task panicked.
    #[error("a task failed: {0}")]
    Task(#[from] JoinError),
}

impl ServeError {
    fn system(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { step, source }
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// A port, as shown to clients.
struct Entry {
    name: String,
    mac: Mac,
    address: Ipv4Addr,
    socket: PathBuf,
    forwards: Vec<PortForward>,
}

/// A machine, by the index of its port.
#[derive(Clone, Copy, Debug)]
struct Machine {
    port: usize,
    mac: Mac,
}

/// The whole state. Borrowed for a moment at a time, never across an await.
struct Shared {
    dir: PathBuf,
    options: NetworkOptions,
    seed: u64,
    clock: Clock,
    fabric: RefCell<Fabric>,
    gateway: RefCell<Gateway>,
    /// Slots for forwarded connections.
    places: Arc<Semaphore>,
    /// The sockets of the way out, if there is one.
    sockets: Option<Sockets>,
    entries: RefCell<Vec<Entry>>,
    /// The host addresses of ports of shared addresses.
    shared_forwards: RefCell<BTreeMap<(Ipv4Addr, u16), SocketAddr>>,
    tasks: mpsc::UnboundedSender<Task>,
    stop: Notify,
}

impl Shared {
    /// Adds a task to the set.
    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // Refused only when the process ends.
        let _ = self.tasks.send(Box::pin(task));
    }

    /// The machine with this Ethernet address.
    fn machine(&self, mac: Mac) -> Option<Machine> {
        let entries = self.entries.borrow();
        let port = entries.iter().position(|entry| entry.mac == mac)?;
        Some(Machine { port, mac })
    }

    /// The machine that has said last that it has this shared address.
    fn holder(&self, address: Ipv4Addr) -> Option<Machine> {
        let mac = self.gateway.borrow().holder(address)?;
        self.machine(Mac(mac))
    }
}

/// Runs a network until it is stopped. `args`: its folder, and its options as JSON; standard input is the listening
/// control socket.
///
/// # Errors
/// If it cannot run.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Result<(), ServeError> {
    let mut args = args.into_iter();
    let (Some(dir), Some(options), None) = (args.next(), args.next(), args.next()) else {
        return Err(ServeError::Arguments);
    };
    let options: NetworkOptions = serde_json::from_slice(options.as_encoded_bytes())?;
    check(&options)?;
    raise_limit().map_err(ServeError::system("raise the limit of open files"))?;
    let control = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map(StdUnixListener::from)
        .map_err(ServeError::system("take the control socket"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ServeError::system("start the runtime"))?;
    LocalSet::new().block_on(&runtime, serve(Path::new(&dir), options, control))
}

fn check(options: &NetworkOptions) -> Result<(), ServeError> {
    let refuse = |field, found: String, wanted| {
        Err(ServeError::Option {
            field,
            found,
            wanted,
        })
    };
    if !(8..=30).contains(&options.prefix) {
        return refuse("prefix", options.prefix.to_string(), "8 to 30");
    }
    let mask = options.mask();
    let host = u32::from(options.gateway) & !mask;
    if host == 0 || host == !mask {
        return refuse(
            "gateway",
            options.gateway.to_string(),
            "a host address in its subnet",
        );
    }
    if !options.gateway6.is_unique_local() || options.gateway6.to_bits() & !MASK6 == 0 {
        return refuse(
            "gateway6",
            options.gateway6.to_string(),
            "a host address in a unique local prefix (fc00::/7)",
        );
    }
    if options.lease.as_secs() < 2 || options.lease.as_secs() > u64::from(u32::MAX) {
        return refuse("lease", format!("{:?}", options.lease), "at least 2 s");
    }
    if let Some(way_out) = &options.way_out
        && let Some(alias) = Policy::new(options, way_out).bad_alias()
    {
        return refuse(
            "way_out.aliases",
            alias.to_string(),
            "addresses that are neither in the subnet nor loopback, link-local, multicast or reserved",
        );
    }
    Ok(())
}

/// Every forwarded connection is an open file, and the usual limit of a thousand is for programs that use select(2).
fn raise_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}

async fn serve(
    dir: &Path,
    options: NetworkOptions,
    control: StdUnixListener,
) -> Result<(), ServeError> {
    control
        .set_nonblocking(true)
        .map_err(ServeError::system("take the control socket"))?;
    let control =
        UnixListener::from_std(control).map_err(ServeError::system("take the control socket"))?;
    let capture = match options.capture_limit {
        0 => None,
        limit => Some(
            Capture::create(&dir.join(CAPTURE), limit)
                .map_err(ServeError::system("create the capture"))?,
        ),
    };
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    tracing::info!(gateway = %options.gateway, prefix = options.prefix, seed, "network started");
    let (tasks, mut new_tasks) = mpsc::unbounded_channel();
    let clock = Clock::start();
    let shared = Rc::new(Shared {
        dir: dir.to_owned(),
        clock,
        gateway: RefCell::new(Gateway::new(&options, clock)),
        places: Arc::new(Semaphore::new(forwards::MOST)),
        sockets: options.way_out.as_ref().map(Sockets::new),
        options,
        seed,
        fabric: RefCell::new(Fabric::new(seed, capture)),
        entries: RefCell::default(),
        shared_forwards: RefCell::default(),
        tasks,
        stop: Notify::new(),
    });
    shared.spawn(due_frames(shared.clone()));
    shared.spawn(flush_capture(shared.clone()));
    shared.spawn(serve_gateway(shared.clone()));
    shared.spawn(orders::take_orders(shared.clone(), control));

    let mut terminate =
        signal(SignalKind::terminate()).map_err(ServeError::system("wait for signals"))?;
    let mut running = JoinSet::new();
    let end = loop {
        tokio::select! {
            Some(task) = new_tasks.recv() => {
                running.spawn_local(task);
            }
            Some(ended) = running.join_next() => {
                if let Err(failed) = ended {
                    break Err(failed.into());
                }
            }
            () = shared.stop.notified() => break Ok(()),
            _ = terminate.recv() => break Ok(()),
        }
    };
    running.shutdown().await;
    let mut fabric = shared.fabric.borrow_mut();
    if let Some(capture) = fabric.capture() {
        capture.flush();
        let status = capture.status();
        tracing::info!(
            frames = status.frames,
            dropped = status.dropped,
            "capture complete"
        );
    }
    tracing::info!("stopped");
    end
}

/// Sends frames that are late, or that the switch sends by itself, when they are due.
async fn due_frames(shared: Rc<Shared>) {
    let sooner = shared.fabric.borrow().sooner.clone();
    loop {
        let now = Instant::now();
        let next = shared.fabric.borrow_mut().go_on(now);
        match next {
            None => sooner.notified().await,
            Some(next) => tokio::select! {
                () = sooner.notified() => {}
                () = sleep_until(next.into()) => {}
            },
        }
    }
}

/// Passes frames to the gateway.
async fn serve_gateway(shared: Rc<Shared>) {
    let waiting = shared.fabric.borrow().for_gateway.clone();
    let mut replies = Vec::new();
    loop {
        let frame = shared.fabric.borrow_mut().take_for_gateway();
        let Some(frame) = frame else {
            waiting.notified().await;
            continue;
        };
        let now = Instant::now();
        let outgoing = shared.gateway.borrow_mut().take(frame, now, &mut replies);
        if let Some(outgoing) = outgoing {
            way_out::act(&shared, outgoing);
        }
        let mut fabric = shared.fabric.borrow_mut();
        for reply in replies.drain(..) {
            fabric.take_from_gateway(&reply, now);
        }
    }
}

/// So that the capture of a running network is up to date.
async fn flush_capture(shared: Rc<Shared>) {
    loop {
        sleep(FLUSH).await;
        match shared.fabric.borrow_mut().capture() {
            Some(capture) => capture.flush(),
            None => return,
        }
    }
}
