//! A machine of a cluster.

use std::net::Ipv4Addr;

use anyhow::{Context, ensure};
use hearth_api::console::Milestone;
use hearth_api::names;
use hearth_api::v1::{self, ClusterState, NodeSelector};
use hearth_lab::machines;
use hearth_operator::ClusterStatus;
use hearth_qemu::network::{Link, Mac, Nic, PortForward};
use hearth_qemu::switch::{Network, NetworkOptions};

use crate::debug::Debug;
use crate::node::{Node, Plan, Running};
use crate::{Outcome, bounds};

/// A machine of a cluster.
pub struct Member {
    pub(super) name: String,
    pub(super) number: u16,
    pub(super) address: Ipv4Addr,
    pub(super) id: String,
    /// Its machine; can be changed for the next boot.
    pub node: Node,
    pub(super) running: Option<Running>,
}

impl Member {
    pub(super) async fn install(
        plan: Plan<'_>,
        network: &Network,
        options: &NetworkOptions,
        number: u16,
    ) -> anyhow::Result<Self> {
        let name = machines::name(number);
        let (mac, address) = (Mac::of_machine(number), options.machine_address(number));
        let port = network.add_port(&name, mac, address).await?;
        let mut forwards = Vec::new();
        for guest in [
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_UNLOCK,
            names::PORT_DEBUG,
            names::PORT_KUBERNETES,
        ] {
            let host = network.forward(&name, guest).await?;
            forwards.push(PortForward { guest, host });
        }
        let link = Link::Switch {
            socket: port.socket,
        };
        let plan = plan.plugged(Nic { mac, link }, forwards);
        Ok(Self {
            node: plan.install().await?,
            running: None,
            id: String::new(),
            address,
            number,
            name,
        })
    }

    /// Name of its machine, also in the network.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number, from 1.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its initial address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// An address of the cluster's network that no machine has.
    pub fn unused_address(&self) -> Ipv4Addr {
        let [a, b, c, d] = self.address.octets();
        Ipv4Addr::new(a, b, c, d + 100)
    }

    /// Its node ID; empty before it was approved.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Says which node it is, after it has registered again.
    pub(crate) fn identify(&mut self, id: String) {
        self.id = id;
    }

    /// A selector for calls about it.
    pub fn selector(&self) -> NodeSelector {
        hearth_operator::by_id(&self.id)
    }

    /// The machine, which must be powered on.
    ///
    /// # Errors
    /// If it is off.
    pub fn vm(&self) -> anyhow::Result<&Running> {
        let running = self.running.as_ref();
        running.with_context(|| format!("{} is powered off", self.name))
    }

    /// Powers it on. A member gets no parameters: it does not need any.
    ///
    /// # Errors
    /// If it is on, or QEMU does not start.
    pub async fn start(&mut self) -> Outcome {
        ensure!(self.running.is_none(), "{} is powered on", self.name);
        self.running = Some(self.node.power_on().await?);
        Ok(())
    }

    /// Cuts its power.
    ///
    /// # Errors
    /// If it is off.
    pub async fn cut(&mut self) -> Outcome {
        let running = self.running.take();
        let running = running.with_context(|| format!("{} is powered off", self.name))?;
        running.cut().await?;
        // From now on it uses what is on its disk.
        self.node.parameters = None;
        Ok(())
    }

    /// Presses its power button and waits until it has shut down cleanly.
    ///
    /// # Errors
    /// If it ends in another way.
    pub async fn power_off(&mut self) -> Outcome {
        let running = self.running.take();
        let running = running.with_context(|| format!("{} is powered off", self.name))?;
        running.power_off().await?;
        self.node.parameters = None;
        Ok(())
    }

    /// Waits until it reports that it is HOME.
    ///
    /// # Errors
    /// If it does not become HOME.
    pub async fn home(&self) -> Outcome {
        let running = self.vm()?;
        running.home().await.with_context(|| self.name.clone())
    }

    /// Waits until it is HOME and its own curator listens. A member can be HOME by the curator of another before that.
    pub(crate) async fn serves(&self) -> Outcome {
        self.home().await?;
        let curator = self.vm()?.reached(Milestone::Curator, bounds::SETTLED);
        curator.await.map(drop).with_context(|| self.name.clone())
    }

    /// Powers it on and waits until it reports that it is HOME.
    ///
    /// # Errors
    /// If it does not become HOME.
    pub async fn comes_back(&mut self) -> Outcome {
        self.start().await?;
        self.home().await
    }

    /// A client of its debug service.
    ///
    /// # Errors
    /// If its debug service does not answer.
    pub async fn debug(&self) -> anyhow::Result<Debug> {
        self.vm()?.debug().await
    }

    /// Waits until the machine has the node's names: its ID is the host name, and the ID without prefix the machine-id.
    ///
    /// # Errors
    /// If that times out.
    pub async fn is_named(&self) -> Outcome {
        let bare = self.id.strip_prefix("hearth-").context("no node ID")?;
        let debug = self.debug().await?;
        let wanted = format!("{} is named {}", self.name, self.id);
        let named = debug.until(&wanted, |state| {
            state.host_name == self.id && state.machine_id == bare
        });
        named.await.map(drop)
    }

    /// The cluster state that it currently reports.
    ///
    /// # Errors
    /// If its debug service does not answer.
    pub async fn cluster_state(&self) -> anyhow::Result<ClusterState> {
        Ok(self.debug().await?.state().await?.cluster_state())
    }

    /// Its entry in the cluster's list.
    pub fn find<'a>(&self, cluster_status: &'a ClusterStatus) -> Option<&'a v1::Node> {
        cluster_status.nodes.iter().find(|node| node.id == self.id)
    }
    /// What it has last reported, if anything.
    pub fn status<'a>(&self, cluster_status: &'a ClusterStatus) -> Option<&'a v1::NodeStatus> {
        self.find(cluster_status)?.status.as_ref()
    }
}
