//! From a complete cluster to one whose Kubernetes nodes are Ready.
//!
//! The nodes get their roles from the operator: all of them are workers, and as many are controllers as are needed for
//! losing one at a time. The further steps use the user's own tools, `hearthctl kubernetes kubeconfig` and kubectl, so
//! that the command line that is printed in the end is known to work. Each pass reads the nodes' conditions from the
//! cluster and the nodes' status from Kubernetes; what is missing is reported when it changes. It ends when a pod would
//! be admitted.

use std::collections::BTreeMap;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::names;
use hearth_api::v1::{self, NodeState};
use hearth_operator::Operator;
use hearth_qemu::command::CommandLine;
use serde_json::Value;

use crate::events::{Event, Observer};
use crate::fleet::Machines;
use crate::formation::{Candidate, VOTERS};
use crate::hearthctl::{self, Hearthctl, may_pass};
use crate::record::ClusterRecord;
use crate::session::Session;
use crate::{LabError, Result, machines, tool};

/// Between two passes: each kubectl process takes half a second.
const PAUSE: Duration = Duration::from_secs(1);
/// In addition to the bound for the machines: an API server takes most of a minute to start on an emulated machine, and
/// longer on a busy host.
const BOUND: Duration = Duration::from_secs(1200);

/// What is missing if no API server answers.
const API_SERVER: &str = "its API server";

/// Path of the kubeconfig.
pub fn kubeconfig(state: &Path) -> PathBuf {
    hearthctl::folder(state).join("kubeconfig")
}

/// The error, with the last console lines of the first controller.
fn not_ready(fleet: &Machines, why: String) -> LabError {
    let words = match fleet.vm(0) {
        Ok(vm) => vm.tail().to_string(),
        Err(error) => error.to_string(),
    };
    LabError::NoKubernetes { why, words }
}

/// Number of controllers, the first nodes of the cluster. Of two, neither could be lost.
fn controllers(nodes: u16) -> u16 {
    if nodes < VOTERS { 1 } else { VOTERS }
}

/// The requested state of a node.
struct Wanted {
    candidate: Candidate,
    controls: bool,
}

/// Why each node is not Ready according to Kubernetes, or None; by node ID.
type Readiness = BTreeMap<String, Option<String>>;

/// The state of this task. It borrows nothing, because the consoles are read meanwhile.
struct Work {
    observer: Arc<dyn Observer>,
    operator: Operator,
    nodes: Vec<Wanted>,
    hearthctl: Hearthctl,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
    told: BTreeMap<String, String>,
}

impl Session<'_> {
    /// Runs until all nodes that are members are Ready, and a pod would be admitted.
    ///
    /// # Errors
    /// If a machine fails, or the bound is exceeded.
    pub async fn kubernetes(
        &self,
        fleet: &mut Machines,
        record: &mut ClusterRecord,
        kubectl: &Path,
    ) -> Result<()> {
        self.tell(&Event::KubernetesBegins);
        let work = self.work(fleet, record, kubectl).await?;
        let work = tokio::time::timeout(BOUND, work.finish());
        tokio::pin!(work);
        let done = loop {
            tokio::select! {
                done = &mut work => break done,
                news = fleet.next() => {
                    let (index, news) = news?;
                    self.heard(fleet, record, index, news)?;
                }
            }
        };
        match done {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(not_ready(fleet, hearth_api::chain(&error))),
            Err(_) => {
                let why = format!("timed out after {} s", BOUND.as_secs());
                Err(not_ready(fleet, why))
            }
        }
    }

    async fn work(&self, fleet: &Machines, record: &ClusterRecord, kubectl: &Path) -> Result<Work> {
        let controllers = controllers(record.nodes);
        let nodes = self.candidates(fleet, record)?.into_iter().zip(1..);
        let nodes = nodes.map(|(candidate, number)| Wanted {
            candidate,
            controls: number <= controllers,
        });
        self.hearthctl
            .set_routes(&self.api_servers(fleet).await?)
            .await?;
        Ok(Work {
            observer: self.observer.clone(),
            operator: self.asker(fleet)?.connect().await?,
            nodes: nodes.collect(),
            hearthctl: self.hearthctl.clone(),
            kubectl: kubectl.to_owned(),
            kubeconfig: kubeconfig(self.state.path()),
            told: BTreeMap::new(),
        })
    }

    /// The addresses of the API servers in the machines' network, the virtual one included, and those on the host.
    async fn api_servers(&self, fleet: &Machines) -> Result<Vec<(SocketAddrV4, SocketAddr)>> {
        let mut servers = fleet.routes_to(&[names::PORT_KUBERNETES]);
        if let Some(network) = fleet.cluster().network() {
            let address = machines::api_address();
            let host = network.forward_shared(address, names::PORT_KUBERNETES);
            let host = host.await?;
            servers.push((SocketAddrV4::new(address, names::PORT_KUBERNETES), host));
        }
        Ok(servers)
    }
}

impl Work {
    async fn finish(mut self) -> Result<()> {
        let mut has_access = false;
        loop {
            // Curators and API servers restart while nodes change their roles: calls that fail are repeated.
            let nodes = self.operator.nodes().await;
            match nodes.map_err(LabError::call("GetNodes")) {
                Ok(nodes) => {
                    self.give_roles(&nodes).await;
                    if !has_access && self.held(&nodes) {
                        has_access = self.ask_access().await?;
                    }
                    // Not earlier than useful: calls would delay an API server that is starting.
                    let ready = match has_access && self.serves(&nodes) {
                        true => self.kubernetes_nodes().await,
                        false => None,
                    };
                    if self.is_complete(&nodes, ready) && self.takes_pods().await {
                        return Ok(());
                    }
                }
                Err(error) => self.again(&error),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn again(&self, error: &LabError) {
        self.observer.event(&Event::AskingAgain(error));
    }

    /// The members among the machines, with their nodes in the cluster's list.
    fn members<'a>(
        &'a self,
        nodes: &'a [v1::Node],
    ) -> impl Iterator<Item = (&'a Wanted, &'a v1::Node)> {
        let member = |wanted: &'a Wanted| Some((wanted, wanted.candidate.node(nodes)?));
        let members = self.nodes.iter().filter_map(member);
        members.filter(|(_, node)| node.state() == NodeState::Up)
    }

    async fn give_roles(&self, nodes: &[v1::Node]) {
        for (wanted, node) in self.members(nodes) {
            let roles = node.roles.unwrap_or_default();
            let lacks_control = wanted.controls && roles.kubernetes_controller.is_none();
            let lacks_work = roles.kubernetes_worker.is_none();
            if !lacks_control && !lacks_work {
                continue;
            }
            let given = self
                .operator
                .give_kubernetes_roles(&node.id, lacks_control, lacks_work)
                .await;
            // A consensus member first; it is about to become one.
            match given.map_err(LabError::call("UpdateNodeRoles")) {
                Ok(()) => self.observer.event(&Event::KubernetesRoles {
                    machine: &wanted.candidate.machine,
                    controller: lacks_control,
                    worker: lacks_work,
                }),
                Err(error) => self.again(&error),
            }
        }
    }

    /// Whether any node is a controller.
    fn held(&self, nodes: &[v1::Node]) -> bool {
        let mut members = self.members(nodes);
        members.any(|(_, node)| {
            let roles = node.roles.unwrap_or_default();
            roles.kubernetes_controller.is_some()
        })
    }

    /// Whether any controller reports that it is ready.
    fn serves(&self, nodes: &[v1::Node]) -> bool {
        let mut members = self.members(nodes);
        members.any(|(_, node)| {
            let mut conditions = node.status.iter().flat_map(|status| &status.conditions);
            conditions.any(|condition| {
                condition.r#type == names::CONDITION_KUBERNETES_CONTROLLER && condition.met
            })
        })
    }

    /// Makes hearthctl write the kubeconfig. False: not possible yet.
    async fn ask_access(&self) -> Result<bool> {
        let mut write = self.hearthctl.call(["kubernetes", "kubeconfig"]);
        write.option("--output-file", &self.kubeconfig);
        match tool::run(&write).await {
            Ok(_) => Ok(true),
            Err(error) if may_pass(&error) => {
                self.again(&error.into());
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The nodes' status according to Kubernetes; None if it cannot be read.
    async fn kubernetes_nodes(&self) -> Option<Readiness> {
        let said = self
            .kubectl(&["get", "nodes", "--output=json"])
            .await
            .ok()?;
        let nodes = parse(&said).map_err(|source| LabError::Output {
            what: "cannot parse the output of `kubectl get nodes`",
            source,
        });
        nodes.inspect_err(|error| self.again(error)).ok()
    }

    /// Whether a pod would be admitted. On a new cluster the default service account exists some time after the API
    /// server is ready, and no pod is admitted before. Asked by a dry run, with an unused name.
    async fn takes_pods(&mut self) -> bool {
        let ask = ["run", "would-be-taken", "--image=none", "--dry-run=server"];
        let taken = self.kubectl(&ask).await.is_ok();
        if !taken {
            self.tell("pods", "… waiting for pod admission".to_owned());
        }
        taken
    }

    /// Runs kubectl; a failure is only reported as a detail, since the call is repeated.
    async fn kubectl(&self, words: &[&str]) -> Result<String> {
        let mut line = CommandLine::new(&self.kubectl);
        line.option("--kubeconfig", &self.kubeconfig);
        line.arg("--request-timeout=20s");
        for word in words {
            line.arg(word);
        }
        let said = tool::run(&line).await.map_err(LabError::from);
        said.inspect_err(|error| self.again(error))
    }

    /// Whether everything is as requested; reports changes in what is not.
    fn is_complete(&mut self, nodes: &[v1::Node], ready: Option<Readiness>) -> bool {
        let mut missing = Vec::new();
        for (wanted, node) in self.members(nodes) {
            let machine = wanted.candidate.machine.clone();
            let ill = unmet(node).or_else(|| match &ready {
                Some(ready) => match ready.get(&node.id) {
                    Some(None) => None,
                    Some(Some(why)) => Some(why.clone()),
                    None => Some("its kubelet".to_owned()),
                },
                None => Some(API_SERVER.to_owned()),
            });
            missing.push((machine, ill));
        }
        let complete = !missing.is_empty() && missing.iter().all(|(_, ill)| ill.is_none());
        for (machine, ill) in missing {
            let what = match &ill {
                Some(ill) => format!("… waiting for {ill}"),
                None => "Ready".to_owned(),
            };
            self.tell(&machine, what);
        }
        complete
    }

    /// Reports the status if it has changed.
    fn tell(&mut self, whose: &str, what: String) {
        if self.told.get(whose) != Some(&what) {
            self.observer.event(&Event::Kubernetes {
                machine: whose,
                how: &what,
            });
            self.told.insert(whose.to_owned(), what);
        }
    }
}

/// The first role condition of a node that is not met.
fn unmet(node: &v1::Node) -> Option<String> {
    let status = node.status.as_ref()?;
    let mut conditions = status.conditions.iter();
    let unmet = conditions.find(|condition| !condition.met)?;
    Some(format!("{} ({})", unmet.r#type, unmet.message))
}

fn parse(json: &str) -> serde_json::Result<Readiness> {
    #[derive(serde::Deserialize)]
    struct List {
        items: Vec<Value>,
    }
    let list: List = serde_json::from_str(json)?;
    let node = |node: &Value| {
        let name = node["metadata"]["name"].as_str()?.to_owned();
        let conditions = node["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let ready = conditions.find(|condition| condition["type"] == "Ready");
        let why = match ready {
            Some(ready) if ready["status"] == "True" => None,
            Some(ready) => Some(ready["message"].as_str().unwrap_or("Ready").to_owned()),
            None => Some("the first status of its kubelet".to_owned()),
        };
        Some((name, why))
    };
    Ok(list.items.iter().filter_map(node).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_ready_or_say_why_not() {
        let json = r#"{"items":[
            {"metadata":{"name":"a"},"status":{"conditions":[
                {"type":"MemoryPressure","status":"False"},{"type":"Ready","status":"True"}]}},
            {"metadata":{"name":"b"},"status":{"conditions":[
                {"type":"Ready","status":"False","message":"no network"}]}},
            {"metadata":{"name":"c"},"status":{}}]}"#;
        let nodes = parse(json).unwrap();
        assert_eq!(nodes["a"], None);
        assert_eq!(nodes["b"].as_deref(), Some("no network"));
        assert!(nodes["c"].is_some());
        assert!(parse("[]").is_err() && parse("").is_err());
    }

    #[test]
    fn one_controller_may_be_lost_where_there_are_three() {
        let found: Vec<u16> = (1..=5).map(controllers).collect();
        assert_eq!(found, [1, 1, 3, 3, 3]);
    }
}
