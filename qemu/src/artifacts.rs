//! The images and programs that the end-to-end tests use.
//!
//! `cargo xtask test` builds them and writes a manifest; the tests read it. Both sides share these types; the only
//! other link between them is the manifest's path in the environment.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use serde::{Deserialize, Serialize};

use crate::command::Boot;

/// The environment variable with the path of the manifest.
pub const ENVIRONMENT: &str = "HEARTH_TEST_ARTIFACTS";

/// Everything that the end-to-end tests need; all paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Artifacts {
    /// The standard image.
    pub release: Image,
    /// The image with the debug service and failpoints.
    pub test: Image,
    /// The test image with the extension `sample`.
    pub extended: Image,
    /// Media that install the standard image; only built if one of their tests will run.
    pub installer: Option<Installer>,
    /// For the Kubernetes tests; only built if one of them will run, because it takes long.
    pub kubernetes: Option<Kubernetes>,
    /// An image with the extension `sample`, whose init is the example `machine_check` of `hearth-sys`: it tests on a
    /// machine what cannot be tested on a host.
    pub machine_check: Image,
    /// The operator's tool.
    pub hearthctl: PathBuf,
    /// The developer's tasks, `cargo xtask`.
    pub xtask: PathBuf,
    /// The program of the machines' network ([`crate::switch`]).
    pub switch: PathBuf,
    /// Folder of the tests' logs, which are in `SUITE/TEST/`.
    pub logs: PathBuf,
}

/// Media from which a machine is installed. Must not be written to: machines have copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Installer {
    /// The image of a stick.
    pub stick: PathBuf,
    /// The image of a disc.
    pub disc: PathBuf,
}

/// The Kubernetes image, and programs for this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kubernetes {
    /// The image with the debug service and failpoints, and Kubernetes as its
    /// extension.
    pub image: Image,
    /// kubectl of the same version.
    pub kubectl: PathBuf,
    /// A registry of images that runs on the host.
    pub registry: PathBuf,
    /// The archive with the test image of the bundle.
    pub probe: PathBuf,
    /// What a long test adds to a cluster; only built for that.
    pub add_ons: Option<AddOns>,
    /// Kubernetes' conformance tests (`e2e.test`), for which `image` then has the images; only built if they will run.
    pub conformance: Option<PathBuf>,
}

/// What most clusters get on their first day.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddOns {
    /// Measures what nodes and pods use; its manifests are for kustomize.
    pub metrics_server: AddOn,
    /// A gateway controller: `kinds.yaml`, `rbac.yaml` and `traefik.yaml`.
    pub traefik: AddOn,
    /// A store of logs, without manifests.
    pub victoria_logs: AddOn,
    /// A collector of logs; its manifests are in `vlagent.md`.
    pub vlagent: AddOn,
}

/// A program that its makers publish for clusters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddOn {
    /// The archive with its image.
    pub image: PathBuf,
    /// The folder with its manifests.
    pub manifests: PathBuf,
}

/// An image and its parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// The raw disk, which must not be written to: machines use overlays.
    pub disk: PathBuf,
    /// The unified kernel image.
    pub uki: PathBuf,
    /// What a boot of the disk measures into a TPM.
    pub measurements: PathBuf,
    /// The bare kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// The kernel's command line.
    pub cmdline: String,
}

/// The manifest is not available.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactsError {
    /// The environment variable is not set.
    #[error(
        "{ENVIRONMENT} is not set: run the end-to-end tests with `cargo xtask test e2e`, which builds their images"
    )]
    Unnamed,
    /// The manifest cannot be read.
    #[error("cannot read the manifest {path}: {source}")]
    Read {
        /// Path of the manifest.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The manifest has another format.
    #[error("cannot parse the manifest {path}: {source}")]
    Content {
        /// Path of the manifest.
        path: PathBuf,
        /// The underlying error.
        source: serde_json::Error,
    },
}

impl Artifacts {
    /// The artifacts built by `cargo xtask test`.
    ///
    /// # Errors
    /// If the variable is not set, or the manifest cannot be read.
    pub fn from_environment() -> Result<Self, ArtifactsError> {
        match env::var_os(ENVIRONMENT) {
            Some(path) => Self::read(Path::new(&path)),
            None => Err(ArtifactsError::Unnamed),
        }
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(path: &Path) -> Result<Self, ArtifactsError> {
        let path = path.to_owned();
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|source| ArtifactsError::Content { path, source }),
            Err(source) => Err(ArtifactsError::Read { path, source }),
        }
    }
}

impl Image {
    /// The direct boot of this image; a test may append to the kernel's command line.
    pub fn direct(&self) -> Boot {
        Boot::Direct {
            kernel: self.kernel.clone(),
            initrd: Some(self.initramfs.clone()),
            append: self.cmdline.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str) -> Image {
        Image {
            disk: format!("/{name}/hearth.img").into(),
            uki: format!("/{name}/hearth.efi").into(),
            measurements: format!("/{name}/measurements.json").into(),
            kernel: "/bzImage".into(),
            initramfs: format!("/{name}/initramfs.zst").into(),
            cmdline: "console=ttyS0".to_owned(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("artifacts.json");
        let artifacts = Artifacts {
            release: image("release"),
            test: image("test"),
            extended: image("test-sample"),
            installer: Some(Installer {
                stick: "/stick.img".into(),
                disc: "/disc.iso".into(),
            }),
            kubernetes: Some(Kubernetes {
                image: image("kubernetes"),
                kubectl: "/kubectl".into(),
                registry: "/registry".into(),
                probe: "/probe.tar".into(),
                add_ons: None,
                conformance: Some("/e2e.test".into()),
            }),
            machine_check: image("machine-check"),
            hearthctl: "/hearthctl".into(),
            xtask: "/xtask".into(),
            switch: "/hearth-switch".into(),
            logs: "/logs".into(),
        };
        let text = serde_json::to_vec(&artifacts).expect("JSON");
        fs::write(&path, text).expect("written");
        assert_eq!(Artifacts::read(&path).expect("read"), artifacts);
        fs::write(&path, "{}").expect("written");
        let error = Artifacts::read(&path).expect_err("nothing in it");
        assert!(error.to_string().contains("missing field"), "{error}");
        let error = Artifacts::read(&path.join("absent")).expect_err("no such file");
        assert!(matches!(error, ArtifactsError::Read { .. }));
    }

    #[test]
    fn a_direct_boot_takes_all_three_parts() {
        let Boot::Direct {
            kernel,
            initrd,
            append,
        } = image("test").direct()
        else {
            panic!("not a direct boot");
        };
        assert_eq!(kernel, Path::new("/bzImage"));
        assert_eq!(initrd.as_deref(), Some(Path::new("/test/initramfs.zst")));
        assert_eq!(append, "console=ttyS0");
    }
}
