//! Kubernetes as seen by its users: kubectl, with the kubeconfig that `hearthctl kubernetes kubeconfig` generates.
//!
//! Only users' programs are called here, so that what passes works for users. Requests take effect in Kubernetes after
//! some time, without a notification; so the state is queried until it is as expected, within a bound.

pub mod conformance;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use hearth_api::names;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use serde_json::{Value, json};

use crate::bounds::{self, until_ok};
use crate::node::Running;
use crate::{Outcome, TestCtx, owner};

/// The bundled test image: a busybox that serves HTTP at this port, whose `/cgi-bin/hostname` returns the pod's name.
const IMAGE: &str = "hearth.local/probe:1";
/// The port of its server.
pub const IMAGE_PORT: u16 = 8080;
/// Mount path of a pod's volume.
pub const VOLUME: &str = "/volume";

/// Kubernetes, through one of its API servers.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    kubectl: PathBuf,
    hearthctl: Hearthctl,
    kubeconfig: PathBuf,
    folder: PathBuf,
}

impl Kubernetes {
    /// Through this machine's API server and curator, as the cluster's owner, whose files are in the folder `founder`.
    ///
    /// # Errors
    /// If hearthctl does not succeed within the bound.
    pub async fn at(test: &TestCtx, vm: &Running, founder: &Path) -> anyhow::Result<Self> {
        let server = vm.forwarded(names::PORT_KUBERNETES);
        let server = server.context("the API server's port is not forwarded")?;
        let folder = test.folder().join(format!("kubectl-{}", server.port()));
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let curator = vm.forwarded(names::PORT_CURATOR);
        let curator = curator.context("the curator's port is not forwarded")?;
        let config = folder.join("hearthctl.json");
        let hearthctl = owner::hearthctl(test, config, founder, &[curator.into()]).await?;
        let before = Self {
            kubectl: test.kubernetes()?.kubectl.clone(),
            hearthctl,
            kubeconfig: PathBuf::new(),
            folder,
        };
        before.through(server).await
    }

    /// The same, through this address of an API server.
    ///
    /// # Errors
    /// If hearthctl does not succeed within the bound.
    pub async fn through(&self, server: SocketAddr) -> anyhow::Result<Self> {
        let kubeconfig = self.folder.join(format!("kubeconfig-{}", server.port()));
        let mut write = self.hearthctl.call(["kubernetes", "kubeconfig"]);
        write
            .option("--server", format!("https://{server}"))
            .option("--output-file", &kubeconfig);
        // Fails until a controller has reported its address.
        until_ok("a kubeconfig", bounds::KUBERNETES, || async {
            Ok(tool::run(&write).await?)
        })
        .await?;
        Ok(Self {
            kubeconfig,
            ..self.clone()
        })
    }

    /// Sets (`NAME=VALUE`) or removes (`NAME`) settings of a node.
    ///
    /// # Errors
    /// If they are refused.
    pub async fn node_settings(&self, verb: &str, node: &str, settings: &[&str]) -> Outcome {
        let words = ["node", "setting", verb, node];
        let line = self.hearthctl.call(words.iter().chain(settings).copied());
        tool::run(&line).await?;
        Ok(())
    }

    /// Changes cluster settings (`NAME=VALUE`).
    ///
    /// # Errors
    /// If they are refused.
    pub async fn set(&self, settings: &[&str]) -> Outcome {
        let words = ["cluster", "set"].iter().chain(settings);
        let set = self.hearthctl.call(words.copied());
        let said = tokio::time::timeout(bounds::CALL, tool::run(&set)).await;
        said.with_context(|| format!("{settings:?}: no answer"))??;
        Ok(())
    }

    /// Replaces the key of Secrets, and waits until all Secrets are rewritten.
    ///
    /// # Errors
    /// If they are not within the bound.
    pub async fn rotate_secrets_key(&self) -> Outcome {
        let rotate = self.hearthctl.call(["kubernetes", "rotate-secrets-key"]);
        let said = tokio::time::timeout(bounds::KUBERNETES, tool::run(&rotate)).await;
        said.context("the Secrets are not rewritten")??;
        Ok(())
    }

    /// A command of kubectl, without a time limit.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> CommandLine {
        let mut command = CommandLine::new(&self.kubectl);
        command.option("--kubeconfig", &self.kubeconfig);
        for word in words {
            command.arg(word);
        }
        command
    }

    /// What kubectl prints, once it succeeds.
    ///
    /// # Errors
    /// If it does not within the bound.
    pub async fn answers(&self, words: &[&str]) -> anyhow::Result<String> {
        let what = words.join(" ");
        until_ok(&what, bounds::KUBERNETES, || self.kubectl(words)).await
    }

    /// Waits until a script in a pod prints what satisfies the predicate.
    ///
    /// # Errors
    /// If that times out; the error shows the last output.
    pub async fn says(&self, pod: &str, script: &str, is_it: impl Fn(&str) -> bool) -> Outcome {
        self.prints(&["exec", pod, "--", "sh", "-c", script], is_it)
            .await
    }

    /// Waits until kubectl prints what satisfies the predicate.
    ///
    /// # Errors
    /// If that times out; the error shows the last output.
    pub async fn prints(&self, words: &[&str], is_it: impl Fn(&str) -> bool) -> Outcome {
        until_ok(&words.join(" "), bounds::WORKLOAD, || async {
            let said = self.kubectl(words).await?;
            match is_it(&said) {
                true => Ok(()),
                false => bail!("{said:?}"),
            }
        })
        .await
    }

    /// Runs kubectl; returns its output.
    ///
    /// # Errors
    /// If it fails; with its output.
    pub async fn kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        let command = self.command(&[&["--request-timeout=60s"], words].concat());
        let bound = bounds::CALL * 4;
        let said = tokio::time::timeout(bound, tool::run(&command)).await;
        Ok(said.with_context(|| format!("{command}: no answer within {bound:?}"))??)
    }

    /// Waits until kubectl succeeds.
    ///
    /// # Errors
    /// If it does not within the bound.
    pub async fn succeeds(&self, words: &[&str]) -> Outcome {
        let said = until_ok("kubectl", bounds::KUBERNETES, || self.kubectl(words));
        said.await.map(drop)
    }

    /// Objects of a kind, or one object, by kubectl's arguments.
    ///
    /// # Errors
    /// If it fails.
    pub async fn get(&self, words: &[&str]) -> anyhow::Result<Value> {
        let words = [&["get"], words, &["--output=json"]].concat();
        Ok(serde_json::from_str(&self.kubectl(&words).await?)?)
    }

    /// Creates an object, as soon as Kubernetes accepts it: objects that it depends on may not exist yet.
    ///
    /// # Errors
    /// If it is not accepted within the bound.
    pub async fn create(&self, object: &Value) -> Outcome {
        let path = self.file(object)?;
        let words = ["apply", "--filename", &path];
        let applied = until_ok(&path, bounds::WORKLOAD, || self.kubectl(&words)).await;
        applied.map(drop)
    }

    /// Tries once to create a pod of the test image with a specification that `change` has changed; returns why it is
    /// refused.
    ///
    /// # Errors
    /// If it is not.
    pub async fn refuses(
        &self,
        pod: &str,
        node: &str,
        change: impl FnOnce(&mut Value),
    ) -> anyhow::Result<String> {
        let mut object = probe(pod, node);
        change(&mut object["spec"]);
        let words = ["apply", "--filename", &self.file(&object)?];
        match self.kubectl(&words).await {
            Ok(accepted) => bail!("not refused: {accepted}"),
            Err(refused) => Ok(format!("{refused:#}")),
        }
    }

    /// Writes an object, or a list of some, to a file for kubectl.
    fn file(&self, object: &Value) -> anyhow::Result<String> {
        let named = match &object["items"][0] {
            Value::Null => object,
            first => first,
        };
        let name = named["metadata"]["name"].as_str().context("no name")?;
        let kind = object["kind"].as_str().context("no kind")?;
        let path = self.folder.join(format!("{kind}-{name}.json"));
        fs::write(&path, serde_json::to_vec_pretty(object)?)?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// Queries objects until they satisfy the predicate.
    ///
    /// # Errors
    /// If that times out; the error shows the last result.
    pub async fn until(
        &self,
        wanted: &str,
        bound: Duration,
        words: &[&str],
        holds: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        until_ok(wanted, bound, || async {
            let found = self.get(words).await?;
            match holds(&found) {
                true => Ok(found),
                false => bail!("{found:#}"),
            }
        })
        .await
    }

    /// Waits until exactly these nodes exist, and are Ready.
    ///
    /// # Errors
    /// If that times out.
    pub async fn ready(&self, ids: &[&str]) -> Outcome {
        let mut wanted: Vec<&str> = ids.to_vec();
        wanted.sort_unstable();
        let what = format!("nodes that are Ready: {wanted:?}");
        let all = |nodes: &Value| {
            let nodes = items(nodes);
            let mut names: Vec<&str> = nodes.iter().map(name).collect();
            names.sort_unstable();
            names == wanted && nodes.iter().all(|node| condition(node, "Ready") == "True")
        };
        self.until(&what, bounds::KUBERNETES, &["nodes"], all)
            .await?;
        Ok(())
    }

    /// Starts a pod of the test image on this node, and waits until it runs.
    ///
    /// # Errors
    /// If that times out.
    pub async fn probe(&self, pod: &str, node: &str) -> Outcome {
        self.probe_as(pod, node, |_| ()).await
    }

    /// The same, with a specification that `change` has changed.
    ///
    /// # Errors
    /// If that times out.
    pub async fn probe_as(
        &self,
        pod: &str,
        node: &str,
        change: impl FnOnce(&mut Value),
    ) -> Outcome {
        self.begin(pod, node, change).await?;
        self.runs(pod).await
    }

    /// The same, without waiting until it runs.
    ///
    /// # Errors
    /// If it is not accepted within the bound.
    pub async fn begin(&self, pod: &str, node: &str, change: impl FnOnce(&mut Value)) -> Outcome {
        let mut object = probe(pod, node);
        change(&mut object["spec"]);
        self.create(&object).await
    }

    /// The same, with the volume of a claim at [`VOLUME`].
    ///
    /// # Errors
    /// If that times out.
    pub async fn probe_with(&self, pod: &str, node: &str, claim: &str) -> Outcome {
        self.probe_as(pod, node, |spec| {
            spec["volumes"] = json!([{
                "name": "volume",
                "persistentVolumeClaim": { "claimName": claim },
            }]);
            spec["containers"][0]["volumeMounts"] = json!([{
                "name": "volume",
                "mountPath": VOLUME,
            }]);
        })
        .await
    }

    /// Claims a volume of this size, of the default class, once that exists: an earlier claim would never get it.
    ///
    /// # Errors
    /// If it is not accepted.
    pub async fn claim(&self, name: &str, size: &str) -> Outcome {
        let some = |classes: &Value| !items(classes).is_empty();
        self.until("a class", bounds::KUBERNETES, &["storageclasses"], some)
            .await?;
        self.create(&json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": size } },
            },
        }))
        .await
    }

    /// Waits until Kubernetes reports this about the image of a pod.
    ///
    /// # Errors
    /// If that times out.
    pub async fn says_of_pulls(&self, pod: &str, words: &str) -> Outcome {
        let of_pod = format!("involvedObject.name={pod}");
        let events = ["events", "--field-selector", &of_pod];
        let says = |events: &Value| {
            let all = items(events).iter();
            let messages = all.filter_map(|event| event["message"].as_str());
            messages.clone().any(|message| message.contains(words))
        };
        self.until(words, bounds::WORKLOAD, &events, says).await?;
        Ok(())
    }

    /// Waits until this pod is running and ready.
    ///
    /// # Errors
    /// If that times out.
    pub async fn runs(&self, pod: &str) -> Outcome {
        let what = format!("pod {pod} runs");
        let runs =
            |pod: &Value| pod["status"]["phase"] == "Running" && condition(pod, "Ready") == "True";
        self.until(&what, bounds::WORKLOAD, &["pod", pod], runs)
            .await?;
        Ok(())
    }

    /// The ID of a pod's container, which changes with every start.
    ///
    /// # Errors
    /// If it has none.
    pub async fn container(&self, pod: &str) -> anyhow::Result<String> {
        let object = self.get(&["pod", pod]).await?;
        let id = object["status"]["containerStatuses"][0]["containerID"].as_str();
        id.map(str::to_owned)
            .with_context(|| format!("pod {pod} has no container"))
    }

    /// Creates a service with the name of this pod, which forwards port 80 to it; returns its ClusterIP.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn service(&self, pod: &str) -> anyhow::Result<String> {
        self.create(&json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": pod },
            "spec": {
                "selector": { "app": pod },
                "ports": [{ "port": 80, "targetPort": IMAGE_PORT }],
            },
        }))
        .await?;
        let service = self.get(&["service", pod]).await?;
        let ip = service["spec"]["clusterIP"].as_str();
        ip.map(str::to_owned).context("no ClusterIP")
    }

    /// Waits until `pod` gets an answer from `host` with the name of the answering pod, which must be `expected`.
    ///
    /// # Errors
    /// If that times out.
    pub async fn reaches(&self, pod: &str, host: &str, expected: &str) -> Outcome {
        let what = format!("{pod} reaches {expected} as {host}");
        until_ok(&what, bounds::WORKLOAD, || async {
            let said = self.ask(pod, host).await?;
            match said.trim() == expected {
                true => Ok(()),
                false => bail!("{said:?}"),
            }
        })
        .await
    }

    /// Waits until a connection of `pod` to `host` is refused.
    ///
    /// # Errors
    /// If that times out.
    pub async fn reaches_not(&self, pod: &str, host: &str) -> Outcome {
        let what = format!("{pod} does not reach {host}");
        until_ok(&what, bounds::WORKLOAD, || async {
            match self.ask(pod, host).await {
                Err(error) if format!("{error:#}").contains("No route to host") => Ok(()),
                Err(error) => Err(error),
                Ok(said) => bail!("{said:?}"),
            }
        })
        .await
    }

    async fn ask(&self, pod: &str, host: &str) -> anyhow::Result<String> {
        let url = format!("http://{host}/cgi-bin/hostname");
        let words = [
            "exec", pod, "--", "timeout", "20", "wget", "-q", "-O", "-", &url,
        ];
        self.kubectl(&words).await
    }
}

/// A pod that serves HTTP and returns its name.
fn probe(pod: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": pod, "labels": { "app": pod } },
        "spec": {
            // The scheduler chooses among one node.
            "nodeSelector": { "kubernetes.io/hostname": node },
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "probe",
                "image": IMAGE,
                // The machines' network has no registry.
                "imagePullPolicy": "Never",
            }],
        },
    })
}

/// The objects of a list.
pub fn items(list: &Value) -> &[Value] {
    list["items"].as_array().map_or(&[], Vec::as_slice)
}

/// The name of an object.
pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The status of an object's condition: "True", "False" or "Unknown", or empty.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    let conditions = object["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == kind);
    found.map_or("", |found| found["status"].as_str().unwrap_or_default())
}
