//! The texts of the repository, each read once; sources of Rust are parsed once, which takes longest.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::File;

/// Rust, documents and protocol buffers, by their paths in the repository.
pub(super) struct Sources(BTreeMap<PathBuf, Source>);

struct Source {
    text: String,
    syntax: OnceCell<File>,
}

impl Sources {
    pub(super) fn read(root: &Path, files: &[PathBuf]) -> Result<Sources> {
        let is_text = |path: &&PathBuf| ["rs", "md", "proto"].iter().any(|kind| is(path, kind));
        let source = |path: &PathBuf| {
            let full = root.join(path);
            let text = fs::read_to_string(&full).with_context(|| full.display().to_string())?;
            let syntax = OnceCell::new();
            Ok((path.clone(), Source { text, syntax }))
        };
        let sources = files.iter().filter(is_text).map(source);
        Ok(Sources(sources.collect::<Result<_>>()?))
    }

    pub(super) fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        let sources = self.0.iter();
        sources.map(|(path, source)| (path.as_path(), source.text.as_str()))
    }

    /// Those of Rust.
    pub(super) fn rust(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.texts().filter(|(path, _)| is(path, "rs"))
    }

    pub(super) fn has(&self, path: &Path) -> bool {
        self.0.contains_key(path)
    }

    pub(super) fn text(&self, path: &Path) -> Result<&str> {
        Ok(&self.source(path)?.text)
    }

    /// A source of Rust, parsed.
    pub(super) fn syntax(&self, path: &Path) -> Result<&File> {
        let source = self.source(path)?;
        if let Some(syntax) = source.syntax.get() {
            return Ok(syntax);
        }
        let syntax = syn::parse_file(&source.text).with_context(|| path.display().to_string())?;
        Ok(source.syntax.get_or_init(|| syntax))
    }

    fn source(&self, path: &Path) -> Result<&Source> {
        let source = self.0.get(path);
        source.with_context(|| format!("{}: not in the repository", path.display()))
    }
}

fn is(path: &Path, kind: &str) -> bool {
    path.extension().is_some_and(|extension| extension == kind)
}
