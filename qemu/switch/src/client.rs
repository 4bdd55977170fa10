//! The handle to a network's process.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hearth_process::folder::{Folder, FolderError};
use hearth_process::process::{Identity, Process};
use hearth_process::spawn::{self, Lifetime};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::time::timeout;

use super::control::{Answer, MAX_ANSWER, Reply, Request};
use super::{Faults, NetworkOptions, NetworkStatus, Port, Refusal};
use crate::Mac;

/// Name of the control socket in the network's folder.
const CONTROL: &str = "control.sock";
/// Name of the record of the process.
const RECORD: &str = "network.json";
/// Name of the log.
const LOG: &str = "switch.log";

/// Bound for an answer. The process answers at once; on a host with many busy machines it takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bound for the process to end.
const END: Duration = Duration::from_secs(10);

/// After a broken conversation: bound for the end of the process to be noticed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Number of bytes of the log that an error shows.
const WORDS: usize = 2000;

/// A network operation failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// Its folder cannot be used.
    #[error("network: {0}")]
    Folder(#[from] FolderError),
    /// A file operation failed.
    #[error("network: cannot {step} {path}: {source}")]
    File {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// Its record has another format.
    #[error("network: cannot parse {path} ({source}); remove it to start over")]
    Record {
        /// Path of the record.
        path: PathBuf,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// The network of this folder is running.
    #[error("network {dir} is already running as process {pid}; stop it first")]
    Running {
        /// Its folder.
        dir: PathBuf,
        /// Its process ID.
        pid: i32,
    },
    /// No network is running in this folder.
    #[error("no network is running in {0}")]
    NotRunning(PathBuf),
    /// Its process did not start.
    #[error("network: cannot start {binary}: {source}")]
    Spawn {
        /// Path of the program.
        binary: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// Its process has ended.
    #[error("network: the process has ended; its output ({log}):\n{words}")]
    Ended {
        /// The end of its log.
        words: String,
        /// Path of the log.
        log: PathBuf,
    },
    /// There was no answer in time.
    #[error("network: no answer to {request} within {after:?}")]
    Timeout {
        /// Name of the request.
        request: &'static str,
        /// The timeout.
        after: Duration,
    },
    /// The conversation failed.
    #[error("network: cannot {step} for {request}: {source}")]
    Control {
        /// Name of the request.
        request: &'static str,
        /// The step that failed.
        step: &'static str,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The process rejected the request.
    #[error("network: {0}")]
    Refused(#[from] Refusal),
    /// It cannot be left running.
    #[error(
        "network {0} was started as part of this process; only a detachable network can be left running"
    )]
    NotDetachable(PathBuf),
}

impl NetworkError {
    fn file(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { step, path, source }
    }
}

/// The record of a running network.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    process: Identity,
}

/// A running network. Dropping the handle of the process that started it ends the network; when the drop returns, it
/// has ended. Handles of others ([`Network::attach`]) do not affect it.
///
/// Every call is a conversation of its own, so a cancelled call leaves nothing behind, and calls may be made
/// concurrently.
#[derive(Debug)]
pub struct Network {
    dir: Folder,
    process: Process,
    started: Option<Started>,
}

/// Held only by the process that started it. On drop, kills the network's process and waits until it has ended.
#[derive(Debug)]
struct Started {
    lifetime: Lifetime,
    process: Process,
    child: Option<Child>,
}

impl Drop for Started {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        if let Err(error) = self.process.kill() {
            tracing::warn!(%error, "cannot kill the network's process");
        }
        // Takes some milliseconds; only then are its ports free again.
        if self.process.ended_within(END) {
            let _ = child.wait();
        }
    }
}

impl Network {
    /// Starts a network with its files in `dir`, by the program
    /// `hearth-switch`, which is at `binary`. When this returns, it answers.
    ///
    /// # Errors
    /// If it does not start; then nothing is left running.
    pub async fn start(
        binary: &Path,
        dir: &Path,
        options: NetworkOptions,
        lifetime: Lifetime,
    ) -> Result<Self, NetworkError> {
        let dir = Folder::create(dir)?;
        if let Some(process) = running(&dir)? {
            return Err(NetworkError::Running {
                dir: dir.path().to_owned(),
                pid: process.pid(),
            });
        }
        let started = spawn_switch(binary, &dir, &options, lifetime).await?;
        let record = started.process.identity();
        let network = Self {
            process: of_child(&started.child, binary)?,
            dir,
            started: Some(started),
        };
        // The first answer: the network is set up.
        network.status().await?;
        let path = network.dir.file(RECORD);
        let record = record.map_err(NetworkError::file("read", Path::new("/proc")))?;
        save(&path, &Record { process: record }).map_err(NetworkError::file("write", &path))?;
        Ok(network)
    }

    /// The network that is running in this folder, whoever started it.
    ///
    /// # Errors
    /// If none is running, or it does not answer.
    pub async fn attach(dir: &Path) -> Result<Self, NetworkError> {
        if !dir.exists() {
            return Err(NetworkError::NotRunning(dir.to_owned()));
        }
        let dir = Folder::open(dir)?;
        let Some(process) = running(&dir)? else {
            return Err(NetworkError::NotRunning(dir.path().to_owned()));
        };
        let network = Self {
            dir,
            process,
            started: None,
        };
        match network.status().await {
            Ok(_) => Ok(network),
            // Another process is ending it at this moment.
            Err(NetworkError::Ended { .. }) => {
                Err(NetworkError::NotRunning(network.dir().to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    /// The absolute path of its folder.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its log.
    pub fn log(&self) -> PathBuf {
        self.dir.file(LOG)
    }

    /// Its process ID.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Creates a port for a machine, or returns the existing one: a port with this name and this Ethernet address is
    /// returned unchanged, with its current address.
    ///
    /// # Errors
    /// If one of the three belongs to another port or is invalid.
    pub async fn add_port(
        &self,
        name: &str,
        mac: Mac,
        address: Ipv4Addr,
    ) -> Result<Port, NetworkError> {
        let name = name.to_owned();
        match self
            .call("add_port", Request::AddPort { name, mac, address })
            .await?
        {
            Reply::Port(port) => Ok(port),
            other => Err(mistaken("add_port", &other)),
        }
    }

    /// The host address of a TCP port of the port's machine, at 127.0.0.1; it stays the same while the network is
    /// running.
    ///
    /// The host's side accepts every connection; its fate in the machine (refused, reset, no answer) shows afterwards.
    /// New connections go to the machine's current address: the one that DHCP leased to it, or the port's if there is
    /// no lease.
    ///
    /// # Errors
    /// If there is no such port.
    pub async fn forward(&self, name: &str, guest_port: u16) -> Result<SocketAddr, NetworkError> {
        let request = Request::Forward {
            name: name.to_owned(),
            guest: guest_port,
        };
        match self.call("forward", request).await? {
            Reply::PortForward(address) => Ok(address),
            other => Err(mistaken("forward", &other)),
        }
    }

    /// The host address of a TCP port of an address of the subnet that machines have in turn, at 127.0.0.1; it stays
    /// the same while the network is running. New connections go to the machine that has said last, by ARP, that it has
    /// the address; if none has, connections wait some seconds for one and are closed.
    ///
    /// # Errors
    /// If no machine can have the address, or it is the own one of a machine.
    pub async fn forward_shared(
        &self,
        address: Ipv4Addr,
        guest_port: u16,
    ) -> Result<SocketAddr, NetworkError> {
        let request = Request::ForwardShared {
            address,
            guest: guest_port,
        };
        match self.call("forward_shared", request).await? {
            Reply::PortForward(host) => Ok(host),
            other => Err(mistaken("forward_shared", &other)),
        }
    }

    /// Replaces the faults of a port's link. Frames in transit are lost when a link is cut.
    ///
    /// # Errors
    /// If there is no such port, or they are invalid.
    pub async fn set_faults(&self, name: &str, faults: Faults) -> Result<(), NetworkError> {
        let name = name.to_owned();
        self.order("set_faults", Request::SetFaults { name, faults })
            .await
    }

    /// The faults of a port's link.
    ///
    /// # Errors
    /// If there is no such port.
    pub async fn faults(&self, name: &str) -> Result<Faults, NetworkError> {
        let status = self.status().await?;
        let port = status.port(name);
        let faults = port.map(|port| port.faults);
        faults.ok_or_else(|| Refusal::NoPort(name.to_owned()).into())
    }

    /// Blocks traffic between two machines, or unblocks it. The gateway, and so the host, still reaches both.
    ///
    /// # Errors
    /// If there are no such two ports.
    pub async fn block(&self, a: &str, b: &str, on: bool) -> Result<(), NetworkError> {
        let (a, b) = (a.to_owned(), b.to_owned());
        self.order("block", Request::Block { a, b, on }).await
    }

    /// Partitions the network: machines of different groups cannot reach each other, all others can, whatever was
    /// blocked before. No groups: the network is whole. The gateway, and so the host, reaches every machine.
    ///
    /// # Errors
    /// If there is no such port, or one is named twice; then nothing is changed.
    pub async fn part(&self, groups: &[&[&str]]) -> Result<(), NetworkError> {
        let owned = |group: &&[&str]| group.iter().map(|&name| name.to_owned()).collect();
        let groups = groups.iter().map(owned).collect();
        self.order("part", Request::Part { groups }).await
    }

    /// Changes the address that DHCP gives a port's machine. The machine notices when it renews its lease, and gets a
    /// NAK.
    ///
    /// # Errors
    /// If there is no such port, or the address is in use or invalid.
    pub async fn set_address(&self, name: &str, address: Ipv4Addr) -> Result<(), NetworkError> {
        let name = name.to_owned();
        self.order("set_address", Request::SetAddress { name, address })
            .await
    }

    /// Makes DHCP answer a port's machine, which is the default, or not. Existing leases remain valid until they
    /// expire.
    ///
    /// # Errors
    /// If there is no such port.
    pub async fn set_dhcp(&self, name: &str, on: bool) -> Result<(), NetworkError> {
        let name = name.to_owned();
        self.order("set_dhcp", Request::SetDhcp { name, on }).await
    }

    /// The status of the network.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn status(&self) -> Result<NetworkStatus, NetworkError> {
        match self.call("status", Request::Status).await? {
            Reply::Status(status) => Ok(*status),
            other => Err(mistaken("status", &other)),
        }
    }

    /// Ends the network, whoever started it. Machines that are connected stay disconnected. When this returns, its
    /// process has ended and the capture is complete.
    ///
    /// # Errors
    /// If the process cannot be waited for or killed.
    pub async fn stop(mut self) -> Result<(), NetworkError> {
        let asked = self.order("stop", Request::Stop).await;
        let ended = timeout(END, self.process.ended()).await;
        if asked.is_err() || ended.is_err() {
            self.process
                .kill()
                .map_err(NetworkError::file("kill", self.dir()))?;
        }
        self.process
            .ended()
            .await
            .map_err(NetworkError::file("wait for", self.dir()))?;
        // Reaps it.
        drop(self.started.take());
        Ok(())
    }

    /// Leaves it running without this process. It can be found by its folder.
    ///
    /// # Errors
    /// If it was not started as detachable. It is then killed, as by any drop.
    pub fn detach(mut self) -> Result<(), NetworkError> {
        if let Some(started) = &mut self.started {
            if started.lifetime != Lifetime::Detachable {
                return Err(NetworkError::NotDetachable(self.dir.path().to_owned()));
            }
            started.child = None;
        }
        Ok(())
    }

    async fn order(&self, name: &'static str, request: Request) -> Result<(), NetworkError> {
        match self.call(name, request).await? {
            Reply::Done => Ok(()),
            other => Err(mistaken(name, &other)),
        }
    }

    async fn call(&self, name: &'static str, request: Request) -> Result<Reply, NetworkError> {
        match timeout(PATIENCE, self.converse(name, &request)).await {
            Ok(Ok(answer)) => Ok(answer?),
            // Usually because it ended, with the reason in its log. Its sockets are closed a moment before it ends.
            Ok(Err(error)) => match timeout(LAST_WORDS, self.process.ended()).await {
                Ok(Ok(())) => Err(self.ended()),
                _ => Err(error),
            },
            Err(_) => Err(NetworkError::Timeout {
                request: name,
                after: PATIENCE,
            }),
        }
    }

    async fn converse(
        &self,
        name: &'static str,
        request: &Request,
    ) -> Result<Answer, NetworkError> {
        let failed = |step| {
            move |source| NetworkError::Control {
                request: name,
                step,
                source,
            }
        };
        let mut stream = self.dir.connect(&self.dir.file(CONTROL)).await?;
        let mut line = serde_json::to_vec(request)
            .map_err(io::Error::from)
            .map_err(failed("write the request"))?;
        line.push(b'\n');
        stream
            .write_all(&line)
            .await
            .map_err(failed("send the request"))?;
        let mut answer = Vec::new();
        BufReader::new(stream.take(MAX_ANSWER as u64))
            .read_until(b'\n', &mut answer)
            .await
            .map_err(failed("read the answer"))?;
        if answer.pop() != Some(b'\n') {
            return Err(failed("read the answer")(
                io::ErrorKind::UnexpectedEof.into(),
            ));
        }
        serde_json::from_slice(&answer)
            .map_err(io::Error::from)
            .map_err(failed("parse the answer"))
    }

    fn ended(&self) -> NetworkError {
        let log = self.log();
        let words = fs::read(&log).unwrap_or_default();
        let words = &words[words.len().saturating_sub(WORDS)..];
        NetworkError::Ended {
            words: String::from_utf8_lossy(words).into_owned(),
            log,
        }
    }
}

/// The error for an answer of another type.
fn mistaken(request: &'static str, reply: &Reply) -> NetworkError {
    NetworkError::Control {
        request,
        step: "parse the answer",
        source: io::Error::new(io::ErrorKind::InvalidData, format!("{reply:?}")),
    }
}

/// The process of the network in this folder, if it is running.
fn running(dir: &Folder) -> Result<Option<Process>, NetworkError> {
    let path = dir.file(RECORD);
    let record = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        record => record.map_err(NetworkError::file("read", &path))?,
    };
    let record: Record =
        serde_json::from_slice(&record).map_err(|source| NetworkError::Record { path, source })?;
    Process::find(&record.process).map_err(NetworkError::file("read", Path::new("/proc")))
}

/// By a rename, so that a partial record is never read.
fn save(path: &Path, record: &Record) -> io::Result<()> {
    let partial = path.with_extension("partial");
    fs::write(&partial, serde_json::to_vec(record)?)?;
    fs::rename(partial, path)
}

async fn spawn_switch(
    binary: &Path,
    dir: &Folder,
    options: &NetworkOptions,
    lifetime: Lifetime,
) -> Result<Started, NetworkError> {
    let spawn_error = |source| NetworkError::Spawn {
        binary: binary.to_owned(),
        source,
    };
    // It listens before the process is started, so that clients need not wait for that.
    let control = dir.listen(&dir.file(CONTROL))?;
    let path = dir.file(LOG);
    let log = File::create(&path).map_err(NetworkError::file("make", &path))?;
    let options = serde_json::to_string(options)
        .map_err(io::Error::from)
        .map_err(spawn_error)?;
    // Its working directory is the folder, so that its socket addresses are short.
    let program = std::path::absolute(binary).map_err(spawn_error)?;
    let mut command = Command::new(program);
    command
        .arg(dir.path())
        .arg(options)
        .current_dir(dir.path())
        .stdin(Stdio::from(OwnedFd::from(control)))
        .stdout(log.try_clone().map_err(spawn_error)?)
        .stderr(log);
    let child = spawn::spawn(command, lifetime, Arc::from([]))
        .await
        .map_err(spawn_error)?;
    let child = Some(child);
    Ok(Started {
        lifetime,
        process: of_child(&child, binary)?,
        child,
    })
}

fn of_child(child: &Option<Child>, binary: &Path) -> Result<Process, NetworkError> {
    let pid = child.as_ref().map_or(0, Child::id);
    Process::of_child(pid).map_err(|source| NetworkError::Spawn {
        binary: binary.to_owned(),
        source,
    })
}
