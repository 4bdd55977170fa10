//! `cargo xtask tidy`: the rules of the house that a program can check.
//!
//! `docs/architecture.md` states them as invariants; each function here is
//! one of them. They look at what git tracks or would track, so build output
//! is never looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::checkout::root;
use crate::ui::Ui;

/// Check the rules of the repository that a program can check.
#[derive(clap::Args)]
pub struct Args {}

/// What stands at the top of the tree, beside dotfiles.
const TOP_LEVEL: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "clippy.toml",
    "docs",
    "image",
    "kernel-config",
    "node",
    "qemu",
    "tests",
    "xtask",
];

/// Our crates, and which of our crates each may depend on.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("hearth-api", &[]),
    (
        "hearth-agent",
        &["hearth-api", "hearth-base", "hearth-host", "hearth-sys"],
    ),
    ("hearth-base", &[]),
    ("hearth-build", &[]),
    ("hearth-bundle", &["hearth-build"]),
    (
        "hearth-consensus",
        &["hearth-api", "hearth-base", "hearth-host", "hearth-sys"],
    ),
    (
        "hearth-core",
        &[
            "hearth-agent",
            "hearth-api",
            "hearth-base",
            "hearth-consensus",
            "hearth-curator",
            "hearth-enrolment",
            "hearth-host",
            "hearth-kubernetes",
            "hearth-sys",
        ],
    ),
    (
        "hearth-curator",
        &[
            "hearth-api",
            "hearth-base",
            "hearth-consensus",
            "hearth-host",
            "hearth-sys",
        ],
    ),
    (
        "hearth-enrolment",
        &["hearth-api", "hearth-base", "hearth-host", "hearth-sys"],
    ),
    ("hearth-host", &["hearth-api", "hearth-base", "hearth-sys"]),
    (
        "hearth-kubernetes",
        &[
            "hearth-agent",
            "hearth-api",
            "hearth-base",
            "hearth-consensus",
            "hearth-host",
            "hearth-kubernetes-api",
            "hearth-kubernetes-dns",
            "hearth-sys",
        ],
    ),
    ("hearth-kubernetes-api", &["hearth-api", "hearth-base"]),
    (
        "hearth-kubernetes-dns",
        &[
            "hearth-api",
            "hearth-base",
            "hearth-host",
            "hearth-kubernetes-api",
            "hearth-sys",
        ],
    ),
    ("hearth-sys", &["hearth-base"]),
    ("hearth-ctl", &["hearth-api"]),
    (
        "hearth-extension",
        &["hearth-api", "hearth-build", "hearth-image"],
    ),
    ("hearth-image", &[]),
    ("hearth-kernel", &["hearth-build"]),
    ("hearth-lab", &["hearth-api", "hearth-qemu"]),
    ("hearth-process", &[]),
    (
        "hearth-qemu",
        &["hearth-api", "hearth-process", "hearth-switch"],
    ),
    ("hearth-switch", &["hearth-process"]),
    ("hearth-tests", &["hearth-api", "hearth-lab", "hearth-qemu"]),
    (
        "xtask",
        &[
            "hearth-api",
            "hearth-build",
            "hearth-bundle",
            "hearth-extension",
            "hearth-image",
            "hearth-kernel",
            "hearth-lab",
            "hearth-qemu",
        ],
    ),
];

/// A longer file is two files.
const MAX_LINES: usize = 800;
const MAX_ARCHITECTURE_LINES: usize = 300;
const MAX_BYTES: u64 = 1 << 20;
const VAGUE_NAMES: &[&str] = &["util", "utils", "common", "helpers", "misc", "manager"];

/// Our crates.
pub fn crates() -> impl Iterator<Item = &'static str> {
    MAY_DEPEND_ON.iter().map(|(name, _)| *name)
}

/// Checks every rule and reports all that is wrong, not the first thing only.
pub fn run(ui: &Ui, _args: Args) -> Result<()> {
    let root = root();
    let files = tracked(&root)?;
    let metadata = metadata(&root)?;
    let mut wrong = Vec::new();
    top_level(&files, &mut wrong);
    sizes(&root, &files, &mut wrong)?;
    names(&files, &mut wrong);
    one_way_between_crates(&metadata, &mut wrong);
    licences(&metadata, &mut wrong);
    for line in &wrong {
        ui.say(line);
    }
    match wrong.len() {
        0 => {
            ui.say(format_args!(
                "tidy: {} files, nothing to complain of",
                files.len()
            ));
            Ok(())
        }
        n => bail!("{n} rules are broken"),
    }
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
        wrong.push(format!("{name}: not one of the house's rooms"));
    }
    for name in TOP_LEVEL.iter().filter(|name| !found.contains(**name)) {
        wrong.push(format!("{name}: missing"));
    }
}

fn sizes(root: &Path, files: &[PathBuf], wrong: &mut Vec<String>) -> Result<()> {
    for path in files {
        let full = root.join(path);
        let bytes = fs::metadata(&full)
            .with_context(|| full.display().to_string())?
            .len();
        if bytes > MAX_BYTES {
            wrong.push(format!(
                "{}: {bytes} bytes; binaries are never committed",
                path.display()
            ));
            continue;
        }
        let limit = match path.to_str() {
            Some("docs/architecture.md") => MAX_ARCHITECTURE_LINES,
            _ if path.extension().is_some_and(|e| e == "rs") => MAX_LINES,
            _ => continue,
        };
        let text = fs::read_to_string(&full).with_context(|| full.display().to_string())?;
        let lines = text.lines().count();
        if lines > limit {
            wrong.push(format!(
                "{}: {lines} lines, at most {limit}",
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
                    "{}: \"{stem}\" says nothing of what it is for",
                    path.display()
                ));
            }
        }
    }
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    license: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// "dev" for what only tests link, "build", or nothing.
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<ResolvedNode>,
}

#[derive(Deserialize)]
struct ResolvedNode {
    id: String,
    deps: Vec<ResolvedDependency>,
}

#[derive(Deserialize)]
struct ResolvedDependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    kind: Option<String>,
}

fn metadata(root: &Path) -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    serde_json::from_slice(&output.stdout).context("cargo metadata: its answer")
}

fn one_way_between_crates(metadata: &Metadata, wrong: &mut Vec<String>) {
    let rules: BTreeMap<&str, &[&str]> = MAY_DEPEND_ON.iter().copied().collect();
    for package in &metadata.packages {
        let Some(allowed) = rules.get(package.name.as_str()) else {
            continue;
        };
        let product = |dependency: &&Dependency| dependency.kind.as_deref() != Some("dev");
        for dependency in package.dependencies.iter().filter(product) {
            let name = dependency.name.as_str();
            if rules.contains_key(name) && !allowed.contains(&name) {
                wrong.push(format!("{} must not depend on {name}", package.name));
            }
        }
    }
}

/// No copyleft in what runs on the node: walks what the binary links.
fn licences(metadata: &Metadata, wrong: &mut Vec<String>) {
    let nodes: BTreeMap<&str, &ResolvedNode> = metadata
        .resolve
        .nodes
        .iter()
        .map(|node| (node.id.as_str(), node))
        .collect();
    let core = metadata
        .packages
        .iter()
        .find(|package| package.name == "hearth-core");
    let mut pending: Vec<&str> = core
        .map(|package| package.id.as_str())
        .into_iter()
        .collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = pending.pop() {
        if !linked.insert(id) {
            continue;
        }
        for dependency in nodes.get(id).into_iter().flat_map(|node| &node.deps) {
            if dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()) {
                pending.push(&dependency.pkg);
            }
        }
    }
    for package in metadata
        .packages
        .iter()
        .filter(|package| linked.contains(package.id.as_str()))
    {
        match package.license.as_deref() {
            Some(licence) if permissive(licence) => {}
            Some(licence) => wrong.push(format!(
                "{}: {licence} may not go into the node",
                package.name
            )),
            None => wrong.push(format!("{}: no licence is declared", package.name)),
        }
    }
}

/// Whether an SPDX expression leaves us a choice without copyleft.
fn permissive(expression: &str) -> bool {
    let choices = expression
        .split(" OR ")
        .flat_map(|choice| choice.split('/'));
    choices
        .into_iter()
        .any(|choice| !choice.contains("GPL") && !choice.contains("MPL"))
}

#[cfg(test)]
mod tests {
    use super::permissive;

    #[test]
    fn copyleft_is_found_and_a_choice_is_taken() {
        assert!(permissive("MIT OR Apache-2.0"));
        assert!(permissive("MIT/Apache-2.0"));
        assert!(permissive("Apache-2.0 OR LGPL-2.1-or-later"));
        assert!(!permissive("MPL-2.0"));
        assert!(!permissive("GPL-3.0-only"));
    }
}
