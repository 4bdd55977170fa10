//! kube-proxy: services' addresses, by rules in the kernel.
//!
//! It needs nothing but a certificate and an API server, and starts again only
//! when the node's address changes; a renewed certificate it reads by itself.
//!
//! Its rules stay in the kernel when it ends, which is right when it comes
//! back and wrong when the role has gone: [`clear_rules`] lets it take them
//! away itself, and touches nobody else's but those that lead from ports of
//! the node to pods. Their plugin takes them away pod by pod, and those of a
//! pod that was killed would be there first when the role is back.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::names::POD_NETWORK;
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::LogTree;
use hearth_base::supervisor::{Context, Exit, Failure};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::layout::{EphemeralWorker, Root};
use hearth_kubernetes_api::Client;
use hearth_sys::files::{self, FileError};
use hearth_sys::iptables::{Iptables, IptablesError};
use serde_json::{Value as Json, json};

use super::super::balancer;
use super::super::kubeconfig::{Credentials, Kubeconfig};
use super::super::program::{self, Profile, Program, ProgramError, Progress, probe};
use super::PRIVATE;
use super::certificates;

/// Where it tells whether its rules are there.
const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10256);
/// Where it counts, for whoever asks on this machine.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
/// A CA's certificate has at most so many bytes.
const MAX_CA_BYTES: u64 = 64 << 10;
/// For its rules to be taken away.
const CLEAR_WITHIN: Duration = Duration::from_secs(20);
/// The chain in which the plugin for host ports has what leads to its others.
const HOST_PORTS: &str = "CNI-HOSTPORT-DNAT";

const PROFILE: Profile = Profile {
    // As where it is a pod, which by custom asks for a tenth of a processor: its
    // rules matter to pods that run, and what makes pods run goes first.
    niceness: 10,
    ..Profile::usual(Binary::Proxy)
};

/// What runs kube-proxy.
pub(crate) struct Worker {
    /// What all of Kubernetes on this node has.
    pub parts: Arc<crate::Worker>,
    /// The programs.
    pub bundle: Arc<Bundle>,
    /// Will be awaited: it is there when certificates are.
    pub client: Value<Client>,
    /// Will be read: how many API servers are ready.
    pub ready: Value<usize>,
    /// Will be written: how kube-proxy fares.
    pub progress: Writer<Progress>,
}

/// Runs it.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Result<Exit, Failure> {
    let parts = &worker.parts;
    let mut addresses = parts.address.watch();
    let known = async {
        let name = parts.member.watch().next().await?.node_id.to_string();
        worker.client.watch().next().await?;
        Ok::<_, event::Closed>((name, addresses.next().await?))
    };
    let (name, address) = tokio::select! {
        known = known => known?,
        () = ctx.cancelled() => return Ok(Exit::Done),
    };
    let program = worker.program(&name, address)?;
    let outdated = async {
        let moved = addresses.wait_for(|now| *now != address).await;
        moved.map(|_| "the node's address has changed")
    };
    let well = || probe::http(HEALTH, "/healthz");
    let (log, progress) = (&parts.log_tree, &worker.progress);
    program::run_until_outdated(&ctx, &program, log, progress, well, outdated).await
}

impl Worker {
    fn program(&self, name: &str, address: IpAddr) -> Result<Program, Failure> {
        let files = self.parts.root.ephemeral.kubernetes().worker();
        let program = Binary::Proxy.name();
        save_kubeconfig(&files, program)?;
        let config = files.config(program);
        let content = configuration(&files.kubeconfig(program), name, address);
        files::write_atomic(&config, content.to_string().as_bytes(), PRIVATE)?;
        Ok(command(&self.parts.root, &self.bundle).with_servers(self.ready.clone()))
    }
}

/// How it is started.
fn command(root: &Root, bundle: &Bundle) -> Program {
    let kubernetes = root.ephemeral.kubernetes();
    let name = Binary::Proxy.name();
    let program = Program::new(bundle, PROFILE, &kubernetes.work(name));
    program.flag("config", kubernetes.worker().config(name))
}

/// Writes how it reaches the API servers, and as whom: by files, which it reads
/// again by itself.
fn save_kubeconfig(files: &EphemeralWorker, program: &str) -> Result<(), FileError> {
    let keys = files.keys(certificates::PROXY);
    let ca = files::read_limited(&keys.ca(), MAX_CA_BYTES)?.unwrap_or_default();
    Kubeconfig {
        server: &balancer::url(),
        ca_pem: &String::from_utf8_lossy(&ca),
        credentials: Credentials::Files {
            certificate: &keys.certificate(),
            key: &keys.key(),
        },
    }
    .save(&files.kubeconfig(program))
}

/// kube-proxy's file.
fn configuration(kubeconfig: &Path, name: &str, address: IpAddr) -> Json {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": { "kubeconfig": kubeconfig },
        "hostnameOverride": name,
        // Otherwise it looks for its node's object, which may not be there yet.
        "bindAddress": address,
        "mode": "iptables",
        "clusterCIDR": POD_NETWORK,
        "healthzBindAddress": HEALTH,
        "metricsBindAddress": METRICS,
        // The kernel's own measure is right for the machine.
        "conntrack": { "maxPerCore": 0 },
    })
}

/// How it takes its rules away.
fn cleanup(root: &Root, bundle: &Bundle) -> Program {
    let work = root.ephemeral.kubernetes().work(Binary::Proxy.name());
    Program::new(bundle, PROFILE, &work).flag("cleanup", "true")
}

/// Takes its rules away. It always says that it has failed: after its rules it
/// looks for sets of addresses that another mode of it would have made, by a
/// program that is not in the bundle. What stays if it has failed indeed is in
/// nobody's way until the next boot, so it is told and no more.
pub(crate) async fn clear_rules(root: &Root, bundle: &Bundle, log: &LogTree) {
    let program = cleanup(root, bundle);
    match program
        .complete(log, Binary::Proxy.name(), CLEAR_WITHIN)
        .await
    {
        Ok(()) => {}
        Err(error @ ProgramError::Ended { .. }) => {
            tracing::info!("the rules of services are taken away: {error}");
        }
        Err(error) => tracing::warn!("the rules of services stay until the next boot: {error}"),
    }
    if let Err(error) = clear_host_ports(bundle).await {
        let error = hearth_api::chain(&error);
        tracing::warn!("the rules of host ports stay until the next boot: {error}");
    }
}

async fn clear_host_ports(bundle: &Bundle) -> Result<(), IptablesError> {
    let iptables = Iptables::at(bundle.program(Binary::Iptables));
    // Made when the first pod has one.
    if iptables.holds("nat", "-S", HOST_PORTS, &[]).await? {
        iptables.change("nat", "-F", HOST_PORTS, &[]).await?;
        tracing::info!("the rules of pods' host ports are taken away");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{EmptyBundle, KUBERNETES, check, check_json, difference, root};

    #[test]
    fn it_is_started_as_committed() {
        for version in KUBERNETES {
            let bundle = EmptyBundle::of(version);
            let started = bundle.lines(&command(&root(), &bundle.bundle));
            check(include_str!("../snapshot/kube-proxy.txt"), &started);
            let cleans = bundle.lines(&cleanup(&root(), &bundle.bundle));
            let config = "---config=/node/ephemeral/kubernetes/worker/kube-proxy.config\n";
            assert_eq!(
                difference(&started, &cleans),
                format!("{config}+--cleanup=true\n")
            );
        }
    }

    #[test]
    fn its_file_is_as_committed() {
        let file = configuration(Path::new("/e/k"), "hearth-x", [192, 0, 2, 7].into());
        check_json(include_str!("../snapshot/kube-proxy.json"), &file);
    }
}
