//! The revision and time of a checkout; the time is that of everything built from it.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, io};

use crate::command::{Cmd, CommandError};
use crate::files::{FileError, failed};
use crate::progress::Progress;

/// Why revision and time could not be determined.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A git command failed.
    #[error(transparent)]
    Git(#[from] CommandError),
    /// The checkout has no commit.
    #[error("git log printed no commit")]
    NoCommit,
    /// git's commit time is not a number.
    #[error("git commit time: expected Unix seconds, got {0:?}")]
    CommitTime(String),
    /// SOURCE_DATE_EPOCH is not a number.
    #[error("SOURCE_DATE_EPOCH: expected Unix seconds, got {0:?}")]
    Epoch(String),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A checkout's revision and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its commit, with `-dirty` appended if files differ from it; none outside of git.
    pub revision: Option<String>,
    /// Unix seconds.
    pub time: u64,
}

impl Source {
    /// Of the checkout in this folder. `SOURCE_DATE_EPOCH` overrides the time. Where git fails, as it does in a checkout that
    /// belongs to another user, the revision is unknown, and a warning says why.
    pub fn of_checkout(progress: &dyn Progress, root: &Path) -> Result<Source, SourceError> {
        let from_git = match root.join(".git").exists() {
            true => Source::of_git(progress, root).map(Some),
            false => Ok(None),
        };
        let from_git = from_git.or_else(|error| match error {
            SourceError::Git(CommandError::Interrupted(_)) => Err(error),
            error => {
                progress.say(&format!("warning: the revision is unknown: {error}"));
                Ok(None)
            }
        })?;
        let mut source = match from_git {
            Some(source) => source,
            // Archives carry the commit's time, and every checkout has this file.
            None => Source {
                revision: None,
                time: changed(&root.join("Cargo.lock"))?,
            },
        };
        if let Ok(epoch) = env::var("SOURCE_DATE_EPOCH") {
            source.time = epoch.parse().map_err(|_| SourceError::Epoch(epoch))?;
        }
        Ok(source)
    }

    fn of_git(progress: &dyn Progress, root: &Path) -> Result<Source, SourceError> {
        let git = |arguments: &[&str]| {
            let git = Cmd::new("git").arg("-C").arg(root);
            git.args(arguments).output(progress)
        };
        let commit = git(&["log", "-1", "--format=%ct %H"])?;
        let (time, hash) = commit.trim().split_once(' ').ok_or(SourceError::NoCommit)?;
        let dirty = !git(&["status", "--porcelain"])?.is_empty();
        Ok(Source {
            revision: Some(format!("{hash:.12}{}", if dirty { "-dirty" } else { "" })),
            time: time
                .parse()
                .map_err(|_| SourceError::CommitTime(time.to_owned()))?,
        })
    }
}

/// A file's modification time, in Unix seconds.
fn changed(path: &Path) -> Result<u64, FileError> {
    let changed: io::Result<SystemTime> = path.metadata().and_then(|file| file.modified());
    let changed = changed.map_err(failed("read the metadata of", path))?;
    Ok(changed
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::progress::Silent;

    fn git(root: &Path, arguments: &[&str]) {
        Cmd::new("git")
            .arg("-C")
            .arg(root)
            .args(["-c", "user.name=x", "-c", "user.email=x@x"])
            .args(arguments)
            .env("GIT_COMMITTER_DATE", "@1700000000 +0000")
            .run(&Silent)
            .unwrap();
    }

    #[test]
    fn a_checkout_has_its_commits_revision_and_time() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("Cargo.lock"), "").unwrap();
        let archive = Source::of_checkout(&Silent, root).unwrap();
        assert_eq!(archive.revision, None);
        assert!(archive.time > 1_700_000_000);

        git(root, &["init", "--quiet"]);
        git(root, &["add", "."]);
        git(root, &["commit", "--quiet", "--message", "one"]);
        let clean = Source::of_checkout(&Silent, root).unwrap();
        let revision = clean.revision.unwrap();
        assert_eq!((revision.len(), clean.time), (12, 1_700_000_000));
        fs::write(root.join("new"), "").unwrap();
        let dirty = Source::of_checkout(&Silent, root).unwrap();
        assert_eq!(dirty.revision, Some(format!("{revision}-dirty")));
    }

    #[test]
    fn the_revision_is_unknown_where_git_fails() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("Cargo.lock"), "").unwrap();
        fs::write(root.join(".git"), "gitdir: /nowhere\n").unwrap();
        assert_eq!(Source::of_checkout(&Silent, root).unwrap().revision, None);
    }
}
