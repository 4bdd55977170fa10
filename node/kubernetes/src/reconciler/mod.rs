//! Reconciles the objects that Hearth maintains in a Kubernetes cluster, and the Node objects with
//! the nodes of the Hearth cluster.
//!
//! | part | content |
//! |---|---|
//! | [`lease`] | leader election among several controllers |
//! | `controller` | runs all of this on a controller |
//! | `cluster` | nodes and configuration, from the curators |
//! | `manifests` | the objects that a cluster was founded with |
//! | [`objects`] | the desired objects: permissions of nodes, classes, the DNS service |
//! | `policies` | the network policy of each worker |
//! | `seen` | the watched objects |
//! | [`nodes`] | which Node objects are removed, and the labels of the others |
//! | [`volumes::plan`] | which volumes are created and removed |
//!
//! It is level-triggered: the actual state is compared with the desired state whenever either may
//! have changed, and every [`Timing::drift`] in any case. So it has no state of its own that could
//! be lost, and manual changes are reverted. The actual state comes from watches, so a round
//! without work needs no requests to the API server.
//!
//! Running pods and services are not affected when no reconciler runs.
//!
//! [`volumes::plan`]: super::volumes::plan

mod admission;
pub(crate) mod cluster;
pub(crate) mod controller;
pub mod lease;
pub(crate) mod manifests;
pub mod nodes;
pub mod objects;
mod policies;
mod seen;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{StreamExt as _, select_all};
use hearth_api::identity::NodeId;
use hearth_base::event::{Closed, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_kubernetes_api::{ApiError, Client, Objects, Watching, kinds};
use hearth_network_policy::node::MAX_BYTES;
use http::StatusCode;
use tokio::time::{Instant, sleep_until};

use super::policy;
use super::program::Progress;
use super::volumes::plan::{self, Going, Refusal};
use lease::Competitor;
use nodes::{Cluster, Patience};
use objects::NAMESPACE;
use seen::{Seen, Sources};

/// Name of the lease of the leader.
const LEASE: &str = "hearth-reconciler";
/// Maximum number of pending events that are combined into one round.
const MAX_NEWS_PER_ROUND: usize = 1024;

/// Intervals and delays.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Timing of the lease.
    pub lease: lease::Timing,
    /// Interval at which everything is reconciled again.
    pub drift: Duration,
    /// Delay before failed requests are retried.
    pub again: Duration,
    /// How long a Node object is kept when its node is not a worker.
    pub patience: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: lease::Timing::default(),
            drift: Duration::from_secs(60),
            again: Duration::from_secs(5),
            patience: nodes::PATIENCE,
        }
    }
}

/// Configuration, inputs and outputs of the reconciler.
pub struct Reconciler {
    /// Identity for the lease: the ID of this node.
    pub identity: String,
    /// Directory of the volumes on each node.
    pub volumes: PathBuf,
    /// Intervals and delays.
    pub timing: Timing,
    /// Input: a client of this node's API server with all permissions.
    pub client: Value<Client>,
    /// Input: the nodes and the configuration of the cluster.
    pub cluster: Value<Arc<Cluster>>,
    /// Output: whether the constant objects exist.
    pub constants: Arc<Writer<Progress>>,
}

impl Reconciler {
    /// Records that the constant objects were applied, or why the first one was not. Later failures
    /// are not recorded: an object that is changed or deleted is restored.
    fn applied(&self, missing: Option<String>) {
        if self.constants.value().get() != Some(Progress::Serving) {
            self.constants.set(match missing {
                None => Progress::Serving,
                Some(why) => Progress::Failing(why),
            });
        }
    }
}

/// Runs the reconciler: as leader, or as candidate. It is healthy in both cases.
pub async fn run(ctx: Context, reconciler: Arc<Reconciler>) -> Outcome {
    let watching = Watching::of(&ctx);
    let mut clients = reconciler.client.watch();
    let mut client = tokio::select! {
        client = clients.next() => client?,
        () = ctx.cancelled() => return Ok(()),
    };
    watching.good();
    loop {
        client = tokio::select! {
            outcome = compete(&reconciler, client, &watching) => return outcome,
            newer = clients.next() => newer?,
            () = ctx.cancelled() => return Ok(()),
        };
    }
}

/// Competes for the lease, and reconciles while it holds it. Returns only on an error.
async fn compete(reconciler: &Reconciler, client: Client, watching: &Watching<'_>) -> Outcome {
    let identity = reconciler.identity.clone();
    let timing = reconciler.timing.lease;
    let lease = Competitor::new(&client, NAMESPACE, LEASE, identity, timing);
    loop {
        // While another controller is the leader, it applies the constant objects.
        lease.win(|| reconciler.applied(None)).await;
        tracing::info!("acquired the reconciler lease");
        tokio::select! {
            () = lease.hold() => tracing::info!("lost the reconciler lease"),
            outcome = lead(reconciler, client.clone(), watching) => return outcome,
        }
    }
}

/// Reconciles while this controller is the leader. Returns only on an error.
async fn lead(reconciler: &Reconciler, client: Client, watching: &Watching<'_>) -> Outcome {
    let mut seen = Seen::default();
    let sources = Sources {
        client: &client,
        watching,
    };
    let mut news = select_all(sources.all(&seen)).ready_chunks(MAX_NEWS_PER_ROUND);
    let mut clusters = reconciler.cluster.watch();
    let mut cluster = None;
    let mut rounds = Rounds::new(reconciler, client.clone());
    loop {
        tokio::select! {
            told = news.next() => {
                let told = told.ok_or_else(|| Failure::msg("the watches ended"))?;
                for news in told {
                    rounds.policies_due |= seen.take(news);
                }
            }
            newer = next(&mut clusters) => {
                cluster = Some(newer?);
                rounds.policies_due = true;
            }
            () = sleep_until(rounds.next) => {}
        }
        if let Some(cluster) = &cluster {
            rounds.constants(cluster).await;
            if rounds.follow(cluster, &seen).await {
                watching.good();
            }
        }
        rounds.rest();
    }
}

async fn next(clusters: &mut Watcher<Arc<Cluster>>) -> Result<Arc<Cluster>, Closed> {
    clusters.next().await
}

/// The state of a leader between rounds.
struct Rounds<'a> {
    reconciler: &'a Reconciler,
    client: Client,
    patience: Patience,
    /// When everything is reconciled again.
    drift: Instant,
    /// When the next round is due without events.
    next: Instant,
    /// The applied list of workers.
    workers: Option<BTreeSet<NodeId>>,
    /// The applied endpoints of the DNS service.
    servers: Option<Vec<(String, Ipv4Addr)>>,
    /// Which volumes each node may release; initially unknown: an earlier leader may have left
    /// permissions.
    going: Option<Going>,
    /// Something has changed on which network policies depend.
    policies_due: bool,
    /// Refused claims for which an event has been written.
    refused: BTreeSet<(String, String)>,
    failed: bool,
    again: Option<Instant>,
}

impl<'a> Rounds<'a> {
    fn new(reconciler: &'a Reconciler, client: Client) -> Self {
        let now = Instant::now();
        Self {
            reconciler,
            client,
            patience: Patience::new(reconciler.timing.patience),
            drift: now,
            next: now,
            workers: None,
            servers: None,
            going: None,
            policies_due: true,
            refused: BTreeSet::new(),
            failed: false,
            again: None,
        }
    }

    /// Applies the constant objects if they are due.
    async fn constants(&mut self, cluster: &Cluster) {
        if Instant::now() < self.drift {
            return;
        }
        self.drift = Instant::now() + self.reconciler.timing.drift;
        self.workers = None;
        self.servers = None;
        // Permissions are applied again only if there are any.
        self.going.take_if(|going| !going.is_empty());
        let mut missing = None;
        let mut constant = objects::constant();
        if !cluster.other_network {
            constant.push(objects::dns_service(&cluster.ranges));
            constant.extend(policies::constant());
        }
        for wanted in constant.into_iter().chain(admission::policies()) {
            let applied = wanted.apply(&self.client).await;
            let object = format!("{} {}", wanted.kind.name, wanted.name());
            if let Err(error) = &applied {
                missing.get_or_insert(format!("{object}: {}", hearth_api::chain(error)));
            }
            self.done(&format!("apply {object}"), applied);
        }
        if missing.is_some() {
            self.drift = Instant::now() + self.reconciler.timing.again;
        }
        self.reconciler.applied(missing);
    }

    /// Reconciles everything that depends on nodes, claims and volumes; returns whether these are
    /// known.
    async fn follow(&mut self, cluster: &Cluster, seen: &Seen) -> bool {
        let workers = cluster.nodes.iter().filter(|(_, member)| member.worker);
        let workers: BTreeSet<NodeId> = workers.map(|(node, _)| *node).collect();
        self.follow_workers(&workers).await;
        let (Some(nodes), Some(claims), Some(volumes)) =
            (seen.nodes.all(), seen.claims.all(), seen.volumes.all())
        else {
            return false;
        };
        let mut work = nodes::plan(cluster, nodes.values(), &mut self.patience, Instant::now());
        let servers = std::mem::take(&mut work.servers);
        self.follow_nodes(work).await;
        if !cluster.other_network {
            self.follow_servers(servers).await;
        }
        let there = cluster.nodes.keys().copied().collect();
        let nodes = plan::Nodes {
            workers,
            directory: &self.reconciler.volumes,
            all: &there,
        };
        let mut work = plan::plan(claims.values(), volumes.values(), &nodes);
        let going = std::mem::take(&mut work.going);
        self.follow_going(going, &there).await;
        self.follow_volumes(work).await;
        self.follow_policies(cluster, seen).await
    }

    /// Publishes the network policy of each worker; returns whether all of it is known.
    async fn follow_policies(&mut self, cluster: &Cluster, seen: &Seen) -> bool {
        let (Some(pods), Some(namespaces), Some(policies), Some(published)) = (
            seen.pods.all(),
            seen.namespaces.all(),
            seen.policies.all(),
            seen.published.all(),
        ) else {
            return false;
        };
        if !self.policies_due {
            return true;
        }
        let mut done = true;
        let workers = cluster.nodes.iter().filter(|(_, member)| member.worker);
        let networks = workers.map(|(node, member)| (*node, member.networks.clone()));
        let objects = hearth_network_policy::plan::Objects {
            pods,
            namespaces,
            policies,
        };
        let planned = hearth_network_policy::plan::plan(objects, &networks.collect());
        let work = policies::work(&planned, published);
        for wanted in work.write {
            let applied = wanted.apply(&self.client).await;
            done &= self.done("publish the network policy of a node", applied);
        }
        let maps = self.client.within(policy::NAMESPACE, kinds::CONFIG_MAPS);
        for name in work.remove {
            let removed = gone(&maps, &name).await;
            done &= self.done("remove the network policy of a node", removed);
        }
        for (node, bytes) in work.too_large {
            tracing::warn!(
                "the network policy of node {node} is too large: {bytes} bytes, the limit is \
                 {MAX_BYTES}; the node keeps the one that it has, and new pods have no network"
            );
        }
        self.policies_due = !done;
        true
    }

    /// Applies the list of workers, before anything else: a node that was deleted gets no more pods.
    async fn follow_workers(&mut self, workers: &BTreeSet<NodeId>) {
        if self.workers.as_ref() != Some(workers) {
            let applied = admission::workers(workers).apply(&self.client).await;
            let told = self.done("apply the list of workers", applied);
            self.workers = told.then(|| workers.clone());
        }
    }

    async fn follow_nodes(&mut self, work: nodes::Work) {
        self.again = work.again;
        let nodes = self.client.all(kinds::NODES);
        for name in work.remove {
            tracing::info!(
                node = name,
                "removing Node: it is not a worker of the cluster"
            );
            self.done("delete a Node", gone(&nodes, &name).await);
        }
        for (name, patch) in work.patch {
            let patched = if_still_so(nodes.merge(&name, &patch).await);
            self.done("change labels or taints of a Node", patched);
        }
    }

    async fn follow_servers(&mut self, servers: Vec<(String, Ipv4Addr)>) {
        if self.servers.as_ref() != Some(&servers) {
            let applied = objects::dns_endpoints(&servers).apply(&self.client).await;
            let told = self.done("apply the endpoints of DNS", applied);
            self.servers = told.then_some(servers);
        }
    }

    /// Permits each node to release those of its volumes that are being deleted.
    async fn follow_going(&mut self, going: Going, nodes: &BTreeSet<NodeId>) {
        if self.going.as_ref() == Some(&going) {
            return;
        }
        let before = self.going.take();
        let mut done = true;
        for (node, volumes) in &going {
            let before = before.as_ref().and_then(|before| before.get(node));
            if before != Some(volumes) {
                for wanted in objects::release_permission(*node, volumes) {
                    let applied = wanted.apply(&self.client).await;
                    done &= self.done("permit a node to release its volumes", applied);
                }
            }
        }
        let before: Vec<NodeId> = match &before {
            Some(before) => before.keys().copied().collect(),
            None => nodes.iter().copied().collect(),
        };
        for node in before.into_iter().filter(|node| !going.contains_key(node)) {
            for kind in [kinds::CLUSTER_ROLE_BINDINGS, kinds::CLUSTER_ROLES] {
                let removed = gone(&self.client.all(kind), &objects::letting_go_name(node)).await;
                done &= self.done("revoke the permission to release volumes", removed);
            }
        }
        self.going = done.then_some(going);
    }

    async fn follow_volumes(&mut self, work: plan::Work) {
        let volumes = self.client.all(kinds::VOLUMES);
        for planned in work.create {
            let made = match volumes.create(planned.body()).await {
                // It exists already.
                Err(error) if error.is(StatusCode::CONFLICT) => Ok(()),
                made => made.map(drop),
            };
            self.done("create a volume", made);
        }
        for name in work.remove {
            self.done("delete a volume", gone(&volumes, &name).await);
        }
        for (name, patch) in work.abandon {
            tracing::warn!(
                volume = name,
                "releasing volume: its node is not in the cluster any more"
            );
            self.done("release a volume", volumes.merge(&name, &patch).await);
        }
        for ((namespace, name, _), patch) in work.choose_again {
            let claims = self.client.within(&namespace, kinds::CLAIMS);
            let asked = if_still_so(claims.merge(&name, &patch).await);
            self.done("request another node for a claim", asked);
        }
        let mut refused = BTreeSet::new();
        for refusal in work.refuse {
            let key = (refusal.claim.2.clone(), refusal.why.clone());
            if self.refused.contains(&key) || self.tell(&refusal).await {
                refused.insert(key);
            }
        }
        self.refused = refused;
    }

    /// Writes an event to the claim with the reason why it is refused.
    async fn tell(&mut self, refusal: &Refusal) -> bool {
        let (namespace, name, _) = &refusal.claim;
        tracing::warn!("claim {namespace}/{name}: {}", refusal.why);
        let told = objects::refusal(refusal).apply(&self.client).await;
        self.done("write an event", told)
    }

    /// Returns whether a request has succeeded; one that has failed is logged and will be retried.
    fn done(&mut self, what: &str, outcome: Result<(), ApiError>) -> bool {
        if let Err(error) = &outcome {
            tracing::warn!("cannot {what}: {}", hearth_api::chain(error));
            self.failed = true;
        }
        outcome.is_ok()
    }

    /// Sets the time of the next round.
    fn rest(&mut self) {
        self.next = self.drift;
        if let Some(again) = self.again.take() {
            self.next = self.next.min(again);
        }
        if self.failed {
            self.failed = false;
            let again = Instant::now() + self.reconciler.timing.again;
            self.next = self.next.min(again);
        }
    }
}

/// Deletes an object, if it still exists.
async fn gone(objects: &Objects, name: &str) -> Result<(), ApiError> {
    if_still_so(objects.delete(name).await)
}

/// Ignores that an object does not exist or has changed: the watch will report it.
fn if_still_so(outcome: Result<(), ApiError>) -> Result<(), ApiError> {
    match outcome {
        Err(error) if error.is(StatusCode::NOT_FOUND) || error.is(StatusCode::CONFLICT) => Ok(()),
        outcome => outcome,
    }
}
