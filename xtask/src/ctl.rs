//! `cargo xtask ctl`: hearthctl against the cluster of `cargo xtask run`.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use hearth_lab::hearthctl::Hearthctl;
use hearth_qemu::cluster;

use crate::hearthctl;
use crate::run;
use crate::ui::Ui;

/// Run hearthctl as the owner of the running cluster
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Words for hearthctl: `-- node list`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// What hearthctl does without a cluster, by the first word.
const NEEDS_NO_CLUSTER: [&str; 9] = [
    "-h",
    "--help",
    "-V",
    "--version",
    "help",
    "version",
    "completion",
    "context",
    "owner",
];

/// Runs the task: becomes hearthctl.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let state = run::folder()?;
    let config = Hearthctl::config_in(&state);
    let first = args.args.first().map(String::as_str);
    if first.is_some_and(|word| !NEEDS_NO_CLUSTER.contains(&word)) {
        if cluster::running(&state)?.is_empty() {
            bail!("nothing is running; `cargo xtask run --detach` starts a node");
        }
        let takes_ownership = args.args.iter().any(|word| word == "take-ownership");
        if !config.exists() && !takes_ownership {
            bail!(
                "the running cluster is not owned yet: `cargo xtask run` does that when the node is HOME; where the parameters are your own, do it yourself, by `cargo xtask ctl -- cluster take-ownership`"
            );
        }
    }
    let program = hearthctl::build(ui)?;
    let mut command = Command::new(&program);
    command.args(&args.args).env(hearthctl::CONFIG, &config);
    ui.detail(format_args!(
        "$ {}={} {} {}",
        hearthctl::CONFIG,
        config.display(),
        program.display(),
        args.args.join(" ")
    ));
    // In our place: its exit code, its signals and its terminal are the user's.
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
