//! The kubelet: its configuration, and when it runs.
//!
//! It starts when everything that it needs is available: certificates, the pod network, and a ready
//! containerd with the images of the extension. Its configuration depends on these, so when one of
//! them changes, it is restarted; pods are not affected. It may be killed at any moment: its state
//! is in the API server and in containerd.
//!
//! A kubelet creates its Node when it starts, and not again. So if its Node is deleted, by hand or
//! by a controller with an older view of the cluster, the kubelet is restarted as well.

use std::collections::BTreeSet;
use std::future::pending;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::pin::pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use hearth_api::names::{KUBERNETES_DOMAIN, PORT_KUBELET, ports};
use hearth_api::node_settings::Reserved;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::NodeRoles;
use hearth_base::event::{Value, Writer};
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Exit, Failure};
use hearth_host::bundle::{Binary, Bundle};
use hearth_host::handover::{PodNetwork, PodsPossible};
use hearth_host::layout::Root;
use hearth_kubernetes_api::fields::Node;
use hearth_kubernetes_api::store::{Event, Full};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{ApiError, Client, kinds};
use hearth_sys::files;
use serde_json::{Value as Json, json};

use super::super::addresses::NodeAddresses;
use super::super::containerd::{self, Imported};
use super::super::program::{self, Profile, Program, Progress, probe};
use super::super::registries::provider;
use super::reserve::Reserve;
use super::{PRIVATE, certificates, network};

/// Address of its health endpoint.
const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), ports::KUBELET_HEALTH);

const PROFILE: Profile = Profile::usual(Binary::Kubelet);

/// Inputs and output of the runnable of the kubelet.
pub(crate) struct Worker {
    /// Inputs and outputs of Kubernetes on this node.
    pub parts: Arc<crate::Worker>,
    /// The programs.
    pub bundle: Arc<Bundle>,
    /// Which network its pods have.
    pub pods: PodsPossible,
    /// Input: the node's own client, which is set when certificates have been issued.
    pub client: Value<Client>,
    /// Input: whether the images of the extension have been imported.
    pub imported: Value<Imported>,
    /// Held while the kubelet runs: containerd ends after it.
    pub containerd: ReadLock,
    /// Input: how many API servers are ready.
    pub ready: Value<usize>,
    /// Output: the state of the kubelet.
    pub progress: Writer<Progress>,
}

/// What its configuration depends on.
struct Facts {
    name: String,
    addresses: NodeAddresses,
    /// The addresses of pods and services.
    ranges: ClusterRanges,
    /// `None`: the pods have another network than the built-in one.
    network: Option<PodNetwork>,
    /// Whether this node is a controller as well.
    controller: bool,
    /// The ports of registries for which there are credentials.
    registry_ports: BTreeSet<u16>,
    /// What operators keep from pods.
    reserved: Reserved,
}

/// Runs the kubelet.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Result<Exit, Failure> {
    let parts = &worker.parts;
    let mut clients = worker.client.watch();
    let mut networks = parts.pod_network.watch();
    let ranges = match worker.pods {
        PodsPossible::BuiltIn(ranges) | PodsPossible::OtherNetwork(ranges) => ranges,
        PodsPossible::None => return Err(Failure::msg("internal error: expected pods")),
    };
    let mut all_addresses = parts.addresses(&ranges);
    let mut all_roles = parts.local_roles.watch();
    let mut settings = parts.settings.value().watch();
    let mut node_settings = parts.node_settings.watch();
    let known = async {
        let name = parts.member.watch().next().await?.own.node().to_string();
        let mut imported = worker.imported.watch();
        imported.wait_for(Result::is_ok).await?.ok();
        let network = match worker.pods {
            PodsPossible::BuiltIn(_) => Some(networks.some().await?),
            PodsPossible::None | PodsPossible::OtherNetwork(_) => None,
        };
        let addresses = all_addresses.next().await?;
        let client = clients.next().await?;
        let controller = is_controller(&all_roles.next().await?);
        let registry_ports = provider::ports(&*settings.next().await?);
        let facts = Facts {
            name,
            addresses,
            ranges,
            network,
            controller,
            registry_ports,
            reserved: node_settings.next().await?.reserved,
        };
        Ok::<_, Failure>((facts, client))
    };
    let (facts, client) = tokio::select! {
        known = known => known?,
        () = ctx.cancelled() => return Ok(Exit::Done),
    };
    let program = worker.program(&facts)?;
    let _held = worker.containerd.hold().await;
    let which = Which::Named(facts.name.clone());
    let own = watch(
        client.all(kinds::NODES),
        which,
        |_: Node| Some(()),
        Full::default(),
    );
    let outdated = async {
        tokio::select! {
            () = removed(own) => Ok("its Node has been deleted"),
            renewed = clients.next() => renewed.map(|_| "its certificates have been renewed"),
            moved = networks.wait_for(|now| *now != facts.network) => {
                moved.map(|_| "the pod network has changed")
            }
            moved = all_addresses.changed(&facts.addresses) => {
                moved.map(|()| "the node's addresses have changed")
            }
            other = all_roles.wait_for(|roles| is_controller(roles) != facts.controller) => {
                other.map(|_| "the node's roles have changed")
            }
            other = settings.wait_for(|now| provider::ports(now) != facts.registry_ports) => {
                other.map(|_| "there are credentials for registries with other ports")
            }
            other = node_settings.wait_for(|now| now.reserved != facts.reserved) => {
                other.map(|_| "what is reserved has changed")
            }
        }
    };
    let well = || probe::http(HEALTH, "/healthz");
    let (log, progress) = (&parts.log_tree, &worker.progress);
    program::run_until_outdated(&ctx, &program, log, progress, well, outdated).await
}

fn is_controller(roles: &NodeRoles) -> bool {
    roles.kubernetes_controller.is_some()
}

/// Waits until the watched object has existed and has been deleted. While the watch fails, the
/// object is assumed to be unchanged.
async fn removed<T>(one: impl Stream<Item = Result<Event<T>, ApiError>>) {
    let mut was_there = false;
    let mut told = pin!(one);
    while let Some(event) = told.next().await {
        let is_there = match event {
            Ok(Event::All(all)) => !all.objects().is_empty(),
            Ok(Event::Changed(..)) => true,
            Ok(Event::Gone(_)) => false,
            Err(error) => {
                tracing::debug!("cannot watch the Node: {}", hearth_api::chain(&error));
                continue;
            }
        };
        if was_there && !is_there {
            return;
        }
        was_there = is_there;
    }
    pending().await
}

impl Worker {
    /// Writes its configuration, and that of the CNI plugins of the built-in network.
    fn program(&self, facts: &Facts) -> Result<Program, Failure> {
        let root = &self.parts.root;
        let files = root.ephemeral.kubernetes().worker();
        if let Some(network) = &facts.network {
            let list = network::conflist(network, &files.addresses());
            let file = files.network().join(network::FILE);
            files::write_atomic(&file, list.to_string().as_bytes(), PRIVATE)?;
        }
        let config = files.config(Binary::Kubelet.name());
        let reserve = Reserve::here(facts.controller, facts.reserved);
        reserve.keep_memory();
        let content = configuration(root, facts, reserve);
        files::write_atomic(&config, content.to_string().as_bytes(), PRIVATE)?;
        self.provide_credentials(&facts.registry_ports)?;
        Ok(command(root, facts, &self.bundle).with_servers(self.ready.clone()))
    }

    /// Writes the configuration of the credential provider, and makes this binary one.
    fn provide_credentials(&self, ports: &BTreeSet<u16>) -> Result<(), Failure> {
        let files = self.parts.root.ephemeral.kubernetes().worker();
        let config = provider::configuration(&files.registries(), ports).to_string();
        let path = files.config(provider::NAME);
        files::write_atomic(&path, config.as_bytes(), PRIVATE)?;
        let folder = files.credential_providers();
        files::create_dir(&folder, files::PRIVATE_DIRECTORY)?;
        let this = std::env::current_exe()?;
        match symlink(this, folder.join(provider::NAME)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// The command line.
fn command(root: &Root, facts: &Facts, bundle: &Bundle) -> Program {
    let name = Binary::Kubelet.name();
    let files = root.ephemeral.kubernetes().worker();
    let work = root.ephemeral.kubernetes().work(name);
    Program::new(bundle, PROFILE, &work)
        .flag("config", files.config(name))
        .flag("kubeconfig", files.kubeconfig(name))
        .flag("hostname-override", &facts.name)
        .flag("node-ip", facts.addresses.to_string())
        .flag("root-dir", &root.kubelet)
        .flag("cert-dir", work)
        .flag(
            "image-credential-provider-config",
            files.config(provider::NAME),
        )
        .flag(
            "image-credential-provider-bin-dir",
            files.credential_providers(),
        )
        .flag("runtime-cgroups", format!("/{}", containerd::GROUP))
}

/// The configuration file.
fn configuration(root: &Root, facts: &Facts, reserve: Reserve) -> Json {
    let keys = root.ephemeral.kubernetes().worker();
    let server = keys.keys(certificates::KUBELET_SERVER);
    let socket = root.ephemeral.containerd_socket();
    // The DNS server on the node itself; in another network, what is installed there.
    let dns = match &facts.network {
        Some(network) => network.subnets.gateway(),
        None => facts.ranges.dns_service(),
    };
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "address": "0.0.0.0",
        "port": PORT_KUBELET,
        "readOnlyPort": 0,
        "healthzBindAddress": HEALTH.ip(),
        "healthzPort": HEALTH.port(),
        "tlsCertFile": server.certificate(),
        "tlsPrivateKeyFile": server.key(),
        "tlsMinVersion": "VersionTLS13",
        // Clients authenticate with a certificate, or with a token that the API server checks;
        // authorization is the API server's.
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": server.ca() },
        },
        "authorization": { "mode": "Webhook" },
        "clusterDomain": KUBERNETES_DOMAIN,
        "clusterDNS": [dns],
        "resolvConf": "/etc/resolv.conf",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        // The group of all pods is limited to the rest. With both, a pod that forks without end takes
        // nothing from the node, and not all from other pods.
        "kubeReserved": reserve.kube_reserved(),
        "enforceNodeAllocatable": ["pods"],
        "podPidsLimit": 2048,
        "maxPods": 110,
        "volumePluginDir": root.data.kubernetes().volume_plugins(),
        // Each update costs CPU time on slow machines.
        "nodeStatusUpdateFrequency": "10s",
        // Pulling images and starting containers take long on a slow machine.
        "runtimeRequestTimeout": "10m",
        // Its chains are for a kube-proxy with iptables rules.
        "makeIPTablesUtilChains": false,
        "containerLogMaxSize": "10Mi",
        "containerLogMaxFiles": 3,
        // The defaults reserve too much on small disks and machines.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "5%",
            "nodefs.inodesFree": "5%",
            "imagefs.available": "5%",
        },
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use futures::stream::{iter, pending};
    use hearth_host::networking::NodeSubnets;

    use super::*;
    use crate::snapshot::{EmptyBundle, KUBERNETES, check, check_json, root};
    use crate::worker::reserve::Machine;

    fn facts() -> Facts {
        Facts {
            name: "hearth-x".into(),
            addresses: NodeAddresses {
                primary: [192, 0, 2, 7].into(),
                second: None,
            },
            ranges: ClusterRanges::DEFAULT,
            network: Some(PodNetwork {
                ranges: ClusterRanges::DEFAULT,
                subnets: NodeSubnets {
                    v4: "10.208.3.0/24".parse().unwrap(),
                    v6: None,
                },
                mtu: 1420,
            }),
            controller: true,
            registry_ports: BTreeSet::new(),
            reserved: Reserved::default(),
        }
    }

    #[test]
    fn it_is_started_as_committed() {
        for version in KUBERNETES {
            let bundle = EmptyBundle::of(version);
            let lines = bundle.lines(&command(&root(), &facts(), &bundle.bundle));
            check(include_str!("../snapshot/kubelet.txt"), &lines);
        }
    }

    #[test]
    fn a_node_of_both_families_says_so() {
        let mut facts = facts();
        facts.addresses.second = "2001:db8::7".parse().ok();
        let bundle = EmptyBundle::of(KUBERNETES[0]);
        let lines = bundle.lines(&command(&root(), &facts, &bundle.bundle));
        assert!(
            lines.contains("--node-ip=192.0.2.7,2001:db8::7\n"),
            "{lines}"
        );
    }

    #[test]
    fn its_file_is_as_committed() {
        let machine = Machine {
            memory: 4 << 30,
            millicpus: 2000,
        };
        let reserve = Reserve::of(true, machine, Reserved::default());
        let file = configuration(&root(), &facts(), reserve);
        check_json(include_str!("../snapshot/kubelet.json"), &file);
    }

    /// Whether `removed` returns after these events.
    fn is_removed(told: Vec<Result<Event<()>, ApiError>>) -> bool {
        removed(iter(told).chain(pending()))
            .now_or_never()
            .is_some()
    }

    #[test]
    fn a_node_is_removed_when_it_was_there() {
        let failure = || Err(ApiError::Silent(std::time::Duration::from_secs(1)));
        let key = || (String::new(), "n".to_owned());
        let none = || Ok(Event::All([].into_iter().collect()));
        let one = || Ok(Event::All([(key(), ())].into_iter().collect()));
        let (changed, gone) = (|| Ok(Event::Changed(key(), ())), || Ok(Event::Gone(key())));
        // The Node is created after the start of the kubelet.
        assert!(!is_removed(vec![
            none(),
            none(),
            failure(),
            changed(),
            one()
        ]));
        assert!(is_removed(vec![none(), changed(), changed(), gone()]));
        assert!(is_removed(vec![one(), gone()]));
        // While the watch fails.
        assert!(!is_removed(vec![one(), failure(), failure()]));
        assert!(is_removed(vec![one(), failure(), none()]));
    }
}
