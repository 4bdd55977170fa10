//! Power of the machines of a run, which another process may have started.
//!
//! A power cut kills QEMU. A machine is started by the process that has the others: by the run in the foreground on
//! request, or, if they were left running, by this process, which leaves it running as well. Nothing is built for that:
//! a machine that is started again is unchanged.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_qemu::cluster::{self, Attached, Cluster, ClusterError};
use hearth_qemu::vm::{Lifetime, Shutdown};
use tokio::task::JoinSet;

use crate::error::shown;
use crate::events::{Event, Observer};
use crate::fleet::{POWER_OFF_BOUND, request_start};
use crate::machines::{self, Blueprint};
use crate::record::ClusterRecord;
use crate::state::parameters_of;
use crate::{LabError, Result};

/// Bound for the run in the foreground to start a machine.
const STARTED_WITHIN: Duration = Duration::from_secs(60);
/// Between two checks.
const PAUSE: Duration = Duration::from_millis(200);

/// The outcome of a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It has been powered on.
    On,
    /// It was already running.
    Running,
    /// Its cluster is not running: there is no network to connect it to.
    NoCluster,
}

/// Powers a machine of a running cluster on.
///
/// # Errors
/// If it does not start.
pub async fn start(folder: &Path, record: &ClusterRecord, number: u16) -> Result<Start> {
    let name = machines::name(number);
    if is_running(folder, &name)? {
        return Ok(Start::Running);
    }
    if cluster::network(folder).await?.is_none() {
        return Ok(Start::NoCluster);
    }
    // Only checks whether the lock is free; it is released before anything else.
    let free = Cluster::resume(folder, None, Lifetime::Detachable)
        .await
        .map(drop);
    match free {
        Ok(()) => add(folder, record, number).await?,
        Err(ClusterError::InUse(_)) => {
            request_start(folder, &name)?;
            wait_for(folder, &name).await?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(Start::On)
}

/// Starts it in this process, beside those that were left running.
async fn add(folder: &Path, record: &ClusterRecord, number: u16) -> Result<()> {
    let blueprint = Blueprint::of_last_run(record)?;
    let network = blueprint.network(record);
    let cluster = Cluster::resume(folder, Some(&network), Lifetime::Detachable);
    let mut cluster = cluster.await?;
    let parameters = parameters_of(folder, record, number)?;
    cluster
        .add(&blueprint.member(record, number, parameters)?)
        .await?;
    Ok(cluster.detach()?)
}

async fn wait_for(folder: &Path, name: &str) -> Result<()> {
    let asked = Instant::now();
    while !is_running(folder, name)? {
        if asked.elapsed() > STARTED_WITHIN {
            return Err(LabError::NotStarted {
                machine: name.to_owned(),
                bound: STARTED_WITHIN,
            });
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

fn is_running(folder: &Path, name: &str) -> Result<bool> {
    let running = cluster::running(folder)?;
    Ok(running.iter().any(|machine| machine.name == name))
}

/// Presses the power buttons of all these machines, waits, and then ends their network.
///
/// # Errors
/// If a machine shuts down in another way.
pub async fn stop(folder: &Path, machines: Vec<Attached>, observer: &dyn Observer) -> Result<()> {
    let mut ends = JoinSet::new();
    let started = Instant::now();
    for machine in machines {
        ends.spawn(async move {
            let shutdown = machine.shutdown(POWER_OFF_BOUND).await;
            (machine, shutdown)
        });
    }
    let mut unclean = Vec::new();
    while let Some(end) = ends.join_next().await {
        let waiting = LabError::process("wait for QEMU");
        let (machine, shutdown) = match end {
            Ok(end) => end,
            Err(error) => return Err(waiting(error.into())),
        };
        let name = machine.name();
        match shutdown.map_err(waiting)? {
            Shutdown::Clean => observer.event(&Event::Down {
                machine: name,
                took: Some(started.elapsed()),
            }),
            Shutdown::Quit | Shutdown::Killed => unclean.push(format!(
                "{name} did not shut down within {} s; killed QEMU; its console: {}",
                POWER_OFF_BOUND.as_secs(),
                shown(&machine.run_dir().serial_log()).display()
            )),
        }
    }
    cluster::end_network(folder).await?;
    match unclean.is_empty() {
        true => Ok(()),
        false => Err(LabError::Unclean(unclean)),
    }
}
