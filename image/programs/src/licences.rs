//! The licence of each module that is linked into a program: which it is, and its text.
//!
//! A module has its licence in files at its root. It is recognised by sentences that no other licence has; a module
//! with none of them, or with one of a licence that is not accepted, is an error: what we give away must be allowed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError};

use crate::error::LicenceError;
use crate::sbom::{Component, STANDARD_LIBRARY};

/// What marks each accepted licence, by its SPDX identifier.
const ACCEPTED: [(&str, &str); 6] = [
    ("Apache-2.0", "Apache License Version 2.0"),
    (
        "ISC",
        "Permission to use, copy, modify, and/or distribute this software for any purpose",
    ),
    (
        "ISC",
        "Permission to use, copy, modify, and distribute this software for any purpose",
    ),
    (
        "MIT",
        "Permission is hereby granted, free of charge, to any person obtaining a copy",
    ),
    ("MPL-2.0", "Mozilla Public License Version 2.0"),
    ("MPL-2.0", "Mozilla Public License version 2.0"),
];

/// The two licences of BSD have this in common, and one of them the other.
const BSD: &str = "Redistribution and use in source and binary forms";
const BSD_3: &str = "endorse or promote products";

/// Never accepted, whatever else the text says.
const REFUSED: [&str; 3] = [
    "GNU GENERAL PUBLIC LICENSE",
    "GNU AFFERO GENERAL PUBLIC LICENSE",
    "GNU LESSER GENERAL PUBLIC LICENSE",
];

/// Determines the licence of each module, and returns all texts; modules with the same text are listed before it.
/// `modules`: Go's folder of unpacked modules. `go`: the toolchain's root.
pub(crate) fn of(
    components: &mut [Component],
    modules: &Path,
    go: &Path,
) -> Result<String, LicenceError> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for component in components {
        let module = format!("{} {}", component.name, component.version);
        if !component.licence.is_empty() {
            let text = format!("{}\n", component.licence);
            texts.entry(text).or_default().push(module);
            continue;
        }
        let folder = match &*component.name {
            STANDARD_LIBRARY => go.to_owned(),
            name => unpacked(modules, name, &component.version),
        };
        let mut found = Vec::new();
        for file in files_of(&folder)? {
            let text = String::from_utf8_lossy(&files::read(&file)?).into_owned();
            for licence in recognise(&text).ok_or_else(|| LicenceError::Unknown {
                module: module.clone(),
                file,
            })? {
                if !found.contains(&licence) {
                    found.push(licence);
                }
            }
            texts.entry(text).or_default().push(module.clone());
        }
        if found.is_empty() {
            return Err(LicenceError::NoFile { module, folder });
        }
        component.licence = found.join(" AND ");
    }
    let blocks = texts.into_iter().map(|(text, modules)| {
        format!(
            "{}\n{}\n\n{}",
            "=".repeat(79),
            modules.join("\n"),
            text.trim_end()
        )
    });
    Ok(blocks.collect::<Vec<_>>().join("\n\n") + "\n")
}

/// Names of files that look like a module's licence and are not: two that say which other file applies to what, and the
/// licence of documentation.
const NO_LICENCES: [&str; 3] = ["copying.md", "license.docs", "license.libyaml"];

/// The files with a module's licence, sorted.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let mut licences = Vec::new();
    for entry in files::entries(folder)? {
        let name = entry.file_name().to_string_lossy().to_ascii_lowercase();
        let is_licence = ["license", "licence", "copying"]
            .iter()
            .any(|start| name.starts_with(start));
        if is_licence && !NO_LICENCES.contains(&&*name) && entry.path().is_file() {
            licences.push(entry.path());
        }
    }
    licences.sort();
    Ok(licences)
}

/// The licences of a text; none if it has none of the accepted ones, or one that is refused.
fn recognise(text: &str) -> Option<Vec<&'static str>> {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if REFUSED.iter().any(|title| words.contains(title)) {
        return None;
    }
    let plain = words.replace(',', "");
    let marked = ACCEPTED
        .iter()
        .filter(|(_, mark)| plain.contains(&mark.replace(',', "")));
    let mut found: Vec<&str> = marked.map(|(id, _)| *id).collect();
    if words.contains(BSD) {
        found.push(match words.contains(BSD_3) {
            true => "BSD-3-Clause",
            false => "BSD-2-Clause",
        });
    }
    found.dedup();
    (!found.is_empty()).then_some(found)
}

/// The folder of an unpacked module.
pub(crate) fn unpacked(modules: &Path, name: &str, version: &str) -> PathBuf {
    modules.join(format!("{}@{}", escaped(name), escaped(version)))
}

/// A path as Go's module cache has it: capital letters are small ones after "!".
fn escaped(path: &str) -> String {
    let mut escaped = String::with_capacity(path.len());
    for c in path.chars() {
        if c.is_ascii_uppercase() {
            escaped.push('!');
        }
        escaped.push(c.to_ascii_lowercase());
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIT: &str = "Permission is hereby granted, free of charge, to any person\nobtaining a copy of this software";
    const BSD_TEXT: &str =
        "Redistribution and use in source and binary forms, with or without modification";

    fn component(name: &str) -> Component {
        Component {
            name: name.to_owned(),
            version: "v1.0.0".to_owned(),
            purl: String::new(),
            licence: String::new(),
            sum: String::new(),
        }
    }

    #[test]
    fn licences_are_told_by_their_sentences() {
        let apache = "                 Apache License\n           Version 2.0, January 2004";
        assert_eq!(recognise(apache), Some(vec!["Apache-2.0"]));
        assert_eq!(recognise(MIT), Some(vec!["MIT"]));
        assert_eq!(recognise(BSD_TEXT), Some(vec!["BSD-2-Clause"]));
        let three = format!("{BSD_TEXT}\nmay be used to endorse or promote products");
        assert_eq!(
            recognise(&format!("{apache}\n{three}")),
            Some(vec!["Apache-2.0", "BSD-3-Clause"])
        );
        assert_eq!(recognise("All rights reserved."), None);
        assert_eq!(
            recognise(&format!("{MIT} GNU GENERAL PUBLIC LICENSE Version 3")),
            None
        );
    }

    #[test]
    fn every_module_needs_an_accepted_licence() {
        let dir = tempfile::tempdir().unwrap();
        let (modules, go) = (dir.path().join("modules"), dir.path().join("go"));
        let licence = |folder: &Path, text: &str| {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join("LICENSE"), text).unwrap();
        };
        licence(&go, BSD_TEXT);
        licence(&modules.join("example.com/!some/a@v1.0.0"), MIT);
        licence(&modules.join("example.com/b@v1.0.0"), MIT);
        let mut all = ["example.com/Some/a", "example.com/b", STANDARD_LIBRARY].map(component);
        let text = of(&mut all, &modules, &go).unwrap();
        assert_eq!(
            all.each_ref().map(|c| &*c.licence),
            ["MIT", "MIT", "BSD-2-Clause"]
        );
        assert_eq!(text.matches("free of charge").count(), 1);
        assert!(
            text.contains("example.com/Some/a v1.0.0\nexample.com/b v1.0.0\n\nPermission"),
            "{text}"
        );
        licence(&modules.join("example.com/c@v1.0.0"), "Ask us.");
        let error = of(&mut [component("example.com/c")], &modules, &go).unwrap_err();
        assert!(
            error.to_string().contains("example.com/c v1.0.0"),
            "{error}"
        );
    }
}
