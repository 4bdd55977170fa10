//! `cargo xtask tidy`: shows violations of the repository's rules, which `hearth-tidy` checks.

use anyhow::{Result, bail};

use crate::checkout::root;
use crate::ui::Ui;

/// Check the rules of the repository that a program can check.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Checks every rule and reports all violations, not only the first.
pub(crate) fn run(ui: &Ui, _args: Args) -> Result<()> {
    let found = hearth_tidy::check(&root())?;
    for line in &found.wrong {
        ui.say(line);
    }
    match found.wrong.len() {
        0 => {
            ui.say(format_args!("tidy: {} files ok", found.files));
            Ok(())
        }
        n => bail!("{n} rules violated"),
    }
}
