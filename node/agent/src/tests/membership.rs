use std::sync::Arc;
use std::time::Duration;

use hearth_api::testing::{Script, TestCurator};
use hearth_api::v1::cluster_directory::{Address, Node};
use hearth_api::v1::{ClusterDirectory, WatchRequest};
use hearth_base::event::{self, Value, Writer};
use hearth_host::cluster_state::{self, ClusterState, Connectivity, EnrolmentPhase, State};
use hearth_host::handover::{Disowned, MemberData};
use tokio::time::Instant;

use crate::connection::{SPLIT_AFTER, Worker, over_each, run};
use crate::testing::Fake;
use crate::{CuratorConnection, LocalControlPlane};
use hearth_base::testing::{Alone, fixed, never, next, soon, until_ok};

struct Member {
    fake: Fake,
    worker: Alone,
    control_plane: Writer<LocalControlPlane>,
    directory: Writer<ClusterDirectory>,
    acknowledged: Writer<Instant>,
    disowned: Writer<Disowned>,
    _phase: Writer<EnrolmentPhase>,
    state_worker: Alone,
    state: ClusterState,
    connection: Value<CuratorConnection>,
}

/// The worker of a node whose cluster state has gone this way.
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
        worker: Alone::run(move |ctx| run(ctx, worker.clone())),
        control_plane: control_plane_writer,
        directory: directory_writer,
        acknowledged: acknowledged_writer,
        disowned: disowned_writer,
        _phase: phase,
        state_worker: Alone::run(move |ctx| cluster_state::run(ctx, state_worker.clone())),
        state,
        connection,
    }
}

impl Member {
    /// The control plane serves at this port, or not at all.
    fn serves_at(&self, curator_port: Option<u16>) {
        self.control_plane.set(LocalControlPlane {
            curator_port,
            ..LocalControlPlane::default()
        });
    }

    async fn becomes(&self, state: State) {
        let mut states = self.state.watch();
        let reached = states.wait_for(|now| *now == state);
        soon("the state", reached).await.unwrap();
    }
}

#[tokio::test]
async fn there_is_a_connection_once_there_is_a_curator() {
    let test = member(&[], None).await;
    let mut connection = test.connection.watch();
    test.worker.is_healthy().await;
    never("a connection to nobody", connection.next()).await;

    test.serves_at(Some(test.fake.curator.address.port()));
    let ours = next("a connection", &mut connection).await;
    assert_eq!(ours.node_id, test.fake.node_id);
    soon("an answer", ours.cluster_domain()).await.unwrap();

    // It stays what it is while nothing better is known, and while what is
    // known is the same.
    test.serves_at(None);
    test.serves_at(Some(test.fake.curator.address.port()));
    never("a connection for no reason", connection.next()).await;
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
    soon("an answer", connection.cluster_domain())
        .await
        .unwrap();
    assert_eq!(other.calls(), ["GetClusterInfo"]);

    test.serves_at(Some(test.fake.curator.address.port()));
    test.worker.is_healthy().await;
    soon("the end", other.stop()).await.unwrap();
    // A call may still meet the connection that is ending.
    until_ok("an answer of our own", || connection.cluster_domain()).await;
    assert!(test.fake.curator.calls().contains(&"GetClusterInfo"));
    never("a connection for no reason", connections.next()).await;
    test.worker.stop().await;
}

/// Curators that are nodes of their own.
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
    soon("an answer", connection.cluster_domain())
        .await
        .unwrap();

    // It has moved: where it was nobody is asked any more.
    test.directory.set(directory(&[&new]));
    until_ok("an answer from there", || async {
        connection.cluster_domain().await.map_err(drop)?;
        (!new.calls().is_empty()).then_some(()).ok_or(())
    })
    .await;
    // Nobody at all would be worse.
    test.directory.set(ClusterDirectory::default());
    test.worker.is_healthy().await;
    soon("an answer", connection.cluster_domain())
        .await
        .unwrap();
    test.worker.is_fine();
    test.worker.stop().await;
}

/// All addresses but one are dead, each in its own way.
#[tokio::test]
async fn a_stale_directory_with_one_curator_that_lives_is_enough() {
    let fake = Fake::new(Script::default()).await;
    let alive = fake.another(Script::default()).await;
    let gone = fake.another(Script::default()).await;
    let stranger = Fake::new(Script::default()).await;
    let mut stale = directory(&[&gone, &stranger.curator, &alive]);
    soon("the end", gone.stop()).await.unwrap();
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
    let mut events = soon("a watch", watching).await.unwrap().into_inner();
    soon("the backlog", events.message()).await.unwrap();

    test.directory.set(directory(&[&moved, &kept]));
    test.directory.set(directory(&[&kept, &moved]));
    test.serves_at(Some(test.fake.curator.address.port()));
    never("the end of the watch", events.message()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn who_is_disowned_has_no_connection() {
    let test = member(&[State::Home], None).await;
    test.serves_at(Some(test.fake.curator.address.port()));
    let mut connections = test.connection.watch();
    let connection = next("a connection", &mut connections).await;
    soon("an answer", connection.cluster_domain())
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
    // Who lives by the connection ends in peace.
    let over = over_each(&test.connection, |connection| async move {
        connection.cluster_domain().await.map(drop)
    });
    never("a failure", over).await;
    test.acknowledged.set(Instant::now());
    never(
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
    never("home by old news", home()).await;
    test.acknowledged.set(Instant::now());
    soon("home", home()).await.unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn what_was_known_outlives_a_worker_that_fails() {
    let test = member(&[State::Home], None).await;
    test.worker.is_healthy().await;
    test.becomes(State::Home).await;
    drop(test.acknowledged);
    test.worker.fails("the writer of this value is gone").await;
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
    never("a life after", states.next()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}
