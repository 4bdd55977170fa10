//! Moves the pinned versions to the newest patch releases.
//!
//! A patch release fixes faults and keeps flags and configuration, so the node does not have to change with it. A new
//! minor release is another matter: it is chosen by hand, together with the table of flags.

use std::path::Path;

use hearth_build::cache::Cache;
use hearth_build::files::{self, failed};
use hearth_build::progress::{Length, Progress};

use crate::KIND;
use crate::compile::required;
use crate::error::ProgramsError;
use crate::go::{Caches, Go};
use crate::modules::{ALL, Module};
use crate::toolchain::{Toolchain, numbers};

/// A version that was moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The module, or the toolchain.
    pub name: &'static str,
    /// The version so far.
    pub from: String,
    /// The version now.
    pub to: String,
}

impl std::fmt::Display for Moved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} → {}", self.name, self.from, self.to)
    }
}

/// Moves the toolchain and every module to the newest patch release of its minor release; returns what moved.
pub fn update(progress: &dyn Progress, sources: &Path) -> Result<Vec<Moved>, ProgramsError> {
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    let task = progress.start("looking for patch releases", Length::Unknown);
    let caches = Caches::of_user()?;
    let pinned = Toolchain::pinned(sources)?;
    let go = pinned.go(progress, &caches)?;
    let mut moved = Vec::new();
    let newest = Toolchain {
        version: newest_toolchain(progress, &go, &pinned.version)?,
    };
    if newest != pinned {
        newest.pin(sources)?;
        moved.push(Moved {
            name: "go",
            from: pinned.version,
            to: newest.version.clone(),
        });
    }
    let go = newest.go(progress, &caches)?;
    for module in ALL {
        task.now(module.name);
        let scratch = builder.scratch()?;
        moved.extend(raise(
            progress,
            &go,
            &sources.join(module.name),
            scratch.path(),
            module,
        )?);
    }
    caches.trim(progress)?;
    task.done();
    Ok(moved)
}

/// Moves one module in `folder`. Works on a copy, so that a failure changes nothing.
fn raise(
    progress: &dyn Progress,
    go: &Go<'_>,
    folder: &Path,
    scratch: &Path,
    module: &'static Module,
) -> Result<Option<Moved>, ProgramsError> {
    for entry in files::entries(folder)? {
        let to = scratch.join(entry.file_name());
        std::fs::copy(entry.path(), &to).map_err(failed("write", &to))?;
    }
    let go_mod = || files::read_text(&scratch.join("go.mod"));
    let version = |text: &str| {
        required(text, module.upstream).ok_or_else(|| ProgramsError::NotRequired {
            file: folder.join("go.mod"),
            module: module.upstream,
        })
    };
    let before = go_mod()?;
    let from = version(&before)?;
    let to = newest_patch(progress, go, scratch, module, &from)?;
    if to == from {
        return Ok(None);
    }
    let mut wanted = vec![format!("{}@{to}", module.upstream)];
    wanted.extend(siblings(module, &before, &from, &to));
    go.cmd("get").dir(scratch).args(wanted).run(progress)?;
    go.cmd("mod").arg("tidy").dir(scratch).run(progress)?;
    for name in ["go.mod", "go.sum"] {
        files::write(&folder.join(name), files::read(&scratch.join(name))?)?;
    }
    Ok(Some(Moved {
        name: module.name,
        from,
        to,
    }))
}

/// The newest patch release of a module.
fn newest_patch(
    progress: &dyn Progress,
    go: &Go<'_>,
    folder: &Path,
    module: &Module,
    version: &str,
) -> Result<String, ProgramsError> {
    let answer = go
        .cmd("list")
        .dir(folder)
        .args(["-m", "-versions", module.upstream])
        .output(progress)?;
    Ok(newest_of_minor(answer.split_whitespace(), version))
}

/// The newest release with the first two numbers of `version`; at least `version`. Pre-releases do not count.
fn newest_of_minor<'a>(all: impl Iterator<Item = &'a str>, version: &str) -> String {
    let parse = |text: &str| {
        let (minor, patch) = text.rsplit_once('.')?;
        Some((minor.to_owned(), patch.parse::<u32>().ok()?))
    };
    let Some((minor, mut newest)) = parse(version) else {
        return version.to_owned();
    };
    for (of, patch) in all.filter_map(parse) {
        if of == minor {
            newest = newest.max(patch);
        }
    }
    format!("{minor}.{newest}")
}

fn newest_toolchain(
    progress: &dyn Progress,
    go: &Go<'_>,
    pinned: &str,
) -> Result<String, ProgramsError> {
    let answer = go
        .cmd("list")
        .args(["-m", "-versions", "go"])
        .output(progress)?;
    let all = answer
        .split_whitespace()
        .map(|version| format!("go{version}"));
    let releases: Vec<String> = all.filter(|version| numbers(version).is_some()).collect();
    Ok(newest_of_minor(releases.iter().map(String::as_str), pinned))
}

/// The modules that have the project's versions under another major number, at the new version.
fn siblings(module: &Module, go_mod: &str, from: &str, to: &str) -> Vec<String> {
    let Some(siblings) = &module.siblings else {
        return Vec::new();
    };
    let theirs = |version: &str| version.replacen(siblings.of_project, siblings.theirs, 1);
    let (old, new) = (theirs(from), theirs(to));
    let mut wanted = Vec::new();
    for line in go_mod.lines() {
        let mut words = line.split_whitespace();
        if let (Some(path), Some(version)) = (words.next(), words.next())
            && path.starts_with(siblings.prefix)
            && version == old
        {
            wanted.push(format!("{path}@{new}"));
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::KUBERNETES;

    #[test]
    fn only_patch_releases_are_taken() {
        let all = [
            "v1.36.9",
            "v1.37.1",
            "v1.37.2",
            "v1.37.10",
            "v1.37.11-rc.1",
            "v1.38.0",
        ];
        assert_eq!(newest_of_minor(all.into_iter(), "v1.37.2"), "v1.37.10");
        assert_eq!(newest_of_minor([].into_iter(), "v1.37.2"), "v1.37.2");
        assert_eq!(
            newest_of_minor(["go1.26.9", "go1.27.4"].into_iter(), "go1.26.8"),
            "go1.26.9"
        );
    }

    #[test]
    fn modules_of_the_same_project_move_with_it() {
        let go_mod = "require (\n\tk8s.io/api v0.37.2 // indirect\n\tk8s.io/klog/v2 v2.140.0 // indirect\n\
                      \tk8s.io/kubernetes v1.37.2\n)\n";
        assert_eq!(
            siblings(&KUBERNETES, go_mod, "v1.37.2", "v1.37.3"),
            ["k8s.io/api@v0.37.3"]
        );
        assert_eq!(
            required(go_mod, "k8s.io/kubernetes").as_deref(),
            Some("v1.37.2")
        );
        assert_eq!(
            required("require k8s.io/kubernetes v1.37.2", "k8s.io/kubernetes").as_deref(),
            Some("v1.37.2")
        );
        assert_eq!(required(go_mod, "k8s.io/absent"), None);
        // The name of a tool is no requirement.
        assert_eq!(
            required(
                "tool go.etcd.io/etcd/server/v3",
                "go.etcd.io/etcd/server/v3"
            ),
            None
        );
    }
}
