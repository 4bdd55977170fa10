//! What the owner does with a node that has come home: take ownership, then look at it, through hearthctl.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::command::{Cmd, Failed};
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
    /// Where they were when ownership was taken last.
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
        let step = match owned {
            true => self.call(&["node", "list", "--output", "json"]),
            false => self
                .curators
                .iter()
                .fold(
                    self.call(&["cluster", "take-ownership", "--name", CONTEXT]),
                    |call, curator| call.arg("--endpoint").arg(curator.to_string()),
                )
                .arg("--owner-key")
                .arg(&self.key)
                .arg("--first-contact-secret")
                .arg(&self.secret),
        };
        let ui = self.ui.clone();
        let output = tokio::task::spawn_blocking(move || step.output(&ui)).await;
        let output = output.unwrap_or_else(|error| Err(anyhow!(error)));
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
    let output = error
        .downcast_ref::<Failed>()
        .map_or("", |failed| failed.output.as_str());
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

    #[test]
    fn the_tools_own_words_are_the_reason() {
        let error = Cmd::new("sh")
            .args(["-c", "echo 'hearthctl: cannot' >&2; echo more >&2; exit 3"])
            .output(&Ui::new(false))
            .unwrap_err();
        assert_eq!(reason(&error), "an answer (hearthctl: cannot)");
    }
}
