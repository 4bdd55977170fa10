use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::testing::{Script, TestCurator};
use hearth_api::v1::cluster_directory::{Address, Node};
use hearth_api::v1::{ClusterDirectory, WatchRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, next, until_ok, within_timeout};
use hearth_host::cluster_state::{self, ClusterState, Connectivity, EnrolmentPhase, State};
use hearth_host::handover::{Disowned, MemberData};
use tokio::time::Instant;

use crate::connection::{SPLIT_AFTER, Worker, for_each_connection, run};
use crate::testing::Fake;
use crate::{CuratorConnection, LocalControlPlane};

struct Member {
    fake: Fake,
    worker: TestSupervisor,
    control_plane: Writer<LocalControlPlane>,
    directory: Writer<ClusterDirectory>,
    acknowledged: Writer<Instant>,
    disowned: Writer<Disowned>,
    _phase: Writer<EnrolmentPhase>,
    state_worker: TestSupervisor,
    state: ClusterState,
    connection: Value<CuratorConnection>,
}

/// The worker of a node whose cluster state has had these values.
async fn member(before: &[State], last: Option<Instant>) -> Member {
    let fake = Fake::new(Script::default()).await;
    member_of(fake, ClusterDirectory::default(), before, last)
}

fn member_of(
    fake: Fake,
    directory: ClusterDirectory,
    before: &[State],
    last: Option<Instant>,
) -> Member {
    let member = MemberData {
        directory,
        ..fake.member()
    };
    let (state_writer, state) = cluster_state::new();
    let (phase, enrolment_phase) = event::value();
    let (connectivity_writer, connectivity) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (directory_writer, live_directory) = event::value();
    let (acknowledged_writer, acknowledged) = event::value();
    let (disowned_writer, disowned) = event::value();
    let (connection_writer, connection) = event::value();
    control_plane_writer.set(LocalControlPlane::default());
    if let Some(last) = last {
        acknowledged_writer.set(last);
    }
    let in_touch = before.first() == Some(&State::Home);
    phase.set(EnrolmentPhase::Member { in_touch });
    if before.contains(&State::Split) {
        connectivity_writer.set(Connectivity::Lost);
    }
    if before.contains(&State::Disowning) {
        disowned_writer.set(Disowned);
    }
    let state_worker = Arc::new(cluster_state::Worker {
        enrolment_phase,
        connectivity,
        disowned: disowned.clone(),
        address: fixed(IpAddr::from([192, 0, 2, 1])),
        cluster_state: state_writer,
    });
    let worker = Arc::new(Worker {
        member: fixed(member),
        control_plane,
        directory: live_directory,
        acknowledged,
        disowned,
        connectivity: connectivity_writer,
        connection: connection_writer,
    });
    Member {
        fake,
        worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
        control_plane: control_plane_writer,
        directory: directory_writer,
        acknowledged: acknowledged_writer,
        disowned: disowned_writer,
        _phase: phase,
        state_worker: TestSupervisor::run(move |ctx| cluster_state::run(ctx, state_worker.clone())),
        state,
        connection,
    }
}

impl Member {
    /// The curator listens on this port, or not at all.
    fn serves_at(&self, curator_port: Option<u16>) {
        self.control_plane.set(LocalControlPlane {
            curator_port,
            ..LocalControlPlane::default()
        });
    }

    async fn becomes(&self, state: State) {
        let mut states = self.state.watch();
        let reached = states.wait_for(|now| *now == state);
        within_timeout("the state", reached).await.unwrap();
    }
}

#[tokio::test]
async fn there_is_a_connection_once_there_is_a_curator() {
    let test = member(&[], None).await;
    let mut connection = test.connection.watch();
    test.worker.is_healthy().await;
    assert_never("a connection to nobody", connection.next()).await;

    test.serves_at(Some(test.fake.curator.address.port()));
    let ours = next("a connection", &mut connection).await;
    assert_eq!(ours.node_id, test.fake.node_id);
    within_timeout("an answer", ours.cluster_domain())
        .await
        .unwrap();

    // The endpoints do not change without better information, or with the same.
    test.serves_at(None);
    test.serves_at(Some(test.fake.curator.address.port()));
    assert_never("a connection for no reason", connection.next()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn other_curators_do_while_there_is_none_on_this_machine() {
    let fake = Fake::new(Script::default()).await;
    let other = fake.another(Script::default()).await;
    let test = member_of(fake, directory(&[&other]), &[], None);
    let mut connections = test.connection.watch();
    let connection = next("a connection", &mut connections).await;
    within_timeout("an answer", connection.cluster_domain())
        .await
        .unwrap();
    assert_eq!(other.calls(), ["GetClusterInfo"]);

    test.serves_at(Some(test.fake.curator.address.port()));
    test.worker.is_healthy().await;
    within_timeout("the end", other.stop()).await.unwrap();
    // A call may still use the connection that is being closed.
    until_ok("an answer of our own", || connection.cluster_domain()).await;
    assert!(test.fake.curator.calls().contains(&"GetClusterInfo"));
    assert_never("a connection for no reason", connections.next()).await;
    test.worker.stop().await;
}

/// Curators on other nodes.
fn directory(curators: &[&TestCurator]) -> ClusterDirectory {
    let node = |curator: &&TestCurator| Node {
        id: curator.node_id.to_string(),
        addresses: vec![Address {
            host: "127.0.0.1".into(),
            port: curator.address.port().into(),
        }],
        roles: None,
    };
    let nodes = curators.iter().map(node).collect();
    ClusterDirectory { nodes }
}

#[tokio::test]
async fn the_live_directory_replaces_the_saved_one() {
    let fake = Fake::new(Script::default()).await;
    let (old, new) = (
        fake.another(Script::default()).await,
        fake.another(Script::default()).await,
    );
    let test = member_of(fake, directory(&[&old]), &[], None);
    let connection = next("a connection", &mut test.connection.watch()).await;
    within_timeout("an answer", connection.cluster_domain())
        .await
        .unwrap();

    // The curator has a new address: the old one is not used any more.
    test.directory.set(directory(&[&new]));
    until_ok("an answer from there", || async {
        connection.cluster_domain().await.map_err(drop)?;
        (!new.calls().is_empty()).then_some(()).ok_or(())
    })
    .await;
    // An empty list would be worse.
    test.directory.set(ClusterDirectory::default());
    test.worker.is_healthy().await;
    within_timeout("an answer", connection.cluster_domain())
        .await
        .unwrap();
    test.worker.is_fine();
    test.worker.stop().await;
}

/// All addresses but one are dead, each for another reason.
#[tokio::test]
async fn a_stale_directory_with_one_curator_that_lives_is_enough() {
    let fake = Fake::new(Script::default()).await;
    let alive = fake.another(Script::default()).await;
    let gone = fake.another(Script::default()).await;
    let stranger = Fake::new(Script::default()).await;
    let mut stale = directory(&[&gone, &stranger.curator, &alive]);
    within_timeout("the end", gone.stop()).await.unwrap();
    for (node, host) in ["192.0.2.77", "127.99.99.99", "nonsense"]
        .iter()
        .enumerate()
    {
        stale.nodes.push(Node {
            id: format!("hearth-{:032x}", 100 + node),
            addresses: vec![Address {
                host: (*host).into(),
                port: 0,
            }],
            roles: None,
        });
    }
    let test = member_of(fake, stale, &[], None);
    let connection = next("a connection", &mut test.connection.watch()).await;
    until_ok("an answer", || connection.cluster_domain()).await;
    assert_eq!(alive.calls(), ["GetClusterInfo"]);
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_connection_that_works_is_not_disturbed() {
    let fake = Fake::new(Script::default()).await;
    let (kept, moved) = (
        fake.another(Script::default()).await,
        fake.another(Script::default()).await,
    );
    let test = member_of(fake, directory(&[&kept]), &[], None);
    let connection = next("a connection", &mut test.connection.watch()).await;
    let mut curator = connection.curator();
    let watching = curator.watch(WatchRequest::default());
    let mut events = within_timeout("a watch", watching)
        .await
        .unwrap()
        .into_inner();
    within_timeout("the backlog", events.message())
        .await
        .unwrap();

    test.directory.set(directory(&[&moved, &kept]));
    test.directory.set(directory(&[&kept, &moved]));
    test.serves_at(Some(test.fake.curator.address.port()));
    assert_never("the end of the watch", events.message()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn who_is_disowned_has_no_connection() {
    let test = member(&[State::Home], None).await;
    test.serves_at(Some(test.fake.curator.address.port()));
    let mut connections = test.connection.watch();
    let connection = next("a connection", &mut connections).await;
    within_timeout("an answer", connection.cluster_domain())
        .await
        .unwrap();

    test.disowned.set(Disowned);
    test.becomes(State::Disowning).await;
    let refused = || async {
        let answer = connection.cluster_domain().await;
        answer.err().ok_or(())
    };
    let refused = until_ok("no way any more", refused).await;
    assert!(refused.to_string().contains("no curator is known"));
    // Workers that use the connection end without an error.
    let over = for_each_connection(&test.connection, |connection| async move {
        connection.cluster_domain().await.map(drop)
    });
    assert_never("a failure", over).await;
    test.acknowledged.set(Instant::now());
    assert_never(
        "a life after",
        test.state.watch().wait_for(|s| *s == State::Home),
    )
    .await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn an_acknowledgement_is_home() {
    let test = member(&[], None).await;
    test.worker.is_healthy().await;
    assert_eq!(test.state.get(), State::Unknown);
    test.acknowledged.set(Instant::now());
    test.becomes(State::Home).await;
    test.worker.stop().await;
}

#[tokio::test]
async fn an_old_acknowledgement_is_not_home() {
    let old = Instant::now().checked_sub(SPLIT_AFTER + Duration::from_secs(1));
    let test = member(&[State::Split], Some(old.expect("an older machine"))).await;
    let home = || {
        let mut states = test.state.watch();
        async move { states.wait_for(|state| *state == State::Home).await }
    };
    test.worker.is_healthy().await;
    assert_never("home by old news", home()).await;
    test.acknowledged.set(Instant::now());
    within_timeout("home", home()).await.unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn what_was_known_outlives_a_worker_that_fails() {
    let test = member(&[State::Home], None).await;
    test.worker.is_healthy().await;
    test.becomes(State::Home).await;
    drop(test.acknowledged);
    test.worker.fails("its writer was dropped").await;
    test.worker.restarted(3).await;
    test.worker.stop().await;
    test.state_worker.is_fine();
    assert_eq!(test.state.get(), State::Home);
}

#[tokio::test]
async fn disowning_is_for_ever() {
    let test = member(&[State::Home, State::Disowning], None).await;
    test.becomes(State::Disowning).await;
    let mut states = test.state.watch();
    next("the state", &mut states).await;
    test.worker.is_healthy().await;
    test.acknowledged.set(Instant::now());
    assert_never("a life after", states.next()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}
