//! `cargo xtask power`: plugs of the machines of `cargo xtask run`.
//!
//! A plug is pulled by killing QEMU, whoever started it. A machine is started by whoever has the others: the run in the
//! foreground, which is asked, or, where they were left running, this process, which leaves it running as well. Nothing is
//! built for that: a machine that comes back is the one that it was.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use hearth_qemu::cluster::{self, Cluster, ClusterError};
use hearth_qemu::vm::Lifetime;

use crate::command::{Interrupted, Interrupts};
use crate::run::fleet::request_start;
use crate::run::machines::{self, Workshop};
use crate::run::state::{self, Founding, State};
use crate::ui::Ui;

/// Pull a node's plug, or switch it on again
#[derive(clap::Args, Debug)]
pub struct Args {
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

/// How long the run in the foreground may take to start a machine.
const BOUND: Duration = Duration::from_secs(60);
/// Between two looks for it.
const PAUSE: Duration = Duration::from_millis(200);

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let folder = State::folder()?;
    let founding = state::founding(&folder)?;
    let number = machines::number(&args.node, &founding)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let interrupts = Interrupts::take();
    let work = async {
        match args.action {
            Action::Cut => cut(ui, &machines::name(number)).await,
            Action::Start => start(ui, &founding, number).await,
        }
    };
    runtime.block_on(async {
        tokio::select! {
            result = work => result,
            () = interrupts.come(1) => bail!(Interrupted),
        }
    })
}

async fn cut(ui: &Ui, name: &str) -> Result<()> {
    match cluster::cut_one(&State::folder()?, name).await? {
        true => ui.say(format_args!(
            "{name} is off: a power cut; `cargo xtask power start {name}` switches it on"
        )),
        false => bail!("{name} is not running"),
    }
    Ok(())
}

async fn start(ui: &Ui, founding: &Founding, number: u16) -> Result<()> {
    let (folder, name) = (State::folder()?, machines::name(number));
    if is_running(&folder, &name)? {
        bail!("{name} is running already");
    }
    if cluster::network(&folder).await?.is_none() {
        bail!("the cluster is not running; `cargo xtask run` boots all of it");
    }
    // Only whether it is free: what this holds is given back before more is asked for.
    let free = Cluster::resume(&folder, None, Lifetime::Detachable)
        .await
        .map(drop);
    match free {
        Ok(()) => add(&folder, founding, number).await?,
        Err(ClusterError::InUse(_)) => {
            request_start(&folder, &name)?;
            wait_for(&folder, &name).await?;
        }
        Err(error) => return Err(error.into()),
    }
    ui.say(format_args!("{name} is on"));
    Ok(())
}

/// Starts it from here, beside those that were left running.
async fn add(folder: &Path, founding: &Founding, number: u16) -> Result<()> {
    let workshop = Workshop::of_last_run(founding)?;
    let network = workshop.network(founding);
    let cluster = Cluster::resume(folder, Some(&network), Lifetime::Detachable);
    let mut cluster = cluster.await?;
    let parameters = state::parameters_of(folder, founding, number)?;
    cluster
        .add(&workshop.member(founding, number, parameters)?)
        .await?;
    Ok(cluster.detach()?)
}

async fn wait_for(folder: &Path, name: &str) -> Result<()> {
    let asked = Instant::now();
    while !is_running(folder, name)? {
        if asked.elapsed() > BOUND {
            bail!(
                "the `cargo xtask run` that has the other nodes did not start {name} within {} s; it takes requests once its cluster is complete",
                BOUND.as_secs()
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

fn is_running(folder: &Path, name: &str) -> Result<bool> {
    let running = cluster::running(folder)?;
    Ok(running.iter().any(|machine| machine.name == name))
}
