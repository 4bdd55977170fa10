//! `cargo xtask bundle`: the bundle of Kubernetes programs, built by `image/bundle`.

use std::path::Path;
use std::{panic, thread};

use anyhow::Result;
use hearth_bundle::Minor;
use hearth_bundle::conformance::{self, Conformance};
pub(crate) use hearth_bundle::{Bundle, large_probe, take_from_package};
use hearth_programs::ETCD;

use crate::kernel;
use crate::programs::sources;
use crate::setup::{self, Needs};
use crate::ui::Ui;

/// Build the Kubernetes bundle unless it is cached; print its path, and that of its bill of materials
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// First move Go, etcd and the programs of the bundle to the newest patch releases of their versions, and fetch the
    /// newest Debian packages; changes files of the checkout
    #[arg(long)]
    update: bool,
    /// Build it, and etcd, again and compare, byte by byte
    #[arg(long)]
    check: bool,
    /// The minor version of Kubernetes before that of the images, which the node supports as well
    #[arg(long, conflicts_with = "conformance")]
    previous: bool,
    /// Also build Kubernetes' conformance tests, and a bundle with their images; print both paths
    #[arg(long)]
    conformance: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    setup::ensure(ui, Needs::KUBERNETES)?;
    if args.update {
        let moved = hearth_programs::update(ui, &sources())?;
        if moved.is_empty() {
            ui.say("all versions are the newest patch releases");
        }
        for one in moved {
            ui.say(one);
        }
        hearth_bundle::update(ui, args.conformance)?;
    }
    let minor = match args.previous {
        true => Minor::Previous,
        false => Minor::Shipped,
    };
    let bundle = hearth_bundle::ensure(ui, &sources(), minor)?;
    if args.check {
        let [etcd] = hearth_programs::ensure(ui, &sources(), [&ETCD])?;
        hearth_programs::check(ui, &sources(), &[(&ETCD, &etcd)])?;
        hearth_bundle::check(ui, &sources(), minor, &bundle)?;
        ui.say("reproducible: two builds of etcd and of the bundle are identical");
    }
    ui.say(&bundle.versions);
    println!("{}", bundle.root.display());
    if let Some(sbom) = &bundle.sbom {
        println!("{}", sbom.display());
    }
    if args.conformance {
        let tests = ensure_conformance(ui, &bundle)?;
        println!("{}", tests.bundle.root.display());
        println!("{}", tests.program.display());
    }
    Ok(())
}

/// The user's bundle, checked, if one is given; otherwise ours, built if it is not in the cache.
///
/// Then the kernel is built as well, because the bundle is for an image: both take many minutes, in which one processor
/// is idle while the other one links or compresses.
pub(crate) fn ensure(ui: &Ui, bundle: Option<&Path>) -> Result<Bundle> {
    if let Some(folder) = bundle {
        return Ok(Bundle::read(folder)?);
    }
    setup::ensure(ui, Needs::KUBERNETES | Needs::KERNEL)?;
    thread::scope(|scope| {
        let kernel = scope.spawn(|| kernel::ensure(ui));
        let bundle = hearth_bundle::ensure(ui, &sources(), Minor::Shipped);
        let kernel = kernel.join();
        kernel.unwrap_or_else(|panic| panic::resume_unwind(panic))?;
        Ok(bundle?)
    })
}

/// The conformance tests, and the bundle with their images, which are added to ours.
pub(crate) fn ensure_conformance(ui: &Ui, bundle: &Bundle) -> Result<Conformance> {
    Ok(conformance::ensure(ui, &sources(), bundle)?)
}
