//! `cargo xtask kernel`: the kernel of this checkout, built by `image/kernel`.

use std::path::PathBuf;

use anyhow::Result;
pub(crate) use hearth_kernel::Kernel;

use crate::checkout::kernel_config;
use crate::setup::{self, Needs};
use crate::ui::Ui;

/// `cargo xtask kernel`: build the kernel unless it is cached; print its path.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Apply further configuration fragments over those of kernel-config/, in this order
    #[arg(long, value_name = "FILE")]
    fragment: Vec<PathBuf>,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let kernel = ensure_with(ui, &args.fragment)?;
    ui.say(format_args!(
        "kernel {} from {}, configuration {}",
        kernel.version, kernel.source, kernel.config_hash
    ));
    println!("{}", kernel.bzimage.display());
    Ok(())
}

/// The kernel of this checkout's `kernel-config/`, built if it is not in the cache.
pub(crate) fn ensure(ui: &Ui) -> Result<Kernel> {
    ensure_with(ui, &[])
}

fn ensure_with(ui: &Ui, fragments: &[PathBuf]) -> Result<Kernel> {
    setup::ensure(ui, Needs::KERNEL)?;
    Ok(hearth_kernel::ensure(ui, &kernel_config(), fragments)?)
}
