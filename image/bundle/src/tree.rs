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

use std::path::Path;

use hearth_build::files::{self, FileError, create_dir};
use hearth_build::progress::Progress;

use crate::compile::{Built, PROGRAMS};
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

/// Every program except Kubernetes' own, and its callers.
const FROM_PACKAGES: [Program; 14] = [
    program("containerd", "usr/bin/containerd", "bin/containerd"),
    // One per pod, started by containerd; it outlives containerd.
    program(
        "containerd",
        "usr/bin/containerd-shim-runc-v2",
        "bin/containerd-shim-runc-v2",
    ),
    program("runc", "usr/sbin/runc", "bin/runc"),
    // For kube-proxy's services, the chains of the kubelet and portmap, and the node's masquerading. The legacy
    // variant, because the kernel has its tables and not nftables.
    program(
        "iptables",
        "usr/sbin/xtables-legacy-multi",
        "bin/xtables-legacy-multi",
    ),
    // kube-proxy deletes flows of UDP services whose endpoint is gone.
    program("conntrack", "usr/sbin/conntrack", "bin/conntrack"),
    // The kubelet mounts volumes with these two.
    program("mount", "bin/mount", "bin/mount"),
    program("mount", "bin/umount", "bin/umount"),
    // The kubelet measures emptyDir volumes with `nice -n 19 du -x -s -B 1` and `find -xdev -printf .`, which are GNU
    // options.
    program("coreutils", "usr/bin/nice", "bin/nice"),
    program("coreutils", "usr/bin/du", "bin/du"),
    program("findutils", "usr/bin/find", "bin/find"),
    // Network plugins: containerd calls loopback for every pod; the node's pod network uses the others.
    program(
        "containernetworking-plugins",
        "usr/lib/cni/bridge",
        "cni/bridge",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/host-local",
        "cni/host-local",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/loopback",
        "cni/loopback",
    ),
    program(
        "containernetworking-plugins",
        "usr/lib/cni/portmap",
        "cni/portmap",
    ),
];

/// Other names of programs: (link, program), both in `bin`. No ip6tables: the kernel has no tables for it.
const LINKS: [(&str, &str); 3] = [
    ("iptables", "xtables-legacy-multi"),
    ("iptables-restore", "xtables-legacy-multi"),
    ("iptables-save", "xtables-legacy-multi"),
];

/// The file in `bin` with all Kubernetes programs.
const KUBERNETES: &str = "kubernetes";

/// Lays the tree out in `root`, which must not exist; works in `scratch`, an empty folder.
pub(crate) fn lay_out(
    progress: &dyn Progress,
    inputs: &Inputs,
    built: &Built,
    scratch: &Path,
    root: &Path,
) -> Result<(), TreeError> {
    let packages = Packages::unpack(progress, inputs, scratch)?;
    for folder in ["bin", "cni", "lib/xtables", "images", "licences"] {
        create_dir(&root.join(folder))?;
    }
    copy(&built.multicall, &root.join("bin").join(KUBERNETES))?;
    for (link, target) in PROGRAMS
        .map(|name| (name, KUBERNETES))
        .into_iter()
        .chain(LINKS)
    {
        files::link(target, &root.join("bin").join(link))?;
    }
    let mut dynamic = Vec::new();
    for Program { package, path, to } in &FROM_PACKAGES {
        let to = root.join(to);
        copy(&packages.file(package, path), &to)?;
        dynamic.push(to);
    }
    let extensions = packages.copy_iptables_extensions(root)?;
    packages.relocate(progress, root, dynamic, extensions)?;
    images(progress, &packages, scratch, root)?;
    licences(&packages, built, root)?;
    let (_, _, kubernetes) = inputs.source()?;
    let version = format!(
        "kubernetes {kubernetes}\ncontainerd {}\nrunc {}\ncni {}\n",
        inputs.upstream_version("containerd")?,
        inputs.upstream_version("runc")?,
        inputs.upstream_version("containernetworking-plugins")?,
    );
    files::write(&root.join("VERSION"), version)?;
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
        &scratch.join("probe"),
        &archives.join("probe.tar"),
    )
}

/// Copies Debian's copyright file of every package whose files are in the tree; Kubernetes' own covers what it
/// contains.
fn licences(packages: &Packages, built: &Built, root: &Path) -> Result<(), FileError> {
    let to = root.join("licences");
    copy(&built.copyright, &to.join("kubernetes"))?;
    for package in FOR_THE_NODE {
        let path = format!("usr/share/doc/{package}/copyright");
        copy(&packages.file(package, &path), &to.join(package))?;
    }
    Ok(())
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

    #[test]
    fn what_a_bundle_must_have_is_laid_out() {
        let files = FROM_PACKAGES.iter().map(|program| program.to.to_owned());
        let links = LINKS.iter().map(|(link, _)| format!("bin/{link}"));
        let laid_out: BTreeSet<String> = files
            .chain(links)
            .chain(PROGRAMS.map(|name| format!("bin/{name}")))
            .collect();
        for program in crate::bundle::PROGRAMS {
            assert!(laid_out.contains(program), "{program}");
        }
    }
}
