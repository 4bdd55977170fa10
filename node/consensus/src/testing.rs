//! A real etcd for tests: a data partition in a temporary directory with certificate authorities,
//! and consensus under a supervisor of its own.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod peer;
pub mod peers;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, SystemTime};

use hearth_api::identity::{ClusterId, NodeId, NodeKey};
use hearth_base::event;
use hearth_base::in_use::ReadLock;
use hearth_base::logtree::{self, LogTree, Severity};
use hearth_base::supervisor::{Backoff, Options, Supervisor, runnable};
use hearth_base::testing::{pause, within_timeout};
use hearth_host::pki::{self, Bootstrapper, Lifetime, NewCluster};
use hearth_host::{cluster_state, layout};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub use peer::Peer;

use super::{
    Config, ConsensusUser, DataReport, HASH_CHECK_INTERVAL, NamespacedClient, Outputs,
    PeerReadiness, QUOTA, RootClient, RootHandle, process, run,
};

/// The etcd that an image has: the file that `HEARTH_ETCD` names, or `hearth/etcd` in the target folder that this
/// program was built in, where the tasks put it.
pub fn etcd() -> PathBuf {
    if let Some(program) = std::env::var_os("HEARTH_ETCD") {
        return program.into();
    }
    let this = std::env::current_exe().unwrap();
    let mut places = this.ancestors().map(|folder| folder.join("hearth/etcd"));
    places.find(|program| program.exists()).unwrap_or_else(|| {
        panic!(
            "no hearth/etcd above {}: `cargo xtask image` builds it",
            this.display()
        )
    })
}

/// A loopback address that no other site of this process uses.
fn own_address() -> Ipv4Addr {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    let [high, low] = GIVEN.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 77, high, low)
}

/// The disk and the identity of a first node.
pub struct Site {
    _directory: TempDir,
    pub root: layout::Root,
    pub node_key: NodeKey,
    pub node_id: NodeId,
    pub cluster_id: ClusterId,
    pub log: LogTree,
    pub state: (cluster_state::Writer, cluster_state::ClusterState),
    /// May be reduced before etcd is started.
    pub quota_bytes: u64,
    peer_listen: SocketAddr,
}

impl Site {
    /// A disk without certificate authorities.
    pub fn blank() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = layout::Root::under(directory.path());
        for part in [root.data.path(), root.ephemeral.path()] {
            std::fs::create_dir(part).unwrap();
        }
        root.data.make_directories().unwrap();
        root.ephemeral.make_directories().unwrap();
        let node_key = NodeKey::generate();
        // Free now, and bound by etcd later. No other process uses this address.
        let free = TcpListener::bind((own_address(), 0)).unwrap();
        Self {
            _directory: directory,
            root,
            node_id: NodeId::from_public_key(&node_key.public()),
            node_key,
            cluster_id: ClusterId::generate(),
            log: LogTree::new(logtree::Options {
                keep: Severity::Debug,
                ..Default::default()
            }),
            state: cluster_state::new(),
            quota_bytes: QUOTA,
            peer_listen: free.local_addr().unwrap(),
        }
    }

    /// A disk with certificate authorities, ready for the first start of etcd.
    pub fn new() -> Self {
        let site = Self::blank();
        site.found_pki();
        site
    }

    pub fn found_pki(&self) {
        let founder = Bootstrapper {
            cluster_id: self.cluster_id,
            node_id: self.node_id,
            node_key: &self.node_key,
        };
        let lifetime = Lifetime::since_build(SystemTime::now());
        let make = || NewCluster::make(&founder, lifetime);
        pki::found(&self.root.data.etcd(), &founder, make).unwrap();
    }

    pub fn config(&self, founding: bool) -> Config {
        Config {
            node_id: self.node_id,
            cluster_id: self.cluster_id,
            etcd: self.root.data.etcd(),
            credentials: self.root.data.node().credentials(),
            socket_dir: self.root.ephemeral.consensus(),
            peer_listen: self.peer_listen,
            member_of_curators: Arc::new(|_| false),
            founding,
            peers: PeerReadiness::default(),
            users: ReadLock::default(),
            quota_bytes: self.quota_bytes,
            hash_check_interval: HASH_CHECK_INTERVAL,
            binary: etcd(),
            peer_proxy: None,
            state: self.state.1.clone(),
            log: self.log.clone(),
        }
    }

    /// Starts etcd and waits until it is ready.
    pub async fn start(&self, founding: bool) -> Running {
        self.start_with(self.config(founding)).await
    }

    /// The same, with a configuration of its own.
    pub async fn start_with(&self, config: Config) -> Running {
        let running = run_with(config);
        within_timeout("etcd is ready", running.handles.watch().next())
            .await
            .unwrap();
        running
    }

    /// Starts etcd without waiting until it is ready.
    pub fn start_anyhow(&self, founding: bool) -> Running {
        run_with(self.config(founding))
    }

    /// A client of the etcd that runs on this site, without a [`Handle`](super::Handle).
    pub fn back_door(&self, user: ConsensusUser) -> NamespacedClient {
        self.store().namespaced(user)
    }

    /// The same, of its whole store.
    pub fn store(&self) -> RootClient {
        RootClient::new(process::socket(&self.root.ephemeral.consensus()))
    }

    /// The process ID of the etcd that runs on this site.
    pub fn etcd_pid(&self) -> i32 {
        *self.etcd_pids().first().expect("etcd is running")
    }

    /// The process IDs of all etcds that run on this site: one, or none.
    pub fn etcd_pids(&self) -> Vec<i32> {
        let data_dir = self.root.data.etcd().data().display().to_string();
        std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid: &i32| {
                std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
                    line.split(|byte| *byte == 0)
                        .any(|word| word == data_dir.as_bytes())
                })
            })
            .collect()
    }

    pub fn signal_etcd(&self, signal: Signal) {
        kill(Pid::from_raw(self.etcd_pid()), signal).unwrap();
    }

    /// Changes a bit of the data of a record in the middle of etcd's log; the second call changes it back.
    pub fn damage_log(&self) {
        // Behind the record's tags and numbers.
        change_bits(&self.last_log(), |bytes| {
            vec![middle_record(bytes) + 8 + 16]
        });
    }

    /// Changes a bit of the length of a record in the middle of etcd's log, which becomes longer than the file; the second call
    /// changes it back.
    pub fn damage_length(&self) {
        change_bits(&self.last_log(), |bytes| vec![middle_record(bytes) + 4]);
    }

    /// Truncates etcd's log in its last record.
    pub fn tear_log(&self) {
        let log = self.last_log();
        let bytes = fs::read(&log).unwrap();
        fs::write(log, &bytes[..used(&bytes) - 1]).unwrap();
    }

    fn last_log(&self) -> PathBuf {
        let files = fs::read_dir(self.root.data.etcd().log()).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let log = files.filter(|file| file.extension() == Some("wal".as_ref()));
        log.max().unwrap()
    }

    /// Changes a bit in each of the two pages that lead to all others of etcd's database; the second call changes them
    /// back.
    pub fn damage_database(&self) {
        let database = self.root.data.etcd().data().join("member/snap/db");
        // The versions.
        change_bits(&database, |_| vec![20, 4096 + 20]);
    }

    /// Changes a value in etcd's database: no page, and no checksum, says so.
    pub fn change_value(&self, from: &[u8], to: &[u8]) {
        let database = self.root.data.etcd().data().join("member/snap/db");
        let mut bytes = fs::read(&database).unwrap();
        let places = bytes.windows(from.len());
        let places: Vec<_> = places.enumerate().filter(|(_, b)| *b == from).collect();
        let places: Vec<_> = places.into_iter().map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "no such value");
        for at in places {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
        fs::write(database, bytes).unwrap();
    }

    /// Stops etcd's threads until it is sent SIGCONT.
    pub async fn pause_etcd(&self) {
        pause(Pid::from_raw(self.etcd_pid())).await;
    }
}

/// The length of what has been written to a file that is preallocated.
fn used(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1
}

/// Where the record begins that is in the middle of the used part of a log.
fn middle_record(log: &[u8]) -> usize {
    let middle = used(log) / 2;
    let mut at = 0;
    loop {
        let frame = u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
        let length = (frame & (u64::MAX >> 8)) as usize;
        let next = at + 8 + length.next_multiple_of(8);
        if next > middle {
            return at;
        }
        at = next;
    }
}

fn change_bits(file: &Path, places: impl FnOnce(&[u8]) -> Vec<usize>) {
    let mut bytes = fs::read(file).unwrap();
    for at in places(&bytes) {
        bytes[at] ^= 1;
    }
    fs::write(file, bytes).unwrap();
}

fn run_with(config: Config) -> Running {
    let config = Arc::new(config);
    let peers = config.peers.clone();
    let (handle, handles) = event::value();
    let (progress, _) = event::value();
    let (data_report, data_reports) = event::value();
    let out = Arc::new(Outputs {
        handle,
        progress,
        data_report,
        slow_disk: event::value().0,
    });
    let supervisor = Supervisor::start(
        runnable(move |ctx| {
            let (config, out) = (config.clone(), out.clone());
            async move {
                ctx.run("consensus", move |ctx| {
                    run(ctx, config.clone(), out.clone())
                })?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        }),
        Options {
            backoff: Backoff {
                initial: Duration::from_millis(20),
                ..Default::default()
            },
            ..Default::default()
        },
    );
    Running {
        supervisor,
        handles,
        data_reports,
        peers,
    }
}

/// Consensus that runs on a site.
pub struct Running {
    pub supervisor: Supervisor,
    pub handles: event::Value<RootHandle>,
    pub data_reports: event::Value<Option<DataReport>>,
    pub peers: PeerReadiness,
}

impl Running {
    pub fn handle(&self) -> RootHandle {
        self.handles.get().expect("etcd has been ready")
    }

    pub fn client(&self) -> NamespacedClient {
        self.handle().root().namespaced(ConsensusUser::Curator)
    }

    pub async fn stop(self) {
        within_timeout("shutdown", self.supervisor.shutdown()).await;
    }

    /// Waits for a failure of the runnable, and returns the last one.
    pub async fn failure(&self) -> String {
        let tree = self.supervisor.tree();
        let mut changes = tree.watch();
        within_timeout("a failure", async {
            loop {
                let failed = tree
                    .snapshot()
                    .into_iter()
                    .find_map(|node| node.last_error.filter(|_| node.name.ends_with("consensus")));
                match failed {
                    Some(error) => return error,
                    None => changes.next().await.unwrap(),
                };
            }
        })
        .await
    }
}

/// Compacts the history before a revision.
pub async fn compact(store: &RootClient, revision: i64) {
    within_timeout("compaction", store.compact(revision))
        .await
        .unwrap();
}
