//! The kernel, built from Debian's source package and our configuration fragment, cached by content.
//!
//! The cache key covers everything that goes in: the version of the source package, the fragments, the compiler and
//! linker, and `RECIPE`. So there is one build per change of those, wherever the checkout is, and every user of a
//! kernel calls [`ensure`] each time. The source is Debian's and not kernel.org's because Debian ships security fixes
//! for it under a signature that every Debian machine already checks; its exact version moves, and is recorded with the
//! result.
//!
//! The fragment is applied to tinyconfig. Kconfig silently drops options that it does not know or whose dependencies
//! are missing; here every line of the fragment is compared with the outcome, and a difference is an error
//! ([`fragment`]).
//!
//! The same inputs give the same bytes: the time, user, host and build number that the kernel would record are fixed,
//! and tools that Kconfig only probes for are hidden from it.

pub mod drivers;
pub mod fragment;

use std::path::{Path, PathBuf};

use hearth_build::cache::{self, Builder, Cache, CacheError};
use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError, Log};
use hearth_build::progress::{Length, Progress, Task};
use ring::digest::{SHA256, digest};

use self::drivers::{Driver, DriversError};
use self::fragment::{Fragment, FragmentError};

/// Version of the steps below, part of the cache key: must be raised when a change of the steps changes the result.
const RECIPE: u32 = 2;

/// Approximate number of steps that make announces for the whole build; only the progress bar depends on it.
const EXPECTED_STEPS: u64 = 2260;

/// The environment variables that the kernel's build sees; it reads dozens more (`KCONFIG_CONFIG`, `KCPPFLAGS` ...), any of
/// which would change a kernel that the cache takes for the same.
const VISIBLE_ENVIRONMENT: [&str; 3] = ["HOME", "PATH", "TMPDIR"];

/// Why a kernel could not be built: the step, with its cause.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A fragment is malformed, or Kconfig did not apply it.
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    /// An external command could not be run or failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A cache operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The list of drivers could not be made or read.
    #[error(transparent)]
    Drivers(#[from] DriversError),
    /// The build failed after its inputs were found.
    #[error("cannot build the kernel; the full log is {}", log.display())]
    NotBuilt {
        /// The compiler's log.
        log: PathBuf,
        /// The underlying error.
        source: Box<KernelError>,
    },
    /// A cache entry is malformed.
    #[error("{} is corrupt: remove {}", entry.join("version").display(), entry.display())]
    Damaged {
        /// Its folder.
        entry: PathBuf,
    },
}

/// A built kernel, in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The compressed, bootable kernel; it is also a UEFI application.
    pub bzimage: PathBuf,
    /// The kernel's own version ("6.12.117").
    pub version: String,
    /// The exact source package ("linux-source-6.12 6.12.117-1~deb12u1").
    pub source: String,
    /// SHA-256 of the whole configuration, in hex.
    pub config_hash: String,
    /// The list of its drivers ([`Kernel::drivers`]).
    drivers: PathBuf,
}

/// The fragments of one kernel, by purpose. No option is in two of them.
const FRAGMENTS: [&str; 3] = ["base.config", "containers.config", "hardware.config"];

/// The kernel for a folder with `series` and the [`FRAGMENTS`], overridden by further fragments in their order; built
/// if it is not in the cache. Debian's source package of the series must be installed.
pub fn ensure(
    progress: &dyn Progress,
    config: &Path,
    fragments: &[PathBuf],
) -> Result<Kernel, KernelError> {
    let inputs = Inputs::gather(progress, config, fragments)?;
    let cache = Cache::of_user("kernel")?;
    let entry = cache.ensure(progress, &inputs.key(), |builder, scratch| {
        build(progress, &inputs, builder, scratch)
    })?;
    Kernel::read(&entry)
}

/// The kernel that [`ensure`] would return, if it is in the cache. Builds nothing.
pub fn cached(progress: &dyn Progress, config: &Path) -> Result<Option<Kernel>, KernelError> {
    let inputs = Inputs::gather(progress, config, &[])?;
    let entry = Cache::of_user("kernel")?.get(&inputs.key());
    entry.map(|entry| Kernel::read(&entry)).transpose()
}

/// The pinned series of the kernel ("6.12"), which names Debian's source package.
pub fn series(config: &Path) -> Result<String, FileError> {
    Ok(files::read_text(&config.join("series"))?.trim().to_owned())
}

/// Everything that the result depends on.
struct Inputs {
    fragment: Fragment,
    /// Name and version of the source package.
    package: String,
    source_version: String,
    tarball: PathBuf,
    /// Versions of compiler and linker, as they print them.
    tools: Vec<String>,
}

impl Inputs {
    fn gather(
        progress: &dyn Progress,
        config: &Path,
        more_fragments: &[PathBuf],
    ) -> Result<Inputs, KernelError> {
        let mut fragment = Fragment::default();
        let ours = FRAGMENTS.map(|name| config.join(name));
        for path in ours.iter().chain(more_fragments) {
            let text = files::read_text(path)?;
            fragment = fragment.overlaid(Fragment::parse(&text, &path.display().to_string())?);
        }
        let package = format!("linux-source-{}", series(config)?);
        let query = ["--show", "--showformat=${Version}"];
        let source_version = Cmd::new("dpkg-query")
            .args(query)
            .arg(&package)
            .output(progress)?
            .trim()
            .to_owned();
        let mut tools = Vec::new();
        for tool in ["gcc", "ld", "zstd"] {
            let version = Cmd::new(tool)
                .arg("--version")
                .env("LC_ALL", "C")
                .output(progress)?;
            tools.push(version.lines().next().unwrap_or_default().to_owned());
        }
        Ok(Inputs {
            fragment,
            tarball: PathBuf::from(format!("/usr/src/{package}.tar.xz")),
            package,
            source_version,
            tools,
        })
    }

    fn key(&self) -> String {
        let recipe = RECIPE.to_string();
        let config = self.fragment.to_string();
        let parts = [
            recipe.as_str(),
            &self.package,
            &self.source_version,
            &config,
        ];
        cache::key(
            parts
                .into_iter()
                .chain(self.tools.iter().map(String::as_str)),
        )
    }
}

/// Builds an entry in `scratch`; returns its folder there.
fn build(
    progress: &dyn Progress,
    inputs: &Inputs,
    builder: &Builder<'_>,
    scratch: &Path,
) -> Result<PathBuf, KernelError> {
    let log = Log::create(builder.log())?;
    let log_path = log.path().to_owned();
    let source = scratch.join("source");
    files::create_dir(&source)?;
    progress.say(&format!(
        "building {} {} with this configuration (not in the cache); this takes minutes",
        inputs.package, inputs.source_version
    ));
    let task = progress.start("building the kernel", Length::Steps(EXPECTED_STEPS));
    let mut make = Make {
        progress,
        source,
        log,
        task: &*task,
    };

    task.now("unpacking");
    let tar = Cmd::new("tar").args(["--extract", "--strip-components=1", "--file"]);
    tar.arg(&inputs.tarball)
        .arg("--directory")
        .arg(&make.source)
        .run(progress)?;
    let finished = make
        .all(&inputs.fragment)
        .map_err(|error| KernelError::NotBuilt {
            log: log_path,
            source: Box::new(error),
        })?;

    let entry = scratch.join("entry");
    files::create_dir(&entry)?;
    let version = format!(
        "{}\n{} {}\n",
        finished.version, inputs.package, inputs.source_version
    );
    files::write(&entry.join("version"), version)?;
    files::write(&entry.join("config"), finished.config)?;
    files::write(&entry.join("bzImage"), finished.bzimage)?;
    files::write(&entry.join("drivers"), drivers::to_text(&finished.drivers))?;
    task.done();
    Ok(entry)
}

struct Finished {
    version: String,
    config: String,
    bzimage: Vec<u8>,
    drivers: Vec<Driver>,
}

/// The unpacked source and its build commands.
struct Make<'a> {
    progress: &'a dyn Progress,
    source: PathBuf,
    log: Log,
    task: &'a dyn Task,
}

impl Make<'_> {
    fn all(&mut self, fragment: &Fragment) -> Result<Finished, KernelError> {
        let config_path = self.source.join(".config");
        self.task.now("configuring");
        self.target("tinyconfig")?;
        let config = files::read_text(&config_path)?;
        files::write(&config_path, format!("{config}{fragment}"))?;
        self.target("olddefconfig")?;
        let config = files::read_text(&config_path)?;
        fragment.verify(&config)?;
        self.target("bzImage")?;
        let version = self.source.join("include/config/kernel.release");
        Ok(Finished {
            version: files::read_text(&version)?.trim().to_owned(),
            config,
            bzimage: files::read(&self.source.join("arch/x86/boot/bzImage"))?,
            drivers: drivers::collect(&self.source)?,
        })
    }

    fn target(&mut self, target: &str) -> Result<(), CommandError> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let make = Cmd::new("make")
            .arg("-C")
            .arg(&self.source)
            .arg(format!("-j{jobs}"))
            .env_only(&VISIBLE_ENVIRONMENT)
            .env("LC_ALL", "C")
            .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01 00:00:00 UTC")
            .env("KBUILD_BUILD_USER", "hearth")
            .env("KBUILD_BUILD_HOST", "hearth")
            .env("KBUILD_BUILD_VERSION", "1")
            // Kconfig records the versions of the tools that it finds, needed or not.
            .args([
                "ARCH=x86",
                "CC=gcc",
                "RUSTC=hidden",
                "BINDGEN=hidden",
                "PAHOLE=hidden",
            ])
            .arg(target);
        make.stream(self.progress, |line| {
            self.log.line(line)?;
            // "  CC      init/main.o"
            if let Some(step) = line.strip_prefix("  ") {
                self.task.step();
                self.task
                    .now(&step.split_whitespace().collect::<Vec<_>>().join(" "));
            }
            Ok(())
        })
    }
}

impl Kernel {
    /// Its drivers, by their paths in the sources.
    pub fn drivers(&self) -> Result<Vec<Driver>, KernelError> {
        Ok(drivers::parse(&files::read_text(&self.drivers)?)?)
    }

    fn read(entry: &Path) -> Result<Kernel, KernelError> {
        let recorded = files::read_text(&entry.join("version"))?;
        let Some((version, source)) = recorded.trim_end().split_once('\n') else {
            return Err(KernelError::Damaged {
                entry: entry.to_owned(),
            });
        };
        let config = files::read(&entry.join("config"))?;
        Ok(Kernel {
            bzimage: entry.join("bzImage"),
            drivers: entry.join("drivers"),
            version: version.to_owned(),
            source: source.to_owned(),
            config_hash: hex::encode(digest(&SHA256, &config)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> Inputs {
        Inputs {
            fragment: Fragment::parse("CONFIG_A=y\n", "test").unwrap(),
            package: "linux-source-1.0".into(),
            source_version: "1.0.1-1".into(),
            tarball: "/nowhere".into(),
            tools: vec!["gcc 12".into(), "ld 2".into()],
        }
    }

    #[test]
    fn key_depends_on_every_input_and_on_no_comment() {
        let key = inputs().key();
        let fragment = |text| Fragment::parse(text, "test").unwrap();
        let changed = [
            Inputs {
                fragment: fragment("# CONFIG_A is not set\n"),
                ..inputs()
            },
            Inputs {
                source_version: "1.0.2-1".into(),
                ..inputs()
            },
            Inputs {
                package: "linux-source-1.1".into(),
                ..inputs()
            },
            Inputs {
                tools: vec!["gcc 12".into(), "ld 3".into()],
                ..inputs()
            },
            Inputs {
                tools: vec!["gcc 12ld 2".into()],
                ..inputs()
            },
        ];
        for inputs in changed {
            assert_ne!(inputs.key(), key);
        }
        assert_eq!(
            Inputs {
                fragment: fragment("# Why.\n\nCONFIG_A=y\n"),
                ..inputs()
            }
            .key(),
            key
        );
    }

    #[test]
    fn entry_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        files::write(
            &dir.path().join("version"),
            "1.0.1\nlinux-source-1.0 1.0.1-1\n",
        )
        .unwrap();
        files::write(&dir.path().join("config"), "abc").unwrap();
        let kernel = Kernel::read(dir.path()).unwrap();
        assert_eq!(kernel.version, "1.0.1");
        assert_eq!(kernel.source, "linux-source-1.0 1.0.1-1");
        assert_eq!(
            kernel.config_hash,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(kernel.bzimage, dir.path().join("bzImage"));
    }

    #[test]
    fn no_option_is_in_two_fragments() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel-config");
        let mut seen = std::collections::BTreeMap::new();
        for name in FRAGMENTS {
            let text = std::fs::read_to_string(config.join(name)).unwrap();
            // A line each, whatever the comments say.
            let fragment = Fragment::parse(&text, name).unwrap().to_string();
            for option in fragment.lines().filter_map(|line| {
                line.split(['=', ' '])
                    .find(|word| word.starts_with("CONFIG_"))
            }) {
                let before = seen.insert(option.to_owned(), name);
                assert_eq!(before, None, "{option} in {name}");
            }
        }
        assert!(seen.contains_key("CONFIG_64BIT") && seen.contains_key("CONFIG_BLK_DEV_NVME"));
        let series = series(&config).unwrap();
        assert!(
            series.split('.').all(|part| part.parse::<u32>().is_ok()),
            "{series}"
        );
    }
}
