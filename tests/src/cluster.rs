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
//! Machines are the usual ones (test image, direct boot, insecure storage),
//! named `node-1`, `node-2` … and numbered so. The first founds the cluster, the
//! others are taken in as an operator would: by a register ticket, approved by
//! the key that their own console shows, made consensus members. Two boot at
//! once, so that a host with two processors is busy and not drowned; for the
//! same reason the tests of a suite have their clusters one after the other.
//!
//! The test's folder has a folder for each machine, and `net` with the switch's
//! log and the packet capture.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context, bail, ensure};
use futures::future::try_join_all;
use hearth_api::{
    client::Endpoint,
    names,
    operator::{self, Standing},
    v1::{self, ClusterState, NodeHealth, NodeSelector},
};
use hearth_lab::{
    formation::{self, Candidate, is_well},
    machines,
};
use hearth_qemu::{
    network::{Forwarded, Link, Mac, Nic},
    switch::{Network, NetworkOptions},
    vm::Lifetime,
};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{
    Outcome, TestCtx, bounds,
    debug::Debug,
    kubernetes::Kubernetes,
    node::{Node, Plan, Running},
    owner::{Operator, patiently},
    writer::Writer,
};

/// Between two looks at a cluster: nothing tells nodes and consensus at once.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// For the one cluster that a suite has at a time.
static TURN: Semaphore = Semaphore::const_new(1);

/// A cluster, or machines that are to be one.
pub struct Cluster {
    // Before the network: a machine without it would say much that misleads.
    members: Vec<Member>,
    owner: Operator,
    network: Network,
    _turn: SemaphorePermit<'static>,
}

/// A machine of a cluster.
pub struct Member {
    name: String,
    number: u16,
    address: Ipv4Addr,
    id: String,
    /// Changes what it is told at its next boot.
    pub node: Node,
    running: Option<Running>,
}

impl TestCtx {
    /// A cluster of so many nodes, all of them voters, HOME and healthy.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn cluster(&self, nodes: u16) -> anyhow::Result<Cluster> {
        Cluster::formed(self, nodes).await
    }
}

impl Cluster {
    /// All of them voters, HOME and healthy.
    pub(crate) async fn formed(test: &TestCtx, nodes: u16) -> anyhow::Result<Self> {
        let mut cluster = Self::founded(test, nodes).await?;
        let others: Vec<u16> = (2..=nodes).collect();
        // Two at once.
        for pair in others.chunks(2) {
            cluster.take_in(pair).await?;
        }
        cluster.complete().await?;
        let all: Vec<u16> = (1..=nodes).collect();
        cluster.voters_with(&all).await?;
        cluster.all_healthy().await?;
        Ok(cluster)
    }

    /// Has everybody made a consensus member, as `cargo xtask run` does.
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
        let complete = formation::complete(self.owner.once(), || all.clone(), LOOK_AGAIN);
        let complete = tokio::time::timeout(bounds::FORMED, complete).await;
        complete.with_context(|| format!("no cluster of voters{}", self.tails()))?;
        Ok(())
    }

    /// Only the first machine is switched on: it has founded a cluster, and its
    /// owner has taken it. The others are installed and have their places in
    /// the network.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn founded(test: &TestCtx, nodes: u16) -> anyhow::Result<Self> {
        Self::founded_as(test, nodes, |_, plan| Ok(plan)).await
    }

    /// The same with machines that are planned so, by their numbers.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn founded_as(
        test: &TestCtx,
        nodes: u16,
        planned: impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        // As long as the clusters before it take, each of which is bounded.
        let turn = TURN.acquire().await?;
        let options = NetworkOptions::default();
        let switch = &test.artifacts().switch;
        let folder = test.folder().join("net");
        let network = Network::start(switch, &folder, options.clone(), Lifetime::Tied).await?;
        let mut members = Vec::new();
        for number in 1..=nodes {
            let member = Member::install(test, &network, &options, number, &planned);
            members.push(member.await?);
        }
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
            _turn: turn,
        })
    }

    /// The node with this number, from 1.
    ///
    /// # Panics
    /// If there is none: the test is wrong.
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

    /// Its owner, at whichever curator answers.
    pub fn owner(&self) -> &Operator {
        &self.owner
    }

    /// What joins the machines: for faults, blocks and addresses, by the
    /// machines' names.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Has machines register, approves them and waits until they are HOME.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn take_in(&mut self, numbers: &[u16]) -> Outcome {
        self.register(numbers).await?;
        for &number in numbers {
            self.admit(number).await?;
        }
        for &number in numbers {
            self.node(number).home().await?;
        }
        Ok(())
    }

    /// Switches machines on that are to register, and learns their keys from
    /// their consoles.
    ///
    /// # Errors
    /// If one does not come so far as to wait for approval.
    pub async fn register(&mut self, numbers: &[u16]) -> Outcome {
        let parameters = self.owner.register_parameters().await?;
        for &number in numbers {
            let member = self.node(number);
            member.node.tell(&parameters);
            member.start().await?;
        }
        Ok(())
    }

    /// Approves a node that registers, by the key that its console shows.
    ///
    /// # Errors
    /// If it does not register, or is not approved.
    pub async fn admit(&mut self, number: u16) -> Outcome {
        let key = self.node(number).vm()?.shows_its_key().await?;
        let operator = self.owner.once();
        let approved = patiently(|| operator.approve(key.clone())).await;
        let node = approved.context("ApproveNode")?;
        self.node(number).id = node.id;
        Ok(())
    }

    /// Says whether a node is to be a consensus member. It follows; see
    /// [`Self::voters_with`].
    ///
    /// # Errors
    /// If that is refused.
    pub async fn set_consensus_member(&mut self, number: u16, wanted: bool) -> Outcome {
        let request = v1::UpdateNodeRolesRequest {
            consensus_member: Some(wanted),
            ..v1::UpdateNodeRolesRequest::default()
        };
        self.set_roles(number, request).await
    }

    /// Says which roles a node is to hold, as far as the request tells.
    ///
    /// # Errors
    /// If that is refused.
    pub async fn set_roles(&mut self, number: u16, request: v1::UpdateNodeRolesRequest) -> Outcome {
        let request = v1::UpdateNodeRolesRequest {
            node: Some(self.node(number).selector()),
            ..request
        };
        let operator = self.owner.once();
        let updated = patiently(|| operator.update_roles(request.clone())).await;
        updated.map(drop).context("UpdateNodeRoles")
    }

    /// How it stands now.
    ///
    /// # Errors
    /// If no curator answers.
    pub async fn standing(&self) -> anyhow::Result<Standing> {
        self.owner.standing().await
    }

    /// The number of the node whose curator leads.
    ///
    /// # Errors
    /// If no curator says so.
    pub async fn leader(&self) -> anyhow::Result<u16> {
        let id = patiently(|| self.owner.once().leader()).await;
        let id = id.context("GetCurrentLeader")?;
        let leader = self.members.iter().find(|member| member.id == id);
        Ok(leader.with_context(|| format!("{id} leads"))?.number)
    }

    /// Waits until the curators of these nodes say the same of who leads.
    ///
    /// # Errors
    /// If they do not come to that.
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
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let agreed = tokio::time::timeout(bounds::SETTLED, look).await;
        agreed.unwrap_or_else(|_| bail!("who leads? {last:?}{}", self.tails()))
    }

    /// Waits until another node's curator leads.
    ///
    /// # Errors
    /// If none does.
    pub async fn led_by_another_than(&self, number: u16) -> anyhow::Result<u16> {
        let look = async {
            loop {
                match self.leader().await {
                    Ok(leader) if leader != number => return leader,
                    _ => tokio::time::sleep(LOOK_AGAIN).await,
                }
            }
        };
        let leader = tokio::time::timeout(bounds::SETTLED, look).await;
        leader.with_context(|| format!("nobody but node-{number} leads{}", self.tails()))
    }

    /// The owner, at this node's curator and no other.
    ///
    /// # Errors
    /// If the node is switched off.
    pub fn owner_at(&self, number: u16) -> anyhow::Result<Operator> {
        let member = &self.members[usize::from(number) - 1];
        Ok(self.owner.at(vec![member.vm()?.curator()?])?)
    }

    /// Waits until the cluster has given a node up: it is not heard any more.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn misses(&self, number: u16) -> Outcome {
        let member = &self.members[usize::from(number) - 1];
        let wanted = format!("{} is given up", member.name);
        let missed = |node: &v1::Node| node.health() == NodeHealth::Timeout;
        let given_up = |standing: &Standing| member.find(standing).is_some_and(missed);
        self.until(&wanted, bounds::SETTLED, given_up).await?;
        Ok(())
    }

    /// Waits until a node sees the cluster so.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn sees(&mut self, number: u16, wanted: ClusterState) -> Outcome {
        let debug = self.node(number).debug().await?;
        let what = format!("node-{number} sees {wanted:?}");
        let seen = debug.until(&what, |state| state.cluster_state() == wanted);
        seen.await.map(drop)
    }

    /// Waits until a node's hosts file has this address for another one, and
    /// for that name no other.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn resolves(&mut self, number: u16, id: &str, address: Ipv4Addr) -> Outcome {
        let debug = self.node(number).debug().await?;
        let wanted = format!("node-{number} finds {id} at {address}");
        let address = address.to_string();
        let found = debug.until(&wanted, |state| {
            let lines = state.hosts.lines().map(str::split_whitespace);
            let mut of_it = lines.filter(|words| words.clone().skip(1).any(|name| name == id));
            of_it.next().and_then(|mut words| words.next()) == Some(&address[..])
                && of_it.next().is_none()
        });
        found.await.map(drop)
    }

    /// Looks until it stands as wanted; calls that fail meanwhile are made
    /// again.
    ///
    /// # Errors
    /// If it does not within `bound`; the error shows the last look, and what
    /// the machines said last.
    pub async fn until(
        &self,
        wanted: &str,
        bound: Duration,
        mut predicate: impl FnMut(&Standing) -> bool,
    ) -> anyhow::Result<Standing> {
        let mut last = None;
        let look = async {
            loop {
                match self.owner.once().standing().await {
                    Ok(standing) if predicate(&standing) => return standing,
                    other => last = Some(other),
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        match tokio::time::timeout(bound, look).await {
            Ok(standing) => Ok(standing),
            Err(_) => bail!(
                "{wanted}: not within {bound:?}, but {last:#?}\n{}",
                self.tails()
            ),
        }
    }

    /// Waits until all that are switched on are HOME, healthy and UP in the
    /// cluster's list, in the boot in which they are now.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn all_healthy(&self) -> Outcome {
        let on: Vec<&Member> = self
            .members
            .iter()
            .filter(|m| m.running.is_some())
            .collect();
        let wanted = "all HOME and healthy";
        let all = |standing: &Standing| {
            on.iter()
                .all(|member| member.find(standing).is_some_and(is_well))
        };
        self.until(wanted, bounds::SETTLED, all).await?;
        Ok(())
    }

    /// Waits until exactly these are voting members of consensus, nothing is
    /// about to change, and all of them are started.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn voters_with(&self, numbers: &[u16]) -> Outcome {
        let index = |number: &u16| usize::from(*number) - 1;
        let mut ids: Vec<&str> = numbers
            .iter()
            .map(|number| self.members[index(number)].id.as_str())
            .collect();
        ids.sort_unstable();
        let wanted = format!("voters {numbers:?}");
        self.until(&wanted, bounds::FORMED, |standing| {
            let members = &standing.consensus.members;
            let settled = members.iter().all(|m| !m.learner && m.started);
            let mut found: Vec<&str> = members.iter().map(|m| m.node_id.as_str()).collect();
            found.sort_unstable();
            settled && standing.consensus.changes.is_empty() && found == ids
        })
        .await?;
        Ok(())
    }

    /// Waits until a node tells of a condition of this type for which that is
    /// true.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn condition(
        &self,
        number: u16,
        kind: &str,
        bound: Duration,
        wanted: impl Fn(&v1::NodeCondition) -> bool,
    ) -> Outcome {
        let member = &self.members[usize::from(number) - 1];
        let what = format!("{}: condition {kind}", member.name);
        let told = |standing: &Standing| {
            let status = member.find(standing).and_then(|node| node.status.as_ref());
            let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
            conditions.any(|condition| condition.r#type == kind && wanted(condition))
        };
        self.until(&what, bound, told).await?;
        Ok(())
    }

    /// Its Kubernetes, by this node's API server.
    ///
    /// # Errors
    /// If the node is switched off, or nobody gets a kubeconfig.
    pub async fn kubernetes(&mut self, test: &TestCtx, number: u16) -> anyhow::Result<Kubernetes> {
        let founder = self.members[0].node.folder().to_owned();
        let vm = self.node(number).vm()?;
        Kubernetes::at(test, vm, &founder).await
    }

    /// Writes that go on from now, on the record of this node.
    ///
    /// # Errors
    /// If the first is not acknowledged.
    pub async fn writer(&mut self, number: u16) -> anyhow::Result<Writer> {
        let id = self.node(number).id.clone();
        Writer::start(self.owner.clone(), id).await
    }

    /// Switches all machines on at once that are off, and waits until they are
    /// home: a cold start of a cluster needs a quorum of them.
    ///
    /// # Errors
    /// If one does not come home.
    pub async fn start_all(&mut self) -> Outcome {
        for member in self.members.iter_mut().filter(|m| m.running.is_none()) {
            member.start().await?;
        }
        let homes = self.members.iter().map(Member::home);
        try_join_all(homes).await.map(drop)
    }

    /// Pulls all plugs.
    ///
    /// # Errors
    /// If a machine had ended before.
    pub async fn cut_all(&mut self) -> Outcome {
        for member in self.members.iter_mut().filter(|m| m.running.is_some()) {
            member.cut().await?;
        }
        Ok(())
    }

    /// What the machines said last.
    fn tails(&self) -> String {
        let tail = |member: &Member| {
            let running = member.running.as_ref()?;
            Some(format!("\n{}: {}", member.name, running.tail()))
        };
        self.members.iter().filter_map(tail).collect()
    }
}

impl Member {
    async fn install(
        test: &TestCtx,
        network: &Network,
        options: &NetworkOptions,
        number: u16,
        planned: &impl for<'a> Fn(u16, Plan<'a>) -> anyhow::Result<Plan<'a>>,
    ) -> anyhow::Result<Self> {
        let name = machines::name(number);
        let (mac, address) = (Mac::of_machine(number), options.machine_address(number));
        let port = network.add_port(&name, mac, address).await?;
        let mut forwards = Vec::new();
        for guest in [
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_DEBUG,
            names::PORT_KUBERNETES,
        ] {
            let host = network.forward(&name, guest).await?;
            forwards.push(Forwarded { guest, host });
        }
        let link = Link::Switch {
            socket: port.socket,
        };
        let plan = test.node(&name).plugged(Nic { mac, link }, forwards);
        Ok(Self {
            node: planned(number, plan)?.install().await?,
            running: None,
            id: String::new(),
            address,
            number,
            name,
        })
    }

    /// Its machine's name, by which the network knows it, too.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number, from 1.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The address that it was given first.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its node ID; empty before it was approved.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// For calls that are about it.
    pub fn selector(&self) -> NodeSelector {
        operator::by_id(&self.id)
    }

    /// The machine, which must be switched on.
    ///
    /// # Errors
    /// If it is off.
    pub fn vm(&self) -> anyhow::Result<&Running> {
        let running = self.running.as_ref();
        running.with_context(|| format!("{} is switched off", self.name))
    }

    /// Switches it on. A member is told nothing: it knows all it needs.
    ///
    /// # Errors
    /// If it is on, or QEMU does not start.
    pub async fn start(&mut self) -> Outcome {
        ensure!(self.running.is_none(), "{} is switched on", self.name);
        self.running = Some(self.node.power_on().await?);
        Ok(())
    }

    /// Pulls its plug.
    ///
    /// # Errors
    /// If it is off.
    pub async fn cut(&mut self) -> Outcome {
        let running = self.running.take();
        let running = running.with_context(|| format!("{} is switched off", self.name))?;
        running.cut().await?;
        // From now on by what is on its disk.
        self.node.parameters = None;
        Ok(())
    }

    /// Presses its power button and waits until it has gone down in order.
    ///
    /// # Errors
    /// If it goes down in another way.
    pub async fn power_off(&mut self) -> Outcome {
        let running = self.running.take();
        let running = running.with_context(|| format!("{} is switched off", self.name))?;
        running.power_off().await?;
        self.node.parameters = None;
        Ok(())
    }

    /// Waits until it says that it is home.
    ///
    /// # Errors
    /// If it does not come home.
    pub async fn home(&self) -> Outcome {
        let running = self.vm()?;
        running.home().await.with_context(|| self.name.clone())
    }

    /// Switches it on and waits until it says that it is home.
    ///
    /// # Errors
    /// If it does not come home.
    pub async fn comes_back(&mut self) -> Outcome {
        self.start().await?;
        self.home().await
    }

    /// A look inside.
    ///
    /// # Errors
    /// If its debug service does not answer.
    pub async fn debug(&self) -> anyhow::Result<Debug> {
        self.vm()?.debug().await
    }

    /// Waits until the machine has the node's names: its ID is the host name,
    /// and the bare part of it the machine-id.
    ///
    /// # Errors
    /// If it does not come to that.
    pub async fn is_named(&self) -> Outcome {
        let bare = self.id.strip_prefix("hearth-").context("no node ID")?;
        let debug = self.debug().await?;
        let wanted = format!("{} is named {}", self.name, self.id);
        let named = debug.until(&wanted, |state| {
            state.host_name == self.id && state.machine_id == bare
        });
        named.await.map(drop)
    }

    /// The cluster as it sees it now.
    ///
    /// # Errors
    /// If its debug service does not answer.
    pub async fn cluster_state(&self) -> anyhow::Result<ClusterState> {
        Ok(self.debug().await?.state().await?.cluster_state())
    }

    /// What the cluster's list says of it.
    pub fn find<'a>(&self, standing: &'a Standing) -> Option<&'a v1::Node> {
        standing.nodes.iter().find(|node| node.id == self.id)
    }
}

/// Where the network brings the machines' curators.
async fn curators(network: &Network) -> anyhow::Result<Vec<Endpoint>> {
    let status = network.status().await?;
    let forwards = status.ports.iter().flat_map(|port| &port.forwards);
    let curators = forwards.filter(|forward| forward.guest == names::PORT_CURATOR);
    Ok(curators.map(|forward| forward.host.into()).collect())
}
