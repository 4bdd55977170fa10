use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::recovery::{RecoveryKey, UnlockSettings};
use hearth_api::testing::{Script, TestCurator};
use hearth_api::v1::{
    self, ColdStartPolicy, NodeCondition, NodeRoles, NodeStatus, RecordedSettings, StorageSecurity,
    TimeSource,
};
use hearth_base::event::{self, Writer};
use hearth_base::testing::{TestSupervisor, assert_never, within_timeout};
use hearth_host::boot_record::boot_id;
use hearth_host::cluster_state::{self, State};
use hearth_host::esp_writes::EspWrites;
use hearth_host::handover::TimeStatus;
use hearth_host::storage::InUse;

use crate::learned::AddressRecord;
use crate::statuspush::{Worker, run};
use crate::testing::{Fake, record};
use crate::{CuratorConnection, EtcdData, LocalControlPlane, View};

struct Pushing {
    fake: Fake,
    worker: TestSupervisor,
    connection: Writer<CuratorConnection>,
    own_address: Writer<AddressRecord>,
    control_plane: Writer<LocalControlPlane>,
    state: cluster_state::Writer,
    second_address: Writer<Option<IpAddr>>,
    directory_saved: Writer<IpAddr>,
    conditions: Writer<Vec<NodeCondition>>,
    /// Why the directory could not be saved.
    directory_failed: Writer<Option<String>>,
    sealed_failed: Writer<Option<String>>,
    network_problems: Writer<Vec<String>>,
    refused_settings: Writer<Vec<String>>,
    disk_problems: Writer<Vec<String>>,
    view: Writer<Arc<View>>,
    recorded: Writer<UnlockSettings>,
    time: Writer<TimeStatus>,
}

fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

/// What the node has recorded.
fn settings(cold_start_policy: ColdStartPolicy) -> UnlockSettings {
    UnlockSettings {
        cold_start_policy,
        recovery_recipient: Some(RecoveryKey::from_bytes([1; 32]).recipient()),
        owner: None,
    }
}

/// The same, as it is reported.
fn reported(cold_start_policy: ColdStartPolicy) -> Option<RecordedSettings> {
    let recipient = RecoveryKey::from_bytes([1; 32]).recipient();
    Some(RecordedSettings {
        cold_start_policy: cold_start_policy.into(),
        recovery_recipient: recipient.as_bytes().to_vec(),
        owner_public_key: Vec::new(),
    })
}

/// The node's n-th address.
fn located(last: u8) -> AddressRecord {
    AddressRecord {
        host: ip(last),
        counter: last.into(),
    }
}

impl Pushing {
    /// Signs another address, and publishes it as saved with the directory.
    fn moves(&self, last: u8) {
        self.own_address.set(located(last));
        self.directory_saved.set(ip(last));
    }
}

/// The worker of a node that is HOME at 192.0.2.1, runs a curator, and has not saved its directory.
async fn pushing() -> Pushing {
    let fake = Fake::new(Script::default()).await;
    let (connection_writer, connection) = event::value();
    let (own_writer, own_address) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (directory_writer, directory_saved) = event::value();
    let (second_writer, second_address) = event::value();
    let (conditions_writer, conditions) = event::value();
    let (directory_failed, directory) = event::value();
    directory_failed.set(None);
    let (sealed_failed, sealed) = event::value();
    sealed_failed.set(None);
    let (problems_writer, network_problems) = event::value();
    let (refused_writer, refused_settings) = event::value();
    let (disks_writer, disk_problems) = event::value();
    let (view_writer, view) = event::value();
    let (recorded_writer, recorded) = event::value();
    let (time_writer, time) = event::value();
    let (storage_writer, storage) = event::value();
    storage_writer.set(InUse {
        security: StorageSecurity::Encrypted,
        cipher: "capi:xts(aes)-plain64".into(),
    });
    recorded_writer.set(settings(ColdStartPolicy::Owner));
    let (state_writer, cluster_state) = cluster_state::new();
    connection_writer.set(fake.connection());
    own_writer.set(located(1));
    control_plane_writer.set(LocalControlPlane {
        curator_port: Some(7835),
        ..LocalControlPlane::default()
    });
    state_writer.set(State::Home).unwrap();
    let worker = Arc::new(Worker {
        version: "1.2.3".into(),
        connection,
        own_address,
        control_plane,
        cluster_state,
        second_address,
        directory_saved,
        conditions,
        esp_writes: EspWrites {
            boot_record: None,
            directory,
            sealed,
        },
        network_problems,
        refused_settings,
        disk_problems,
        view,
        recorded,
        time,
        storage,
    });
    Pushing {
        fake,
        worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
        connection: connection_writer,
        own_address: own_writer,
        control_plane: control_plane_writer,
        state: state_writer,
        network_problems: problems_writer,
        refused_settings: refused_writer,
        disk_problems: disks_writer,
        second_address: second_writer,
        directory_saved: directory_writer,
        conditions: conditions_writer,
        directory_failed,
        sealed_failed,
        view: view_writer,
        recorded: recorded_writer,
        time: time_writer,
    }
}

/// Waits for the report of this number, counted from 1, and that there are no others.
async fn report(curator: &TestCurator, number: usize) -> NodeStatus {
    let seen = within_timeout("a report", curator.until(|s| s.statuses.len() >= number)).await;
    assert_eq!(seen.statuses.len(), number, "{:?}", seen.statuses);
    seen.statuses[number - 1].clone()
}

async fn no_more_than(curator: &TestCurator, number: usize) {
    let more = curator.until(|seen| seen.statuses.len() > number);
    assert_never("another report", more).await;
}

#[tokio::test]
async fn nothing_is_reported_before_the_directory_is_saved() {
    let test = pushing().await;
    no_more_than(&test.fake.curator, 0).await;
    test.directory_saved.set(ip(1));
    let status = report(&test.fake.curator, 1).await;
    assert!(status.sent_at > 0);
    let wanted = NodeStatus {
        external_address: "192.0.2.1".into(),
        curator_port: 7835,
        version: "1.2.3".into(),
        boot_id: boot_id().unwrap(),
        sent_at: status.sent_at,
        cluster_state: v1::ClusterState::Home.into(),
        consensus: None,
        address_counter: 1,
        conditions: Vec::new(),
        recorded_settings: reported(ColdStartPolicy::Owner),
        time: None,
        second_address: String::new(),
        damaged_member_id: None,
        etcd_starts: None,
        storage: Some(v1::StorageStatus {
            security: StorageSecurity::Encrypted.into(),
            cipher: "capi:xts(aes)-plain64".into(),
        }),
    };
    assert_eq!(status, wanted);
    test.recorded.set(settings(ColdStartPolicy::None));
    let status = report(&test.fake.curator, 2).await;
    assert_eq!(status.recorded_settings, reported(ColdStartPolicy::None));
    let time = TimeStatus {
        source: TimeSource::Dhcp,
        servers: vec!["192.0.2.1".into()],
        ..TimeStatus::default()
    };
    test.time.set(time.clone());
    let status = report(&test.fake.curator, 3).await;
    assert_eq!(status.time, Some(v1::TimeStatus::from(&time)));
    test.second_address.set("2001:db8::1".parse().ok());
    let status = report(&test.fake.curator, 4).await;
    assert_eq!(status.second_address, "2001:db8::1");
    test.worker.is_healthy().await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn what_an_interface_lacks_is_reported_until_it_does_not() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    assert_eq!(report(curator, 1).await.conditions, []);
    test.network_problems
        .set(vec!["eth1: no".into(), "eth2: no\n".into()]);
    let conditions = report(curator, 2).await.conditions;
    assert_eq!(conditions[0].r#type, "Network");
    assert!(!conditions[0].met && conditions[0].message.starts_with("eth1: no; eth2: no"));
    test.network_problems.set(Vec::new());
    assert_eq!(report(curator, 3).await.conditions, []);
    test.refused_settings
        .set(vec!["cannot set vm.swappiness to 300".into()]);
    let conditions = report(curator, 4).await.conditions;
    assert_eq!(conditions[0].r#type, "Settings");
    assert_eq!(conditions[0].message, "cannot set vm.swappiness to 300");
    test.refused_settings.set(Vec::new());
    assert_eq!(report(curator, 5).await.conditions, []);
    test.disk_problems
        .set(vec!["disk.scratch: its disk is gone".into()]);
    let conditions = report(curator, 6).await.conditions;
    assert_eq!(conditions[0].r#type, "Disks");
    test.worker.stop().await;
}

#[tokio::test]
async fn a_role_that_is_not_met_is_reported_until_it_is() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    assert_eq!(report(curator, 1).await.conditions, []);
    let unmet = NodeCondition {
        r#type: "KubernetesWorker".into(),
        met: false,
        reason: "NotInstalled".into(),
        message: "the image has no such extension".into(),
    };
    test.conditions.set(vec![unmet.clone()]);
    assert_eq!(
        report(curator, 2).await.conditions,
        std::slice::from_ref(&unmet)
    );
    test.conditions.set(vec![unmet]);
    no_more_than(curator, 2).await;
    test.conditions.set(Vec::new());
    assert_eq!(report(curator, 3).await.conditions, []);
    test.worker.stop().await;
}

/// For every change, not only for the first address.
#[tokio::test]
async fn no_address_is_reported_before_the_directory_is_saved_with_it() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    assert_eq!(report(curator, 1).await.external_address, "192.0.2.1");
    for last in [2, 3] {
        let before = usize::from(last - 1);
        test.own_address.set(located(last));
        no_more_than(curator, 2 * before - 1).await;
        // Other changes are reported with the previous address.
        test.control_plane.set(LocalControlPlane {
            curator_port: Some(u16::from(last)),
            ..LocalControlPlane::default()
        });
        let status = report(curator, 2 * before).await;
        assert_eq!(status.external_address, ip(last - 1).to_string());
        assert_eq!(status.curator_port, u32::from(last));
        test.directory_saved.set(ip(last));
        let status = report(curator, 2 * before + 1).await;
        assert_eq!(status.external_address, ip(last).to_string());
        assert_eq!(status.address_counter, u64::from(last));
    }
    test.worker.is_fine();
    test.worker.stop().await;
}

/// It boots at another address than the one that the curators have, and cannot save that.
#[tokio::test]
async fn a_node_that_cannot_save_its_directory_says_so_at_its_known_address() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    let id = test.fake.node_id.to_string();
    let mut view = View::default();
    view.apply(&[record(&id, "192.0.2.9", NodeRoles::default())], &[]);
    test.view.set(Arc::new(view));
    // It may still be about to save it.
    no_more_than(curator, 0).await;
    test.directory_failed.set(Some("I/O error".into()));
    let status = report(curator, 1).await;
    assert_eq!(status.external_address, "192.0.2.9");
    let [condition] = &status.conditions[..] else {
        panic!("{status:?}");
    };
    assert_eq!((&condition.r#type[..], condition.met), ("Esp", false));
    assert!(condition.message.contains("I/O error"), "{condition:?}");
    no_more_than(curator, 1).await;

    test.directory_failed.set(None);
    assert_eq!(report(curator, 2).await.conditions, []);
    test.directory_saved.set(ip(1));
    assert_eq!(report(curator, 3).await.external_address, "192.0.2.1");
    // Any of the files makes the condition.
    test.sealed_failed.set(Some("read-only".into()));
    assert_eq!(report(curator, 4).await.conditions.len(), 1);
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_slow_disk_of_etcd_is_reported_while_it_is() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    report(curator, 1).await;
    test.control_plane.set(LocalControlPlane {
        curator_port: Some(7835),
        slow_disk: Some("the disk is slow".into()),
        ..LocalControlPlane::default()
    });
    let condition = NodeCondition {
        r#type: "EtcdDisk".into(),
        met: false,
        reason: "Slow".into(),
        message: "the disk is slow".into(),
    };
    assert_eq!(report(curator, 2).await.conditions, [condition]);
    test.control_plane.set(LocalControlPlane {
        curator_port: Some(7835),
        ..LocalControlPlane::default()
    });
    assert_eq!(report(curator, 3).await.conditions, []);
    test.worker.stop().await;
}

#[tokio::test]
async fn what_is_saved_is_not_reported_before_it_is_signed() {
    let test = pushing().await;
    test.directory_saved.set(ip(2));
    no_more_than(&test.fake.curator, 0).await;
    test.own_address.set(located(2));
    report(&test.fake.curator, 1).await;
    test.worker.stop().await;
}

#[tokio::test]
async fn what_changes_is_reported_once() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    report(curator, 1).await;

    test.moves(1);
    test.control_plane.set(LocalControlPlane {
        curator_port: Some(7835),
        ..LocalControlPlane::default()
    });
    no_more_than(curator, 1).await;

    test.moves(2);
    let status = report(curator, 2).await;
    assert_eq!(status.external_address, "192.0.2.2");

    test.control_plane.set(LocalControlPlane {
        data: Some(EtcdData {
            damaged_member: Some(7),
            reason: "LogDamaged",
            message: "etcd's log\nis damaged".into(),
        }),
        ..LocalControlPlane::default()
    });
    let status = report(curator, 3).await;
    assert_eq!(status.curator_port, 0);
    assert_eq!(status.damaged_member_id, Some(7));
    let condition = NodeCondition {
        r#type: "EtcdData".into(),
        met: false,
        reason: "LogDamaged".into(),
        message: "etcd's log is damaged".into(),
    };
    assert_eq!(status.conditions, [condition]);
    test.control_plane.set(LocalControlPlane::default());
    let status = report(curator, 4).await;
    assert_eq!(
        (status.damaged_member_id, &status.conditions[..]),
        (None, &[][..])
    );

    // The new curator may not have the report.
    let second = test.fake.another(Script::default()).await;
    test.connection.set(test.fake.connection_to(&second));
    let status = report(&second, 1).await;
    assert_eq!(status.external_address, "192.0.2.2");
    no_more_than(curator, 4).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn in_split_nothing_is_reported() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(ip(1));
    report(curator, 1).await;
    test.state.set(State::Split).unwrap();
    test.moves(3);
    no_more_than(curator, 1).await;
    test.state.set(State::Home).unwrap();
    let status = report(curator, 2).await;
    assert_eq!(status.external_address, "192.0.2.3");
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_report_that_failed_is_made_again() {
    let test = pushing().await;
    // A curator of another cluster.
    let stranger = Fake::new(Script::default()).await;
    test.connection
        .set(test.fake.connection_to(&stranger.curator));
    test.directory_saved.set(ip(1));
    test.worker.fails("certificate").await;
    test.connection.set(test.fake.connection());
    report(&test.fake.curator, 1).await;
    test.worker.stop().await;
}
