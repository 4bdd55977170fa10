//! Programs of the host.

use std::process::Stdio;

use anyhow::{Context, bail};
use hearth_qemu::command::CommandLine;

/// Runs a program to its end; its standard output.
///
/// # Errors
/// If it does not start or fails; with all that it said.
pub async fn run(command: &CommandLine) -> anyhow::Result<String> {
    let output = tokio::process::Command::from(command.to_std())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("start {command}"))?;
    if !output.status.success() {
        bail!(
            "{command}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
