//! What the bundle is made of: Debian packages, binary and source, fetched by apt and never installed.
//!
//! A mirror holds only the current point release. Therefore the files are kept, in a folder beside the cache's entries
//! ([`Wanted`]), and used until they are fetched anew: the record of them, names and hashes, is what the key of what is
//! made of them covers, so a bundle that is there is found without a network.

use std::path::{Path, PathBuf};

use hearth_build::apt::{Apt, AptError};
use hearth_build::cache::{self, Builder, Cache, CacheError};
use hearth_build::command::CommandError;
use hearth_build::files::{self, FileError, failed};
use hearth_build::progress::{Length, Progress};
use ring::digest::{SHA256, digest};

/// Why the inputs are not there.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// apt does not give the packages.
    #[error(
        "the bundle is made of packages of Debian's release {RELEASE}: does this machine's apt know it, with its sources? \
         Otherwise give a ready bundle with --bundle"
    )]
    NotFetched(#[source] CommandError),
    /// apt was not to be used.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// There is no place for them.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The file system refused.
    #[error(transparent)]
    File(#[from] FileError),
    /// They were there when the bundle was made.
    #[error("the packages of the bundle are gone")]
    Gone,
    /// Somebody has written to them since.
    #[error(
        "the files in {} are not what was fetched: run `cargo xtask kubernetes --update`",
        folder.display()
    )]
    Changed {
        /// Where they are.
        folder: PathBuf,
    },
    /// A binary package that is asked for.
    #[error("the package {0} is not among the inputs")]
    NoPackage(String),
    /// Half of the source package.
    #[error("{0} of Kubernetes is not among the inputs")]
    NoSource(&'static str),
    /// The file of upstream's source is called otherwise than Debian's are.
    #[error("{0} has no version in its name")]
    NoVersion(String),
}

/// The kind of our entries in the cache, beside which the files are kept.
pub(crate) const KIND: &str = "kubernetes";

/// Debian's release whose packages these are, as apt's `Codename` has it.
const RELEASE: &str = "bookworm";

/// The source package: upstream's whole tree, with all it depends on.
pub(crate) const KUBERNETES: &str = "kubernetes";

/// Packages that the tree's files come from; tree.rs says which files, and why.
pub(crate) const FOR_THE_NODE: [&str; 21] = [
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
pub(crate) const TOOLS: [&str; 3] = ["golang-1.19-go", "golang-1.19-src", "patchelf"];

/// What is fetched together, and kept together.
pub(crate) struct Wanted {
    /// Name of the folder, beside the cache's entries.
    folder: &'static str,
    packages: &'static [&'static [&'static str]],
    /// Whether all comes that they depend on, too; otherwise each package that is needed is named.
    with_dependencies: bool,
    source: Option<&'static str>,
}

/// For the bundle.
pub(crate) const OF_THE_BUNDLE: Wanted = Wanted {
    folder: "inputs",
    packages: &[&FOR_THE_NODE, &TOOLS],
    with_dependencies: false,
    source: Some(KUBERNETES),
};

/// For the images of Kubernetes' own tests: what upstream's have from elsewhere.
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
    source: None,
};

/// Name of the record, in the folder of the files it lists.
const RECORD: &str = "record";

/// The files, each as its hash was when it came.
#[derive(Debug)]
pub(crate) struct Inputs {
    dir: PathBuf,
    /// One line each, sorted: SHA-256 in hex, two blanks, file name.
    record: String,
}

impl Inputs {
    /// What is kept; fetched, if it is not all there.
    pub(crate) fn ensure(
        progress: &dyn Progress,
        cache: &Cache,
        wanted: &Wanted,
    ) -> Result<Inputs, InputsError> {
        if let Some(inputs) = Inputs::kept(wanted)? {
            return Ok(inputs);
        }
        let builder = cache.lock(progress)?;
        // Whoever held the lock may have fetched these.
        match Inputs::kept(wanted)? {
            Some(inputs) => Ok(inputs),
            None => Inputs::fetch(progress, &builder, wanted),
        }
    }

    /// What is kept for the bundle, which must have been ensured before.
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
        let whole = names.all(|package| inputs.package(package).is_ok_and(|path| path.exists()))
            && (wanted.source.is_none() || inputs.source().is_ok());
        Ok(whole.then_some(inputs))
    }

    /// Fetches all anew, and keeps that instead of what was kept before.
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
        if let Some(source) = wanted.source {
            apt.download_source(progress, &*task, source)
                .map_err(InputsError::NotFetched)?;
        }
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

    /// Upstream's version of a binary package ("1.6.20" of "1.6.20~ds1-1+deb12u3").
    pub(crate) fn upstream_version(&self, package: &str) -> Result<String, InputsError> {
        let path = self.package(package)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let version = name.split('_').nth(1).unwrap_or_default();
        Ok(upstream(version).to_owned())
    }

    /// Upstream's source, Debian's part of the source package, and upstream's version.
    pub(crate) fn source(&self) -> Result<(PathBuf, PathBuf, String), InputsError> {
        let of_source = |file: &str| file.starts_with(KUBERNETES) && file.contains(".tar.");
        let upstream_tar = self
            .file(|file| of_source(file) && file.contains(".orig.tar."))
            .ok_or(InputsError::NoSource("upstream's source"))?;
        let debian_tar = self
            .file(|file| of_source(file) && file.contains(".debian.tar."))
            .ok_or(InputsError::NoSource("Debian's part of the source"))?;
        let name = upstream_tar
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let version = name
            .split('_')
            .nth(1)
            .and_then(|rest| rest.split_once(".orig.tar."))
            .map(|(version, _)| upstream(version).to_owned())
            .ok_or_else(|| InputsError::NoVersion(name.into_owned()))?;
        Ok((upstream_tar, debian_tar, version))
    }

    /// Stands for names and hashes of all the files, in a key.
    pub(crate) fn digest(&self) -> String {
        hex::encode(&digest(&SHA256, self.record.as_bytes()).as_ref()[..8])
    }

    /// Every file against its hash in the record: they may have lain there for months.
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
    /// Of the packages that are asked for.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.packages.iter().copied().flatten().copied()
    }

    fn dir(&self) -> Result<PathBuf, CacheError> {
        Ok(cache::dir()?.join(KIND).join(self.folder))
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
    // By name: the hashes say nothing to whoever compares two records.
    lines.sort_by(|a, b| a[66..].cmp(&b[66..]));
    Ok(lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
