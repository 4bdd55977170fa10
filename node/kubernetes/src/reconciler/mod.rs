//! The objects that a cluster has from us, and Kubernetes' nodes as they follow
//! from the cluster's.
//!
//! | part | does |
//! |---|---|
//! | [`lease`] | which of several controllers works |
//! | `controller` | runs all of this on a controller |
//! | `cluster` | what the curators say |
//! | [`objects`] | what is to be there: the nodes' rights, classes, the service of names |
//! | [`nodes`] | which Node objects go, and what the others bear |
//! | [`volumes::plan`] | which volumes there are to be |
//!
//! All of it is a comparison of what is with what should be, made again
//! whenever either may have changed, and each [`Timing::drift`] anyway; so there
//! is nothing to remember, nothing to lose, and a change that somebody makes by
//! hand is put right. What is compared is followed by watches, so that a round
//! without work asks nothing of the API server.
//!
//! It works in the background alone: pods and services that are there do not
//! notice when no reconciler runs.
//!
//! [`volumes::plan`]: super::volumes::plan

pub(crate) mod cluster;
pub(crate) mod controller;
pub mod lease;
pub mod nodes;
pub mod objects;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt as _, select_all};
use hearth_api::identity::NodeId;
use hearth_base::event::{Closed, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_kubernetes_api::fields::{Claim, Node, Volume};
use hearth_kubernetes_api::kinds::{self, Kind};
use hearth_kubernetes_api::watch::{Event, Known, Which, watch};
use hearth_kubernetes_api::{ApiError, Client, Objects};
use http::StatusCode;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

use super::program::Progress;
use super::volumes::plan::{self, Going, Refusal};
use hearth_kubernetes_api::Watching;

use lease::Competitor;
use nodes::{Cluster, Patience};
use objects::NAMESPACE;

/// The lease under which one of them works.
const LEASE: &str = "hearth-reconciler";
/// News that are at hand together make one round.
const MAX_NEWS_PER_ROUND: usize = 1024;

/// How often.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Of the lease.
    pub lease: lease::Timing,
    /// Everything is looked at again after so long.
    pub drift: Duration,
    /// What has failed is tried again after so long.
    pub again: Duration,
    /// A Node whose node is no worker stays for so long.
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

/// What the reconciler works with.
pub struct Reconciler {
    /// This node.
    pub identity: String,
    /// Where nodes have their volumes.
    pub volumes: PathBuf,
    /// How often.
    pub timing: Timing,
    /// Will be read: speaks with this node's API server, and may do everything.
    pub client: Value<Client>,
    /// Will be read: what the objects are made of.
    pub cluster: Value<Arc<Cluster>>,
    /// Will be written: whether the objects that are always the same are there.
    pub constants: Arc<Writer<Progress>>,
}

impl Reconciler {
    /// They were applied, or the first one that was not. Once they are there,
    /// one that is changed or lost is put right and does not count.
    fn applied(&self, missing: Option<String>) {
        if self.constants.value().get() != Some(Progress::Serving) {
            self.constants.set(match missing {
                None => Progress::Serving,
                Some(why) => Progress::Failing(why),
            });
        }
    }
}

/// Works, or waits for its turn. Healthy in both.
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

/// Ends by an error only.
async fn compete(reconciler: &Reconciler, client: Client, watching: &Watching<'_>) -> Outcome {
    let identity = reconciler.identity.clone();
    let timing = reconciler.timing.lease;
    let lease = Competitor::new(&client, NAMESPACE, LEASE, identity, timing);
    loop {
        // Whoever holds it makes them.
        lease.win(|| reconciler.applied(None)).await;
        tracing::info!("this controller keeps the objects of the cluster");
        tokio::select! {
            () = lease.hold() => tracing::info!("this controller keeps them no longer"),
            outcome = lead(reconciler, client.clone(), watching) => return outcome,
        }
    }
}

/// What the API server holds of what matters here.
#[derive(Default)]
struct Seen {
    nodes: Known<Node>,
    claims: Known<Claim>,
    volumes: Known<Volume>,
}

/// Something was told, of one of the kinds.
enum News {
    Nodes(Event<Node>),
    Claims(Event<Claim>),
    Volumes(Event<Volume>),
}

impl Seen {
    fn take(&mut self, news: News) {
        match news {
            News::Nodes(event) => self.nodes.take(event, Some),
            News::Claims(event) => self.claims.take(event, plan::waiting),
            News::Volumes(event) => self.volumes.take(event, Some),
        };
    }
}

/// Follows one kind of objects.
fn followed<'a, T: DeserializeOwned + Send + 'a>(
    client: &Client,
    kind: Kind,
    news: fn(Event<T>) -> News,
    watching: &'a Watching<'a>,
) -> BoxStream<'a, News> {
    let told = watch(client.all(kind), Which::All);
    let told = told.filter_map(move |told| async move {
        match told {
            Ok(event) => Some(news(event)),
            Err(error) => {
                watching.failed(kind.plural, &error);
                None
            }
        }
    });
    told.boxed()
}

/// Ends by an error only.
async fn lead(reconciler: &Reconciler, client: Client, watching: &Watching<'_>) -> Outcome {
    let nodes = followed(&client, kinds::NODES, News::Nodes, watching);
    let claims = followed(&client, kinds::CLAIMS, News::Claims, watching);
    let volumes = followed(&client, kinds::VOLUMES, News::Volumes, watching);
    let mut news = select_all([nodes, claims, volumes]).ready_chunks(MAX_NEWS_PER_ROUND);
    let mut seen = Seen::default();
    let mut clusters = reconciler.cluster.watch();
    let mut cluster = None;
    let mut rounds = Rounds::new(reconciler, client);
    loop {
        tokio::select! {
            told = news.next() => {
                let told = told.ok_or_else(|| Failure::msg("the watches ended"))?;
                told.into_iter().for_each(|news| seen.take(news));
            }
            newer = next(&mut clusters) => cluster = Some(newer?),
            () = sleep_until(rounds.next) => {}
        }
        rounds.constants().await;
        if let Some(cluster) = &cluster
            && rounds.follow(cluster, &seen).await
        {
            watching.good();
        }
        rounds.rest();
    }
}

async fn next(clusters: &mut Watcher<Arc<Cluster>>) -> Result<Arc<Cluster>, Closed> {
    clusters.next().await
}

/// What one leader does, round for round.
struct Rounds<'a> {
    reconciler: &'a Reconciler,
    client: Client,
    patience: Patience,
    /// When everything is looked at again.
    drift: Instant,
    /// When the next round is due without news.
    next: Instant,
    /// Those who were told to others as servers of names.
    servers: Option<Vec<(String, Ipv4Addr)>>,
    /// Which volumes which node may let go; not known at first: another leader
    /// may have left some.
    going: Option<Going>,
    /// Claims that were refused, and have been told.
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
            servers: None,
            going: None,
            refused: BTreeSet::new(),
            failed: false,
            again: None,
        }
    }

    /// Those objects that are always the same, when they are due.
    async fn constants(&mut self) {
        if Instant::now() < self.drift {
            return;
        }
        self.drift = Instant::now() + self.reconciler.timing.drift;
        self.servers = None;
        // What nobody needs is nobody's concern.
        self.going.take_if(|going| !going.is_empty());
        let mut missing = None;
        for wanted in objects::constant() {
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

    /// Everything that follows from what there is; tells whether that is known.
    async fn follow(&mut self, cluster: &Cluster, seen: &Seen) -> bool {
        let (Some(nodes), Some(claims), Some(volumes)) =
            (seen.nodes.all(), seen.claims.all(), seen.volumes.all())
        else {
            return false;
        };
        let work = nodes::plan(cluster, nodes.values(), &mut self.patience, Instant::now());
        self.follow_nodes(work).await;
        let there = cluster.nodes.keys().copied().collect();
        let workers = cluster.nodes.iter().filter(|(_, member)| member.worker);
        let nodes = plan::Nodes {
            workers: workers.map(|(node, _)| *node).collect(),
            directory: &self.reconciler.volumes,
            all: &there,
        };
        let mut work = plan::plan(claims.values(), volumes.values(), &nodes);
        let going = std::mem::take(&mut work.going);
        self.follow_going(going, &there).await;
        self.follow_volumes(work).await;
        true
    }

    async fn follow_nodes(&mut self, work: nodes::Work) {
        self.again = work.again;
        let nodes = self.client.all(kinds::NODES);
        for name in work.remove {
            tracing::info!(node = name, "Kubernetes' node is removed: it is no worker");
            self.done("remove a node", gone(&nodes, &name).await);
        }
        for (name, patch) in work.patch {
            self.done("label a node", nodes.merge(&name, &patch).await);
        }
        if self.servers.as_ref() != Some(&work.servers) {
            let wanted = objects::dns_endpoints(&work.servers);
            let applied = wanted.apply(&self.client).await;
            let told = self.done("tell who resolves names", applied);
            self.servers = told.then_some(work.servers);
        }
    }

    /// Each node may let those of its volumes go that are being removed.
    async fn follow_going(&mut self, going: Going, nodes: &BTreeSet<NodeId>) {
        if self.going.as_ref() == Some(&going) {
            return;
        }
        let before = self.going.take();
        let mut done = true;
        for (node, volumes) in &going {
            let before = before.as_ref().and_then(|before| before.get(node));
            if before != Some(volumes) {
                for wanted in objects::letting_go(*node, volumes) {
                    let applied = wanted.apply(&self.client).await;
                    done &= self.done("let a node release its volumes", applied);
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
                done &= self.done("take a right back", removed);
            }
        }
        self.going = done.then_some(going);
    }

    async fn follow_volumes(&mut self, work: plan::Work) {
        let volumes = self.client.all(kinds::VOLUMES);
        for planned in work.create {
            let made = match volumes.create(planned.body()).await {
                // It is there already.
                Err(error) if error.is(StatusCode::CONFLICT) => Ok(()),
                made => made.map(drop),
            };
            self.done("make a volume", made);
        }
        for name in work.remove {
            self.done("remove a volume", gone(&volumes, &name).await);
        }
        for (name, patch) in work.abandon {
            tracing::warn!(
                volume = name,
                "the node of a volume is no more: it is let go"
            );
            self.done("let a volume go", volumes.merge(&name, &patch).await);
        }
        for ((namespace, name, _), patch) in work.choose_again {
            let claims = self.client.within(&namespace, kinds::CLAIMS);
            let asked = if_still_so(claims.merge(&name, &patch).await);
            self.done("have another node chosen for a claim", asked);
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

    /// Tells whoever made a claim why it is not served.
    async fn tell(&mut self, refusal: &Refusal) -> bool {
        let (namespace, name, _) = &refusal.claim;
        tracing::warn!("claim {namespace}/{name}: {}", refusal.why);
        let told = objects::refusal(refusal).apply(&self.client).await;
        self.done("tell of a refusal", told)
    }

    /// Tells whether a request was done; one that has failed is tried again.
    fn done(&mut self, what: &str, outcome: Result<(), ApiError>) -> bool {
        if let Err(error) = &outcome {
            tracing::warn!("{what}: {}", hearth_api::chain(error));
            self.failed = true;
        }
        outcome.is_ok()
    }

    /// Says when the next round is.
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

/// Removes an object, if it is still there.
async fn gone(objects: &Objects, name: &str) -> Result<(), ApiError> {
    if_still_so(objects.delete(name).await)
}

/// That an object is gone, or another has changed it, is fine: the watch tells.
fn if_still_so(outcome: Result<(), ApiError>) -> Result<(), ApiError> {
    match outcome {
        Err(error) if error.is(StatusCode::NOT_FOUND) || error.is(StatusCode::CONFLICT) => Ok(()),
        outcome => outcome,
    }
}
