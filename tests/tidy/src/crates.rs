//! Dependencies between our crates: the compiler forbids cycles, and the table here states the layering.
//!
//! The table states actual dependencies, not only permitted ones: a dependency that does not exist any more is an
//! error, too. So the table describes the architecture, and a new dependency has to be stated here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// Our crates, the lowest first; for each the crates it is built from; the further ones its tests are built from. In
/// the second and the third column `hearth-` is omitted.
#[rustfmt::skip]
const MAY_DEPEND_ON: &[(&str, &str, &str)] = &[
    ("hearth-api", "", ""),
    ("hearth-base", "", ""),
    ("hearth-tpm", "", ""),
    ("hearth-cidr", "", ""),
    ("hearth-sys", "base cidr", ""),
    ("hearth-history", "api", ""),
    ("hearth-parameters", "api cidr", ""),
    ("hearth-host", "api base parameters sys tpm", ""),
    // Reads what the image builder writes.
    ("hearth-installer", "api base host parameters sys", "image"),
    ("hearth-agent", "api base host sys", ""),
    ("hearth-consensus", "api base host sys", ""),
    ("hearth-cluster", "api consensus host parameters sys tpm", ""),
    // What its clients saw is checked.
    ("hearth-curator", "api base cluster consensus host sys tpm", "history"),
    ("hearth-curator-bench", "api cluster consensus curator", ""),
    // A machine registers with a real curator.
    ("hearth-enrolment", "api base host parameters sys tpm", "curator"),
    ("hearth-kubernetes-api", "api base", ""),
    ("hearth-kubernetes-dns", "api base host kubernetes-api", ""),
    ("hearth-network-policy", "api kubernetes-api sys", ""),
    // A worker gets its certificates from a real curator.
    ("hearth-kubernetes", "agent api base consensus host kubernetes-api kubernetes-dns network-policy sys", "curator"),
    ("hearth-core", "agent api base consensus curator enrolment host installer kubernetes parameters sys", "cluster history tpm"),
    ("hearth-fuzz", "api enrolment host image installer kubernetes-dns parameters sys tpm", ""),
    ("hearth-operator", "api tpm", ""),
    ("hearth-ctl", "api operator parameters sys tpm", "image"),
    ("hearth-image", "tpm", ""),
    ("hearth-build", "", ""),
    ("hearth-programs", "build", ""),
    ("hearth-bundle", "build programs", ""),
    // The page about hardware says which drivers our machines have booted.
    ("hearth-kernel", "build", "qemu"),
    ("hearth-extension", "api build image", ""),
    ("hearth-firmware", "build", ""),
    ("hearth-image-bench", "build image", ""),
    ("hearth-process", "", ""),
    ("hearth-switch", "process", ""),
    ("hearth-write-log", "", ""),
    ("hearth-qemu", "api process switch", "write-log"),
    ("hearth-lab", "api operator qemu tpm", ""),
    ("hearth-tests", "api history lab operator qemu tpm write-log", ""),
    ("hearth-runner", "build", ""),
    ("hearth-tidy", "", ""),
    ("xtask", "api build bundle extension firmware image image-bench kernel lab programs qemu runner tidy tpm", ""),
];

/// Our crates.
pub fn crates() -> impl Iterator<Item = &'static str> {
    MAY_DEPEND_ON.iter().map(|(name, _, _)| *name)
}

#[derive(Deserialize)]
pub(super) struct Metadata {
    pub(super) packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
}

#[derive(Deserialize)]
pub(super) struct Package {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) manifest_path: PathBuf,
    pub(super) targets: Vec<Target>,
    pub(super) dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
pub(super) struct Target {
    pub(super) kind: Vec<String>,
    pub(super) src_path: PathBuf,
}

#[derive(Deserialize)]
pub(super) struct Dependency {
    pub(super) name: String,
    /// "dev" for dependencies of tests, "build", or none.
    pub(super) kind: Option<String>,
}

pub(super) fn metadata(root: &Path) -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .arg("--no-deps")
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    serde_json::from_slice(&output.stdout).context("cannot parse the output of cargo metadata")
}

impl Metadata {
    /// Our crates in cargo's metadata.
    pub(super) fn ours(&self) -> impl Iterator<Item = &Package> {
        let is_ours = |package: &&Package| self.workspace_members.contains(&package.id);
        self.packages.iter().filter(is_ours)
    }
}

/// Compares the table with cargo's metadata.
pub(super) fn stated_arrows(metadata: &Metadata, wrong: &mut Vec<String>) {
    let ours: BTreeMap<&str, &Package> = metadata
        .ours()
        .map(|package| (package.name.as_str(), package))
        .collect();
    for name in ours
        .keys()
        .filter(|name| !crates().any(|stated| stated == **name))
    {
        wrong.push(format!("layering: {name}: missing in MAY_DEPEND_ON"));
    }
    for (name, product, tests) in MAY_DEPEND_ON {
        let Some(package) = ours.get(name) else {
            wrong.push(format!(
                "layering: {name}: in MAY_DEPEND_ON, but there is no such crate"
            ));
            continue;
        };
        let (for_tests, for_product): (Vec<_>, Vec<_>) = package
            .dependencies
            .iter()
            .filter(|dependency| ours.contains_key(dependency.name.as_str()))
            .partition(|dependency| dependency.kind.as_deref() == Some("dev"));
        let for_product = names(&for_product);
        let for_tests = &names(&for_tests) - &for_product;
        differences(name, "", product, &for_product, wrong);
        differences(name, " for its tests", tests, &for_tests, wrong);
    }
}

fn names<'a>(dependencies: &[&'a Dependency]) -> BTreeSet<&'a str> {
    let short = |name: &'a str| name.strip_prefix("hearth-").unwrap_or(name);
    dependencies
        .iter()
        .map(|dependency| short(&dependency.name))
        .collect()
}

fn differences(
    name: &str,
    purpose: &str,
    stated: &str,
    found: &BTreeSet<&str>,
    wrong: &mut Vec<String>,
) {
    let stated: BTreeSet<&str> = stated.split_whitespace().collect();
    for other in found.difference(&stated) {
        wrong.push(format!(
            "layering: {name} must not depend on {other}{purpose}"
        ));
    }
    for other in stated.difference(found) {
        wrong.push(format!(
            "layering: {name} does not depend on {other}{purpose}, but MAY_DEPEND_ON says so"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_that_are_not_stated_or_no_longer_there_are_found() {
        let mut wrong = Vec::new();
        differences(
            "hearth-x",
            "",
            "api base",
            &BTreeSet::from(["base", "sys"]),
            &mut wrong,
        );
        assert_eq!(wrong.len(), 2);
        assert!(wrong[0].contains("must not depend on sys"), "{wrong:?}");
        assert!(wrong[1].contains("does not depend on api"), "{wrong:?}");
    }
}
