//! A bundle as a folder: its required files, and the versions that it states.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The programs that a node starts or passes to one of its programs; every bundle must have all of them.
pub(crate) const PROGRAMS: [&str; 16] = [
    "bin/containerd",
    "bin/containerd-shim-runc-v2",
    "bin/du",
    "bin/find",
    "bin/kube-apiserver",
    "bin/kube-controller-manager",
    "bin/kube-proxy",
    "bin/kube-scheduler",
    "bin/kubelet",
    "bin/mount",
    "bin/nft",
    "bin/nice",
    "bin/runc",
    "bin/umount",
    "cni/bridge",
    "cni/host-local",
];

/// Other files that must be present.
pub(crate) const FILES: [&str; 4] = ["cni/loopback", "cni/portmap", "images/pause.tar", "VERSION"];

/// A complete bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// The tree of the extension.
    pub root: PathBuf,
    /// Versions of its programs.
    pub versions: Versions,
    /// kubectl of this version, for this machine; a bundle of the user's has none.
    pub kubectl: Option<PathBuf>,
    /// Its bill of materials; a bundle of the user's has none.
    pub sbom: Option<PathBuf>,
}

/// The file VERSION: one "name version" a line, sorted by name. Every version begins with three numbers, as the node
/// requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions(BTreeMap<String, String>);

/// Why a folder is not a bundle.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidBundle {
    /// A file is missing.
    #[error("{} is not a bundle: {file} is missing", bundle.display())]
    Missing {
        /// The folder.
        bundle: PathBuf,
        /// The missing file, by its path in the folder.
        file: &'static str,
    },
    /// A program is not executable.
    #[error("{} is not a bundle: {file} is not executable", bundle.display())]
    NotExecutable {
        /// The folder.
        bundle: PathBuf,
        /// The program, by its path in the folder.
        file: &'static str,
    },
    /// VERSION is malformed.
    #[error(
        "{}/VERSION: expected lines of a name and a version of three numbers, including `kubernetes` and `containerd`",
        bundle.display()
    )]
    Version {
        /// The folder.
        bundle: PathBuf,
    },
}

impl Bundle {
    /// Reads the bundle in `folder`.
    pub fn read(folder: &Path) -> Result<Bundle, InvalidBundle> {
        for file in PROGRAMS.into_iter().chain(FILES) {
            let metadata = folder.join(file).metadata();
            match metadata {
                Ok(metadata) if metadata.is_file() => {
                    let runs = metadata.permissions().mode() & 0o111 != 0;
                    if !runs && PROGRAMS.contains(&file) {
                        return Err(InvalidBundle::NotExecutable {
                            bundle: folder.to_owned(),
                            file,
                        });
                    }
                }
                _ => {
                    return Err(InvalidBundle::Missing {
                        bundle: folder.to_owned(),
                        file,
                    });
                }
            }
        }
        let text = fs::read_to_string(folder.join("VERSION")).unwrap_or_default();
        let versions = Versions::parse(&text).ok_or_else(|| InvalidBundle::Version {
            bundle: folder.to_owned(),
        })?;
        Ok(Bundle {
            root: folder.to_owned(),
            versions,
            kubectl: None,
            sbom: None,
        })
    }
}

impl Versions {
    /// None if a line is malformed, or a program is missing whose version the node needs for choosing its flags.
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

/// Whether the version begins with three numbers, like "1.31.4", "v1.31.4" and "1.31.4-rc.1".
fn has_three_numbers(version: &str) -> bool {
    let mut parts = version.strip_prefix('v').unwrap_or(version).splitn(3, '.');
    let whole = |part: Option<&str>| part.is_some_and(|part| part.parse::<u32>().is_ok());
    whole(parts.next())
        && whole(parts.next())
        && parts
            .next()
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with everything that a bundle requires.
    fn bundle() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in PROGRAMS.into_iter().chain(FILES) {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, file).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(
            dir.path().join("VERSION"),
            "kubernetes 1.31.4\ncontainerd 1.7.2\n",
        )
        .unwrap();
        dir
    }

    #[test]
    fn a_bundle_of_the_users_is_read() {
        let dir = bundle();
        let read = Bundle::read(dir.path()).unwrap();
        assert_eq!(read.root, dir.path());
        assert_eq!(
            read.versions.to_string(),
            "containerd 1.7.2, kubernetes 1.31.4"
        );
        assert_eq!(read.kubectl, None);
    }

    #[test]
    fn a_bundle_that_lacks_something_is_refused_by_name() {
        for file in PROGRAMS.into_iter().chain(FILES) {
            let dir = bundle();
            fs::remove_file(dir.path().join(file)).unwrap();
            assert_eq!(
                Bundle::read(dir.path()),
                Err(InvalidBundle::Missing {
                    bundle: dir.path().to_owned(),
                    file
                })
            );
        }
        let dir = bundle();
        let kubelet = dir.path().join("bin/kubelet");
        fs::set_permissions(&kubelet, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(
            Bundle::read(dir.path()),
            Err(InvalidBundle::NotExecutable {
                file: "bin/kubelet",
                ..
            })
        ));
    }

    #[test]
    fn a_bundle_says_its_version() {
        let dir = bundle();
        for text in [
            "",
            "kubernetes",
            "kubernetes 1.31.4",
            "containerd 1.7.2",
            "kubernetes 1.31\ncontainerd 1.7.2",
            "kubernetes 1.31.x\ncontainerd 1.7.2",
            "kubernetes 1.31.4\ncontainerd 1.7.2\ncni",
        ] {
            fs::write(dir.path().join("VERSION"), text).unwrap();
            assert_eq!(
                Bundle::read(dir.path()),
                Err(InvalidBundle::Version {
                    bundle: dir.path().to_owned()
                }),
                "{text}"
            );
        }
        let text = "kubernetes v1.31.4-rc.1\n\ncontainerd 1.7.2~ds1\n";
        fs::write(dir.path().join("VERSION"), text).unwrap();
        Bundle::read(dir.path()).unwrap();
    }
}
