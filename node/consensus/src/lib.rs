//! Consensus: etcd as a supervised child process, and the only ways to it.
//!
//! etcd talks to its peers by mutual TLS under an authority of its own; to
//! clients it talks on a unix socket in a directory of root's alone. Nobody in
//! the node opens that socket but this module: parts of the node get a
//! [`NamespacedClient`] that is shut into the prefix of one [`ConsensusUser`],
//! and writes go through [`fenced`] only. The API server of Kubernetes, which is
//! no part of the node and speaks etcd's own language, has a prefix of its own
//! in the same way, by a server that passes its calls on: [`etcd_proxy`].
//!
//! Why a child process and not the store in our own: etcd's panics end etcd,
//! not the node, and its memory and descriptors are its own.
//!
//! What etcd is told at its start decides about the fate of the data, so it is
//! decided here, from what is durable, at every start (see [`Start`]):
//! an existing member is never founded over, and what is missing is missed.
//!
//! "etcd serves" means a linearizable read that was answered, not a process or
//! a port.

mod client;
mod defrag;
pub mod etcd_proxy;
pub mod fenced;
pub mod kubernetes_authorities;
mod log;
mod members;
mod process;
pub mod standing;

/// etcd's interface, as generated from `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, rust_2018_idioms)]
mod wire {
    tonic::include_proto!("etcdserverpb");
}

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use hearth_api::{
    identity::{ClusterId, NodeId},
    v1::ConsensusProgress,
};
use hearth_base::event;
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::layout;
use hearth_host::pki::{self, PkiError};
use hearth_sys::files::{self, FileError};
use tokio::{sync::watch, time::Instant};

pub use client::{
    Change, Changes, ConsensusError, ConsensusUser, Lease, Listing, MalformedName,
    NamespacedClient, Record, RootClient, WatchEnd,
};
pub use members::{Alarm, Member, MemberId, MemberStatus, Members, peer_url};
pub use process::ProcessError;
pub use standing::{Joining, StandingError};

/// Bytes that etcd's file may have (see `defrag`). Its default is twice that, which
/// is more than small disks have.
pub const QUOTA: u64 = 1 << 30;

/// How often a learner says how far it is.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// How patient the members of etcd are with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// There is no other member: the only election is the one at the start,
    /// for which a boot waits, so it happens at once (heartbeat 20 ms,
    /// election 100 ms).
    Alone,
    /// Machines that may be slow for a while (heartbeat 200 ms, election 2 s).
    /// All members must have the same, so a node that was alone restarts its
    /// etcd with this before it adds the first other member.
    Cluster,
}

/// What etcd needs to know.
#[derive(Clone)]
pub struct Config {
    /// Of this node; its name among the members.
    pub node_id: NodeId,
    /// Of the cluster: members of different clusters do not mix.
    pub cluster_id: ClusterId,
    /// etcd's part of the data partition.
    pub etcd: layout::Etcd,
    /// The node's credentials. Where they exist, a founding was acknowledged.
    pub credentials: layout::KeyFiles,
    /// In memory, for root alone. Must exist.
    pub socket_dir: PathBuf,
    /// Where peers are served.
    pub peer_listen: SocketAddr,
    /// Whether this node is founding its cluster (its phase is FOUNDING).
    pub founding: bool,
    /// With the curator above this etcd.
    pub peers: PeerReadiness,
    /// Bytes; etcd refuses writes beyond it.
    pub quota_bytes: u64,
    /// The program.
    pub binary: PathBuf,
    /// An HTTP proxy by which etcd calls its peers. Of no use on a node, where
    /// names lead to peers; a test puts several members on one machine, and a
    /// network of its own making between them.
    pub peer_proxy: Option<SocketAddr>,
    /// The node's view of the cluster; decides whether clients are handed out.
    pub state: ClusterState,
    /// Takes etcd's log lines.
    pub log: LogTree,
}

/// Why consensus does not run, by the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusFailure {
    /// A file that etcd needs is not there.
    #[error("{path} is missing: etcd is not started, for without it there would be a new cluster")]
    Missing {
        /// The file or directory.
        path: PathBuf,
    },
    /// The founding's files make no sense.
    #[error("what to start etcd with")]
    Pki(#[from] PkiError),
    /// The disk.
    #[error("prepare etcd's directory")]
    File(#[from] FileError),
    /// What the disk says of the member.
    #[error("what this node is to consensus")]
    Standing(#[from] StandingError),
    /// The process.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// How etcd is started.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Start {
    /// As the first member of a new cluster, with an empty directory.
    New,
    /// As the member that its data say it is.
    Existing,
    /// As a learner that others have added, with an empty directory.
    Join(Joining),
}

/// Decides from what is durable.
///
/// | | data | no data |
/// |---|---|---|
/// | founding not acknowledged | discard them, new | new |
/// | to join, and has not yet | existing | join |
/// | otherwise | existing | refuse |
///
/// A founding is acknowledged once the node's credentials are durable: before
/// that nobody has heard of the cluster, and an etcd whose very first writes
/// were cut off cannot be trusted to start again. The authorities' keys must
/// still be there as well; they are taken away after the credentials were
/// saved, so that two independent facts have to speak for discarding anything.
/// And nothing is discarded once this etcd has `served`: somebody may be about
/// to save the credentials of what was founded in it.
///
/// Who has joined and has no log is refused: as the same member with an empty
/// log it would break what it has promised. The others remove it, and it joins
/// as a new one.
fn decide(config: &Config, served: bool) -> Result<Start, ConsensusFailure> {
    let peer = config.etcd.peer();
    for path in [peer.ca(), peer.certificate(), peer.key()] {
        if !path.exists() {
            return Err(ConsensusFailure::Missing { path });
        }
    }
    let joining = standing::load(&config.etcd)?;
    let acknowledged = served
        || !config.founding
        || joining.is_some()
        || config.credentials.certificate().exists()
        || !pki::has_authority_keys(&config.etcd)?;
    if acknowledged && standing::has_log(&config.etcd) {
        return Ok(Start::Existing);
    }
    let start = match joining {
        Some(joining) if !standing::has_joined(&config.etcd) => Start::Join(joining),
        _ if acknowledged => {
            let path = config.etcd.log();
            return Err(ConsensusFailure::Missing { path });
        }
        _ => Start::New,
    };
    if config.etcd.data().exists() {
        standing::discard_data(&config.etcd)?;
        tracing::info!("discarded what an interrupted start left in etcd");
    }
    // etcd insists on a directory that is not open to others.
    files::create_dir_durably(&config.etcd.data(), 0o700)?;
    Ok(start)
}

/// Who expects no peers finds its first leader, which is itself, at once.
fn timing(config: &Config) -> Result<Timing, StandingError> {
    Ok(if standing::expects_peers(&config.etcd)? {
        Timing::Cluster
    } else {
        Timing::Alone
    })
}

/// Between a curator and the etcd below it: whether there will be other
/// members, and whether etcd is patient enough for them. Clones share it. Each
/// is a latch: what was said is not taken back, and who asks late learns of it.
#[derive(Clone, Default)]
pub struct PeerReadiness {
    /// Set by the curator.
    peers_expected: watch::Sender<bool>,
    /// Set by who runs etcd.
    peer_timing_ready: watch::Sender<bool>,
}

impl PeerReadiness {
    /// There will be other members.
    pub fn expect_peers(&self) {
        self.peers_expected.send_replace(true);
    }

    /// Whether others can be added.
    pub fn is_peer_timing_ready(&self) -> bool {
        *self.peer_timing_ready.borrow()
    }

    /// Waits until it is known that there will be others.
    async fn peers_expected(&self) {
        latched(&self.peers_expected).await;
    }

    /// Waits until others can be added.
    pub async fn peer_timing_ready(&self) {
        latched(&self.peer_timing_ready).await;
    }
}

async fn latched(latch: &watch::Sender<bool>) {
    // The sender is borrowed, so it lives.
    let _ = latch.subscribe().wait_for(|set| *set).await;
}

/// Why no client can be had at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsensusUnavailable {
    /// This node is not a consensus member.
    #[error("this node does not run consensus: ask the curators instead")]
    NoLocalConsensus,
    /// It is, and etcd does not serve (yet, or at the moment).
    #[error("consensus on this node does not serve yet")]
    NotConnected,
    /// The node is not, or no longer, a member of its cluster.
    #[error("the cluster state is {0}: consensus is for members only")]
    RefusedState(State),
}

/// A consensus member that serves.
#[derive(Clone)]
pub struct Handle {
    root: RootClient,
    serving: watch::Receiver<bool>,
    state: ClusterState,
}

impl Handle {
    /// A client for one user's part of the store, if the node is HOME or
    /// SPLIT.
    pub fn client(&self, user: ConsensusUser) -> Result<NamespacedClient, ConsensusUnavailable> {
        let state = self.state.get();
        if !matches!(state, State::Home | State::Split) {
            return Err(ConsensusUnavailable::RefusedState(state));
        }
        // The runnable that would say so may have been given up.
        let gone = self.serving.has_changed().is_err();
        if gone || !*self.serving.borrow() {
            return Err(ConsensusUnavailable::NotConnected);
        }
        Ok(match user {
            // Read by a program that is not ours, and may hang.
            ConsensusUser::Kubernetes => self.root.apart(user),
            _ => self.root.namespaced(user),
        })
    }
}

/// A consensus member that serves, to the control plane that runs it: the one
/// way to the whole store, whatever the cluster state. Everybody else gets its
/// [`Handle`].
#[derive(Clone)]
pub struct RootHandle(Handle);

impl RootHandle {
    /// The way in that other parts of the node may have.
    pub fn handle(&self) -> Handle {
        self.0.clone()
    }

    /// Everything.
    pub fn root(&self) -> &RootClient {
        &self.0.root
    }
}

/// The client that a part of the node may have at the moment; `handle` is what
/// the control plane says.
pub fn client(
    handle: Option<&Handle>,
    user: ConsensusUser,
) -> Result<NamespacedClient, ConsensusUnavailable> {
    handle
        .ok_or(ConsensusUnavailable::NoLocalConsensus)?
        .client(user)
}

/// What etcd says of itself as it runs.
pub struct Outlets {
    /// Each time that it serves.
    pub handle: event::Writer<RootHandle>,
    /// While it catches up, every quarter of a second; and once it votes.
    pub progress: event::Writer<ConsensusProgress>,
}

/// How one life of etcd ended.
enum End {
    /// It was told to.
    Told,
    /// It is to go on, more patient.
    Restart,
}

/// Runs etcd until it is told to stop, or etcd ends. Publishes a handle as
/// soon as etcd serves.
///
/// When the curator above expects other members, etcd is started once more; the
/// curator and its callers wait for that moment.
pub async fn run(ctx: Context, config: Arc<Config>, out: Arc<Outlets>) -> Outcome {
    let mut healthy = false;
    let mut good = || {
        if !std::mem::replace(&mut healthy, true) {
            ctx.healthy();
        }
    };
    loop {
        match live(&ctx, &config, &out, &mut good).await? {
            End::Told => return Ok(()),
            End::Restart => tracing::info!("etcd is started again, ready for other members"),
        }
    }
}

async fn live(
    ctx: &Context,
    config: &Config,
    out: &Outlets,
    good: &mut impl FnMut(),
) -> Result<End, Failure> {
    let begin = Instant::now();
    let start = decide(config, out.handle.value().get().is_some())?;
    let timing = timing(config).map_err(ConsensusFailure::from)?;
    let root = RootClient::new(process::socket(&config.socket_dir));
    let dn = format!("{}.etcd", ctx.name());
    let mut etcd = process::Etcd::start(config, &start, timing, dn).await?;
    tracing::info!(pid = etcd.id(), ?start, ?timing, "etcd is started");

    let (serving, serves) = watch::channel(false);
    let work = async {
        catch_up(config, &root, out, good).await?;
        serving.send_replace(true);
        out.handle.set(RootHandle(Handle {
            root: root.clone(),
            serving: serves,
            state: config.state.clone(),
        }));
        tracing::info!(after = ?begin.elapsed(), "etcd serves");
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
            standing::note_peers_expected(&config.etcd)?;
            Ok(End::Restart)
        };
        tokio::select! {
            end = other_timing => end,
            never = defrag::keep(&root, config.quota_bytes) => match never {},
        }
    };
    let outcome = tokio::select! {
        ended = etcd.ended() => Err(ended.into()),
        () = ctx.cancelled() => Ok(End::Told),
        outcome = work => outcome,
    };
    serving.send_replace(false);
    if outcome.is_ok() {
        etcd.stop().await?;
    }
    outcome
}

/// Waits until a linearizable read is answered, for ever: without a quorum
/// there is nothing else to do, and the caller watches the process. A learner
/// answers none; it tells how far it is.
async fn catch_up(
    config: &Config,
    root: &RootClient,
    out: &Outlets,
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
                if !standing::has_joined(&config.etcd) {
                    standing::note_joined(&config.etcd)?;
                }
                if !std::mem::replace(&mut said, true) {
                    tracing::info!(member = %status.id, "etcd catches up with the others");
                }
                out.progress.set(ConsensusProgress {
                    member_id: status.id.0,
                    learner: true,
                    applied_index: status.applied,
                });
                good();
                tokio::time::sleep(REPORT_INTERVAL).await;
            }
            // It is cut off. Its reads are refused at once, however long.
            Ok(status) if status.learner => tokio::time::sleep(REPORT_INTERVAL).await,
            _ => {
                tracing::info!("etcd does not serve yet: {error}");
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
    // It may have been promoted by the word of an earlier life.
    if standing::load(&config.etcd)?.is_some() && !standing::has_joined(&config.etcd) {
        standing::note_joined(&config.etcd)?;
    }
    Ok(())
}

/// Says which member it is, now that it votes. Tries until etcd tells.
async fn report_voter(root: &RootClient, out: &Outlets) {
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
            Err(error) => tracing::info!("etcd does not say which member it is: {error}"),
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::new_without_default)]
// It is test code, and fails as tests do.
pub mod testing;
#[cfg(test)]
mod tests;
