//! The node's packet filter: what may come in from where, what may pass, and what may leave.
//!
//! One table of nf_tables, [`rules::TABLE`], is the node's own; kube-proxy and the CNI plugins have
//! theirs beside it. It does not depend on the node's roles: it is loaded once the node is a
//! member, before the mesh forwards the first packet, and stays until the machine stops. So there
//! is no moment in which a role comes or goes without rules. Nodes whose image lacks the extension
//! have no pods, forward nothing, and need none.
//!
//! The rules follow the addresses of the nodes, the ranges of pods and services in the cluster's
//! settings, and the network policy of this node's pods, which the worker role receives
//! ([`hearth_network_policy`]). Where pods have another network than the built-in one, only the rules
//! about the node's own ports remain: which packets are from pods, and what they may do, is up to that
//! network. Each change replaces the whole table in one transaction; connections are not affected. What
//! is in the kernel is read back after each change and then regularly: a pod with the privileges to
//! change it, or a program that flushes all tables, does not do so for long, and the log says that it
//! was done.

mod rules;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_agent::{MAX_RETRY_DELAY, PeerAddresses, PeerWatcher, View};
use hearth_api::names::EXTENSION_KUBERNETES;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::extensions::Extensions;
use hearth_host::handover::{MemberData, PacketFilter, PodNetwork, PodsPossible};
use hearth_network_policy::node::NodePolicy;
use hearth_sys::nftables::{Nftables, NftablesError};
use tokio::time::{Instant, sleep_until};

pub(crate) use rules::{OWN_TCP, OWN_UDP};
use rules::{Pods, Rules, TABLE};

/// How often the rules in the kernel are compared with what they should be.
const READ_EVERY: Duration = Duration::from_secs(30);

/// Keeps the packet filter of this node.
pub struct Worker {
    /// The mounted extensions; one of them contains `nft`.
    pub extensions: Arc<Extensions>,
    /// Input: the identity of this node.
    pub member: Value<MemberData>,
    /// Input: the nodes of the cluster.
    pub view: Value<Arc<View>>,
    /// Input: the addresses of other nodes.
    pub learned: Value<PeerAddresses>,
    /// Input: the address of this node.
    pub address: Value<IpAddr>,
    /// Input: which pods there may be; not set means none.
    pub may_have_pods: Value<PodsPossible>,
    /// Input: the network of this node's pods.
    pub pod_network: Value<Option<PodNetwork>>,
    /// Input: the network policy of this node's pods; `None` while it is not known.
    pub network_policy: Value<Option<Arc<NodePolicy>>>,
    /// Input: the cluster's settings for Kubernetes, on nodes with one of its roles.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Output: set once the rules are in the kernel, and again when they are about other ranges.
    pub packet_filter: Writer<PacketFilter>,
}

/// Runs the packet filter on this node, if its image has the extension.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.restart_within(Some(MAX_RETRY_DELAY));
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

/// Keeps the rules up to date. Returns only on an error.
async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let health = Health::of(ctx);
    let Ok(mounted) = worker.extensions.get(EXTENSION_KUBERNETES) else {
        health.good();
        return std::future::pending().await;
    };
    let member = worker.member.watch().next().await?;
    let mut filter = Filter::new(Bundle::open(mounted)?.program(Binary::Nft));
    let mut peers = PeerWatcher::new(&member, &worker.view, &worker.learned, &worker.address);
    let mut all_pods = worker.may_have_pods.watch();
    let mut networks = worker.pod_network.watch();
    let mut policies = worker.network_policy.watch();
    let mut settings = worker.settings.watch();
    loop {
        let known = worker.settings.get();
        let ranges = known.as_deref().map(ClusterRanges::of).transpose()?;
        // On a node whose own address is in them, no role of Kubernetes runs, and the rules would cut it off.
        let own = worker.address.get();
        let ranges = ranges.filter(|ranges| !own.is_some_and(|own| ranges.contains(own)));
        // One of the nodes has it.
        let shared = known.and_then(|settings| settings.virtual_address());
        let nodes = peers.known().all_addresses().chain(shared);
        filter.set(Rules::of(nodes, ranges, pods(worker))).await?;
        let in_place = PacketFilter {
            nftables: filter.nftables.clone(),
            table: TABLE,
            ranges,
        };
        if worker.packet_filter.value().get().as_ref() != Some(&in_place) {
            worker.packet_filter.set(in_place);
        }
        health.good();
        tokio::select! {
            news = peers.changed() => news?,
            pods = all_pods.next() => drop(pods?),
            network = networks.next() => drop(network?),
            policy = policies.next() => drop(policy?),
            settings = settings.next() => drop(settings?),
            () = sleep_until(filter.read_at) => filter.restore().await?,
        }
    }
}

fn pods(worker: &Worker) -> Pods {
    if let Some(PodsPossible::OtherNetwork(_)) = worker.may_have_pods.get() {
        return Pods::OtherNetwork;
    }
    match worker.pod_network.get().flatten() {
        Some(network) => Pods::BuiltIn {
            subnets: network.subnets,
            policy: worker.network_policy.get().flatten(),
        },
        None => Pods::None,
    }
}

/// The table in the kernel.
struct Filter {
    nftables: Nftables,
    /// The rules that were written last, and what the kernel made of them.
    written: Option<(Rules, String)>,
    /// When the kernel's are compared with them next.
    read_at: Instant,
}

impl Filter {
    fn new(program: PathBuf) -> Self {
        Self {
            nftables: Nftables::at(program),
            written: None,
            read_at: Instant::now(),
        }
    }

    /// Makes these the rules in the kernel, if others were written last.
    async fn set(&mut self, rules: Rules) -> Result<(), NftablesError> {
        match &self.written {
            Some((written, _)) if *written == rules => Ok(()),
            _ => self.write(rules).await,
        }
    }

    async fn write(&mut self, rules: Rules) -> Result<(), NftablesError> {
        self.nftables.apply(&rules.script()).await?;
        let found = self.nftables.table(TABLE).await?;
        self.written = Some((rules, found));
        self.read_at = Instant::now() + READ_EVERY;
        Ok(())
    }

    /// Writes the rules again if something else has changed or removed them.
    async fn restore(&mut self) -> Result<(), NftablesError> {
        let Some((rules, wanted)) = self.written.take() else {
            return Ok(());
        };
        // A table that cannot be read is most likely not there.
        let found = self.nftables.table(TABLE).await.unwrap_or_default();
        if found != wanted {
            tracing::warn!(
                "another program has changed the node's packet filter; writing it again"
            );
            return self.write(rules).await;
        }
        self.written = Some((rules, wanted));
        self.read_at = Instant::now() + READ_EVERY;
        Ok(())
    }
}
