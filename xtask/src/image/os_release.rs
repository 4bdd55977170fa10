//! os-release: what an image says of itself, to the firmware's tools through the UKI and to the node in `/etc`.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail};

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
    let version = env!("CARGO_PKG_VERSION");
    let source = Source::of_checkout(ui)?;
    let mut fields = vec![
        ("ID", "hearth".to_owned()),
        ("NAME", "Hearth".to_owned()),
        ("PRETTY_NAME", format!("Hearth {version}")),
        ("VERSION_ID", version.to_owned()),
        ("IMAGE_ID", "hearth".to_owned()),
        ("IMAGE_VERSION", version.to_owned()),
    ];
    if flavour != Flavour::Release {
        fields.push(("VARIANT_ID", flavour.name().to_owned()));
    }
    if let Some(revision) = source.revision {
        fields.push(("BUILD_ID", revision));
    }
    // No clock before it is right, so it is the node's first guess of the time. The source's time and not the build's:
    // the same source gives the same image.
    fields.push(("HEARTH_BUILD_TIME", source.time.to_string()));
    fields.extend(kernel_fields(kernel));
    for (program, _) in programs {
        let (field, flag) = match program.file_name().and_then(|name| name.to_str()) {
            Some("etcd") => ("HEARTH_ETCD_VERSION", "--version"),
            Some("mkfs.xfs") => ("HEARTH_XFSPROGS_VERSION", "-V"),
            other => bail!("how is {other:?} asked for its version?"),
        };
        let answer = Cmd::new(program).arg(flag).output(ui)?;
        fields.push((field, version_in(&answer)?.to_owned()));
    }
    Ok(text(&fields))
}

/// That of an image around a program which is not ours.
pub fn around(program: &Path, kernel: &Kernel) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let mut fields = vec![("ID", "linux".to_owned()), ("NAME", name.into_owned())];
    fields.extend(kernel_fields(kernel));
    text(&fields)
}

fn kernel_fields(kernel: &Kernel) -> [(&'static str, String); 3] {
    [
        ("HEARTH_KERNEL_VERSION", kernel.version.clone()),
        ("HEARTH_KERNEL_SOURCE", kernel.source.clone()),
        ("HEARTH_KERNEL_CONFIG_SHA256", kernel.config_hash.clone()),
    ]
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
            Cmd::new("git")
                .arg("-C")
                .arg(root)
                .args(arguments)
                .output(ui)
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

/// Fields as lines for a shell.
fn text(fields: &[(&str, String)]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let line = |(name, value): &(&str, String)| {
        if !value.is_empty() && value.chars().all(plain) {
            return format!("{name}={value}\n");
        }
        let mut quoted = String::new();
        for c in value.chars().filter(|c| !c.is_control()) {
            if "\"$`\\".contains(c) {
                quoted.push('\\');
            }
            quoted.push(c);
        }
        format!("{name}=\"{quoted}\"\n")
    };
    fields.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_where_a_shell_wants_it() {
        let fields = [
            ("A", "plain-1.0".to_owned()),
            ("B", "with blank".to_owned()),
            ("C", "a\"$`\\\nb".to_owned()),
            ("D", String::new()),
        ];
        assert_eq!(
            text(&fields),
            "A=plain-1.0\nB=\"with blank\"\nC=\"a\\\"\\$\\`\\\\b\"\nD=\"\"\n"
        );
    }

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
