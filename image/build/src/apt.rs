//! Debian packages, binary and source, fetched by apt and never installed.
//!
//! apt already has the machine's mirrors, proxies and keys, and checks every signature and hash. It runs with a private
//! configuration, because the machine's usually lists no source packages and must not be changed, and because fetching
//! must work for an ordinary user. The private configuration repeats the machine's entries with their sources added,
//! and, where a caller needs them, further components of Debian, such as the one with firmware; also repeated are its `Acquire` settings; index files, cache and state are in a scratch folder. The machine's hooks are left out:
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
}

impl Apt {
    /// Prepares apt for packages of this Debian release ("bookworm"), in an empty folder.
    pub fn new(progress: &dyn Progress, scratch: &Path, release: &str) -> Result<Apt, AptError> {
        Apt::with_components(progress, scratch, release, &[])
    }

    /// The same, with further components of Debian ("non-free-firmware") from the machine's mirrors of this release.
    pub fn with_components(
        progress: &dyn Progress,
        scratch: &Path,
        release: &str,
        components: &[&str],
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
        let debian = Components {
            suites: suites(release),
            components,
        };
        copy_entries(Path::new("/etc/apt"), &sources, &debian)?;
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
fn copy_entries(from: &Path, to: &Path, debian: &Components<'_>) -> Result<(), FileError> {
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
            Some("list") => with_sources_of_lines(&debian.in_lines(&text)),
            Some("sources") => with_sources_of_stanzas(&debian.in_stanzas(&text)),
            _ => continue,
        };
        write(&to.join(&*name), text)?;
    }
    Ok(())
}

/// The suites of a release of Debian.
fn suites(release: &str) -> [String; 3] {
    ["", "-updates", "-security"].map(|part| format!("{release}{part}"))
}

/// Components that are added to the entries for these suites. Entries of other providers have other suites.
struct Components<'a> {
    suites: [String; 3],
    components: &'a [&'a str],
}

impl Components<'_> {
    fn is_suite(&self, word: &str) -> bool {
        self.suites.iter().any(|suite| suite == word)
    }

    /// Those that are not among the words of an entry, each after a blank.
    fn missing_in(&self, entry: &str) -> String {
        let listed = |component: &str| entry.split_whitespace().any(|word| word == component);
        let missing = self.components.iter().filter(|word| !listed(word));
        missing.map(|word| format!(" {word}")).collect()
    }

    fn in_lines(&self, text: &str) -> String {
        let mut lines = String::new();
        for line in text.lines() {
            let entry = line.split('#').next().unwrap_or_default().trim_end();
            match entry.split_whitespace().any(|word| self.is_suite(word)) {
                true => lines += &format!("{entry}{}\n", self.missing_in(entry)),
                false => lines += &format!("{line}\n"),
            }
        }
        lines
    }

    fn in_stanzas(&self, text: &str) -> String {
        let stanzas = text.split("\n\n").map(|stanza| self.in_stanza(stanza));
        stanzas.collect::<Vec<_>>().join("\n")
    }

    fn in_stanza(&self, stanza: &str) -> String {
        let field = |line: &str, wanted: &str| {
            let (name, value) = line.split_once(':')?;
            let is = name.eq_ignore_ascii_case(wanted);
            is.then(|| value.to_owned())
        };
        let ours = stanza.lines().any(|line| {
            let suites = field(line, "suites").unwrap_or_default();
            suites.split_whitespace().any(|word| self.is_suite(word))
        });
        let mut lines = String::new();
        for line in stanza.lines() {
            lines += line;
            if ours && let Some(listed) = field(line, "components") {
                lines += &self.missing_in(&listed);
            }
            lines += "\n";
        }
        lines
    }
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
    fn components_are_added_to_the_entries_of_the_release_alone() {
        let firmware = Components {
            suites: suites("bookworm"),
            components: &["non-free-firmware"],
        };
        let lines = "deb http://mirror/debian bookworm main # ours\n\
                     deb http://mirror/debian bookworm-updates main non-free-firmware\n\
                     deb http://other/apt cloud-sdk-bookworm main\n";
        assert_eq!(
            firmware.in_lines(lines),
            "deb http://mirror/debian bookworm main non-free-firmware\n\
             deb http://mirror/debian bookworm-updates main non-free-firmware\n\
             deb http://other/apt cloud-sdk-bookworm main\n"
        );
        let stanzas = "Types: deb\nComponents: main\nSuites: bookworm-security\n\n\
                       Types: deb\nSuites: nodistro\nComponents: main\n";
        assert_eq!(
            firmware.in_stanzas(stanzas),
            "Types: deb\nComponents: main non-free-firmware\nSuites: bookworm-security\n\n\
             Types: deb\nSuites: nodistro\nComponents: main\n"
        );
        let none = Components {
            components: &[],
            ..firmware
        };
        assert_eq!(none.in_stanzas(stanzas), stanzas);
    }

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
