//! Reports this node's status to the curators when it changes, and once over
//! each new way to them.
//!
//! Its address is reported only after the cluster directory has been saved on
//! the ESP: others may then rely on this node being found there after the next
//! power cut.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::v1;
use hearth_api::v1::{NodeStatus, UpdateNodeStatusRequest};
use hearth_base::event::Value;
use hearth_base::supervisor::{Context, Failure, Outcome};

use super::controlplane::ControlPlane;
use super::health::Health;
use super::membership::{CuratorConnection, refused};
use crate::cluster_state::{ClusterState, State};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// One report may take so long.
const BOUND: Duration = Duration::from_secs(10);

pub(super) struct Worker {
    pub version: String,
    /// Will be read.
    pub connection: Value<CuratorConnection>,
    /// Will be read.
    pub address: Value<IpAddr>,
    /// Will be read.
    pub control_plane: Value<ControlPlane>,
    /// Will be read.
    pub cluster_state: ClusterState,
    /// Will be read: nothing is reported before it is set.
    pub directory_saved: Value<()>,
}

/// Random for each boot, from the kernel.
pub(super) fn boot_id() -> Result<String, Failure> {
    let text = std::fs::read_to_string(BOOT_ID)?;
    Ok(text.trim().to_owned())
}

pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    tokio::select! {
        outcome = report_changes(&ctx, &worker) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Ends by an error only; the restart then reports everything anew.
async fn report_changes(ctx: &Context, worker: &Worker) -> Outcome {
    let boot_id = boot_id()?;
    worker.directory_saved.watch().next().await?;
    let mut connections = worker.connection.watch();
    let mut addresses = worker.address.watch();
    let mut control_planes = worker.control_plane.watch();
    let mut states = worker.cluster_state.watch();

    let mut connection = connections.next().await?;
    let mut address = addresses.next().await?;
    let ControlPlane {
        mut curator_port,
        mut progress,
        ..
    } = control_planes.next().await?;
    let mut state = states.next().await?;
    let health = Health::of(ctx);
    let mut reported = None;
    loop {
        let status = NodeStatus {
            external_address: address.to_string(),
            curator_port: curator_port.unwrap_or_default().into(),
            version: worker.version.clone(),
            boot_id: boot_id.clone(),
            sent_at: 0,
            cluster_state: v1::ClusterState::from(state).into(),
            consensus: progress,
            address_counter: 0,
        };
        // In SPLIT nobody hears us, the report is due when that has passed; in
        // DISOWNING nobody wants to.
        let heard = !matches!(state, State::Split | State::Disowning);
        // Values are set to what they were, too.
        if heard && reported.as_ref() != Some(&status) {
            push(&connection, status.clone()).await?;
            health.good();
            reported = Some(status);
        }
        tokio::select! {
            // First whether anyone listens, then what there is to say.
            biased;
            next = states.next() => state = next?,
            next = connections.next() => {
                connection = next?;
                reported = None;
            }
            next = addresses.next() => address = next?,
            next = control_planes.next() => {
                let next = next?;
                curator_port = next.curator_port;
                progress = next.progress;
            }
        }
    }
}

async fn push(connection: &CuratorConnection, undated: NodeStatus) -> Outcome {
    let request = UpdateNodeStatusRequest {
        node_id: connection.node_id.to_string(),
        status: Some(NodeStatus {
            sent_at: now(),
            ..undated
        }),
    };
    let mut curator = connection.curator();
    let updated = tokio::time::timeout(BOUND, curator.update_node_status(request)).await?;
    updated.map(|_| ()).map_err(refused)
}

fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
