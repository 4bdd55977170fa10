//! From power-on to a running pod: on a node, and by a script that starts the same programs. Then a second pod on the
//! same machine, whose image is pulled.
//!
//! The benchmark documents what is compared, and how fairly. The user's part on the host is done by hearthctl and
//! kubectl, with kubectl's raw requests: further requests that only add convenience are not part of a pod's start.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_api::console::Milestone;
use hearth_api::v1::node_debug_client::NodeDebugClient;
use hearth_api::v1::{GetStateRequest, NodeParameters, StorageSecurityPolicy};
use hearth_api::{names, registries};
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::{Boot, CommandLine};
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::vm::Vm;
use serde_json::{Value, json};

use super::{Build, Lab, clear, end, forwarded, parameters};
use crate::hearthctl::Hearthctl;
use crate::owner::{Owner, with_storage};
use crate::registry::{Access, Registry};
use crate::{LabError, Result, tool};

/// Memory of the machines, in MiB.
const MEMORY: u32 = 2048;
const DISK_BYTES: u64 = 8 << 30;
/// Bound for a round, two boots that each end with a pod; each takes two minutes on a quiet machine.
const BOUND: Duration = Duration::from_secs(2400);
/// Bound for the second pod alone: nothing else says that its image cannot be pulled.
const PULL_BOUND: Duration = Duration::from_secs(600);
/// Between two calls; each is a process on the host.
const PAUSE: Duration = Duration::from_millis(500);
/// Number of memory samples of the node.
const WEIGHINGS: usize = 10;
/// An image that is part of the bundle.
const IMAGE: &str = "hearth.local/probe:1";
/// Repository and tag of the image that is pulled.
const PULLED: (&str, &str) = ("large-probe", "1");
/// What the node logs when its API server is ready.
const API_WORKS: &str = "kube-apiserver is ready";
/// The default namespace of pods.
const NAMESPACE: &str = "/api/v1/namespaces/default";
/// Console lines of the script.
const SCRIPT_READY: &str = "script: ready";
const SCRIPT_RUNNING: &str = "script: running";
const SCRIPT_PULLING: &str = "script: pulling";
const SCRIPT_PULLED: &str = "script: pulled";
const SCRIPT_FAILED: &str = "script: failed";

/// The results of a round.
pub struct Measured {
    /// Times of the node.
    pub node: NodeTimes,
    /// Times of the script.
    pub script: Times,
}

/// Times in seconds.
pub struct Times {
    /// From power-on until the API server is ready.
    pub api: f64,
    /// From power-on until the first pod runs.
    pub pod: f64,
    /// From the creation of the second pod, whose image is pulled, until it runs.
    pub pull: f64,
}

/// The results of a round for the node.
pub struct NodeTimes {
    /// Until it was HOME, in seconds.
    pub home: f64,
    /// The other times.
    pub times: Times,
    /// The memory, sampled several times.
    pub memory: Vec<Memory>,
}

/// Memory of the node, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Resident memory of Hearth's own processes.
    pub resident: f64,
    /// What is in use of the machine's memory.
    pub used: f64,
}

/// The progress of a round.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// The node or the script starts.
    Begins(&'static str),
    /// One of the round's five parts is complete.
    Done,
    /// A call failed and will be repeated.
    AskingAgain(&'a LabError),
}

/// Receives the progress.
type Observer<'a> = dyn Fn(Step<'_>) + 'a;

/// The configuration of a round.
pub struct Round {
    /// The node's image: with the debug service, and Kubernetes.
    pub node: Image,
    /// The initramfs of the script, used with the node's kernel and disk. It has the authority of the registry.
    pub script: PathBuf,
    /// The registry that both pull from.
    pub registry: Registry,
    /// The operator's tool.
    pub hearthctl: Hearthctl,
    /// Path of kubectl.
    pub kubectl: PathBuf,
    /// The maker of the machines.
    pub lab: Lab,
}

impl Round {
    /// Measures both, each on a new disk; the script first, if they are swapped.
    ///
    /// # Errors
    /// If one of them does not run the pod in time.
    pub async fn run(&self, swapped: bool, told: &Observer<'_>) -> Result<Measured> {
        let round = async {
            let (node, script) = if swapped {
                let script = self.script(told).await?;
                (self.node(told).await?, script)
            } else {
                let node = self.node(told).await?;
                (node, self.script(told).await?)
            };
            Ok(Measured { node, script })
        };
        let round = tokio::time::timeout(BOUND, round).await;
        round.unwrap_or(Err(LabError::Late {
            what: "two pods",
            bound: BOUND,
        }))
    }

    async fn node(&self, told: &Observer<'_>) -> Result<NodeTimes> {
        told(Step::Begins("node"));
        clear(&self.folder())?;
        fs::create_dir_all(self.folder()).map_err(LabError::file("make", &self.folder()))?;
        let owner = Owner::create(&self.folder())?;
        let item = parameters(&self.founding(&owner)?)?;
        let vm = self.machine("node", self.node.direct(), vec![item]).await?;
        let home = vm.reached(Milestone::Home, BOUND).await?.at.as_secs_f64();
        told(Step::Done);
        let runs = self.pod_runs(&vm, told);
        let runs = vm.while_running("a pod that runs", BOUND, runs).await?;
        let pod = vm.started().elapsed().as_secs_f64();
        let api = runs.map_err(|error| LabError::Unexpected {
            wanted: "a running pod",
            found: hearth_api::chain(&error),
            tail: format!("the node's console:\n{}", vm.tail()),
        })?;
        told(Step::Done);
        let memory = weigh(&vm).await?;
        told(Step::Done);
        let created = Instant::now();
        let runs = self.run_pod(pulled(&self.registry), told);
        let runs = vm.while_running("a pod of a pulled image", PULL_BOUND, runs);
        runs.await??;
        let pull = created.elapsed().as_secs_f64();
        told(Step::Done);
        end(vm).await?;
        Ok(NodeTimes {
            home,
            times: Times { api, pod, pull },
            memory,
        })
    }

    /// The parameters of the node. It knows the registry from the start, as the script does. INSECURE, because the
    /// script does not encrypt.
    fn founding(&self, owner: &Owner) -> Result<NodeParameters> {
        let mut configuration = with_storage(StorageSecurityPolicy::NeedsInsecure);
        let pem = self.registry.authority()?;
        let authorities = registries::authorities_from_pem(&pem);
        let kubernetes = configuration.kubernetes.get_or_insert_default();
        kubernetes.registry_authorities = authorities.ok_or_else(|| LabError::Unexpected {
            wanted: "the certificate of the registry's authority in PEM",
            found: pem,
            tail: String::new(),
        })?;
        Ok(owner.parameters(configuration))
    }

    /// Measures the same programs without a node.
    async fn script(&self, told: &Observer<'_>) -> Result<Times> {
        told(Step::Begins("script"));
        let mut boot = self.node.direct();
        if let Boot::Direct { initrd, .. } = &mut boot {
            *initrd = Some(self.script.clone());
        }
        let vm = self.machine("script", boot, Vec::new()).await?;
        let api = script_says(&vm, SCRIPT_READY, BOUND).await?;
        let pod = script_says(&vm, SCRIPT_RUNNING, BOUND).await?;
        let pulling = script_says(&vm, SCRIPT_PULLING, PULL_BOUND).await?;
        let pull = script_says(&vm, SCRIPT_PULLED, PULL_BOUND).await? - pulling;
        end(vm).await?;
        told(Step::Done);
        Ok(Times { api, pod, pull })
    }

    /// The folder of the owner's and the user's files.
    fn folder(&self) -> PathBuf {
        self.lab.folder.join("kubernetes")
    }

    /// A machine with a new disk of the node.
    async fn machine(&self, what: &str, boot: Boot, fw_cfg: Vec<Item>) -> Result<Vm> {
        let build = Build {
            name: format!("kubernetes-{what}"),
            memory_mib: MEMORY,
            boot,
            disk: &self.node.disk,
            disk_bytes: DISK_BYTES,
            ports: &[
                names::PORT_CURATOR,
                names::PORT_KUBERNETES,
                names::PORT_DEBUG,
            ],
            fw_cfg,
        };
        self.lab.start(build).await
    }

    /// The user's steps until the pod runs; returns the time at which the API server was ready, in seconds from
    /// power-on.
    async fn pod_runs(&self, vm: &Vm, told: &Observer<'_>) -> Result<f64> {
        let (curator, api) = (
            forwarded(vm, names::PORT_CURATOR)?,
            forwarded(vm, names::PORT_KUBERNETES)?,
        );
        let folder = self.folder();
        let mut own = self.hearthctl.call(["cluster", "take-ownership"]);
        own.option("--endpoint", curator.to_string())
            .option("--owner-key", crate::owner::key_file(&folder))
            .option("--first-contact-secret", crate::owner::secret_file(&folder));
        tool::run(&own).await?;
        // At first the cluster does not know the addresses of its API servers.
        let words = ["kubernetes", "kubeconfig", "--embed", "--server"];
        let mut write = self.hearthctl.call(words);
        write
            .arg(format!("https://{api}"))
            .option("--output-file", self.kubeconfig());
        patiently(told, async || Ok(tool::run(&write).await?)).await;
        let works = |line: &str| line.contains(API_WORKS);
        let works = vm.wait_for("an API server", BOUND, works).await?;
        let account = r#""name":"default""#;
        self.told("serviceaccounts", "default", account, told).await;
        self.run_pod(preloaded(), told).await?;
        Ok(works.at.as_secs_f64())
    }

    /// Creates a pod, and waits until it runs.
    async fn run_pod(&self, pod: Pod, told: &Observer<'_>) -> Result<()> {
        let file = self.folder().join(format!("{}.json", pod.name));
        fs::write(&file, pod.object.to_string()).map_err(LabError::file("write", &file))?;
        let mut create = self.kubectl(&["create", "--raw", &format!("{NAMESPACE}/pods")]);
        create.option("--filename", &file);
        patiently(told, async || match tool::run(&create).await {
            // The request succeeded, and the answer was lost.
            Err(error) if error.to_string().contains("already exists") => Ok(String::new()),
            created => Ok(created?),
        })
        .await;
        let running = r#""phase":"Running""#;
        self.told("pods", pod.name, running, told).await;
        Ok(())
    }

    /// Watches an object of a kind until `word` appears. A new connection costs the API server more than a waiting one.
    async fn told(&self, kind: &str, name: &str, word: &str, told: &Observer<'_>) {
        let path = format!("{NAMESPACE}/{kind}?watch=1&fieldSelector=metadata.name={name}");
        let follow = self.kubectl(&["get", "--raw", &path]);
        patiently(told, async || Ok(tool::run_until(&follow, word).await?)).await;
    }

    fn kubeconfig(&self) -> PathBuf {
        self.folder().join("kubeconfig")
    }

    fn kubectl(&self, words: &[&str]) -> CommandLine {
        let mut line = CommandLine::new(&self.kubectl);
        line.option("--kubeconfig", self.kubeconfig());
        for word in words {
            line.arg(*word);
        }
        line
    }
}

/// Starts the registry that both pull from, with the image of this archive; its files are in this folder, which is
/// cleared first.
///
/// # Errors
/// If it does not serve, or the archive is something else.
pub async fn registry(program: &Path, folder: &Path, image: &Path) -> Result<Registry> {
    clear(folder)?;
    let registry = Registry::start(program, folder, Access::Anyone).await?;
    let (name, tag) = PULLED;
    registry.add(image, name, tag).await?;
    Ok(registry)
}

/// A pod of the user's; the scheduler has to assign it.
pub struct Pod {
    /// Its name.
    pub name: &'static str,
    /// Its object.
    pub object: Value,
}

/// The first pod, whose image is on the machine.
pub fn preloaded() -> Pod {
    pod("probe", IMAGE, "Never")
}

/// The second pod, whose image is in this registry.
pub fn pulled(registry: &Registry) -> Pod {
    let (name, tag) = PULLED;
    let image = format!("{}/{name}:{tag}", registry.name());
    pod("pulled", &image, "IfNotPresent")
}

fn pod(name: &'static str, image: &str, policy: &str) -> Pod {
    let container = json!({ "name": name, "image": image, "imagePullPolicy": policy });
    let object = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": { "containers": [container] },
    });
    Pod { name, object }
}

/// Repeats until it succeeds; the round has a bound.
async fn patiently<T>(told: &Observer<'_>, attempt: impl AsyncFn() -> Result<T>) {
    while let Err(error) = attempt().await {
        told(Step::AskingAgain(&error));
        tokio::time::sleep(PAUSE).await;
    }
}

/// Seconds from QEMU's start until the script prints the line.
async fn script_says(vm: &Vm, wanted: &'static str, bound: Duration) -> Result<f64> {
    let told = |line: &str| line.starts_with(wanted) || line.starts_with(SCRIPT_FAILED);
    let line = vm.wait_for(wanted, bound, told).await?;
    if line.text.starts_with(SCRIPT_FAILED) {
        return Err(LabError::Unexpected {
            wanted: "the script's programs to keep running",
            found: line.text.to_string(),
            tail: vm.tail().to_string(),
        });
    }
    Ok(line.at.as_secs_f64())
}

/// Memory, as reported by the node.
async fn weigh(vm: &Vm) -> Result<Vec<Memory>> {
    let debug = forwarded(vm, names::PORT_DEBUG)?;
    let mut samples = Vec::new();
    let failed = |call| move |error: tonic::Status| LabError::call(call)(error);
    let unreachable = |error: tonic::transport::Error| {
        failed("connecting to the debug service")(tonic::Status::from_error(Box::new(error)))
    };
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{debug}"));
    let channel = endpoint.map_err(unreachable)?.connect().await;
    let mut client = NodeDebugClient::new(channel.map_err(unreachable)?);
    for _ in 0..WEIGHINGS {
        tokio::time::sleep(PAUSE * 2).await;
        let state = client.get_state(GetStateRequest {}).await;
        let state = state.map_err(failed("GetState"))?.into_inner();
        samples.push(Memory {
            resident: state.resident_bytes as f64,
            used: state.used_bytes as f64,
        });
    }
    Ok(samples)
}
