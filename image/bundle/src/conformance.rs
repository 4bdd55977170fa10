//! Kubernetes' own conformance tests, in the version of the bundle.
//!
//! The program (`e2e.test`) runs on the developer's machine and tests a cluster. Its pods run images from registries
//! that the test machines cannot reach, so the images are made here (`images`) and added to our bundle. Such a bundle
//! is for tests only.
//!
//! The programs are compiled by `image/programs`; the bundle with the images is an entry of the cache of its own, which
//! is made in seconds.

mod images;

use std::path::{Path, PathBuf};

use hearth_build::cache::Cache;
use hearth_build::command::Cmd;
use hearth_build::progress::{Length, Progress};
use hearth_programs::{Built, CONFORMANCE};

use crate::Minor;
use crate::bundle::Bundle;
use crate::entry::{self, ROOT, compiler, folders, key};
use crate::error::BuildError;
use crate::inputs::{self, Inputs, KIND};
use crate::packages::Packages;

/// Version of the images, part of the cache key.
const IMAGES_RECIPE: u32 = 2;

/// The tests, and what they need on a node.
pub struct Conformance {
    /// The program that tests a cluster.
    pub program: PathBuf,
    /// The bundle with the images of the tests.
    pub bundle: Bundle,
}

/// Both parts, built if they are not in the cache. The bundle must have been ensured before. `programs`: the folder
/// `image/programs` of the checkout.
pub fn ensure(
    progress: &dyn Progress,
    programs: &Path,
    bundle: &Bundle,
) -> Result<Conformance, BuildError> {
    let [tests] = hearth_programs::ensure(progress, programs, [&CONFORMANCE])?;
    let cache = Cache::of_user(KIND)?;
    let inputs = Inputs::of_the_bundle()?;
    let packages = Inputs::ensure(progress, &cache, &inputs::OF_THE_TESTS)?;
    let of_bundle = key(
        &inputs,
        &crate::compile(progress, programs, Minor::Shipped)?,
        &compiler(progress)?,
    );
    let with_images = format!(
        "conformance-images-{IMAGES_RECIPE}-{of_bundle}-{}-{}",
        tests.key(),
        packages.digest()
    );
    let with_images = cache.ensure(progress, &with_images, |_, scratch| {
        add_images(progress, bundle, &inputs, &packages, &tests, scratch)
    })?;
    let ours = entry::bundle(&with_images)?;
    Ok(Conformance {
        program: tests.program("e2e.test"),
        bundle: Bundle {
            kubectl: bundle.kubectl.clone(),
            ..ours
        },
    })
}

/// Builds an entry of the bundle with the images in `scratch`; returns its folder there.
fn add_images(
    progress: &dyn Progress,
    bundle: &Bundle,
    inputs: &Inputs,
    packages: &Inputs,
    tests: &Built,
    scratch: &Path,
) -> Result<PathBuf, BuildError> {
    let _task = progress.start(
        "building the images of the Kubernetes conformance tests",
        Length::Moment,
    );
    let [stage, entry] = folders(scratch)?;
    let root = entry.join(ROOT);
    // Links and modes are part of a bundle.
    Cmd::new("cp")
        .arg("--archive")
        .arg(&bundle.root)
        .arg(&root)
        .run(progress)?;
    let mut unpacked = Packages::unpack(progress, inputs, &stage)?;
    packages.verify()?;
    for package in packages.packages() {
        unpacked.add(progress, &package)?;
    }
    images::make(progress, &unpacked, tests, &stage, &root.join("images"))?;
    Ok(entry)
}
