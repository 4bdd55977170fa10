//! Kubernetes on booted machines, from its roles to a service that answers.
//!
//! Each test has a cluster of its own, one after the other. Tests with several machines or with faults are long ones.

mod dual_stack;
mod first_day;
mod situations;
mod volumes;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hearth_api::client::Channel;
use hearth_api::names;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{
    ClusterState, GetPacketFilterRequest, NodeCondition, PodNetwork, UpdateNodeRolesRequest,
};
use hearth_lab::registry::{self, LOGIN};
use hearth_lab::tool;
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::CommandLine;
use hearth_qemu::switch::NetworkOptions;
use hearth_tests::kubernetes::{IMAGE_PORT, condition, items, name};
use hearth_tests::{Cluster, Kubernetes, Outcome, TestCtx, bounds, here};
use serde_json::{Value, json};

fn roles(controller: Option<bool>, worker: Option<bool>) -> UpdateNodeRolesRequest {
    UpdateNodeRolesRequest {
        kubernetes_controller: controller,
        kubernetes_worker: worker,
        ..UpdateNodeRolesRequest::default()
    }
}

/// Both roles are assigned at the founding, if the image has Kubernetes. A pod runs, connects to another and is reached
/// by address and name; the role is removed and assigned again, and the Node object with it; the last of several
/// requests within a second wins; images come from registries.
#[tokio::test]
async fn a_pod_runs_and_the_role_comes_and_goes() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let options = NetworkOptions {
        way_out: Some(registry::way_out()),
        ..NetworkOptions::default()
    };
    let mut cluster = Cluster::founded_in(&test, &options, 1, |_, plan| plan.kubernetes()).await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    for kind in ["KubernetesController", "KubernetesWorker"] {
        let met = cluster.condition(1, kind, bounds::KUBERNETES, |c| c.met);
        met.await?;
    }

    kubernetes.probe("server", &node).await?;
    let ip = kubernetes.service("server").await?;
    kubernetes.probe("client", &node).await?;
    for host in [&ip[..], "server", "server.default.svc.cluster.local"] {
        kubernetes.reaches("client", host, "server").await?;
    }
    // Through its own service, too; the short name is the pod's own in its /etc/hosts.
    kubernetes.reaches("server", &ip, "server").await?;
    let said = kubernetes.kubectl(&["logs", "server"]).await?;
    ensure!(said.contains("/cgi-bin/hostname"), "{said}");
    let said = kubernetes.kubectl(&["exec", "server", "--", "hostname"]);
    ensure!(said.await?.trim() == "server");

    policies_isolate_pods(&kubernetes, &ip).await?;
    pods_are_confined_by_default(&kubernetes, &node).await?;
    host_ports_take_nothing(&kubernetes, &node).await?;
    let owner = cluster.owner().clone();
    let mut management = cluster.node(1).vm()?.management(&owner, &node)?;
    own_rules_are_shown(&mut management).await?;
    kernel_serves_pods(&kubernetes, &node).await?;
    settings_are_followed(&kubernetes, &node).await?;

    cluster.set_roles(1, roles(None, Some(false))).await?;
    let none = |nodes: &Value| items(nodes).is_empty();
    kubernetes
        .until("no node", bounds::WORKLOAD, &["nodes"], none)
        .await?;
    rules_of_services_are_removed(&mut management).await?;
    for wanted in [true, false, true] {
        cluster.set_roles(1, roles(None, Some(wanted))).await?;
    }
    kubernetes.ready(&[&node]).await?;
    kubernetes.probe("later", &node).await?;
    let ip = kubernetes.service("later").await?;
    kubernetes.reaches("later", &ip, "later").await?;
    // At the end: a kubelet that has pulled the test image gives the bundled one to no new pod, because both are one image,
    // and it only knows that a pod may use it by the name by which it was pulled.
    images_come_from_registries(&test, &kubernetes, &node).await?;
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// Images come from a registry with an authority of its own, which asks for a password; and from the same one as a mirror
/// of Docker Hub. What is set counts for the next pull, and no pod is restarted for it.
async fn images_come_from_registries(
    test: &TestCtx,
    kubernetes: &Kubernetes,
    node: &str,
) -> Outcome {
    let registry = test.registry().await?;
    let archive = &test.kubernetes()?.probe;
    for name in ["probe", "library/mirrored"] {
        registry.add(archive, name, "1").await?;
    }
    let pulled = |image: String| {
        move |spec: &mut Value| {
            let container = &mut spec["containers"][0];
            container["image"] = json!(image);
            container["imagePullPolicy"] = json!("Always");
        }
    };
    let name = registry.name();
    let image = pulled(format!("{name}/probe:1"));
    kubernetes.begin("own", node, image).await?;
    let unknown = "certificate signed by unknown authority";
    kubernetes.says_of_pulls("own", unknown).await?;
    let authorities = format!("kubernetes.registry_authorities={}", registry.authority()?);
    kubernetes.set(&[&authorities]).await?;
    kubernetes
        .says_of_pulls("own", "no basic auth credentials")
        .await?;
    let credentials = format!("kubernetes.registry_credentials={name}={LOGIN},docker.io={LOGIN}");
    kubernetes.set(&[&credentials]).await?;
    kubernetes.runs("own").await?;

    let mirrors = format!("kubernetes.registry_mirrors=docker.io=https://{name}");
    kubernetes.set(&[&mirrors]).await?;
    let image = pulled("mirrored:1".to_owned());
    kubernetes.begin("hub", node, image).await?;
    kubernetes.runs("hub").await?;
    let restarts = kubernetes.get(&["pod", "own"]).await?;
    let restarts = &restarts["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == json!(0), "restarts: {restarts}");
    Ok(())
}

/// A policy with these rules for connections to a pod.
fn ingress_policy(name: &str, pod: &str, ingress: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": name },
        "spec": {
            "podSelector": { "matchLabels": { "app": pod } },
            "ingress": ingress,
        },
    })
}

/// A policy takes a connection away between two pods of a node, and another one gives it back. `service` is the address
/// of the server's service.
async fn policies_isolate_pods(kubernetes: &Kubernetes, service: &str) -> Outcome {
    let policy = |name: &str, ingress: Value| ingress_policy(name, "server", &ingress);
    kubernetes.create(&policy("nobody", json!([]))).await?;
    kubernetes.reaches_not("client", "server").await?;
    // A pod reaches itself all the same.
    kubernetes.reaches("server", service, "server").await?;
    let client = json!([{
        "from": [{ "podSelector": { "matchLabels": { "app": "client" } } }],
        "ports": [{ "port": IMAGE_PORT }],
    }]);
    kubernetes.create(&policy("client", client)).await?;
    kubernetes.reaches("client", "server", "server").await?;
    let words = ["delete", "networkpolicies", "--all"];
    kubernetes.kubectl(&words).await.map(drop)
}

/// A privileged pod is refused, until the owner says that the namespace may have them.
async fn pods_are_confined_by_default(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let refused = kubernetes.refuses("refused", node, privileged).await?;
    ensure!(
        refused.contains("violates PodSecurity \"baseline:latest\": privileged"),
        "{refused}"
    );
    let level = "pod-security.kubernetes.io/enforce=privileged";
    let words = ["label", "namespace", "default", level];
    kubernetes.kubectl(&words).await.map(drop)
}

fn privileged(spec: &mut Value) {
    spec["containers"][0]["securityContext"] = json!({ "privileged": true });
}

/// A host port takes neither the node's own ports nor the resolver of the node's pods.
async fn host_ports_take_nothing(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let with_host_port = |port: u16| {
        move |spec: &mut Value| {
            spec["containers"][0]["ports"] = json!([
                { "containerPort": IMAGE_PORT, "hostPort": port },
                { "containerPort": IMAGE_PORT, "hostPort": port, "protocol": "UDP" },
            ]);
        }
    };
    let refused = kubernetes.refuses("curator", node, with_host_port(7836));
    let refused = refused.await?;
    ensure!(
        refused.contains("host port 7836, 7836 is used by the node itself"),
        "{refused}"
    );
    // Port 53 is not the node's, except at the address of the resolver.
    kubernetes
        .probe_as("resolver", node, with_host_port(53))
        .await?;
    kubernetes.reaches("client", "server", "server").await?;
    let object = kubernetes.get(&["node", node]).await?;
    let addresses = items_of(&object["status"]["addresses"]);
    let address = addresses.iter().find(|a| a["type"] == "InternalIP");
    let address = address.and_then(|a| a["address"].as_str());
    let address = address.context("the node has no address")?;
    let host = format!("{address}:53");
    kubernetes.reaches("client", &host, "resolver").await?;
    let words = ["delete", "pod", "resolver", "--wait=false"];
    kubernetes.kubectl(&words).await.map(drop)
}

fn items_of(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// Tables of programs of the bundle.
const SERVICE_TABLES: [&str; 2] = ["table ip kube-proxy {", "table ip cni_hostport {"];

/// The packet filter as the node's kernel has it.
async fn own_rules_are_shown(management: &mut NodeManagementClient<Channel>) -> Outcome {
    let own = packet_filter(management, false).await?;
    ensure!(own.starts_with("table inet hearth {"), "{own}");
    let all = packet_filter(management, true).await?;
    for table in SERVICE_TABLES.iter().chain(&["table inet hearth {"]) {
        ensure!(all.contains(table), "no {table}\n{all}");
    }
    ensure!(!all.contains("xt "), "rules of iptables\n{all}");
    Ok(())
}

/// The rules of services go with the role.
async fn rules_of_services_are_removed(management: &mut NodeManagementClient<Channel>) -> Outcome {
    let began = Instant::now();
    loop {
        let all = packet_filter(management, true).await?;
        let Some(table) = SERVICE_TABLES.iter().find(|table| all.contains(*table)) else {
            return Ok(());
        };
        ensure!(began.elapsed() < bounds::SETTLED, "{table} remains\n{all}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn packet_filter(
    management: &mut NodeManagementClient<Channel>,
    all_tables: bool,
) -> anyhow::Result<String> {
    let request = GetPacketFilterRequest { all_tables };
    let mut parts = management.get_packet_filter(request).await?.into_inner();
    let mut rules = String::new();
    while let Some(part) = parts.message().await? {
        rules += &part.rules;
    }
    Ok(rules)
}

/// Prints what a privileged pod misses of the kernel, a line each, and the errors.
const MISSING: &str = "exec 2>&1
for name in fuse nfs4 ext4 iso9660; do grep -qw $name /proc/filesystems || echo $name; done
for device in net/tun fuse nbd0; do test -e /dev/$device || echo $device; done
for kind in dummy bridge; do ip link add new type $kind && ip link del new || echo $kind; done
ip link add link eth0 name new type macvlan && ip link del new || echo macvlan
mkdir -p /mnt && mount -t tmpfs none /mnt || echo tmpfs
for name in connmark owner socket; do grep -qx $name /proc/net/ip_tables_matches || echo match $name; done
for name in CT REDIRECT TPROXY; do grep -qx $name /proc/net/ip_tables_targets || echo target $name; done";

/// Prints what the programs of the control plane are, or see, that they should not; nothing if there are none of them
/// is a difference, too.
const CONFINED: &str = "exec 2>&1
for name in apiserver controller scheduler; do
  process=$(grep -slx kube-$name /proc/[0-9]*/comm | cut -d/ -f3)
  test -n \"$process\" || echo no $name
  grep -q '^Uid:.64001.64001.64001.64001$' /proc/$process/status || echo $name is root
  grep -q '^CapPrm:.0000000000000000$' /proc/$process/status || echo $name has capabilities
  grep -q '^Seccomp:.2$' /proc/$process/status || echo $name calls what it likes
  for private in data/etcd data/node ephemeral/consensus; do
    test -d /proc/1/root/$private || echo no $private
    ls /proc/$process/root/$private | grep -q . && echo $name sees $private
  done
done
true";

/// Settings of the node reach its kernel, which pods see, and its Node object; and they are taken back.
async fn settings_are_followed(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let setting = "cat /proc/sys/vm/max_map_count";
    let words = ["exec", "client", "--", "sh", "-c", setting];
    let before = kubernetes.kubectl(&words).await?;
    let tainted = |wanted: bool| {
        move |node: &Value| {
            let taints = node["spec"]["taints"].as_array().cloned();
            let is_it = |taint: &Value| taint["key"] == "dedicated" && taint["value"] == "tests";
            taints.unwrap_or_default().iter().any(is_it) == wanted
        }
    };
    let set = [
        "sysctl.vm.max_map_count=262145",
        "taint.dedicated=tests:PreferNoSchedule",
    ];
    kubernetes.node_settings("set", node, &set).await?;
    kubernetes
        .says("client", setting, |said| said.trim() == "262145")
        .await?;
    let words = ["node", node];
    kubernetes
        .until("the taint", bounds::WORKLOAD, &words, tainted(true))
        .await?;
    let remove = ["sysctl.vm.max_map_count", "taint.dedicated"];
    kubernetes.node_settings("remove", node, &remove).await?;
    kubernetes
        .says("client", setting, |said| said == before)
        .await?;
    kubernetes
        .until("no taint", bounds::WORKLOAD, &words, tainted(false))
        .await?;
    Ok(())
}

/// Pods that ask for them get a user namespace, and what the kernel has for volumes and networks.
async fn kernel_serves_pods(kubernetes: &Kubernetes, node: &str) -> Outcome {
    let apart = |spec: &mut Value| spec["hostUsers"] = false.into();
    kubernetes.probe_as("apart", node, apart).await?;
    let map = kubernetes.kubectl(&["exec", "apart", "--", "cat", "/proc/self/uid_map"]);
    let map = map.await?;
    let [inside, outside, _length] = map.split_whitespace().collect::<Vec<_>>()[..] else {
        bail!("{map:?}");
    };
    ensure!(inside == "0" && outside != "0", "root is {map:?}");

    let everything = |spec: &mut Value| {
        privileged(spec);
        spec["hostPID"] = true.into();
    };
    kubernetes.probe_as("privileged", node, everything).await?;
    let words = ["exec", "privileged", "--", "sh", "-c", MISSING];
    let missing = kubernetes.kubectl(&words).await?;
    ensure!(missing.is_empty(), "missing: {missing}");
    let words = ["exec", "privileged", "--", "sh", "-c", CONFINED];
    let unconfined = kubernetes.kubectl(&words).await?;
    ensure!(unconfined.is_empty(), "the control plane: {unconfined}");
    for pod in ["apart", "privileged"] {
        kubernetes
            .kubectl(&["delete", "pod", pod, "--wait=false"])
            .await?;
    }
    Ok(())
}

/// The minor version before that of the images: the bundle and the image are made as users do it.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn the_previous_minor_version_runs_a_pod() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let xtask = &test.artifacts().xtask;
    let mut bundle = CommandLine::new(xtask);
    bundle.arg("bundle").arg("--previous");
    let bundle = tool::run(&bundle).await?;
    let root = bundle.lines().next().context("no path of a bundle")?;
    let disk = test.folder().join("hearth.img");
    let mut image = CommandLine::new(xtask);
    image
        .arg("image")
        .option("--extension", format!("kubernetes={root}"))
        .option("--output", &disk);
    tool::run(&image).await?;
    let image = Image {
        disk,
        ..test.artifacts().release.clone()
    };
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| {
        Ok(plan.kubernetes()?.image(image.clone()).uefi())
    })
    .await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    let object = kubernetes.get(&["node", &node]).await?;
    let kubelet = &object["status"]["nodeInfo"]["kubeletVersion"];
    let shipped = kubernetes.kubectl(&["version", "--client"]).await?;
    let is_shipped = kubelet.as_str().is_some_and(|old| shipped.contains(old));
    ensure!(!is_shipped, "kubelet {kubelet} is the shipped one");
    kubernetes.probe("server", &node).await?;
    let ip = kubernetes.service("server").await?;
    kubernetes.probe("client", &node).await?;
    for host in [&ip[..], "server"] {
        kubernetes.reaches("client", host, "server").await?;
    }
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// A cluster without the built-in pod network: its node has no pods with an address until another network has been
/// installed, as users do it, by a pod in the host's network.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn another_pod_network_can_be_installed() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| {
        Ok(plan.kubernetes()?.configured(|settings| {
            let kubernetes = settings.kubernetes.get_or_insert_default();
            kubernetes.set_pod_network(PodNetwork::None);
        }))
    })
    .await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    for kind in ["KubernetesController", "KubernetesWorker"] {
        let met = cluster.condition(1, kind, bounds::KUBERNETES, |c| c.met);
        met.await?;
    }
    let waits = |node: &Value| {
        let range = &node["spec"]["podCIDR"];
        range.is_string() && condition(node, "Ready") == "False"
    };
    let object = kubernetes
        .until("no network", bounds::KUBERNETES, &["node", &node], waits)
        .await?;
    let range = object["spec"]["podCIDR"].as_str().context("no range")?;
    let services = ["services", "--namespace", "kube-system"];
    let services = kubernetes.get(&services).await?;
    ensure!(items(&services).is_empty(), "{services:#}");

    let level = "pod-security.kubernetes.io/enforce=privileged";
    let words = ["label", "namespace", "default", level];
    kubernetes.kubectl(&words).await?;
    let install = |spec: &mut Value| installs_network(spec, range);
    kubernetes.begin("installer", &node, install).await?;
    kubernetes.ready(&[&node]).await?;
    kubernetes.probe("server", &node).await?;
    kubernetes.probe("client", &node).await?;
    let server = kubernetes.get(&["pod", "server"]).await?;
    let ip = server["status"]["podIP"].as_str().context("no address")?;
    let (net, _) = range.rsplit_once('.').context(range.to_owned())?;
    ensure!(ip.starts_with(net), "{ip} is not of {range}");
    let host = format!("{ip}:{IMAGE_PORT}");
    kubernetes.reaches("client", &host, "server").await?;

    let owner = cluster.owner().clone();
    let mut management = cluster.node(1).vm()?.management(&owner, &node)?;
    let rules = packet_filter(&mut management, true).await?;
    let built_in = SERVICE_TABLES.iter().chain(&["hearth-pods"]);
    let built_in = built_in.filter(|part| rules.contains(**part)).count();
    ensure!(built_in == 0 && rules.contains("own_tcp"), "{rules}");
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// A plugin and the configuration that names it, at the usual paths. The plugin is a script for a shell that it brings
/// along, and runs the node's own `bridge`.
fn installs_network(spec: &mut Value, range: &str) {
    let configuration = json!({
        "cniVersion": "0.4.0",
        "name": "installed",
        "plugins": [{
            "type": "installed",
            "bridge": "installed0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": range }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    let plugin = "#!/opt/cni/bin/busybox sh\nexec ${CNI_PATH%%:*}/bridge\n";
    let script = "set -e
        cp /bin/busybox /plugins/busybox
        printf %s \"$PLUGIN\" > /plugins/installed
        chmod 755 /plugins/installed
        printf %s \"$CONFIGURATION\" > /configuration/written
        mv /configuration/written /configuration/10-installed.conflist
        exec sleep 1000000";
    spec["hostNetwork"] = json!(true);
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    spec["volumes"] = json!([
        { "name": "plugins", "hostPath": { "path": "/opt/cni/bin" } },
        { "name": "configuration", "hostPath": { "path": "/etc/cni/net.d" } },
    ]);
    let container = &mut spec["containers"][0];
    container["command"] = json!(["sh", "-c", script]);
    container["env"] = json!([
        { "name": "PLUGIN", "value": plugin },
        { "name": "CONFIGURATION", "value": configuration.to_string() },
    ]);
    container["volumeMounts"] = json!([
        { "name": "plugins", "mountPath": "/plugins" },
        { "name": "configuration", "mountPath": "/configuration" },
    ]);
}

/// A node whose image has no Kubernetes accepts the role all the same, and reports what is missing.
#[tokio::test]
async fn an_image_without_kubernetes_says_so() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 1).await?;
    cluster.set_roles(1, roles(Some(true), Some(true))).await?;
    for kind in ["KubernetesController", "KubernetesWorker"] {
        let missing = cluster.condition(1, kind, bounds::SETTLED, |condition| {
            !condition.met && condition.reason == "NotInstalled"
        });
        missing.await?;
    }
    // Everything else continues.
    cluster.all_healthy().await?;
    drop(cluster);
    test.passed()
}

/// The root hash that the firmware or the launcher of the kernel supplies does not match the disk.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_extension_that_is_not_vouched_for_is_refused() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let good = test.kubernetes()?.image.clone();
    let cmdline = with_another_hash(&good.cmdline)?;
    let bad = Image { cmdline, ..good };
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| {
        Ok(plan.kubernetes()?.image(bad.clone()))
    })
    .await?;
    cluster.set_roles(1, roles(None, Some(true))).await?;
    let refused = cluster.condition(1, "KubernetesWorker", bounds::SETTLED, |condition| {
        !condition.met && condition.reason == "ExtensionRefused"
    });
    refused.await?;
    cluster.all_healthy().await?;
    drop(cluster);
    test.passed()
}

/// The command line with a root hash whose last digit differs.
fn with_another_hash(cmdline: &str) -> anyhow::Result<String> {
    let word = cmdline
        .split_whitespace()
        .find(|word| word.starts_with(names::EXTENSION_WORD))
        .context("no extension on the command line")?;
    let is_hash = |part: &&str| part.len() == 64 && hex::decode(part).is_ok();
    let hash = word.split(':').find(is_hash).context(word.to_owned())?;
    let (rest, last) = hash.split_at(hash.len() - 1);
    let other = if last == "0" { "1" } else { "0" };
    Ok(cmdline.replace(hash, &format!("{rest}{other}")))
}

/// Pods of two nodes reach each other by service and name, over an encrypted network. A node that loses contact with
/// its cluster keeps its pods; one that loses power restarts with them.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn two_workers_are_one_network_and_survive_split_and_power_cut() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 2, |_, plan| plan.kubernetes()).await?;
    cluster.add_nodes(&[2]).await?;
    cluster.set_roles(2, roles(None, Some(true))).await?;
    let ids = [1, 2].map(|number| cluster.node(number).id().to_owned());
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&ids[0], &ids[1]]).await?;

    kubernetes.probe("there", &ids[1]).await?;
    let ip = kubernetes.service("there").await?;
    kubernetes.probe("here", &ids[0]).await?;
    for host in [&ip[..], "there"] {
        kubernetes.reaches("here", host, "there").await?;
    }
    // The DNS servers have a service address, too.
    let full = "there.default.svc.cluster.local";
    let dns = ClusterRanges::DEFAULT.dns_service().to_string();
    let words = ["exec", "here", "--", "nslookup", full, &dns];
    let said = kubernetes.kubectl(&words).await?;
    ensure!(said.contains(&ip), "{said}");
    // And in the other direction.
    kubernetes.service("here").await?;
    kubernetes.reaches("there", "here", "here").await?;
    let capture = cluster.network().status().await?.capture;
    let capture = capture.context("no packet capture")?;
    ensure!(
        capture.dropped == 0,
        "the capture is incomplete: {capture:?}"
    );
    let wire = std::fs::read(&capture.path);
    let wire = wire.with_context(|| format!("read {}", capture.path.display()))?;
    let request = b"GET /cgi-bin/hostname";
    let is_readable = wire.windows(request.len()).any(|bytes| bytes == request);
    ensure!(!is_readable, "requests can be read: {capture:?}");

    // It loses contact with its cluster: its pods continue.
    let container = kubernetes.container("there").await?;
    cluster.network().part(&[&["node-1"], &["node-2"]]).await?;
    cluster.wait_cluster_state(2, ClusterState::Split).await?;
    cluster.network().part(&[]).await?;
    cluster.wait_cluster_state(2, ClusterState::Home).await?;
    kubernetes.ready(&[&ids[0], &ids[1]]).await?;
    kubernetes.reaches("here", "there", "there").await?;
    let after = kubernetes.container("there").await?;
    ensure!(
        after == container,
        "{container} did not outlive SPLIT: {after}"
    );

    // Its power is cut; it rejoins by itself, with its pods.
    cluster.node(2).cut().await?;
    cluster.wait_unreachable(2).await?;
    cluster.node(2).comes_back().await?;
    let again = |pod: &serde_json::Value| {
        let started = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
        condition(pod, "Ready") == "True" && started >= Some(1)
    };
    let there = kubernetes.until(
        "it runs again",
        bounds::KUBERNETES,
        &["pod", "there"],
        again,
    );
    ensure!(name(&there.await?) == "there");
    kubernetes.ready(&[&ids[0], &ids[1]]).await?;
    kubernetes.reaches("here", "there", "there").await?;
    drop(cluster);
    test.passed()
}

/// Two controllers, and a third voter, so that either of the two may be lost. The virtual address is at the first, and
/// moves to the other when the power of the first is cut.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn one_controller_of_two_may_be_lost() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 3, |number, plan| match number {
        // It is only a voter.
        3 => Ok(plan),
        _ => plan.kubernetes(),
    })
    .await?;
    // One control plane starts after the other: both at once are too much for a small host without hardware
    // virtualisation.
    let first = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&first]).await?;
    let address = virtual_address(&cluster, &kubernetes, 1).await?;
    cluster.add_nodes(&[2, 3]).await?;
    for number in [2, 3] {
        cluster.set_consensus_member(number, true).await?;
    }
    cluster.voters_with(&[1, 2, 3]).await?;
    cluster.set_roles(2, roles(Some(true), Some(true))).await?;
    let ids = [1, 2].map(|number| cluster.node(number).id().to_owned());
    let second = cluster.kubernetes(&test, 2).await?;
    second.ready(&[&ids[0], &ids[1]]).await?;
    has_address(&cluster, 2, "Standby").await?;
    let shared = second.through(address).await?;
    shared.kubectl(&READY).await?;
    let kept = ["generic", "kept", "--from-literal=key=value"];
    kubernetes
        .kubectl(&[&["create", "secret"], &kept[..]].concat())
        .await?;

    cluster.node(1).cut().await?;
    shared.succeeds(&READY).await?;
    has_address(&cluster, 2, "Holder").await?;
    secret_is_kept(&shared).await?;
    // Its kubelet uses the other API server, which has the other scheduler.
    second.probe("after", &ids[1]).await?;
    second.service("after").await?;
    // By its bare name a pod reaches itself, because that is its host name.
    second.reaches("after", "after.default", "after").await?;
    cluster.node(1).comes_back().await?;
    second.ready(&[&ids[0], &ids[1]]).await?;
    has_address(&cluster, 1, "Standby").await?;
    second.rotate_secrets_key().await?;
    secret_is_kept(&kubernetes).await?;
    drop(cluster);
    test.passed()
}

/// Both API servers decrypt what either has encrypted.
async fn secret_is_kept(kubernetes: &Kubernetes) -> Outcome {
    let secret = kubernetes.get(&["secret", "kept"]).await?;
    ensure!(secret["data"]["key"] == json!("dmFsdWU="), "{secret}");
    Ok(())
}

/// What kubectl asks an API server that should work.
const READY: [&str; 4] = ["get", "--raw", "/readyz", "--request-timeout=5s"];

/// Gives the API servers a virtual address, and a name in their certificates, while this controller is the only one; its
/// API server is not restarted for it. Returns the host's address of the virtual one.
async fn virtual_address(
    cluster: &Cluster,
    kubernetes: &Kubernetes,
    number: u16,
) -> anyhow::Result<SocketAddr> {
    let refused = kubernetes.set(&["kubernetes.api_address=10.224.0.7"]).await;
    let refused = format!("{:#}", refused.err().context("in the range of services")?);
    ensure!(refused.contains("outside the ranges of pods"), "{refused}");
    let address = cluster.network().status().await?.options.shared_address();
    kubernetes
        .set(&[
            &format!("kubernetes.api_address={address}"),
            "certificate_names=api.example",
        ])
        .await?;
    has_address(cluster, number, "Holder").await?;
    let port = names::PORT_KUBERNETES;
    let host = cluster.network().forward_shared(address, port).await?;
    let shared = kubernetes.through(host).await?;
    let named = [&READY[..], &["--tls-server-name=api.example"]].concat();
    shared.succeeds(&named).await?;
    Ok(host)
}

/// Waits until a controller says this of the virtual address.
async fn has_address(cluster: &Cluster, number: u16, reason: &str) -> Outcome {
    let kind = "KubernetesApiAddress";
    let is_so = |condition: &NodeCondition| condition.met && condition.reason == reason;
    cluster
        .condition(number, kind, bounds::KUBERNETES, is_so)
        .await
}
