//! The owner's first steps with a node that is HOME, through hearthctl: take ownership, then query it.
//!
//! The owner's actions use hearthctl rather than calls of this process, so that every successful `run` also shows that
//! hearthctl works.
//!
//! hearthctl also gets the host addresses of each node's ports, because the addresses that the cluster knows are those
//! of an emulated network. Every run sets them again, since each has a network of its own with other ports. A machine
//! that is started again later keeps its address and its ports: they belong to its slot in the network.

use std::fmt;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_qemu::command::CommandLine;

use crate::error::shown;
use crate::owner::{key_file, recovery_key_file, secret_file};
use crate::tool::{self, ToolError};
use crate::{LabError, Result};

/// Between two calls.
const PAUSE: Duration = Duration::from_millis(500);

/// Name of the context in hearthctl's configuration.
const CONTEXT: &str = "run";

/// hearthctl's folder in a cluster's state folder.
pub fn folder(state: &Path) -> PathBuf {
    state.join("hearthctl")
}

/// hearthctl with a contexts file.
#[derive(Clone, Debug)]
pub struct Hearthctl {
    /// Path of the program.
    pub program: PathBuf,
    /// Path of its contexts file.
    pub config: PathBuf,
}

impl Hearthctl {
    /// The contexts file in a cluster's state folder.
    pub fn config_in(state: &Path) -> PathBuf {
        folder(state).join("config.json")
    }

    /// A command line of it.
    pub fn call<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> CommandLine {
        let mut line = CommandLine::new(&self.program);
        line.option("--config", &self.config);
        for word in words {
            line.arg(word);
        }
        line
    }

    /// The command line that takes ownership at these curators, with the owner's files in this folder.
    pub fn take_ownership(
        &self,
        name: &str,
        owner: &Path,
        curators: &[impl fmt::Display],
    ) -> CommandLine {
        let mut line = self.call(["cluster", "take-ownership", "--name", name]);
        for curator in curators {
            line.option("--endpoint", curator.to_string());
        }
        line.option("--owner-key", key_file(owner));
        line.option("--first-contact-secret", secret_file(owner));
        line
    }

    /// Connects to an address of a context by another one.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn route(
        &self,
        context: &str,
        address: SocketAddrV4,
        host: SocketAddr,
    ) -> Result<(), ToolError> {
        let mut line = self.call(["--context", context, "context", "route"]);
        line.arg(address.to_string()).arg(host.to_string());
        tool::run(&line).await?;
        Ok(())
    }

    /// Sets the routes of the context of a run, which must exist.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn set_routes(&self, routes: &[(SocketAddrV4, SocketAddr)]) -> Result<(), ToolError> {
        for (address, host) in routes {
            self.route(CONTEXT, *address, *host).await?;
        }
        Ok(())
    }
}

/// What a user types to unlock the cluster with the owner's files in this folder. Without a context its unlock ports on
/// this host are named.
pub fn unlock_command(owner: &Path, ports: &[SocketAddr]) -> String {
    let mut command = "cargo xtask ctl -- cluster unlock".to_owned();
    for port in ports {
        command.push_str(&format!(" --endpoint {port}"));
    }
    let files = [
        ("--owner-key", key_file(owner)),
        ("--recovery-key", recovery_key_file(owner)),
    ];
    for (option, file) in files {
        command.push_str(&format!(" {option} {}", shown(&file).display()));
    }
    command
}

/// Whether a failed call should be repeated, by its exit code: 1 means that the server returned an error, 3 that it did
/// not answer. Both can be temporary while the node starts.
pub fn may_pass(error: &ToolError) -> bool {
    matches!(error.code(), Some(1 | 3))
}

/// The used fields of a node in `node list -o json`.
#[derive(serde::Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Node ID.
    pub id: String,
    /// `HEALTHY`, `UNKNOWN` or `TIMEOUT`.
    pub health: String,
    /// The cluster state that the node itself reported, if it has.
    pub cluster_state: Option<String>,
}

impl Node {
    /// Parses the tool's output.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn list(json: &str) -> Result<Vec<Node>> {
        serde_json::from_str(json).map_err(|source| LabError::Output {
            what: "cannot parse the output of `hearthctl node list -o json`",
            source,
        })
    }

    /// Whether the node is healthy and HOME.
    pub fn is_well(&self) -> bool {
        self.health == "HEALTHY" && self.cluster_state.as_deref() == Some("HOME")
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.cluster_state.as_deref().unwrap_or("not reported yet");
        write!(f, "{}: {}, cluster state {state}", self.id, self.health)
    }
}

/// The owner of a run's cluster, using hearthctl.
#[derive(Clone, Debug)]
pub struct Owning {
    /// The tool.
    pub tool: Hearthctl,
    /// The folder of the owner's files.
    pub owner: PathBuf,
    /// The addresses of the curators on this host.
    pub curators: Vec<SocketAddr>,
    /// The nodes' ports: the address in the cluster's network, and the one on the host.
    pub routes: Vec<(SocketAddrV4, SocketAddr)>,
    /// Whether hearthctl has these routes.
    pub routed: bool,
    /// The addresses of the curators when ownership was last taken.
    pub owned_at: Vec<SocketAddr>,
    /// The time of the first call.
    pub asked: Option<Instant>,
}

/// The progress of the owner.
#[derive(Debug)]
pub enum Progress {
    /// The context exists, with these addresses.
    Owned(Vec<SocketAddr>),
    /// The node is HOME and healthy, according to the cluster.
    Well {
        /// Time since the first call.
        took: Duration,
    },
    /// Not yet; what is missing now.
    NotYet(String),
}

impl Owning {
    /// Takes the next step. An error is permanent.
    pub async fn next(mut self) -> (Owning, Result<Progress>) {
        if self.asked.is_some() {
            tokio::time::sleep(PAUSE).await;
        }
        let asked = *self.asked.get_or_insert_with(Instant::now);
        // A context stores addresses, and this time the ports may be others; taking ownership again is harmless.
        let owned = self.is_owned();
        let output = self.step(owned).await;
        self.routed |= output.is_ok();
        let progress = match output {
            Err(error) if may_pass(&error) => {
                let answer = format!("a successful call (last error: {})", error.first_line());
                Ok(Progress::NotYet(answer))
            }
            Err(error) => Err(error.into()),
            Ok(_) if !owned => {
                self.owned_at.clone_from(&self.curators);
                Ok(Progress::Owned(self.curators.clone()))
            }
            Ok(json) => judge(&json, asked.elapsed()),
        };
        (self, progress)
    }

    /// Takes ownership and sets the routes, or lists the nodes.
    async fn step(&self, owned: bool) -> Result<String, ToolError> {
        let mut said = String::new();
        if !owned {
            let take = self
                .tool
                .take_ownership(CONTEXT, &self.owner, &self.curators);
            tool::run(&take).await?;
        }
        if !self.routed {
            self.tool.set_routes(&self.routes).await?;
        }
        if owned {
            said = tool::run(&self.tool.call(["node", "list", "--output", "json"])).await?;
        }
        Ok(said)
    }

    /// Whether the context exists, with the current addresses of the curators.
    pub fn is_owned(&self) -> bool {
        self.owned_at == self.curators && self.tool.config.exists()
    }
}

fn judge(json: &str, took: Duration) -> Result<Progress> {
    let nodes = Node::list(json)?;
    Ok(match &nodes[..] {
        [node] if node.is_well() => Progress::Well { took },
        [node] => Progress::NotYet(format!("HOME and HEALTHY ({node})")),
        nodes => Progress::NotYet(format!("one node in the list (got {})", nodes.len())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_healthy_node_is_what_is_wanted() {
        let well = r#"{"id":"a","health":"HEALTHY","cluster_state":"HOME"}"#;
        let ill = r#"{"id":"a","health":"UNKNOWN","cluster_state":"HOME"}"#;
        let judge = |nodes: &[&str]| {
            super::judge(&format!("[{}]", nodes.join(",")), Duration::ZERO).unwrap()
        };
        assert!(matches!(judge(&[well]), Progress::Well { .. }));
        for nodes in [&[][..], &[ill], &[well, well]] {
            assert!(matches!(judge(nodes), Progress::NotYet(_)));
        }
    }

    #[tokio::test]
    async fn routes_are_told_once_in_every_run_and_before_the_nodes_are_asked() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let (tool, heard) = (folder.path().join("tool"), folder.path().join("heard"));
        let script = format!(
            "#!/bin/sh\nshift 2\necho \"$*\" >> {}\n[ $1 != node ] || echo '[]'\n",
            heard.display()
        );
        std::fs::write(&tool, script).unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        let config = folder.path().join("config.json");
        std::fs::write(&config, "").unwrap();
        let route = |last: u8, port: u16| {
            let address = SocketAddrV4::new([10, 77, 0, last].into(), 7836);
            (address, SocketAddr::from(([127, 0, 0, 1], port)))
        };
        let curators = vec![SocketAddr::from(([127, 0, 0, 1], 1))];
        let tool = Hearthctl {
            program: tool,
            config,
        };
        let owner = |owned_at| Owning {
            tool: tool.clone(),
            owner: folder.path().to_owned(),
            curators: curators.clone(),
            routes: vec![route(11, 2), route(12, 3)],
            routed: false,
            owned_at,
            asked: None,
        };
        let told = "--context run context route 10.77.0.11:7836 127.0.0.1:2\n\
                    --context run context route 10.77.0.12:7836 127.0.0.1:3\n";
        let list = "node list --output json\n";
        let said = || {
            let said = std::fs::read_to_string(&heard).unwrap();
            std::fs::remove_file(&heard).unwrap();
            said
        };

        // The curators have other ports, so ownership is taken again.
        let (new, progress) = owner(Vec::new()).next().await;
        assert!(matches!(progress, Ok(Progress::Owned(_))));
        let (first, rest) = said()
            .split_once('\n')
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .unwrap();
        assert!(first.starts_with("cluster take-ownership --name run --endpoint 127.0.0.1:1 "));
        assert_eq!(rest, told);
        drop(new.next().await);
        assert_eq!(said(), list);

        // The curators' addresses are unchanged; those of the nodes may not be.
        drop(owner(curators.clone()).next().await);
        assert_eq!(said(), format!("{told}{list}"));
    }

    #[test]
    fn the_command_names_what_the_context_does_not_know() {
        let owner = Path::new("/state");
        let files = "--owner-key /state/owner-key.pem --recovery-key /state/recovery-key";
        assert_eq!(
            unlock_command(owner, &[]),
            format!("cargo xtask ctl -- cluster unlock {files}")
        );
        assert_eq!(
            unlock_command(owner, &["127.0.0.1:1".parse().unwrap()]),
            format!("cargo xtask ctl -- cluster unlock --endpoint 127.0.0.1:1 {files}")
        );
    }

    async fn failed(script: &str) -> ToolError {
        let mut line = CommandLine::new("sh");
        line.option("-c", script);
        tool::run(&line).await.unwrap_err()
    }

    #[tokio::test]
    async fn the_tools_own_words_are_the_reason() {
        let error = failed("echo 'hearthctl: cannot' >&2; echo more >&2; exit 3").await;
        assert_eq!(error.first_line(), "hearthctl: cannot");
    }

    #[tokio::test]
    async fn only_silence_and_answers_may_pass() {
        for (code, passes) in [(1, true), (2, false), (3, true), (4, false)] {
            let error = failed(&format!("exit {code}")).await;
            assert_eq!(may_pass(&error), passes, "{code}");
        }
        assert!(!may_pass(&failed("kill $$").await));
    }

    #[test]
    fn a_node_is_well_when_both_say_so() {
        let list = |health: &str, state: &str| {
            let json = format!(
                r#"[{{"id":"hearth-1","health":"{health}","cluster_state":{state},"more":1}}]"#
            );
            Node::list(&json).unwrap().remove(0)
        };
        assert!(list("HEALTHY", r#""HOME""#).is_well());
        assert!(!list("UNKNOWN", r#""HOME""#).is_well());
        assert!(!list("HEALTHY", r#""SPLIT""#).is_well());
        let silent = list("HEALTHY", "null");
        assert!(!silent.is_well());
        assert!(silent.to_string().contains("not reported yet"));
        assert!(Node::list("{}").is_err());
    }
}
