//! Kubernetes: one node from power-on until a pod runs that a user has asked for and the scheduler has placed.
//!
//! The node is the image with the debug service and the bundle, direct boot, with both of Kubernetes' roles from its founding.
//! Meanwhile a user on the host takes ownership and has a kubeconfig written. As soon as the node says that its API server
//! works, the user follows the account that pods have until it has a token, asks for a pod of the image that rides along,
//! and follows it until it runs. There the clock stops. All that is by hearthctl and kubectl, and by kubectl's plain
//! requests: what it asks besides when it is asked for more comfort is no part of a pod's start. Then the node is left
//! alone, and its own processes are weighed: PID 1 and the core, not etcd and not what Kubernetes brings.
//!
//! In alternation with it, on a machine of the same make, the same programs are started by a script ([`script`]).

mod script;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hearth_api::console::Milestone;
use hearth_api::v1::node_debug_client::NodeDebugClient;
use hearth_api::v1::{self, GetStateRequest};
use hearth_api::{names, owner};
use hearth_qemu::accel::{self, Accel};
use hearth_qemu::command::{Boot, Machine, OnReset};
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::vm::{Lifetime, Vm};
use prost::Message as _;

use super::boot::machines::CPUS;
use super::{Records, ratio, remove, until_interrupted};
use crate::command::Cmd;
use crate::hearthctl;
use crate::image::{self, Artifacts, Flavour};
use crate::kubernetes;
use crate::run::kubernetes::kubectl;
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::{Task, Ui};

/// Of the machine, in MiB.
const MEMORY: u32 = 2048;
const DISK_BYTES: u64 = 8 << 30;
/// For a round, two boots that end with a pod: each takes two minutes on a quiet machine.
const BOUND: Duration = Duration::from_secs(2400);
/// Between two questions; each is a process on the host.
const PAUSE: Duration = Duration::from_millis(500);
/// The node is weighed so often, so far apart.
const WEIGHINGS: usize = 10;
const POD: &str = "probe";
/// What the node logs when its API server is ready.
const API_WORKS: &str = "kube-apiserver works";
/// Where pods are that nobody puts elsewhere.
const NAMESPACE: &str = "/api/v1/namespaces/default";
/// Rides along.
const IMAGE: &str = "hearth.local/probe:1";
/// Its name in a machine's folder.
const DISK: &str = "disk.qcow2";

/// What a round gave.
struct Measured {
    node: Node,
    script: Times,
}

/// From power-on, in seconds.
struct Times {
    /// Until the API server is ready.
    api: f64,
    /// Until the pod runs.
    pod: f64,
}

/// What a round gave of the node.
struct Node {
    home: f64,
    times: Times,
    resident: Vec<f64>,
}

struct Round {
    ui: Ui,
    node: Artifacts,
    script: PathBuf,
    hearthctl: PathBuf,
    kubectl: PathBuf,
    accel: Accel,
    folder: PathBuf,
}

/// Measures.
pub fn measure(
    ui: &Ui,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN)?;
    let bundle = kubernetes::ensure(ui, None)?;
    let extension = [kubernetes::extension(&bundle)?];
    weigh_on_disk(ui, &extension, records)?;
    let round = Round {
        ui: ui.clone(),
        // What can be looked into is what is booted.
        node: image::ensure_extended(ui, Flavour::Debug, &extension)?,
        script: script::initramfs(ui)?,
        hearthctl: hearthctl::build(ui)?,
        kubectl: kubectl(&bundle)?,
        accel: accel::choose(accel)?.accel,
        folder: target::folder("bench")?.join("kubernetes"),
    };
    let rounds = rounds.unwrap_or(3);
    let task = ui.counted_task("measuring Kubernetes", u64::from(rounds) * 4);
    let mut all = Vec::new();
    let runs = async {
        for number in 0..rounds {
            let measured = tokio::time::timeout(BOUND, round.run(number % 2 == 1, &task)).await;
            all.push(measured.with_context(|| format!("no two pods within {BOUND:?}"))??);
        }
        anyhow::Ok(())
    };
    until_interrupted(runs)?;
    task.done();
    record(&all, records);
    Ok(())
}

fn record(all: &[Measured], records: &mut Records) {
    let of = |part: fn(&Measured) -> f64| all.iter().map(part).collect::<Vec<_>>();
    records.add("kubernetes.home_seconds", "s", &of(|m| m.node.home));
    let (api, script) = (of(|m| m.node.times.api), of(|m| m.script.api));
    records.add("kubernetes.api_seconds", "s", &api);
    records.add("kubernetes.api_seconds_script", "s", &script);
    let (pod, script) = (of(|m| m.node.times.pod), of(|m| m.script.pod));
    records.add("kubernetes.pod_seconds", "s", &pod);
    records.add("kubernetes.pod_seconds_script", "s", &script);
    let ratios = ratio(&pod, &script);
    records.add("kubernetes.pod_ratio_script", "ratio", &ratios);
    let resident = all.iter().flat_map(|m| m.node.resident.iter().copied());
    let resident: Vec<f64> = resident.collect();
    records.add("kubernetes.hearth_resident_bytes", "bytes", &resident);
}

/// What users get is what is weighed on disk.
fn weigh_on_disk(ui: &Ui, extension: &[image::Request], records: &mut Records) -> Result<()> {
    let release = image::ensure_extended(ui, Flavour::Release, extension)?;
    let bytes = fs::metadata(&release.image).context("the image")?.blocks() * 512;
    records.add("kubernetes.image_allocated_bytes", "bytes", &[bytes as f64]);
    for extension in &release.extensions {
        let bytes = fs::metadata(extension).context("the extension")?.len();
        records.add("kubernetes.extension_bytes", "bytes", &[bytes as f64]);
    }
    Ok(())
}

impl Round {
    /// Both, each on a new disk.
    async fn run(&self, swapped: bool, task: &Task) -> Result<Measured> {
        let (node, script) = if swapped {
            let script = self.script(task).await?;
            (self.node(task).await?, script)
        } else {
            let node = self.node(task).await?;
            (node, self.script(task).await?)
        };
        Ok(Measured { node, script })
    }

    async fn node(&self, task: &Task) -> Result<Node> {
        task.now("node");
        remove(&self.folder)?;
        let run_dir = RunDir::create(&self.folder)?;
        let vm = self.start_node(&run_dir).await?;
        let forwarded = |port| vm.forwarded(port).context("QEMU forwards no port");
        let home = vm.reached(Milestone::Home, BOUND).await?.at.as_secs_f64();
        task.step();
        let (curator, api, debug) = (
            forwarded(names::PORT_CURATOR)?,
            forwarded(names::PORT_KUBERNETES)?,
            forwarded(names::PORT_DEBUG)?,
        );
        let runs = self.pod_runs(&vm, curator, api);
        let runs = vm.while_running("a pod that runs", BOUND, runs).await?;
        let pod = vm.started().elapsed().as_secs_f64();
        let api = runs.with_context(|| format!("the node's console:\n{}", vm.tail()))?;
        task.step();
        let resident = weigh(debug).await?;
        task.step();
        vm.power_cut().await?;
        remove_disk(&run_dir)?;
        Ok(Node {
            home,
            times: Times { api, pod },
            resident,
        })
    }

    /// The same programs without a node.
    async fn script(&self, task: &Task) -> Result<Times> {
        task.now("script");
        let folder = self.folder.with_file_name("kubernetes-script");
        remove(&folder)?;
        let run_dir = RunDir::create(&folder)?;
        let vm = self.machine(&run_dir, &self.script, Vec::new()).await?;
        let times = script::pod_runs(&vm).await?;
        vm.power_cut().await?;
        remove_disk(&run_dir)?;
        task.step();
        Ok(times)
    }

    fn key(&self) -> PathBuf {
        self.folder.join("owner-key.pem")
    }

    fn secret(&self) -> PathBuf {
        self.folder.join("first-contact-secret")
    }

    async fn start_node(&self, run_dir: &RunDir) -> Result<Vm> {
        let key = owner::create_key(&self.key())?;
        let secret = owner::create_first_contact_secret(&self.secret())?;
        let bootstrap = v1::ClusterBootstrap {
            owner_public_key: key.public().as_bytes().to_vec(),
            first_contact_secret: secret.expose().to_vec(),
            initial_cluster_configuration: Some(v1::ClusterConfiguration {
                storage_security_policy: v1::StorageSecurityPolicy::NeedsInsecure.into(),
                ..v1::ClusterConfiguration::default()
            }),
            ..v1::ClusterBootstrap::default()
        };
        let parameters = v1::NodeParameters {
            cluster: Some(v1::node_parameters::Cluster::ClusterBootstrap(bootstrap)),
            ..v1::NodeParameters::default()
        };
        let item = Item::bytes(names::FW_CFG_PARAMETERS, parameters.encode_to_vec())?;
        self.machine(run_dir, &self.node.initramfs, vec![item])
            .await
    }

    /// A machine with the node's disk as it is when it is new.
    async fn machine(&self, run_dir: &RunDir, initramfs: &Path, fw_cfg: Vec<Item>) -> Result<Vm> {
        let disk = run_dir.file(DISK);
        make_overlay(&self.node.image, &disk, Some(DISK_BYTES)).await?;
        let ports = [
            names::PORT_CURATOR,
            names::PORT_KUBERNETES,
            names::PORT_DEBUG,
        ];
        let network = UserNetwork {
            restricted: false,
            forwards: ports.map(Forward::any).into(),
        };
        let machine = Machine {
            cpus: CPUS,
            memory_mib: MEMORY,
            boot: Boot::Direct {
                kernel: self.node.kernel.clone(),
                initrd: Some(initramfs.to_owned()),
                append: self.node.cmdline.clone(),
            },
            disks: vec![Disk::new(disk, Format::Qcow2)],
            nics: vec![Nic {
                mac: Mac::of_machine(1),
                link: Link::User(network),
            }],
            fw_cfg,
            // A kernel that panics must not boot again until the time is up.
            on_reset: OnReset::Exit,
            ..Machine::new("kubernetes", self.accel)
        };
        Ok(Vm::start(&machine, run_dir, Lifetime::Tied).await?)
    }

    /// What a user does until the pod runs; tells when the API server was ready, in seconds from power-on.
    async fn pod_runs(&self, vm: &Vm, curator: SocketAddr, api: SocketAddr) -> Result<f64> {
        let own = self.hearthctl(&["cluster", "take-ownership", "--endpoint"]);
        let own = own.arg(curator.to_string()).arg("--owner-key");
        let own = own.arg(self.key()).arg("--first-contact-secret");
        self.output(own.arg(self.secret())).await?;
        // Nobody has told the cluster where API servers are, at first.
        self.patiently(async || {
            let write = self.hearthctl(&["kubernetes", "kubeconfig", "--embed", "--server"]);
            let write = write.arg(format!("https://{api}")).arg("--output");
            self.output(write.arg(self.kubeconfig())).await
        })
        .await;
        let works = |line: &str| line.contains(API_WORKS);
        let works = vm.wait_for("an API server", BOUND, works).await?;
        self.told("secrets", "default-token-").await;
        self.ask_for_pod().await?;
        self.told("pods", r#""phase":"Running""#).await;
        Ok(works.at.as_secs_f64())
    }

    async fn ask_for_pod(&self) -> Result<()> {
        let (pods, pod) = (format!("{NAMESPACE}/pods"), self.folder.join("pod.json"));
        fs::write(&pod, script::probe().to_string()).context("the pod's file")?;
        self.patiently(async || {
            let create = self.kubectl(&["create", "--raw", &pods, "--filename"]);
            match self.output(create.arg(&pod)).await {
                // The server did it, and the answer was lost.
                Err(error) if format!("{error:#}").contains("already exists") => Ok(String::new()),
                created => created,
            }
        })
        .await;
        Ok(())
    }

    /// Follows the objects of a kind until the API server says a word. A connection costs it more than one that waits.
    async fn told(&self, kind: &str, word: &'static str) {
        let path = format!("{NAMESPACE}/{kind}?watch=1");
        self.patiently(async || {
            let (ui, follow) = (self.ui.clone(), self.kubectl(&["get", "--raw", &path]));
            tokio::task::spawn_blocking(move || says(&ui, follow, word)).await?
        })
        .await;
    }

    fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    fn hearthctl(&self, words: &[&str]) -> Cmd {
        let cmd = Cmd::new(&self.hearthctl).args(words);
        cmd.env(hearthctl::CONFIG, self.folder.join("hearthctl.json"))
    }

    fn kubectl(&self, words: &[&str]) -> Cmd {
        let cmd = Cmd::new(&self.kubectl).arg("--kubeconfig");
        cmd.arg(self.kubeconfig()).args(words)
    }

    /// Again and again until it works; the round has a bound.
    async fn patiently<T>(&self, attempt: impl AsyncFn() -> Result<T>) {
        while let Err(error) = attempt().await {
            self.ui.detail(format_args!("asking again: {error:#}"));
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn output(&self, cmd: Cmd) -> Result<String> {
        let ui = self.ui.clone();
        Ok(tokio::task::spawn_blocking(move || cmd.output(&ui)).await??)
    }
}

/// Runs a command until it says a word, and ends it then.
fn says(ui: &Ui, cmd: Cmd, word: &str) -> Result<()> {
    let mut said = false;
    let ended = cmd.stream(ui, |line| {
        said = line.contains(word);
        if said {
            return Err(std::io::Error::other(format!("it has said {word}")));
        }
        Ok(())
    });
    match said {
        true => Ok(()),
        false => {
            ended?;
            bail!("it ended and has not said {word}")
        }
    }
}

/// It goes with its machine; the logs stay.
fn remove_disk(run_dir: &RunDir) -> Result<()> {
    fs::remove_file(run_dir.file(DISK)).context("cannot remove the disk")
}

/// What Hearth's own processes have resident, as the node sees it.
async fn weigh(debug: SocketAddr) -> Result<Vec<f64>> {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{debug}"))?
        .connect()
        .await
        .context("the debug service")?;
    let mut client = NodeDebugClient::new(channel);
    let mut samples = Vec::new();
    for _ in 0..WEIGHINGS {
        tokio::time::sleep(PAUSE * 2).await;
        let state = client.get_state(GetStateRequest {}).await;
        samples.push(state.context("GetState")?.into_inner().resident_bytes as f64);
    }
    Ok(samples)
}
