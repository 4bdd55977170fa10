//! Programs for this host, built from this checkout.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::checkout::root;
use crate::command::Cmd;
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::Ui;

/// Builds the network of machines (`hearth_switch`); returns the program.
pub fn switch(ui: &Ui) -> Result<PathBuf> {
    build(ui, "hearth-switch", "hearth-switch")
}

/// Builds a program of a package; returns where it is.
pub fn build(ui: &Ui, package: &str, name: &str) -> Result<PathBuf> {
    setup::ensure(ui, Needs::NODE)?;
    let target = target::dir()?;
    let task = ui.quiet_task(format!("compiling {name}"));
    Cmd::new(target::cargo())
        .dir(root())
        .args(["build", "--locked", "--package", package])
        .args(["--bin", name, "--target-dir"])
        .arg(target)
        .stream(ui, |line| {
            task.now(line.trim());
            Ok(())
        })?;
    drop(task);
    let program = target.join("debug").join(name);
    if !program.is_file() {
        bail!(
            "cargo has built {name} and not put it at {}",
            program.display()
        );
    }
    Ok(program)
}
