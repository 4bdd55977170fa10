//! What it costs that disks are encrypted: a cold start of a cluster, and the return of one node.
//!
//! Two clusters are formed, which differ in nothing but their storage, and are then started, one at a time. All boot
//! through firmware, which measures, and all machines have a TPM, so that what firmware and loader do is the same.
//! Insecure nodes do not use theirs. What is measured is what an operator waits for: until the cluster reports that all
//! nodes are voters, HOME and healthy, each by a status of its present boot.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use hearth_api::client::{Endpoint, retry_unavailable};
use hearth_api::console::Milestone;
use hearth_api::identity::NodeId;
use hearth_api::names;
use hearth_api::v1::{self, ClusterConfiguration, RebootRequest, TpmMode};
use hearth_operator::{ClusterStatus, Operator, OwnershipError};
use hearth_qemu::artifacts::Image;
use hearth_qemu::cluster::Cluster;
use hearth_qemu::command::OnReset;
use hearth_qemu::vm::Vm;

use super::cluster::{Formed, Plan, Progress, curator, one_ends};
use super::{BOOT_BOUND, CALL, Lab, MEMORY, Way};
use crate::formation::{Candidate, plan};
use crate::machines::name;
use crate::record::Storage;
use crate::{LabError, Result};

/// Between two queries of the status.
const PAUSE: Duration = Duration::from_millis(200);

/// What a cluster's disks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disks {
    /// Not encrypted.
    Insecure,
    /// Encrypted, and opened by each node's own TPM.
    Encrypted,
}

impl Disks {
    /// All of them.
    pub const ALL: [Disks; 2] = [Disks::Insecure, Disks::Encrypted];

    /// Their name, and that of the cluster's folder.
    pub fn word(self) -> &'static str {
        match self {
            Disks::Insecure => "insecure",
            Disks::Encrypted => "encrypted",
        }
    }

    fn configuration(self) -> ClusterConfiguration {
        match self {
            Disks::Encrypted => Storage::Tpm.configuration(),
            // BEST_EFFORT would seal the keys of its nodes, although nothing is encrypted with them.
            Disks::Insecure => ClusterConfiguration {
                tpm_mode: TpmMode::Disabled.into(),
                ..Storage::Insecure.configuration()
            },
        }
    }
}

/// The measurements of one round.
pub struct Times {
    /// All machines, from the start of the first one.
    pub cold_start: Duration,
    /// One node, from the owner's call of Reboot.
    pub reboot: Duration,
    /// One node, from the cut of its power; it is switched on again at once.
    pub power_cut: Duration,
}

/// A cluster whose machines are off.
pub struct Subject<'a> {
    plan: Plan<'a>,
    cluster: Cluster,
    operator: Operator,
    candidates: Vec<Candidate>,
    /// The last boot of each node that was seen, by node ID. The cluster reports a node that has lost its power as
    /// healthy until its heartbeats have been missed, so only a status of another boot shows that it is back.
    boots: BTreeMap<String, String>,
}

impl<'a> Subject<'a> {
    /// Forms a cluster with these disks in a folder of `lab`, and cuts the power of its machines.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn form(
        disks: Disks,
        lab: &Lab,
        node: &'a Image,
        switch: &'a Path,
        nodes: u16,
        told: impl FnMut(Progress<'_>),
    ) -> Result<Self> {
        let plan = Plan {
            lab: Lab {
                accel: lab.accel,
                folder: lab.folder.join(disks.word()),
            },
            node,
            memory_mib: MEMORY,
            way: Way::Uefi,
            has_tpm: true,
            on_reset: OnReset::Reboot,
            switch,
            nodes,
            configuration: disks.configuration(),
        };
        let Formed {
            cluster,
            operator,
            candidates,
            ..
        } = plan.form(told).await?;
        let status = operator.cluster_status().await;
        let status = status.map_err(LabError::call("GetConsensusStatus or GetNodes"))?;
        let subject = Self {
            plan,
            cluster,
            operator,
            candidates,
            boots: boots(&status),
        };
        subject.cut_all().await?;
        Ok(subject)
    }

    /// Measures a cold start, then a reboot and a power cut of a node that does not lead, and cuts the power of all
    /// machines. `told` receives what begins.
    ///
    /// # Errors
    /// If a machine fails, or the cluster is not complete again in time.
    pub async fn round(&mut self, told: impl Fn(&'static str)) -> Result<Times> {
        told("cold start");
        let cold_start = self.cold_start().await?;
        told("reboot");
        let reboot = self.reboot().await?;
        told("power cut");
        let power_cut = self.power_cut().await?;
        self.cut_all().await?;
        Ok(Times {
            cold_start,
            reboot,
            power_cut,
        })
    }

    /// Removes the disks; the logs are kept.
    ///
    /// # Errors
    /// If a disk cannot be removed.
    pub fn end(self) -> Result<()> {
        self.plan.end(self.cluster)
    }

    /// Members boot at once, as in `cargo xtask run`: none of them has a quorum alone.
    async fn cold_start(&mut self) -> Result<Duration> {
        let started = Instant::now();
        for number in 1..=self.plan.nodes {
            let member = self.plan.member(number, None)?;
            self.cluster.add(&member).await?;
        }
        let machines = self.cluster.machines().iter();
        try_join_all(machines.map(|vm| vm.reached(Milestone::Home, BOOT_BOUND))).await?;
        let all: Vec<u16> = (1..=self.plan.nodes).collect();
        self.back(&all, self.curators(None), started).await
    }

    async fn reboot(&mut self) -> Result<Duration> {
        let number = self.follower().await?;
        let (machine, id) = (name(number), self.id(number)?);
        let at = self
            .cluster
            .forwarded(&machine, names::PORT_NODE_MANAGEMENT);
        let at = at.ok_or_else(|| unplugged(&machine))?;
        let management = self.operator.node_management(id, at.into());
        let mut management = management.map_err(OwnershipError::from)?;
        let started = Instant::now();
        let called = management.reboot(RebootRequest {}).await;
        called.map_err(LabError::call("Reboot"))?;
        let others = self.curators(Some(number));
        self.back(&[number], others, started).await
    }

    async fn power_cut(&mut self) -> Result<Duration> {
        let number = self.follower().await?;
        let member = self.plan.member(number, None)?;
        let started = Instant::now();
        cut(self.machine(number)?).await?;
        self.cluster.add(&member).await?;
        let others = self.curators(Some(number));
        self.back(&[number], others, started).await
    }

    async fn cut_all(&self) -> Result<()> {
        let machines = self.cluster.machines().iter();
        try_join_all(machines.map(cut)).await.map(drop)
    }

    /// The first node whose curator does not lead: the loss of a leader is another measurement, and would make rounds
    /// differ.
    async fn follower(&self) -> Result<u16> {
        let operator = self.at(self.curators(None))?;
        let leader = retry_unavailable(CALL, || operator.leader()).await;
        let leader = leader.map_err(LabError::call("GetCurrentLeader"))?;
        let follows = |candidate: &Candidate| candidate.id.as_ref() != Some(&leader);
        let index = self.candidates.iter().position(follows);
        let index = index.and_then(|index| u16::try_from(index).ok());
        Ok(index.unwrap_or_default() + 1)
    }

    /// Waits until these nodes are back and nothing is missing in the cluster, as these curators see it; the time since
    /// `started`.
    async fn back(
        &mut self,
        numbers: &[u16],
        curators: Vec<Endpoint>,
        started: Instant,
    ) -> Result<Duration> {
        let operator = self.at(curators)?;
        let ids = numbers.iter().map(|number| self.id(*number));
        let ids: Vec<NodeId> = ids.collect::<Result<_>>()?;
        let look = async {
            loop {
                match operator.cluster_status().await {
                    Ok(status) if is_back(&self.candidates, &ids, &self.boots, &status) => {
                        return boots(&status);
                    }
                    Ok(_) => {}
                    Err(error) => tracing::debug!(%error, "retrying"),
                }
                tokio::time::sleep(PAUSE).await;
            }
        };
        let boots = tokio::select! {
            seen = tokio::time::timeout(BOOT_BOUND, look) => seen.map_err(|_| LabError::Late {
                what: "complete cluster",
                bound: BOOT_BOUND,
            })?,
            error = one_ends(&self.cluster) => return Err(error),
        };
        let took = started.elapsed();
        self.boots = boots;
        Ok(took)
    }

    /// A new client of these curators: an earlier one may have a connection to a machine that was off.
    fn at(&self, curators: Vec<Endpoint>) -> Result<Operator> {
        Ok(self.operator.at(curators).map_err(OwnershipError::from)?)
    }

    /// The curators, without that of the node with this number.
    fn curators(&self, without: Option<u16>) -> Vec<Endpoint> {
        let numbers = (1..=self.plan.nodes).filter(|number| Some(*number) != without);
        let curators = numbers.map(|number| curator(&self.cluster, &name(number)));
        curators.flatten().collect()
    }

    fn machine(&self, number: u16) -> Result<&Vm> {
        let name = name(number);
        let machine = self.cluster.machine(&name);
        machine.ok_or(LabError::NeverStarted(name))
    }

    fn id(&self, number: u16) -> Result<NodeId> {
        let candidate = self.candidates.get(usize::from(number) - 1);
        let id = candidate.and_then(|candidate| candidate.id.as_ref());
        let id = id.and_then(|id| id.parse().ok());
        id.ok_or_else(|| LabError::NoMachine {
            name: name(number),
            has: format!("{} nodes", self.candidates.len()),
        })
    }
}

/// Whether nothing is missing in the cluster, and these nodes have booted again since `before`.
fn is_back(
    candidates: &[Candidate],
    ids: &[NodeId],
    before: &BTreeMap<String, String>,
    status: &ClusterStatus,
) -> bool {
    let now = boots(status);
    let booted = |id: &NodeId| {
        let id = id.to_string();
        now.contains_key(&id) && now.get(&id) != before.get(&id)
    };
    plan(candidates, status).missing.is_empty() && ids.iter().all(booted)
}

async fn cut(vm: &Vm) -> Result<()> {
    let cut = vm.power_cut().await;
    cut.map(drop).map_err(LabError::process("kill QEMU"))
}

/// The boot of each node that has reported one, by node ID.
fn boots(status: &ClusterStatus) -> BTreeMap<String, String> {
    let boot = |node: &v1::Node| {
        let status = node.status.as_ref()?;
        Some((node.id.clone(), status.boot_id.clone()))
    };
    status.nodes.iter().filter_map(boot).collect()
}

fn unplugged(machine: &str) -> LabError {
    LabError::Unplugged {
        machine: machine.to_owned(),
        what: "port on this host",
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hearth_api::v1::{ClusterState, NodeHealth, NodeState};

    use super::*;

    const ID: NodeId = NodeId::from_bytes([2; 16]);

    /// A cluster of one voter, HOME, whose last status is of this boot.
    fn status(boot: &str, health: NodeHealth) -> ClusterStatus {
        let node = v1::Node {
            id: ID.to_string(),
            state: NodeState::Up.into(),
            health: health.into(),
            status: Some(v1::NodeStatus {
                cluster_state: ClusterState::Home.into(),
                boot_id: boot.to_owned(),
                ..v1::NodeStatus::default()
            }),
            ..v1::Node::default()
        };
        let member = v1::ConsensusMemberStatus {
            node_id: ID.to_string(),
            ..v1::ConsensusMemberStatus::default()
        };
        ClusterStatus {
            nodes: vec![node],
            consensus: v1::GetConsensusStatusResponse {
                members: vec![member],
                ..v1::GetConsensusStatusResponse::default()
            },
        }
    }

    #[test]
    fn a_node_is_back_when_it_is_well_in_another_boot() {
        let candidate = Candidate {
            machine: name(1),
            address: Ipv4Addr::LOCALHOST,
            public_key: None,
            id: Some(ID.to_string()),
            approve: true,
            votes: true,
        };
        let before = boots(&status("first", NodeHealth::Healthy));
        let is_back = |status: &ClusterStatus| {
            is_back(std::slice::from_ref(&candidate), &[ID], &before, status)
        };
        // Not missed yet.
        assert!(!is_back(&status("first", NodeHealth::Healthy)));
        assert!(!is_back(&status("second", NodeHealth::Unknown)));
        assert!(is_back(&status("second", NodeHealth::Healthy)));
        assert!(!is_back(&ClusterStatus::default()));
    }
}
