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
use hearth_base::event::{Closed, Value, Watcher};
use hearth_base::supervisor::{Context, Failure, Outcome};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt as _, reflector as reflect};
use kube::{Client, Error, Resource};
use tokio::time::{Instant, sleep_until, timeout};

use super::access::{Pauses, Watching};
use super::volumes::plan::{self, Refusal};
use lease::Competitor;
use nodes::{Cluster, Patience};
use objects::{MANAGER, NAMESPACE, Wanted};

/// The lease under which one of them works.
const LEASE: &str = "hearth-reconciler";
/// For a request to the API server.
const REQUEST: Duration = Duration::from_secs(30);
/// News that are at hand together make one round.
const TOGETHER: usize = 1024;

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
    /// Will be read.
    pub cluster: Value<Arc<Cluster>>,
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
    let lease = Competitor::new(client.clone(), NAMESPACE, LEASE, identity, timing);
    loop {
        lease.win().await;
        tracing::info!("this controller keeps the objects of the cluster");
        tokio::select! {
            () = lease.hold() => tracing::info!("this controller keeps them no longer"),
            outcome = lead(reconciler, client.clone(), watching) => return outcome,
        }
    }
}

/// Something was told.
enum News {
    Something,
    /// Of this kind everything has been told once.
    Complete(usize),
}

/// What the API server holds of what matters here.
struct Seen {
    nodes: Store<Node>,
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
}

/// Follows one kind of objects.
fn followed<'a, K>(
    at: usize,
    what: &'static str,
    api: Api<K>,
    watching: &'a Watching<'a>,
) -> (Store<K>, BoxStream<'a, News>)
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let events = watcher(api, watcher::Config::default());
    let events = reflect(writer, events).backoff(Pauses);
    let news = events.filter_map(move |event| async move {
        match event {
            Ok(Event::InitDone) => Some(News::Complete(at)),
            Ok(Event::Apply(_) | Event::Delete(_)) => Some(News::Something),
            Ok(Event::Init | Event::InitApply(_)) => None,
            Err(error) => {
                watching.failed(what, &error);
                None
            }
        }
    });
    (store, news.boxed())
}

/// Ends by an error only.
async fn lead(reconciler: &Reconciler, client: Client, watching: &Watching<'_>) -> Outcome {
    let (nodes, of_nodes) = followed(0, "nodes", Api::all(client.clone()), watching);
    let (claims, of_claims) = followed(1, "claims", Api::all(client.clone()), watching);
    let (volumes, of_volumes) = followed(2, "volumes", Api::all(client.clone()), watching);
    let seen = Seen {
        nodes,
        claims,
        volumes,
    };
    let mut news = select_all([of_nodes, of_claims, of_volumes]).ready_chunks(TOGETHER);
    let mut complete = [false; 3];
    let mut clusters = reconciler.cluster.watch();
    let mut cluster = None;
    let mut rounds = Rounds::new(reconciler, client);
    loop {
        tokio::select! {
            told = news.next() => {
                for news in told.ok_or_else(|| Failure::msg("the watches ended"))? {
                    if let News::Complete(at) = news {
                        complete[at] = true;
                    }
                }
            }
            newer = next(&mut clusters) => cluster = Some(newer?),
            () = sleep_until(rounds.next) => {}
        }
        rounds.constants().await;
        if let Some(cluster) = cluster.as_ref().filter(|_| complete == [true; 3]) {
            rounds.follow(cluster, &seen).await;
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
        let before = self.failed;
        for wanted in objects::constant() {
            let client = self.client.clone();
            let applied = async move { apply(&client, &wanted).await };
            self.request("apply", applied).await;
        }
        if self.failed && !before {
            self.drift = Instant::now() + self.reconciler.timing.again;
        }
    }

    /// Everything that follows from what there is.
    async fn follow(&mut self, cluster: &Cluster, seen: &Seen) {
        let nodes = seen.nodes.state();
        let nodes = nodes.iter().map(Arc::as_ref);
        let work = nodes::plan(cluster, nodes, &mut self.patience, Instant::now());
        self.again = work.again;
        let api = Api::<Node>::all(self.client.clone());
        for name in work.remove {
            tracing::info!(node = name, "Kubernetes' node is removed: it is no worker");
            self.request(
                "remove a node",
                gone(api.delete(&name, &DeleteParams::default())),
            )
            .await;
        }
        for (name, patch) in work.patch {
            let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
            self.request("label a node", done(api.patch(&name, &params, &patch)))
                .await;
        }
        if self.servers.as_ref() != Some(&work.servers) {
            let wanted = objects::dns_endpoints(&work.servers);
            let client = self.client.clone();
            let applied = async move { apply(&client, &wanted).await };
            let told = self.request("tell who resolves names", applied).await;
            self.servers = told.then_some(work.servers);
        }
        self.follow_volumes(cluster, seen).await;
    }

    async fn follow_volumes(&mut self, cluster: &Cluster, seen: &Seen) {
        let (claims, volumes) = (seen.claims.state(), seen.volumes.state());
        let workers = cluster.nodes.keys().copied().collect();
        let work = plan::plan(
            claims.iter().map(Arc::as_ref),
            volumes.iter().map(Arc::as_ref),
            &workers,
            &self.reconciler.volumes,
        );
        let api = Api::<PersistentVolume>::all(self.client.clone());
        for planned in work.create {
            match serde_json::from_value(planned.body()) {
                Ok(volume) => {
                    let params = PostParams {
                        field_manager: Some(MANAGER.to_owned()),
                        ..PostParams::default()
                    };
                    self.request("make a volume", there(api.create(&params, &volume)))
                        .await;
                }
                Err(error) => tracing::error!(%error, "a volume of ours is none"),
            }
        }
        for name in work.remove {
            self.request(
                "remove a volume",
                gone(api.delete(&name, &DeleteParams::default())),
            )
            .await;
        }
        for (name, patch) in work.abandon {
            tracing::warn!(
                volume = name,
                "the node of a volume is no more: it is let go"
            );
            let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
            self.request("let a volume go", done(api.patch(&name, &params, &patch)))
                .await;
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
        let (namespace, name, uid) = &refusal.claim;
        tracing::warn!("claim {namespace}/{name}: {}", refusal.why);
        let wanted = objects::refusal(refusal);
        let api: Api<kube::api::DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &wanted.resource);
        let event = format!("{name}.{uid}");
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(&wanted.body);
        let told = done(api.patch(&event, &params, &patch));
        self.request("tell of a refusal", told).await
    }

    /// One request, which may fail and is then tried again.
    async fn request(
        &mut self,
        what: &str,
        request: impl Future<Output = Result<(), Error>>,
    ) -> bool {
        let error = match timeout(REQUEST, request).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => hearth_api::chain(&error),
            Err(_) => "the API server does not answer".to_owned(),
        };
        tracing::warn!("{what}: {error}");
        self.failed = true;
        false
    }

    /// Says when the next round is.
    fn rest(&mut self) {
        self.next = self.drift;
        if let Some(again) = self.again.take() {
            self.next = self.next.min(again);
        }
        if std::mem::take(&mut self.failed) {
            let again = Instant::now() + self.reconciler.timing.again;
            self.next = self.next.min(again);
        }
    }
}

async fn apply(client: &Client, wanted: &Wanted) -> Result<(), Error> {
    done(wanted.apply(client)).await
}

async fn done<T>(request: impl Future<Output = Result<T, Error>>) -> Result<(), Error> {
    request.await.map(drop)
}

/// That it is gone already, or that another has changed it, is fine.
async fn gone<T>(request: impl Future<Output = Result<T, Error>>) -> Result<(), Error> {
    match request.await {
        Err(Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// That it is there already is fine.
async fn there<T>(request: impl Future<Output = Result<T, Error>>) -> Result<(), Error> {
    match request.await {
        Err(Error::Api(status)) if status.code == 409 => Ok(()),
        outcome => outcome.map(drop),
    }
}
