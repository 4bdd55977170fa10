//! Finds the nodes that wait to be unlocked, and those of the same cluster that are running.
//!
//! A locked node has no certificate, and whoever is at its address can answer in its place. So what
//! is found here is a list of challenges, each signed by the key that it names, and nothing more:
//! whether one is by a node of the owner shows when its wrapped key is opened. Directories are not
//! signed at all. They lead to further addresses, whose number is limited.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use futures::future::join_all;
use hearth_api::client::{self, AttemptError, Endpoint};
use hearth_api::first_contact;
use hearth_api::identity::{ClusterId, NodeId};
use hearth_api::names::{PORT_NODE_MANAGEMENT, PORT_UNLOCK};
use hearth_api::recovery::{Challenge, RecoveryError};
use hearth_api::tls::Clock;
use hearth_api::v1::node_unlock_client::NodeUnlockClient;
use hearth_api::v1::{ClusterDirectory, GetUnlockChallengeRequest};
use tonic::Status;

/// More entries of one directory, or more addresses of one node, are ignored.
const MAX_ENTRIES: usize = 64;
/// More addresses from all directories together are ignored.
const MAX_ADDRESSES: usize = 256;

/// Where to look.
#[derive(Clone)]
pub struct Search {
    /// Addresses of unlock ports.
    pub endpoints: Vec<Endpoint>,
    /// Connections to an address of the cluster go to another one: for clusters in another network.
    pub routes: BTreeMap<Endpoint, Endpoint>,
    /// Only nodes of this cluster. `None`: of that of the first node that answers.
    pub cluster: Option<ClusterId>,
    /// Nodes that are known to be running, such as those that were unlocked a moment ago.
    pub running: BTreeSet<NodeId>,
    /// Limits each connection and each call.
    pub timeout: Duration,
    /// The clock by which certificates expire.
    pub clock: Clock,
}

/// Nothing was found at an address that could be unlocked.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody is there.
    #[error(transparent)]
    Connect(#[from] AttemptError),
    /// The call failed.
    #[error("GetUnlockChallenge failed")]
    Call(#[source] Box<Status>),
    /// The answer has no challenge, or an invalid one.
    #[error("invalid challenge")]
    Challenge(#[from] RecoveryError),
}

/// The given addresses are of nodes of two clusters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected nodes of one cluster, got cluster {first} at {first_at} and cluster {other} at {other_at}"
)]
pub struct MixedClusters {
    /// The first cluster.
    pub first: ClusterId,
    /// The address of its node.
    pub first_at: Endpoint,
    /// Another cluster.
    pub other: ClusterId,
    /// The address of its node.
    pub other_at: Endpoint,
}

/// A node that waits to be unlocked, according to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locked {
    /// Where it answered.
    pub endpoint: Endpoint,
    /// Its challenge.
    pub challenge: Challenge,
    /// The consensus members that it knows, with the addresses of their curators.
    pub curators: BTreeMap<NodeId, Vec<Endpoint>>,
}

impl Locked {
    /// Its ID.
    pub fn id(&self) -> NodeId {
        self.challenge.node().node_id
    }

    /// The ID of its cluster.
    pub fn cluster(&self) -> ClusterId {
        self.challenge.node().cluster_id
    }
}

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// The cluster; `None` if none is expected and no node waits.
    pub cluster: Option<ClusterId>,
    /// Its nodes that wait. More than one may claim the same ID.
    pub locked: Vec<Locked>,
    /// Nodes of other clusters that wait.
    pub strangers: Vec<Locked>,
    /// Its nodes that are running.
    pub running: BTreeSet<NodeId>,
    /// Addresses at which no node waits, and why not.
    pub silent: Vec<(Endpoint, AskError)>,
}

impl Found {
    /// The consensus members that the nodes know, with the addresses of their curators.
    pub fn curators(&self) -> BTreeMap<NodeId, BTreeSet<Endpoint>> {
        let mut all = BTreeMap::<NodeId, BTreeSet<Endpoint>>::new();
        for (id, addresses) in self.locked.iter().flat_map(|locked| &locked.curators) {
            all.entry(*id)
                .or_default()
                .extend(addresses.iter().cloned());
        }
        all
    }

    /// Sorts the answers of some addresses into those of the cluster and others.
    fn add(&mut self, answers: Vec<(Endpoint, Result<Locked, AskError>)>) {
        for (endpoint, answer) in answers {
            match answer {
                Ok(locked) if Some(locked.cluster()) != self.cluster => self.strangers.push(locked),
                // The same node at another of its addresses.
                Ok(locked) if self.locked.iter().any(|l| l.challenge == locked.challenge) => {}
                Ok(locked) => self.locked.push(locked),
                Err(error) => self.silent.push((endpoint, error)),
            }
        }
    }
}

impl Search {
    /// The address to connect to instead of `address`.
    pub fn reach(&self, address: Endpoint) -> Endpoint {
        self.routes.get(&address).cloned().unwrap_or(address)
    }

    /// Asks the given addresses, and those in the answers.
    ///
    /// # Errors
    /// If no cluster is expected, and nodes of two clusters answer at the given addresses.
    pub async fn find(&self) -> Result<Found, MixedClusters> {
        let mut asked: BTreeSet<Endpoint> = self.endpoints.iter().cloned().collect();
        let answers = self.ask_all(self.endpoints.clone()).await;
        let mut found = Found {
            cluster: match self.cluster {
                Some(cluster) => Some(cluster),
                None => only_cluster(&answers)?,
            },
            ..Found::default()
        };
        found.add(answers);
        loop {
            let next = self.leads(&found, &asked);
            if next.is_empty() {
                break;
            }
            asked.extend(next.iter().cloned());
            found.add(self.ask_all(next).await);
        }
        found.running = self.running_nodes(&found).await;
        Ok(found)
    }

    /// Unlock ports in the directories that were not asked yet.
    fn leads(&self, found: &Found, asked: &BTreeSet<Endpoint>) -> Vec<Endpoint> {
        let curators = found.curators();
        let addresses = curators.values().flatten();
        let ports = addresses.map(|address| self.reach(address.at_port(PORT_UNLOCK)));
        let new: BTreeSet<Endpoint> = ports.filter(|port| !asked.contains(port)).collect();
        let room = (self.endpoints.len() + MAX_ADDRESSES).saturating_sub(asked.len());
        new.into_iter().take(room).collect()
    }

    async fn ask_all(&self, ports: Vec<Endpoint>) -> Vec<(Endpoint, Result<Locked, AskError>)> {
        let asked = ports.into_iter().map(|port| async {
            let answer = ask(&port, self.timeout).await;
            (port, answer)
        });
        join_all(asked).await
    }

    /// The consensus members that are not locked, and serve as a node of this cluster.
    async fn running_nodes(&self, found: &Found) -> BTreeSet<NodeId> {
        let locked: BTreeSet<NodeId> = found.locked.iter().map(Locked::id).collect();
        let others = found.curators().into_iter();
        let looks = others
            .filter(|(id, _)| !locked.contains(id) && !self.running.contains(id))
            .map(|(id, addresses)| async move {
                let runs = self.runs(found.cluster, id, &addresses).await;
                runs.then_some(id)
            });
        let seen = join_all(looks).await.into_iter().flatten();
        seen.chain(self.running.difference(&locked).copied())
            .collect()
    }

    /// Whether the node serves at one of these addresses. Its curator does only with a quorum, its
    /// management also without.
    async fn runs(
        &self,
        cluster: Option<ClusterId>,
        id: NodeId,
        addresses: &BTreeSet<Endpoint>,
    ) -> bool {
        let ports = addresses
            .iter()
            .flat_map(|address| [address.clone(), address.at_port(PORT_NODE_MANAGEMENT)]);
        let looks = ports.map(|port| self.served_by(self.reach(port)));
        let seen = join_all(looks).await;
        seen.into_iter()
            .flatten()
            .any(|node| (Some(node.0), node.1) == (cluster, id))
    }

    /// The node that serves at an address, according to its certificate. It proves little, because
    /// the CA may not be known: whoever forges it only makes the owner unlock fewer nodes.
    async fn served_by(&self, endpoint: Endpoint) -> Option<(ClusterId, NodeId)> {
        let clock = self.clock.clone();
        let identity = first_contact::claimed_identity(&endpoint, self.timeout, clock).await?;
        Some((identity.cluster, identity.node_id()?))
    }
}

/// The cluster of all nodes that have answered.
fn only_cluster(
    answers: &[(Endpoint, Result<Locked, AskError>)],
) -> Result<Option<ClusterId>, MixedClusters> {
    let mut nodes = answers
        .iter()
        .filter_map(|(_, answer)| answer.as_ref().ok());
    let Some(first) = nodes.next() else {
        return Ok(None);
    };
    match nodes.find(|node| node.cluster() != first.cluster()) {
        None => Ok(Some(first.cluster())),
        Some(other) => Err(MixedClusters {
            first: first.cluster(),
            first_at: first.endpoint.clone(),
            other: other.cluster(),
            other_at: other.endpoint.clone(),
        }),
    }
}

/// Asks one address for its node's challenge, and verifies it.
pub(super) async fn ask(endpoint: &Endpoint, timeout: Duration) -> Result<Locked, AskError> {
    let channel = client::connect_plain(endpoint, timeout).await?;
    let mut node = NodeUnlockClient::new(channel);
    let call = node.get_unlock_challenge(GetUnlockChallengeRequest {});
    let answer = client::within(timeout, call)
        .await
        .map_err(|status| AskError::Call(Box::new(status)))?
        .into_inner();
    Ok(Locked {
        endpoint: endpoint.clone(),
        challenge: Challenge::parse(&answer.challenge.unwrap_or_default())?,
        curators: curators(&answer.directory.unwrap_or_default()),
    })
}

/// The entries of a directory. Malformed ones are ignored: they would only lead nowhere.
fn curators(directory: &ClusterDirectory) -> BTreeMap<NodeId, Vec<Endpoint>> {
    let entries = directory.nodes.iter().take(MAX_ENTRIES);
    let entry = |node: &hearth_api::v1::cluster_directory::Node| {
        let addresses = node.addresses.iter().take(MAX_ENTRIES);
        let endpoints = addresses.filter_map(|address| {
            let host: IpAddr = address.host.parse().ok()?;
            Some(Endpoint::new(host, u16::try_from(address.port).ok()?))
        });
        Some((node.id.parse().ok()?, endpoints.collect()))
    };
    entries.filter_map(entry).collect()
}
