//! Programs of the host that are run to their end.
//!
//! Each is a process group of its own: an interrupt at the terminal reaches this process, which decides how to handle
//! it. A program whose future is dropped is killed.

use std::io;
use std::process::{ExitStatus, Stdio};

use hearth_qemu::command::CommandLine;
use tokio::io::{AsyncBufReadExt, BufReader};

/// A program failed.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It did not start.
    #[error("cannot start `{line}`")]
    Start {
        /// The command line.
        line: String,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// It exited with a failure.
    #[error("`{line}` failed: {status}\n{output}")]
    Failed {
        /// The command line.
        line: String,
        /// Its exit status.
        status: ExitStatus,
        /// Its standard error.
        output: String,
    },
}

impl ToolError {
    /// The first line of its output.
    pub fn first_line(&self) -> &str {
        match self {
            ToolError::Start { .. } => "",
            ToolError::Failed { output, .. } => output.lines().next().unwrap_or_default(),
        }
    }

    /// Its exit code, if it exited.
    pub fn code(&self) -> Option<i32> {
        match self {
            ToolError::Start { .. } => None,
            ToolError::Failed { status, .. } => status.code(),
        }
    }
}

/// Runs a program until it prints `word` on its standard output, and ends it then.
///
/// # Errors
/// If it does not start, or ends before that.
pub async fn run_until(command: &CommandLine, word: &str) -> Result<(), ToolError> {
    let start = |source| ToolError::Start {
        line: command.to_string(),
        source,
    };
    let mut child = quiet(command)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(start)?;
    if let Some(output) = child.stdout.take() {
        let mut lines = BufReader::new(output).lines();
        while let Some(line) = lines.next_line().await.map_err(start)? {
            if line.contains(word) {
                return Ok(());
            }
        }
    }
    Err(ToolError::Failed {
        line: command.to_string(),
        status: child.wait().await.map_err(start)?,
        output: format!("it ended before printing {word:?}"),
    })
}

fn quiet(command: &CommandLine) -> tokio::process::Command {
    // The target that `hearth_qemu` uses for its commands.
    tracing::debug!(target: "hearth_qemu::command", "{command}");
    let mut child = tokio::process::Command::from(command.to_std());
    child
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    child
}

/// Runs a program to its end; returns its standard output.
///
/// # Errors
/// If it does not start or fails; with its standard error.
pub async fn run(command: &CommandLine) -> Result<String, ToolError> {
    let output = quiet(command)
        .output()
        .await
        .map_err(|source| ToolError::Start {
            line: command.to_string(),
            source,
        })?;
    if !output.status.success() {
        return Err(ToolError::Failed {
            line: command.to_string(),
            status: output.status,
            output: String::from_utf8_lossy(&output.stderr)
                .trim_end()
                .to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> CommandLine {
        let mut line = CommandLine::new("sh");
        line.option("-c", script);
        line
    }

    #[tokio::test]
    async fn a_program_says_what_was_wrong_on_standard_error() {
        assert_eq!(run(&sh("echo out; echo err >&2")).await.unwrap(), "out\n");
        let error = run(&sh("echo out; echo first >&2; echo last >&2; exit 3")).await;
        let error = error.unwrap_err();
        assert_eq!((error.first_line(), error.code()), ("first", Some(3)));
    }

    #[tokio::test]
    async fn a_program_is_ended_when_it_has_said_enough() {
        let endless = sh("echo one; echo two; exec sleep 1000");
        run_until(&endless, "two").await.unwrap();
        let error = run_until(&sh("echo one"), "two").await.unwrap_err();
        assert!(
            error.to_string().contains("before printing \"two\""),
            "{error}"
        );
    }
}
