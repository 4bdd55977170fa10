//! A run: machines, their owner, and the state of their cluster.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::v1::NodeState;
use hearth_operator::{ClusterStatus, Operator};
use hearth_qemu::cluster;
use hearth_tpm::images::TrustedImage;

use crate::events::{Event, Observer};
use crate::fleet::{Machines, News};
use crate::formation::{Candidate, VOTERS};
use crate::hearthctl::Hearthctl;
use crate::owner::Owner;
use crate::record::ClusterRecord;
use crate::state::State;
use crate::{LabError, Result};

/// Bound for each call: none of them waits for an event, but a host that boots machines is busy.
pub(crate) const CALL: Duration = Duration::from_secs(20);

/// A run of a cluster that is kept.
pub struct Session<'a> {
    /// The state folder.
    pub state: &'a State,
    /// Parameters of the first node.
    pub parameters: Vec<u8>,
    /// The operator's tool, with the contexts of this cluster.
    pub hearthctl: Hearthctl,
    /// Number of nodes, the last ones, that are left for the user to approve.
    pub join_later: u16,
    /// The image of machines with a TPM, for the cluster to trust.
    pub image: Option<TrustedImage>,
    /// Whether an encrypted cluster is left for the user to unlock.
    pub no_unlock: bool,
    /// Bound for each node to become HOME and answer.
    pub timeout: Duration,
    /// Receives the events.
    pub observer: Arc<dyn Observer>,
}

/// Makes calls to the cluster from this process, as an owner, to these curators.
pub(crate) struct Asker {
    owner: Owner,
    curators: Vec<Endpoint>,
    image: Option<TrustedImage>,
}

impl Asker {
    /// Gets a certificate for the owner key, and has the cluster trust the image of its machines.
    pub(crate) async fn connect(&self) -> Result<Operator> {
        let taken = self.owner.take_ownership(self.curators.clone(), CALL).await;
        let operator = taken?;
        if let Some(image) = &self.image {
            let trusted = operator.trust_image(image).await;
            trusted.map_err(LabError::call("TrustImage"))?;
        }
        Ok(operator)
    }
}

impl Session<'_> {
    pub(crate) fn tell(&self, event: &Event<'_>) {
        self.observer.event(event);
    }

    /// The owner of this cluster.
    pub(crate) fn asker(&self, fleet: &Machines) -> Result<Asker> {
        let curators = fleet.curators().into_iter();
        Ok(Asker {
            owner: Owner::load(self.state.path())?,
            curators: curators.map(Endpoint::from).collect(),
            image: self.image.clone(),
        })
    }

    /// The sum of the bounds of its parts.
    pub(crate) fn bound(&self, record: &ClusterRecord) -> Duration {
        self.timeout * record.nodes.into()
    }

    /// hearthctl with the contexts file of a cluster's folder.
    pub fn tool_in(state: &State, program: PathBuf) -> Hearthctl {
        Hearthctl {
            program,
            config: Hearthctl::config_in(state.path()),
        }
    }

    /// The machines that were ever started. Each may have become a member unnoticed, because the user also approves and
    /// assigns roles to nodes that were left running.
    pub(crate) fn started_before(&self, fleet: &Machines) -> Result<Vec<usize>> {
        let known = cluster::known(self.state.path())?;
        let members = (0..fleet.nodes.len())
            .filter(|index| *index == 0 || known.contains(&fleet.nodes[*index].name));
        Ok(members.collect())
    }

    /// Processes an event of a machine; while a cluster is formed, any failure is an error.
    pub(crate) fn heard(
        &self,
        fleet: &Machines,
        record: &mut ClusterRecord,
        index: usize,
        news: News,
    ) -> Result<()> {
        match news {
            News::Ended(exit) => return Err(fleet.failure(index, exit)),
            News::Line(Some(trouble)) => return Err(fleet.failure(index, trouble)),
            News::Line(None) => {}
        }
        if fleet.nodes[0].is_home() && !record.was_home {
            record.was_home = true;
            self.state.save(record)?;
        }
        Ok(())
    }

    /// The machines as input of the plan.
    pub(crate) fn candidates(
        &self,
        fleet: &Machines,
        record: &ClusterRecord,
    ) -> Result<Vec<Candidate>> {
        let approved = record.nodes.saturating_sub(self.join_later);
        let candidate = |node: &crate::fleet::Node| {
            let address = fleet.cluster().address(&node.name);
            Ok(Candidate {
                machine: node.name.clone(),
                address: address.ok_or_else(|| LabError::Unplugged {
                    machine: node.name.clone(),
                    what: "address",
                })?,
                public_key: node.key().map(<[u8]>::to_vec),
                id: record.members.get(&node.name).cloned(),
                approve: node.number <= approved,
                votes: node.number <= VOTERS.min(approved),
            })
        };
        fleet.nodes.iter().map(candidate).collect()
    }

    /// Records the node IDs of machines that have become members.
    pub(crate) fn remember(
        &self,
        candidates: &[Candidate],
        record: &mut ClusterRecord,
        cluster_status: &ClusterStatus,
    ) -> Result<()> {
        let mut new = false;
        for candidate in candidates {
            if record.members.contains_key(&candidate.machine) {
                continue;
            }
            let node = candidate.node(&cluster_status.nodes);
            if let Some(node) = node.filter(|node| node.state() == NodeState::Up) {
                let (machine, id) = (candidate.machine.clone(), node.id.clone());
                record.members.insert(machine, id);
                new = true;
            }
        }
        match new {
            true => self.state.save(record),
            false => Ok(()),
        }
    }
}
