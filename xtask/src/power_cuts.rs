//! `cargo xtask power-cuts`: power cuts at every flush of a recorded machine, with choices of the writes after it.
//!
//! The cuts are tried by end-to-end tests of the suite `power_cut_sweep`, for which this task builds everything and which
//! it tells which part to try. The recording and the results are kept in a folder, so that the task goes on where it was
//! interrupted.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use hearth_lab::power_cuts::{CHOICES, CUT, DEFAULT_CHOICES, FOLDER, SHARD, Scenario};
use hearth_lab::shard::Shard;

use crate::target::{self, shown};
use crate::test::{self, Environment};
use crate::ui::Ui;

/// Cut the power of a machine at every flush of what it does first
///
/// The machine is recorded once for each image. What has passed with the image is not tried again. Parts on several hosts
/// need the same recording: a copy of the folder.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What is recorded: first-bootstrap, or join (a second machine registers, joins, and becomes a consensus member)
    #[arg(default_value_t = Scenario::FirstBootstrap)]
    scenario: Scenario,
    /// Try only each N-th cut, from the I-th on
    #[arg(long, value_name = "I/N", default_value_t = Shard::ALL)]
    shard: Shard,
    /// Try only this cut, with the recording that there is: 12 (nothing later than the 12th flush), 12+all, 12+seed7
    #[arg(long, value_name = "CUT", conflicts_with = "shard")]
    cut: Option<String>,
    /// How many choices of unflushed writes to try for each flush
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHOICES)]
    choices: usize,
    /// Folder for the recording and the results [default:
    /// target/hearth/power-cuts/SCENARIO]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Forget the recording and the results
    #[arg(long, conflicts_with = "cut")]
    fresh: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let folder = match &args.folder {
        Some(folder) => std::path::absolute(folder)?,
        None => target::folder("power-cuts")?.join(args.scenario.word()),
    };
    if args.fresh && folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let mut environment: Environment = vec![
        (FOLDER, folder.clone().into()),
        (SHARD, args.shard.to_string().into()),
        (CHOICES, args.choices.to_string().into()),
    ];
    if let Some(cut) = &args.cut {
        environment.push((CUT, cut.into()));
    }
    let test = match args.scenario {
        Scenario::FirstBootstrap => "power_cut_sweep::first_bootstrap",
        Scenario::Join => "power_cut_sweep::join",
    };
    let outcome = test::run_one(ui, test, environment);
    let summary = folder.join("summary.txt");
    if let Ok(text) = std::fs::read_to_string(&summary) {
        ui.say(format_args!("\n{text}\nresults: {}", shown(&folder)));
    }
    outcome
}
