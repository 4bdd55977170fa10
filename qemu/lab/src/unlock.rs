//! A cold start: the nodes of an encrypted cluster that was off as a whole wait for its owner, and this module unlocks
//! them, as `hearthctl cluster unlock` does.
//!
//! The machines boot one after the other, so there are several rounds: each unlocks the nodes that wait by then and that a
//! quorum still needs. The other nodes get their keys from the cluster.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use hearth_api::client::Endpoint;
use hearth_api::identity::NodeId;
use hearth_api::tls::wall_clock;
use hearth_operator::unlock::{Keys, Outcome, Scope, Search, UnlockError, unlock};
use hearth_qemu::cluster;

use crate::Result;
use crate::events::Event;
use crate::fleet::Machines;
use crate::hearthctl::unlock_command;
use crate::owner::Owner;
use crate::record::{ClusterRecord, Storage};
use crate::session::{CALL, Session};

/// Between two rounds: nodes that boot do not report when they wait.
const PAUSE: Duration = Duration::from_millis(500);

/// Bound for each connection and call of a search. A machine that is still booting answers nothing, and a round is as long
/// as its slowest answer.
const LOOK: Duration = Duration::from_secs(5);

/// The rounds of a cold start.
#[derive(Clone)]
pub(crate) struct ColdStart {
    keys: Keys,
    search: Search,
    /// Whether the user unlocks the nodes.
    by_user: bool,
}

/// The result of a round.
#[derive(Debug)]
pub(crate) enum Round {
    /// No node waits yet.
    Nobody,
    /// A node waits for the user.
    Waits,
    /// Nodes were unlocked, or could not be.
    Tried(Outcome),
}

impl ColdStart {
    /// One round.
    pub(crate) fn round(self) -> BoxFuture<'static, (ColdStart, Result<Round>)> {
        Box::pin(async {
            tokio::time::sleep(PAUSE).await;
            let round = self.try_once().await;
            (self, round)
        })
    }

    async fn try_once(&self) -> Result<Round> {
        let found = self.search.find().await?;
        if found.locked.is_empty() {
            return Ok(Round::Nobody);
        }
        if self.by_user {
            return Ok(Round::Waits);
        }
        let outcome = unlock(&found, &self.keys, Scope::Quorum, CALL, |step| {
            tracing::debug!("{step}");
        });
        Ok(Round::Tried(outcome.await))
    }
}

impl Session<'_> {
    /// The cold start of a cluster whose nodes may wait for their owner.
    pub(crate) fn cold_start(
        &self,
        fleet: &Machines,
        record: &ClusterRecord,
    ) -> Result<Option<ColdStart>> {
        let state = self.state.path();
        // Machines that were never started have nothing to unlock.
        if record.storage != Some(Storage::Encrypted) || cluster::known(state)?.is_empty() {
            return Ok(None);
        }
        let Some(keys) = Owner::load(state)?.keys() else {
            return Ok(None);
        };
        let routes = fleet.routes().into_iter();
        let ports = fleet.unlock_ports().into_iter();
        Ok(Some(ColdStart {
            keys,
            search: Search {
                endpoints: ports.map(Endpoint::from).collect(),
                routes: routes
                    .map(|(from, via)| (SocketAddr::from(from).into(), via.into()))
                    .collect(),
                cluster: None,
                running: BTreeSet::new(),
                timeout: LOOK,
                clock: wall_clock(),
            },
            by_user: self.no_unlock,
        }))
    }

    /// Processes the result of a round; returns the next one, if one is needed.
    ///
    /// # Errors
    /// If the owner's keys are not those of the cluster.
    pub(crate) async fn unlocked(
        &self,
        fleet: &mut Machines,
        record: &ClusterRecord,
        mut start: ColdStart,
        round: Result<Round>,
    ) -> Result<Option<ColdStart>> {
        let outcome = match round? {
            Round::Nobody => return Ok(Some(start)),
            Round::Waits => {
                self.leave_to_user(fleet).await?;
                return Ok(None);
            }
            Round::Tried(outcome) => outcome,
        };
        for id in outcome.unlocked() {
            let machine = machine(record, id).unwrap_or_else(|| id.to_string());
            self.tell(&Event::Unlocked { machine: &machine });
            start.search.running.insert(id);
        }
        for (id, error) in outcome.failures() {
            let why = format!("{id}: {}", hearth_api::chain(error));
            match error {
                // It may have restarted, or the host is busy.
                UnlockError::Connect(_) | UnlockError::Call(_) => fleet.wait_for(0, &why),
                _ => return Err(fleet.failure(0, why)),
            }
        }
        Ok((!outcome.quorum.is_reached()).then_some(start))
    }

    /// Reports what the user runs, for which hearthctl knows the addresses of this run.
    async fn leave_to_user(&self, fleet: &Machines) -> Result<()> {
        let mut ports = Vec::new();
        match self.hearthctl.config.exists() {
            true => self.hearthctl.set_routes(&fleet.routes()).await?,
            // The cluster was cut off before its owner had a certificate.
            false => ports = fleet.unlock_ports(),
        }
        let command = unlock_command(self.state.path(), &ports);
        self.tell(&Event::OwnerNeeded { command: &command });
        Ok(())
    }
}

/// The machine of this node, if it was recorded.
fn machine(record: &ClusterRecord, id: NodeId) -> Option<String> {
    let id = id.to_string();
    let mut members = record.members.iter();
    members
        .find(|(_, member)| **member == id)
        .map(|(machine, _)| machine.clone())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use hearth_api::identity::ClusterId;
    use hearth_api::testing::{LockedNode, TestLockedNode};
    use hearth_api::v1::ClusterDirectory;
    use hearth_api::v1::cluster_directory::Node;

    use super::*;
    use crate::record::RunOptions;

    const NODES: [NodeId; 3] = [
        NodeId::from_bytes([1; 16]),
        NodeId::from_bytes([2; 16]),
        NodeId::from_bytes([3; 16]),
    ];

    fn cold_start(owner: &Owner, by_user: bool) -> ColdStart {
        ColdStart {
            keys: owner.keys().unwrap(),
            search: Search {
                endpoints: Vec::new(),
                routes: BTreeMap::new(),
                cluster: None,
                running: BTreeSet::new(),
                timeout: LOOK,
                clock: wall_clock(),
            },
            by_user,
        }
    }

    async fn node(owner: &Owner, cluster_id: ClusterId, node_id: NodeId) -> TestLockedNode {
        let nodes = NODES.map(|id| Node {
            id: id.to_string(),
            ..Node::default()
        });
        TestLockedNode::start(LockedNode {
            cluster_id,
            node_id,
            owner: owner.key.public(),
            recipient: owner.recovery.as_ref().unwrap().recipient(),
            directory: ClusterDirectory {
                nodes: nodes.into(),
            },
            other_disk: false,
        })
        .await
    }

    #[tokio::test]
    async fn nodes_that_boot_one_after_the_other_are_unlocked_up_to_a_quorum() {
        let (owner, cluster) = (Owner::generate(), ClusterId::generate());
        let (mut start, round) = cold_start(&owner, false).round().await;
        assert!(matches!(round, Ok(Round::Nobody)), "{round:?}");
        let mut nodes = Vec::new();
        for (id, reached) in [(NODES[1], false), (NODES[2], true)] {
            let node = node(&owner, cluster, id).await;
            start.search.endpoints.push(node.endpoint());
            nodes.push(node);
            let (next, round) = start.round().await;
            let Ok(Round::Tried(outcome)) = round else {
                panic!("{round:?}");
            };
            start = next;
            assert_eq!(outcome.quorum.is_reached(), reached);
            assert_eq!(outcome.unlocked(), BTreeSet::from([id]));
            start.search.running.extend(outcome.unlocked());
        }
        assert!(nodes.iter().all(TestLockedNode::is_unlocked));
    }

    #[tokio::test]
    async fn what_is_left_to_the_user_stays_locked() {
        let owner = Owner::generate();
        let node = node(&owner, ClusterId::generate(), NODES[0]).await;
        let mut start = cold_start(&owner, true);
        start.search.endpoints.push(node.endpoint());
        let (_, round) = start.round().await;
        assert!(matches!(round, Ok(Round::Waits)), "{round:?}");
        assert_eq!(node.answers(), 0);
    }

    #[test]
    fn a_node_is_called_by_its_machine() {
        let mut record = ClusterRecord::new(&RunOptions::default());
        assert_eq!(machine(&record, NODES[0]), None);
        let member = ("node-2".to_owned(), NODES[0].to_string());
        record.members.extend([member]);
        assert_eq!(machine(&record, NODES[0]).as_deref(), Some("node-2"));
    }
}
