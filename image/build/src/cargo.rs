//! Programs compiled from a checkout: for this machine, and static ones for a node, the same bytes from any checkout.
//!
//! The compiler puts paths of source files into a binary (messages of panics). In a static one they are cut to what they are
//! called within the checkout and the registry, so that it says nothing of the machine that built it.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{self, CacheError};
use crate::command::{Cmd, CommandError};
use crate::files::{self, FileError};
use crate::progress::{Length, Progress};

/// What nodes are.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Between flags in CARGO_ENCODED_RUSTFLAGS, which unlike RUSTFLAGS can hold paths with blanks.
const SEPARATOR: &str = "\x1f";

/// Why there is no program.
#[derive(Debug, thiserror::Error)]
pub enum CargoError {
    /// Cargo does not say where it builds.
    #[error("cannot start cargo metadata")]
    Start(#[source] io::Error),
    /// Nor does it give a reason that is understood.
    #[error("cargo metadata failed: {0}")]
    Metadata(String),
    /// It is not where it should be.
    #[error("cargo has built {name} and not put it at {}", path.display())]
    Elsewhere {
        /// The program.
        name: String,
        /// Where it should be.
        path: PathBuf,
    },
    /// Its registry, whose path must not be in a program.
    #[error("cannot find cargo's home: neither CARGO_HOME nor HOME is set")]
    NoHome,
    /// Cargo failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Another build was waited for in vain.
    #[error(transparent)]
    Lock(#[from] CacheError),
    /// The file system refused.
    #[error(transparent)]
    File(#[from] FileError),
}

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
pub struct Product<'a> {
    /// What it is called while it is compiled.
    pub what: &'a str,
    /// How.
    pub profile: Profile,
    /// Names it to cargo.
    pub arguments: &'a [&'a str],
    /// Its path in the profile's folder.
    pub built: &'a str,
}

/// A call of cargo: of the one that runs this task, if one does.
///
/// Cargo tells the program that it runs of what package it is. Build scripts name the same variables to it as what they
/// depend on (ring's does), so a call that hands them on builds anew whatever a call from a shell or from another task has
/// built: they are removed.
pub fn command() -> Cmd {
    told_of_no_package(program())
}

fn told_of_no_package(program: OsString) -> Cmd {
    Cmd::new(program).env_remove_if(describes_a_package)
}

fn program() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn describes_a_package(name: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// A checkout, and where cargo builds it.
#[derive(Debug, Clone)]
pub struct Checkout {
    root: PathBuf,
    target: PathBuf,
}

impl Checkout {
    /// The checkout whose workspace is `root`.
    ///
    /// Cargo alone knows where its target folder is (`CARGO_TARGET_DIR`, `build.target-dir` in any of its configuration
    /// files), so it is asked.
    pub fn at(root: PathBuf) -> Result<Checkout, CargoError> {
        let output = Command::new(program())
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(&root)
            .output()
            .map_err(CargoError::Start)?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            return Err(CargoError::Metadata(reason.trim_end().to_owned()));
        }
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| CargoError::Metadata(format!("not JSON: {error}")))?;
        let target = metadata["target_directory"]
            .as_str()
            .ok_or_else(|| CargoError::Metadata("no target_directory".to_owned()))?
            .into();
        Ok(Checkout { root, target })
    }

    /// Cargo's target folder.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// `hearth/NAME` in it, made.
    pub fn folder(&self, name: &str) -> Result<PathBuf, FileError> {
        let folder = self.target.join("hearth").join(name);
        files::create_dir(&folder)?;
        Ok(folder)
    }

    /// Builds a program of a package for this machine; returns where it is.
    pub fn program(
        &self,
        progress: &dyn Progress,
        package: &str,
        name: &str,
    ) -> Result<PathBuf, CargoError> {
        let task = progress.start(&format!("compiling {name}"), Length::Moment);
        command()
            .dir(&self.root)
            .args(["build", "--locked", "--package", package])
            .args(["--bin", name, "--target-dir"])
            .arg(&self.target)
            .stream(progress, |line| {
                task.now(line.trim());
                Ok(())
            })?;
        drop(task);
        let path = self.target.join("debug").join(name);
        if path.is_file() {
            Ok(path)
        } else {
            let name = name.to_owned();
            Err(CargoError::Elsewhere { name, path })
        }
    }

    /// Compiles a static program, and has it taken away before anybody else compiles one: cargo has one place for the builds
    /// of all flavours.
    pub fn static_program<E: From<CargoError>>(
        &self,
        progress: &dyn Progress,
        product: &Product<'_>,
        take: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        let lock = self.folder("").map_err(CargoError::from)?.join("node.lock");
        let _lock = cache::lock_file(progress, &lock).map_err(CargoError::from)?;
        take(&self.compile(progress, product)?)
    }

    fn compile(
        &self,
        progress: &dyn Progress,
        product: &Product<'_>,
    ) -> Result<PathBuf, CargoError> {
        let task = progress.start(&format!("compiling {}", product.what), Length::Unknown);
        let flags = self.flags(progress)?.join(SEPARATOR);
        command()
            .dir(&self.root)
            .args(["build", "--locked", "--profile", product.profile.name()])
            .args(product.arguments)
            .args(["--target", TARGET, "--target-dir"])
            .arg(&self.target)
            // RUSTFLAGS would be ignored beside it, and what the user wants is in it already.
            .env("CARGO_ENCODED_RUSTFLAGS", flags)
            .stream(progress, |line| {
                task.now(line.trim());
                Ok(())
            })?;
        task.done();
        Ok(self
            .target
            .join(TARGET)
            .join(product.profile.name())
            .join(product.built))
    }

    /// The user's flags for the compiler, if any, then ours.
    fn flags(&self, progress: &dyn Progress) -> Result<Vec<String>, CargoError> {
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
            progress.say(&format!(
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
        for (path, name) in self.remapped()? {
            flags.push(format!("--remap-path-prefix={}={name}", path.display()));
        }
        Ok(flags)
    }

    /// Folders of source, and what they are called in the binary.
    fn remapped(&self) -> Result<Vec<(PathBuf, &'static str)>, CargoError> {
        // Generated source lies in the target folder, which need not be in the checkout.
        let mut folders = vec![
            (self.root.clone(), "hearth"),
            (self.target.clone(), "hearth/target"),
        ];
        let home = env::var_os("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))
            .ok_or(CargoError::NoHome)?;
        // One folder per registry, its name made of the registry's host. Absent where all is vendored.
        let registry = home.join("registry/src");
        if registry.is_dir() {
            let entries = files::entries(&registry)?;
            let mut sources: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
            sources.sort();
            folders.extend(sources.into_iter().map(|path| (path, "crates")));
        }
        Ok(folders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn a_call_of_cargo_hands_on_nothing_of_the_calling_package() {
        let own = |name: &str| {
            name.starts_with("CARGO_PKG_NAME") || name.starts_with("CARGO_MANIFEST_DIR")
        };
        assert!(
            env::vars().any(|(name, _)| own(&name)),
            "cargo runs this test"
        );
        let seen = told_of_no_package("env".into()).output(&Silent).unwrap();
        assert!(!seen.lines().any(own), "{seen}");
        assert!(seen.lines().any(|line| line.starts_with("PATH=")), "{seen}");
    }
}
