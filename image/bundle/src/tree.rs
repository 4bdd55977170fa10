//! Lays out the tree that a node mounts at [`crate::packages::MOUNTED_AT`].
//!
//! The node's root holds no loader, libraries or tools for anything but the node itself, and a bundle may be newer than
//! the node. So the tree is self-contained: every dynamically linked program is rewritten (patchelf) to name the tree's
//! own loader and to search the tree's `lib` only, and all libraries are collected at build time. The alternatives were
//! an LD_LIBRARY_PATH, which every child would inherit down to the containers of runc, and linking everything
//! statically, which would mean building Debian's C programs again.
//!
//! Of a file, only bytes, mode and name reach the node; the bytes are Debian's or the compiler's, so the same inputs
//! give the same tree.

use std::path::{Path, PathBuf};

use hearth_build::files::{self, FileError, create_dir};
use hearth_build::progress::Progress;
use hearth_programs::{Built, Component, ProgramsError, Sbom};

use crate::inputs::{FOR_THE_NODE, Inputs, InputsError};
use crate::modes::{copy, settle_modes};
use crate::packages::{Packages, PackagesError};
use crate::rootfs::{self, ImageError};

/// Why the tree could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The inputs are not available.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// The programs could not be relocated.
    #[error(transparent)]
    Packages(#[from] PackagesError),
    /// An image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A bill of materials could not be read.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A program taken from a package.
struct Program {
    package: &'static str,
    /// Path in the package.
    path: &'static str,
    /// Path in the tree.
    to: &'static str,
}

const fn program(package: &'static str, path: &'static str, to: &'static str) -> Program {
    Program { package, path, to }
}

/// Every program of Debian, with what calls it.
const FROM_PACKAGES: [Program; 6] = [
    // Rules for packets: those of kube-proxy, of portmap and of the node.
    program("nftables", "usr/sbin/nft", "bin/nft"),
    // The kubelet mounts volumes with these two.
    program("mount", "bin/mount", "bin/mount"),
    program("mount", "bin/umount", "bin/umount"),
    // The kubelet measures emptyDir volumes with `nice -n 19 du -x -s -B 1` and `find -xdev -printf .`, which are GNU
    // options.
    program("coreutils", "usr/bin/nice", "bin/nice"),
    program("coreutils", "usr/bin/du", "bin/du"),
    program("findutils", "usr/bin/find", "bin/find"),
];

/// The package with the Mozilla list of authorities.
const AUTHORITIES: &str = "ca-certificates";

/// The file in `bin` with all Kubernetes programs, and the names that it is called by.
const KUBERNETES: &str = "kubernetes";
const CALLED: [&str; 5] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
];

/// Programs that are compiled, besides Kubernetes: containerd starts a shim for each pod, which outlives it, and calls
/// loopback for every pod; the node's pod network uses the other plugins.
const COMPILED: [&str; 7] = [
    "bin/containerd",
    "bin/containerd-shim-runc-v2",
    "bin/runc",
    "cni/bridge",
    "cni/host-local",
    "cni/loopback",
    "cni/portmap",
];

/// The compiled programs of the bundle.
pub(crate) struct Compiled {
    pub(crate) cni: Built,
    pub(crate) containerd: Built,
    pub(crate) kubernetes: Built,
    pub(crate) runc: Built,
}

impl Compiled {
    /// All, with the names that they have in VERSION.
    pub(crate) fn all(&self) -> [(&'static str, &Built); 4] {
        [
            ("cni", &self.cni),
            ("containerd", &self.containerd),
            ("kubernetes", &self.kubernetes),
            ("runc", &self.runc),
        ]
    }

    /// The file for this path in the tree.
    fn file(&self, path: &str) -> PathBuf {
        let (folder, name) = path.split_once('/').unwrap_or_default();
        match (folder, name) {
            ("cni", name) => self.cni.program(name),
            (_, "runc") => self.runc.program(name),
            (_, name) => self.containerd.program(name),
        }
    }
}

/// Lays the tree out in `root`, which must not exist; works in `scratch`, an empty folder.
pub(crate) fn lay_out(
    progress: &dyn Progress,
    inputs: &Inputs,
    compiled: &Compiled,
    scratch: &Path,
    root: &Path,
) -> Result<(), TreeError> {
    let packages = Packages::unpack(progress, inputs, scratch)?;
    for folder in ["bin", "cni", "lib", "images", "licences"] {
        create_dir(&root.join(folder))?;
    }
    copy(
        &compiled.kubernetes.program(KUBERNETES),
        &root.join("bin").join(KUBERNETES),
    )?;
    for path in COMPILED {
        copy(&compiled.file(path), &root.join(path))?;
    }
    for name in CALLED {
        files::link(KUBERNETES, &root.join("bin").join(name))?;
    }
    let mut dynamic = Vec::new();
    for Program { package, path, to } in &FROM_PACKAGES {
        let to = root.join(to);
        copy(&packages.file(package, path), &to)?;
        dynamic.push(to);
    }
    packages.relocate(progress, root, dynamic)?;
    images(progress, &packages, scratch, root)?;
    authorities(&packages, root)?;
    licences(&packages, compiled, root)?;
    let versions = compiled.all();
    let versions = versions.map(|(name, built)| format!("{name} {}\n", built.version));
    files::write(&root.join("VERSION"), versions.concat())?;
    settle_modes(root)?;
    Ok(())
}

/// The images that a node has without a registry.
fn images(
    progress: &dyn Progress,
    packages: &Packages,
    scratch: &Path,
    root: &Path,
) -> Result<(), ImageError> {
    let archives = root.join("images");
    rootfs::pause_image(
        progress,
        "hearth.local/pause:1",
        &scratch.join("pause"),
        &archives.join("pause.tar"),
    )?;
    rootfs::probe_image(
        progress,
        packages,
        "hearth.local/probe:1",
        &[],
        &scratch.join("probe"),
        &archives.join("probe.tar"),
    )
}

/// The authorities of the Mozilla list, in the order of their file names: those whose certificates containerd accepts of
/// registries.
fn authorities(packages: &Packages, root: &Path) -> Result<(), FileError> {
    let folder = packages.file(AUTHORITIES, "usr/share/ca-certificates/mozilla");
    let mut all = Vec::new();
    for certificate in files::entries(&folder)? {
        all.extend(files::read(&certificate.path())?);
    }
    files::write(&root.join("authorities.pem"), all)
}

/// Copies the licences of what was compiled, and Debian's copyright file of every package whose files are in the tree.
fn licences(packages: &Packages, compiled: &Compiled, root: &Path) -> Result<(), FileError> {
    let to = root.join("licences");
    for (name, built) in compiled.all() {
        copy(&built.licences(), &to.join(name))?;
    }
    for package in FOR_THE_NODE {
        let path = format!("usr/share/doc/{package}/copyright");
        copy(&packages.file(package, &path), &to.join(package))?;
    }
    Ok(())
}

/// What the tree consists of: the compiled programs with their modules, and Debian's packages.
pub(crate) fn sbom(compiled: &Compiled, inputs: &Inputs) -> Result<Sbom, TreeError> {
    let mut programs = Vec::new();
    for (_, built) in compiled.all() {
        programs.push(built.sbom()?);
    }
    let mut packages = Vec::new();
    for package in FOR_THE_NODE {
        let version = inputs.version(package)?;
        packages.push(Component {
            purl: format!("pkg:deb/debian/{package}@{version}?arch=amd64"),
            name: package.to_owned(),
            version,
            // Debian describes a package's licences in its own words.
            licence: format!("LicenseRef-debian-{package}"),
            sum: String::new(),
        });
    }
    let version = &compiled.kubernetes.version;
    Ok(Sbom::of_whole("kubernetes", version, &programs, &packages))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn everything_comes_from_a_package_that_is_fetched() {
        for program in &FROM_PACKAGES {
            assert!(
                FOR_THE_NODE.contains(&program.package),
                "{}",
                program.package
            );
        }
    }

    /// In `image/programs/kubernetes`, which is compiled as it is.
    #[test]
    fn the_compiled_program_knows_every_name() {
        let source = include_str!("../../programs/kubernetes/main.go");
        for name in CALLED {
            assert!(source.contains(&format!("\"{name}\":")), "{name}");
        }
    }

    #[test]
    fn what_a_bundle_must_have_is_laid_out() {
        let files = FROM_PACKAGES.iter().map(|program| program.to.to_owned());
        let laid_out: BTreeSet<String> = files
            .chain(COMPILED.map(str::to_owned))
            .chain(CALLED.map(|name| format!("bin/{name}")))
            .collect();
        for program in crate::bundle::PROGRAMS {
            assert!(laid_out.contains(program), "{program}");
        }
    }
}
