//! The QEMU program of this host, and its version.
//!
//! The version is checked before the first machine starts: an older QEMU would refuse an option of ours, in words that
//! do not name the reason.

use std::ffi::OsString;
use std::io;

use tokio::process::Command;
use tokio::sync::OnceCell;

/// The environment variable with the path of another QEMU.
pub const ENVIRONMENT: &str = "HEARTH_QEMU";

/// The program's name in PATH.
pub const NAME: &str = "qemu-system-x86_64";

/// The oldest version that all options of ours work with.
const OLDEST: Version = Version(7, 2);

/// Major and minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

/// This host has no QEMU that can be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProgramError {
    /// It did not run.
    #[error(
        "cannot run {program} (package qemu-system-x86, or the path in {ENVIRONMENT}): {reason}"
    )]
    Run {
        /// The program.
        program: String,
        /// The underlying error.
        reason: String,
    },
    /// Its output has no version.
    #[error("{program} --version: expected a version, got {output:?}")]
    Unknown {
        /// The program.
        program: String,
        /// Its output.
        output: String,
    },
    /// It is too old.
    #[error(
        "{program}: expected QEMU {}.{} or newer, got {}.{}; name another one in {ENVIRONMENT}",
        OLDEST.0, OLDEST.1, found.0, found.1
    )]
    Old {
        /// The program.
        program: String,
        /// Its major and minor version.
        found: (u32, u32),
    },
}

/// The program: the one that the environment names, or the one in PATH.
pub fn program() -> OsString {
    std::env::var_os(ENVIRONMENT).unwrap_or_else(|| NAME.into())
}

/// Checks the version; only once, because the program does not change during a task.
pub(crate) async fn check() -> Result<(), ProgramError> {
    static CHECKED: OnceCell<()> = OnceCell::const_new();
    CHECKED
        .get_or_try_init(async || check_version(&program()).await)
        .await
        .copied()
}

async fn check_version(program: &OsString) -> Result<(), ProgramError> {
    let name = || program.to_string_lossy().into_owned();
    let failed = |reason: io::Error| ProgramError::Run {
        program: name(),
        reason: reason.to_string(),
    };
    let output = Command::new(program).arg("--version").output().await;
    let output = String::from_utf8_lossy(&output.map_err(failed)?.stdout).into_owned();
    match version(&output) {
        Some(version) if version >= OLDEST => Ok(()),
        Some(Version(major, minor)) => Err(ProgramError::Old {
            program: name(),
            found: (major, minor),
        }),
        None => Err(ProgramError::Unknown {
            program: name(),
            output,
        }),
    }
}

/// The version in the output of `--version`.
fn version(output: &str) -> Option<Version> {
    let (_, rest) = output.split_once("version ")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some(Version(number()?, number()?))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn an_old_program_is_refused_with_both_versions() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        let check = async |output: &str| {
            fs::write(&program, format!("#!/bin/sh\necho '{output}'\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            check_version(&program.clone().into()).await
        };
        check("QEMU emulator version 7.2.15 (Debian 1:7.2+dfsg-7)")
            .await
            .unwrap();
        check("QEMU emulator version 10.0.2").await.unwrap();
        let old = check("QEMU emulator version 6.2.0").await.unwrap_err();
        let text = old.to_string();
        assert!(
            text.contains("expected QEMU 7.2 or newer, got 6.2;"),
            "{text}"
        );
        assert!(text.contains(ENVIRONMENT), "{text}");
        let unknown = check("what?").await.unwrap_err();
        assert!(unknown.to_string().contains("got \"what?"), "{unknown}");
        let absent = check_version(&"/no/such/qemu".into()).await.unwrap_err();
        assert!(
            absent.to_string().contains("package qemu-system-x86"),
            "{absent}"
        );
    }
}
