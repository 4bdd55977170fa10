//! `cargo xtask stop`: powers off what `cargo xtask run` has started.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use hearth_qemu::cluster;
use hearth_qemu::vm::Shutdown;
use tokio::task::JoinSet;

use crate::command::Interrupts;
use crate::run::state::State;
use crate::target::shown;
use crate::ui::Ui;

/// Power off the running nodes
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Pull their plugs instead: a power cut
    #[arg(long)]
    force: bool,
}

/// How long a node may take to go down: it stops etcd, syncs and unmounts, on a host that may be busy.
pub const BOUND: Duration = Duration::from_secs(60);

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
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
    let state = State::folder()?;
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
    let unclean = power_off(ui, &state).await?;
    cluster::end_network(&state).await?;
    if !unclean.is_empty() {
        bail!("{}", unclean.join("\n"));
    }
    Ok(())
}

/// Presses all power buttons at once; returns complaints.
async fn power_off(ui: &Ui, state: &Path) -> Result<Vec<String>> {
    let mut ends = JoinSet::new();
    let started = Instant::now();
    let machines = cluster::attach(state).await?;
    let names = machines
        .iter()
        .map(|m| format!("{} (process {})", m.name(), m.pid()));
    let task = ui.task(format!(
        "powering off {}",
        names.collect::<Vec<_>>().join(", ")
    ));
    for machine in machines {
        ends.spawn(async move {
            let shutdown = machine.shutdown(BOUND).await;
            (machine, shutdown)
        });
    }
    let mut unclean = Vec::new();
    while let Some(end) = ends.join_next().await {
        let (machine, shutdown) = end?;
        let name = machine.name();
        match shutdown? {
            Shutdown::Clean => {
                let took = started.elapsed().as_secs_f64();
                ui.say(format_args!("{name} is down: {took:.1} s"));
            }
            Shutdown::Quit | Shutdown::Killed => unclean.push(format!(
                "{name} did not go down within {} s, so QEMU was ended; its console: {}",
                BOUND.as_secs(),
                shown(&machine.run_dir().serial_log())
            )),
        }
    }
    drop(task);
    Ok(unclean)
}
