//! The operator's tool, built from this checkout and set up for the cluster of `cargo xtask run`.
//!
//! What an owner does is done by the tool that owners have, not by calls of our own: that it works beside `run` is then
//! known whenever `run` works.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::CommandError;
use crate::program;
use crate::ui::Ui;

/// The environment variable that names its contexts file to it.
pub const CONFIG: &str = "HEARTH_CONFIG";

/// Builds the tool; returns the program.
pub fn build(ui: &Ui) -> Result<PathBuf> {
    program::build(ui, "hearth-ctl", "hearthctl")
}

/// Its folder among what `run` keeps.
pub fn folder(state: &Path) -> PathBuf {
    state.join("hearthctl")
}

/// Its contexts file there.
pub fn config(state: &Path) -> PathBuf {
    folder(state).join("config.json")
}

/// Why a call of the tool failed, by its exit code: 1 is an answer that was an error, 3 no answer. Both may pass when the
/// node is further.
pub fn may_pass(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(CommandError::Failed { status, .. }) if matches!(status.code(), Some(1 | 3))
    )
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
    pub fn list(json: &str) -> Result<Vec<Node>> {
        serde_json::from_str(json).context("`hearthctl node list -o json` is not understood")
    }

    /// What it takes to call the cluster well.
    pub fn is_well(&self) -> bool {
        self.health == "HEALTHY" && self.cluster_state.as_deref() == Some("HOME")
    }
}

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.cluster_state.as_deref().unwrap_or("not told yet");
        write!(f, "{}: {}, cluster state {state}", self.id, self.health)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Cmd;

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

    #[test]
    fn only_silence_and_answers_may_pass() {
        let failed = |code: i32| {
            Cmd::new("sh")
                .args(["-c", &format!("exit {code}")])
                .output(&Ui::new(false))
                .unwrap_err()
                .into()
        };
        assert!(may_pass(&failed(1)) && may_pass(&failed(3)));
        assert!(!may_pass(&failed(2)) && !may_pass(&failed(4)));
        assert!(!may_pass(&anyhow::anyhow!("something else")));
    }
}
