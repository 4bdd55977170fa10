//! The owner's side of unlocking: finds the nodes of a cluster that is not running, and gives them
//! the keys of their data partitions.
//!
//! An encrypted node whose cluster cannot give it its key waits for its owner, at a port without TLS
//! ([`hearth_api::recovery`] documents what passes through it). [`Search::find`] lists such nodes,
//! [`plan()`] decides which of them are needed for a quorum, and [`unlock`] answers their challenges.
//! The rest of the cluster gets its keys from the curators that then run.
//!
//! # Invariants
//! - A node's key is sent to this node only, encrypted, and only after the recovery key has opened
//!   it: who merely claims to be a node of the cluster is neither answered nor counted.
//! - No node of another cluster than the expected one is unlocked.
//! - No more nodes are unlocked than a quorum needs, unless all are requested: each of them runs
//!   with its key in memory from then on.

mod find;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use futures::future::join_all;
use hearth_api::client::{self, AttemptError, Endpoint};
use hearth_api::identity::{NodeId, OwnerKey};
use hearth_api::recovery::{RecoveryError, RecoveryKey};
use hearth_api::v1::UnlockRequest;
use hearth_api::v1::node_unlock_client::NodeUnlockClient;
use tonic::{Code, Status};

pub use find::{AskError, Found, Locked, MixedClusters, Search};
pub use plan::{Plan, Quorum, plan};

/// The owner's keys.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Signs the answers.
    pub owner: OwnerKey,
    /// Opens the nodes' wrapped keys.
    pub recovery: RecoveryKey,
}

/// Which nodes are unlocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// As many as a quorum needs.
    Quorum,
    /// All that were found.
    All,
}

/// Why a node was not unlocked.
#[derive(Debug, thiserror::Error)]
pub enum UnlockError {
    /// The recovery key is not the one to which the node's key was encrypted.
    #[error(
        "the recovery key does not open the key of this node: expected the recovery key of its \
         cluster (this was found out on this machine: nothing was sent)"
    )]
    RecoveryKey(#[from] RecoveryError),
    /// The node has rejected the answer's signature.
    #[error("the node rejected the owner key: expected that of its cluster ({said})")]
    OwnerKey {
        /// The node's message.
        said: String,
    },
    /// The node's data partition does not open with the key.
    #[error("the key does not open the node's data partition ({said})")]
    Key {
        /// The node's message.
        said: String,
    },
    /// The node cannot be reached any more.
    #[error(transparent)]
    Connect(#[from] AttemptError),
    /// The call failed.
    #[error("Unlock failed")]
    Call(#[source] Box<Status>),
}

impl From<Status> for UnlockError {
    fn from(status: Status) -> Self {
        let said = status.message().to_owned();
        match status.code() {
            Code::PermissionDenied => Self::OwnerKey { said },
            Code::InvalidArgument => Self::Key { said },
            _ => Self::Call(Box::new(status)),
        }
    }
}

/// What is known of a node.
#[derive(Debug)]
pub enum NodeState {
    /// It waits to be unlocked, and was not needed.
    Locked,
    /// It was unlocked.
    Unlocked,
    /// It runs.
    Running,
    /// It answers at none of its addresses.
    Silent,
    /// It waits to be unlocked, and that failed.
    Failed(UnlockError),
}

impl NodeState {
    /// Its word in tables and JSON.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Locked => "LOCKED",
            Self::Unlocked => "UNLOCKED",
            Self::Running => "RUNNING",
            Self::Silent => "SILENT",
            Self::Failed(_) => "FAILED",
        }
    }
}

/// A node after the attempt.
#[derive(Debug)]
pub struct Node {
    /// Where it answered; for a node that is not locked, an address in the directory.
    pub endpoint: Option<Endpoint>,
    /// Its state.
    pub state: NodeState,
}

/// The result of [`unlock`].
#[derive(Debug)]
pub struct Outcome {
    /// The consensus members, and other nodes that wait.
    pub nodes: BTreeMap<NodeId, Node>,
    /// The quorum with the nodes that were unlocked.
    pub quorum: Quorum,
}

impl Outcome {
    /// The nodes that were unlocked.
    pub fn unlocked(&self) -> BTreeSet<NodeId> {
        let nodes = self.nodes.iter();
        let unlocked = nodes.filter(|(_, node)| matches!(node.state, NodeState::Unlocked));
        unlocked.map(|(id, _)| *id).collect()
    }

    /// The nodes that could not be unlocked, and why not.
    pub fn failures(&self) -> impl Iterator<Item = (NodeId, &UnlockError)> {
        self.nodes
            .iter()
            .filter_map(|(id, node)| match &node.state {
                NodeState::Failed(error) => Some((*id, error)),
                _ => None,
            })
    }
}

/// An event of [`unlock`].
#[derive(Debug)]
pub enum Step<'a> {
    /// A node was unlocked.
    Unlocked(NodeId),
    /// A node was not unlocked.
    Failed(NodeId, &'a UnlockError),
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlocked(id) => write!(f, "{id}: unlocked"),
            Self::Failed(id, error) => {
                write!(f, "{id}: not unlocked: {}", hearth_api::chain(*error))
            }
        }
    }
}

/// A node whose challenge the recovery key has answered.
struct Ready<'a> {
    locked: &'a Locked,
    request: UnlockRequest,
}

/// Unlocks nodes that were found. If one of them fails, another one is unlocked in its place, as
/// long as there is one. `timeout` limits each connection and each call.
pub async fn unlock(
    found: &Found,
    keys: &Keys,
    scope: Scope,
    timeout: Duration,
    mut told: impl FnMut(Step<'_>),
) -> Outcome {
    let (ready, mut failed) = answer_all(found, keys);
    for (id, error) in &failed {
        told(Step::Failed(*id, error));
    }
    let directories = directories(found, &ready);
    let mut waiting: BTreeSet<NodeId> = ready.keys().copied().collect();
    let mut unlocked = BTreeSet::new();
    loop {
        let up = found.running.union(&unlocked).copied().collect();
        let chosen = match scope {
            Scope::Quorum => plan(&directories, &waiting, &up).unlock,
            Scope::All => waiting.clone(),
        };
        if chosen.is_empty() {
            break;
        }
        let calls = chosen.iter().filter_map(|id| ready.get(id));
        let calls = calls.map(|ready| async {
            let given = hand_over(ready, keys, timeout).await;
            (ready.locked.id(), given)
        });
        for (id, given) in join_all(calls).await {
            waiting.remove(&id);
            match given {
                Ok(()) => {
                    told(Step::Unlocked(id));
                    unlocked.insert(id);
                }
                Err(error) => {
                    told(Step::Failed(id, &error));
                    failed.insert(id, error);
                }
            }
        }
    }
    let up = found.running.union(&unlocked).copied().collect();
    Outcome {
        quorum: Quorum::least(&directories, &up),
        nodes: nodes(found, &ready, &unlocked, failed),
    }
}

/// The answers to all challenges that the recovery key opens, and why it does not open the others.
fn answer_all<'a>(
    found: &'a Found,
    keys: &Keys,
) -> (BTreeMap<NodeId, Ready<'a>>, BTreeMap<NodeId, UnlockError>) {
    let (mut ready, mut failed) = (BTreeMap::new(), BTreeMap::new());
    for locked in &found.locked {
        match locked.challenge.answered(&keys.recovery, &keys.owner) {
            Ok(request) => {
                ready.insert(locked.id(), Ready { locked, request });
            }
            Err(error) => {
                failed.insert(locked.id(), UnlockError::from(error));
            }
        }
    }
    // Somebody else has claimed to be this node.
    failed.retain(|id, _| !ready.contains_key(id));
    (ready, failed)
}

/// The lists of consensus members according to the nodes of the owner; as long as there is none,
/// according to all.
fn directories(found: &Found, ready: &BTreeMap<NodeId, Ready<'_>>) -> Vec<BTreeSet<NodeId>> {
    let voters = |locked: &Locked| locked.curators.keys().copied().collect();
    let mut all: BTreeSet<BTreeSet<NodeId>> = match ready.is_empty() {
        true => found.locked.iter().map(voters).collect(),
        false => ready.values().map(|ready| voters(ready.locked)).collect(),
    };
    all.remove(&BTreeSet::new());
    if all.is_empty() {
        // Not even itself: such a node was stopped before it had an address.
        all.insert(found.locked.iter().map(Locked::id).collect());
    }
    all.into_iter().collect()
}

/// Sends an answer. If the node has restarted since, its new challenge is answered.
async fn hand_over(ready: &Ready<'_>, keys: &Keys, timeout: Duration) -> Result<(), UnlockError> {
    let locked = ready.locked;
    let given = send(&locked.endpoint, ready.request.clone(), timeout).await;
    let Err(UnlockError::OwnerKey { said }) = given else {
        return given;
    };
    match find::ask(&locked.endpoint, timeout).await {
        Ok(again) if again.challenge != locked.challenge && again.id() == locked.id() => {
            let request = again.challenge.answered(&keys.recovery, &keys.owner)?;
            send(&locked.endpoint, request, timeout).await
        }
        _ => Err(UnlockError::OwnerKey { said }),
    }
}

async fn send(
    endpoint: &Endpoint,
    request: UnlockRequest,
    timeout: Duration,
) -> Result<(), UnlockError> {
    let channel = client::connect_plain(endpoint, timeout).await?;
    let mut node = NodeUnlockClient::new(channel);
    client::within(timeout, node.unlock(request)).await?;
    Ok(())
}

fn nodes(
    found: &Found,
    ready: &BTreeMap<NodeId, Ready<'_>>,
    unlocked: &BTreeSet<NodeId>,
    failed: BTreeMap<NodeId, UnlockError>,
) -> BTreeMap<NodeId, Node> {
    let mut nodes = BTreeMap::new();
    for (id, addresses) in found.curators() {
        let state = match found.running.contains(&id) {
            true => NodeState::Running,
            false => NodeState::Silent,
        };
        let endpoint = addresses.into_iter().next();
        nodes.insert(id, Node { endpoint, state });
    }
    let claimed = found.locked.iter().map(|locked| (locked.id(), locked));
    let proven = ready.iter().map(|(id, ready)| (*id, ready.locked));
    for (id, locked) in claimed.chain(proven) {
        let state = match unlocked.contains(&id) {
            true => NodeState::Unlocked,
            false => NodeState::Locked,
        };
        let endpoint = Some(locked.endpoint.clone());
        nodes.insert(id, Node { endpoint, state });
    }
    for (id, error) in failed {
        if let Some(node) = nodes.get_mut(&id) {
            node.state = NodeState::Failed(error);
        }
    }
    nodes
}

#[cfg(test)]
mod tests;
