//! The operator's tool, built from this checkout.

use std::path::PathBuf;

use anyhow::Result;

use crate::program;
use crate::ui::Ui;

/// The environment variable with the path of its contexts file.
pub(crate) const CONFIG: &str = "HEARTH_CONFIG";

/// Builds the tool; returns the path of the program.
pub(crate) fn build(ui: &Ui) -> Result<PathBuf> {
    program::build(ui, "hearthctl")
}
