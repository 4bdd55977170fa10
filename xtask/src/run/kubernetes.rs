//! From a cluster that is complete to one whose Kubernetes nodes are Ready.
//!
//! The nodes get their roles from the operator: every one works, and as many control as may be lost one at a time. What a
//! user would do then is done with the user's own tools, `hearthctl kubernetes kubeconfig` and kubectl, so that the line in
//! the end is known to work. Each look asks the cluster what its nodes say of their roles, and Kubernetes what it thinks of
//! its nodes; what is missing is said once, as it changes. The end is that a pod would be taken.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use hearth_api::client::Endpoint;
use hearth_api::names;
use hearth_api::owner as owner_files;
use hearth_api::v1::{self, NodeState};
use serde_json::Value;

use super::fleet::Fleet;
use super::state::{Founding, State};
use super::{Run, VOTERS};
use crate::command::{Cmd, find_program};
use crate::formation::Candidate;
use crate::hearthctl;
use crate::kubernetes::Bundle;
use crate::operator::Operator;
use crate::ui::Ui;

/// Between two looks: kubectl is a process of half a second.
const PAUSE: Duration = Duration::from_secs(1);
/// Beside what the machines take: an API server takes most of a minute to start on an emulated machine, and longer on a
/// busy host.
const BOUND: Duration = Duration::from_secs(1200);

/// Why, with the first controller's last words.
fn not_ready(fleet: &Fleet, why: impl std::fmt::Display) -> anyhow::Error {
    let words = match fleet.vm(0) {
        Ok(vm) => vm.tail().to_string(),
        Err(error) => error.to_string(),
    };
    anyhow!(
        "Kubernetes is not ready: {why}\n\n{words}\n`cargo xtask run` tries again from where it was"
    )
}

/// Kubernetes' client for this machine: the bundle's, or the user's own.
pub fn kubectl(bundle: &Bundle) -> Result<PathBuf> {
    let own = || find_program("kubectl");
    bundle.kubectl.clone().or_else(own).context(
        "a bundle of your own brings no kubectl: install one of its version, so that it is found in PATH",
    )
}

/// The file that kubectl is told by.
pub fn kubeconfig(state: &Path) -> PathBuf {
    hearthctl::folder(state).join("kubeconfig")
}

/// How many nodes are controllers, the first ones: of two, neither could be lost.
fn controllers(nodes: u16) -> u16 {
    if nodes < VOTERS { 1 } else { VOTERS }
}

/// A node, as it is to be.
struct Wanted {
    candidate: Candidate,
    controls: bool,
}

/// What is at work, with nothing borrowed: the machines are listened to meanwhile.
struct Work {
    ui: Ui,
    operator: Operator,
    nodes: Vec<Wanted>,
    hearthctl: PathBuf,
    config: PathBuf,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
    server: SocketAddr,
    told: BTreeMap<String, String>,
}

impl Run<'_> {
    /// Until all nodes that are members are Ready, and a pod would be taken.
    pub(super) async fn kubernetes(
        &self,
        fleet: &mut Fleet,
        founding: &mut Founding,
        kubectl: &Path,
    ) -> Result<()> {
        self.ui.say("the nodes get their Kubernetes roles");
        let work = self.work(fleet, founding, kubectl).await?;
        let work = tokio::time::timeout(BOUND, work.finish());
        tokio::pin!(work);
        let done = loop {
            tokio::select! {
                done = &mut work => break done,
                news = fleet.next() => {
                    let (index, news) = news?;
                    self.heard(fleet, founding, index, news)?;
                }
            }
        };
        match done {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(not_ready(fleet, format_args!("{error:#}"))),
            Err(_) => Err(not_ready(
                fleet,
                format_args!("not within {} s", BOUND.as_secs()),
            )),
        }
    }

    async fn work(&self, fleet: &Fleet, founding: &Founding, kubectl: &Path) -> Result<Work> {
        let key = owner_files::read_key(&self.state.owner_key())?;
        let secret = owner_files::read_first_contact_secret(&self.state.first_contact_secret())?;
        let curators: Vec<Endpoint> = fleet.curators().into_iter().map(Endpoint::from).collect();
        let controllers = controllers(founding.nodes);
        let candidates = self.candidates(fleet, founding)?;
        let nodes = candidates.into_iter().zip(1..);
        let nodes = nodes.map(|(candidate, number)| Wanted {
            candidate,
            controls: number <= controllers,
        });
        let first = &fleet.nodes[0].name;
        let server = fleet.cluster().forwarded(first, names::PORT_KUBERNETES);
        Ok(Work {
            ui: self.ui.clone(),
            operator: Operator::take_ownership(&key, &secret, &curators).await?,
            nodes: nodes.collect(),
            hearthctl: self.hearthctl.clone(),
            config: hearthctl::config(self.state.path()),
            kubectl: kubectl.to_owned(),
            kubeconfig: kubeconfig(self.state.path()),
            server: server.context("the API server's port is not forwarded")?,
            told: BTreeMap::new(),
        })
    }
}

impl Work {
    async fn finish(mut self) -> Result<()> {
        let mut has_access = false;
        loop {
            // Curators and API servers come and go while nodes change their roles: whoever does not answer is asked again.
            match self.operator.nodes().await {
                Ok(nodes) => {
                    self.give_roles(&nodes).await?;
                    if !has_access && self.held(&nodes) {
                        has_access = self.ask_access().await?;
                    }
                    // Not before it is worth asking: an API server that starts has better things to do.
                    let ready = match has_access && self.serves(&nodes) {
                        true => self.kubernetes_nodes().await,
                        false => Err(anyhow!("its API server")),
                    };
                    if self.is_complete(&nodes, ready) && self.takes_pods().await {
                        return Ok(());
                    }
                }
                Err(error) => self.ui.detail(format_args!("asking again: {error:#}")),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The members among the machines, with what the cluster knows of them.
    fn members<'a>(
        &'a self,
        nodes: &'a [v1::Node],
    ) -> impl Iterator<Item = (&'a Wanted, &'a v1::Node)> {
        let member = |wanted: &'a Wanted| Some((wanted, wanted.candidate.node(nodes)?));
        let members = self.nodes.iter().filter_map(member);
        members.filter(|(_, node)| node.state() == NodeState::Up)
    }

    async fn give_roles(&self, nodes: &[v1::Node]) -> Result<()> {
        for (wanted, node) in self.members(nodes) {
            let roles = node.roles.unwrap_or_default();
            let lacks_control = wanted.controls && roles.kubernetes_controller.is_none();
            let lacks_work = roles.kubernetes_worker.is_none();
            if lacks_control || lacks_work {
                let given = self
                    .operator
                    .give_kubernetes_roles(&node.id, lacks_control, lacks_work)
                    .await;
                // A consensus member first; it is about to be one.
                match given {
                    Ok(()) => {
                        let machine = &wanted.candidate.machine;
                        let roles = match (lacks_control, lacks_work) {
                            (true, true) => "controller and worker",
                            (true, false) => "controller",
                            _ => "worker",
                        };
                        self.ui.say(format_args!("  {machine}: Kubernetes {roles}"));
                    }
                    Err(error) => self.ui.detail(format_args!("asking again: {error:#}")),
                }
            }
        }
        Ok(())
    }

    /// Whether there is a controller to ask.
    fn held(&self, nodes: &[v1::Node]) -> bool {
        let mut members = self.members(nodes);
        members.any(|(_, node)| {
            let roles = node.roles.unwrap_or_default();
            roles.kubernetes_controller.is_some()
        })
    }

    /// Whether one of them says that it works.
    fn serves(&self, nodes: &[v1::Node]) -> bool {
        let mut members = self.members(nodes);
        members.any(|(_, node)| {
            let mut conditions = node.status.iter().flat_map(|status| &status.conditions);
            conditions.any(|condition| {
                condition.r#type == names::CONDITION_KUBERNETES_CONTROLLER && condition.met
            })
        })
    }

    /// Lets hearthctl write the file that kubectl is told by. False: not yet.
    async fn ask_access(&self) -> Result<bool> {
        let write = Cmd::new(&self.hearthctl)
            .args(["kubernetes", "kubeconfig", "--server"])
            .arg(format!("https://{}", self.server))
            .arg("--output")
            .arg(&self.kubeconfig)
            .env(hearthctl::CONFIG, &self.config);
        match self.output(write).await {
            Ok(_) => Ok(true),
            Err(error) if hearthctl::may_pass(&error) => {
                self.ui.detail(format_args!("asking again: {error:#}"));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The nodes by Kubernetes' word: what keeps each from being Ready, or nothing.
    async fn kubernetes_nodes(&self) -> Result<BTreeMap<String, Option<String>>> {
        let said = self.kubectl(&["get", "nodes", "--output=json"]).await;
        parse(&said.map_err(|_| anyhow!("its API server"))?)
    }

    /// Whether a pod would be taken. On a new cluster the account that it has by default gets its token a while after the API
    /// server is ready, and none is taken before. Asked without making one, by a name that is nobody's.
    async fn takes_pods(&mut self) -> bool {
        let ask = ["run", "would-be-taken", "--image=none", "--dry-run=server"];
        let taken = self.kubectl(&ask).await.is_ok();
        if !taken {
            self.tell("pods", "… waiting until one would be taken".to_owned());
        }
        taken
    }

    /// What kubectl says; why it failed is a detail, for it is asked again.
    async fn kubectl(&self, words: &[&str]) -> Result<String> {
        let kubectl = Cmd::new(&self.kubectl).arg("--kubeconfig");
        let kubectl = kubectl.arg(&self.kubeconfig).arg("--request-timeout=20s");
        let said = self.output(kubectl.args(words)).await;
        said.inspect_err(|error| self.ui.detail(format_args!("asking again: {error:#}")))
    }

    async fn output(&self, cmd: Cmd) -> Result<String> {
        let ui = self.ui.clone();
        Ok(tokio::task::spawn_blocking(move || cmd.output(&ui)).await??)
    }

    /// Whether all is as it is to be; says what is not, where that is new.
    fn is_complete(
        &mut self,
        nodes: &[v1::Node],
        ready: Result<BTreeMap<String, Option<String>>>,
    ) -> bool {
        let mut missing = Vec::new();
        for (wanted, node) in self.members(nodes) {
            let machine = wanted.candidate.machine.clone();
            let ill = unmet(node).or_else(|| match &ready {
                Ok(ready) => match ready.get(&node.id) {
                    Some(None) => None,
                    Some(Some(why)) => Some(why.clone()),
                    None => Some("its kubelet".to_owned()),
                },
                Err(error) => Some(error.to_string()),
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

    /// Says it if it is new.
    fn tell(&mut self, whose: &str, what: String) {
        if self.told.get(whose) != Some(&what) {
            self.ui.say(format_args!("  {whose}  {what}"));
            self.told.insert(whose.to_owned(), what);
        }
    }
}

/// What a node says of its roles that are not met.
fn unmet(node: &v1::Node) -> Option<String> {
    let status = node.status.as_ref()?;
    let mut conditions = status.conditions.iter();
    let unmet = conditions.find(|condition| !condition.met)?;
    Some(format!("{} ({})", unmet.r#type, unmet.message))
}

fn parse(json: &str) -> Result<BTreeMap<String, Option<String>>> {
    let list: Value = serde_json::from_str(json).context("kubectl's nodes")?;
    let Some(items) = list["items"].as_array() else {
        bail!("kubectl's nodes: no list");
    };
    let node = |node: &Value| {
        let name = node["metadata"]["name"].as_str()?.to_owned();
        let conditions = node["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let ready = conditions.find(|condition| condition["type"] == "Ready");
        let why = match ready {
            Some(ready) if ready["status"] == "True" => None,
            Some(ready) => Some(ready["message"].as_str().unwrap_or("Ready").to_owned()),
            None => Some("its kubelet's first word".to_owned()),
        };
        Some((name, why))
    };
    Ok(items.iter().filter_map(node).collect())
}

/// The first words for kubectl, as they are typed in a shell.
pub fn line(state: &State, kubectl: &Path) -> String {
    let kubeconfig = kubeconfig(state.path());
    let shown = crate::target::shown;
    format!("{} --kubeconfig {}", shown(kubectl), shown(&kubeconfig))
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
