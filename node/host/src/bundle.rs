//! The contents of the extension `kubernetes`: the programs, their paths and their versions.
//!
//! ```text
//! VERSION          one program and its version per line
//! bin/             programs; one binary may have several names
//! cni/             CNI plugins
//! images/          container images, as archives
//! ```
//!
//! The extension determines the versions, not this binary. Flags and configuration files come and go
//! with the minor versions of a program, and one that is not supported makes it exit. So the node
//! states which minor versions it knows ([`SUPPORTED`]): the one that is shipped, and the one before
//! it, from which clusters are updated. It refuses others, with both versions in the message. What
//! differs between the two would be in this table as well; at present nothing that the node uses does.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use hearth_sys::files::{self, FileError};

use crate::layout;

/// Larger files are rejected.
const MAX_VERSION_FILE_SIZE: u64 = 4096;

/// The minor versions of which the node knows the flags and the configuration: the first and the last.
const SUPPORTED: [(&str, Minor, Minor); 2] = [
    ("kubernetes", Minor(1, 36), Minor(1, 37)),
    ("containerd", Minor(2, 3), Minor(2, 4)),
];

/// A minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Minor(u32, u32);

impl fmt::Display for Minor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Why an extension cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file VERSION cannot be read.
    #[error("cannot read the versions in the extension kubernetes")]
    Read(#[from] FileError),
    /// There is no file VERSION.
    #[error("{path} is missing: the extension is not a Kubernetes bundle")]
    Missing {
        /// The expected file.
        path: PathBuf,
    },
    /// A malformed line.
    #[error("{path}: expected a program and its version, got {line:?}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, truncated to 80 characters.
        line: String,
    },
    /// The version of a required program is missing.
    #[error("{path} has no version of {program}")]
    NoVersion {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
    },
    /// The node does not know this version.
    #[error("{path}: expected {program} {oldest} or {newest}, found {found}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The program.
        program: &'static str,
        /// The oldest version that the node knows.
        oldest: Minor,
        /// The newest version that the node knows.
        newest: Minor,
        /// The version of the extension.
        found: Version,
    },
}

/// The version of a program. The order is that of the releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The major version.
    pub major: u32,
    /// The minor version; flags are added and removed with it.
    pub minor: u32,
    /// The patch version.
    pub patch: u32,
}

impl Version {
    /// Parses `1.37.2`, with or without a leading `v`; a suffix after the third number (`-rc.1`,
    /// `+debian`) is ignored.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
        let mut number = || {
            let part = parts.next()?;
            let end = part.find(|c: char| !c.is_ascii_digit());
            part[..end.unwrap_or(part.len())].parse().ok()
        };
        Some(Self {
            major: number()?,
            minor: number()?,
            patch: number()?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A program of the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The variants are named after the programs.
pub enum Binary {
    Apiserver,
    ControllerManager,
    Scheduler,
    Kubelet,
    Proxy,
    Containerd,
    Runc,
    Nft,
}

impl Binary {
    /// All programs.
    pub const ALL: [Self; 8] = [
        Self::Apiserver,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Kubelet,
        Self::Proxy,
        Self::Containerd,
        Self::Runc,
        Self::Nft,
    ];

    /// The name of its file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Apiserver => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kubelet => "kubelet",
            Self::Proxy => "kube-proxy",
            Self::Containerd => "containerd",
            Self::Runc => "runc",
            Self::Nft => "nft",
        }
    }
}

/// A mounted Kubernetes bundle.
#[derive(Clone, Debug)]
pub struct Bundle {
    root: layout::Bundle,
}

impl Bundle {
    /// Reads the versions of the bundle mounted at `mounted`.
    pub fn open(mounted: &Path) -> Result<Self, BundleError> {
        let root = layout::Bundle::under(mounted);
        let path = root.version();
        let bytes = files::read_limited(&path, MAX_VERSION_FILE_SIZE)?;
        let bytes = bytes.ok_or_else(|| BundleError::Missing { path: path.clone() })?;
        let text = String::from_utf8_lossy(&bytes);
        let versions = parse(&text).map_err(|line| BundleError::Line {
            path: path.clone(),
            line: line.chars().take(80).collect(),
        })?;
        for (program, oldest, newest) in SUPPORTED {
            let found = versions.iter().find(|(name, _)| *name == program);
            let Some(&(_, found)) = found else {
                return Err(BundleError::NoVersion { path, program });
            };
            if !(oldest..=newest).contains(&Minor(found.major, found.minor)) {
                return Err(BundleError::Unsupported {
                    path,
                    program,
                    oldest,
                    newest,
                    found,
                });
            }
        }
        Ok(Self { root })
    }

    /// The path of a program.
    pub fn program(&self, binary: Binary) -> PathBuf {
        self.root.programs().join(binary.name())
    }

    /// The directory of the programs, their whole `PATH`.
    pub fn programs(&self) -> PathBuf {
        self.root.programs()
    }

    /// The directory of the CNI plugins.
    pub fn network_plugins(&self) -> PathBuf {
        self.root.network_plugins()
    }

    /// The directory with the configuration of registries, if the extension has one.
    pub fn registries(&self) -> Option<PathBuf> {
        Some(self.root.registries()).filter(|path| path.is_dir())
    }

    /// The CA certificates for registries, if the extension has them.
    pub fn authorities(&self) -> Option<PathBuf> {
        Some(self.root.authorities()).filter(|path| path.is_file())
    }

    /// The archives of container images, sorted by name.
    pub fn images(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        match std::fs::read_dir(self.root.images()) {
            Ok(entries) => {
                for entry in entries {
                    let path = entry?.path();
                    if path.extension().is_some_and(|extension| extension == "tar") {
                        found.push(path);
                    }
                }
            }
            // Images are optional.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        found.sort();
        Ok(found)
    }
}

/// The program and version of each line, or the first malformed line.
fn parse(text: &str) -> Result<Vec<(&str, Version)>, &str> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, version) = line.trim().split_once(' ').ok_or(line)?;
            Ok((name, Version::parse(version.trim()).ok_or(line)?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bundle(text: &str) -> Result<Bundle, BundleError> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("VERSION"), text).unwrap();
        Bundle::open(directory.path())
    }

    #[test]
    fn the_shipped_minor_version_and_the_one_before_are_supported() {
        for (kubernetes, containerd) in [
            ("1.37.2", "2.4.2"),
            ("v1.36.0", "v2.3.7"),
            ("1.37.0-rc.1", "2.4.0+build"),
        ] {
            let text = format!("kubernetes {kubernetes}\ncontainerd {containerd}\nrunc 1.5.2\n");
            bundle(&text).unwrap();
        }
        for (kubernetes, containerd, expected) in [
            (
                "1.20.2",
                "2.4.2",
                "expected kubernetes 1.36 or 1.37, found 1.20.2",
            ),
            (
                "1.38.0",
                "2.4.2",
                "expected kubernetes 1.36 or 1.37, found 1.38.0",
            ),
            (
                "1.37.2",
                "1.7.0",
                "expected containerd 2.3 or 2.4, found 1.7.0",
            ),
        ] {
            let text = format!("kubernetes {kubernetes}\ncontainerd {containerd}\n");
            let error = bundle(&text).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = bundle("containerd 2.4.2\n").unwrap_err();
        assert!(error.to_string().ends_with("no version of kubernetes"));
        let error = bundle("kubernetes 1.x\n").unwrap_err();
        assert!(error.to_string().contains("kubernetes 1.x"), "{error}");
    }

    #[test]
    fn images_are_archives_in_order() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(
            directory.path().join("VERSION"),
            "kubernetes 1.37.2\ncontainerd 2.4.2\n",
        )
        .unwrap();
        let bundle = Bundle::open(directory.path()).unwrap();
        assert_eq!(bundle.images().unwrap(), [] as [PathBuf; 0]);
        let images = directory.path().join("images");
        std::fs::create_dir(&images).unwrap();
        for name in ["b.tar", "README", "a.tar"] {
            std::fs::write(images.join(name), "").unwrap();
        }
        assert_eq!(
            bundle.images().unwrap(),
            [images.join("a.tar"), images.join("b.tar")]
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_text_is_versions_or_refused(text: String) {
            let _ = parse(&text);
        }
    }
}
