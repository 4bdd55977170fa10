//! The Go toolchain: pinned by its exact version, fetched by any Go that knows how.
//!
//! Since 1.21 the go command can become another version of itself, which it fetches as a module and checks against the
//! checksum database (`GOTOOLCHAIN`). So a machine needs some Go of that age, and the result does not depend on which.
//! Where PATH has none, Debian's backports have one; it is unpacked into the user's cache and not installed.

use std::path::{Path, PathBuf};

use hearth_build::apt::{Apt, AptError};
use hearth_build::cache::Cache;
use hearth_build::command::{Cmd, CommandError, find_program};
use hearth_build::files;
use hearth_build::progress::{Length, Progress};

use crate::error::{ProgramsError, ToolchainError};
use crate::go::{Caches, Go};

/// The file with the pinned version, in `image/programs`.
const PIN: &str = "toolchain";

/// The oldest Go that knows GOTOOLCHAIN.
const OLDEST: &str = "1.21";

/// The release of Debian whose backports have a Go, and their package.
const RELEASE: &str = "bookworm";
const PACKAGE: &str = "golang-1.23-go";

/// The pinned toolchain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Toolchain {
    /// "go1.26.8".
    pub(crate) version: String,
}

impl Toolchain {
    pub(crate) fn pinned(sources: &Path) -> Result<Toolchain, ProgramsError> {
        let file = sources.join(PIN);
        let text = files::read_text(&file)?;
        match numbers(text.trim()) {
            Some(numbers) if numbers.len() == 3 => Ok(Toolchain {
                version: text.trim().to_owned(),
            }),
            _ => Err(ToolchainError::Pin { file, found: text }.into()),
        }
    }

    /// Pins this one.
    pub(crate) fn pin(&self, sources: &Path) -> Result<(), ProgramsError> {
        Ok(files::write(
            &sources.join(PIN),
            format!("{}\n", self.version),
        )?)
    }

    /// The go command of this version.
    pub(crate) fn go<'a>(
        &self,
        progress: &dyn Progress,
        caches: &'a Caches,
    ) -> Result<Go<'a>, ProgramsError> {
        let go = Go::new(progress, ensure_go(progress)?, &self.version, caches)?;
        let answer = go.cmd("version").output(progress);
        let answer = answer.map_err(|source| ToolchainError::NotPinned {
            pinned: self.version.clone(),
            source,
        })?;
        if answer.split_whitespace().nth(2) != Some(&self.version) {
            return Err(ProgramsError::Output {
                command: "version",
                expected: "the pinned toolchain",
                found: answer,
            });
        }
        Ok(go)
    }
}

/// A go command that can fetch the pinned one: that of PATH, or Debian's, which is fetched if it is not in the cache.
pub fn ensure_go(progress: &dyn Progress) -> Result<PathBuf, ToolchainError> {
    let found = match find_program("go") {
        None => "no go command".to_owned(),
        Some(go) => {
            let answer = Cmd::new(&go)
                .arg("version")
                .env("GOTOOLCHAIN", "local")
                .output(progress)?;
            if answer.split_whitespace().nth(2).is_some_and(is_recent) {
                return Ok(go);
            }
            answer.trim().to_owned()
        }
    };
    let entry = Cache::of_user("go")?.ensure(progress, PACKAGE, |_, scratch| {
        fetch(progress, scratch, &found)
    })?;
    go_below(&entry)
}

/// Unpacks Debian's package in `scratch`; returns the folder.
fn fetch(progress: &dyn Progress, scratch: &Path, found: &str) -> Result<PathBuf, ToolchainError> {
    progress.say(&format!(
        "fetching Go from Debian's backports: PATH has {found}, and {OLDEST} or newer is needed"
    ));
    let task = progress.start("fetching Go", Length::Unknown);
    let not_fetched = |source: CommandError| ToolchainError::NotFetched {
        oldest: OLDEST,
        found: found.to_owned(),
        source,
    };
    let apt = Apt::of_suite(progress, scratch, RELEASE, &format!("{RELEASE}-backports"))?;
    apt.update(progress, &*task).map_err(not_fetched)?;
    apt.download(progress, &*task, [PACKAGE])
        .map_err(not_fetched)?;
    let unpacked = scratch.join("go");
    for file in files::entries(&apt.finish()?)? {
        Cmd::new("dpkg-deb")
            .arg("--extract")
            .arg(file.path())
            .arg(&unpacked)
            .run(progress)
            .map_err(AptError::from)?;
    }
    go_below(&unpacked)?;
    task.done();
    Ok(unpacked)
}

/// The go command of an unpacked package, which is below the name of its series.
fn go_below(unpacked: &Path) -> Result<PathBuf, ToolchainError> {
    let series = files::entries(&unpacked.join("usr/lib"))?;
    let mut programs = series.iter().map(|folder| folder.path().join("bin/go"));
    programs
        .find(|program| program.exists())
        .ok_or_else(|| ToolchainError::Empty(unpacked.to_owned()))
}

/// Whether "go1.26.8" knows GOTOOLCHAIN.
fn is_recent(version: &str) -> bool {
    numbers(version) >= numbers(&format!("go{OLDEST}"))
}

/// The numbers of a version of Go; none if it is no release.
pub(crate) fn numbers(version: &str) -> Option<Vec<u32>> {
    let numbers = version.strip_prefix("go")?.split('.');
    numbers.map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_go_are_compared_by_number() {
        for (version, recent) in [
            ("go1.26.8", true),
            ("go1.21.0", true),
            ("go1.100", true),
            ("go1.19.8", false),
            ("go1.9", false),
            ("devel", false),
        ] {
            assert_eq!(is_recent(version), recent, "{version}");
        }
    }

    #[test]
    fn the_pin_is_one_release() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        let pinned = Toolchain::pinned(sources).unwrap();
        assert!(is_recent(&pinned.version));
        let dir = tempfile::tempdir().unwrap();
        for text in ["1.26.8", "go1.26", "go1.27rc1", ""] {
            std::fs::write(dir.path().join(PIN), text).unwrap();
            let error = Toolchain::pinned(dir.path()).unwrap_err().to_string();
            assert!(error.contains("expected a version like"), "{error}");
        }
        pinned.pin(dir.path()).unwrap();
        assert_eq!(Toolchain::pinned(dir.path()).unwrap(), pinned);
    }
}
