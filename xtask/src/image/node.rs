//! Compiles the node: one static binary, the same bytes from any checkout.
//!
//! The compiler puts paths of source files into a binary (messages of panics). Here they are cut to what they are called
//! within the checkout and the registry, so that the binary says nothing of the machine that built it.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hearth_build::cache;
use hearth_image::output::write_if_changed;

use super::{Example, Flavour};
use crate::checkout::root;
use crate::command::Cmd;
use crate::target;
use crate::ui::Ui;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Between flags in CARGO_ENCODED_RUSTFLAGS, which unlike RUSTFLAGS can hold paths with blanks.
const SEPARATOR: &str = "\x1f";

/// How a program is compiled; the workspace's Cargo.toml says what that is.
#[derive(Clone, Copy, Debug)]
pub enum Profile {
    /// As it is shipped.
    Node,
    /// For tests alone.
    Test,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Profile::Node => "node",
            Profile::Test => "node-test",
        }
    }
}

/// A program that is compiled.
struct Product<'a> {
    what: &'a str,
    profile: Profile,
    /// Names it to cargo.
    arguments: &'a [&'a str],
    /// Its path in the profile's folder.
    built: &'a str,
}

/// Compiles the node and copies it to `destination`: cargo has one place for the builds of all flavours.
pub fn build(ui: &Ui, flavour: Flavour, destination: &Path) -> Result<PathBuf> {
    let mut arguments = vec!["--package", "hearth-core", "--bin", "init"];
    let (profile, features) = match flavour {
        Flavour::Release => (Profile::Node, None),
        Flavour::Debug => (Profile::Node, Some("debug-service")),
        Flavour::Test => (Profile::Test, Some("debug-service,failpoints")),
    };
    if let Some(features) = features {
        arguments.extend(["--features", features]);
    }
    let product = Product {
        what: &format!("the node ({})", flavour.name()),
        profile,
        arguments: &arguments,
        built: "init",
    };
    compile(ui, &product, destination)
}

/// Compiles an example of hearth-sys, as static as the node, and copies it to `destination`.
pub fn build_example(ui: &Ui, example: Example, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: example.what,
        profile: example.profile,
        arguments: &["--package", "hearth-sys", "--example", example.name],
        built: &format!("examples/{}", example.name),
    };
    compile(ui, &product, destination)
}

/// Compiles the program that runs the curator on this machine, as the node is, and copies it to `destination`.
pub fn build_curator_host(ui: &Ui, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: "the curator on the host",
        profile: Profile::Node,
        arguments: &[
            "--package",
            "hearth-curator",
            "--features",
            "testing",
            "--example",
            "curator_host",
        ],
        built: "examples/curator_host",
    };
    compile(ui, &product, destination)
}

/// Compiles a static binary.
fn compile(ui: &Ui, product: &Product<'_>, destination: &Path) -> Result<PathBuf> {
    let root = root();
    let target = target::dir()?;
    let _lock = cache::lock_file(ui, &target::folder("")?.join("node.lock"))?;
    let task = ui.task(format!("compiling {}", product.what));
    Cmd::new(target::cargo())
        .dir(&root)
        .args(["build", "--locked", "--profile", product.profile.name()])
        .args(product.arguments)
        .args(["--target", TARGET, "--target-dir"])
        .arg(target)
        // RUSTFLAGS would be ignored beside it, and what the user wants is in it already.
        .env("CARGO_ENCODED_RUSTFLAGS", flags(ui, &root)?.join(SEPARATOR))
        .stream(ui, |line| {
            task.now(line.trim());
            Ok(())
        })?;
    task.done();
    let built = target
        .join(TARGET)
        .join(product.profile.name())
        .join(product.built);
    let bytes = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    write_if_changed(destination, &bytes)?;
    make_executable(destination)?;
    Ok(destination.to_owned())
}

/// In the image every program is one; here it is for those who try the binary on the host.
fn make_executable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

/// The user's flags for the compiler, if any, then ours.
fn flags(ui: &Ui, root: &Path) -> Result<Vec<String>> {
    let users = match (env::var("CARGO_ENCODED_RUSTFLAGS"), env::var("RUSTFLAGS")) {
        (Ok(flags), _) => flags.split(SEPARATOR).map(str::to_owned).collect(),
        (_, Ok(flags)) => flags
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>(),
        _ => Vec::new(),
    };
    let mut flags: Vec<String> = users.into_iter().filter(|flag| !flag.is_empty()).collect();
    if !flags.is_empty() {
        ui.say(format_args!(
            "the node is compiled with flags from the environment: {}",
            flags.join(" ")
        ));
    }
    for ours in [
        "target-feature=+crt-static",
        // What is the same is there once; a static PIE's own relocations are packed.
        "link-arg=-Wl,--icf=all",
        "link-arg=-Wl,-z,pack-relative-relocs",
    ] {
        flags.extend(["-C".to_owned(), ours.to_owned()]);
    }
    for (path, name) in remapped(root)? {
        flags.push(format!("--remap-path-prefix={}={name}", path.display()));
    }
    Ok(flags)
}

/// Folders of source, and what they are called in the binary.
fn remapped(root: &Path) -> Result<Vec<(PathBuf, &'static str)>> {
    // Generated source lies in the target folder, which need not be in the checkout.
    let mut folders = vec![
        (root.to_owned(), "hearth"),
        (target::dir()?.to_owned(), "hearth/target"),
    ];
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))
        .context("cannot find cargo's home: neither CARGO_HOME nor HOME is set")?;
    // One folder per registry, its name made of the registry's host. Absent where all is vendored.
    let registry = home.join("registry/src");
    if registry.is_dir() {
        let context = || format!("cannot read {}", registry.display());
        let mut sources = Vec::new();
        for entry in fs::read_dir(&registry).with_context(context)? {
            sources.push(entry.with_context(context)?.path());
        }
        sources.sort();
        folders.extend(sources.into_iter().map(|path| (path, "crates")));
    }
    Ok(folders)
}
