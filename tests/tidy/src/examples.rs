//! Checks that every example in a doc comment is compiled: crates without examples have their doc tests switched off,
//! because rustdoc takes seconds to find that there are none.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::crates::Metadata;

pub(super) fn are_compiled(
    root: &Path,
    files: &[PathBuf],
    metadata: &Metadata,
    wrong: &mut Vec<String>,
) -> Result<()> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
    for package in metadata.ours() {
        let manifest = read(&package.manifest_path)?;
        let folder = package
            .manifest_path
            .parent()
            .map(|folder| folder.join("src"));
        let Some(folder) = folder.filter(|_| manifest.contains("doctest = false")) else {
            continue;
        };
        let folder = folder.strip_prefix(root).unwrap_or(&folder);
        for path in files.iter().filter(|path| path.starts_with(folder)) {
            if path.extension().is_some_and(|extension| extension == "rs")
                && let Some(line) = example(&read(&root.join(path))?)
            {
                wrong.push(format!(
                    "{}:{line}: an example in a crate with doctest = false",
                    path.display()
                ));
            }
        }
    }
    Ok(())
}

/// The line of the first block in a doc comment that rustdoc takes for Rust.
fn example(text: &str) -> Option<usize> {
    let mut is_open = false;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let doc = line
            .strip_prefix("//!")
            .or_else(|| line.strip_prefix("///"));
        let Some(language) = doc.and_then(|doc| doc.trim_start().strip_prefix("```")) else {
            continue;
        };
        if !is_open && language.trim() != "text" {
            return Some(number + 1);
        }
        is_open = !is_open;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_example() {
        assert_eq!(example("//! ```text\n//! a\n//! ```\nfn f() {}\n"), None);
        assert_eq!(example("//! A.\n//! ```\n//! a();\n//! ```\n"), Some(2));
        assert_eq!(example("    /// ```no_run\n    /// ```\n"), Some(1));
        assert_eq!(example("//! ```text\n//! ```\n/// ```\n/// ```\n"), Some(3));
    }
}
