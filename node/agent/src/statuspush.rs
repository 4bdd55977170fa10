//! Reports this node's status to the curators when it changes, and once over each new connection.
//!
//! An address is reported only after the cluster directory has been saved on the ESP together with
//! that address: after the next power cut, this node can then find the others and be found by them.
//! This holds for every change of the address, and cannot be bypassed: the address only comes from
//! the worker that has saved it. Until then the last one stays reported.
//!
//! So a node whose ESP takes no writes has the address that the curators know already, and one that
//! boots and cannot save its directory reports that, with the condition that says so.
//!
//! The clock is measured all the time. Curators write each report to etcd, so a new measurement
//! alone is reported only every [`MEASUREMENT_EVERY`].

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::identity::PublicKey;
use hearth_api::names::conditions::{self, DISKS, NETWORK, SETTINGS};
use hearth_api::recovery::{RecoveryRecipient, UnlockSettings};
use hearth_api::v1::{
    self, NodeCondition, NodeStatus, RecordedSettings, StorageStatus, UpdateNodeStatusRequest,
};
use hearth_base::event::{Closed, Value, Watcher};
use hearth_base::supervisor::{Context, Health, Outcome};
use hearth_host::boot_record::boot_id;
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::esp_writes::{EspWatcher, EspWrites};
use hearth_host::handover::TimeStatus;
use hearth_host::storage::InUse;

use tokio::time::Instant;

use super::learned::AddressRecord;
use crate::connection::{self, CuratorConnection, refused};
use crate::{LocalControlPlane, View};

/// Timeout of one report.
const BOUND: Duration = Duration::from_secs(10);
/// Interval of reports if only the measured difference of the clock has changed.
const MEASUREMENT_EVERY: Duration = Duration::from_secs(3600);

/// Reports this node's status to the curators.
pub struct Worker {
    /// Version of the image.
    pub version: String,
    /// Read: the connection to the curators.
    pub connection: Value<CuratorConnection>,
    /// Read: this node's signed address.
    pub own_address: Value<AddressRecord>,
    /// Read: curator port and etcd progress on this node.
    pub control_plane: Value<LocalControlPlane>,
    /// Read: reported, and decides whether to report.
    pub cluster_state: ClusterState,
    /// Read: this node's address of the other family; not set means none.
    pub second_address: Value<Option<IpAddr>>,
    /// Read: no other address is ever reported.
    pub directory_saved: Value<IpAddr>,
    /// Read: conditions of the roles whose programs may fail.
    pub conditions: Value<Vec<NodeCondition>>,
    /// Read: whether the ESP can be written.
    pub esp_writes: EspWrites,
    /// Read: what the network interfaces lack.
    pub network_problems: Value<Vec<String>>,
    /// Read: the settings of the node that its kernel has refused.
    pub refused_settings: Value<Vec<String>>,
    /// Read: what the further disks of the node lack.
    pub disk_problems: Value<Vec<String>>,
    /// Read: the address that the curators have, for a node that may not report its own.
    pub view: Value<Arc<View>>,
    /// Read: what this node has recorded of its cluster's settings.
    pub recorded: Value<UnlockSettings>,
    /// Read: the state of the clock; reported once it is known.
    pub time: Value<TimeStatus>,
    /// Read: how the data partition is encrypted.
    pub storage: Value<InUse>,
}

/// The address that may be reported.
struct Addresses {
    saved: Watcher<IpAddr>,
    signed: Watcher<AddressRecord>,
    newest: (Option<IpAddr>, Option<AddressRecord>),
}

impl Addresses {
    fn of(worker: &Worker) -> Self {
        Self {
            saved: worker.directory_saved.watch(),
            signed: worker.own_address.watch(),
            newest: (None, None),
        }
    }

    /// The next address for which the saved and the signed one are equal. Cancellation safe.
    async fn next(&mut self) -> Result<AddressRecord, Closed> {
        loop {
            tokio::select! {
                saved = self.saved.next() => self.newest.0 = Some(saved?),
                signed = self.signed.next() => self.newest.1 = Some(signed?),
            }
            if let (Some(saved), Some(signed)) = self.newest
                && saved == signed.host
            {
                return Ok(signed);
            }
        }
    }
}

/// Reports changes over the current connection.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(report_changes(&ctx, &worker)).await
}

/// Only returns errors; after the restart everything is reported again.
async fn report_changes(ctx: &Context, worker: &Worker) -> Outcome {
    let boot_id = boot_id()?;
    ctx.restart_within(Some(connection::MAX_RETRY_DELAY));
    let mut addresses = Addresses::of(worker);
    let mut connections = worker.connection.watch();
    let mut control_planes = worker.control_plane.watch();
    let mut states = worker.cluster_state.watch();
    let mut conditions = worker.conditions.watch();
    let mut recordings = worker.recorded.watch();
    let mut seconds = worker.second_address.watch();
    let mut second = worker.second_address.get().flatten();
    let mut known_conditions = worker.conditions.get().unwrap_or_default();
    let mut times = worker.time.watch();
    let mut time = ReportedTime::default();

    let mut esp = worker.esp_writes.watch();
    let mut all_problems = worker.network_problems.watch();
    let mut problems = worker.network_problems.get().unwrap_or_default();
    let mut all_refused = worker.refused_settings.watch();
    let mut refused_settings = worker.refused_settings.get().unwrap_or_default();
    let mut all_disk_problems = worker.disk_problems.watch();
    let mut disk_problems = worker.disk_problems.get().unwrap_or_default();

    let mut connection = connections.next().await?;
    let mut address = tokio::select! {
        address = addresses.next() => address?,
        known = known_address(worker, &connection, &mut esp) => known?,
    };
    let mut control_plane = control_planes.next().await?;
    let mut state = states.next().await?;
    let mut recorded = recordings.next().await?;
    // A member's data partition is mounted, once in a boot.
    let storage = worker.storage.watch().next().await?;
    let health = Health::of(ctx);
    let mut reported = None;
    loop {
        let status = NodeStatus {
            external_address: address.host.to_string(),
            curator_port: control_plane.curator_port.unwrap_or_default().into(),
            version: worker.version.clone(),
            boot_id: boot_id.clone(),
            sent_at: 0,
            cluster_state: v1::ClusterState::from(state).into(),
            consensus: control_plane.progress,
            address_counter: address.counter,
            conditions: control_plane
                .conditions()
                .into_iter()
                .chain(esp.condition())
                .chain(unmet(NETWORK, "InterfaceProblem", &problems))
                .chain(unmet(SETTINGS, "Refused", &refused_settings))
                .chain(unmet(DISKS, "DiskProblem", &disk_problems))
                .chain(known_conditions.iter().cloned())
                .collect(),
            recorded_settings: Some(message(&recorded)),
            time: time.status.as_ref().map(v1::TimeStatus::from),
            second_address: second
                .map(|address| address.to_string())
                .unwrap_or_default(),
            damaged_member_id: control_plane
                .data
                .as_ref()
                .and_then(|data| data.damaged_member),
            etcd_starts: control_plane.starts,
            storage: Some(StorageStatus::from(&storage)),
        };
        // In SPLIT no curator can be reached, and the report is sent after that; in DISOWNING
        // curators reject it.
        let heard = !matches!(state, State::Split | State::Disowning);
        // Values are also set without a change.
        if heard && reported.as_ref() != Some(&status) {
            push(&connection, status.clone()).await?;
            health.good();
            reported = Some(status);
        }
        tokio::select! {
            // First check the connection, then what to report.
            biased;
            next = states.next() => state = next?,
            next = connections.next() => {
                connection = next?;
                reported = None;
            }
            next = addresses.next() => address = next?,
            next = seconds.next() => second = next?,
            next = conditions.next() => known_conditions = next?,
            changed = esp.changed() => changed?,
            next = all_problems.next() => problems = next?,
            next = all_refused.next() => refused_settings = next?,
            next = all_disk_problems.next() => disk_problems = next?,
            next = recordings.next() => recorded = next?,
            next = times.next() => time.update(next?),
            next = control_planes.next() => control_plane = next?,
        }
    }
}

/// The condition of a node that has problems of one kind.
fn unmet(kind: &str, reason: &str, problems: &[String]) -> Option<NodeCondition> {
    (!problems.is_empty()).then(|| NodeCondition {
        r#type: kind.to_owned(),
        met: false,
        reason: reason.to_owned(),
        message: conditions::printable(&problems.join("; ")),
    })
}

/// The address of this node that the curators have, once the directory cannot be saved. Cancellation safe.
async fn known_address(
    worker: &Worker,
    connection: &CuratorConnection,
    esp: &mut EspWatcher,
) -> Result<AddressRecord, Closed> {
    let mut views = worker.view.watch();
    let mut view = worker.view.get();
    loop {
        let own = view
            .as_ref()
            .and_then(|view| view.nodes.get(&connection.node_id));
        if let Some(located) = own.and_then(|own| own.located)
            && esp.directory_failed()
        {
            return Ok(located);
        }
        tokio::select! {
            next = views.next() => view = Some(next?),
            changed = esp.changed() => changed?,
        }
    }
}

/// The state of the clock that is reported.
#[derive(Default)]
struct ReportedTime {
    status: Option<TimeStatus>,
    since: Option<Instant>,
}

impl ReportedTime {
    /// Takes a new state, unless only the measurement is new and the last one is not old.
    fn update(&mut self, new: TimeStatus) {
        let is_recent = self
            .since
            .is_some_and(|since| since.elapsed() < MEASUREMENT_EVERY);
        let is_alike = self.status.as_ref().is_some_and(|status| {
            let first = status.measured.is_none() && new.measured.is_some();
            !first
                && TimeStatus {
                    measured: new.measured,
                    ..status.clone()
                } == new
        });
        if !(is_recent && is_alike) {
            self.status = Some(new);
            self.since = Some(Instant::now());
        }
    }
}

fn message(recorded: &UnlockSettings) -> RecordedSettings {
    RecordedSettings {
        cold_start_policy: recorded.cold_start_policy.into(),
        recovery_recipient: RecoveryRecipient::to_field(recorded.recovery_recipient),
        owner_public_key: PublicKey::to_field(recorded.owner),
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

#[expect(clippy::disallowed_methods, reason = "for a time stamp only")]
fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::TimeSource;
    use hearth_host::handover::{Measured, TimeProblem};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_new_measurement_alone_is_reported_once_in_an_hour() {
        let measured = |offset| TimeStatus {
            source: TimeSource::Dhcp,
            synchronised: true,
            measured: Some(Measured {
                offset,
                at: UNIX_EPOCH,
            }),
            ..TimeStatus::default()
        };
        let mut time = ReportedTime::default();
        time.update(TimeStatus {
            measured: None,
            ..measured(0)
        });
        time.update(measured(1));
        assert_eq!(time.status, Some(measured(1)));
        time.update(measured(2));
        assert_eq!(time.status, Some(measured(1)));
        tokio::time::advance(MEASUREMENT_EVERY).await;
        time.update(measured(3));
        assert_eq!(time.status, Some(measured(3)));
        let problem = TimeStatus {
            problem: Some(TimeProblem::Unknown("none of 1 answers".into())),
            ..measured(4)
        };
        time.update(problem.clone());
        assert_eq!(time.status, Some(problem));
    }
}
