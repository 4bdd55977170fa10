//! Checks that each crate has the lints of the workspace, one of which forbids `unsafe`.
//!
//! `forbid` cannot be overridden by an `allow` in the code. So the few crates that need `unsafe` cannot inherit the
//! workspace's lints; they repeat them, with `deny` as the only difference, so that they can allow it locally.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::crates::Metadata;

/// The crates whose own modules may contain `unsafe`: on a node, only the kernel's interfaces.
const MAY_BE_UNSAFE: &[&str] = &[
    "hearth-build",
    "hearth-process",
    "hearth-qemu",
    "hearth-sys",
];

pub(super) fn nobody_departs(
    root: &Path,
    metadata: &Metadata,
    wrong: &mut Vec<String>,
) -> Result<()> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
    let workspace = read(&root.join("Cargo.toml"))?;
    for package in metadata.ours() {
        let manifest = read(&package.manifest_path)?;
        let may_be_unsafe = MAY_BE_UNSAFE.contains(&package.name.as_str());
        if !keeps(&workspace, &manifest, may_be_unsafe) {
            wrong.push(format!(
                "{}: the lints differ from the workspace's",
                package.name
            ));
        }
    }
    Ok(())
}

fn keeps(workspace: &str, manifest: &str, may_be_unsafe: bool) -> bool {
    if !may_be_unsafe {
        return section(manifest, "lints") == ["workspace = true"];
    }
    ["rust", "clippy"].iter().all(|tool| {
        let expected = section(workspace, &format!("workspace.lints.{tool}"));
        let own = section(manifest, &format!("lints.{tool}"));
        let expected = expected.iter().map(|line| match *line {
            "unsafe_code = \"forbid\"" => "unsafe_code = \"deny\"",
            line => line,
        });
        expected.eq(own)
    })
}

/// The lines of a section of a manifest, without comments and blank lines.
fn section<'a>(manifest: &'a str, name: &str) -> Vec<&'a str> {
    let header = format!("[{name}]");
    let lines = manifest
        .lines()
        .map(str::trim)
        .skip_while(|line| *line != header)
        .skip(1);
    let says_something = |line: &&str| !line.is_empty() && !line.starts_with('#');
    lines
        .take_while(|line| !line.starts_with('['))
        .filter(says_something)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::keeps;

    #[test]
    fn who_departs_from_the_lints_is_found() {
        let workspace = "[workspace.lints.rust]\nunsafe_code = \"forbid\"\nmissing_docs = \"warn\"\n\n[workspace.lints.clippy]\nall = 1\n";
        let inherits = "[lints]\nworkspace = true\n\n[dependencies]\n";
        let repeats = "# Why.\n[lints.rust]\nunsafe_code = \"deny\"\nmissing_docs = \"warn\"\n[lints.clippy]\nall = 1\n[features]\n";
        assert!(keeps(workspace, inherits, false));
        assert!(keeps(workspace, repeats, true));
        assert!(!keeps(workspace, repeats, false));
        assert!(!keeps(workspace, "[dependencies]\n", false));
        assert!(!keeps(
            workspace,
            &repeats.replace("missing_docs = \"warn\"\n", ""),
            true
        ));
        assert!(!keeps(workspace, &repeats.replace("deny", "allow"), true));
    }
}
