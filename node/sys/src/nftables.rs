//! Packet filter rules, by the program `nft` of the extension.
//!
//! A script is one transaction: the kernel takes all of it or nothing, so there is no moment with
//! half of the rules. What is in the kernel can be read back in the same syntax.
//!
//! Why the program and not netlink: only nodes that may have pods need rules, and those have the
//! program, because kube-proxy and the CNI plugins run it. It knows the binary form of every
//! expression, which differs between kernels, and it names what is wrong in a script.

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use tokio::process::Command;
use tokio::time::timeout;

use crate::child::{Child, ChildError, Stream};

const RUN_LIMIT: Duration = Duration::from_secs(40);
/// Maximum number of quoted lines of an error.
const MAX_QUOTED_LINES: usize = 8;
/// Maximum size of rules that are written, or read back.
const MAX_RULES_BYTES: usize = 8 << 20;

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
    /// The script cannot be passed to the program.
    #[error("cannot keep a script in memory")]
    Script(#[from] io::Error),
    /// The script is too long.
    #[error("expected rules of at most {MAX_RULES_BYTES} bytes, got {found}")]
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
        if script.len() > MAX_RULES_BYTES {
            let found = script.len();
            return Err(NftablesError::TooLong { found });
        }
        // Not an argument, which must not be longer than 128 KiB, and not a pipe, which somebody would
        // have to write while the program reads.
        let file = memfd_create("nft", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
        let mut file = File::from(file);
        // A statement ends with a line, or with a semicolon.
        file.write_all(script.as_bytes())?;
        file.write_all(b"\n")?;
        file.rewind()?;
        let script = Stdio::from(file);
        self.run("apply", &["--file", "-"], script).await.map(drop)
    }

    /// The table of family `inet` as the kernel has it, without the values of counters.
    pub async fn table(&self, name: &str) -> Result<String, NftablesError> {
        let arguments = ["--stateless", "list", "table", "inet", name];
        self.run("list table", &arguments, Stdio::null()).await
    }

    /// The same with the values of counters.
    pub async fn table_with_counters(&self, name: &str) -> Result<String, NftablesError> {
        let arguments = ["list", "table", "inet", name];
        self.run("list table", &arguments, Stdio::null()).await
    }

    /// The rules of all tables, with the values of counters.
    pub async fn ruleset(&self) -> Result<String, NftablesError> {
        let arguments = ["list", "ruleset"];
        self.run("list ruleset", &arguments, Stdio::null()).await
    }

    async fn run(
        &self,
        task: &'static str,
        arguments: &[&str],
        input: Stdio,
    ) -> Result<String, NftablesError> {
        let mut command = Command::new(&self.file);
        command.args(arguments).env_clear();
        command.env("PATH", self.file.parent().unwrap_or(Path::new("")));
        let output: Arc<Mutex<Output>> = Arc::default();
        let lines = output.clone();
        let take = move |stream, line: &str| {
            let mut output = lines.lock().unwrap_or_else(PoisonError::into_inner);
            output.take(stream, line);
        };
        let mut child = Child::spawn_with_input(command, input, take).await?;
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
    async fn a_script_has_any_length_up_to_the_limit() {
        let (_directory, nft) = script("test $(/usr/bin/wc -c) = 200001");
        nft.apply(&"x".repeat(200_000)).await.unwrap();
        let long = "x".repeat(MAX_RULES_BYTES + 1);
        let error = nft.apply(&long).await.unwrap_err();
        assert!(matches!(error, NftablesError::TooLong { .. }), "{error}");
    }
}
