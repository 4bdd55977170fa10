//! `cargo xtask conformance`: Kubernetes' conformance cases on two emulated machines, all that can run.
//!
//! The cases are run by the end-to-end test `conformance::sweep`, which this task builds everything for and tells which
//! part to run. The results are kept in a folder, so that the task goes on where it was interrupted.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use hearth_lab::conformance::{LIST, NETWORK_POLICIES, RESULTS, SHARD};
use hearth_lab::shard::Shard;

use crate::target::{self, shown};
use crate::test;
use crate::ui::Ui;

/// The test that runs the cases.
const TEST: &str = "conformance::sweep";

/// Run the Kubernetes conformance cases, or a part of them
///
/// tests/conformance.txt lists all cases, and says of each that is not run why. Cases that have passed before are not
/// run again. Without hardware virtualisation all of them take many hours.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run only each N-th case, from the I-th on
    #[arg(long, value_name = "I/N", default_value_t = Shard::ALL)]
    shard: Shard,
    /// Run upstream's cases for network policies instead (tests/network-policies.txt)
    #[arg(long)]
    network_policies: bool,
    /// Folder for the results: e2e.log, junit_01.xml, summary.txt [default:
    /// target/hearth/conformance, or network-policies beside it]
    #[arg(long, value_name = "FOLDER")]
    results: Option<PathBuf>,
    /// Forget earlier results
    #[arg(long)]
    fresh: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let folder = match &args.results {
        Some(folder) => std::path::absolute(folder)?,
        None if args.network_policies => target::folder(NETWORK_POLICIES)?,
        None => target::folder("conformance")?,
    };
    if args.fresh && folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let mut environment = vec![
        (SHARD, args.shard.to_string().into()),
        (RESULTS, folder.clone().into()),
    ];
    if args.network_policies {
        environment.push((LIST, NETWORK_POLICIES.into()));
    }
    let outcome = test::run_one(ui, TEST, environment);
    let summary = folder.join("summary.txt");
    if let Ok(text) = std::fs::read_to_string(&summary) {
        ui.say(format_args!("\n{text}\nresults: {}", shown(&folder)));
    }
    outcome
}
