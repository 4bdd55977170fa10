//! `cargo xtask kernel`: the kernel, from Debian's source package and our configuration fragment, cached by content.
//!
//! The key of the cache covers all that goes in: the version of the source package, the fragments, the compiler and
//! linker, and [`RECIPE`]. So a build happens once per change of those, wherever the checkout lies, and `image` and `run`
//! simply ask for the kernel each time ([`ensure`]). The source is Debian's and not kernel.org's because Debian ships
//! security fixes for it under a signature that every Debian machine already checks; its exact version moves, and is
//! recorded with the result.
//!
//! The fragment is applied to tinyconfig. Kconfig silently drops what it does not know or whose dependencies are missing;
//! here every line of the fragment is compared with the outcome and a difference is an error ([`fragment`]).
//!
//! The same inputs give the same bytes: the time, user, host and build number that the kernel would record are fixed, and
//! the tools that Kconfig only probes for are hidden from it.

mod fragment;

use std::fs::File;
use std::io::{LineWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ring::digest::{Context as Digest, SHA256, digest};

use self::fragment::Fragment;
use crate::cache::{Builder, Cache};
use crate::checkout::root;
use crate::command::Cmd;
use crate::setup::{self, Needs};
use crate::ui::{Task, Ui};

/// Version of the steps below, part of the cache's key: to be raised when a change of them changes the result.
const RECIPE: u32 = 1;

/// About how many steps make announces for the whole build; only the bar depends on it.
const EXPECTED_STEPS: u64 = 2260;

/// What the environment could smuggle into the build.
const HIDDEN_ENVIRONMENT: [&str; 12] = [
    "ARCH",
    "CC",
    "CROSS_COMPILE",
    "KAFLAGS",
    "KBUILD_OUTPUT",
    "KCFLAGS",
    "KCONFIG_ALLCONFIG",
    "LLVM",
    "LOCALVERSION",
    "MAKEFLAGS",
    "MAKELEVEL",
    "SOURCE_DATE_EPOCH",
];

/// `cargo xtask kernel`: build the kernel, or find it in the cache; prints where it is.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Further configuration fragments, laid over kernel-config/fragment.config in this order
    #[arg(long, value_name = "FILE")]
    fragment: Vec<PathBuf>,
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
}

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let kernel = ensure_with(ui, &args.fragment)?;
    ui.say(format_args!(
        "kernel {} from {}, configuration {}",
        kernel.version, kernel.source, kernel.config_hash
    ));
    println!("{}", kernel.bzimage.display());
    Ok(())
}

/// The kernel of this checkout's `kernel-config/`, built if it is not in the cache.
pub fn ensure(ui: &Ui) -> Result<Kernel> {
    ensure_with(ui, &[])
}

fn ensure_with(ui: &Ui, more_fragments: &[PathBuf]) -> Result<Kernel> {
    setup::ensure(ui, Needs::KERNEL)?;
    let inputs = Inputs::gather(ui, more_fragments)?;
    let cache = Cache::of_user("kernel")?;
    let entry = cache.ensure(ui, &inputs.key(), |builder, scratch| {
        build(ui, &inputs, builder, scratch)
    })?;
    Kernel::read(&entry)
}

/// All that the result depends on.
struct Inputs {
    fragment: Fragment,
    /// Name and version of the source package.
    package: String,
    source_version: String,
    tarball: PathBuf,
    /// Compiler and linker, as they call themselves.
    tools: Vec<String>,
}

impl Inputs {
    fn gather(ui: &Ui, more_fragments: &[PathBuf]) -> Result<Inputs> {
        let config_dir = config_dir();
        let mut fragment = Fragment::default();
        for path in std::iter::once(&config_dir.join("fragment.config")).chain(more_fragments) {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            fragment = fragment.overlaid(Fragment::parse(&text, &path.display().to_string())?);
        }
        let package = format!("linux-source-{}", series()?);
        let query = ["--show", "--showformat=${Version}"];
        let source_version = Cmd::new("dpkg-query")
            .args(query)
            .arg(&package)
            .output(ui)?
            .trim()
            .to_owned();
        let mut tools = Vec::new();
        for tool in ["gcc", "ld", "zstd"] {
            let version = Cmd::new(tool)
                .arg("--version")
                .env("LC_ALL", "C")
                .output(ui)?;
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
        let mut hash = Digest::new(&SHA256);
        let recipe = RECIPE.to_string();
        let config = self.fragment.to_string();
        let parts = [
            recipe.as_str(),
            &self.package,
            &self.source_version,
            &config,
        ];
        for part in parts
            .into_iter()
            .chain(self.tools.iter().map(String::as_str))
        {
            // Each with its length, so that no two lists of parts read alike.
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hex::encode(&hash.finish().as_ref()[..16])
    }
}

/// The pinned series of the kernel ("6.12"), which names Debian's source package.
pub fn series() -> Result<String> {
    let path = config_dir().join("series");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn config_dir() -> PathBuf {
    root().join("kernel-config")
}

/// Builds an entry in `scratch`; returns its folder there.
fn build(ui: &Ui, inputs: &Inputs, builder: &Builder<'_>, scratch: &Path) -> Result<PathBuf> {
    let log_path = builder.log();
    let log =
        File::create(&log_path).with_context(|| format!("cannot create {}", log_path.display()))?;
    let source = scratch.join("source");
    std::fs::create_dir(&source).with_context(|| format!("cannot create {}", source.display()))?;
    ui.say(format_args!(
        "{} {} with this configuration is not in the cache: building it, which takes minutes",
        inputs.package, inputs.source_version
    ));
    let task = ui.counted_task("building the kernel", EXPECTED_STEPS);
    let mut make = Make {
        ui,
        source,
        log: LineWriter::new(log),
        task: &task,
    };

    task.now("unpacking");
    let tar = Cmd::new("tar").args(["--extract", "--strip-components=1", "--file"]);
    tar.arg(&inputs.tarball)
        .arg("--directory")
        .arg(&make.source)
        .run(ui)?;
    let finished = make.all(&inputs.fragment).with_context(|| {
        format!(
            "the kernel was not built; the whole log is {}",
            log_path.display()
        )
    })?;

    let entry = scratch.join("entry");
    std::fs::create_dir(&entry).with_context(|| format!("cannot create {}", entry.display()))?;
    let version = format!(
        "{}\n{} {}\n",
        finished.version, inputs.package, inputs.source_version
    );
    write(&entry.join("version"), version.as_bytes())?;
    write(&entry.join("config"), finished.config.as_bytes())?;
    write(&entry.join("bzImage"), &finished.bzimage)?;
    task.done();
    Ok(entry)
}

struct Finished {
    version: String,
    config: String,
    bzimage: Vec<u8>,
}

/// The unpacked source and what is done with it.
struct Make<'a> {
    ui: &'a Ui,
    source: PathBuf,
    log: LineWriter<File>,
    task: &'a Task,
}

impl Make<'_> {
    fn all(&mut self, fragment: &Fragment) -> Result<Finished> {
        let config_path = self.source.join(".config");
        let read_config = || {
            std::fs::read_to_string(&config_path)
                .with_context(|| format!("cannot read {}", config_path.display()))
        };
        self.task.now("configuring");
        self.target("tinyconfig")?;
        std::fs::write(&config_path, format!("{}{fragment}", read_config()?))
            .with_context(|| format!("cannot write {}", config_path.display()))?;
        self.target("olddefconfig")?;
        let config = read_config()?;
        fragment.verify(&config)?;
        self.target("bzImage")?;
        let version = self.source.join("include/config/kernel.release");
        let bzimage = self.source.join("arch/x86/boot/bzImage");
        Ok(Finished {
            version: std::fs::read_to_string(&version)
                .with_context(|| format!("cannot read {}", version.display()))?
                .trim()
                .to_owned(),
            config,
            bzimage: std::fs::read(&bzimage)
                .with_context(|| format!("cannot read {}", bzimage.display()))?,
        })
    }

    fn target(&mut self, target: &str) -> Result<()> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut make = Cmd::new("make")
            .arg("-C")
            .arg(&self.source)
            .arg(format!("-j{jobs}"));
        for name in HIDDEN_ENVIRONMENT {
            make = make.env_remove(name);
        }
        make = make
            .env("LC_ALL", "C")
            .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01 00:00:00 UTC")
            .env("KBUILD_BUILD_USER", "hearth")
            .env("KBUILD_BUILD_HOST", "hearth")
            .env("KBUILD_BUILD_VERSION", "1")
            // Kconfig writes the versions of what it finds into the configuration, wanted or not.
            .args([
                "ARCH=x86",
                "CC=gcc",
                "RUSTC=hidden",
                "BINDGEN=hidden",
                "PAHOLE=hidden",
            ])
            .arg(target);
        make.stream(self.ui, |line| {
            writeln!(self.log, "{line}").context("cannot write the log")?;
            // "  CC      init/main.o"
            if let Some(step) = line.strip_prefix("  ") {
                self.task.step();
                self.task
                    .now(step.split_whitespace().collect::<Vec<_>>().join(" "));
            }
            Ok(())
        })?;
        self.log.flush().context("cannot write the log")
    }
}

impl Kernel {
    fn read(entry: &Path) -> Result<Kernel> {
        let read = |name: &str| {
            let path = entry.join(name);
            std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))
        };
        let recorded = read("version")?;
        let (version, source) = recorded.trim_end().split_once('\n').with_context(|| {
            format!(
                "{} is damaged: remove {}",
                entry.join("version").display(),
                entry.display()
            )
        })?;
        Ok(Kernel {
            bzimage: entry.join("bzImage"),
            version: version.to_owned(),
            source: source.to_owned(),
            config_hash: hex::encode(digest(&SHA256, read("config")?.as_bytes())),
        })
    }
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
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
        write(
            &dir.path().join("version"),
            b"1.0.1\nlinux-source-1.0 1.0.1-1\n",
        )
        .unwrap();
        write(&dir.path().join("config"), b"abc").unwrap();
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
    fn the_fragment_of_the_house_parses() {
        let path = config_dir().join("fragment.config");
        let fragment =
            Fragment::parse(&std::fs::read_to_string(path).unwrap(), "fragment.config").unwrap();
        assert!(fragment.to_string().contains("CONFIG_64BIT=y\n"));
        assert!(
            series()
                .unwrap()
                .split('.')
                .all(|part| part.parse::<u32>().is_ok())
        );
    }
}
