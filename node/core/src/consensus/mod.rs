//! Consensus: etcd as a supervised child process, and the only ways to it.
//!
//! etcd talks to its peers by mutual TLS under an authority of its own; to
//! clients it talks on a unix socket in a directory of root's alone. Nobody in
//! the node opens that socket but this module: parts of the node get a
//! [`NamespacedClient`] that is shut into the prefix of one [`ConsensusUser`],
//! and writes go through [`fenced`] only.
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
pub mod fenced;
mod log;
mod members;
mod process;

/// etcd's interface, as generated from `proto/etcd.proto`.
#[allow(missing_docs, clippy::all, rust_2018_idioms)]
mod wire {
    tonic::include_proto!("etcdserverpb");
}

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use hearth_api::identity::{ClusterId, NodeId};
use hearth_base::{
    event,
    logtree::LogTree,
    supervisor::{Context, Outcome},
    sys::files::{self, FileError},
};
use tokio::{sync::watch, time::Instant};

use crate::{
    cluster_state::{ClusterState, State},
    layout,
    pki::{self, PkiError},
};

pub use client::{
    Change, Changes, ConsensusError, ConsensusUser, Lease, Listing, NamespacedClient, Record,
    RootClient, WatchEnd,
};
pub use members::{Member, MemberId, MemberStatus, Members, peer_url};
pub use process::ProcessError;

/// etcd's store may grow to this. Its default is twice that, which is more
/// than small disks have.
pub const DEFAULT_QUOTA: u64 = 1 << 30;

/// How patient the members of etcd are with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// There is no other member: the only election is the one at the start,
    /// for which a boot waits, so it happens at once (heartbeat 20 ms,
    /// election 100 ms).
    Alone,
    /// Machines that may be slow for a while (heartbeat 500 ms, election 5 s).
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
    /// See there.
    pub timing: Timing,
    /// Bytes; etcd refuses writes beyond it.
    pub quota_bytes: u64,
    /// The program.
    pub binary: PathBuf,
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
    /// The disk.
    #[error("remove the data of a founding that was interrupted: {path}")]
    Discard {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// How etcd is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// As the first member of a new cluster, with an empty directory.
    New,
    /// As the member that its data say it is.
    Existing,
}

/// Decides from what is durable.
///
/// | | data | no data |
/// |---|---|---|
/// | founding not acknowledged | discard them, new | new |
/// | otherwise | existing | refuse |
///
/// A founding is acknowledged once the node's credentials are durable: before
/// that nobody has heard of the cluster, and an etcd whose very first writes
/// were cut off cannot be trusted to start again. The authorities' keys must
/// still be there as well; they are taken away after the credentials were
/// saved, so that two independent facts have to speak for discarding anything.
/// And nothing is discarded once this etcd has `served`: somebody may be about
/// to save the credentials of what was founded in it.
fn decide(config: &Config, served: bool) -> Result<Start, ConsensusFailure> {
    let peer = config.etcd.peer();
    for path in [peer.ca(), peer.certificate(), peer.key()] {
        if !path.exists() {
            return Err(ConsensusFailure::Missing { path });
        }
    }
    let data = config.etcd.data();
    let acknowledged = served
        || !config.founding
        || config.credentials.certificate().exists()
        || !pki::has_authority_keys(&config.etcd)?;
    if acknowledged {
        // etcd makes the directory first and the log in it later, whole.
        let log = data.join("member").join("wal");
        return if log.exists() {
            Ok(Start::Existing)
        } else {
            Err(ConsensusFailure::Missing { path: log })
        };
    }
    match std::fs::remove_dir_all(&data) {
        Ok(()) => {
            tracing::info!("discarded what an interrupted founding left in etcd");
            files::sync_dir(config.etcd.path())?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(ConsensusFailure::Discard { path: data, source }),
    }
    // etcd insists on a directory that is not open to others.
    files::create_dir_durably(&data, 0o700)?;
    Ok(Start::New)
}

/// Between a curator and the etcd below it: whether there will be other
/// members, and whether etcd is patient enough for them. A copy each for both.
#[derive(Clone)]
pub struct Company {
    /// Set by the curator.
    expected: Arc<event::Writer<()>>,
    /// Set by who runs etcd.
    ready: Arc<event::Writer<()>>,
}

impl Default for Company {
    fn default() -> Self {
        Self {
            expected: Arc::new(event::value().0),
            ready: Arc::new(event::value().0),
        }
    }
}

impl Company {
    /// Of an etcd that is not alone, or does not mind.
    pub fn is_here() -> Self {
        let company = Self::default();
        company.ready.set(());
        company
    }

    /// There will be others.
    pub fn expect(&self) {
        if self.expected.value().get().is_none() {
            self.expected.set(());
        }
    }

    /// Whether others can be added.
    pub fn is_ready(&self) -> bool {
        self.ready.value().get().is_some()
    }
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
        Ok(self.root.namespaced(user))
    }

    /// Everything, for the control plane itself, whatever the state.
    pub fn root(&self) -> &RootClient {
        &self.root
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

/// Runs etcd until it is told to stop, or etcd ends. Publishes a handle as
/// soon as etcd serves.
pub async fn run(ctx: Context, config: Arc<Config>, out: Arc<event::Writer<Handle>>) -> Outcome {
    let begin = Instant::now();
    let start = decide(&config, out.value().get().is_some())?;
    let root = RootClient::new(process::socket(&config.socket_dir));
    let dn = format!("{}.etcd", ctx.name());
    let mut etcd = process::Etcd::start(&config, start == Start::New, dn).await?;
    tracing::info!(pid = etcd.id(), ?start, "etcd is started");

    let (serving, serves) = watch::channel(false);
    tokio::select! {
        () = first_read(&root) => {}
        ended = etcd.ended() => return Err(ended.into()),
        () = ctx.cancelled() => {
            etcd.stop().await?;
            return Ok(());
        }
    }
    serving.send_replace(true);
    out.set(Handle {
        root,
        serving: serves,
        state: config.state.clone(),
    });
    tracing::info!(after = ?begin.elapsed(), "etcd serves");
    ctx.healthy();

    let outcome = tokio::select! {
        ended = etcd.ended() => Err(ended.into()),
        () = ctx.cancelled() => Ok(()),
    };
    serving.send_replace(false);
    if outcome.is_ok() {
        etcd.stop().await?;
    }
    outcome
}

/// Waits until a linearizable read is answered, for ever: without a quorum
/// there is nothing else to do, and the caller watches the process.
async fn first_read(root: &RootClient) {
    const ATTEMPT: Duration = Duration::from_secs(10);
    let client = root.namespaced(ConsensusUser::Curator).bounded(ATTEMPT);
    while let Err(error) = client.get(fenced::EPOCH).await {
        tracing::info!("etcd does not serve yet: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::new_without_default)]
// It is test code, and fails as tests do.
pub mod testing;
#[cfg(test)]
mod tests;
