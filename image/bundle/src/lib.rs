//! The bundle: everything that a node needs to run containers and Kubernetes, cached by content.
//!
//! A bundle is a folder that becomes the extension `kubernetes` of an image; `docs/kubernetes.md` describes its
//! content. Ours is made of Debian packages: Kubernetes is compiled from the source package (`compile`), everything
//! else is used as Debian built it (`tree`). Debian's packages are signed, their sources and licences are known, and
//! every machine that builds Hearth can fetch them. The price is the version: the last Kubernetes in Debian with its
//! servers is 1.20. So a bundle is a plain folder with its versions written in it, and a newer one from elsewhere can
//! replace ours with [`Bundle::read`]; the node chooses its flags by those versions.
//!
//! The cache key covers everything that goes in: the names and hashes of the packages, the sources here, the C
//! compiler, and the recipe's version. If the bundle of this key exists, nothing is fetched or compiled.

mod amend;
mod bundle;
mod compare;
mod compile;
pub mod conformance;
mod entry;
mod error;
mod inputs;
mod modes;
mod oci;
mod packages;
mod rootfs;
mod tree;

pub use amend::AmendError;
pub use bundle::{Bundle, InvalidBundle, Versions};
pub use compile::CompileError;
pub use error::BuildError;
pub use inputs::InputsError;
pub use oci::ArchiveError;
pub use packages::{ExtensionsError, MOUNTED_AT, PackagesError};
pub use rootfs::ImageError;
pub use tree::TreeError;

use std::path::{Path, PathBuf};

use hearth_build::cache::{Builder, Cache};
use hearth_build::command::Cmd;
use hearth_build::files::{self, Log, failed};
use hearth_build::progress::{Length, Progress};

use entry::{KUBECTL, ROOT, compiler, folders, key};
use inputs::{Inputs, KIND};

/// Fetches the newest point release of the packages, and with `tests` also of those for the conformance tests.
pub fn update(progress: &dyn Progress, tests: bool) -> Result<(), BuildError> {
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    Inputs::fetch(progress, &builder, &inputs::OF_THE_BUNDLE)?;
    if tests {
        Inputs::fetch(progress, &builder, &inputs::OF_THE_TESTS)?;
    }
    Ok(())
}

/// Our bundle, built if it is not in the cache.
pub fn ensure(progress: &dyn Progress) -> Result<Bundle, BuildError> {
    let cache = Cache::of_user(KIND)?;
    let inputs = Inputs::ensure(progress, &cache, &inputs::OF_THE_BUNDLE)?;
    let key = key(&inputs, &compiler(progress)?);
    let entry = cache.ensure(progress, &key, |builder, scratch| {
        progress.say("building the Kubernetes bundle (not in the cache); this takes minutes");
        build(progress, &inputs, builder, scratch)
    })?;
    Ok(Bundle {
        kubectl: Some(entry.join(KUBECTL)),
        ..entry::bundle(&entry)?
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

/// Builds our bundle again and compares the results, byte by byte.
pub fn check(progress: &dyn Progress, bundle: &Bundle) -> Result<(), BuildError> {
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    let inputs = Inputs::of_the_bundle()?;
    let scratch = builder.scratch()?;
    let again = build(progress, &inputs, &builder, scratch.path())?;
    let mut different = Vec::new();
    compare::compare(
        &bundle.root,
        &again.join(ROOT),
        Path::new(""),
        &mut different,
    )?;
    if let Some(kubectl) = &bundle.kubectl
        && files::read(kubectl)? != files::read(&again.join(KUBECTL))?
    {
        different.push(KUBECTL.to_owned());
    }
    if different.is_empty() {
        Ok(())
    } else {
        Err(BuildError::NotTheSame(different))
    }
}

/// Builds an entry in `scratch`; returns its folder there.
fn build(
    progress: &dyn Progress,
    inputs: &Inputs,
    builder: &Builder<'_>,
    scratch: &Path,
) -> Result<PathBuf, BuildError> {
    inputs.verify()?;
    let mut log = Log::create(builder.log())?;
    let task = progress.start(
        "building the Kubernetes bundle",
        Length::Steps(compile::EXPECTED_PACKAGES),
    );
    let [source, stage, entry] = folders(scratch)?;
    let built = compile::compile(progress, inputs, &source, &mut log, &*task)
        .map_err(|source| BuildError::not_compiled(&log, source))?;
    task.now("laying out the tree");
    tree::lay_out(progress, inputs, &built, &stage, &entry.join(ROOT))?;
    let kubectl = entry.join(KUBECTL);
    std::fs::copy(&built.kubectl, &kubectl).map_err(failed("keep kubectl at", &kubectl))?;
    task.done();
    Ok(entry)
}
