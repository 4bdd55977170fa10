//! Packet filter rules, by the program `nft` of the extension.
//!
//! A script is one transaction: the kernel takes all of it or nothing, so there is no moment with
//! half of the rules. What is in the kernel can be read back in the same syntax.
//!
//! Why the program and not netlink: only nodes that may have pods need rules, and those have the
//! program, because kube-proxy and the CNI plugins run it. It knows the binary form of every
//! expression, which differs between kernels, and it names what is wrong in a script.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::child::{Child, ChildError, Stream};

const RUN_LIMIT: Duration = Duration::from_secs(40);
/// Maximum number of quoted lines of an error.
const MAX_QUOTED_LINES: usize = 8;
/// Maximum size of rules that are read back.
const MAX_RULES_BYTES: usize = 8 << 20;
/// The longest argument that the kernel accepts is 128 KiB.
const MAX_SCRIPT_BYTES: usize = 127 << 10;

/// Why the rules cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The program cannot be run.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The program timed out.
    #[error("nft {task} timed out after {RUN_LIMIT:?}")]
    Late {
        /// The task of the program.
        task: &'static str,
    },
    /// The program failed.
    #[error("nft {task}: {status}: {said}")]
    Failed {
        /// The task of the program.
        task: &'static str,
        /// The exit status.
        status: ExitStatus,
        /// The first lines of its messages.
        said: String,
    },
    /// The script is too long for one transaction.
    #[error("expected rules of at most {MAX_SCRIPT_BYTES} bytes, got {found}")]
    TooLong {
        /// The size of the script in bytes.
        found: usize,
    },
    /// The rules in the kernel are too long to be read.
    #[error("the rules in the kernel are longer than {MAX_RULES_BYTES} bytes")]
    TooMany,
}

/// The program `nft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nftables {
    file: PathBuf,
}

#[derive(Default)]
struct Output {
    rules: String,
    messages: Vec<String>,
    too_long: bool,
}

impl Nftables {
    /// The program at this path.
    pub fn at(file: PathBuf) -> Self {
        Self { file }
    }

    /// Applies a script, in the syntax of nft(8), as one transaction.
    pub async fn apply(&self, script: &str) -> Result<(), NftablesError> {
        if script.len() > MAX_SCRIPT_BYTES {
            let found = script.len();
            return Err(NftablesError::TooLong { found });
        }
        // A statement ends with a line, or with a semicolon.
        let script = format!("{script}\n");
        self.run("apply", &[&script]).await.map(drop)
    }

    /// The table of family `inet` as the kernel has it, without the values of counters.
    pub async fn table(&self, name: &str) -> Result<String, NftablesError> {
        let arguments = ["--stateless", "list", "table", "inet", name];
        self.run("list table", &arguments).await
    }

    /// The same with the values of counters.
    pub async fn table_with_counters(&self, name: &str) -> Result<String, NftablesError> {
        self.run("list table", &["list", "table", "inet", name])
            .await
    }

    /// The rules of all tables, with the values of counters.
    pub async fn ruleset(&self) -> Result<String, NftablesError> {
        self.run("list ruleset", &["list", "ruleset"]).await
    }

    async fn run(&self, task: &'static str, arguments: &[&str]) -> Result<String, NftablesError> {
        let mut command = Command::new(&self.file);
        command.args(arguments).env_clear();
        command.env("PATH", self.file.parent().unwrap_or(Path::new("")));
        let output: Arc<Mutex<Output>> = Arc::default();
        let lines = output.clone();
        let take = move |stream, line: &str| {
            let mut output = lines.lock().unwrap_or_else(PoisonError::into_inner);
            output.take(stream, line);
        };
        let mut child = Child::spawn(command, take).await?;
        let Ok(status) = timeout(RUN_LIMIT, child.wait()).await else {
            return Err(NftablesError::Late { task });
        };
        let status = status?;
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        if !status.success() {
            let said = output.messages.join(" ");
            return Err(NftablesError::Failed { task, status, said });
        }
        match output.too_long {
            true => Err(NftablesError::TooMany),
            false => Ok(std::mem::take(&mut output.rules)),
        }
    }
}

impl Output {
    fn take(&mut self, stream: Stream, line: &str) {
        match stream {
            Stream::Stdout if self.rules.len() + line.len() < MAX_RULES_BYTES => {
                self.rules.push_str(line);
                self.rules.push('\n');
            }
            Stream::Stdout => self.too_long = true,
            Stream::Stderr if self.messages.len() < MAX_QUOTED_LINES => {
                self.messages.push(line.trim().to_owned());
            }
            Stream::Stderr => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, Nftables) {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("nft");
        std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&file, executable).unwrap();
        (directory, Nftables::at(file))
    }

    #[tokio::test]
    async fn its_answer_is_read_and_its_complaint_quoted() {
        let (_directory, nft) = script("/bin/echo \"$@\"; /bin/echo complaint >&2");
        assert_eq!(
            nft.table("t").await.unwrap(),
            "--stateless list table inet t\n"
        );
        let (_directory, nft) = script("echo 'Error: syntax error' >&2; exit 1");
        let error = nft.apply("flush").await.unwrap_err().to_string();
        assert!(
            error.starts_with("nft apply: exit status: 1: Error: syntax error"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_script_that_the_kernel_would_refuse_is_refused_by_size() {
        let (_directory, nft) = script("exit 0");
        let long = "x".repeat(MAX_SCRIPT_BYTES + 1);
        let error = nft.apply(&long).await.unwrap_err();
        assert!(matches!(error, NftablesError::TooLong { .. }), "{error}");
    }
}
