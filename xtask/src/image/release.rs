//! What an image says of itself: asked of the checkout and of the programs, written by `hearth_image::os_release`.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail};
use hearth_image::os_release::{self, KernelRelease, NodeRelease};

use super::Flavour;
use crate::checkout::root;
use crate::command::Cmd;
use crate::kernel::Kernel;
use crate::ui::Ui;

/// The node's.
pub fn of_node(
    ui: &Ui,
    flavour: Flavour,
    kernel: &Kernel,
    programs: &[(PathBuf, String)],
) -> Result<String> {
    let source = Source::of_checkout(ui)?;
    let versions = programs.iter().map(|(program, _)| version_of(ui, program));
    Ok(os_release::of_node(&NodeRelease {
        version: env!("CARGO_PKG_VERSION"),
        variant: (flavour != Flavour::Release).then(|| flavour.name()),
        revision: source.revision.as_deref(),
        source_time: source.time,
        kernel: kernel_release(kernel),
        programs: versions.collect::<Result<_>>()?,
    }))
}

/// That of an image around a program which is not ours.
pub fn around(program: &Path, kernel: &Kernel) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    os_release::around(&name, &kernel_release(kernel))
}

fn kernel_release(kernel: &Kernel) -> KernelRelease<'_> {
    KernelRelease {
        version: &kernel.version,
        source: &kernel.source,
        config_sha256: &kernel.config_hash,
    }
}

/// The version of a program that rides along, with the field for it.
fn version_of(ui: &Ui, program: &Path) -> Result<(&'static str, String)> {
    let (field, flag) = match program.file_name().and_then(|name| name.to_str()) {
        Some("etcd") => ("HEARTH_ETCD_VERSION", "--version"),
        Some("mkfs.xfs") => ("HEARTH_XFSPROGS_VERSION", "-V"),
        other => bail!("how is {other:?} asked for its version?"),
    };
    let answer = Cmd::new(program).arg(flag).output(ui)?;
    Ok((field, version_in(&answer)?.to_owned()))
}

/// The revision that a record of this checkout bears: its commit, with `-dirty` where files differ from it; `unknown`
/// outside of a git checkout.
pub fn revision(ui: &Ui) -> Result<String> {
    Ok(Source::of_checkout(ui)?
        .revision
        .unwrap_or_else(|| "unknown".to_owned()))
}

struct Source {
    revision: Option<String>,
    /// Unix seconds.
    time: u64,
}

impl Source {
    fn of_checkout(ui: &Ui) -> Result<Source> {
        let root = root();
        let mut source = if root.join(".git").exists() {
            Source::of_git(ui, &root)?
        } else {
            // Archives carry the commit's time, and this file every checkout has.
            let path = root.join("Cargo.lock");
            let changed = std::fs::metadata(&path)
                .and_then(|metadata| metadata.modified())
                .with_context(|| format!("cannot look at {}", path.display()))?;
            let time = changed
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs();
            Source {
                revision: None,
                time,
            }
        };
        if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
            let wanted = || format!("SOURCE_DATE_EPOCH is {epoch:?}, Unix seconds are wanted");
            source.time = epoch.parse().with_context(wanted)?;
        }
        Ok(source)
    }

    fn of_git(ui: &Ui, root: &Path) -> Result<Source> {
        let git = |arguments: &[&str]| {
            let git = Cmd::new("git").arg("-C").arg(root);
            git.args(arguments).output(ui)
        };
        let commit = git(&["log", "-1", "--format=%ct %H"])?;
        let (time, hash) = commit
            .trim()
            .split_once(' ')
            .context("git log says nothing")?;
        let dirty = !git(&["status", "--porcelain"])?.is_empty();
        Ok(Source {
            revision: Some(format!("{:.12}{}", hash, if dirty { "-dirty" } else { "" })),
            time: time
                .parse()
                .with_context(|| format!("git's commit time is {time:?}"))?,
        })
    }
}

/// The first word of an answer that is a version.
fn version_in(answer: &str) -> Result<&str> {
    answer
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
        .with_context(|| format!("no version in {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found() {
        assert_eq!(
            version_in("etcd Version: 3.4.23\nGit SHA: x1.2\n").unwrap(),
            "3.4.23"
        );
        assert_eq!(version_in("mkfs.xfs version 6.1.0\n").unwrap(), "6.1.0");
        assert!(version_in("none here").is_err());
    }
}
