//! Debian packages, fetched by apt and never installed.
//!
//! apt already has the machine's mirrors, proxies and keys, and checks every signature and hash. It runs with a private
//! configuration, because the machine's must not be changed, and because fetching must work for an ordinary user. The
//! private configuration repeats the machine's entries, with further components of Debian where a caller needs them, such
//! as the one with firmware, or has one suite at the mirrors that they name; it repeats the machine's `Acquire` settings.
//! Index files, cache and state are in a scratch folder. The machine's hooks are left out: they belong to the machine's
//! own updates.

mod components;
mod entries;

use std::fs;
use std::path::{Path, PathBuf};

use components::Components;
use entries::Form;

use crate::command::{Cmd, CommandError};
use crate::files::{FileError, create_dir, failed, write};
use crate::progress::{Progress, Task};

/// apt with a private configuration.
pub struct Apt {
    config: PathBuf,
    /// The folder that the files are fetched into.
    fetched: PathBuf,
}

/// A binary package that the mirror has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// The name of its file ("firmware-bnx2_20230210-5_all.deb").
    pub file: String,
    /// The hash of the file in the signed index, with its kind ("SHA256:…").
    pub hash: String,
}

impl Available {
    /// The name of the package.
    pub fn package(&self) -> &str {
        self.file.split('_').next().unwrap_or_default()
    }

    /// Parses a line of `--print-uris`: `'URI' FILE SIZE HASH`.
    fn parse(line: &str) -> Option<Available> {
        let (_, rest) = line.strip_prefix('\'')?.split_once("' ")?;
        match rest.split_whitespace().collect::<Vec<_>>()[..] {
            [file, _size, hash] if file.ends_with(".deb") => Some(Available {
                file: file.to_owned(),
                hash: hash.to_owned(),
            }),
            _ => None,
        }
    }
}

/// Why packages were not fetched.
#[derive(Debug, thiserror::Error)]
pub enum AptError {
    /// An apt command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The machine's apt has no entry of this release of Debian.
    #[error("this machine's apt has no entry of Debian {0}")]
    NoEntry(String),
}

impl Apt {
    /// Prepares apt for packages of this Debian release ("bookworm"), in an empty folder.
    pub fn new(progress: &dyn Progress, scratch: &Path, release: &str) -> Result<Apt, AptError> {
        Apt::prepare(progress, scratch, release, |text, _| text.to_owned())
    }

    /// The same, with further components of Debian ("non-free-firmware") from the machine's mirrors of this release.
    pub fn with_components(
        progress: &dyn Progress,
        scratch: &Path,
        release: &str,
        components: &[&str],
    ) -> Result<Apt, AptError> {
        let components = Components {
            suites: suites(release),
            components,
        };
        Apt::prepare(progress, scratch, release, |text, form| {
            components.added_to(text, form)
        })
    }

    /// Prepares apt for packages of one suite that belongs to a Debian release ("bookworm-backports" to "bookworm") and
    /// that the machine may not list: at the machine's mirror for that release.
    pub fn of_suite(
        progress: &dyn Progress,
        scratch: &Path,
        release: &str,
        suite: &str,
    ) -> Result<Apt, AptError> {
        Apt::prepare(progress, scratch, release, |text, form| {
            entries::of_suite(text, form, release, suite)
        })
    }

    /// `entry`: what becomes of a file with the machine's entries.
    fn prepare(
        progress: &dyn Progress,
        scratch: &Path,
        release: &str,
        entry: impl Fn(&str, Form) -> String,
    ) -> Result<Apt, AptError> {
        let dir = scratch.join("apt");
        let sources = dir.join("sources");
        let fetched = scratch.join("fetched");
        for folder in [
            &sources,
            &dir.join("state/lists/partial"),
            &fetched.join("partial"),
        ] {
            create_dir(folder)?;
        }
        if !entries::copy(Path::new("/etc/apt"), &sources, entry)? {
            return Err(AptError::NoEntry(release.to_owned()));
        }
        write(&dir.join("preferences"), preferences(release))?;
        write(&dir.join("state/status"), "")?;
        let machine = Cmd::new("apt-config").arg("dump").output(progress)?;
        let config = dir.join("apt.conf");
        write(&config, configuration(&machine, &dir, &fetched))?;
        Ok(Apt { config, fetched })
    }

    /// Reads the package indices. Must be called before any download.
    pub fn update(&self, progress: &dyn Progress, task: &dyn Task) -> Result<(), CommandError> {
        self.follow(progress, task, self.get("update"))
    }

    /// The binary packages of these names, in the versions that [`Apt::download`] would fetch.
    pub fn available<'a>(
        &self,
        progress: &dyn Progress,
        packages: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Available>, CommandError> {
        let printed = self.get("download").arg("--print-uris").args(packages);
        let printed = printed.dir(&self.fetched).output(progress)?;
        Ok(printed.lines().filter_map(Available::parse).collect())
    }

    /// The folder that files are fetched into.
    pub fn fetched(&self) -> &Path {
        &self.fetched
    }

    /// Fetches binary packages of these names.
    pub fn download<'a>(
        &self,
        progress: &dyn Progress,
        task: &dyn Task,
        packages: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), CommandError> {
        self.follow(progress, task, self.get("download").args(packages))
    }

    /// Fetches binary packages of these names and all their dependencies.
    pub fn download_whole(
        &self,
        progress: &dyn Progress,
        task: &dyn Task,
        packages: impl Iterator<Item = &'static str>,
    ) -> Result<(), CommandError> {
        let install =
            self.get("install")
                .args(["--download-only", "--yes", "--no-install-recommends"]);
        self.follow(progress, task, install.args(packages))
    }

    /// The folder that holds the fetched files and nothing else.
    pub fn finish(self) -> Result<PathBuf, AptError> {
        let context = || failed("clean", &self.fetched);
        fs::remove_dir_all(self.fetched.join("partial")).map_err(context())?;
        match fs::remove_file(self.fetched.join("lock")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(context()(error).into())
            }
            _ => Ok(self.fetched),
        }
    }

    fn follow(
        &self,
        progress: &dyn Progress,
        task: &dyn Task,
        cmd: Cmd,
    ) -> Result<(), CommandError> {
        cmd.dir(&self.fetched).stream(progress, |line| {
            task.now(line.trim());
            Ok(())
        })
    }

    fn get(&self, what: &str) -> Cmd {
        Cmd::new("apt-get")
            .env("APT_CONFIG", &self.config)
            .env("LC_ALL", "C")
            .args(["--quiet", what])
    }
}

/// The suites of a release of Debian.
fn suites(release: &str) -> [String; 3] {
    ["", "-updates", "-security"].map(|part| format!("{release}{part}"))
}

/// Prefers packages of this Debian release to those of the same name from anywhere else, backports included.
fn preferences(release: &str) -> String {
    suites(release)
        .map(|suite| format!("Package: *\nPin: release o=Debian,n={suite}\nPin-Priority: 990\n"))
        .join("\n")
}

/// `machine` is the machine's configuration, as `apt-config dump` prints it. The result treats nothing as installed, so
/// that dependencies are fetched completely and no version is preferred because the machine has it.
fn configuration(machine: &str, dir: &Path, fetched: &Path) -> String {
    let mut config = String::new();
    for line in machine.lines() {
        // Proxies, timeouts and the like, but not the further indices that other programs make apt fetch.
        if line.starts_with("Acquire::") && !line.starts_with("Acquire::IndexTargets") {
            config += &format!("{line}\n");
        }
    }
    let (dir, fetched) = (dir.display(), fetched.display());
    config
        + &format!(
            r#"Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{dir}/sources";
Dir::Etc::preferences "{dir}/preferences";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{dir}/state";
Dir::State::status "{dir}/state/status";
Dir::Cache "{dir}/cache";
Dir::Cache::archives "{fetched}";
APT::Sandbox::User "root";
"#
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_mirror_has_is_read_from_its_addresses() {
        let line = "'http://mirror/pool/firmware-bnx2_20230210-5_all.deb' firmware-bnx2_20230210-5_all.deb 123 SHA256:ab";
        let available = Available::parse(line).unwrap();
        assert_eq!(available.package(), "firmware-bnx2");
        assert_eq!(available.hash, "SHA256:ab");
        assert_eq!(Available::parse("Reading package lists..."), None);
    }

    #[test]
    fn configuration_takes_what_is_about_acquiring_and_no_hooks() {
        let machine = "Acquire::http::Proxy \"http://proxy\";\nAcquire::IndexTargets::deb::DEP-11 \"x\";\n\
                       APT::Update::Post-Invoke:: \"hook\";\nDir \"/\";\n";
        let config = configuration(machine, Path::new("/scratch"), Path::new("/fetched"));
        assert!(config.starts_with("Acquire::http::Proxy \"http://proxy\";\nDir::Etc::main"));
        assert!(config.contains("Dir::State \"/scratch/state\";\n"));
        assert!(config.contains("Dir::Cache::archives \"/fetched\";\n"));
        assert!(!config.contains("hook") && !config.contains("DEP-11"));
    }
}
