//! Kubernetes' own conformance tests, built from the same source as the bundle.
//!
//! The program (`e2e.test`) runs on the developer's machine and tests a cluster. Its pods run images from registries
//! that the test machines cannot reach, so the images are made here (`images`) and added to our bundle. Such a bundle
//! is for tests only.
//!
//! There are two cache entries: the compiled programs, whose key covers little more than the bundle's, and the bundle
//! with the images, which is made in seconds and changes more often.

mod images;

use std::path::{Path, PathBuf};

use hearth_build::cache::{Builder, Cache};
use hearth_build::command::Cmd;
use hearth_build::files::{self, Log};
use hearth_build::progress::{Length, Progress};

use crate::bundle::Bundle;
use crate::compile;
use crate::entry::{self, ROOT, compiler, folders, key};
use crate::error::BuildError;
use crate::inputs::{self, Inputs, KIND};
use crate::modes::copy;
use crate::packages::Packages;

/// Version of the compiled programs and their build steps, part of the cache key.
const PROGRAMS_RECIPE: u32 = 1;

/// Version of the images, part of the cache key.
const IMAGES_RECIPE: u32 = 1;

/// The program that tests a cluster, in an entry of compiled programs.
const PROGRAM: &str = "host/e2e.test";

/// Content for images, in an entry of compiled programs.
const FOR_IMAGES: &str = "images";

/// The tests, and what they need on a node.
pub struct Conformance {
    /// The program that tests a cluster.
    pub program: PathBuf,
    /// The bundle with the images of the tests.
    pub bundle: Bundle,
}

/// Both parts, built if they are not in the cache. The bundle must have been ensured before.
pub fn ensure(progress: &dyn Progress, bundle: &Bundle) -> Result<Conformance, BuildError> {
    let cache = Cache::of_user(KIND)?;
    let inputs = Inputs::of_the_bundle()?;
    let of_bundle = key(&inputs, &compiler(progress)?);
    let programs = format!("conformance-programs-{PROGRAMS_RECIPE}-{of_bundle}");
    let programs = cache.ensure(progress, &programs, |builder, scratch| {
        progress.say(
            "building the Kubernetes conformance tests (not in the cache); this takes minutes",
        );
        build(progress, &inputs, builder, scratch)
    })?;
    let packages = Inputs::ensure(progress, &cache, &inputs::OF_THE_TESTS)?;
    let with_images = format!(
        "conformance-images-{IMAGES_RECIPE}-{PROGRAMS_RECIPE}-{of_bundle}-{}",
        packages.digest()
    );
    let with_images = cache.ensure(progress, &with_images, |_, scratch| {
        let programs = programs.join(FOR_IMAGES);
        add_images(progress, bundle, &inputs, &packages, &programs, scratch)
    })?;
    let ours = entry::bundle(&with_images)?;
    Ok(Conformance {
        program: programs.join(PROGRAM),
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
    programs: &Path,
    scratch: &Path,
) -> Result<PathBuf, BuildError> {
    let _task = progress.start(
        "building the images of the Kubernetes conformance tests",
        Length::Moment,
    );
    let [_, stage, entry] = folders(scratch)?;
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
    images::make(progress, &unpacked, programs, &stage, &root.join("images"))?;
    Ok(entry)
}

/// Builds an entry of compiled programs in `scratch`; returns its folder there.
fn build(
    progress: &dyn Progress,
    inputs: &Inputs,
    builder: &Builder<'_>,
    scratch: &Path,
) -> Result<PathBuf, BuildError> {
    inputs.verify()?;
    let mut log = Log::create(builder.log())?;
    let task = progress.start(
        "building the Kubernetes conformance tests",
        Length::Steps(compile::EXPECTED_TEST_PACKAGES),
    );
    let [source, _, entry] = folders(scratch)?;
    let built = compile::compile_tests(progress, inputs, &source, &mut log, &*task)
        .map_err(|source| BuildError::not_compiled(&log, source))?;
    let for_images = entry.join(FOR_IMAGES);
    files::create_dir(&for_images)?;
    for file in &built.for_images {
        copy(file, &for_images.join(file.file_name().unwrap_or_default()))?;
    }
    copy(&built.program, &entry.join(PROGRAM))?;
    task.done();
    Ok(entry)
}
