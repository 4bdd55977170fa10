use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::node_settings::NodeSettings;
use hearth_api::testing::Script;
use hearth_api::v1::node_roles::KubernetesWorker;
use hearth_api::v1::{NodeRoles, NodeSetting, WatchEvent};
use hearth_base::event::{self, Value, Writer};
use hearth_base::logtree::Severity;
use hearth_base::testing::{TestSupervisor, assert_never, fixed, next};
use hearth_host::handover::Refusals;

use crate::CuratorConnection;
use crate::rolefetch::{Assigned, Worker, load, run, save};
use crate::testing::{Fake, consensus_member, record};

/// Timeout for anything in these tests.
const LONG: Duration = Duration::from_secs(3600);

struct Fetching {
    fake: Fake,
    worker: TestSupervisor,
    roles: Value<NodeRoles>,
    settings: Value<Arc<NodeSettings>>,
    refusals: Value<Refusals>,
    connection: Writer<CuratorConnection>,
    file: PathBuf,
    _directory: tempfile::TempDir,
}

/// The worker, with a prepared roles file. There is no connection yet.
async fn fetching(prepare: impl FnOnce(&PathBuf)) -> Fetching {
    fetching_within(LONG, prepare).await
}

/// The same, with this timeout of a watch.
async fn fetching_within(silence: Duration, prepare: impl FnOnce(&PathBuf)) -> Fetching {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("node").join("roles.pb");
    fs::create_dir(file.parent().unwrap()).unwrap();
    prepare(&file);
    let fake = Fake::new(Script::default()).await;
    let (connection_writer, connection) = event::value();
    let (roles_writer, roles) = event::value();
    let (settings_writer, settings) = event::value();
    let (refusals_writer, refusals) = event::value();
    let worker = Arc::new(Worker {
        roles_file: file.clone(),
        silence,
        member: fixed(fake.member()),
        connection,
        local_roles: roles_writer,
        node_settings: settings_writer,
        refusals: Arc::new(refusals_writer),
    });
    Fetching {
        fake,
        worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
        roles,
        settings,
        refusals,
        connection: connection_writer,
        file,
        _directory: directory,
    }
}

impl Fetching {
    /// The curators return this node with these roles, and another node.
    fn curators_say(&self, own: NodeRoles) {
        let other = format!("hearth-{}", "0".repeat(32));
        self.fake.curator.set_nodes(vec![
            record(&self.fake.node_id.to_string(), "", own),
            record(&other, "", NodeRoles::default()),
        ]);
    }
}

fn assigned(roles: NodeRoles) -> Assigned {
    Assigned {
        roles,
        settings: Vec::new(),
    }
}

fn kubernetes_worker() -> NodeRoles {
    NodeRoles {
        kubernetes_worker: Some(KubernetesWorker {}),
        ..NodeRoles::default()
    }
}

#[tokio::test]
async fn what_is_on_disk_needs_no_curator() {
    let test = fetching(|file| save(file, &assigned(consensus_member())).unwrap()).await;
    let mut roles = test.roles.watch();
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    // The log of a boot shows the initial roles.
    let said = "consensus_member=true kubernetes_controller=false kubernetes_worker=false";
    test.worker.says(Severity::Info, said).await;

    // The same roles again change nothing; other roles do.
    test.curators_say(consensus_member());
    test.connection.set(test.fake.connection());
    test.worker.is_healthy().await;
    assert_never("the same roles", roles.next()).await;
    test.fake.curator.send(&WatchEvent {
        nodes: vec![record(
            &test.fake.node_id.to_string(),
            "",
            kubernetes_worker(),
        )],
        ..WatchEvent::default()
    });
    assert_eq!(next("roles", &mut roles).await, kubernetes_worker());
    assert_eq!(
        load(&test.file).unwrap(),
        Some(assigned(kubernetes_worker()))
    );
    test.worker.is_fine();
    test.worker.stop().await;
}

/// Settings come with the roles, and are kept with them, those of a later release included.
#[tokio::test]
async fn settings_are_followed_and_kept() {
    let test = fetching(|file| save(file, &assigned(consensus_member())).unwrap()).await;
    let mut all = test.settings.watch();
    assert_eq!(*next("settings", &mut all).await, NodeSettings::default());
    test.connection.set(test.fake.connection());
    let setting = |name: &str, value: &str| NodeSetting {
        name: name.into(),
        value: value.into(),
    };
    let settings = vec![
        setting("of.a.later.release", "7"),
        setting("reserved.cpu", "2"),
    ];
    let mut own = record(&test.fake.node_id.to_string(), "", consensus_member());
    own.settings.clone_from(&settings);
    test.fake.curator.set_nodes(vec![own]);
    assert_eq!(next("settings", &mut all).await.reserved.millicpus, 2000);
    let kept = Assigned {
        settings,
        ..assigned(consensus_member())
    };
    assert_eq!(load(&test.file).unwrap(), Some(kept));
    test.worker.stop().await;
}

#[tokio::test]
async fn roles_that_cannot_be_saved_are_not_held() {
    let test = fetching(|file| fs::remove_dir(file.parent().unwrap()).unwrap()).await;
    test.curators_say(consensus_member());
    test.connection.set(test.fake.connection());
    test.worker.fails("roles.pb").await;
    test.worker.restarted(2).await;
    assert_eq!(test.roles.get(), None);

    fs::create_dir(test.file.parent().unwrap()).unwrap();
    let mut roles = test.roles.watch();
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    assert_eq!(
        load(&test.file).unwrap(),
        Some(assigned(consensus_member()))
    );
    test.worker.stop().await;
}

#[tokio::test]
async fn a_damaged_file_is_not_empty_roles() {
    let test = fetching(|file| fs::write(file, b"\xff\xff").unwrap()).await;
    test.curators_say(kubernetes_worker());
    test.connection.set(test.fake.connection());
    test.worker
        .fails("roles.pb: not a valid roles record")
        .await;
    test.worker.restarted(2).await;
    assert_eq!(test.roles.get(), None);
    assert_eq!(fs::read(&test.file).unwrap(), b"\xff\xff", "untouched");
    assert!(test.fake.curator.calls().is_empty());
    test.worker.stop().await;
}

#[tokio::test]
async fn a_node_that_is_unknown_keeps_its_roles() {
    let test = fetching(|file| save(file, &assigned(consensus_member())).unwrap()).await;
    let mut roles = test.roles.watch();
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    test.connection.set(test.fake.connection());
    test.worker.is_healthy().await;
    test.fake.curator.send(&WatchEvent {
        tombstones: vec![test.fake.node_id.to_string()],
        ..WatchEvent::default()
    });
    test.worker.warns("keeping its roles").await;
    next("a refusal", &mut test.refusals.watch()).await;
    assert_eq!(test.roles.get(), Some(consensus_member()));
    assert_eq!(
        load(&test.file).unwrap(),
        Some(assigned(consensus_member()))
    );
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_watch_that_ends_begins_again() {
    let test = fetching(|_| ()).await;
    let mut roles = test.roles.watch();
    test.curators_say(consensus_member());
    test.connection.set(test.fake.connection());
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    test.curators_say(kubernetes_worker());
    test.fake.curator.end_watches();
    test.worker.fails("the curator ended the watch").await;
    assert_eq!(next("roles", &mut roles).await, kubernetes_worker());
    test.worker.stop().await;
}

/// The connection answers keep-alives; only the stream hangs.
#[tokio::test]
async fn a_curator_that_hangs_is_left_for_another() {
    let silence = Duration::from_millis(500);
    let test = fetching_within(silence, |_| ()).await;
    let mut roles = test.roles.watch();
    test.curators_say(consensus_member());
    let second = test.fake.another(Script::default()).await;
    let own = test.fake.node_id.to_string();
    second.set_nodes(vec![record(&own, "", kubernetes_worker())]);
    let both = test.fake.connection_to_all(&[&test.fake.curator, &second]);
    test.connection.set(both);
    assert_eq!(next("roles", &mut roles).await, consensus_member());

    test.worker.fails("no watch event from the curator").await;
    assert_eq!(next("roles", &mut roles).await, kubernetes_worker());
    test.worker.stop().await;
}

/// Progress events without changes are sufficient.
#[tokio::test]
async fn a_curator_with_no_news_is_not_left() {
    let silence = Duration::from_secs(2);
    let test = fetching_within(silence, |_| ()).await;
    let mut roles = test.roles.watch();
    test.curators_say(consensus_member());
    test.connection.set(test.fake.connection());
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    let begin = tokio::time::Instant::now();
    let mut due = tokio::time::interval(silence / 10);
    while begin.elapsed() < 2 * silence {
        due.tick().await;
        test.fake.curator.send(&WatchEvent::default());
    }
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn another_curator_is_asked_at_once() {
    let test = fetching(|_| ()).await;
    let mut roles = test.roles.watch();
    test.curators_say(consensus_member());
    test.connection.set(test.fake.connection());
    assert_eq!(next("roles", &mut roles).await, consensus_member());
    let second = test.fake.another(Script::default()).await;
    let own = test.fake.node_id.to_string();
    second.set_nodes(vec![record(&own, "", kubernetes_worker())]);
    test.connection.set(test.fake.connection_to(&second));
    assert_eq!(next("roles", &mut roles).await, kubernetes_worker());
    test.worker.is_fine();
    test.worker.stop().await;
}
