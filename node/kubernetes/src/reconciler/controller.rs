//! The reconciler as a part of a controller: its own certificate, the curators'
//! word of the cluster, and the work.

use std::sync::Arc;

use hearth_base::event::{self, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::pki::kubernetes::KeyAndCertificate;
use hearth_kubernetes_api::Client;
use rustls_pki_types::CertificateDer;

use super::{Reconciler, Timing, cluster, run};
use crate::access;
use crate::program::Progress;

/// Makes a certificate for the reconciler.
pub(crate) type Issue = dyn Fn() -> Result<KeyAndCertificate, Failure> + Send + Sync;

/// What a controller gives.
pub(crate) struct Worker {
    /// Of the node.
    pub parts: Arc<crate::Worker>,
    /// Of this node's API server, e.g. `https://127.0.0.1:6443`.
    pub server: String,
    /// By which it proves itself.
    pub authority: CertificateDer<'static>,
    /// Who we are.
    pub issue: Box<Issue>,
    /// Will be written: see [`Reconciler::constants`].
    pub constants: Arc<Writer<Progress>>,
}

/// Runs the parts below this runnable.
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
        connection: worker.parts.connection.clone(),
        cluster: cluster_writer,
    });
    ctx.run("cluster", move |ctx| cluster::run(ctx, curators.clone()))?;
    let reconciler = Arc::new(Reconciler {
        identity: member.node_id.to_string(),
        volumes: worker.parts.root.data.volumes(),
        timing: Timing::default(),
        client,
        cluster: known,
        constants: worker.constants.clone(),
    });
    ctx.run("work", move |ctx| run(ctx, reconciler.clone()))?;
    ctx.healthy();
    ctx.cancelled().await;
    Ok(())
}

/// A client, and a newer one when its certificate is due.
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
