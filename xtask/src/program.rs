//! Programs for this host, built from this checkout.

use std::path::PathBuf;

use anyhow::Result;

use crate::setup::{self, Needs};
use crate::target::checkout;
use crate::ui::Ui;

/// Builds the program of the machines' network (`hearth_switch`); returns its path.
pub(crate) fn switch(ui: &Ui) -> Result<PathBuf> {
    build(ui, "hearth-switch")
}

/// Builds a program; returns its path.
pub(crate) fn build(ui: &Ui, name: &str) -> Result<PathBuf> {
    setup::ensure(ui, Needs::NODE)?;
    Ok(checkout()?.program(ui, name)?)
}
