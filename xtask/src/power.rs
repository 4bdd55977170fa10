//! `cargo xtask power`: power of the machines of `cargo xtask run`.
//!
//! `hearth_lab::power` implements power cuts and restarts.

use anyhow::{Result, bail};
use hearth_lab::power::{Start, start};
use hearth_lab::{machines, state};
use hearth_qemu::cluster;

use crate::command::{Interrupted, Interrupts};
use crate::ui::Ui;

/// Cut a node's power, or start it again
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Action to take
    #[arg(value_enum)]
    action: Action,
    /// Node, such as node-2 or 2
    node: String,
}

/// The actions.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Cut the power; nothing more is written to the disk
    Cut,
    /// Power on, with the existing disk
    Start,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let folder = crate::run::folder()?;
    let record = state::record(&folder)?;
    let number = machines::number(&args.node, &record)?;
    let name = machines::name(number);
    let runtime = tokio::runtime::Runtime::new()?;
    let interrupts = Interrupts::take();
    let work = async {
        match args.action {
            Action::Cut => match cluster::cut_one(&folder, &name).await? {
                true => ui.say(format_args!(
                    "{name} is off: power cut; start it with `cargo xtask power start {name}`"
                )),
                false => bail!("{name} is not running"),
            },
            Action::Start => match start(&folder, &record, number).await? {
                Start::On => ui.say(format_args!("{name} is on")),
                Start::Running => bail!("{name} is already running"),
                Start::NoCluster => {
                    bail!("the cluster is not running; boot it with `cargo xtask run`")
                }
            },
        }
        Ok(())
    };
    runtime.block_on(async {
        tokio::select! {
            result = work => result,
            () = interrupts.come(1) => bail!(Interrupted),
        }
    })
}
