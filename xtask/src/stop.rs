//! `cargo xtask stop`: powers off what `cargo xtask run` has started.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use hearth_qemu::cluster;
use hearth_qemu::vm::Shutdown;

use crate::command::Interrupts;
use crate::run::state::State;
use crate::target::shown;
use crate::ui::Ui;

/// Power off the running node
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Pull its plug instead: a power cut
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
        ui.say("nothing is running");
        return Ok(());
    }
    if force {
        for machine in cluster::cut(&state).await? {
            ui.say(format_args!("{}: power cut", machine.name));
        }
        return Ok(());
    }
    let mut unclean = Vec::new();
    for machine in cluster::attach(&state).await? {
        let name = machine.name();
        let started = Instant::now();
        let task = ui.task(format!("powering off {name} (process {})", machine.pid()));
        let shutdown = machine.shutdown(BOUND).await?;
        drop(task);
        let took = started.elapsed().as_secs_f64();
        match shutdown {
            Shutdown::Clean => ui.say(format_args!("{name} is down: {took:.1} s")),
            Shutdown::Quit | Shutdown::Killed => unclean.push(format!(
                "{name} did not go down within {} s, so QEMU was ended; its console: {}",
                BOUND.as_secs(),
                shown(&machine.run_dir().serial_log())
            )),
        }
    }
    if !unclean.is_empty() {
        bail!("{}", unclean.join("\n"));
    }
    Ok(())
}
