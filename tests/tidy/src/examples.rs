//! Checks that every example in a doc comment is compiled: crates without examples have their doc tests switched off,
//! because rustdoc takes seconds to find that there are none.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::crates::Metadata;
use super::sources::Sources;

pub(super) fn are_compiled(
    root: &Path,
    sources: &Sources,
    metadata: &Metadata,
    wrong: &mut Vec<String>,
) -> Result<()> {
    for package in metadata.ours() {
        let path = &package.manifest_path;
        let manifest = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        if !manifest.contains("doctest = false") {
            continue;
        }
        let folder = path.with_file_name("src");
        let folder = folder.strip_prefix(root)?;
        for (path, text) in sources.rust().filter(|(path, _)| path.starts_with(folder)) {
            if let Some(line) = example(text) {
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
