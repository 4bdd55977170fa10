//! `cargo xtask ctl`: runs hearthctl for the cluster of `cargo xtask run`.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use hearth_lab::hearthctl::Hearthctl;
use hearth_qemu::cluster;

use crate::ui::Ui;
use crate::{hearthctl, run};

/// Run hearthctl as the owner of the running cluster
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Arguments for hearthctl, such as `-- node list`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// hearthctl's commands that need no cluster, by the first argument.
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

/// Runs the task, which replaces this process by hearthctl.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let state = run::folder()?;
    let config = Hearthctl::config_in(&state);
    let first = args.args.first().map(String::as_str);
    if first.is_some_and(|word| !NEEDS_NO_CLUSTER.contains(&word)) {
        if cluster::running(&state)?.is_empty() {
            bail!("no cluster is running; start one with `cargo xtask run --detach`");
        }
        let owns = |word: &String| ["take-ownership", "unlock"].contains(&word.as_str());
        if !config.exists() && !args.args.iter().any(owns) {
            bail!(
                "no owner of the running cluster yet: `cargo xtask run` takes ownership when the node is HOME; if the parameters are your own, run `cargo xtask ctl -- cluster take-ownership`"
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
    // Replaces this process: exit code, signals and terminal are hearthctl's.
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
