//! `cargo xtask stop`: powers off what `cargo xtask run` has started.

use anyhow::{Result, bail};
use hearth_lab::events::{Event, Observer};
use hearth_lab::power;
use hearth_qemu::cluster;

use crate::command::Interrupts;
use crate::run;
use crate::ui::Ui;

/// Power off the running nodes
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Pull their plugs instead: a power cut
    #[arg(long)]
    force: bool,
}

/// Says what happens, line by line.
struct Lines<'a>(&'a Ui);

impl Observer for Lines<'_> {
    fn event(&self, event: &Event<'_>) {
        self.0.say(event);
    }
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let interrupts = Interrupts::take();
    runtime.block_on(async {
        tokio::select! {
            result = stop(ui, args.force) => result,
            () = interrupts.come(1) => bail!(crate::command::Interrupted),
        }
    })
}

async fn stop(ui: &Ui, force: bool) -> Result<()> {
    let state = run::folder()?;
    if cluster::running(&state)?.is_empty() {
        // Of a run that was killed between its machines' end and its own, say.
        match cluster::end_network(&state).await? {
            true => ui.say("no node is running; their network was, and has ended"),
            false => ui.say("nothing is running"),
        }
        return Ok(());
    }
    if force {
        for machine in cluster::cut(&state).await? {
            ui.say(format_args!("{}: power cut", machine.name));
        }
        return Ok(());
    }
    let machines = cluster::attach(&state).await?;
    let names = machines
        .iter()
        .map(|m| format!("{} (process {})", m.name(), m.pid()));
    let names: Vec<String> = names.collect();
    let _task = ui.task(format!("powering off {}", names.join(", ")));
    Ok(power::stop(&state, machines, &Lines(ui)).await?)
}
