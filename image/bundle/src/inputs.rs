//! The Debian packages of the bundle, fetched by apt and never installed.
//!
//! A mirror holds only the current point release. Therefore the files are kept in a folder beside the cache's entries
//! ([`Wanted`]), and used until they are fetched again. The cache key covers the record of their names and hashes, so
//! an existing bundle is found without a network.

use std::path::{Path, PathBuf};

use hearth_build::apt::{Apt, AptError};
use hearth_build::cache::{self, Builder, Cache, CacheError};
use hearth_build::command::CommandError;
use hearth_build::files::{self, FileError, failed};
use hearth_build::progress::{Length, Progress};
use ring::digest::{SHA256, digest};

/// Why the inputs are not available.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// apt did not fetch the packages.
    #[error(
        "cannot fetch the packages of Debian release {RELEASE}: check that this machine's apt has that \
         release and its sources. \
         Alternatively give an existing bundle with --bundle"
    )]
    NotFetched(#[source] CommandError),
    /// apt could not be prepared.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache folder is not available.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The packages have been removed since the bundle was made.
    #[error("the packages of the bundle are missing from the cache")]
    Gone,
    /// The files have been modified since they were fetched.
    #[error(
        "the files in {} have been modified since they were fetched: run `cargo xtask bundle --update`",
        folder.display()
    )]
    Changed {
        /// Folder of the files.
        folder: PathBuf,
    },
    /// A required binary package is missing.
    #[error("the package {0} is not among the inputs")]
    NoPackage(String),
}

/// Kind of cache entry beside which the files are kept.
pub(crate) const KIND: &str = "kubernetes";

/// The Debian release of the packages, as in apt's `Codename`.
const RELEASE: &str = "bookworm";

/// Packages that files of the tree come from; tree.rs lists which files, and why.
pub(crate) const FOR_THE_NODE: [&str; 21] = [
    "busybox-static",
    "ca-certificates",
    "coreutils",
    "findutils",
    "libblkid1",
    "libbsd0",
    "libc6",
    "libedit2",
    "libgmp10",
    "libjansson4",
    "libmd0",
    "libmnl0",
    "libmount1",
    "libnftables1",
    "libnftnl11",
    "libpcre2-8-0",
    "libselinux1",
    "libtinfo6",
    "libxtables12",
    "mount",
    "nftables",
];

/// The package that is only used for the build: it rewrites a program's library path.
pub(crate) const PATCHELF: &str = "patchelf";

/// A set of packages that is fetched and kept together.
pub(crate) struct Wanted {
    /// Name of the folder, beside the cache's entries.
    folder: &'static str,
    packages: &'static [&'static [&'static str]],
    /// Whether all dependencies are fetched, too; otherwise each package is listed.
    with_dependencies: bool,
}

/// For the bundle.
pub(crate) const OF_THE_BUNDLE: Wanted = Wanted {
    folder: "inputs",
    packages: &[&FOR_THE_NODE, &[PATCHELF]],
    with_dependencies: false,
};

/// For the images of Kubernetes' own tests, which replace upstream's.
pub(crate) const OF_THE_TESTS: Wanted = Wanted {
    folder: "inputs-of-tests",
    packages: &[&[
        "bind9-dnsutils",
        "curl",
        "dash",
        "libc-bin",
        "netcat-openbsd",
    ]],
    with_dependencies: true,
};

/// Name of the record, in the folder of the files that it lists.
const RECORD: &str = "record";

/// The files, each with its hash when it was fetched.
#[derive(Debug)]
pub(crate) struct Inputs {
    dir: PathBuf,
    /// One line each, sorted: SHA-256 in hex, two blanks, file name.
    record: String,
}

impl Inputs {
    /// The kept files; fetched if they are incomplete.
    pub(crate) fn ensure(
        progress: &dyn Progress,
        cache: &Cache,
        wanted: &Wanted,
    ) -> Result<Inputs, InputsError> {
        if let Some(inputs) = Inputs::kept(wanted)? {
            return Ok(inputs);
        }
        let builder = cache.lock(progress)?;
        // The previous lock holder may have fetched them.
        match Inputs::kept(wanted)? {
            Some(inputs) => Ok(inputs),
            None => Inputs::fetch(progress, &builder, wanted),
        }
    }

    /// The kept files of the bundle, which must have been ensured before.
    pub(crate) fn of_the_bundle() -> Result<Inputs, InputsError> {
        Inputs::kept(&OF_THE_BUNDLE)?.ok_or(InputsError::Gone)
    }

    fn kept(wanted: &Wanted) -> Result<Option<Inputs>, InputsError> {
        let dir = wanted.dir()?;
        let record = match std::fs::read_to_string(dir.join(RECORD)) {
            Ok(record) => record,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", &dir)(error).into()),
        };
        let inputs = Inputs { dir, record };
        let mut names = wanted.names();
        let whole = names.all(|package| inputs.package(package).is_ok_and(|path| path.exists()));
        Ok(whole.then_some(inputs))
    }

    /// Fetches all packages again, and keeps them in place of the previous ones.
    pub(crate) fn fetch(
        progress: &dyn Progress,
        builder: &Builder<'_>,
        wanted: &Wanted,
    ) -> Result<Inputs, InputsError> {
        let scratch = builder.scratch()?;
        let task = progress.start("fetching Debian packages", Length::Unknown);
        let apt = Apt::new(progress, scratch.path(), RELEASE)?;
        apt.update(progress, &*task).map_err(AptError::from)?;
        let names = wanted.names();
        if wanted.with_dependencies {
            apt.download_whole(progress, &*task, names)
        } else {
            apt.download(progress, &*task, names)
        }
        .map_err(InputsError::NotFetched)?;
        let fetched = apt.finish()?;
        files::write(&fetched.join(RECORD), record_of(&fetched)?)?;
        let dir = wanted.dir()?;
        if dir.exists() {
            std::fs::remove_dir_all(&dir).map_err(failed("remove", &dir))?;
        }
        std::fs::rename(&fetched, &dir).map_err(failed("make", &dir))?;
        task.done();
        Ok(Inputs::of_folder(&dir)?)
    }

    /// All files of a folder, as they are now.
    pub(crate) fn of_folder(dir: &Path) -> Result<Inputs, FileError> {
        Ok(Inputs {
            record: record_of(dir)?,
            dir: dir.to_owned(),
        })
    }

    /// The files of all binary packages, by name.
    pub(crate) fn packages(&self) -> impl Iterator<Item = PathBuf> {
        let names = self.record.lines().filter_map(|line| line.split_once("  "));
        names
            .filter(|(_, name)| name.ends_with(".deb"))
            .map(|(_, name)| self.dir.join(name))
    }

    /// Names and hashes of all the files.
    pub(crate) fn record(&self) -> &str {
        &self.record
    }

    /// The file of a binary package.
    pub(crate) fn package(&self, name: &str) -> Result<PathBuf, InputsError> {
        self.file(|file| {
            file.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('_') && rest.ends_with(".deb"))
        })
        .ok_or_else(|| InputsError::NoPackage(name.to_owned()))
    }

    /// Debian's version of a binary package.
    pub(crate) fn version(&self, package: &str) -> Result<String, InputsError> {
        let path = self.package(package)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(name.split('_').nth(1).unwrap_or_default().to_owned())
    }

    /// A hash of names and hashes of all files, for use in a key.
    pub(crate) fn digest(&self) -> String {
        hex::encode(&digest(&SHA256, self.record.as_bytes()).as_ref()[..8])
    }

    /// Checks every file against its hash in the record: they may have been kept for months.
    pub(crate) fn verify(&self) -> Result<(), InputsError> {
        if record_of(&self.dir)? != self.record {
            return Err(InputsError::Changed {
                folder: self.dir.clone(),
            });
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
    /// Names of the packages to fetch.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.packages.iter().copied().flatten().copied()
    }

    fn dir(&self) -> Result<PathBuf, CacheError> {
        Ok(cache::dir()?.join(KIND).join(self.folder))
    }
}

fn record_of(dir: &Path) -> Result<String, FileError> {
    let mut lines = Vec::new();
    for entry in files::entries(dir)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == RECORD {
            continue;
        }
        let hash = hex::encode(digest(&SHA256, &files::read(&entry.path())?));
        lines.push(format!("{hash}  {name}\n"));
    }
    // Sorted by name, which makes two records easy to compare.
    lines.sort_by(|a, b| a[66..].cmp(&b[66..]));
    Ok(lines.concat())
}

#[cfg(test)]
mod tests {
    use std::fs;

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
    fn files_are_found_by_package() {
        let inputs = inputs(&[
            "libmount1_2.38.1-5+deb12u3_amd64.deb",
            "mount_2.38.1-5+deb12u3_amd64.deb",
            "nftables_1.0.6-2+deb12u2_amd64.deb",
        ]);
        let name = |package| {
            let path = inputs.package(package).unwrap();
            path.file_name().unwrap().to_string_lossy().into_owned()
        };
        assert_eq!(name("mount"), "mount_2.38.1-5+deb12u3_amd64.deb");
        assert_eq!(inputs.version("nftables").unwrap(), "1.0.6-2+deb12u2");
        assert!(inputs.package("nft").is_err());
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
