//! A Kubernetes worker: everything that a node needs to run pods.
//!
//! | runnable | reads | writes |
//! |---|---|---|
//! | `registries` | the cluster's settings | the proxy to registries |
//! | `containerd` | the proxy to registries | its progress |
//! | `images` | containerd's progress | imported |
//! | `pulls` | containerd's progress | the log |
//! | `certificates` | curator connection, address | the node's own TLS and client |
//! | `kubelet` | client, imported, pod network, address, ready servers | its progress |
//! | `kube-proxy` * | client, address, ready servers | its progress |
//! | `volumes` | client | – |
//! | `names` * | client, pod network | – |
//! | `policy` * | client | the network policy of this node |
//! | `servers`, `balancer` | view, learned addresses, address, the node's own TLS | ready servers |
//!
//! Each restarts independently, and waits for its inputs: the start order follows from the values.
//! The shutdown order is described in [`containerd`].
//!
//! Those with a star belong to the built-in pod network: they do not run in a cluster with another one
//! (setting `kubernetes.pod_network`, which is fixed when the cluster is created).
//!
//! All clients of the worker connect to the API servers through the balancer.
//!
//! When the role has been removed, and at each start without it, [`clear`] cleans up what it has
//! left (see [`machine`]).

pub(crate) mod certificates;
mod kubelet;
mod machine;
mod network;
mod proxy;
mod reserve;

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::select_all;
use hearth_api::names::EXTENSION_KUBERNETES;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1;
use hearth_base::event::{self, Value, Writer};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::handover::{MemberData, PodNetwork, PodsPossible};
use hearth_kubernetes_api::Client;

use super::containerd::{self, Imported};
use super::program::Progress;
use super::registries::{self, Proxy};
use super::{RoleCondition, Worker, balancer, services};

pub(super) use machine::MachineLock;

/// File mode: readable by root only.
const PRIVATE: u32 = 0o600;

/// The states of the parts, for the condition.
struct Facts {
    /// `None`: the pods have another network than the built-in one.
    network: Option<Value<Option<PodNetwork>>>,
    client: Value<Client>,
    waits: Value<String>,
    images: Value<Imported>,
    programs: Vec<(Binary, Value<Progress>)>,
}

/// Runs the parts of a worker as children of this runnable, and reports their condition. Returns
/// only on an error.
pub(super) async fn run(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: Arc<Bundle>,
    condition: &Writer<RoleCondition>,
) -> Outcome {
    let wanted = "waiting for the cluster's settings";
    condition.set(RoleCondition::unmet("WaitingForControlPlane", wanted));
    let known = parts.settings.value().watch().next().await?;
    let ranges = ClusterRanges::of(&known)?;
    let pods = match known.pod_network() {
        v1::PodNetwork::Unspecified | v1::PodNetwork::BuiltIn => PodsPossible::BuiltIn(ranges),
        v1::PodNetwork::None => PodsPossible::OtherNetwork(ranges),
    };
    condition.set(RoleCondition::unmet("Starting", "preparing the machine"));
    parts.may_have_pods.set(pods);
    if let Err(error) = machine::prepare(&parts.machine, &parts.root, pods).await {
        condition.set(RoleCondition::unmet("Failing", error.to_string()));
        return Err(error);
    }
    let member = parts.member.watch().next().await?;
    let facts = start(ctx, parts, &bundle, &member, pods)?;
    ctx.healthy();
    let mut network = parts.pod_network.watch();
    let mut client = facts.client.watch();
    let mut waits = facts.waits.watch();
    let mut images = facts.images.watch();
    let programs = facts.programs.iter();
    let mut programs: Vec<_> = programs.map(|(_, progress)| progress.watch()).collect();
    loop {
        condition.set(facts.condition());
        let program = select_all(programs.iter_mut().map(|one| one.next().boxed()));
        tokio::select! {
            changed = network.next() => changed.map(drop)?,
            changed = client.next() => changed.map(drop)?,
            changed = waits.next() => changed.map(drop)?,
            changed = images.next() => changed.map(drop)?,
            (changed, ..) = program => changed.map(drop)?,
        }
    }
}

fn start(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: &Arc<Bundle>,
    member: &MemberData,
    pods: PodsPossible,
) -> Result<Facts, Failure> {
    let in_use = ReadLock::default();
    let proxy = start_registries(ctx, parts)?;
    let (containerd_writer, containerd) = event::value();
    let (imported_writer, imported) = event::value();
    let (tls_writer, tls) = event::value();
    let (client_writer, client) = event::value();
    let (waits_writer, waits) = event::value();
    let (kubelet_writer, kubelet) = event::value();
    let worker = Arc::new(containerd::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        in_use: in_use.clone(),
        proxy,
        progress: containerd_writer,
    });
    ctx.run_restartable("containerd", &worker, containerd::run)?;
    let importer = Arc::new(containerd::Importer {
        parts: parts.clone(),
        bundle: bundle.clone(),
        containerd: containerd.clone(),
        imported: imported_writer,
    });
    ctx.run("images", move |ctx| {
        containerd::import(ctx, importer.clone())
    })?;
    let pulls = Arc::new(containerd::Pulls {
        parts: parts.clone(),
        containerd: containerd.clone(),
    });
    ctx.run_worker("pulls", &pulls, containerd::follow)?;
    let worker = Arc::new(certificates::Worker {
        files: parts.root.ephemeral.kubernetes().worker(),
        calendar: parts.calendar.clone(),
        connection: parts.connection.clone(),
        address: parts.address.clone(),
        tls: tls_writer,
        client: client_writer,
        waits: waits_writer,
    });
    ctx.run("certificates", move |ctx| {
        certificates::run(ctx, worker.clone())
    })?;
    let ready = balancer::start(ctx, parts, member, tls)?;
    let worker = Arc::new(kubelet::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        pods,
        client: client.clone(),
        imported: imported.clone(),
        containerd: in_use,
        ready: ready.clone(),
        progress: kubelet_writer,
    });
    ctx.run_restartable("kubelet", &worker, kubelet::run)?;
    services::volumes(ctx, parts, &client)?;
    let mut facts = Facts {
        network: None,
        client,
        waits,
        images: imported,
        programs: vec![(Binary::Containerd, containerd), (Binary::Kubelet, kubelet)],
    };
    if let PodsPossible::BuiltIn(ranges) = pods {
        services::of_built_in_network(ctx, parts, &facts.client)?;
        facts.network = Some(parts.pod_network.clone());
        let proxy = start_proxy(ctx, parts, bundle, (&facts.client, ranges), ready)?;
        facts.programs.push((Binary::Proxy, proxy));
    }
    Ok(facts)
}

/// Follows the settings for registries; returns the proxy to them.
fn start_registries(ctx: &Context, parts: &Arc<Worker>) -> Result<Value<Proxy>, Failure> {
    let (writer, proxy) = event::value();
    let worker = Arc::new(registries::Worker {
        folder: parts.root.ephemeral.kubernetes().worker().registries(),
        settings: parts.settings.value(),
        proxy: writer,
    });
    ctx.run_worker("registries", &worker, registries::run)?;
    Ok(proxy)
}

fn start_proxy(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: &Arc<Bundle>,
    (client, ranges): (&Value<Client>, ClusterRanges),
    ready: Value<usize>,
) -> Result<Value<Progress>, Failure> {
    let (writer, progress) = event::value();
    let worker = Arc::new(proxy::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        ranges,
        client: client.clone(),
        ready,
        progress: writer,
    });
    ctx.run_restartable("kube-proxy", &worker, proxy::run)?;
    Ok(progress)
}

impl Facts {
    fn condition(&self) -> RoleCondition {
        let programs = self.programs.iter();
        let programs = programs.map(|(binary, progress)| (binary.name(), progress.get()));
        let programs: Vec<_> = programs.collect();
        let waits = match self.client.get() {
            Some(_) => None,
            None => Some(
                self.waits
                    .get()
                    .unwrap_or_else(|| "not requested yet".into()),
            ),
        };
        let images = self.images.get().and_then(Result::err);
        let network = self.network.as_ref();
        let network = network.is_none_or(|network| network.get().flatten().is_some());
        judge(waits, network, images, &programs)
    }
}

/// The condition of the worker: failures first, then missing inputs, then programs that are not
/// ready yet. `waits` is why there are no certificates, `images` why there are no images.
fn judge(
    waits: Option<String>,
    network: bool,
    images: Option<String>,
    programs: &[(&'static str, Option<Progress>)],
) -> RoleCondition {
    for (name, progress) in programs {
        if let Some(Progress::Failing(why)) = progress {
            return RoleCondition::unmet("Failing", format!("{name}: {why}"));
        }
    }
    if let Some(why) = images {
        let message = format!("cannot import the images of the extension: {why}");
        return RoleCondition::unmet("Failing", message);
    }
    if let Some(why) = waits {
        let message = format!("waiting for the node's certificates: {why}");
        return RoleCondition::unmet("WaitingForControlPlane", message);
    }
    if !network {
        let message = "waiting for the pod network of this node";
        return RoleCondition::unmet("WaitingForNetwork", message);
    }
    for (name, progress) in programs {
        if *progress != Some(Progress::Serving) {
            return RoleCondition::unmet("Starting", format!("{name} is not ready yet"));
        }
    }
    RoleCondition::Met
}

/// Cleans up what the role has left on the machine; does nothing if it never ran.
pub(super) async fn clear(parts: &Worker) -> Outcome {
    let root = &parts.root;
    // Only a worker creates this directory, before anything else.
    let ran = root.ephemeral.kubernetes().worker().path().exists();
    if ran && let Ok(mounted) = parts.extensions.get(EXTENSION_KUBERNETES) {
        match Bundle::open(mounted) {
            Ok(bundle) => proxy::clear_rules(&bundle).await,
            // Not expected, because the role has run. Clean up the rest.
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::warn!("the rules of services remain until the next boot: {error}");
            }
        }
    }
    machine::clear(&parts.machine, root).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(condition: RoleCondition) -> &'static str {
        match condition {
            RoleCondition::Unmet { reason, .. } => reason,
            RoleCondition::Met => "Met",
            RoleCondition::NotHeld => "NotHeld",
        }
    }

    #[test]
    fn the_standing_names_what_is_in_the_way_first() {
        let all = |progress: &Option<Progress>| ["a", "b"].map(|name| (name, progress.clone()));
        let serving = all(&Some(Progress::Serving));
        assert_eq!(judge(None, true, None, &serving), RoleCondition::Met);
        let none = all(&None);
        let why = Some("nobody answers".to_owned());
        assert_eq!(
            reason(judge(why.clone(), false, None, &none)),
            "WaitingForControlPlane"
        );
        assert_eq!(reason(judge(None, false, None, &none)), "WaitingForNetwork");
        assert_eq!(reason(judge(None, true, None, &none)), "Starting");
        let full = Some("the disk is full".to_owned());
        let failing = judge(why.clone(), false, full.clone(), &none);
        let message = "cannot import the images of the extension: the disk is full";
        assert_eq!(failing, RoleCondition::unmet("Failing", message));
        // Without containerd there are no images, either.
        let [first, mut last] = serving;
        last.1 = Some(Progress::Failing("it ended".into()));
        let failing = judge(why, false, full, &[first, last]);
        assert_eq!(failing, RoleCondition::unmet("Failing", "b: it ended"));
    }
}
