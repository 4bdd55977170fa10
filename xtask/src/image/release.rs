//! The description of an image: collected from the checkout and the programs, formatted by `hearth_image::os_release`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hearth_build::source::Source;
use hearth_image::os_release::{self, KernelRelease, NodeRelease};
use hearth_image::recipe::Release;

use super::Flavour;
use crate::checkout::root;
use crate::command::Cmd;
use crate::kernel::Kernel;
use crate::ui::Ui;

/// The version of everything in this checkout.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The description of the node's image.
pub(super) fn of_node(
    ui: &Ui,
    flavour: Flavour,
    kernel: &Kernel,
    programs: &[(PathBuf, String)],
) -> Result<Release> {
    let source = Source::of_checkout(ui, &root())?;
    let versions = programs.iter().map(|(program, _)| version_of(ui, program));
    Ok(of(os_release::of_node(&NodeRelease {
        version: VERSION,
        variant: (flavour != Flavour::Release).then(|| flavour.name()),
        revision: source.revision.as_deref(),
        source_time: source.time,
        kernel: kernel_release(kernel),
        programs: versions.collect::<Result<_>>()?,
    })))
}

/// The description of an image around a program that is not Hearth's.
pub(super) fn around(program: &Path, kernel: &Kernel) -> Release {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    of(os_release::around(&name, &kernel_release(kernel)))
}

fn of(os_release: String) -> Release {
    Release {
        version: VERSION.to_owned(),
        os_release,
    }
}

fn kernel_release(kernel: &Kernel) -> KernelRelease<'_> {
    KernelRelease {
        version: &kernel.version,
        source: &kernel.source,
        config_sha256: &kernel.config_hash,
    }
}

/// The version of an included program, with the field for it.
fn version_of(ui: &Ui, program: &Path) -> Result<(&'static str, String)> {
    let (field, flag) = match program.file_name().and_then(|name| name.to_str()) {
        Some("etcd") => ("HEARTH_ETCD_VERSION", "--version"),
        Some("mkfs.xfs") => ("HEARTH_XFSPROGS_VERSION", "-V"),
        other => bail!("cannot determine the version of {other:?}"),
    };
    let answer = Cmd::new(program).arg(flag).output(ui)?;
    Ok((field, version_in(&answer)?.to_owned()))
}

/// The revision in records of this checkout: its commit, with `-dirty` appended if files differ from it; `unknown`
/// outside of a git checkout.
pub(crate) fn revision(ui: &Ui) -> Result<String> {
    let revision = Source::of_checkout(ui, &root())?.revision;
    Ok(revision.unwrap_or_else(|| "unknown".to_owned()))
}

/// The first word of the output that is a version.
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
            version_in("etcd Version: 3.7.3\nGit SHA: x1.2\n").unwrap(),
            "3.7.3"
        );
        assert_eq!(version_in("mkfs.xfs version 6.1.0\n").unwrap(), "6.1.0");
        assert!(version_in("none here").is_err());
    }
}
