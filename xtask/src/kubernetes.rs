//! `cargo xtask kubernetes`: the bundle, all that a node needs to run containers and Kubernetes, cached by content.
//!
//! A bundle is a folder that becomes the extension `kubernetes` of an image; `docs/kubernetes.md` says what is in it. Ours is
//! made of Debian packages: Kubernetes is compiled from the source package ([`compile`]), everything else is taken as Debian
//! built it ([`tree`]). Debian, because its packages are signed, their sources and licences are known, and every machine
//! that builds Hearth can fetch them. The price is the version: the last Kubernetes in Debian with its servers is 1.20. So a
//! bundle is a plain folder with its versions written in it, and a newer one from anywhere takes our place with
//! `--bundle`; the node chooses its flags by those versions.
//!
//! The key of the cache covers all that goes in: the names and hashes of the packages, the sources here, the C compiler, and
//! [`RECIPE`]. Nothing is fetched and nothing compiled when the bundle of this key is there.

mod amend;
mod compile;
pub mod conformance;
mod inputs;
mod oci;
mod tree;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{LineWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hearth_api::names;
use ring::digest::{Context as Digest, SHA256};

use self::inputs::Inputs;
use crate::cache::{Builder, Cache};
use crate::command::{Cmd, check_interrupt};
use crate::image;
use crate::setup::{self, Needs};
use crate::ui::Ui;

/// Version of the steps, part of the cache's key: to be raised when a change of them changes the result.
const RECIPE: u32 = 2;

/// The part of an entry that becomes the extension.
const ROOT: &str = "root";

/// The client for the developer's machine, in an entry.
const KUBECTL: &str = "host/kubectl";

/// What a node starts or hands to one of its programs; a bundle without one of them is none.
const PROGRAMS: [&str; 19] = [
    "bin/conntrack",
    "bin/containerd",
    "bin/containerd-shim-runc-v2",
    "bin/du",
    "bin/find",
    "bin/iptables",
    "bin/iptables-restore",
    "bin/iptables-save",
    "bin/kube-apiserver",
    "bin/kube-controller-manager",
    "bin/kube-proxy",
    "bin/kube-scheduler",
    "bin/kubelet",
    "bin/mount",
    "bin/nice",
    "bin/runc",
    "bin/umount",
    "cni/bridge",
    "cni/host-local",
];

/// What else must be there.
const FILES: [&str; 4] = ["cni/loopback", "cni/portmap", "images/pause.tar", "VERSION"];

/// Build the Kubernetes bundle, or find it in the cache; prints where it is
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Fetch the newest point release of the packages first
    #[arg(long)]
    update: bool,
    /// Build it once more and compare, byte by byte
    #[arg(long)]
    check: bool,
    /// Build Kubernetes' conformance tests, too, and a bundle with what they run; prints where both are
    #[arg(long)]
    conformance: bool,
}

/// A bundle that is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// The tree of the extension.
    pub root: PathBuf,
    /// Its versions.
    pub versions: Versions,
    /// A client of this version for this machine; a bundle of the user's has none.
    pub kubectl: Option<PathBuf>,
}

/// The file VERSION: what is in a bundle, one "name version" a line, by name. Every version begins with three numbers, as
/// the node wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions(BTreeMap<String, String>);

/// Why a folder is no bundle.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BundleError {
    /// A file is not there.
    #[error("{} is no bundle: it has no {file}", bundle.display())]
    Missing {
        /// The folder.
        bundle: PathBuf,
        /// What is missing, by its path in it.
        file: &'static str,
    },
    /// A program cannot be run by its mode.
    #[error("{} is no bundle: {file} is not executable", bundle.display())]
    NotExecutable {
        /// The folder.
        bundle: PathBuf,
        /// The program, by its path in it.
        file: &'static str,
    },
    /// VERSION does not say what this is.
    #[error(
        "{}/VERSION must hold lines of a name and a version of three numbers, `kubernetes` and `containerd` among them",
        bundle.display()
    )]
    Version {
        /// The folder.
        bundle: PathBuf,
    },
}

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    setup::ensure(ui, Needs::KUBERNETES)?;
    if args.update {
        let cache = Cache::of_user("kubernetes")?;
        let builder = cache.lock(ui)?;
        Inputs::fetch(ui, &builder, &inputs::OF_THE_BUNDLE)?;
        if args.conformance {
            Inputs::fetch(ui, &builder, &inputs::OF_THE_TESTS)?;
        }
    }
    let bundle = ensure(ui, None)?;
    if args.check {
        check(ui, &bundle)?;
    }
    ui.say(&bundle.versions);
    println!("{}", bundle.root.display());
    if args.conformance {
        let tests = conformance::ensure(ui, &bundle)?;
        println!("{}", tests.bundle.root.display());
        println!("{}", tests.program.display());
    }
    Ok(())
}

/// The user's bundle, checked, where one is given; otherwise ours, built if it is not in the cache.
pub fn ensure(ui: &Ui, bundle: Option<&Path>) -> Result<Bundle> {
    if let Some(folder) = bundle {
        return Ok(Bundle::read(folder)?);
    }
    setup::ensure(ui, Needs::KUBERNETES)?;
    let cache = Cache::of_user("kubernetes")?;
    let inputs = Inputs::ensure(ui, &cache, &inputs::OF_THE_BUNDLE)?;
    let key = key(&inputs, &compiler(ui)?);
    let entry = cache.ensure(ui, &key, |builder, scratch| {
        ui.say("this Kubernetes bundle is not in the cache: building it, which takes minutes");
        build(ui, &inputs, builder, scratch)
    })?;
    Bundle::of_entry(&entry)
}

/// Copies a program out of one of the packages that the bundle is made of, as Debian has built it. A bundle must have been
/// ensured before.
pub fn take_from_package(ui: &Ui, package: &str, path: &str, to: &Path) -> Result<()> {
    let inputs = Inputs::of_the_bundle()?;
    let scratch = tempfile::tempdir().context("cannot make a folder")?;
    Cmd::new("dpkg-deb")
        .arg("--extract")
        .arg(inputs.package(package)?)
        .arg(scratch.path())
        .run(ui)?;
    fs::copy(scratch.path().join(path), to)
        .with_context(|| format!("cannot take {path} out of the package {package}"))?;
    Ok(())
}

/// Builds it once more and compares.
fn check(ui: &Ui, bundle: &Bundle) -> Result<()> {
    let cache = Cache::of_user("kubernetes")?;
    let builder = cache.lock(ui)?;
    let inputs = Inputs::of_the_bundle()?;
    let scratch = builder.scratch()?;
    let again = build(ui, &inputs, &builder, scratch.path())?;
    let mut different = Vec::new();
    compare(
        &bundle.root,
        &again.join(ROOT),
        Path::new(""),
        &mut different,
    )?;
    if let Some(kubectl) = &bundle.kubectl
        && read(kubectl)? != read(&again.join(KUBECTL))?
    {
        different.push(KUBECTL.to_owned());
    }
    if !different.is_empty() {
        bail!(
            "built twice, the bundle is not the same: {}",
            different.join(", ")
        );
    }
    ui.say("built twice, the bundle is the same");
    Ok(())
}

/// Builds an entry in `scratch`; returns its folder there.
fn build(ui: &Ui, inputs: &Inputs, builder: &Builder<'_>, scratch: &Path) -> Result<PathBuf> {
    inputs.verify()?;
    let (log_path, mut log) = new_log(builder)?;
    let task = ui.counted_task("building the Kubernetes bundle", compile::EXPECTED_PACKAGES);
    let [source, stage, entry] = folders(scratch)?;
    let built = compile::compile(ui, inputs, &source, &mut log, &task)
        .with_context(|| format!("the whole log is {}", log_path.display()))?;
    log.flush().context("cannot write the log")?;
    task.now("laying out the tree");
    tree::lay_out(ui, inputs, &built, &stage, &entry.join(ROOT))?;
    fs::copy(&built.kubectl, entry.join(KUBECTL)).context("cannot keep kubectl")?;
    task.done();
    Ok(entry)
}

/// For the source, for what is in between, and for the entry.
fn folders(scratch: &Path) -> Result<[PathBuf; 3]> {
    let all = ["source", "stage", "entry"].map(|name| scratch.join(name));
    for folder in all.iter().chain([&all[2].join("host")]) {
        fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    Ok(all)
}

/// Where what the compiler says goes.
fn new_log(builder: &Builder<'_>) -> Result<(PathBuf, LineWriter<File>)> {
    let path = builder.log();
    let log = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok((path, LineWriter::new(log)))
}

/// The C compiler and its linker, as they call themselves.
fn compiler(ui: &Ui) -> Result<String> {
    let mut tools = String::new();
    for tool in ["gcc", "ld"] {
        let version = Cmd::new(tool)
            .arg("--version")
            .env("LC_ALL", "C")
            .output(ui)?;
        tools += version.lines().next().unwrap_or_default();
        tools += "\n";
    }
    Ok(tools)
}

fn key(inputs: &Inputs, compiler: &str) -> String {
    let mut hash = Digest::new(&SHA256);
    let recipe = RECIPE.to_string();
    for part in [
        recipe.as_str(),
        inputs.record(),
        compile::MULTICALL,
        tree::PAUSE,
        compiler,
    ] {
        // Each with its length, so that no two lists of parts read alike.
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex::encode(&hash.finish().as_ref()[..16])
}

impl Bundle {
    /// The bundle in `folder`.
    pub fn read(folder: &Path) -> Result<Bundle, BundleError> {
        for file in PROGRAMS.into_iter().chain(FILES) {
            let metadata = folder.join(file).metadata();
            match metadata {
                Ok(metadata) if metadata.is_file() => {
                    let runs = metadata.permissions().mode() & 0o111 != 0;
                    if !runs && PROGRAMS.contains(&file) {
                        return Err(BundleError::NotExecutable {
                            bundle: folder.to_owned(),
                            file,
                        });
                    }
                }
                _ => {
                    return Err(BundleError::Missing {
                        bundle: folder.to_owned(),
                        file,
                    });
                }
            }
        }
        let text = fs::read_to_string(folder.join("VERSION")).unwrap_or_default();
        let versions = Versions::parse(&text).ok_or_else(|| BundleError::Version {
            bundle: folder.to_owned(),
        })?;
        Ok(Bundle {
            root: folder.to_owned(),
            versions,
            kubectl: None,
        })
    }

    /// As the extension of an image.
    pub fn extension(&self) -> Result<image::Request> {
        let name = names::EXTENSION_KUBERNETES;
        Ok(format!("{name}={}", self.root.display()).parse()?)
    }

    fn of_entry(entry: &Path) -> Result<Bundle> {
        let bundle = Bundle::read(&entry.join(ROOT))
            .with_context(|| format!("the cache is damaged: remove {}", entry.display()))?;
        Ok(Bundle {
            kubectl: Some(entry.join(KUBECTL)),
            ..bundle
        })
    }
}

impl Versions {
    /// None where a line is none, or a program is missing by whose version the node chooses what to tell it.
    fn parse(text: &str) -> Option<Versions> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let versions: Option<BTreeMap<String, String>> = lines
            .map(|line| {
                let (name, version) = line.trim().split_once(' ')?;
                let version = version.trim();
                has_three_numbers(version).then(|| (name.to_owned(), version.to_owned()))
            })
            .collect();
        versions
            .filter(|named| {
                ["kubernetes", "containerd"]
                    .iter()
                    .all(|name| named.contains_key(*name))
            })
            .map(Versions)
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = self
            .0
            .iter()
            .map(|(name, version)| format!("{name} {version}"));
        f.write_str(&words.collect::<Vec<_>>().join(", "))
    }
}

/// "1.31.4", "v1.31.4" and "1.31.4-rc.1" do.
fn has_three_numbers(version: &str) -> bool {
    let mut parts = version.strip_prefix('v').unwrap_or(version).splitn(3, '.');
    let whole = |part: Option<&str>| part.is_some_and(|part| part.parse::<u32>().is_ok());
    whole(parts.next())
        && whole(parts.next())
        && parts
            .next()
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Adds the paths below `at` at which the two trees differ in kind, mode or content.
fn compare(one: &Path, two: &Path, at: &Path, different: &mut Vec<String>) -> Result<()> {
    check_interrupt()?;
    let (first, second) = (one.join(at), two.join(at));
    let kind = |path: &Path| {
        let metadata = path.symlink_metadata().ok()?;
        Some((metadata.file_type(), metadata.permissions().mode()))
    };
    let (left, right) = (kind(&first), kind(&second));
    let name = || at.display().to_string();
    if left != right {
        different.push(name());
        return Ok(());
    }
    let Some((kind, _)) = left else {
        return Ok(());
    };
    if kind.is_dir() {
        let mut names = children(&first)?;
        names.extend(children(&second)?);
        names.sort();
        names.dedup();
        for child in names {
            compare(one, two, &at.join(child), different)?;
        }
    } else if kind.is_symlink() {
        if fs::read_link(&first).ok() != fs::read_link(&second).ok() {
            different.push(name());
        }
    } else if read(&first)? != read(&second)? {
        different.push(name());
    }
    Ok(())
}

fn children(folder: &Path) -> Result<Vec<std::ffi::OsString>> {
    let context = || format!("cannot read {}", folder.display());
    let entries = folder.read_dir().with_context(context)?;
    entries
        .map(|entry| Ok(entry.with_context(context)?.file_name()))
        .collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests;
