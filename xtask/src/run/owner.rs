//! What the owner does with a node that has come home: take ownership, then look at it, through hearthctl.
//!
//! hearthctl is told as well where each node's own port is found on the host, for the addresses that the cluster knows are
//! those of an emulated network. Every run tells it anew, since each has a network of its own, with other ports. A machine
//! that is started again later keeps both its address and its ports: they belong to its place in the network.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::command::{Cmd, CommandError};
use crate::hearthctl::{CONFIG, Node, may_pass};
use crate::ui::Ui;

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(500);

/// The context's name in hearthctl's configuration.
const CONTEXT: &str = "run";

/// The owner.
pub struct Owner {
    pub ui: Ui,
    /// The tool.
    pub hearthctl: PathBuf,
    /// Its contexts file.
    pub config: PathBuf,
    /// The owner key's file.
    pub key: PathBuf,
    /// The first-contact secret's file.
    pub secret: PathBuf,
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

impl Owner {
    /// The next step. An error is one that waiting does not mend.
    pub async fn next(mut self) -> (Owner, Result<Progress>) {
        if self.asked.is_some() {
            tokio::time::sleep(PAUSE).await;
        }
        let asked = *self.asked.get_or_insert_with(Instant::now);
        // A context remembers addresses, and the ports may be others this time; taking ownership again is harmless.
        let owned = self.is_owned();
        let mut steps = Vec::new();
        if !owned {
            steps.push(self.take_ownership());
        }
        if !self.routed {
            steps.extend(self.tell_routes());
        }
        if owned {
            steps.push(self.call(&["node", "list", "--output", "json"]));
        }
        let ui = self.ui.clone();
        let output = tokio::task::spawn_blocking(move || {
            let run = |_, step: Cmd| step.output(&ui);
            steps.into_iter().try_fold(String::new(), run)
        });
        let output = output
            .await
            .map_or_else(|error| Err(anyhow!(error)), |output| Ok(output?));
        self.routed |= output.is_ok();
        let progress = match output {
            Err(error) if may_pass(&error) => Ok(Progress::NotYet(reason(&error))),
            Err(error) => Err(error),
            Ok(_) if !owned => {
                self.owned_at.clone_from(&self.curators);
                Ok(Progress::Owned(self.curators.clone()))
            }
            Ok(json) => judge(&json, asked.elapsed()),
        };
        (self, progress)
    }

    /// Whether the context is there, and points where the curators are.
    pub fn is_owned(&self) -> bool {
        self.owned_at == self.curators && self.config.exists()
    }

    fn take_ownership(&self) -> Cmd {
        let call = self.call(&["cluster", "take-ownership", "--name", CONTEXT]);
        let endpoints = self.curators.iter().map(SocketAddr::to_string);
        endpoints
            .fold(call, |call, curator| call.arg("--endpoint").arg(curator))
            .arg("--owner-key")
            .arg(&self.key)
            .arg("--first-contact-secret")
            .arg(&self.secret)
    }

    fn tell_routes(&self) -> impl Iterator<Item = Cmd> {
        let tell = |(address, host): &(SocketAddrV4, SocketAddr)| {
            self.call(&["--context", CONTEXT, "context", "route"])
                .arg(address.to_string())
                .arg(host.to_string())
        };
        self.routes.iter().map(tell)
    }

    fn call(&self, words: &[&str]) -> Cmd {
        Cmd::new(&self.hearthctl)
            .args(words)
            .env(CONFIG, &self.config)
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

/// What hearthctl said, without the command around it.
fn reason(error: &anyhow::Error) -> String {
    let output = match error.downcast_ref() {
        Some(CommandError::Failed { output, .. }) => output.as_str(),
        _ => "",
    };
    let first = output.lines().next().unwrap_or_default();
    format!("an answer ({first})")
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
            "#!/bin/sh\necho \"$*\" >> {}\n[ $1 != node ] || echo '[]'\n",
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
        let owner = |owned_at| Owner {
            ui: Ui::new(false),
            hearthctl: tool.clone(),
            config: config.clone(),
            key: folder.path().join("key"),
            secret: folder.path().join("secret"),
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

    #[test]
    fn the_tools_own_words_are_the_reason() {
        let error = Cmd::new("sh")
            .args(["-c", "echo 'hearthctl: cannot' >&2; echo more >&2; exit 3"])
            .output(&Ui::new(false))
            .unwrap_err();
        assert_eq!(reason(&error.into()), "an answer (hearthctl: cannot)");
    }
}
