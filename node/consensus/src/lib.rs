//! Consensus: runs etcd as a supervised child process and provides the clients for it.
//!
//! etcd talks to its peers over mutual TLS under a CA of its own. They reach it through a port that
//! only members pass: [`peer_port`]. Clients reach it through a unix
//! socket in a directory that only root can open. Only this crate opens that socket. Other parts of
//! the node get a [`NamespacedClient`], which is confined to the prefix of one [`ConsensusUser`],
//! and write through [`fenced`] only. Kubernetes' API server, which speaks the etcd API itself, is
//! confined to a prefix of its own in the same way, by a proxy: [`etcd_proxy`].
//!
//! etcd is a child process, not a store in this process, so that a panic of etcd ends etcd and not
//! the node, and so that its memory and file descriptors are its own.
//!
//! The flags with which etcd starts decide what happens to its data. They are therefore derived
//! from durable state at every start (see [`Start`]): an existing member is never bootstrapped
//! again, and missing data are an error.
//!
//! "etcd is ready" means that it has answered a linearizable read, not that a process runs or a
//! port is open. etcd's own `/readyz` makes the same read, and also fails while there is a CORRUPT alarm, which
//! operators can see only if curators have their clients then. `/livez` makes a read that is not linearizable, as a
//! call on the connection that exists would, so an HTTP client beside it would detect nothing more.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

mod client;
mod corruption;
mod damage;
mod defrag;
pub mod etcd_proxy;
pub mod fenced;
pub mod kubernetes_authorities;
mod log;
mod log_lengths;
pub mod manifests;
pub mod member_record;
mod members;
mod peer_port;
mod process;
pub mod secrets_keys;
mod slow_disk;
pub mod starts;
mod store_version;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{ClusterId, NodeId};
use hearth_api::v1::ConsensusProgress;
use hearth_base::event;
use hearth_base::in_use::ReadLock;
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::layout;
use hearth_host::pki::{self, PkiError};
use hearth_sys::files::{self, FileError};
use tokio::sync::{Notify, OwnedRwLockReadGuard, watch};
use tokio::time::Instant;

use self::peer_port::PeerPort;

pub use client::{
    Change, Changes, ConsensusError, ConsensusUser, Lease, Listing, MalformedName,
    NamespacedClient, Record, RootClient, WatchEnd,
};
pub use damage::{Damage, Damaged, DataReport};
pub use member_record::{Joining, MemberRecordError};
pub use members::{Alarm, Member, MemberId, MemberStatus, Members, peer_url};
pub use peer_port::{MemberOfCurators, PeerPortError};
pub use process::ProcessError;
pub use slow_disk::SlowDisk;
pub use store_version::StoreVersionError;

/// Maximum size of etcd's database file in bytes (see `defrag`). etcd's own default is twice that,
/// which is more than small disks have.
pub const QUOTA: u64 = 1 << 30;

/// How often the leader compares the members' checksums. There are new ones every six minutes (a tenth of the history that
/// is kept). If no majority agrees, no writes are accepted for some seconds after each comparison.
pub const HASH_CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// How long etcd waits, when the node shuts down, for those that [hold](Handle::hold) it: longer than
/// a program may take to end.
const USERS_WITHIN: Duration = Duration::from_secs(5);

/// How often a learner reports its progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// Heartbeat and election timeouts of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// This member is the only one. The only election is the one at the start, and the boot waits
    /// for it, so the timeouts are short (heartbeat 20 ms, election 100 ms).
    SingleMember,
    /// Several members, on machines that may be slow for a while (heartbeat 200 ms, election 2 s).
    /// All members need the same timing, so a single member restarts its etcd with this one before
    /// it adds the first peer.
    Cluster,
}

/// The configuration of one etcd member.
#[derive(Clone)]
pub struct Config {
    /// ID of this node; also its member name.
    pub node_id: NodeId,
    /// ID of the cluster, used as etcd's cluster token: members of different clusters reject each
    /// other.
    pub cluster_id: ClusterId,
    /// etcd's directory on the data partition.
    pub etcd: layout::Etcd,
    /// The node's credentials. If they exist, the bootstrap was acknowledged.
    pub credentials: layout::KeyFiles,
    /// Directory of the client socket: on a tmpfs, mode 0700. Must exist.
    pub socket_dir: PathBuf,
    /// Where peers reach etcd.
    pub peer_listen: SocketAddr,
    /// Nodes that may be peers although the local etcd does not list them yet.
    pub member_of_curators: MemberOfCurators,
    /// Whether this node is bootstrapping its cluster (its phase is FOUNDING).
    pub founding: bool,
    /// Shared with the curator on this node.
    pub peers: PeerReadiness,
    /// Who [holds](Handle::hold) etcd.
    pub users: ReadLock,
    /// Quota in bytes; etcd refuses writes beyond it.
    pub quota_bytes: u64,
    /// How often the leader compares the members' checksums; whole seconds.
    pub hash_check_interval: Duration,
    /// Path of the etcd binary.
    pub binary: PathBuf,
    /// An HTTP proxy through which etcd connects to its peers. Only for tests, which run several
    /// members on one machine and a network of their own between them; on a node, peers are reached
    /// by their names.
    pub peer_proxy: Option<SocketAddr>,
    /// The node's cluster state; decides whether clients are handed out.
    pub state: ClusterState,
    /// Receives etcd's log lines.
    pub log: LogTree,
}

/// Why etcd could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusFailure {
    /// A file that etcd needs does not exist.
    #[error("{path} is missing: not starting etcd, which would form a new cluster")]
    Missing {
        /// The file or directory.
        path: PathBuf,
    },
    /// The certificate authorities cannot be read.
    #[error("cannot read the certificate authorities")]
    Pki(#[from] PkiError),
    /// The data directory cannot be created.
    #[error("cannot prepare etcd's data directory")]
    File(#[from] FileError),
    /// The member record on the disk cannot be read.
    #[error("cannot read the etcd member record")]
    MemberRecord(#[from] MemberRecordError),
    /// etcd's log cannot be read.
    #[error("cannot read etcd's log in {path}")]
    Log {
        /// Its folder.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The store on the disk is of another version of etcd.
    #[error(transparent)]
    StoreVersion(#[from] StoreVersionError),
    /// Peers could not reach etcd.
    #[error(transparent)]
    PeerPort(#[from] PeerPortError),
    /// The process could not be started, or exited.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The data are known to be damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
}

/// How etcd is started.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Start {
    /// As the first member of a new cluster, with an empty directory.
    New,
    /// As the member that its data directory describes.
    Existing,
    /// As a learner that other members have added, with an empty directory.
    Join(Joining),
}

/// Decides from durable state.
///
/// | | data | no data |
/// |---|---|---|
/// | bootstrap not acknowledged | discard, new | new |
/// | join requested, not joined yet | existing | join |
/// | otherwise | existing | refuse |
///
/// A bootstrap is acknowledged once the node's credentials are durable. Before that no other
/// machine knows of the cluster, and an etcd whose first writes were cut off cannot be trusted to
/// start again. The keys of the certificate authorities must still exist as well: they are removed
/// after the credentials are saved, so two independent facts are needed before anything is
/// discarded. Nothing is discarded either once this etcd has `served`: the control plane may be
/// about to save the credentials of the new cluster.
///
/// A member that has joined and has lost its write-ahead log is refused: with an empty log it would
/// break the promises (votes, acknowledged entries) that it made under the same member ID. The
/// other members remove it, and it joins as a new member.
fn decide(config: &Config, served: bool) -> Result<Start, ConsensusFailure> {
    if let Some(damaged) = corruption::noted(&config.etcd) {
        return Err(damaged.into());
    }
    let joining = member_record::load(&config.etcd)?;
    let acknowledged = served
        || !config.founding
        || joining.is_some()
        || config.credentials.certificate().exists()
        || !pki::has_authority_keys(&config.etcd)?;
    if acknowledged && member_record::has_log(&config.etcd) {
        store_version::admit(&config.etcd)?;
        return Ok(Start::Existing);
    }
    let start = match joining {
        Some(joining) if !member_record::has_joined(&config.etcd) => Start::Join(joining),
        _ if acknowledged => {
            let path = config.etcd.log();
            return Err(ConsensusFailure::Missing { path });
        }
        _ => Start::New,
    };
    if config.etcd.data().exists() {
        member_record::discard_data(&config.etcd)?;
        tracing::info!("discarded etcd data left by an interrupted start");
    }
    // etcd rejects a data directory that others can read. It is durable with the note beside it.
    files::create_dir(&config.etcd.data(), files::PRIVATE_DIRECTORY)?;
    store_version::note(&config.etcd)?;
    Ok(start)
}

/// etcd is not started without them.
fn has_peer_files(config: &Config) -> Result<(), ConsensusFailure> {
    let peer = config.etcd.peer();
    for path in [peer.ca(), peer.certificate(), peer.key()] {
        if !path.exists() {
            return Err(ConsensusFailure::Missing { path });
        }
    }
    Ok(())
}

/// A node that expects no peers elects itself at once.
fn timing(config: &Config) -> Result<Timing, MemberRecordError> {
    Ok(if member_record::expects_peers(&config.etcd)? {
        Timing::Cluster
    } else {
        Timing::SingleMember
    })
}

/// Shared by a curator and the etcd on its node: whether there will be other members, and whether
/// etcd runs with the timing for them. Clones share the state. Both are latches: they are never
/// reset, and a late reader sees them.
#[derive(Clone, Default)]
pub struct PeerReadiness {
    /// Set by the curator.
    peers_expected: watch::Sender<bool>,
    /// Set by [`run`].
    peer_timing_ready: watch::Sender<bool>,
}

impl PeerReadiness {
    /// Announces that there will be other members.
    pub fn expect_peers(&self) {
        self.peers_expected.send_replace(true);
    }

    /// Whether etcd runs with multi-member timing, so that members can be added.
    pub fn is_peer_timing_ready(&self) -> bool {
        *self.peer_timing_ready.borrow()
    }

    /// Waits until other members are expected.
    async fn peers_expected(&self) {
        latched(&self.peers_expected).await;
    }

    /// Waits until members can be added.
    pub async fn peer_timing_ready(&self) {
        latched(&self.peer_timing_ready).await;
    }
}

async fn latched(latch: &watch::Sender<bool>) {
    // The sender is borrowed, so the channel cannot close.
    let _ = latch.subscribe().wait_for(|set| *set).await;
}

/// Why there is no client at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsensusUnavailable {
    /// This node is not a consensus member.
    #[error("this node does not run etcd: use the curators instead")]
    NoLocalConsensus,
    /// It is a member, but etcd is not ready.
    #[error("etcd on this node is not ready")]
    NotConnected,
    /// The node is not a member of its cluster, or not any more.
    #[error("cluster state is {0}: etcd clients are only available to members of the cluster")]
    RefusedState(State),
}

/// A running etcd that is ready; see [`Handle::client`].
#[derive(Clone)]
pub struct Handle {
    root: RootClient,
    serving: watch::Receiver<bool>,
    state: ClusterState,
    users: ReadLock,
}

impl Handle {
    /// Keeps etcd running for a moment when the node shuts down, until the guard is dropped: for
    /// programs that write a last time when they end.
    pub async fn hold(&self) -> OwnedRwLockReadGuard<()> {
        self.users.hold().await
    }

    /// A client for one user's namespace, if the node is HOME or SPLIT.
    pub fn client(&self, user: ConsensusUser) -> Result<NamespacedClient, ConsensusUnavailable> {
        let state = self.state.get();
        if !matches!(state, State::Home | State::Split) {
            return Err(ConsensusUnavailable::RefusedState(state));
        }
        // The runnable that would reset the flag may have been dropped.
        let gone = self.serving.has_changed().is_err();
        if gone || !*self.serving.borrow() {
            return Err(ConsensusUnavailable::NotConnected);
        }
        Ok(match user {
            // Read by a program that is not part of Hearth and may stop reading.
            ConsensusUser::Kubernetes => self.root.apart(user),
            _ => self.root.namespaced(user),
        })
    }
}

/// A running etcd that is ready, for the control-plane worker that starts it: the only access to
/// the whole store, whatever the cluster state. All other parts get its [`Handle`].
#[derive(Clone)]
pub struct RootHandle(Handle);

impl RootHandle {
    /// The handle for other parts of the node.
    pub fn handle(&self) -> Handle {
        self.0.clone()
    }

    /// The client of the whole store.
    pub fn root(&self) -> &RootClient {
        &self.0.root
    }
}

/// The client that a part of the node may use at the moment; `handle` is the value that the control
/// plane publishes.
pub fn client(
    handle: Option<&Handle>,
    user: ConsensusUser,
) -> Result<NamespacedClient, ConsensusUnavailable> {
    handle
        .ok_or(ConsensusUnavailable::NoLocalConsensus)?
        .client(user)
}

/// What [`run`] publishes.
pub struct Outputs {
    /// Set each time that etcd becomes ready.
    pub handle: event::Writer<RootHandle>,
    /// Set every 250 ms while a learner catches up, and once when the member is a voter.
    pub progress: event::Writer<ConsensusProgress>,
    /// Set when the data turn out to be damaged, and to none when etcd is ready.
    pub data_report: event::Writer<Option<DataReport>>,
    /// Set while the disk keeps etcd waiting.
    pub slow_disk: event::Writer<Option<SlowDisk>>,
}

impl Outputs {
    fn report(&self, damaged: &Damaged) {
        let report = DataReport::Damaged(damaged.clone());
        self.data_report.set(Some(report));
    }
}

/// How one run of the etcd process ended.
enum End {
    /// The runnable was cancelled.
    Stopped,
    /// Restart etcd with multi-member timing.
    Restart,
}

/// Runs etcd until the runnable is cancelled or etcd exits. Publishes a handle as soon as etcd is
/// ready.
///
/// When the curator expects other members, etcd is restarted once with multi-member timing; the
/// curator and its callers wait for that.
pub async fn run(ctx: Context, config: Arc<Config>, out: Arc<Outputs>) -> Outcome {
    has_peer_files(&config)?;
    let started = Notify::new();
    // Until etcd has ended: a leader hands over to another member first.
    let port = async {
        // etcd needs longer to serve than the port to be opened.
        started.notified().await;
        let port = PeerPort::open(&config).await;
        match port.map_err(ConsensusFailure::from)?.serve().await {}
    };
    tokio::select! {
        outcome = run_etcd(&ctx, &config, &out, &started) => outcome,
        failed = port => failed,
    }
}

/// `started` is notified when etcd has been started for the first time.
async fn run_etcd(ctx: &Context, config: &Config, out: &Outputs, started: &Notify) -> Outcome {
    let mut healthy = false;
    let mut good = || {
        if !std::mem::replace(&mut healthy, true) {
            ctx.healthy();
        }
    };
    loop {
        match live(ctx, config, (out, started), &mut good).await? {
            End::Stopped => return Ok(()),
            End::Restart => tracing::info!("restarting etcd with multi-member timing"),
        }
    }
}

async fn live(
    ctx: &Context,
    config: &Config,
    (out, started): (&Outputs, &Notify),
    good: &mut impl FnMut(),
) -> Result<End, Failure> {
    ctx.ends_within(USERS_WITHIN + process::STOP_BOUND);
    let begin = Instant::now();
    let start =
        decide(config, out.handle.value().get().is_some()).inspect_err(|error| match error {
            ConsensusFailure::Damaged(damaged) => out.report(damaged),
            ConsensusFailure::Missing { .. } => out.report(&Damaged {
                damage: Damage::Log,
                words: error.to_string(),
            }),
            _ => {}
        })?;
    let timing = timing(config).map_err(ConsensusFailure::from)?;
    let root = RootClient::new(process::socket(&config.socket_dir));
    if let Start::Existing = start {
        check_log(config).await.inspect_err(|error| {
            if let ConsensusFailure::Damaged(damaged) = error {
                out.report(damaged);
            }
        })?;
    }
    let dn = format!("{}.etcd", ctx.name());
    let mut etcd = process::Etcd::start(config, &start, timing, dn).await?;
    tracing::info!(pid = etcd.id(), ?start, ?timing, "started etcd");
    started.notify_one();
    let waits_for_disk = etcd.waits_for_disk().watch();
    out.slow_disk.set(None);

    let (serving, serves) = watch::channel(false);
    let work = async {
        catch_up(config, &root, out, good).await?;
        serving.send_replace(true);
        out.handle.set(RootHandle(Handle {
            root: root.clone(),
            serving: serves,
            state: config.state.clone(),
            users: config.users.clone(),
        }));
        tracing::info!(after = ?begin.elapsed(), "etcd is ready");
        out.data_report.set(None);
        good();
        if timing == Timing::Cluster {
            config.peers.peer_timing_ready.send_replace(true);
        }
        report_voter(&root, out).await;
        let other_timing = async {
            config.peers.peers_expected().await;
            if timing == Timing::Cluster {
                return std::future::pending().await;
            }
            member_record::note_peers_expected(&config.etcd)?;
            Ok(End::Restart)
        };
        tokio::select! {
            end = other_timing => end,
            never = defrag::keep(&root, config.quota_bytes) => match never {},
            damaged = corruption::keep(&root, &config.etcd, &out.data_report) => Err(damaged),
        }
    };
    let outcome = tokio::select! {
        ended = etcd.ended() => {
            if let ProcessError::Damaged(damaged) = &ended {
                out.report(damaged);
            }
            Err(ended.into())
        }
        () = stopped(ctx, &config.users) => Ok(End::Stopped),
        outcome = work => outcome,
        never = slow_disk::keep(waits_for_disk, &out.slow_disk) => match never {},
    };
    serving.send_replace(false);
    match outcome {
        Ok(End::Stopped) => etcd.stop().await?,
        // Nobody else is there to take over from it, and its clients keep their connections.
        Ok(End::Restart) => etcd.kill().await?,
        Err(_) => {}
    }
    outcome
}

/// Looks for what etcd would take for the work of a power cut.
async fn check_log(config: &Config) -> Result<(), ConsensusFailure> {
    let log = config.etcd.log();
    let checked = spawn_blocking({
        let log = log.clone();
        move || log_lengths::check(&log)
    });
    let failed = |source| ConsensusFailure::Log {
        path: log.clone(),
        source,
    };
    let checked = checked.await.map_err(|error| failed(error.into()))?;
    match checked.map_err(failed)? {
        Some(damaged) => Err(damaged.into()),
        None => Ok(()),
    }
}

/// Waits until the runnable is cancelled and nobody holds etcd any more.
async fn stopped(ctx: &Context, users: &ReadLock) {
    ctx.cancelled().await;
    users.is_over("a user of etcd", USERS_WITHIN).await;
}

/// Waits, without a limit, until etcd answers a linearizable read: without a quorum there is
/// nothing else to do, and the caller watches the process. A learner answers none; it reports its
/// progress.
async fn catch_up(
    config: &Config,
    root: &RootClient,
    out: &Outputs,
    good: &mut impl FnMut(),
) -> Result<(), Failure> {
    const ATTEMPT_BOUND: Duration = Duration::from_secs(10);
    const RETRY_DELAY: Duration = Duration::from_millis(20);
    let client = root
        .namespaced(ConsensusUser::Curator)
        .bounded(ATTEMPT_BOUND);
    let members = root.members().bounded(ATTEMPT_BOUND);
    let mut said = false;
    while let Err(error) = client.get(fenced::EPOCH).await {
        match members.status().await {
            Ok(status) if status.learner && status.leader.is_some() => {
                if !member_record::has_joined(&config.etcd) {
                    member_record::note_joined(&config.etcd)?;
                }
                if !std::mem::replace(&mut said, true) {
                    tracing::info!(member = %status.id, "etcd learner is catching up");
                }
                out.progress.set(ConsensusProgress {
                    member_id: status.id.0,
                    learner: true,
                    applied_index: status.applied,
                });
                good();
                tokio::time::sleep(REPORT_INTERVAL).await;
            }
            // Partitioned from the leader. Its reads are refused at once, for however long that
            // lasts.
            Ok(status) if status.learner => tokio::time::sleep(REPORT_INTERVAL).await,
            _ => {
                tracing::info!("etcd is not ready yet: {error}");
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
    // It may have been promoted because of a report from before a restart.
    if member_record::load(&config.etcd)?.is_some() && !member_record::has_joined(&config.etcd) {
        member_record::note_joined(&config.etcd)?;
    }
    Ok(())
}

/// Reports the member ID once this member is a voter. Retries until etcd answers.
async fn report_voter(root: &RootClient, out: &Outputs) {
    let members = root.members();
    loop {
        match members.status().await {
            Ok(status) => {
                return out.progress.set(ConsensusProgress {
                    member_id: status.id.0,
                    learner: false,
                    applied_index: 0,
                });
            }
            Err(error) => tracing::info!("cannot read etcd's member ID: {error}"),
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::new_without_default)]
// Test code: it panics on errors.
pub mod testing;
#[cfg(test)]
mod tests;
