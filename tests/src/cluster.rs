//! Several machines in one network, formed into a cluster.
//!
//! ```no_run
//! # use hearth_tests::{Outcome, TestCtx, here};
//! # async fn story() -> Outcome {
//! let test = TestCtx::begin(here!())?;
//! let mut cluster = test.cluster(3).await?; // three voters, HOME and healthy
//! cluster.node(2).cut().await?;
//! cluster.voters_with(&[1, 3]).await?;
//! cluster.node(2).start().await?;
//! cluster.node(2).home().await?;
//! cluster.all_healthy().await?;
//! drop(cluster);
//! test.passed()
//! # }
//! ```
//!
//! Machines are the usual ones (test image, direct boot, insecure storage), named `node-1`, `node-2` and so on, with
//! these numbers. The first founds the cluster; the others are added as by an operator: they register with a ticket,
//! are approved by the key on their own console, and are made consensus members. Two boot at once, so that a host with
//! two processors is busy but not overloaded; [`crate::places`] has when a test may have a cluster.
//!
//! The test's folder has a folder for each machine, and `net` with the switch's log and the packet capture.

mod member;
mod recorded;
mod saved;

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::future::try_join_all;
use hearth_api::client::Endpoint;
use hearth_api::names;
use hearth_api::v1::{self, ClusterState, NodeHealth};
use hearth_history::Reads;
use hearth_lab::formation::{self, Candidate, is_well};
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::machines;
use hearth_operator::ClusterStatus;
use hearth_qemu::switch::{Network, NetworkOptions};
use hearth_qemu::vm::Lifetime;
use tokio::sync::Mutex;

use crate::clients::Clients;
use crate::kubernetes::Kubernetes;
use crate::leaders::Leaders;
use crate::node::Plan;
use crate::owner::{self, Operator, retry_unavailable};
use crate::places::Occupant;
use crate::writer::Writer;
use crate::{Outcome, TestCtx, bounds};
pub use member::Member;
use saved::Saved;

/// A cluster, or machines that will form one.
pub struct Cluster {
    // Before the network: without it, machines would log misleading errors.
    members: Vec<Member>,
    owner: Operator,
    network: Network,
}

/// Machines in one network that are powered off, and form no cluster yet.
pub struct Machines {
    // Before the network, as in a cluster.
    /// In the order of their numbers.
    pub members: Vec<Member>,
    /// Connects them, and forwards their ports.
    pub network: Network,
}

impl Machines {
    /// As many as this, configured by `plan`, which gets their numbers.
    ///
    /// # Errors
    /// If one cannot be configured or installed.
    pub async fn install(
        test: &TestCtx,
        count: u16,
        planned: impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        Self::install_in(test, &NetworkOptions::default(), count, planned).await
    }

    /// The same in a network with these options.
    ///
    /// # Errors
    /// If one cannot be configured or installed.
    pub async fn install_in(
        test: &TestCtx,
        options: &NetworkOptions,
        count: u16,
        planned: impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        let plans = usual(test, count).into_iter().zip(1..);
        let plans: Vec<Plan<'_>> = plans
            .map(|(plan, number)| planned(number, plan))
            .collect::<anyhow::Result<_>>()?;
        // As long as the earlier clusters take, each of which is bounded.
        test.turn(match plans.iter().any(Plan::runs_kubernetes) {
            true => Occupant::Kubernetes,
            false => Occupant::Cluster,
        })?;
        installed(test, options, plans).await
    }
}

impl TestCtx {
    /// A cluster of this many nodes, all of them voters, HOME and healthy.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn cluster(&self, nodes: u16) -> anyhow::Result<Cluster> {
        Cluster::formed(self, nodes).await
    }
}

impl Cluster {
    /// All nodes are voters, HOME and healthy: booted from the disks of a cluster that was formed once ([`saved`]).
    pub(crate) async fn formed(test: &TestCtx, nodes: u16) -> anyhow::Result<Self> {
        test.turn(Occupant::Cluster)?;
        let saved = {
            // One test forms it.
            static FORMING: Mutex<()> = Mutex::const_new(());
            let _forming = FORMING.lock().await;
            match Saved::find(test, nodes)? {
                Some(saved) => saved,
                None => Saved::make(test, Self::form(test, nodes).await?).await?,
            }
        };
        let Machines {
            mut members,
            network,
        } = installed(test, &NetworkOptions::default(), usual(test, nodes)).await?;
        for (index, member) in members.iter_mut().enumerate() {
            saved.restore(index, member).await?;
            member.start().await?;
        }
        try_join_all(members.iter().map(Member::serves)).await?;
        let owner = members[0].vm()?.owned().await?;
        let owner = owner.at(curators(&network).await?)?;
        let cluster = Self {
            members,
            owner,
            network,
        };
        cluster.is_formed().await?;
        Ok(cluster)
    }

    /// Forms a cluster of new machines.
    async fn form(test: &TestCtx, nodes: u16) -> anyhow::Result<Self> {
        let mut cluster = Self::founded(test, nodes).await?;
        let others: Vec<u16> = (2..=nodes).collect();
        // Two at once.
        for pair in others.chunks(2) {
            cluster.add_nodes(pair).await?;
        }
        cluster.complete().await?;
        cluster.is_formed().await?;
        Ok(cluster)
    }

    async fn is_formed(&self) -> Outcome {
        let all: Vec<u16> = self.members.iter().map(Member::number).collect();
        self.voters_with(&all).await?;
        self.all_healthy().await
    }

    /// Makes all nodes consensus members, like `cargo xtask run`.
    async fn complete(&self) -> Outcome {
        let candidate = |member: &Member| Candidate {
            machine: member.name.clone(),
            address: member.address,
            public_key: None,
            id: Some(member.id.clone()),
            approve: true,
            votes: true,
        };
        let all: Vec<Candidate> = self.members.iter().map(candidate).collect();
        let complete = formation::complete(self.owner.once(), || all.clone(), bounds::LOOK_AGAIN);
        let complete = tokio::time::timeout(bounds::FORMED, complete).await;
        complete.with_context(|| format!("no cluster of voters{}", self.tails()))?;
        Ok(())
    }

    /// Only the first machine is powered on: it has founded a cluster, and its owner has taken ownership. The others
    /// are installed and have their slots in the network.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn founded(test: &TestCtx, nodes: u16) -> anyhow::Result<Self> {
        Self::founded_as(test, nodes, |_, plan| Ok(plan)).await
    }

    /// The same with machines configured by `plan`, which gets their numbers.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn founded_as(
        test: &TestCtx,
        nodes: u16,
        planned: impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        Self::founded_in(test, &NetworkOptions::default(), nodes, planned).await
    }

    /// The same in a network with these options.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn founded_in(
        test: &TestCtx,
        options: &NetworkOptions,
        nodes: u16,
        planned: impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        let Machines {
            mut members,
            network,
        } = Machines::install_in(test, options, nodes, planned).await?;
        let first = &mut members[0];
        first.start().await?;
        first.home().await?;
        let owner = first.vm()?.owned().await?;
        first.id = owner.one_healthy_node().await?.id;
        let curators = curators(&network).await?;
        Ok(Self {
            members,
            owner: owner.at(curators)?,
            network,
        })
    }

    /// The node with this number, from 1.
    ///
    /// # Panics
    ///
    /// If there is none: an error of the test.
    pub fn node(&mut self, number: u16) -> &mut Member {
        &mut self.members[usize::from(number) - 1]
    }

    /// All of them, in order.
    pub fn nodes(&mut self) -> &mut [Member] {
        &mut self.members
    }

    /// The numbers of all nodes but this one.
    pub fn others(&self, than: u16) -> Vec<u16> {
        let numbers = self.members.iter().map(Member::number);
        numbers.filter(|number| *number != than).collect()
    }

    /// The owner, connected to any curator.
    pub fn owner(&self) -> &Operator {
        &self.owner
    }

    /// The network of the machines: for faults, blocks and addresses, by machine name.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Makes machines register, approves them and waits until they are HOME.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn add_nodes(&mut self, numbers: &[u16]) -> Outcome {
        self.register(numbers).await?;
        for &number in numbers {
            self.approve(number).await?;
        }
        for &number in numbers {
            self.node(number).home().await?;
        }
        Ok(())
    }

    /// Powers on machines that will register, and reads their keys from their consoles.
    ///
    /// # Errors
    /// If one does not reach the wait for approval.
    pub async fn register(&mut self, numbers: &[u16]) -> Outcome {
        let parameters = self.owner.register_parameters().await?;
        for &number in numbers {
            let member = self.node(number);
            member.node.tell(&parameters);
            member.start().await?;
        }
        Ok(())
    }

    /// Approves a registering node by the key on its console.
    ///
    /// # Errors
    /// If it has not registered, or the approval fails.
    pub async fn approve(&mut self, number: u16) -> Outcome {
        let key = self.node(number).vm()?.shows_its_key().await?;
        let operator = self.owner.once();
        let approved = retry_unavailable(|| operator.approve(key.clone())).await;
        let node = approved.context("ApproveNode")?;
        self.node(number).id = node.id;
        Ok(())
    }

    /// Sets whether a node should be a consensus member. The change follows; see [`Self::voters_with`].
    ///
    /// # Errors
    /// If the call fails.
    pub async fn set_consensus_member(&mut self, number: u16, wanted: bool) -> Outcome {
        let request = v1::UpdateNodeRolesRequest {
            consensus_member: Some(wanted),
            ..v1::UpdateNodeRolesRequest::default()
        };
        self.set_roles(number, request).await
    }

    /// Sets the roles of a node that the request names.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn set_roles(&mut self, number: u16, request: v1::UpdateNodeRolesRequest) -> Outcome {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(self.node(number).selector()),
            ..request
        };
        let operator = self.owner.once();
        let updated = retry_unavailable(|| operator.update_roles(request.clone())).await;
        updated.map(drop).context("UpdateNodeRoles")
    }

    /// Observes who leads.
    pub fn leaders(&self) -> Leaders {
        Leaders::observe(self.owner.clone())
    }

    /// The number of the node whose etcd is the leader.
    ///
    /// # Errors
    /// If no curator knows.
    pub async fn etcd_leader(&self) -> anyhow::Result<u16> {
        let members = self.cluster_status().await?.consensus.members;
        let leader = members.iter().find(|member| member.leader);
        let leader = leader.with_context(|| format!("no leader: {members:?}"))?;
        let node = self.members.iter().find(|node| node.id == leader.node_id);
        Ok(node.with_context(|| format!("unknown {leader:?}"))?.number)
    }

    /// The current status of the cluster.
    ///
    /// # Errors
    /// If no curator answers.
    pub async fn cluster_status(&self) -> anyhow::Result<ClusterStatus> {
        self.owner.cluster_status().await
    }

    /// The number of the node whose curator is the leader.
    ///
    /// # Errors
    /// If no curator knows.
    pub async fn leader(&self) -> anyhow::Result<u16> {
        let id = retry_unavailable(|| self.owner.once().leader()).await;
        let id = id.context("GetCurrentLeader")?;
        let leader = self.members.iter().find(|member| member.id == id);
        Ok(leader
            .with_context(|| format!("unknown leader {id}"))?
            .number)
    }

    /// Waits until the curators of these nodes agree on the leader.
    ///
    /// # Errors
    /// If that times out.
    pub async fn one_leads(&self, numbers: &[u16]) -> Outcome {
        let mut last = Vec::new();
        let look = async {
            loop {
                last.clear();
                for &number in numbers {
                    let asked = self.owner_at(number)?.once().leader().await;
                    last.push(asked.map_err(|status| format!("node-{number}: {status}")));
                }
                if last[0].is_ok() && last.iter().all(|leader| *leader == last[0]) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(bounds::LOOK_AGAIN).await;
            }
        };
        let agreed = tokio::time::timeout(bounds::SETTLED, look).await;
        agreed.unwrap_or_else(|_| bail!("no agreement on the leader: {last:?}{}", self.tails()))
    }

    /// Waits until another node's curator is the leader.
    ///
    /// # Errors
    /// If that times out.
    pub async fn led_by_another_than(&self, number: u16) -> anyhow::Result<u16> {
        let look = async {
            loop {
                match self.leader().await {
                    Ok(leader) if leader != number => return leader,
                    _ => tokio::time::sleep(bounds::LOOK_AGAIN).await,
                }
            }
        };
        let leader = tokio::time::timeout(bounds::SETTLED, look).await;
        leader.with_context(|| format!("no leader other than node-{number}{}", self.tails()))
    }

    /// The owner, connected to this node's curator only.
    ///
    /// # Errors
    /// If the node is powered off.
    pub fn owner_at(&self, number: u16) -> anyhow::Result<Operator> {
        let member = &self.members[usize::from(number) - 1];
        Ok(self.owner.at(vec![member.vm()?.curator()?])?)
    }

    /// Waits until the cluster has declared a node unreachable: its heartbeats have expired.
    ///
    /// # Errors
    /// If that times out.
    pub async fn wait_unreachable(&self, number: u16) -> Outcome {
        let member = &self.members[usize::from(number) - 1];
        let wanted = format!("{} is declared unreachable", member.name);
        let missed = |node: &v1::Node| node.health() == NodeHealth::Timeout;
        let given_up =
            |cluster_status: &ClusterStatus| member.find(cluster_status).is_some_and(missed);
        self.until(&wanted, bounds::SETTLED, given_up).await?;
        Ok(())
    }

    /// Waits until a node reports this cluster state.
    ///
    /// # Errors
    /// If that times out.
    pub async fn wait_cluster_state(&mut self, number: u16, wanted: ClusterState) -> Outcome {
        let debug = self.node(number).debug().await?;
        let what = format!("node-{number} reports {wanted:?}");
        let seen = debug.until(&what, |state| state.cluster_state() == wanted);
        seen.await.map(drop)
    }

    /// Waits until a node's hosts file has this address for another node, and no other address for that name.
    ///
    /// # Errors
    /// If that times out.
    pub async fn resolves(&mut self, number: u16, id: &str, address: Ipv4Addr) -> Outcome {
        let debug = self.node(number).debug().await?;
        let wanted = format!("node-{number} resolves {id} to {address}");
        let address = address.to_string();
        let found = debug.until(&wanted, |state| {
            let lines = state.hosts.lines().map(str::split_whitespace);
            let mut of_it = lines.filter(|words| words.clone().skip(1).any(|name| name == id));
            of_it.next().and_then(|mut words| words.next()) == Some(&address[..])
                && of_it.next().is_none()
        });
        found.await.map(drop)
    }

    /// Queries the status until it is as wanted; calls that fail meanwhile are repeated.
    ///
    /// # Errors
    /// If that takes longer than `bound`; the error shows the last status, and the last console lines of the machines.
    pub async fn until(
        &self,
        wanted: &str,
        bound: Duration,
        mut predicate: impl FnMut(&ClusterStatus) -> bool,
    ) -> anyhow::Result<ClusterStatus> {
        let mut last = None;
        let look = async {
            loop {
                match self.owner.once().cluster_status().await {
                    Ok(cluster_status) if predicate(&cluster_status) => return cluster_status,
                    other => last = Some(other),
                }
                tokio::time::sleep(bounds::LOOK_AGAIN).await;
            }
        };
        match tokio::time::timeout(bound, look).await {
            Ok(cluster_status) => Ok(cluster_status),
            Err(_) => bail!(
                "{wanted}: timed out after {bound:?}; last status: {last:#?}\n{}",
                self.tails()
            ),
        }
    }

    /// Waits until all nodes that are powered on are HOME, healthy and UP in the cluster's list, in their current boot.
    ///
    /// # Errors
    /// If that times out.
    pub async fn all_healthy(&self) -> Outcome {
        let on: Vec<&Member> = self
            .members
            .iter()
            .filter(|m| m.running.is_some())
            .collect();
        let wanted = "all HOME and healthy";
        let all = |cluster_status: &ClusterStatus| {
            on.iter()
                .all(|member| member.find(cluster_status).is_some_and(is_well))
        };
        self.until(wanted, bounds::SETTLED, all).await?;
        Ok(())
    }

    /// Waits until exactly these nodes are voters, no change is pending, and all of them have started.
    ///
    /// # Errors
    /// If that times out.
    pub async fn voters_with(&self, numbers: &[u16]) -> Outcome {
        let index = |number: &u16| usize::from(*number) - 1;
        let mut ids: Vec<&str> = numbers
            .iter()
            .map(|number| self.members[index(number)].id.as_str())
            .collect();
        ids.sort_unstable();
        let wanted = format!("voters {numbers:?}");
        self.until(&wanted, bounds::FORMED, |cluster_status| {
            let members = &cluster_status.consensus.members;
            let settled = members.iter().all(|m| !m.learner && m.started);
            let mut found: Vec<&str> = members.iter().map(|m| m.node_id.as_str()).collect();
            found.sort_unstable();
            settled && cluster_status.consensus.changes.is_empty() && found == ids
        })
        .await?;
        Ok(())
    }

    /// Waits until a node reports a condition of this type that satisfies the predicate.
    ///
    /// # Errors
    /// If that times out.
    pub async fn condition(
        &self,
        number: u16,
        kind: &str,
        bound: Duration,
        wanted: impl Fn(&v1::NodeCondition) -> bool,
    ) -> Outcome {
        let member = &self.members[usize::from(number) - 1];
        let what = format!("{}: condition {kind}", member.name);
        let wanted = |condition: &v1::NodeCondition| condition.r#type == kind && wanted(condition);
        let told = |cluster_status: &ClusterStatus| {
            let status = member.status(cluster_status);
            status.is_some_and(|status| status.conditions.iter().any(wanted))
        };
        self.until(&what, bound, told).await?;
        Ok(())
    }

    /// Waits until a node does not report a condition of this type.
    ///
    /// # Errors
    /// If that times out.
    pub async fn no_condition(&self, number: u16, kind: &str, bound: Duration) -> Outcome {
        let member = &self.members[usize::from(number) - 1];
        let what = format!("{}: no condition {kind}", member.name);
        let none = |cluster_status: &ClusterStatus| {
            let status = member.status(cluster_status);
            status.is_some_and(|status| status.conditions.iter().all(|c| c.r#type != kind))
        };
        self.until(&what, bound, none).await?;
        Ok(())
    }

    /// Waits until the curators have this address for a node.
    ///
    /// # Errors
    /// If that times out.
    pub async fn is_at(&self, id: &str, address: Ipv4Addr) -> Outcome {
        let wanted = format!("{id} at {address}");
        let address = address.to_string();
        self.until(&wanted, bounds::SETTLED, |cluster_status| {
            let node = cluster_status.nodes.iter().find(|node| node.id == id);
            let status = node.and_then(|node| node.status.as_ref());
            status.is_some_and(|status| status.external_address == address)
        })
        .await?;
        Ok(())
    }

    /// hearthctl with a context of this cluster and its owner.
    ///
    /// # Errors
    /// If it does not take ownership within the bound.
    pub async fn hearthctl(&self, test: &TestCtx) -> anyhow::Result<Hearthctl> {
        let curators = curators(&self.network).await?;
        let config = test.folder().join("hearthctl.json");
        owner::hearthctl(test, config, self.members[0].node.folder(), &curators).await
    }

    /// The cluster's Kubernetes, through this node's API server.
    ///
    /// # Errors
    /// If the node is powered off, or no kubeconfig can be generated.
    pub async fn kubernetes(&mut self, test: &TestCtx, number: u16) -> anyhow::Result<Kubernetes> {
        let founder = self.members[0].node.folder().to_owned();
        let vm = self.node(number).vm()?;
        Kubernetes::at(test, vm, &founder).await
    }

    /// Starts continuous writes to the record of this node.
    ///
    /// # Errors
    /// If the first is not acknowledged.
    pub async fn writer(&mut self, number: u16) -> anyhow::Result<Writer> {
        let id = self.node(number).id.clone();
        Writer::start(self.owner.clone(), id).await
    }

    /// Starts clients of all curators, one of each, which use this node's labels.
    ///
    /// # Errors
    /// If not all of them get answers.
    pub async fn clients(&self, number: u16, reads: Reads) -> anyhow::Result<Clients> {
        let node = &self.members[usize::from(number) - 1].id;
        let numbers = self.members.iter().map(Member::number);
        let curators = numbers.map(|number| self.owner_at(number));
        Clients::start(node, curators.collect::<anyhow::Result<_>>()?, reads).await
    }

    /// Takes ownership once more: the owner gets a new certificate, from the first node.
    ///
    /// # Errors
    /// If that fails.
    pub async fn log_in(&mut self) -> Outcome {
        let owner = self.members[0].vm()?.owned().await?;
        self.owner = owner.at(curators(&self.network).await?)?;
        Ok(())
    }

    /// Powers on all machines that are off at once, and waits until they are HOME: a cold start of a cluster needs a
    /// quorum of them.
    ///
    /// # Errors
    /// If one does not become HOME.
    pub async fn start_all(&mut self) -> Outcome {
        for member in self.members.iter_mut().filter(|m| m.running.is_none()) {
            member.start().await?;
        }
        let homes = self.members.iter().map(Member::home);
        try_join_all(homes).await.map(drop)
    }

    /// Cuts the power of all machines.
    ///
    /// # Errors
    /// If a machine had ended before.
    pub async fn cut_all(&mut self) -> Outcome {
        for member in self.members.iter_mut().filter(|m| m.running.is_some()) {
            member.cut().await?;
        }
        Ok(())
    }

    /// The last console lines of the machines.
    fn tails(&self) -> String {
        let tail = |member: &Member| {
            let running = member.running.as_ref()?;
            Some(format!("\n{}: {}", member.name, running.tail()))
        };
        self.members.iter().filter_map(tail).collect()
    }
}

/// Plans of this many machines.
fn usual(test: &TestCtx, nodes: u16) -> Vec<Plan<'_>> {
    let names = (1..=nodes).map(machines::name);
    names.map(|name| test.node(&name)).collect()
}

async fn installed(
    test: &TestCtx,
    options: &NetworkOptions,
    plans: Vec<Plan<'_>>,
) -> anyhow::Result<Machines> {
    let (switch, folder) = (&test.artifacts().switch, test.folder().join("net"));
    let network =
        Network::start(switch, &folder, options.clone(), Lifetime::KillWithParent).await?;
    let mut members = Vec::new();
    for (plan, number) in plans.into_iter().zip(1..) {
        let member = Member::install(plan, &network, options, number);
        members.push(member.await?);
    }
    Ok(Machines { members, network })
}

/// The host endpoints of the machines' curators.
async fn curators(network: &Network) -> anyhow::Result<Vec<Endpoint>> {
    let status = network.status().await?;
    let forwards = status.ports.iter().flat_map(|port| &port.forwards);
    let curators = forwards.filter(|forward| forward.guest == names::PORT_CURATOR);
    Ok(curators.map(|forward| forward.host.into()).collect())
}
