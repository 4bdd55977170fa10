//! Creates a file system with the program of its developers.
//!
//! `mkfs.xfs` is bundled in the image. Its flags: overwrite existing content (`-f`: the caller has
//! decided that), do not discard first (`-K`: that can take minutes and has no benefit on a new
//! partition), no output (`-q`).

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::process::Command;

use super::child::{Child, ChildError};

/// The path of the program in the image.
pub const MKFS_XFS: &str = "/sbin/mkfs.xfs";

/// The timeout. It usually takes seconds, even on emulated machines; a disk that needs longer than
/// this is not usable.
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// How many of the last output lines an error quotes.
const MAX_QUOTED_LINES: usize = 8;

/// Why a file system cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    /// The program cannot be run.
    #[error("cannot create a file system on {device}")]
    Run {
        /// The device.
        device: PathBuf,
        /// The error of the child process.
        source: ChildError,
    },
    /// The program failed.
    #[error("cannot create a file system on {device}: mkfs: {status}: {message}")]
    Failed {
        /// The device.
        device: PathBuf,
        /// The exit status.
        status: ExitStatus,
        /// The last lines of its output.
        message: String,
    },
    /// The program timed out and was killed.
    #[error("cannot create a file system on {device}: mkfs timed out after {bound:?}: {message}")]
    TooSlow {
        /// The device.
        device: PathBuf,
        /// The timeout.
        bound: Duration,
        /// The last lines of its output.
        message: String,
    },
}

/// Creates an XFS file system on a device; existing content is overwritten.
pub async fn xfs(device: &Path) -> Result<(), MkfsError> {
    xfs_with(Path::new(MKFS_XFS), device, RUN_LIMIT).await
}

/// The same, with an explicit program and timeout.
pub async fn xfs_with(program: &Path, device: &Path, bound: Duration) -> Result<(), MkfsError> {
    let run_failed = |source| MkfsError::Run {
        device: device.to_owned(),
        source,
    };
    let lines = Arc::new(Mutex::new(Vec::new()));
    let mut command = Command::new(program);
    command.args(["-f", "-K", "-q"]).arg(device);
    let keep = lines.clone();
    let child = Child::spawn(command, move |_, line| {
        let mut lines = keep.lock().unwrap_or_else(|broken| broken.into_inner());
        if lines.len() == MAX_QUOTED_LINES {
            lines.remove(0);
        }
        lines.push(line.trim().to_owned());
    });
    let mut child = child.await.map_err(run_failed)?;
    let ended = tokio::time::timeout(bound, child.wait()).await;
    // After a timeout the program is killed, before anything else uses the device.
    let message = || {
        let lines = lines.lock().unwrap_or_else(|broken| broken.into_inner());
        lines.join("; ")
    };
    match ended {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(MkfsError::Failed {
            device: device.to_owned(),
            status,
            message: message(),
        }),
        Ok(Err(source)) => Err(run_failed(source)),
        Err(_) => {
            child
                .terminate(Duration::from_secs(5))
                .await
                .map_err(run_failed)?;
            Err(MkfsError::TooSlow {
                device: device.to_owned(),
                bound,
                message: message(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(script: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mkfs");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        (dir, path)
    }

    #[tokio::test]
    async fn it_is_called_with_the_device_and_believed() {
        let (dir, mkfs) = program("echo \"$*\" > \"$4\"");
        let device = dir.path().join("device");
        let bound = Duration::from_secs(20);
        xfs_with(&mkfs, &device, bound).await.unwrap();
        let arguments = std::fs::read_to_string(&device).unwrap();
        assert_eq!(arguments.trim(), format!("-f -K -q {}", device.display()));
    }

    #[tokio::test]
    async fn its_last_words_are_quoted() {
        let (_dir, mkfs) = program("echo size of the data subvolume is too small >&2; exit 1");
        let error = xfs_with(&mkfs, Path::new("/dev/x"), Duration::from_secs(20)).await;
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("too small") && error.contains("/dev/x"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn one_that_hangs_is_ended() {
        let (_dir, mkfs) = program("echo thinking; exec sleep 1000");
        let error = xfs_with(&mkfs, Path::new("/dev/x"), Duration::from_millis(300)).await;
        let error = error.unwrap_err();
        assert!(matches!(error, MkfsError::TooSlow { .. }), "{error}");
    }
}
