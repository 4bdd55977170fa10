//! kube-proxy: services, with nftables rules, which it changes with the program `nft` of the bundle.
//!
//! It needs a certificate and an API server only, and is restarted only when the node's addresses
//! change; renewed certificates are reloaded.
//!
//! Its rules stay in the kernel when it ends, which is right for a restart and wrong when the role
//! has been removed: [`clear_rules`] deletes its tables, and the one of host ports. The rules in that
//! are removed by the CNI plugin when a pod is stopped; rules of a pod that was killed would stay, and
//! have precedence when the role is assigned again. Not by kube-proxy's own cleanup, which takes
//! half a minute of a slow machine and always reports a failure, because it looks for rules of its
//! other modes with programs that are not in the bundle.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use hearth_api::names::ports;
use hearth_api::ranges::ClusterRanges;
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Exit, Failure};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::layout::{EphemeralWorker, Root};
use hearth_kubernetes_api::Client;
use hearth_sys::cidr::Cidr;
use hearth_sys::files::{self, FileError};
use hearth_sys::nftables::Nftables;
use serde_json::{Value as Json, json};

use super::super::addresses::NodeAddresses;
use super::super::balancer;
use super::super::kubeconfig::{Credentials, Kubeconfig};
use super::super::program::{self, Profile, Program, Progress, probe};
use super::{PRIVATE, certificates};

/// Address of its health endpoint.
const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), ports::PROXY_HEALTH);
/// Address of its metrics.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), ports::PROXY_METRICS);
/// Maximum size of a CA certificate.
const MAX_CA_BYTES: u64 = 64 << 10;
/// The tables of kube-proxy, and those of the portmap plugin for host ports.
const TABLES: [&str; 4] = [
    "ip kube-proxy",
    "ip6 kube-proxy",
    "ip cni_hostport",
    "ip6 cni_hostport",
];

const PROFILE: Profile = Profile {
    // A low priority, as where it runs as a pod, which usually requests a tenth of a processor: its
    // rules matter to running pods only, and the programs that start pods go first.
    niceness: 10,
    ..Profile::usual(Binary::Proxy)
};

/// Inputs and output of the runnable of kube-proxy.
pub(crate) struct Worker {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// The programs.
    pub bundle: Arc<Bundle>,
    /// The addresses of pods and services.
    pub ranges: ClusterRanges,
    /// Input: set when certificates have been issued; kube-proxy starts then.
    pub client: Value<Client>,
    /// Input: how many API servers are ready.
    pub ready: Value<usize>,
    /// Output: the state of kube-proxy.
    pub progress: Writer<Progress>,
}

/// Runs kube-proxy.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Result<Exit, Failure> {
    let parts = &worker.parts;
    let mut addresses = parts.addresses(&worker.ranges);
    let known = async {
        let name = parts.member.watch().next().await?.own.node().to_string();
        worker.client.watch().next().await?;
        Ok::<_, event::Closed>((name, addresses.next().await?))
    };
    let (name, here) = tokio::select! {
        known = known => known?,
        () = ctx.cancelled() => return Ok(Exit::Done),
    };
    let program = worker.program(&name, &here)?;
    let outdated = async {
        let moved = addresses.changed(&here).await;
        moved.map(|_| "the node's addresses have changed")
    };
    let well = || probe::http(HEALTH, "/healthz");
    let (log, progress) = (&parts.log_tree, &worker.progress);
    program::run_until_outdated(&ctx, &program, log, progress, well, outdated).await
}

impl Worker {
    fn program(&self, name: &str, addresses: &NodeAddresses) -> Result<Program, Failure> {
        let files = self.parts.root.ephemeral.kubernetes().worker();
        let program = Binary::Proxy.name();
        save_kubeconfig(&files, program)?;
        let config = files.config(program);
        let content = configuration(&files.kubeconfig(program), name, addresses, &self.ranges);
        files::write_atomic(&config, content.to_string().as_bytes(), PRIVATE)?;
        Ok(command(&self.parts.root, &self.bundle).with_servers(self.ready.clone()))
    }
}

/// The command line.
fn command(root: &Root, bundle: &Bundle) -> Program {
    let kubernetes = root.ephemeral.kubernetes();
    let name = Binary::Proxy.name();
    let program = Program::new(bundle, PROFILE, &kubernetes.work(name));
    program.flag("config", kubernetes.worker().config(name))
}

/// Writes its kubeconfig, with paths of certificate files, which it reloads.
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

/// The configuration file.
fn configuration(
    kubeconfig: &Path,
    name: &str,
    addresses: &NodeAddresses,
    ranges: &ClusterRanges,
) -> Json {
    let mut file = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": { "kubeconfig": kubeconfig },
        "hostnameOverride": name,
        // Otherwise it looks up its Node, which may not exist yet.
        "bindAddress": addresses.primary,
        "mode": "nftables",
        "clusterCIDR": ranges.pods_text(),
        "healthzBindAddress": HEALTH,
        "metricsBindAddress": METRICS,
        // The kernel's default fits the machine.
        "conntrack": { "maxPerCore": 0 },
    });
    if let Some(second) = addresses.second {
        // Otherwise the second one is that of its Node, if that has one when kube-proxy starts.
        let all = [addresses.primary, second].map(|address| Cidr::host(address).to_string());
        file["nodePortAddresses"] = json!(all);
    }
    file
}

/// Removes the rules of services and host ports, whoever of these has written some. Rules that remain
/// do no harm until the next boot, so a failure is only logged.
pub(crate) async fn clear_rules(bundle: &Bundle) {
    let nftables = Nftables::at(bundle.program(Binary::Nft));
    // A table that is not there cannot be deleted.
    let script = TABLES.map(|table| format!("add table {table}; delete table {table}"));
    if let Err(error) = nftables.apply(&script.join("\n")).await {
        let error = hearth_api::chain(&error);
        tracing::warn!("the rules of services and host ports remain until the next boot: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{EmptyBundle, KUBERNETES, check, check_json, root};

    #[test]
    fn it_is_started_as_committed() {
        for version in KUBERNETES {
            let bundle = EmptyBundle::of(version);
            let started = bundle.lines(&command(&root(), &bundle.bundle));
            check(include_str!("../snapshot/kube-proxy.txt"), &started);
        }
    }

    #[test]
    fn its_file_is_as_committed() {
        let mut addresses = NodeAddresses {
            primary: [192, 0, 2, 7].into(),
            second: None,
        };
        let ranges = &ClusterRanges::DEFAULT;
        let of = |addresses: &NodeAddresses| {
            configuration(Path::new("/e/k"), "hearth-x", addresses, ranges)
        };
        let mut file = of(&addresses);
        check_json(include_str!("../snapshot/kube-proxy.json"), &file);
        addresses.second = "2001:db8::7".parse().ok();
        file["nodePortAddresses"] = json!(["192.0.2.7/32", "2001:db8::7/128"]);
        assert_eq!(of(&addresses), file);
    }
}
