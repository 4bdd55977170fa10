//! The bundle: everything that a node needs to run containers and Kubernetes, cached by content.
//!
//! A bundle is a folder that becomes the extension `kubernetes` of an image; `docs/kubernetes.md` describes its
//! content. Kubernetes, containerd, runc and the network plugins are compiled from their Go modules
//! (`image/programs`); what they call and Debian has in a supported release is Debian's ([`tree`]). A bundle is a plain
//! folder with its versions written in it, so that one from elsewhere can replace ours ([`Bundle::read`]); the node
//! checks those versions.
//!
//! The cache key covers everything that goes in: the compiled programs, the names and hashes of the packages, the
//! sources here, the C compiler, and the recipe's version. If the bundle of this key exists, nothing is fetched or
//! compiled.

mod bundle;
mod compare;
pub mod conformance;
mod entry;
mod error;
mod inputs;
mod large_probe;
mod modes;
mod oci;
mod packages;
mod rootfs;
mod tree;

pub use bundle::{Bundle, InvalidBundle, Versions};
pub use error::BuildError;
pub use inputs::InputsError;
pub use large_probe::large_probe;
pub use oci::ArchiveError;
pub use packages::{MOUNTED_AT, PackagesError};
pub use rootfs::{ImageError, program_image};
pub use tree::TreeError;

use std::path::{Path, PathBuf};

use hearth_build::cache::Cache;
use hearth_build::command::Cmd;
use hearth_build::files::failed;
use hearth_build::progress::{Length, Progress};
use hearth_programs::{
    CNI, CONTAINERD, KUBERNETES, KUBERNETES_PREVIOUS, Module, ProgramsError, RUNC,
};

use entry::{ROOT, SBOM, compiler, folders, key};
use inputs::{Inputs, KIND};
use tree::Compiled;

/// Which minor version of Kubernetes a bundle has: one of those that the node supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Minor {
    /// That of the images.
    Shipped,
    /// The one before it.
    Previous,
}

impl Minor {
    const fn module(self) -> &'static Module {
        match self {
            Minor::Shipped => &KUBERNETES,
            Minor::Previous => &KUBERNETES_PREVIOUS,
        }
    }
}

/// Fetches the newest point release of Debian's packages, and with `tests` also of those for the conformance tests.
pub fn update(progress: &dyn Progress, tests: bool) -> Result<(), BuildError> {
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    Inputs::fetch(progress, &builder, &inputs::OF_THE_BUNDLE)?;
    if tests {
        Inputs::fetch(progress, &builder, &inputs::OF_THE_TESTS)?;
    }
    Ok(())
}

/// Our bundle, built if it is not in the cache. `programs`: the folder `image/programs` of the checkout.
pub fn ensure(
    progress: &dyn Progress,
    programs: &Path,
    minor: Minor,
) -> Result<Bundle, BuildError> {
    let compiled = compile(progress, programs, minor)?;
    let cache = Cache::of_user(KIND)?;
    let inputs = Inputs::ensure(progress, &cache, &inputs::OF_THE_BUNDLE)?;
    let key = key(&inputs, &compiled, &compiler(progress)?);
    let entry = cache.ensure(progress, &key, |_, scratch| {
        build(progress, &inputs, &compiled, scratch)
    })?;
    Ok(Bundle {
        kubectl: Some(compiled.kubernetes.program("kubectl")),
        sbom: Some(entry.join(SBOM)),
        ..entry::bundle(&entry)?
    })
}

/// The programs that are compiled.
fn compile(progress: &dyn Progress, programs: &Path, minor: Minor) -> Result<Compiled, BuildError> {
    let modules = [&CNI, &CONTAINERD, minor.module(), &RUNC];
    let [cni, containerd, kubernetes, runc] = hearth_programs::ensure(progress, programs, modules)?;
    Ok(Compiled {
        cni,
        containerd,
        kubernetes,
        runc,
    })
}

/// Copies a program, as built by Debian, out of one of the packages of the bundle. A bundle must have been ensured
/// before.
pub fn take_from_package(
    progress: &dyn Progress,
    package: &str,
    path: &str,
    to: &Path,
) -> Result<(), BuildError> {
    let inputs = Inputs::of_the_bundle()?;
    let scratch = tempfile::tempdir().map_err(failed("make a folder in", &std::env::temp_dir()))?;
    Cmd::new("dpkg-deb")
        .arg("--extract")
        .arg(inputs.package(package)?)
        .arg(scratch.path())
        .run(progress)?;
    std::fs::copy(scratch.path().join(path), to).map_err(|source| BuildError::NotTaken {
        path: path.to_owned(),
        package: package.to_owned(),
        source,
    })?;
    Ok(())
}

/// Builds our bundle again, the compiled programs included, and compares the results, byte by byte.
pub fn check(
    progress: &dyn Progress,
    programs: &Path,
    minor: Minor,
    bundle: &Bundle,
) -> Result<(), BuildError> {
    let compiled = compile(progress, programs, minor)?;
    hearth_programs::check(
        progress,
        programs,
        &[
            (&CNI, &compiled.cni),
            (&CONTAINERD, &compiled.containerd),
            (minor.module(), &compiled.kubernetes),
            (&RUNC, &compiled.runc),
        ],
    )?;
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    let inputs = Inputs::of_the_bundle()?;
    let scratch = builder.scratch()?;
    let again = build(progress, &inputs, &compiled, scratch.path())?;
    let mut different = Vec::new();
    compare::compare(
        &bundle.root,
        &again.join(ROOT),
        Path::new(""),
        &mut different,
    )?;
    if different.is_empty() {
        Ok(())
    } else {
        Err(BuildError::NotTheSame(different))
    }
}

/// Lays out an entry in `scratch`; returns its folder there.
fn build(
    progress: &dyn Progress,
    inputs: &Inputs,
    compiled: &Compiled,
    scratch: &Path,
) -> Result<PathBuf, BuildError> {
    inputs.verify()?;
    let task = progress.start("laying out the Kubernetes bundle", Length::Moment);
    let [stage, entry] = folders(scratch)?;
    tree::lay_out(progress, inputs, compiled, &stage, &entry.join(ROOT))?;
    tree::sbom(compiled, inputs)?
        .write(&entry.join(SBOM))
        .map_err(ProgramsError::from)?;
    task.done();
    Ok(entry)
}
