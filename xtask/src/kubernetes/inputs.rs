//! What the bundle is made of: Debian packages, binary and source, fetched by apt and never installed.
//!
//! apt is asked because it has the machine's mirrors, proxies and keys and checks every signature and hash. It is asked
//! through a configuration of our own, since the machine's is not ours to change: it knows no source packages as a rule,
//! and fetching must work for an ordinary user. So the private one repeats the machine's entries with their sources added
//! and what is set about acquiring; index files, cache and state live in a scratch folder. Hooks of the machine's are left
//! out: they belong to the machine's own updates.
//!
//! A mirror holds only the current point release. Therefore the files are kept, in a folder beside the cache's entries
//! ([`Wanted`]), and used until `--update` fetches anew: the record of them, names and hashes, is what the key of what is
//! made of them covers, so a bundle that is there is found without a network.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ring::digest::{SHA256, digest};

use crate::cache::{self, Builder, Cache};
use crate::command::Cmd;
use crate::ui::Ui;

/// Debian's release whose packages these are, as apt's `Codename` has it.
const RELEASE: &str = "bookworm";

/// The source package: upstream's whole tree, with all it depends on.
pub const KUBERNETES: &str = "kubernetes";

/// Packages that the tree's files come from; tree.rs says which files, and why.
pub const FOR_THE_NODE: [&str; 21] = [
    "busybox-static",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "coreutils",
    "findutils",
    "iptables",
    "libblkid1",
    "libc6",
    "libip4tc2",
    "libip6tc2",
    "libmnl0",
    "libmount1",
    "libnetfilter-conntrack3",
    "libnfnetlink0",
    "libpcre2-8-0",
    "libseccomp2",
    "libselinux1",
    "libxtables12",
    "mount",
    "runc",
];

/// Packages that are only used here: the Go toolchain which the source package was made for, and what rewrites where a
/// program finds its libraries.
pub const TOOLS: [&str; 3] = ["golang-1.19-go", "golang-1.19-src", "patchelf"];

/// What is fetched together, and kept together.
pub struct Wanted {
    /// Name of the folder, beside the cache's entries.
    folder: &'static str,
    packages: &'static [&'static [&'static str]],
    /// Whether all comes that they depend on, too; otherwise each package that is needed is named.
    with_dependencies: bool,
    source: Option<&'static str>,
}

/// For the bundle.
pub const OF_THE_BUNDLE: Wanted = Wanted {
    folder: "inputs",
    packages: &[&FOR_THE_NODE, &TOOLS],
    with_dependencies: false,
    source: Some(KUBERNETES),
};

/// For the images of Kubernetes' own tests: what upstream's have from elsewhere.
pub const OF_THE_TESTS: Wanted = Wanted {
    folder: "inputs-of-tests",
    packages: &[&[
        "bind9-dnsutils",
        "curl",
        "dash",
        "libc-bin",
        "netcat-openbsd",
    ]],
    with_dependencies: true,
    source: None,
};

/// Name of the record, in the folder of the files it lists.
const RECORD: &str = "record";

/// The files, each as its hash was when it came.
#[derive(Debug)]
pub struct Inputs {
    dir: PathBuf,
    /// One line each, sorted: SHA-256 in hex, two blanks, file name.
    record: String,
}

impl Inputs {
    /// What is kept; fetched, if it is not all there.
    pub fn ensure(ui: &Ui, cache: &Cache, wanted: &Wanted) -> Result<Inputs> {
        if let Some(inputs) = Inputs::kept(wanted)? {
            return Ok(inputs);
        }
        let builder = cache.lock(ui)?;
        // Whoever held the lock may have fetched these.
        match Inputs::kept(wanted)? {
            Some(inputs) => Ok(inputs),
            None => Inputs::fetch(ui, &builder, wanted),
        }
    }

    /// What is kept for the bundle, which must have been ensured before.
    pub fn of_the_bundle() -> Result<Inputs> {
        Inputs::kept(&OF_THE_BUNDLE)?.context("the packages of the bundle are gone")
    }

    fn kept(wanted: &Wanted) -> Result<Option<Inputs>> {
        let dir = wanted.dir()?;
        let record = match fs::read_to_string(dir.join(RECORD)) {
            Ok(record) => record,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", dir.display()));
            }
        };
        let inputs = Inputs { dir, record };
        let mut names = wanted.names();
        let whole = names.all(|package| inputs.package(package).is_ok_and(|path| path.exists()))
            && (wanted.source.is_none() || inputs.source().is_ok());
        Ok(whole.then_some(inputs))
    }

    /// Fetches all anew, and keeps that instead of what was kept before.
    pub fn fetch(ui: &Ui, builder: &Builder<'_>, wanted: &Wanted) -> Result<Inputs> {
        let scratch = builder.scratch()?;
        let task = ui.task("fetching Debian packages");
        let apt = Apt::new(ui, scratch.path())?;
        let show = |cmd: Cmd| {
            cmd.dir(&apt.fetched).stream(ui, |line| {
                task.now(line.trim());
                Ok(())
            })
        };
        show(apt.get("update"))?;
        let get = match wanted.with_dependencies {
            true => {
                apt.get("install")
                    .args(["--download-only", "--yes", "--no-install-recommends"])
            }
            false => apt.get("download"),
        };
        show(get.args(wanted.names())).with_context(|| asking_for(RELEASE))?;
        if let Some(source) = wanted.source {
            show(apt.get("source").arg("--download-only").arg(source))
                .with_context(|| asking_for(RELEASE))?;
        }
        apt.tidy()?;
        write(&apt.fetched.join(RECORD), &record_of(&apt.fetched)?)?;
        let dir = wanted.dir()?;
        if dir.exists() {
            fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        }
        fs::rename(&apt.fetched, &dir).with_context(|| format!("cannot make {}", dir.display()))?;
        task.done();
        Inputs::of_folder(&dir)
    }

    /// All files of a folder, as they are now.
    pub fn of_folder(dir: &Path) -> Result<Inputs> {
        Ok(Inputs {
            record: record_of(dir)?,
            dir: dir.to_owned(),
        })
    }

    /// The files of all binary packages, by name.
    pub fn packages(&self) -> impl Iterator<Item = PathBuf> {
        let names = self.record.lines().filter_map(|line| line.split_once("  "));
        names
            .filter(|(_, name)| name.ends_with(".deb"))
            .map(|(_, name)| self.dir.join(name))
    }

    /// Names and hashes of all the files.
    pub fn record(&self) -> &str {
        &self.record
    }

    /// The file of a binary package.
    pub fn package(&self, name: &str) -> Result<PathBuf> {
        self.file(|file| {
            file.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('_') && rest.ends_with(".deb"))
        })
        .with_context(|| format!("the package {name} is not among the inputs"))
    }

    /// Upstream's version of a binary package ("1.6.20" of "1.6.20~ds1-1+deb12u3").
    pub fn upstream_version(&self, package: &str) -> Result<String> {
        let path = self.package(package)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let version = name.split('_').nth(1).unwrap_or_default();
        Ok(upstream(version).to_owned())
    }

    /// Upstream's source, Debian's part of the source package, and upstream's version.
    pub fn source(&self) -> Result<(PathBuf, PathBuf, String)> {
        let of_source = |file: &str| file.starts_with(KUBERNETES) && file.contains(".tar.");
        let upstream_tar = self
            .file(|file| of_source(file) && file.contains(".orig.tar."))
            .context("upstream's source of Kubernetes is not among the inputs")?;
        let debian_tar = self
            .file(|file| of_source(file) && file.contains(".debian.tar."))
            .context("Debian's part of the source of Kubernetes is not among the inputs")?;
        let name = upstream_tar
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let version = name
            .split('_')
            .nth(1)
            .and_then(|rest| rest.split_once(".orig.tar."))
            .map(|(version, _)| upstream(version).to_owned())
            .with_context(|| format!("{name} has no version in its name"))?;
        Ok((upstream_tar, debian_tar, version))
    }

    /// Stands for names and hashes of all the files, in a key.
    pub fn digest(&self) -> String {
        hex::encode(&digest(&SHA256, self.record.as_bytes()).as_ref()[..8])
    }

    /// Every file against its hash in the record: they may have lain there for months.
    pub fn verify(&self) -> Result<()> {
        let found = record_of(&self.dir)?;
        if found != self.record {
            bail!(
                "the files in {} are not what was fetched: run `cargo xtask kubernetes --update`",
                self.dir.display()
            );
        }
        Ok(())
    }

    fn file(&self, wanted: impl Fn(&str) -> bool) -> Option<PathBuf> {
        let mut names = self.record.lines().filter_map(|line| line.split_once("  "));
        let (_, name) = names.find(|(_, name)| wanted(name))?;
        Some(self.dir.join(name))
    }
}

impl Wanted {
    /// Of the packages that are asked for.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.packages.iter().copied().flatten().copied()
    }

    fn dir(&self) -> Result<PathBuf> {
        Ok(cache::dir()?.join("kubernetes").join(self.folder))
    }
}

/// The version without what Debian adds. "1.20.5+really1.20.2" is 1.20.2: the package went back, its number could not.
fn upstream(version: &str) -> &str {
    let version = match version.split_once("+really") {
        Some((_, really)) => really,
        None => version,
    };
    version.split(['~', '+', '-']).next().unwrap_or(version)
}

fn record_of(dir: &Path) -> Result<String> {
    let context = || format!("cannot read {}", dir.display());
    let mut lines = Vec::new();
    for entry in dir.read_dir().with_context(context)? {
        let entry = entry.with_context(context)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == RECORD {
            continue;
        }
        let content = fs::read(entry.path())
            .with_context(|| format!("cannot read {}", entry.path().display()))?;
        lines.push(format!(
            "{}  {name}\n",
            hex::encode(digest(&SHA256, &content))
        ));
    }
    // By name: the hashes say nothing to whoever compares two records.
    lines.sort_by(|a, b| a[66..].cmp(&b[66..]));
    Ok(lines.concat())
}

fn asking_for(release: &str) -> String {
    format!(
        "the bundle is made of packages of Debian's release {release}: does this machine's apt know it, with its sources? \
         Otherwise give a ready bundle with --bundle"
    )
}

/// apt with a configuration of its own.
struct Apt {
    config: PathBuf,
    /// Where the files come to.
    fetched: PathBuf,
}

impl Apt {
    fn new(ui: &Ui, scratch: &Path) -> Result<Apt> {
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
        write(&dir.join("preferences"), &preferences())?;
        write(&dir.join("state/status"), "")?;
        let machine = Cmd::new("apt-config").arg("dump").output(ui)?;
        let config = dir.join("apt.conf");
        write(&config, &configuration(&machine, &dir, &fetched))?;
        Ok(Apt { config, fetched })
    }

    /// Removes what apt keeps beside the files.
    fn tidy(&self) -> Result<()> {
        let context = || format!("cannot clean {}", self.fetched.display());
        fs::remove_dir_all(self.fetched.join("partial")).with_context(context)?;
        match fs::remove_file(self.fetched.join("lock")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(context)
            }
            _ => Ok(()),
        }
    }

    fn get(&self, what: &str) -> Cmd {
        Cmd::new("apt-get")
            .env("APT_CONFIG", &self.config)
            .env("LC_ALL", "C")
            .args(["--quiet", what])
    }
}

/// The machine's entries for packages, each with its sources too.
fn copy_entries(from: &Path, to: &Path) -> Result<()> {
    let mut files = vec![from.join("sources.list")];
    if let Ok(parts) = from.join("sources.list.d").read_dir() {
        files.extend(parts.flatten().map(|entry| entry.path()));
    }
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let Ok(text) = fs::read_to_string(&file) else {
            // Not there, or not for us to read.
            continue;
        };
        let text = match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => with_sources_of_lines(&text),
            Some("sources") => with_sources_of_stanzas(&text),
            _ => continue,
        };
        write(&to.join(&*name), &text)?;
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

/// Packages of Debian's release before those of the same name from anywhere else, backports included.
fn preferences() -> String {
    ["", "-updates", "-security"]
        .map(|part| {
            format!("Package: *\nPin: release o=Debian,n={RELEASE}{part}\nPin-Priority: 990\n")
        })
        .join("\n")
}

/// `machine`: the machine's configuration, as `apt-config dump` prints it. By it nothing is installed, so that dependencies
/// come whole and no version of the machine's is preferred.
fn configuration(machine: &str, dir: &Path, fetched: &Path) -> String {
    let mut config = String::new();
    for line in machine.lines() {
        // Proxies, timeouts and the like; not the further indices that other programs have apt fetch.
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

fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(names: &[&str]) -> Inputs {
        let record = names
            .iter()
            .map(|name| format!("{}  {name}\n", "0".repeat(64)));
        Inputs {
            dir: "/kept".into(),
            record: record.collect(),
        }
    }

    #[test]
    fn versions_are_upstreams() {
        for (debian, theirs) in [
            ("1.20.5+really1.20.2", "1.20.2"),
            ("1.6.20~ds1-1+deb12u3", "1.6.20"),
            ("1.1.5+ds1-1+deb12u1", "1.1.5"),
            ("9.1-1", "9.1"),
        ] {
            assert_eq!(upstream(debian), theirs);
        }
    }

    #[test]
    fn files_are_found_by_package() {
        let inputs = inputs(&[
            "containerd_1.6.20~ds1-1+deb12u3_amd64.deb",
            "kubernetes_1.20.5+really1.20.2-1.1+deb12u1.debian.tar.xz",
            "kubernetes_1.20.5+really1.20.2-1.1+deb12u1.dsc",
            "kubernetes_1.20.5+really1.20.2.orig.tar.gz",
            "libmount1_2.38.1-5+deb12u3_amd64.deb",
            "mount_2.38.1-5+deb12u3_amd64.deb",
        ]);
        let name = |package| {
            let path = inputs.package(package).unwrap();
            path.file_name().unwrap().to_string_lossy().into_owned()
        };
        assert_eq!(name("mount"), "mount_2.38.1-5+deb12u3_amd64.deb");
        assert_eq!(inputs.upstream_version("containerd").unwrap(), "1.6.20");
        assert!(inputs.package("contain").is_err());
        let (upstream, debian, version) = inputs.source().unwrap();
        assert!(upstream.ends_with("kubernetes_1.20.5+really1.20.2.orig.tar.gz"));
        assert!(debian.ends_with("kubernetes_1.20.5+really1.20.2-1.1+deb12u1.debian.tar.xz"));
        assert_eq!(version, "1.20.2");
    }

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

    #[test]
    fn a_changed_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b_1_amd64.deb"), "one").unwrap();
        fs::write(dir.path().join("a_1_amd64.deb"), "two").unwrap();
        let inputs = Inputs::of_folder(dir.path()).unwrap();
        assert!(inputs.record.find("a_1").unwrap() < inputs.record.find("b_1").unwrap());
        inputs.verify().unwrap();
        fs::write(dir.path().join("a_1_amd64.deb"), "three").unwrap();
        assert!(inputs.verify().is_err());
    }
}
