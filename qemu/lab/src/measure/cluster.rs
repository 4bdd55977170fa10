//! Clusters of measured machines, all of them voters.
//!
//! They are formed like `cargo xtask run --nodes`: the first node founds the cluster, then the others boot together, are
//! approved by the keys on their consoles, and are made consensus members.

use std::path::Path;
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::console::{Milestone, Report};
use hearth_api::names;
use hearth_api::v1::{ClusterConfiguration, NodeParameters};
use hearth_operator::Operator;
use hearth_qemu::artifacts::Image;
use hearth_qemu::cluster::{Cluster, Member};
use hearth_qemu::command::{Machine, OnReset, TpmInterface};
use hearth_qemu::disk::Cache;
use hearth_qemu::switch::NetworkOptions;
use hearth_qemu::vm::Lifetime;
use tokio::task::JoinSet;

use super::{CALL, DISK, DISK_BYTES, Lab, Way, clear, parameters, remove_file};
use crate::formation::{self, Candidate, shown_key};
use crate::machines::{name, network};
use crate::owner::Owner;
use crate::{LabError, Result};

/// Bound for a whole formation, which takes less than a minute.
const FORMATION_BOUND: Duration = Duration::from_secs(600);
/// Between two reconciliations.
const PAUSE: Duration = Duration::from_millis(200);

/// The specification of a cluster.
pub struct Plan<'a> {
    /// The accelerator of its machines, and its folder.
    pub lab: Lab,
    /// The image of its nodes.
    pub node: &'a Image,
    /// How they boot.
    pub way: Way,
    /// Memory of each machine, in MiB.
    pub memory_mib: u32,
    /// Whether they have a TPM.
    pub has_tpm: bool,
    /// What happens if one reboots.
    pub on_reset: OnReset,
    /// The program of their network.
    pub switch: &'a Path,
    /// The number of nodes.
    pub nodes: u16,
    /// What the cluster is founded with.
    pub configuration: ClusterConfiguration,
}

/// A cluster that has been formed and is running.
pub struct Formed {
    /// From the start of the first machine until GetNodes of the first node's owner succeeded.
    pub one: Duration,
    /// From the same start until all nodes were voters.
    pub all: Duration,
    /// Its machines.
    pub cluster: Cluster,
    /// Its owner, with all curators.
    pub operator: Operator,
    /// Its machines as nodes, with their IDs.
    pub candidates: Vec<Candidate>,
}

/// The progress of a formation.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// The first node is booting.
    First,
    /// The others are booting, or are about to.
    Others,
    /// The parameters for the others are not available yet; the reason.
    NotYet(&'a LabError),
}

impl Plan<'_> {
    /// Forms the cluster; its folder, which then has the owner's files, is cleared first. `told` receives the progress.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn form(&self, mut told: impl FnMut(Progress<'_>)) -> Result<Formed> {
        let formed = tokio::time::timeout(FORMATION_BOUND, self.formed(&mut told)).await;
        formed.unwrap_or(Err(LabError::Late {
            what: "cluster",
            bound: FORMATION_BOUND,
        }))
    }

    async fn formed(&self, told: &mut impl FnMut(Progress<'_>)) -> Result<Formed> {
        let folder = &self.lab.folder;
        clear(folder)?;
        let ports = [names::PORT_CURATOR, names::PORT_NODE_MANAGEMENT];
        let options = NetworkOptions::default();
        let network = network(self.switch, options, self.nodes, &ports);
        let cluster = Cluster::open(folder, Some(&network), Lifetime::KillWithParent);
        let mut cluster = cluster.await?;
        let owner = Owner::create(folder)?;
        told(Progress::First);
        let founding = owner.parameters(self.configuration.clone());
        cluster.add(&self.member(1, Some(&founding))?).await?;
        let vm = &cluster.machines()[0];
        let started = vm.started();
        vm.reached(Milestone::Home, FORMATION_BOUND).await?;
        let curators = (1..=self.nodes).filter_map(|number| curator(&cluster, &name(number)));
        let operator = owner.take_ownership(curators.collect(), CALL).await?;
        let listed = operator.nodes().await;
        listed.map_err(LabError::call("GetNodes"))?;
        let one = started.elapsed();
        told(Progress::Others);
        // The first request for a ticket makes the new node prepare for further members.
        let register = loop {
            let parameters = operator.register_parameters().await;
            match parameters.map_err(LabError::call("GetRegisterTicket or GetClusterInfo")) {
                Ok(parameters) => break parameters,
                Err(error) => told(Progress::NotYet(&error)),
            }
            tokio::time::sleep(PAUSE).await;
        };
        for number in 2..=self.nodes {
            let member = self.member(number, Some(&register))?;
            cluster.add(&member).await?;
        }
        let candidates = complete(&cluster, &operator).await?;
        Ok(Formed {
            one,
            all: started.elapsed(),
            cluster,
            operator,
            candidates,
        })
    }

    /// The machine with this number. One that is a member needs no parameters.
    pub(super) fn member(&self, number: u16, told: Option<&NodeParameters>) -> Result<Member> {
        let fw_cfg = told.map(parameters).transpose()?.into_iter().collect();
        let boot = self.way.boot(self.node)?;
        let machine = self
            .lab
            .machine(name(number), self.memory_mib, boot, fw_cfg);
        Ok(Member {
            machine: Machine {
                tpm: self.has_tpm.then_some(TpmInterface::Tis),
                on_reset: self.on_reset,
                ..machine
            },
            image: self.node.disk.clone(),
            disk_bytes: Some(DISK_BYTES),
            cache: Cache::Writeback,
        })
    }

    /// Cuts the power of all machines and removes their disks; the logs are kept.
    ///
    /// # Errors
    /// If a disk cannot be removed.
    pub fn end(&self, cluster: Cluster) -> Result<()> {
        drop(cluster);
        for number in 1..=self.nodes {
            remove_file(&self.lab.folder.join(name(number)).join(DISK))?;
        }
        Ok(())
    }
}

/// The host endpoint of a machine's curator.
pub(super) fn curator(cluster: &Cluster, machine: &str) -> Option<Endpoint> {
    let at = cluster.forwarded(machine, names::PORT_CURATOR);
    at.map(Endpoint::from)
}

/// Reconciles until nothing is missing; returns the machines with their node IDs.
async fn complete(cluster: &Cluster, operator: &Operator) -> Result<Vec<Candidate>> {
    let mut candidates = Vec::new();
    let mut keys = JoinSet::new();
    for (index, vm) in cluster.machines().iter().enumerate() {
        let address = cluster.address(vm.name());
        candidates.push(Candidate {
            machine: vm.name().to_owned(),
            address: address.ok_or_else(|| LabError::Unplugged {
                machine: vm.name().to_owned(),
                what: "address",
            })?,
            public_key: None,
            id: None,
            approve: true,
            votes: true,
        });
        let mut reports = vm.console().reports();
        keys.spawn(async move {
            while let Some(reported) = reports.next().await {
                if let Report::Waiting(why) = &reported.report
                    && let Some(key) = shown_key(why)
                {
                    return Some((index, key));
                }
            }
            None
        });
    }
    let mut known = || {
        while let Some(key) = keys.try_join_next() {
            if let Ok(Some((index, key))) = key {
                candidates[index].public_key = Some(key);
            }
        }
        candidates.clone()
    };
    let done = tokio::select! {
        done = formation::complete(operator, &mut known, PAUSE) => done,
        error = one_ends(cluster) => return Err(error),
    };
    let mut members = known();
    for member in &mut members {
        let node = member.node(&done.cluster_status.nodes);
        member.id = node.map(|node| node.id.clone());
    }
    Ok(members)
}

/// Waits until a machine has ended, which is always an error.
pub(super) async fn one_ends(cluster: &Cluster) -> LabError {
    loop {
        for vm in cluster.machines() {
            if let Some(exit) = vm.exit() {
                return LabError::Ended {
                    machine: vm.name().to_owned(),
                    exit: exit.to_string(),
                    tail: vm.tail().to_string(),
                };
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
