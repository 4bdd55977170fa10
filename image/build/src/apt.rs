//! Debian packages, binary and source, fetched by apt and never installed.
//!
//! apt already has the machine's mirrors, proxies and keys, and checks every signature and hash. It runs with a private
//! configuration, because the machine's usually lists no source packages and must not be changed, and because fetching
//! must work for an ordinary user. The private configuration repeats the machine's entries with their sources added,
//! and its `Acquire` settings; index files, cache and state are in a scratch folder. The machine's hooks are left out:
//! they belong to the machine's own updates.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Cmd, CommandError};
use crate::files::{FileError, create_dir, failed, write};
use crate::progress::{Progress, Task};

/// apt with a private configuration.
pub struct Apt {
    config: PathBuf,
    /// The folder that the files are fetched into.
    fetched: PathBuf,
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
}

impl Apt {
    /// Prepares apt for packages of this Debian release ("bookworm"), in an empty folder.
    pub fn new(progress: &dyn Progress, scratch: &Path, release: &str) -> Result<Apt, AptError> {
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
        copy_entries(Path::new("/etc/apt"), &sources)?;
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

    /// Fetches binary packages of these names.
    pub fn download(
        &self,
        progress: &dyn Progress,
        task: &dyn Task,
        packages: impl Iterator<Item = &'static str>,
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

    /// Fetches a source package.
    pub fn download_source(
        &self,
        progress: &dyn Progress,
        task: &dyn Task,
        package: &str,
    ) -> Result<(), CommandError> {
        let source = self.get("source").arg("--download-only");
        self.follow(progress, task, source.arg(package))
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

/// Copies the machine's package entries, adding sources to each.
fn copy_entries(from: &Path, to: &Path) -> Result<(), FileError> {
    let mut files = vec![from.join("sources.list")];
    if let Ok(parts) = from.join("sources.list.d").read_dir() {
        files.extend(parts.flatten().map(|entry| entry.path()));
    }
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let Ok(text) = fs::read_to_string(&file) else {
            // Absent, or not readable for this user.
            continue;
        };
        let text = match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => with_sources_of_lines(&text),
            Some("sources") => with_sources_of_stanzas(&text),
            _ => continue,
        };
        write(&to.join(&*name), text)?;
    }
    Ok(())
}

fn with_sources_of_lines(text: &str) -> String {
    let mut lines = String::new();
    for line in text.lines() {
        lines += &format!("{line}\n");
        if let Some(rest) = line.trim_start().strip_prefix("deb")
            && rest.starts_with([' ', '\t'])
        {
            lines += &format!("deb-src{rest}\n");
        }
    }
    lines
}

fn with_sources_of_stanzas(text: &str) -> String {
    let mut lines = String::new();
    for line in text.lines() {
        lines += line;
        if let Some((name, types)) = line.split_once(':')
            && name.eq_ignore_ascii_case("types")
            && !types.split_whitespace().any(|kind| kind == "deb-src")
        {
            lines += " deb-src";
        }
        lines += "\n";
    }
    lines
}

/// Prefers packages of this Debian release to those of the same name from anywhere else, backports included.
fn preferences(release: &str) -> String {
    ["", "-updates", "-security"]
        .map(|part| {
            format!("Package: *\nPin: release o=Debian,n={release}{part}\nPin-Priority: 990\n")
        })
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
    fn entries_get_their_sources() {
        let lines = "# deb old\ndeb [signed-by=/k] http://mirror/debian bookworm main\ndeb-src http://mirror/x y z\n";
        assert_eq!(
            with_sources_of_lines(lines),
            "# deb old\ndeb [signed-by=/k] http://mirror/debian bookworm main\n\
             deb-src [signed-by=/k] http://mirror/debian bookworm main\ndeb-src http://mirror/x y z\n"
        );
        let stanzas = "Types: deb\nURIs: http://mirror/debian\n\ntypes: deb deb-src\n";
        assert_eq!(
            with_sources_of_stanzas(stanzas),
            "Types: deb deb-src\nURIs: http://mirror/debian\n\ntypes: deb deb-src\n"
        );
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
