//! `cargo xtask kubernetes`: the bundle of Kubernetes programs, built by `image/bundle`.

use std::path::Path;

use anyhow::Result;
pub(crate) use hearth_bundle::{Bundle, conformance, take_from_package};

use crate::setup::{self, Needs};
use crate::ui::Ui;

/// Build the Kubernetes bundle unless it is cached; print its path
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Fetch the newest point release of the packages first
    #[arg(long)]
    update: bool,
    /// Build it again and compare, byte by byte
    #[arg(long)]
    check: bool,
    /// Also build Kubernetes' conformance tests, and a bundle with their images; print both paths
    #[arg(long)]
    conformance: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    setup::ensure(ui, Needs::KUBERNETES)?;
    if args.update {
        hearth_bundle::update(ui, args.conformance)?;
    }
    let bundle = hearth_bundle::ensure(ui)?;
    if args.check {
        hearth_bundle::check(ui, &bundle)?;
        ui.say("reproducible: two builds of the bundle are identical");
    }
    ui.say(&bundle.versions);
    println!("{}", bundle.root.display());
    if args.conformance {
        let tests = conformance::ensure(ui, &bundle)?;
        println!("{}", tests.bundle.root.display());
        println!("{}", tests.program.display());
    }
    Ok(())
}

/// The user's bundle, checked, if one is given; otherwise ours, built if it is not in the cache.
pub(crate) fn ensure(ui: &Ui, bundle: Option<&Path>) -> Result<Bundle> {
    if let Some(folder) = bundle {
        return Ok(Bundle::read(folder)?);
    }
    setup::ensure(ui, Needs::KUBERNETES)?;
    Ok(hearth_bundle::ensure(ui)?)
}
