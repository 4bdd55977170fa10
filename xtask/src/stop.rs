//! `cargo xtask stop`: powers off the machines of `cargo xtask run`.

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
    /// Cut their power instead
    #[arg(long)]
    force: bool,
}

/// Prints events, line by line.
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
        // Left by a run that was killed after its machines had ended, say.
        match cluster::end_network(&state).await? {
            true => ui.say("no node is running; stopped their network"),
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
