//! Programs compiled from a checkout: for this machine, and static ones for a node, which are reproducible from any
//! checkout.
//!
//! The compiler puts source paths into a binary (panic messages). In a static program they are shortened to the paths
//! within the checkout and the registry, so that the program reveals nothing of the machine that built it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::cache::{self, CacheError};
use crate::command::{Cmd, CommandError};
use crate::files::{self, FileError};
use crate::progress::{Length, Progress};

/// The target of nodes.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Separator of flags in CARGO_ENCODED_RUSTFLAGS, which unlike RUSTFLAGS can hold paths with blanks.
const SEPARATOR: &str = "\x1f";

/// Why a program was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum CargoError {
    /// `cargo metadata` did not start.
    #[error("cannot start cargo metadata")]
    Start(#[source] io::Error),
    /// `cargo metadata` failed, or its output was not understood.
    #[error("cargo metadata failed: {0}")]
    Metadata(String),
    /// The program is not at the expected path after the build.
    #[error("cargo built {name}, but it is not at {}", path.display())]
    Elsewhere {
        /// Name of the program.
        name: String,
        /// Expected path.
        path: PathBuf,
    },
    /// Cargo's home is unknown; its registry path must not appear in a program.
    #[error("cannot determine cargo's home: neither CARGO_HOME nor HOME is set")]
    NoHome,
    /// A cargo command failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The build lock could not be taken.
    #[error(transparent)]
    Lock(#[from] CacheError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The variable that lets the programs of the test harness accept unstable options. The compiler obeys it, too.
pub const UNSTABLE: &str = "RUSTC_BOOTSTRAP";

/// How a program is compiled: a profile of the workspace's Cargo.toml.
#[derive(Clone, Copy, Debug)]
pub enum Profile {
    /// The profile that is shipped.
    Node,
    /// For tests only.
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

/// A program to compile.
pub struct Product<'a> {
    /// Name for progress messages.
    pub what: &'a str,
    /// Its profile.
    pub profile: Profile,
    /// Arguments that select it for cargo.
    pub arguments: &'a [&'a str],
    /// Its path in the profile's folder.
    pub built: &'a str,
}

/// A cargo command: the cargo that runs this task, if there is one.
///
/// Cargo sets variables that describe the running package. Build scripts name the same variables as dependencies
/// (ring's does), so a cargo call that inherits them rebuilds whatever a call from a shell or from another task has
/// built. They are removed, and [`UNSTABLE`] with them.
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
    let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_"];
    name == UNSTABLE || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// A checkout and the folder that cargo builds it in.
#[derive(Debug, Clone)]
pub struct Checkout {
    root: PathBuf,
    target: PathBuf,
}

impl Checkout {
    /// The checkout whose workspace root is `root`.
    ///
    /// Only cargo knows its target folder (`CARGO_TARGET_DIR`, or `build.target-dir` in any of its configuration
    /// files), so it is queried.
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

    /// `hearth/NAME` in the target folder; created if absent.
    pub fn folder(&self, name: &str) -> Result<PathBuf, FileError> {
        let folder = self.target.join("hearth").join(name);
        files::create_dir(&folder)?;
        Ok(folder)
    }

    /// Builds a program for this machine; returns its path.
    ///
    /// Cargo is given the whole workspace, as by the tests: with which features it compiles a dependency is decided by
    /// all selected packages together, and another selection would compile most dependencies again.
    pub fn program(&self, progress: &dyn Progress, name: &str) -> Result<PathBuf, CargoError> {
        let task = progress.start(&format!("compiling {name}"), Length::Moment);
        command()
            .dir(&self.root)
            .args(["build", "--locked", "--workspace"])
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

    /// Compiles a static program and calls `take` before anybody else compiles one: all flavours of a profile share one
    /// output path.
    pub fn static_program<E: From<CargoError>>(
        &self,
        progress: &dyn Progress,
        product: &Product<'_>,
        take: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        let folder = self.folder("").map_err(CargoError::from)?;
        let lock = folder.join(format!("{}.lock", product.profile.name()));
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
            // With this variable set, cargo ignores RUSTFLAGS; the user's flags are included already.
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

    /// The user's compiler flags, if any, followed by ours.
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
                "compiling the node with flags from the environment: {}",
                flags.join(" ")
            ));
        }
        for ours in [
            "target-feature=+crt-static",
            // Identical code is merged; relocations of a static PIE are packed.
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

    /// Source folders and their names in the binary.
    fn remapped(&self) -> Result<Vec<(PathBuf, &'static str)>, CargoError> {
        // Generated source is in the target folder, which need not be inside the checkout.
        let mut folders = vec![
            (self.root.clone(), "hearth"),
            (self.target.clone(), "hearth/target"),
        ];
        let home = env::var_os("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))
            .ok_or(CargoError::NoHome)?;
        // One folder per registry, named after its host. Absent if everything is vendored.
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
