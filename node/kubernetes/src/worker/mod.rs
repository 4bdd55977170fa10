//! A Kubernetes worker: what has to run on this node so that pods do.
//!
//! | runnable | reads | writes |
//! |---|---|---|
//! | `containerd` | – | its progress |
//! | `images` | containerd's progress | imported |
//! | `certificates` | curator connection, address | the node's own TLS and client |
//! | `kubelet` | client, imported, pod network, address, ready servers | its progress |
//! | `kube-proxy` | client, address, ready servers | its progress |
//! | `names`, `volumes` | client, pod network | – |
//! | `servers`, `balancer` | view, learned addresses, address, the node's own TLS | ready servers |
//!
//! Each restarts alone, and waits for what it needs: none is started in vain,
//! and the order follows from the values. They end in order as well: see
//! [`containerd`](super::containerd).
//!
//! All of the worker's clients reach the API servers by one address of this
//! machine, behind which the balancer knows where they are.
//!
//! When the role has gone, and at each start without it, [`clear`] takes away
//! what it left (see [`machine`]).

pub(crate) mod certificates;
mod kubelet;
mod machine;
mod network;
mod proxy;

use std::sync::Arc;

use hearth_api::names::EXTENSION_KUBERNETES;
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::handover::{MemberData, PodNetwork};
use hearth_kubernetes_api::Client;

use super::balancer;
use super::containerd::{self, Imported};
use super::program::{InUse, Progress};
use super::{Standing, Worker, services};

pub(super) use machine::Turn;

/// Only root of this machine.
const PRIVATE: u32 = 0o600;

/// What is known of the worker's parts.
struct Facts {
    network: Value<Option<PodNetwork>>,
    client: Value<Client>,
    waits: Value<String>,
    images: Value<Imported>,
    programs: [(Binary, Value<Progress>); 3],
}

/// Runs the worker's parts below this runnable, and tells how they stand; ends
/// by an error only.
pub(super) async fn run(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: Arc<Bundle>,
    standing: &Writer<Standing>,
) -> Outcome {
    standing.set(Standing::unmet("Starting", "the machine is made ready"));
    parts.may_have_pods.set(true);
    if let Err(error) = machine::prepare(&parts.machine, &parts.root).await {
        standing.set(Standing::unmet("Failing", error.to_string()));
        return Err(error);
    }
    let member = parts.member.watch().next().await?;
    let facts = start(ctx, parts, &bundle, &member)?;
    ctx.healthy();
    let mut network = facts.network.watch();
    let mut client = facts.client.watch();
    let mut waits = facts.waits.watch();
    let mut images = facts.images.watch();
    let [containerd, kubelet, proxy] = &facts.programs;
    let mut containerd = containerd.1.watch();
    let mut kubelet = kubelet.1.watch();
    let mut proxy = proxy.1.watch();
    loop {
        standing.set(facts.standing());
        tokio::select! {
            changed = network.next() => changed.map(drop)?,
            changed = client.next() => changed.map(drop)?,
            changed = waits.next() => changed.map(drop)?,
            changed = images.next() => changed.map(drop)?,
            changed = containerd.next() => changed.map(drop)?,
            changed = kubelet.next() => changed.map(drop)?,
            changed = proxy.next() => changed.map(drop)?,
        }
    }
}

fn start(
    ctx: &Context,
    parts: &Arc<Worker>,
    bundle: &Arc<Bundle>,
    member: &MemberData,
) -> Result<Facts, Failure> {
    let in_use = InUse::default();
    let (containerd_writer, containerd) = event::value();
    let (imported_writer, imported) = event::value();
    let (tls_writer, tls) = event::value();
    let (client_writer, client) = event::value();
    let (waits_writer, waits) = event::value();
    let (kubelet_writer, kubelet) = event::value();
    let (proxy_writer, proxy) = event::value();
    let worker = Arc::new(containerd::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        in_use: in_use.clone(),
        progress: containerd_writer,
    });
    ctx.run("containerd", move |ctx| {
        containerd::run(ctx, worker.clone())
    })?;
    let importer = Arc::new(containerd::Importer {
        parts: parts.clone(),
        bundle: bundle.clone(),
        containerd: containerd.clone(),
        imported: imported_writer,
    });
    ctx.run("images", move |ctx| {
        containerd::import(ctx, importer.clone())
    })?;
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
    services::start(ctx, parts, &client)?;
    let worker = Arc::new(kubelet::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        client: client.clone(),
        imported: imported.clone(),
        containerd: in_use,
        ready: ready.clone(),
        progress: kubelet_writer,
    });
    ctx.run_restartable("kubelet", &worker, kubelet::run)?;
    let worker = Arc::new(proxy::Worker {
        parts: parts.clone(),
        bundle: bundle.clone(),
        client: client.clone(),
        ready,
        progress: proxy_writer,
    });
    ctx.run_restartable("kube-proxy", &worker, proxy::run)?;
    Ok(Facts {
        network: parts.pod_network.clone(),
        client,
        waits,
        images: imported,
        programs: [
            (Binary::Containerd, containerd),
            (Binary::Kubelet, kubelet),
            (Binary::Proxy, proxy),
        ],
    })
}

impl Facts {
    fn standing(&self) -> Standing {
        let programs = self.programs.each_ref();
        let programs = programs.map(|(binary, progress)| (binary.name(), progress.get()));
        let waits = match self.client.get() {
            Some(_) => None,
            None => Some(self.waits.get().unwrap_or_else(|| "not asked yet".into())),
        };
        let images = self.images.get().and_then(Result::err);
        judge(
            waits,
            self.network.get().flatten().is_some(),
            images,
            &programs,
        )
    }
}

/// How the worker stands: what fails, before what is waited for, before what
/// has not come up yet. `waits` says why there are no certificates, `images` why
/// there are no images.
fn judge(
    waits: Option<String>,
    network: bool,
    images: Option<String>,
    programs: &[(&'static str, Option<Progress>)],
) -> Standing {
    for (name, progress) in programs {
        if let Some(Progress::Failing(why)) = progress {
            return Standing::unmet("Failing", format!("{name}: {why}"));
        }
    }
    if let Some(why) = images {
        let message = format!("the images that come with Kubernetes: {why}");
        return Standing::unmet("Failing", message);
    }
    if let Some(why) = waits {
        let message = format!("the node's certificates for Kubernetes: {why}");
        return Standing::unmet("WaitingForControlPlane", message);
    }
    if !network {
        let message = "the pods' network of this node is not there yet";
        return Standing::unmet("WaitingForNetwork", message);
    }
    for (name, progress) in programs {
        if *progress != Some(Progress::Serving) {
            return Standing::unmet("Starting", format!("{name} does not serve yet"));
        }
    }
    Standing::Met
}

/// Undoes what the role has left on the machine; nothing if it never ran.
pub(super) async fn clear(parts: &Worker) -> Outcome {
    let root = &parts.root;
    // Made by the worker alone, before anything else of it.
    let ran = root.ephemeral.kubernetes().worker().path().exists();
    if ran && let Ok(mounted) = parts.extensions.get(EXTENSION_KUBERNETES) {
        match Bundle::open(mounted) {
            Ok(bundle) => proxy::clear_rules(root, &bundle, &parts.log_tree).await,
            // It was good once. The rest can be cleared all the same.
            Err(error) => {
                let error = hearth_api::chain(&error);
                tracing::warn!("the rules of services stay until the next boot: {error}");
            }
        }
    }
    machine::clear(&parts.machine, root).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(standing: Standing) -> &'static str {
        match standing {
            Standing::Unmet { reason, .. } => reason,
            Standing::Met => "Met",
            Standing::NotHeld => "NotHeld",
        }
    }

    #[test]
    fn the_standing_names_what_is_in_the_way_first() {
        let all = |progress: &Option<Progress>| ["a", "b"].map(|name| (name, progress.clone()));
        let serving = all(&Some(Progress::Serving));
        assert_eq!(judge(None, true, None, &serving), Standing::Met);
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
        let message = "the images that come with Kubernetes: the disk is full";
        assert_eq!(failing, Standing::unmet("Failing", message));
        // Without it there are no images, either.
        let [first, mut last] = serving;
        last.1 = Some(Progress::Failing("it ended".into()));
        let failing = judge(why, false, full, &[first, last]);
        assert_eq!(failing, Standing::unmet("Failing", "b: it ended"));
    }
}
