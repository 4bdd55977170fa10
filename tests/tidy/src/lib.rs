//! The rules of the repository that a program can check.
//!
//! `docs/architecture.md` states them as invariants; each function here checks one of them. They check the files that
//! git tracks or would track, so build output is never included. `cargo xtask tidy` runs them, and `cargo xtask test`
//! runs them before the tests.

mod circles;
mod crates;
mod decisions;
mod examples;
mod faults;
mod imports;
mod lints;
mod sources;
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub use crates::crates;
use sources::Sources;

/// The result of checking the repository.
pub struct Findings {
    /// Number of checked files.
    pub files: usize,
    /// All violations, a line each.
    pub wrong: Vec<String>,
}

/// The entries at the top of the tree, except dotfiles.
const TOP_LEVEL: &[&str] = &[
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "clippy.toml",
    "deny.toml",
    "docs",
    "image",
    "kernel-config",
    "node",
    "qemu",
    "tests",
    "xtask",
];

/// A longer file has to be split.
const MAX_LINES: usize = 800;
const MAX_ARCHITECTURE_LINES: usize = 300;
const MAX_BYTES: u64 = 1 << 20;
const VAGUE_NAMES: &[&str] = &["util", "utils", "common", "helpers", "misc", "manager"];

/// Checks every rule in the repository at `root`.
///
/// # Errors
/// If a file cannot be read, or git or cargo fails.
pub fn check(root: &Path) -> Result<Findings> {
    let files = tracked(root)?;
    let metadata = crates::metadata(root)?;
    let sources = Sources::read(root, &files)?;
    let mut wrong = Vec::new();
    top_level(&files, &mut wrong);
    sizes(root, &files, &sources, &mut wrong)?;
    names(&files, &mut wrong);
    crates::stated_arrows(&metadata, &mut wrong);
    circles::between_modules(root, &sources, &metadata, &mut wrong)?;
    lints::nobody_departs(root, &metadata, &mut wrong)?;
    faults::are_tested_as_stated(root, &sources, &metadata, &mut wrong)?;
    let index = sources.text(Path::new("docs/decisions.md"))?;
    decisions::are_in_the_index(&files, index, &mut wrong);
    imports::have_one_style(&sources, &mut wrong)?;
    examples::are_compiled(root, &sources, &metadata, &mut wrong)?;
    words::none_is_retired(&sources, &mut wrong);
    Ok(Findings {
        files: files.len(),
        wrong,
    })
}

/// Files that git tracks, or would if they were added.
fn tracked(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ])
        .current_dir(root)
        .output()
        .context("git ls-files")?;
    if !output.status.success() {
        bail!(
            "git ls-files: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let listing =
        String::from_utf8(output.stdout).context("git ls-files: names that are not UTF-8")?;
    let present = listing
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from);
    Ok(present.filter(|path| root.join(path).is_file()).collect())
}

fn top_level(files: &[PathBuf], wrong: &mut Vec<String>) {
    let found: BTreeSet<String> = files
        .iter()
        .filter_map(|path| path.components().next())
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'))
        .collect();
    for name in found
        .iter()
        .filter(|name| !TOP_LEVEL.contains(&name.as_str()))
    {
        wrong.push(format!("{name}: unexpected top-level entry"));
    }
    for name in TOP_LEVEL.iter().filter(|name| !found.contains(**name)) {
        wrong.push(format!("{name}: missing top-level entry"));
    }
}

fn sizes(root: &Path, files: &[PathBuf], sources: &Sources, wrong: &mut Vec<String>) -> Result<()> {
    for path in files {
        let full = root.join(path);
        let bytes = fs::metadata(&full)
            .with_context(|| full.display().to_string())?
            .len();
        if bytes > MAX_BYTES {
            wrong.push(format!(
                "{}: {bytes} bytes; do not commit binaries",
                path.display()
            ));
            continue;
        }
        let limit = match path.to_str() {
            Some("docs/architecture.md") => MAX_ARCHITECTURE_LINES,
            _ if path.extension().is_some_and(|e| e == "rs") => MAX_LINES,
            _ => continue,
        };
        let lines = sources.text(path)?.lines().count();
        if lines > limit {
            wrong.push(format!(
                "{}: expected at most {limit} lines, got {lines}",
                path.display()
            ));
        }
    }
    Ok(())
}

fn names(files: &[PathBuf], wrong: &mut Vec<String>) {
    for path in files {
        for part in path.components() {
            let part = part.as_os_str().to_string_lossy();
            let stem = part.split('.').next().unwrap_or(&part);
            if VAGUE_NAMES.contains(&stem) {
                wrong.push(format!(
                    "{}: \"{stem}\" is not a descriptive name",
                    path.display()
                ));
            }
        }
    }
}
