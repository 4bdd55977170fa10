//! `cargo xtask kubernetes`: the bundle of Kubernetes' programs, by the builder in `image/bundle`.

use std::path::Path;

use anyhow::Result;
pub(crate) use hearth_bundle::{Bundle, conformance, take_from_package};

use crate::setup::{self, Needs};
use crate::ui::Ui;

/// Build the Kubernetes bundle, or find it in the cache; prints where it is
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Fetch the newest point release of the packages first
    #[arg(long)]
    update: bool,
    /// Build it once more and compare, byte by byte
    #[arg(long)]
    check: bool,
    /// Build Kubernetes' conformance tests, too, and a bundle with what they run; prints where both are
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
        ui.say("built twice, the bundle is the same");
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

/// The user's bundle, checked, where one is given; otherwise ours, built if it is not in the cache.
pub(crate) fn ensure(ui: &Ui, bundle: Option<&Path>) -> Result<Bundle> {
    if let Some(folder) = bundle {
        return Ok(Bundle::read(folder)?);
    }
    setup::ensure(ui, Needs::KUBERNETES)?;
    Ok(hearth_bundle::ensure(ui)?)
}
