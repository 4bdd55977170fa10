//! Kubernetes' own conformance tests, made of the same source as the bundle.
//!
//! The program (`e2e.test`) runs on the developer's machine and asks a cluster; what its pods run comes as images, from
//! registries that a test's machines have no way to. They are made here instead ([`images`]) and ride along in a bundle that
//! is ours but for that; such a bundle is for tests alone.
//!
//! Two entries of the cache: what is compiled, whose key is little more than the bundle's, and the bundle with the images,
//! which is made in seconds and changes more often.

mod images;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::compile;
use super::inputs::{self, Inputs};
use super::tree;
use super::{Bundle, ROOT, compiler, folders, key, new_log};
use crate::cache::{Builder, Cache};
use crate::command::Cmd;
use crate::ui::Ui;

/// Version of what is compiled and how, part of its key.
const PROGRAMS_RECIPE: u32 = 1;

/// Version of the images, part of their key.
const IMAGES_RECIPE: u32 = 1;

/// The program that asks a cluster, in an entry of what is compiled.
const PROGRAM: &str = "host/e2e.test";

/// What goes into images, there.
const FOR_IMAGES: &str = "images";

/// The tests, and what they need on a node.
pub struct Conformance {
    /// Asks a cluster.
    pub program: PathBuf,
    /// The bundle with the tests' images.
    pub bundle: Bundle,
}

/// Both, built if they are not in the cache. The bundle must have been ensured before.
pub fn ensure(ui: &Ui, bundle: &Bundle) -> Result<Conformance> {
    let cache = Cache::of_user("kubernetes")?;
    let inputs = Inputs::of_the_bundle()?;
    let of_bundle = key(&inputs, &compiler(ui)?);
    let programs = format!("conformance-programs-{PROGRAMS_RECIPE}-{of_bundle}");
    let programs = cache.ensure(ui, &programs, |builder, scratch| {
        ui.say(
            "Kubernetes' conformance tests are not in the cache: building them, which takes minutes",
        );
        build(ui, &inputs, builder, scratch)
    })?;
    let packages = Inputs::ensure(ui, &cache, &inputs::OF_THE_TESTS)?;
    let with_images = format!(
        "conformance-images-{IMAGES_RECIPE}-{PROGRAMS_RECIPE}-{of_bundle}-{}",
        packages.digest()
    );
    let with_images = cache.ensure(ui, &with_images, |_, scratch| {
        let task = ui.quiet_task("making the images of Kubernetes' conformance tests");
        let [_, stage, entry] = folders(scratch)?;
        let root = entry.join(ROOT);
        // Links and modes are part of a bundle.
        Cmd::new("cp")
            .arg("--archive")
            .arg(&bundle.root)
            .arg(&root)
            .run(ui)?;
        let mut unpacked = tree::Packages::unpack(ui, &inputs, &stage)?;
        packages.verify()?;
        for package in packages.packages() {
            unpacked.add(ui, &package)?;
        }
        images::make(
            ui,
            &unpacked,
            &programs.join(FOR_IMAGES),
            &stage,
            &root.join("images"),
        )?;
        drop(task);
        Ok(entry)
    })?;
    let ours = Bundle::read(&with_images.join(ROOT))
        .with_context(|| format!("the cache is damaged: remove {}", with_images.display()))?;
    Ok(Conformance {
        program: programs.join(PROGRAM),
        bundle: Bundle {
            kubectl: bundle.kubectl.clone(),
            ..ours
        },
    })
}

/// Builds an entry of what is compiled in `scratch`; returns its folder there.
fn build(ui: &Ui, inputs: &Inputs, builder: &Builder<'_>, scratch: &Path) -> Result<PathBuf> {
    inputs.verify()?;
    let (log_path, mut log) = new_log(builder)?;
    let task = ui.counted_task(
        "building Kubernetes' conformance tests",
        compile::EXPECTED_TEST_PACKAGES,
    );
    let [source, _, entry] = folders(scratch)?;
    let built = compile::compile_tests(ui, inputs, &source, &mut log, &task)
        .with_context(|| format!("the whole log is {}", log_path.display()))?;
    log.flush().context("cannot write the log")?;
    let for_images = entry.join(FOR_IMAGES);
    tree::create_dir(&for_images)?;
    for file in &built.for_images {
        let name = file.file_name().context("a file without a name")?;
        tree::copy(file, &for_images.join(name))?;
    }
    tree::copy(&built.program, &entry.join(PROGRAM))?;
    task.done();
    Ok(entry)
}
