//! The node's network interfaces, and which of their addresses is the node's.
//!
//! The parameters say which interfaces are used, and how; the sealed configuration has a copy from the time of enrolment,
//! so that a later boot needs no parameters. Without any of both, every Ethernet device is used, by DHCP and by the
//! advertisements of IPv6 routers. An operator can set another configuration while the node runs ([`control`]): then all
//! interfaces are taken down, and the new ones begin as at boot.
//!
//! Each interface is followed on its own ([`interface`]) and reports what it has: one that fails, or that has to wait, holds no
//! other one up. From the reports this worker decides ([`choice`]) which interface leads: its first address is the one at which
//! other nodes reach this one. It writes `resolv.conf`, and publishes the address, that of the other family, the MTU, the time
//! servers, and what the interfaces lack, which the node reports as a condition.
//!
//! Lost addresses are not withdrawn: the other nodes have no better one until there is another. The time servers are
//! published before the address, so that whoever has waited for that knows them; so are the second address and the MTU.
//!
//! # Parts
//! - `choice`: which interface leads, and what the node has from all of them; pure.
//! - `interface`: from a device to addresses; again whenever that fails.
//! - `device`: the device of an interface, as soon as it exists; `claims`: whether another machine has its address.
//! - `control`: the configuration, and how operators change it; `trial`: which one is used meanwhile; pure.
//! - this module: the order of it all, and what is published.

mod choice;
mod claims;
pub(crate) mod control;
mod device;
mod interface;
mod report;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::chain;
use hearth_api::console::{Milestone, Report};
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_enrolment::sealed::{SealedStore, Stored};
use hearth_host::console;
use hearth_host::layout::Root;
use hearth_host::networking::cidr;
use hearth_host::parameters::Loaded;
use hearth_parameters::{self as parameters, Interface};
use hearth_sys::cidr::Cidr;
use hearth_sys::netlink::{LinkKind, LinkMonitor, Netlink, NetlinkError};
use hearth_sys::{devices, files, sysctl};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use choice::{Choice, Seen};
use interface::{Followed, Source};
use report::News;

const PUBLIC: u32 = 0o644;
/// How long an address waits for a better one that another interface may get: longer than DHCP takes where it works.
const PATIENCE: Duration = Duration::from_secs(3);

/// The network configuration that this machine was given.
pub(crate) fn of_parameters(parameters: &Loaded, sealed: &SealedStore) -> parameters::Network {
    if let Ok(Some(found)) = parameters {
        return found.parameters.network.clone();
    }
    match sealed.load() {
        Ok(Stored::Sealed(sealed)) => sealed.network().cloned().unwrap_or_default(),
        // Enrolment reads the sealed configuration, too, and reports what is wrong with it.
        Ok(Stored::Absent | Stored::NeverCompleted) | Err(_) => parameters::Network::default(),
    }
}

/// The inputs and outputs of the network worker.
pub(crate) struct Network {
    /// Input: the configuration of the interfaces.
    pub network_configuration: Value<parameters::Network>,
    /// The configuration whose interfaces are followed, after those of the one before were taken down.
    pub network_followed: Writer<parameters::Network>,
    /// For the path of `resolv.conf`.
    pub root: Root,
    /// Input: the cluster's settings for Kubernetes, on nodes with one of its roles; they have the ranges of pods and services.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    pub address: Arc<Writer<IpAddr>>,
    pub second_address: Arc<Writer<Option<IpAddr>>>,
    /// The MTU of the interface with the address, in bytes.
    pub mtu: Arc<Writer<u32>>,
    pub dhcp_time_servers: Arc<Writer<Vec<IpAddr>>>,
    /// What the interfaces lack, for people.
    pub network_problems: Arc<Writer<Vec<String>>>,
}

/// Brings the network up and keeps it up. What every configuration needs is done before there is one.
pub(crate) async fn run(ctx: Context, network: Arc<Network>) -> Outcome {
    let netlink = Netlink::open()?;
    netlink.set_loopback_up().await?;
    // A path may carry less than its links promise, and not say so: TCP finds out by itself.
    if let Err(error) = sysctl::set("net.ipv4.tcp_mtu_probing", "1") {
        tracing::warn!("{}", chain(&error));
    }
    let (reserved_writer, reserved) = event::value();
    let mut published = Published::new(&network);
    ctx.healthy();
    ctx.until_cancelled(async {
        tokio::select! {
            end = follow_configurations(&netlink, &mut published, &reserved) => end,
            end = reserve(&network.settings, &reserved_writer) => end,
        }
    })
    .await
}

/// Follows the interfaces of the configuration, then those of the next one. Returns only on an error.
async fn follow_configurations(
    netlink: &Netlink,
    published: &mut Published<'_>,
    reserved: &Value<Vec<Cidr>>,
) -> Outcome {
    let network = published.network;
    let mut configurations = network.network_configuration.watch();
    let mut configuration = configurations.next().await?;
    let at_boot = devices::mtus(netlink).await?;
    loop {
        let before = network.network_followed.value().get();
        if before.is_some_and(|before| before != configuration) {
            tracing::info!(
                "the network configuration has changed: all interfaces are set up again"
            );
            devices::reset(netlink, &at_boot).await?;
        }
        set_if_changed(&network.network_followed, configuration.clone());
        published.begin(&configuration);
        let (tell, heard) = mpsc::channel(8);
        let reserved = reserved.clone();
        let source = Source { reserved, tell };
        let mut followed = JoinSet::new();
        let next = tokio::select! {
            end = published.follow(heard) => return end,
            end = follow_interfaces(netlink, &source, &configuration.interfaces, &mut followed) => return end,
            next = configurations.next() => next?,
        };
        // None of them changes anything after this.
        followed.shutdown().await;
        configuration = next;
    }
}

/// Follows the configured interfaces; if there are none, each Ethernet device that the machine has or gets. Returns only on an
/// error.
async fn follow_interfaces(
    netlink: &Netlink,
    source: &Source,
    configured: &[Interface],
    followed: &mut JoinSet<()>,
) -> Outcome {
    for order in 0..configured.len() {
        let one = Followed::configured(order, configured);
        followed.spawn(interface::follow(source.clone(), one));
    }
    let mut monitor = LinkMonitor::open()?;
    let mut known = BTreeSet::new();
    loop {
        if configured.is_empty() {
            for device in new_devices(netlink, &mut known).await? {
                followed.spawn(interface::follow(source.clone(), device));
            }
        }
        let changed = async {
            match known.is_empty() {
                true => device::await_change(&mut monitor, &device::none_found()).await,
                false => monitor.changed().await,
            }
        };
        tokio::select! {
            changed = changed, if configured.is_empty() => changed?,
            // Only that of a device ends in order, when the device is gone.
            Some(ended) = followed.join_next() => ended?,
        }
    }
}

/// The Ethernet devices that are not known yet. Those that are gone are forgotten.
async fn new_devices(
    netlink: &Netlink,
    known: &mut BTreeSet<u32>,
) -> Result<Vec<Followed>, NetlinkError> {
    let mut links = netlink.list_links().await?;
    links.retain(|link| {
        link.kind == LinkKind::Ethernet && link.controller.is_none() && link.mac.is_some()
    });
    known.retain(|index| links.iter().any(|link| link.index == *index));
    let new = links.iter().filter(|link| known.insert(link.index));
    Ok(new.map(Followed::device).collect())
}

/// Keeps the networks of pods and services from being used as those of machines.
async fn reserve(
    settings: &Value<Arc<KubernetesConfiguration>>,
    reserved: &Writer<Vec<Cidr>>,
) -> Outcome {
    let mut settings = settings.watch();
    while let Ok(settings) = settings.next().await {
        let ranges = ClusterRanges::of(&settings)?;
        let v6 = ranges.v6.map(|v6| [cidr(v6.pods), cidr(v6.services)]);
        let v4 = [cidr(ranges.v4.pods), cidr(ranges.v4.services)];
        reserved.set(v4.into_iter().chain(v6.into_iter().flatten()).collect());
    }
    // The last ones remain valid.
    std::future::pending().await
}

/// What was published, and what it was made of.
struct Published<'a> {
    network: &'a Network,
    configuration: parameters::Network,
    /// By the order of preference.
    seen: BTreeMap<usize, Seen>,
    problems: BTreeMap<usize, String>,
    /// Until when an address waits for a better one; `None` before there is any.
    until: Option<Instant>,
    /// The file that was written: it may be empty, and programs expect that it exists.
    resolv_conf: Option<String>,
}

impl<'a> Published<'a> {
    fn new(network: &'a Network) -> Self {
        Self {
            network,
            configuration: parameters::Network::default(),
            seen: BTreeMap::new(),
            problems: BTreeMap::new(),
            until: None,
            resolv_conf: None,
        }
    }

    /// Forgets what the interfaces of an earlier configuration had. Their addresses stay published until there are others.
    fn begin(&mut self, configuration: &parameters::Network) {
        self.configuration = configuration.clone();
        self.seen.clear();
        self.problems.clear();
        self.until = None;
    }

    async fn follow(&mut self, mut heard: mpsc::Receiver<(usize, News)>) -> Outcome {
        set_if_changed(&self.network.network_problems, Vec::new());
        loop {
            let waits_until = self.until.filter(|until| *until > Instant::now());
            tokio::select! {
                news = heard.recv() => {
                    // The worker has a sender, so there is always one.
                    let Some((order, news)) = news else { return Ok(()) };
                    self.note(order, news);
                }
                () = sleep_until(waits_until.unwrap_or_else(Instant::now)), if waits_until.is_some() => {}
            }
            self.decide()?;
        }
    }

    fn note(&mut self, order: usize, news: News) {
        match news {
            News::Has(seen) => drop(self.seen.insert(order, seen)),
            News::Lacks(why) => drop(self.problems.insert(order, why)),
            News::LacksNothing => drop(self.problems.remove(&order)),
        }
        let problems = self.problems.values().cloned().collect();
        set_if_changed(&self.network.network_problems, problems);
    }

    fn decide(&mut self) -> Outcome {
        let current = self.network.address.value().get();
        let mut addresses = self.seen.values().flat_map(|seen| &seen.addresses);
        if self.until.is_none() && addresses.next().is_some() {
            self.until = Some(Instant::now() + PATIENCE);
        }
        let may_wait = self.until.is_none_or(|until| until > Instant::now());
        let Some(choice) = choice::choose(&self.seen, current, may_wait) else {
            return Ok(());
        };
        self.publish(&choice)
    }

    fn publish(&mut self, choice: &Choice) -> Outcome {
        let network = self.network;
        set_if_changed(&network.dhcp_time_servers, choice.time_servers.clone());
        let resolv_conf = choice.resolv_conf(&self.configuration);
        if self.resolv_conf.as_ref() != Some(&resolv_conf) {
            let path = network.root.ephemeral.resolv_conf();
            files::write_atomic(&path, resolv_conf.as_bytes(), PUBLIC)?;
            if !resolv_conf.is_empty() {
                tracing::info!(
                    "resolv.conf: {}",
                    resolv_conf.trim_end().replace('\n', "; ")
                );
            }
            self.resolv_conf = Some(resolv_conf);
        }
        set_if_changed(&network.second_address, choice.second);
        set_if_changed(&network.mtu, choice.mtu);
        let is_first = network.address.value().get().is_none();
        if set_if_changed(&network.address, choice.address.address()) {
            tracing::info!(
                interface = choice.interface,
                "network address: {}",
                choice.address
            );
        }
        if is_first {
            let address = choice.address.to_string();
            console::report(&Report::Reached(Milestone::Network, address));
        }
        Ok(())
    }
}

fn set_if_changed<T>(writer: &Writer<T>, state: T) -> bool
where
    T: Clone + PartialEq + Send + Sync + 'static,
{
    let changed = writer.value().get().as_ref() != Some(&state);
    if changed {
        writer.set(state);
    }
    changed
}
