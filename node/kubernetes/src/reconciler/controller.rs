//! The reconciler as a part of a controller: its certificate, its view of the cluster, and the
//! reconciler itself.

use std::sync::Arc;

use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_consensus::manifests::Manifests;
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_kubernetes_api::Client;
use rustls_pki_types::CertificateDer;

use super::manifests::{self, ManifestsStatus};
use super::{Reconciler, Timing, cluster, run};
use crate::access;
use crate::program::Progress;

/// Issues a certificate for the reconciler.
pub(crate) type Issue = dyn Fn() -> Result<KeyAndCertificate, Failure> + Send + Sync;

/// Inputs and outputs.
pub(crate) struct Worker {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// URL of this node's API server, such as `https://127.0.0.1:6443`.
    pub server: String,
    /// CA certificate of the API server.
    pub authority: CertificateDer<'static>,
    /// Issues client certificates.
    pub issue: Box<Issue>,
    /// Input: the cluster's settings.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Input: the objects that the cluster was founded with.
    pub manifests: Manifests,
    /// Output: see [`Reconciler::constants`].
    pub constants: Arc<Writer<Progress>>,
    /// Output: which of `manifests` are left to apply.
    pub manifests_status: Arc<Writer<ManifestsStatus>>,
}

/// Runs the parts as children of this runnable.
pub(crate) async fn on_controller(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let mut members = worker.parts.member.watch();
    let member = tokio::select! {
        member = members.next() => member?,
        () = ctx.cancelled() => return Ok(()),
    };
    let (client_writer, client) = event::value();
    let (cluster_writer, known) = event::value();
    let (all, writer) = (worker.clone(), Arc::new(client_writer));
    ctx.run("access", move |ctx| {
        let (all, writer) = (all.clone(), writer.clone());
        async move { keep_client(ctx, &all, &writer).await }
    })?;
    let curators = Arc::new(cluster::Worker {
        view: worker.parts.view.clone(),
        settings: worker.settings.clone(),
        cluster: cluster_writer,
    });
    ctx.run("cluster", move |ctx| cluster::run(ctx, curators.clone()))?;
    let reconciler = Arc::new(Reconciler {
        identity: member.own.node().to_string(),
        volumes: worker.parts.root.data.volumes(),
        timing: Timing::default(),
        client: client.clone(),
        cluster: known,
        constants: worker.constants.clone(),
    });
    ctx.run("work", move |ctx| run(ctx, reconciler.clone()))?;
    let manifests = Arc::new(manifests::Worker {
        manifests: worker.manifests.clone(),
        client,
        constants: worker.constants.value(),
        status: worker.manifests_status.clone(),
    });
    ctx.run_worker("manifests", &manifests, manifests::run)?;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}

/// Publishes a client, and a new one when its certificate is due for renewal.
async fn keep_client(ctx: Context, worker: &Worker, clients: &Writer<Client>) -> Outcome {
    let health = Health::of(&ctx);
    loop {
        let own = (worker.issue)()?;
        clients.set(access::client(&worker.server, &worker.authority, &own)?);
        health.good();
        tokio::select! {
            () = worker.parts.calendar.reaches(own.renew_at()) => {}
            () = ctx.cancelled() => return Ok(()),
        }
    }
}
