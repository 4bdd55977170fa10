//! `cargo xtask power`: plugs of the machines of `cargo xtask run`.
//!
//! How plugs are pulled, and who starts a machine again, is in `hearth_lab::power`.

use anyhow::{Result, bail};
use hearth_lab::power::{Start, start};
use hearth_lab::{machines, state};
use hearth_qemu::cluster;

use crate::command::{Interrupted, Interrupts};
use crate::ui::Ui;

/// Pull a node's plug, or switch it on again
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What to do
    #[arg(value_enum)]
    action: Action,
    /// Which node: node-2, or 2
    node: String,
}

/// What can be done.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// A power cut: nothing is written any more
    Cut,
    /// Switch it on, with the disk that it had
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
                    "{name} is off: a power cut; `cargo xtask power start {name}` switches it on"
                )),
                false => bail!("{name} is not running"),
            },
            Action::Start => match start(&folder, &record, number).await? {
                Start::On => ui.say(format_args!("{name} is on")),
                Start::Running => bail!("{name} is running already"),
                Start::NoCluster => {
                    bail!("the cluster is not running; `cargo xtask run` boots all of it")
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
