//! The handle to a network's process.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use hearth_process::{
    folder::{Folder, FolderError},
    process::{Identity, Process},
    spawn::{self, Lifetime},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    time::timeout,
};

use super::{
    Faults, NetworkOptions, NetworkStatus, Port, Refusal,
    control::{Answer, MAX_ANSWER, Reply, Request},
};
use crate::Mac;

/// What the process is asked through; in the network's folder.
const CONTROL: &str = "control.sock";
/// Which process it is.
const RECORD: &str = "network.json";
/// What it says.
const LOG: &str = "switch.log";

/// How long an answer may take. The process answers at once; on a host with
/// many busy machines it takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long the process may take to end.
const END: Duration = Duration::from_secs(10);

/// After a conversation broke off: how long the process's end may take to show.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How much of the log an error shows, in bytes.
const WORDS: usize = 2000;

/// A network did not do.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// Its folder cannot be used.
    #[error("network: {0}")]
    Folder(#[from] FolderError),
    /// A file in its folder cannot be used.
    #[error("network: cannot {step} {path}: {source}")]
    File {
        /// What failed.
        step: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Its record is not of this form.
    #[error("network: {path} is not understood ({source}); remove it to start over")]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A network of this folder was left running.
    #[error("network {dir} is running already, as process {pid}; stop it first")]
    Running {
        /// Its folder.
        dir: PathBuf,
        /// Its process.
        pid: i32,
    },
    /// There is none to attach to.
    #[error("no network is running in {0}")]
    NotRunning(PathBuf),
    /// Its process did not start.
    #[error("network: {binary} does not start: {source}")]
    Spawn {
        /// The program.
        binary: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Its process is gone.
    #[error("network: its process has ended; its words ({log}):\n{words}")]
    Ended {
        /// The end of its log.
        words: String,
        /// Where all of it is.
        log: PathBuf,
    },
    /// There was no answer in time.
    #[error("network: {request} was not answered in {after:?}")]
    Timeout {
        /// What was asked.
        request: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// The conversation failed.
    #[error("network: cannot {step} for {request}: {source}")]
    Control {
        /// What was asked.
        request: &'static str,
        /// What failed.
        step: &'static str,
        /// How.
        source: io::Error,
    },
    /// The process said no.
    #[error("network: {0}")]
    Refused(#[from] Refusal),
    /// It was started tied to this process.
    #[error(
        "network {0} was started tied to this process; only a detachable one can be left running"
    )]
    Tied(PathBuf),
}

impl NetworkError {
    fn file(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { step, path, source }
    }
}

/// What is kept of a running network.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    process: Identity,
}

/// A running network. Dropping the handle of whoever started it ends the
/// process, and when the drop returns it is gone; handles of others
/// ([`Network::attach`]) are only handles.
///
/// Every call is a conversation of its own, so a call that is given up half
/// way leaves nothing behind, and calls may be made at once.
#[derive(Debug)]
pub struct Network {
    dir: Folder,
    process: Process,
    started: Option<Started>,
}

/// What only the one who started it has. Kills the process when it goes, and
/// waits until it is gone.
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
        // Some milliseconds; only then are its ports free again.
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
    /// Whatever keeps it from that; then nothing is left running.
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
        // The first answer: from here on all is there.
        network.status().await?;
        let path = network.dir.file(RECORD);
        let record = record.map_err(NetworkError::file("look into", Path::new("/proc")))?;
        save(&path, &Record { process: record }).map_err(NetworkError::file("write", &path))?;
        Ok(network)
    }

    /// The network that runs in this folder, whoever started it.
    ///
    /// # Errors
    /// If none does, or it does not answer.
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
            // Somebody else ends it just now.
            Err(NetworkError::Ended { .. }) => {
                Err(NetworkError::NotRunning(network.dir().to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    /// Its folder, absolute.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its log.
    pub fn log(&self) -> PathBuf {
        self.dir.file(LOG)
    }

    /// Its process's number.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Makes a port for a machine, or finds it: a port of this name and this
    /// Ethernet address that is there already is given back as it is, with the
    /// address that it has now.
    ///
    /// # Errors
    /// If one of the three belongs to another port or cannot be.
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

    /// Where this host reaches a TCP port of the port's machine: a port at
    /// 127.0.0.1 that stays the same for as long as the network runs.
    ///
    /// The host's side takes every connection; what becomes of it in the
    /// machine (refused, reset, no answer) shows there afterwards. New
    /// connections go to the address that the machine has at that time: the
    /// one that DHCP gave it, or the port's where DHCP gave none.
    ///
    /// # Errors
    /// If there is no such port.
    pub async fn forward(&self, name: &str, guest_port: u16) -> Result<SocketAddr, NetworkError> {
        let request = Request::Forward {
            name: name.to_owned(),
            guest: guest_port,
        };
        match self.call("forward", request).await? {
            Reply::Forwarded(address) => Ok(address),
            other => Err(mistaken("forward", &other)),
        }
    }

    /// Replaces the faults of a port's link. What is under way on a link that
    /// is cut is lost.
    ///
    /// # Errors
    /// If there is no such port, or they cannot be.
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

    /// Keeps two machines from each other, or lets them. The gateway, and so
    /// the host, reaches both all the same.
    ///
    /// # Errors
    /// If there are no such two ports.
    pub async fn block(&self, a: &str, b: &str, on: bool) -> Result<(), NetworkError> {
        let (a, b) = (a.to_owned(), b.to_owned());
        self.order("block", Request::Block { a, b, on }).await
    }

    /// Parts the network: machines of different groups do not reach each other,
    /// all others do, whatever was blocked before. No groups: the network is
    /// whole. The gateway, and so the host, reaches every machine.
    ///
    /// # Errors
    /// If there is no such port, or one is named twice; then all is as it was.
    pub async fn part(&self, groups: &[&[&str]]) -> Result<(), NetworkError> {
        let owned = |group: &&[&str]| group.iter().map(|&name| name.to_owned()).collect();
        let groups = groups.iter().map(owned).collect();
        self.order("part", Request::Part { groups }).await
    }

    /// Changes the address that DHCP gives a port's machine. The machine
    /// learns of it when it renews its lease, and is refused.
    ///
    /// # Errors
    /// If there is no such port, or the address is another's or cannot be.
    pub async fn set_address(&self, name: &str, address: Ipv4Addr) -> Result<(), NetworkError> {
        let name = name.to_owned();
        self.order("set_address", Request::SetAddress { name, address })
            .await
    }

    /// Lets DHCP answer a port's machine, as it does at first, or not. Leases
    /// that were given hold until they end.
    ///
    /// # Errors
    /// If there is no such port.
    pub async fn set_dhcp(&self, name: &str, on: bool) -> Result<(), NetworkError> {
        let name = name.to_owned();
        self.order("set_dhcp", Request::SetDhcp { name, on }).await
    }

    /// What it is and has done.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn status(&self) -> Result<NetworkStatus, NetworkError> {
        match self.call("status", Request::Status).await? {
            Reply::Status(status) => Ok(*status),
            other => Err(mistaken("status", &other)),
        }
    }

    /// Ends it, whoever started it. Machines that are plugged in stay
    /// unplugged from then on. When this returns, its process is gone and the
    /// capture is whole.
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

    /// Lets it go on without this process. It is found again by its folder.
    ///
    /// # Errors
    /// If it was not started for that. It is then killed, as by any drop.
    pub fn detach(mut self) -> Result<(), NetworkError> {
        if let Some(started) = &mut self.started {
            if started.lifetime != Lifetime::Detachable {
                return Err(NetworkError::Tied(self.dir.path().to_owned()));
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
            // Mostly because it ended, and its log says why. Its sockets end
            // a moment before it does.
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
            .map_err(failed("understand the answer"))
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

/// An answer to something else.
fn mistaken(request: &'static str, reply: &Reply) -> NetworkError {
    NetworkError::Control {
        request,
        step: "understand the answer",
        source: io::Error::new(io::ErrorKind::InvalidData, format!("{reply:?}")),
    }
}

/// The process that runs a network in this folder.
fn running(dir: &Folder) -> Result<Option<Process>, NetworkError> {
    let path = dir.file(RECORD);
    let record = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        record => record.map_err(NetworkError::file("read", &path))?,
    };
    let record: Record =
        serde_json::from_slice(&record).map_err(|source| NetworkError::Record { path, source })?;
    Process::find(&record.process).map_err(NetworkError::file("look into", Path::new("/proc")))
}

/// By a rename, so that half a record is never read.
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
    // It listens before it is started, so that nobody has to wait for it to.
    let control = dir.listen(&dir.file(CONTROL))?;
    let path = dir.file(LOG);
    let log = File::create(&path).map_err(NetworkError::file("make", &path))?;
    let options = serde_json::to_string(options)
        .map_err(io::Error::from)
        .map_err(spawn_error)?;
    // It runs in its folder, so that the addresses of its sockets are short.
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
