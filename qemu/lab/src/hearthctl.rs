//! What the owner does with a node that has come home: take ownership, then look at it, through hearthctl.
//!
//! What an owner does is done by the tool that owners have, not by calls of our own: that it works beside `run` is then
//! known whenever `run` works.
//!
//! hearthctl is told as well where each node's own port is found on the host, for the addresses that the cluster knows are
//! those of an emulated network. Every run tells it anew, since each has a network of its own, with other ports. A machine
//! that is started again later keeps both its address and its ports: they belong to its place in the network.

use std::fmt;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_qemu::command::CommandLine;

use crate::owner::{key_file, secret_file};
use crate::tool::{self, ToolError};
use crate::{LabError, Result};

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(500);

/// The context's name in hearthctl's configuration.
const CONTEXT: &str = "run";

/// Its folder among what is kept of a cluster.
pub fn folder(state: &Path) -> PathBuf {
    state.join("hearthctl")
}

/// The operator's tool with a contexts file.
#[derive(Clone, Debug)]
pub struct Hearthctl {
    /// The program.
    pub program: PathBuf,
    /// Its contexts file.
    pub config: PathBuf,
}

impl Hearthctl {
    /// The contexts file that is kept with a cluster.
    pub fn config_in(state: &Path) -> PathBuf {
        folder(state).join("config.json")
    }

    /// A call of it.
    pub fn call<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> CommandLine {
        let mut line = CommandLine::new(&self.program);
        line.option("--config", &self.config);
        for word in words {
            line.arg(word);
        }
        line
    }

    /// The call that takes ownership at these curators, with the owner's files in this folder.
    pub fn take_ownership(&self, name: &str, owner: &Path, curators: &[SocketAddr]) -> CommandLine {
        let mut line = self.call(["cluster", "take-ownership", "--name", name]);
        for curator in curators {
            line.option("--endpoint", curator.to_string());
        }
        line.option("--owner-key", key_file(owner));
        line.option("--first-contact-secret", secret_file(owner));
        line
    }
}

/// Why a call of the tool failed, by its exit code: 1 is an answer that was an error, 3 no answer. Both may pass when the
/// node is further.
pub fn may_pass(error: &ToolError) -> bool {
    matches!(error.code(), Some(1 | 3))
}

/// What `node list -o json` says of a node, as far as it matters here.
#[derive(serde::Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Node ID.
    pub id: String,
    /// `HEALTHY`, `UNKNOWN` or `TIMEOUT`.
    pub health: String,
    /// The cluster as the node itself sees it, once it has said so.
    pub cluster_state: Option<String>,
}

impl Node {
    /// Reads the tool's output.
    ///
    /// # Errors
    /// If it is something else.
    pub fn list(json: &str) -> Result<Vec<Node>> {
        serde_json::from_str(json).map_err(|source| LabError::Output {
            what: "`hearthctl node list -o json` is not understood",
            source,
        })
    }

    /// What it takes to call the cluster well.
    pub fn is_well(&self) -> bool {
        self.health == "HEALTHY" && self.cluster_state.as_deref() == Some("HOME")
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.cluster_state.as_deref().unwrap_or("not told yet");
        write!(f, "{}: {}, cluster state {state}", self.id, self.health)
    }
}

/// The owner of a run's cluster, by the tool.
#[derive(Clone, Debug)]
pub struct Owning {
    /// The tool.
    pub tool: Hearthctl,
    /// Where the owner's files are.
    pub owner: PathBuf,
    /// Where the curators are found from here.
    pub curators: Vec<SocketAddr>,
    /// Where the nodes themselves are asked: the address in the cluster's network, and the one on the host.
    pub routes: Vec<(SocketAddrV4, SocketAddr)>,
    /// Whether hearthctl knows these routes.
    pub routed: bool,
    /// Where the curators were when ownership was taken last.
    pub owned_at: Vec<SocketAddr>,
    /// When the first question was asked.
    pub asked: Option<Instant>,
}

/// How far the owner has come.
#[derive(Debug)]
pub enum Progress {
    /// The context is there, and points at these addresses.
    Owned(Vec<SocketAddr>),
    /// The node is HOME and healthy, by its cluster's word.
    Well {
        /// Since the first question.
        took: Duration,
    },
    /// It may be well later; what is missing now.
    NotYet(String),
}

impl Owning {
    /// The next step. An error is one that waiting does not mend.
    pub async fn next(mut self) -> (Owning, Result<Progress>) {
        if self.asked.is_some() {
            tokio::time::sleep(PAUSE).await;
        }
        let asked = *self.asked.get_or_insert_with(Instant::now);
        // A context remembers addresses, and the ports may be others this time; taking ownership again is harmless.
        let owned = self.is_owned();
        let output = self.step(owned).await;
        self.routed |= output.is_ok();
        let progress = match output {
            Err(error) if may_pass(&error) => {
                let answer = format!("an answer ({})", error.first_line());
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

    /// Takes ownership, or lists the nodes; in between, the routes.
    async fn step(&self, owned: bool) -> Result<String, ToolError> {
        let mut said = String::new();
        if !owned {
            let take = self
                .tool
                .take_ownership(CONTEXT, &self.owner, &self.curators);
            tool::run(&take).await?;
        }
        if !self.routed {
            for (address, host) in &self.routes {
                let words = ["--context", CONTEXT, "context", "route"];
                let mut tell = self.tool.call(words);
                tell.arg(address.to_string()).arg(host.to_string());
                tool::run(&tell).await?;
            }
        }
        if owned {
            said = tool::run(&self.tool.call(["node", "list", "--output", "json"])).await?;
        }
        Ok(said)
    }

    /// Whether the context is there, and points where the curators are.
    pub fn is_owned(&self) -> bool {
        self.owned_at == self.curators && self.tool.config.exists()
    }
}

fn judge(json: &str, took: Duration) -> Result<Progress> {
    let nodes = Node::list(json)?;
    Ok(match &nodes[..] {
        [node] if node.is_well() => Progress::Well { took },
        [node] => Progress::NotYet(format!("HOME and HEALTHY ({node})")),
        nodes => Progress::NotYet(format!("one node ({} are listed)", nodes.len())),
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

        // The ports of the curators are others, so ownership is taken again.
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

        // They are what they were; those of the nodes may not be.
        drop(owner(curators.clone()).next().await);
        assert_eq!(said(), format!("{told}{list}"));
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
        assert!(silent.to_string().contains("not told yet"));
        assert!(Node::list("{}").is_err());
    }
}
