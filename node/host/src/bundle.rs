//! The contents of the extension `kubernetes`: the programs, their paths and their versions.
//!
//! ```text
//! VERSION          one program and its version per line
//! bin/             programs; one binary may have several names
//! cni/             CNI plugins
//! images/          container images, as archives
//! ```
//!
//! The extension determines the versions, not this binary. The arguments of a program depend on its
//! version. All such dependence is in one table ([`Flag`]), so that a newer bundle needs changes
//! only there.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use hearth_sys::files::{self, FileError};

use crate::layout;

/// Larger files are rejected.
const MAX_VERSION_FILE_SIZE: u64 = 4096;

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
    /// Parses `1.20.2`, with or without a leading `v`; a suffix after the third number (`-rc.1`,
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

/// Flags and fields that not every version of Kubernetes supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// `--port=0` of controller-manager and scheduler: disables plain HTTP.
    ManagerInsecurePort,
    /// `--insecure-port=0` of the API server: disables plain HTTP.
    ApiserverInsecurePort,
    /// `--container-runtime=remote` of the kubelet: older versions have another runtime.
    KubeletContainerRuntime,
    /// `containerRuntimeEndpoint` in the kubelet's configuration file instead of a flag.
    KubeletRuntimeEndpointInFile,
}

impl Flag {
    /// The minor versions of Kubernetes 1 that support it: the first one, and the first one that no
    /// longer does.
    const fn between(self) -> (u32, u32) {
        match self {
            Self::ManagerInsecurePort => (0, 24),
            Self::ApiserverInsecurePort => (0, 24),
            Self::KubeletContainerRuntime => (0, 27),
            Self::KubeletRuntimeEndpointInFile => (27, u32::MAX),
        }
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
    Iptables,
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
        Self::Iptables,
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
            Self::Iptables => "iptables",
        }
    }
}

/// A mounted Kubernetes bundle.
#[derive(Clone, Debug)]
pub struct Bundle {
    root: layout::Bundle,
    kubernetes: Version,
    containerd: Version,
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
        let of = |program: &'static str| {
            let found = versions.iter().find(|(name, _)| *name == program);
            found
                .map(|(_, version)| *version)
                .ok_or_else(|| BundleError::NoVersion {
                    path: path.clone(),
                    program,
                })
        };
        Ok(Self {
            kubernetes: of("kubernetes")?,
            containerd: of("containerd")?,
            root,
        })
    }

    /// The version of Kubernetes: the API server, the controller manager, the scheduler, the
    /// kubelet and kube-proxy.
    pub const fn kubernetes(&self) -> Version {
        self.kubernetes
    }

    /// The version of containerd.
    pub const fn containerd(&self) -> Version {
        self.containerd
    }

    /// Whether this version of Kubernetes supports the flag.
    pub const fn has(&self, flag: Flag) -> bool {
        let (first, end) = flag.between();
        self.kubernetes.major == 1 && first <= self.kubernetes.minor && self.kubernetes.minor < end
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
    fn versions_are_what_the_extension_says() {
        let bundle = bundle("kubernetes 1.20.2\ncontainerd v1.6.20~ds1\nrunc 1.1.5\n").unwrap();
        assert_eq!(bundle.kubernetes().to_string(), "1.20.2");
        assert_eq!(bundle.containerd().to_string(), "1.6.20");
        assert!(bundle.has(Flag::ManagerInsecurePort));
        assert!(!bundle.has(Flag::KubeletRuntimeEndpointInFile));
    }

    #[test]
    fn a_newer_kubernetes_is_told_other_things() {
        let bundle = bundle("kubernetes v1.30.1\ncontainerd 2.0.0").unwrap();
        assert!(!bundle.has(Flag::ManagerInsecurePort));
        assert!(bundle.has(Flag::KubeletRuntimeEndpointInFile));
        assert!(bundle.kubernetes() > Version::parse("1.9.30").unwrap());
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = bundle("containerd 1.6.20\n").unwrap_err();
        assert!(error.to_string().ends_with("no version of kubernetes"));
        let error = bundle("kubernetes 1.x\n").unwrap_err();
        assert!(error.to_string().contains("kubernetes 1.x"), "{error}");
    }

    #[test]
    fn images_are_archives_in_order() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(
            directory.path().join("VERSION"),
            "kubernetes 1.20.2\ncontainerd 1.6.20\n",
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
