//! etcd's command line and its process.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use hearth_base::event;
use hearth_sys::child::{Child, ChildError};
use tokio::process::Command;

use super::damage::{Damage, Damaged};
use super::{Config, Start, Timing, log, peer_url, slow_disk};

/// etcd requires a port in every client URL, even of a unix socket. The whole "host" is the file
/// name of the socket, in the working directory.
const SOCKET_NAME: &str = "client:0";
/// Where etcd serves HTTP, such as `/livez`. On the clients' socket it would accept connections while
/// it shuts down, and wait for ever for one on which nothing is sent: a client that is about to
/// reconnect, and has no call any more.
const HTTP_SOCKET_NAME: &str = "http:0";
/// Where etcd serves its peers; they reach it through [`peer_port`](super::peer_port).
const PEER_SOCKET_NAME: &str = "peers:0";
/// How long etcd may take to shut down before it is killed, which loses nothing. A leader whose peers are gone takes
/// longer: it asks each of them for its version, and waits three seconds for each. Shorter than the time after which the
/// supervisor warns.
pub(super) const STOP_BOUND: Duration = Duration::from_secs(4);
/// Part of etcd's message when the other members have removed it. etcd exits then, and after every
/// further start.
const REMOVED_MESSAGE: &str = "has been permanently removed from the cluster";

/// The socket on which etcd serves its clients.
pub(crate) fn socket(directory: &Path) -> PathBuf {
    directory.join(SOCKET_NAME)
}

/// The socket on which etcd serves its peers.
pub(crate) fn peer_socket(directory: &Path) -> PathBuf {
    directory.join(PEER_SOCKET_NAME)
}

/// Why etcd could not be started, or has exited.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The child process failed.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The socket of an earlier process could not be removed.
    #[error("cannot remove the old socket {socket}")]
    Socket {
        /// Path of the socket.
        socket: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// etcd exited without being stopped.
    #[error("etcd exited with {status}{}", last(.last_words))]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// Its last fatal log line.
        last_words: Option<String>,
    },
    /// etcd cannot use what is on the disk.
    #[error(transparent)]
    Damaged(#[from] Damaged),
}

fn last(words: &Option<String>) -> String {
    words.as_ref().map(|w| format!(": {w}")).unwrap_or_default()
}

/// A running etcd. Dropping it kills the process; so does the end of this process.
pub(crate) struct Etcd {
    child: Child,
    /// The last log line that has a reason to exit.
    last_words: Arc<Mutex<Option<String>>>,
    waits_for_disk: event::Value<String>,
}

impl Etcd {
    /// Starts etcd. Its log lines go into the log tree under `dn`.
    pub(super) async fn start(
        config: &Config,
        start: &Start,
        timing: Timing,
        dn: String,
    ) -> Result<Self, ProcessError> {
        // An etcd that was killed leaves its sockets behind, and the next one could not bind them.
        for name in [SOCKET_NAME, HTTP_SOCKET_NAME, PEER_SOCKET_NAME] {
            let socket = config.socket_dir.join(name);
            match fs::remove_file(&socket) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(ProcessError::Socket { socket, source });
                }
                _ => {}
            }
        }
        let mut command = Command::new(&config.binary);
        command
            .args(arguments(config, start, timing))
            .env_clear()
            .current_dir(&config.socket_dir);
        if let Some(proxy) = config.peer_proxy {
            command.env("HTTPS_PROXY", format!("http://{proxy}"));
        }
        let last_words = Arc::new(Mutex::new(None));
        let (tree, words) = (config.log.clone(), last_words.clone());
        let (waits, waits_for_disk) = event::value();
        let mut shown = log::Shown::default();
        let child = Child::spawn(command, move |_, line| {
            let mut parsed = log::parse(line);
            shown.weigh(&mut parsed, Instant::now());
            tree.append_raw(&dn, parsed.severity, &parsed.message);
            if slow_disk::says(&parsed.message) {
                waits.set(parsed.message.clone());
            }
            if parsed.fatal || parsed.message.contains(REMOVED_MESSAGE) {
                *words.lock().unwrap_or_else(PoisonError::into_inner) = Some(parsed.message);
            }
        })
        .await?;
        Ok(Self {
            child,
            last_words,
            waits_for_disk,
        })
    }

    /// The last line by which it says that it has waited for its disk.
    pub(crate) fn waits_for_disk(&self) -> &event::Value<String> {
        &self.waits_for_disk
    }

    /// Its process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until etcd exits without being stopped.
    pub(crate) async fn ended(&mut self) -> ProcessError {
        match self.child.wait().await {
            Ok(status) => self.end(status),
            Err(error) => error.into(),
        }
    }

    fn end(&self, status: ExitStatus) -> ProcessError {
        let words = self.last_words.lock();
        let last_words = words.unwrap_or_else(PoisonError::into_inner).take();
        match last_words {
            Some(words) if let Some(damage) = Damage::of(&words) => {
                Damaged { damage, words }.into()
            }
            last_words => ProcessError::Ended { status, last_words },
        }
    }

    /// Ends etcd at once, as a crash would. To a request to stop it reacts by waiting for all watches of its clients, longer
    /// than they could bear.
    pub(crate) async fn kill(mut self) -> Result<(), ProcessError> {
        self.child.kill().await?;
        Ok(())
    }

    /// Shuts etcd down; kills it after [`STOP_BOUND`].
    pub(crate) async fn stop(mut self) -> Result<(), ProcessError> {
        self.child.terminate(STOP_BOUND).await?;
        Ok(())
    }
}

/// etcd's command-line arguments.
fn arguments(config: &Config, start: &Start, timing: Timing) -> Vec<String> {
    let name = config.node_id.to_string();
    let url = peer_url(config.node_id);
    let client = format!("unix://{SOCKET_NAME}");
    let peer = config.etcd.peer();
    let path = |p: PathBuf| p.display().to_string();
    let (heartbeat, election) = match timing {
        Timing::SingleMember => (20, 100),
        Timing::Cluster => (200, 2000),
    };
    // An etcd that has data reads its cluster from them.
    let alone = || format!("{name}={url}");
    let (state, initial) = match start {
        Start::New => ("new", alone()),
        Start::Existing => ("existing", alone()),
        Start::Join(joining) => ("existing", joining.initial_cluster.clone()),
    };
    let mut arguments: Vec<String> = [
        ("--name", name.clone()),
        ("--data-dir", path(config.etcd.data())),
        ("--listen-client-urls", client.clone()),
        ("--advertise-client-urls", client),
        (
            "--listen-client-http-urls",
            format!("unix://{HTTP_SOCKET_NAME}"),
        ),
        ("--listen-peer-urls", format!("unix://{PEER_SOCKET_NAME}")),
        ("--initial-advertise-peer-urls", url.clone()),
        ("--initial-cluster", initial),
        ("--initial-cluster-state", state.into()),
        ("--initial-cluster-token", config.cluster_id.to_string()),
        ("--peer-trusted-ca-file", path(peer.ca())),
        ("--peer-cert-file", path(peer.certificate())),
        ("--peer-key-file", path(peer.key())),
        ("--heartbeat-interval", heartbeat.to_string()),
        ("--election-timeout", election.to_string()),
        ("--quota-backend-bytes", config.quota_bytes.to_string()),
        ("--auto-compaction-mode", "periodic".into()),
        ("--auto-compaction-retention", "1h".into()),
        // The entries that etcd keeps in memory between two snapshots.
        ("--snapshot-count", "10000".into()),
        ("--feature-gates", "CompactHashCheck=true".into()),
        (
            "--compact-hash-check-time",
            format!("{}s", config.hash_check_interval.as_secs()),
        ),
        ("--logger", "zap".into()),
        ("--log-outputs", "stderr".into()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect();
    arguments.extend(
        [
            // All members have the same program, so none needs an older version.
            "--tls-min-version=TLS1.3",
            // A member that was partitioned does not force an election when it reconnects.
            "--pre-vote",
            // With the strict check, etcd adds no member while a voter is away, nor within five
            // seconds of the last addition: a dead voter could not be replaced. The leading curator
            // checks that a change leaves a quorum.
            "--strict-reconfig-check=false",
            // A JSON gateway on the client port, which is not used.
            "--enable-grpc-gateway=false",
        ]
        .map(str::to_owned),
    );
    arguments
}
